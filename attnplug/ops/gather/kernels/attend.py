"""The Triton kernel of gather_attention: one program attends to one piece of a row's kept keys."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.rows import note_progress, row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.gather.kernels.select import best_keys, block_of, nth_best


@triton.jit
def _append(new, cache, position, S, d, s_step, D: tl.constexpr):
    """Write a token's key or value `[D]` where it goes, if there is room."""
    room = tl.where(position < S, D, 0)
    x = tl.load(new + d, mask=d < D, other=0.0, cache_modifier=".cg")
    tl.store(cache + position.to(tl.int64) * s_step + d, x, mask=d < room)


@triton.jit
def _rows(cache, new, at, position, s_step):
    """Where the keys (values) at `at` are: the newest token's is not in the cache yet."""
    rows = cache + at.to(tl.int64) * s_step
    if new is not None:
        rows = tl.where(at == position, new, rows)
    return rows


@triton.jit
def attend_kept(
    q, k, v, new_k, new_v, index, scores, best, progress, lengths, start, key_mask, sinks,
    partial, out, lse, scale, cap, T, S, N, splits,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, nk_b, nk_h, nv_b, nv_h, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, SINK: tl.constexpr, LOCAL: tl.constexpr, K: tl.constexpr,
    LIST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, CAPPED: tl.constexpr,
    FUSED: tl.constexpr, ONE: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr,
    MEMBERS: tl.constexpr, CHAINED: tl.constexpr, LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one query and KV head against one piece of the kept keys.

    The blocks to read stand in `index`, or it is None and they are picked from `scores` here. With
    a new token (T = 1) its key and value are read where they are, and written to the cache.
    CHAINED: the kernels before are those of the same step, so that all but their list was there
    before the first of them began, and only who reads the list waits.
    """
    split = tl.program_id(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if not CHAINED:
            gdc_wait()  # for the list, and for whatever else the kernels before have written
        gdc_launch_dependents()
    NEW: tl.constexpr = 0 if new_k is None else 1
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    row = b * tl.num_programs(1) + tl.program_id(1)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & in_width[None, :], other=0.0, cache_modifier=".cg"
    )
    position = length - T + t
    reach = position
    if NEW == 1:
        reach = tl.minimum(position, S - 1)
    own = tl.maximum(position - low, 0) // BLOCK
    edge = tl.maximum(own - LOCAL + 1, SINK)
    limit = own - LOCAL + 1
    k_at = k + b * k_b + h.to(tl.int64) * k_h
    v_at = v + b * v_b + h.to(tl.int64) * v_h
    fresh_k, fresh_v = new_k, new_v
    if NEW == 1:
        fresh_k = new_k + b * nk_b + h * nk_h
        fresh_v = new_v + b * nv_b + h * nv_h
        if split == 0:
            _append(fresh_k, k_at, position, S, d, k_s, D)
            _append(fresh_v, v_at, position, S, d, v_s, D)
        scale = tl.where(length > S, float("nan"), scale)  # no room: nobody may miss that
    scores_at, best_at = scores, best
    if scores is not None:
        scores_at = scores + row * N
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    TILES: tl.constexpr = ((SINK + LOCAL + K) * BLOCK + TILE - 1) // TILE
    # Slots are the sink's blocks, then the local ones, then the list; no block counts twice.
    KNOWN: tl.constexpr = SINK + LOCAL
    WHOLE: tl.constexpr = BLOCK % TILE == 0  # a tile lies in one block
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    alone, names = 0, 0
    if ONE and WHOLE:  # one block, and only who reads a listed one waits
        slot = split * TILE // BLOCK
        alone = tl.where(slot < SINK, slot, own - LOCAL + 1 + slot - SINK)
        if slot >= KNOWN:
            if PDL and CHAINED:
                gdc_wait()
            if scores is not None:
                alone = nth_best(slot - KNOWN, scores_at, best_at, limit, KP, WIDE, MEMBERS)
            elif K > 0:
                alone = tl.load(index + row * K + slot - KNOWN, cache_modifier=".cg")
    else:
        if PDL and CHAINED:
            gdc_wait()
        if scores is not None:
            names = block_of(best_keys(scores_at, best_at, limit, KP, WIDE, MEMBERS))
        elif WHOLE:
            i = tl.arange(0, LIST)
            names = tl.load(index + row * K + i, mask=i < K, other=-1, cache_modifier=".cg")
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        place = i * TILE + n
        if WHOLE:
            slot = i * TILE // BLOCK
            if ONE:
                name = alone
            else:
                name = tl.where(slot < SINK, slot, own - LOCAL + 1 + slot - SINK)
                if K > 0:
                    listed = tl.max(tl.where(tl.arange(0, LIST) == slot - KNOWN, names, -1), 0)
                    name = tl.where(slot < KNOWN, name, listed)
        else:
            slot = place // BLOCK
            name = tl.where(slot < SINK, slot, own - LOCAL + 1 + slot - SINK)
            in_list = (slot >= KNOWN) & (slot < KNOWN + K)
            if K > 0:
                listed = tl.load(index + row * K + slot - KNOWN, mask=in_list, other=-1)
                name = tl.where(slot < KNOWN, name, listed)
        # What a slot lets be seen: to the query's own position, or nothing.
        until = tl.where((slot < KNOWN) | (name < edge), reach, -0x7FFFFFFF)
        until = tl.where((slot < SINK) | (name >= SINK), until, -0x7FFFFFFF)
        at = low + name * BLOCK + place % BLOCK
        seen = at <= until
        if key_mask is not None:
            seen = seen & (tl.load(key_mask + b * mask_b + at, mask=seen, other=0) != 0)
        loadable = seen[:, None] & in_width[None, :]
        # .cg: nothing is read twice, and an L1 line may be older than the last token.
        key = tl.load(
            _rows(k_at, fresh_k, at, position, k_s)[:, None] + d[None, :],
            mask=loadable, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        value = tl.load(
            _rows(v_at, fresh_v, at, position, v_s)[:, None] + d[None, :],
            mask=loadable, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)

    if scores is not None:  # no kernel has selected, so nobody has noted it
        if (h == 0) & (split == splits - 1):  # reads the list, hence has waited
            note_progress(progress, b, low, tl.maximum(limit, 0))
    heads = (tl.num_programs(1) // T) * GROUP
    store_piece(
        top, total, acc, sinks, partial, out, lse, head, (b * heads + head) * T + t,
        tl.num_programs(2).to(tl.int64) * heads * T, d, in_group, in_width, split, splits, D, FUSED,
    )  # fmt: skip
