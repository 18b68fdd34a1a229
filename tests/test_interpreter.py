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


def test_types_of_blocks_are_made_once():
    four = tl.block_type(tl.int32, [4])
    assert tl.block_type(tl.int32, (tl.constexpr(4),)) is four
    assert four.numel == 4 and [*four.shape] == [4] and four.scalar is tl.int32
    pointers = [tl.pointer_type(tl.int32, *more) for more in ((), (3,), (3, True))]
    others = [tl.block_type(element, [4]) for element in (tl.float32, *pointers)]
    assert all(a != b for a in others for b in (four, *others) if a is not b)
    assert len({id(x) for x in (four, *others)}) == 5
    for shape, error in (([3], ValueError), ([], TypeError), ([4.0], TypeError)):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


@triton.jit
def meet(x, y, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    products = tl.load(x + rows) * tl.load(y + columns) + tl.load(x + columns)
    tl.store(out + rows * N + columns, products.to(tl.float32) + products.shape[0])


def test_shapes_that_differ_are_broadcast():
    x, y = torch.arange(4.0), torch.arange(4, dtype=torch.int32) + 1
    out = torch.empty(4, 4)
    meet.run(grid=(1,), warmup=False, x=x, y=y, out=out, N=4)
    assert torch.equal(out, x[:, None] * y[None] + x[None] + 4)


@triton.jit
def multiply(x, y, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(x + rows * N + columns), tl.load(y + rows * N + columns))
    tl.store(out + rows * N + columns, product)


def test_the_bits_of_a_row_are_the_same_anywhere_in_a_tile():
    """BLAS takes the last rows of a tile by other kernels on some CPUs, with other roundings."""
    x, y = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    found, moved = torch.empty(64, 64), torch.empty(64, 64)
    multiply.run(grid=(1,), warmup=False, x=x, y=y, out=found, N=64)
    multiply.run(grid=(1,), warmup=False, x=x[order].contiguous(), y=y, out=moved, N=64)
    assert torch.equal(moved, found[order])
    assert torch.allclose(found, (x.double() @ y.double()).float(), rtol=1e-6, atol=1e-6)


@triton.jit
def add_up(x, out, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(values, 0))
    tl.store(out + 1 + tl.arange(0, 1), tl.sum(tl.reshape(values, [1, N]), 1))


@pytest.mark.parametrize("values", [[2**31 - 1] * 7, [-(2**31)] * 3, [2**30, 2**30], [5, -7]])
def test_sums_of_integers_wrap(values):
    x = torch.tensor(values + [0] * (8 - len(values)), dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    add_up.run(grid=(1,), warmup=False, x=x, out=out, N=8)
    wrapped = (sum(values) + 2**31) % 2**32 - 2**31
    assert out.tolist() == [wrapped, wrapped]


def test_no_check_is_left_out_that_would_raise():
    """The check of overflow ends in a device assert, which says nothing without `debug`."""
    assert not interpreter.interpreter_builder.options.debug
    assert interpreter.interpreter_semantic.device_assert(None, "never read", None) is None
