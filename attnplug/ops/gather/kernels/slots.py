"""Triton functions of the kernels that attend to kept blocks: a row's slots, which are the sink's
blocks, then the local ones, then the list, and which block each of them holds."""

from attnplug.ops.common.triton import tl, triton


@triton.jit
def edge_block(slot, own, SINK: tl.constexpr, LOCAL: tl.constexpr):
    """The block of a slot before the list: the sink's blocks, then the LOCAL ones up to `own`."""
    return tl.where(slot < SINK, slot, own - LOCAL + 1 + slot - SINK)


@triton.jit
def look_up(
    slot,
    listed_at,
    row_table,
    own,
    edge,
    reach,
    low,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(where the blocks of these slots begin, how many of their first keys are seen), int32: a
    token of the cache, or with a `row_table` the number of the block among those of all pages. A
    slot whose block is counted in another slot has none."""
    KNOWN: tl.constexpr = SINK + LOCAL
    j = edge_block(slot, own, SINK, LOCAL)
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
