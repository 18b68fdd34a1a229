"""The codes of a cache's keys: `sketch`'s 16 to 32 bytes a token and KV head.

    x = (k, 1) @ encoder,   code_i = round(x_i), clipped to 0..15 or 0..3

Tokens are coded by blocks of 128, counted from each row's first real token, once a block is behind
the last four, which are read exactly: block 0, the sink, is read exactly for ever and has no codes.
A coded block never changes until the cache is cropped. So `progress` says how many leading blocks
are done, for which start, and only what is missing is read.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import DTYPES, check_sequence_inputs, check_tensor, why_not_width
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import padded_width
from attnplug.ops.common.views import cache_of, rows_of, steps_of
from attnplug.ops.sketch.kernels import codes as kernel_codes
from attnplug.ops.sketch.kernels import encode as kernels
from attnplug.ops.sketch.kernels.codes import Code
from attnplug.ops.sketch.state import BLOCK, CHUNK, COORDINATES, Codes

NAME = "encode_keys"
LOCAL = kernel_codes.LOCAL.value
TILE, WIDEST = 64, 128  # tokens of a tile, and the widest head that has them


def encode_keys(
    k: torch.Tensor,
    v: torch.Tensor,
    encoder: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    progress: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> None:
    """Make the codes of all blocks that are to have some, in place.

    Args:
        k, v: `[B, Hkv, S, D]`, float32, float16 or bfloat16. Values are read only to flag those
            that are not finite.
        encoder: float32 `[B, Hkv, D + 1, r]` of `fit_basis`.
        fine, coarse, odd, progress: of `empty_codes`; written.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen. A hidden key and its value may
            hold anything.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, k, v)
    _encode_keys(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask)


def _allocate(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask):
    for label, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ArgumentError(f"{NAME}: {label} has {tensor.dim()} dimensions, needs [B,H,S,D]")
        require(
            tensor.dtype in DTYPES,
            NAME,
            f"{label} is {tensor.dtype}, needs float32, float16 or bfloat16",
        )
    require(k.shape == v.shape, NAME, f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    require(k.device == v.device, NAME, f"v is on {v.device}, k on {k.device}")
    unserved = why_not_width(k.shape[3])
    require(not unserved, NAME, unserved)
    check_sequence_inputs(NAME, k, k, lengths, start, key_mask)
    check_codes(NAME, k, fine, coarse, odd, progress)
    wanted = (*k.shape[:2], k.shape[3] + 1, 2 * fine.shape[3] + 4 * coarse.shape[3])
    check_float(NAME, "encoder", encoder, wanted, k.device)


def check_float(name, label, tensor, shape, device):
    """Raise ArgumentError unless a tensor is float32, contiguous, of a shape and on a device."""
    check_tensor(name, label, tensor, torch.float32, tuple(shape), device)


def check_codes(name, k, fine, coarse, odd, progress):
    """The checks of a cache's codes, shared by the ops that read them."""
    batch, heads, size, width = k.shape
    pairs = [(a // 2, b // 4) for a, b in COORDINATES.values() if a + b <= width]
    found = (fine.shape[-1], coarse.shape[-1])
    if found not in pairs:
        raise ArgumentError(
            f"{name}: fine and coarse have {found} bytes a token, need one of {pairs} for head "
            f"dimension {width}"
        )
    for label, tensor, shape, dtype in (
        ("fine", fine, (batch, heads, size, found[0]), torch.uint8),
        ("coarse", coarse, (batch, heads, size, found[1]), torch.uint8),
        ("odd", odd, (batch, heads, -(-size // CHUNK)), torch.uint8),
        ("progress", progress, (batch, 2), torch.int32),
    ):
        check_tensor(name, label, tensor, dtype, shape, k.device)


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def near_block(length, start):
    """First of the last blocks, counted from `start`, that are read exactly."""
    return max(max(length - 1 - start, 0) // BLOCK - (LOCAL - 1), 1)


@njit()
def rounded_code(x, most):
    """The nearest code; of a NaN it is 0."""
    x = np.floor(x + np.float32(0.5))
    return np.uint8(min(x, most)) if x > 0 else np.uint8(0)


@njit(parallel=True)
def _reference(k, v, encoder, mask, fine, coarse, odd, done, lengths, start, offset):
    """Codes of the tokens of blocks done..near-1, for every row and KV head in parallel; k and v
    hold the tokens from `offset` on."""
    batch, heads, _, width = k.shape
    half, quarter = fine.shape[3], coarse.shape[3]
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        first = start[b] + max(done[b], 1) * BLOCK
        until = start[b] + near_block(lengths[b], start[b]) * BLOCK
        for n in range(first, until):
            seen = hidden.shape[0] == 0 or hidden[n]
            x = encoder[b, h, width].copy()
            finite = True
            if seen:
                for d in range(width):
                    key, value = k[b, h, n - offset, d], v[b, h, n - offset, d]
                    finite = finite and np.isfinite(key) and np.isfinite(value)
                    for r in range(x.shape[0]):
                        x[r] += key * encoder[b, h, d, r]
            for i in range(half):
                fine[b, h, n, i] = rounded_code(x[i], 15) | rounded_code(x[half + i], 15) << 4
            for i in range(quarter):
                packed = np.uint8(0)
                for j in range(4):
                    packed |= rounded_code(x[2 * half + j * quarter + i], 3) << (2 * j)
                coarse[b, h, n, i] = packed
            chunk = (n - start[b]) // CHUNK
            if (n - start[b]) % CHUNK == 0:
                odd[b, h, chunk] = 0
            if not finite:
                odd[b, h, chunk] = 1


def encode_on_cpu(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask):
    """Make the codes that `progress` lacks; lengths and start int64 `[B]`."""
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0).long()
    near = torch.tensor(
        [near_block(int(n), int(s)) for n, s in zip(lengths, start, strict=True)],
        dtype=torch.int64,
        device="cpu",
    )
    missing = done.clamp(min=1) < near
    if bool(missing.any()):
        first = int((start + done.clamp(min=1) * BLOCK)[missing].min())
        last = int((start + near * BLOCK)[missing].max())
        _reference(
            *arrays(k[:, :, first:last], v[:, :, first:last], encoder, key_mask, fine, coarse, odd),
            *arrays(done, lengths, start, first),
        )
    progress[:, 0] = torch.maximum(done, near)
    progress[:, 1] = start


def _cpu(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask):
    lengths, start = rows_on_cpu(k, lengths, start)
    encode_on_cpu(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask)


# --- CUDA ------------------------------------------------------------------------------------


def _has_tiles(k, code):
    """Whether `encode_tiles` serves such keys: tf32 holds those of 16 bits, and both parts of the
    encoder and a tile, in its own precision and in float32, fit in shared memory. Wider heads have
    too few registers."""
    here, width = card(k.device), padded_width(k.shape[3])
    bytes_wanted = width * (8 * (code.R4 + code.R2) + 6 * TILE)
    fits = width <= WIDEST and bytes_wanted <= here.shared
    return fits and k.element_size() == 2 and here.precision == "tf32x3"


def launch_encode_keys(k, v, encoder, fine, coarse, odd, progress, lengths, start, key_mask):
    """Run the kernels; tensors as in `encode_keys`, on a GPU or in Triton's interpreter."""
    batch, heads, size, width = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    # Enough programs to fill a GPU when a whole prompt is new, few where nothing is.
    programs = max(1, min(1024 // (batch * heads), odd.shape[2]))
    rows, steps = rows_of(size, lengths, start, mask_bytes(key_mask)), steps_of(lengths, start)
    code = Code.of(fine, coarse)
    kernel, how = kernels.encode, {"PRECISION": card(k.device).precision}
    if _has_tiles(k, code):
        kernel, how = kernels.encode_tiles, {"TOKENS": TILE}
    launch_kernel(
        kernel,
        grid=(programs, heads, batch),
        cache=cache_of(k, v),
        rows=rows,
        encoder=encoder,
        codes=Codes(fine, coarse, odd, progress),
        chunks=odd.shape[2],
        programs=programs,
        D=width,
        DP=padded_width(width),
        CODE=code,
        STEPS=steps,
        num_warps=4,
        **how,
    )
    launch_kernel(
        kernels.note, grid=(batch,), rows=rows, progress=progress, STEPS=steps, num_warps=1
    )


_encode_keys = define_op(
    f"{NAME}(Tensor k, Tensor v, Tensor encoder, Tensor(a!) fine, Tensor(b!) coarse, "
    "Tensor(c!) odd, Tensor(d!) progress, Tensor? lengths, Tensor? start, Tensor? key_mask) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_encode_keys,
)
