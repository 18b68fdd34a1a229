"""INT8 summaries of pages: a scale for each block, and no frame of a row's."""

import pytest
import torch
from cases import random
from paged_cases import make
from test_paged_gather import chosen

from attnplug.ops import page_bounds
from attnplug.ops.gather import page_bounds as op
from attnplug.ops.gather.block_bounds import frame_of
from attnplug.ops.gather.page_bounds import empty_page_bounds, page_summaries, rows_of_summaries

BLOCK = 16


def note(device_path, k, bounds, slots, band):
    if device_path[1] == "reference" or device_path[0] == "cuda":
        page_bounds(k, bounds, slots, block=BLOCK, band=band)
    else:
        args = k, bounds, slots, BLOCK, band
        op._allocate(*args)
        op.launch_page_bounds(*args)


def summaries(device_path, pages, band):
    """The pages on the device, and their codes with garbage where no kernel has written."""
    on = pages.to(device_path[0])
    bounds = empty_page_bounds(on.kv[0], BLOCK, dtype=torch.int8).fill_(-77)
    note(device_path, on.kv[0], bounds, on.slots(), band)
    return on, bounds


def decoded(bounds, pages, blocks):
    """What the codes of each row's first blocks stand for, fp64, and one code's worth."""
    own = rows_of_summaries(bounds.cpu(), pages.table, blocks, pages.kv[0], BLOCK)
    frame = frame_of(own, blocks)
    assert (frame.centre == 0).all() and (frame.unit == 1).all()
    worth = frame.scale.double()[..., None, None]
    return own[:, :, :blocks].double() * worth, worth


def edges(pages, band):
    """Exact max and min, or a band's edges, of every complete block, fp64 `[B,Hkv,N,2,D]`."""
    k = pages.rows[0].double()
    k = k[:, :, : k.shape[2] // BLOCK * BLOCK].unflatten(2, (-1, BLOCK))
    if not band:
        return torch.stack([k.amax(3), k.amin(3)], 3)
    mean, half = k.mean(3), 0.8 * k.var(3, correction=0).sqrt()
    return torch.stack([mean + half, mean - half], 3)


@pytest.mark.parametrize("band", [True, False])
@pytest.mark.parametrize("page", [16, 32, 48])
def test_codes_stand_for_the_edges(device_path, page, band):
    pages = make(3, [page * 3, 0, page * 2 + 9], page=page)
    _, bounds = summaries(device_path, pages, band)
    want = edges(pages, band)
    found, worth = decoded(bounds, pages, want.shape[2])
    for b, length in enumerate(pages.lengths.tolist()):
        n = length // BLOCK
        error = (found - want)[b, :, :n] / worth[b, :, :n]
        if band:
            assert (error.abs() <= 0.501).all()
        else:
            assert (error[:, :, 0] >= 0).all() and (error[:, :, 1] <= 0).all()
            assert (error.abs() <= 1.01).all()
        top = want[b, :, :n].abs().amax((2, 3), keepdim=True)
        assert torch.allclose(worth[b, :, :n] * 126, top, rtol=1e-5)


def test_the_kernel_makes_the_references_codes(device_path):
    pages = make(7, [90, 64, 200], page=32)
    _, bounds = summaries(device_path, pages, True)
    _, want = summaries(("cpu", "reference"), pages, True)
    found, worth = decoded(bounds, pages, 4)
    right, _ = decoded(want, pages, 4)
    for b, length in enumerate(pages.lengths.tolist()):  # a sum rounds as it was ordered
        n = min(length // BLOCK, 4)
        assert ((found - right)[b, :, :n].abs() <= 1.01 * worth[b, :, :n]).all()


@pytest.mark.parametrize("scoring", ["band", "bounds"])
@pytest.mark.parametrize(("group", "top_k"), [(1, 3), (7, 8), (16, 40)])
def test_the_list_is_that_of_what_the_codes_stand_for(device_path, group, top_k, scoring):
    pages = make(11, [900, 15, 640], page=32)
    on, bounds = summaries(device_path, pages, scoring == "band")
    q = random(5, 3, 2 * group, 1, 64)
    options = {"block": BLOCK, "top_k": top_k, "sink": 1, "local": 2, "scoring": scoring}
    index = chosen(device_path, q.to(device_path[0]), on, bounds, **options)
    blocks = 900 // BLOCK
    said, _ = decoded(bounds, pages, blocks)
    heads = q[:, :, 0].double().unflatten(1, (2, group))
    above, below = heads.clamp(min=0), heads.clamp(max=0)
    score = above @ said[:, :, :, 0].transpose(2, 3) + below @ said[:, :, :, 1].transpose(2, 3)
    score = score.amax(2)
    for b, length in enumerate(pages.lengths.tolist()):
        last = max((length - 1) // BLOCK - 2 + 1, 1)
        for h in range(2):
            own = score[b, h, 1:last]
            want = (own.topk(min(top_k, len(own))).indices + 1).tolist()
            got = [j for j in index[b, h, 0].tolist() if j >= 0]
            # Digits of the queries round: of two scores as close either block is right.
            gap = own.sort(descending=True).values
            apart = set(got) ^ set(want)
            if apart:
                edge = gap[top_k - 1]
                assert all(abs(float(score[b, h, j] - edge)) < 2e-3 for j in apart)
            assert len(got) == len(want)


def test_a_copied_page_takes_its_codes_along(device_path):
    pages = make(0, [64, 64], page=32)
    on, bounds = summaries(device_path, pages, True)
    old, new = pages.table[0].tolist(), pages.table[1].tolist()
    for part in page_summaries(bounds, on.kv[0], BLOCK):
        assert len(part) == on.kv.shape[1]
        part[new] = part[old]
    found, _ = decoded(bounds, pages, 4)
    assert torch.equal(found[0], found[1])


def test_a_key_that_is_not_finite_comes_first(device_path):
    pages = make(1, [320], page=32)
    pages.kv[0, pages.table[0, 3], 1, 4, 7] = torch.nan
    on, bounds = summaries(device_path, pages, True)
    options = {"block": BLOCK, "top_k": 2, "sink": 1, "local": 2, "scoring": "band"}
    q = random(0, 1, 4, 1, 64).to(device_path[0])
    index = chosen(device_path, q, on, bounds, **options)
    assert 6 in index[0, 1, 0]
