"""How one program finds the k largest of the scores that it holds: it brackets the k-th by rounds
of thresholds and sorts nothing.

Names: x is a score and t a threshold. Thresholds are int32 keys that order like the scores: NaN is
-inf, -0.0 is 0.0. `need` is how many scores are to be found. docs/methods/topk.md draws a round.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-0x7F800001)  # key of -inf
MOST = tl.constexpr(0x7F800000)  # key of +inf


# ---- scores and keys ----------------------------------------------------------------------------


@triton.jit
def clean(x):
    """NaN becomes -inf, -0.0 becomes 0.0."""
    return tl.maximum(x, float("-inf")) + 0.0


@triton.jit
def key_of(x):
    """int32 that orders like the clean score x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The clean score of a key: `key_of` is its own inverse on the bits."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_three(a0, a1, a2, b0, b1, b2):
    """Combine function of a `tl.reduce` that adds up three tensors at once."""
    return a0 + b0, a1 + b1, a2 + b2


# ---- thresholds ---------------------------------------------------------------------------------


@triton.jit
def fifth(low, high, part):
    """The key at `part` fifths of the way from low to high (exclusive). Fifths of the keys, not of
    the scores: the interval shrinks whatever the distribution of the scores."""
    return tl.minimum(tl.maximum(low + (high - low) * part // 5, low + 1), high - 1)


@triton.jit
def _clamped_key(x, low, high):
    """Key of the score x, moved between low and high (exclusive)."""
    return tl.minimum(tl.maximum(key_of(x + 0.0).to(tl.int64), low + 1), high - 1)


@triton.jit
def tighten(low, high, at_low, at_high, t, count, need):
    """Move low or high to the threshold t, which `count` keys reach. Keeps the counts at both ends:
    at_low >= need > at_high."""
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
def _normal_quantile(rank, count, mean, deviation):
    """The score that `rank` of `count` normal scores reach (Abramowitz and Stegun, 26.2.22)."""
    fraction = tl.minimum(tl.maximum(rank, 0.5), count - 0.5) / count
    tail = tl.minimum(fraction, 1 - fraction)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    return mean + deviation * tl.where(fraction < 0.5, z, -z)


@triton.jit
def _reaches(x, t):
    """Which clean scores reach the key t. MOST + 1 is the key of a NaN, which no score reaches."""
    return x >= score_of(t.to(tl.int32))


@triton.jit
def _try(x, low, high, at_low, at_high, thresholds, need, TOGETHER: tl.constexpr):
    """Count the scores at four thresholds, two 16-bit counts a sum, and tighten by each."""
    t1, t2, t3, t4 = thresholds
    counts_1_2 = _reaches(x, t1).to(tl.int32) + (_reaches(x, t2).to(tl.int32) << 16)
    counts_3_4 = _reaches(x, t3).to(tl.int32) + (_reaches(x, t4).to(tl.int32) << 16)
    if TOGETHER:  # one synchronization of the program's warps instead of two
        counts_1_2, counts_3_4 = tl.reduce((counts_1_2, counts_3_4), 0, _add_two)
    else:
        counts_1_2 = tl.sum(counts_1_2, 0)
        counts_3_4 = tl.sum(counts_3_4, 0)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t1, counts_1_2 & 0xFFFF, need)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t2, counts_1_2 >> 16, need)
    low, high, at_low, at_high = tighten(low, high, at_low, at_high, t3, counts_3_4 & 0xFFFF, need)
    return tighten(low, high, at_low, at_high, t4, counts_3_4 >> 16, need)


@triton.jit
def _try_normal(x, low, high, at_low, at_high, need, normal, outer, inner):
    """Try the four thresholds that `outer` or `inner` more or fewer scores than needed would reach,
    were the scores normal; `normal` is their (count, mean, deviation)."""
    count, mean, deviation = normal
    t1 = _clamped_key(_normal_quantile(need + outer, count, mean, deviation), low, high)
    t2 = _clamped_key(_normal_quantile(need + inner, count, mean, deviation), low, high)
    t3 = _clamped_key(_normal_quantile(need - inner, count, mean, deviation), low, high)
    t4 = _clamped_key(_normal_quantile(need - outer, count, mean, deviation), low, high)
    return _try(x, low, high, at_low, at_high, (t1, t2, t3, t4), need, True)


@triton.jit
def _narrow(x, ok, count, need, NORMAL: tl.constexpr):
    """Bracket the k-th of the `count` scores that are ok (the others are -inf).
    docs/methods/topk.md draws a round.

    Returns keys low and high, the scores that reach each (at_low, at_high) and the rounds. Fewer
    scores than needed reach high. Exactly as many as needed reach low, or all between are equal.

    A round tries four thresholds around the place where the k-th would be. In the first round of a
    whole row (NORMAL) that place supposes normal scores, later scores spread evenly between the two
    known ends. The outer two thresholds lie about two standard deviations of the count away.
    Real scores are seldom normal: if the first round misses, the second goes further out. After a
    round that does not halve the candidates, thresholds are fifths of the true range, alternately
    of the scores and of their keys."""
    low = tl.full([], LEAST, tl.int64)
    high = tl.full([], MOST + 1, tl.int64)
    at_low = count
    at_high = count * 0
    rounds = count * 0
    stuck = rounds != 0
    if NORMAL:
        finite = tl.abs(x) < 1e15  # squares of larger ones overflow
        y = tl.where(finite, x, 0.0)
        finite_count, total, squares = tl.reduce((finite.to(tl.float32), y, y * y), 0, add_three)
        among = tl.maximum(finite_count, 1.0)
        mean = total / among
        deviation = tl.sqrt(tl.maximum(squares / among - mean * mean, 0.0))
        if (at_low > need) & (finite_count > 0):
            sigma = tl.sqrt(need * (1 - need / count)) + 1
            normal = (among, mean, deviation)
            low, high, at_low, at_high = _try_normal(
                x, low, high, at_low, at_high, need, normal, outer=2.2 * sigma, inner=0.7 * sigma
            )
            rounds += 1
            if at_low - at_high > 512:
                low, high, at_low, at_high = _try_normal(
                    x, low, high, at_low, at_high, need, normal, outer=7 * sigma, inner=2 * sigma
                )
                rounds += 1
        stuck = (at_low - at_high) * 2 > count
    while (at_low > need) & (high - low > 1):
        low_score = score_of(low.to(tl.int32))
        high_score = score_of((high - 1).to(tl.int32))
        if stuck | ~(tl.abs(high_score - low_score) < float("inf")):
            least, most = key_range(key_of(x), ok & _reaches(x, low) & ~_reaches(x, high))
            low = least.to(tl.int64)
            high = most.to(tl.int64) + 1
            low_score = score_of(least)
            high_score = score_of(most)
        before = at_low - at_high
        fraction = (at_low - need) / before  # of the candidates, those below the k-th
        sigma = tl.sqrt(fraction * (1 - fraction) / before) + 0.6 / before
        width = high_score - low_score
        if ~(width < float("inf")) | (stuck & (rounds % 2 == 0)):
            t1 = fifth(low, high, 1)
            t2 = fifth(low, high, 2)
            t3 = fifth(low, high, 3)
            t4 = fifth(low, high, 4)
        else:
            part_1 = tl.where(stuck, 0.2, tl.maximum(fraction - 1.5 * sigma, 0.0))
            t1 = _clamped_key(low_score + width * part_1, low, high)
            part_2 = tl.where(stuck, 0.4, tl.maximum(fraction - 0.3 * sigma, 0.0))
            t2 = _clamped_key(low_score + width * part_2, low, high)
            part_3 = tl.where(stuck, 0.6, tl.minimum(fraction + 0.3 * sigma, 1.0))
            t3 = _clamped_key(low_score + width * part_3, low, high)
            part_4 = tl.where(stuck, 0.8, tl.minimum(fraction + 1.5 * sigma, 1.0))
            t4 = _clamped_key(low_score + width * part_4, low, high)
        thresholds = (t1, t2, t3, t4)
        low, high, at_low, at_high = _try(x, low, high, at_low, at_high, thresholds, need, NORMAL)
        stuck = (at_low - at_high) * 2 > before
        rounds += 1
    return low, high, at_low, at_high, rounds


@triton.jit
def keep_best(x, ok, count, need, NORMAL: tl.constexpr):
    """(which scores are the best `need` of the `count` ones that are ok, a key that all of them
    reach, rounds). x is clean, and -inf where not ok; of equals the first are kept."""
    low, high, at_low, at_high, rounds = _narrow(x, ok, count, need, NORMAL)
    keep = ok & _reaches(x, low)
    if at_low > need:
        above = _reaches(x, high)
        first = tl.cumsum((keep & ~above).to(tl.int32), 0) <= need - at_high
        keep = above | (keep & first)
    return keep, low, rounds
