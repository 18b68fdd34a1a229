"""The Triton kernels of `topk`, in the order in which they run (topk.py says what they compute).

A row longer than one program can hold goes through three of them, several programs a row:

    verify   guesses a range of scores from the hint and counts the row's scores in its bins
    collect  finds the bin that holds the k-th score; what lies above it is sure and goes to the
             output, what lies in it goes to a list
    refine   one program a row: selects the rest from the list, or, where the list overflowed,
             searches the row for a threshold first

`whole_row` does a short row alone, in registers. `order` sorts the picks when asked to.

Scores are compared as int32 keys that order like the scores: NaN is -inf, -0.0 is 0.0. Programs of
a row learn their places in its output by looking back at what the programs before them counted,
so that lists and picks stand in the same order in every run. Programs start in the order of
their number (decoupled look-back as in CUB relies on the same), so nobody waits for one that
cannot start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Word of a program of `collect`: ready, sure scores, scores in the bin. No overflow: 31 bits each.
_READY = tl.constexpr(1 << 62)
_LOW = tl.constexpr((1 << 31) - 1)
_LEAST = tl.constexpr(-0x7F800001)  # key of -inf
_MOST = tl.constexpr(0x7F800000)  # key of +inf
_EMPTY = tl.constexpr(-(2**63))
_HUGE = tl.constexpr(1e30)  # a mask in disguise: no part of a guess

# Rows of stats.
ALL, WHOLE_ROW, GVR, RADIX = range(4)
_ALL, _WHOLE_ROW, _GVR, _RADIX = (tl.constexpr(path) for path in range(4))


# ---- scores, keys, bins -------------------------------------------------------------------------


@triton.jit
def _clean(x):
    return tl.where(x == x, x, float("-inf")) + 0.0


@triton.jit
def _key(x):
    """int32 that orders like the clean score x."""
    u = x.to(tl.int32, bitcast=True)
    return u ^ ((u >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    u = key ^ ((key >> 31) & 0x7FFFFFFF)
    return u.to(tl.float32, bitcast=True)


@triton.jit
def _bin(x, low, scale, BINS: tl.constexpr):
    """Bin of a clean score: 0 below the range, BINS - 1 above it. Monotone in x, whatever the
    range, which is all that exactness asks."""
    b = (x - low) * scale
    return tl.minimum(tl.maximum(b, -1.0), BINS - 2.0).to(tl.int32) + 1


@triton.jit
def _length(lengths, r, N, LENGTH_STEP):
    n = N
    if lengths is not None:
        n = tl.minimum(tl.maximum(tl.load(lengths + r * LENGTH_STEP), 0), N).to(tl.int32)
    return n


@triton.jit
def _take_all(x_at, n, out_i, out_x, K, K_PAD: tl.constexpr):
    """The row is no longer than k: all of it, then -1."""
    q = tl.arange(0, K_PAD)
    x = _clean(tl.load(x_at + q, mask=(q < n) & (q < K), other=float("-inf")))
    tl.store(out_i + q, tl.where(q < n, q, -1), mask=q < K)
    tl.store(out_x + q, x, mask=q < K)


# ---- thresholds ---------------------------------------------------------------------------------


@triton.jit
def _cut(low, high, part, linear):
    """A key between low and high (exclusive), `part` fifths of the way: of the scores' way where
    `linear`, of the keys' way otherwise, which halves what is left whatever the scores are."""
    key = low + (high - low) * part // 5
    a = _score(low.to(tl.int32))
    z = _score((high - 1).to(tl.int32))
    x = a + (z - a) * (part * 0.2)
    key = tl.where(linear & (tl.abs(x) < float("inf")), _key(x + 0.0).to(tl.int64), key)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _tighten(low, high, at_low, at_high, t, count, need):
    """count = number of keys >= t. Keeps at_low >= need > at_high."""
    enough = count >= need
    low = tl.where(enough, tl.maximum(low, t), low)
    at_low = tl.where(enough, tl.minimum(at_low, count), at_low)
    high = tl.where(enough, high, tl.minimum(high, t))
    at_high = tl.where(enough, at_high, tl.maximum(at_high, count))
    return low, high, at_low, at_high


@triton.jit
def _four(key, ok, t1, t2, t3, t4):
    """Which of four thresholds each key reaches, as four 16-bit counts."""
    return (
        (ok & (key >= t1.to(tl.int32))).to(tl.int64)
        + ((ok & (key >= t2.to(tl.int32))).to(tl.int64) << 16)
        + ((ok & (key >= t3.to(tl.int32))).to(tl.int64) << 32)
        + ((ok & (key >= t4.to(tl.int32))).to(tl.int64) << 48)
    )


@triton.jit
def _narrow(key, ok, m, need):
    """Keys low, high of the m keys that are ok: fewer than `need` are >= high, and those that are
    >= low are just as many as needed, or all those between are equal. Also the rounds it took."""
    low = tl.min(tl.where(ok, key, _MOST), 0).to(tl.int64)
    high = tl.max(tl.where(ok, key, _LEAST), 0).to(tl.int64) + 1
    at_low = m
    at_high = m * 0
    rounds = m * 0
    while (at_low > need) & (high - low > 1):
        linear = rounds < 3
        if rounds >= 3:  # no easy row: equal scores with nothing between must not take 14 rounds
            between = ok & (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
            low = tl.min(tl.where(between, key, _MOST), 0).to(tl.int64)
            high = tl.max(tl.where(between, key, _LEAST), 0).to(tl.int64) + 1
        t1 = _cut(low, high, 1, linear)
        t2 = _cut(low, high, 2, linear)
        t3 = _cut(low, high, 3, linear)
        t4 = _cut(low, high, 4, linear)
        c = tl.sum(_four(key, ok, t1, t2, t3, t4), 0)
        low, high, at_low, at_high = _tighten(
            low, high, at_low, at_high, t1, (c & 0xFFFF).to(tl.int32), need
        )
        low, high, at_low, at_high = _tighten(
            low, high, at_low, at_high, t2, ((c >> 16) & 0xFFFF).to(tl.int32), need
        )
        low, high, at_low, at_high = _tighten(
            low, high, at_low, at_high, t3, ((c >> 32) & 0xFFFF).to(tl.int32), need
        )
        low, high, at_low, at_high = _tighten(
            low, high, at_low, at_high, t4, ((c >> 48) & 0xFFFF).to(tl.int32), need
        )
        rounds += 1
    return low, high, rounds


@triton.jit
def _pick(x, i, ok, m, need, out_i, out_x):
    """Store the best `need` of the m scores x (clean) with indices i that are ok, in the order of
    the tensors (of equals the first): first those above the threshold, then those at it."""
    key = _key(x)
    low, high, rounds = _narrow(key, ok, m, need)
    above = ok & (key >= high.to(tl.int32))
    at = ok & (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
    flags = above.to(tl.int32) + (at.to(tl.int32) << 16)
    place = tl.cumsum(flags, 0)
    sure = tl.sum(flags, 0) & 0xFFFF
    keep = above | (at & ((place >> 16) <= need - sure))
    slot = tl.where(above, place & 0xFFFF, sure + (place >> 16)) - 1
    tl.store(out_i + slot, i, mask=keep)
    tl.store(out_x + slot, x, mask=keep)
    return rounds


# ---- a short row, alone -------------------------------------------------------------------------


@triton.jit
def whole_row(
    scores, lengths, out_i, out_x, stats, N, x_r,
    K, K_PAD: tl.constexpr, SIZE: tl.constexpr, LENGTH_STEP: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    n = _length(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    i = tl.arange(0, SIZE)
    x = tl.load(x_at + i, mask=i < n, other=float("-inf"))
    if n <= K:
        _take_all(x_at, n, out_i + r * K, out_x + r * K, K, K_PAD)
        tl.store(stats + r * 3, _ALL)
        tl.store(stats + r * 3 + 1, 0)
        tl.store(stats + r * 3 + 2, n)
    else:
        m = tl.full([], 0, tl.int32) + n
        rounds = _pick(_clean(x), i, i < n, m, K, out_i + r * K, out_x + r * K)
        tl.store(stats + r * 3, _WHOLE_ROW)
        tl.store(stats + r * 3 + 1, rounds)
        tl.store(stats + r * 3 + 2, n)


# ---- guess and verify ---------------------------------------------------------------------------


@triton.jit
def _outline(v, ok):
    """Least, mean, largest and number of the scores that are ok, without those that stand so far
    above the rest (an attention sink) that they alone would set the width of the bins."""
    count = tl.maximum(tl.sum(ok.to(tl.int32), 0), 1)
    mean = tl.sum(tl.where(ok, v, 0.0), 0) / count
    least = tl.min(tl.where(ok, v, float("inf")), 0)
    ok = ok & (v <= mean + 64 * (mean - least))
    count = tl.maximum(tl.sum(ok.to(tl.int32), 0), 1)
    mean = tl.sum(tl.where(ok, v, 0.0), 0) / count
    return least, mean, tl.max(tl.where(ok, v, float("-inf")), 0), count


@triton.jit
def _guess(x_at, hint_at, n, M, K, BINS: tl.constexpr, SAMPLE: tl.constexpr):
    """low and scale of bins in which to look for the row's k-th score, from the scores at the hint
    and from a sample of the row. Whatever comes out, the answer is exact; it may take longer."""
    e = 2 * tl.arange(0, SAMPLE).to(tl.int64) + 1
    s = _clean(tl.load(x_at + e * n // (2 * SAMPLE)))
    usable = tl.abs(s) < _HUGE
    bottom, mean, top, _ = _outline(s, usable)
    low = bottom
    high = top + 0.5 * (top - mean)  # the k-th may lie above all of the sample
    if hint_at is not None:
        j = tl.load(hint_at + e * M // (2 * SAMPLE))
        named = (j >= 0) & (j < n)
        v = _clean(tl.load(x_at + j, mask=named, other=float("-inf")))
        least, middle, most, hits = _outline(v, named & (tl.abs(v) < _HUGE))
        lowest = least - 0.15 * (most - least)
        # Are there k scores above it? A hint of few distinct or only the best scores has too few.
        seen = tl.sum((usable & (s >= lowest)).to(tl.int32), 0)
        few = seen.to(tl.float32) * n < 2.0 * K * SAMPLE
        low = tl.where(hits >= 8, tl.where(few, tl.minimum(lowest, mean), lowest), low)
        highest = tl.maximum(tl.minimum(most, middle + 8 * (middle - least)), top)
        high = tl.where(hits >= 8, highest, high)
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    width = tl.where(high > low, tl.minimum(high - low, 1e32), 0.0)
    return low, (BINS - 2) / tl.maximum(width, 1e-30)


@triton.jit
def _grouped(n, K, GROUP):
    """Whether the row has enough groups: the k-th of 2k group maxima still says something."""
    return n >= 2 * GROUP * K


@triton.jit
def _count(x, low, scale, BINS: tl.constexpr):
    b = _bin(x, low, scale, BINS)
    return tl.histogram(b, BINS, mask=b > 0)  # bin 0 has the most, and nobody asks for its count


@triton.jit
def _count_maxima(
    x, maxima, s, n, low, scale, BINS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr
):
    GROUPS: tl.constexpr = TILE // GROUP
    top = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
    g = s * GROUPS + tl.arange(0, GROUPS)
    tl.store(maxima + g, top, mask=g < tl.cdiv(n, GROUP))
    return _count(top, low, scale, BINS)


@triton.jit
def verify(
    scores, hint, lengths, edges, counts, words, maxima, N, M, collectors, groups_r, x_r, hint_r,
    P, K, BINS: tl.constexpr, SAMPLE: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, LENGTH_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c of P of row r: counts of its part of the row in each bin; with GROUP > 1 it counts
    (and keeps) only the maximum of every GROUP neighbours."""
    c = tl.program_id(0) % P
    r = (tl.program_id(0) // P).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    each = tl.cdiv(collectors, P)
    w = tl.arange(0, WORDS)
    mine = (w < each) & (c * each + w < collectors)
    tl.store(words + r * collectors + c * each + w, tl.zeros([WORDS], tl.int64), mask=mine)
    n = _length(lengths, r, N, LENGTH_STEP)
    if n > K:
        x_at = scores + r * x_r
        tiles = tl.cdiv(n, TILE)
        first = c * tl.cdiv(tiles, P)
        last = tl.minimum(first + tl.cdiv(tiles, P), tiles)
        lane = tl.arange(0, TILE)
        i = first * TILE + lane
        x = tl.load(x_at + i, mask=i < n, other=float("-inf"))
        hint_at = None
        if hint is not None:
            hint_at = hint + r * hint_r
        low, scale = _guess(x_at, hint_at, n, M, K, BINS, SAMPLE)
        if c == 0:
            tl.store(edges + r * 2, low)
            tl.store(edges + r * 2 + 1, scale)
        count = tl.zeros([BINS], tl.int32)
        for s in range(first, last):
            i = (s + 1) * TILE + lane  # the next tile is under way while this one is counted
            y = tl.load(x_at + i, mask=i < tl.minimum(last * TILE, n), other=float("-inf"))
            x = _clean(x)
            if GROUP > 1:
                if _grouped(n, K, GROUP):
                    count += _count_maxima(
                        x, maxima + r * groups_r, s, n, low, scale, BINS, TILE, GROUP
                    )
                else:
                    count += _count(x, low, scale, BINS)
            else:
                count += _count(x, low, scale, BINS)
            x = y
        # Saturated counts are still above any k.
        kept = tl.minimum(count, 32767).to(tl.int16)
        tl.store(counts + (r * P + c) * BINS + tl.arange(0, BINS), kept)


# ---- collect ------------------------------------------------------------------------------------


@triton.jit
def _flags(x, inside, j, low, scale, BINS: tl.constexpr):
    """1 for a score above bin j, 1 << 16 for one in it."""
    b = _bin(x, low, scale, BINS)
    return tl.where(inside, (b > j).to(tl.int32) + ((b == j).to(tl.int32) << 16), 0)


@triton.jit
def _spread(x, flags, low, high):
    """Least and largest key of the scores in the bin, with those seen before."""
    key = _key(x)
    low = tl.minimum(low, tl.min(tl.where(flags > 0xFFFF, key, _MOST), 0))
    high = tl.maximum(high, tl.max(tl.where(flags > 0xFFFF, key, _LEAST), 0))
    return low, high


@triton.jit
def _look_back(words, c, total, SLOTS: tl.constexpr):
    """Publish this program's (sure, in the bin) and return the sums of the programs before it."""
    sure = (total & 0xFFFFFFFF).to(tl.int64)
    tl.atomic_xchg(words + c, (sure << 31) + (total >> 32) + _READY, sem="relaxed")
    q = tl.arange(0, SLOTS)
    w = tl.load(words + q, mask=q < c, other=_READY, volatile=True)
    while tl.min(w, 0) == 0:
        w = tl.load(words + q, mask=q < c, other=_READY, volatile=True)
    before = tl.sum(w & (_READY - 1), 0)
    return (before >> 31).to(tl.int32), (before & _LOW).to(tl.int32)


@triton.jit
def _wide(flags):
    """Total of the flags as sure + (in the bin << 32)."""
    total = tl.sum(flags, 0)
    return (total & 0xFFFF).to(tl.int64) + ((total >> 16).to(tl.int64) << 32)


@triton.jit
def _write(
    x, i, flags, sure, inbin, out_i, out_x, list_i, list_x,
    K, CAPACITY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sure scores to the output, from place `sure` on, those in the bin to the list. Counting only
    maxima, more than k may be above the bin: these are then what is selected from."""
    place = tl.cumsum(flags, 0)
    a = sure + (place & 0xFFFF) - 1
    b = inbin + (place >> 16) - 1
    is_sure = (flags & 1) > 0
    tl.store(out_i + a, i, mask=is_sure & (a < K))
    tl.store(out_x + a, x, mask=is_sure & (a < K))
    if GROUP > 1:
        tl.store(list_i + a, i, mask=is_sure & (a < CAPACITY))
        tl.store(list_x + a, x, mask=is_sure & (a < CAPACITY))
    held = (flags > 0xFFFF) & (b < CAPACITY)
    tl.store(list_i + CAPACITY + b, i, mask=held)
    tl.store(list_x + CAPACITY + b, x, mask=held)
    total = tl.sum(flags, 0)
    return sure + (total & 0xFFFF), inbin + (total >> 16)


@triton.jit
def _find_bin(counts, r, K, BINS: tl.constexpr, P, P_PAD: tl.constexpr):
    """The bin that holds the k-th counted score, and how many it holds (0: not counted)."""
    p = tl.arange(0, P_PAD)
    t = tl.arange(0, BINS)
    h = tl.load(
        counts + (r * P + p[:, None]) * BINS + t[None, :], mask=p[:, None] < P, other=0,
        cache_modifier=".cg",
    )  # fmt: skip
    h = tl.sum(h.to(tl.int32), 0)
    reach = tl.sum(h, 0) - tl.cumsum(h, 0) + h  # in bin t and above
    j = tl.sum(((reach >= K) & (t > 0)).to(tl.int32), 0)  # bin 0 was not counted: it has the rest
    return j, tl.sum(tl.where(t == j, h, 0), 0)


@triton.jit
def _gather(x_at, named, s, hits, n, GROUP: tl.constexpr, BATCH: tl.constexpr):
    """The scores of BATCH of the named groups, in ascending order of their index."""
    e = s + tl.arange(0, BATCH)
    g = tl.load(named + e, mask=e < hits, other=0)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (e[:, None] < hits) & (i < n)
    x = tl.load(x_at + i, mask=inside, other=float("-inf"))
    SIZE: tl.constexpr = BATCH * GROUP
    return tl.reshape(_clean(x), [SIZE]), tl.reshape(i, [SIZE]), tl.reshape(inside, [SIZE])


@triton.jit
def _collect_groups(
    x_at, n, c, words, ranges, maxima, groups, j, low, scale, out_i, out_x, list_i, list_x,
    K, BINS: tl.constexpr, HERE: tl.constexpr, GROUP: tl.constexpr,
    BATCH: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Read the maxima of HERE groups, and of the row only the groups whose maximum qualifies."""
    g = c * HERE + tl.arange(0, HERE)
    inside = g < tl.cdiv(n, GROUP)
    top = tl.load(maxima + g, mask=inside, other=float("-inf"), cache_modifier=".cg")
    hit = (inside & (_bin(top, low, scale, BINS) >= j)).to(tl.int32)
    hits = tl.sum(hit, 0)
    named = groups + c * HERE
    tl.store(named + tl.cumsum(hit, 0) - 1, g, mask=hit > 0)
    tl.debug_barrier()  # below, other warps read what this one stored
    total = tl.full([], 0, tl.int64)
    key_low = tl.full([], _MOST, tl.int32)
    key_high = tl.full([], _LEAST, tl.int32)
    for s in range(0, hits, BATCH):
        x, i, inside = _gather(x_at, named, s, hits, n, GROUP, BATCH)
        f = _flags(x, inside, j, low, scale, BINS)
        total += _wide(f)
        key_low, key_high = _spread(x, f, key_low, key_high)
    tl.store(ranges, key_low)
    tl.store(ranges + 1, key_high)
    sure, inbin = _look_back(words, c, total, SLOTS)
    for s in range(0, hits, BATCH):
        x, i, inside = _gather(x_at, named, s, hits, n, GROUP, BATCH)
        f = _flags(x, inside, j, low, scale, BINS)
        sure, inbin = _write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, GROUP)


@triton.jit
def _collect_tiles(
    x_at, n, c, words, ranges, j, low, scale, crowded, out_i, out_x, list_i, list_x,
    K, BINS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Read TILES tiles of the row, twice: to count, and to write."""
    lane = tl.arange(0, TILE)
    first = c * TILES * TILE
    last = tl.minimum(first + TILES * TILE, n)
    total = tl.full([], 0, tl.int64)
    key_low = tl.full([], _MOST, tl.int32)
    key_high = tl.full([], _LEAST, tl.int32)
    for s in range(first, last, TILE):
        i = s + lane
        x = _clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
        f = _flags(x, i < n, j, low, scale, BINS)
        total += _wide(f)
        if crowded:
            key_low, key_high = _spread(x, f, key_low, key_high)
    tl.store(ranges, key_low)
    tl.store(ranges + 1, key_high)
    sure, inbin = _look_back(words, c, total, SLOTS)
    for s in range(first, last, TILE):
        i = s + lane
        x = _clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
        f = _flags(x, i < n, j, low, scale, BINS)
        sure, inbin = _write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, GROUP)


@triton.jit
def collect(
    scores, lengths, edges, counts, words, ranges, maxima, groups, list_i, list_x, out_i, out_x,
    N, groups_r, x_r,
    P, K, BINS: tl.constexpr, verifiers,
    VERIFIERS_PAD: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    BATCH: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program c of P of row r: its TILES * TILE scores."""
    c = tl.program_id(0) % P
    r = (tl.program_id(0) // P).to(tl.int64)
    n = _length(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    lane = tl.arange(0, TILE)
    first = c * TILES * TILE
    i = first + lane
    x = tl.zeros([TILE], tl.float32)
    if TILES == 1:  # the scores are an input: no need to wait for the counts
        x = tl.load(x_at + i, mask=i < n, other=float("-inf"))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n > K:
        low = tl.load(edges + r * 2, cache_modifier=".cg")
        scale = tl.load(edges + r * 2 + 1, cache_modifier=".cg")
        j, held = _find_bin(counts, r, K, BINS, verifiers, VERIFIERS_PAD)
        words += r * P
        ranges += (r * P + c) * 2
        list_i += r * 2 * CAPACITY
        list_x += r * 2 * CAPACITY
        out_i += r * K
        out_x += r * K
        crowded = (j == 0) | (held > CAPACITY)  # the list may overflow: refine wants its range
        if TILES == 1:
            x = _clean(x)
            f = _flags(x, i < n, j, low, scale, BINS)
            if crowded:
                key_low = tl.full([], _MOST, tl.int32)
                key_high = tl.full([], _LEAST, tl.int32)
                key_low, key_high = _spread(x, f, key_low, key_high)
                tl.store(ranges, key_low)
                tl.store(ranges + 1, key_high)
            sure, inbin = _look_back(words, c, _wide(f), SLOTS)
            _write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, GROUP)
        else:
            if GROUP > 1:
                if _grouped(n, K, GROUP):
                    _collect_groups(
                        x_at, n, c, words, ranges, maxima + r * groups_r, groups + r * groups_r,
                        j, low, scale, out_i, out_x, list_i, list_x,
                        K, BINS, TILE * TILES // GROUP, GROUP, BATCH, CAPACITY, SLOTS,
                    )  # fmt: skip
                else:
                    _collect_tiles(
                        x_at, n, c, words, ranges, j, low, scale, crowded,
                        out_i, out_x, list_i, list_x,
                        K, BINS, TILE, TILES, GROUP, CAPACITY, SLOTS,
                    )  # fmt: skip
            else:
                _collect_tiles(
                    x_at, n, c, words, ranges, j, low, scale, crowded,
                    out_i, out_x, list_i, list_x,
                    K, BINS, TILE, TILES, GROUP, CAPACITY, SLOTS,
                )  # fmt: skip


# ---- refine -------------------------------------------------------------------------------------


@triton.jit
def _search(
    x_at, n, low, high, at_low, at_high, out_i, out_x, list_i, list_x,
    K, CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Radix path: split the keys low..high in five, pass by pass over the row, until the part with
    the k-th fits the list, or is a single key. Then write output and list as collect would."""
    lane = tl.arange(0, TILE)
    passes = at_low * 0 + 1
    while (at_low - at_high > CAPACITY) & (high - low > 1):
        t1 = _cut(low, high, 1, False)
        t2 = _cut(low, high, 2, False)
        t3 = _cut(low, high, 3, False)
        t4 = _cut(low, high, 4, False)
        sums = tl.zeros([TILE], tl.int64)  # a lane sees n / TILE scores: 16 bits hold the count
        for s in range(0, n, TILE):
            i = s + lane
            x = _clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
            sums += _four(_key(x), i < n, t1, t2, t3, t4)
        c1 = tl.sum((sums & 0xFFFF).to(tl.int32), 0)
        c2 = tl.sum(((sums >> 16) & 0xFFFF).to(tl.int32), 0)
        c3 = tl.sum(((sums >> 32) & 0xFFFF).to(tl.int32), 0)
        c4 = tl.sum(((sums >> 48) & 0xFFFF).to(tl.int32), 0)
        low, high, at_low, at_high = _tighten(low, high, at_low, at_high, t1, c1, K)
        low, high, at_low, at_high = _tighten(low, high, at_low, at_high, t2, c2, K)
        low, high, at_low, at_high = _tighten(low, high, at_low, at_high, t3, c3, K)
        low, high, at_low, at_high = _tighten(low, high, at_low, at_high, t4, c4, K)
        passes += 1
    sure = at_low * 0
    inbin = at_low * 0
    for s in range(0, n, TILE):
        i = s + lane
        x = _clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
        key = _key(x)
        f = tl.where(key >= high.to(tl.int32), 1, tl.where(key >= low.to(tl.int32), 1 << 16, 0))
        f = tl.where(i < n, f, 0)
        sure, inbin = _write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, 1)
    return sure, inbin, passes


@triton.jit
def _from_list(list_i, list_x, m, need, out_i, out_x, SIZE: tl.constexpr):
    q = tl.arange(0, SIZE)
    i = tl.load(list_i + q, mask=q < m, other=0, cache_modifier=".cg")
    x = tl.load(list_x + q, mask=q < m, other=float("-inf"), cache_modifier=".cg")
    _pick(x, i, q < m, m, need, out_i, out_x)


@triton.jit
def refine(
    scores, lengths, words, ranges, list_i, list_x, out_i, out_x, stats, N, x_r,
    P, K, K_PAD: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr, SMALL: tl.constexpr, SLOTS: tl.constexpr, LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    n = _length(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    list_i += r * 2 * CAPACITY
    list_x += r * 2 * CAPACITY
    out_i += r * K
    out_x += r * K
    stats += r * 3
    if PDL:
        gdc_wait()
    if n <= K:
        _take_all(x_at, n, out_i, out_x, K, K_PAD)
        tl.store(stats, _ALL)
        tl.store(stats + 1, 0)
        tl.store(stats + 2, n)
    else:
        q = tl.arange(0, SLOTS)
        w = tl.load(words + r * P + q, mask=q < P, other=_READY, cache_modifier=".cg")
        counted = tl.sum(w & (_READY - 1), 0)
        sure = (counted >> 31).to(tl.int32)
        m = (counted & _LOW).to(tl.int32)
        at = tl.full([], CAPACITY, tl.int32)
        path = tl.full([], _GVR, tl.int32)
        passes = tl.full([], 1, tl.int32)
        candidates = sure + m
        low = tl.full([], _LEAST, tl.int64)
        high = tl.full([], _MOST + 1, tl.int64)
        at_low = tl.full([], 0, tl.int32) + n
        at_high = tl.full([], 0, tl.int32)
        if sure >= K:  # maxima were counted, and k scores are above the bin: select from those
            m = sure
            sure = at_high
            at = at_high
            candidates = m
        elif m > CAPACITY:
            key_low = tl.load(
                ranges + (r * P + q) * 2, mask=q < P, other=_MOST, cache_modifier=".cg"
            )
            key_high = tl.load(
                ranges + (r * P + q) * 2 + 1, mask=q < P, other=_LEAST, cache_modifier=".cg"
            )
            low = tl.min(key_low, 0).to(tl.int64)
            high = tl.max(key_high, 0).to(tl.int64) + 1
            at_low = sure + m
            at_high = sure
        # Equal scores need no search: the list has the first of them, which are the winners.
        if (m > CAPACITY) & (high - low > 1):
            sure, m, passes = _search(
                x_at, n, low, high, at_low, at_high, out_i, out_x, list_i, list_x,
                K, CAPACITY, TILE,
            )  # fmt: skip
            at = tl.full([], CAPACITY, tl.int32)
            path = tl.full([], _RADIX, tl.int32)
            candidates = sure + m
            tl.debug_barrier()
        m = tl.minimum(m, CAPACITY)
        need = K - sure
        if m <= SMALL:
            _from_list(list_i + at, list_x + at, m, need, out_i + sure, out_x + sure, SMALL)
        else:
            _from_list(list_i + at, list_x + at, m, need, out_i + sure, out_x + sure, CAPACITY)
        tl.store(stats, path)
        tl.store(stats + 1, passes)
        tl.store(stats + 2, candidates)


# ---- in order -----------------------------------------------------------------------------------


@triton.jit
def order(out_i, out_x, K, K_PAD: tl.constexpr):
    """Sort a row's picks: largest score first, of equals the lower index, -1 last."""
    r = tl.program_id(0).to(tl.int64)
    q = tl.arange(0, K_PAD)
    i = tl.load(out_i + r * K + q, mask=q < K, other=-1)
    x = tl.load(out_x + r * K + q, mask=q < K, other=float("-inf"))
    both = (_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)
    both = tl.sort(tl.where(i < 0, _EMPTY, both), descending=True)
    tl.debug_barrier()  # every warp has read before one of them writes
    empty = both == _EMPTY
    i = tl.where(empty, -1, 0x7FFFFFFF - (both & 0x7FFFFFFF).to(tl.int32))
    x = tl.where(empty, float("-inf"), _score((both >> 32).to(tl.int32)))
    tl.store(out_i + r * K + q, i, mask=q < K)
    tl.store(out_x + r * K + q, x, mask=q < K)
