"""The Triton kernels of select_blocks: refresh and score, then (for estimate) combine the heads,
then select. A candidate is an int64 key, larger for a larger score and then for a lower block."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.block_bounds import blocks_done, note_progress, refresh_blocks, row_span


@triton.jit
def _key(score, index):
    """int64 whose order is: larger score first, then lower index. No NaN may come here."""
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _hand_on(
    score, j, usable, score_at, best_at, limit, CHUNK: tl.constexpr, MEMBERS: tl.constexpr
):
    """Store a chunk's keys and, where the selection has two levels, their groups' maxima."""
    key = tl.where(usable, _key(score, j), -0x7FFFFFFFFFFFFFFF)
    tl.store(score_at + j, key, mask=j < limit)
    if MEMBERS > 0:
        best = tl.max(tl.reshape(key, [CHUNK // MEMBERS, MEMBERS]), 1)
        g = tl.min(j, 0) // MEMBERS + tl.arange(0, CHUNK // MEMBERS)
        tl.store(best_at + g, best, mask=g * MEMBERS < limit)


@triton.jit
def _seen(key_mask, b, mask_b, low, j, limit, BLOCK: tl.constexpr):
    """Whether the mask lets a key of each block j through."""
    n = tl.arange(0, BLOCK)
    at = key_mask + b * mask_b + low + j[:, None] * BLOCK + n[None, :]
    return tl.max(tl.load(at, mask=(j < limit)[:, None], other=0).to(tl.int32), 1) > 0


@triton.jit
def _summaries(
    bounds_at, j, limit, D: tl.constexpr, DP: tl.constexpr, SCORING: tl.constexpr
):  # fmt: skip
    """(maxima, minima) `[CHUNK, DP]` of blocks j, or their means twice. .cg: they are read once."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    d = tl.arange(0, DP)
    at = bounds_at + j[:, None] * (PARTS * D) + d[None, :]
    readable = (j < limit)[:, None] & (d < D)[None, :]
    high = tl.load(at, mask=readable, other=0.0, cache_modifier=".cg")
    low = high
    if SCORING != 2:
        low = tl.load(at + D, mask=readable, other=0.0, cache_modifier=".cg")
    return high, low


@triton.jit
def _head_scores(query, high, low, scale, SCORING: tl.constexpr):
    """[ROWS, CHUNK] scores of blocks for every head; for "mean", row 0 is that of the mean."""
    if SCORING == 2:
        score = tl.dot(query, high.to(query.dtype).T, input_precision="ieee")
    elif SCORING == 0:
        zero = query * 0  # a NaN stays one
        above = tl.where(query > 0, query, zero).to(high.dtype)
        below = tl.where(query < 0, query, zero).to(high.dtype)
        score = tl.dot(above, high.T, input_precision="ieee")
        score = tl.dot(below, low.T, score, input_precision="ieee")
    else:
        score = tl.dot(query, high.T, input_precision="ieee")
        score = tl.dot(query, low.T, score, input_precision="ieee") * (0.5 * scale)
        step = query.to(tl.float32) * scale
        spread = (high.to(tl.float32) - low.to(tl.float32)) * 0.25
        score += 0.5 * tl.dot(step * step, (spread * spread).T, input_precision="tf32")
    return score


@triton.jit
def _store_heads(
    score, usable, j, limit, own, chunk_at, in_group, GROUP: tl.constexpr
):  # fmt: skip
    """A chunk's scores of each head, and their log-sum-exp, for combine_heads."""
    score = tl.where(usable[None, :], score, float("-inf"))
    at = own[:, None] + j[None, :] * GROUP
    tl.store(at, score, mask=in_group[:, None] & (j < limit)[None, :])
    finite = tl.where(score < float("inf"), score, float("-inf"))  # neither NaN nor inf
    top = tl.max(finite, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(finite - shift[:, None]), 1)
    lse = shift + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(chunk_at, tl.where(total > 0, lse, float("-inf")), mask=in_group)


@triton.jit
def score_blocks(
    q, k, bounds, progress, lengths, start, key_mask, scores, best, heads_at, scale,
    T, S, N, chunks, q_b, q_h, q_t, k_b, k_h, k_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, SCORING: tl.constexpr,
    CHUNK: tl.constexpr, MEMBERS: tl.constexpr, REPEAT: tl.constexpr, STAGES: tl.constexpr,
    SOON: tl.constexpr, NEW: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """REPEAT chunks of blocks of one query and KV head: summaries that are missing, then scores."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    chunk = tl.program_id(0) * REPEAT
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if NEW > 0:
            gdc_wait()  # launched early itself
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    kv_heads = tl.num_programs(1) // T
    row = (b * kv_heads + h) * T + t
    bounds_at = bounds + (b * kv_heads + h) * N * (PARTS * D)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    done = blocks_done(progress, b, low)
    if SOON:  # while the length is on its way; what lies past it counts for nothing
        high, deep = _summaries(bounds_at, chunk * CHUNK + tl.arange(0, CHUNK), N, D, DP, SCORING)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_group = g < GROUP
    q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg"
    )
    limit = (length - T + t - low) // BLOCK - LOCAL + 1
    # No way out for who reads soon: the compiler would move the reads behind it.
    if SOON or chunk * CHUNK < limit:
        end = tl.minimum((chunk + REPEAT) * CHUNK, limit)
        begin = tl.maximum(chunk * CHUNK, done)
        if begin < end:
            mask_at = k
            if key_mask is not None:
                mask_at = key_mask + b * mask_b
            # The queries of one row may do the same blocks at once: they write the same.
            refresh_blocks(
                k + b * k_b + h.to(tl.int64) * k_h, mask_at, bounds_at, begin, end, 1, low, k_s,
                D, DP, BLOCK, PARTS, key_mask is not None,
            )  # fmt: skip
            tl.debug_barrier()  # other warps load what one has stored
            if SOON:
                j = chunk * CHUNK + tl.arange(0, CHUNK)
                high, deep = _summaries(bounds_at, j, N, D, DP, SCORING)
        if SCORING == 2:  # the mean over the group is a product with ones: every row holds it
            mean = tl.sum(query.to(tl.float32), 0) / GROUP
            query = tl.zeros([ROWS, DP], tl.float32) + mean[None, :]
        own = heads_at
        if SCORING == 1:
            own = heads_at + row * GROUP * (N + chunks) + g
        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        for i in tl.range(0, REPEAT, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            j = (chunk + i) * CHUNK + tl.arange(0, CHUNK)
            if not SOON:
                high, deep = _summaries(bounds_at, j, limit, D, DP, SCORING)
            score = _head_scores(query, high, deep, scale, SCORING)  # pyright: ignore[reportPossiblyUnboundVariable]
            usable = (j >= SINK) & (j < limit)
            if key_mask is not None:
                usable = usable & _seen(key_mask, b, mask_b, low, j, limit, BLOCK)
            if SCORING == 1:
                chunk_at = own + (N + chunk + i) * GROUP
                _store_heads(score, usable, j, limit, own, chunk_at, in_group, GROUP)
            else:
                score = tl.where(score == score, score, float("inf"))
                score = tl.max(tl.where(in_group[:, None], score, float("-inf")), 0)
                _hand_on(score, j, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)


@triton.jit
def _row_limit(
    lengths, start, row, T, S, kv_heads, BLOCK: tl.constexpr, LOCAL: tl.constexpr,
    NEW: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """(sequence of the row, its start, end of the query's candidates, end of the last query's)."""
    b = row // (kv_heads * T)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    limit = (length - T + row.to(tl.int32) % T - low) // BLOCK - LOCAL + 1
    last = tl.maximum((length - 1 - low) // BLOCK - LOCAL + 1, 0)
    return b, low, limit, last


@triton.jit
def combine_heads(
    scores, best, heads_at, lengths, start, T, S, N, chunks, kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MEMBERS: tl.constexpr, NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """log sum over the heads of each one's softmax over the candidates, for one chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, _, limit, _ = _row_limit(
        lengths, start, row, T, S, kv_heads, BLOCK, LOCAL, NEW, LENGTH_STEP, START_STEP
    )
    if chunk * CHUNK < limit:
        g = tl.arange(0, ROWS)
        c = tl.arange(0, CHUNKS)
        own = heads_at + row * GROUP * (N + chunks) + g
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
        odd = tl.sum((score != score).to(tl.int32), 1) > 0
        share = tl.where(score == score, score - lse[None, :], float("-inf"))
        high = tl.max(share, 1)
        shift = tl.where((high == float("-inf")) | (high == float("inf")), 0.0, high)
        total = tl.sum(tl.exp(share - shift[:, None]), 1)
        score = shift + tl.log(tl.where(total > 0, total, 1.0))
        score = tl.where(odd, float("inf"), score)
        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        usable = odd | (high > float("-inf"))
        _hand_on(score, j, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)


@triton.jit
def _load_keys(at, inside):
    """.cg: an L1 line may be older than the keys, which other multiprocessors wrote."""
    return tl.load(at, mask=inside, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg")


@triton.jit
def _finalists(
    best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The members [KP * MEMBERS] of the KP groups with the best maxima, and which of them there
    are: among them are the KP best keys, as keys are distinct."""
    i = tl.arange(0, WIDE)
    group = tl.topk(_load_keys(best_at + i, i * MEMBERS < limit), KP)
    j = (_index(group) // MEMBERS)[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
    inside = (group > -0x7FFFFFFFFFFFFFFF)[:, None] & (j < limit)
    j = tl.where(inside, j, limit)
    return tl.reshape(j, [KP * MEMBERS])


@triton.jit
def best_keys(
    scores_at, best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The KP largest of a row's keys, largest first."""
    SIZE: tl.constexpr = WIDE if MEMBERS == 0 else KP * MEMBERS
    j = tl.arange(0, SIZE)
    if MEMBERS > 0:
        j = _finalists(best_at, limit, KP, WIDE, MEMBERS)
    return tl.topk(_load_keys(scores_at + j, j < limit), KP)


@triton.jit
def block_of(key):
    """The blocks that keys name; -1 for none."""
    return tl.where(key > -0x7FFFFFFFFFFFFFFF, _index(key), -1)


@triton.jit
def nth_best(
    n, scores_at, best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
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
def select_best(
    scores, best, progress, lengths, start, out, T, S, N, kv_heads,
    BLOCK: tl.constexpr, LOCAL: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr, NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best K of one row's keys; its first program notes which summaries are done now."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        if NEW == 0:
            gdc_wait()
        gdc_launch_dependents()
    b, low, limit, last = _row_limit(
        lengths, start, row, T, S, kv_heads, BLOCK, LOCAL, NEW, LENGTH_STEP, START_STEP
    )
    if PDL and NEW > 0:
        gdc_wait()
    best_at = best
    if MEMBERS > 0:
        best_at = best + row * tl.cdiv(N, MEMBERS)
    key = best_keys(scores + row * N, best_at, limit, KP, WIDE, MEMBERS)
    n = tl.arange(0, KP)
    tl.store(out + row * K + n, block_of(key), mask=n < K)
    if row % (kv_heads * T) == 0:
        note_progress(progress, b, low, last)
