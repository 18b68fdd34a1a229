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
def _head_scores(
    query, bounds_at, j, limit, in_width, scale,
    D: tl.constexpr, DP: tl.constexpr, SCORING: tl.constexpr,
):  # fmt: skip
    """[ROWS, CHUNK] scores of blocks j for every head; for "mean", row 0 is that of the mean."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    at = bounds_at + j[:, None] * (PARTS * D) + tl.arange(0, DP)[None, :]
    readable = (j < limit)[:, None] & in_width[None, :]
    high = tl.load(at, mask=readable, other=0.0)
    if SCORING == 2:
        score = tl.dot(query, high.to(query.dtype).T, input_precision="ieee")
    else:
        low = tl.load(at + D, mask=readable, other=0.0)
        if SCORING == 0:
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
def score_blocks(
    q, k, bounds, progress, lengths, start, key_mask, scores, best, heads_at, scale,
    T, S, N, chunks, q_b, q_h, q_t, k_b, k_h, k_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, SCORING: tl.constexpr,
    CHUNK: tl.constexpr, MEMBERS: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of blocks of one query and KV head: summaries that are missing, then scores."""
    PARTS: tl.constexpr = 1 if SCORING == 2 else 2
    chunk = tl.program_id(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    limit = (length - T + t - low) // BLOCK - LOCAL + 1
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    if chunk * CHUNK < limit:
        kv_heads = tl.num_programs(1) // T
        row = (b * kv_heads + h) * T + t
        bounds_at = bounds + (b * kv_heads + h) * N * (PARTS * D)
        done = blocks_done(progress, b, low)
        end = tl.minimum((chunk + 1) * CHUNK, limit)
        if done < end:
            mask_at = k
            if key_mask is not None:
                mask_at = key_mask + b * mask_b
            # The queries of one row may do the same blocks at once: they write the same.
            refresh_blocks(
                k + b * k_b + h.to(tl.int64) * k_h, mask_at, bounds_at,
                tl.maximum(chunk * CHUNK, done), end, 1, low, k_s,
                D, DP, BLOCK, PARTS, key_mask is not None,
            )  # fmt: skip
            tl.debug_barrier()  # other warps load what one has stored
        g = tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        in_width = d < D
        in_group = g < GROUP
        q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
        query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
        if SCORING == 2:  # the mean over the group is a product with ones: every row holds it
            mean = tl.sum(query.to(tl.float32), 0) / GROUP
            query = tl.zeros([ROWS, DP], tl.float32) + mean[None, :]
        score = _head_scores(query, bounds_at, j, limit, in_width, scale, D, DP, SCORING)
        if SCORING == 1:
            usable = (j >= SINK) & (j < limit)
            if key_mask is not None:
                usable = usable & _seen(key_mask, b, mask_b, low, j, limit, BLOCK)
            score = tl.where(usable[None, :], score, float("-inf"))
            own = heads_at + row * GROUP * (N + chunks) + g
            tl.store(
                own[:, None] + j[None, :] * GROUP,
                score,
                mask=in_group[:, None] & (j < limit)[None, :],
            )
            finite = tl.where(score < float("inf"), score, float("-inf"))  # neither NaN nor inf
            top = tl.max(finite, 1)
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp(finite - shift[:, None]), 1)
            lse = shift + tl.log(tl.where(total > 0, total, 1.0))
            lse = tl.where(total > 0, lse, float("-inf"))
            tl.store(own + (N + chunk) * GROUP, lse, mask=in_group)
        else:
            number = in_group[:, None] & (score == score)
            odd = tl.sum((in_group[:, None] & (score != score)).to(tl.int32), 0) > 0
            score = tl.max(tl.where(number, score, float("-inf")), 0)
            score = tl.where(odd, float("inf"), score)
            usable = (j >= SINK) & (j < limit)
            if key_mask is not None:
                usable = usable & _seen(key_mask, b, mask_b, low, j, limit, BLOCK)
            best_at = best
            if MEMBERS > 0:
                best_at = best + row * tl.cdiv(N, MEMBERS)
            _hand_on(score, j, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)


@triton.jit
def combine_heads(
    scores, best, heads_at, lengths, start, T, S, N, chunks, kv_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOCAL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MEMBERS: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """log sum over the heads of each one's softmax over the candidates, for one chunk."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(lengths, start, row // (kv_heads * T), S, LENGTH_STEP, START_STEP)
    limit = (length - T + row.to(tl.int32) % T - low) // BLOCK - LOCAL + 1
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
def select_best(
    scores, best, progress, lengths, start, out, T, S, N, kv_heads,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, WIDE: tl.constexpr, MEMBERS: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best K of one row's keys; its first program notes which summaries are done now."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b = row // (kv_heads * T)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    limit = (length - T + row.to(tl.int32) % T - low) // BLOCK - LOCAL + 1
    none = -0x7FFFFFFFFFFFFFFF
    i = tl.arange(0, WIDE)
    # .cg: an L1 line may be older than the keys, which other multiprocessors wrote.
    if MEMBERS == 0:
        key = tl.load(scores + row * N + i, mask=i < limit, other=none, cache_modifier=".cg")
    else:
        # The K best are in the K groups with the best maxima: keys are distinct.
        at = best + row * tl.cdiv(N, MEMBERS) + i
        group = tl.load(at, mask=i * MEMBERS < limit, other=none, cache_modifier=".cg")
        group = tl.topk(group, KP)
        j = (_index(group) // MEMBERS)[:, None] * MEMBERS + tl.arange(0, MEMBERS)[None, :]
        inside = (group > none)[:, None] & (j < limit)
        key = tl.load(scores + row * N + j, mask=inside, other=none, cache_modifier=".cg")
        key = tl.reshape(key, [KP * MEMBERS])
    key = tl.topk(key, KP)
    n = tl.arange(0, KP)
    tl.store(out + row * K + n, tl.where(key > none, _index(key), -1), mask=n < K)
    if row % (kv_heads * T) == 0:
        last = (length - 1 - low) // BLOCK - LOCAL + 1
        note_progress(progress, b, low, tl.maximum(last, 0))
