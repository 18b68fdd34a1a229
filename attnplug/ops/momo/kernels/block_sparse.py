"""The Triton kernels of block_sparse_attention: the lists that every GPU path attends over, and
flash attention over them for every shape and option. (Hopper has a faster one for the common case,
`hopper.py`.)"""

import math
from typing import NamedTuple

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.pipeline import Loop, loop_that_fits
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.triton import tl, triton

_LOG2E = math.log2(math.e)
_LN2 = tl.constexpr(math.log(2.0))
_NO_BLOCK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _positions(LENGTHS, START, b, T, S, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr):
    """-> first valid key, position of query 0, first query that is no padding."""
    length = S
    if LENGTHS is not None:
        length = tl.load(LENGTHS + b * LENGTH_STEP).to(tl.int32)
    start = 0
    if START is not None:
        start = tl.load(START + b * START_STEP).to(tl.int32)
    offset = length - T
    return start, offset, tl.maximum(start - offset, 0)


@triton.jit
def count_run(block_a, count_a, block_b, count_b):
    """For an associative scan over sorted blocks: each one's place in its run of equal blocks."""
    return block_b, tl.where(block_a == block_b, count_a + count_b, count_b)


@triton.jit(do_not_specialize=["T", "S", "NQ"])
def _list_kernel(
    INDEX,
    LIST,
    COUNT,
    LENGTHS,
    START,
    T,
    S,
    HEADS,
    NQ,
    K,
    WINDOW,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    K_PAD: tl.constexpr,
    SINK_PAD: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b = program // NQ // HEADS
    start, offset, first = _positions(LENGTHS, START, b, T, S, LENGTH_STEP, START_STEP)
    begin = first + (program % NQ).to(tl.int32) * QUERY_BLOCK
    local = tl.maximum(offset + begin - WINDOW - start, 0) // BLOCK
    local = tl.where(begin < T, local, 0)
    sink = tl.minimum(local, SINK)

    entry = tl.arange(0, K_PAD)
    block = tl.load(INDEX + program * K + entry, mask=entry < K, other=-1)
    block = tl.where((block >= SINK) & (block < local), block, _NO_BLOCK)
    block = tl.sort(block)
    _, times = tl.associative_scan((block, tl.full([K_PAD], 1, tl.int32)), 0, count_run)
    distinct = (block != _NO_BLOCK) & (times == 1)
    place = tl.cumsum(distinct.to(tl.int32), 0) - 1 + sink
    own = LIST + program * (K + SINK)
    tl.store(own + place, block, mask=distinct)
    if SINK > 0:
        head = tl.arange(0, SINK_PAD)
        tl.store(own + head, head, mask=head < sink)
    tl.store(COUNT + program, sink + tl.sum(distinct.to(tl.int32), 0))


@triton.jit
def _tile(
    i,
    q,
    softmax,
    cache,
    part,
    factors,
    HAS_MASK: tl.constexpr,
    LOCAL: tl.constexpr,
    spec: tl.constexpr,
):
    """One online-softmax step over keys i*N.. of the concatenation of the listed blocks and the
    local part. `softmax` is (maximum, denominator, output, whether a row saw a key), and is
    returned updated. `cache` has the pointers to the row's first valid key, from which keys are
    numbered: (K, V, key mask, their strides over keys). `part` says which keys: (list, its blocks,
    first local block, keys in all, last key of each row)."""
    top, total, acc, seen = softmax
    k_base, v_base, mask_base, k_s, v_s = cache
    list_base, listed, local, limit, row_limit = part
    scale, softcap = factors
    D: tl.constexpr = spec.D
    D_PAD: tl.constexpr = spec.D_PAD
    BLOCK: tl.constexpr = spec.BLOCK
    N: tl.constexpr = spec.N
    PRECISION: tl.constexpr = spec.PRECISION
    n = i * N + tl.arange(0, N)
    d = tl.arange(0, D_PAD)
    inside = n < limit
    open_key = inside
    if BLOCK % N == 0:  # the tile lies in one block: one scalar, not a gather
        slot = i * N // BLOCK
    else:
        slot = n // BLOCK
    if LOCAL:
        block = tl.load(list_base + slot, mask=slot < listed, other=0)
        block = tl.where(slot < listed, block, local + slot - listed)
    else:
        block = tl.load(list_base + slot)
    key = block * BLOCK + n % BLOCK
    k_at = k_base + key.to(tl.int64)[None, :] * k_s + d[:, None]
    v_at = v_base + key.to(tl.int64)[:, None] * v_s + d[None, :]
    if HAS_MASK:
        if LOCAL:
            open_key = tl.load(mask_base + key, mask=inside, other=0) != 0
        else:
            open_key = tl.load(mask_base + key) != 0
    # The kernel does not read hidden keys: a NaN there must not reach a dot product.
    if HAS_MASK or LOCAL:
        keys = tl.load(k_at, mask=open_key[None, :] & (d < D)[:, None], other=0.0)
    elif D != D_PAD:
        keys = tl.load(k_at, mask=(d < D)[:, None], other=0.0)
    else:
        keys = tl.load(k_at)
    logits = tl.dot(q, keys, input_precision=PRECISION)
    if spec.SCALE_FIRST:
        logits *= scale
        if spec.SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + e^2x), with logits already in units of log2
            tanh = 1.0 - 2.0 / (1.0 + tl.exp2(2.0 * logits))
            logits = tanh * softcap
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
    higher = tl.maximum(top, tl.max(logits, 1) * factor)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(p, 1)
    if HAS_MASK or LOCAL:
        values = tl.load(v_at, mask=open_key[:, None] & (d < D)[None, :], other=0.0)
    elif D != D_PAD:
        values = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
    else:
        values = tl.load(v_at)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return higher, total, acc, seen


class Spec(NamedTuple):
    """What the attention kernel is compiled for."""

    LENGTH_STEP: int  # from a row's length to the next row's
    START_STEP: int
    GROUP: int  # query heads of a KV head
    QUERY_BLOCK: int
    BLOCK: int
    D: int
    D_PAD: int  # a power of two
    M: int  # queries of a tile
    N: int  # keys of a tile
    SPLITS: int  # tiles of a query block
    SCALE_FIRST: bool  # scale the logits, not their maximum alone
    SOFTCAP: bool
    PRECISION: str = "ieee"


@triton.jit
def _attend_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    LIST,
    COUNT,
    LENGTHS,
    START,
    KEY_MASK,
    scale,
    softcap,
    T,
    S,
    NQ,
    LISTED,
    WINDOW,
    HEADS_KV,
    q_strides,
    k_strides,
    v_strides,
    mask_b,
    spec: tl.constexpr,
):
    # KV head by KV head, so that its keys stay in L2; in each, the longest lists first, and the
    # heads of a group, which share most of their blocks, side by side.
    HAS_MASK: tl.constexpr = KEY_MASK is not None
    LENGTH_STEP: tl.constexpr = spec.LENGTH_STEP
    START_STEP: tl.constexpr = spec.START_STEP
    GROUP: tl.constexpr = spec.GROUP
    QUERY_BLOCK: tl.constexpr = spec.QUERY_BLOCK
    BLOCK: tl.constexpr = spec.BLOCK
    D: tl.constexpr = spec.D
    D_PAD: tl.constexpr = spec.D_PAD
    M: tl.constexpr = spec.M
    N: tl.constexpr = spec.N
    SPLITS: tl.constexpr = spec.SPLITS
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    pid = tl.program_id(0)
    member = pid % GROUP
    tile = NQ * SPLITS - 1 - pid // GROUP % (NQ * SPLITS)
    kv = pid // GROUP // (NQ * SPLITS)
    b = (kv // HEADS_KV).to(tl.int64)
    kv_head = (kv % HEADS_KV).to(tl.int64)
    head = kv_head * GROUP + member
    query_block = tile // SPLITS
    start, offset, first = _positions(LENGTHS, START, b, T, S, LENGTH_STEP, START_STEP)
    begin = first + query_block * QUERY_BLOCK
    local = tl.maximum(offset + begin - WINDOW - start, 0) // BLOCK

    row = tile % SPLITS * M + tl.arange(0, M)
    in_block = row < QUERY_BLOCK
    d = tl.arange(0, D_PAD)
    whole = (d < D)[None, :]
    bh = b * HEADS_KV * GROUP + head
    # Padding queries belong to no query block: the program of the query block that would hold them
    # without padding clears them.
    padding = query_block * QUERY_BLOCK + row
    cleared = in_block & (padding < tl.minimum(first, T))
    clear_at = (bh * T + padding)[:, None] * D + d[None, :]
    zero = tl.zeros([M, D_PAD], OUT.dtype.element_ty)
    tl.store(OUT + clear_at, zero, mask=cleared[:, None] & whole)
    tl.store(LSE + bh * T + padding, tl.full([M], float("-inf"), tl.float32), mask=cleared)

    t = begin + row
    live = in_block & (t < T)
    q_base = Q + b * q_b + head * q_h
    q_at = q_base + t.to(tl.int64)[:, None] * q_t + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & whole, other=0.0)
    listed = tl.load(COUNT + bh * NQ + query_block)
    list_base = LIST + (bh * NQ + query_block) * LISTED
    # Positions from here on count from the row's first valid key.
    row_limit = offset + t - start
    row_end = tl.minimum(begin + tl.minimum((tile % SPLITS + 1) * M, QUERY_BLOCK), T)
    limit = listed * BLOCK + offset + row_end - start - local * BLOCK
    any_row = begin + tile % SPLITS * M < T
    limit = tl.where(any_row, limit, 0)
    full = tl.where(any_row, listed * BLOCK // N, 0)
    k_base = K + b * k_b + kv_head * k_h + tl.cast(start, tl.int64) * k_s
    v_base = V + b * v_b + kv_head * v_h + tl.cast(start, tl.int64) * v_s
    mask_base = LIST
    if HAS_MASK:
        mask_base = KEY_MASK + b * mask_b + start

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    seen = tl.zeros([M], tl.int32)
    cache = (k_base, v_base, mask_base, k_s, v_s)
    part = (list_base, listed, local, limit, row_limit)
    softmax, factors = (top, total, acc, seen), (scale, softcap)
    for i in range(0, full):
        softmax = _tile(i, q, softmax, cache, part, factors, HAS_MASK, LOCAL=False, spec=spec)
    # Not pipelined: with gathered key numbers (N > BLOCK) Triton 3.6 compiles this loop to wrong
    # numbers at two stages. It has two or three turns.
    for i in tl.range(full, tl.cdiv(limit, N), num_stages=1):
        softmax = _tile(i, q, softmax, cache, part, factors, HAS_MASK, LOCAL=True, spec=spec)

    top, total, acc, seen = softmax
    if not HAS_MASK:
        seen = tl.full([M], 1, tl.int32)  # a query sees at least itself
    nothing = total == 0.0
    # Keys were seen but every logit was -inf: dense gives NaN, and 0 would be a plausible number.
    empty = tl.where(seen > 0, float("nan"), 0.0)
    total = tl.where(nothing, 1.0, total)
    result = tl.where(nothing[:, None], empty[:, None], acc / total[:, None])
    shift = tl.where(top == float("-inf"), 0.0, top)
    lse = tl.where(nothing, float("-inf"), (shift + tl.log2(total)) * _LN2)
    out_at = (bh * T + t)[:, None] * D + d[None, :]
    tl.store(OUT + out_at, result.to(OUT.dtype.element_ty), mask=live[:, None] & whole)
    tl.store(LSE + bh * T + t, lse, mask=live)


def unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _configuration(
    dim: int, dtype: torch.dtype, query_block: int, block: int, shared: int
) -> dict[str, int]:
    """Tile sizes and pipelining within `shared` bytes of shared memory. A tile of keys lies in one
    key block wherever a power of two of at least 16 divides the block: its address is then one
    scalar, the fast way. (H200, 128K tokens, D=128, bf16: 430 TFLOP/s; a tile of 128 keys gathered
    from two blocks, 8 warps: 407.)"""
    if dtype == torch.float32:
        rows, keys, warps, stages = 64, 32, 8 if dim > 256 else 4, 1 if dim > 128 else 2
    elif dim > 256:  # the sums of 128 rows take all registers; not timed
        rows, keys, warps, stages = 64, 32, 8, 2
    elif dim > 128:
        rows, keys, warps, stages = 128, 64, 8, 2
    else:
        rows, keys, warps, stages = 128, 64, 4, 2
    whole = block & -block
    if whole >= 16:
        keys = min(keys, whole)
    else:
        stages = 1  # gathered key numbers: see the unpipelined loop in the kernel
    rows = min(rows, max(16, next_power_of_two(query_block)))
    itemsize = dtype.itemsize
    loop = loop_that_fits(Loop(rows, keys, stages), padded_width(dim) * itemsize, itemsize, shared)
    warps = warps if loop.rows > 32 else 4
    return dict(M=loop.rows, N=loop.keys, num_warps=warps, num_stages=loop.stages)


def build_lists(index, query_block, block, sink, window, lengths, start, queries, keys):
    """-> per query block the distinct blocks before the local part, sink first, and their count."""
    sink = min(sink, cdiv(keys, block))
    batch, heads, blocks, width = index.shape
    lists = torch.empty(
        batch, heads, blocks, max(width + sink, 1), dtype=torch.int32, device=index.device
    )
    count = torch.empty(batch, heads, blocks, dtype=torch.int32, device=index.device)
    padded = max(2, next_power_of_two(width))
    launch_kernel(
        _list_kernel,
        grid=(batch * heads * blocks,),
        INDEX=index.contiguous(),
        LIST=lists,
        COUNT=count,
        LENGTHS=lengths,
        START=start,
        T=queries,
        S=keys,
        HEADS=heads,
        NQ=blocks,
        K=width,
        WINDOW=window,
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        QUERY_BLOCK=query_block,
        BLOCK=block,
        SINK=sink,
        K_PAD=padded,
        SINK_PAD=next_power_of_two(max(sink, 1)),
        num_warps=max(1, min(16, padded // 128)),
    )
    return lists, count


def launch_triton(
    q,
    k,
    v,
    lists,
    count,
    scale,
    query_block,
    block,
    window,
    lengths,
    start,
    key_mask,
    softcap,
    out,
    lse,
    configuration=None,
):
    """Fill `out` and `lse`. `configuration` overrides `_configuration`, for tuning."""
    batch, heads, queries, dim = q.shape
    keys, kv_heads, blocks = k.shape[2], k.shape[1], lists.shape[2]
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    mask = None if key_mask is None else unit_last(key_mask).view(torch.uint8)
    shared = card(q.device).shared
    chosen = configuration or _configuration(dim, q.dtype, query_block, block, shared)
    spec = Spec(
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        GROUP=heads // kv_heads,
        QUERY_BLOCK=query_block,
        BLOCK=block,
        D=dim,
        D_PAD=padded_width(dim),
        M=chosen["M"],
        N=chosen["N"],
        SPLITS=cdiv(query_block, chosen["M"]),
        SCALE_FIRST=softcap > 0.0 or scale <= 0.0,
        SOFTCAP=softcap > 0.0,
    )
    launch_kernel(
        _attend_kernel,
        grid=(batch * heads * blocks * spec.SPLITS,),
        Q=q,
        K=k,
        V=v,
        OUT=out,
        LSE=lse,
        LIST=lists,
        COUNT=count,
        LENGTHS=lengths,
        START=start,
        KEY_MASK=mask,
        # With a softcap the kernel wants logit / softcap in units of log 2, and caps in them too.
        scale=scale * _LOG2E / (softcap or 1.0),
        softcap=softcap * _LOG2E,
        T=queries,
        S=keys,
        NQ=blocks,
        LISTED=lists.shape[3],
        WINDOW=window,
        HEADS_KV=kv_heads,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        mask_b=0 if mask is None else mask.stride(0),
        spec=spec,
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
    )
