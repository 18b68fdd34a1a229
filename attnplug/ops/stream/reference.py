"""The numba references of `stream_mask`, one a search: the specification and the CPU path."""

import numpy as np

from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.stream.kernels import bounds as kernels

WIDER = kernels.WIDER.value

# --- search="branches" ---------------------------------------------------------------------------


@njit()
def _valid_blocks(mask, allowed, start, position, block):
    """Which blocks a query block that ends at `position` may look at, up to the last such; empty
    masks hide nothing."""
    valid = np.zeros(position // block + 1, np.bool_)
    end = 0
    for s in range(start, position + 1):
        r = (s - start) // block
        if (mask.shape[0] == 0 or mask[s]) and (allowed.shape[0] == 0 or allowed[r]):
            valid[r] = True
            end = r + 1
    return valid[:end]


@njit()
def _row_maxima(q, k, mask, position, first):
    """Largest product `[M]` of each query `q [M, D]`, at `position` on, and the keys `k [N, D]`, at
    `first` on, that it sees."""
    products = np.zeros((q.shape[0], k.shape[0]), np.float32)
    add_product(q, np.ascontiguousarray(k.T), products)
    best = np.full(q.shape[0], -np.inf, np.float32)
    for m in range(q.shape[0]):
        for n in range(min(k.shape[0], position + m - first + 1)):
            if (mask.shape[0] == 0 or mask[first + n]) and products[m, n] > best[m]:
                best[m] = products[m, n]  # a NaN is never larger
    return best


@njit()
def _score(q, k, mask, position, first):
    """Largest product of queries `q [M, D]`, at `position` on, and keys `k [N, D]`, at `first`
    on, that see each other."""
    return _row_maxima(q, k, mask, position, first).max()


@njit()
def _first_valid(valid, a, b):
    for r in range(a, b):
        if valid[r]:
            return r
    return -1


@njit()
def _before(score, r, other_score, other):
    """Whether candidate (score, r) comes before the other; r = -1 stands for none. Two that tie
    stay in the order of branch and part, in which they are offered."""
    if other == -1 or r == -1:
        return r != -1
    return score > other_score or (score == other_score and r < other)


@njit()
def _insert(lists, count, score, r, a, b):
    """Candidate (score, r, [a, b)) into the sorted lists of `count`, the last one may fall out."""
    scores, blocks, begins, ends = lists
    place = min(count, blocks.shape[0] - 1)
    if count == blocks.shape[0] and not _before(score, r, scores[place], blocks[place]):
        return count
    while place > 0 and _before(score, r, scores[place - 1], blocks[place - 1]):
        scores[place], blocks[place] = scores[place - 1], blocks[place - 1]
        begins[place], ends[place] = begins[place - 1], ends[place - 1]
        place -= 1
    scores[place], blocks[place], begins[place], ends[place] = score, r, a, b
    return min(count + 1, blocks.shape[0])


@njit()
def _lists(size):
    return (
        np.full(size, -np.inf, np.float32),
        np.full(size, -1, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )


@njit()
def _refine(q, k, mask, valid, position, start, block, branches):
    """(scores, blocks) of the query block `q`, sorted, `[branches]`; `valid` ends with the last
    valid block."""
    found = _lists(branches)
    first = _first_valid(valid, 0, valid.shape[0])
    width = valid.shape[0] - first if first >= 0 else 0
    a = first
    for i in range(branches):
        b = a + width // branches + (1 if i < width % branches else 0)
        r = _first_valid(valid, a, b)
        score = np.float32(-np.inf)
        if r >= 0:
            begin = start + r * block
            score = _score(q, k[begin : begin + block], mask, position, begin)
        found[0][i], found[1][i], found[2][i], found[3][i] = score, r, a, b
        a = b
    blocks, iterations = valid.shape[0], 1
    while 1 << iterations < blocks:
        iterations += 1
    for _ in range(iterations):
        better, count = _lists(branches), 0
        for i in range(branches):
            a, b = found[2][i], found[3][i]
            cut = a + (b - a + 1) // 2
            for begin, end in ((a, cut), (cut, b)):
                r = _first_valid(valid, begin, end)
                score = np.float32(-np.inf)
                if r >= 0 and r == found[1][i]:
                    score = found[0][i]
                elif r >= 0:
                    at = start + r * block
                    score = _score(q, k[at : at + block], mask, position, at)
                count = _insert(better, count, score, r, begin, end)
        found = better
    return found[0], found[1]


# --- search="bounds" -----------------------------------------------------------------------------


@njit(parallel=True)
def summarise(k, lengths, start, mask, block):
    """Max and min of the shown keys of every complete block, `[B, Hkv, NK, 2, D]`; NaN where one of
    them is not finite."""
    batch, heads, size, width = k.shape
    found = np.zeros((batch, heads, -(-size // block), 2, width), np.float32)
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        for r in range((lengths[b] - start[b]) // block):
            high, low, finite = found[b, h, r, 0], found[b, h, r, 1], True
            seen = 0
            for s in range(start[b] + r * block, start[b] + (r + 1) * block):
                if hidden.shape[0] > 0 and not hidden[s]:
                    continue
                for d in range(width):
                    x = k[b, h, s, d]
                    high[d] = x if seen == 0 or x > high[d] else high[d]
                    low[d] = x if seen == 0 or x < low[d] else low[d]
                    finite = finite and abs(x) < np.inf
                seen += 1
            if not finite:
                high[:] = np.nan
    return found


@njit()
def _mean(q, query_block):
    """Sum of the finite values of queries `q [M, D]`, over the size of a query block."""
    mean = np.zeros(q.shape[1], np.float32)
    for m in range(q.shape[0]):
        for d in range(q.shape[1]):
            if abs(q[m, d]) < np.inf:
                mean[d] += q[m, d] * np.float32(1.0 / query_block)
    return mean


@njit()
def _bound(mean, high, low):
    total = np.float32(0.0)
    for d in range(mean.shape[0]):
        total += mean[d] * (high[d] if mean[d] > 0 else low[d])
    return total if total == total else np.float32(np.inf)


@njit()
def _candidates(mean, summaries, valid, places):
    """The `places` blocks of highest bound among the valid ones that have summaries `[N, 2, D]`."""
    found, count = _lists(places), 0
    for r in range(min(summaries.shape[0], valid.shape[0])):
        if valid[r]:
            bound = _bound(mean, summaries[r, 0], summaries[r, 1])
            count = _insert(found, count, bound, r, 0, 0)
    return found[1][:count]


@njit()
def _best_of(q, k, mask, candidates, position, start, block, branches):
    """(scores, blocks) of the best `branches` of the candidates, sorted."""
    found, count = _lists(branches), 0
    for r in candidates:
        begin = start + r * block
        score = _score(q, k[begin : begin + block], mask, position, begin)
        count = _insert(found, count, score, r, 0, 0)
    return found[0], found[1]


# --- either search -------------------------------------------------------------------------------


@njit()
def _rank(q, k, mask, summaries, valid, position, start, block, query_block, places):
    """(scores, blocks) of the query block `q`, sorted, `[places]`: of the earlier blocks of highest
    bound, and of those that not all its queries see whole."""
    own = (position - start) // block
    ranked = _candidates(_mean(q, query_block), summaries[:own], valid, WIDER * places)
    candidates = np.append(ranked, own + np.nonzero(valid[own:])[0])
    return _best_of(q, k, mask, candidates, position, start, block, places)


@njit()
def _drop_far(q, k, mask, position, start, block, gap, scores, blocks):
    """Take the blocks from the sorted list of which no query has a score that is at most `gap`
    below its best one in the list; those behind move up."""
    maxima = np.full((blocks.shape[0], q.shape[0]), -np.inf, np.float32)
    best = np.full(q.shape[0], -np.inf, np.float32)
    for i in range(blocks.shape[0]):
        if blocks[i] >= 0:
            begin = start + blocks[i] * block
            maxima[i] = _row_maxima(q, k[begin : begin + block], mask, position, begin)
            best = np.maximum(best, maxima[i])
    count = 0
    for i in range(blocks.shape[0]):
        near = (maxima[i] > -np.inf) & (maxima[i] >= best - gap)
        if near.any():
            scores[count], blocks[count] = scores[i], blocks[i]
            count += 1
    scores[count:], blocks[count:] = -np.inf, -1


@njit(parallel=True)
def search_rows(
    q,
    k,
    summaries,
    flat,
    lengths,
    start,
    mask,
    block_mask,
    budget,
    gap,
    query_block,
    block,
    index,
    score,
):
    """Every (row, query head, query block), in parallel: by bounds of `summaries` if `flat`, else
    by branches. A negative `gap` drops nothing."""
    batch, heads, queries, _ = q.shape
    group, slots = heads // k.shape[1], index.shape[2]
    for item in prange(batch * heads * slots):
        b, h, i = item // (heads * slots), item // slots % heads, item % slots
        offset = lengths[b] - queries
        t = max(0, start[b] - offset) + i * query_block
        until = min(t + query_block, queries)
        places = max(min(budget[b % len(budget), h % budget.shape[1], i], index.shape[3]), 0)
        index[b, h, i] = -1
        score[b, h, i] = -np.inf
        if t >= queries or places == 0:
            continue
        hidden = mask[b * len(mask) // batch]
        position = offset + until - 1
        allowed = block_mask[b % len(block_mask), h % block_mask.shape[1], i]
        valid = _valid_blocks(hidden, allowed, start[b], position, block)
        row, keys = q[b, h, t:until], k[b, h // group, : position + 1]
        first = offset + t
        if flat:
            earlier = summaries[b, h // group]
            scores, blocks = _rank(
                row, keys, hidden, earlier, valid, first, start[b], block, query_block, places
            )
        else:
            scores, blocks = _refine(row, keys, hidden, valid, first, start[b], block, places)
        if gap >= 0:
            _drop_far(row, keys, hidden, first, start[b], block, gap, scores, blocks)
        index[b, h, i, :places] = blocks
        score[b, h, i, :places] = scores
