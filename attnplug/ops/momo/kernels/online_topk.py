"""Online selection of the best key blocks of a row, for query_sparse_attention: while a row's key
blocks pass in ascending order, keep the `top_k` with the highest scores S(j). Three algorithms
(paper: Measure Once, Mask Once, section 3), each as a numba function for one row and as a Triton
function for M rows at once.

Every *offered* block passes through one step (`offer` in numba, `offer_*` in Triton). A score that
is not finite (NaN or infinite logits) is offered as -inf, so it is listed only where a slot would
stay empty, and it stays out of the statistics: a NaN can neither crash nor duplicate anything.

exact
    Buffers s (-inf), t (EMPTY). mu = the slot with the lowest score, of equals the one with the
    highest block index, of empty slots the first. The newcomer (S, j) replaces mu where S > s_mu,
    or S = s_mu and j < t_mu. mu is found again, O(k), only after a replacement.
tournament
    The same rule on a winner tree of 2k nodes (any k, not only powers of two): leaves k..2k-1,
    node i keeps the lower of nodes 2i and 2i+1 (of equal scores the higher block index) with the
    leaf it came from, node 1 is mu. O(log k) a replacement. The same set as exact, ties included.
estimated
    Slots 0..k_exact-1 are an exact buffer, the other E = k - k_exact are appended to. For block j,
    the n-th of the row's N offered blocks (n from 1), in this order:
      1. S(j) enters the running mean m and variance sigma^2 (Welford, population variance).
      2. (S, j) is offered to the exact buffer. The loser is the newcomer or the block that it
         displaced; where it took an empty slot there is none and the step ends.
      3. left = N - n + 1 losers are still to come, this one included, for `free` open slots. The
         loser is appended where free > 0 and (free >= left, or its score exceeds
         m + sqrt(2) sigma erfinv(2 p - 1) with p = 1 - free / left).
    Each block is a loser at most once, so none is listed twice, and since free >= left accepts
    everything, min(N, k) blocks are listed in the end.
"""

import math

import numba
import numpy as np
import triton
import triton.language as tl

ALGORITHMS = ("exact", "tournament", "estimated")
EXACT, TOURNAMENT, ESTIMATED = range(3)
EVERY = 3  # keeps every block's score in the slot of its number: measure_blocks' reference
# The index of an empty slot: above every block, so that empty slots are displaced first. The
# Triton buffers add the slot's distance from the last one, which makes the indices distinct.
EMPTY = 1 << 30
NO_BLOCK = tl.constexpr(EMPTY)


# ---- numba: one row ----


@numba.njit(cache=True, inline="never")
def erfinv(ratio):
    """erfinv(1 - 2 ratio) for 0 < ratio < 1 (Giles 2012, the single-precision polynomials)."""
    w = -math.log(4.0 * ratio * (1.0 - ratio))
    if w < 5.0:
        c = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
             -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
        w -= 2.5
    else:
        c = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
             -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip
        w = math.sqrt(w) - 3.0
    y = c[0]
    for i in range(1, 9):
        y = c[i] + y * w
    return y * (1.0 - 2.0 * ratio)


@numba.njit(cache=True)
def _lowest(s, t, slots):
    mu = 0
    for i in range(1, slots):
        if s[i] < s[mu] or (s[i] == s[mu] and t[i] > t[mu]):
            mu = i
    return mu


@numba.njit(cache=True)
def _offer_exact(s, t, state, slots, value, block):
    """Offer to slots 0..slots-1; state[0] caches mu. Returns the loser (its index EMPTY: none)."""
    mu = int(state[0])
    if slots == 0 or not (value > s[mu] or (value == s[mu] and block < t[mu])):
        return value, block
    loser = s[mu], t[mu]
    s[mu], t[mu] = value, block
    state[0] = _lowest(s, t, slots)
    return loser


@numba.njit(cache=True)
def _offer_tournament(s, t, leaf, value, block):
    if not (value > s[1] or (value == s[1] and block < t[1])):
        return
    node = leaf[1]
    s[node], t[node] = value, block
    while node > 1:
        other, up = node ^ 1, node >> 1
        low = node
        if s[other] < s[node] or (s[other] == s[node] and t[other] > t[node]):
            low = other
        s[up], t[up], leaf[up] = s[low], t[low], leaf[low]
        node = up


@numba.njit(cache=True)
def _offer_estimated(s, t, state, exact_k, value, block, offered):
    # state: mu, seen, appended, finite, mean, sum of squared deviations
    state[1] += 1
    if value > -np.inf:
        state[3] += 1
        delta = value - state[4]
        state[4] += delta / state[3]
        state[5] += delta * (value - state[4])
    value, block = _offer_exact(s, t, state, exact_k, value, block)
    free = len(s) - exact_k - state[2]
    if block == EMPTY or free <= 0:
        return
    left = offered - state[1] + 1
    if free < left:
        sigma = math.sqrt(state[5] / max(state[3], 1.0))
        if not value > state[4] + math.sqrt(2.0) * sigma * erfinv(free / left):
            return
    slot = exact_k + int(state[2])
    s[slot], t[slot] = value, block
    state[2] += 1


@numba.njit(cache=True)
def start_rows(algorithm, rows, top_k):
    """The empty state of `rows` rows: scores, block indices, leaves, and six numbers."""
    width = 2 * top_k if algorithm == TOURNAMENT else top_k
    s = np.full((rows, width), -np.inf, np.float32)
    t = np.full((rows, width), EMPTY, np.int64)
    leaf = np.zeros((rows, width), np.int64)
    if algorithm == TOURNAMENT:
        for node in range(width - 1, 0, -1):
            leaf[:, node] = node if node >= top_k else leaf[0, 2 * node]
    return s, t, leaf, np.zeros((rows, 6))


@numba.njit(cache=True)
def offer(algorithm, s, t, leaf, state, exact_k, value, block, offered):
    """Offer one block to one row; `offered` is how many blocks the row is offered in all."""
    if not np.isfinite(value):
        value = np.float32(-np.inf)
    if algorithm == EVERY:
        s[block], t[block] = value, block
    elif algorithm == TOURNAMENT:
        _offer_tournament(s, t, leaf, value, block)
    elif algorithm == EXACT:
        _offer_exact(s, t, state, len(s), value, block)
    else:
        _offer_estimated(s, t, state, exact_k, value, block, offered)


@numba.njit(cache=True)
def write_row(algorithm, s, t, index, score):
    """The row's list in the order of its slots (the tournament's leaves), -1 and -inf if empty."""
    first = len(index) if algorithm == TOURNAMENT else 0
    for i in range(len(index)):
        empty = t[first + i] == EMPTY
        index[i] = -1 if empty else t[first + i]
        score[i] = s[first + i]


# ---- Triton: M rows at once ----


@triton.jit
def _erfinv(ratio):
    # erfinv(1 - 2 ratio), as in numba
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
    low = tl.min(s, 1)
    return low, tl.max(tl.where(s == low[:, None], t, -1), 1)


@triton.jit
def offer_slots(value, block, offered, s, t, low, low_t):
    """low, low_t cache the lowest slot; returns the buffers, it, and the losers."""
    took = offered & _beats(value, block, low, low_t)
    loser = tl.where(took, low, value)
    loser_t = tl.where(took, low_t, block)
    # No branch on "any row took": asking that of the whole tile costs more than doing it. The block
    # indices in a buffer are distinct: low_t names the slot.
    hit = took[:, None] & (t == low_t[:, None])
    s = tl.where(hit, value[:, None], s)
    t = tl.where(hit, block, t)
    low, low_t = lowest(s, t)
    return s, t, low, low_t, loser, loser_t


@triton.jit
def write_slots(s, t, INDEX, SCORE, exists, K: tl.constexpr, P: tl.constexpr):
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
def offer_exact(
    value, block, offered, low, low_t, low_slot, INDEX, SCORE, M: tl.constexpr, K: tl.constexpr
):
    """The buffers are the rows' lists themselves, pointers [M]; low, low_t, low_slot cache the
    lowest slot. The barriers keep a store to a row from its loads, which other threads may do."""
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
    value, loser, loser_t, offered, total, seen, appended, finite, mean, squares,
    INDEX, SCORE, K: tl.constexpr, EXACT_K: tl.constexpr,
):  # fmt: skip
    """INDEX, SCORE: pointers [M] to the rows' lists; a loser is stored there once and never read
    back. Returns the five running numbers."""
    seen += offered.to(tl.int32)
    counts = offered & (value > float("-inf"))
    finite += counts.to(tl.float32)
    delta = tl.where(counts, value - mean, 0.0)
    mean += delta / tl.maximum(finite, 1.0)
    squares += delta * tl.where(counts, value - mean, 0.0)
    free = K - EXACT_K - appended
    left = total - seen + 1
    ratio = free.to(tl.float32) / tl.maximum(left, 1).to(tl.float32)
    sigma = tl.sqrt(squares / tl.maximum(finite, 1.0))
    ratio = tl.minimum(tl.maximum(ratio, 1e-30), 0.99999994)  # outside: decided by the counts
    threshold = mean + 1.4142135623730951 * sigma * _erfinv(ratio)
    take = offered & (loser_t < NO_BLOCK) & (free > 0) & ((free >= left) | (loser > threshold))
    tl.store(INDEX + EXACT_K + appended, loser_t, mask=take)
    tl.store(SCORE + EXACT_K + appended, loser, mask=take)
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
def offer_tree(
    value, block, offered, low, low_t, leaf, TREE, K: tl.constexpr, LEVELS: tl.constexpr
):
    """low, low_t, leaf cache node 1. One replacement reads siblings and writes the path from the
    leaf to the root, which never meet; the barrier keeps two replacements apart, whose accesses
    to a row may come from different threads."""
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
    for first in range(0, K, 32):
        slot = first + tl.arange(0, 32)[None, :]
        mask = exists[:, None] & (slot < K)
        bits = tl.load(TREE[:, None] + K + slot, mask=mask, other=0)
        t = tl.load(TREE[:, None] + 3 * K + slot, mask=mask, other=0)
        tl.store(SCORE[:, None] + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        tl.store(INDEX[:, None] + slot, tl.where(t >= NO_BLOCK, -1, t), mask=mask)
