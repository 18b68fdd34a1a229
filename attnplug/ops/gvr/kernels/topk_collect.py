"""The second kernel of a long row of `topk`, several programs a row: it finds the bin that holds
the k-th score. Scores above that bin are sure and go to the output; scores in it go to a list, from
which `refine` selects the rest, one program a row.

A program knows its places in the output and the list from what the programs of `verify` counted in
the parts before its own, so results and lists have the same order in every run. If only maxima were
counted, it looks back at the words of the programs before it. Programs start in the order of their
number, as CUB's decoupled look-back assumes too, so no program waits for one that cannot start.

Names as in `topk_select`; `kth_bin` is the bin of the k-th score.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.topk_select import (
    COUNT_MASK,
    EDGE_LOW,
    EDGE_SCALE,
    IN_BIN_SHIFT,
    LEAST,
    MOST,
    RANGE_HIGH,
    RANGE_LOW,
    READY,
    SURE_MASK,
    SURE_SHIFT,
    add_three,
    clean,
    key_of,
    key_range,
    length_of,
    write,
)
from attnplug.ops.gvr.kernels.topk_verify import bin_of, counts_maxima, part_of_row

# Counts of two kinds in one int64, 32 bits each.
_LOW_HALF = tl.constexpr(0x7FFFFFFF)  # no count is negative


@triton.jit
def _flags(x, inside, bins, BINS: tl.constexpr):
    """SURE for a score above the k-th's bin, IN_BIN for one in it, else 0; `bins` is (kth_bin, low,
    scale)."""
    kth_bin, low, scale = bins
    own = bin_of(x, low, scale, BINS)
    flags = (own > kth_bin).to(tl.int32) + ((own == kth_bin).to(tl.int32) << IN_BIN_SHIFT)
    return tl.where(inside, flags, 0)


@triton.jit
def _widen(x, flags, key_low, key_high):
    """The least and largest key of scores in the bin, with those of the scores x."""
    least, most = key_range(key_of(x), flags > SURE_MASK)
    return tl.minimum(key_low, least), tl.maximum(key_high, most)


@triton.jit
def _store_range(ranges, key_low, key_high):
    tl.store(ranges + RANGE_LOW, key_low)
    tl.store(ranges + RANGE_HIGH, key_high)


@triton.jit
def _look_back(words, program, total, SLOTS: tl.constexpr):
    """Publish this program's (sure, in the bin) and return the sums of the programs before it."""
    sure = (total & 0xFFFFFFFF).to(tl.int64)
    tl.atomic_xchg(words + program, (sure << SURE_SHIFT) + (total >> 32) + READY, sem="relaxed")
    e = tl.arange(0, SLOTS)
    word = tl.load(words + e, mask=e < program, other=READY, volatile=True)
    while tl.min(word, 0) == 0:
        word = tl.load(words + e, mask=e < program, other=READY, volatile=True)
    before = tl.sum(word & (READY - 1), 0)
    return (before >> SURE_SHIFT).to(tl.int32), (before & COUNT_MASK).to(tl.int32)


@triton.jit
def _sum_flags(flags):
    """Sum of the flags as sure + (in the bin << 32)."""
    total = tl.sum(flags, 0)
    return (total & SURE_MASK).to(tl.int64) + ((total >> IN_BIN_SHIFT).to(tl.int64) << 32)


@triton.jit
def _find_bin(counts, r, part, K, BINS: tl.constexpr, parts, PARTS_PAD: tl.constexpr):
    """The bin that holds the k-th counted score, and how many scores are in it and above it. Each
    number has the count of all parts in the lower half of an int64, of the parts before `part` in
    the upper. Bin 0 was not counted."""
    p = tl.arange(0, PARTS_PAD)
    bins = tl.arange(0, BINS)
    count = tl.load(
        counts + (r * parts + p[:, None]) * BINS + bins[None, :],
        mask=p[:, None] < parts,
        other=0,
        cache_modifier=".cg",
    ).to(tl.int64)
    both = tl.sum(count + (tl.where(p[:, None] < part, count, 0) << 32), 0)
    count = (both & _LOW_HALF).to(tl.int32)
    reach = tl.cumsum(count, 0, reverse=True)  # scores in this bin and above
    counted = bins > 0
    enough = counted & (reach >= K)
    last = enough & (reach - count < K)  # the k-th's
    return tl.reduce(
        (
            enough.to(tl.int32),
            tl.where(last, both, 0),
            tl.where(counted & (reach < K), both, 0),
        ),
        0,
        add_three,
    )


@triton.jit
def _load_groups(x_at, chosen, first, hits, n, GROUP: tl.constexpr, BATCH: tl.constexpr):
    """(scores, indices, which are inside the row) of BATCH of the `hits` chosen groups from the
    `first` on, in ascending order of index."""
    e = first + tl.arange(0, BATCH)
    group = tl.load(chosen + e, mask=e < hits, other=0)
    i = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (e[:, None] < hits) & (i < n)
    x = tl.load(x_at + i, mask=inside, other=float("-inf"))
    SIZE: tl.constexpr = BATCH * GROUP
    return tl.reshape(clean(x), [SIZE]), tl.reshape(i, [SIZE]), tl.reshape(inside, [SIZE])


@triton.jit
def _collect_groups(
    x_at,
    n,
    program,
    words,
    ranges,
    maxima,
    groups,
    bins,
    out,
    lists,
    K,
    BINS: tl.constexpr,
    HERE: tl.constexpr,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    CAPACITY: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Read the maxima of HERE groups, and of the row only the groups whose maximum qualifies."""
    kth_bin, low, scale = bins
    group = program * HERE + tl.arange(0, HERE)
    inside = group < tl.cdiv(n, GROUP)
    largest = tl.load(maxima + group, mask=inside, other=float("-inf"), cache_modifier=".cg")
    hit = (inside & (bin_of(largest, low, scale, BINS) >= kth_bin)).to(tl.int32)
    hits = tl.sum(hit, 0)
    chosen = groups + program * HERE
    tl.store(chosen + tl.cumsum(hit, 0) - 1, group, mask=hit > 0)
    tl.debug_barrier()  # below, other warps read what this one stored
    total = tl.full([], 0, tl.int64)
    key_low = tl.full([], MOST, tl.int32)
    key_high = tl.full([], LEAST, tl.int32)
    for first in range(0, hits, BATCH):
        x, i, ok = _load_groups(x_at, chosen, first, hits, n, GROUP, BATCH)
        flags = _flags(x, ok, bins, BINS)
        total += _sum_flags(flags)
        key_low, key_high = _widen(x, flags, key_low, key_high)
    _store_range(ranges, key_low, key_high)
    sure, in_bin = _look_back(words, program, total, SLOTS)
    for first in range(0, hits, BATCH):
        x, i, ok = _load_groups(x_at, chosen, first, hits, n, GROUP, BATCH)
        flags = _flags(x, ok, bins, BINS)
        sure, in_bin = write(x, i, flags, sure, in_bin, out, lists, K, CAPACITY, GROUP)


@triton.jit
def _collect_part(
    x,
    x_at,
    span,
    program,
    words,
    ranges,
    bins,
    counted,
    out,
    lists,
    K,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """The part of the row in `span` = (first score, end, the row's length), of which x is the first
    tile; `counted` are the last two results of `_find_bin`."""
    first, last, n = span
    kth_bin, _, _ = bins
    counts_in_bin, counts_above = counted
    lane = tl.arange(0, TILE)
    all_sure = (counts_above & _LOW_HALF).to(tl.int32)
    sure = (counts_above >> 32).to(tl.int32)
    # Bin 0, which holds the k-th if that is below the range, has the scores of no other bin.
    all_in_bin = tl.where(kth_bin > 0, (counts_in_bin & _LOW_HALF).to(tl.int32), n - all_sure)
    in_bin = tl.where(kth_bin > 0, (counts_in_bin >> 32).to(tl.int32), tl.minimum(first, n) - sure)
    if program == 0:
        tl.store(words, (all_sure.to(tl.int64) << SURE_SHIFT) + all_in_bin + READY)
    key_low = tl.full([], MOST, tl.int32)
    key_high = tl.full([], LEAST, tl.int32)
    for tile in range(first, last, TILE):
        i = tile + TILE + lane
        next_x = tl.load(x_at + i, mask=i < last, other=float("-inf"))
        x = clean(x)
        i = tile + lane
        flags = _flags(x, i < last, bins, BINS)
        if all_in_bin > CAPACITY:  # the list overflows: refine searches the range of its keys
            key_low, key_high = _widen(x, flags, key_low, key_high)
        sure, in_bin = write(x, i, flags, sure, in_bin, out, lists, K, CAPACITY, GROUP)
        x = next_x
    if all_in_bin > CAPACITY:
        _store_range(ranges, key_low, key_high)


@triton.jit
def collect(
    scores,
    lengths,
    edges,
    counts,
    words,
    ranges,
    maxima,
    groups,
    list_index,
    list_score,
    indices,
    values,
    N,
    groups_of_row,
    scores_stride,
    programs,
    K,
    BINS: tl.constexpr,
    parts,
    PARTS_PAD: tl.constexpr,
    PART_TILE: tl.constexpr,
    TILE: tl.constexpr,
    HERE: tl.constexpr,
    GROUP: tl.constexpr,
    BATCH: tl.constexpr,
    CAPACITY: tl.constexpr,
    SLOTS: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One of the `programs` of row r: the part that the same program of `verify` counted, in tiles
    of PART_TILE, or HERE groups."""
    program = tl.program_id(0) % programs
    r = (tl.program_id(0) // programs).to(tl.int64)
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * scores_stride
    first, last = part_of_row(n, program, parts, PART_TILE)
    # The scores are an input: this load need not wait for the counts.
    i = first + tl.arange(0, TILE)
    x = tl.load(x_at + i, mask=i < last, other=float("-inf"), cache_modifier=".cg")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n > K:
        low = tl.load(edges + r * 2 + EDGE_LOW, cache_modifier=".cg")
        scale = tl.load(edges + r * 2 + EDGE_SCALE, cache_modifier=".cg")
        kth_bin, counts_in_bin, counts_above = _find_bin(
            counts, r, program, K, BINS, parts=parts, PARTS_PAD=PARTS_PAD
        )
        bins, counted = (kth_bin, low, scale), (counts_in_bin, counts_above)
        words += r * programs
        ranges += (r * programs + program) * 2
        lists = (list_index + r * 2 * CAPACITY, list_score + r * 2 * CAPACITY)
        out = (indices + r * K, values + r * K)
        if GROUP == 1:
            _collect_part(
                x=x,
                x_at=x_at,
                span=(first, last, n),
                program=program,
                words=words,
                ranges=ranges,
                bins=bins,
                counted=counted,
                out=out,
                lists=lists,
                K=K,
                BINS=BINS,
                TILE=TILE,
                GROUP=GROUP,
                CAPACITY=CAPACITY,
            )
        elif counts_maxima(n, K, GROUP):
            _collect_groups(
                x_at=x_at,
                n=n,
                program=program,
                words=words,
                ranges=ranges,
                maxima=maxima + r * groups_of_row,
                groups=groups + r * groups_of_row,
                bins=bins,
                out=out,
                lists=lists,
                K=K,
                BINS=BINS,
                HERE=HERE,
                GROUP=GROUP,
                BATCH=BATCH,
                CAPACITY=CAPACITY,
                SLOTS=SLOTS,
            )
        else:
            _collect_part(
                x=x,
                x_at=x_at,
                span=(first, last, n),
                program=program,
                words=words,
                ranges=ranges,
                bins=bins,
                counted=counted,
                out=out,
                lists=lists,
                K=K,
                BINS=BINS,
                TILE=TILE,
                GROUP=GROUP,
                CAPACITY=CAPACITY,
            )
