"""The Triton kernel that picks and attends at once: `pick_tokens` and `attend_picks` without a list
that programs share."""

import triton
import triton.language as tl

from attnplug.ops.common.rows import row_span
from attnplug.ops.sketch.kernels.attend import attend_tile, query_facts, store_sums
from attnplug.ops.sketch.kernels.codes import BLOCK, begin, near_block
from attnplug.ops.sketch.kernels.pick import (
    before,
    levels,
    list_tokens,
    next_hint,
    picked_of,
    threshold_of,
    upper_edge,
)
from attnplug.ops.sketch.kernels.prepare import store_partial

UNIT = tl.constexpr(64)  # slots: a program's are a multiple of it, so that it reads wide words


@triton.jit
def _equals(shares, first, end, since, until, threshold, centre, LOOK: tl.constexpr):
    """How many of a program's candidates are in the threshold's bin."""
    found = 0
    for at in tl.range(first, end, LOOK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        n = tl.multiple_of(at, UNIT) + tl.arange(0, LOOK)
        share = tl.load(shares + n, mask=n < end, other=0.0, cache_modifier=".cg")
        seen = (n >= since) & (n < until) & (n < end)
        found += tl.sum(levels(share, seen, threshold, centre) >> 16, 0)
    return found


@triton.jit
def _own_picks(
    shares,
    own,
    first,
    end,
    since,
    until,
    threshold,
    centre,
    room,
    capacity,
    LOOK: tl.constexpr,
    ASM: tl.constexpr,
):
    """List the picks among a program's slots in `own`, ascending, `room` at most of those that are
    in the threshold's bin; how many they are."""
    found, equals = 0, 0
    for at in tl.range(first, end, LOOK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        n = tl.multiple_of(at, UNIT) + tl.arange(0, LOOK)
        share = tl.load(shares + n, mask=n < end, other=0.0, cache_modifier=".cg")
        both = levels(share, (n >= since) & (n < until) & (n < end), threshold, centre)
        ahead = tl.cumsum(both, 0) - both
        rank = equals + (ahead >> 16)
        slot = found + (ahead & 65535) + tl.minimum(rank, room) - tl.minimum(equals, room)
        taken = (both == 1) | ((both > 1) & (rank < room))
        # A row has no more picks than there is room for, whatever the counts say.
        list_tokens(own, slot, n, taken & (slot < capacity), ASM)
        all_both = tl.sum(both, 0)
        more = equals + (all_both >> 16)
        found += (all_both & 65535) + tl.minimum(more, room) - tl.minimum(equals, room)
        equals = more
    return tl.minimum(found, capacity)


@triton.jit
def attend_best(
    q,
    k,
    v,
    projected,
    fine,
    coarse,
    shares,
    total,
    middle,
    hint,
    lengths,
    start,
    marks,
    picks,
    cut,
    norm,
    pick_out,
    pick_lse,
    pick_sums,
    scale,
    cap,
    top_k,
    S,
    capacity,
    pieces,
    columns,
    q_strides,
    k_strides,
    v_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R4: tl.constexpr,
    R2: tl.constexpr,
    TILE: tl.constexpr,
    LOOK: tl.constexpr,
    PIECES: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the picks among one piece of a row's candidates, and attend a group's queries to them,
    exactly and as the scan scored them. The picks are those of `pick`: each program finds the
    threshold by itself, and only where the threshold's bin has more tokens than there is room for
    must it know how many of them are in front. It lists its own in `picks [B, Hkv, pieces,
    capacity]`. The kernel in front is the scan, which has waited for `prepare` before this one
    starts, so that what is `prepare`'s can be read at once."""
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    row = place * GROUP
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_group = r < GROUP
    in_width = d < D
    q_b, q_h = q_strides
    q_at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    k_at = k + b * k_b + h.to(tl.int64) * k_h + d[None, :]
    v_at = v + b * v_b + h.to(tl.int64) * v_h + d[None, :]
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    since = low + BLOCK
    until = low + near_block(tl.minimum(length, S), low) * BLOCK
    front = since // UNIT
    units = tl.cdiv(tl.maximum(until, since), UNIT) - front
    first = (front + (piece.to(tl.int64) * units // pieces).to(tl.int32)) * UNIT
    end = (front + ((piece + 1).to(tl.int64) * units // pieces).to(tl.int32)) * UNIT
    end = tl.minimum(end, S)
    begin(PDL)
    shares += place * S
    centre = tl.load(middle + place, cache_modifier=".cg")
    visible, wanted, reached, threshold, above = threshold_of(
        total, hint, shares, place, centre, top_k, since, until
    )
    edge = upper_edge(wanted, reached, threshold, centre)
    reaching = picked_of(visible, wanted, reached, S)  # the threshold's bin, room or not
    room = capacity - above
    if reaching > capacity:
        equals = _equals(shares, first, end, since, until, threshold, centre, LOOK)
        marks += place * pieces
        tl.atomic_xchg(marks + piece, equals.to(tl.int64) * 2 + 1, sem="relaxed")
        in_front = (before(marks, piece, PIECES) >> 1).to(tl.int32)
        room = tl.maximum(room - in_front, 0)
    own = picks + (place * pieces + piece) * capacity
    found = _own_picks(
        shares, own, first, end, since, until, threshold, centre, room, capacity, LOOK, ASM
    )
    if piece == 0:
        tl.store(cut + place * 3, edge)
        tl.store(cut + place * 3 + 1, (visible - tl.minimum(reaching, capacity)).to(tl.float32))
        tl.store(cut + place * 3 + 2, next_hint(reached, visible, top_k).to(tl.float32))

    unit, fine_high, fine_low, coarse_high, coarse_low, base, shift = query_facts(
        projected, norm, row, columns, GROUP, HEADS, R4, R2, CAPPED
    )
    base_r = tl.load(norm + row + r, mask=in_group, other=float("inf"), cache_modifier=".cg")
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total_weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    moment = tl.zeros([HEADS], tl.float32)
    exact_low = tl.zeros([ROWS], tl.float32)
    guess_low = tl.zeros([HEADS], tl.float32)
    tl.debug_barrier()  # other threads have listed what this one reads
    slot = tl.arange(0, TILE)
    coming = tl.load(own + slot, mask=slot < found, other=-1, cache_modifier=".cg")
    # Not pipelined: see `attend`.
    for _ in tl.range(0, found, TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = coming.to(tl.int64)
        slot += TILE
        coming = tl.load(own + slot, mask=slot < found, other=-1, cache_modifier=".cg")
        top, total_weight, acc, mass, moment, exact_low, guess_low = attend_tile(
            at,
            (at >= 0) & (at < S),
            query,
            k_at,
            v_at,
            k_s,
            v_s,
            fine,
            coarse,
            place,
            S,
            unit,
            fine_high,
            fine_low,
            coarse_high,
            coarse_low,
            base,
            shift,
            base_r,
            edge,
            scale,
            cap,
            in_width,
            top,
            total_weight,
            acc,
            mass,
            moment,
            exact_low,
            guess_low,
            R4,
            R2,
            CAPPED,
            ASM,
        )

    at_row = (row + r) * pieces + piece
    store_partial(top, total_weight, acc, pick_out, pick_lse, at_row, d, in_group, in_width, D)
    store_sums(
        pick_sums,
        row,
        pieces,
        piece,
        mass,
        moment,
        exact_low,
        guess_low,
        in_group,
        GROUP,
        ROWS,
        HEADS,
    )
