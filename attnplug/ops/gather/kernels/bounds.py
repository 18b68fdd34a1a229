"""The Triton kernels of block_bounds, and the pieces of them that other kernels call: select_blocks
and gather_decode make missing summaries on the way.

A row's head has its summaries at `bounds_at`. INT8 codes have their frame (centre, unit, scales and
for bands widths, float32) behind them, at `frame`.
"""

from typing import NamedTuple

import torch

from attnplug.ops.common.rows import blocks_done, note_progress, row_span
from attnplug.ops.common.sizes import padded_width
from attnplug.ops.common.triton import tl, triton

# Codes are rounded outwards by at least SLACK, which is more than the rounding error of a float32
# quotient of up to MOST; the last of the 127 codes is left for that. A block whose keys are all
# equal has the scale LEAST.
SLACK, MOST, LEAST = tl.constexpr(2e-4), tl.constexpr(126.0), tl.constexpr(1e-30)
BAND_WIDTH = tl.constexpr(0.8)  # standard deviations on either side of the mean
SPREAD = tl.constexpr(8.0)  # units lie within this factor of their mean over the channels


class Form(NamedTuple):
    """What summaries a kernel is compiled for."""

    D: int
    DP: int  # D, padded
    BLOCK: int  # keys of a block
    PARTS: int  # of a summary: two, or one of the codes of a row's bands
    INT8: bool  # they are codes
    BAND: bool  # by mean and standard deviation, not max and min
    FRAMED: bool  # codes have a frame; those of pages leave its centre and unit unread

    @classmethod
    def of(cls, bounds: torch.Tensor, block: int, band: bool, framed: bool = True) -> "Form":
        parts, width = bounds.shape[3:]
        int8 = bounds.dtype == torch.int8
        return cls(width, padded_width(width), block, parts, int8, band, framed)


@triton.jit
def summaries_at(bounds, row, N, FORM: tl.constexpr):
    """(where the summaries of one row's head begin, where the frame of N blocks' codes does)."""
    D: tl.constexpr = FORM.D
    PARTS: tl.constexpr = FORM.PARTS
    INT8: tl.constexpr = FORM.INT8
    if INT8:
        NUMBERS: tl.constexpr = 2 if PARTS == 1 else 1  # of a block in the frame
        at = bounds + row * (N + tl.cdiv(4 * (2 * D + NUMBERS * N), PARTS * D)) * (PARTS * D)
        return at, (at + N * (PARTS * D)).to(tl.pointer_type(tl.float32))
    else:
        at = bounds + row * N * (PARTS * D)
        return at, at


@triton.jit
def frame_at(frame, d, D: tl.constexpr):
    """(centre, unit) of the channels d, 0 and 0 from D on."""
    centre = tl.load(frame + d, mask=d < D, other=0.0, cache_modifier=".cg")
    return centre, tl.load(frame + D + d, mask=d < D, other=0.0, cache_modifier=".cg")


@triton.jit
def _set_frame(frame, high, low, d, D: tl.constexpr):
    """The frame of a row's head, from max and min of its first block. Several programs may store
    it: they store the same values."""
    half = (high - low) * 0.5
    mean = tl.sum(tl.where(d < D, half, 0.0), 0) / D
    usable = (mean > 1e-20) & (mean < float("inf"))
    unit = tl.minimum(tl.maximum(half, mean / SPREAD), mean * SPREAD)
    tl.store(frame + d, tl.where(usable, high * 0.5 + low * 0.5, 0.0), mask=d < D)
    tl.store(frame + D + d, tl.where(usable, unit, 1.0), mask=d < D)


@triton.jit
def _store_codes(
    out, frame, j, high, low, d, D: tl.constexpr, FRAMED: tl.constexpr, NEAREST: tl.constexpr
):
    """Max and min of block j as codes, rounded outwards, or to the NEAREST, and their scale."""
    if FRAMED:
        centre, unit = frame_at(frame, d, D)
        inverse = 1.0 / tl.where(d < D, unit, 1.0)
        high, low = (high - centre) * inverse, (low - centre) * inverse
    size = tl.maximum(tl.abs(high), tl.abs(low))
    finite = tl.sum(((tl.abs(high) < float("inf")) & (tl.abs(low) < float("inf"))).to(tl.int32), 0)
    any_not_finite = finite < high.shape[0]
    scale = tl.maximum(tl.max(size, 0) * (1.0 / MOST), LEAST)
    inverse = 1.0 / scale
    if NEAREST:
        above, below = tl.floor(high * inverse + 0.5), tl.floor(low * inverse + 0.5)
    else:
        above, below = tl.ceil(high * inverse + SLACK), tl.floor(low * inverse - SLACK)
    above = tl.where(any_not_finite, 0.0, above)
    below = tl.where(any_not_finite, 0.0, below)
    tl.store(out, above.to(tl.int8), mask=d < D)
    tl.store(out + D, below.to(tl.int8), mask=d < D)
    tl.store(frame + 2 * D + j, tl.where(any_not_finite, float("nan"), scale))


@triton.jit
def _store_band(out, frame, j, N, high, low, d, D: tl.constexpr):
    """The middle of block j's band as codes, rounded to the nearest; their scale, and its width."""
    centre, unit = frame_at(frame, d, D)
    inverse = 1.0 / tl.where(d < D, unit, 1.0)
    middle = (high * 0.5 + low * 0.5 - centre) * inverse
    half = (high - low) * 0.5 * inverse
    fits = (tl.abs(middle) < float("inf")) & (half < float("inf"))
    finite = tl.sum(fits.to(tl.int32), 0) == high.shape[0]
    scale = tl.maximum(tl.max(tl.abs(middle), 0) * (1.0 / MOST), LEAST)
    code = tl.where(finite, tl.floor(middle * (1.0 / scale) + 0.5), 0.0)
    tl.store(out, code.to(tl.int8), mask=d < D)
    tl.store(frame + 2 * D + j, tl.where(finite, scale, float("nan")))
    tl.store(frame + 2 * D + N + j, tl.where(finite, tl.sum(half, 0) / D, float("nan")))


@triton.jit
def refresh_blocks(
    k_at,
    k_s,
    mask_at,
    bounds_at,
    frame,
    N,
    begin,
    end,
    stride,
    done,
    start,
    FORM: tl.constexpr,
):
    """Summarise blocks begin, begin + stride, ... before end of one row's head, which has room for
    N, whose blocks begin at key `start`, and of which `done` have summaries. `mask_at`: where the
    row's key mask begins, or None.

    KEYS keys at a time enter elementwise, and the reduction across them comes at the end: this runs
    once in a block's life and must not make the kernels that call it large. INT8 and FRAMED: the
    first block is read twice, first for the frame that its codes need.
    """
    D: tl.constexpr = FORM.D
    DP: tl.constexpr = FORM.DP
    BLOCK: tl.constexpr = FORM.BLOCK
    INT8: tl.constexpr = FORM.INT8
    BAND: tl.constexpr = FORM.BAND
    FRAMED: tl.constexpr = FORM.FRAMED
    MASKED: tl.constexpr = mask_at is not None
    KEYS: tl.constexpr = 8
    d = tl.arange(0, DP)
    n = tl.arange(0, KEYS)
    in_width = d < D
    first = begin
    if INT8 and FRAMED:
        begin = tl.where((done == 0) & (begin < end), begin - stride, begin)
        first = begin
    for turn in range(begin, end, stride):
        j = turn
        if INT8 and FRAMED:
            j = tl.where((done == 0) & (turn == first), 0, turn)
        high = tl.full([KEYS, DP], float("-inf"), tl.float32)
        low = tl.full([KEYS, DP], float("inf"), tl.float32)
        count = tl.zeros([KEYS], tl.int32)
        pivot = tl.zeros([DP], tl.float32)
        if BAND:  # sums, about the first key and of the squares
            high = tl.zeros([KEYS, DP], tl.float32)
            low = tl.zeros([KEYS, DP], tl.float32)
            one = start + j * BLOCK
            if MASKED:  # its first key that is seen: what is hidden enters nothing
                m = tl.arange(0, BLOCK)
                one += tl.min(tl.where(tl.load(mask_at + one + m) != 0, m, BLOCK - 1), 0)
            pivot = tl.load(k_at + one.to(tl.int64) * k_s + d, mask=in_width, other=0.0)
            pivot = pivot.to(tl.float32)
        for i in range(0, BLOCK, KEYS):
            at = start + j * BLOCK + i + n
            key = tl.load(
                k_at + at.to(tl.int64)[:, None] * k_s + d[None, :],
                mask=in_width[None, :],
                other=0.0,
            ).to(tl.float32)
            seen = at >= 0
            if MASKED:
                seen = tl.load(mask_at + at) != 0
            count += seen.to(tl.int32)
            if BAND:
                off = tl.where(seen[:, None], key - pivot[None, :], 0.0)
                high += off
                low += off * off
            else:  # a NaN comes in and stays
                above = tl.where(seen[:, None], key, float("-inf"))
                below = tl.where(seen[:, None], key, float("inf"))
                high = tl.maximum(high, above, propagate_nan=tl.PropagateNan.ALL)
                low = tl.minimum(low, below, propagate_nan=tl.PropagateNan.ALL)
        out = bounds_at + j * (FORM.PARTS * D) + d
        seen_keys = tl.sum(count, 0)
        # The reduction across keys drops a NaN.
        any_nan = tl.sum((high != high).to(tl.int32), 0) > 0
        if BAND:
            mean = tl.sum(high, 0) / tl.maximum(seen_keys, 1)
            square = tl.sum(low, 0) / tl.maximum(seen_keys, 1) - mean * mean
            half = BAND_WIDTH * tl.sqrt(tl.maximum(square, 0.0))
            top = tl.where(seen_keys > 0, pivot + mean + half, 0.0)
            bottom = tl.where(seen_keys > 0, pivot + mean - half, 0.0)
        else:
            top = tl.where(seen_keys > 0, tl.max(high, 0), 0.0)
            bottom = tl.where(seen_keys > 0, tl.min(low, 0), 0.0)
        if INT8:
            top = tl.where(in_width, tl.where(any_nan, float("nan"), top), 0.0)
            bottom = tl.where(in_width, bottom, 0.0)
            if not FRAMED:
                _store_codes(out, frame, j, top, bottom, d, D, FRAMED, BAND)
            elif (done == 0) & (turn == first):
                _set_frame(frame, top, bottom, d, D)
                tl.debug_barrier()  # other warps read it
            elif BAND:
                _store_band(out, frame, j, N, top, bottom, d, D)
            else:
                _store_codes(out, frame, j, top, bottom, d, D, FRAMED, BAND)
        else:
            tl.store(out, tl.where(any_nan, float("nan"), top), mask=in_width)
            tl.store(out + D, tl.where(any_nan, float("nan"), bottom), mask=in_width)


@triton.jit
def refresh(
    cache,
    rows,
    bounds,
    progress,
    N,
    programs,
    FORM: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program's share of the missing blocks of one row's head, which has room for N."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    until = tl.maximum(length - low, 0) // FORM.BLOCK
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    bounds_at, frame = summaries_at(bounds, b * tl.num_programs(1) + h, N, FORM)
    done = blocks_done(progress, b, low)
    refresh_blocks(
        k_at=cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h,
        k_s=cache.k_s,
        mask_at=mask_at,
        bounds_at=bounds_at,
        frame=frame,
        N=N,
        begin=done + tl.program_id(0),
        end=until,
        stride=programs,
        done=done,
        start=low,
        FORM=FORM,
    )


@triton.jit
def note_refreshed(rows, progress, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Note for one row that `refresh` has ended: all its complete blocks have summaries."""
    b = tl.program_id(0)
    length, low = row_span(rows, b, STEPS)
    note_progress(progress, b, low, tl.maximum(length - low, 0) // BLOCK)
