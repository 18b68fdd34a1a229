"""Which key blocks a decode step should read: the best of each KV head by a score of their
summaries.

    bounds     max_g relu(q_g) . max_j - relu(-q_g) . min_j          no key of block j scores higher
    estimate   log sum_g softmax_j(e_gj),   e_gj = scale q_g . (max_j + min_j) / 2
                                                   + sum_d (scale q_gd (max_jd - min_jd) / 4)^2 / 2
    mean       mean_g q_g . mean_j

over the query heads g of the group. Candidates are the blocks between the sink and the last
`local` blocks; a block none of whose keys the mask lets through is none. The best `top_k` are
taken, ties to the lower index. A block with a NaN or infinite key, whose score is then NaN or
infinite, comes first: it must surface. Missing summaries are made on the way (`block_bounds`).
Sources: Quest (Tang et al., 2024); "Attention Pays Its Bill" (shared/papers/000).
"""

from typing import NamedTuple

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.errors import ArgumentError
from attnplug.ops._define import (
    check_attention_inputs,
    check_sequence_inputs,
    define_op,
    refuse_gradients,
)
from attnplug.ops._splits import machine
from attnplug.ops.block_bounds import (
    NO_MASK,
    blocks_done,
    check_bounds,
    length_step,
    mask_bytes,
    note_progress,
    refresh_blocks,
    refresh_on_cpu,
    row_span,
    rows_on_cpu,
)

SCORINGS = ("bounds", "estimate", "mean")
MAX_BLOCKS = 256


def select_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    bounds: torch.Tensor,
    progress: torch.Tensor,
    *,
    scale: float,
    block: int,
    top_k: int,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best distant key blocks of every query and KV head; makes missing summaries first.

    The query at position p of a row looks at the blocks from `sink` to
    `(p - start) // block - local`, both included: all of them are complete.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; the last T tokens of each row.
        k: `[B, Hkv, S, D]` like q, a cache that holds these tokens already.
        bounds: `[B, Hkv, ceil(S / block), 2, D]`, for `scoring` "mean" 1 for 2, like k; written.
        progress: int32 `[B, 2]`; written. Both as `block_bounds` keeps them.
        scale: factor on q.k, above 0.
        block: keys a block: 16, 32, 64 or 128.
        top_k: blocks to take, 0 to 256.
        sink: first blocks that are read anyway.
        local: last blocks that are read anyway, the query's own included; at least 1.
        scoring: "bounds", "estimate" or "mean".
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.

    Returns:
        int32 `[B, Hkv, T, top_k]`, blocks counted from `start`, best first, -1 where there are
        fewer.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("select_blocks", q, k)
    return _select_blocks(
        q, k, bounds, progress, scale, block, top_k, sink, local, scoring, lengths, start, key_mask
    )


def _allocate(
    q, k, bounds, progress, scale, block, top_k, sink, local, scoring, lengths, start, key_mask
):
    name = "select_blocks"
    check_attention_inputs(name, q, k, k)
    check_sequence_inputs(name, q, k, lengths, start, key_mask)
    check_bounds(name, k, bounds, progress, block)
    if not scale > 0:
        raise ArgumentError(f"{name}: scale is {scale}, needs a number above 0")
    if not 0 <= top_k <= MAX_BLOCKS:
        raise ArgumentError(f"{name}: top_k is {top_k}, needs 0 to {MAX_BLOCKS}")
    if sink < 0:
        raise ArgumentError(f"{name}: sink is {sink}, needs at least 0")
    if local < 1:
        raise ArgumentError(f"{name}: local is {local}, needs at least 1, the query's own block")
    if scoring not in SCORINGS:
        raise ArgumentError(f"{name}: scoring is {scoring!r}, needs {', '.join(SCORINGS)}")
    parts = 1 if scoring == "mean" else 2
    if bounds.shape[3] != parts:
        raise ArgumentError(
            f"{name}: bounds has {bounds.shape[3]} parts, scoring {scoring!r} needs {parts}"
        )
    shape = (q.shape[0], k.shape[1], q.shape[2], top_k)
    return q.new_empty(shape, dtype=torch.int32)


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def _bound(q, high, low):
    score = np.float32(0.0)
    for d in range(q.shape[0]):
        score += q[d] * (high[d] if q[d] > 0 else low[d])
    return score


@numba.njit(cache=True)
def _estimate(q, high, low, scale):
    score = np.float32(0.0)
    for d in range(q.shape[0]):
        x = q[d] * scale
        spread = x * (high[d] - low[d]) * np.float32(0.25)
        score += x * (high[d] + low[d]) * np.float32(0.5) + np.float32(0.5) * spread * spread
    return score


@numba.njit(cache=True)
def _scores(q, bounds, scale, scoring):
    """float32 scores `[blocks]` of summaries `bounds [blocks, parts, D]` for a group `q [G, D]`."""
    group, blocks = q.shape[0], bounds.shape[0]
    scores = np.full(blocks, -np.inf, np.float32)
    if scoring == 1:
        for g in range(group):
            own = np.empty(blocks, np.float32)
            for j in range(blocks):
                own[j] = _estimate(q[g], bounds[j, 0], bounds[j, 1], scale)
            top, total = np.float32(-np.inf), np.float32(0.0)
            for x in own:  # a block that is not finite comes first anyway, and not alone
                top = max(top, x) if x < np.inf else top
            for x in own:
                total += np.exp(x - top) if x < np.inf else np.float32(0.0)
            for j in range(blocks):
                scores[j] = np.logaddexp(scores[j], own[j] - top - np.log(total))
    elif scoring == 2:
        mean = np.zeros(q.shape[1], np.float32)
        for g in range(group):
            mean += q[g] / np.float32(group)
        for j in range(blocks):
            score = np.float32(0.0)
            for d in range(mean.shape[0]):
                score += mean[d] * bounds[j, 0, d]
            scores[j] = score
    else:
        for j in range(blocks):
            for g in range(group):
                score = _bound(q[g], bounds[j, 0], bounds[j, 1])
                scores[j] = score if score > scores[j] or score != score else scores[j]
    return scores


@numba.njit(cache=True)
def _best(scores, allowed, out):
    """The allowed blocks of highest score, best first, into `out [top_k]`; NaN counts as inf."""
    best = np.empty(out.shape[0], np.float32)
    count = 0
    for j in range(scores.shape[0]):
        if not allowed[j]:
            continue
        score = scores[j] if scores[j] == scores[j] else np.float32(np.inf)
        if count < out.shape[0]:
            place, count = count, count + 1
        elif out.shape[0] > 0 and score > best[count - 1]:
            place = count - 1
        else:
            continue
        while place > 0 and score > best[place - 1]:
            best[place], out[place] = best[place - 1], out[place - 1]
            place -= 1
        best[place], out[place] = score, j
    out[count:] = -1


@numba.njit(parallel=True, cache=True)
def _reference(q, bounds, mask, lengths, start, scale, block, sink, local, scoring, out):
    """Scores and choice of every (row, KV head, query), in parallel."""
    batch, heads, queries, _ = q.shape
    kv_heads = bounds.shape[1]
    group = heads // kv_heads
    for item in numba.prange(batch * kv_heads * queries):
        b = item // (kv_heads * queries)
        h = item // queries % kv_heads
        t = item % queries
        position = lengths[b] - queries + t - start[b]
        end = max(position // block - local + 1, sink)
        allowed = np.ones(end - sink, np.bool_)
        hidden = mask[b * len(mask) // batch]
        if hidden.shape[0] > 0:
            for j in range(sink, end):
                first = start[b] + j * block
                allowed[j - sink] = hidden[first : first + block].any()
        shown = bounds[b, h, sink:end][allowed]
        scores = np.empty(end - sink, np.float32)
        scores[allowed] = _scores(q[b, h * group : h * group + group, t], shown, scale, scoring)
        _best(scores, allowed, out[b, h, t])
        for i in range(out.shape[3]):
            out[b, h, t, i] += sink if out[b, h, t, i] >= 0 else 0


def _cpu(
    q, k, bounds, progress, scale, block, top_k, sink, local, scoring, lengths, start, key_mask, out
):
    lengths, start = rows_on_cpu(k, lengths, start)
    until = ((lengths - 1 - start).clamp(min=0) // block - local + 1).clamp(min=0)
    refresh_on_cpu(k, key_mask, bounds, progress, start, until, block)
    _reference(
        q.float().contiguous().numpy(),
        bounds[:, :, : max(int(until.max()), sink)].float().numpy(),
        NO_MASK if key_mask is None else key_mask.numpy(),
        lengths.numpy(),
        start.numpy(),
        np.float32(scale),
        block,
        sink,
        local,
        SCORINGS.index(scoring),
        out.numpy(),
    )


# --- CUDA: refresh and score, then (for estimate) combine, then select -----------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    chunk: int  # blocks of one program of the score kernel
    members: int  # blocks whose maximum the score kernel hands on; 0: none, the selection is flat
    warps: int
    select_warps: int


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
def _score(
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
def _combine(
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
def _select(
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


def plan_for(rows: int, blocks: int, top_k: int, width: int, itemsize: int) -> Plan:
    """The pre-tuned plan of a shape. `blocks` is how many the cache has room for."""
    chunk = 16 if rows * blocks <= 4096 else 32 if rows * blocks <= 16384 else 64
    chunk = min(chunk, 16384 // (triton.next_power_of_2(width) * itemsize))  # 16 KiB of maxima
    members = 0
    if triton.next_power_of_2(blocks) > 512:  # flat, larger ones take long
        members = min(chunk, 16 if blocks <= 16384 else 32)
    return Plan(chunk, members, warps=4, select_warps=4 if top_k <= 64 else 8)


def launch_select_blocks(
    q, k, bounds, progress, scale, block, top_k, sink, local, scoring, lengths, start, key_mask,
    out, plan=None,
):  # fmt: skip
    """Run the kernels; tensors as in `select_blocks`, on a GPU or in Triton's interpreter."""
    batch, heads, queries, width = q.shape
    kv_heads, size, blocks = k.shape[1], k.shape[2], bounds.shape[2]
    group, rows = heads // kv_heads, batch * kv_heads * queries
    if plan is None:
        plan = plan_for(rows, blocks, top_k, width, q.element_size())
    pdl = machine(q.device)[1]
    dependent = {"launch_pdl": True} if pdl else {}
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    key_mask = mask_bytes(key_mask)
    chunks = triton.cdiv(blocks, plan.chunk)
    mode = SCORINGS.index(scoring)
    scores = torch.empty(rows * blocks, dtype=torch.int64, device=q.device)
    best = scores
    if plan.members:
        groups = rows * triton.cdiv(blocks, plan.members)
        best = torch.empty(groups, dtype=torch.int64, device=q.device)
    per_head = None
    if mode == 1:
        places = rows * group * (blocks + chunks)
        per_head = torch.empty(places, dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(group))
    steps = length_step(lengths), length_step(start)
    _score[(chunks, kv_heads * queries, batch)](
        q, k, bounds, progress, lengths, start, key_mask, scores, best, per_head, scale,
        queries, size, blocks, chunks, *q.stride()[:3], *k.stride()[:3],
        0 if key_mask is None else key_mask.stride(0),
        group, padded, width, triton.next_power_of_2(width), block, sink, local, mode,
        plan.chunk, plan.members, *steps, pdl,
        num_warps=plan.warps,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    if mode == 1:
        _combine[(chunks, rows)](
            scores, best, per_head, lengths, start, queries, size, blocks, chunks, kv_heads,
            group, padded, block, local, plan.chunk, triton.next_power_of_2(chunks), plan.members,
            *steps, pdl,
            num_warps=plan.warps, **dependent,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    kept = max(2, triton.next_power_of_2(top_k))
    wide = triton.cdiv(blocks, plan.members) if plan.members else blocks
    _select[(rows,)](
        scores, best, progress, lengths, start, out, queries, size, blocks, kv_heads,
        block, sink, local, top_k, kept, max(2 * kept, triton.next_power_of_2(wide)),
        plan.members, *steps, pdl,
        num_warps=plan.select_warps, **dependent,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


_select_blocks = define_op(
    "select_blocks(Tensor q, Tensor k, Tensor(a!) bounds, Tensor(b!) progress, float scale, "
    "int block, int top_k, int sink, int local, str scoring, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_select_blocks,
)
