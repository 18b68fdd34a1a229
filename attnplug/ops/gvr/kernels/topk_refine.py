"""The last kernel of a long row of `topk`, one program a row: it selects the rest from the list
that the programs of `collect` have written, or searches the row if that list overflowed.

Names as in `topk_select`.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.topk_select import (
    ALL,
    BIN_LIST,
    COUNT_MASK,
    GVR,
    IN_BIN,
    LEAST,
    MOST,
    RADIX,
    RANGE_HIGH,
    RANGE_LOW,
    READY,
    SURE,
    SURE_SHIFT,
    clean,
    fifth,
    key_of,
    length_of,
    pick,
    pick_list,
    store_stats,
    take_all,
    tighten,
    write,
)

_ALL, _GVR, _RADIX = (tl.constexpr(path) for path in (ALL, GVR, RADIX))


@triton.jit
def _count_four(key, ok, t1, t2, t3, t4):
    """Which of four thresholds each key reaches, as four 16-bit counts in one int64."""
    return (
        (ok & (key >= t1.to(tl.int32))).to(tl.int64)
        + ((ok & (key >= t2.to(tl.int32))).to(tl.int64) << 16)
        + ((ok & (key >= t3.to(tl.int32))).to(tl.int64) << 32)
        + ((ok & (key >= t4.to(tl.int32))).to(tl.int64) << 48)
    )


@triton.jit
def search(
    x_at,
    n,
    low,
    high,
    at_low,
    at_high,
    out,
    lists,
    K,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Radix path: split the keys low..high in five, pass by pass over the row, until the part with
    the k-th fits the list or is a single key. Then write output and list as `collect` does."""
    lane = tl.arange(0, TILE)
    passes = at_low * 0 + 1
    while (at_low - at_high > CAPACITY) & (high - low > 1):
        t1 = fifth(low, high, 1)
        t2 = fifth(low, high, 2)
        t3 = fifth(low, high, 3)
        t4 = fifth(low, high, 4)
        sums = tl.zeros([TILE], tl.int64)  # a lane sees n / TILE scores: 16 bits hold the count
        for tile in range(0, n, TILE):
            i = tile + lane
            x = clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
            sums += _count_four(key_of(x), i < n, t1, t2, t3, t4)
        count_1 = tl.sum((sums & 0xFFFF).to(tl.int32), 0)
        count_2 = tl.sum(((sums >> 16) & 0xFFFF).to(tl.int32), 0)
        count_3 = tl.sum(((sums >> 32) & 0xFFFF).to(tl.int32), 0)
        count_4 = tl.sum(((sums >> 48) & 0xFFFF).to(tl.int32), 0)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t1, count_1, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t2, count_2, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t3, count_3, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t4, count_4, K)
        passes += 1
    sure = at_low * 0
    in_bin = at_low * 0
    for tile in range(0, n, TILE):
        i = tile + lane
        x = clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
        key = key_of(x)
        is_sure = key >= high.to(tl.int32)
        flags = tl.where(is_sure, SURE, tl.where(key >= low.to(tl.int32), IN_BIN, 0))
        flags = tl.where(i < n, flags, 0)
        sure, in_bin = write(x, i, flags, sure, in_bin, out, lists, K, CAPACITY, GROUP=1)
    return sure, in_bin, passes


@triton.jit
def _load_list(list_index, list_score, SIZE: tl.constexpr):
    """The first SIZE entries of a list, loaded before the list's length has arrived."""
    e = tl.arange(0, SIZE)
    i = tl.load(list_index + e, cache_modifier=".cg")
    return i, tl.load(list_score + e, cache_modifier=".cg")


@triton.jit
def refine(
    scores,
    lengths,
    words,
    ranges,
    list_index,
    list_score,
    indices,
    values,
    stats,
    N,
    scores_stride,
    programs,
    K,
    K_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    SMALL: tl.constexpr,
    SLOTS: tl.constexpr,
    LOOKED_BACK: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish row r, which `programs` of `collect` have begun."""
    r = tl.program_id(0).to(tl.int64)
    x_at = scores + r * scores_stride
    list_index += r * 2 * CAPACITY
    list_score += r * 2 * CAPACITY
    indices += r * K
    values += r * K
    stats += r * 3
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    if n <= K:
        take_all(x_at, n, indices, values, K, K_PAD)
        store_stats(stats, _ALL, 0, n)
    else:
        first_i, first_x = _load_list(
            list_index + BIN_LIST * CAPACITY, list_score + BIN_LIST * CAPACITY, SMALL
        )
        e = tl.arange(0, SLOTS)
        if LOOKED_BACK:  # each program left a word; otherwise the first one the totals
            word = tl.load(
                words + r * programs + e, mask=e < programs, other=READY, cache_modifier=".cg"
            )
            counted = tl.sum(word & (READY - 1), 0)
        else:
            counted = tl.load(words + r * programs, cache_modifier=".cg") & (READY - 1)
        sure = (counted >> SURE_SHIFT).to(tl.int32)
        in_bin = (counted & COUNT_MASK).to(tl.int32)
        list_at = tl.full([], BIN_LIST * CAPACITY, tl.int32)
        path = tl.full([], _GVR, tl.int32)
        passes = tl.full([], 1, tl.int32)
        candidates = sure + in_bin
        low = tl.full([], LEAST, tl.int64)
        high = tl.full([], MOST + 1, tl.int64)
        at_low = tl.full([], 0, tl.int32) + n
        at_high = tl.full([], 0, tl.int32)
        if sure >= K:  # maxima were counted, and k scores are above the bin: select from those
            in_bin = sure
            sure = at_high
            list_at = at_high
            candidates = in_bin
        elif in_bin > CAPACITY:
            key_low = tl.load(
                ranges + (r * programs + e) * 2 + RANGE_LOW,
                mask=e < programs,
                other=MOST,
                cache_modifier=".cg",
            )
            key_high = tl.load(
                ranges + (r * programs + e) * 2 + RANGE_HIGH,
                mask=e < programs,
                other=LEAST,
                cache_modifier=".cg",
            )
            low = tl.min(key_low, 0).to(tl.int64)
            high = tl.max(key_high, 0).to(tl.int64) + 1
            at_low = sure + in_bin
            at_high = sure
        # Equal scores need no search: the list has the first of them, which are selected.
        if (in_bin > CAPACITY) & (high - low > 1):
            sure, in_bin, passes = search(
                x_at=x_at,
                n=n,
                low=low,
                high=high,
                at_low=at_low,
                at_high=at_high,
                out=(indices, values),
                lists=(list_index, list_score),
                K=K,
                CAPACITY=CAPACITY,
                TILE=TILE,
            )
            list_at = tl.full([], BIN_LIST * CAPACITY, tl.int32)
            path = tl.full([], _RADIX, tl.int32)
            candidates = sure + in_bin
            tl.debug_barrier()
        in_bin = tl.minimum(in_bin, CAPACITY)
        need = K - sure
        if (in_bin <= SMALL) & (path == _GVR) & (list_at == BIN_LIST * CAPACITY):
            ok = tl.arange(0, SMALL) < in_bin
            x = tl.where(ok, first_x, float("-inf"))
            pick(
                x,
                first_i,
                ok,
                in_bin,
                need,
                indices=indices + sure,
                values=values + sure,
                NORMAL=False,
            )
        else:
            pick_list(
                list_index=list_index + list_at,
                list_score=list_score + list_at,
                count=in_bin,
                need=need,
                indices=indices + sure,
                values=values + sure,
                SIZE=CAPACITY,
            )
        store_stats(stats, path, passes, candidates)
