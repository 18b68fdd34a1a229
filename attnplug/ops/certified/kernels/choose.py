"""The Triton kernel of `certified_attention` that chooses what is read exactly and sums up what the
bounds need of the rest. To the base 2.

A row's KV head has CHUNKS programs that sum up, block j belonging to chunk j % CHUNKS, and as many
that merge the pieces of the first pass as its group has heads, unless `weigh_heads` has merged
them. Where few blocks are promoted,
READERS more programs read these, each its own, and need no sums. Else the chunks' programs list
them for `promote`. All but the merging programs choose for the whole head, which costs no time as
they all do it at once.
"""

from attnplug.ops.certified.kernels.promote import read_blocks
from attnplug.ops.certified.kernels.search import score_of
from attnplug.ops.certified.kernels.select import (
    block_sums,
    choose,
    head_norm,
    head_norms,
    marked,
    merge_head,
    query_norms,
    set_digest,
)
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.kernels.tiles import load_query
from attnplug.ops.certified.records import R
from attnplug.ops.certified.scratch import (
    COUNTER_FIELDS,
    COUNTER_HITS,
    COUNTER_STEP,
    COUNTER_WANTED,
    place_item,
)
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def choose_blocks(
    q,
    cache,
    tier,
    rows,
    scores,
    splits,
    merged,
    left_sums,
    head_sums,
    needs,
    promotion,
    scratch,
    choice,
    scale,
    cap,
    N,
    pieces,
    SLOTS,
    SHAPE: tl.constexpr,
    GP: tl.constexpr,
    SEARCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEPTH: tl.constexpr,
    MATH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some of a KV head's promoted blocks, or one chunk of its blocks, or the merge of the `pieces`
    of one of its heads. A chunk leaves `left_sums` of each head, `counts` of its blocks, and
    without READERS the `block_list` of the promoted ones, with their places in the scratch cache.
    READERS leave `promoted_sums` and `changes`, and in `read_digest` the `set_digest` of what they
    read. All records are those of records.py."""
    GROUP: tl.constexpr = SHAPE.GROUP
    BLOCK: tl.constexpr = SHAPE.BLOCK
    CHUNKS: tl.constexpr = PROGRAMS.CHUNKS
    READERS: tl.constexpr = PROGRAMS.READERS
    OWN: tl.constexpr = PROGRAMS.OWN
    SETS: tl.constexpr = PROGRAMS.SETS
    h = tl.program_id(0)
    chunk = tl.program_id(1) - READERS  # below 0: it reads
    b = tl.program_id(2).to(tl.int64)
    group = b * tl.num_programs(0) + h
    if PDL:
        gdc_wait()
        if chunk < CHUNKS:  # what is next is launched when the merges are done, and finds room
            gdc_launch_dependents()
    if chunk >= CHUNKS:
        row = group * GROUP + chunk - CHUNKS
        of_head = head_norm(splits.lse, row, pieces, PROGRAMS.SPLITS)
        merge_head(merged, splits, row, pieces, of_head, SHAPE.D, SHAPE.DP)
        return
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(tier.progress, b, length, low, BLOCK)
    g = tl.arange(0, GP)
    in_heads = g < GROUP
    row_g = group * GROUP + g
    logs_at = scores.logs + row_g * N
    summary_at = tier.summary + group * N * R.SUMMARY_FIELDS
    every = tl.arange(0, SEARCH.TILE)
    eta_every, query = every, every
    if READERS > 0:  # loaded before anything has to wait for anything, also for how many blocks
        until = tl.where(chunk < 0, N, 0)
        asked = tl.where(chunk < 0, GROUP, 0)
        query = load_query(q, b, h, asked, SHAPE)
        asked_for = every < until
        eta_every = tl.load(
            summary_at + every * R.SUMMARY_FIELDS + R.ETA, mask=asked_for, other=0.0
        )
    numbers = chunk + tl.arange(0, PROGRAMS.WAYS) * CHUNKS
    ways = numbers < SLOTS
    holder, last_use, now = numbers, numbers, 0
    mine, clock, clock_at, owner_at, used_at = ways, numbers, cache.k, cache.k, cache.k
    if scratch is not None:
        of_set = tl.arange(0, SETS)
        mine = of_set % CHUNKS == chunk
        clock_at = scratch.counters + (group * SETS + of_set) * COUNTER_FIELDS + COUNTER_STEP
        owner_at = scratch.owner + group * SLOTS + numbers
        holder = tl.load(owner_at, mask=ways, other=-1, cache_modifier=".cg")
        used_at = scratch.used + group * SLOTS + numbers
        last_use = tl.load(used_at, mask=ways, other=0, cache_modifier=".cg")
        clock = tl.load(clock_at, mask=mine, other=0, cache_modifier=".cg")
        now = tl.max(clock, 0).to(tl.int32) + 1
    if SEARCH.NEEDS:
        norm_at = head_sums + row_g * R.HEAD_FIELDS + R.HEAD_LSE
        norm = tl.load(norm_at, mask=in_heads, other=float("-inf"))
        rest_at = head_sums + row_g * R.HEAD_FIELDS + R.HEAD_REST_LSE
        rest = tl.load(rest_at, mask=in_heads, other=float("-inf"))
    else:
        norm, rest = head_norms(splits.lse, row_g, in_heads, pieces, PROGRAMS.SPLITS)
    empty = norm == float("-inf")
    shown = tl.where(empty, 0.0, norm)
    rest_mass = tl.where(empty, 1.0, tl.exp2(rest - shown))
    if (chunk == 0) and not SEARCH.NEEDS:
        tl.store(head_sums + row_g * R.HEAD_FIELDS + R.HEAD_LSE, norm, mask=in_heads)
        tl.store(head_sums + row_g * R.HEAD_FIELDS + R.HEAD_REST_LSE, rest, mask=in_heads)
    key_threshold, value_threshold, block_scores, order = choose(
        head_at=scores.logs + group * GROUP * N,
        N=N,
        logs_at=logs_at,
        norm=shown,
        rest_mass=rest_mass,
        choice=choice,
        blocks=blocks,
        in_group=in_heads,
        GROUP=GROUP,
        GP=GP,
        SEARCH=SEARCH,
    )
    if READERS > 0:
        if chunk < 0:
            keys, values, _worthy, _spot = marked(
                score=block_scores,
                eta=eta_every,
                key_threshold=key_threshold,
                value_threshold=value_threshold,
                there=every < blocks,
                j=every,
                row=group,
                length=length,
                explore=0.0,
                EXPLORES=False,
            )
            rank = tl.where(keys, order, 0)
            # In one sum: how many are promoted, how many of these have a rank, and their ranks.
            packed = tl.sum(tl.where(keys, 1 + (rank > 0) * 65536 + rank * 1048576, 0), 0)
            promoted = packed & 65535
            reader = chunk + READERS
            if reader == READERS - 1:  # the one that has least to do
                tl.store(promotion.read_digest + group, set_digest(every, values, keys))
            if reader < promoted:
                ranked = (packed >> 16 & 15) == promoted
                if not (ranked & (2 * (packed >> 20) == promoted * (promoted + 1))):
                    # blocks alike, or promoted for their values: not the first of the order
                    rank = tl.where(keys, tl.cumsum(keys.to(tl.int32), 0), 0)
                name = every * R.NAME_STEP + values.to(tl.int32) * R.NAME_VALUES
                read_blocks(
                    query,
                    cache=cache,
                    tier=tier,
                    rows=rows,
                    scores=scores,
                    promotion=promotion,
                    scratch=None,
                    scale=scale,
                    cap=cap,
                    N=N,
                    SLOTS=0,
                    b=b,
                    h=h,
                    group=group,
                    low=low,
                    piece=reader,
                    pieces=READERS,
                    first=reader,
                    count=promoted,
                    step=READERS,
                    own_blocks=(rank, name),
                    block_lists=(None, rank, rank),
                    SHAPE=SHAPE,
                    PROGRAMS=PROGRAMS,
                    DEPTH=DEPTH,
                    LISTED=False,
                    MATH=MATH,
                    PDL=PDL,
                )
            return

    i = tl.arange(0, OWN)
    j = chunk + i * CHUNKS
    there = j < blocks
    mask = there[:, None] & in_heads[None, :]
    log = tl.load(logs_at[None, :] + j[:, None], mask=mask, other=float("-inf"))
    delta = tl.load(scores.delta + row_g[None, :] * N + j[:, None], mask=mask, other=0.0)
    noise = tl.load(scores.noise + row_g[None, :] * N + j[:, None], mask=mask, other=0.0)
    square_at = scores.squares + row_g[None, :] * N + j[:, None]
    square = tl.load(square_at, mask=mask, other=float("-inf"))
    eta = tl.load(summary_at + j * R.SUMMARY_FIELDS + R.ETA, mask=there, other=0.0)
    moved = query_norms(q, b, h * GROUP, scale, GP, SHAPE)
    mass = tl.exp2(log - shown[None, :])
    root = tl.exp2(square * 0.5 - shown[None, :]) + R.SQUARE_FLOOR
    keys, values, worthy, spot = marked(
        score=score_of(mass),
        eta=eta,
        key_threshold=key_threshold,
        value_threshold=value_threshold,
        there=there,
        j=j,
        row=group,
        length=length,
        explore=choice.explore,
        EXPLORES=SEARCH.EXPLORES,
    )
    climbed = 0
    if SEARCH.NEEDS:
        need_at = needs + row_g[None, :] * N + j[:, None]
        need = tl.load(need_at, mask=mask, other=float("-inf"))
        least = tl.load(head_sums + row_g * R.HEAD_FIELDS + R.HEAD_NEED, mask=in_heads, other=0.0)
        wanted = (need >= least[None, :]) & mask
        needed = there & (tl.max(wanted.to(tl.int32), 1) > 0)
        climbed = tl.max(needed.to(tl.int32), 0)
        keys, values, spot = keys | needed, values | needed, spot & ~needed
    change, under, shift, plain, left, error, reach, largest, loudest, widest = block_sums(
        log=log,
        delta=delta,
        noise=noise,
        summary_at=summary_at,
        j=j,
        there=there,
        mass=mass,
        root=root,
        moved=moved,
        keys=keys,
    )
    at = left_sums + row_g * (R.LEFT_FIELDS * CHUNKS) + chunk
    tl.store(at + R.LEFT_CHANGE * CHUNKS, change, mask=in_heads)
    tl.store(at + R.LEFT_UNDER * CHUNKS, under, mask=in_heads)
    tl.store(at + R.LEFT_NORM * CHUNKS, plain, mask=in_heads)
    tl.store(at + R.LEFT_MOVED * CHUNKS, shift, mask=in_heads)
    tl.store(at + R.LEFT_MASS * CHUNKS, left, mask=in_heads)
    tl.store(at + R.LEFT_ERROR * CHUNKS, error, mask=in_heads)
    tl.store(at + R.LEFT_REACH * CHUNKS, reach, mask=in_heads)
    tl.store(at + R.ALL_DELTA * CHUNKS, largest, mask=in_heads)
    tl.store(at + R.ALL_NOISE * CHUNKS, loudest, mask=in_heads)
    tl.store(at + R.ALL_NORM * CHUNKS, widest, mask=in_heads)
    promoted = tl.sum(keys.to(tl.int32), 0)
    whole = tl.sum(values.to(tl.int32), 0)
    at = promotion.counts + group * (R.COUNT_FIELDS * CHUNKS) + chunk
    tl.store(at + R.COUNT_KEYS * CHUNKS, promoted)
    tl.store(at + R.COUNT_VALUES * CHUNKS, whole)
    tl.store(at + R.COUNT_WORTHY * CHUNKS, tl.sum(worthy.to(tl.int32), 0))
    tl.store(at + R.COUNT_NEEDED * CHUNKS, climbed)
    if READERS > 0:
        tl.store(at + R.COUNT_DIGEST * CHUNKS, set_digest(j, values, keys))

    hits = promoted * 0  # of what is in slots
    if READERS == 0:
        rank = tl.where(keys, tl.cumsum(keys.to(tl.int32), 0), 0)
        name = (
            j * R.NAME_STEP + spot.to(tl.int32) * R.NAME_SPOT + values.to(tl.int32) * R.NAME_VALUES
        )
        list_at = promotion.block_list + (group * CHUNKS + chunk) * (OWN * R.LIST_FIELDS)
        if scratch is None:
            tl.store(list_at + (rank - 1) * R.LIST_FIELDS + R.LIST_NAME, name, mask=keys)
        else:
            for index in range(promoted):
                this = tl.sum(tl.where(rank == index + 1, name, 0), 0)
                item = 2 * (low + this // R.NAME_STEP * BLOCK)
                of_set_this = this // R.NAME_STEP % SETS
                place, holder, last_use = place_item(
                    item=item,
                    of_set=of_set_this,
                    keep=this & R.NAME_SPOT == 0,
                    numbers=numbers,
                    there=ways,
                    owner=holder,
                    used=last_use,
                    now=now,
                    OF=SETS,
                )
                hits += (place >= 0).to(tl.int32)
                value_place = -1
                if this & R.NAME_VALUES > 0:
                    value_place, holder, last_use = place_item(
                        item=item + 1,
                        of_set=of_set_this,
                        keep=this & R.NAME_SPOT == 0,
                        numbers=numbers,
                        there=ways,
                        owner=holder,
                        used=last_use,
                        now=now,
                        OF=SETS,
                    )
                    hits += (value_place >= 0).to(tl.int32)
                tl.store(list_at + index * R.LIST_FIELDS + R.LIST_NAME, this)
                tl.store(list_at + index * R.LIST_FIELDS + R.LIST_KEYS, place)
                tl.store(list_at + index * R.LIST_FIELDS + R.LIST_VALUES, value_place)
    if scratch is not None:
        tl.debug_barrier()  # every warp loads and stores the same words
        tl.store(owner_at, holder, mask=ways)
        tl.store(used_at, last_use, mask=ways)
        tl.store(clock_at, clock + 1, mask=mine)
        at = scratch.counters + (group * SETS + chunk) * COUNTER_FIELDS
        wanted_before = tl.load(at + COUNTER_WANTED, cache_modifier=".cg")
        hits_before = tl.load(at + COUNTER_HITS, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(at + COUNTER_WANTED, wanted_before + promoted + whole)
        tl.store(at + COUNTER_HITS, hits_before + hits)
