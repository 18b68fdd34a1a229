"""The Triton kernels of `sketch` over pages that read codes: the scan, and attention to the
picks."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import online_softmax, softcap
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.sketch.kernels.attend import SUMS
from attnplug.ops.sketch.kernels.codes import (
    BINS,
    BLOCK,
    LARGEST,
    bin_of,
    capped,
    estimated,
    exp2,
    log2,
    near_block,
    normal_quantile,
    share,
    unpack_coarse,
    unpack_fine,
)
from attnplug.ops.sketch.kernels.prepare import store_partial

NONE = tl.constexpr(-1)  # of a list of picks


@triton.jit
def _weights_of(weights, row, band, GROUP: tl.constexpr, HEADS: tl.constexpr, CODE: tl.constexpr):
    """A group's weights of codes in a band: int8 [RP, HEADS] of both parts, unit and offset
    [HEADS]."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    R4P: tl.constexpr = 32 if R4 < 32 else R4
    g = tl.arange(0, HEADS)
    in_group = g < GROUP
    place = (row + g).to(tl.int64) * weights.bands + band
    own = weights.whole + place[None, :] * (R4 + R2)
    i = tl.arange(0, R4P)
    j = tl.arange(0, R2)
    fine = tl.load(own + i[:, None], mask=(i < R4)[:, None] & in_group[None, :], other=0)
    coarse = tl.load(own + R4 + j[:, None], mask=in_group[None, :] & (j >= 0)[:, None], other=0)
    unit = tl.load(weights.facts + place * 2, mask=in_group, other=0.0)
    offset = tl.load(weights.facts + place * 2 + 1, mask=in_group, other=0.0)
    return fine, coarse, unit, offset


@triton.jit
def _codes_at(sketch, at, seen, CODE: tl.constexpr, ASM: tl.constexpr):
    """The codes, int8, of tokens whose codes lie at `at` [N]."""
    f = tl.arange(0, CODE.R4 // 2)
    c = tl.arange(0, CODE.R2 // 4)
    fine_at = sketch.fine + at[:, None] * (CODE.R4 // 2) + f[None, :]
    coarse_at = sketch.coarse + at[:, None] * (CODE.R2 // 4) + c[None, :]
    fine = tl.load(fine_at, mask=seen[:, None], other=0)
    coarse = tl.load(coarse_at, mask=seen[:, None], other=0)
    return unpack_fine(fine, ASM), unpack_coarse(coarse, ASM)


@triton.jit
def scan(
    weights,
    fixed,
    sampled,
    sketch,
    cache,
    rows,
    scanned,
    estimate,
    v_mean,
    k,
    cap,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
    PER_BAND: tl.constexpr,
    PIECES: tl.constexpr,
    SAMPLES: tl.constexpr,
    SAMPLE: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
    STEPS: tl.constexpr,
):
    """EACH tokens of one row's KV head, a part of a band: shares, their histogram, and the sums of
    the estimated weights. The first program also leaves what the sample says of the row."""
    GROUP: tl.constexpr = SHAPE.GROUP
    PAGE: tl.constexpr = SHAPE.PAGE
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    row = place * GROUP
    length, _ = row_span(rows, b, STEPS)
    end = near_block(length, 0) * BLOCK
    first = part * EACH
    g = tl.arange(0, HEADS)
    in_group = g < GROUP
    sums = scanned.sums + ((row + g) * scanned.parts + part) * 2
    if (first >= end) & (part > 0):
        tl.store(sums, tl.zeros([HEADS], tl.float32), mask=in_group)
        tl.store(sums + 1, tl.zeros([HEADS], tl.float32), mask=in_group)
        return
    n_tokens = end - BLOCK
    # What the sample says: mean and variance of the scores before a cap.
    p = tl.arange(0, SAMPLES)
    D: tl.constexpr = SHAPE.D
    COLUMNS: tl.constexpr = 2 + D
    WIDE: tl.constexpr = 4 + D
    at = sampled.scores + ((row + g)[None, :].to(tl.int64) * SAMPLES + p[:, None]) * COLUMNS
    one = tl.sum(tl.load(at, mask=in_group[None, :] & (p >= 0)[:, None], other=0.0), 0)
    two = tl.sum(tl.load(at + 1, mask=in_group[None, :] & (p >= 0)[:, None], other=0.0), 0)
    count = tl.maximum(tl.minimum(n_tokens, SAMPLE), 1).to(tl.float32)
    mean = one / count
    variance = tl.maximum(two / count - mean * mean, 0.0)
    j = tl.arange(0, PIECES)
    known = tl.load(
        fixed.lse + (row + g).to(tl.int64)[None, :] * fixed.number + j[:, None],
        mask=in_group[None, :] & (j < fixed.number)[:, None],
        other=float("-inf"),
    )
    top = tl.max(known, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    # A NaN may be dropped by the maximum; it comes back through the sum.
    base = shift + log2(tl.sum(exp2(known - shift[None, :], ASM), 0), ASM)
    z = normal_quantile(k / tl.maximum(n_tokens, 1).to(tl.float32), ASM)
    likely = capped(mean + z * tl.sqrt(variance), cap, CAPPED) - base
    centre = tl.max(tl.where(in_group, likely, float("-inf")), 0)
    centre = tl.where(tl.abs(centre) < 1e30, centre, 0.0)
    if part == 0:
        tl.store(scanned.norm + row + g, base, mask=in_group)
        tl.store(scanned.middle + place, centre)
        d = tl.arange(0, SHAPE.DP)
        own_estimate = estimate + (row + g).to(tl.int64) * WIDE
        tl.store(own_estimate, tl.zeros([HEADS], tl.float32), mask=in_group)
        tl.store(own_estimate + 1, tl.zeros([HEADS], tl.float32), mask=in_group)
        tl.store(own_estimate + 2, mean, mask=in_group)
        tl.store(own_estimate + 3, tl.sqrt(variance), mask=in_group)
        total = tl.full([SHAPE.DP], 0.0, tl.float32)
        along = tl.full([HEADS, SHAPE.DP], 0.0, tl.float32)
        for i in range(SAMPLES):
            at_v = sampled.totals + (place * SAMPLES + i) * D + d
            total += tl.load(at_v, mask=d < D, other=0.0)
            at_s = sampled.scores + ((row + g).to(tl.int64) * SAMPLES + i) * COLUMNS + 2
            shown = in_group[:, None] & (d < D)[None, :]
            along += tl.load(at_s[:, None] + d[None, :], mask=shown, other=0.0)
        total = total / count
        tl.store(v_mean + place * D + d, total, mask=d < D)
        along = along / count - mean[:, None] * total[None, :]
        shown = in_group[:, None] & (d < D)[None, :]
        tl.store(own_estimate[:, None] + 4 + d[None, :], along, mask=shown)
    fine, coarse, unit, offset = _weights_of(weights, row, part // PER_BAND, GROUP, HEADS, CODE)
    base = tl.where(in_group, base, float("inf"))  # heads that pad the group have no share
    shift = offset if CAPPED else offset - base
    own_table = cache.table + b * cache.table_b
    shares = scanned.shares + place * rows.S
    bins = scanned.total + place * BINS
    reached = tl.cumsum(tl.load(bins + tl.arange(0, BINS)), 0, reverse=True)
    # Others have counted some already: a share that k tokens have reached is a lower bound.
    floor = tl.maximum(tl.sum((reached >= k).to(tl.int32), 0) - 1, 1)
    mass = tl.zeros([TILE, HEADS], tl.float32)
    moment = tl.zeros([TILE, HEADS], tl.float32)
    wrong = tl.zeros([TILE], tl.int32)
    last = tl.minimum(first + EACH, end)
    for n0 in tl.range(first, last, TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        token = n0 + tl.arange(0, TILE)
        seen = (token >= BLOCK) & (token < last)
        page = page_of(own_table, token, seen, PAGE)
        own = (page * tl.num_programs(1) + h) * PAGE + token % PAGE
        fine_codes, coarse_codes = _codes_at(sketch, own, seen, CODE, ASM)
        wrong |= tl.load(sketch.odd + own, mask=seen, other=0).to(tl.int32)
        s = estimated(fine_codes, coarse_codes, fine, coarse, unit, shift)
        limit = tl.where(seen, LARGEST, float("-inf"))[:, None]
        if CAPPED:
            e = exp2(tl.minimum(capped(s, cap, CAPPED) - base[None, :], limit), ASM)
        else:
            e = exp2(tl.minimum(s, limit), ASM)
        mass += e
        moment += e * s
        h_tile = share(e, ASM)
        tl.store(shares + token, h_tile, mask=seen)
        index = bin_of(h_tile, centre)
        tl.atomic_add(bins + index, 1, mask=seen & (index >= floor), sem="relaxed")
    visible = tl.maximum(last - tl.maximum(first, BLOCK), 0)
    tl.atomic_add(bins, visible, sem="relaxed")
    poison = tl.where(tl.max(wrong, 0) > 0, float("nan"), 0.0)
    tl.store(sums, tl.sum(mass, 0) + poison, mask=in_group)
    tl.store(sums + 1, tl.sum(moment, 0), mask=in_group)


@triton.jit
def attend(
    q,
    cache,
    weights,
    sketch,
    picks,
    cut,
    norm,
    pieces,
    pick_sums,
    scale,
    cap,
    room,
    capacity,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BAND: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """A group's queries against one piece of its picks, exactly and as the scan scored them. Picks
    ascend, so that a tile has few bands, and is scored by one after the other."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    PAGE: tl.constexpr = SHAPE.PAGE
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    row = place * GROUP
    r = tl.arange(0, ROWS)
    g = tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    in_group = r < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    k_at, v_at = begin_of(cache, 0, h)
    k_at, v_at = k_at + d[None, :], v_at + d[None, :]
    base = tl.load(norm + row + g, mask=g < GROUP, other=float("inf"))
    base_r = tl.load(norm + row + r, mask=in_group, other=float("inf"))
    edge = tl.load(cut + place * 3)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    moment = tl.zeros([HEADS], tl.float32)
    exact_low = tl.zeros([ROWS], tl.float32)
    guess_low = tl.zeros([HEADS], tl.float32)
    listed = picks + place * capacity
    own_table = cache.table + b * cache.table_b
    # Not pipelined: see `attend.attend`.
    for i in tl.range(0, TILES, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        slot = (piece * TILES + i) * TILE + tl.arange(0, TILE)
        at = tl.load(listed + slot, mask=slot < capacity, other=NONE)
        seen = (at >= 0) & (at < room)
        page = page_of(own_table, at, seen, PAGE)
        in_page = (at % PAGE).to(tl.int64)
        loadable = seen[:, None] & in_width[None, :]
        key_at = k_at + (page * cache.k_b + in_page * cache.k_s)[:, None]
        value_at = v_at + (page * cache.v_b + in_page * cache.v_s)[:, None]
        key = tl.load(key_at, mask=loadable, other=0.0)
        value = tl.load(value_at, mask=loadable, other=0.0)
        own = (page * tl.num_programs(1) + h) * PAGE + in_page
        fine_codes, coarse_codes = _codes_at(sketch, own, seen, CODE, ASM)
        band = at // BAND
        last = tl.max(tl.where(seen, band, -1), 0)
        guess = tl.zeros([TILE, HEADS], tl.float32)
        for one in tl.range(tl.min(tl.where(seen, band, last + 1), 0), last + 1, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            fine, coarse, unit, offset = _weights_of(weights, row, one, GROUP, HEADS, CODE)
            shift = offset if CAPPED else offset - base
            s = estimated(fine_codes, coarse_codes, fine, coarse, unit, shift)
            guess = tl.where((band == one)[:, None], s, guess)
        limit = tl.where(seen, LARGEST, float("-inf"))[:, None]
        if CAPPED:
            e = exp2(tl.minimum(capped(guess, cap, CAPPED) - base[None, :], limit), ASM)
        else:
            e = exp2(tl.minimum(guess, limit), ASM)
        # Heads that pad the group have -inf, or nothing where no band was looked at.
        e = tl.where((g < GROUP)[None, :], e, 0.0)
        guess = tl.where((g < GROUP)[None, :], guess, 0.0)
        lower = seen & (share(e, ASM).to(tl.float32) < edge)
        mass += tl.sum(e, 0)
        moment += tl.sum(e * guess, 0)
        guess_low += tl.sum(tl.where(lower[:, None], e, 0.0), 0)
        s = tl.dot(query, key.to(query.dtype).T, input_precision="ieee") * scale
        if CAPPED:
            s = softcap(s, cap)
        exact = tl.exp2(tl.minimum(s - base_r[:, None], LARGEST))
        exact_low += tl.sum(tl.where(lower[None, :], exact, 0.0), 1)
        s = tl.where(seen[None, :], s, float("-inf"))
        p, decay, top, total = online_softmax(s, top, total)
        weighed = acc * decay[:, None]
        acc = tl.dot(p.to(value.dtype), value, weighed, input_precision="ieee")
    out_at = (row + r) * pieces.number + piece
    store_partial(top, total, acc, pieces, out_at, d, in_group, in_width, D)
    sums = pick_sums + ((row + g) * pieces.number + piece) * SUMS
    tl.store(sums, mass, mask=g < GROUP)
    tl.store(sums + 1, moment, mask=g < GROUP)
    tl.store(pick_sums + ((row + r) * pieces.number + piece) * SUMS + 2, exact_low, mask=in_group)
    tl.store(sums + 3, guess_low, mask=g < GROUP)
