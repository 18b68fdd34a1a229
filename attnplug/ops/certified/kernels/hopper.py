"""The pass of `certified_attention` over the quantized blocks for Hopper (sm_90), in Gluon.

A program is one warp: nothing waits for another. The copy engine brings the next codes to shared
memory while a step's are multiplied, through tensor descriptors, in an order that lets threads read
without conflicts what they multiply (`hopper_tiles.py`). Loads by the threads themselves kept the
L1 busier than memory: each asked for many lines of 128 bytes, and used 64 of one. Copies further
ahead are unfair: more wait for memory than it needs to be busy, and some programs end late.

    scores   [16, tokens] = digits codes^T, integers: the query times the block's scales, as three
             digits of eight bits over a unit of its own; rows 0..7 heads and the highest digit,
             8..15 the middle one, and a second product for the lowest
    output   [D, 8] = v'^T p^T, with v' dequantized to float16

Row 7 sums the key codes for the check words. Products with codes are exact, and what three digits
leave of the query is less than what `_prepare` allows the sum of float products that the other
kernels have. `attend.attend` does the same for all else.
"""

from attnplug.ops.certified.kernels.hopper_tiles import (
    S_MMA,
    channels_first,
    eight_blocks,
    halves,
    key_tile,
    key_words,
    meta_lines,
    queries,
    query_tile,
    scale_pairs,
    scale_words,
    scores_of,
    two_rows,
    value_lines,
    value_places,
    value_tile,
    value_words,
)
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.hopper import copy_tile, gdc_launch_dependents, gdc_wait
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import fence_async_shared, gl, gluon, mbarrier, mma_v2

CHECK_ROW = gl.constexpr(7)  # of a tile of 8 query rows: a group has 7 heads at most
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.9 and 3.6


@gluon.jit
def _capped(s, cap):
    return cap * (1 - 2 / (gl.exp2(s * (2 * R.LOG2E) / cap) + 1))


@gluon.jit
def _metadata(meta_at, summary_at, check_at, j, last, D: gl.constexpr, PL: gl.constexpr):
    """Of blocks j [8] below `last`: words of scales and of zeros [8, D/2], those of the summary,
    weighted and summed, and the second check word [8]."""
    there = j < last
    c = gl.arange(0, D // 2, layout=gl.SliceLayout(0, PL))
    at = meta_at + j.to(gl.int64)[:, None] * D + c[None, :]
    scales = gl.load(at, mask=there[:, None], other=0)
    zeros = gl.load(at + D // 2, mask=there[:, None], other=0)
    at = summary_at + j.to(gl.int64) * R.SUMMARY_FIELDS
    summed = gl.load(at + R.ETA, mask=there, other=0)
    summed += 7 * gl.load(at + R.NU, mask=there, other=0)
    summed += 13 * gl.load(at + R.KEY_SPECTRUM, mask=there, other=0)
    summed += 19 * gl.load(at + R.VALUE_SPECTRUM, mask=there, other=0)
    stored = gl.load(
        check_at + j.to(gl.int64) * R.CHECK_FIELDS + R.CHECK_PREPARE, mask=there, other=0
    )
    return scales, zeros, summed, stored


@gluon.jit
def _prepare(
    query,
    meta_at,
    summary_at,
    check_at,
    base_at,
    delta_at,
    noise_at,
    first,
    last,
    cap,
    in_group,
    D: gl.constexpr,
    SL: gl.constexpr,
    PL: gl.constexpr,
    CAPPED: gl.constexpr,
):
    """`attend.prepare` for the blocks first..last-1 of one KV head, eight at a time; how
    many second check words did not fit. `query` [8, D] carries the scale."""
    A: gl.constexpr = gl.DotOperandLayout(0, S_MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S_MMA, 2)
    BLOCKS: gl.constexpr = gl.SliceLayout(1, PL)
    high = query.to(gl.bfloat16)
    low = (query - high.to(gl.float32)).to(gl.bfloat16)
    both = gl.reshape(gl.permute(gl.join(high, low), (2, 0, 1)), (16, D))
    both = gl.convert_layout(channels_first(both, 16, D), A)
    size = gl.abs(high.to(gl.float32)) * R.QUERY_CARE  # at least |query|
    size = size.to(gl.bfloat16)
    size = gl.reshape(gl.permute(gl.join(size, size), (2, 0, 1)), (16, D))
    size = gl.convert_layout(channels_first(size, 16, D), A)
    n = gl.arange(0, 8, layout=BLOCKS)
    c = gl.arange(0, D // 2, layout=gl.SliceLayout(0, PL))
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, SL))
    wrong = gl.full([8], 0, gl.int32, BLOCKS)
    ahead = _metadata(meta_at, summary_at, check_at, first + n, last, D, PL)
    for block in range(first, last, 8):
        j = block + n
        there = j < last
        scales, zeros, summed, stored = ahead
        ahead = _metadata(meta_at, summary_at, check_at, j + 8, last, D, PL)
        words = gl.sum((1 + 2 * c)[None, :] * (scales + 3 * zeros), 1)
        words += R.CHECK_SEED + R.CHECK_STEP * j + summed
        wrong += (there & (words != stored)).to(gl.int32)

        z = channels_first(halves(zeros, D), 8, D)
        x = channels_first(halves(scales, D), 8, D)
        z_size = gl.convert_layout(
            gl.permute((z & 0x7FFF).to(gl.bfloat16, bitcast=True), (1, 0)), B
        )
        z = gl.convert_layout(gl.permute(z.to(gl.bfloat16, bitcast=True), (1, 0)), B)
        x = gl.convert_layout(gl.permute(x.to(gl.bfloat16, bitcast=True), (1, 0)), B)
        nothing = gl.full([16, 8], 0.0, gl.float32, S_MMA)
        product = gl.sum(gl.reshape(mma_v2(both, z, nothing), (2, 8, 8)), 0)
        # both halves are the same
        half = gl.max(gl.reshape(mma_v2(size, x, nothing), (2, 8, 8)), 0) * 0.5
        reach = gl.max(gl.reshape(mma_v2(size, z_size, nothing), (2, 8, 8)), 0)
        product = gl.convert_layout(product, SL)
        half = gl.convert_layout(half, SL)
        reach = gl.convert_layout(reach, SL)
        noise = (D + R.DOT_EXTRA) * R.DOT_SLACK * (reach + R.CODE_REACH * half) + R.NOISE_FLOOR
        if CAPPED:
            noise += cap * R.CAP_SLACK
        place = (block + i).to(gl.int64)[None, :]
        mask = in_group[:, None] & (block + i < last)[None, :]
        gl.store(base_at[:, None] + place, product, mask=mask)
        gl.store(noise_at[:, None] + place, noise, mask=mask)
        gl.store(delta_at[:, None] + place, half * R.DELTA_CARE_16_BIT + noise, mask=mask)
    return gl.sum(wrong, 0)


@gluon.jit
def _bring(lines, rings, full, slot, token, STEP: gl.constexpr):
    """Have the codes and value scales of STEP tokens copied from `lines` to a slot of the `rings`;
    both in the order k_codes, v_codes, v_meta."""
    k_codes, v_codes, v_meta = lines
    k_ring, v_ring, m_ring = rings
    bar = full.index(slot)
    mbarrier.expect(bar, STEP * (128 + 64 + 32))
    copy_tile(k_codes, [token, 0], bar, k_ring.index(slot))
    copy_tile(v_codes, [token // 2, 0], bar, v_ring.index(slot))
    copy_tile(v_meta, [token // 4, 0], bar, m_ring.index(slot))


@gluon.jit
def attend_blocks(
    q,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    summary,
    check,
    progress,
    rows,
    scores,
    splits,
    flags,
    scale,
    cap,
    N,
    count,
    SHAPE: gl.constexpr,
    STEP: gl.constexpr,
    RING: gl.constexpr,
    CAPPED: gl.constexpr,
    CHECKED: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """All heads of one KV head against one of `count` splits of its quantized blocks; first what
    `attend.prepare` does for these. Compares the check words of its split. `k_codes`, `v_codes` and
    `v_meta` are descriptors of lines of 32 words (a token, two and four of D = 128), metadata of
    keys and summaries come as words. Split 0 of the pieces is what is not quantized
    (`attend_rest`)."""
    GROUP: gl.constexpr = SHAPE.GROUP
    D: gl.constexpr = SHAPE.D
    BLOCK: gl.constexpr = SHAPE.BLOCK
    XL: gl.constexpr = queries()
    SL: gl.constexpr = scores_of(STEP)
    VL: gl.constexpr = value_places(STEP)
    PL: gl.constexpr = eight_blocks()
    KL: gl.constexpr = key_words(STEP)
    LINES: gl.constexpr = value_lines(STEP)
    META: gl.constexpr = meta_lines(STEP)
    split = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    HALF: gl.constexpr = D // 32
    PARTS: gl.constexpr = BLOCK // STEP
    ML: gl.constexpr = gl.SliceLayout(2, VL)
    ROW: gl.constexpr = gl.SliceLayout(1, SL)
    QUARTER: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [0], [0], [0]], [], [], [4])
    if PDL:
        gdc_launch_dependents()
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    first = split * blocks // count
    last = (split + 1) * blocks // count
    group = b * gl.num_programs(1) + h

    r = gl.arange(0, 8, layout=ROW)
    row = group.to(gl.int32) * GROUP + r
    in_group = r < GROUP
    rx = gl.arange(0, 8, layout=gl.SliceLayout(1, XL))
    dx = gl.arange(0, D, layout=gl.SliceLayout(0, XL))
    q_at = q.at + b * q.b + (h * GROUP + rx).to(gl.int64)[:, None] * q.h + dx[None, :]
    shown = (rx < GROUP)[:, None] & (dx >= 0)[None, :]
    query = gl.load(q_at, mask=shown, other=0.0).to(gl.float32) * scale

    gamma = gl.arange(0, HALF, layout=gl.SliceLayout(0, ML))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, VL)))
    k_ring = gl.allocate_shared_memory(gl.int32, [RING, STEP, 32], k_codes.layout)
    v_ring = gl.allocate_shared_memory(gl.int32, [RING, STEP // 2, 32], v_codes.layout)
    m_ring = gl.allocate_shared_memory(gl.int32, [RING, STEP // 4, 32], v_meta.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    tiles = (last - first) * PARTS
    lines = (k_codes, v_codes, v_meta)
    rings = (k_ring, v_ring, m_ring)
    token = (group.to(gl.int32) * N + first) * BLOCK
    for i in gl.static_range(RING):
        if i < tiles:
            _bring(lines, rings, full, i, token + i * STEP, STEP)
    scales_at = k_meta + group * N * D + gl.arange(0, D // 2, layout=scale_pairs())
    at = gl.minimum(first, gl.maximum(last - 1, 0)).to(gl.int64)
    scales = gl.load(scales_at + at * D)
    base_at = scores.base + row.to(gl.int64) * N
    wrong = _prepare(
        query,
        meta_at=k_meta + group * N * D,
        summary_at=summary + group * N * R.SUMMARY_FIELDS,
        check_at=check + group * N * R.CHECK_FIELDS,
        base_at=base_at,
        delta_at=scores.delta + row.to(gl.int64) * N,
        noise_at=scores.noise + row.to(gl.int64) * N,
        first=first,
        last=last,
        cap=cap,
        in_group=in_group,
        D=D,
        SL=SL,
        PL=PL,
        CAPPED=CAPPED,
    )
    weight = (1 + dx % 31).to(gl.float32)
    query = gl.where((rx == CHECK_ROW)[:, None], weight[None, :], query)
    near = gl.allocate_shared_memory(gl.float32, [8, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    near.store(query)
    barrier()  # other threads have written the products of a program's blocks

    top = gl.full([8], float("-inf"), gl.float32, ROW)
    total = gl.full([8], 0.0, gl.float32, ROW)
    acc = gl.full([D, 8], 0.0, gl.float32, S_MMA)
    sums_k = gl.full([8, STEP], 0, gl.int32, SL)
    sums_s = gl.full([4], 0, gl.int32, QUARTER)
    sums_v = gl.full([STEP // 2, HALF, 4], 0, gl.int32, VL)
    sums_w = gl.full([STEP // 2, HALF], 0, gl.int32, ML)

    zero = gl.load(base_at + at, mask=in_group, other=0.0)
    slot = 0
    phase = 0
    ahead = RING
    for j in range(first, last):
        digits, rest, unit = query_tile(near.load(XL), scales, rx == CHECK_ROW, XL, PL, D)
        unit = gl.convert_layout(unit, ROW)[:, None]
        if CHECKED:
            own = gl.sum(gl.sum(gl.reshape(scales, (D // 64, 4, 8)), 2), 0)
            sums_s += gl.convert_layout(own, QUARTER)
        zero_now = zero[:, None]
        at = gl.minimum(j + 1, last - 1).to(gl.int64)
        scales = gl.load(scales_at + at * D)
        zero = gl.load(base_at + at, mask=in_group, other=0.0)
        held = gl.full([8], 0.0, gl.float32, ROW)
        held_squares = gl.full([8], 0.0, gl.float32, ROW)
        for _part in range(PARTS):
            mbarrier.wait(full.index(slot), phase)
            codes = k_ring.index(slot).load(KL)
            words = value_words(v_ring.index(slot).load(LINES), STEP)
            low_words, high_words = scale_words(m_ring.index(slot).load(META), STEP)
            barrier()
            if ahead < tiles:
                _bring(lines, rings, full, slot, token + ahead * STEP, STEP)
            ahead += 1
            slot += 1
            if slot == RING:
                slot = 0
                phase ^= 1

            keys = key_tile(codes, STEP, D)
            nothing = gl.full([16, STEP], 0, gl.int32, S_MMA)
            high, middle = two_rows(mma_v2(digits, keys, nothing), STEP)
            lowest, _nothing = two_rows(mma_v2(rest, keys, nothing), STEP)
            whole = gl.convert_layout(high * 256 + middle, SL)
            lowest = gl.convert_layout(lowest, SL)
            if CHECKED:
                sums_k += lowest
                even, odd = gl.split(words)
                sums_v += gl.convert_layout(even + odd, VL)
                sums_w += gl.convert_layout(gl.sum(low_words + 3 * high_words, 2), ML)
            s = whole.to(gl.float32) * (256 * unit) + (lowest.to(gl.float32) * unit + zero_now)
            if CAPPED:
                s = _capped(s, cap)
            best = gl.maximum(top, gl.convert_layout(gl.max(s, 1), ROW))
            shift = gl.where(best == float("-inf"), 0.0, best)
            # A NaN score may be dropped by the maximum; it comes back through p.
            p = gl.exp2(s - shift[:, None])
            decay = gl.exp2(top - shift)
            top = best
            mass = gl.convert_layout(gl.sum(p, 1), ROW)
            total = total * decay + mass
            held = held * decay + mass
            squares = gl.convert_layout(gl.sum(p * p, 1), ROW)
            held_squares = held_squares * (decay * decay) + squares
            values = value_tile(words, low_words, high_words, STEP, D)
            weights = gl.convert_layout(
                gl.permute(p.to(gl.float16), (1, 0)), gl.DotOperandLayout(1, S_MMA, 2)
            )
            acc *= gl.convert_layout(decay, gl.SliceLayout(0, S_MMA))[None, :]
            acc = mma_v2(values, weights, acc)
        shift = gl.where(top == float("-inf"), 0.0, top)
        gl.store(scores.logs + row.to(gl.int64) * N + j, shift + gl.log2(held), mask=in_group)
        square = 2 * shift + gl.log2(held_squares)
        gl.store(scores.squares + row.to(gl.int64) * N + j, square, mask=in_group)

    if PDL:
        gdc_wait()
    if CHECKED:
        summed = gl.sum(gl.where(r == CHECK_ROW, gl.sum(sums_k, 1), 0), 0)
        summed += gl.sum(sums_s, 0)
        column = (gamma[None, :] * 4)[:, :, None] + word[None, None, :]
        summed += gl.sum(gl.sum(gl.sum(sums_v * (1 + 2 * column), 2), 1), 0)
        summed += gl.sum(gl.sum(sums_w * (1 + 2 * gamma[None, :]), 1), 0)
        i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        stored = gl.full([32], 0, gl.int32, i.type.layout)
        for j in range(first, last, 32):
            mine = j + i < last
            words = gl.load(
                check + (group * N + j + i) * R.CHECK_FIELDS + R.CHECK_PASS, mask=mine, other=0
            )
            stored += words - gl.where(mine, R.CHECK_SEED + R.CHECK_STEP * (j + i), 0)
        faulty = (summed != gl.sum(stored, 0)) | (wrong > 0)
        gl.store(flags + group * R.FLAG_FIELDS + R.FLAG_CHECK, 1, mask=faulty)
    piece = row.to(gl.int64) * (count + 1) + split + 1
    empty = total == 0
    divisor = gl.where(empty, 1.0, total)
    result = gl.where(top == float("-inf"), 0.0, top) + gl.log2(divisor)
    gl.store(splits.lse + piece, gl.where(empty, float("-inf"), result), mask=in_group)
    m = gl.arange(0, D, layout=gl.SliceLayout(1, S_MMA))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, S_MMA))
    channel = m // 8 % 2 * (D // 2) + m % 8 * (D // 16) + m // 16
    row_g = (group.to(gl.int32) * GROUP + g).to(gl.int64)
    out_at = splits.out + ((row_g * (count + 1) + split + 1) * D)[None, :] + channel[:, None]
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(0, S_MMA))[None, :]
    gl.store(out_at, acc, mask=(g < GROUP)[None, :] & (m >= 0)[:, None])
