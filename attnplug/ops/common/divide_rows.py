"""The rows of one decode step divided between two methods, by all rows' lengths, in one launch.

    saved  = sum over rows i < steps of max(0, n_i - row)
    far(r) = r < steps  and  n_r >= max(1, row)  and  saved >= alone - row

A far row's length goes to one method and 0 to the other, so that each reads its own rows alone. The
rule is `attnplug.policies.crossover.RowCrossover`, which says why.
"""

import torch

from attnplug.ops.common.define import define_op, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.common.triton import tl, triton

NAME = "divide_rows"


def divide_rows(
    lengths: torch.Tensor,
    near: torch.Tensor,
    far: torch.Tensor,
    chosen: torch.Tensor,
    *,
    row: int,
    alone: int,
    steps: int | None = None,
) -> None:
    """Write the lengths of near and of far rows, 0 for the others, and which rows are far.

    Args:
        lengths: int32 or int64 `[R]`, contiguous; 0 is a row that pads the batch.
        near, far: like lengths, contiguous; written.
        chosen: bool `[R]`, contiguous; written.
        row, alone: tokens from which on a row is far beside others, and alone.
        steps: rows that may be far, the first ones. None: all.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
    """
    _divide_rows(lengths, near, far, chosen, row, alone, len(lengths) if steps is None else steps)


def _allocate(lengths, near, far, chosen, row, alone, steps):
    fits = lengths.dim() == 1 and lengths.dtype in (torch.int32, torch.int64)
    found = f"{lengths.dtype} {tuple(lengths.shape)}"
    require(fits, NAME, f"lengths is {found}, needs int32 or int64 [R]")
    for label, made, dtype in (
        ("near", near, lengths.dtype),
        ("far", far, lengths.dtype),
        ("chosen", chosen, torch.bool),
    ):
        fits = made.shape == lengths.shape and made.dtype == dtype and made.is_contiguous()
        found = f"{made.dtype} {tuple(made.shape)}"
        require(fits, NAME, f"{label} is {found}, needs {dtype} {tuple(lengths.shape)}, contiguous")
        require(made.device == lengths.device, NAME, f"{label} is on {made.device}")
    require(lengths.is_contiguous(), NAME, "lengths is not contiguous")


def _cpu(lengths, near, far, chosen, row, alone, steps):
    own = lengths[:steps]
    saved = (own - row).clamp(min=0).sum()
    chosen[steps:] = False
    chosen[:steps] = (own >= max(1, row)) & (saved >= alone - row)
    torch.mul(lengths, chosen, out=far)
    torch.sub(lengths, far, out=near)


# A server's batches have any number of rows: none of them may compile anew.
@triton.jit(do_not_specialize=["count", "steps", "row", "alone"])
def _divide(lengths, near, far, chosen, count, steps, row, alone, ROWS: tl.constexpr):
    n = tl.arange(0, ROWS)
    length = tl.load(lengths + n, mask=n < count, other=0)
    step = n < steps
    saved = tl.sum(tl.where(step, tl.maximum(length - row, 0), 0).to(tl.int64), 0)
    is_far = step & (length >= tl.maximum(row, 1)) & (saved >= alone - row)
    tl.store(near + n, tl.where(is_far, 0, length), mask=n < count)
    tl.store(far + n, tl.where(is_far, length, 0), mask=n < count)
    tl.store(chosen + n, is_far.to(tl.uint8), mask=n < count)


def launch_divide_rows(lengths, near, far, chosen, row, alone, steps):
    """Run the kernel: one program, since every row needs all rows."""
    count = len(lengths)
    if count == 0:
        return
    launch_kernel(
        _divide,
        grid=(1,),
        lengths=lengths,
        near=near,
        far=far,
        chosen=chosen.view(torch.uint8),
        count=count,
        steps=steps,
        row=row,
        alone=alone,
        ROWS=max(32, next_power_of_two(count)),
        **{"num_warps": 1},
    )


_divide_rows = define_op(
    "divide_rows(Tensor lengths, Tensor(a!) near, Tensor(b!) far, Tensor(c!) chosen, int row, "
    "int alone, int steps) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_divide_rows,
)
