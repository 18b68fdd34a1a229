"""Summaries of the key blocks of a paged cache, by physical block: sequences that share a page
share its summaries.

    summary of block i of page p  ->  place p * (page / block) + i  among those of all pages

What a block's summary holds is said in `block_bounds`. INT8 codes have two parts here, for a band
too, and a scale for each block. They have no frame: a page belongs to no row.

    a band's edges ~ scale_j code
    bounds:  scale_j max_code >= max,   min >= scale_j min_code

The caller tells which keys it has written,
and the block whose last key is among them is summarised. There is no count of what is done. A page
that a new sequence takes is written anew before one of its blocks is complete again. Whoever copies
a page's keys copies its summaries along (`page_summaries`).

Keys in fp8 are summarised as they are stored, without their scale, which is one for all keys and
changes no order of scores. Their summaries are codes.

Source: Quest (Tang et al., 2024), as in "Attention Pays Its Bill" (docs/papers.md).
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    BLOCKS,
    FP8,
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_scales,
)
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit
from attnplug.ops.common.pages import block_places
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.views import cache_of
from attnplug.ops.gather.block_bounds import (
    empty_bounds,
    encode,
    frame_of,
    refresh_on_cpu,
    summary_rows,
)
from attnplug.ops.gather.kernels.bounds import Form
from attnplug.ops.gather.kernels.page_bounds import summarise_written

NAME = "page_bounds"


def empty_page_bounds(
    k: torch.Tensor, block: int, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Summaries of all blocks of the pages `k [pages, Hkv, page, D]`, zeros. They are those that
    `empty_bounds` makes of one row with as many keys, `[1, Hkv, pages * page / block, 2, D]` like
    k. With `dtype` int8 they are codes."""
    pages, heads, page, width = k.shape
    one_row = k.new_empty((1,), dtype=k.dtype).expand(1, heads, pages * page, width)
    return empty_bounds(one_row, block, dtype=dtype)


def page_bounds(
    k: torch.Tensor,
    bounds: torch.Tensor,
    slots: torch.Tensor,
    *,
    block: int,
    band: bool = False,
) -> None:
    """Summarise, in place, the blocks whose last key has just been written.

    Args:
        k: `[pages, Hkv, page, D]`, float32, float16, bfloat16 or float8_e4m3fn, the written keys in
            it; `page` a multiple of `block`. Neighbours in D next to each other.
        bounds: `[1, Hkv, pages * page / block, 2, D]` like k, or int8, as `empty_page_bounds`
            makes them, int8 for float8_e4m3fn; contiguous; written.
        slots: int32 or int64 `[N]`, where keys were written: page times `page`, plus the place in
            the page. Outside of the pages, negative ones too: nowhere.
        block: keys a block: 16, 32, 64 or 128.
        band: whether the two parts are the edges of a band about the keys' mean, not max and min.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        CardError: the GPU does not convert float8_e4m3fn.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, k)
    _page_bounds(k, bounds, slots, block, band)


def _allocate(k, bounds, slots, block, band):
    check_attention_inputs(NAME, None, k, head_dims=WIDE_HEAD_DIMS, fp8=True)
    check_scales(NAME, k, None, None)
    check_page_bounds(NAME, k, bounds, block)
    fits = slots.dim() == 1 and slots.dtype in (torch.int32, torch.int64)
    found = f"slots is {slots.dtype} {tuple(slots.shape)}"
    require(fits, NAME, f"{found}, needs int32 or int64 [N]")
    require(slots.device == k.device, NAME, f"slots is on {slots.device}, k on {k.device}")
    require(k.stride(3) == 1, NAME, f"k has a stride of {k.stride(3)} in D, needs 1")


def check_page_bounds(name, k, bounds, block):
    """The checks of the summaries of pages, for `page_bounds` and for `select_blocks`."""
    if block not in BLOCKS:
        raise ArgumentError(f"{name}: block is {block}, needs {', '.join(map(str, BLOCKS))}")
    pages, heads, page, width = k.shape
    require(page % block == 0, name, f"pages of {page} keys are no multiple of block {block}")
    found = f"bounds is {bounds.dtype}"
    fits = bounds.dtype in ((torch.int8,) if k.dtype == FP8 else (k.dtype, torch.int8))
    wanted = "int8" if k.dtype == FP8 else "that or int8"
    require(fits, name, f"{found}, pages of {k.dtype} need {wanted}")
    wanted = (1, heads, summary_rows(pages * page // block, width, bounds.dtype, 2), 2, width)
    if tuple(bounds.shape) != wanted:
        raise ArgumentError(
            f"{name}: bounds has shape {tuple(bounds.shape)}, needs [1,Hkv,blocks of all pages,2,D]"
            f" = {list(wanted)}"
        )
    require(bounds.device == k.device, name, f"bounds is on {bounds.device}, k on {k.device}")
    require(bounds.is_contiguous(), name, "bounds is not contiguous")


def page_summaries(bounds: torch.Tensor, k: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Views of the summaries of the pages `k`, with page p's own at `[p]`: what must be copied
    where a page is copied."""
    pages, per_page = k.shape[0], k.shape[2] // block
    if bounds.dtype == torch.int8:
        scale = frame_of(bounds, pages * per_page).scale[0]
        codes = bounds[0, :, : pages * per_page]
        return [x.unflatten(1, (pages, per_page)).movedim(1, 0) for x in (codes, scale)]
    return [bounds[0].unflatten(1, (pages, per_page)).movedim(1, 0)]


# --- CPU: the specification ------------------------------------------------------------------


def rows_of_summaries(
    bounds: torch.Tensor, table: torch.Tensor, blocks: int, k: torch.Tensor, block: int
) -> torch.Tensor:
    """The summaries of the first `blocks` blocks of each row, as `empty_bounds` would have them for
    rows of so many blocks; a copy."""
    pages, heads, page, width = k.shape
    stored = pages * page // block
    places = block_places(table, blocks, page // block, stored)
    if bounds.dtype != torch.int8:
        return bounds[0][:, places].transpose(0, 1)
    rows = summary_rows(blocks, width, bounds.dtype, 2)
    found = bounds.new_zeros((len(table), heads, rows, *bounds.shape[3:]))
    own = frame_of(found, blocks)
    own.unit.fill_(1)
    own.scale.copy_(frame_of(bounds, stored).scale[0][:, places].transpose(0, 1))
    found[:, :, :blocks] = bounds[0][:, places].transpose(0, 1)
    return found


@njit()
def _encode_blocks(wide, places, nearest, codes, scale):
    """Edges `wide [Hkv, N, 2, D]` as codes `[Hkv, blocks, 2, D]` and scales, at `places`."""
    centre, unit = np.zeros(wide.shape[3], np.float32), np.ones(wide.shape[3], np.float32)
    for h in range(wide.shape[0]):
        for i in range(len(places)):
            own = codes[h, places[i]]
            scale[h, places[i]] = encode(wide[h, i], centre, unit, nearest, own)


def summarise_on_cpu(k, bounds, slots, block, band=False):
    pages, heads, page, width = k.shape
    slots = slots.long()
    stored = (slots >= 0) & (slots < pages * page)
    ends = slots[stored & (slots % block == block - 1)]
    if len(ends) == 0:
        return
    first = ends % page - block + 1
    at = first[:, None] + torch.arange(block, device="cpu")
    keys = k.transpose(1, 2)[ends[:, None] // page, at]  # [N, block, Hkv, D]
    row = keys.permute(2, 0, 1, 3).reshape(1, heads, len(ends) * block, width)
    places, stored, int8 = ends // block, pages * page // block, bounds.dtype == torch.int8
    row = row.float() if int8 else row
    own = empty_bounds(row, block)
    progress = torch.zeros((1, 2), dtype=torch.int32, device="cpu")
    start = torch.zeros(1, dtype=torch.int64, device="cpu")
    refresh_on_cpu(row, None, own, progress, start, start + len(ends), block, band)
    if int8:
        codes, scale = bounds[0, :, :stored], frame_of(bounds, stored).scale[0]
        _encode_blocks(own[0].numpy(), places.numpy(), band, codes.numpy(), scale.numpy())
    else:
        bounds.index_copy_(2, places, own)


# --- CUDA ------------------------------------------------------------------------------------

MANY = 1024  # slots from which a program looks at several


def launch_page_bounds(k, bounds, slots, block, band=False):
    """Run the kernel; tensors as in `page_bounds`, on a GPU or in Triton's interpreter."""
    pages, heads, page, _ = k.shape
    count, each = len(slots), 1 if len(slots) < MANY else block
    if count == 0:
        return
    launch_kernel(
        summarise_written,
        grid=(cdiv(count, each), heads),
        cache=cache_of(k, None),
        bounds=bounds,
        slots=slots,
        count=count,
        places=pages * page // block,
        slot_stride=slots.stride(0),
        PAGE=page,
        EACH=each,
        FORM=Form.of(bounds, block, band, framed=False),
        **{"num_warps": 4},
    )


_page_bounds = define_op(
    "page_bounds(Tensor k, Tensor(a!) bounds, Tensor slots, int block, bool band) -> ()",
    allocate=_allocate,
    cpu=summarise_on_cpu,
    cuda=launch_page_bounds,
)
