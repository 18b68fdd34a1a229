"""The Triton kernel of `certified_attention` that chooses what is read exactly and sums up what the
bounds need of the rest. To the base 2.

A row's KV head has CHUNKS programs that sum up, block j belonging to chunk j % CHUNKS, and as many
that merge the partial results as its group has heads. Where few blocks are promoted READERS more
read these, each its own, and need no sums; else the chunks' programs list them for `promote`. All
but the merging ones choose for the whole head, which costs no time as they all do it at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.attend import load_query, quantized_blocks
from attnplug.ops.certified.kernels.promote import read_blocks
from attnplug.ops.certified.kernels.search import score_of
from attnplug.ops.certified.kernels.select import (
    block_sums,
    choose,
    marked,
    merge_head,
    names_sum,
    norms,
)
from attnplug.ops.certified.scratch import place_item
from attnplug.ops.common.rows import row_span


@triton.jit
def choose_blocks(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, progress, lengths, start, key_mask, base,
    delta, noise, logs, partial, partial_lse, merged, found, counts, heads, listed, gained, changes,
    flags, named, owner, used, counters, coverage, least, most, v_tol, budget,
    key_tolerance, explore, scale, cap, S, N, splits, SLOTS,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr, READERS: tl.constexpr,
    OWN: tl.constexpr, WAYS: tl.constexpr, SETS: tl.constexpr, DEPTH: tl.constexpr,
    EXPLORES: tl.constexpr, HELD: tl.constexpr, FEW: tl.constexpr, COVERS: tl.constexpr,
    EXPANDS: tl.constexpr, BUDGETED: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some of a KV head's promoted blocks, or one chunk of its blocks, or the merge of one of its
    heads. `found` gets ten numbers of each head and chunk, `counts` how many blocks were taken,
    whole, and for their values' error, whether rung 1 was climbed, and `names_sum` of the taken;
    `named` that of those which READERS read. Without READERS `listed` gets of each block that is
    read exactly its name and the places in the scratch cache of its keys and of its values
    (`place_item`)."""
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
        merge_head(merged, partial, partial_lse, row, splits, D, DP, SPLITS)
        return
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    g = tl.arange(0, GP)
    in_heads = g < GROUP
    row_g = group * GROUP + g
    logs_at = logs + row_g * N
    delta_at = delta + row_g * N
    summary_at = summary + group * N * 2
    every = tl.arange(0, TILE)
    eta_every, query = every, every
    if READERS > 0:  # loaded before anything has to wait for anything, also for how many blocks
        until = tl.where(chunk < 0, N, 0)
        asked = tl.where(chunk < 0, GROUP, 0)
        query = load_query(q, b, h, q_b, q_h, asked, GROUP, ROWS, D, DP)
        eta_every = tl.load(summary_at + every * 2, mask=every < until, other=0.0)
    numbers = chunk + tl.arange(0, WAYS) * CHUNKS
    ways = numbers < SLOTS
    holder, last_use, now = numbers, numbers, 0
    mine, clock, clock_at = ways, numbers, owner
    if owner is not None:
        of_set = tl.arange(0, SETS)
        mine = of_set % CHUNKS == chunk
        clock_at = counters + (group * SETS + of_set) * 3
        holder = tl.load(owner + group * SLOTS + numbers, mask=ways, other=-1, cache_modifier=".cg")
        last_use = tl.load(used + group * SLOTS + numbers, mask=ways, other=0, cache_modifier=".cg")
        clock = tl.load(clock_at, mask=mine, other=0, cache_modifier=".cg")
        now = tl.max(clock, 0).to(tl.int32) + 1
    norm, tail = norms(partial_lse, row_g, in_heads, splits, GP, SPLITS)
    empty = norm == float("-inf")
    shown = tl.where(empty, 0.0, norm)
    own = tl.where(empty, 1.0, tl.exp2(tail - shown))
    if chunk == 0:
        tl.store(heads + row_g * 2, norm, mask=in_heads)
        tl.store(heads + row_g * 2 + 1, tail, mask=in_heads)
    x, worth_x, climbed, scores, order = choose(
        logs + group * GROUP * N, N, logs_at, delta_at, summary_at, shown, own, coverage, least,
        most, v_tol, budget, key_tolerance, blocks, in_heads, GROUP, GP, TILE, HELD, FEW, COVERS,
        EXPANDS, BUDGETED,
    )  # fmt: skip
    if READERS > 0:
        if chunk < 0:
            keys, values, _worthy, _spot = marked(
                scores, eta_every, x, worth_x, every < blocks, every, group, length, 0.0, False
            )
            rank = tl.where(keys, order, 0)
            # In one sum: how many are taken, how many of these are in the order, and their places.
            sums = tl.sum(tl.where(keys, 1 + (rank > 0) * 65536 + rank * 1048576, 0), 0)
            taken = sums & 65535
            reader = chunk + READERS
            if reader == READERS - 1:  # the one that has least to do
                tl.store(named + group, names_sum(every, values, keys))
            if reader < taken:
                ordered = (sums >> 16 & 15) == taken
                if not (ordered & (2 * (sums >> 20) == taken * (taken + 1))):
                    # blocks alike, or taken for their values: not the first of the order
                    rank = tl.where(keys, tl.cumsum(keys.to(tl.int32), 0), 0)
                name = every * 4 + values.to(tl.int32)
                read_blocks(
                    query, k, v, k_codes, k_meta, v_codes, v_meta, summary, key_mask, base, delta,
                    gained, changes, flags, None, None, None, scale, cap, N, 0, b, h, group, low,
                    reader, READERS, reader, taken, READERS, rank, name, None, rank, rank,
                    k_b, k_h, k_s, v_b, v_h, v_s, mask_b, GROUP, ROWS, D, DP, BLOCK, HALF,
                    HALF_P, CHUNKS, OWN, DEPTH, False, QK, PV, PARTS, CAPPED, PDL,
                )  # fmt: skip
            return

    i = tl.arange(0, OWN)
    j = chunk + i * CHUNKS
    there = j < blocks
    mask = there[:, None] & in_heads[None, :]
    log = tl.load(logs_at[None, :] + j[:, None], mask=mask, other=float("-inf"))
    deviation = tl.load(delta_at[None, :] + j[:, None], mask=mask, other=0.0)
    quiet = tl.load(noise + row_g[None, :] * N + j[:, None], mask=mask, other=0.0)
    eta = tl.load(summary_at + j * 2, mask=there, other=0.0)
    nu = tl.load(summary_at + j * 2 + 1, mask=there, other=0.0)
    mass = tl.exp2(log - shown[None, :])
    score = score_of(mass)
    keys, values, worthy, spot = marked(
        score, eta, x, worth_x, there, j, group, length, explore, EXPLORES
    )
    over, under, plain, grown, left, worst, reach, largest, loudest, widest = block_sums(
        log, deviation, quiet, eta, nu, mass, keys
    )
    at = found + row_g * (10 * CHUNKS) + chunk
    tl.store(at, over, mask=in_heads)
    tl.store(at + CHUNKS, under, mask=in_heads)
    tl.store(at + 2 * CHUNKS, plain, mask=in_heads)
    tl.store(at + 3 * CHUNKS, grown, mask=in_heads)
    tl.store(at + 4 * CHUNKS, left, mask=in_heads)
    tl.store(at + 5 * CHUNKS, worst, mask=in_heads)
    tl.store(at + 6 * CHUNKS, reach, mask=in_heads)
    tl.store(at + 7 * CHUNKS, largest, mask=in_heads)
    tl.store(at + 8 * CHUNKS, loudest, mask=in_heads)
    tl.store(at + 9 * CHUNKS, widest, mask=in_heads)
    taken = tl.sum(keys.to(tl.int32), 0)
    whole = tl.sum(values.to(tl.int32), 0)
    at = counts + group * (5 * CHUNKS) + chunk
    tl.store(at, taken)
    tl.store(at + CHUNKS, whole)
    tl.store(at + 2 * CHUNKS, tl.sum(worthy.to(tl.int32), 0))
    tl.store(at + 3 * CHUNKS, climbed)
    if READERS > 0:
        tl.store(at + 4 * CHUNKS, names_sum(j, values, keys))

    hits = taken * 0  # of what is in slots
    if READERS == 0:
        rank = tl.where(keys, tl.cumsum(keys.to(tl.int32), 0), 0)
        name = j * 4 + spot.to(tl.int32) * 2 + values.to(tl.int32)
        list_at = listed + (group * CHUNKS + chunk) * (OWN * 3)
        if owner is None:
            tl.store(list_at + (rank - 1) * 3, name, mask=keys)
        else:
            for index in range(taken):
                this = tl.sum(tl.where(rank == index + 1, name, 0), 0)
                item = 2 * (low + this // 4 * BLOCK)
                of_set_this = this // 4 % SETS
                place, holder, last_use = place_item(
                    item, of_set_this, this & 2 == 0, numbers, ways, holder, last_use, now, SETS
                )
                hits += (place >= 0).to(tl.int32)
                value_place = -1
                if this & 1 > 0:
                    value_place, holder, last_use = place_item(
                        item + 1,
                        of_set_this,
                        this & 2 == 0,
                        numbers,
                        ways,
                        holder,
                        last_use,
                        now,
                        SETS,
                    )
                    hits += (value_place >= 0).to(tl.int32)
                tl.store(list_at + index * 3, this)
                tl.store(list_at + index * 3 + 1, place)
                tl.store(list_at + index * 3 + 2, value_place)
    if owner is not None:
        tl.debug_barrier()  # every warp loads and stores the same words
        tl.store(owner + group * SLOTS + numbers, holder, mask=ways)
        tl.store(used + group * SLOTS + numbers, last_use, mask=ways)
        tl.store(clock_at, clock + 1, mask=mine)
        at = counters + (group * SETS + chunk) * 3
        wanted_before = tl.load(at + 1, cache_modifier=".cg")
        found_before = tl.load(at + 2, cache_modifier=".cg")
        tl.debug_barrier()
        tl.store(at + 1, wanted_before + taken + whole)
        tl.store(at + 2, found_before + hits)
