"""The Triton kernels of `certified_attention` that read nothing but originals: what is not
quantized, and what is recomputed. To the base 2."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.attend import (
    arrived,
    capped,
    load_query,
    quantized_blocks,
    split_dot,
)
from attnplug.ops.common.rows import row_span


@triton.jit
def load_values(v_at, tokens, v_s, seen, D: tl.constexpr, COLUMNS: tl.constexpr, CP: tl.constexpr):
    """Original values of some tokens as two tiles of half the channels."""
    c = tl.arange(0, CP)
    at = v_at + tokens.to(tl.int64)[:, None] * v_s + c[None, :]
    low = tl.load(at, mask=seen[:, None] & (c < COLUMNS)[None, :], other=0.0)
    there = (c < COLUMNS) & (c + COLUMNS < D)
    high = tl.load(at + COLUMNS, mask=seen[:, None] & there[None, :], other=0.0)
    return low, high


@triton.jit
def attend_exactly(
    query, k_at, v_at, k_s, v_s, begin, end, scale, cap, mask_at, rows,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    CP: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    PARTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens begin..end-1 of the originals: (top, total, low and high sums,
    sums of norms, largest norm, largest sum of |q||k|). TOGETHER: `arrived` for its loads, where
    the compiler does not pipeline them."""
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    norms = tl.zeros([ROWS], tl.float32)
    reach = tl.zeros([ROWS], tl.float32)
    widest = tl.zeros([BLOCK], tl.float32)
    low = tl.zeros([ROWS, CP], tl.float32)
    high = tl.zeros([ROWS, CP], tl.float32)
    for at in range(begin, end, BLOCK):
        seen = at + n < end
        if MASKED:
            seen = seen & (tl.load(mask_at + at + n, mask=seen, other=0) != 0)
        tokens = at + n
        key = tl.load(
            k_at + tokens.to(tl.int64)[:, None] * k_s + d[None, :],
            mask=seen[:, None] & (d < D)[None, :],
            other=0.0,
        )
        value_low, value_high = load_values(v_at, tokens, v_s, seen, D, COLUMNS, CP)
        key, value_low = arrived(key, TOGETHER), arrived(value_low, TOGETHER)
        value_high = arrived(value_high, TOGETHER)
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        sizes = tl.dot(tl.abs(query), tl.abs(key).T, input_precision="ieee") * scale
        reach = tl.maximum(reach, tl.max(sizes, 1))
        if CAPPED:
            s = capped(s, cap)
        s = tl.where(seen[None, :], s, float("-inf"))
        best = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        wide, wider = value_low.to(tl.float32), value_high.to(tl.float32)
        norm = tl.sqrt(tl.sum(wide * wide, 1) + tl.sum(wider * wider, 1))
        total = total * decay + tl.sum(p, 1)
        norms = norms * decay + tl.sum(p * norm[None, :], 1)
        widest = tl.maximum(widest, norm)
        low = split_dot(p, value_low, low * decay[:, None], value_low.dtype, PARTS)
        high = split_dot(p, value_high, high * decay[:, None], value_high.dtype, PARTS)
    return top, total, low, high, norms, tl.max(widest, 0), reach


@triton.jit
def attend_rest(
    q, k, v, progress, lengths, start, key_mask, odd, flags, partial, partial_lse, extremes,
    scale, cap, S, splits, programs, q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    PROGRAMS: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one KV head against what is not quantized, as split 0 of the partial results;
    sets its flags to what `prepare` has found. The pass over the blocks runs beside it."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    group = b * tl.num_programs(0) + h
    if PDL:
        gdc_wait()
    found = 0
    if odd is not None:
        i = tl.arange(0, PROGRAMS)
        found = tl.max(tl.load(odd + group * programs + i, mask=i < programs, other=0), 0)
    tl.store(flags + group * 2, 0)
    tl.store(flags + group * 2 + 1, found)
    if PDL:
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    r = tl.arange(0, ROWS)
    c = tl.arange(0, CP)
    in_group = r < GROUP
    row = group.to(tl.int32) * GROUP + r
    query = load_query(q, b, h, q_b, q_h, GROUP, GROUP, ROWS, D, DP)
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    FITS: tl.constexpr = DP <= 128 and k.dtype.element_ty.primitive_bitwidth == 16
    top, total, acc_low, acc_high, norms, widest, reach = attend_exactly(
        query, k + b * k_b + h.to(tl.int64) * k_h, v + b * v_b + h.to(tl.int64) * v_h,
        k_s, v_s, low + blocks * BLOCK, length, scale, cap, mask_at, r,
        D, DP, TILE, COLUMNS, CP, ROWS, key_mask is not None, CAPPED, PARTS, PDL and FITS,
    )  # fmt: skip
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    tl.store(extremes + row * 3, norms / divisor, mask=in_group)
    tl.store(extremes + row * 3 + 1, tl.zeros([ROWS], tl.float32) + widest, mask=in_group)
    tl.store(extremes + row * 3 + 2, reach, mask=in_group)
    piece = row.to(tl.int64) * (splits + 1)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(partial_lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    out_at = partial + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask & (c + COLUMNS < D)[None, :])


@triton.jit
def recompute(
    q, k, v, lengths, start, key_mask, rungs, telemetry, partial, partial_lse, extremes, scale, cap,
    S, splits, telemetry_rows, q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, PARTS: tl.constexpr,
    CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exact attention of a KV head some of whose heads must be recomputed; else nothing."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, ROWS)
    in_group = r < GROUP
    head = h * GROUP + r
    row = (b * tl.num_programs(1) * GROUP + head).to(tl.int64)
    if tl.max(tl.load(rungs + row, mask=in_group, other=0) & 12, 0) == 0:  # neither head nor row
        return
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    c = tl.arange(0, CP)
    query = load_query(q, b, h, q_b, q_h, GROUP, GROUP, ROWS, D, DP)
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    tiles = tl.cdiv(tl.maximum(length - low, 0), TILE)
    begin = low + split * tiles // splits * TILE
    end = tl.minimum(low + (split + 1) * tiles // splits * TILE, length)
    top, total, acc_low, acc_high, _norms, widest, reach = attend_exactly(
        query, k + b * k_b + h.to(tl.int64) * k_h, v + b * v_b + h.to(tl.int64) * v_h,
        k_s, v_s, begin, end, scale, cap, mask_at, r,
        D, DP, TILE, COLUMNS, CP, ROWS, key_mask is not None, CAPPED, PARTS, False,
    )  # fmt: skip
    piece = row * splits + split
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(partial_lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    tl.store(extremes + piece * 2, tl.zeros([ROWS], tl.float32) + widest, mask=in_group)
    tl.store(extremes + piece * 2 + 1, reach, mask=in_group)
    out_at = partial + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask & (c + COLUMNS < D)[None, :])
    if telemetry is not None:
        if split == 0:
            group = b * tl.num_programs(1) + h
            at = telemetry + group * telemetry_rows * 16 + 14 + tl.arange(0, 2)
            counted = tl.load(at)
            tl.debug_barrier()  # every warp loads and stores the same words
            tl.store(at, counted + (length - low))
