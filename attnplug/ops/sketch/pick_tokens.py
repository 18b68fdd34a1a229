"""The tokens that a step of `sketch` reads exactly: the k with the largest shares.

The k-th share's bin is the highest that k tokens reach. Picks are all tokens above it, and those
in it in the order of the cache while the list has room: k to k + k / 8 tokens, and the k best
among them unless more than k / 8 tokens share the bin, which then takes in some for others at
most a bin's width (2^(1/16) near the middle) better. No sort, and no pass over the shares but one.
"""

import numba
import numpy as np
import torch
import triton

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_sequence_inputs
from attnplug.ops.common.define import define_op, require
from attnplug.ops.common.device import early, machine
from attnplug.ops.common.rows import row_step, rows_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.sketch.encode_keys import near_block
from attnplug.ops.sketch.estimates import BINS, FINE, LOWER, MARGIN, STEPS, bin_of
from attnplug.ops.sketch.kernels import pick as kernels
from attnplug.ops.sketch.state import BLOCK

NAME = "sketch_pick"
ROUND = 64  # tokens: lists are a multiple of it


def capacity_for(k: int) -> int:
    """Places of a list of k picks or a few more."""
    return -(-(k + k // 8) // ROUND) * ROUND


def pick_tokens(
    shares: torch.Tensor,
    total: torch.Tensor,
    middle: torch.Tensor,
    *,
    top_k: int,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the tokens with the largest shares.

    Args:
        shares, total, middle: of `scan_sketch`.
        top_k: tokens to pick, as in the scan.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.

    Returns:
        picks int32 `[B, Hkv, capacity_for(top_k)]`: slots of the cache, ascending, -1
            behind them. All candidates where there are no more than top_k.
        cut float32 `[B, Hkv, 3]`: the share from which on a pick is of the upper half (inf: none
            is), how many visible candidates are not picked, and the `hint` for the next step's
            scan: the bin from which it counts, the highest that 4 top_k tokens reach; 0: all.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
    """
    return _pick_tokens(shares, total, middle, top_k, lengths, start)


def _allocate(shares, total, middle, top_k, lengths, start):
    if shares.dim() != 3 or shares.dtype != torch.float16:
        raise ArgumentError(
            f"{NAME}: shares is {shares.dtype} {tuple(shares.shape)}, needs float16 [B,Hkv,S]"
        )
    rows = tuple(shares.shape[:2])
    for label, tensor, shape, dtype in (
        ("total", total, (*rows, BINS), torch.int32),
        ("middle", middle, rows, torch.float32),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ArgumentError(
                f"{NAME}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs {dtype} "
                f"{list(shape)}"
            )
        require(tensor.device == shares.device, NAME, f"{label} is on {tensor.device}")
        require(tensor.is_contiguous(), NAME, f"{label} is not contiguous")
    require(shares.is_contiguous(), NAME, "shares is not contiguous")
    require(top_k >= 1, NAME, f"top_k is {top_k}, needs at least 1")
    like = shares[..., None]
    check_sequence_inputs(NAME, like, like, lengths, start, None)
    return (
        shares.new_empty((*rows, capacity_for(top_k)), dtype=torch.int32),
        shares.new_empty((*rows, 3), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def edge_of(index, middle):
    """The lower edge of a bin."""
    y = index - 128.0
    if abs(y) > FINE:
        y = (1.0 if y > 0 else -1.0) * (FINE + (abs(y) - FINE) * 8)
    return middle + y / STEPS


@numba.njit(cache=True)
def _reaching(total, wanted):
    """The highest bin that `wanted` tokens reach, and how many are above it."""
    above = 0
    for index in range(BINS - 1, 0, -1):
        if above + total[index] >= wanted:
            return index, above
        above += total[index]
    return 0, above


@numba.njit(cache=True)
def _next_hint(total, wanted):
    """The bin from which a next scan counts: the highest that so many tokens reach. Where too few
    were counted to know it, LOWER below the lowest bin that has one."""
    if total[0] <= wanted:
        return 0
    index, above = _reaching(total, wanted)
    if index > 0:
        return index
    lowest, _ = _reaching(total, above)
    return max(lowest - LOWER, 0)


@numba.njit(parallel=True, cache=True)
def _reference(shares, total, middle, top_k, lengths, start, picks, cut):
    """The list of every row and KV head, in parallel."""
    batch, heads, _ = shares.shape
    for item in numba.prange(batch * heads):
        b, h = item // heads, item % heads
        capacity = picks.shape[2]
        visible = total[b, h, 0]
        wanted = min(top_k, visible)
        threshold, above = _reaching(total[b, h], wanted)
        upper, _ = _reaching(total[b, h], wanted // 2)
        cut[b, h, 0] = edge_of(upper, middle[b, h]) if upper > threshold else np.inf
        count, equal = 0, 0
        first = start[b] + BLOCK
        for n in range(first, start[b] + near_block(lengths[b], start[b]) * BLOCK):
            if not shares[b, h, n] > -np.inf:
                continue
            index = bin_of(shares[b, h, n], middle[b, h])
            if index < threshold or (index == threshold and equal >= capacity - above):
                continue
            equal += index == threshold
            picks[b, h, count] = n
            count += 1
        cut[b, h, 1] = visible - count
        cut[b, h, 2] = _next_hint(total[b, h], MARGIN * top_k)
        picks[b, h, count:] = -1


def _cpu(shares, total, middle, top_k, lengths, start, picks, cut):
    lengths, start = rows_on_cpu(shares[..., None], lengths, start)
    _reference(
        shares.float().numpy(),
        total.numpy(),
        middle.numpy(),
        top_k,
        lengths.numpy(),
        start.numpy(),
        picks.numpy(),
        cut.numpy(),
    )


# --- CUDA ------------------------------------------------------------------------------------


def tile_for(rows: int, size: int, multiprocessors: int) -> int:
    """Slots for one program, of `rows` rows and KV heads with `size` slots each."""
    tile = 1024
    while tile < 4096 and rows * cdiv(size, tile) > 2 * multiprocessors:
        tile *= 2
    return tile


def new_marks(shares: torch.Tensor, programs: int | None = None) -> torch.Tensor:
    """What the programs of one row tell each other, int64 `[B, Hkv, programs + SHARED]`; as many
    programs as `pick` has by itself unless told. To be cleared before each launch: in a chain
    `prepare` does."""
    batch, heads, size = shares.shape
    if programs is None:
        programs = cdiv(size, tile_for(batch * heads, size, machine(shares.device)[0]))
    return shares.new_empty((batch, heads, programs + kernels.SHARED.value), dtype=torch.int64)


def launch_pick_tokens(
    shares,
    total,
    middle,
    top_k,
    lengths,
    start,
    picks,
    cut,
    marks=None,
    hint=None,
    is_new=False,
    tile=None,
    warps=None,
    registers=64,
):
    """Run the kernel; tensors as in `pick_tokens`, on a GPU or in Triton's interpreter. `marks` are
    of `new_marks`, cleared; `hint` is the one that the scan had. With `is_new`, `lengths` lack a
    token."""
    batch, heads, size = shares.shape
    capacity = picks.shape[2]
    tile = tile or tile_for(batch * heads, size, machine(shares.device)[0])
    marks = new_marks(shares, cdiv(size, tile)).zero_() if marks is None else marks
    pieces = marks.shape[2] - kernels.SHARED.value
    pdl, dependent = early(shares.device)
    kernels.pick.run(
        grid=(pieces, heads, batch),
        warmup=False,
        shares=shares,
        total=total,
        middle=middle,
        hint=hint,
        lengths=lengths,
        start=start,
        marks=marks,
        picks=picks,
        cut=cut,
        k=top_k,
        S=size,
        pieces=pieces,
        capacity=capacity,
        TILE=tile,
        PIECES=triton.next_power_of_2(pieces),
        CAPACITY_P=triton.next_power_of_2(capacity),
        ASM=shares.is_cuda,
        NEW=int(is_new),
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        PDL=pdl,
        num_warps=warps or max(4, tile // 512),
        **dependent,
        maxnreg=registers,  # four programs of 8 warps run at a time; few bytes are spilled
    )


_pick_tokens = define_op(
    f"{NAME}(Tensor shares, Tensor total, Tensor middle, int top_k, "
    "Tensor? lengths, Tensor? start) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_pick_tokens,
)
