"""page_bounds against torch, on the numba reference and on the Triton kernel: exactly the pages
whose last slot was written get a summary, and it is that of their keys."""

import pytest
import torch
from cases import random, to_device
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops.gather import page_bounds as op


def summarise(device_path, k, bounds, slots):
    """The public op, or the Triton launcher where the op would not run it."""
    device, path = device_path
    there = to_device((k, bounds, slots), device)
    if path == "reference" or device == "cuda":
        op.page_bounds(*there)
    else:
        op._allocate(*there)
        op.launch_page_bounds(*there)
    bounds.copy_(there[1])


@given(data=st.data())
def test_matches_torch(device_path, data):
    draw = data.draw
    pages, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    page, width = draw(st.sampled_from([16, 32, 128])), draw(st.sampled_from([64, 80, 128]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    k = random(draw(st.integers(0, 999)), pages, heads, page, width, dtype=dtype)
    if draw(st.booleans()):  # vLLM's other order of memory
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    slot = st.integers(-1, pages * page + 3)
    ends = st.integers(0, pages - 1).map(lambda n: n * page + page - 1)
    slots = torch.tensor(draw(st.lists(st.one_of(slot, ends), max_size=12)), dtype=torch.int64)
    bounds = torch.full((pages, heads, 2, width), torch.nan, dtype=dtype)
    summarise(device_path, k, bounds, slots)
    done = {s // page for s in slots.tolist() if s >= 0 and s % page == page - 1}
    for n in range(pages):
        if n in done:
            want = torch.stack([k[n].amax(1), k[n].amin(1)], 1)
            assert torch.equal(bounds[n], want)
        else:
            assert bounds[n].isnan().all()


def test_a_nan_stays(device_path):
    k = random(1, 2, 1, 16, 64)
    k[1, 0, 3, 7] = torch.nan
    bounds = torch.zeros(2, 1, 2, 64)
    summarise(device_path, k, bounds, torch.tensor([15, 31]))
    found = bounds.isnan()
    assert found[1, 0, :, 7].all() and found.sum() == 2


def test_no_slot_is_no_work(device_path):
    bounds = torch.zeros(2, 1, 2, 64)
    summarise(device_path, random(1, 2, 1, 16, 64), bounds, torch.empty(0, dtype=torch.int64))
    assert not bounds.any()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=torch.zeros(2, 16, 64)), "k has 3 dimensions"),
        (dict(k=torch.zeros(2, 1, 16, 64, dtype=torch.int8)), "k is torch.int8"),
        (dict(k=torch.zeros(2, 1, 24, 64)), "pages of 24"),
        (dict(k=torch.zeros(2, 1, 16, 72)), "head dimension 72"),
        (dict(bounds=torch.zeros(2, 1, 1, 64)), r"needs torch.float32 \[pages,Hkv,2,D\]"),
        (dict(bounds=torch.zeros(2, 1, 2, 128)[..., ::2]), "bounds is not contiguous"),
        (dict(slots=torch.zeros(3, dtype=torch.int32)), "slots is torch.int32"),
    ],
)
def test_refuses(change, message):
    given = dict(k=torch.zeros(2, 1, 16, 64), bounds=torch.zeros(2, 1, 2, 64))
    given |= dict(slots=torch.zeros(3, dtype=torch.int64)) | change
    with pytest.raises(ArgumentError, match=message):
        op.page_bounds(**given)


def test_has_no_gradient():
    k = torch.zeros(2, 1, 16, 64, requires_grad=True)
    with pytest.raises(GradientError):
        op.page_bounds(k, torch.zeros(2, 1, 2, 64), torch.zeros(1, dtype=torch.int64))


def test_opcheck():
    args = random(1, 2, 1, 16, 64), torch.zeros(2, 1, 2, 64), torch.tensor([3, 15])
    torch.library.opcheck(torch.ops.attnplug.page_bounds.default, args)
