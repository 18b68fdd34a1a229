"""The Triton kernel of `attend_picks`."""

from attnplug.ops.common.rows import row_of
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.sketch.kernels.codes import (
    LARGEST,
    begin,
    capped,
    estimated,
    exp2,
    load_unit,
    load_weights,
    share,
    unpack_coarse,
    unpack_fine,
)
from attnplug.ops.sketch.kernels.prepare import store_partial

SUMS = tl.constexpr(4)  # of a piece: Z, U, and over the lower half exact and estimated weights


@triton.jit
def query_facts(
    projected,
    norm,
    row,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CODE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """What scores of codes are made of: the unit of the weights, those of the fine and those of the
    coarse coordinates, and what is added to a score, less the `norm` where none is capped."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    g = tl.arange(0, HEADS)
    RP: tl.constexpr = 64 if R4 + R2 <= 64 else 128
    unit = load_unit(projected, row, R4 + R2, RP, GROUP, HEADS)
    fine_weights = load_weights(projected, row, 0, R4, 32 if R4 < 32 else R4, GROUP, HEADS, unit)
    coarse_weights = load_weights(projected, row, R4, R2, R2, GROUP, HEADS, unit)
    facts = projected.at + (row + g).to(tl.int64) * projected.columns + R4 + R2
    offset = tl.load(facts, mask=g < GROUP, other=0.0, cache_modifier=".cg")
    base = tl.load(norm + row + g, mask=g < GROUP, other=float("inf"), cache_modifier=".cg")
    shift = offset if CAPPED else offset - base
    return unit, fine_weights, coarse_weights, base, shift


@triton.jit
def attend(
    q,
    cache,
    projected,
    codes,
    picks,
    cut,
    norm,
    pieces,
    pick_sums,
    scale,
    cap,
    S,
    capacity,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    CODE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
    CHAINED: tl.constexpr,
    FETCHED: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A group's queries against one piece of its picks, exactly and as the scan scored them. In
    the chain `pick` has waited for the scan before this kernel starts, so that all that is not of
    `pick` can be read at once. Keys and values that have been FETCHED lie in the order of the
    picks, their codes where the cache has them."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    own_row = row_of(b, STEPS)
    home = own_row * tl.num_programs(1) + h
    row = place * GROUP
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_group = r < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    if not CHAINED:
        begin(PDL)
    k_at, v_at = begin_of(cache, own_row, h)
    k_at, v_at = k_at + d[None, :], v_at + d[None, :]
    unit, fine_weights, coarse_weights, base, shift = query_facts(
        projected, norm, row, GROUP, HEADS, CODE, CAPPED
    )
    # The same for the rows of the exact product.
    base_r = tl.load(norm + row + r, mask=in_group, other=float("inf"), cache_modifier=".cg")
    if CHAINED:
        begin(PDL)
    edge = tl.load(cut + place * 3, cache_modifier=".cg")
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    moment = tl.zeros([HEADS], tl.float32)
    exact_low = tl.zeros([ROWS], tl.float32)
    guess_low = tl.zeros([HEADS], tl.float32)
    listed = picks + place * capacity
    slot = piece * TILES * TILE + tl.arange(0, TILE)
    end = (piece + 1) * TILES * TILE
    coming = tl.load(listed + slot, mask=slot < capacity, other=-1, cache_modifier=".cg")
    # Not pipelined: Triton 3.6 compiled such a loop over gathered keys to wrong code, without a
    # word (block_sparse_attention).
    for _ in tl.range(0, TILES, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = coming.to(tl.int64)
        own = slot if FETCHED else at
        slot += TILE
        coming = tl.load(
            listed + slot, mask=slot < tl.minimum(end, capacity), other=-1, cache_modifier=".cg"
        )
        seen = (at >= 0) & (at < S)
        loadable = seen[:, None] & in_width[None, :]
        key = tl.load(k_at + own[:, None] * cache.k_s, mask=loadable, other=0.0)
        value = tl.load(v_at + own[:, None] * cache.v_s, mask=loadable, other=0.0)
        code = (home * S + at)[:, None]
        fine_bytes = tl.load(
            codes.fine + code * (R4 // 2) + tl.arange(0, R4 // 2)[None, :],
            mask=seen[:, None],
            other=0,
        )
        coarse_bytes = tl.load(
            codes.coarse + code * (R2 // 4) + tl.arange(0, R2 // 4)[None, :],
            mask=seen[:, None],
            other=0,
        )
        guess = estimated(
            unpack_fine(fine_bytes, ASM),
            unpack_coarse(coarse_bytes, ASM),
            fine_weights,
            coarse_weights,
            unit,
            shift,
        )
        limit = tl.where(seen, LARGEST, float("-inf"))[:, None]
        if CAPPED:
            e = exp2(tl.minimum(capped(guess, cap, CAPPED) - base[None, :], limit), ASM)
        else:
            e = exp2(tl.minimum(guess, limit), ASM)
        lower = seen & (share(e, ASM).to(tl.float32) < edge)
        mass += tl.sum(e, 0)
        moment += tl.sum(e * guess, 0)
        guess_low += tl.sum(tl.where(lower[:, None], e, 0.0), 0)

        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:  # cap tanh(y), tanh(y) = 1 - 2 / (exp(2y) + 1); scale holds 2 log2(e) / cap
            s = cap * (1 - 2 / (tl.exp2(s) + 1))
        exact = tl.exp2(tl.minimum(s - base_r[:, None], LARGEST))
        exact_low += tl.sum(tl.where(lower[None, :], exact, 0.0), 1)
        s = tl.where(seen[None, :], s, float("-inf"))
        best = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(best == float("-inf"), 0.0, best)
        # A NaN score may be dropped by the maximum; it comes back through p.
        p = tl.exp2(s - safe[:, None])
        decay = tl.exp2(top - safe)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        top = best

    store_partial(
        top, total, acc, pieces, (row + r) * pieces.number + piece, d, in_group, in_width, D
    )
    g = tl.arange(0, HEADS)
    sums = pick_sums + ((row + g) * pieces.number + piece) * SUMS
    tl.store(sums, mass, mask=g < GROUP)
    tl.store(sums + 1, moment, mask=g < GROUP)
    tl.store(pick_sums + ((row + r) * pieces.number + piece) * SUMS + 2, exact_low, mask=in_group)
    tl.store(sums + 3, guess_low, mask=g < GROUP)
