"""Block-sparse attention: every query block attends to its own list of key blocks.

    out[t] = sum over l in A(t) of softmax(scale q_t k_l) v_l,   lse[t] = log sum exp(scale q_t k_l)

A(t) is the union, no key twice, of the listed key blocks of t's query block, the first `sink`
blocks, and the local part: every key from the block that holds the key `window` before the query
block's first query, up to t itself. So listed blocks are complete for every query of the block and
only the local part needs the causal mask.

The CUDA path is two kernels: the first turns each list into the sorted list of distinct blocks
that are neither sink nor local, sink in front, and its count; the second runs flash attention over
that list, a tile made of whichever blocks come next, and then over the local part.

Source: MOMO (Measure Once, Mask Once), Algorithm 1, step 3.
"""

import math

import numba
import numpy as np
import torch
import triton
import triton.language as tl

from attnplug.errors import ArgumentError
from attnplug.ops._define import (
    check_attention_inputs,
    check_sequence_inputs,
    define_op,
    refuse_gradients,
    require,
)
from attnplug.ops._product import add_product

NAME = "block_sparse_attention"
# One program sorts a query block's whole list in registers.
MAX_BLOCKS = 8192

_LOG2E = math.log2(math.e)
_LN2 = tl.constexpr(math.log(2.0))
_NO_BLOCK = tl.constexpr(0x7FFFFFFF)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact causal softmax attention over listed key blocks, the sink and a local part.

    q `[B,Hq,T,D]`; k, v `[B,Hkv,S,D]`; fp32, fp16 or bf16; D in 64, 80, 96, 128, 256. index
    `[B,Hq,ceil(T/query_block),K]` int32, K at most 8192: key blocks of `block` keys, numbered from
    the row's `start`, in any order; entries that are negative, named twice, in the sink or in the
    local part (so also the future) are ignored.

    lengths `[1]` or `[B]`: valid tokens in k, v, of which the T queries are the last (None: S).
    start `[1]` or `[B]`: first valid key of each row; query blocks are counted from the row's first
    query at or after it. key_mask `[B,S]` bool: False keys are never seen. sink in key blocks,
    window in tokens. softcap > 0: logits become softcap * tanh(logit / softcap).

    Returns out `[B,Hq,T,D]` in q's dtype and lse `[B,Hq,T]` fp32 (natural log). A query that sees
    no key (padding, all masked) gives 0 and -inf.

    Source: MOMO (Measure Once, Mask Once), Algorithm 1, step 3.
    """
    refuse_gradients(NAME, q, k, v)
    return _OP(
        q, k, v, index, scale, query_block, block, sink, window, lengths, start, key_mask, softcap
    )


def _allocate(
    q, k, v, index, scale, query_block, block, sink, window, lengths, start, key_mask, softcap
) -> tuple[torch.Tensor, torch.Tensor]:
    check_attention_inputs(NAME, q, k, v)
    check_sequence_inputs(NAME, q, k, lengths, start, key_mask)
    for label, value, least in (
        ("query_block", query_block, 1), ("block", block, 1), ("sink", sink, 0),
        ("window", window, 0), ("softcap", softcap, 0),
    ):  # fmt: skip
        require(value >= least, NAME, f"{label} is {value}, needs at least {least}")
    require(index.dtype == torch.int32, NAME, f"index is {index.dtype}, needs int32")
    require(index.device == q.device, NAME, f"index is on {index.device} but q is on {q.device}")
    query_blocks = (q.shape[2] + query_block - 1) // query_block
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
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


# ---- numba: the specification -------------------------------------------------------------------


@numba.njit(cache=True)
def _logit(x, scale, softcap):
    x *= scale
    return softcap * math.tanh(x / softcap) if softcap > 0.0 else x


@numba.njit(cache=True)
def _weigh(logits, row, best, total):
    """One online-softmax step of query `row`: logits become weights; -> decay of what came before.
    NaN never wins the maximum, and surfaces as a NaN weight."""
    top = best[row]
    for x in logits:
        if x > top:
            top = x
    shift = top if top > -np.inf else np.float32(0.0)
    decay = np.exp(best[row] - shift)
    for n in range(logits.size):
        logits[n] = np.exp(logits[n] - shift)
    total[row] = total[row] * decay + logits.sum()
    best[row] = top
    return decay


@numba.njit(cache=True)
def _chosen_keys(index, local, block, sink, begin, visible):
    """Positions, ascending, of the visible keys of the sink and of the listed blocks before the
    local part."""
    chosen = np.zeros(local, np.bool_)
    chosen[:sink] = True
    for name in index:
        if 0 <= name < local:
            chosen[name] = True
    keys = np.empty(int(chosen.sum()) * block, np.int64)
    used = 0
    for name in range(local):
        if chosen[name]:
            for key in range(begin + name * block, begin + (name + 1) * block):
                if visible[key]:
                    keys[used] = key
                    used += 1
    return keys[:used]


@numba.njit(cache=True)
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
            acc[row] *= _weigh(weights[row], row, best, total)
        add_product(weights, values, acc)
    values = v[local_keys]
    near = np.zeros((queries, local_keys.size), np.float32)
    add_product(q, np.ascontiguousarray(k[local_keys].T), near)
    for row in range(queries):
        seen = np.searchsorted(local_keys, position + row, side="right")
        if seen > 0:
            for n in range(seen):
                near[row, n] = _logit(near[row, n], scale, softcap)
            acc[row] *= _weigh(near[row, :seen], row, best, total)
            add_product(near[row : row + 1, :seen], values[:seen], acc[row : row + 1])
        if keys.size + seen == 0:
            out[row] = 0.0
            lse[row] = -np.inf
        else:  # all logits -inf: 0/0 is NaN, as in dense
            out[row] = acc[row] / total[row]
            shift = best[row] if best[row] > -np.inf else np.float32(0.0)
            lse[row] = shift + np.log(total[row])


@numba.njit(parallel=True, cache=True)
def _reference(
    q, k, v, index, length, start, visible, scale, softcap, query_block, block, sink, window, out,
    lse,
):  # fmt: skip
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    blocks = index.shape[2]
    out[:] = 0.0
    lse[:] = -np.inf
    for item in numba.prange(batch * heads * blocks):
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
        span = np.arange(start[b] + local * block, offset + end)
        _query_block(
            q[b, h, begin:end], k[b, h // group], v[b, h // group], keys,
            span[visible[b, span[0] : span[-1] + 1]], offset + begin, scale, softcap,
            out[b, h, begin:end], lse[b, h, begin:end],
        )  # fmt: skip


def _cpu(
    q, k, v, index, scale, query_block, block, sink, window, lengths, start, key_mask, softcap,
    out, lse,
):  # fmt: skip
    batch, keys = k.shape[0], k.shape[2]
    length = torch.full((batch,), keys) if lengths is None else lengths.long().expand(batch)
    begin = torch.zeros(batch).long() if start is None else start.long().expand(batch)
    longest = int(length.max()) if batch else 0
    if longest > keys or (batch and int(begin.min()) < 0):
        raise ArgumentError(
            f"{NAME}: lengths go to {longest} and start from {int(begin.min())}, but k and v hold "
            f"keys 0 to {keys - 1}"
        )
    visible = torch.ones(batch, keys, dtype=torch.bool) if key_mask is None else key_mask
    wide = torch.empty(out.shape, dtype=torch.float32)
    # Every array contiguous: numba compiles anew for each combination of layouts.
    _reference(
        q.float().contiguous().numpy(),
        k[:, :, :longest].float().contiguous().numpy(),
        v[:, :, :longest].float().contiguous().numpy(),
        index.contiguous().numpy(), length.contiguous().numpy(), begin.contiguous().numpy(),
        visible.contiguous().numpy(),
        np.float32(scale), np.float32(softcap), query_block, block, sink, window,
        wide.numpy(), lse.numpy(),
    )  # fmt: skip
    out.copy_(wide)


# ---- Triton -------------------------------------------------------------------------------------


@triton.jit
def _bounds(LENGTHS, START, b, T, S, LENGTH_STRIDE: tl.constexpr, START_STRIDE: tl.constexpr):
    """-> first valid key, position of query 0, first query that is no padding."""
    length = S
    if LENGTHS is not None:
        length = tl.load(LENGTHS + b * LENGTH_STRIDE).to(tl.int32)
    start = 0
    if START is not None:
        start = tl.load(START + b * START_STRIDE).to(tl.int32)
    offset = length - T
    return start, offset, tl.maximum(start - offset, 0)


@triton.jit
def _count_run(block_a, named_a, block_b, named_b):
    return block_b, tl.where(block_a == block_b, named_a + named_b, named_b)


@triton.jit
def _list_kernel(
    INDEX, LIST, COUNT, LENGTHS, START, T, S, HEADS, NQ, K, WINDOW,
    LENGTH_STRIDE: tl.constexpr, START_STRIDE: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, SINK: tl.constexpr, K_PAD: tl.constexpr, SINK_PAD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    b = program // NQ // HEADS
    start, offset, first = _bounds(LENGTHS, START, b, T, S, LENGTH_STRIDE, START_STRIDE)
    begin = first + (program % NQ).to(tl.int32) * QUERY_BLOCK
    local = tl.maximum(offset + begin - WINDOW - start, 0) // BLOCK
    local = tl.where(begin < T, local, 0)
    sink = tl.minimum(local, SINK)

    entry = tl.arange(0, K_PAD)
    name = tl.load(INDEX + program * K + entry, mask=entry < K, other=-1)
    name = tl.where((name >= SINK) & (name < local), name, _NO_BLOCK)
    name = tl.sort(name)
    _, times = tl.associative_scan((name, tl.full([K_PAD], 1, tl.int32)), 0, _count_run)
    distinct = (name != _NO_BLOCK) & (times == 1)
    place = tl.cumsum(distinct.to(tl.int32), 0) - 1 + sink
    own = LIST + program * (K + SINK)
    tl.store(own + place, name, mask=distinct)
    if SINK > 0:
        head = tl.arange(0, SINK_PAD)
        tl.store(own + head, head, mask=head < sink)
    tl.store(COUNT + program, sink + tl.sum(distinct.to(tl.int32), 0))


@triton.jit
def _tile(
    i, q, m, total, acc, seen, k_base, v_base, mask_base, list_base, stride_ks, stride_vs, scale,
    softcap, listed, local, limit, row_limit,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    SCALE_FIRST: tl.constexpr, SOFTCAP: tl.constexpr, HAS_MASK: tl.constexpr,
    LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over keys i*N.. of the concatenation of the listed blocks and the
    local part; every base points at the row's first valid key, and so do key numbers."""
    n = i * N + tl.arange(0, N)
    d = tl.arange(0, D_PAD)
    inside = n < limit
    open_key = inside
    if BLOCK % N == 0:  # the tile lies in one block: one scalar, not a gather
        slot = i * N // BLOCK
    else:
        slot = n // BLOCK
    if LOCAL:
        name = tl.load(list_base + slot, mask=slot < listed, other=0)
        name = tl.where(slot < listed, name, local + slot - listed)
    else:
        name = tl.load(list_base + slot)
    key = name * BLOCK + n % BLOCK
    k_place = k_base + key.to(tl.int64)[None, :] * stride_ks + d[:, None]
    v_place = v_base + key.to(tl.int64)[:, None] * stride_vs + d[None, :]
    if HAS_MASK:
        if LOCAL:
            open_key = tl.load(mask_base + key, mask=inside, other=0) != 0
        else:
            open_key = tl.load(mask_base + key) != 0
    # Hidden keys are not even read: whatever stands there must not reach a dot product.
    if HAS_MASK or LOCAL:
        keys = tl.load(k_place, mask=open_key[None, :] & (d < D)[:, None], other=0.0)
    elif D != D_PAD:
        keys = tl.load(k_place, mask=(d < D)[:, None], other=0.0)
    else:
        keys = tl.load(k_place)
    logits = tl.dot(q, keys, input_precision=PRECISION)
    if SCALE_FIRST:
        logits *= scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), with logits already in units of log2
            bent = 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * logits))
            logits = bent * softcap
        factor = 1.0
    else:
        factor = scale
    if LOCAL:
        visible = open_key[None, :] & (key[None, :] <= row_limit[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        if HAS_MASK:
            seen = tl.maximum(seen, tl.max(visible.to(tl.int32), 1))
    elif HAS_MASK:
        logits = tl.where(open_key[None, :], logits, float("-inf"))
        seen = tl.maximum(seen, tl.max(open_key.to(tl.int32), 0))
    m_next = tl.maximum(m, tl.max(logits, 1) * factor)
    shift = tl.where(m_next == float("-inf"), 0.0, m_next)
    p = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(m - shift)
    total = total * decay + tl.sum(p, 1)
    if HAS_MASK or LOCAL:
        values = tl.load(v_place, mask=open_key[:, None] & (d < D)[None, :], other=0.0)
    elif D != D_PAD:
        values = tl.load(v_place, mask=(d < D)[None, :], other=0.0)
    else:
        values = tl.load(v_place)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return m_next, total, acc, seen


@triton.jit
def _attend_kernel(
    Q, K, V, OUT, LSE, LIST, COUNT, LENGTHS, START, KEY_MASK, scale, softcap, T, S, NQ, LISTED,
    WINDOW, HEADS_KV, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb,
    stride_vh, stride_vs, stride_mb,
    LENGTH_STRIDE: tl.constexpr, START_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, SCALE_FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # KV head by KV head, so that its keys stay in L2; in each, the longest lists first, and the
    # heads of a group, which share most of their blocks, side by side.
    HAS_MASK: tl.constexpr = KEY_MASK is not None
    pid = tl.program_id(0)
    member = pid % GROUP
    tile = NQ * SPLITS - 1 - pid // GROUP % (NQ * SPLITS)
    kv = pid // GROUP // (NQ * SPLITS)
    b = (kv // HEADS_KV).to(tl.int64)
    kv_head = (kv % HEADS_KV).to(tl.int64)
    head = kv_head * GROUP + member
    place = tile // SPLITS
    start, offset, first = _bounds(LENGTHS, START, b, T, S, LENGTH_STRIDE, START_STRIDE)
    begin = first + place * QUERY_BLOCK
    local = tl.maximum(offset + begin - WINDOW - start, 0) // BLOCK

    row = tile % SPLITS * M + tl.arange(0, M)
    in_block = row < QUERY_BLOCK
    d = tl.arange(0, D_PAD)
    whole = (d < D)[None, :]
    bh = b * HEADS_KV * GROUP + head
    # Padding queries belong to no query block: the program of the same slot clears them.
    padding = place * QUERY_BLOCK + row
    cleared = in_block & (padding < tl.minimum(first, T))
    clear_place = (bh * T + padding)[:, None] * D + d[None, :]
    zero = tl.zeros([M, D_PAD], OUT.dtype.element_ty)
    tl.store(OUT + clear_place, zero, mask=cleared[:, None] & whole)
    tl.store(LSE + bh * T + padding, tl.full([M], float("-inf"), tl.float32), mask=cleared)

    t = begin + row
    live = in_block & (t < T)
    q_base = Q + b * stride_qb + head * stride_qh
    q_place = q_base + t.to(tl.int64)[:, None] * stride_qt + d[None, :]
    q = tl.load(q_place, mask=live[:, None] & whole, other=0.0)
    listed = tl.load(COUNT + bh * NQ + place)
    list_base = LIST + (bh * NQ + place) * LISTED
    # Positions from here on count from the row's first valid key.
    row_limit = offset + t - start
    row_end = tl.minimum(begin + tl.minimum((tile % SPLITS + 1) * M, QUERY_BLOCK), T)
    limit = listed * BLOCK + offset + row_end - start - local * BLOCK
    any_row = begin + tile % SPLITS * M < T
    limit = tl.where(any_row, limit, 0)
    full = tl.where(any_row, listed * BLOCK // N, 0)
    k_base = K + b * stride_kb + kv_head * stride_kh + tl.cast(start, tl.int64) * stride_ks
    v_base = V + b * stride_vb + kv_head * stride_vh + tl.cast(start, tl.int64) * stride_vs
    mask_base = LIST
    if HAS_MASK:
        mask_base = KEY_MASK + b * stride_mb + start

    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    seen = tl.zeros([M], tl.int32)
    for i in range(0, full):
        m, total, acc, seen = _tile(
            i, q, m, total, acc, seen, k_base, v_base, mask_base, list_base, stride_ks, stride_vs,
            scale, softcap, listed, local, limit, row_limit, D, D_PAD, BLOCK, N, SCALE_FIRST,
            SOFTCAP, HAS_MASK, False, PRECISION,
        )  # fmt: skip
    # Not pipelined: with gathered key numbers (N > BLOCK) Triton 3.6 compiles this loop to wrong
    # numbers at two stages. It has two or three turns.
    for i in tl.range(full, tl.cdiv(limit, N), num_stages=1):
        m, total, acc, seen = _tile(
            i, q, m, total, acc, seen, k_base, v_base, mask_base, list_base, stride_ks, stride_vs,
            scale, softcap, listed, local, limit, row_limit, D, D_PAD, BLOCK, N, SCALE_FIRST,
            SOFTCAP, HAS_MASK, True, PRECISION,
        )  # fmt: skip

    if not HAS_MASK:
        seen = tl.full([M], 1, tl.int32)  # a query sees at least itself
    nothing = total == 0.0
    # Keys were seen but every logit was -inf: dense gives NaN, and 0 would be a plausible number.
    empty = tl.where(seen > 0, float("nan"), 0.0)
    total = tl.where(nothing, 1.0, total)
    result = tl.where(nothing[:, None], empty[:, None], acc / total[:, None])
    shift = tl.where(m == float("-inf"), 0.0, m)
    lse = tl.where(nothing, float("-inf"), (shift + tl.log2(total)) * _LN2)
    out_place = (bh * T + t)[:, None] * D + d[None, :]
    tl.store(OUT + out_place, result.to(OUT.dtype.element_ty), mask=live[:, None] & whole)
    tl.store(LSE + bh * T + t, lse, mask=live)


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _configuration(dim: int, dtype: torch.dtype, query_block: int, block: int) -> dict[str, int]:
    """Tile sizes and pipelining. A tile of keys lies in one key block wherever a power of two of at
    least 16 divides the block: its address is then one scalar, the fast way. (H200, 128K tokens,
    D=128, bf16: 430 TFLOP/s; a tile of 128 keys gathered from two blocks, 8 warps: 407.)"""
    if dtype == torch.float32:
        rows, keys, warps, stages = 64, 32, 4, 1 if dim > 128 else 2
    elif dim > 128:
        rows, keys, warps, stages = 128, 64, 8, 2
    else:
        rows, keys, warps, stages = 128, 64, 4, 2
    whole = block & -block
    if whole >= 16:
        keys = min(keys, whole)
    else:
        stages = 1  # gathered key numbers: see the unpipelined loop in the kernel
    rows = min(rows, max(16, triton.next_power_of_2(query_block)))
    return dict(M=rows, N=keys, num_warps=warps if rows > 32 else 4, num_stages=stages)


def _build_lists(index, query_block, block, sink, window, lengths, start, queries, keys):
    """-> per query block the distinct blocks before the local part, sink first, and their count."""
    batch, heads, blocks, names = index.shape
    lists = torch.empty(
        batch, heads, blocks, max(names + sink, 1), dtype=torch.int32, device=index.device
    )
    count = torch.empty(batch, heads, blocks, dtype=torch.int32, device=index.device)
    padded = max(2, triton.next_power_of_2(names))
    _list_kernel[(batch * heads * blocks,)](
        index.contiguous(), lists, count, lengths, start, queries, keys, heads, blocks, names,
        window, **_row_strides(lengths, start), QUERY_BLOCK=query_block, BLOCK=block, SINK=sink,
        K_PAD=padded, SINK_PAD=triton.next_power_of_2(max(sink, 1)),
        num_warps=max(1, min(16, padded // 128)),
    )  # fmt: skip
    return lists, count


def _row_strides(lengths, start) -> dict[str, int]:
    return dict(
        LENGTH_STRIDE=0 if lengths is None or lengths.shape[0] == 1 else lengths.stride(0),
        START_STRIDE=0 if start is None or start.shape[0] == 1 else start.stride(0),
    )


def launch_block_sparse_attention(
    q, k, v, index, scale, query_block, block, sink, window, lengths, start, key_mask, softcap,
    out, lse, configuration=None,
):  # fmt: skip
    """Fill `out` and `lse` with the Triton kernels; allocates the lists, nothing data dependent.
    `configuration` overrides `_configuration`, for tuning."""
    batch, heads, queries, dim = q.shape
    if out.numel() == 0:
        return
    keys, kv_heads = k.shape[2], k.shape[1]
    sink = min(sink, triton.cdiv(keys, block))
    lists, count = _build_lists(
        index, query_block, block, sink, window, lengths, start, queries, keys
    )
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    mask = None if key_mask is None else _unit_last(key_mask).view(torch.uint8)
    chosen = configuration or _configuration(dim, q.dtype, query_block, block)
    splits = triton.cdiv(query_block, chosen["M"])
    blocks = index.shape[2]
    _attend_kernel[(batch * heads * blocks * splits,)](
        q, k, v, out, lse, lists, count, lengths, start, mask,
        # With a softcap the kernel wants logit / softcap in units of log2, and caps in them too.
        scale * _LOG2E / (softcap or 1.0), softcap * _LOG2E,
        queries, keys, blocks, lists.shape[3], window, kv_heads,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], 0 if mask is None else mask.stride(0),
        **_row_strides(lengths, start), GROUP=heads // kv_heads, QUERY_BLOCK=query_block,
        BLOCK=block, D=dim, D_PAD=triton.next_power_of_2(dim), SPLITS=splits,
        SCALE_FIRST=softcap > 0.0 or scale <= 0.0, SOFTCAP=softcap > 0.0, PRECISION="ieee",
        **chosen,
    )  # fmt: skip


_OP = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor index, float scale, int query_block, int block, "
    "int sink, int window, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap) "
    "-> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_block_sparse_attention,
)
