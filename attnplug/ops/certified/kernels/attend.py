"""The Triton kernels of `certified_attention` that read the quantized tier: the deviations of every
block, and the pass over the blocks (`kernels/hopper.py` has that of Hopper's usual cases).

Logarithms and scores are to the base 2. Keys: the query is multiplied by a block's scales and split
into two bf16 parts, so that codes enter the tensor cores as they are. A small kernel computes the
query times the zeros before ("base"). Values: dequantized to fp16, as two tiles of half the
channels.
"""

from attnplug.ops.certified.kernels.tier import (
    bf16_value,
    load_key_scales,
    load_value_codes,
    quantized_blocks,
    values_of,
)
from attnplug.ops.certified.kernels.tiles import capped, load_query, split_dot
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def prepare(
    q,
    tier,
    rows,
    scores,
    metadata_faults,
    scale,
    cap,
    N,
    programs,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    MATH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Base, delta and noise of every head and block (`BlockScores`). Compares the second check
    words and leaves in `metadata_faults` whether one did not fit."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    QK: tl.constexpr = tl.float32 if MATH.FLOAT32_KEYS else tl.bfloat16
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(tier.progress, b, length, low, SHAPE.BLOCK)
    r = tl.arange(0, SHAPE.ROWS)
    d = tl.arange(0, SHAPE.DP)
    i = tl.arange(0, TILE)
    in_width = d < D
    in_group = r < GROUP
    head = h * GROUP + r
    query = load_query(q, b, h, GROUP, SHAPE)
    query = query.to(tl.float32) * scale
    size = tl.abs(query.to(QK).to(tl.float32)) * R.QUERY_CARE  # at least |query|
    weight = tl.where(in_width, 1 + 2 * (d // 2), 0)
    first = (b * tl.num_programs(1) + h) * N
    out_at = (b * tl.num_programs(1) * GROUP + head.to(tl.int64))[:, None] * N
    wrong = tl.zeros([TILE], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(blocks, TILE), programs):
        j = tile * TILE + i
        there = j < blocks
        meta_at = tier.k_meta + (first + j)[:, None] * (2 * D) + d[None, :]
        mask = there[:, None] & in_width[None, :]
        scale_bits = tl.load(meta_at, mask=mask, other=0).to(tl.int32)
        zero_bits = tl.load(meta_at + D, mask=mask, other=0).to(tl.int32)
        scales = bf16_value(scale_bits)
        zeros = bf16_value(zero_bits)
        nothing = tl.zeros([ROWS, TILE], tl.float32)
        product = split_dot(query, zeros.to(QK).T, nothing, QK, MATH.PARTS)
        half = split_dot(size, scales.to(QK).T, nothing, QK, 1) * 0.5
        reach = split_dot(size, tl.abs(zeros).to(QK).T, nothing, QK, 1)
        noise = (D + R.DOT_EXTRA) * R.DOT_SLACK * (reach + R.CODE_REACH * half) + R.NOISE_FLOOR
        if MATH.CAPPED:
            noise += cap * R.CAP_SLACK
        mask = in_group[:, None] & there[None, :]
        tl.store(scores.base + out_at + j[None, :], product, mask=mask)
        tl.store(scores.noise + out_at + j[None, :], noise, mask=mask)
        delta_at = scores.delta + out_at + j[None, :]
        tl.store(delta_at, half * R.DELTA_CARE_16_BIT + noise, mask=mask)
        raw = ((scale_bits & 0xFFFF) + 3 * (zero_bits & 0xFFFF)) << 16 * (d % 2)[None, :]
        words = R.CHECK_SEED + R.CHECK_STEP * j + tl.sum(weight[None, :] * raw, 1)
        summary_at = tier.summary + (first + j) * R.SUMMARY_FIELDS
        eta = tl.load(summary_at + R.ETA, mask=there, other=0.0)
        nu = tl.load(summary_at + R.NU, mask=there, other=0.0)
        words += eta.to(tl.int32, bitcast=True) + 7 * nu.to(tl.int32, bitcast=True)
        of_keys = tl.load(summary_at + R.KEY_SPECTRUM, mask=there, other=0.0)
        of_values = tl.load(summary_at + R.VALUE_SPECTRUM, mask=there, other=0.0)
        words += 13 * of_keys.to(tl.int32, bitcast=True)
        words += 19 * of_values.to(tl.int32, bitcast=True)
        check_at = tier.check + (first + j) * R.CHECK_FIELDS + R.CHECK_PREPARE
        stored = tl.load(check_at, mask=there, other=0)
        wrong |= (there & (words.to(tl.int32) != stored)).to(tl.int32)
    at = metadata_faults + (b * tl.num_programs(1) + h) * programs + tl.program_id(0)
    tl.store(at, tl.max(wrong, 0))


@triton.jit
def attend(
    q,
    tier,
    rows,
    scores,
    splits,
    flags,
    scale,
    cap,
    N,
    count,
    SHAPE: tl.constexpr,
    STAGES: tl.constexpr,
    MATH: tl.constexpr,
    CHECKED: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one KV head against one of `count` splits of its quantized blocks. Compares the
    first check words of its split. Split 0 of the pieces is what is not quantized
    (`attend_rest`)."""
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    DP: tl.constexpr = SHAPE.DP
    D: tl.constexpr = SHAPE.D
    BLOCK: tl.constexpr = SHAPE.BLOCK
    HALF_P: tl.constexpr = SHAPE.HALF_P
    QK: tl.constexpr = tl.float32 if MATH.FLOAT32_KEYS else tl.bfloat16
    PV: tl.constexpr = tl.float32 if MATH.FLOAT32_VALUES else tl.float16
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(tier.progress, b, length, low, BLOCK)
    COLUMNS: tl.constexpr = SHAPE.HALF * 16
    CP: tl.constexpr = HALF_P * 16
    r = tl.arange(0, ROWS)
    d = tl.arange(0, SHAPE.DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    in_group = r < GROUP
    head = h * GROUP + r
    row = b * tl.num_programs(1) * GROUP + head
    query = load_query(q, b, h, GROUP, SHAPE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    first = split * blocks // count
    last = (split + 1) * blocks // count
    checks_row = r == ROWS - 1  # a spare row of the product sums the codes
    scaled = query.to(tl.float32) * scale
    weight = tl.where(in_width, 1 + d % 31, 0)
    block0 = (b * tl.num_programs(1) + h) * N
    codes_at = tier.k_codes + n[:, None] * D + d[None, :]
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
        bits = load_key_scales(tier.k_meta, place, SHAPE).to(tl.int32)
        codes = tl.load(codes_at + place * (BLOCK * D), mask=in_width[None, :], other=0)
        sides = scaled * bf16_value(bits)[None, :]
        if CHECKED:
            sides = tl.where(checks_row[:, None], weight.to(tl.float32)[None, :], sides)
        s = split_dot(sides, codes.to(QK).T, tl.zeros([ROWS, BLOCK], tl.float32), QK, MATH.PARTS)
        if CHECKED:
            sums_k += tl.sum(tl.where(checks_row[:, None], s, 0.0), 0).to(tl.int32)
            sums_s += bits & 0xFFFF
            stored += tl.load(tier.check + place * R.CHECK_FIELDS + R.CHECK_PASS)
        s += tl.load(scores.base + row.to(tl.int64) * N + j, mask=in_group, other=0.0)[:, None]
        if MATH.CAPPED:
            s = capped(s, cap)
        if rows.key_mask is not None:
            s = tl.where((tl.load(mask_at + low + j * BLOCK + n) != 0)[None, :], s, float("-inf"))
        best = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(best == float("-inf"), 0.0, best)
        # A NaN score may be dropped by the maximum; it comes back through p.
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        mass = tl.sum(p, 1)
        total = total * decay + mass
        log_at = scores.logs + row.to(tl.int64) * N + j
        tl.store(log_at, shift + tl.log2(mass), mask=in_group)
        square_at = scores.squares + row.to(tl.int64) * N + j
        tl.store(square_at, 2 * shift + tl.log2(tl.sum(p * p, 1)), mask=in_group)
        bytes_v, low_words, high_words = load_value_codes(tier.v_codes, tier.v_meta, place, SHAPE)
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
        summed = tl.sum(sums_k.to(tl.int64), 0)
        summed += tl.sum(sums_s.to(tl.int64) << 16 * (d % 2), 0)
        summed += tl.sum(tl.sum(sums_w.to(tl.int64), 1), 0)
        summed += tl.sum(tl.sum(tl.sum(sums_v, 2).to(tl.int64), 1), 0)
        taken = (last - first).to(tl.int64)
        summed += taken * R.CHECK_SEED + R.CHECK_STEP * (taken * first + taken * (taken - 1) // 2)
        faulty = (summed - stored) & 0xFFFFFFFF != 0
        group = b * tl.num_programs(1) + h
        tl.store(flags + group * R.FLAG_FIELDS + R.FLAG_CHECK, 1, mask=faulty)
    piece = row.to(tl.int64) * (count + 1) + split + 1
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(splits.lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    out_at = splits.out + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    mask = mask & (c + COLUMNS < D)[None, :]
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask)
