"""The Triton kernels of tiered_decode: one places the blocks that a step wants in the slots on the
GPU, the other attends, reading each block from where it is."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece


@triton.jit
def place_blocks(
    index, table, owner, used, counters, lengths, start, place, S, N, SLOTS, heads,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, K: tl.constexpr,
    MP: tl.constexpr, RP: tl.constexpr, NEW: tl.constexpr, CHAINED: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots of the blocks that one row's KV head wants, the sink's and the listed: `place` is the
    slot of a block that is there, -2 - slot for one that comes now, -1 for what needs none.

    What comes takes the slots that the hand finds: first those nobody wanted again since it last
    passed, in its order, then the others. Loads and stores of the same words have a barrier
    between: every warp does both.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        if not CHAINED:
            gdc_wait()
        gdc_launch_dependents()
        if CHAINED:
            gdc_wait()
    b = row // heads
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    edge = tl.maximum(length - 1 - low, 0) // BLOCK - LOCAL + 1  # from here on the ring has it
    m = tl.arange(0, MP)
    r = tl.arange(0, RP)
    name = m
    if K > 0:
        inside = (m >= SINK) & (m < SINK + K)
        at = index + row * K + m - SINK
        name = tl.where(m < SINK, m, tl.load(at, mask=inside, other=-1, cache_modifier=".cg"))
    wanted = (m < SINK + K) & (name >= 0) & (name < edge)
    first = low + name * BLOCK
    table_at, owner_at, used_at = table + row * N, owner + row * SLOTS, used + row * SLOTS
    slot = tl.load(table_at + name, mask=wanted, other=0, cache_modifier=".cg")
    holder = tl.load(owner_at + slot, mask=wanted, other=-1, cache_modifier=".cg")
    hand = tl.load(counters + row * 3 + 2, cache_modifier=".cg").to(tl.int32)
    asked = tl.load(counters + row * 3, cache_modifier=".cg")
    found = tl.load(counters + row * 3 + 1, cache_modifier=".cg")
    hit = wanted & (holder == first)
    miss = wanted & (holder != first)
    needed = tl.sum(miss.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(used_at + slot, 2, mask=hit)  # not to be given away
    tl.debug_barrier()

    turn = (hand + r) % SLOTS
    state = tl.load(used_at + turn, mask=r < SLOTS, other=2, cache_modifier=".cg")
    cold, warm = (state == 0).to(tl.int32), (state == 1).to(tl.int32)
    rank = tl.where(cold > 0, tl.cumsum(cold, 0), tl.sum(cold, 0) + tl.cumsum(warm, 0)) - 1
    given = (cold + warm > 0) & (rank < needed)
    last = tl.max(tl.where(given, r, -1), 0)
    kept = (state == 2) | ((state == 1) & (r > last))
    tl.debug_barrier()
    tl.store(used_at + turn, tl.where(kept & ~given, 1, 0), mask=r < SLOTS)
    place_at = place + row * (SINK + K)
    tl.store(place_at + rank, turn, mask=given)  # a list of the slots that are free now
    tl.debug_barrier()
    number = tl.cumsum(miss.to(tl.int32), 0) - 1
    free = tl.load(place_at + number, mask=miss, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(table_at + name, free, mask=miss)
    tl.store(owner_at + free, first, mask=miss)
    tl.store(place_at + m, tl.where(hit, slot, tl.where(miss, -2 - free, -1)), mask=m < SINK + K)
    tl.store(counters + row * 3, asked + tl.sum(wanted.to(tl.int64), 0))
    tl.store(counters + row * 3 + 1, found + tl.sum(hit.to(tl.int64), 0))
    tl.store(counters + row * 3 + 2, ((hand + last + 1) % SLOTS).to(tl.int64))


@triton.jit
def _append(new, cache, ring, position, S, W, d, s_step, D: tl.constexpr):
    """Write a token's key or value `[D]` where it goes, if there is room: to the cache and to the
    ring of the last tokens."""
    room = tl.where(position < S, D, 0)
    x = tl.load(new + d, mask=d < D, other=0.0, cache_modifier=".cg")
    tl.store(cache + position.to(tl.int64) * s_step + d, x, mask=d < room)
    tl.store(ring + (position % W) * D + d, x, mask=d < room)


@triton.jit
def _rows(
    cache, ring, slot, new, at, position, offset, in_ring, in_slot, W, s_step, D: tl.constexpr
):
    """Where the keys (values) at `at` are: in the ring, in a slot, in the cache, or not yet in any
    of them."""
    rows = cache + at.to(tl.int64) * s_step
    rows = tl.where(in_slot, slot + offset * D, rows)
    rows = tl.where(in_ring, ring + (at % W) * D, rows)
    if new is not None:
        rows = tl.where(at == position, new, rows)
    return rows


@triton.jit
def attend_tiered(
    q, k, v, new_k, new_v, ring, slots, index, place, lengths, start, key_mask, sinks,
    partial, out, lse, scale, cap, S, SLOTS, splits,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, nk_b, nk_h, nv_b, nv_h, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, K: tl.constexpr,
    MP: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr,
    FUSED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one query and KV head against one piece of the kept keys, in the order of
    `attend_kept`: sink, local, listed. A block that comes is written to its slot on the way."""
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    W: tl.constexpr = LOCAL * BLOCK
    NEW: tl.constexpr = 0 if new_k is None else 1
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    row = b * tl.num_programs(1) + h
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    m = tl.arange(0, MP)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & in_width[None, :], other=0.0, cache_modifier=".cg"
    )
    position = length - 1
    reach = tl.minimum(position, S - 1)
    near = tl.maximum(position - low, 0) // BLOCK - LOCAL + 1  # first block of the ring
    edge = tl.maximum(near, SINK)
    k_at = k + b * k_b + h.to(tl.int64) * k_h
    v_at = v + b * v_b + h.to(tl.int64) * v_h
    ring_at = ring + row * (2 * W * D)
    slots_at = slots + row * SLOTS * (2 * BLOCK * D)
    fresh_k, fresh_v = new_k, new_v
    if NEW == 1:
        fresh_k = new_k + b * nk_b + h * nk_h
        fresh_v = new_v + b * nv_b + h * nv_h
        if split == splits - 1:
            _append(fresh_k, k_at, ring_at, position, S, W, d, k_s, D)
            _append(fresh_v, v_at, ring_at + W * D, position, S, W, d, v_s, D)
        scale = tl.where(length > S, float("nan"), scale)  # no room: nobody may miss that
    TILES: tl.constexpr = (SINK + LOCAL + K) * BLOCK // TILE
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    names, places = m, tl.full([MP], -1, tl.int32)
    # Only who reads what the kernels before have placed waits for them; local tiles do not.
    if PDL:
        if (first * TILE < SINK * BLOCK) | (last * TILE > (SINK + LOCAL) * BLOCK):
            gdc_wait()
    if SINK + K > 0:
        places = tl.load(
            place + row * (SINK + K) + m, mask=m < SINK + K, other=-1, cache_modifier=".cg"
        )
    if K > 0:
        listed = tl.load(
            index + row * K + m - SINK, mask=(m >= SINK) & (m < SINK + K), other=-1,
            cache_modifier=".cg",
        )  # fmt: skip
        names = tl.where(m < SINK, m, listed)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        slot = i * TILE // BLOCK
        local = (slot >= SINK) & (slot < SINK + LOCAL)
        mine = m == tl.where(slot < SINK, slot, slot - LOCAL)
        name = tl.max(tl.where(mine, names, -1), 0)
        where = tl.max(tl.where(mine, places, -0x7FFFFFFF), 0)
        name = tl.where(local, near + slot - SINK, name)
        where = tl.where(local, -1, where)
        # What a slot lets be seen: to the query's own position, or nothing.
        until = tl.where((slot < SINK + LOCAL) | (name < edge), reach, -0x7FFFFFFF)
        until = tl.where((slot < SINK) | (name >= SINK), until, -0x7FFFFFFF)
        offset = i * TILE % BLOCK + n
        at = low + name * BLOCK + offset
        seen = at <= until
        loadable = seen[:, None] & in_width[None, :]
        in_ring = name >= near
        taken = tl.where(where >= 0, where, -2 - where)
        slot_at = slots_at + taken.to(tl.int64) * (2 * BLOCK * D)
        key = tl.load(
            _rows(
                k_at, ring_at, slot_at, fresh_k, at, position, offset, in_ring, where >= 0, W,
                k_s, D,
            )[:, None] + d[None, :],
            mask=loadable, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        value = tl.load(
            _rows(
                v_at, ring_at + W * D, slot_at + BLOCK * D, fresh_v, at, position, offset, in_ring,
                where >= 0, W, v_s, D,
            )[:, None] + d[None, :],
            mask=loadable, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        comes = at <= tl.where(where < -1, until, -0x7FFFFFFF)
        comes = comes[:, None] & in_width[None, :]
        tl.store(slot_at + offset[:, None] * D + d[None, :], key, mask=comes)
        tl.store(slot_at + (BLOCK + offset)[:, None] * D + d[None, :], value, mask=comes)
        if key_mask is not None:  # after the load: the slot holds what a mask hides, too
            seen = seen & (tl.load(key_mask + b * mask_b + at, mask=seen, other=0) != 0)
            value = tl.where(seen[:, None], value, tl.zeros_like(value))
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)

    if PDL:
        gdc_wait()  # whoever follows must find all that came before done
    heads = tl.num_programs(1) * GROUP
    store_piece(
        top, total, acc, sinks, partial, out, lse, head, b * heads + head,
        tl.num_programs(2).to(tl.int64) * heads, d, in_group, in_width, split, splits, D, FUSED,
    )  # fmt: skip
