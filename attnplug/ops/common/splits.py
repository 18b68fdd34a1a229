"""Attention of few queries whose keys are cut in pieces ("splits"), one program each. Each program
stores its piece, and a second kernel merges the pieces by their log-sum-exps.

    lse = log sum over pieces of exp(lse_i),   out = sum over pieces of exp(lse_i - lse) out_i

Source: Dao et al., Flash-Decoding for long-context inference (2023).
"""

from typing import Any

import torch

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.device import early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import LN2, LOG2E
from attnplug.ops.common.triton import gdc_wait, tl, triton
from attnplug.ops.common.views import Output

_LN2, _LOG2E = Constant(LN2), Constant(LOG2E)


@triton.jit
def store_piece(
    top,
    total,
    acc,
    output,
    head,
    row,
    rows,
    d,
    in_group,
    in_width,
    split,
    splits,
    D: tl.constexpr,
):
    """Store what piece `split` of `splits` gives for the query-head pairs `row`, of `rows` in all.

    `top`, `total` and `acc` are the state of the online softmax. Stored to `output.pieces`, for
    `merge_splits`; or without them (there is one piece) as `out` and natural log-sum-exp, unless
    `lse` is None.
    The pieces are `[rows, splits, D]` outputs, then `[rows, splits]` log-sum-exps in base 2.
    """
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    base = tl.where(top == float("-inf"), 0.0, top)
    result = tl.where(empty, float("-inf"), base + tl.log2(divisor))
    if output.pieces is None:
        if output.sinks is not None:
            logit = tl.load(output.sinks + head, mask=in_group, other=float("-inf")).to(tl.float32)
            divisor += tl.exp2(logit * _LOG2E - base)
        if output.lse is not None:
            tl.store(output.lse + row, result * _LN2, mask=in_group)
        out_at = output.out + row[:, None] * D + d[None, :]
    else:
        row = row * splits + split
        tl.store(output.pieces + rows * splits * D + row, result, mask=in_group)
        out_at = output.pieces + row[:, None] * D + d[None, :]
    tl.store(
        out_at,
        (acc / divisor[:, None]).to(out_at.dtype.element_ty),
        mask=in_group[:, None] & in_width[None, :],
    )


def pieces_of(out: torch.Tensor, splits: int) -> torch.Tensor:
    """Temporary memory for `splits` pieces of each row of `out [B, Hq, T, D]`."""
    batch, heads, queries, width = out.shape
    elements = batch * heads * queries * splits * (width + 1)
    return torch.empty(elements, dtype=torch.float32, device=out.device)


def launch_merge(
    output: Output, splits: int, columns: int, chained: bool = True, **more: Any
) -> None:
    """Merge the `splits` pieces of each row into `output.out`, a program for so many columns of the
    head dimension. Unless it is `chained` to the kernel in front, it starts when that has ended.
    `more` are arguments of `merge_splits`."""
    batch, heads, queries, width = output.out.shape
    pdl, dependent = early(output.out.device) if chained else (False, {})
    launch_kernel(
        merge_splits,
        grid=(batch * heads * queries, cdiv(width, columns)),
        output=output,
        heads=heads,
        T=queries,
        splits=splits,
        D=width,
        COLUMNS=columns,
        SPLITS=next_power_of_two(splits),
        PDL=pdl,
        **{"num_warps": 4, **dependent, **more},
    )


@triton.jit
def merge_splits(
    output,
    heads,
    T,
    splits,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    lengths=None,
    counters: tl.constexpr = 0,  # pyright: ignore[reportArgumentType]
    row_lengths=None,
    ROW_STEP: tl.constexpr = 0,  # pyright: ignore[reportArgumentType]
    kept_splits=None,
    whole_splits=None,
):
    """Merge the pieces of one query-head pair, in one slice of COLUMNS of the head dimension.

    With `lengths` `[counters]` it also counts the decode step's token in them: all kernels that
    read them have ended. With `row_lengths` `[B]`, ROW_STEP apart, rows of length 0 keep what is in
    `output.out`, and their pieces need not be there. With `whole_splits` these are merged as well:
    they have that many pieces, the others `kept_splits`. `output.lse` may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, SPLITS)
    in_splits = j < splits
    lse_at = output.pieces + tl.num_programs(0).to(tl.int64) * splits * D
    length = 1
    if row_lengths is not None:  # there before the first kernel of the step began
        length = tl.load(row_lengths + row // (heads * T) * ROW_STEP, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    if whole_splits is None:
        if length <= 0:
            return
    else:
        in_splits = j < tl.where(length > 0, kept_splits, whole_splits)
    # .cg: an L1 line may be older than the pieces, which other multiprocessors wrote.
    piece_lse = tl.load(
        lse_at + row * splits + j, mask=in_splits, other=float("-inf"), cache_modifier=".cg"
    )
    piece = tl.load(
        output.pieces + (row * splits + j)[:, None] * D + d[None, :],
        mask=in_splits[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    empty = piece_lse == float("-inf")  # such a piece may never have been written
    piece = tl.where(empty[:, None], 0.0, piece)
    top = tl.max(piece_lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(piece_lse - shift)
    total = tl.sum(weight, 0)
    denominator = tl.where(total == 0, 1.0, total)
    result = tl.where(total == 0, float("-inf"), shift + tl.log2(denominator))
    if output.sinks is not None:
        sink = tl.load(output.sinks + row // T % heads).to(tl.float32)
        denominator += tl.exp2(sink * _LOG2E - shift)
    merged = tl.sum(piece * weight[:, None], 0) / denominator
    tl.store(output.out + row * D + d, merged.to(output.out.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        if output.lse is not None:
            tl.store(output.lse + row, result * _LN2)
        if lengths is not None:
            if row < counters:
                tl.atomic_add(lengths + row, 1, sem="relaxed")
