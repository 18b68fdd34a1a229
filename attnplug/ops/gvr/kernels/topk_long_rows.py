"""The kernels of `topk` that give a long row several programs:

    verify   guesses a range of scores from the hint and counts the row's scores in its bins
    collect  finds the bin that holds the k-th score; what lies above it is sure and goes to the
             output, what lies in it goes to a list

and `refine` (_topk_refine.py), one program a row, selects the rest from the list.

A program of `collect` knows its places in the output and the list from what the programs of
`verify` counted in the parts before its own, so picks and lists stand in the same order in every
run. Where only maxima were counted it looks back at what the programs before it have found;
programs start in the order of their number (CUB's decoupled look-back relies on the same): nobody
waits for one that cannot start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.gvr.kernels.topk_select import (
    LEAST,
    LOW,
    MOST,
    READY,
    add_three,
    clean,
    key_of,
    key_range,
    length_of,
    write,
)

_HUGE = tl.constexpr(1e30)  # a mask in disguise: no part of a guess


@triton.jit
def _bin(x, low, scale, BINS: tl.constexpr):
    """Bin of a clean score: 0 below the range, BINS - 1 above it. Monotone in x, whatever the
    range, which is all that exactness asks."""
    b = (x - low) * scale
    return tl.minimum(tl.maximum(b, -1.0), BINS - 2.0).to(tl.int32) + 1


# ---- guess and verify ---------------------------------------------------------------------------


@triton.jit
def _merge_four(n1, s1, l1, m1, n2, s2, l2, m2):
    return n1 + n2, s1 + s2, tl.minimum(l1, l2), tl.maximum(m1, m2)


@triton.jit
def _outline(v, ok):
    """Number, mean, least and largest of the scores that are ok."""
    count, total, least, most = tl.reduce(
        (
            ok.to(tl.float32),
            tl.where(ok, v, 0.0),
            tl.where(ok, v, float("inf")),
            tl.where(ok, v, float("-inf")),
        ),
        0,
        _merge_four,
    )
    return count, total / tl.maximum(count, 1.0), least, most


@triton.jit
def _inner(v, ok):
    """`_outline` without scores so far above the rest (an attention sink) that they alone would
    set the width of the bins."""
    _, mean, least, _ = _outline(v, ok)
    return _outline(v, ok & (v <= mean + 64 * (mean - least)))


@triton.jit
def _guess(x_at, hint_at, n, M, K, BINS: tl.constexpr, SAMPLE: tl.constexpr):
    """low and scale of bins in which to look for the row's k-th score, from the scores at the hint
    and from a sample of the row. Whatever comes out, the answer is exact; it may take longer."""
    e = 2 * tl.arange(0, SAMPLE).to(tl.int64) + 1
    j = tl.zeros([SAMPLE], tl.int32)
    if hint_at is not None:
        j = tl.load(hint_at + e * M // (2 * SAMPLE))
    s = clean(tl.load(x_at + e * n // (2 * SAMPLE)))
    usable = tl.abs(s) < _HUGE
    _, mean, low, top = _inner(s, usable)
    raised = mean + 0.4 * (top - mean)
    lowest = mean
    high = top + 0.5 * (top - mean)  # the k-th may lie above all of the sample
    if hint_at is not None:
        named = (j >= 0) & (j < n)
        v = clean(tl.load(x_at + j, mask=named, other=float("-inf")))
        hits, middle, least, most = _inner(v, named & (tl.abs(v) < _HUGE))
        highest = tl.maximum(tl.minimum(most, middle + 8 * (middle - least)), top)
        lowest = tl.where(hits >= 8, least - 0.15 * (most - least), lowest)
        # Not below the row's own: nothing says that the hint has seen the best.
        high = tl.where(hits >= 8, tl.maximum(highest, high), high)
    # The highest of these that surely has k scores above it. The sample says so; the hint cannot:
    # it may hold few distinct scores, or the best alone.
    above_raised, above_mean, above_lowest = tl.reduce(
        (
            (usable & (s >= raised)).to(tl.float32),
            (usable & (s >= mean)).to(tl.float32),
            (usable & (s >= lowest)).to(tl.float32),
        ),
        0,
        add_three,
    )
    share = K / n * SAMPLE
    low = tl.where(above_mean > 3 * share + 4, mean, low)
    low = tl.where(above_raised > 3 * share + 4, tl.maximum(raised, low), low)
    low = tl.where(above_lowest > 2 * share, tl.maximum(lowest, low), low)
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    width = tl.where(high > low, tl.minimum(high - low, 1e32), 0.0)
    return low, (BINS - 2) / tl.maximum(width, 1e-30)


@triton.jit
def _grouped(n, K, GROUP):
    """Whether the row has enough groups: the k-th of 2k group maxima still says something."""
    return n >= 2 * GROUP * K


@triton.jit
def _part(n, c, P, TILE: tl.constexpr):
    """Where part c of P of a row begins and ends; parts are whole tiles."""
    first = c * (tl.cdiv(tl.cdiv(n, TILE), P) * TILE)
    return first, tl.minimum(first + tl.cdiv(tl.cdiv(n, TILE), P) * TILE, n)


@triton.jit
def _count(x, low, scale, BINS: tl.constexpr):
    b = _bin(x, low, scale, BINS)
    return tl.histogram(b, BINS, mask=b > 0)  # bin 0 has the most, and nobody asks for its count


@triton.jit
def _count_maxima(
    x, maxima, s, n, low, scale, BINS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr
):
    GROUPS: tl.constexpr = TILE // GROUP
    top = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
    g = s // GROUP + tl.arange(0, GROUPS)
    tl.store(maxima + g, top, mask=g < tl.cdiv(n, GROUP))
    return _count(top, low, scale, BINS)


@triton.jit
def verify(
    scores, hint, lengths, edges, counts, words, maxima, N, M, programs, groups_r, x_r, hint_r,
    P, K, BINS: tl.constexpr, SAMPLE: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, LENGTH_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c of P of row r: counts of its part of the row in each bin; with GROUP > 1 it counts
    (and keeps) only the maximum of every GROUP neighbours."""
    c = tl.program_id(0) % P
    r = (tl.program_id(0) // P).to(tl.int64)
    if PDL:  # the wait first: what starts early may count on the scores being there
        gdc_wait()
        gdc_launch_dependents()
    each = tl.cdiv(programs, P)
    w = tl.arange(0, WORDS)
    mine = (w < each) & (c * each + w < programs)
    tl.store(words + r * programs + c * each + w, tl.zeros([WORDS], tl.int64), mask=mine)
    n = length_of(lengths, r, N, LENGTH_STEP)
    if n > K:
        x_at = scores + r * x_r
        first, last = _part(n, c, P, TILE)
        lane = tl.arange(0, TILE)
        i = first + lane
        x = tl.load(x_at + i, mask=i < last, other=float("-inf"))
        hint_at = None
        if hint is not None:
            hint_at = hint + r * hint_r
        low, scale = _guess(x_at, hint_at, n, M, K, BINS, SAMPLE)
        if c == 0:
            tl.store(edges + r * 2, low)
            tl.store(edges + r * 2 + 1, scale)
        count = tl.zeros([BINS], tl.int32)
        for s in range(first, last, TILE):
            i = s + TILE + lane  # the next tile is under way while this one is counted
            y = tl.load(x_at + i, mask=i < last, other=float("-inf"))
            x = clean(x)
            if GROUP > 1:
                if _grouped(n, K, GROUP):
                    count += _count_maxima(
                        x, maxima + r * groups_r, s, n, low, scale, BINS, TILE, GROUP
                    )
                else:
                    count += _count(x, low, scale, BINS)
            else:
                count += _count(x, low, scale, BINS)
            x = y
        # int16 where a part fits it; of maxima, saturated counts are still above any k.
        if counts.dtype.element_ty == tl.int16:
            count = tl.minimum(count, 32767)
        at = counts + (r * P + c) * BINS + tl.arange(0, BINS)
        tl.store(at, count.to(counts.dtype.element_ty))


# ---- collect ------------------------------------------------------------------------------------


@triton.jit
def _flags(x, inside, j, low, scale, BINS: tl.constexpr):
    """1 for a score above bin j, 1 << 16 for one in it."""
    b = _bin(x, low, scale, BINS)
    return tl.where(inside, (b > j).to(tl.int32) + ((b == j).to(tl.int32) << 16), 0)


@triton.jit
def _spread(x, flags, low, high):
    """Least and largest key of the scores in the bin, with those seen before."""
    least, most = key_range(key_of(x), flags > 0xFFFF)
    return tl.minimum(low, least), tl.maximum(high, most)


@triton.jit
def _look_back(words, c, total, SLOTS: tl.constexpr):
    """Publish this program's (sure, in the bin) and return the sums of the programs before it."""
    sure = (total & 0xFFFFFFFF).to(tl.int64)
    tl.atomic_xchg(words + c, (sure << 31) + (total >> 32) + READY, sem="relaxed")
    q = tl.arange(0, SLOTS)
    w = tl.load(words + q, mask=q < c, other=READY, volatile=True)
    while tl.min(w, 0) == 0:
        w = tl.load(words + q, mask=q < c, other=READY, volatile=True)
    before = tl.sum(w & (READY - 1), 0)
    return (before >> 31).to(tl.int32), (before & LOW).to(tl.int32)


@triton.jit
def _wide(flags):
    """Total of the flags as sure + (in the bin << 32)."""
    total = tl.sum(flags, 0)
    return (total & 0xFFFF).to(tl.int64) + ((total >> 16).to(tl.int64) << 32)


@triton.jit
def _find_bin(counts, r, c, K, BINS: tl.constexpr, P, P_PAD: tl.constexpr):
    """The bin that holds the k-th counted score, and how many scores are in it and above it: of all
    parts in the lower half of an int64, of those before part c in the upper. Bin 0 counts none."""
    p = tl.arange(0, P_PAD)
    t = tl.arange(0, BINS)
    h = tl.load(
        counts + (r * P + p[:, None]) * BINS + t[None, :], mask=p[:, None] < P, other=0,
        cache_modifier=".cg",
    ).to(tl.int64)  # fmt: skip
    both = tl.sum(h + (tl.where(p[:, None] < c, h, 0) << 32), 0)
    h = (both & 0x7FFFFFFF).to(tl.int32)
    reach = tl.cumsum(h, 0, reverse=True)  # in bin t and above
    counted = t > 0
    enough = counted & (reach >= K)
    last = enough & (reach - h < K)  # bin j
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
def _gather(x_at, named, s, hits, n, GROUP: tl.constexpr, BATCH: tl.constexpr):
    """The scores of BATCH of the named groups, in ascending order of their index."""
    e = s + tl.arange(0, BATCH)
    g = tl.load(named + e, mask=e < hits, other=0)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (e[:, None] < hits) & (i < n)
    x = tl.load(x_at + i, mask=inside, other=float("-inf"))
    SIZE: tl.constexpr = BATCH * GROUP
    return tl.reshape(clean(x), [SIZE]), tl.reshape(i, [SIZE]), tl.reshape(inside, [SIZE])


@triton.jit
def _collect_groups(
    x_at, n, c, words, ranges, maxima, groups, j, low, scale, out_i, out_x, list_i, list_x,
    K, BINS: tl.constexpr, HERE: tl.constexpr, GROUP: tl.constexpr,
    BATCH: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Read the maxima of HERE groups, and of the row only the groups whose maximum qualifies."""
    g = c * HERE + tl.arange(0, HERE)
    inside = g < tl.cdiv(n, GROUP)
    top = tl.load(maxima + g, mask=inside, other=float("-inf"), cache_modifier=".cg")
    hit = (inside & (_bin(top, low, scale, BINS) >= j)).to(tl.int32)
    hits = tl.sum(hit, 0)
    named = groups + c * HERE
    tl.store(named + tl.cumsum(hit, 0) - 1, g, mask=hit > 0)
    tl.debug_barrier()  # below, other warps read what this one stored
    total = tl.full([], 0, tl.int64)
    key_low = tl.full([], MOST, tl.int32)
    key_high = tl.full([], LEAST, tl.int32)
    for s in range(0, hits, BATCH):
        x, i, ok = _gather(x_at, named, s, hits, n, GROUP, BATCH)
        f = _flags(x, ok, j, low, scale, BINS)
        total += _wide(f)
        key_low, key_high = _spread(x, f, key_low, key_high)
    tl.store(ranges, key_low)
    tl.store(ranges + 1, key_high)
    sure, inbin = _look_back(words, c, total, SLOTS)
    for s in range(0, hits, BATCH):
        x, i, ok = _gather(x_at, named, s, hits, n, GROUP, BATCH)
        f = _flags(x, ok, j, low, scale, BINS)
        sure, inbin = write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, GROUP)


@triton.jit
def _collect_part(
    x, x_at, first, last, n, c, words, ranges, j, held, above, low, scale,
    out_i, out_x, list_i, list_x,
    K, BINS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Part first..last of the row, of which x is the first tile."""
    lane = tl.arange(0, TILE)
    all_sure = (above & 0x7FFFFFFF).to(tl.int32)
    sure = (above >> 32).to(tl.int32)
    # Bin 0, where the k-th is below the range, has what is in no other.
    all_held = tl.where(j > 0, (held & 0x7FFFFFFF).to(tl.int32), n - all_sure)
    inbin = tl.where(j > 0, (held >> 32).to(tl.int32), tl.minimum(first, n) - sure)
    if c == 0:
        tl.store(words, (all_sure.to(tl.int64) << 31) + all_held + READY)
    key_low = tl.full([], MOST, tl.int32)
    key_high = tl.full([], LEAST, tl.int32)
    for s in range(first, last, TILE):
        i = s + TILE + lane
        y = tl.load(x_at + i, mask=i < last, other=float("-inf"))
        x = clean(x)
        i = s + lane
        f = _flags(x, i < last, j, low, scale, BINS)
        if all_held > CAPACITY:  # the list overflows: refine wants its range
            key_low, key_high = _spread(x, f, key_low, key_high)
        sure, inbin = write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, GROUP)
        x = y
    if all_held > CAPACITY:
        tl.store(ranges, key_low)
        tl.store(ranges + 1, key_high)


@triton.jit
def collect(
    scores, lengths, edges, counts, words, ranges, maxima, groups, list_i, list_x, out_i, out_x,
    N, groups_r, x_r,
    P, K, BINS: tl.constexpr, verifiers,
    VERIFIERS_PAD: tl.constexpr, VERIFY_TILE: tl.constexpr, TILE: tl.constexpr,
    HERE: tl.constexpr, GROUP: tl.constexpr,
    BATCH: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program c of P of row r: the part that program c of `verify` counted, or HERE groups."""
    c = tl.program_id(0) % P
    r = (tl.program_id(0) // P).to(tl.int64)
    n = length_of(lengths, r, N, LENGTH_STEP)
    x_at = scores + r * x_r
    first, last = _part(n, c, verifiers, VERIFY_TILE)
    # The scores are an input: no need to wait for the counts.
    i = first + tl.arange(0, TILE)
    x = tl.load(x_at + i, mask=i < last, other=float("-inf"), cache_modifier=".cg")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n > K:
        low = tl.load(edges + r * 2, cache_modifier=".cg")
        scale = tl.load(edges + r * 2 + 1, cache_modifier=".cg")
        j, held, above = _find_bin(counts, r, c, K, BINS, verifiers, VERIFIERS_PAD)
        words += r * P
        ranges += (r * P + c) * 2
        list_i += r * 2 * CAPACITY
        list_x += r * 2 * CAPACITY
        out_i += r * K
        out_x += r * K
        if GROUP > 1:
            if _grouped(n, K, GROUP):
                _collect_groups(
                    x_at, n, c, words, ranges, maxima + r * groups_r, groups + r * groups_r,
                    j, low, scale, out_i, out_x, list_i, list_x,
                    K, BINS, HERE, GROUP, BATCH, CAPACITY, SLOTS,
                )  # fmt: skip
            else:
                _collect_part(
                    x, x_at, first, last, n, c, words, ranges, j, held, above, low, scale,
                    out_i, out_x, list_i, list_x, K, BINS, TILE, GROUP, CAPACITY,
                )  # fmt: skip
        else:
            _collect_part(
                x, x_at, first, last, n, c, words, ranges, j, held, above, low, scale,
                out_i, out_x, list_i, list_x, K, BINS, TILE, GROUP, CAPACITY,
            )  # fmt: skip
