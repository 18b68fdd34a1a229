"""The Triton kernel of query_sparse_attention: every shape, option and algorithm, any GPU. (Hopper
has a faster one for the common case, `hopper.py`.)"""

from typing import NamedTuple

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.pipeline import Loop, loop_that_fits
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.momo.kernels.online_topk import (
    NO_BLOCK,
    fill_lists,
    lowest,
    offer_estimated,
    offer_exact,
    offer_slots,
    offer_tree,
    start_slots,
    start_tree,
    write_slots,
    write_tree,
)

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


def offered_before(key_mask, start, block):
    """int32 `[B, S // block + 1]`: how many of a row's first j blocks hold an unmasked key."""
    batch, keys = key_mask.shape
    position = torch.arange(keys // block * block, device=key_mask.device).expand(batch, -1)
    if start is not None:
        position = position + start[:, None]
    seen = key_mask.gather(1, position.clamp(max=keys - 1)) & (position < keys)
    blocks = seen.view(batch, keys // block, block).any(-1)
    return torch.nn.functional.pad(blocks.cumsum(1, dtype=torch.int32), (1, 0))


class Spec(NamedTuple):
    """What the kernel is compiled for."""

    G: int  # query heads of a KV head
    D: int
    DP: int  # D, padded to a power of two
    M: int  # (row, head) pairs of a tile
    N: int  # keys of a tile
    BLOCK: int
    TOP_K: int  # slots of a row; 0 selects nothing, -1 stores every block's score
    EXACT_K: int  # slots chosen exactly
    P: int  # exact slots in registers, padded to a power of two
    LEVELS: int  # of the tournament's tree; -1: another algorithm
    CAP: bool  # a softcap
    HAS_LENGTHS: bool
    HAS_START: bool
    HAS_MASK: bool
    VALUES: bool = True  # without them there is no output
    PRECISION: str = "tf32x3"


@triton.jit
def _scan(
    q,
    cache,
    rows,
    state,
    lists,
    tiles,
    factors,
    DIAGONAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    spec: tl.constexpr,
):
    """Attend over `tiles` (first, end) of N keys; the running softmax and the selection, `state`,
    are passed in and returned. Logits (x * unit) are in units of log 2. TOP_K < 0 stores every
    score and selects nothing.

    `cache` is (K, V, their strides over keys, MASK, BEFORE), `rows` (first valid key, end of the
    keys that any row sees, positions, complete blocks, blocks offered in all), `lists` (INDEX,
    SCORE, TREE, rows of SCORE for TOP_K < 0). `state` is the softmax (output, maximum,
    denominator), the exact buffers, their lowest slot (score, block index), and the counts of
    `offer_estimated`. The second of the counts is the number of appended blocks ("estimated",
    EXACT_K < TOP_K), the lowest slot ("exact", EXACT_K = TOP_K) or the root's leaf ("tournament",
    LEVELS >= 0)."""
    K, V, k_s, v_s, MASK, BEFORE = cache
    start, end, pos, blocks, total = rows
    # Triton 3.6 does not parse nested targets.
    softmax, buffers, lowest_slot, counts = state
    acc, peak, mass = softmax
    s, t = buffers
    low, low_t = lowest_slot
    seen, slot, finite, mean, squares = counts
    INDEX, SCORE, TREE, kept_r = lists
    first, last = tiles
    scale, cap = factors
    D: tl.constexpr = spec.D
    M: tl.constexpr = spec.M
    N: tl.constexpr = spec.N
    BLOCK: tl.constexpr = spec.BLOCK
    TOP_K: tl.constexpr = spec.TOP_K
    EXACT_K: tl.constexpr = spec.EXACT_K
    LEVELS: tl.constexpr = spec.LEVELS
    PRECISION: tl.constexpr = spec.PRECISION
    d = tl.arange(0, q.shape[1])
    column = tl.arange(0, N)
    PER: tl.constexpr = N // BLOCK
    for tile in range(first, last):
        origin = start + tile * N
        ok = column < end - origin
        if HAS_MASK:
            ok &= tl.load(MASK + origin + column, mask=ok, other=0) != 0
        kp = K + origin.to(tl.int64) * k_s + column[:, None] * k_s + d[None, :]
        vp = V + origin.to(tl.int64) * v_s + column[:, None] * v_s + d[None, :]
        if DIAGONAL:
            k = tl.load(kp, mask=ok[:, None] & (d < D)[None, :], other=0.0)
        elif D == q.shape[1]:
            k = tl.load(kp)
        else:
            k = tl.load(kp, mask=(d < D)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if spec.CAP:  # tanh(y) = 1 - 2 / (exp(2 y) + 1)
            x = cap - 2.0 * cap / (tl.exp2(x * scale) + 1.0)
            unit = 1.0
        else:
            unit = scale
        if DIAGONAL:
            visible = ok[None, :] & (column[None, :] <= (pos - origin)[:, None])
            x = tl.where(visible, x, -float("inf"))
        if TOP_K:
            x3 = tl.reshape(x, [M, PER, BLOCK])
            block_peak = tl.max(x3, 2) * unit
            higher = tl.maximum(peak, tl.max(block_peak, 1))
            shift = tl.where(block_peak == -float("inf"), 0.0, block_peak)
            p3 = tl.exp2(x3 * unit - shift[:, :, None])
            block_mass = tl.sum(p3, 2)
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            # each block against its own peak first: its score must not underflow
            added = tl.exp2(block_peak - shift[:, None])
            p = tl.reshape(p3 * added[:, :, None], [M, N])
            kept = tl.exp2(peak - shift)
            mass = mass * kept + tl.sum(block_mass * added, 1)
            finite_mass = (block_mass > 0) & (block_mass < float("inf"))
            value = block_peak + tl.log2(tl.where(finite_mass, block_mass, 1.0))
            value = tl.where(
                finite_mass & (tl.abs(value) < float("inf")), value * LN2, -float("inf")
            )
            if TOP_K < 0:
                j = tile * PER + tl.arange(0, PER)[None, :]
                least = tl.minimum(value, 65504.0)  # float16's largest
                tl.store(
                    SCORE[:, None] + j * kept_r, least.to(tl.float16), mask=j < blocks[:, None]
                )
            for u in tl.static_range(PER if TOP_K > 0 else 0):
                j = tile * PER + u
                offered = j < blocks
                if HAS_MASK:
                    in_range = j < tl.max(blocks, 0)
                    now = tl.load(BEFORE + j + 1, mask=in_range, other=0)
                    unmasked = now > tl.load(BEFORE + j, mask=in_range, other=0)
                    offered = tl.where(unmasked, offered, False)
                one = tl.where((tl.arange(0, PER) == u)[None, :], value, 0.0)
                one = tl.sum(one, 1)
                if LEVELS >= 0:
                    low, low_t, slot = offer_tree(
                        one, j, offered, (low, low_t, slot), TREE, TOP_K, LEVELS
                    )
                elif EXACT_K == TOP_K:
                    low, low_t, slot = offer_exact(
                        one, j, offered, (low, low_t, slot), INDEX, SCORE, M, TOP_K
                    )
                else:
                    s, t, low, low_t, loser, loser_t = offer_slots(
                        one, j, offered, (s, t), (low, low_t)
                    )
                    counts = (seen, slot, finite, mean, squares)
                    seen, slot, finite, mean, squares = offer_estimated(
                        one, (loser, loser_t), offered, total, counts, INDEX, SCORE, TOP_K, EXACT_K
                    )
        else:
            higher = tl.maximum(peak, tl.max(x, 1) * unit)
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(x * unit - shift[:, None])
            kept = tl.exp2(peak - shift)
            mass = mass * kept + tl.sum(p, 1)
        peak = higher
        if spec.VALUES:
            if DIAGONAL:
                v = tl.load(vp, mask=ok[:, None] & (d < D)[None, :], other=0.0)
            elif D == q.shape[1]:
                v = tl.load(vp)
            else:
                v = tl.load(vp, mask=(d < D)[None, :], other=0.0)
            acc = acc * kept[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return (acc, peak, mass), (s, t), (low, low_t), (seen, slot, finite, mean, squares)


# Triton specialises every number in a tuple argument, whatever do_not_specialize says. Strides are
# to be specialised, and come as tuples; these numbers are not.
@triton.jit(do_not_specialize=["T", "S", "R", "tiles", "gamma", "kept"])
def _kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    INDEX,
    SCORE,
    TREE,
    LENGTHS,
    START,
    MASK,
    BEFORE,
    q_strides,
    k_strides,
    v_strides,
    lengths_b,
    start_b,
    before_b,
    B,
    HK,
    T,
    S,
    R,
    tiles,
    gamma,
    kept,
    scale,
    cap,
    spec: tl.constexpr,
):
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    G: tl.constexpr = spec.G
    D: tl.constexpr = spec.D
    M: tl.constexpr = spec.M
    N: tl.constexpr = spec.N
    TOP_K: tl.constexpr = spec.TOP_K
    EXACT_K: tl.constexpr = spec.EXACT_K
    HAS_MASK: tl.constexpr = spec.HAS_MASK
    # the tiles with most keys first; neighbours in the grid are the KV heads of one tile
    tile = tiles - 1 - tl.program_id(0) // (B * HK)
    b = tl.program_id(0) % (B * HK) // HK
    kv = tl.program_id(0) % HK
    length = S
    if spec.HAS_LENGTHS:
        length = tl.load(LENGTHS + b * lengths_b).to(tl.int32)
    start = tl.zeros([], tl.int32)
    if spec.HAS_START:
        start = tl.load(START + b * start_b).to(tl.int32)
    base = tl.maximum(length - T, start)

    # the M rows of the tile: (row, head of the group), head fastest
    flat = tile * M + tl.arange(0, M)
    row = flat // G
    head = kv * G + flat % G
    exists = row < R
    pos = base + row * gamma
    live = exists & (pos < length)
    pos = tl.where(live, pos, start - 1)
    DP: tl.constexpr = spec.DP
    d = tl.arange(0, DP)
    t = (pos - (length - T)).to(tl.int64)
    qp = Q + b.to(tl.int64) * q_b + head.to(tl.int64) * q_h + t * q_t
    q = tl.load(qp[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    K += b.to(tl.int64) * k_b + kv.to(tl.int64) * k_h
    V += b.to(tl.int64) * v_b + kv.to(tl.int64) * v_h
    MASK += b.to(tl.int64) * S
    BEFORE += b.to(tl.int64) * before_b
    out_row = (b * HK * G + head).to(tl.int64) * R + row
    INDEX += out_row * TOP_K
    if TOP_K < 0:  # [B,Hq,kept,R]
        SCORE += (b * HK * G + head).to(tl.int64) * kept * R + row
    else:
        SCORE += out_row * TOP_K
    TREE += out_row * (6 * TOP_K)

    end = tl.max(pos, 0) + 1
    last = (end - start + N - 1) // N
    full = (tl.minimum(base + tile * M // G * gamma, end - 1) - start + 1) // N
    blocks = (pos - start + 1) // spec.BLOCK
    total = blocks
    if HAS_MASK:
        full = full * 0
        total = tl.load(BEFORE + blocks, mask=live, other=0)

    acc = tl.zeros([M, DP], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    mean, squares, finite = mass, mass, mass
    seen = tl.zeros([M], tl.int32)
    slot = seen
    P: tl.constexpr = spec.P
    LEVELS: tl.constexpr = spec.LEVELS
    slots = start_slots(EXACT_K if EXACT_K < TOP_K else 0, M, P)
    low, low_t = lowest(slots[0], slots[1])
    if LEVELS >= 0:
        start_tree(TREE, exists, TOP_K, LEVELS)
        low, low_t = peak, seen + NO_BLOCK
        slot = seen + (1 << LEVELS)  # the leftmost leaf
    elif EXACT_K == TOP_K and TOP_K > 0:
        fill_lists(INDEX, SCORE, exists, seen, TOP_K)
        tl.debug_barrier()
        low, low_t = peak, seen + NO_BLOCK
    cache = (K, V, k_s, v_s, MASK, BEFORE)
    rows = (start, end, pos, blocks, total)
    state = (acc, peak, mass), slots, (low, low_t), (seen, slot, finite, mean, squares)
    lists = (INDEX, SCORE, TREE, R)
    factors = (scale, cap)
    if not HAS_MASK:
        state = _scan(q, cache, rows, state, lists, (0, full), factors, False, False, spec)
    state = _scan(q, cache, rows, state, lists, (full, last), factors, True, HAS_MASK, spec)

    softmax, slots, _lowest_slot, counts = state
    acc, peak, mass = softmax
    empty = (mass == 0.0) | (live == 0)
    mass = tl.where(empty, 1.0, mass)
    if spec.VALUES:
        acc = tl.where(empty[:, None], 0.0, acc / mass[:, None])
    tl.store(LSE + out_row, tl.where(empty, float("-inf"), (peak + tl.log2(mass)) * LN2), exists)
    if spec.VALUES:
        op = OUT + out_row[:, None] * D + d[None, :]
        tl.store(op, acc.to(OUT.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])
    if LEVELS >= 0:
        write_tree(TREE, INDEX, SCORE, exists, TOP_K)
    elif EXACT_K < TOP_K and TOP_K > 0:
        if EXACT_K:
            write_slots(slots[0], slots[1], INDEX, SCORE, exists, EXACT_K, P)
        # disjoint from every store before, so that no order between them matters
        fill_lists(INDEX, SCORE, exists, EXACT_K + counts[1], TOP_K)


def configuration(head_dim, itemsize, block, top_k, algorithm, packed_rows, shared):
    """Tile rows and keys, warps and stages, measured on an H200 in bfloat16; smaller tiles where
    a program has fewer `shared` bytes. `head_dim` is a power of two, `packed_rows` counts the rows
    of all tiles of the call."""
    rows, keys, warps, stages = 128, max(block, 64) if top_k else 64, 8, 3
    light = algorithm == "estimated" if top_k else head_dim == 64 or packed_rows < 128 * 2048
    if itemsize == 4:
        rows = 32  # below wgmma's 64: it would keep two shared copies of an operand for tf32x3
        keys = keys if top_k or head_dim <= 256 else 32
    elif head_dim > 256:  # the sums of 128 rows take all registers; not timed
        rows, keys = 64, keys if top_k else 32
    elif head_dim > 128:
        rows = 128 if keys == 64 else 64
    elif keys == 64 and light:
        rows, warps = 64, 4
    while stages > 1 and head_dim * itemsize * (rows + 2 * keys * stages) > 200_000:
        stages -= 1
    loop = Loop(rows, keys, stages, keeps_all=itemsize == 4)
    loop = loop_that_fits(loop, head_dim * itemsize, itemsize, shared, block if top_k else 16)
    return loop.rows, loop.keys, warps, loop.stages


def launch_triton(
    q,
    k,
    v,
    scale,
    gamma,
    block,
    top_k,
    exact_k,
    algorithm,
    lengths,
    start,
    key_mask,
    softcap,
    out,
    lse,
    index,
    score,
):
    """The kernel on the current device, or interpreted on CPU tensors (TRITON_INTERPRET=1). With
    `top_k` -1 score is `[B,Hq,blocks,R]` float16, where complete blocks' scores are stored; v may
    be None then."""
    values, v = v is not None, k if v is None else v
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    (batch, heads, queries, dim), kv_heads = q.shape, k.shape[1]
    tree = top_k > 0 and algorithm == "tournament"
    width, found = padded_width(dim), card(q.device)
    rows = batch * heads * out.shape[2]
    shape = width, q.element_size(), block, top_k, algorithm, rows
    M, N, warps, stages = configuration(*shape, found.shared)
    exact = {"exact": top_k, "tournament": 0, "estimated": min(exact_k, top_k)}[algorithm]
    spec = Spec(
        G=heads // kv_heads,
        D=dim,
        DP=width,
        M=M,
        N=N,
        BLOCK=block if top_k else N,
        TOP_K=top_k,
        EXACT_K=exact,
        P=next_power_of_two(max(exact, 1)) if exact < top_k else 1,
        LEVELS=(2 * top_k - 1).bit_length() - 1 if tree else -1,
        CAP=softcap > 0,
        HAS_LENGTHS=lengths is not None,
        HAS_START=start is not None,
        HAS_MASK=key_mask is not None,
        VALUES=values,
        PRECISION=found.precision,
    )
    tiles = cdiv(out.shape[2] * spec.G, M)
    dummy = lse  # a tensor that the kernel does not read
    before = dummy
    if key_mask is not None:
        key_mask = key_mask.contiguous()
        before = offered_before(key_mask, start, block)
    launch_kernel(
        _kernel,
        grid=(tiles * batch * kv_heads,),
        Q=q,
        K=k,
        V=v,
        OUT=out,
        LSE=lse,
        INDEX=index,
        SCORE=score,
        TREE=lse.new_empty((*lse.shape, 6 * top_k), dtype=torch.int32) if tree else dummy,
        LENGTHS=dummy if lengths is None else lengths,
        START=dummy if start is None else start,
        MASK=dummy if key_mask is None else key_mask.view(torch.uint8),
        BEFORE=before,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        lengths_b=row_step(lengths),
        start_b=row_step(start),
        before_b=before.stride(0),
        B=batch,
        HK=kv_heads,
        T=queries,
        S=k.shape[2],
        R=out.shape[2],
        tiles=tiles,
        gamma=gamma,
        kept=score.shape[2] if top_k < 0 else 0,
        scale=scale * LOG2E * (2.0 / softcap if softcap else 1.0),
        cap=softcap * LOG2E,
        spec=spec,
        num_warps=warps,
        num_stages=stages,
    )
