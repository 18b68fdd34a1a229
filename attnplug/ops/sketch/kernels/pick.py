"""The Triton kernel of `pick_tokens`."""

from attnplug.ops.common.rows import row_of, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.sketch.kernels.codes import (
    BINS,
    BLOCK,
    EIGHT,
    FINE,
    LOWER,
    MARGIN,
    NOTED,
    OCTAVE,
    RISE,
    begin,
    bin_of,
    edge_of,
    lowest_counted,
    near_block,
    place_of,
)

RECOUNT = tl.constexpr(2048)  # tokens that a program counts at a time where the counts do not do
# What a row's programs share behind their marks: how many times a program has come for tokens to
# count again, how many of these have been counted, and the counts.
SHARED = tl.constexpr(2 + BINS.value)


@triton.jit
def _lowest(reached, wanted):
    """The highest bin that so many tokens reach, of the numbers that reach each bin."""
    return tl.sum((reached >= wanted).to(tl.int32), 0) - 1


@triton.jit
def _reaching(own, visible):
    """How many tokens reach each bin. Bin 0 counts all of them, and so is reached by all."""
    bins = tl.arange(0, BINS)
    reached = tl.cumsum(tl.where(bins == 0, 0, own), 0, reverse=True)
    return tl.where(bins == 0, visible, reached)


@triton.jit
def _counted(reached):
    """How many tokens a scan has counted."""
    return tl.max(tl.where(tl.arange(0, BINS) == 0, 0, reached), 0)


@triton.jit
def next_hint(reached, visible, hinted, k):
    """The bin that a next scan is to count from: the highest that MARGIN k tokens reach. Where
    this scan, which counted from bin `hinted` on (1: all), has too few to know it, LOWER below its
    lowest bin. It goes up by RISE at most where there was a hint."""
    counted = _counted(reached)
    wanted = MARGIN * k
    known = _lowest(reached, wanted)
    known = tl.where(hinted > 1, tl.minimum(known, hinted + RISE), known)
    lowest = _lowest(reached, counted)
    lowest = tl.where(hinted > 1, tl.minimum(lowest, hinted), lowest)
    guess = tl.where(counted > 0, tl.maximum(lowest - LOWER, 0), 0)
    return tl.where(visible <= wanted, 0, tl.where(counted < wanted, guess, known))


@triton.jit
def _counted_again(shares, since, until, centre, shared):
    """The histogram of a row's shares, as the scan counts them without a hint. The row's programs
    that run by now share the work: each comes for RECOUNT tokens until none are left, and waits for
    those that others count. No program waits for one that may not have started."""
    bins = tl.arange(0, BINS)
    turns = tl.cdiv(until - since, RECOUNT).to(tl.int64)
    turn = tl.atomic_add(shared, 1, sem="relaxed")
    while turn < turns:
        n = since + turn.to(tl.int32) * RECOUNT + tl.arange(0, RECOUNT)
        share = tl.load(shares + n, mask=n < until, other=float("-inf"), cache_modifier=".cg")
        own = tl.histogram(tl.where(share > float("-inf"), bin_of(share, centre), 0), BINS)
        tl.atomic_add(shared + 2 + bins, own.to(tl.int64), mask=own > 0, sem="relaxed")
        tl.debug_barrier()  # what all threads have added comes before the next line
        tl.atomic_add(shared + 1, 1, sem="acq_rel")
        turn = tl.atomic_add(shared, 1, sem="relaxed")
    counted = tl.atomic_add(shared + 1, 0, sem="acquire")
    while counted < turns:
        counted = tl.atomic_add(shared + 1, 0, sem="acquire")
    tl.debug_barrier()
    return tl.load(shared + 2 + bins, cache_modifier=".cg").to(tl.int32)


@triton.jit
def levels(share, seen, threshold, centre):
    """1 for shares above the threshold's bin, 65536 for those in it, else 0."""
    least = (threshold - 128).to(tl.float32)
    if (least > -FINE) & (least < FINE):  # there a place is so many steps from the middle
        y = share.to(tl.float32) - centre
        higher = y >= (least + 1) * (1 / OCTAVE)
        level = y >= least * (1 / OCTAVE)
    else:
        y = place_of(share, centre)
        higher = y >= least + 1
        level = (y >= least) & (share > float("-inf"))
    return tl.where(seen & level, tl.where(higher, 1, 65536), 0)


@triton.jit
def before(marks, piece, PIECES: tl.constexpr):
    """What the pieces in front of this one have found, added up. Each leaves a mark, an odd number,
    as soon as it has counted; a GPU starts programs in the order of their numbers, so they run."""
    j = tl.arange(0, PIECES)
    found = tl.load(marks + j, mask=j < piece, other=1, volatile=True)
    while tl.min(found & 1, 0) == 0:
        found = tl.load(marks + j, mask=j < piece, other=1, volatile=True)
    return tl.sum(found - 1, 0)


@triton.jit
def list_tokens(picks, slot, n, taken, ASM: tl.constexpr):
    """Write the tokens `n` that are `taken` to their places in the list."""
    if ASM:  # a store of Triton's would carry all addresses through shared memory first
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.s32 p, $4, 0; mad.wide.s32 at, $2, 4, $1; "
            "@p st.global.b32 [at], $3; mov.b32 $0, 0; }",
            "=r,l,r,r,r",
            [picks.to(tl.int64), slot, n, taken.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(picks + slot, n, mask=taken)


@triton.jit
def _threshold(own, reached, wanted):
    """The highest bin that as many as wanted reach, and how many are above it. Bin 0, which all
    reach, is not above any."""
    both = tl.where(reached >= wanted, 4294967296, own.to(tl.int64))
    found = tl.sum(both, 0)
    return (found >> 32).to(tl.int32) - 1, found.to(tl.int32)


@triton.jit
def threshold_of(total, hinted, shares, shared, place, centre, k, since, until):
    """(visible, wanted, reached, threshold, above, complete): how many candidates there are and how
    many of them are to be picks, how many tokens reach each bin, the highest bin that as many as
    wanted reach, how many are above it, and whether the scan has counted all that can be picks.
    `shares` are the row's; where it has counted too few, as the hint was too high (`hinted`: the
    lowest bin that was counted by it, or 1), the row's programs count them again."""
    bins = tl.arange(0, BINS)
    visible = tl.load(total + place * BINS, cache_modifier=".cg")
    own = tl.load(total + place * BINS + bins, cache_modifier=".cg")
    wanted = tl.minimum(k, visible)
    reached = _reaching(own, visible)
    threshold, above = _threshold(own, reached, wanted)
    complete = threshold > 0
    if (hinted > 1) & (complete == 0):
        own = _counted_again(shares, since, until, centre, shared)
        reached = _reaching(own, visible)
        threshold, above = _threshold(own, reached, wanted)
    return visible, wanted, reached, threshold, above, complete


@triton.jit
def picked_of(visible, wanted, reached, capacity):
    """How many tokens are picks: all that reach the threshold's bin, as far as there is room."""
    return tl.minimum(tl.min(tl.where(reached >= wanted, reached, visible + 1), 0), capacity)


@triton.jit
def upper_edge(wanted, reached, threshold, centre):
    """The share from which on a pick is of the upper half; infinite where none is."""
    upper = _lowest(reached, wanted // 2)
    return tl.where(upper > threshold, edge_of(upper, centre), float("inf"))


@triton.jit
def _list_eights(counted, listed, count, EIGHTS: tl.constexpr):
    """List those of the `count` first eights of which the scan may have counted a token; returns
    how many there are. `counted` has a bit for each, four in a byte."""
    e = tl.arange(0, EIGHTS)
    at = tl.arange(0, EIGHTS // 4)
    byte = tl.load(counted + at, mask=at < count // 4, other=0, cache_modifier=".cg")
    found = (byte.to(tl.int32)[:, None] >> tl.arange(0, 4)[None, :]) & 1
    found = tl.reshape(found, (EIGHTS,))
    tl.store(listed + tl.cumsum(found, 0) - found, e, mask=found != 0)
    tl.debug_barrier()  # a thread reads what others have listed
    return tl.sum(found, 0)


@triton.jit
def _eights(listed, at, count, direct, EACH: tl.constexpr):
    """(index, whether there is one) of eights `at` to `at + EACH` of the list, or of all."""
    e = at + tl.arange(0, EACH)
    index = e
    if direct == 0:
        index = tl.load(listed + e, mask=e < count, other=0, cache_modifier=".cg")
    return index, e < count


@triton.jit
def _shares_of(shares, listed, at, count, direct, TILE: tl.constexpr):
    """(token, share, whether there is one) [TILE] of so many tokens of a piece, in their order."""
    index, there = _eights(listed, at, count, direct, TILE // EIGHT)
    n = index[:, None] * EIGHT + tl.arange(0, EIGHT)[None, :]
    seen = there[:, None] & (n >= 0)
    share = tl.load(shares + n, mask=seen, other=0.0, cache_modifier=".cg")
    return tl.reshape(n, (TILE,)), tl.reshape(share, (TILE,)), tl.reshape(seen, (TILE,))


@triton.jit
def _list_tile(picks, n, both, above, equal, room, ASM: tl.constexpr):
    """List the picks among a tile's tokens `n`, where so many above the threshold's bin and in it
    are in front of them."""
    ahead = tl.cumsum(both, 0) - both
    rank = equal + (ahead >> 16)
    slot = above + (ahead & 65535) + tl.minimum(rank, room)
    list_tokens(picks, slot, n, (both == 1) | ((both > 1) & (rank < room)), ASM)


@triton.jit
def pick(
    scanned,
    notes,
    rows,
    hint,
    picks,
    cut,
    k,
    pieces,
    capacity,
    EIGHTS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    CAPACITY_P: tl.constexpr,
    ASM: tl.constexpr,
    NEW: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The picks of one piece of the candidates of one row's KV head, in the order of the cache;
    their place in the list is where the pieces before this one end. A piece has LEAST to EIGHTS
    times eight tokens. If it has more than TILE, and the scan has counted enough, only those eights
    are read of which it may have counted a token, listed first in `notes.listed`."""
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    length, low = row_span(rows, b, STEPS, NEW)
    since = low + BLOCK
    until = low + near_block(tl.minimum(length, rows.S), low) * BLOCK
    eights = (until - since) // EIGHT
    per = tl.maximum(tl.cdiv(eights, pieces * 4) * 4, LEAST)  # whole bytes of `counted`
    first = piece * per
    count = tl.minimum(per, eights - first)
    if (piece > 0) & (count <= 0):
        return
    EACH: tl.constexpr = TILE // EIGHT
    own = scanned.shares + place * rows.S + since + first * EIGHT
    hinted = 1
    if hint is not None:  # of the step before
        home = row_of(b, STEPS) * tl.num_programs(1) + h
        hinted = lowest_counted(tl.load(hint + home, cache_modifier=".cg"))
    begin(PDL)
    direct = per <= EACH
    listed = notes.listed
    if notes.counted is None:
        direct = per > 0
        listed = picks  # not read
    n, share, seen = _shares_of(own, listed, 0, tl.where(direct, count, 0), 1, TILE)
    centre = tl.load(scanned.middle + place, cache_modifier=".cg")
    marks = notes.marks + place * (pieces + SHARED)
    shares_at = scanned.shares + place * rows.S
    visible, wanted, reached, threshold, above, complete = threshold_of(
        scanned.total, hinted, shares_at, marks + pieces, place, centre, k, since, until
    )
    if notes.counted is not None:
        if direct == 0:
            listed += place * (rows.S // EIGHT) + first
            direct = complete == 0
            if complete:
                bytes_at = notes.counted + place * (rows.S // NOTED) + first // (NOTED // EIGHT)
                count = _list_eights(bytes_at, listed, count, EIGHTS)
            n, share, seen = _shares_of(own, listed, 0, count, direct, TILE)

    both = levels(share, seen, threshold, centre)
    ahead = tl.sum(both, 0)
    own_both = ahead
    for at in tl.range(EACH, count, EACH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        _, more, there = _shares_of(own, listed, at, count, direct, TILE)
        own_both += tl.sum(levels(more, there, threshold, centre), 0)
    mark = (own_both & 65535).to(tl.int64) * 4294967296 + (own_both >> 16).to(tl.int64) * 2 + 1
    tl.atomic_xchg(marks + piece, mark, sem="relaxed")
    in_front = before(marks, piece, PIECES)

    picks += place * capacity
    room = capacity - above  # for the tokens of the threshold's bin, in the order of the cache
    n_above, n_equal = (in_front >> 32).to(tl.int32), ((in_front & 4294967295) >> 1).to(tl.int32)
    token = since + first * EIGHT
    _list_tile(picks, token + n, both, n_above, n_equal, room, ASM)
    for at in tl.range(EACH, count, EACH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        n, more, there = _shares_of(own, listed, at, count, direct, TILE)
        n_above += ahead & 65535
        n_equal += ahead >> 16
        both = levels(more, there, threshold, centre)
        ahead = tl.sum(both, 0)
        _list_tile(picks, token + n, both, n_above, n_equal, room, ASM)
    if piece == 0:
        n_picks = picked_of(visible, wanted, reached, capacity)
        tl.store(cut + place * 3, upper_edge(wanted, reached, threshold, centre))
        tl.store(cut + place * 3 + 1, (visible - n_picks).to(tl.float32))
        coming = next_hint(reached, visible, hinted, k)
        tl.store(cut + place * 3 + 2, coming.to(tl.float32))
        empty = tl.arange(0, CAPACITY_P)
        tl.store(
            picks + empty,
            tl.full([CAPACITY_P], -1, tl.int32),
            mask=(empty >= n_picks) & (empty < capacity),
        )
