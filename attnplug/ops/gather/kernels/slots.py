"""Triton functions of the kernels that attend to kept blocks: a row's slots, which are the sink's
blocks, then the local ones, then the list, and which block each of them holds."""

import functools
from typing import NamedTuple

from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.common.triton import tl, triton


class Keep(NamedTuple):
    """The keep set that a kernel is compiled for."""

    BLOCK: int  # keys of a block
    SINK: int  # first blocks
    LOCAL: int  # last blocks
    K: int  # listed blocks
    LIST: int  # K, padded

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, block: int, sink: int, local: int, listed: int) -> "Keep":
        return cls(block, sink, local, listed, next_power_of_two(max(1, listed)))

    @property
    def keys(self) -> int:
        return (self.SINK + self.LOCAL + self.K) * self.BLOCK


@triton.jit
def edge_block(slot, own, KEEP: tl.constexpr):
    """The block of a slot before the list: the sink's blocks, then the LOCAL ones up to `own`."""
    return tl.where(slot < KEEP.SINK, slot, own - KEEP.LOCAL + 1 + slot - KEEP.SINK)


@triton.jit
def look_up(
    slot,
    listed_at,
    row_table,
    own,
    edge,
    reach,
    low,
    KEEP: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(where the blocks of these slots begin, how many of their first keys are seen), int32: a
    token of the cache, or with a `row_table` the number of the block among those of all pages. A
    slot whose block is counted in another slot has none."""
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    K: tl.constexpr = KEEP.K
    KNOWN: tl.constexpr = SINK + KEEP.LOCAL
    j = edge_block(slot, own, KEEP)
    if K > 0:
        in_list = (slot >= KNOWN) & (slot < KNOWN + K)
        listed = tl.load(listed_at + slot - KNOWN, mask=in_list, other=-1, cache_modifier=".cg")
        j = tl.where(slot < KNOWN, j, listed)
    counts = ((slot < KNOWN) | (j < edge)) & ((slot < SINK) | (j >= SINK))
    at = low + j * BLOCK
    seen = tl.where(counts, tl.minimum(tl.maximum(reach - at + 1, 0), BLOCK), 0)
    if row_table is not None:
        page = tl.load(row_table + at // PAGE, mask=seen > 0, other=0)
        at = page * (PAGE // BLOCK) + at % PAGE // BLOCK
    return at, seen
