"""The keys of a paged cache as INT8, by physical slot: sequences that share a page share its codes.

    codes[p, h, i], scales[p, h, i] = quantize_keys(k[p, h, i])   for each slot p * page + i

`score_tokens` reads them. The caller tells which keys it has written, and these are coded. There is
nothing else to keep: a key's code depends on the key alone, and a slot that is written again is
coded again. Whoever copies a page's keys copies its codes along, or has the copies' slots coded.

Source: the INT8 keys of `score_tokens`, as in "Guess-Verify-Refine" (docs/papers.md).
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.ops.common.checks import check_attention_inputs, check_tensor
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.gvr.kernels.page_codes import code_written

NAME = "page_codes"
EACH = 16  # slots of one program


class PageCodes(NamedTuple):
    """int8 `codes` `[pages, Hkv, page, D]` and float32 `scales` `[pages, Hkv, page]` of all keys of
    a paged cache."""

    codes: torch.Tensor
    scales: torch.Tensor


def empty_page_codes(k: torch.Tensor) -> PageCodes:
    """Codes of fresh pages `k [pages, Hkv, page, D]`, zeros."""
    codes = torch.zeros(k.shape, dtype=torch.int8, device=k.device)
    return PageCodes(codes, torch.zeros(k.shape[:3], dtype=torch.float32, device=k.device))


def page_codes(
    k: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor
) -> None:
    """Code, in place, the keys that have just been written.

    Args:
        k: `[pages, Hkv, page, D]`, float32, float16 or bfloat16, the written keys in it. Neighbours
            in D next to each other.
        codes, scales: int8 `[pages, Hkv, page, D]` and float32 `[pages, Hkv, page]`, as
            `empty_page_codes` makes them; contiguous; written.
        slots: int32 or int64 `[N]`, where keys were written: page times `page`, plus the place in
            the page. Outside of the pages, negative ones too: nowhere.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, k)
    _page_codes(k, codes, scales, slots)


def _allocate(k, codes, scales, slots):
    check_attention_inputs(NAME, None, k)
    require(k.stride(3) == 1, NAME, f"k has a stride of {k.stride(3)} in D, needs 1")
    check_tensor(NAME, "codes", codes, torch.int8, tuple(k.shape), k.device)
    check_tensor(NAME, "scales", scales, torch.float32, tuple(k.shape[:3]), k.device)
    fits = slots.dim() == 1 and slots.dtype in (torch.int32, torch.int64)
    found = f"slots is {slots.dtype} {tuple(slots.shape)}"
    require(fits, NAME, f"{found}, needs int32 or int64 [N]")
    require(slots.device == k.device, NAME, f"slots is on {slots.device}, k on {k.device}")


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(keys, slots, codes, scales):
    """Code `keys [N,Hkv,D]` into their slots, which are in parallel."""
    page = codes.shape[2]
    for n in prange(len(slots)):
        p, i = slots[n] // page, slots[n] % page
        for h in range(keys.shape[1]):
            key = keys[n, h]
            largest = np.float32(0)
            for x in key:
                largest = max(largest, abs(x)) if x == x else np.float32(np.nan)
                if largest != largest:  # a maximum may pass over NaN
                    break
            scale = largest / np.float32(127)
            usable = 0 < scale < np.inf  # not of zeros, nor of what is not finite
            for d in range(len(key)):
                codes[p, h, i, d] = np.int8(np.rint(key[d] / scale)) if usable else 0
            scales[p, h, i] = scale


def _cpu(k, codes, scales, slots):
    slots = slots[(slots >= 0) & (slots < k.shape[0] * k.shape[2])].long()
    keys = k[slots // k.shape[2], :, slots % k.shape[2]].float()
    _reference(keys.numpy(), slots.numpy(), codes.numpy(), scales.numpy())


# --- CUDA ------------------------------------------------------------------------------------


def launch_page_codes(k, codes, scales, slots):
    """Run the kernel; tensors as in `page_codes`, on a GPU or in Triton's interpreter."""
    pages, heads, page, width = k.shape
    count = len(slots)
    if count == 0:
        return
    launch_kernel(
        code_written,
        grid=(cdiv(count, EACH), heads),
        k=k,
        codes=codes,
        scales=scales,
        slots=slots,
        count=count,
        stored=pages * page,
        k_strides=k.stride()[:3],
        slot_stride=slots.stride(0),
        D=width,
        DP=padded_width(width),
        PAGE=page,
        EACH=EACH,
        **{"num_warps": 4},
    )


_page_codes = define_op(
    "page_codes(Tensor k, Tensor(a!) codes, Tensor(b!) scales, Tensor slots) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_page_codes,
)
