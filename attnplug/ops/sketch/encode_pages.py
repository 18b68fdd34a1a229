"""The codes of keys that have been written to a paged cache.

    x = (R(-s) k, 1) @ encoder,   code_i = round(x_i), clipped to 0..15 or 0..3

s is the first position of the key's band of 2,048 positions (`model_basis`). The caller tells which
slots it has written, and which positions their tokens have in their sequences.
"""

import numpy as np
import torch

from attnplug.ops.common.checks import check_attention_inputs
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.common.views import cache_of
from attnplug.ops.sketch.encode_keys import check_float, rounded_code
from attnplug.ops.sketch.kernels import pages as kernels
from attnplug.ops.sketch.kernels.codes import Code
from attnplug.ops.sketch.model_basis import BAND
from attnplug.ops.sketch.pages import PageSketch, check_pages, check_turns

NAME = "encode_pages"
EACH = 32  # slots of one program


def encode_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    encoder: torch.Tensor,
    turns: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Code, in place, the keys that have just been written.

    Args:
        k, v: `[pages, Hkv, page, D]`, float32, float16 or bfloat16, the written keys and values in
            them. Values are read only to flag those that are not finite. Neighbours in D next to
            each other.
        encoder: float32 `[Hkv, D + 1, r]` of `fit_model_basis`.
        turns: float32 `[bands, 2, P]` of `turns_of`.
        fine, coarse, odd: uint8 `[pages, Hkv, page, bytes]` twice and `[pages, Hkv, page]`, as
            `empty_page_sketch` makes them; written.
        slots: int32 or int64 `[N]`, where keys were written: page times `page`, plus the place in
            the page. Outside of the pages, negative ones too: nowhere.
        positions: int32 or int64 `[N]`, of their tokens in their sequences. A token beyond the
            bands is not coded.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, k, v)
    _encode_pages(k, v, encoder, turns, fine, coarse, odd, slots, positions)


def _allocate(k, v, encoder, turns, fine, coarse, odd, slots, positions):
    check_attention_inputs(NAME, None, k, v)
    for label, tensor in (("k", k), ("v", v)):
        require(tensor.stride(3) == 1, NAME, f"{label} has a stride other than 1 in D")
    check_pages(NAME, k, fine, coarse, odd)
    check_turns(NAME, turns, k)
    rank = 2 * fine.shape[3] + 4 * coarse.shape[3]
    check_float(NAME, "encoder", encoder, (k.shape[1], k.shape[3] + 1, rank), k.device)
    for label, tensor in (("slots", slots), ("positions", positions)):
        fits = tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)
        found = f"{label} is {tensor.dtype} {tuple(tensor.shape)}"
        require(fits, NAME, f"{found}, needs int32 or int64 [N]")
        require(tensor.device == k.device, NAME, f"{label} is on {tensor.device}, k on {k.device}")
    require(len(slots) == len(positions), NAME, "slots and positions differ in length")


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def turned_back(x, turn, out):
    """R(-s) x of one key or query `[D]` into `out`; `turn [2, P]` are cosines and sines of -s
    times each frequency."""
    count = turn.shape[1]
    out[:] = x
    for d in range(count):
        out[d] = x[d] * turn[0, d] - x[count + d] * turn[1, d]
        out[count + d] = x[count + d] * turn[0, d] + x[d] * turn[1, d]


@njit(parallel=True)
def _reference(keys, values, encoder, turns, fine, coarse, odd, slots, bands):
    """Codes of `keys, values [N, Hkv, D]` into their slots, which are in parallel."""
    page, width = odd.shape[2], keys.shape[2]
    half, quarter = fine.shape[3], coarse.shape[3]
    for n in prange(len(slots)):
        p, i = slots[n] // page, slots[n] % page
        for h in range(keys.shape[1]):
            key = np.empty(width, np.float32)
            turned_back(keys[n, h], turns[bands[n]], key)
            x = encoder[h, width].copy()
            finite = True
            for d in range(width):
                finite = finite and np.isfinite(keys[n, h, d]) and np.isfinite(values[n, h, d])
                for r in range(x.shape[0]):
                    x[r] += key[d] * encoder[h, d, r]
            for j in range(half):
                fine[p, h, i, j] = rounded_code(x[j], 15) | rounded_code(x[half + j], 15) << 4
            for j in range(quarter):
                packed = np.uint8(0)
                for part in range(4):
                    c = rounded_code(x[2 * half + part * quarter + j], 3)
                    packed |= c << (2 * part)
                coarse[p, h, i, j] = packed
            odd[p, h, i] = 0 if finite else 1


def _cpu(k, v, encoder, turns, fine, coarse, odd, slots, positions):
    stored = (slots >= 0) & (slots < k.shape[0] * k.shape[2])
    stored &= (positions >= 0) & (positions < len(turns) * BAND)
    slots, bands = slots[stored].long(), positions[stored].long() // BAND
    at = slots // k.shape[2], slice(None), slots % k.shape[2]
    _reference(
        *arrays(k[at], v[at], encoder, turns, fine, coarse, odd, slots, bands),
    )


# --- CUDA ------------------------------------------------------------------------------------


def launch_encode_pages(k, v, encoder, turns, fine, coarse, odd, slots, positions):
    """Run the kernel; tensors as in `encode_pages`, on a GPU or in Triton's interpreter."""
    pages, heads, page, width = k.shape
    count = len(slots)
    if count == 0:
        return
    launch_kernel(
        kernels.encode_written,
        grid=(cdiv(count, EACH), heads),
        cache=cache_of(k, v),
        encoder=encoder,
        turns=turns,
        sketch=PageSketch(fine, coarse, odd),
        slots=slots,
        positions=positions,
        count=count,
        stored=pages * page,
        bands=len(turns),
        slot_stride=slots.stride(0),
        position_stride=positions.stride(0),
        D=width,
        DP=padded_width(width),
        HALF=turns.shape[2],
        PAGE=page,
        EACH=EACH,
        BAND=BAND,
        CODE=Code.of(fine, coarse),
        PRECISION=card(k.device).precision,
        **{"num_warps": 4},
    )


_encode_pages = define_op(
    f"{NAME}(Tensor k, Tensor v, Tensor encoder, Tensor turns, Tensor(a!) fine, Tensor(b!) coarse, "
    "Tensor(c!) odd, Tensor slots, Tensor positions) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_encode_pages,
)
