"""Online selection of the best key blocks of a row, for query_sparse_attention: while a row's key
blocks pass in ascending order, keep the `top_k` with the highest scores S(j). Three algorithms
(Measure Once, Mask Once, section 3; docs/papers.md), each as a numba function for one row here, and
as a Triton function for M rows at once in `kernels/online_topk.py`.

Every *offered* block passes through one step (`offer` in numba, `offer_*` in Triton). A score that
is not finite (NaN or infinite logits) is offered as -inf. It is then listed only where a slot would
stay empty, and it does not enter the statistics: a NaN neither crashes nor duplicates a block.

exact
    Buffers s of scores (-inf) and t of block indices (EMPTY). mu is the slot with the lowest score,
    of equal ones that with the highest block index, of empty ones the first. The offered (S, j)
    replaces mu where S > s_mu, or S = s_mu and j < t_mu. mu is searched, O(k), only after a
    replacement.
tournament
    The same rule on a winner tree of 2k nodes (any k, not only powers of two): leaves k..2k-1,
    node i keeps the lower of nodes 2i and 2i+1 (of equal scores the higher block index) with the
    leaf it came from, node 1 is mu. O(log k) a replacement. The same set as exact, ties included.
estimated
    Slots 0..k_exact-1 are an exact buffer, the other E = k - k_exact are appended to. For block j,
    the n-th of the row's N offered blocks (n from 1), in this order:
      1. S(j) enters the running mean m and variance sigma^2 (Welford, population variance).
      2. (S, j) is offered to the exact buffer. The loser is the offered block or the block that it
         displaced. Where it took an empty slot there is no loser, and the step ends.
      3. left = N - n + 1 losers are still to come, this one included, for `free` open slots. The
         loser is appended where free > 0 and (free >= left, or its score exceeds
         m + sqrt(2) sigma erfinv(2 p - 1) with p = 1 - free / left).
    Each block is a loser at most once, so none is listed twice. Since free >= left accepts every
    loser, min(N, k) blocks are listed in the end.
"""

import math

import numpy as np

from attnplug.ops.common.numba_cache import njit

ALGORITHMS = ("exact", "tournament", "estimated")
EXACT, TOURNAMENT, ESTIMATED = range(3)
EVERY = 3  # keeps every block's score in the slot of its number: measure_blocks' reference
# The coefficients of erfinv, from that of the highest power: for w below 5 and from there on.
CENTRAL = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)
# The index of an empty slot: above every block, so that empty slots are displaced first.
EMPTY = 1 << 30


@njit(inline="never")
def erfinv(ratio):
    """erfinv(1 - 2 ratio) for 0 < ratio < 1 (Giles 2012, the single-precision polynomials)."""
    w = -math.log(4.0 * ratio * (1.0 - ratio))
    if w < 5.0:
        c = CENTRAL
        w -= 2.5
    else:
        c = TAIL
        w = math.sqrt(w) - 3.0
    y = c[0]
    for i in range(1, 9):
        y = c[i] + y * w
    return y * (1.0 - 2.0 * ratio)


@njit()
def _lowest(s, t, slots):
    mu = 0
    for i in range(1, slots):
        if s[i] < s[mu] or (s[i] == s[mu] and t[i] > t[mu]):
            mu = i
    return mu


@njit()
def _offer_exact(s, t, state, slots, value, block):
    """Offer to slots 0..slots-1; state[0] caches mu. Returns the loser (its index EMPTY: none)."""
    mu = int(state[0])
    if slots == 0 or not (value > s[mu] or (value == s[mu] and block < t[mu])):
        return value, block
    loser = s[mu], t[mu]
    s[mu], t[mu] = value, block
    state[0] = _lowest(s, t, slots)
    return loser


@njit()
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


@njit()
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


@njit()
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


@njit()
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


@njit()
def write_row(algorithm, s, t, index, score):
    """The row's list in the order of its slots (the tournament's leaves), -1 and -inf if empty."""
    first = len(index) if algorithm == TOURNAMENT else 0
    for i in range(len(index)):
        empty = t[first + i] == EMPTY
        index[i] = -1 if empty else t[first + i]
        score[i] = s[first + i]
