"""The Triton kernels of tiered_decode. One gives slots on the GPU to the blocks that a decode step
wants; the other attends, and reads each block from where it is: ring, slot or host memory."""

from attnplug.ops.common.rows import row_span, shown
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.common.views import begin_of


@triton.jit
def place_blocks(
    index,
    near,
    rows,
    place,
    N,
    SLOTS,
    heads,
    KEEP: tl.constexpr,
    MP: tl.constexpr,
    RP: tl.constexpr,
    NEW: tl.constexpr,
    CHAINED: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Slots of the blocks that one row's KV head wants, the sink's and the listed. `place` gets the
    slot of a block that is resident, -2 - slot for one that is fetched now, -1 for no slot.

    Fetched blocks take the slots that the clock's hand finds: in its order, first those that no
    step has wanted again since the hand last passed, then the others. Every warp loads and stores
    the same words, so barriers separate loads from stores.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        if not CHAINED:
            gdc_wait()
        gdc_launch_dependents()
        if CHAINED:
            gdc_wait()
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    K: tl.constexpr = KEEP.K
    b = row // heads
    length, low = row_span(rows, b, STEPS, NEW)
    # The ring has this block and later ones.
    edge = tl.maximum(length - 1 - low, 0) // BLOCK - KEEP.LOCAL + 1
    m = tl.arange(0, MP)
    r = tl.arange(0, RP)
    j = m  # block
    if K > 0:
        inside = (m >= SINK) & (m < SINK + K)
        at = index + row * K + m - SINK
        j = tl.where(m < SINK, m, tl.load(at, mask=inside, other=-1, cache_modifier=".cg"))
    wanted = (m < SINK + K) & (j >= 0) & (j < edge)
    first = low + j * BLOCK
    table_at, owner_at = near.table + row * N, near.owner + row * SLOTS
    used_at = near.used + row * SLOTS
    slot = tl.load(table_at + j, mask=wanted, other=0, cache_modifier=".cg")
    slot_owner = tl.load(owner_at + slot, mask=wanted, other=-1, cache_modifier=".cg")
    hand = tl.load(near.counters + row * 3 + 2, cache_modifier=".cg").to(tl.int32)
    wanted_before = tl.load(near.counters + row * 3, cache_modifier=".cg")
    hits_before = tl.load(near.counters + row * 3 + 1, cache_modifier=".cg")
    hit = wanted & (slot_owner == first)
    miss = wanted & (slot_owner != first)
    needed = tl.sum(miss.to(tl.int32), 0)
    tl.debug_barrier()
    tl.store(used_at + slot, 2, mask=hit)  # in use by this step: must not be given away
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
    tl.store(place_at + rank, turn, mask=given)  # the list of slots that are free now
    tl.debug_barrier()
    number = tl.cumsum(miss.to(tl.int32), 0) - 1
    free = tl.load(place_at + number, mask=miss, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(table_at + j, free, mask=miss)
    tl.store(owner_at + free, first, mask=miss)
    tl.store(place_at + m, tl.where(hit, slot, tl.where(miss, -2 - free, -1)), mask=m < SINK + K)
    tl.store(near.counters + row * 3, wanted_before + tl.sum(wanted.to(tl.int64), 0))
    tl.store(near.counters + row * 3 + 1, hits_before + tl.sum(hit.to(tl.int64), 0))
    tl.store(near.counters + row * 3 + 2, ((hand + last + 1) % SLOTS).to(tl.int64))


@triton.jit
def _append(new, cache, ring, position, S, W, d, s_stride, D: tl.constexpr):
    """Write a token's key or value `[D]` to the cache and to the ring of the last W tokens, if the
    cache has a place at `position`."""
    room = tl.where((position >= 0) & (position < S), D, 0)
    x = tl.load(new + d, mask=d < D, other=0.0, cache_modifier=".cg")
    tl.store(cache + position.to(tl.int64) * s_stride + d, x, mask=d < room)
    tl.store(ring + (position % W) * D + d, x, mask=d < room)


@triton.jit
def _token_at(
    cache,
    ring,
    slot,
    new,
    at,
    position,
    offset,
    in_ring,
    in_slot,
    W,
    s_stride,
    D: tl.constexpr,
):
    """Where the keys (values) of the tokens `at` are: in the ring, in a slot, in the cache, or for
    the newest token in `new`."""
    token_at = cache + at.to(tl.int64) * s_stride
    token_at = tl.where(in_slot, slot + offset * D, token_at)
    token_at = tl.where(in_ring, ring + (at % W) * D, token_at)
    if new is not None:
        token_at = tl.where(at == position, new, token_at)
    return token_at


@triton.jit
def attend_tiered(
    q,
    cache,
    rows,
    token,
    near,
    index,
    place,
    output,
    scale,
    cap,
    SLOTS,
    splits,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    MP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one query and KV head against one piece of the kept keys, in the order of
    `attend_kept`: sink, local, listed. A fetched block is written to its slot on the way."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    LOCAL: tl.constexpr = KEEP.LOCAL
    K: tl.constexpr = KEEP.K
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    W: tl.constexpr = LOCAL * BLOCK
    NEW: tl.constexpr = 0 if token is None else 1
    length, low = row_span(rows, b, STEPS, NEW)
    row = b * tl.num_programs(1) + h
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    m = tl.arange(0, MP)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & in_width[None, :], other=0.0, cache_modifier=".cg"
    )
    position = length - 1
    reach = tl.minimum(position, rows.S - 1)
    ring_first = tl.maximum(position - low, 0) // BLOCK - LOCAL + 1  # first block of the ring
    edge = tl.maximum(ring_first, SINK)
    k_at, v_at = begin_of(cache, b, h)
    ring_at = near.ring + row * (2 * W * D)
    slots_at = near.slots + row * SLOTS * (2 * BLOCK * D)
    token_k, token_v = None, None
    if token is not None:
        token_k = token.k + b * token.k_b + h * token.k_h
        token_v = token.v + b * token.v_b + h * token.v_h
        if split == splits - 1:
            _append(token_k, k_at, ring_at, position, rows.S, W, d, cache.k_s, D)
            _append(token_v, v_at, ring_at + W * D, position, rows.S, W, d, cache.v_s, D)
        # The cache is full: the output shows it.
        scale = tl.where(length > rows.S, float("nan"), scale)
    TILES: tl.constexpr = (SINK + LOCAL + K) * BLOCK // TILE
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    blocks, places = m, tl.full([MP], -1, tl.int32)
    # Only programs that read placed blocks wait for the kernels in front; local tiles do not.
    if PDL:
        if (first * TILE < SINK * BLOCK) | (last * TILE > (SINK + LOCAL) * BLOCK):
            gdc_wait()
    if SINK + K > 0:
        places = tl.load(
            place + row * (SINK + K) + m, mask=m < SINK + K, other=-1, cache_modifier=".cg"
        )
    if K > 0:
        listed = tl.load(
            index + row * K + m - SINK,
            mask=(m >= SINK) & (m < SINK + K),
            other=-1,
            cache_modifier=".cg",
        )
        blocks = tl.where(m < SINK, m, listed)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        slot = i * TILE // BLOCK
        local = (slot >= SINK) & (slot < SINK + LOCAL)
        mine = m == tl.where(slot < SINK, slot, slot - LOCAL)
        j = tl.max(tl.where(mine, blocks, -1), 0)
        placed = tl.max(tl.where(mine, places, -0x7FFFFFFF), 0)
        j = tl.where(local, ring_first + slot - SINK, j)
        placed = tl.where(local, -1, placed)
        # Keys of block j are visible up to the query's own position, or none where the slot's block
        # is counted in another slot.
        until = tl.where((slot < SINK + LOCAL) | (j < edge), reach, -0x7FFFFFFF)
        until = tl.where((slot < SINK) | (j >= SINK), until, -0x7FFFFFFF)
        offset = i * TILE % BLOCK + n
        at = low + j * BLOCK + offset
        seen = at <= until
        loadable = seen[:, None] & in_width[None, :]
        in_ring = j >= ring_first
        taken = tl.where(placed >= 0, placed, -2 - placed)
        slot_at = slots_at + taken.to(tl.int64) * (2 * BLOCK * D)
        key_at = _token_at(
            cache=k_at,
            ring=ring_at,
            slot=slot_at,
            new=token_k,
            at=at,
            position=position,
            offset=offset,
            in_ring=in_ring,
            in_slot=placed >= 0,
            W=W,
            s_stride=cache.k_s,
            D=D,
        )
        key = tl.load(key_at[:, None] + d[None, :], mask=loadable, other=0.0, cache_modifier=".cg")
        value_at = _token_at(
            cache=v_at,
            ring=ring_at + W * D,
            slot=slot_at + BLOCK * D,
            new=token_v,
            at=at,
            position=position,
            offset=offset,
            in_ring=in_ring,
            in_slot=placed >= 0,
            W=W,
            s_stride=cache.v_s,
            D=D,
        )
        value = tl.load(
            value_at[:, None] + d[None, :], mask=loadable, other=0.0, cache_modifier=".cg"
        )
        fetched = at <= tl.where(placed < -1, until, -0x7FFFFFFF)
        fetched = fetched[:, None] & in_width[None, :]
        tl.store(slot_at + offset[:, None] * D + d[None, :], key, mask=fetched)
        tl.store(slot_at + (BLOCK + offset)[:, None] * D + d[None, :], value, mask=fetched)
        if rows.key_mask is not None:  # after the load: the slot also holds keys that a mask hides
            seen = shown(rows, b, at, seen)
            value = tl.where(seen[:, None], value, tl.zeros_like(value))
        top, total, acc = attend_tile(
            query=query,
            key=key,
            value=value,
            seen=seen,
            top=top,
            total=total,
            acc=acc,
            scale=scale,
            cap=cap,
            CAPPED=CAPPED,
        )

    if PDL:
        gdc_wait()  # kernels that follow must find all earlier ones done
    heads = tl.num_programs(1) * GROUP
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=b * heads + head,
        rows=tl.num_programs(2).to(tl.int64) * heads,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=splits,
        D=D,
    )
