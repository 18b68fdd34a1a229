"""A short row of `topk` by one program that holds it in registers, a bin of a histogram narrow
enough that those in it are ranked one against all.

The bins lie about the score that the k-th would be, were the finite scores normal; each is as wide
as WIDTH standard deviations of how many reach it. One pass counts them, so the program waits for
its warps a fixed number of times: for the mean and deviation, the counts, the places and the list.
Where the k-th is in no bin or too many share its bin, another pass counts wider bins beside them
or narrower ones in it; where three of these do not help, `pick` looks for it round after round.

A thread holds 4 neighbours of every 128: `[32 lanes, warps, 1 or 2, 4, 4]` in the order of the
code below. Scores are loaded and picks stored with the axes in the order that makes Triton load 16
bytes a thread, and store without a way through shared memory, as both layouts are then the same but
for the registers' order: where nothing tells axes apart, it begins with the first or the last.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.gvr.kernels import topk_select as select
from attnplug.ops.gvr.kernels.topk_select import add_three, clean, length_of, pick, take_all

TILE = 64  # of the list, ranked at once
SHARE = 2  # of so many scores one is sampled
WIDTH = 1.2  # so that a list rarely takes more than one tile
_TILE = tl.constexpr(TILE)
_PASSES = tl.constexpr(4)
_ALL, _WHOLE_ROW = tl.constexpr(select.ALL), tl.constexpr(select.WHOLE_ROW)
# Triton begins with the last axis, not the first.
LAST_FIRST = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
_LAST_FIRST = tl.constexpr(LAST_FIRST)
# In a float of this magnitude the low bits count whole numbers, and a sum with it rounds to them.
_MAGIC = tl.constexpr(8388608.0)
_MAGIC_BITS = tl.constexpr(0x4B000000)
_EMPTY = tl.constexpr((-0x800000 << 32) | 0x7FFFFFFF)  # -inf at no index: behind all others


@triton.jit
def _add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _turn(x):
    """Between the axes of the code and those of memory accesses."""
    if _LAST_FIRST:
        return tl.trans(x, 4, 3, 2, 1, 0)
    else:
        return x


@triton.jit
def _thread_sum(x):
    """[32, W, HALVES, 4, 4] -> [W, 32]: a sum in each thread."""
    return tl.trans(tl.sum(tl.sum(tl.sum(x, 4), 3), 2))


@triton.jit
def _four(x):
    """The sum of the four bytes of x."""
    x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
    return (x + (x >> 16)) & 0xFFFF


@triton.jit
def _first_bytes(x, i):
    """The sum of the first i bytes of x, i up to 3."""
    one = tl.where(i > 0, x & 255, 0)
    return one + tl.where(i > 1, (x >> 8) & 255, 0) + tl.where(i > 2, (x >> 16) & 255, 0)


# ---- the bin of the k-th ------------------------------------------------------------------------


@triton.jit
def _bell_bins(x, sampled, K, SHARE: tl.constexpr, WIDTH: tl.constexpr):
    """scale, shift: `x * scale + shift`, rounded, is the bin of x, 5 that of the k-th, were the
    scores normal. Of the scores 1 of SHARE is sampled."""
    finite = sampled & (tl.abs(x) < 1e30)
    y = tl.where(finite, x, 0.0)
    count = tl.sum(_thread_sum(finite.to(tl.float32)), 1)
    total = tl.sum(_thread_sum(y), 1)
    squares = tl.sum(_thread_sum(y * y), 1)
    count, total, squares = tl.reduce((count, total, squares), 0, add_three)
    mean = total / count
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    count *= SHARE
    part = K / count
    tail = tl.minimum(part, 1 - part)
    t = tl.sqrt(-1.3862943611198906 * tl.log2(tail))  # Abramowitz and Stegun, 26.2.22
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    density = 0.3989423 * tl.exp2(-0.72134752 * z * z) * count
    scale = density / (WIDTH * (tl.sqrt(K * (1 - part)) + 1) * deviation)
    return scale, 5.0 - (mean + deviation * tl.where(part < 0.5, z, -z)) * scale


@triton.jit
def _usable(scale, shift):
    return (scale > 0) & (scale < 1e30) & (tl.abs(shift) < 2e6)


@triton.jit
def _other_bins(scale, shift, b):
    """Four times as wide below the bins or above them, or the bin b in eight."""
    at = tl.where(b == 0, 0.5, tl.where(b == 10, 9.5, b - 0.5))
    factor = tl.where((b == 0) | (b == 10), 0.25, 8.0)
    return scale * factor, (shift - at) * factor + tl.where(b == 0, 9.5, 0.5)


@triton.jit
def _edge(count, spare, b, below, upto):
    few = count <= spare
    below = tl.where(few, tl.maximum(below, count), below)
    upto = tl.where(few, upto, tl.minimum(upto, count))
    return b + few.to(tl.int32), below, upto


@triton.jit
def _two_edges(counts, spare, b, below, upto):
    b, below, upto = _edge(counts & 0xFFFF, spare, b, below, upto)
    return _edge(counts >> 16, spare, b, below, upto)


@triton.jit
def _find_bin(x, scale, shift, spare, SIZE: tl.constexpr):
    """The bins of the scores x, 0 to 10, as floats _MAGIC further up; the one of the score with
    `spare` smaller ones, how many are below that bin, and how many up to it.

    A thread counts in 64 bits, six a bin but the last: no more than 32 scores are its own. The
    product turns them into counts up to each bin."""
    y = x * scale + (shift + _MAGIC)
    y = tl.minimum(tl.maximum(y, _MAGIC), _MAGIC + 10)  # NaN goes to the lowest
    place = (y.to(tl.int32, bitcast=True) - _MAGIC_BITS) * 6
    counts = _thread_sum(tl.full(y.shape, 1, tl.int64) << place.to(tl.int64)) * 0x0041041041041041
    a = counts.to(tl.int32)
    z = (counts >> 30).to(tl.int32)
    c0 = tl.sum((a & 63) | ((z & 63) << 16), 1)
    c1 = tl.sum(((a >> 6) & 63) | (((z >> 6) & 63) << 16), 1)
    c2 = tl.sum(((a >> 12) & 63) | (((z >> 12) & 63) << 16), 1)
    c3 = tl.sum(((a >> 18) & 63) | (((z >> 18) & 63) << 16), 1)
    c4 = tl.sum(((a >> 24) & 63) | (((z >> 24) & 63) << 16), 1)
    c0, c1, c2, c3, c4 = tl.reduce((c0, c1, c2, c3, c4), 0, _add_five)
    b = c0 * 0
    below = c0 * 0
    upto = c0 * 0 + SIZE
    b, below, upto = _two_edges(c0, spare, b, below, upto)
    b, below, upto = _two_edges(c1, spare, b, below, upto)
    b, below, upto = _two_edges(c2, spare, b, below, upto)
    b, below, upto = _two_edges(c3, spare, b, below, upto)
    b, below, upto = _two_edges(c4, spare, b, below, upto)
    return y, b, below, upto


@triton.jit
def _found(b, below, upto, LIST: tl.constexpr):
    """Few share the bin; that above all bins is as good as any, the one below holds NaN too."""
    return (b > 0) & (upto - below <= LIST)


# ---- places, and the list -----------------------------------------------------------------------


@triton.jit
def _places(flag, W: tl.constexpr, HALVES: tl.constexpr):
    """`[32, W, HALVES, 4, 4]` of flags, 1: above, 2**16: in the bin, else 0. How many flags of its
    kind are before each, in the low and the high half of its place: of those above in the order of
    the row, so that neighbours are stored together; of those in the bin in any."""
    before = tl.cumsum(flag, 4) - flag
    each = tl.sum(flag, 4)
    i = tl.arange(0, 4)[None, None, None, :]
    # Four counts in the bytes of a word: [HALVES, W, 32].
    above = tl.trans(tl.sum((each & 0xFFFF) << (8 * i), 3), 2, 1, 0)
    inside = tl.trans(tl.sum((each >> 16) << (8 * i), 3), 2, 1, 0)
    lane = tl.cumsum(above, 2) - above
    warp = tl.broadcast_to(tl.sum(above, 2)[:, :, None], [HALVES, W, 32])
    mine = tl.reshape(tl.sum(_four(above) | (_four(inside) << 16), 0), [W * 32])
    base = tl.reshape(tl.cumsum(mine, 0) - mine, [W, 32]) - tl.sum(_four(lane), 0)
    base = tl.trans(base)[:, :, None, None]
    if HALVES > 1:
        first = tl.arange(0, HALVES)[:, None, None] == 0
        first = tl.where(first, _four(warp) + (_four(inside) << 16), 0)
        second = tl.arange(0, HALVES)[None, None, :, None] > 0
        base += tl.where(second, tl.trans(tl.sum(first, 0))[:, :, None, None], 0)
    lane = tl.trans(lane, 2, 1, 0)[:, :, :, None]
    warp = tl.trans(warp, 2, 1, 0)[:, :, :, None]
    inside = tl.trans(inside, 2, 1, 0)[:, :, :, None]
    base += ((lane >> (8 * i)) & 255) + _first_bytes(warp, i) + (_first_bytes(inside, i) << 16)
    return base[:, :, :, :, None] + before


@triton.jit
def _score_and_index(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32)


@triton.jit
def _rank_list(words, m, need, out_i, out_x):
    """Store the best `need` of the m scores of a list, in any order, best first and of equals the
    lower index: the place of each is the number of those before it. Behind them lie _TILE empty
    ones."""
    q = tl.arange(0, _TILE)
    for at in range(0, m, _TILE):
        x, i = _score_and_index(tl.load(words + at + q))
        before = tl.zeros([_TILE, _TILE], tl.int32)
        for other in range(0, m, _TILE):
            y, j = _score_and_index(tl.load(words + other + q))
            y = y[:, None]
            ahead = (y > x[None, :]) | ((y == x[None, :]) & (j[:, None] < i[None, :]))
            before += ahead.to(tl.int32)
        rank = tl.sum(before, 0)
        kept = (at + q < m) & (rank < need)
        tl.store(out_i + rank, i, mask=kept)
        tl.store(out_x + rank, x + 0.0, mask=kept)


# ---- the row ------------------------------------------------------------------------------------


@triton.jit
def _load(x_at, i, n, N, lengths):
    """The scores, -inf behind the row's end; as they are, NaN and -0.0 too."""
    if lengths is None:
        return tl.load(x_at + i, mask=i < N, other=float("-inf"))
    else:  # whole groups of four, so that a thread loads them together
        inside = (i < (n + 3) // 4 * 4) & (i < N)
        return tl.where(i < n, tl.load(x_at + i, mask=inside, other=float("-inf")), float("-inf"))


@triton.jit
def binned_row(
    scores, lengths, out_i, out_x, stats, words, N, x_r,
    K, K_PAD: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr, LIST: tl.constexpr,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, LENGTH_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    out_i += r * K
    out_x += r * K
    stats += r * 3
    words += r * (LIST + _TILE)
    SIZE: tl.constexpr = 512 * HALVES * W
    if n <= K:
        take_all(x_at, n, out_i, out_x, K, K_PAD)
        tl.store(stats, _ALL)
        tl.store(stats + 1, 0)
    else:
        lane = tl.arange(0, 32)[:, None, None, None, None]
        warp = tl.arange(0, W)[None, :, None, None, None]
        half = tl.arange(0, HALVES)[None, None, :, None, None]
        group = tl.arange(0, 4)[None, None, None, :, None]
        q = tl.arange(0, 4)[None, None, None, None, :]
        i = q + lane * 4 + group * 128 + half * 512 + warp * (512 * HALVES)
        at = _turn(i)
        x = _turn(_load(x_at, at, n, N, lengths))
        scale, shift = _bell_bins(x, q < 4 // SHARE, K, SHARE, WIDTH)
        usable = _usable(scale, shift)
        y, b, below, upto = _find_bin(x, scale, shift, SIZE - K, SIZE)
        rounds = n * 0 + 1
        while usable & ~_found(b, below, upto, LIST) & (rounds < _PASSES):
            scale, shift = _other_bins(scale, shift, b)
            usable = _usable(scale, shift)
            y, b, below, upto = _find_bin(x, scale, shift, SIZE - K, SIZE)
            rounds += 1
        if usable & _found(b, below, upto, LIST):
            m = upto - below
            bin_y = b.to(tl.float32) + _MAGIC
            above = y > bin_y
            inside = y == bin_y
            places = _places(tl.where(above, 1, tl.where(inside, 0x10000, 0)), W, HALVES)
            word = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | i.to(tl.int64)
            place = _turn(places)
            tl.store(words + (place >> 16), _turn(word), mask=_turn(inside))
            tl.store(words + m + tl.arange(0, _TILE), tl.full([_TILE], _EMPTY, tl.int64))
            tl.store(out_i + (place & 0xFFFF), at, mask=_turn(above))
            tl.store(out_x + (place & 0xFFFF), _turn(x) + 0.0, mask=_turn(above))
            tl.debug_barrier()  # other warps read what one has stored
            above_it = SIZE - upto
            _rank_list(words, m, K - above_it, out_i + above_it, out_x + above_it)
        else:
            j = tl.arange(0, SIZE)
            v = clean(tl.load(x_at + j, mask=j < n, other=float("-inf")))
            rounds += pick(v, j, j < n, tl.full([], 0, tl.int32) + n, K, out_i, out_x, True)
        tl.store(stats, _WHOLE_ROW)
        tl.store(stats + 1, rounds)
    tl.store(stats + 2, n)
