"""The Triton kernel of `pick_tokens`."""

import triton
import triton.language as tl

from attnplug.ops.common.rows import row_span
from attnplug.ops.sketch.kernels.codes import (
    BINS,
    BLOCK,
    begin,
    edge_of,
    near_block,
    place_of,
)


@triton.jit
def _lowest(reached, wanted):
    """The highest bin that so many tokens reach, of the numbers that reach each bin."""
    return tl.sum((reached >= wanted).to(tl.int32), 0) - 1


@triton.jit
def _at(x, bins, index):
    """Element `index` of x, 0 past its end."""
    return tl.sum(tl.where(bins == index, x, 0), 0)


@triton.jit
def _before(marks, piece, PIECES: tl.constexpr):
    """What the pieces in front of this one have found, added up. Each leaves a mark, an odd number,
    as soon as it has counted; a GPU starts programs in the order of their numbers, so they run."""
    j = tl.arange(0, PIECES)
    found = tl.load(marks + j, mask=j < piece, other=1, volatile=True)
    while tl.min(found & 1, 0) == 0:
        found = tl.load(marks + j, mask=j < piece, other=1, volatile=True)
    return tl.sum(found - 1, 0)


@triton.jit
def pick(
    shares,
    total,
    middle,
    lengths,
    start,
    marks,
    picks,
    cut,
    k,
    S,
    pieces,
    capacity,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    CAPACITY_P: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The picks among TILE slots of one row's KV head, in the order of the cache; their place in
    the list is where the pieces before this one end."""
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    since = low + BLOCK
    until = low + near_block(length, low) * BLOCK
    n = piece * TILE + tl.arange(0, TILE)
    bins = tl.arange(0, BINS)
    begin(PDL)
    # Slots that are no candidates are read too, so that loads are wide; they are not looked at.
    share = tl.load(shares + place * S + n, mask=n < S, other=0.0, cache_modifier=".cg")
    own = tl.load(total + place * BINS + bins, cache_modifier=".cg")
    centre = tl.load(middle + place, cache_modifier=".cg")
    # Bin 0 counts all tokens, and so is reached by all.
    reached = tl.cumsum(tl.where(bins == 0, 0, own), 0, reverse=True)
    visible = _at(own, bins, 0)
    reached = tl.where(bins == 0, visible, reached)
    threshold = _lowest(reached, tl.minimum(k, visible))
    above = _at(reached, bins, threshold + 1)  # tokens above the threshold's bin: all are picks

    seen = (n >= since) & (n < until) & (share > float("-inf"))
    y = tl.where(seen, place_of(share, centre), -129.0)
    least = (threshold - 128).to(tl.float32)
    higher = (y >= least + 1).to(tl.int32)
    level = (y >= least).to(tl.int32) - higher
    both = higher + level * 65536
    own_both = tl.sum(both, 0)
    marks += place * pieces
    mark = (own_both & 65535).to(tl.int64) * 4294967296 + (own_both >> 16).to(tl.int64) * 2 + 1
    tl.atomic_xchg(marks + piece, mark, sem="relaxed")
    both = tl.cumsum(both, 0) - both  # those in front of each
    before = _before(marks, piece, PIECES)

    room = capacity - above  # for the tokens of the threshold's bin, in the order of the cache
    rank = ((before & 4294967295) >> 1).to(tl.int32) + (both >> 16)
    slot = (before >> 32).to(tl.int32) + (both & 65535) + tl.minimum(rank, room)
    taken = (higher > 0) | ((level > 0) & (rank < room))
    tl.store(picks + place * capacity + slot, n, mask=taken)
    if piece == 0:
        count = tl.minimum(_at(reached, bins, threshold), capacity)
        upper = _lowest(reached, tl.minimum(k, visible) // 2)
        edge = tl.where(upper > threshold, edge_of(upper, centre), float("inf"))
        tl.store(cut + place * 2, edge)
        tl.store(cut + place * 2 + 1, (visible - count).to(tl.float32))
        empty = tl.arange(0, CAPACITY_P)
        tl.store(
            picks + place * capacity + empty,
            tl.full([CAPACITY_P], -1, tl.int32),
            mask=(empty >= count) & (empty < capacity),
        )
