"""Which key blocks each query block attends to, found by hierarchical refinement: near-linear in
the context, never T x T.

Key block r of a query block is *valid* iff a query of the block sees a key in it (causality,
padding, `key_mask`, `block_mask`). Its score is

    score(r) = max q[t].k[s]   over the pairs (t, s) that see each other; unscaled, a NaN is -inf

`top_k` branches divide the interval from the first to the last valid block into equal parts; the
first ones get the remainder. ceil(log2(blocks)) times, each branch [a, b) is split at
a + ceil((b - a) / 2). The first valid block of a part represents it, and the best `top_k` of the
parts are kept by the total order (score descending, then block, branch, part ascending). So the
same inputs give the same bits on every path, wherever the arithmetic of the scores is exact.

A part that contains its branch's representative has the same score: one new score a branch and
iteration. Source: STREAM (Rosser et al., 2025), appendices A and B (docs/papers.md).
"""

from typing import NamedTuple

import numba
import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import define_op, refuse_gradients
from attnplug.ops.common.product import add_product
from attnplug.ops.common.rows import NO_MASK, mask_bytes, row_step, rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.stream.kernels import refine as kernels

NAME = "stream_mask"
BLOCKS = (16, 32, 64, 128)
MAX_BRANCHES = 128


def stream_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    query_block: int = 64,
    block: int = 64,
    top_k: int = 32,
    budget: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key blocks that each query head's query blocks attend to, best first (see above).

    Query blocks count from the first real query of the call, key blocks from `start`. With T = 1
    the only query block is the last token.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; the last T tokens of each row.
        k: `[B, Hkv, S, D]` like q; any strides, both.
        query_block: queries a block: 16, 32, 64 or 128.
        block: keys a block: 16, 32, 64 or 128.
        top_k: branches, and so the most blocks of one query block: 1 to 128.
        budget: int32 or int64 `[B or 1, Hq or 1, NQ]`, branches of each query block, cut to 0 to
            `top_k`: its list is what `top_k=budget` gives, padded. None: `top_k`.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        block_mask: bool `[B or 1, Hq or 1, NQ, NK]`, False where a query block must not see a key
            block; any strides.

    Returns:
        index: int32 `[B, Hq, NQ, top_k]`, NQ = ceil(T / query_block), NK = ceil(S / block); -1
            where there are fewer.
        score: float32, like index; -inf there.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k)
    return _stream_mask(
        q, k, query_block, block, top_k, budget, lengths, start, key_mask, block_mask
    )


def _allocate(q, k, query_block, block, top_k, budget, lengths, start, key_mask, block_mask):
    check_attention_inputs(NAME, q, k, k)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    for label, size in (("query_block", query_block), ("block", block)):
        if size not in BLOCKS:
            raise ArgumentError(f"{NAME}: {label} is {size}, needs {', '.join(map(str, BLOCKS))}")
    if not 1 <= top_k <= MAX_BRANCHES:
        raise ArgumentError(f"{NAME}: top_k is {top_k}, needs 1 to {MAX_BRANCHES}")
    batch, heads, queries = q.shape[:3]
    slots = -(-queries // query_block)
    if budget is not None:
        if budget.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"{NAME}: budget is {budget.dtype}, needs int32 or int64")
        _check_shape(q, "budget", budget, "[B or 1, Hq or 1, NQ]", (slots,))
    if block_mask is not None:
        if block_mask.dtype != torch.bool:
            raise ArgumentError(f"{NAME}: block_mask is {block_mask.dtype}, needs bool")
        ends = (slots, -(-k.shape[2] // block))
        _check_shape(q, "block_mask", block_mask, "[B or 1, Hq or 1, NQ, NK]", ends)
    shape = (batch, heads, slots, top_k)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)


def _check_shape(q, label, tensor, names, ends):
    """`tensor` is `[B or 1, Hq or 1, *ends]` on q's device."""
    shape = tuple(tensor.shape)
    if (
        len(shape) != 2 + len(ends)
        or shape[0] not in (1, q.shape[0])
        or shape[1] not in (1, q.shape[1])
        or shape[2:] != ends
    ):
        wanted = ", ".join(map(str, (*q.shape[:2], *ends)))
        raise ArgumentError(f"{NAME}: {label} has shape {shape}, needs {names} = [{wanted}]")
    if tensor.device != q.device:
        raise ArgumentError(f"{NAME}: {label} is on {tensor.device}, q on {q.device}")


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _score(q, k, mask, position, first):
    """Largest product of queries `q [M, D]`, at `position` on, and keys `k [N, D]`, at `first`
    on, that see each other."""
    products = np.zeros((q.shape[0], k.shape[0]), np.float32)
    add_product(q, np.ascontiguousarray(k.T), products)
    best = np.float32(-np.inf)
    for m in range(q.shape[0]):
        for n in range(min(k.shape[0], position + m - first + 1)):
            if (mask.shape[0] == 0 or mask[first + n]) and products[m, n] > best:
                best = products[m, n]  # a NaN is never larger
    return best


@numba.njit(cache=True)
def _first_valid(valid, a, b):
    for r in range(a, b):
        if valid[r]:
            return r
    return -1


@numba.njit(cache=True)
def _before(score, r, other_score, other):
    """Whether candidate (score, r) comes before the other; r = -1 stands for none. Two that tie
    stay in the order of branch and part, in which they are offered."""
    if other == -1 or r == -1:
        return r != -1
    return score > other_score or (score == other_score and r < other)


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _lists(size):
    return (
        np.full(size, -np.inf, np.float32),
        np.full(size, -1, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )


@numba.njit(cache=True)
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


@numba.njit(parallel=True, cache=True)
def _reference(q, k, lengths, start, mask, block_mask, budget, query_block, block, index, score):
    """Every (row, query head, query block), in parallel."""
    batch, heads, queries, _ = q.shape
    group, slots = heads // k.shape[1], index.shape[2]
    for item in numba.prange(batch * heads * slots):
        b, h, i = item // (heads * slots), item // slots % heads, item % slots
        offset = lengths[b] - queries
        t = max(0, start[b] - offset) + i * query_block
        until = min(t + query_block, queries)
        branches = max(min(budget[b % len(budget), h % budget.shape[1], i], index.shape[3]), 0)
        index[b, h, i] = -1
        score[b, h, i] = -np.inf
        if t >= queries or branches == 0:
            continue
        hidden = mask[b * len(mask) // batch]
        position = offset + until - 1
        allowed = block_mask[b % len(block_mask), h % block_mask.shape[1], i]
        valid = _valid_blocks(hidden, allowed, start[b], position, block)
        row, keys = q[b, h, t:until], k[b, h // group, : position + 1]
        scores, blocks = _refine(row, keys, hidden, valid, offset + t, start[b], block, branches)
        index[b, h, i, :branches] = blocks
        score[b, h, i, :branches] = scores


def _cpu(
    q, k, query_block, block, top_k, budget, lengths, start, key_mask, block_mask, index, score
):
    lengths, start = rows_on_cpu(k, lengths, start)
    if budget is None:
        budget = torch.full((1, 1, index.shape[2]), top_k)
    _reference(
        q.float().contiguous().numpy(),
        k[:, :, : max(int(lengths.max()), 0)].float().contiguous().numpy(),
        lengths.numpy(),
        start.numpy(),
        NO_MASK if key_mask is None else key_mask.contiguous().numpy(),
        np.empty((1, 1, index.shape[2], 0), np.bool_)
        if block_mask is None
        else block_mask.contiguous().numpy(),
        budget.long().contiguous().numpy(),
        query_block,
        block,
        index.numpy(),
        score.numpy(),
    )


# --- CUDA: the scores that a group's heads share, then each head's refinement ------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    heads: int  # of one group, that share the key tiles of the first iteration
    tile: int  # keys that a program reads at once
    seed_warps: int
    warps: int
    # Of the pipelines over keys. A loop gets one only after a GPU has compared it: Triton 3.6
    # silently compiled such a loop over gathered keys to wrong code (block_sparse_attention).
    seed_stages: int = 1
    stages: int = 1


def plan_for(
    rows: int, group: int, block: int, width: int, itemsize: int, alike: bool, masked: bool = False
) -> Plan:
    """The plan of a shape: `rows` queries a block; the heads of a group look at the same blocks in
    the first iteration where they are `alike`; keys are `masked` one by one or not."""
    key_bytes = next_power_of_two(width) * itemsize
    room = max(1, min(256 // rows, 65536 // (rows * key_bytes)))  # 64 KiB of queries
    heads = min(next_power_of_two(group), 1 << room.bit_length() - 1) if alike else 1
    tile = max(16, min(block, 32768 // key_bytes))
    warps = 8 if rows == 128 else 4
    pipelined = key_bytes == 256 and itemsize == 2 and block == rows == 64 and not masked
    return Plan(heads, tile, 8 if heads * rows >= 128 else 4, warps, 1, 3 if pipelined else 1)


def _nearest_keys(key_mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """For every key the next one that the mask shows, itself included (S where none is left), and
    the last one so far (-1), int32 `[B, S]`."""
    if key_mask is None:
        return None, None
    size = key_mask.shape[1]
    at = torch.arange(size, dtype=torch.int32, device=key_mask.device)
    after = torch.where(key_mask, at, size).flip(1).cummin(1).values.flip(1)
    return after.int().contiguous(), torch.where(key_mask, at, -1).int().cummax(1).values


def _broadcast_strides(tensor: torch.Tensor | None, dimensions: int) -> tuple[int, ...]:
    """The strides of an optional `[B or 1, Hq or 1, ...]`, 0 where a dimension is shared."""
    if tensor is None:
        return (0,) * dimensions
    return tuple(s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def launch_stream_mask(
    q,
    k,
    query_block,
    block,
    top_k,
    budget,
    lengths,
    start,
    key_mask,
    block_mask,
    index,
    score,
    plan=None,
):
    """Run the kernels; tensors as in `stream_mask`, on a GPU or in Triton's interpreter. Only with
    a `key_mask` do they need memory beside the outputs: two int32 a key."""
    if index.numel() == 0:
        return
    batch, heads, queries, width = q.shape
    kv_heads, slots = k.shape[1], index.shape[2]
    group = heads // kv_heads
    rows = min(query_block, max(16, next_power_of_two(queries)))
    if plan is None:
        alike = all(x is None or x.shape[1] == 1 for x in (budget, block_mask))
        masked = key_mask is not None
        plan = plan_for(rows, group, block, width, q.element_size(), alike, masked)
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    after, before = _nearest_keys(key_mask)
    key_mask = mask_bytes(key_mask)
    shared = {
        "q": q,
        "k": k,
        "index": index,
        "score": score,
        "lengths": lengths,
        "start": start,
        "key_mask": key_mask,
        "after": after,
        "before": before,
        "block_mask": None if block_mask is None else block_mask.view(torch.uint8),
        "budget": budget,
        "T": queries,
        "S": k.shape[2],
        "q_strides": q.stride()[:3],
        "k_strides": k.stride()[:3],
        "mask_stride": 0 if key_mask is None else key_mask.stride(0),
        "allowed_strides": _broadcast_strides(block_mask, 4),
        "budget_strides": _broadcast_strides(budget, 3),
        "GROUP": group,
        "D": width,
        "DP": next_power_of_two(width),
        "QUERY_BLOCK": query_block,
        "ROWS": rows,
        "BLOCK": block,
        "TILE": plan.tile,
        "K": top_k,
        "KP": max(2, next_power_of_two(top_k)),
        "LENGTH_STEP": row_step(lengths),
        "START_STEP": row_step(start),
    }
    kernels.seed.run(
        grid=(slots, kv_heads * cdiv(group, plan.heads), batch),
        warmup=False,
        **shared,
        STAGES=plan.seed_stages,
        HEADS=plan.heads,
        num_warps=plan.seed_warps,
    )
    kernels.refine.run(
        grid=(slots, heads, batch), warmup=False, **shared, STAGES=plan.stages, num_warps=plan.warps
    )


_stream_mask = define_op(
    "stream_mask(Tensor q, Tensor k, int query_block, int block, int top_k, Tensor? budget, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, Tensor? block_mask) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_stream_mask,
)
