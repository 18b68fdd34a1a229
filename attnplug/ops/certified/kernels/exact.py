"""The Triton kernels of `certified_attention` that read nothing but originals: what is not
quantized, and what is recomputed. To the base 2."""

from attnplug.ops.certified.kernels.replace import decided
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.kernels.tiles import arrived, capped, load_query, split_dot
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def load_values(v_at, tokens, v_s, seen, SHAPE: tl.constexpr):
    """Original values of some tokens as two tiles of half the channels."""
    COLUMNS: tl.constexpr = SHAPE.HALF * 16
    CP: tl.constexpr = SHAPE.HALF_P * 16
    c = tl.arange(0, CP)
    at = v_at + tokens.to(tl.int64)[:, None] * v_s + c[None, :]
    low = tl.load(at, mask=seen[:, None] & (c < COLUMNS)[None, :], other=0.0)
    there = (c < COLUMNS) & (c + COLUMNS < SHAPE.D)
    high = tl.load(at + COLUMNS, mask=seen[:, None] & there[None, :], other=0.0)
    return low, high


@triton.jit
def attend_exactly(
    query,
    k_at,
    v_at,
    k_s,
    v_s,
    begin,
    end,
    scale,
    cap,
    mask_at,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    MATH: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Online softmax over tokens begin..end-1 of the originals: (top, total, low and high sums,
    sums of norms, largest norm, reach). `reach` is the largest sum of |q||k|. Under a softcap it is
    raised, so that (D + DOT_EXTRA) DOT_SLACK times it has room for what `capped` loses. TOGETHER:
    `arrived` for its loads, where the compiler does not pipeline them."""
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    CP: tl.constexpr = SHAPE.HALF_P * 16
    n = tl.arange(0, TILE)
    d = tl.arange(0, SHAPE.DP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    norms = tl.zeros([ROWS], tl.float32)
    reach = tl.zeros([ROWS], tl.float32)
    widest = tl.zeros([TILE], tl.float32)
    low = tl.zeros([ROWS, CP], tl.float32)
    high = tl.zeros([ROWS, CP], tl.float32)
    for at in range(begin, end, TILE):
        seen = at + n < end
        if mask_at is not None:
            seen = seen & (tl.load(mask_at + at + n, mask=seen, other=0) != 0)
        tokens = at + n
        key = tl.load(
            k_at + tokens.to(tl.int64)[:, None] * k_s + d[None, :],
            mask=seen[:, None] & (d < D)[None, :],
            other=0.0,
        )
        value_low, value_high = load_values(v_at, tokens, v_s, seen, SHAPE)
        key, value_low = arrived(key, TOGETHER), arrived(value_low, TOGETHER)
        value_high = arrived(value_high, TOGETHER)
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        sizes = tl.dot(tl.abs(query), tl.abs(key).T, input_precision="ieee") * scale
        reach = tl.maximum(reach, tl.max(sizes, 1))
        if MATH.CAPPED:
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
        low = split_dot(p, value_low, low * decay[:, None], value_low.dtype, MATH.PARTS)
        high = split_dot(p, value_high, high * decay[:, None], value_high.dtype, MATH.PARTS)
    if MATH.CAPPED:
        reach += cap * (R.CAP_SLACK / ((D + R.DOT_EXTRA) * R.DOT_SLACK))
    return top, total, low, high, norms, tl.max(widest, 0), reach


@triton.jit
def attend_rest(
    q,
    cache,
    progress,
    rows,
    metadata_faults,
    flags,
    splits,
    rest_norms,
    scale,
    cap,
    count,
    programs,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MATH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one KV head against what is not quantized, as split 0 of the `count` + 1 pieces;
    sets its flags to what the `programs` of `prepare` have found. The pass over the blocks runs
    beside it."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    group = b * tl.num_programs(0) + h
    if PDL:
        gdc_wait()
    fault = 0
    if metadata_faults is not None:
        i = tl.arange(0, PROGRAMS)
        there = i < programs
        fault = tl.max(tl.load(metadata_faults + group * programs + i, mask=there, other=0), 0)
    tl.store(flags + group * R.FLAG_FIELDS + R.FLAG_SCORE, 0)
    tl.store(flags + group * R.FLAG_FIELDS + R.FLAG_CHECK, fault)
    if PDL:
        gdc_launch_dependents()
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(progress, b, length, low, SHAPE.BLOCK)
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    COLUMNS: tl.constexpr = SHAPE.HALF * 16
    CP: tl.constexpr = SHAPE.HALF_P * 16
    r = tl.arange(0, SHAPE.ROWS)
    c = tl.arange(0, CP)
    in_group = r < GROUP
    row = group.to(tl.int32) * GROUP + r
    query = load_query(q, b, h, GROUP, SHAPE)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    FITS: tl.constexpr = SHAPE.DP <= 128 and cache.k.dtype.element_ty.primitive_bitwidth == 16
    top, total, acc_low, acc_high, norms, widest, reach = attend_exactly(
        query,
        k_at=cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h,
        v_at=cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h,
        k_s=cache.k_s,
        v_s=cache.v_s,
        begin=low + blocks * SHAPE.BLOCK,
        end=length,
        scale=scale,
        cap=cap,
        mask_at=mask_at,
        SHAPE=SHAPE,
        TILE=TILE,
        MATH=MATH,
        TOGETHER=PDL and FITS,
    )
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    norms_at = rest_norms + row * R.REST_FIELDS
    tl.store(norms_at + R.REST_NORM, norms / divisor, mask=in_group)
    tl.store(norms_at + R.REST_WIDEST, tl.zeros([ROWS], tl.float32) + widest, mask=in_group)
    tl.store(norms_at + R.REST_REACH, reach, mask=in_group)
    piece = row.to(tl.int64) * (count + 1)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(splits.lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    out_at = splits.out + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask & (c + COLUMNS < D)[None, :])


@triton.jit
def recompute(
    q,
    cache,
    rows,
    rungs,
    raised,
    head_ends,
    pieces,
    exact_norms,
    scale,
    cap,
    tolerance,
    count,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    MATH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exact attention, in `count` pieces, of a KV head some of whose heads must be recomputed. All
    programs of a KV head decide that for themselves, and alike; the first writes it down."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, SHAPE.ROWS)
    in_group = r < GROUP
    head = h * GROUP + r
    row = (b * tl.num_programs(1) * GROUP + head).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    rung = decided(raised, head_ends, b * heads, heads, head, in_group, tolerance, HEADS)
    tl.store(rungs + row, rung, mask=in_group & (split == 0))
    if tl.max(tl.where(in_group, rung & (R.HEAD | R.ROW), 0), 0) == 0:
        return
    length, low = row_span(rows, b, STEPS)
    COLUMNS: tl.constexpr = SHAPE.HALF * 16
    CP: tl.constexpr = SHAPE.HALF_P * 16
    c = tl.arange(0, CP)
    query = load_query(q, b, h, GROUP, SHAPE)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    tiles = tl.cdiv(tl.maximum(length - low, 0), TILE)
    begin = low + split * tiles // count * TILE
    end = tl.minimum(low + (split + 1) * tiles // count * TILE, length)
    top, total, acc_low, acc_high, _norms, widest, reach = attend_exactly(
        query,
        k_at=cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h,
        v_at=cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h,
        k_s=cache.k_s,
        v_s=cache.v_s,
        begin=begin,
        end=end,
        scale=scale,
        cap=cap,
        mask_at=mask_at,
        SHAPE=SHAPE,
        TILE=TILE,
        MATH=MATH,
        TOGETHER=False,
    )
    piece = row * count + split
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    result = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(pieces.lse + piece, tl.where(empty, float("-inf"), result), mask=in_group)
    norms_at = exact_norms + piece * R.EXACT_FIELDS
    tl.store(norms_at + R.EXACT_WIDEST, tl.zeros([ROWS], tl.float32) + widest, mask=in_group)
    tl.store(norms_at + R.EXACT_REACH, reach, mask=in_group)
    out_at = pieces.out + piece[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low / divisor[:, None], mask=mask)
    tl.store(out_at + COLUMNS, acc_high / divisor[:, None], mask=mask & (c + COLUMNS < D)[None, :])
