"""The first kernel of a long row of `topk`, several programs a row: it guesses a range of scores
from the hint and counts the row's scores in the bins of that range. `collect` comes next.

Names as in `topk_select`; e is an element of a hint or a sample.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.topk_select import (
    EDGE_LOW,
    EDGE_SCALE,
    add_three,
    clean,
    length_of,
)

_HUGE = tl.constexpr(1e30)  # larger scores are masks in disguise: the guess ignores them


# ---- bins, groups and parts, on which verify and collect must agree -----------------------------


@triton.jit
def bin_of(x, low, scale, BINS: tl.constexpr):
    """Bin of a clean score: 0 below the range, BINS - 1 above it. Monotone in x whatever the range,
    and exactness needs no more."""
    place = (x - low) * scale
    return tl.minimum(tl.maximum(place, -1.0), BINS - 2.0).to(tl.int32) + 1


@triton.jit
def counts_maxima(n, K, GROUP):
    """Whether the row has enough groups: the k-th of 2k group maxima still says something."""
    return n >= 2 * GROUP * K


@triton.jit
def part_of_row(n, part, parts, TILE: tl.constexpr):
    """(first score, end) of one of the parts of a row; parts are whole tiles."""
    first = part * (tl.cdiv(tl.cdiv(n, TILE), parts) * TILE)
    return first, tl.minimum(first + tl.cdiv(tl.cdiv(n, TILE), parts) * TILE, n)


# ---- guess --------------------------------------------------------------------------------------


@triton.jit
def _merge_outlines(count0, sum0, least0, most0, count1, sum1, least1, most1):
    return count0 + count1, sum0 + sum1, tl.minimum(least0, least1), tl.maximum(most0, most1)


@triton.jit
def _outline(x, ok):
    """Number, mean, least and largest of the scores that are ok."""
    count, total, least, most = tl.reduce(
        (
            ok.to(tl.float32),
            tl.where(ok, x, 0.0),
            tl.where(ok, x, float("inf")),
            tl.where(ok, x, float("-inf")),
        ),
        0,
        _merge_outlines,
    )
    return count, total / tl.maximum(count, 1.0), least, most


@triton.jit
def _outline_without_outliers(x, ok):
    """`_outline` without scores far above the rest (attention sinks), which alone would set the
    width of the bins."""
    _, mean, least, _ = _outline(x, ok)
    return _outline(x, ok & (x <= mean + 64 * (mean - least)))


@triton.jit
def _guess(x_at, hint_at, n, hints, K, BINS: tl.constexpr, SAMPLE: tl.constexpr):
    """low and scale of the bins in which to look for the row's k-th score, from the scores at
    SAMPLE of the `hints` and from a sample of the row. A wrong guess costs time, never
    exactness."""
    e = 2 * tl.arange(0, SAMPLE).to(tl.int64) + 1
    i = tl.zeros([SAMPLE], tl.int32)
    if hint_at is not None:
        i = tl.load(hint_at + e * hints // (2 * SAMPLE))
    sample = clean(tl.load(x_at + e * n // (2 * SAMPLE)))
    usable = tl.abs(sample) < _HUGE
    _, mean, low, top = _outline_without_outliers(sample, usable)
    raised = mean + 0.4 * (top - mean)
    lowest = mean
    high = top + 0.5 * (top - mean)  # the k-th may lie above all of the sample
    if hint_at is not None:
        in_row = (i >= 0) & (i < n)
        hinted = clean(tl.load(x_at + i, mask=in_row, other=float("-inf")))
        hits, middle, least, most = _outline_without_outliers(
            hinted, in_row & (tl.abs(hinted) < _HUGE)
        )
        highest = tl.maximum(tl.minimum(most, middle + 8 * (middle - least)), top)
        lowest = tl.where(hits >= 8, least - 0.15 * (most - least), lowest)
        # Not below the sample's: the hint need not hold the row's best scores.
        high = tl.where(hits >= 8, tl.maximum(highest, high), high)
    # low becomes the highest of these three that surely has k scores above it. The sample tells;
    # the hint cannot, as it may hold few distinct scores, or only the best.
    above_raised, above_mean, above_lowest = tl.reduce(
        (
            (usable & (sample >= raised)).to(tl.float32),
            (usable & (sample >= mean)).to(tl.float32),
            (usable & (sample >= lowest)).to(tl.float32),
        ),
        0,
        add_three,
    )
    expected = K / n * SAMPLE  # selected scores in the sample
    low = tl.where(above_mean > 3 * expected + 4, mean, low)
    low = tl.where(above_raised > 3 * expected + 4, tl.maximum(raised, low), low)
    low = tl.where(above_lowest > 2 * expected, tl.maximum(lowest, low), low)
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    width = tl.where(high > low, tl.minimum(high - low, 1e32), 0.0)
    return low, (BINS - 2) / tl.maximum(width, 1e-30)


# ---- verify -------------------------------------------------------------------------------------


@triton.jit
def _count_bins(x, low, scale, BINS: tl.constexpr):
    """Scores in each bin. Bin 0 is left out: it is the fullest, and its count is not needed."""
    bins = bin_of(x, low, scale, BINS)
    return tl.histogram(bins, BINS, mask=bins > 0)


@triton.jit
def _count_maxima(
    x, maxima, first, n, low, scale, BINS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """Count and store only the maximum of every GROUP neighbours of the tile from `first` on."""
    GROUPS: tl.constexpr = TILE // GROUP
    largest = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
    group = first // GROUP + tl.arange(0, GROUPS)
    tl.store(maxima + group, largest, mask=group < tl.cdiv(n, GROUP))
    return _count_bins(largest, low, scale, BINS)


@triton.jit
def verify(
    scores,
    hint,
    lengths,
    edges,
    counts,
    words,
    maxima,
    N,
    hints,
    programs,
    groups_of_row,
    scores_stride,
    hint_stride,
    parts,
    K,
    BINS: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count one part of row r in the bins; with GROUP > 1, only the maximum of every GROUP
    neighbours, which it stores too. And zero this part's share of the words of `collect`, which has
    so many `programs` a row."""
    part = tl.program_id(0) % parts
    r = (tl.program_id(0) // parts).to(tl.int64)
    if PDL:  # the wait first: a kernel started early by this one may rely on the scores
        gdc_wait()
        gdc_launch_dependents()
    words_of_part = tl.cdiv(programs, parts)
    e = tl.arange(0, WORDS)
    in_part = (e < words_of_part) & (part * words_of_part + e < programs)
    word_at = words + r * programs + part * words_of_part + e
    tl.store(word_at, tl.zeros([WORDS], tl.int64), mask=in_part)
    n = length_of(lengths, r, N, LENGTH_STEP)
    if n > K:
        x_at = scores + r * scores_stride
        first, last = part_of_row(n, part, parts, TILE)
        lane = tl.arange(0, TILE)
        i = first + lane
        x = tl.load(x_at + i, mask=i < last, other=float("-inf"))
        hint_at = None
        if hint is not None:
            hint_at = hint + r * hint_stride
        low, scale = _guess(x_at, hint_at, n, hints, K, BINS, SAMPLE)
        if part == 0:
            tl.store(edges + r * 2 + EDGE_LOW, low)
            tl.store(edges + r * 2 + EDGE_SCALE, scale)
        count = tl.zeros([BINS], tl.int32)
        for tile in range(first, last, TILE):
            i = tile + TILE + lane  # the next tile is under way while this one is counted
            next_x = tl.load(x_at + i, mask=i < last, other=float("-inf"))
            x = clean(x)
            if GROUP > 1:
                if counts_maxima(n, K, GROUP):
                    count += _count_maxima(
                        x,
                        maxima + r * groups_of_row,
                        first=tile,
                        n=n,
                        low=low,
                        scale=scale,
                        BINS=BINS,
                        TILE=TILE,
                        GROUP=GROUP,
                    )
                else:
                    count += _count_bins(x, low, scale, BINS)
            else:
                count += _count_bins(x, low, scale, BINS)
            x = next_x
        # int16 where a part fits it; of maxima, saturated counts are still above any k.
        if counts.dtype.element_ty == tl.int16:
            count = tl.minimum(count, 32767)
        count_at = counts + (r * parts + part) * BINS + tl.arange(0, BINS)
        tl.store(count_at, count.to(counts.dtype.element_ty))
