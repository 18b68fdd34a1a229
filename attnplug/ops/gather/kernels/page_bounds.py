"""The Triton kernel of page_bounds: one program looks at a few of the slots that were written, and
summarises the blocks whose last key is among them."""

from attnplug.ops.common.triton import tl, triton
from attnplug.ops.gather.kernels.bounds import refresh_blocks, summaries_at


@triton.jit
def summarise_slot(
    k,
    bounds,
    slot,
    h,
    places,
    k_strides,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BAND: tl.constexpr,
    INT8: tl.constexpr,
):
    """The block that a slot completes, if it completes one, of head h (int64). `places`: blocks of
    all pages."""
    k_p, k_h, k_s = k_strides
    in_pages = (slot >= 0) & (slot // BLOCK < places)
    if in_pages & (slot % BLOCK == BLOCK - 1):
        begin = slot // PAGE * k_p + (slot % PAGE - BLOCK + 1) * k_s
        k_at = k + h * k_h + begin
        place = slot // BLOCK
        bounds_at, frame = summaries_at(bounds, h, places, D, 2, INT8)
        refresh_blocks(
            k_at=k_at,
            mask_at=k,
            bounds_at=bounds_at + place * (2 * D),
            frame=frame + place,  # codes have a scale each, and no frame besides
            N=places,
            begin=0,
            end=1,
            stride=1,
            done=0,
            start=0,
            k_s=k_s,
            D=D,
            DP=DP,
            BLOCK=BLOCK,
            PARTS=2,
            INT8=INT8,
            MASKED=False,
            BAND=BAND,
            FRAMED=False,
        )


@triton.jit(do_not_specialize=["count", "places"])  # of any batch, of a cache of any size
def summarise_written(
    k,
    bounds,
    slots,
    count,
    places,
    k_strides,
    slot_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BAND: tl.constexpr,
    INT8: tl.constexpr,
    EACH: tl.constexpr,
):
    """The blocks that slots EACH i and on complete, of one head. `places`: blocks of all pages."""
    h = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * EACH
    for i in range(first, tl.minimum(first + EACH, count)):
        summarise_slot(
            k=k,
            bounds=bounds,
            slot=tl.load(slots + i * slot_stride).to(tl.int64),
            h=h,
            places=places,
            k_strides=k_strides,
            D=D,
            DP=DP,
            BLOCK=BLOCK,
            PAGE=PAGE,
            BAND=BAND,
            INT8=INT8,
        )
