"""Decode attention over a keep set of key blocks: the first ones, the last ones and a list.

    out[t] = sum_j p[t, j] v[j],   p[t, j] = exp(s[t, j]) / (sum_i exp(s[t, i]) + exp(sink)),
    s[t, j] = scale q[t].k[j]  (softcap: cap tanh(s / cap)),   lse[t] = log sum_i exp(s[t, i])

over the keys j <= pos(t) of the blocks that the query's KV head keeps. These are the first `sink`,
the last `local` up to the query's own, and the blocks listed in `index`. Blocks are numbered from
each row's first real token. The cost does not depend on the length.

The kept keys are cut in pieces. One program attends to each piece, and a second kernel merges the
pieces by their log-sum-exps (split-k). For large batches a row is one piece, and its program writes
the result itself (fused).

Sources: "Attention Pays Its Bill" (docs/papers.md); Flash-Decoding as in `dense_decode`.
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    BLOCKS,
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
)
from attnplug.ops.common.define import define_op, refuse_gradients
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, page_rows, table_at
from attnplug.ops.common.pipeline import Loop, stages_that_fit
from attnplug.ops.common.reference import arrays, reference_rows, sinks_on_cpu
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.softmax import base_two
from attnplug.ops.common.splits import launch_merge, pieces_of
from attnplug.ops.common.views import (
    Output,
    cache_of,
    chosen_between,
    query_of,
    rows_of,
    shape_of,
    steps_of,
    token_of,
)
from attnplug.ops.gather.attend_plan import looked_up, plan_for
from attnplug.ops.gather.kernels.attend import Turns, attend_kept
from attnplug.ops.gather.kernels.slots import Keep


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float,
    block: int,
    sink: int = 1,
    local: int = 4,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of the last T tokens over the key blocks that each KV head keeps.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16, made for T = 1.
        k, v: `[B, Hkv, S, D]` like q, Hkv dividing Hq; S is the size of the cache. With a table
            pages `[pages, Hkv, page, D]`, and S is `P * page`.
        index: int32 `[B, Hkv, T, K]`, blocks counted from `start`, none twice. -1 is passed over,
            and so are first and last blocks, and blocks after the query.
        scale: factor on q.k, commonly `D ** -0.5`.
        block: keys a block: 16, 32, 64 or 128.
        sink: first blocks that are always read.
        local: last blocks that are always read, the query's own included. 0: the list alone says.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.
        table: int32 `[B, P]`, the pages of each row, as `dense_decode` has it.

    Returns:
        out `[B, Hq, T, D]` of q's dtype and lse `[B, Hq, T]` float32 (natural logarithm, sinks left
        out). A query that sees no key gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("gather_attention", q, k, v, sinks)
    options = scale, block, sink, local, lengths, start, key_mask, softcap, sinks
    if table is not None:
        return _gather_attention_paged(q, k, v, index, table, *options)
    return _gather_attention(q, k, v, index, *options)


def allocate_attention(
    q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks, table=None,
    fp8=False,
):  # fmt: skip
    name = "gather_attention"
    check_attention_inputs(name, q, k, v, table, head_dims=WIDE_HEAD_DIMS, fp8=fp8)
    check_sequence_inputs(name, q, k, lengths, start, key_mask, table)
    batch, heads, queries, width = q.shape
    wanted = (batch, k.shape[1], queries)
    if index.dim() != 4 or tuple(index.shape[:3]) != wanted or index.dtype != torch.int32:
        raise ArgumentError(
            f"{name}: index is {index.dtype} {tuple(index.shape)}, needs int32 [B,Hkv,T,K] = "
            f"[{', '.join(map(str, wanted))}, K]"
        )
    if index.device != q.device:
        raise ArgumentError(f"{name}: index is on {index.device}, q on {q.device}")
    if block not in BLOCKS:
        raise ArgumentError(f"{name}: block is {block}, needs {', '.join(map(str, BLOCKS))}")
    if sink < 0:
        raise ArgumentError(f"{name}: sink is {sink}, needs at least 0")
    if local < 0:
        raise ArgumentError(f"{name}: local is {local}, needs at least 0")
    if sink + local + index.shape[3] == 0:
        raise ArgumentError(f"{name}: sink and local are 0 and index lists no block")
    if not softcap >= 0:
        raise ArgumentError(f"{name}: softcap is {softcap}, needs 0 (off) or a positive cap")
    if sinks is not None:
        check_sinks(name, q, sinks)
    return (
        q.new_empty((batch, heads, queries, width)),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def kept_keys(listed, position, start, mask, block, sink, local):
    """The keys that a query at `position` reads, ascending within each block; an empty `mask` hides
    nothing."""
    own = (position - start) // block
    seen = max(own + 1, 0)  # blocks up to the query's
    sink, local = min(sink, seen), min(local, seen)
    edge = max(own - local + 1, sink)  # first local block
    blocks = np.empty(sink + local + listed.shape[0], np.int64)
    count = 0
    for j in range(sink):
        blocks[count], count = j, count + 1
    for j in range(edge, own + 1):
        blocks[count], count = j, count + 1
    for j in listed:
        if sink <= j < edge:
            blocks[count], count = j, count + 1
    keys = np.empty(count * block, np.int64)
    total = 0
    for j in blocks[:count]:
        for n in range(start + j * block, start + (j + 1) * block):
            if n <= position and (mask.shape[0] == 0 or mask[n]):
                keys[total], total = n, total + 1
    return keys[:total]


@njit(parallel=True)
def _reference(
    q, k, v, table, index, lengths, start, mask, block, sink, local, sinks, scale, softcap, out, lse
):
    """Dense attention over the kept keys, for every (row, KV head, query) in parallel."""
    batch, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    for item in prange(batch * kv_heads * queries):
        b = item // (kv_heads * queries)
        h = item // queries % kv_heads
        t = item % queries
        g = h * group
        hidden = mask[b * len(mask) // batch]
        position = lengths[b] - queries + t
        kept = kept_keys(index[b, h, t], position, start[b], hidden, block, sink, local)
        keys = np.empty((2, len(kept), q.shape[3]), np.float32)
        for i in range(len(kept)):
            page, place = table[b, kept[i] // k.shape[2]], kept[i] % k.shape[2]
            keys[0, i], keys[1, i] = k[page, h, place], v[page, h, place]
        reference_rows(
            q[b, g : g + group, t : t + 1],
            keys[0],
            keys[1],
            np.empty(0, np.bool_),
            len(kept) - 1,
            0,
            0,
            sinks[g : g + group],
            scale,
            softcap,
            out[b, g : g + group, t : t + 1],
            lse[b, g : g + group, t : t + 1],
        )


def attend_on_cpu(
    q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks, out, lse,
    table=None,
):  # fmt: skip
    lengths, start = rows_on_cpu(k, lengths, start, table)
    k, v, table = page_rows(k, v, table, int(lengths.max()))
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    _reference(
        *arrays(q.contiguous(), k, v, table, index.contiguous(), lengths, start, key_mask),
        *arrays(block, sink, local, sinks_on_cpu(sinks), scale, softcap, result, lse),
    )
    out.copy_(result)


# --- CUDA: attend, then reduce where there is more than one piece ----------------------------


class Step(NamedTuple):
    """What `gather_decode` adds to a list of blocks: the token that is not in the cache yet (on
    pages there is none), and whether to count it in `lengths`."""

    new_k: torch.Tensor | None
    new_v: torch.Tensor | None
    counts: bool


def launch_gather_attention(
    q,
    k,
    v,
    index,
    scale,
    block,
    sink,
    local,
    lengths,
    start,
    key_mask,
    softcap,
    sinks,
    out,
    lse,
    plan=None,
    step=None,
    table=None,
    pieces=None,
    scales=(None, None),
):
    """Run the kernels; tensors as in `gather_attention`, on a GPU or in Triton's interpreter. With
    a `step` they write its token and count it. With `pieces`, float32, the first kernel stores them
    there, none for rows of length 0; nothing merges them into `out`. `scales` are what the
    keys and the values of fp8 pages are to be multiplied by."""
    (batch, _, queries, width), kv_heads = q.shape, k.shape[1]
    keep = Keep.of(block, sink, local, index.shape[3])
    pdl, dependent = early(q.device)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    index, key_mask = index.contiguous(), mask_bytes(key_mask)
    shape, masked = shape_of(q, k, table), key_mask is not None
    found = card(q.device)
    if plan is None:
        cut = batch * kv_heads * queries, shape.GROUP, keep.keys, block, width, q.element_size()
        plan = plan_for(*cut, found.processors, masked)
    fused = plan.splits == 1 and pieces is None
    counts = step is not None and step.counts
    stored = pieces
    if not fused and pieces is None:
        stored = pieces_of(out, plan.splits)
    output = Output(stored, out, lse, sinks)
    factor, cap = base_two(scale, softcap)
    ahead, stages = looked_up(plan, keep.keys, block, shape.PAGE, not masked)
    row_bytes = shape.DP * q.element_size()
    shared = row_bytes, q.element_size(), found.shared, masked
    turns = Turns(
        TILE=plan.tile,
        STAGES=stages_that_fit(Loop(shape.ROWS, plan.tile, stages), *shared),
        AHEAD=ahead,
        ONE=plan.splits * plan.tile == keep.keys,
    )
    token = None if step is None else token_of(step.new_k, step.new_v)
    cache, token = chosen_between(q.device, cache_of(k, v, table, scales), token)
    launch_kernel(
        attend_kept,
        grid=(plan.splits, kv_heads * queries, batch),
        q=query_of(q),
        cache=cache,
        rows=rows_of(capacity(k, table), lengths, start, key_mask),
        token=token,
        index=index,
        output=output,
        scale=factor,
        cap=cap,
        splits=plan.splits,
        SHAPE=shape,
        KEEP=keep,
        TURNS=turns,
        STEPS=steps_of(lengths, start),
        CAPPED=softcap > 0,
        CHAINED=step is not None and keep.K > 0,
        PDL=pdl,
        SKIP_EMPTY=pieces is not None,
        **{"num_warps": plan.warps, **dependent},
    )
    if not fused and pieces is None:
        counted = {"lengths": lengths, "counters": lengths.shape[0]} if counts else {}
        launch_merge(output, plan.splits, plan.columns, **counted)
    elif counts:
        lengths.add_(1)


_gather_attention = define_op(
    "gather_attention(Tensor q, Tensor k, Tensor v, Tensor index, float scale, int block, "
    "int sink, int local, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? sinks) -> (Tensor, Tensor)",
    allocate=allocate_attention,
    cpu=attend_on_cpu,
    cuda=launch_gather_attention,
    repeats=True,
)

_gather_attention_paged = define_op(
    "gather_attention_paged(Tensor q, Tensor k, Tensor v, Tensor index, Tensor table, "
    "float scale, int block, int sink, int local, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask, float softcap, Tensor? sinks) -> (Tensor, Tensor)",
    allocate=table_at(4, allocate_attention),
    cpu=table_at(4, attend_on_cpu),
    cuda=table_at(4, launch_gather_attention),
    repeats=True,
)
