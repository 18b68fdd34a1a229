"""Online selection of the best key blocks, in Triton, M rows at once: the device part of
`../online_topk.py`, which defines the three algorithms and the order of their updates. The lowest
slot of a row's buffer is cached as (low, low_t, its place): score, block index, slot or leaf."""

from attnplug.ops.common.triton import tl, triton
from attnplug.ops.momo.online_topk import EMPTY

# The index of an empty slot. Buffers in registers and lists add the slot's distance from the last
# one, which makes the indices of a row distinct.
NO_BLOCK = tl.constexpr(EMPTY)


@triton.jit
def _erfinv(ratio):
    # erfinv(1 - 2 ratio), with the coefficients of online_topk.py written out
    w = -tl.log(tl.maximum(4.0 * ratio * (1.0 - ratio), 1e-30))
    a = w - 2.5
    p = 3.43273939e-07 + 2.81022636e-08 * a
    p = -3.5233877e-06 + p * a
    p = -4.39150654e-06 + p * a
    p = 0.00021858087 + p * a
    p = -0.00125372503 + p * a
    p = -0.00417768164 + p * a
    p = 0.246640727 + p * a
    p = 1.50140941 + p * a
    b = tl.sqrt(tl.maximum(w, 0.0)) - 3.0
    r = 0.000100950558 - 0.000200214257 * b
    r = 0.00134934322 + r * b
    r = -0.00367342844 + r * b
    r = 0.00573950773 + r * b
    r = -0.0076224613 + r * b
    r = 0.00943887047 + r * b
    r = 1.00167406 + r * b
    r = 2.83297682 + r * b
    return tl.where(w < 5.0, p, r) * (1.0 - 2.0 * ratio)


@triton.jit
def _beats(value, block, low, low_t):
    """Whether the offered block replaces the lowest one."""
    return (value > low) | ((value == low) & (block < low_t))


@triton.jit
def start_slots(K: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """Exact buffers [M, P] of K slots in registers, for small K; the P - K padding slots (+inf)
    are never the lowest."""
    slot = tl.arange(0, P)[None, :] + tl.zeros([M, P], tl.int32)
    s = tl.where(slot < K, float("-inf"), float("inf"))
    t = tl.where(slot < K, NO_BLOCK + P - slot, -1)
    return s, t


@triton.jit
def lowest(s, t):
    """Score and block index of each row's lowest slot."""
    low = tl.min(s, 1)
    return low, tl.max(tl.where(s == low[:, None], t, -1), 1)


@triton.jit
def offer_slots(value, block, offered, slots, lowest_slot):
    """`slots` are the buffers (s, t), `lowest_slot` is their (low, low_t). Returns both, and the
    losers."""
    s, t = slots
    low, low_t = lowest_slot
    took = offered & _beats(value, block, low, low_t)
    loser = tl.where(took, low, value)
    loser_t = tl.where(took, low_t, block)
    # No branch on "any row took": a reduction over the tile costs more than the update itself. The
    # block indices in a buffer are distinct: low_t identifies the slot.
    hit = took[:, None] & (t == low_t[:, None])
    s = tl.where(hit, value[:, None], s)
    t = tl.where(hit, block, t)
    low, low_t = lowest(s, t)
    return s, t, low, low_t, loser, loser_t


@triton.jit
def write_slots(s, t, INDEX, SCORE, exists, K: tl.constexpr, P: tl.constexpr):
    """The exact buffers to the first K slots of the rows' lists."""
    slot = tl.arange(0, P)[None, :]
    mask = exists[:, None] & (slot < K)
    tl.store(INDEX[:, None] + slot, tl.where(t >= NO_BLOCK, -1, t), mask=mask)
    tl.store(SCORE[:, None] + slot, s, mask=mask)


@triton.jit
def fill_lists(INDEX, SCORE, exists, first, K: tl.constexpr):
    """-1 and -inf in slots first (one for each row) to K - 1."""
    for origin in range(0, K, 32):
        slot = origin + tl.arange(0, 32)[None, :]
        mask = exists[:, None] & (slot >= first[:, None]) & (slot < K)
        tl.store(INDEX[:, None] + slot, tl.full(mask.shape, -1, tl.int32), mask=mask)
        tl.store(SCORE[:, None] + slot, tl.full(mask.shape, float("-inf"), tl.float32), mask=mask)


@triton.jit
def offer_exact(value, block, offered, lowest_slot, INDEX, SCORE, M: tl.constexpr, K: tl.constexpr):
    """The buffers are the rows' lists themselves, pointers [M]. Returns the (low, low_t, low_slot)
    that it got as `lowest_slot`, updated. The barriers order the stores to a row and its loads,
    which other threads may do."""
    low, low_t, low_slot = lowest_slot
    took = offered & _beats(value, block, low, low_t)
    if tl.max(took.to(tl.int32), 0) > 0:
        tl.store(SCORE + low_slot, value, mask=took)
        tl.store(INDEX + low_slot, block + tl.zeros_like(low_slot), mask=took)
        tl.debug_barrier()
        new, new_t = tl.full([M], float("inf"), tl.float32), tl.full([M], -1, tl.int32)
        new_slot = tl.zeros([M], tl.int32)
        for origin in range(0, K, 32):
            slot = origin + tl.arange(0, 32)[None, :]
            mask = took[:, None] & (slot < K)
            s = tl.load(SCORE[:, None] + slot, mask=mask, other=float("inf"))
            t = tl.load(INDEX[:, None] + slot, mask=mask, other=-2)
            t = tl.where(t == -1, NO_BLOCK + K - slot, t)
            least, least_t = lowest(s, t)
            here = (s == least[:, None]) & (t == least_t[:, None])
            least_slot = tl.max(tl.where(here, slot, 0), 1)
            better = (least < new) | ((least == new) & (least_t > new_t))
            new = tl.where(better, least, new)
            new_t = tl.where(better, least_t, new_t)
            new_slot = tl.where(better, least_slot, new_slot)
        tl.debug_barrier()
        low = tl.where(took, new, low)
        low_t = tl.where(took, new_t, low_t)
        low_slot = tl.where(took, new_slot, low_slot)
    return low, low_t, low_slot


@triton.jit
def offer_estimated(
    value, loser, offered, total, counts, INDEX, SCORE, K: tl.constexpr, EXACT_K: tl.constexpr
):
    """`loser` is its (score, block index), `total` the blocks that the row is offered in all.
    `counts` are blocks seen, losers appended, finite scores, their mean, and their sum of squared
    deviations; they are returned, updated. INDEX, SCORE: pointers [M] to the rows' lists; the
    kernel stores a loser there once and never reads it back."""
    loser_score, loser_t = loser
    seen, appended, finite, mean, squares = counts
    seen += offered.to(tl.int32)
    counted = offered & (value > float("-inf"))
    finite += counted.to(tl.float32)
    delta = tl.where(counted, value - mean, 0.0)
    mean += delta / tl.maximum(finite, 1.0)
    squares += delta * tl.where(counted, value - mean, 0.0)
    free = K - EXACT_K - appended
    left = total - seen + 1
    ratio = free.to(tl.float32) / tl.maximum(left, 1).to(tl.float32)
    sigma = tl.sqrt(squares / tl.maximum(finite, 1.0))
    ratio = tl.minimum(tl.maximum(ratio, 1e-30), 0.99999994)  # outside: decided by the counts
    threshold = mean + 1.4142135623730951 * sigma * _erfinv(ratio)
    take = (
        offered & (loser_t < NO_BLOCK) & (free > 0) & ((free >= left) | (loser_score > threshold))
    )
    tl.store(INDEX + EXACT_K + appended, loser_t, mask=take)
    tl.store(SCORE + EXACT_K + appended, loser_score, mask=take)
    appended += take.to(tl.int32)
    return seen, appended, finite, mean, squares


@triton.jit
def start_tree(TREE, exists, K: tl.constexpr, LEVELS: tl.constexpr):
    """TREE: pointers [M] to 3 * 2K int32 a row: scores (as bits), block indices, leaves."""
    for first in range(0, 2 * K, 32):
        node = first + tl.arange(0, 32)[None, :]
        leaf = node
        for _ in tl.static_range(LEVELS):
            leaf = tl.where(leaf < K, 2 * leaf, leaf)
        mask = exists[:, None] & (node < 2 * K)
        minus_inf = tl.full(mask.shape, float("-inf"), tl.float32).to(tl.int32, bitcast=True)
        tl.store(TREE[:, None] + node, minus_inf, mask=mask)
        tl.store(TREE[:, None] + 2 * K + node, tl.full(mask.shape, NO_BLOCK, tl.int32), mask=mask)
        leaf += tl.zeros(mask.shape, tl.int32)
        tl.store(TREE[:, None] + 4 * K + node, leaf, mask=mask)
    tl.debug_barrier()


@triton.jit
def offer_tree(value, block, offered, root, TREE, K: tl.constexpr, LEVELS: tl.constexpr):
    """`root` caches node 1, (low, low_t, leaf), and is returned updated. One replacement reads
    siblings and writes the path from the leaf to the root, which are different nodes. The barrier
    separates two replacements, whose accesses to a row may come from different threads."""
    low, low_t, leaf = root
    took = offered & _beats(value, block, low, low_t)
    if tl.max(took.to(tl.int32), 0) > 0:
        node = leaf
        win, win_t, win_leaf = value, block + tl.zeros_like(low_t), leaf
        tl.store(TREE + node, win.to(tl.int32, bitcast=True), mask=took)
        tl.store(TREE + 2 * K + node, win_t, mask=took)
        for _ in tl.static_range(LEVELS):
            up = took & (node > 1)
            sibling = node ^ 1
            bits = tl.load(TREE + sibling, mask=up, other=0)
            s = bits.to(tl.float32, bitcast=True)
            t = tl.load(TREE + 2 * K + sibling, mask=up, other=0)
            other = up & ((s < win) | ((s == win) & (t > win_t)))
            other_leaf = tl.load(TREE + 4 * K + sibling, mask=other, other=0)
            win = tl.where(other, s, win)
            win_t = tl.where(other, t, win_t)
            win_leaf = tl.where(other, other_leaf, win_leaf)
            node = tl.where(up, node >> 1, node)
            tl.store(TREE + node, win.to(tl.int32, bitcast=True), mask=up)
            tl.store(TREE + 2 * K + node, win_t, mask=up)
            tl.store(TREE + 4 * K + node, win_leaf, mask=up)
        low = tl.where(took, win, low)
        low_t = tl.where(took, win_t, low_t)
        leaf = tl.where(took, win_leaf, leaf)
        tl.debug_barrier()
    return low, low_t, leaf


@triton.jit
def write_tree(TREE, INDEX, SCORE, exists, K: tl.constexpr):
    """The leaves, in order, to the rows' lists."""
    for first in range(0, K, 32):
        slot = first + tl.arange(0, 32)[None, :]
        mask = exists[:, None] & (slot < K)
        bits = tl.load(TREE[:, None] + K + slot, mask=mask, other=0)
        t = tl.load(TREE[:, None] + 3 * K + slot, mask=mask, other=0)
        tl.store(SCORE[:, None] + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        tl.store(INDEX[:, None] + slot, tl.where(t >= NO_BLOCK, -1, t), mask=mask)
