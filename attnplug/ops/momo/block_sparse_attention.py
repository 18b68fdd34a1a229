"""Block-sparse attention: every query block attends to its own list of key blocks.

    out[t] = sum over l in A(t) of softmax(scale q_t k_l) v_l,   lse[t] = log sum exp(scale q_t k_l)

A(t) is the union, no key twice, of the listed key blocks of t's query block, the first `sink`
blocks, and the local part: every key from the block that holds the key `window` before the query
block's first query, up to t itself. So listed blocks are complete for every query of the block and
only the local part needs the causal mask.

The CUDA path is two kernels. The first turns each list into the sorted list of distinct blocks that
are neither sink nor local. It puts the sink's blocks in front, and counts them. The second runs
flash attention over that list, a tile made of whichever blocks come next, then over the local part.

Source: MOMO (Measure Once, Mask Once; docs/papers.md), Algorithm 1, step 3.
"""

import math

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import WIDE_HEAD_DIMS, check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import add_tile, arrays
from attnplug.ops.common.rows import rows_as_given
from attnplug.ops.momo.delta_correct import correct_on_cpu, launch_delta_correct
from attnplug.ops.momo.kernels import hopper as _hopper
from attnplug.ops.momo.kernels.block_sparse import build_lists, launch_triton

NAME = "block_sparse_attention"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor index, float scale, int query_block, int block, "
    "int sink, int window, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? rows, int gamma, float weight) -> (Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
# One program sorts a query block's whole list in registers.
MAX_BLOCKS = 8192


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    *,
    scale: float,
    query_block: int = 128,
    block: int = 64,
    sink: int = 1,
    window: int = 0,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    rows: torch.Tensor | None = None,
    gamma: int = 16,
    weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal softmax attention over listed key blocks, the sink and a local part.

    q `[B,Hq,T,D]`; k, v `[B,Hkv,S,D]`; fp32, fp16 or bf16; D a multiple of 16 up to 256, or 512.
    index `[B,Hq,ceil(T/query_block),K]` int32, K at most 8192: key blocks of `block` keys, numbered
    from the row's `start`, in any order. Entries that are negative, listed twice, in the sink or in
    the local part (so also the future) are ignored.

    lengths `[1]` or `[B]`: valid tokens in k, v, of which the T queries are the last (None: S).
    start `[1]` or `[B]`: first valid key of each row; query blocks are counted from the row's first
    query at or after it. key_mask `[B,S]` bool: False keys are never seen. sink in key blocks,
    window in tokens. softcap > 0: logits become softcap * tanh(logit / softcap).

    rows `[B,Hq,ceil(T/gamma),D]`: the dense outputs of every gamma-th query. Given, out is
    corrected by them as delta_correct does, with its gamma and weight; lse stays that of the
    sparse attention.

    Returns out `[B,Hq,T,D]` in q's dtype and lse `[B,Hq,T]` fp32 (natural log). A query that sees
    no key (padding, all masked) gives 0 and -inf.

    Source: MOMO (Measure Once, Mask Once), Algorithm 1, step 3.
    """
    refuse_gradients(NAME, q, k, v, rows)
    blocks, tokens = (query_block, block, sink, window), (lengths, start, key_mask)
    return _OP(q, k, v, index, scale, *blocks, *tokens, softcap, rows, gamma, weight)


def _allocate(*args) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    q, index, rows, gamma, weight = call.q, call.index, call.rows, call.gamma, call.weight
    check_attention_inputs(NAME, q, call.k, call.v, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(NAME, q, call.k, call.lengths, call.start, call.key_mask)
    for label, least in (
        ("query_block", 1),
        ("block", 1),
        ("sink", 0),
        ("window", 0),
        ("softcap", 0),
    ):
        value = getattr(call, label)
        require(value >= least, NAME, f"{label} is {value}, needs at least {least}")
    require(index.dtype == torch.int32, NAME, f"index is {index.dtype}, needs int32")
    require(index.device == q.device, NAME, f"index is on {index.device} but q is on {q.device}")
    # In the form that the other ops have: torch.export compares the two.
    query_blocks = (q.shape[2] + call.query_block - 1) // call.query_block
    require(
        index.dim() == 4 and index.shape[:3] == (q.shape[0], q.shape[1], query_blocks),
        NAME,
        f"index has shape {tuple(index.shape)}, needs [B,Hq,ceil(T/query_block),K] = "
        f"{(q.shape[0], q.shape[1], query_blocks)} + (K,)",
    )
    require(
        index.shape[3] <= MAX_BLOCKS,
        NAME,
        f"index names {index.shape[3]} blocks a query block, at most {MAX_BLOCKS} are sorted",
    )
    require(gamma >= 1, NAME, f"gamma is {gamma}, needs at least 1")
    require(0 <= weight <= 1, NAME, f"weight is {weight}, needs 0 to 1")
    if rows is not None:
        shape = (*q.shape[:2], (q.shape[2] + gamma - 1) // gamma, q.shape[3])
        require(
            rows.shape == shape and rows.dtype == q.dtype and rows.device == q.device,
            NAME,
            f"rows is {tuple(rows.shape)} {rows.dtype} on {rows.device}, needs "
            f"[B,Hq,ceil(T/gamma),D] = {shape} {q.dtype} on {q.device}",
        )
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


# ---- numba: the specification -------------------------------------------------------------------


@njit()
def _logit(x, scale, softcap):
    x *= scale
    return softcap * math.tanh(x / softcap) if softcap > 0.0 else x


@njit()
def _chosen_keys(index, local, block, sink, begin, visible):
    """Positions, ascending, of the visible keys of the sink and of the listed blocks before the
    local part."""
    chosen = np.zeros(local, np.bool_)
    chosen[:sink] = True
    for listed in index:
        if 0 <= listed < local:
            chosen[listed] = True
    keys = np.empty(int(chosen.sum()) * block, np.int64)
    used = 0
    for number in range(local):
        if chosen[number]:
            for key in range(begin + number * block, begin + (number + 1) * block):
                if visible[key]:
                    keys[used] = key
                    used += 1
    return keys[:used]


@njit()
def _query_block(q, k, v, keys, local_keys, position, scale, softcap, out, lse):
    """Queries q `[n,D]` at positions position.. over `keys` (all see them) and, causally, over
    `local_keys`."""
    queries, dim = q.shape
    best = np.full(queries, -np.inf, np.float32)
    total = np.zeros(queries, np.float32)
    acc = np.zeros((queries, dim), np.float32)
    for chunk in range(0, keys.size, 512):
        here = keys[chunk : chunk + 512]
        values = v[here]
        weights = np.zeros((queries, here.size), np.float32)
        add_product(q, np.ascontiguousarray(k[here].T), weights)
        for row in range(queries):
            for n in range(here.size):
                weights[row, n] = _logit(weights[row, n], scale, softcap)
        add_tile(weights, values, best, total, acc)
    values = v[local_keys]
    near = np.zeros((queries, local_keys.size), np.float32)
    add_product(q, np.ascontiguousarray(k[local_keys].T), near)
    for row in range(queries):
        seen = np.searchsorted(local_keys, position + row, side="right")
        if seen > 0:
            for n in range(seen):
                near[row, n] = _logit(near[row, n], scale, softcap)
            own = slice(row, row + 1)
            add_tile(near[own, :seen], values[:seen], best[own], total[own], acc[own])
        if keys.size + seen == 0:
            out[row] = 0.0
            lse[row] = -np.inf
        else:  # all logits -inf: 0/0 is NaN, as in dense
            out[row] = acc[row] / total[row]
            shift = best[row] if best[row] > -np.inf else np.float32(0.0)
            lse[row] = shift + np.log(total[row])


@njit(parallel=True)
def _reference(
    q,
    k,
    v,
    index,
    length,
    start,
    visible,
    scale,
    softcap,
    query_block,
    block,
    sink,
    window,
    out,
    lse,
):
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    blocks = index.shape[2]
    out[:] = 0.0
    lse[:] = -np.inf
    for item in prange(batch * heads * blocks):
        b, h, place = item // (heads * blocks), item // blocks % heads, item % blocks
        offset = length[b] - queries
        begin = max(start[b] - offset, 0) + place * query_block
        end = min(begin + query_block, queries)
        if begin >= end:
            continue
        local = max(offset + begin - window - start[b], 0) // block
        keys = _chosen_keys(
            index[b, h, place], local, block, min(sink, local), start[b], visible[b]
        )
        local_keys = np.arange(start[b] + local * block, offset + end)
        local_keys = local_keys[visible[b, local_keys[0] : local_keys[-1] + 1]]
        _query_block(
            q[b, h, begin:end],
            k[b, h // group],
            v[b, h // group],
            keys,
            local_keys,
            offset + begin,
            scale,
            softcap,
            out[b, h, begin:end],
            lse[b, h, begin:end],
        )


def _cpu(*args):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    k, v, lengths, start = call.k, call.v, call.lengths, call.start
    batch, keys = k.shape[0], k.shape[2]
    length, begin = rows_as_given(batch, keys, lengths, start)
    longest = int(length.max()) if batch else 0
    if longest > keys or (batch and int(begin.min()) < 0):
        raise ArgumentError(
            f"{NAME}: lengths go to {longest} and start from {int(begin.min())}, but k and v hold "
            f"keys 0 to {keys - 1}"
        )
    visible = call.key_mask
    if visible is None:
        visible = torch.ones(batch, keys, dtype=torch.bool, device="cpu")
    wide = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    # Every array contiguous: numba compiles anew for each combination of layouts.
    _reference(
        *arrays(*(x.contiguous() for x in (call.q, k[:, :, :longest], v[:, :, :longest]))),
        *arrays(*(x.contiguous() for x in (call.index, length, begin, visible))),
        *arrays(call.scale, call.softcap, call.query_block, call.block, call.sink, call.window),
        *arrays(wide, lse),
    )
    if call.rows is not None:
        wide = correct_on_cpu(wide, call.rows, call.gamma, call.weight, lengths, start, keys)
    out.copy_(wide)


# ---- CUDA ---------------------------------------------------------------------------------------


def launch_block_sparse_attention(*args):
    """Fill `out` and `lse`; allocates the lists, nothing data dependent. Which kernel runs is
    decided by what the host knows, no value is read."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    if out.numel() == 0:
        return
    tensors, keys = (call.q, call.k, call.v), call.k.shape[2]
    query_block, block, rows, gamma = call.query_block, call.block, call.rows, call.gamma
    blocks, tokens = (query_block, block, call.sink, call.window), (call.lengths, call.start)
    listed = build_lists(call.index, *blocks, *tokens, call.q.shape[2], keys)
    sizes = query_block == _hopper.QUERY_BLOCK and block == _hopper.BLOCK
    plain = call.start is None and call.key_mask is None and call.softcap == 0.0 and call.scale > 0
    hopper = sizes and plain and _hopper.serves(*tensors)
    fused = hopper and rows is not None and _hopper.corrects(rows, gamma)
    sparse = out if rows is None or fused else torch.empty_like(out)
    asked = {
        "scale": call.scale,
        "window": call.window,
        "lengths": call.lengths,
        "out": sparse,
        "lse": lse,
    }
    if hopper:
        correction = {"dense": rows if fused else None, "gamma": gamma, "weight": call.weight}
        _hopper.launch_block_sparse(*tensors, *listed, **asked, **correction)
    else:
        asked |= {"query_block": query_block, "block": block, "softcap": call.softcap}
        launch_triton(*tensors, *listed, **asked, start=call.start, key_mask=call.key_mask)
    if sparse is not out:
        launch_delta_correct(sparse, rows, gamma, call.weight, *tokens, keys, out)


_OP = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_block_sparse_attention,
)
