"""Pages in fp8 with the scales that an engine keeps: what the ops give there is what they give on
float32 pages of the same keys and values, descaled, and summaries are of what is stored."""

import dataclasses

import pytest
import test_gather_pieces
import test_gather_rows
import torch
from cases import dtypes, random
from paged_cases import make
from test_page_codes_of_bounds import note
from test_paged_gather import chosen

from attnplug.errors import ArgumentError, CardError
from attnplug.ops.common import checks
from attnplug.ops.common.device import Card
from attnplug.ops.gather.gather_pieces import gather_pieces
from attnplug.ops.gather.page_bounds import empty_page_bounds

FP8 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.25, 1.7  # no key beyond 448: torch 2.11 makes NaN of these
BLOCK = 16
OPTIONS = {"scale": 0.3, "block": BLOCK, "top_k": 2, "sink": 1, "local": 2}


def stored_and_meant(device, lengths, **how):
    """Pages in fp8, the same as float32, descaled, and the scales."""
    pages = make(3, lengths, **how).to(device)
    scales = {"k_scale": torch.tensor(K_SCALE), "v_scale": torch.tensor([V_SCALE])}
    scales = {name: scale.to(device) for name, scale in scales.items()}
    numbers = torch.tensor([K_SCALE, V_SCALE], device=device).view(2, 1, 1, 1, 1)
    fp8 = (pages.kv / numbers).to(FP8)
    meant = dataclasses.replace(pages, kv=fp8.float() * numbers)
    return dataclasses.replace(pages, kv=fp8), meant, scales


def codes_of(device_path, pages, band, slots=None):
    k = pages.kv[0]
    bounds = empty_page_bounds(k, BLOCK, dtype=torch.int8)
    note(device_path, k, bounds, pages.slots() if slots is None else slots, band)
    return bounds


@pytest.mark.parametrize("band", [True, False])
@pytest.mark.parametrize("page", [16, 48])
def test_summaries_are_of_what_is_stored(device_path, page, band):
    """Every number of fp8 is one of float32: the codes are the same, bit for bit."""
    fp8, _, _ = stored_and_meant(device_path[0], [page * 3, 0, page * 2 + 9], page=page)
    wide = dataclasses.replace(fp8, kv=fp8.kv.float())
    found, want = (codes_of(device_path, pages, band) for pages in (fp8, wide))
    assert found.any() and torch.equal(found, want)


@pytest.mark.parametrize(
    "how, scoring, softcap, dtype",
    [
        ({"page": 16}, "band", 0.0, torch.float32),
        ({"page": 32, "layout": "tokens first", "width": 48}, "bounds", 2.5, torch.float32),
        ({"page": 32}, "band", 0.0, torch.float16),
        ({"page": 16}, "band", 0.0, torch.bfloat16),
    ],
)
def test_a_step_is_that_over_the_descaled_pages(device_path, how, scoring, softcap, dtype):
    """Far rows and near ones, in halves and in one chain; a step completes a block."""
    if dtype not in dtypes(device_path):
        pytest.skip("the interpreter cannot multiply bfloat16")
    fp8, meant, scales = stored_and_meant(device_path[0], [160, 75, 0, 133], **how)
    width = fp8.kv.shape[4]
    q = random(0, 4, 4, 1, width).to(device_path[0])
    slots = test_gather_pieces.newest(fp8).to(device_path[0])
    known = fp8.slots()[~torch.isin(fp8.slots(), slots)]
    codes = codes_of(device_path, fp8, scoring == "band", known)
    complete = codes_of(device_path, fp8, scoring == "band")
    assert not torch.equal(codes, complete)
    far = torch.tensor([1, 0, 0, 1], device=device_path[0])
    lengths, near = fp8.lengths * far, fp8.lengths * (1 - far)
    options = OPTIONS | {"softcap": softcap, "scoring": scoring, "slots": slots}
    for chain in (False, True):
        found = []
        asked = q.to(dtype)  # the queries of both are what 16 bits can hold
        for pages, query, more in ((fp8, asked, scales), (meant, asked.float(), {})):
            bounds, out = codes.clone(), torch.full_like(query, torch.nan)
            if chain:
                rows = lengths, near, out
                test_gather_rows.run(device_path, query, pages, bounds, *rows, **options, **more)
            else:
                rows = lengths, out
                test_gather_pieces.run(device_path, query, pages, bounds, *rows, **options, **more)
            found.append(out)
            assert pages is meant or torch.equal(bounds, complete)
        served = torch.ones(4, dtype=torch.bool) if chain else far.bool().cpu()
        for out in found:
            assert bool(out.isfinite().flatten(1).all(1).cpu()[served].all())
        got, want = (x.cpu().double()[served] for x in found)
        epsilon = torch.finfo(dtype).eps
        assert (got - want).abs().max() <= (4 * epsilon + 1e-5) * (1 + want.abs().max())
        assert (got - want * V_SCALE).abs().max() > 0.1  # scales count


def test_blocks_are_chosen_as_over_the_descaled_keys(device_path):
    """One scale for all keys changes no order."""
    fp8, meant, _ = stored_and_meant(device_path[0], [160, 133], page=16)
    fp8, q = dataclasses.replace(fp8, kv=fp8.kv.float()), random(0, 2, 4, 1, 64)
    choice = {"block": BLOCK, "top_k": 2, "sink": 1, "local": 2, "scoring": "band"}
    first, second = (
        chosen(device_path, q.to(device_path[0]), x, codes_of(device_path, x, True), **choice)
        for x in (fp8, meant)
    )
    assert torch.equal(first, second)


def call(**changes):
    fp8, _, scales = stored_and_meant("cpu", [130, 77], page=32)
    k, v = fp8.kv
    inputs = {"q": random(0, 2, 4, 1, 64), "k": k, "v": v, **scales, **OPTIONS}
    inputs["bounds"] = empty_page_bounds(k, BLOCK, dtype=torch.int8)
    inputs |= {"table": fp8.table, "lengths": fp8.lengths}
    return gather_pieces(**inputs | changes)


def test_arguments_that_do_not_fit():
    call()
    _, meant, _ = stored_and_meant("cpu", [130, 77], page=32)
    whole = {"k": meant.kv[0], "v": meant.kv[1]}
    for change, message in (
        ({"v": meant.kv[1]}, "v is torch.float32 but k is torch.float8_e4m3fn"),
        ({"k": meant.kv[0]}, "v is torch.float8_e4m3fn"),
        ({"q": torch.zeros(2, 4, 1, 64).to(FP8)}, "q is torch.float8_e4m3fn"),
        ({"bounds": torch.zeros(1, 2, 18, 2, 64)}, "pages of torch.float8_e4m3fn need int8"),
        ({"k_scale": torch.ones(2)}, r"k_scale is torch.float32 \(2,\), needs one float32"),
        ({"v_scale": torch.ones(1).double()}, "v_scale is torch.float64"),
        (whole, "k_scale is for torch.float8_e4m3fn"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(**change)
    call(k_scale=None, v_scale=None)


def test_a_card_without_fp8_is_named(monkeypatch):
    monkeypatch.setattr(checks, "card", lambda _: Card.made("nvidia", (8, 6), 82, 101376))
    k = torch.empty(1, dtype=FP8, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    with pytest.raises(CardError, match="this GPU does not convert"):
        checks.check_scales("op", k, None, None)
    monkeypatch.setattr(checks, "card", lambda _: Card.made("nvidia", (8, 9), 82, 101376))
    checks.check_scales("op", k, None, None)
