"""The kernel of `topk` for a short row: one program a row holds the scores in registers.

It counts the scores in nine bins, narrow enough that few scores share the bin of the k-th, and
ranks those few by pairwise comparison.

The bins lie around the k-th score predicted by a normal distribution. Each is WIDTH standard
deviations wide, of the number of scores that reach the predicted one. One pass counts them all, so
the program synchronizes its warps a fixed number of times: for mean and deviation, for the counts,
for the places and for the list. If the k-th is in no bin, another pass counts wider bins beside the
first; if too many scores share its bin, it counts narrower bins inside. After _PASSES passes
without success, `pick` brackets the k-th by rounds of thresholds (`narrow` in topk_select.py;
docs/methods/topk.md draws it).

A thread holds 4 neighbours of every 128: `[32 lanes, warps, 1 or 2 halves, 4 groups, 4]` in the
axes of the code below. Loads of scores and stores of results have these axes in the order that
makes Triton access 16 bytes a thread, without a conversion through shared memory: the two layouts
differ only in the order of registers. Where nothing else decides, Triton begins with the first axis
or, from 3.7 on, with the last.
"""

from attnplug.ops.common.triton import INSTALLED, gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels import topk_select as select
from attnplug.ops.gvr.kernels.topk_select import (
    CANDIDATES,
    IN_BIN,
    IN_BIN_SHIFT,
    PASSES,
    PATH,
    SURE,
    SURE_MASK,
    add_three,
    clean,
    length_of,
    pick,
    take_all,
)

TILE = 64  # scores of the list that are ranked at once
SHARE = 2  # one of so many scores is sampled for mean and deviation
WIDTH = 1.2  # of a bin; at this width a list rarely takes more than one tile
_TILE = tl.constexpr(TILE)
_PASSES = tl.constexpr(4)  # over the bins, before `pick` takes over
_BELOW, _ABOVE = tl.constexpr(0), tl.constexpr(10)  # the bins beside the nine
_ALL, _WHOLE_ROW = tl.constexpr(select.ALL), tl.constexpr(select.WHOLE_ROW)
# Whether Triton begins with the last axis, not the first.
LAST_FIRST = INSTALLED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
_LAST_FIRST = tl.constexpr(LAST_FIRST)
# 2**23: adding it to a small float rounds that to an integer, which the low bits then hold.
_MAGIC = tl.constexpr(8388608.0)
_MAGIC_BITS = tl.constexpr(0x4B000000)
_EMPTY = tl.constexpr((-0x800000 << 32) | 0x7FFFFFFF)  # -inf at no index: after all others


@triton.jit
def add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def memory_axes(x):
    """Convert between the axes of the code and those of memory accesses."""
    if _LAST_FIRST:
        return tl.trans(x, 4, 3, 2, 1, 0)
    else:
        return x


@triton.jit
def thread_sum(x):
    """`[32, WARPS, HALVES, 4, 4]` -> `[WARPS, 32]`: the sum of each thread."""
    return tl.trans(tl.sum(tl.sum(tl.sum(x, 4), 3), 2))


@triton.jit
def _sum_bytes(x):
    """The sum of the four bytes of x."""
    x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
    return (x + (x >> 16)) & 0xFFFF


@triton.jit
def _sum_first_bytes(x, count):
    """The sum of the first `count` bytes of x, at most 3."""
    one = tl.where(count > 0, x & 255, 0)
    return one + tl.where(count > 1, (x >> 8) & 255, 0) + tl.where(count > 2, (x >> 16) & 255, 0)


# ---- the bin of the k-th ------------------------------------------------------------------------


@triton.jit
def _normal_bins(x, sampled, K, SHARE: tl.constexpr, WIDTH: tl.constexpr):
    """(scale, shift): `x * scale + shift`, rounded, is the bin of x. Were the scores normal, bin 5
    would hold the k-th. One of SHARE scores is sampled."""
    finite = sampled & (tl.abs(x) < 1e30)
    y = tl.where(finite, x, 0.0)
    count = tl.sum(thread_sum(finite.to(tl.float32)), 1)
    total = tl.sum(thread_sum(y), 1)
    squares = tl.sum(thread_sum(y * y), 1)
    count, total, squares = tl.reduce((count, total, squares), 0, add_three)
    mean = total / count
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    count *= SHARE
    fraction = K / count
    tail = tl.minimum(fraction, 1 - fraction)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))  # Abramowitz and Stegun, 26.2.22
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    density = 0.3989423 * tl.exp2(-0.72134752 * z * z) * count
    scale = density / (WIDTH * (tl.sqrt(K * (1 - fraction)) + 1) * deviation)
    return scale, 5.0 - (mean + deviation * tl.where(fraction < 0.5, z, -z)) * scale


@triton.jit
def usable_bins(scale, shift):
    """Whether the bins are finite and their numbers small enough to round by _MAGIC."""
    return (scale > 0) & (scale < 1e30) & (tl.abs(shift) < 2e6)


@triton.jit
def other_bins(scale, shift, kth_bin):
    """(scale, shift) of bins four times as wide, below the bins or above them; or of eight bins in
    place of the k-th's."""
    beside = (kth_bin == _BELOW) | (kth_bin == _ABOVE)
    edge = tl.where(kth_bin == _BELOW, 0.5, tl.where(kth_bin == _ABOVE, 9.5, kth_bin - 0.5))
    factor = tl.where(beside, 0.25, 8.0)
    return scale * factor, (shift - edge) * factor + tl.where(kth_bin == _BELOW, 9.5, 0.5)


@triton.jit
def _pass_edge(count, spare, kth_bin, below, upto):
    """Move past one edge between bins, which `count` scores lie below: if they are at most `spare`,
    the k-th is above the edge."""
    move = count <= spare
    below = tl.where(move, tl.maximum(below, count), below)
    upto = tl.where(move, upto, tl.minimum(upto, count))
    return kth_bin + move.to(tl.int32), below, upto


@triton.jit
def _pass_two_edges(counts, spare, kth_bin, below, upto):
    kth_bin, below, upto = _pass_edge(counts & 0xFFFF, spare, kth_bin, below, upto)
    return _pass_edge(counts >> 16, spare, kth_bin, below, upto)


@triton.jit
def find_bin(x, scale, shift, spare, SIZE: tl.constexpr):
    """(bins, kth_bin, below, upto): the bins of the scores x, 0 to 10, as floats _MAGIC further up;
    the bin of the score that `spare` scores are smaller than; how many scores are below that bin,
    and how many up to it.

    A thread counts in 64 bits, six bits for each bin but the last, as it holds at most 32 scores.
    The multiplication turns the counts into cumulative counts up to each bin."""
    bins = x * scale + (shift + _MAGIC)
    bins = tl.minimum(tl.maximum(bins, _MAGIC), _MAGIC + 10)  # NaN goes to the lowest
    bit = (bins.to(tl.int32, bitcast=True) - _MAGIC_BITS) * 6
    ones = tl.full(bins.shape, 1, tl.int64) << bit.to(tl.int64)
    counts = thread_sum(ones) * 0x0041041041041041
    low = counts.to(tl.int32)  # up to bins 0 to 4
    high = (counts >> 30).to(tl.int32)  # up to bins 5 to 9
    up_to_0_5 = tl.sum((low & 63) | ((high & 63) << 16), 1)
    up_to_1_6 = tl.sum(((low >> 6) & 63) | (((high >> 6) & 63) << 16), 1)
    up_to_2_7 = tl.sum(((low >> 12) & 63) | (((high >> 12) & 63) << 16), 1)
    up_to_3_8 = tl.sum(((low >> 18) & 63) | (((high >> 18) & 63) << 16), 1)
    up_to_4_9 = tl.sum(((low >> 24) & 63) | (((high >> 24) & 63) << 16), 1)
    up_to_0_5, up_to_1_6, up_to_2_7, up_to_3_8, up_to_4_9 = tl.reduce(
        (up_to_0_5, up_to_1_6, up_to_2_7, up_to_3_8, up_to_4_9), 0, add_five
    )
    kth_bin = up_to_0_5 * 0
    below = up_to_0_5 * 0
    upto = up_to_0_5 * 0 + SIZE
    kth_bin, below, upto = _pass_two_edges(up_to_0_5, spare, kth_bin, below, upto)
    kth_bin, below, upto = _pass_two_edges(up_to_1_6, spare, kth_bin, below, upto)
    kth_bin, below, upto = _pass_two_edges(up_to_2_7, spare, kth_bin, below, upto)
    kth_bin, below, upto = _pass_two_edges(up_to_3_8, spare, kth_bin, below, upto)
    kth_bin, below, upto = _pass_two_edges(up_to_4_9, spare, kth_bin, below, upto)
    return bins, kth_bin, below, upto


@triton.jit
def fits(kth_bin, below, upto, LIST: tl.constexpr):
    """Whether the list holds all scores of the k-th's bin. The bin above the nine is as good as any
    other; the one below them holds NaN too."""
    return (kth_bin > _BELOW) & (upto - below <= LIST)


# ---- places, and the list -----------------------------------------------------------------------


@triton.jit
def _places(flags, WARPS: tl.constexpr, HALVES: tl.constexpr):
    """For `[32, WARPS, HALVES, 4, 4]` flags, how many of the same kind (SURE or IN_BIN) come before
    each, in the low and the high half of its place. Sure scores count in the order of the row, so
    that neighbours are stored together; scores in the bin in an arbitrary order."""
    before = tl.cumsum(flags, 4) - flags
    of_group = tl.sum(flags, 4)
    group = tl.arange(0, 4)[None, None, None, :]
    # The counts of four groups in the bytes of a word: [HALVES, WARPS, 32].
    sure = tl.trans(tl.sum((of_group & SURE_MASK) << (8 * group), 3), 2, 1, 0)
    in_bin = tl.trans(tl.sum((of_group >> IN_BIN_SHIFT) << (8 * group), 3), 2, 1, 0)
    lane = tl.cumsum(sure, 2) - sure
    warp = tl.broadcast_to(tl.sum(sure, 2)[:, :, None], [HALVES, WARPS, 32])
    of_thread = tl.sum(_sum_bytes(sure) | (_sum_bytes(in_bin) << IN_BIN_SHIFT), 0)
    of_thread = tl.reshape(of_thread, [WARPS * 32])
    base = tl.reshape(tl.cumsum(of_thread, 0) - of_thread, [WARPS, 32])
    base = base - tl.sum(_sum_bytes(lane), 0)
    base = tl.trans(base)[:, :, None, None]
    if HALVES > 1:
        first = tl.arange(0, HALVES)[:, None, None] == 0
        first = tl.where(first, _sum_bytes(warp) + (_sum_bytes(in_bin) << IN_BIN_SHIFT), 0)
        second = tl.arange(0, HALVES)[None, None, :, None] > 0
        base += tl.where(second, tl.trans(tl.sum(first, 0))[:, :, None, None], 0)
    lane = tl.trans(lane, 2, 1, 0)[:, :, :, None]
    warp = tl.trans(warp, 2, 1, 0)[:, :, :, None]
    in_bin = tl.trans(in_bin, 2, 1, 0)[:, :, :, None]
    sure_before = ((lane >> (8 * group)) & 255) + _sum_first_bytes(warp, group)
    base += sure_before + (_sum_first_bytes(in_bin, group) << IN_BIN_SHIFT)
    return base[:, :, :, :, None] + before


@triton.jit
def _score_and_index(entry):
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), entry.to(tl.int32)


@triton.jit
def _rank_list(entries, count, need, indices, values):
    """Store the best `need` of the `count` entries of a list, best first and of equals the lower
    index: the place of an entry is the number of entries ahead of it. The list may have any order,
    and _TILE empty entries follow it."""
    e = tl.arange(0, _TILE)
    for tile in range(0, count, _TILE):
        x, i = _score_and_index(tl.load(entries + tile + e))
        before = tl.zeros([_TILE, _TILE], tl.int32)
        for other_tile in range(0, count, _TILE):
            other_x, other_i = _score_and_index(tl.load(entries + other_tile + e))
            other_x = other_x[:, None]
            larger, equal = other_x > x[None, :], other_x == x[None, :]
            ahead = larger | (equal & (other_i[:, None] < i[None, :]))
            before += ahead.to(tl.int32)
        rank = tl.sum(before, 0)
        kept = (tile + e < count) & (rank < need)
        tl.store(indices + rank, i, mask=kept)
        tl.store(values + rank, x + 0.0, mask=kept)


@triton.jit
def store_best(
    x,
    i,
    i_to_store,
    found,
    entries,
    indices,
    values,
    K,
    WARPS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Store the K best of the scores x with indices i, where `found`, of `find_bin`, fits the list.
    `i_to_store` is i with the axes of memory, `entries` the room for the list."""
    bins, kth_bin, below, upto = found
    SIZE: tl.constexpr = 512 * HALVES * WARPS
    count = upto - below
    kth_bins = kth_bin.to(tl.float32) + _MAGIC
    sure = bins > kth_bins
    in_bin = bins == kth_bins
    places = _places(tl.where(sure, SURE, tl.where(in_bin, IN_BIN, 0)), WARPS, HALVES)
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | i.to(tl.int64)
    place = memory_axes(places)
    entry_at = entries + (place >> IN_BIN_SHIFT)
    tl.store(entry_at, memory_axes(entry), mask=memory_axes(in_bin))
    tl.store(entries + count + tl.arange(0, _TILE), tl.full([_TILE], _EMPTY, tl.int64))
    to_out = place & SURE_MASK
    tl.store(indices + to_out, i_to_store, mask=memory_axes(sure))
    tl.store(values + to_out, memory_axes(x) + 0.0, mask=memory_axes(sure))
    tl.debug_barrier()  # other warps read what one has stored
    selected = SIZE - upto
    _rank_list(entries, count, K - selected, indices + selected, values + selected)


# ---- the row ------------------------------------------------------------------------------------


@triton.jit
def _load(x_at, i, n, N, lengths):
    """The scores, -inf from the row's end on. NaN and -0.0 stay."""
    if lengths is None:
        return tl.load(x_at + i, mask=i < N, other=float("-inf"))
    else:  # whole groups of four, so that a thread loads them together
        inside = (i < (n + 3) // 4 * 4) & (i < N)
        return tl.where(i < n, tl.load(x_at + i, mask=inside, other=float("-inf")), float("-inf"))


@triton.jit
def binned_row(
    scores,
    lengths,
    indices,
    values,
    stats,
    entries,
    N,
    scores_stride,
    K,
    K_PAD: tl.constexpr,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
    LIST: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select row r; `entries` `[LIST + TILE]` of each row is the room for its list."""
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * scores_stride
    indices += r * K
    values += r * K
    stats += r * 3
    entries += r * (LIST + _TILE)
    SIZE: tl.constexpr = 512 * HALVES * WARPS
    if n <= K:
        take_all(x_at, n, indices, values, K, K_PAD)
        tl.store(stats + PATH, _ALL)
        tl.store(stats + PASSES, 0)
    else:
        lane = tl.arange(0, 32)[:, None, None, None, None]
        warp = tl.arange(0, WARPS)[None, :, None, None, None]
        half = tl.arange(0, HALVES)[None, None, :, None, None]
        group = tl.arange(0, 4)[None, None, None, :, None]
        in_group = tl.arange(0, 4)[None, None, None, None, :]
        i = in_group + lane * 4 + group * 128 + half * 512 + warp * (512 * HALVES)
        i_to_store = memory_axes(i)
        x = memory_axes(_load(x_at, i_to_store, n, N, lengths))
        scale, shift = _normal_bins(x, in_group < 4 // SHARE, K, SHARE, WIDTH)
        usable = usable_bins(scale, shift)
        bins, kth_bin, below, upto = find_bin(x, scale, shift, SIZE - K, SIZE)
        rounds = n * 0 + 1
        while usable & ~fits(kth_bin, below, upto, LIST) & (rounds < _PASSES):
            scale, shift = other_bins(scale, shift, kth_bin)
            usable = usable_bins(scale, shift)
            bins, kth_bin, below, upto = find_bin(x, scale, shift, SIZE - K, SIZE)
            rounds += 1
        if usable & fits(kth_bin, below, upto, LIST):
            store_best(
                x=x,
                i=i,
                i_to_store=i_to_store,
                found=(bins, kth_bin, below, upto),
                entries=entries,
                indices=indices,
                values=values,
                K=K,
                WARPS=WARPS,
                HALVES=HALVES,
            )
        else:
            j = tl.arange(0, SIZE)
            cleaned = clean(tl.load(x_at + j, mask=j < n, other=float("-inf")))
            count = tl.full([], 0, tl.int32) + n
            rounds += pick(cleaned, j, j < n, count, K, indices=indices, values=values, NORMAL=True)
        tl.store(stats + PATH, _WHOLE_ROW)
        tl.store(stats + PASSES, rounds)
    tl.store(stats + CANDIDATES, n)
