"""The Triton kernel of `pick_tokens`."""

import triton
import triton.language as tl

from attnplug.ops.common.rows import row_span
from attnplug.ops.sketch.kernels.codes import BINS, BLOCK, begin, bin_of, edge_of, near_block

TILE = tl.constexpr(1024)  # tokens of one step
ROWS = tl.constexpr(16)  # parts whose counts a program loads at once


@triton.jit
def _lowest(reached, wanted):
    """The highest bin that so many tokens reach, of the numbers that reach each bin."""
    return tl.sum((reached >= wanted).to(tl.int32), 0) - 1


@triton.jit
def _at(x, bins, index):
    """Element `index` of x, 0 past its end."""
    return tl.sum(tl.where(bins == index, x, 0), 0)


@triton.jit
def pick(
    shares,
    counts,
    total,
    middle,
    lengths,
    start,
    picks,
    cut,
    k,
    S,
    parts,
    capacity,
    CAPACITY_P: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The picks of one part of one row's KV head, in the order of the cache; its place in the list
    is where the parts before it end."""
    begin(PDL)
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = near_block(length, low) - 1
    bins = tl.arange(0, BINS)
    own = tl.load(total + place * BINS + bins, cache_modifier=".cg")
    centre = tl.load(middle + place, cache_modifier=".cg")
    # Bin 0 counts all tokens, and so is reached by all.
    reached = tl.cumsum(tl.where(bins == 0, 0, own), 0, reverse=True)
    visible = _at(own, bins, 0)
    reached = tl.where(bins == 0, visible, reached)
    threshold = _lowest(reached, tl.minimum(k, visible))
    above = _at(reached, bins, threshold + 1)  # tokens above the threshold's bin: all are picks
    room = capacity - above  # for the tokens of the threshold's bin, in the order of the cache
    count = tl.minimum(_at(reached, bins, threshold), capacity)

    before_above = tl.zeros([BINS], tl.int32)
    before_equal = tl.zeros([BINS], tl.int32)
    rows = tl.arange(0, ROWS)
    for p in range(0, part, ROWS):
        at = counts + (place * parts + p + rows[:, None]) * BINS + bins[None, :]
        some = tl.load(at, mask=(p + rows < part)[:, None], other=0, cache_modifier=".cg")
        some = tl.sum(some, 0)
        before_above += tl.where((bins > threshold) & (bins > 0), some, 0)
        if threshold == 0:  # what is in no other bin
            before_equal += tl.where(bins == 0, some, -some)
        else:
            before_equal += tl.where(bins == threshold, some, 0)
    so_far = tl.sum(before_above, 0)
    equal = tl.sum(before_equal, 0)

    if part == parts - 1:
        upper = _lowest(reached, tl.minimum(k, visible) // 2)
        edge = tl.where(upper > threshold, edge_of(upper, centre), float("inf"))
        tl.store(cut + place * 2, edge)
        tl.store(cut + place * 2 + 1, (visible - count).to(tl.float32))
        slot = tl.arange(0, CAPACITY_P)
        tl.store(
            picks + place * capacity + slot,
            tl.full([CAPACITY_P], -1, tl.int32),
            mask=(slot >= count) & (slot < capacity),
        )

    n = tl.arange(0, TILE)
    since = low + BLOCK + (part * blocks // parts) * BLOCK
    until = low + BLOCK + ((part + 1) * blocks // parts) * BLOCK
    for at in range(since, until, TILE):
        share = tl.load(
            shares + place * S + at + n,
            mask=at + n < until,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        shown = share > float("-inf")
        index = bin_of(share, centre)
        higher = (shown & (index > threshold)).to(tl.int32)
        level = (shown & (index == threshold)).to(tl.int32)
        rank = equal + tl.cumsum(level, 0) - level
        taken = (level > 0) & (rank < room)
        slot = so_far + tl.cumsum(higher, 0) - higher + tl.minimum(rank, room)
        tl.store(picks + place * capacity + slot, at + n, mask=(higher > 0) | taken)
        so_far += tl.sum(higher, 0)
        equal += tl.sum(level, 0)
