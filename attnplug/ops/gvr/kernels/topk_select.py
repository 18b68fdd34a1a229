"""The parts of `topk` that one program does alone: select the best scores that it holds, do a short
row, sort the result. And what these parts share with the kernels of a long row.

Names: x is a score and i its index, n the length of a row, t a threshold, as on
docs/methods/topk.md.
`need` is how many scores are still to be selected. Thresholds are int32 keys that order like the
scores: NaN is -inf, -0.0 is 0.0.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton

# ---- what kernels hand each other ---------------------------------------------------------------
#
# verify, collect and refine, of a long row, share these buffers; the shapes are those of one row:
#
#   edges   [2]                 at EDGE_LOW and EDGE_SCALE the bins' lower edge and 1 / width
#   counts  [verifiers, BINS]   scores, or maxima of groups, in each bin
#   words   [programs]          READY + (sure << SURE_SHIFT) + scores in the k-th's bin, of one
#                               program of collect; if none looks back, of the row, in word 0
#   ranges  [programs, 2]       at RANGE_LOW and RANGE_HIGH the least and largest key in that bin
#   lists   [2, CAPACITY]       the scores in that bin from BIN_LIST * CAPACITY on; before them, if
#                               maxima were counted, the sure ones
#
# "Sure" scores lie above the bin that holds the k-th counted score.
EDGE_LOW, EDGE_SCALE = tl.constexpr(0), tl.constexpr(1)
RANGE_LOW, RANGE_HIGH = tl.constexpr(0), tl.constexpr(1)
BIN_LIST = tl.constexpr(1)
READY = tl.constexpr(1 << 62)
SURE_SHIFT = tl.constexpr(31)  # 31 bits for each of the two counts: no overflow
COUNT_MASK = tl.constexpr((1 << 31) - 1)
# A flag of a score, and in the sums of flags the unit of each of two 16-bit counts.
SURE = tl.constexpr(1)
IN_BIN = tl.constexpr(1 << 16)
IN_BIN_SHIFT = tl.constexpr(16)
SURE_MASK = tl.constexpr(0xFFFF)

LEAST = tl.constexpr(-0x7F800001)  # key of -inf
MOST = tl.constexpr(0x7F800000)  # key of +inf
_EMPTY = tl.constexpr(-(2**63))

# The path of a row, as `stats` reports it.
ALL, WHOLE_ROW, GVR, RADIX = range(4)
_ALL, _WHOLE_ROW = tl.constexpr(ALL), tl.constexpr(WHOLE_ROW)
# The columns of `stats`.
PATH, PASSES, CANDIDATES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def store_stats(stats, path, passes, candidates):
    """The three columns of a row's `stats`."""
    tl.store(stats + PATH, path)
    tl.store(stats + PASSES, passes)
    tl.store(stats + CANDIDATES, candidates)


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
def length_of(lengths, r, N, LENGTH_STEP):
    """The length of row r, within the N scores of the buffer."""
    n = N
    if lengths is not None:
        n = tl.load(lengths + r * LENGTH_STEP, cache_modifier=".cg")
        n = tl.minimum(tl.maximum(n, 0), N).to(tl.int32)
    return n


@triton.jit
def take_all(x_at, n, indices, values, K, K_PAD: tl.constexpr):
    """Select a row no longer than k: all of it, then -1."""
    place = tl.arange(0, K_PAD)
    x = clean(tl.load(x_at + place, mask=(place < n) & (place < K), other=float("-inf")))
    tl.store(indices + place, tl.where(place < n, place, -1), mask=place < K)
    tl.store(values + place, x, mask=place < K)


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
def clamped_key(x, low, high):
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
def normal_quantile(rank, count, mean, deviation):
    """The score that `rank` of `count` normal scores reach (Abramowitz and Stegun, 26.2.22)."""
    fraction = tl.minimum(tl.maximum(rank, 0.5), count - 0.5) / count
    tail = tl.minimum(fraction, 1 - fraction)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    return mean + deviation * tl.where(fraction < 0.5, z, -z)


@triton.jit
def reaches(x, t):
    """Which clean scores reach the key t. MOST + 1 is the key of a NaN, which no score reaches."""
    return x >= score_of(t.to(tl.int32))


@triton.jit
def try_four(x, low, high, at_low, at_high, thresholds, need, TOGETHER: tl.constexpr):
    """Count the scores at four thresholds, two 16-bit counts a sum, and tighten by each."""
    t1, t2, t3, t4 = thresholds
    counts_1_2 = reaches(x, t1).to(tl.int32) + (reaches(x, t2).to(tl.int32) << 16)
    counts_3_4 = reaches(x, t3).to(tl.int32) + (reaches(x, t4).to(tl.int32) << 16)
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
    t1 = clamped_key(normal_quantile(need + outer, count, mean, deviation), low, high)
    t2 = clamped_key(normal_quantile(need + inner, count, mean, deviation), low, high)
    t3 = clamped_key(normal_quantile(need - inner, count, mean, deviation), low, high)
    t4 = clamped_key(normal_quantile(need - outer, count, mean, deviation), low, high)
    return try_four(x, low, high, at_low, at_high, (t1, t2, t3, t4), need, True)


@triton.jit
def narrow(x, ok, count, need, NORMAL: tl.constexpr):
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
        finite = tl.abs(x) < 1e30
        y = tl.where(finite, x, 0.0)
        finite_count, total, squares = tl.reduce((finite.to(tl.float32), y, y * y), 0, add_three)
        mean = total / finite_count
        deviation = tl.sqrt(tl.maximum(squares / finite_count - mean * mean, 0.0))
        if (at_low > need) & (deviation < float("inf")):
            sigma = tl.sqrt(need * (1 - need / count)) + 1
            normal = (finite_count, mean, deviation)
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
            least, most = key_range(key_of(x), ok & reaches(x, low) & ~reaches(x, high))
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
            t1 = clamped_key(low_score + width * part_1, low, high)
            part_2 = tl.where(stuck, 0.4, tl.maximum(fraction - 0.3 * sigma, 0.0))
            t2 = clamped_key(low_score + width * part_2, low, high)
            part_3 = tl.where(stuck, 0.6, tl.minimum(fraction + 0.3 * sigma, 1.0))
            t3 = clamped_key(low_score + width * part_3, low, high)
            part_4 = tl.where(stuck, 0.8, tl.minimum(fraction + 1.5 * sigma, 1.0))
            t4 = clamped_key(low_score + width * part_4, low, high)
        thresholds = (t1, t2, t3, t4)
        low, high, at_low, at_high = try_four(
            x, low, high, at_low, at_high, thresholds, need, NORMAL
        )
        stuck = (at_low - at_high) * 2 > before
        rounds += 1
    return low, high, at_low, at_high, rounds


@triton.jit
def pick(x, i, ok, count, need, indices, values, NORMAL: tl.constexpr):
    """Store the best `need` of the `count` scores x (clean, and -inf where not ok) with indices i,
    in the order of the tensors; of equals the first."""
    low, high, at_low, at_high, rounds = narrow(x, ok, count, need, NORMAL)
    keep = ok & reaches(x, low)
    if at_low > need:
        above = reaches(x, high)
        first = tl.cumsum((keep & ~above).to(tl.int32), 0) <= need - at_high
        keep = above | (keep & first)
    slot = tl.cumsum(keep.to(tl.int32), 0)
    slot = tl.where(keep, slot, 0).to(tl.int64)  # one conversion of layouts, not two
    tl.store(indices + slot - 1, i, mask=slot > 0)
    tl.store(values + slot - 1, x, mask=slot > 0)
    return rounds


@triton.jit
def pick_list(list_index, list_score, count, need, indices, values, SIZE: tl.constexpr):
    """`pick` of the `count` scores of a list. .cg: other multiprocessors may have written them."""
    e = tl.arange(0, SIZE)
    i = tl.load(list_index + e, mask=e < count, other=0, cache_modifier=".cg")
    x = tl.load(list_score + e, mask=e < count, other=float("-inf"), cache_modifier=".cg")
    pick(x, i, e < count, count, need, indices=indices, values=values, NORMAL=False)


# ---- a short row, alone -------------------------------------------------------------------------


@triton.jit
def whole_row(
    scores,
    lengths,
    indices,
    values,
    stats,
    N,
    scores_stride,
    K,
    K_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select row r by rounds of thresholds, the row's scores in registers."""
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * scores_stride
    i = tl.arange(0, SIZE)
    x = tl.load(x_at + i, mask=i < n, other=float("-inf"))
    if n <= K:
        take_all(x_at, n, indices + r * K, values + r * K, K, K_PAD)
        store_stats(stats + r * 3, _ALL, 0, n)
    else:
        x = clean(x)
        indices += r * K
        values += r * K
        count = tl.full([], 0, tl.int32) + n
        rounds = pick(x, i, i < n, count, K, indices=indices, values=values, NORMAL=True)
        store_stats(stats + r * 3, _WHOLE_ROW, rounds, n)


# ---- a list -------------------------------------------------------------------------------------


@triton.jit
def write(x, i, flags, sure, in_bin, out, lists, K, CAPACITY: tl.constexpr, GROUP: tl.constexpr):
    """Store sure scores to `out` = (indices, values) from place `sure` on, and scores in the bin to
    their list from place `in_bin` on; returns both places advanced. With GROUP > 1 only maxima were
    counted, and more than k scores may be sure: `refine` then selects from the list of these."""
    indices, values = out
    list_index, list_score = lists
    place = tl.cumsum(flags, 0)
    is_sure = (flags & SURE) > 0
    to_out = tl.where(is_sure, sure + (place & SURE_MASK) - 1, CAPACITY + K).to(tl.int64)
    is_in_bin = flags > SURE_MASK
    to_list = tl.where(is_in_bin, in_bin + (place >> IN_BIN_SHIFT) - 1, CAPACITY).to(tl.int64)
    tl.store(indices + to_out, i, mask=to_out < K)
    tl.store(values + to_out, x, mask=to_out < K)
    if GROUP > 1:
        tl.store(list_index + to_out, i, mask=to_out < CAPACITY)
        tl.store(list_score + to_out, x, mask=to_out < CAPACITY)
    tl.store(list_index + BIN_LIST * CAPACITY + to_list, i, mask=to_list < CAPACITY)
    tl.store(list_score + BIN_LIST * CAPACITY + to_list, x, mask=to_list < CAPACITY)
    total = tl.sum(flags, 0)
    return sure + (total & SURE_MASK), in_bin + (total >> IN_BIN_SHIFT)


# ---- in order -----------------------------------------------------------------------------------


@triton.jit
def order(indices, values, K, K_PAD: tl.constexpr):
    """Sort a row's result: largest score first, of equals the lower index, -1 last."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, K_PAD)
    i = tl.load(indices + r * K + place, mask=place < K, other=-1)
    x = tl.load(values + r * K + place, mask=place < K, other=float("-inf"))
    both = (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)
    both = tl.sort(tl.where(i < 0, _EMPTY, both), descending=True)
    tl.debug_barrier()  # every warp has read before one of them writes
    empty = both == _EMPTY
    i = tl.where(empty, -1, 0x7FFFFFFF - (both & 0x7FFFFFFF).to(tl.int32))
    x = tl.where(empty, float("-inf"), score_of((both >> 32).to(tl.int32)))
    tl.store(indices + r * K + place, i, mask=place < K)
    tl.store(values + r * K + place, x, mask=place < K)
