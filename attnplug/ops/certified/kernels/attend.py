"""The Triton kernels of `certified_attention` that read the quantized tier: the deviations of every
block, and the pass over the blocks (`_certified_hopper` has that of Hopper's usual cases).

Logarithms and scores are to the base 2 here. Keys: the query is multiplied by a block's scales and
split into two bf16 parts, so that codes enter the tensor cores as they are; zeros times query come
from a small kernel before ("base"). Values: dequantized to fp16, as two tiles of half the channels.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.quantize import bf16_value, fp16_value
from attnplug.ops.common.rows import row_span


@triton.jit
def quantized_blocks(
    progress, b, length, low, BLOCK: tl.constexpr
):  # fmt: skip
    """Complete blocks of row b that the tier holds, counted from `low`."""
    done = tl.load(progress + b * 2, cache_modifier=".cg")
    at = tl.load(progress + b * 2 + 1, cache_modifier=".cg")
    done = tl.where(at == low, done, 0)
    return tl.minimum(done, tl.maximum(length - low, 0) // BLOCK)


@triton.jit
def arrived(x, PDL: tl.constexpr):
    """x itself. The compiler changes a tensor's layout right behind its load and needs barriers for
    it, so that one load would wait for the one before. What it cannot see through stays put: all
    loads in front of this are under way at once. Not for the interpreter."""
    if PDL:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        word = x.to(tl.int32, bitcast=True) if PACK == 1 else x
        word = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [word], dtype=word.dtype, is_pure=False, pack=PACK
        )
        x = word.to(x.dtype, bitcast=True)
    return x


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
def load_query(
    q, b, h, q_b, q_h, heads, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Queries [ROWS, DP] of so many heads of a KV head's group."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h + d[None, :]
    return tl.load(at, mask=(r < heads)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_codes(
    codes_at, meta_at, BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr
):  # fmt: skip
    """One block's value codes [BLOCK, groups, 16], and the words of scale and zero of the groups
    [BLOCK, groups] in the low and in the high channels, as they lie in memory."""
    n = tl.arange(0, BLOCK)
    g = tl.arange(0, HALF_P)
    c = tl.arange(0, 16)
    there = (g < HALF)[None, :]
    place = n[:, None, None] * (HALF * 16) + g[None, :, None] * 16 + c[None, None, :]
    codes = tl.load(codes_at + place, mask=there[:, :, None], other=0)
    words_at = meta_at + n[:, None] * (2 * HALF) + g[None, :]
    low_words = tl.load(words_at, mask=there, other=0)
    high_words = tl.load(words_at + HALF, mask=there, other=0)
    return codes, low_words, high_words


@triton.jit
def values_of(codes, words, BLOCK: tl.constexpr, CP: tl.constexpr):
    """Codes 0..15 with their words as float32 [BLOCK, CP]."""
    value = codes.to(tl.float32) * fp16_value(words)[:, :, None]
    return tl.reshape(value + fp16_value(words >> 16)[:, :, None], [BLOCK, CP])


@triton.jit
def prepare(
    q, k_meta, summary, check, progress, lengths, start, base, delta, noise, odd, scale, cap,
    S, N, programs, q_b, q_h,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QK: tl.constexpr, PARTS: tl.constexpr,
    CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per head and block: query times zeros, what a score can be off by, and the part of that
    which arithmetic can make; compares the second check words."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    query = load_query(q, b, h, q_b, q_h, GROUP, GROUP, ROWS, D, DP)
    query = query.to(tl.float32) * scale
    size = tl.abs(query.to(QK).to(tl.float32)) * 1.00390625  # at least |query|
    weight = tl.where(in_width, 1 + 2 * (d // 2), 0)
    first = (b * tl.num_programs(1) + h) * N
    out_at = (b * tl.num_programs(1) * GROUP + head.to(tl.int64))[:, None] * N
    wrong = tl.zeros([TILE], tl.int32)
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
        raw = ((scale_bits & 0xFFFF) + 3 * (zero_bits & 0xFFFF)) << 16 * (d % 2)[None, :]
        words = 100000007 + 7919 * j + tl.sum(weight[None, :] * raw, 1)
        eta = tl.load(summary + (first + j) * 2, mask=there, other=0.0)
        nu = tl.load(summary + (first + j) * 2 + 1, mask=there, other=0.0)
        words += eta.to(tl.int32, bitcast=True) + 7 * nu.to(tl.int32, bitcast=True)
        stored = tl.load(check + (first + j) * 2 + 1, mask=there, other=0)
        wrong |= (there & (words.to(tl.int32) != stored)).to(tl.int32)
    at = odd + (b * tl.num_programs(1) + h) * programs + tl.program_id(0)
    tl.store(at, tl.max(wrong, 0))


@triton.jit
def attend(
    q, k_codes, k_meta, v_codes, v_meta, check, progress, lengths, start, key_mask,
    base, logs, partial, partial_lse, flags, scale, cap, S, N, splits, q_b, q_h, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, STAGES: tl.constexpr,
    QK: tl.constexpr, PV: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    CHECKED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one KV head against one split of its quantized blocks. Compares the first check
    words of its split. Split 0 of the partial results is what is not quantized (`attend_rest`)."""
    if PDL:
        gdc_launch_dependents()
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
    query = load_query(q, b, h, q_b, q_h, GROUP, GROUP, ROWS, D, DP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    mask_at = key_mask
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
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
    column_weight = ((1 + 2 * (column // 4)) << 8 * (column % 4))[None, :, :]
    word_weight = (1 + 2 * tl.arange(0, HALF_P))[None, :]
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
        bytes_v, low_words, high_words = load_codes(
            v_codes + place * (BLOCK * COLUMNS), v_meta + place * (BLOCK * 2 * HALF),
            BLOCK, HALF, HALF_P,
        )  # fmt: skip
        if CHECKED:
            sums_v += bytes_v.to(tl.int32) * column_weight
            sums_w += (low_words + 3 * high_words) * word_weight
        weights = p.to(PV)
        value_low = values_of(bytes_v & 15, low_words, BLOCK, CP).to(PV)
        value_high = values_of(bytes_v >> 4, high_words, BLOCK, CP).to(PV)
        acc_low = tl.dot(weights, value_low, acc_low * decay[:, None], input_precision="ieee")
        acc_high = tl.dot(weights, value_high, acc_high * decay[:, None], input_precision="ieee")

    if PDL:
        gdc_wait()
    if CHECKED:
        found = tl.sum(sums_k.to(tl.int64), 0)
        found += tl.sum(sums_s.to(tl.int64) << 16 * (d % 2), 0)
        found += tl.sum(tl.sum(sums_w.to(tl.int64), 1), 0)
        found += tl.sum(tl.sum(tl.sum(sums_v, 2).to(tl.int64), 1), 0)
        count = (last - first).to(tl.int64)
        found += count * 100000007 + 7919 * (count * first + count * (count - 1) // 2)
        tl.store(
            flags + (b * tl.num_programs(1) + h) * 2 + 1, 1, mask=(found - stored) & 0xFFFFFFFF != 0
        )
    piece = row.to(tl.int64) * (splits + 1) + split + 1
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(partial_lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    out_at = partial + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    mask = mask & (c + COLUMNS < D)[None, :]
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask)
