"""The Triton kernels of `certified_attention` that read the cache: the deviations of every block,
the pass over the quantized blocks, the exact reading of promoted ones, and exact recomputation.

Logarithms and scores are to the base 2 here. Keys: the query is multiplied by a block's scales and
split into two bf16 parts, so that codes enter the tensor cores as they are; zeros times query come
from a small kernel before ("base"). Values: dequantized to fp16, as two tiles of half the channels.
"""

import triton
import triton.language as tl

from attnplug.ops.block_bounds import row_span
from attnplug.ops.quantize_kv import bf16_value, fold_bits, fp16_value


@triton.jit
def quantized_blocks(
    progress, b, length, low, BLOCK: tl.constexpr
):  # fmt: skip
    """Complete blocks of row b that the tier holds, counted from `low`."""
    done = tl.load(progress + b * 2)
    done = tl.where(tl.load(progress + b * 2 + 1) == low, done, 0)
    return tl.minimum(done, tl.maximum(length - low, 0) // BLOCK)


@triton.jit
def split_dot(a, b, acc, dtype: tl.constexpr, PARTS: tl.constexpr):
    """acc + a b with float32 `a` in one or two parts of `b`'s dtype."""
    high = a.to(dtype)
    acc = tl.dot(high, b, acc, input_precision="ieee")
    if PARTS == 2:
        acc = tl.dot((a - high.to(tl.float32)).to(dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit
def capped(s, cap):
    """cap tanh(s / cap), both to the base 2: tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    return cap * (1 - 2 / (tl.exp2(s * (2 * 1.4426950408889634) / cap) + 1))


@triton.jit
def load_values(v_at, tokens, v_s, seen, D: tl.constexpr, COLUMNS: tl.constexpr, CP: tl.constexpr):
    """Original values of some tokens as two tiles of half the channels, and their norms."""
    c = tl.arange(0, CP)
    at = v_at + tokens.to(tl.int64)[:, None] * v_s + c[None, :]
    low = tl.load(at, mask=seen[:, None] & (c < COLUMNS)[None, :], other=0.0)
    there = (c < COLUMNS) & (c + COLUMNS < D)
    high = tl.load(at + COLUMNS, mask=seen[:, None] & there[None, :], other=0.0)
    wide, wider = low.to(tl.float32), high.to(tl.float32)
    return low, high, tl.sqrt(tl.sum(wide * wide, 1) + tl.sum(wider * wider, 1))


@triton.jit
def unpack_values(
    codes_at, meta_at, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr
):  # fmt: skip
    """One block's quantized values as float32 [BLOCK, groups, 16], low and high channels; and the
    codes and words as they lie in memory."""
    n = tl.arange(0, BLOCK)
    g = tl.arange(0, HALF_P)
    c = tl.arange(0, 16)
    there = (g < HALF)[None, :]
    place = n[:, None, None] * (HALF * 16) + g[None, :, None] * 16 + c[None, None, :]
    codes = tl.load(codes_at + place, mask=there[:, :, None], other=0)
    words_at = meta_at + n[:, None] * (2 * HALF) + g[None, :]
    low_words = tl.load(words_at, mask=there, other=0)
    high_words = tl.load(words_at + HALF, mask=there, other=0)
    low = (codes & 15).to(tl.float32) * fp16_value(low_words)[:, :, None]
    low += fp16_value(low_words >> 16)[:, :, None]
    high = (codes >> 4).to(tl.float32) * fp16_value(high_words)[:, :, None]
    high += fp16_value(high_words >> 16)[:, :, None]
    return low, high, codes, low_words, high_words


@triton.jit
def prepare(
    q, k_meta, summary, check, progress, lengths, start, base, delta, noise, flags, scale, cap,
    S, N, programs, q_b, q_h,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QK: tl.constexpr, PARTS: tl.constexpr,
    CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """Per head and block: query times zeros, what a score can be off by, and the part of that which
    arithmetic can make; compares the second check words."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    i = tl.arange(0, TILE)
    in_width = d < D
    in_group = r < GROUP
    head = h * GROUP + r
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    query = query.to(tl.float32) * scale
    size = tl.abs(query.to(QK).to(tl.float32)) * 1.00390625  # at least |query|
    weight = tl.where(in_width, 1 + d % 31, 0)
    first = (b * tl.num_programs(1) + h) * N
    out_at = (b * tl.num_programs(1) * GROUP + head.to(tl.int64))[:, None] * N
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), programs):
        j = tile * TILE + i
        there = j < blocks
        meta_at = k_meta + (first + j)[:, None] * (2 * D) + d[None, :]
        mask = there[:, None] & in_width[None, :]
        scale_bits = tl.load(meta_at, mask=mask, other=0).to(tl.int32)
        zero_bits = tl.load(meta_at + D, mask=mask, other=0).to(tl.int32)
        scales = bf16_value(scale_bits)
        zeros = bf16_value(zero_bits)
        nothing = tl.zeros([ROWS, TILE], tl.float32)
        product = split_dot(query, zeros.to(QK).T, nothing, QK, PARTS)
        half = split_dot(size, scales.to(QK).T, nothing, QK, 1) * 0.5
        reach = split_dot(size, tl.abs(zeros).to(QK).T, nothing, QK, 1)
        quiet = (D + 16) * 4.76837158203125e-07 * (reach + 254 * half) + 1e-18
        if CAPPED:
            quiet += cap * 9.5367431640625e-07
        mask = in_group[:, None] & there[None, :]
        tl.store(base + out_at + j[None, :], product, mask=mask)
        tl.store(noise + out_at + j[None, :], quiet, mask=mask)
        tl.store(delta + out_at + j[None, :], half * 1.0234375 + quiet, mask=mask)
        raw = 3 * (scale_bits & 0xFFFF) + 5 * (zero_bits & 0xFFFF)
        words = 100000007 + 7919 * j + tl.sum(weight[None, :] * raw, 1)
        eta = tl.load(summary + (first + j) * 2, mask=there, other=0.0)
        nu = tl.load(summary + (first + j) * 2 + 1, mask=there, other=0.0)
        words += fold_bits(eta) + 7 * fold_bits(nu)
        stored = tl.load(check + (first + j) * 2 + 1, mask=there, other=0)
        wrong = tl.max((there & (words.to(tl.int32) != stored)).to(tl.int32), 0)
        tl.store(flags + b * 2 + 1, 1, mask=wrong > 0)


@triton.jit
def attend_exactly(
    query, k_at, v_at, k_s, v_s, begin, end, scale, cap, mask_at, rows,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    CP: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens begin..end-1 of the originals: (top, total, low and high sums,
    sums of norms, largest norm, largest sum of |q||k|)."""
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
        value_low, value_high, norm = load_values(v_at, tokens, v_s, seen, D, COLUMNS, CP)
        total = total * decay + tl.sum(p, 1)
        norms = norms * decay + tl.sum(p * norm[None, :], 1)
        widest = tl.maximum(widest, norm)
        low = split_dot(p, value_low, low * decay[:, None], value_low.dtype, PARTS)
        high = split_dot(p, value_high, high * decay[:, None], value_high.dtype, PARTS)
    return top, total, low, high, norms, tl.max(widest, 0), reach


@triton.jit
def attend(
    q, k, v, k_codes, k_meta, v_codes, v_meta, check, progress, lengths, start, key_mask,
    base, logs, partial, partial_lse, extremes, flags, scale, cap, S, N, splits,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, STAGES: tl.constexpr,
    QK: tl.constexpr, PV: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    CHECKED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """All heads of one KV head against one split of its quantized blocks; split 0 reads what is not
    quantized from the originals. Compares the first check words of its split."""
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    in_group = r < GROUP
    head = h * GROUP + r
    row = b * tl.num_programs(1) * GROUP + head
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    if split == 0:
        top, total, acc_low, acc_high, norms, widest, reach = attend_exactly(
            query, k + b * k_b + h.to(tl.int64) * k_h, v + b * v_b + h.to(tl.int64) * v_h,
            k_s, v_s, low + blocks * BLOCK, length, scale, cap, mask_at, r,
            D, DP, 16, COLUMNS, CP, ROWS, key_mask is not None, CAPPED, PARTS,
        )  # fmt: skip
        tl.store(extremes + row * 3, norms / tl.where(total == 0, 1.0, total), mask=in_group)
        tl.store(extremes + row * 3 + 1, tl.zeros([ROWS], tl.float32) + widest, mask=in_group)
        tl.store(extremes + row * 3 + 2, reach, mask=in_group)

    first = (split - 1) * blocks // (splits - 1)
    last = split * blocks // (splits - 1)
    last = tl.where(split == 0, 0, last)
    first = tl.where(split == 0, 0, first)
    checks_row = r == ROWS - 1  # a spare row of the product sums the codes
    scaled = query.to(tl.float32) * scale
    weight = tl.where(in_width, 1 + d % 31, 0)
    block0 = (b * tl.num_programs(1) + h) * N
    codes_at = k_codes + n[:, None] * D + d[None, :]
    sums_k = tl.zeros([BLOCK], tl.int32)
    sums_s = tl.zeros([DP], tl.int32)
    sums_v = tl.zeros([BLOCK, HALF_P, 16], tl.int32)
    sums_w = tl.zeros([BLOCK, HALF_P], tl.int32)
    column = tl.arange(0, HALF_P)[:, None] * 16 + tl.arange(0, 16)[None, :]
    column_weight = (1 + column % 31)[None, :, :]
    stored = (last - first).to(tl.int64) * 0
    for j in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        place = block0 + j
        bits = tl.load(k_meta + place * (2 * D) + d, mask=in_width, other=0).to(tl.int32)
        codes = tl.load(codes_at + place * (BLOCK * D), mask=in_width[None, :], other=0)
        sides = scaled * bf16_value(bits)[None, :]
        if CHECKED:
            sides = tl.where(checks_row[:, None], weight.to(tl.float32)[None, :], sides)
        s = split_dot(sides, codes.to(QK).T, tl.zeros([ROWS, BLOCK], tl.float32), QK, PARTS)
        if CHECKED:
            sums_k += tl.sum(tl.where(checks_row[:, None], s, 0.0), 0).to(tl.int32)
            sums_s += bits & 0xFFFF
            stored += tl.load(check + place * 2)
        s += tl.load(base + row.to(tl.int64) * N + j, mask=in_group, other=0.0)[:, None]
        if CAPPED:
            s = capped(s, cap)
        if key_mask is not None:
            s = tl.where((tl.load(mask_at + low + j * BLOCK + n) != 0)[None, :], s, float("-inf"))
        best = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(best == float("-inf"), 0.0, best)
        # A NaN score may be dropped by the maximum; it comes back through p.
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        mass = tl.sum(p, 1)
        total = total * decay + mass
        tl.store(logs + row.to(tl.int64) * N + j, shift + tl.log2(mass), mask=in_group)
        value_low, value_high, bytes_v, low_words, high_words = unpack_values(
            v_codes + place * (BLOCK * COLUMNS), v_meta + place * (BLOCK * 2 * HALF),
            BLOCK, HALF, HALF_P,
        )  # fmt: skip
        if CHECKED:
            sums_v += bytes_v.to(tl.int32) * column_weight
            sums_w += (low_words & 0xFFFF) + 3 * (low_words >> 16 & 0xFFFF)
            sums_w += (high_words & 0xFFFF) + 3 * (high_words >> 16 & 0xFFFF)
        weights = p.to(PV)
        value_low = tl.reshape(value_low.to(PV), [BLOCK, CP])
        value_high = tl.reshape(value_high.to(PV), [BLOCK, CP])
        acc_low = tl.dot(weights, value_low, acc_low * decay[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, value_high, acc_high * decay[:, None], input_precision="ieee")

    if CHECKED:
        found = tl.sum(sums_k.to(tl.int64), 0) + tl.sum(sums_s.to(tl.int64), 0)
        found += tl.sum(tl.sum(sums_w.to(tl.int64), 1), 0)
        found += tl.sum(tl.sum(tl.sum(sums_v, 2).to(tl.int64), 1), 0)
        count = (last - first).to(tl.int64)
        found += count * 100000007 + 7919 * (count * first + count * (count - 1) // 2)
        tl.store(flags + b * 2 + 1, 1, mask=(found - stored) & 0xFFFFFFFF != 0)
    piece = row.to(tl.int64) * splits + split
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(partial_lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    out_at = partial + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    mask = mask & (c + COLUMNS < D)[None, :]
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask)


@triton.jit
def promote(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, key_mask, lengths, start, base, delta,
    chosen, counts, slots, partial, partial_top, flags, scale, cap, S, N, C, pieces,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, QK: tl.constexpr,
    PV: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):  # fmt: skip
    """One piece of the blocks that a KV head reads exactly: what they change in its sums, and
    their log-masses, quantized and exact. Scores and values must be within their bounds."""
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    _length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    in_group = r < GROUP
    head = h * GROUP + r
    row = (b * tl.num_programs(1) * GROUP + head).to(tl.int64)
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    scaled = query.to(tl.float32) * scale
    k_at = k + b * k_b + h.to(tl.int64) * k_h
    v_at = v + b * v_b + h.to(tl.int64) * v_h
    group = b * tl.num_programs(1) + h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    count = tl.minimum(tl.load(counts + group * 2), C)
    for i in range(piece, count, pieces):
        name = tl.load(chosen + group * C + i)
        j = name // 2
        whole = name % 2  # values too
        place = group * N + j
        tokens = low + j * BLOCK + n
        seen = tokens >= 0
        if key_mask is not None:
            seen = tl.load(key_mask + b * mask_b + tokens) != 0
        bits = tl.load(k_meta + place * (2 * D) + d, mask=in_width, other=0)
        codes = tl.load(
            k_codes + place * (BLOCK * D) + n[:, None] * D + d[None, :],
            mask=in_width[None, :],
            other=0,
        )
        key = tl.load(
            k_at + tokens.to(tl.int64)[:, None] * k_s + d[None, :],
            mask=seen[:, None] & in_width[None, :],
            other=0.0,
        )
        nothing = tl.zeros([ROWS, BLOCK], tl.float32)
        rough = split_dot(scaled * bf16_value(bits)[None, :], codes.to(QK).T, nothing, QK, PARTS)
        rough += tl.load(base + row * N + j, mask=in_group, other=0.0)[:, None]
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:
            rough = capped(rough, cap)
            s = capped(s, cap)
        limit = tl.load(delta + row * N + j, mask=in_group, other=0.0)
        off = ~(tl.abs(s - rough) <= limit[:, None]) & in_group[:, None] & seen[None, :]
        wrong = tl.maximum(wrong, tl.max(off.to(tl.int32), 0))
        s = tl.where(seen[None, :], s, float("-inf"))
        rough = tl.where(seen[None, :], rough, float("-inf"))
        best = tl.maximum(top, tl.maximum(tl.max(s, 1), tl.max(rough, 1)))
        shift = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(s - shift[:, None])
        old = tl.exp2(rough - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        slot = slots + row * (2 * C) + i
        tl.store(slot, shift + tl.log2(tl.sum(old, 1)), mask=in_group)
        tl.store(slot + C, shift + tl.log2(tl.sum(p, 1)), mask=in_group)

        low3, high3, _codes, _low_words, _high_words = unpack_values(
            v_codes + place * (BLOCK * COLUMNS), v_meta + place * (BLOCK * 2 * HALF),
            BLOCK, HALF, HALF_P,
        )  # fmt: skip
        value_low = tl.reshape(low3, [BLOCK, CP])
        value_high = tl.reshape(high3, [BLOCK, CP])
        wanted = seen & (n * 0 + whole > 0)
        new_low, new_high, _norm = load_values(v_at, tokens, v_s, wanted, D, COLUMNS, CP)
        new_low = tl.where(wanted[:, None], new_low.to(tl.float32), value_low)
        new_high = tl.where(wanted[:, None], new_high.to(tl.float32), value_high)
        in_low = (c < COLUMNS)[None, :] & seen[:, None]
        in_high = in_low & (c + COLUMNS < D)[None, :]
        error_low = tl.where(in_low, new_low - value_low, 0.0)
        error_high = tl.where(in_high, new_high - value_high, 0.0)
        error = tl.sqrt(tl.sum(error_low * error_low, 1) + tl.sum(error_high * error_high, 1))
        eta = tl.load(summary + place * 2)
        wrong = tl.maximum(wrong, (wanted & ~(error <= eta)).to(tl.int32))
        acc_low = split_dot(p, new_low.to(PV), acc_low * decay[:, None], PV, PARTS)
        acc_low = tl.dot((-old).to(PV), value_low.to(PV), acc_low, input_precision="ieee")
        acc_high = split_dot(p, new_high.to(PV), acc_high * decay[:, None], PV, PARTS)
        acc_high = tl.dot((-old).to(PV), value_high.to(PV), acc_high, input_precision="ieee")

    tl.store(flags + b * 2, 1, mask=tl.max(wrong, 0) > 0)
    at = row * pieces + piece
    tl.store(partial_top + at, top, mask=in_group)
    out_at = partial + at[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low, mask=mask)
    tl.store(out_at + COLUMNS, acc_high, mask=mask & (c + COLUMNS < D)[None, :])


@triton.jit
def recompute(
    q, k, v, lengths, start, key_mask, rungs, telemetry, partial, partial_lse, extremes, scale, cap,
    S, splits, telemetry_rows, q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, PARTS: tl.constexpr,
    CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """Exact attention of a KV head some of whose heads must be recomputed; else nothing."""
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
    d = tl.arange(0, DP)
    c = tl.arange(0, CP)
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & (d < D)[None, :], other=0.0)
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    tiles = tl.cdiv(tl.maximum(length - low, 0), TILE)
    begin = low + split * tiles // splits * TILE
    end = tl.minimum(low + (split + 1) * tiles // splits * TILE, length)
    top, total, acc_low, acc_high, _norms, widest, reach = attend_exactly(
        query, k + b * k_b + h.to(tl.int64) * k_h, v + b * v_b + h.to(tl.int64) * v_h,
        k_s, v_s, begin, end, scale, cap, mask_at, r,
        D, DP, TILE, COLUMNS, CP, ROWS, key_mask is not None, CAPPED, PARTS,
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
