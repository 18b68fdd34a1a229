"""The second of the two kernels of a long row of `topk` that reads the row once: one program a row
selects the k best of what the programs of `sift` have kept (topk_sift.py).

Kept scores are the tail of a row. Those from the highest floor on are taken for a generalized
Pareto distribution with their mean and deviation, which predicts the k-th; the nine bins of
topk_short_rows.py lie around it. If no bin is found, rounds of thresholds bracket the k-th, and of
scores equal to it the index decides. If fewer than k scores reach the highest floor, what was
dropped may be a pick, and the row is searched.

Names as in `topk_select`.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.topk_refine import search
from attnplug.ops.gvr.kernels.topk_select import (
    ALL,
    BIN_LIST,
    GVR,
    LEAST,
    RADIX,
    length_of,
    narrow,
    pick_list,
    reaches,
    score_of,
    store_stats,
    take_all,
)
from attnplug.ops.gvr.kernels.topk_short_rows import (
    TILE,
    add_five,
    find_bin,
    fits,
    memory_axes,
    other_bins,
    store_best,
    thread_sum,
    usable_bins,
)

_ALL, _GVR, _RADIX = (tl.constexpr(path) for path in (ALL, GVR, RADIX))
_TILE = tl.constexpr(TILE)
_PASSES = tl.constexpr(4)  # over the bins, before rounds of thresholds take over


@triton.jit
def _tail_bins(x, floor, K, WIDTH: tl.constexpr):
    """(scale, shift, how many scores reach the floor, how many there are): `x * scale + shift`,
    rounded, is the bin of x. Were the scores from the floor on as said above, bin 5 would hold the
    k-th. Mean m and deviation s of what they exceed it by give the shape (1 - (m / s)^2) / 2."""
    above = x >= floor
    usable = above & (x < 1e30)
    y = tl.where(usable, x - floor, 0.0)
    reach = tl.sum(thread_sum(above.to(tl.int32)), 1)
    there = tl.sum(thread_sum((x > float("-inf")).to(tl.int32)), 1)
    count = tl.sum(thread_sum(usable.to(tl.float32)), 1)
    total = tl.sum(thread_sum(y), 1)
    squares = tl.sum(thread_sum(y * y), 1)
    reach, there, count, total, squares = tl.reduce(
        (reach, there, count, total, squares), 0, add_five
    )
    mean = total / tl.maximum(count, 1.0)
    variance = tl.maximum(squares / tl.maximum(count, 1.0) - mean * mean, 1e-30)
    shape = tl.minimum(tl.maximum(0.5 * (1 - mean * mean / variance), -0.5), 0.45)
    shape = tl.where(tl.abs(shape) < 0.01, 0.01, shape)
    sigma = mean * (1 - shape)
    grown = tl.exp2(shape * tl.log2(tl.maximum(reach, 1).to(tl.float32) / K))
    kth = floor + sigma * (grown - 1) / shape
    density = K / (sigma * grown)
    spread = tl.sqrt(K * tl.maximum(1 - K / tl.maximum(reach, 1).to(tl.float32), 0.0)) + 1
    scale = density / (WIDTH * spread)
    return scale, 5.0 - kth * scale, reach, there


@triton.jit
def _cut(i, tied, wanted, size):
    """The index up to which `wanted` of the tied scores lie: a search in fifths."""
    low = tl.full([], -1, tl.int32)
    high = tl.full([], 0, tl.int32) + (size - 1)
    while high - low > 1:  # fewer lie up to low, and enough up to high
        step = (high - low + 4) // 5
        t1 = tl.minimum(low + step, high)
        t2 = tl.minimum(low + 2 * step, high)
        t3 = tl.minimum(low + 3 * step, high)
        t4 = tl.minimum(low + 4 * step, high)
        two = (tied & (i <= t1)).to(tl.int32) + ((tied & (i <= t2)).to(tl.int32) << 16)
        more = (tied & (i <= t3)).to(tl.int32) + ((tied & (i <= t4)).to(tl.int32) << 16)
        two = tl.sum(two, 0)
        more = tl.sum(more, 0)
        low, high = _move(low, high, t1, two & 0xFFFF, wanted)
        low, high = _move(low, high, t2, two >> 16, wanted)
        low, high = _move(low, high, t3, more & 0xFFFF, wanted)
        low, high = _move(low, high, t4, more >> 16, wanted)
    return high


@triton.jit
def _move(low, high, t, count, wanted):
    enough = count >= wanted
    return tl.where(enough, low, tl.maximum(low, t)), tl.where(enough, tl.minimum(high, t), high)


@triton.jit
def _pick(slot_scores, slot_index, slots, there, size, indices, values, K, SIZE: tl.constexpr):
    """Select by rounds of thresholds, and return how many. Slots are in no order of index, so that
    of scores equal to the k-th those up to an index are taken."""
    e = tl.arange(0, SIZE)
    x = tl.load(slot_scores + e, mask=e < slots, other=float("-inf"), cache_modifier=".cg")
    i = tl.load(slot_index + e, mask=e < slots, other=0, cache_modifier=".cg")
    low, high, at_low, at_high, rounds = narrow(x, x > float("-inf"), there, K, False)
    keep = (x > float("-inf")) & reaches(x, low)
    if at_low > K:
        above = reaches(x, high)
        tied = keep & ~above
        keep = above | (tied & (i <= _cut(i, tied, K - at_high, size)))
    slot = tl.where(keep, tl.cumsum(keep.to(tl.int32), 0), 0).to(tl.int64)
    tl.store(indices + slot - 1, i, mask=slot > 0)
    tl.store(values + slot - 1, x, mask=slot > 0)
    return rounds


@triton.jit
def _search_row(
    x_at, n, floor, reach, lists, indices, values, K, CAPACITY: tl.constexpr, TILE: tl.constexpr
):
    """Select from the row itself. Fewer than k scores, `reach`, have the key `floor` or more."""
    list_index, list_score = lists
    sure, in_bin, passes = search(
        x_at=x_at,
        n=n,
        low=tl.full([], LEAST, tl.int64),
        high=floor,
        at_low=tl.full([], 0, tl.int32) + n,
        at_high=reach,
        out=(indices, values),
        lists=lists,
        K=K,
        CAPACITY=CAPACITY,
        TILE=TILE,
    )
    tl.debug_barrier()
    pick_list(
        list_index=list_index + BIN_LIST * CAPACITY,
        list_score=list_score + BIN_LIST * CAPACITY,
        count=tl.minimum(in_bin, CAPACITY),
        need=K - sure,
        indices=indices + sure,
        values=values + sure,
        SIZE=CAPACITY,
    )
    return passes, sure + in_bin


@triton.jit
def finish(
    scores,
    lengths,
    slot_scores,
    slot_index,
    floors,
    entries,
    list_index,
    list_score,
    indices,
    values,
    stats,
    N,
    scores_stride,
    parts,
    K,
    K_PAD: tl.constexpr,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    HALVES: tl.constexpr,
    WARPS: tl.constexpr,
    LIST: tl.constexpr,
    CAPACITY: tl.constexpr,
    SEARCHED: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select row r from its slots. `entries` `[LIST + TILE]` of each row is the room for its list,
    `list_index` and `list_score` those of a search."""
    r = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = 512 * HALVES * WARPS
    lane = tl.arange(0, 32)[:, None, None, None, None]
    warp = tl.arange(0, WARPS)[None, :, None, None, None]
    half = tl.arange(0, HALVES)[None, None, :, None, None]
    group = tl.arange(0, 4)[None, None, None, :, None]
    in_group = tl.arange(0, 4)[None, None, None, None, :]
    e = memory_axes(in_group + lane * 4 + group * 128 + half * 512 + warp * (512 * HALVES))
    slots = parts * ROOM
    slot_scores += r * slots
    slot_index += r * slots
    indices += r * K
    values += r * K
    stats += r * 3
    # The kernel in front, that has filled the slots, has waited: the lengths are there.
    n = length_of(lengths, r, N, LENGTH_STEP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n <= K:
        take_all(scores + r * scores_stride, n, indices, values, K, K_PAD)
        store_stats(stats, _ALL, 0, n)
    else:
        x = tl.load(slot_scores + e, mask=e < slots, other=float("-inf"), cache_modifier=".cg")
        x = memory_axes(x)
        i_to_store = tl.load(slot_index + e, mask=e < slots, other=0, cache_modifier=".cg")
        p = tl.arange(0, PARTS)
        floor = tl.load(floors + r * parts + p, mask=p < parts, other=LEAST, cache_modifier=".cg")
        key = tl.max(floor, 0).to(tl.int64)
        scale, shift, reach, there = _tail_bins(x, score_of(key.to(tl.int32)), K, WIDTH)
        if reach >= K:
            usable = usable_bins(scale, shift)
            bins, kth_bin, below, upto = find_bin(x, scale, shift, SIZE - K, SIZE)
            rounds = n * 0 + 1
            while usable & ~fits(kth_bin, below, upto, LIST) & (rounds < _PASSES):
                scale, shift = other_bins(scale, shift, kth_bin)
                usable = usable_bins(scale, shift)
                bins, kth_bin, below, upto = find_bin(x, scale, shift, SIZE - K, SIZE)
                rounds += 1
            if usable & fits(kth_bin, below, upto, LIST):
                store_best(
                    x=x,
                    i=memory_axes(i_to_store),
                    i_to_store=i_to_store,
                    found=(bins, kth_bin, below, upto),
                    entries=entries + r * (LIST + _TILE),
                    indices=indices,
                    values=values,
                    K=K,
                    WARPS=WARPS,
                    HALVES=HALVES,
                )
            else:
                rounds += _pick(
                    slot_scores=slot_scores,
                    slot_index=slot_index,
                    slots=slots,
                    there=there,
                    size=N,
                    indices=indices,
                    values=values,
                    K=K,
                    SIZE=SIZE,
                )
            store_stats(stats, _GVR, rounds, there)
        else:
            lists = (list_index + r * 2 * CAPACITY, list_score + r * 2 * CAPACITY)
            passes, candidates = _search_row(
                x_at=scores + r * scores_stride,
                n=n,
                floor=key,
                reach=reach,
                lists=lists,
                indices=indices,
                values=values,
                K=K,
                CAPACITY=CAPACITY,
                TILE=SEARCHED,
            )
            store_stats(stats, _RADIX, passes, candidates)
