"""Which key blocks each query block attends to, never T x T.

Key block r of a query block is *valid* iff a query of the block sees a key in it (causality,
padding, `key_mask`, `block_mask`). Its score is

    score(r) = max q[t].k[s]   over the pairs (t, s) that see each other; unscaled, a NaN is -inf

A search finds up to `top_k` valid blocks of high score. Lists have the total order (score
descending, then block ascending). So the same inputs give the same bits on every path, wherever
the arithmetic is exact.

search="bounds", flat
    The block of a query block's first query and those behind it are its *own*. Every earlier block
    has a bound, from the block's channelwise max and min over the keys that the masks show:

        bound(r) = sum_d max(m_d max_rd, m_d min_rd),   m = sum_t q[t] / query_block

    over t in the query block, values that are not finite left out. For each of the block's keys,
    m . k is at most bound(r). A shown key that is not finite makes the bound +inf. The `4 top_k`
    valid earlier blocks of highest bound, ties to the lower block, are scored, and so are the valid
    own ones. The best `top_k` of these are the list: with at most `4 top_k` valid earlier blocks
    the best of all.
search="branches", hierarchical, near-linear in the context
    `top_k` branches divide the interval from the first to the last valid block into equal parts;
    the first ones get the remainder. ceil(log2(blocks)) times, each branch [a, b) is split at
    a + ceil((b - a) / 2). The first valid block of a part represents it. The best `top_k` of the
    parts are kept, by the total order and then (branch, part) ascending. A part that contains its
    branch's representative has the same score: one new score a branch and iteration.

With a `gap`, a list is shortened after the search, by what each query prefers. Let score(t, r) be
the largest q[t].k[s] over the keys s of r that query t sees, and best(t) the largest score(t, r)
over the list. A listed block stays where

    score(t, r) >= best(t) - gap    for a query t of the block; a score of -inf is near to nothing

So where a few keys dominate each query's scores, a list has few blocks; where scores are flat, it
has up to `top_k`. For every query that sees a key of a dropped block, some listed key has more than
e^(scale gap) times that key's weight in the softmax.

Sources: STREAM (Rosser et al., 2025), appendices A and B, and section 10 for lists by the gap of
scores; the bound is Quest's (Tang et al., 2024) (docs/papers.md).
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import NO_MASK, mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.views import cache_of, query_of, rows_of, shape_of, steps_of
from attnplug.ops.stream.bounds import RankPlan, launch_bounds
from attnplug.ops.stream.kernels import refine as kernels
from attnplug.ops.stream.kernels.refine import Allowed, Budget, Search
from attnplug.ops.stream.reference import search_rows, summarise

NAME = "stream_mask"
SCHEMA = (
    "stream_mask(Tensor q, Tensor k, int query_block, int block, int top_k, Tensor? budget, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, Tensor? block_mask, str search, "
    "float? gap) -> (Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
BLOCKS = (16, 32, 64, 128)
MAX_BRANCHES = 128
SEARCHES = ("branches", "bounds")


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
    search: str = "bounds",
    gap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The key blocks that each query head's query blocks attend to, best first (see above).

    Query blocks count from the first real query of the call, key blocks from `start`. With T = 1
    the only query block is the last token.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; the last T tokens of each row.
        k: `[B, Hkv, S, D]` like q; any strides, both.
        query_block: queries a block: 16, 32, 64 or 128.
        block: keys a block: 16, 32, 64 or 128.
        top_k: the most blocks of one query block's list, and its branches: 1 to 128.
        budget: int32 or int64 `[B or 1, Hq or 1, NQ]`, the `top_k` of each query block, cut to 0 to
            `top_k`: its list is what `top_k=budget` gives, padded. None: `top_k`.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        block_mask: bool `[B or 1, Hq or 1, NQ, NK]`, False where a query block must not see a key
            block; any strides.
        search: "bounds" or "branches". "bounds" reads all keys once, whatever T is.
        gap: drops the far blocks of each list (above), at least 0, in the units of a score. None:
            drops none.

    Returns:
        index: int32 `[B, Hq, NQ, top_k]`, NQ = ceil(T / query_block), NK = ceil(S / block); -1
            behind the last block of a list that is shorter.
        score: float32, like index; -inf there.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k)
    rows = lengths, start, key_mask
    return _stream_mask(q, k, query_block, block, top_k, budget, *rows, block_mask, search, gap)


def _allocate(
    q, k, query_block, block, top_k, budget, lengths, start, key_mask, block_mask, search, gap
):
    check_attention_inputs(NAME, q, k, k)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    for label, size in (("query_block", query_block), ("block", block)):
        if size not in BLOCKS:
            raise ArgumentError(f"{NAME}: {label} is {size}, needs {', '.join(map(str, BLOCKS))}")
    if not 1 <= top_k <= MAX_BRANCHES:
        raise ArgumentError(f"{NAME}: top_k is {top_k}, needs 1 to {MAX_BRANCHES}")
    if search not in SEARCHES:
        raise ArgumentError(f"{NAME}: search is {search!r}, needs {' or '.join(SEARCHES)}")
    if gap is not None and not 0 <= gap < float("inf"):
        raise ArgumentError(f"{NAME}: gap is {gap}, needs a number from 0 on")
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


# --- CPU: the specification, in reference.py ---------------------------------------------------


def _cpu(*args):
    call, (index, score) = Call(*args[:-2]), args[-2:]
    q, k, key_mask, block_mask = call.q, call.k, call.key_mask, call.block_mask
    query_block, block, budget = call.query_block, call.block, call.budget
    lengths, start = rows_on_cpu(k, call.lengths, call.start)
    if budget is None:
        budget = torch.full((1, 1, index.shape[2]), call.top_k, dtype=torch.int64, device="cpu")
    keys = k[:, :, : max(int(lengths.max()), 0)].float().contiguous().numpy()
    mask = NO_MASK if key_mask is None else key_mask.contiguous().numpy()
    allowed = np.empty((1, 1, index.shape[2], 0), np.bool_)
    if block_mask is not None:
        allowed = block_mask.contiguous().numpy()
    rows = lengths.numpy(), start.numpy(), mask
    gap = np.float32(-1 if call.gap is None else call.gap)
    options = allowed, budget.long().contiguous().numpy(), gap, query_block, block
    queries, out = q.float().contiguous().numpy(), (index.numpy(), score.numpy())
    flat = call.search == "bounds"
    summaries = np.empty((*keys.shape[:2], 0, 2, keys.shape[3]), np.float32)
    if flat:
        summaries = summarise(keys, *rows, block)
    search_rows(queries, keys, summaries, flat, *rows, *options, *out)


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
    key_bytes = padded_width(width) * itemsize
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


def _shared(call, index, score):
    """The kernels' arguments that do not depend on the search or its plan."""
    key_mask, block_mask, budget = call.key_mask, call.block_mask, call.budget
    top_k = call.top_k
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k))
    after, before = _nearest_keys(key_mask)
    strides = _broadcast_strides(block_mask, 4)
    rows = min(call.query_block, max(16, next_power_of_two(q.shape[2])))
    return {
        "q": query_of(q),
        "cache": cache_of(k, None),
        "rows": rows_of(k.shape[2], call.lengths, call.start, mask_bytes(key_mask)),
        "index": index,
        "score": score,
        "after": after,
        "before": before,
        "allowed": Allowed(None if block_mask is None else block_mask.view(torch.uint8), *strides),
        "budget": None if budget is None else Budget(budget, *_broadcast_strides(budget, 3)),
        "gap": call.gap,
        "SHAPE": shape_of(q, k, rows=rows),
        "SEARCH": Search(call.query_block, call.block, top_k, max(2, next_power_of_two(top_k))),
        "STEPS": steps_of(call.lengths, call.start),
    }


def launch_stream_mask(*args, plan: Plan | RankPlan | None = None):
    """Run the kernels; tensors as in `stream_mask`, on a GPU or in Triton's interpreter. For
    branches they need memory beside the outputs only with a `key_mask`, two int32 a key."""
    call, (index, score) = Call(*args[:-2]), args[-2:]
    if index.numel() == 0:
        return
    shared = _shared(call, index, score)
    if call.search == "bounds":
        assert not isinstance(plan, Plan)
        launch_bounds(shared, plan)
    else:
        assert not isinstance(plan, RankPlan)
        _launch_branches(shared, plan)


def _launch_branches(shared, plan: Plan | None):
    k, index, group, budget = (
        shared["cache"].k,
        shared["index"],
        shared["SHAPE"].GROUP,
        shared["budget"],
    )
    if plan is None:
        of_heads = (budget and budget.at, shared["allowed"].at)
        alike = all(x is None or x.shape[1] == 1 for x in of_heads)
        shape = shared["SHAPE"].ROWS, group, shared["SEARCH"].BLOCK, k.shape[3], k.element_size()
        plan = plan_for(*shape, alike, masked=shared["rows"].key_mask is not None)
    batch, heads, slots, _ = index.shape
    launch_kernel(
        kernels.seed,
        grid=(slots, k.shape[1] * cdiv(group, plan.heads), batch),
        **{name: value for name, value in shared.items() if name != "gap"},
        TILE=plan.tile,
        STAGES=plan.seed_stages,
        HEADS=plan.heads,
        num_warps=plan.seed_warps,
    )
    launch_kernel(
        kernels.refine,
        grid=(slots, heads, batch),
        **shared,
        TILE=plan.tile,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )


_stream_mask = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_stream_mask,
)
