"""The Triton kernel that makes spread summaries, mean and variance of a block's keys as INT8 codes,
and what the kernel that scores them needs of it (`kernels/score_spread.py`).

A row's head has codes `[N, 2, D]` at `codes_at`, means before variances, and behind them bfloat16
scales `[2, G, N]` at `scales_at`: one for each part of a block's codes and 32 channels of them.
"""

from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.triton import tl, triton

CHANNELS = tl.constexpr(32)  # that share a scale: what one integer product takes
LEAST = tl.constexpr(1e-30)  # the smallest scale


@triton.jit
def spread_at(bounds, row, N, D: tl.constexpr):
    """(where the codes of one row's head begin, where their scales do)."""
    GROUPS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    at = bounds + row * (N + tl.cdiv(2 * GROUPS * N, D)) * (2 * D)
    codes_at = at.to(tl.pointer_type(tl.int8))
    return codes_at, (at + N * (2 * D)).to(tl.pointer_type(tl.int16))


@triton.jit
def _encode(values, d, D: tl.constexpr, DP: tl.constexpr):
    """INT8 codes of `values [DP]`, and as bfloat16 bits the scale of each 32 channels
    `[DP / CHANNELS]`, rounded up, so that no code exceeds 127."""
    values = tl.where(d < D, values, 0.0)
    grouped = tl.reshape(values, [DP // CHANNELS, CHANNELS])
    finite = tl.abs(grouped) < float("inf")
    odd = tl.sum(finite.to(tl.int32), 1) < CHANNELS
    top = tl.max(tl.where(finite, tl.abs(grouped), 0.0), 1)
    scale = tl.maximum(top * (1.0 / 127.0), LEAST)
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale = (bits << 16).to(tl.float32, bitcast=True)
    level = grouped * (1.0 / scale)[:, None]
    level = tl.where(odd[:, None], 0.0, tl.minimum(tl.maximum(level, -127.0), 127.0))
    # To the nearest integer: 1.5 2^23 leaves no bits for a fraction.
    code = (level + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.reshape(code, [DP]), tl.where(odd, 0x7FC0, bits)  # NaN


@triton.jit
def _store_part(
    values,
    part: tl.constexpr,
    codes_at,
    scales_at,
    j,
    N,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Store means (part 0) or variances (part 1) of block j."""
    GROUPS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    d = tl.arange(0, DP)
    c = tl.arange(0, DP // CHANNELS)
    code, bits = _encode(values, d, D, DP)
    tl.store(codes_at + (j * 2 + part) * D + d, code.to(tl.int8), mask=d < D)
    tl.store(scales_at + (part * GROUPS + c) * N + j, bits.to(tl.int16), mask=c < GROUPS)


@triton.jit
def _load_keys(
    k_at,
    mask_at,
    first,
    k_s,
    D: tl.constexpr,
    DP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(KEYS keys `[KEYS, DP]` from `first` on as float32, which of them may be seen)."""
    d = tl.arange(0, DP)
    at = first + tl.arange(0, KEYS)
    key = tl.load(
        k_at + at.to(tl.int64)[:, None] * k_s + d[None, :], mask=(d < D)[None, :], other=0.0
    )
    seen = at >= 0
    if MASKED:
        seen = tl.load(mask_at + at) != 0
    return key.to(tl.float32), seen


@triton.jit
def refresh_spread(
    k_at,
    mask_at,
    codes_at,
    scales_at,
    begin,
    end,
    stride,
    start,
    N,
    k_s,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Summarise blocks begin, begin + stride, ... before end of one row's head, whose blocks begin
    at key `start`. The keys are read twice: for their mean, then for their variance about it."""
    KEYS: tl.constexpr = 16
    for j in range(begin, end, stride):
        total = tl.zeros([KEYS, DP], tl.float32)
        count = tl.zeros([KEYS], tl.int32)
        for i in range(0, BLOCK, KEYS):
            first = start + j * BLOCK + i
            key, seen = _load_keys(k_at, mask_at, first, k_s, D, DP, KEYS, MASKED)
            count += seen.to(tl.int32)
            total += tl.where(seen[:, None], key, 0.0)
        seen_keys = tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
        mean = tl.sum(total, 0) / seen_keys
        total = tl.zeros([KEYS, DP], tl.float32)
        for i in range(0, BLOCK, KEYS):
            first = start + j * BLOCK + i
            key, seen = _load_keys(k_at, mask_at, first, k_s, D, DP, KEYS, MASKED)
            key -= mean[None, :]
            total += tl.where(seen[:, None], key * key, 0.0)
        _store_part(mean, 0, codes_at, scales_at, j, N, D, DP)
        _store_part(tl.sum(total, 0) / seen_keys, 1, codes_at, scales_at, j, N, D, DP)


@triton.jit
def refresh_all_spread(
    k,
    bounds,
    progress,
    lengths,
    start,
    key_mask,
    S,
    N,
    programs,
    k_strides,
    mask_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):
    """One program's share of the missing blocks of one row's head, which has room for N."""
    k_b, k_h, k_s = k_strides
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_stride
    codes_at, scales_at = spread_at(bounds, b * tl.num_programs(1) + h, N, D)
    refresh_spread(
        k_at=k + b * k_b + h.to(tl.int64) * k_h,
        mask_at=mask_at,
        codes_at=codes_at,
        scales_at=scales_at,
        begin=blocks_done(progress, b, low) + tl.program_id(0),
        end=tl.maximum(length - low, 0) // BLOCK,
        stride=programs,
        start=low,
        N=N,
        k_s=k_s,
        D=D,
        DP=DP,
        BLOCK=BLOCK,
        MASKED=key_mask is not None,
    )
