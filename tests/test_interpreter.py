"""What `interpreter.py` leaves out of a launch is what the launch has done already."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import languages
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"
)


@triton.jit
def doubled(x):
    return x + tl.where(x > 0, x, x)


@triton.jit
def double_twice(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, doubled(doubled(tl.load(x + at))))


def launch(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double_twice.run(grid=(3,), warmup=False, x=x, out=out, N=8)
    return out


def test_device_functions_compute_with_what_their_launch_has_replaced():
    own = tl.arange, tl.tensor.__add__, tl.where
    x = torch.arange(8.0)
    for _ in range(2):  # the first launch has put everything back
        assert torch.equal(launch(x), 4 * x)
        assert (tl.arange, tl.tensor.__add__, tl.where) == own


def test_a_launch_looks_through_the_language_once(monkeypatch):
    looked = []
    look = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda pkg, *more: looked.append(pkg) or look(pkg, *more)
    )
    launch(torch.arange(8.0))
    assert looked.count(tl) == 1
    launch(torch.arange(8.0))
    assert looked.count(tl) == 2


def test_the_language_is_found_by_any_name():
    assert languages(doubled.fn) == {tl}
