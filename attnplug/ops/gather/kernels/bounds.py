"""The Triton kernels of block_bounds, and what ops that make summaries on the way take of them."""

import triton
import triton.language as tl

from attnplug.ops.common.rows import blocks_done, note_progress, row_span

# Codes are rounded outwards by SLACK at least, which is more than float32 takes from a quotient of
# up to MOST; one of the 127 codes is left to that. A block of one point has the scale LEAST.
SLACK, MOST, LEAST = tl.constexpr(2e-4), tl.constexpr(126.0), tl.constexpr(1e-30)
SPREAD = tl.constexpr(8.0)  # units lie within this factor of their mean over the channels


@triton.jit
def summaries_at(bounds, row, N, D: tl.constexpr, PARTS: tl.constexpr, INT8: tl.constexpr):
    """Where the summaries of one row's head begin, and the frame of the codes of its N blocks."""
    if INT8:
        at = bounds + row * (N + 4 + tl.cdiv(2 * N, D)) * (PARTS * D)
        return at, (at + N * (PARTS * D)).to(tl.pointer_type(tl.float32))
    else:
        at = bounds + row * N * (PARTS * D)
        return at, at


@triton.jit
def frame_at(behind, d, D: tl.constexpr):
    """(centre, unit) of the channels d, 0 and 0 where there are none."""
    centre = tl.load(behind + d, mask=d < D, other=0.0, cache_modifier=".cg")
    return centre, tl.load(behind + D + d, mask=d < D, other=0.0, cache_modifier=".cg")


@triton.jit
def _set_frame(behind, high, deep, d, D: tl.constexpr):
    """The frame of a row's head, from max and min of its first block. Who writes it writes the
    same."""
    half = (high - deep) * 0.5
    mean = tl.sum(tl.where(d < D, half, 0.0), 0) / D
    plain = (mean > 1e-20) & (mean < float("inf"))
    unit = tl.minimum(tl.maximum(half, mean / SPREAD), mean * SPREAD)
    tl.store(behind + d, tl.where(plain, high * 0.5 + deep * 0.5, 0.0), mask=d < D)
    tl.store(behind + D + d, tl.where(plain, unit, 1.0), mask=d < D)


@triton.jit
def _store_codes(out, behind, j, high, deep, d, D: tl.constexpr):
    """Max and min as codes, rounded outwards."""
    centre, unit = frame_at(behind, d, D)
    inverse = 1.0 / tl.where(d < D, unit, 1.0)
    high, deep = (high - centre) * inverse, (deep - centre) * inverse
    size = tl.maximum(tl.abs(high), tl.abs(deep))
    odd = tl.sum(((tl.abs(high) < float("inf")) & (tl.abs(deep) < float("inf"))).to(tl.int32), 0)
    odd = odd < high.shape[0]
    scale = tl.maximum(tl.max(size, 0) * (1.0 / MOST), LEAST)
    inverse = 1.0 / scale
    above = tl.where(odd, 0.0, tl.ceil(high * inverse + SLACK))
    below = tl.where(odd, 0.0, tl.floor(deep * inverse - SLACK))
    tl.store(out, above.to(tl.int8), mask=d < D)
    tl.store(out + D, below.to(tl.int8), mask=d < D)
    tl.store(behind + 2 * D + j, tl.where(odd, float("nan"), scale))


@triton.jit
def refresh_blocks(
    k_at, mask_at, bounds_at, behind, begin, end, step, done, low, k_s,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    INT8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Summarise blocks begin, begin + step, ... before end of one row's head, of which `done` are.

    Elementwise over STEP keys at a time and across them at the end: the kernels that do this once
    in a block's life must not be made large by it. The first codes need the first block's frame,
    which is a turn of its own.
    """
    STEP: tl.constexpr = 8
    d = tl.arange(0, DP)
    n = tl.arange(0, STEP)
    in_width = d < D
    if INT8:
        begin = tl.where((done == 0) & (begin < end), begin - step, begin)
        first = begin
    for turn in range(begin, end, step):
        j = turn
        if INT8:
            j = tl.where((done == 0) & (turn == first), 0, turn)  # pyright: ignore[reportPossiblyUnboundVariable]
        high = tl.full([STEP, DP], float("-inf"), tl.float32)
        deep = tl.full([STEP, DP], float("inf"), tl.float32)
        count = tl.zeros([STEP], tl.int32)
        if PARTS == 1:
            high = tl.zeros([STEP, DP], tl.float32)
        for i in range(0, BLOCK, STEP):
            at = low + j * BLOCK + i + n
            key = tl.load(
                k_at + at.to(tl.int64)[:, None] * k_s + d[None, :],
                mask=in_width[None, :],
                other=0.0,
            ).to(tl.float32)
            seen = at >= 0
            if MASKED:
                seen = tl.load(mask_at + at) != 0
            count += seen.to(tl.int32)
            if PARTS == 1:
                high += tl.where(seen[:, None], key, 0.0)
            else:  # a NaN comes in and stays
                shown = seen[:, None]
                above, below = (
                    tl.where(shown, key, float("-inf")),
                    tl.where(shown, key, float("inf")),
                )
                high = tl.maximum(high, above, propagate_nan=tl.PropagateNan.ALL)
                deep = tl.minimum(deep, below, propagate_nan=tl.PropagateNan.ALL)
        out = bounds_at + j * (PARTS * D) + d
        seen_keys = tl.sum(count, 0)
        if PARTS == 1:
            tl.store(out, tl.sum(high, 0) / tl.maximum(seen_keys, 1), mask=in_width)
        else:  # the maximum across drops a NaN
            odd = tl.sum((high != high).to(tl.int32), 0) > 0
            top = tl.where(seen_keys > 0, tl.max(high, 0), 0.0)
            bottom = tl.where(seen_keys > 0, tl.min(deep, 0), 0.0)
            if INT8:
                top = tl.where(in_width, tl.where(odd, float("nan"), top), 0.0)
                bottom = tl.where(in_width, bottom, 0.0)
                if (done == 0) & (turn == first):  # pyright: ignore[reportPossiblyUnboundVariable]
                    _set_frame(behind, top, bottom, d, D)
                    tl.debug_barrier()  # other warps read it
                else:
                    _store_codes(out, behind, j, top, bottom, d, D)
            else:
                tl.store(out, tl.where(odd, float("nan"), top), mask=in_width)
                tl.store(out + D, tl.where(odd, float("nan"), bottom), mask=in_width)


@triton.jit
def refresh(
    k, bounds, progress, lengths, start, key_mask, S, N, programs, k_b, k_h, k_s, mask_b,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    INT8: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """One program's share of the missing blocks of one row's head."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    until = tl.maximum(length - low, 0) // BLOCK
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    bounds_at, behind = summaries_at(bounds, b * tl.num_programs(1) + h, N, D, PARTS, INT8)
    done = blocks_done(progress, b, low)
    refresh_blocks(
        k + b * k_b + h.to(tl.int64) * k_h, mask_at, bounds_at, behind, done + tl.program_id(0),
        until, programs, done, low, k_s, D, DP, BLOCK, PARTS, INT8, key_mask is not None,
    )  # fmt: skip


@triton.jit
def note(
    progress, lengths, start, S, BLOCK: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    note_progress(progress, b, low, tl.maximum(length - low, 0) // BLOCK)
