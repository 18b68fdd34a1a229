"""The Triton kernels of select_blocks: refresh and score, then (for estimate) combine the heads,
then select. A candidate is an int64 key, larger for a larger score and then for a lower block."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.rows import blocks_done, note_progress, row_span
from attnplug.ops.gather.kernels.bounds import frame_at, refresh_blocks, summaries_at


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
    bounds_at, behind, j, limit, D: tl.constexpr, DP: tl.constexpr, SCORING: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """(maxima, minima) `[CHUNK, DP]` of blocks j, or their means twice, and the scales of codes.
    .cg: they are read once."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    d = tl.arange(0, DP)
    at = bounds_at + j[:, None] * (PARTS * D) + d[None, :]
    readable = (j < limit)[:, None] & (d < D)[None, :]
    high = tl.load(at, mask=readable, other=0, cache_modifier=".cg")
    low = high
    if SCORING != 2:
        low = tl.load(at + D, mask=readable, other=0, cache_modifier=".cg")
    factor = 1.0
    if INT8:
        factor = tl.load(behind + 2 * D + j, mask=j < limit, other=0.0, cache_modifier=".cg")
    return high, low, factor


@triton.jit
def _digits(query, behind, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr):
    """What heads' queries are to codes: `query unit = step (128 a + b)`, the INT8 digits of their
    positive elements, and of their negative ones; what a product of the row counts; and what to
    add, `query . centre`. The heads come twice: the first HEADS rows get the digits a, the others
    b, and nothing to add."""
    coarse = tl.arange(0, 2 * HEADS) < HEADS
    centre, unit = frame_at(behind, tl.arange(0, DP), D)
    query = query.to(tl.float32)
    scaled = query * unit[None, :]
    top = tl.max(tl.abs(scaled), 1)
    level = scaled * (16256.0 / tl.where(top > 0, top, 1.0))[:, None]
    level = tl.where(tl.abs(level) <= 16257.0, level, 0.0)
    # To the nearest integer: 1.5 2^23 leaves no bits for a fraction.
    level = (level + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    first = (level + 64) >> 7
    digit = tl.where(coarse[:, None], first, level - first * 128)
    above = tl.where(level > 0, digit, 0).to(tl.int8)
    below = tl.where(level < 0, digit, 0).to(tl.int8)
    # What is not finite makes a NaN of it.
    middle = tl.sum(query * centre[None, :] + query * 0, 1)
    step = top * tl.where(coarse, 128.0 / 16256.0, 1.0 / 16256.0)
    return above, below, step, tl.where(coarse, middle, 0.0)


@triton.jit
def _ready(
    query, behind, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SCORING: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """What `_scores` wants of the queries `[HEADS, DP]` (for codes, twice), once for all blocks."""
    if INT8:
        return _digits(query, behind, D, DP, HEADS)
    elif SCORING == 2:  # the mean over the group is a product with ones: every row holds it
        mean = tl.sum(query.to(tl.float32), 0) / GROUP
        query = tl.zeros([HEADS, DP], tl.float32) + mean[None, :]
        return query, query, 1.0, 0.0
    else:
        return query, query, 1.0, 0.0


@triton.jit
def _code_scores(
    above, below, step, middle, high, low, scale, HEADS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """`[HEADS, CHUNK]` scores of codes. A row's sum is of integers: exact."""
    total = tl.dot(above, high.T, out_dtype=tl.int32)
    total = tl.dot(below, low.T, total, out_dtype=tl.int32)
    score = total.to(tl.float32) * step[:, None] * scale[None, :] + middle[:, None]
    return tl.sum(tl.reshape(score, [2, HEADS, CHUNK]), 0)


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
def _scores(
    above, below, step, middle, high, low, factor, scale, GROUP: tl.constexpr,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, SCORING: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """`[CHUNK]` scores of blocks; for "estimate" `[HEADS, CHUNK]`, of every head."""
    if INT8:
        score = _code_scores(above, below, step, middle, high, low, factor, HEADS, CHUNK)
    else:
        score = _head_scores(above, high, low, scale, SCORING)
    if SCORING != 1:
        score = tl.where(score == score, score, float("inf"))
        in_group = tl.arange(0, HEADS) < GROUP
        score = tl.max(tl.where(in_group[:, None], score, float("-inf")), 0)
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
    SOON: tl.constexpr, INT8: tl.constexpr, NEW: tl.constexpr, LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """REPEAT chunks of blocks of one query and KV head: summaries that are missing, then scores.
    INT8: the summaries are codes; their products have two rows for a head."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    HEADS: tl.constexpr = ROWS // 2 if INT8 else ROWS
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
    bounds_at, behind = summaries_at(bounds, b * kv_heads + h, N, D, PARTS, INT8)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    done = blocks_done(progress, b, low)
    g = tl.arange(0, HEADS)
    r = tl.arange(0, ROWS) % HEADS
    d = tl.arange(0, DP)
    in_group = g < GROUP
    q_at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(
        q_at, mask=(r < GROUP)[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg"
    )
    if SOON:  # while the length is on its way; what lies past it counts for nothing
        j = chunk * CHUNK + tl.arange(0, CHUNK)
        high, deep, factor = _summaries(bounds_at, behind, j, N, D, DP, SCORING, INT8)
        above, below, step, middle = _ready(query, behind, GROUP, HEADS, D, DP, SCORING, INT8)
        score = _scores(
            above, below, step, middle, high, deep, factor, scale, GROUP, HEADS, CHUNK, SCORING,
            INT8,
        )  # fmt: skip
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
                k + b * k_b + h.to(tl.int64) * k_h, mask_at, bounds_at, behind, begin, end, 1, done,
                low, k_s, D, DP, BLOCK, PARTS, INT8, key_mask is not None,
            )  # fmt: skip
            tl.debug_barrier()  # other warps load what one has stored
            if SOON:  # Once more. Summaries that were read in either way would be unpacked in both.
                j = chunk * CHUNK + tl.arange(0, CHUNK)
                high, deep, factor = _summaries(bounds_at, behind, j, N, D, DP, SCORING, INT8)
                above, below, step, middle = _ready(
                    query, behind, GROUP, HEADS, D, DP, SCORING, INT8
                )
                score = _scores(
                    above, below, step, middle, high, deep, factor, scale, GROUP, HEADS, CHUNK,
                    SCORING, INT8,
                )  # fmt: skip
        if not SOON:
            above, below, step, middle = _ready(query, behind, GROUP, HEADS, D, DP, SCORING, INT8)
        own = heads_at
        if SCORING == 1:
            own = heads_at + row * GROUP * (N + chunks) + g
        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        for i in tl.range(0, REPEAT, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            j = (chunk + i) * CHUNK + tl.arange(0, CHUNK)
            if not SOON:
                high, deep, factor = _summaries(bounds_at, behind, j, limit, D, DP, SCORING, INT8)
                score = _scores(
                    above, below, step, middle, high, deep, factor, scale, GROUP, HEADS, CHUNK,  # pyright: ignore[reportPossiblyUnboundVariable]
                    SCORING, INT8,
                )  # fmt: skip
            usable = (j >= SINK) & (j < limit)
            if key_mask is not None:
                usable = usable & _seen(key_mask, b, mask_b, low, j, limit, BLOCK)
            if SCORING == 1:
                chunk_at = own + (N + chunk + i) * GROUP
                _store_heads(score, usable, j, limit, own, chunk_at, in_group, GROUP)  # pyright: ignore[reportPossiblyUnboundVariable]
            else:
                _hand_on(score, j, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)  # pyright: ignore[reportPossiblyUnboundVariable]


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
def _keys_to_sort(at, limit, SIZE: tl.constexpr):
    """All keys of a row, in another order: a sort compares neighbours most, and with four warps
    neighbours are one thread's here."""
    if SIZE >= 512:
        j = tl.arange(0, SIZE // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        key = tl.reshape(_load_keys(at + j, j < limit), [SIZE // 256, 4, 32, 2])
        key = tl.reshape(tl.permute(key, (1, 2, 0, 3)), [SIZE])
    else:
        j = tl.arange(0, SIZE)
        key = _load_keys(at + j, j < limit)
    return key


@triton.jit
def _finalists(
    best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The members [KP * MEMBERS] of the KP groups with the best maxima, and which of them there
    are: among them are the KP best keys, as keys are distinct."""
    group = tl.topk(_keys_to_sort(best_at, tl.cdiv(limit, MEMBERS), WIDE), KP)
    j = (_index(group) // MEMBERS)[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
    inside = (group > -0x7FFFFFFFFFFFFFFF)[:, None] & (j < limit)
    j = tl.where(inside, j, limit)
    return tl.reshape(j, [KP * MEMBERS])


@triton.jit
def best_keys(
    scores_at, best_at, limit, KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
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
