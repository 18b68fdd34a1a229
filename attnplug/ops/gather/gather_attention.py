"""Decode attention over a keep set of key blocks: the sink, the last blocks and a list.

    out[t] = sum_j p[t, j] v[j],   p[t, j] = exp(s[t, j]) / (sum_i exp(s[t, i]) + exp(sink)),
    s[t, j] = scale q[t].k[j]  (softcap: cap tanh(s / cap)),   lse[t] = log sum_i exp(s[t, i])

over the keys j <= pos(t) of the blocks that the query's KV head keeps: the first `sink`, the last
`local` up to the query's own, and those that `index` names. Blocks are numbered from each row's
first real token. What it costs does not depend on the length. The kept keys are cut in pieces which
programs of their own attend to, and a second kernel merges the pieces by their log-sum-exps
(split-k); with one piece a row, for large batches, the one program writes the result (fused).
Source: "Attention Pays Its Bill" (shared/papers/000); Flash-Decoding as in `dense_decode`.
"""

import functools
from typing import NamedTuple

import numba
import numpy as np
import torch
import triton

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    BLOCKS,
    check_attention_inputs,
    check_sequence_inputs,
    check_sinks,
)
from attnplug.ops.common.define import define_op, refuse_gradients
from attnplug.ops.common.device import early, machine
from attnplug.ops.common.reference import reference_kept, sinks_on_cpu
from attnplug.ops.common.rows import NO_MASK, mask_bytes, row_step, rows_on_cpu
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.splits import merge_splits
from attnplug.ops.gather.kernels import attend as kernels
from attnplug.ops.gather.select_blocks import Scores


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of the last T tokens over the key blocks that each KV head keeps.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16, made for T = 1.
        k, v: `[B, Hkv, S, D]` like q, Hkv dividing Hq; S is the size of the cache.
        index: int32 `[B, Hkv, T, K]`, blocks counted from `start`, none twice. -1, and blocks that
            are sink, local or after the query, are passed over.
        scale: factor on q.k, commonly `D ** -0.5`.
        block: keys a block: 16, 32, 64 or 128.
        sink: first blocks that are always read.
        local: last blocks that are always read, the query's own included; at least 1.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.

    Returns:
        out `[B, Hq, T, D]` of q's dtype and lse `[B, Hq, T]` float32 (natural logarithm, sinks left
        out). A query that sees no key gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("gather_attention", q, k, v, sinks)
    return _gather_attention(
        q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks
    )


def _allocate(
    q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks
):  # fmt: skip
    name = "gather_attention"
    check_attention_inputs(name, q, k, v)
    check_sequence_inputs(name, q, k, lengths, start, key_mask)
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
    if local < 1:
        raise ArgumentError(f"{name}: local is {local}, needs at least 1, the query's own block")
    if not softcap >= 0:
        raise ArgumentError(f"{name}: softcap is {softcap}, needs 0 (off) or a positive cap")
    if sinks is not None:
        check_sinks(name, q, sinks)
    return (
        q.new_empty((batch, heads, queries, width)),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def _kept_keys(listed, position, start, mask, block, sink, local):
    """The keys that a query at `position` reads, ascending within each block; an empty `mask` hides
    nothing."""
    own = (position - start) // block
    edge = max(own - local + 1, sink)  # first local block
    names = np.empty(sink + local + listed.shape[0], np.int64)
    count = 0
    for name in range(sink):
        names[count], count = name, count + 1
    for name in range(edge, own + 1):
        names[count], count = name, count + 1
    for name in listed:
        if sink <= name < edge:
            names[count], count = name, count + 1
    keys = np.empty(count * block, np.int64)
    total = 0
    for name in names[:count]:
        for n in range(start + name * block, start + (name + 1) * block):
            if n <= position and (mask.shape[0] == 0 or mask[n]):
                keys[total], total = n, total + 1
    return keys[:total]


@numba.njit(parallel=True, cache=True)
def _reference(
    q, k, v, index, lengths, start, mask, block, sink, local, sinks, scale, softcap, out, lse
):
    """Dense attention over the kept keys, for every (row, KV head, query) in parallel."""
    batch, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    for item in numba.prange(batch * kv_heads * queries):
        b = item // (kv_heads * queries)
        h = item // queries % kv_heads
        t = item % queries
        g = h * group
        hidden = mask[b * len(mask) // batch]
        position = lengths[b] - queries + t
        kept = _kept_keys(index[b, h, t], position, start[b], hidden, block, sink, local)
        reference_kept(
            q[b, g : g + group, t : t + 1],
            k[b, h],
            v[b, h],
            kept,
            sinks[g : g + group],
            scale,
            softcap,
            out[b, g : g + group, t : t + 1],
            lse[b, g : g + group, t : t + 1],
        )


def _cpu(
    q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks, out, lse
):
    lengths, start = rows_on_cpu(k, lengths, start)
    valid = int(lengths.max())
    result = torch.empty(out.shape, dtype=torch.float32)
    _reference(
        q.float().contiguous().numpy(),
        k[:, :, :valid].float().numpy(),
        v[:, :, :valid].float().numpy(),
        index.contiguous().numpy(),
        lengths.numpy(),
        start.numpy(),
        NO_MASK if key_mask is None else key_mask.numpy(),
        block,
        sink,
        local,
        sinks_on_cpu(sinks),
        np.float32(scale),
        np.float32(softcap),
        result.numpy(),
        lse.numpy(),
    )
    out.copy_(result)


# --- CUDA: attend, then reduce where there is more than one piece ----------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    tile: int  # keys of one step
    splits: int  # pieces that the kept keys are cut in; 1: fused
    warps: int
    stages: int
    columns: int  # of the head dimension, for one program of the reduction


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int, group: int, keys: int, block: int, width: int, itemsize: int, multiprocessors: int
) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head, query) triples keep `keys` each, in
    blocks of `block`."""
    row_bytes = triton.next_power_of_2(width) * itemsize
    tile = 64 if row_bytes <= 256 else 32  # two programs for a block of 128
    tiles = -(-keys // tile)
    # Pipelined is what a GPU has compared: Triton 3.6 compiled a loop over gathered keys to wrong
    # code, without a word (block_sparse_attention).
    pipelined = row_bytes <= 256 and block % tile == 0
    splits, stages = tiles, 2 if pipelined else 1  # one step: key and value on their way at once
    if pipelined and rows * tiles > 8 * multiprocessors:  # bandwidth counts: few that read on
        splits, stages = max(1, min(tiles, 2 * multiprocessors // rows)), 4
    elif rows * tiles > 32 * multiprocessors:
        splits = max(1, min(tiles, 16 * multiprocessors // rows))
    return Plan(
        tile=tile,
        splits=splits,
        warps=4 if group <= 16 else 8,
        stages=stages,
        columns=32 if rows * group <= 4096 else triton.next_power_of_2(width),
    )


class Step(NamedTuple):
    """What `gather_decode` knows beyond a list: the token that is not in the cache yet, whether to
    count it in `lengths`, and where no kernel has selected, the scores to pick from."""

    new_k: torch.Tensor
    new_v: torch.Tensor
    progress: torch.Tensor
    counts: bool
    scores: Scores | None = None
    top_k: int = 0


def launch_gather_attention(
    q, k, v, index, scale, block, sink, local, lengths, start, key_mask, softcap, sinks, out, lse,
    plan=None, step=None,
):  # fmt: skip
    """Run the kernels; tensors as in `gather_attention`, on a GPU or in Triton's interpreter. With
    a `step` they write its token and count it, and `index` may be None."""
    batch, heads, queries, width = q.shape
    kv_heads, size = k.shape[1], k.shape[2]
    assert index is not None or step is not None
    listed = index.shape[3] if index is not None else step.top_k  # pyright: ignore[reportOptionalMemberAccess]
    group, rows = heads // kv_heads, batch * kv_heads * queries
    pdl, dependent = early(q.device)
    keys = (sink + local + listed) * block
    if plan is None:
        processors = machine(q.device)[0]
        plan = plan_for(rows, group, keys, block, width, q.element_size(), processors)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    index, key_mask = None if index is None else index.contiguous(), mask_bytes(key_mask)
    fused, counts = plan.splits == 1, step is not None and step.counts
    partial = out
    if not fused:
        places = rows * group * plan.splits * (width + 1)
        partial = torch.empty(places, dtype=torch.float32, device=q.device)
    new_k = new_v = progress = scores = best = None
    blocks = members = kept = wide = 0
    if step is not None:
        new_k, new_v, progress = step.new_k, step.new_v, step.progress
        if step.scores is not None:
            scores, best, members = step.scores.keys, step.scores.best, step.scores.plan.members
            blocks = scores.numel() // rows
            kept, wide = step.scores.widths(listed, blocks)
    kernels.attend_kept[(plan.splits, kv_heads * queries, batch)](
        q, k, v, new_k, new_v, index, scores, best, progress, lengths, start, key_mask, sinks,
        partial, out, lse,
        scale * LOG2E if softcap == 0 else 2 * LOG2E * scale / softcap, softcap * LOG2E,
        queries, size, blocks, plan.splits,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *((0,) * 4 if step is None else (*step.new_k.stride()[:2], *step.new_v.stride()[:2])),
        0 if key_mask is None else key_mask.stride(0),
        group, max(16, triton.next_power_of_2(group)), width, triton.next_power_of_2(width),
        block, sink, local, listed, triton.next_power_of_2(max(1, listed)), plan.tile,
        plan.stages, softcap > 0, fused, plan.splits * plan.tile == keys, kept, wide, members,
        step is not None and listed > 0, row_step(lengths), row_step(start), pdl,
        num_warps=plan.warps, **dependent,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    if not fused:
        merge_splits[(rows * group, triton.cdiv(width, plan.columns))](
            partial, sinks, out, lse, heads, queries, plan.splits,
            width, plan.columns, triton.next_power_of_2(plan.splits), pdl,
            lengths if counts else None, lengths.shape[0] if counts else 0,
            num_warps=4, **dependent,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    elif counts:
        lengths.add_(1)


_gather_attention = define_op(
    "gather_attention(Tensor q, Tensor k, Tensor v, Tensor index, float scale, int block, "
    "int sink, int local, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? sinks) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_gather_attention,
)
