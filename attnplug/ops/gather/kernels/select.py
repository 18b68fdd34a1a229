"""The Triton kernels that make keys of blocks' scores and select by them, for select_blocks.

For a short list, a candidate block is an int64 key, which orders by score first, larger is better,
and then by block, lower is better. For a long one it is the key's upper half, an int32. Where there
are many, a first level selects groups of blocks by their maxima.
"""

from attnplug.ops.common.rows import known_progress, row_span, store_progress
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton

NONE = tl.constexpr(-0x80000000)  # the upper half of what is no candidate's key


@triton.jit
def key_of(score, index):
    """int64 whose order is: larger score first, then lower index. The score must not be NaN."""
    return (_order_of(score).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _order_of(score):
    """int32 whose order is that of float32 scores: a key's upper half."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def index_of(key):
    """The index that `key_of` took."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def store_keys(
    score, first, usable, scores_at, best_at, limit, CHUNK: tl.constexpr, MEMBERS: tl.constexpr
):
    """Store the keys of CHUNK blocks from `first` on, or the keys' upper halves, and, where the
    selection has two levels, the maxima of their groups of MEMBERS."""
    j = first + tl.arange(0, CHUNK)
    if scores_at.dtype.element_ty == tl.int32:
        key = tl.where(usable, _order_of(score), NONE)
    else:
        key = tl.where(usable, key_of(score, j), -0x7FFFFFFFFFFFFFFF)
    tl.store(scores_at + j, key, mask=j < limit)
    if MEMBERS > 0:
        best = tl.max(tl.reshape(key, [CHUNK // MEMBERS, MEMBERS]), 1)
        group = first // MEMBERS + tl.arange(0, CHUNK // MEMBERS)
        tl.store(best_at + group, best, mask=group * MEMBERS < limit)


@triton.jit
def _load_keys(at, inside):
    """Keys at `at`, no candidate's outside `inside`. .cg: other multiprocessors wrote the keys, and
    an L1 line may be older."""
    return tl.load(at, mask=inside, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")


@triton.jit
def _keys_to_sort(at, limit, SIZE: tl.constexpr):
    """All keys of a row, reordered for a sort: it compares neighbours most, and in this order
    neighbours belong to one thread (of four warps)."""
    if SIZE >= 512:
        j = tl.arange(0, SIZE // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        key = tl.reshape(_load_keys(at + j, j < limit), [SIZE // 256, 4, 32, 2])
        key = tl.reshape(tl.permute(key, (1, 2, 0, 3)), [SIZE])
    else:
        j = tl.arange(0, SIZE)
        key = _load_keys(at + j, j < limit)
    return key


@triton.jit
def _finalists(best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr):
    """The blocks [KP * MEMBERS] of the KP groups with the best maxima, `limit` for none. They hold
    the KP best keys, because keys are distinct."""
    group = tl.topk(_keys_to_sort(best_at, tl.cdiv(limit, MEMBERS), WIDE), KP)
    j = (index_of(group) // MEMBERS)[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
    inside = (group > -0x7FFFFFFFFFFFFFFF)[:, None] & (j < limit)
    j = tl.where(inside, j, limit)
    return tl.reshape(j, [KP * MEMBERS])


@triton.jit
def best_keys(
    scores_at, best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):
    """The KP largest of a row's keys, largest first."""
    if MEMBERS > 0:
        j = _finalists(best_at, limit, KP, WIDE, MEMBERS)
        key = _load_keys(scores_at + j, j < limit)
    else:
        key = _keys_to_sort(scores_at, limit, WIDE)
    return tl.topk(key, KP)


@triton.jit
def block_of(key):
    """The blocks that keys name; -1 for none."""
    return tl.where(key > -0x7FFFFFFFFFFFFFFF, index_of(key), -1)


@triton.jit
def row_limit(
    rows,
    row,
    T,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    STEPS: tl.constexpr,
    NEW: tl.constexpr,
):
    """(sequence of the row, its start, end of the query's candidates, end of the last query's)."""
    b = row // (kv_heads * T)
    length, low = row_span(rows, b, STEPS, NEW)
    limit = (length - T + row.to(tl.int32) % T - low) // BLOCK - LOCAL + 1
    last = tl.maximum((length - 1 - low) // BLOCK - LOCAL + 1, 0)
    return b, low, limit, last


@triton.jit
def _wait_for_scores(progress, notes, b, low, PDL: tl.constexpr):
    """Wait for the kernel in front. Lengths and progress were there before it began, so the program
    that `notes` how many blocks have summaries asks for what is noted before; 0 for others."""
    done = 0
    if progress is not None:
        if notes:
            done = known_progress(progress, b, low)
    if PDL:
        gdc_wait()
    return done


@triton.jit
def _store_none(out_at, K: tl.constexpr, KP: tl.constexpr):
    """The list of a row without candidates. On pages that is most rows of most steps: those which
    another method serves have a length of 0, and should cost next to nothing."""
    n = tl.arange(0, KP)
    tl.store(out_at + n, -1, mask=n < K)


@triton.jit
def select_best(
    scores,
    best,
    progress,
    rows,
    out,
    T,
    N,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    WIDE: tl.constexpr,
    MEMBERS: tl.constexpr,
    STEPS: tl.constexpr,
    NEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best K of one row's keys. The first program of a sequence notes which blocks have
    summaries now, unless they are those of pages. A row is a (sequence, KV head, query) triple."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    b, low, limit, last = row_limit(rows, row, T, kv_heads, BLOCK, LOCAL, STEPS, NEW)
    notes = row % (kv_heads * T) == 0
    done = _wait_for_scores(progress, notes, b, low, PDL)
    if progress is None:
        if limit <= 0:
            _store_none(out + row * K, K, KP)
            return
    best_at = best
    if MEMBERS > 0:
        best_at = best + row * tl.cdiv(N, MEMBERS)
    key = best_keys(scores + row * N, best_at, limit, KP, WIDE, MEMBERS)
    n = tl.arange(0, KP)
    tl.store(out + row * K + n, block_of(key), mask=n < K)
    if progress is not None:
        if notes:
            store_progress(progress, b, low, tl.maximum(done, last))


@triton.jit
def _threshold(score, low, high, found, K: tl.constexpr):
    """(low, high, scores not below low, scores not below high), between which the K-th largest is:
    K or more scores are not below `low`, `found` at first, and fewer than K not below `high`.

    Each turn cuts what is between in three and counts at both cuts. One sum gives both counts, 16
    bits each, of an int32: a warp adds those up in one instruction, where it would shuffle an int64
    ten times. Behind a first level `low` may be below all scores, which are 32,768 at most, so all
    of them may be counted. The search ends when `low` has exactly K, or when all between are equal.
    """
    tl.static_assert(score.shape[0] <= 65536, "counts have 16 bits")
    above = found * 0
    distance = high.to(tl.int64) - low.to(tl.int64)
    while (found > K) & (distance > 1):
        step = ((distance.to(tl.uint32) + 2) // 3).to(tl.int64)
        first = (low.to(tl.int64) + step).to(tl.int32)
        second = (low.to(tl.int64) + 2 * step).to(tl.int32)  # no more than high
        both = (score >= first).to(tl.int32) + ((score >= second).to(tl.int32) << 16)
        counts = tl.sum(both, 0)
        few, fewer = counts & 0xFFFF, (counts >> 16) & 0xFFFF
        above = tl.where(few < K, few, tl.where(fewer < K, fewer, above))
        found = tl.where(fewer >= K, fewer, tl.where(few >= K, few, found))
        high = tl.where(few < K, first, tl.where(fewer < K, second, high))
        low = tl.where(fewer >= K, second, tl.where(few >= K, first, low))
        distance = high.to(tl.int64) - low.to(tl.int64)
    return low, high, found, above


@triton.jit
def _at_least(score, low, high, found, above, K: tl.constexpr):
    """The K largest scores between the ends that `_threshold` found, ties to the lower place; all
    that are not below `low` where they are fewer."""
    taken = score >= low
    if found > K:
        least = taken & (score < high)
        taken = (score >= high) | (least & (tl.cumsum(least.to(tl.int32), 0) <= K - above))
    return taken


@triton.jit
def _load_scores(at, inside):
    """Scores at `at`, as integers in their order; NONE for no candidate and outside `inside`. .cg:
    see `_load_keys`."""
    return tl.load(at, mask=inside, other=NONE, cache_modifier=".cg")


@triton.jit
def _store_taken(out_at, taken, j):
    """Store the taken ones of j in their order."""
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(out_at + place, j, mask=taken)


@triton.jit
def _wider(low, high, count, other_low, other_high, other_count):
    """Combine function of a `tl.reduce` for (smallest, largest, number)."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high), count + other_count


@triton.jit
def _ends(score):
    """(smallest, largest + 1, number) of the scores that are no NONE."""
    usable = score > NONE
    low = tl.where(usable, score, 0x7FFFFFFF)
    # One reduction: the program's warps wait for each other once.
    low, high, count = tl.reduce((low, score, usable.to(tl.int32)), 0, _wider)
    return low, high + 1, count  # the largest score is infinity, so there is room for 1


@triton.jit
def _best_groups(
    maxima_at,
    out_at,
    limit,
    K: tl.constexpr,
    KP: tl.constexpr,
    WIDE: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The blocks [KP * MEMBERS] of the K groups with the best maxima, `limit` for none; a score
    that none of the K best blocks is below; and one that no block reaches. The list's memory holds
    the groups meanwhile."""
    n, group = tl.arange(0, KP), tl.arange(0, WIDE)
    maxima = _load_scores(maxima_at + group, group * MEMBERS < limit)
    floor, ceiling, found = _ends(maxima)
    floor, top, enough, above = _threshold(maxima, floor, ceiling, found, K)
    _store_taken(out_at, _at_least(maxima, floor, top, enough, above, K), group)
    groups = tl.minimum(found, K)
    tl.debug_barrier()  # other warps load what one has stored
    chosen = tl.load(out_at + n, mask=n < groups, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    j = chosen[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
    j = tl.reshape(tl.where((n < groups)[:, None], j, limit), [KP * MEMBERS])
    # The K groups' maxima are K scores: no score below the least of them is taken.
    return j, tl.where(found < K, NONE + 1, floor), ceiling


@triton.jit
def select_many(
    scores,
    best,
    progress,
    rows,
    out,
    T,
    N,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    WIDE: tl.constexpr,
    MEMBERS: tl.constexpr,
    STEPS: tl.constexpr,
    NEW: tl.constexpr,
    PDL: tl.constexpr,
    DIRECT: tl.constexpr = False,
):
    """What `select_best` does for a long list, in ascending order: it compares scores with a
    threshold and sorts nothing. Where blocks stand in groups, it takes the K groups with the best
    maxima first; they hold the K best blocks. The list's own memory holds their numbers meanwhile.
    DIRECT: a row of no more blocks than K groups hold skips that.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    b, low, limit, last = row_limit(rows, row, T, kv_heads, BLOCK, LOCAL, STEPS, NEW)
    notes = row % (kv_heads * T) == 0
    done = _wait_for_scores(progress, notes, b, low, PDL)
    if progress is None:
        if limit <= 0:
            _store_none(out + row * K, K, KP)
            return
    n = tl.arange(0, KP)
    out_at = out + row * K
    if MEMBERS > 0:
        maxima_at = best + row * tl.cdiv(N, MEMBERS)
        if DIRECT and limit <= KP * MEMBERS:
            j = tl.arange(0, KP * MEMBERS)
            score = _load_scores(scores + row * N + j, j < limit)
            floor, ceiling, found = _ends(score)
        else:
            j, floor, ceiling = _best_groups(maxima_at, out_at, limit, K, KP, WIDE, MEMBERS)
            score = _load_scores(scores + row * N + j, j < limit)
            found = tl.sum((score >= floor).to(tl.int32), 0)
    else:
        j = tl.arange(0, WIDE)
        score = _load_scores(scores + row * N + j, j < limit)
        floor, ceiling, found = _ends(score)
    floor, top, enough, above = _threshold(score, floor, ceiling, found, K)
    _store_taken(out_at, _at_least(score, floor, top, enough, above, K), j)
    count = tl.minimum(found, K)
    tl.store(out_at + n, -1, mask=(n >= count) & (n < K))
    if progress is not None:
        if notes:
            store_progress(progress, b, low, tl.maximum(done, last))
