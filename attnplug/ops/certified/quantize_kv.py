"""Keys as INT8 and values as INT4, block by block, beside the cache that they are made from.

    keys     per block and channel d:  code = round((k - zero) / scale) in -127..127,
             zero = bf16((max + min) / 2), scale = bf16 rounded up of max |k - zero| / 127,
             so that |k - (scale code + zero)| <= scale / 2
    values   per token and group of 16 channels:  code = round((v - zero) / scale) in 0..15,
             zero = fp16(min), scale = fp16((max - zero) / 15)
    summary  eta = max over the block's tokens of ||v - v^||_2, nu = max ||v||_2, and the spectral
             norms of the block's errors of keys and of values, as matrices [block, D]; measured
             with the stored metadata, all rounded up
    check    sums over all of the above, by which a reader knows that it reads what was written

Blocks are numbered from each row's first real token: block j is keys start + block j up to
start + block (j + 1) - 1. Only complete blocks are quantized, once: `progress` says how many
leading blocks are done, for which start. Keys that the key mask hides enter nothing. A key that is
not finite makes its channel's scale NaN, a value that is not finite (or past fp16) makes eta
infinite: `certified_attention` cannot certify such a block and reads the originals. Two value codes
share a byte, channel c the low half and channel c + columns the high one. So a reader unpacks them
into two tiles and never interleaves. The format is that of "Runtime-Certified Bounded-Error
Quantized Attention" (docs/papers.md), with the keys' metadata in bf16.
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.certified.kernels.quantize import launch_quantize_kv
from attnplug.ops.certified.proof import (
    CARE,
    CHECK_SEED,
    CHECK_STEP,
    HALF_CARE,
    LEAST_SCALE,
    MEASURED_FLOOR,
    SPECTRAL_SLACK,
)
from attnplug.ops.common.checks import (
    BLOCKS,
    check_attention_inputs,
    check_sequence_inputs,
    check_tensor,
)
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import rows_on_cpu

GROUP = 16  # channels of a value that share scale and zero
SUMMARY_FIELDS = 4
PROOF = "e7e871618e29a220"  # `proof.digest()` of the constants that numba compiles in here


class QuantizedKV(NamedTuple):
    """The quantized tier of one layer: N = ceil(S / block) blocks a row, all contiguous."""

    k_codes: torch.Tensor  # int8 [B,Hkv,N,block,D]
    k_meta: torch.Tensor  # bfloat16 [B,Hkv,N,2,D]: scale, zero
    v_codes: torch.Tensor  # uint8 [B,Hkv,N,block,C], C = 16 ceil(D / 32)
    v_meta: torch.Tensor  # int32 [B,Hkv,N,block,C/8]: fp16 scale in the low half, zero in the high
    summary: torch.Tensor  # float32 [B,Hkv,N,4]: eta, nu, spectral norms of key and value errors
    check: torch.Tensor  # int32 [B,Hkv,N,2]
    progress: torch.Tensor  # int32 [B,2]: leading blocks done, and the start they count from

    @classmethod
    def empty(
        cls, batch: int, heads: int, size: int, width: int, block: int, device: torch.device | str
    ) -> "QuantizedKV":
        """An empty tier for a cache `[batch, heads, size, width]`."""
        grid, columns = (batch, heads, -(-size // block)), value_columns(width)

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(torch.int8, *grid, block, width),
            zeros(torch.bfloat16, *grid, 2, width),
            zeros(torch.uint8, *grid, block, columns),
            zeros(torch.int32, *grid, block, columns // 8),
            zeros(torch.float32, *grid, SUMMARY_FIELDS),
            zeros(torch.int32, *grid, 2),
            zeros(torch.int32, batch, 2),
        )

    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self)


SCHEMA = (
    "quantize_kv(Tensor k, Tensor v, Tensor(a!) k_codes, Tensor(b!) k_meta, Tensor(c!) v_codes, "
    "Tensor(d!) v_meta, Tensor(e!) summary, Tensor(f!) check, Tensor(g!) progress, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, int block) -> ()"
)
Call = arguments_of(SCHEMA)


def value_columns(width: int) -> int:
    """Bytes of one token's value codes: half the channels, in whole groups."""
    return GROUP * (-(-width // (2 * GROUP)))


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    tier: QuantizedKV,
    *,
    block: int,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> None:
    """Quantize all complete blocks that `tier` lacks, in place.

    Args:
        k, v: `[B, Hkv, S, D]`, float32, float16 or bfloat16. Originals; may lie in host
            memory that the device reads (`models.host_memory`).
        tier: `QuantizedKV.empty(B, Hkv, S, D, block, device)` at first; written.
        block: keys a block: 16, 32, 64 or 128.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen. A block is quantized once:
            the mask of its keys must not change afterwards.

    A caller that shortens or replaces the keys must lower the row's count in `tier.progress`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("quantize_kv", k, v)
    _quantize_kv(k, v, *tier, lengths, start, key_mask, block)


def check_tier(name: str, k: torch.Tensor, tier: tuple[torch.Tensor, ...], block: int) -> None:
    """The checks of a quantized tier against the keys `[B,Hkv,S,D]` that it is made from."""
    if block not in BLOCKS:
        raise ArgumentError(f"{name}: block is {block}, needs {', '.join(map(str, BLOCKS))}")
    batch, heads, size, width = k.shape
    grid, columns = (batch, heads, -(-size // block)), value_columns(width)
    wanted = (
        ("k_codes", torch.int8, (*grid, block, width)),
        ("k_meta", torch.bfloat16, (*grid, 2, width)),
        ("v_codes", torch.uint8, (*grid, block, columns)),
        ("v_meta", torch.int32, (*grid, block, columns // 8)),
        ("summary", torch.float32, (*grid, SUMMARY_FIELDS)),
        ("check", torch.int32, (*grid, 2)),
        ("progress", torch.int32, (batch, 2)),
    )
    for tensor, (label, dtype, shape) in zip(tier, wanted, strict=True):
        check_tensor(name, label, tensor, dtype, shape, k.device)


def _allocate(*args):
    call = Call(*args)
    k, v, tier = *args[:2], args[2:9]
    name = "quantize_kv"
    check_attention_inputs(name, None, k, v)
    check_sequence_inputs(name, None, k, call.lengths, call.start, call.key_mask)
    check_tier(name, k, tier, call.block)


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _bf16(x, up, scratch):
    """(bits, value) of x as bfloat16: rounded to nearest even, or up where x is positive."""
    scratch[0] = x
    bits = np.int64(scratch.view(np.int32)[0])
    bits = bits + (0xFFFF if up else 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    scratch.view(np.int32)[0] = bits
    return bits >> 16, scratch[0]


@njit()
def _fp16(x, scratch):
    """(bits, value) of x as float16, rounded to nearest even."""
    size = abs(x)
    sign = 0x8000 if x < 0 else 0
    if not size < 65520.0:
        limit = np.float32(-np.inf) if x < 0 else np.float32(np.inf)
        return (0x7E00, np.float32(np.nan)) if size != size else (sign | 0x7C00, limit)
    if size < 6.103515625e-05:
        steps = np.rint(np.float64(x) * 16777216.0)
        return sign | np.int64(abs(steps)), np.float32(steps / 16777216.0)
    scratch[0] = x
    bits = np.int64(scratch.view(np.int32)[0])
    bits = bits + 0xFFF + (bits >> 13 & 1) >> 13 << 13
    scratch.view(np.int32)[0] = bits
    return sign | ((bits & 0x7FFFFFFF) >> 13) - (112 << 10), scratch[0]


@njit()
def _product_with_transpose(rows):
    """`rows @ rows.T` without BLAS, which warns once a block where a parallel loop calls it."""
    size, width = rows.shape
    columns = rows.T.copy()
    found = np.zeros((size, size))
    for i in range(size):
        for d in range(width):
            for j in range(size):
                found[i, j] += rows[i, d] * columns[d, j]
    return found


@njit()
def _spectral_norm(errors):
    """At least the spectral norm of `errors [block, D]`: the Schatten norm ||(E E^T)^2||_F^(1/4),
    which is at most n^(1/8) times it, and what the kernel's arithmetic needs."""
    longest = 0.0
    for n in range(errors.shape[0]):
        size = np.sqrt((errors[n] ** 2).sum())
        if not size < np.inf:
            return np.inf
        longest = max(longest, size)
    if longest == 0:
        return MEASURED_FLOOR
    near = errors / longest
    gram = _product_with_transpose(near)
    fourth = _product_with_transpose(gram)
    square = np.sqrt(np.sqrt((fourth**2).sum()) + SPECTRAL_SLACK * (gram**2).sum())
    square += SPECTRAL_SLACK * np.trace(gram)
    return longest * np.sqrt(square) * CARE + MEASURED_FLOOR


@njit()
def _quantize_keys(k, seen, codes, meta, scratch, errors):
    """Keys `k [block, D]` into codes, metadata and `errors`; returns their part of (check0,
    check1)."""
    size, width = k.shape
    first, second = np.int64(0), np.int64(0)
    for d in range(width):
        low, high, finite, weight = np.float32(np.inf), np.float32(-np.inf), True, 1 + d % 31
        for n in range(size):
            if seen[n]:
                low, high = min(low, k[n, d]), max(high, k[n, d])
                finite = finite and abs(k[n, d]) < np.inf
        scale_bits, zero_bits = np.int64(0), np.int64(0)
        scale, zero = np.float32(0), np.float32(0)
        if not finite:
            scale_bits = np.int64(0x7FC0)
        elif high >= low:
            zero_bits, zero = _bf16(low * np.float32(0.5) + high * np.float32(0.5), False, scratch)
            half = max(high - zero, zero - low) * np.float32(HALF_CARE)
            if half > 0:
                least = max(half / np.float32(127), np.float32(LEAST_SCALE))
                scale_bits, scale = _bf16(least, True, scratch)
        meta[0, d], meta[1, d] = scale_bits, zero_bits
        for n in range(size):
            code = 0
            if seen[n] and scale > 0:
                code = int(max(-127.0, min(127.0, np.floor((k[n, d] - zero) / scale + 0.5))))
            codes[n, d] = code
            errors[n, d] = k[n, d] - (np.float64(code) * scale + zero) if seen[n] else 0.0
            first += weight * code
        first += (scale_bits & 0xFFFF) << 16 * (d % 2)
        words = (scale_bits & 0xFFFF) + 3 * (zero_bits & 0xFFFF)
        second += (1 + 2 * (d // 2)) * (words << 16 * (d % 2))
    return first, second


@njit()
def _quantize_values(v, seen, codes, meta, scratch, errors):
    """Values `v [block, D]` into codes, metadata and `errors`; returns (check0's part, eta, nu)."""
    size, width = v.shape
    columns = codes.shape[1]
    half = columns // 16
    first, eta, nu = np.int64(0), 0.0, 0.0
    for n in range(size):
        codes[n], meta[n], errors[n] = 0, 0, 0.0
        if not seen[n]:
            continue
        error, norm = 0.0, 0.0
        for g in range(width // 16):
            part = v[n, g * 16 : g * 16 + 16]
            low, high = part.min(), part.max()
            zero_bits, zero = _fp16(low, scratch)
            scale_bits, scale = _fp16(max(np.float32(0), (high - zero) / np.float32(15)), scratch)
            word = np.int64(zero_bits) << 16 | np.int64(scale_bits)
            meta[n, g] = word - (word >> 31 << 32)
            for i in range(16):
                code = 0
                if scale > 0 and scale < np.inf:
                    code = int(max(0.0, min(15.0, np.floor((part[i] - zero) / scale + 0.5))))
                c = g * 16 + i
                codes[n, c % columns] |= code << 4 * (c // columns)
                errors[n, c] = np.float64(part[i]) - (code * scale + zero)
                error += errors[n, c] ** 2
                norm += np.float64(part[i]) ** 2
            first += (1 + 2 * (g // half)) * (1 + 2 * (g % half)) * (word & 0xFFFFFFFF)
        eta, nu = max(eta, np.sqrt(error)), max(nu, np.sqrt(norm))
        if not (np.sqrt(error) < np.inf and np.sqrt(norm) < np.inf):
            eta, nu = np.inf, np.inf
        for c in range(columns):
            first += (np.int64(codes[n, c]) << 8 * (c % 4)) * (1 + 2 * (c // 4))
    return first, eta * CARE + MEASURED_FLOOR, nu * CARE + MEASURED_FLOOR


@njit(parallel=True)
def _reference(
    k, v, mask, k_codes, k_meta, v_codes, v_meta, summary, check, done, until, start, offset, block
):
    """Blocks done..until-1 of every row and head, in parallel; `k, v` hold the tokens from
    `offset` on."""
    batch, heads = k.shape[:2]
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        scratch = np.empty(1, np.float32)
        errors = np.empty((block, k.shape[3]))
        seen = np.ones(block, np.bool_)
        for j in range(done[b], until[b]):
            at = start[b] + j * block
            if hidden.shape[0] > 0:
                seen = hidden[at : at + block]
            tokens = slice(at - offset, at - offset + block)
            one, two = _quantize_keys(
                k[b, h, tokens], seen, k_codes[b, h, j], k_meta[b, h, j], scratch, errors
            )
            of_keys = _spectral_norm(errors)
            three, eta, nu = _quantize_values(
                v[b, h, tokens], seen, v_codes[b, h, j], v_meta[b, h, j], scratch, errors
            )
            summary[b, h, j, 0], summary[b, h, j, 1] = eta, nu
            summary[b, h, j, 2], summary[b, h, j, 3] = of_keys, _spectral_norm(errors)
            bits = summary[b, h, j].view(np.int32)
            seed = CHECK_SEED + CHECK_STEP * j
            check[b, h, j, 0] = seed + one + three
            check[b, h, j, 1] = seed + two
            for i in range(SUMMARY_FIELDS):
                check[b, h, j, 1] += (1 + 6 * i) * np.int64(bits[i])


def _cpu(*args):
    call = Call(*args)
    k, v, progress, block = call.k, call.v, call.progress, call.block
    lengths, start = rows_on_cpu(k, call.lengths, call.start)
    until = (lengths - start).clamp(min=0) // block
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0).long()
    missing = done < until
    if bool(missing.any()):
        first = int((start + done * block)[missing].min())
        last = int((start + until * block)[missing].max())
        _reference(
            *arrays(k[:, :, first:last], v[:, :, first:last], call.key_mask),
            *arrays(call.k_codes, call.k_meta.view(torch.int16), call.v_codes, call.v_meta),
            *arrays(call.summary, call.check),
            *arrays(done, until, start, first, block),
        )
    progress[:, 0] = torch.maximum(done, until)
    progress[:, 1] = start


_quantize_kv = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_quantize_kv,
)
