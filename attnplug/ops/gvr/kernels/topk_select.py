"""The parts of `topk` that one program does alone: select the best scores that it holds, do a short
row, sort the result. And what these parts share with the kernels of a long row.

Names: x is a score and i its index, n the length of a row, t a threshold, as on
docs/methods/topk.md.
`need` is how many scores are still to be selected. Thresholds are int32 keys that order like the
scores: NaN is -inf, -0.0 is 0.0.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.threshold import clean, keep_best, key_of, score_of

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
def pick(x, i, ok, count, need, indices, values, NORMAL: tl.constexpr):
    """Store the best `need` of the `count` scores x (clean, and -inf where not ok) with indices i,
    in the order of the tensors; of equals the first."""
    keep, _, rounds = keep_best(x, ok, count, need, NORMAL)
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
