"""The Triton kernels that make keys of blocks' scores and select by them, for select_blocks.
gather_decode's attending kernel calls pieces of them.

A candidate block is an int64 key, which orders by score first, larger is better, and then by block,
lower is better. Where there are many, a first level selects groups of blocks by their maxima.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.rows import note_progress, row_span
from attnplug.ops.common.threshold import clean, keep_best, score_of

NONE = tl.constexpr(-0x80000000)  # the upper half of no candidate's key


@triton.jit
def key_of(score, index):
    """int64 whose order is: larger score first, then lower index. The score must not be NaN."""
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(key):
    """The index that `key_of` took."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def store_keys(
    score, j, usable, scores_at, best_at, limit, CHUNK: tl.constexpr, MEMBERS: tl.constexpr
):
    """Store a chunk's keys and, where the selection has two levels, the maxima of their groups of
    MEMBERS."""
    key = tl.where(usable, key_of(score, j), -0x7FFFFFFFFFFFFFFF)
    tl.store(scores_at + j, key, mask=j < limit)
    if MEMBERS > 0:
        best = tl.max(tl.reshape(key, [CHUNK // MEMBERS, MEMBERS]), 1)
        group = tl.min(j, 0) // MEMBERS + tl.arange(0, CHUNK // MEMBERS)
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
def nth_best(
    n, scores_at, best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):
    """The block of rank n among a row's keys; -1 where there are not so many."""
    if MEMBERS == 0 and WIDE <= 64:  # by comparing all with all; from 128 on a sort is faster
        j = tl.arange(0, WIDE)
        at, inside = scores_at + j, j < limit
        key = _load_keys(at, inside)
        rank = tl.sum((_load_keys(at, inside)[None, :] > key[:, None]).to(tl.int32), 1)
    else:
        key = best_keys(scores_at, best_at, limit, KP, WIDE, MEMBERS)
        rank = tl.arange(0, KP)
    return tl.max(tl.where(rank == n, block_of(key), -1), 0)


@triton.jit
def row_limit(
    lengths,
    start,
    row,
    T,
    S,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):
    """(sequence of the row, its start, end of the query's candidates, end of the last query's)."""
    b = row // (kv_heads * T)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    limit = (length - T + row.to(tl.int32) % T - low) // BLOCK - LOCAL + 1
    last = tl.maximum((length - 1 - low) // BLOCK - LOCAL + 1, 0)
    return b, low, limit, last


@triton.jit
def combine_heads(
    scores,
    best,
    head_scores,
    lengths,
    start,
    T,
    S,
    N,
    chunks,
    kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MEMBERS: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """log sum over the heads of each one's softmax over the candidates, for one chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, _, limit, _ = row_limit(
        lengths=lengths,
        start=start,
        row=row,
        T=T,
        S=S,
        kv_heads=kv_heads,
        BLOCK=BLOCK,
        LOCAL=LOCAL,
        NEW=NEW,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    if chunk * CHUNK < limit:
        g = tl.arange(0, ROWS)
        c = tl.arange(0, CHUNKS)
        own = head_scores + row * GROUP * (N + chunks) + g
        in_group = g < GROUP
        lse = tl.load(
            own[None, :] + (N + c)[:, None] * GROUP,
            mask=in_group[None, :] & (c < tl.cdiv(limit, CHUNK))[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        top = tl.max(lse, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(lse - top[None, :]), 0)
        lse = top + tl.log(tl.where(total > 0, total, 1.0))
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        score = tl.load(
            own[None, :] + j[:, None] * GROUP,
            mask=in_group[None, :] & (j < limit)[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        any_nan = tl.sum((score != score).to(tl.int32), 1) > 0
        share = tl.where(score == score, score - lse[None, :], float("-inf"))
        high = tl.max(share, 1)
        shift = tl.where((high == float("-inf")) | (high == float("inf")), 0.0, high)
        total = tl.sum(tl.exp(share - shift[:, None]), 1)
        score = shift + tl.log(tl.where(total > 0, total, 1.0))
        score = tl.where(any_nan, float("inf"), score)
        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        usable = any_nan | (high > float("-inf"))
        store_keys(score, j, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)


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
    lengths,
    start,
    out,
    T,
    S,
    N,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    WIDE: tl.constexpr,
    MEMBERS: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best K of one row's keys. The first program of a sequence notes which blocks have
    summaries now, unless they are those of pages. A row is a (sequence, KV head, query) triple."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    b, low, limit, last = row_limit(
        lengths=lengths,
        start=start,
        row=row,
        T=T,
        S=S,
        kv_heads=kv_heads,
        BLOCK=BLOCK,
        LOCAL=LOCAL,
        NEW=NEW,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    if PDL:  # the lengths were there before the kernel in front began
        gdc_wait()
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
        if row % (kv_heads * T) == 0:
            note_progress(progress, b, low, last)


@triton.jit
def _scores_of(keys):
    """(scores of keys, which of them are candidates' keys); -inf for no candidate."""
    bits = (keys >> 32).to(tl.int32)
    ok = bits > NONE
    return tl.where(ok, clean(score_of(bits)), float("-inf")), ok


@triton.jit
def _store_taken(out_at, taken, j):
    """Store the taken ones of j in their order."""
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(out_at + place, j, mask=taken)


@triton.jit
def select_many(
    scores,
    best,
    progress,
    lengths,
    start,
    out,
    T,
    S,
    N,
    kv_heads,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    WIDE: tl.constexpr,
    MEMBERS: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `select_best` does for a long list, in ascending order: it compares scores with a
    threshold and sorts nothing. Where blocks stand in groups, it takes the K groups with the best
    maxima first; they hold the K best blocks. The list's own memory holds their numbers meanwhile.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    b, low, limit, last = row_limit(
        lengths=lengths,
        start=start,
        row=row,
        T=T,
        S=S,
        kv_heads=kv_heads,
        BLOCK=BLOCK,
        LOCAL=LOCAL,
        NEW=NEW,
        LENGTH_STEP=LENGTH_STEP,
        START_STEP=START_STEP,
    )
    if PDL:  # the lengths were there before the kernel in front began
        gdc_wait()
    if progress is None:
        if limit <= 0:
            _store_none(out + row * K, K, KP)
            return
    n = tl.arange(0, KP)
    out_at = out + row * K
    if MEMBERS > 0:
        group = tl.arange(0, WIDE)
        at = best + row * tl.cdiv(N, MEMBERS) + group
        maxima, ok = _scores_of(_load_keys(at, group * MEMBERS < limit))
        found = tl.sum(ok.to(tl.int32), 0)
        taken, floor, _ = keep_best(maxima, ok, found, K, NORMAL=True)
        _store_taken(out_at, taken, group)
        groups = tl.minimum(found, K)
        tl.debug_barrier()  # other warps load what one has stored
        chosen = tl.load(out_at + n, mask=n < groups, other=0, cache_modifier=".cg")
        tl.debug_barrier()
        j = chosen[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
        j = tl.reshape(tl.where((n < groups)[:, None], j, limit), [KP * MEMBERS])
        score, ok = _scores_of(_load_keys(scores + row * N + j, j < limit))
        # The K groups' maxima are K scores: no score below the least of them is taken.
        ok = ok & (score >= score_of(floor.to(tl.int32)))
        score = tl.where(ok, score, float("-inf"))
    else:
        j = tl.arange(0, WIDE)
        score, ok = _scores_of(_load_keys(scores + row * N + j, j < limit))
    found = tl.sum(ok.to(tl.int32), 0)
    taken, _, _ = keep_best(score, ok, found, K, NORMAL=True)
    _store_taken(out_at, taken, j)
    count = tl.minimum(found, K)
    tl.store(out_at + n, -1, mask=(n >= count) & (n < K))
    if progress is not None:
        if row % (kv_heads * T) == 0:
            note_progress(progress, b, low, last)
