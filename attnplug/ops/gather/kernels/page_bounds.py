"""The Triton kernel of page_bounds: one program looks at a few of the slots that were written, and
summarises the blocks whose last key is among them."""

from attnplug.ops.common.triton import tl, triton
from attnplug.ops.gather.kernels.bounds import refresh_blocks, summaries_at


@triton.jit
def summarise_slot(
    cache,
    bounds,
    slot,
    h,
    places,
    PAGE: tl.constexpr,
    FORM: tl.constexpr,
):
    """The block that a slot completes, if it completes one, of head h (int64). `places`: blocks of
    all pages."""
    BLOCK: tl.constexpr = FORM.BLOCK
    in_pages = (slot >= 0) & (slot // BLOCK < places)
    if in_pages & (slot % BLOCK == BLOCK - 1):
        begin = slot // PAGE * cache.k_b + (slot % PAGE - BLOCK + 1) * cache.k_s
        place = slot // BLOCK
        bounds_at, frame = summaries_at(bounds, h, places, FORM)
        refresh_blocks(
            k_at=cache.k + h * cache.k_h + begin,
            k_s=cache.k_s,
            mask_at=None,
            bounds_at=bounds_at + place * (FORM.PARTS * FORM.D),
            frame=frame + place,  # codes have a scale each, and no frame besides
            N=places,
            begin=0,
            end=1,
            stride=1,
            done=0,
            start=0,
            FORM=FORM,
        )


@triton.jit(do_not_specialize=["count", "places"])  # of any batch, of a cache of any size
def summarise_written(
    cache,
    bounds,
    slots,
    count,
    places,
    slot_stride,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
    FORM: tl.constexpr,
):
    """The blocks that slots EACH i and on complete, of one head. `places`: blocks of all pages."""
    h = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * EACH
    for i in range(first, tl.minimum(first + EACH, count)):
        slot = tl.load(slots + i * slot_stride).to(tl.int64)
        summarise_slot(cache, bounds, slot, h, places, PAGE, FORM)
