"""The Triton kernels of block_sparse_attention: the lists that every GPU path attends over, and
flash attention over them for every shape and option. (Hopper has a faster one for the common case,
`_hopper.py`.)"""

import math

import torch
import triton
import triton.language as tl

from attnplug.ops.common.rows import row_step

_LOG2E = math.log2(math.e)
_LN2 = tl.constexpr(math.log(2.0))
_NO_BLOCK = tl.constexpr(0x7FFFFFFF)


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


def build_lists(index, query_block, block, sink, window, lengths, start, queries, keys):
    """-> per query block the distinct blocks before the local part, sink first, and their count."""
    sink = min(sink, triton.cdiv(keys, block))
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
        LENGTH_STRIDE=row_step(lengths),
        START_STRIDE=row_step(start),
    )


def launch_triton(
    q, k, v, lists, count, scale, query_block, block, window, lengths, start, key_mask, softcap,
    out, lse, configuration=None,
):  # fmt: skip
    """Fill `out` and `lse`. `configuration` overrides `_configuration`, for tuning."""
    batch, heads, queries, dim = q.shape
    keys, kv_heads = k.shape[2], k.shape[1]
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    mask = None if key_mask is None else _unit_last(key_mask).view(torch.uint8)
    chosen = configuration or _configuration(dim, q.dtype, query_block, block)
    splits = triton.cdiv(query_block, chosen["M"])
    blocks = lists.shape[2]
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
