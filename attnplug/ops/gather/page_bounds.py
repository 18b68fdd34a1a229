"""Summaries of the pages of a paged KV cache, which several rows may share.

    bounds[n, h, 0] = max of the keys of page n,   bounds[n, h, 1] = their min   (elementwise)

A page's summary belongs to the page and not to a row: whoever reads the page finds it. The call
that writes a page's last slot makes it, so that nobody counts what is done. A page that is given
to another row is written again up to its last slot before it counts as complete.

Source: Quest's bounds (Tang et al., 2024), as `block_bounds` keeps them for contiguous caches.
"""

import numba
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import BLOCKS, DTYPES, HEAD_DIMS
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.gather.kernels.page_bounds import summarise_pages

NAME = "page_bounds"


def page_bounds(k: torch.Tensor, bounds: torch.Tensor, slots: torch.Tensor) -> None:
    """Make the summaries of the pages whose last slot is among `slots`, in place.

    A NaN among a page's keys gives NaN.

    Args:
        k: `[pages, Hkv, page, D]`, float32, float16 or bfloat16, pages of 16, 32, 64 or 128 keys;
            any strides. The keys of `slots` are written already.
        bounds: `[pages, Hkv, 2, D]` like k, contiguous; written.
        slots: int64 `[tokens]`, where a call's keys went: `page * keys a page + place`. Negative:
            nowhere. Slots behind the last page are not looked at.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
        GradientError: k requires grad.
    """
    refuse_gradients(NAME, k)
    _page_bounds(k, bounds, slots)


def _allocate(k, bounds, slots):
    require(k.dim() == 4, NAME, f"k has {k.dim()} dimensions, needs [pages,Hkv,page,D]")
    pages, heads, page, width = k.shape
    require(k.dtype in DTYPES, NAME, f"k is {k.dtype}, needs float32, float16 or bfloat16")
    require(page in BLOCKS, NAME, f"k has pages of {page}, needs {', '.join(map(str, BLOCKS))}")
    require(
        width in HEAD_DIMS,
        NAME,
        f"head dimension {width} is not one of {', '.join(map(str, HEAD_DIMS))}",
    )
    wanted = (pages, heads, 2, width)
    if tuple(bounds.shape) != wanted or bounds.dtype != k.dtype:
        raise ArgumentError(
            f"{NAME}: bounds is {bounds.dtype} {tuple(bounds.shape)}, needs {k.dtype} "
            f"[pages,Hkv,2,D] = {list(wanted)}"
        )
    require(bounds.is_contiguous(), NAME, "bounds is not contiguous")
    if slots.dim() != 1 or slots.dtype != torch.int64:
        raise ArgumentError(f"{NAME}: slots is {slots.dtype} {tuple(slots.shape)}, needs int64 [N]")
    for label, tensor in (("bounds", bounds), ("slots", slots)):
        if tensor.device != k.device:
            raise ArgumentError(f"{NAME}: {label} is on {tensor.device}, k on {k.device}")


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def _reference(keys, out):
    """Max and min over the keys of `keys [heads, page, D]`, into `out [heads, 2, D]`."""
    for h in range(keys.shape[0]):
        for d in range(keys.shape[2]):
            high = low = keys[h, 0, d]
            for n in range(1, keys.shape[1]):
                x = keys[h, n, d]
                high = x if x > high or x != x else high  # a NaN comes in and stays
                low = x if x < low or x != x else low
            out[h, 0, d], out[h, 1, d] = high, low


def _cpu(k, bounds, slots):
    pages, _, page, _ = k.shape
    last = slots[(slots >= 0) & (slots % page == page - 1)] // page
    for n in last[last < pages].tolist():
        wide = torch.empty(bounds.shape[1:], dtype=torch.float32)
        _reference(k[n].float().contiguous().numpy(), wide.numpy())
        bounds[n] = wide


# --- CUDA ------------------------------------------------------------------------------------


def launch_page_bounds(k, bounds, slots):
    """Run the kernel; tensors as in `page_bounds`, on a GPU or in Triton's interpreter."""
    pages, heads, page, width = k.shape
    if slots.shape[0] == 0 or pages == 0:
        return
    k = k if k.stride(3) == 1 else k.contiguous()
    summarise_pages.run(
        grid=(slots.shape[0], heads),
        warmup=False,
        k=k,
        bounds=bounds,
        slots=slots,
        pages=pages,
        k_strides=k.stride()[:3],
        slot_stride=slots.stride(0),
        HEADS=heads,
        PAGE=page,
        D=width,
        DP=next_power_of_two(width),
        num_warps=4,
    )


_page_bounds = define_op(
    "page_bounds(Tensor k, Tensor(a!) bounds, Tensor slots) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_page_bounds,
)
