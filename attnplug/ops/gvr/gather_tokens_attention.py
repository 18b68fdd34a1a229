"""Decode attention over the tokens that each KV head keeps: the sink, the window and a list.

    out[t] = sum_j p[t, j] v[j],   p[t, j] = exp(s[t, j]) / (sum_i exp(s[t, i]) + exp(sinks[h])),
    s[t, j] = scale q[t].k[j]  (softcap: cap tanh(s / cap)),   lse[t] = log sum_i exp(s[t, i])

The sums run over the keys j <= pos(t) that the query's KV head keeps. These are the row's first
`sink` real tokens, the last `window` tokens up to the query's own, and the tokens that `index`
lists. The cost does not depend on the length. The kept keys are divided into splits; one program
attends to each split, and a second kernel merges the splits by their log-sum-exps (split-k). With
one split a row, as large batches have, the program writes the result itself (fused).
Source: "Guess-Verify-Refine: Data-Aware Top-K for Sparse-Attention Decoding on Blackwell via
Temporal Correlation" (docs/papers.md), section 2; Flash-Decoding as in `dense_decode`.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs, check_sinks
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, page_rows, table_at
from attnplug.ops.common.reference import arrays, reference_rows, sinks_on_cpu
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import padded_width
from attnplug.ops.common.softmax import base_two
from attnplug.ops.common.splits import launch_merge, pieces_of
from attnplug.ops.common.views import Output, cache_of, query_of, rows_of, shape_of, steps_of
from attnplug.ops.gvr.kernels.attend_tokens import attend_tokens

NAME = "gather_tokens_attention"


def gather_tokens_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float,
    sink: int = 16,
    window: int = 256,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of the last T tokens over the tokens that each KV head keeps.

    Args:
        q: `[B,Hq,T,D]`, float32, float16 or bfloat16, made for T = 1.
        k, v: `[B,Hkv,S,D]` like q, Hkv dividing Hq; S is the size of the cache. With a table pages
            `[pages,Hkv,page,D]`, and S is `P * page`.
        index: int32 `[B,Hkv,T,K]`, a row's tokens, none twice. -1 is skipped, and so are tokens of
            the sink, the window or the padding, and tokens after the query.
        scale: factor on q.k, commonly `D ** -0.5`.
        sink: so many first real tokens are always read.
        window: this many last tokens are always read, the query's own included. 0: the list alone
            says.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.
        table: int32 `[B,P]`, the pages of each row, as `dense_decode` has it.

    Returns:
        out `[B,Hq,T,D]` of q's dtype and lse `[B,Hq,T]` float32 (natural logarithm, sinks left
        out). A query that sees no key gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, sinks)
    options = scale, sink, window, lengths, start, key_mask, softcap, sinks
    if table is not None:
        return _gather_tokens_attention_paged(q, k, v, index, table, *options)
    return _gather_tokens_attention(q, k, v, index, *options)


def _allocate(
    q, k, v, index, scale, sink, window, lengths, start, key_mask, softcap, sinks, table=None
):
    check_attention_inputs(NAME, q, k, v, table)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask, table)
    batch, heads, queries, width = q.shape
    wanted = (batch, k.shape[1], queries)
    if index.dim() != 4 or tuple(index.shape[:3]) != wanted or index.dtype != torch.int32:
        raise ArgumentError(
            f"{NAME}: index is {index.dtype} {tuple(index.shape)}, needs int32 [B,Hkv,T,K] = "
            f"[{', '.join(map(str, wanted))}, K]"
        )
    require(index.device == q.device, NAME, f"index is on {index.device}, q on {q.device}")
    require(sink >= 0, NAME, f"sink is {sink}, needs at least 0")
    require(window >= 0, NAME, f"window is {window}, needs at least 0")
    most = sink + window + index.shape[3]
    require(most > 0, NAME, "sink and window are 0 and index lists no token")
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive cap")
    if sinks is not None:
        check_sinks(NAME, q, sinks)
    return (
        q.new_empty((batch, heads, queries, width)),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _kept_keys(listed, position, start, mask, sink, window):
    """The keys that a query at `position` reads; an empty `mask` hides nothing."""
    window_first = max(position - window + 1, start + sink)
    kept = np.empty(sink + window + listed.shape[0], np.int64)
    count = 0
    for n in range(start, min(start + sink, position + 1)):
        kept[count], count = n, count + 1
    for n in range(window_first, position + 1):
        kept[count], count = n, count + 1
    for n in listed:
        if start + sink <= n < window_first:
            kept[count], count = n, count + 1
    if mask.shape[0] == 0:
        return kept[:count]
    return kept[:count][mask[kept[:count]]]


@njit(parallel=True)
def _reference(
    q, k, v, table, index, lengths, start, mask, sink, window, sinks, scale, softcap, out, lse
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
        kept = _kept_keys(index[b, h, t], position, start[b], hidden, sink, window)
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


def _cpu(
    q, k, v, index, scale, sink, window, lengths, start, key_mask, softcap, sinks, out, lse,
    table=None,
):  # fmt: skip
    lengths, start = rows_on_cpu(k, lengths, start, table)
    k, v, table = page_rows(k, v, table, int(lengths.max()))
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    _reference(
        *arrays(q.contiguous(), k, v, table, index.contiguous(), lengths, start, key_mask),
        *arrays(sink, window, sinks_on_cpu(sinks), scale, softcap, result, lse),
    )
    out.copy_(result)


# --- CUDA: attend, then merge where there is more than one split -----------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    tile: int  # keys that a program reads at once
    splits: int  # of the kept keys, a program each; 1: fused
    warps: int
    columns: int  # of the head dimension, for one program of the merge


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int, group: int, keys: int, width: int, itemsize: int, multiprocessors: int
) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head, query) triples keep `keys` each."""
    padded = padded_width(width)
    tile = 64 if padded * itemsize <= 256 else 32
    tiles = -(-keys // tile)
    splits = max(1, min(tiles, 16 * multiprocessors // rows))
    return Plan(tile, splits, 4 if group <= 16 else 8, 32 if rows * group <= 4096 else padded)


def launch_gather_tokens_attention(
    q,
    k,
    v,
    index,
    scale,
    sink,
    window,
    lengths,
    start,
    key_mask,
    softcap,
    sinks,
    out,
    lse,
    plan=None,
    table=None,
):
    """Run the kernels; tensors as in `gather_tokens_attention`, on a GPU or in the interpreter."""
    (batch, _, queries, width), kv_heads, listed = q.shape, k.shape[1], index.shape[3]
    shape, found = shape_of(q, k, table), card(q.device)
    if plan is None:
        cut = batch * kv_heads * queries, shape.GROUP, sink + window + listed
        plan = plan_for(*cut, width, q.element_size(), found.processors)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    index, key_mask = index.contiguous(), mask_bytes(key_mask)
    fused = plan.splits == 1
    output = Output(None if fused else pieces_of(out, plan.splits), out, lse, sinks)
    factor, cap = base_two(scale, softcap)
    pdl, dependent = early(q.device)
    launch_kernel(
        attend_tokens,
        grid=(plan.splits, kv_heads * queries, batch),
        q=query_of(q),
        cache=cache_of(k, v, table),
        rows=rows_of(capacity(k, table), lengths, start, key_mask),
        index=index,
        output=output,
        scale=factor,
        cap=cap,
        splits=plan.splits,
        SHAPE=shape,
        SINK=sink,
        WINDOW=window,
        K=listed,
        TILE=plan.tile,
        STEPS=steps_of(lengths, start),
        CAPPED=softcap > 0,
        PDL=pdl,
        **{"num_warps": plan.warps, **dependent},
    )
    if not fused:
        launch_merge(output, plan.splits, plan.columns)


_gather_tokens_attention = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor index, float scale, int sink, int window, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, Tensor? sinks) "
    "-> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_gather_tokens_attention,
    repeats=True,
)

_gather_tokens_attention_paged = define_op(
    f"{NAME}_paged(Tensor q, Tensor k, Tensor v, Tensor index, Tensor table, float scale, "
    "int sink, int window, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? sinks) -> (Tensor, Tensor)",
    allocate=table_at(4, _allocate),
    cpu=table_at(4, _cpu),
    cuda=table_at(4, launch_gather_tokens_attention),
    repeats=True,
)
