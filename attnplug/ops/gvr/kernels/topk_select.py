"""What one program of `topk` does alone: select the best of a short row, and sort the picks; and
what it shares with the programs of a long row.

Scores are compared as int32 keys that order like the scores: NaN is -inf, -0.0 is 0.0.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Word of a program of `collect`: ready, sure scores, scores in the bin. No overflow: 31 bits each.
READY = tl.constexpr(1 << 62)
LOW = tl.constexpr((1 << 31) - 1)
LEAST = tl.constexpr(-0x7F800001)  # key of -inf
MOST = tl.constexpr(0x7F800000)  # key of +inf
_EMPTY = tl.constexpr(-(2**63))

# The ways of a row, as stats has them.
ALL, WHOLE_ROW, GVR, RADIX = range(4)
_ALL, _WHOLE_ROW = tl.constexpr(ALL), tl.constexpr(WHOLE_ROW)


# ---- scores and keys ----------------------------------------------------------------------------


@triton.jit
def clean(x):
    """NaN becomes -inf, -0.0 becomes 0.0."""
    return tl.maximum(x, float("-inf")) + 0.0


@triton.jit
def key_of(x):
    """int32 that orders like the clean score x."""
    u = x.to(tl.int32, bitcast=True)
    return u ^ ((u >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    u = key ^ ((key >> 31) & 0x7FFFFFFF)
    return u.to(tl.float32, bitcast=True)


@triton.jit
def length_of(lengths, r, N, LENGTH_STEP):
    n = N
    if lengths is not None:
        n = tl.load(lengths + r * LENGTH_STEP, cache_modifier=".cg")
        n = tl.minimum(tl.maximum(n, 0), N).to(tl.int32)
    return n


@triton.jit
def take_all(x_at, n, out_i, out_x, K, K_PAD: tl.constexpr):
    """The row is no longer than k: all of it, then -1."""
    q = tl.arange(0, K_PAD)
    x = clean(tl.load(x_at + q, mask=(q < n) & (q < K), other=float("-inf")))
    tl.store(out_i + q, tl.where(q < n, q, -1), mask=q < K)
    tl.store(out_x + q, x, mask=q < K)


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


# ---- thresholds ---------------------------------------------------------------------------------


@triton.jit
def fifth(low, high, part):
    """A key between low and high (exclusive), `part` fifths of the keys' way: however the scores
    are spread, what is left shrinks."""
    return tl.minimum(tl.maximum(low + (high - low) * part // 5, low + 1), high - 1)


@triton.jit
def _cut(x, low, high):
    """Key of the score x, moved between low and high (exclusive)."""
    return tl.minimum(tl.maximum(key_of(x + 0.0).to(tl.int64), low + 1), high - 1)


@triton.jit
def tighten(low, high, at_low, at_high, t, count, need):
    """count = number of keys >= t. Keeps at_low >= need > at_high."""
    enough = count >= need
    low = tl.where(enough, tl.maximum(low, t), low)
    at_low = tl.where(enough, tl.minimum(at_low, count), at_low)
    high = tl.where(enough, high, tl.minimum(high, t))
    at_high = tl.where(enough, at_high, tl.maximum(at_high, count))
    return low, high, at_low, at_high


@triton.jit
def key_range(key, ok):
    """Least and largest of the keys that are ok."""
    return tl.min(tl.where(ok, key, MOST), 0), tl.max(tl.where(ok, key, LEAST), 0)


@triton.jit
def _bell(count, m, mean, deviation):
    """The score that `count` of m reach, were they a normal sample (Abramowitz and Stegun,
    26.2.22)."""
    part = tl.minimum(tl.maximum(count, 0.5), m - 0.5) / m
    tail = tl.minimum(part, 1 - part)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    return mean + deviation * tl.where(part < 0.5, z, -z)


@triton.jit
def _reach(x, t):
    """Which clean scores reach the key t; MOST + 1 is the key of a NaN, which none reaches."""
    return x >= score_of(t.to(tl.int32))


@triton.jit
def _try(x, low, high, at_low, at_high, t1, t2, t3, t4, need, TOGETHER: tl.constexpr):
    """Count the scores at four thresholds, two 16-bit counts a sum."""
    c = _reach(x, t1).to(tl.int32) + (_reach(x, t2).to(tl.int32) << 16)
    d = _reach(x, t3).to(tl.int32) + (_reach(x, t4).to(tl.int32) << 16)
    if TOGETHER:  # the program waits for its warps once, not twice
        c, d = tl.reduce((c, d), 0, _add_two)
    else:
        c = tl.sum(c, 0)
        d = tl.sum(d, 0)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t1, c & 0xFFFF, need)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t2, c >> 16, need)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t3, d & 0xFFFF, need)
    return tighten(low, high, at_low, at_high, t4, d >> 16, need)


@triton.jit
def _try_bell(
    x, low, high, at_low, at_high, need, count, mean, deviation, outer, inner
):  # fmt: skip
    """Four thresholds that `outer` or `inner` scores more or fewer than needed would reach, were
    they normal."""
    t1 = _cut(_bell(need + outer, count, mean, deviation), low, high)
    t2 = _cut(_bell(need + inner, count, mean, deviation), low, high)
    t3 = _cut(_bell(need - inner, count, mean, deviation), low, high)
    t4 = _cut(_bell(need - outer, count, mean, deviation), low, high)
    return _try(x, low, high, at_low, at_high, t1, t2, t3, t4, need, True)


@triton.jit
def _narrow(x, ok, m, need, BELL: tl.constexpr):
    """Keys low, high of the m scores that are ok (the others are -inf): at_high, fewer than needed,
    reach high; at_low reach low, and these are just as many as needed, or all between are equal.
    And the rounds.

    A round tries four thresholds about the place where the k-th would be, were the finite scores
    normal (the first round of a whole row) or evenly spread between the two that are known; the
    outer two at about twice its standard deviation. A bell fits real scores badly: where it misses,
    they are further out. Where a round does not halve what is left: fifths of the true range, in
    turn of the scores and of their keys."""
    low = tl.full([], LEAST, tl.int64)
    high = tl.full([], MOST + 1, tl.int64)
    at_low = m
    at_high = m * 0
    rounds = m * 0
    stuck = rounds != 0
    if BELL:
        finite = tl.abs(x) < 1e30
        y = tl.where(finite, x, 0.0)
        count, total, squares = tl.reduce((finite.to(tl.float32), y, y * y), 0, add_three)
        mean = total / count
        deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
        if (at_low > need) & (deviation < float("inf")):
            step = tl.sqrt(need * (1 - need / m)) + 1
            low, high, at_low, at_high = _try_bell(
                x, low, high, at_low, at_high, need, count, mean, deviation, 2.2 * step, 0.7 * step
            )
            rounds += 1
            if at_low - at_high > 512:
                low, high, at_low, at_high = _try_bell(
                    x, low, high, at_low, at_high, need, count, mean, deviation,
                    7 * step, 2 * step,
                )  # fmt: skip
                rounds += 1
        stuck = (at_low - at_high) * 2 > m
    while (at_low > need) & (high - low > 1):
        a = score_of(low.to(tl.int32))
        z = score_of((high - 1).to(tl.int32))
        if stuck | ~(tl.abs(z - a) < float("inf")):
            least, most = key_range(key_of(x), ok & _reach(x, low) & ~_reach(x, high))
            low = least.to(tl.int64)
            high = most.to(tl.int64) + 1
            a = score_of(least)
            z = score_of(most)
        before = at_low - at_high
        p = (at_low - need) / before  # of the way up
        step = tl.sqrt(p * (1 - p) / before) + 0.6 / before
        width = z - a
        if ~(width < float("inf")) | (stuck & (rounds % 2 == 0)):
            t1 = fifth(low, high, 1)
            t2 = fifth(low, high, 2)
            t3 = fifth(low, high, 3)
            t4 = fifth(low, high, 4)
        else:
            t1 = _cut(a + width * tl.where(stuck, 0.2, tl.maximum(p - 1.5 * step, 0.0)), low, high)
            t2 = _cut(a + width * tl.where(stuck, 0.4, tl.maximum(p - 0.3 * step, 0.0)), low, high)
            t3 = _cut(a + width * tl.where(stuck, 0.6, tl.minimum(p + 0.3 * step, 1.0)), low, high)
            t4 = _cut(a + width * tl.where(stuck, 0.8, tl.minimum(p + 1.5 * step, 1.0)), low, high)
        low, high, at_low, at_high = _try(
            x, low, high, at_low, at_high, t1, t2, t3, t4, need, BELL
        )  # fmt: skip
        stuck = (at_low - at_high) * 2 > before
        rounds += 1
    return low, high, at_low, at_high, rounds


@triton.jit
def pick(x, i, ok, m, need, out_i, out_x, BELL: tl.constexpr):
    """Store the best `need` of the m scores x (clean, and -inf where not ok) with indices i, in the
    order of the tensors; of equals the first."""
    low, high, at_low, at_high, rounds = _narrow(x, ok, m, need, BELL)
    keep = ok & _reach(x, low)
    if at_low > need:
        above = _reach(x, high)
        first = tl.cumsum((keep & ~above).to(tl.int32), 0) <= need - at_high
        keep = above | (keep & first)
    slot = tl.cumsum(keep.to(tl.int32), 0)
    slot = tl.where(keep, slot, 0).to(tl.int64)  # one conversion of layouts, not two
    tl.store(out_i + slot - 1, i, mask=slot > 0)
    tl.store(out_x + slot - 1, x, mask=slot > 0)
    return rounds


@triton.jit
def pick_list(list_i, list_x, m, need, out_i, out_x, SIZE: tl.constexpr):
    """`pick` of the m scores of a list. .cg: other multiprocessors may have written them."""
    q = tl.arange(0, SIZE)
    i = tl.load(list_i + q, mask=q < m, other=0, cache_modifier=".cg")
    x = tl.load(list_x + q, mask=q < m, other=float("-inf"), cache_modifier=".cg")
    pick(x, i, q < m, m, need, out_i, out_x, False)


# ---- a short row, alone -------------------------------------------------------------------------


@triton.jit
def whole_row(
    scores, lengths, out_i, out_x, stats, N, x_r,
    K, K_PAD: tl.constexpr, SIZE: tl.constexpr, LENGTH_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    i = tl.arange(0, SIZE)
    x = tl.load(x_at + i, mask=i < n, other=float("-inf"))
    if n <= K:
        take_all(x_at, n, out_i + r * K, out_x + r * K, K, K_PAD)
        tl.store(stats + r * 3, _ALL)
        tl.store(stats + r * 3 + 1, 0)
        tl.store(stats + r * 3 + 2, n)
    else:
        x = clean(x)
        out_i += r * K
        out_x += r * K
        m = tl.full([], 0, tl.int32) + n
        rounds = pick(x, i, i < n, m, K, out_i, out_x, True)
        tl.store(stats + r * 3, _WHOLE_ROW)
        tl.store(stats + r * 3 + 1, rounds)
        tl.store(stats + r * 3 + 2, n)


# ---- a list -------------------------------------------------------------------------------------


@triton.jit
def write(
    x, i, flags, sure, inbin, out_i, out_x, list_i, list_x,
    K, CAPACITY: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sure scores to the output, from place `sure` on, those in the bin to the list. Counting only
    maxima, more than k may be above the bin: these are then what is selected from."""
    place = tl.cumsum(flags, 0)
    a = tl.where((flags & 1) > 0, sure + (place & 0xFFFF) - 1, CAPACITY + K).to(tl.int64)
    b = tl.where(flags > 0xFFFF, inbin + (place >> 16) - 1, CAPACITY).to(tl.int64)
    tl.store(out_i + a, i, mask=a < K)
    tl.store(out_x + a, x, mask=a < K)
    if GROUP > 1:
        tl.store(list_i + a, i, mask=a < CAPACITY)
        tl.store(list_x + a, x, mask=a < CAPACITY)
    tl.store(list_i + CAPACITY + b, i, mask=b < CAPACITY)
    tl.store(list_x + CAPACITY + b, x, mask=b < CAPACITY)
    total = tl.sum(flags, 0)
    return sure + (total & 0xFFFF), inbin + (total >> 16)


# ---- in order -----------------------------------------------------------------------------------


@triton.jit
def order(out_i, out_x, K, K_PAD: tl.constexpr):
    """Sort a row's picks: largest score first, of equals the lower index, -1 last."""
    r = tl.program_id(0).to(tl.int64)
    q = tl.arange(0, K_PAD)
    i = tl.load(out_i + r * K + q, mask=q < K, other=-1)
    x = tl.load(out_x + r * K + q, mask=q < K, other=float("-inf"))
    both = (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)
    both = tl.sort(tl.where(i < 0, _EMPTY, both), descending=True)
    tl.debug_barrier()  # every warp has read before one of them writes
    empty = both == _EMPTY
    i = tl.where(empty, -1, 0x7FFFFFFF - (both & 0x7FFFFFFF).to(tl.int32))
    x = tl.where(empty, float("-inf"), score_of((both >> 32).to(tl.int32)))
    tl.store(out_i + r * K + q, i, mask=q < K)
    tl.store(out_x + r * K + q, x, mask=q < K)
