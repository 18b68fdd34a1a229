"""The weights of the edges (query block, key block) that a trace lists, and on request attention
over the listed blocks alone. Never T x T.

C are the pairs that see each other (causality, padding, `key_mask`). i is a query block, r a block
that `index[i]` lists, and p[t] = softmax over the keys of all blocks listed for t's query block:

    "score"   max q[t].k[s]  over the pairs (t, s) of i and r in C; unscaled, a NaN is -inf
    "mass"    sum p[t, s]    over t in i and s in r: of at most `query_block` in all
    "value"   | sum p[t, s] v[s] |_2   the length of what r adds to the outputs of i together
    out[t]    sum p[t, s] v[s]         over the listed blocks

p is the softmax of scale q.k. The order of every sum is fixed: two runs give the same bits.
Source: STREAM (Rosser et al., 2025), sections 3 and 6 (docs/papers.md).
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import next_power_of_two, padded_width
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.views import cache_of, query_of, rows_of, shape_of, steps_of
from attnplug.ops.stream.kernels.edges import MASS, SCORE, VALUE, weigh_edges
from attnplug.ops.stream.kernels.refine import Search
from attnplug.ops.stream.stream_mask import BLOCKS

NAME = "stream_edges"
SCHEMA = (
    "stream_edges(Tensor q, Tensor k, Tensor v, Tensor index, float scale, str weights, "
    "bool output, int query_block, int block, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask) -> (Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
WEIGHTS = ("score", "mass", "value")  # in the order of their numbers, SCORE, MASS, VALUE


def stream_edges(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float,
    weights: str = "mass",
    output: bool = False,
    query_block: int = 64,
    block: int = 64,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight of every edge that `index` names (equations above).

    Query blocks count from the first real query of the call, key blocks from `start`, as in
    `stream_mask`.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; the last T tokens of each row.
        k: `[B, Hkv, S, D]` like q; v like k; any strides, all three.
        index: int32 `[B, Hq, NQ, K]`, NQ = ceil(T / query_block), no block twice in a list. -1 and
            blocks after the query block are skipped.
        scale: factor on q.k in the softmax, above 0.
        weights: "score", "mass" or "value".
        output: whether to return the attention over the listed blocks as well.
        query_block: queries a block: 16, 32, 64 or 128.
        block: keys a block: 16, 32, 64 or 128.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the T queries being the last of them.
            None: all S. Slots from `length` on are never read.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.

    Returns:
        weight: float32 `[B, Hq, NQ, K]`, in the order of `index`; 0 for a skipped entry, with
            "score" -inf.
        With `output` also out `[B, Hq, T, D]` of q's dtype and lse `[B, Hq, T]` float32 (natural
        logarithm): 0 and -inf for a query that sees no key.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    weight, out, lse = _stream_edges(
        q, k, v, index, scale, weights, output, query_block, block, lengths, start, key_mask
    )
    return (weight, out, lse) if output else weight


def _allocate(q, k, v, index, scale, weights, output, query_block, block, lengths, start, key_mask):
    check_attention_inputs(NAME, q, k, v)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    for label, size in (("query_block", query_block), ("block", block)):
        if size not in BLOCKS:
            raise ArgumentError(f"{NAME}: {label} is {size}, needs {', '.join(map(str, BLOCKS))}")
    if not scale > 0:
        raise ArgumentError(f"{NAME}: scale is {scale}, needs a number above 0")
    if weights not in WEIGHTS:
        raise ArgumentError(f"{NAME}: weights is {weights!r}, needs {', '.join(WEIGHTS)}")
    batch, heads, queries, width = q.shape
    wanted = (batch, heads, -(-queries // query_block))
    if index.dim() != 4 or tuple(index.shape[:3]) != wanted or index.dtype != torch.int32:
        raise ArgumentError(
            f"{NAME}: index is {index.dtype} {tuple(index.shape)}, needs int32 [B,Hq,NQ,K] = "
            f"[{', '.join(map(str, wanted))}, K]"
        )
    if index.device != q.device:
        raise ArgumentError(f"{NAME}: index is on {index.device}, q on {q.device}")
    rows = queries if output else 0
    return (
        q.new_empty(tuple(index.shape), dtype=torch.float32),
        q.new_empty((batch, heads, rows, width)),
        q.new_empty((batch, heads, rows), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _products(q, k, mask, position, first):
    """q.k of queries `[M, D]`, at `position` on, and keys `[N, D]`, at `first` on, and which of
    these pairs see each other."""
    products = np.zeros((q.shape[0], k.shape[0]), np.float32)
    add_product(q, np.ascontiguousarray(k.T), products)
    seen = np.zeros(products.shape, np.bool_)
    for m in range(q.shape[0]):
        for n in range(min(k.shape[0], position + m - first + 1)):
            seen[m, n] = mask.shape[0] == 0 or mask[first + n]
    return products, seen


@njit()
def _row(q, k, v, mask, listed, position, start, scale, block, mode, weight, out, lse):
    """One query block `q [M, D]` against the blocks `listed [K]`; `k` and `v` end with its last
    position. `weight [K]`, `out [M, D]`, `lse [M]`."""
    rows, keys = q.shape[0], k.shape[0]
    top = np.full(rows, -np.inf, np.float32)
    for turn in range(3):  # the maxima, then the sums, then the share of each block
        total = np.zeros(rows, np.float64)
        for place in range(listed.shape[0]):
            first = start + listed[place] * block
            best, part = np.float32(-np.inf), np.zeros((rows, block), np.float32)
            if listed[place] >= 0 and first < keys:
                until = min(first + block, keys)
                s, seen = _products(q, k[first:until], mask, position, first)
                for m in range(rows):
                    shift = 0.0 if top[m] == -np.inf else top[m]
                    for n in range(until - first):
                        if not seen[m, n]:
                            continue
                        best = max(best, s[m, n]) if s[m, n] == s[m, n] else best
                        if turn == 0:
                            x = s[m, n] * scale
                            top[m] = max(top[m], x) if x == x else top[m]
                        elif turn == 1:
                            total[m] += np.exp(s[m, n] * scale - shift)
                        else:
                            part[m, n] = np.exp(s[m, n] * scale - lse[m])
                if turn == 2:
                    gain = np.zeros((rows, v.shape[1]), np.float32)
                    values = v[first:until].copy()
                    for n in range(until - first):
                        if not seen[-1, n]:  # no query sees it: 0 times NaN is NaN
                            values[n] = 0.0
                    add_product(part[:, : until - first], values, gain)
                    out += gain
                    if mode == VALUE:
                        weight[place] = np.sqrt((gain.sum(0).astype(np.float64) ** 2).sum())
            if turn == 2 and mode == SCORE:
                weight[place] = best
            elif turn == 2 and mode == MASS:
                weight[place] = part.astype(np.float64).sum()
        if turn == 1:
            for m in range(rows):
                shift = 0.0 if top[m] == -np.inf else top[m]
                lse[m] = -np.inf if total[m] == 0 else shift + np.log(total[m])


@njit(parallel=True)
def _reference(
    q, k, v, index, lengths, start, mask, scale, query_block, block, mode, weight, out, lse
):
    """Every (row, query head, query block), in parallel; `out` and `lse` come empty (0, -inf)."""
    batch, heads, queries, _ = q.shape
    group, slots = heads // k.shape[1], index.shape[2]
    for item in prange(batch * heads * slots):
        b, h, i = item // (heads * slots), item // slots % heads, item % slots
        offset = lengths[b] - queries
        t = max(0, start[b] - offset) + i * query_block
        until = min(t + query_block, queries)
        weight[b, h, i] = -np.inf if mode == SCORE else 0.0
        if t < queries:
            end = offset + until
            _row(
                q[b, h, t:until],
                k[b, h // group, :end],
                v[b, h // group, :end],
                mask[b * len(mask) // batch],
                index[b, h, i],
                offset + t,
                start[b],
                scale,
                block,
                mode,
                weight[b, h, i],
                out[b, h, t:until],
                lse[b, h, t:until],
            )


def _cpu(*args):
    call, (weight, out, lse) = Call(*args[:-3]), args[-3:]
    q, k, v = call.q, call.k, call.v
    lengths, start = rows_on_cpu(k, call.lengths, call.start)
    valid = max(int(lengths.max()), 0)
    result = torch.zeros(q.shape, dtype=torch.float32, device="cpu")
    sums = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device="cpu")
    _reference(
        *arrays(*(x.contiguous() for x in (q, k[:, :, :valid], v[:, :, :valid], call.index))),
        *arrays(lengths, start, call.key_mask, call.scale, call.query_block, call.block),
        *arrays(WEIGHTS.index(call.weights), weight, result, sums),
    )
    if call.output:
        out.copy_(result)
        lse.copy_(sums)


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; chosen from static shapes alone."""

    tile: int  # keys that a program reads at once
    warps: int
    # Not pipelined: Triton 3.6 silently compiled a loop over gathered keys to wrong code
    # (block_sparse_attention).


def plan_for(rows: int, block: int, width: int, itemsize: int) -> Plan:
    """The plan of a shape: `rows` queries a block."""
    key_bytes = padded_width(width) * itemsize
    return Plan(max(16, min(block, 32768 // key_bytes, 64)), 8 if rows == 128 else 4)


def launch_stream_edges(*args, plan=None):
    """Run the kernel; tensors as in `stream_edges`, on a GPU or in Triton's interpreter."""
    call, (weight, out, lse) = Call(*args[:-3]), args[-3:]
    if call.output:  # padding queries are in no query block
        out.zero_()
        lse.fill_(-torch.inf)
    batch, heads, queries, width = call.q.shape
    query_block, block = call.query_block, call.block
    rows = min(query_block, max(16, next_power_of_two(queries)))
    plan = plan or plan_for(rows, block, width, call.q.element_size())
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in args[:3])
    index, key_mask = call.index.contiguous(), mask_bytes(call.key_mask)
    launch_kernel(
        weigh_edges,
        grid=(index.shape[2], heads, batch),
        q=query_of(q),
        cache=cache_of(k, v),
        rows=rows_of(k.shape[2], call.lengths, call.start, key_mask),
        index=index,
        weight=weight,
        out=out,
        lse=lse,
        scale=call.scale * LOG2E,
        K=index.shape[3],
        SHAPE=shape_of(q, k, rows=rows),
        SEARCH=Search(query_block, block, 1, 1),  # each query block is looked at
        TILE=plan.tile,
        MODE=WEIGHTS.index(call.weights),
        OUTPUT=call.output,
        STEPS=steps_of(call.lengths, call.start),
        num_warps=plan.warps,
        num_stages=1,
    )


_stream_edges = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_stream_edges,
)
