"""Keys as INT8 and values as INT4, block by block, beside the cache that they are made from.

    keys     per block and channel d:  code = round((k - zero) / scale) in -127..127,
             zero = bf16((max + min) / 2), scale = bf16 rounded up of max |k - zero| / 127,
             so that |k - (scale code + zero)| <= scale / 2
    values   per token and group of 16 channels:  code = round((v - zero) / scale) in 0..15,
             zero = fp16(min), scale = fp16((max - zero) / 15)
    summary  eta = max over the block's tokens of ||v - v^||_2, measured with the stored metadata,
             nu = max ||v||_2, both rounded up
    check    sums over all of the above, by which a reader knows that it reads what was written

Blocks are numbered from each row's first real token: block j is keys start + block j up to
start + block (j + 1) - 1. Only complete blocks are quantized, once: `progress` says how many
leading blocks are done, for which start. Keys that the key mask hides enter nothing. A key that is
not finite makes its channel's scale NaN, a value that is not finite (or past fp16) makes eta
infinite: `certified_attention` cannot certify such a block and reads the originals. Two value codes
share a byte, channel c the low half and channel c + columns the high one, so that a reader unpacks
them into two tiles and never interleaves. The format is that of "Runtime-Certified Bounded-Error
Quantized Attention" (shared/papers/001), with the keys' metadata in bf16.
"""

from typing import NamedTuple

import numba
import numpy as np
import torch
import triton
import triton.language as tl

from attnplug.errors import ArgumentError
from attnplug.ops._define import (
    check_attention_inputs,
    check_sequence_inputs,
    define_op,
    mask_bytes,
    refuse_gradients,
    require,
    row_step,
    rows_on_cpu,
)
from attnplug.ops.block_bounds import BLOCKS, NO_MASK, blocks_done, note_progress, row_span

GROUP = 16  # channels of a value that share scale and zero
# Check words begin at CHECK_SEED + CHECK_STEP j: an empty block must not look like a written one,
# nor one block like another.
CHECK_SEED, CHECK_STEP = 100_000_007, 7919


class QuantizedKV(NamedTuple):
    """The quantized tier of one layer: N = ceil(S / block) blocks a row, all contiguous."""

    k_codes: torch.Tensor  # int8 [B,Hkv,N,block,D]
    k_meta: torch.Tensor  # bfloat16 [B,Hkv,N,2,D]: scale, zero
    v_codes: torch.Tensor  # uint8 [B,Hkv,N,block,C], C = 16 ceil(D / 32)
    v_meta: torch.Tensor  # int32 [B,Hkv,N,block,C/8]: fp16 scale in the low half, zero in the high
    summary: torch.Tensor  # float32 [B,Hkv,N,2]: eta, nu
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
            zeros(torch.float32, *grid, 2),
            zeros(torch.int32, *grid, 2),
            zeros(torch.int32, batch, 2),
        )

    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self)


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
        k, v: `[B, Hkv, S, D]`, float32, float16 or bfloat16. Originals; may lie in pinned host
            memory that the device reads (`models.pinned`).
        tier: `QuantizedKV.empty(B, Hkv, S, D, block, device)` at first; written.
        block: keys a block: 16, 32, 64 or 128.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen. A block is quantized once:
            the mask of its keys must not change afterwards.

    Whoever shortens or replaces the keys lowers the row's count in `tier.progress`.

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
        ("summary", torch.float32, (*grid, 2)),
        ("check", torch.int32, (*grid, 2)),
        ("progress", torch.int32, (batch, 2)),
    )
    for tensor, (label, dtype, shape) in zip(tier, wanted, strict=True):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ArgumentError(
                f"{name}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs {dtype} {shape}"
            )
        require(tensor.is_contiguous(), name, f"{label} is not contiguous")
        if tensor.device != k.device:
            raise ArgumentError(f"{name}: {label} is on {tensor.device}, k on {k.device}")


def _allocate(
    k,
    v,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    summary,
    check,
    progress,
    lengths,
    start,
    key_mask,
    block,
):
    name = "quantize_kv"
    check_attention_inputs(name, k, k, v)
    check_sequence_inputs(name, k, k, lengths, start, key_mask)
    check_tier(name, k, (k_codes, k_meta, v_codes, v_meta, summary, check, progress), block)


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def _bf16(x, up, scratch):
    """(bits, value) of x as bfloat16: rounded to nearest even, or up where x is positive."""
    scratch[0] = x
    bits = np.int64(scratch.view(np.int32)[0])
    bits = bits + (0xFFFF if up else 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    scratch.view(np.int32)[0] = bits
    return bits >> 16, scratch[0]


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _quantize_keys(k, seen, codes, meta, scratch):
    """Keys `k [block, D]` into codes and metadata; returns their part of (check0, check1)."""
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
            half = max(high - zero, zero - low) * np.float32(1.00001)
            if half > 0:
                least = max(half / np.float32(127), np.float32(2.0**-100))
                scale_bits, scale = _bf16(least, True, scratch)
        meta[0, d], meta[1, d] = scale_bits, zero_bits
        for n in range(size):
            code = 0
            if seen[n] and scale > 0:
                code = int(max(-127.0, min(127.0, np.floor((k[n, d] - zero) / scale + 0.5))))
            codes[n, d] = code
            first += weight * code
        first += scale_bits & 0xFFFF
        second += weight * (3 * (scale_bits & 0xFFFF) + 5 * (zero_bits & 0xFFFF))
    return first, second


@numba.njit(cache=True)
def _quantize_values(v, seen, codes, meta, scratch):
    """Values `v [block, D]` into codes and metadata; returns (check0's part, eta, nu)."""
    size, width = v.shape
    columns = codes.shape[1]
    first, eta, nu = np.int64(0), 0.0, 0.0
    for n in range(size):
        codes[n], meta[n] = 0, 0
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
                error += (np.float64(part[i]) - (code * scale + zero)) ** 2
                norm += np.float64(part[i]) ** 2
            first += (scale_bits & 0xFFFF) + 3 * (zero_bits & 0xFFFF)
        eta, nu = max(eta, np.sqrt(error)), max(nu, np.sqrt(norm))
        if not (np.sqrt(error) < np.inf and np.sqrt(norm) < np.inf):
            eta, nu = np.inf, np.inf
        for c in range(columns):
            first += np.int64(codes[n, c]) * (1 + c % 31)
    return first, eta * (1 + 2.0**-10) + 2.0**-50, nu * (1 + 2.0**-10) + 2.0**-50


@numba.njit(cache=True)
def _fold(bits):
    return (bits & 0xFFFF) + 3 * (bits >> 16 & 0xFFFF)


@numba.njit(parallel=True, cache=True)
def _reference(
    k, v, mask, k_codes, k_meta, v_codes, v_meta, summary, check, done, until, start, offset, block
):
    """Blocks done..until-1 of every row and head, in parallel; `k, v` hold the tokens from
    `offset` on."""
    batch, heads = k.shape[:2]
    for item in numba.prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        scratch = np.empty(1, np.float32)
        seen = np.ones(block, np.bool_)
        for j in range(done[b], until[b]):
            at = start[b] + j * block
            if hidden.shape[0] > 0:
                seen = hidden[at : at + block]
            tokens = slice(at - offset, at - offset + block)
            one, two = _quantize_keys(
                k[b, h, tokens], seen, k_codes[b, h, j], k_meta[b, h, j], scratch
            )
            three, eta, nu = _quantize_values(
                v[b, h, tokens], seen, v_codes[b, h, j], v_meta[b, h, j], scratch
            )
            summary[b, h, j, 0], summary[b, h, j, 1] = eta, nu
            bits = summary[b, h, j].view(np.int32)
            seed = CHECK_SEED + CHECK_STEP * j
            check[b, h, j, 0] = seed + one + three
            check[b, h, j, 1] = seed + two + _fold(bits[0]) + 7 * _fold(bits[1])


def _cpu(
    k,
    v,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    summary,
    check,
    progress,
    lengths,
    start,
    key_mask,
    block,
):
    lengths, start = rows_on_cpu(k, lengths, start)
    until = (lengths - start).clamp(min=0) // block
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0).long()
    missing = done < until
    if bool(missing.any()):
        first = int((start + done * block)[missing].min())
        last = int((start + until * block)[missing].max())
        _reference(
            k[:, :, first:last].float().numpy(),
            v[:, :, first:last].float().numpy(),
            NO_MASK if key_mask is None else key_mask.numpy(),
            k_codes.numpy(),
            k_meta.view(torch.int16).numpy(),
            v_codes.numpy(),
            v_meta.numpy(),
            summary.numpy(),
            check.numpy(),
            done.numpy(),
            until.numpy(),
            start.numpy(),
            first,
            block,
        )
    progress[:, 0] = torch.maximum(done, until)
    progress[:, 1] = start


# --- CUDA ------------------------------------------------------------------------------------


@triton.jit
def bf16_value(bits):
    """float32 of bfloat16 bits in an integer tensor; no bfloat16 arithmetic, which Triton's
    interpreter lacks."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp16_value(bits):
    """float32 of float16 bits in the low half of an int32 tensor."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fold_bits(x):
    """A float32's bits as a small sum for a check word."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits & 0xFFFF) + 3 * (bits >> 16 & 0xFFFF)


@triton.jit
def _quantize_key_tile(key, seen, in_width, d):
    """Keys [BLOCK, DP] -> (codes, scale bits, zero bits, their parts of check0 and check1)."""
    finite = seen[:, None] & (tl.abs(key) < float("inf"))
    odd = tl.sum((seen[:, None] & ~(tl.abs(key) < float("inf"))).to(tl.int32), 0)
    low = tl.min(tl.where(finite, key, float("inf")), 0)
    high = tl.max(tl.where(finite, key, float("-inf")), 0)
    some = in_width & (high >= low)
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    bits = (low * 0.5 + high * 0.5).to(tl.int32, bitcast=True)
    zero_bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    zero = bf16_value(zero_bits)
    half = tl.maximum(high - zero, zero - low) * 1.00001
    # rounded to nearest, as the reference divides: a compiled `/` is an approximation
    least = tl.maximum(tl.div_rn(half, 127.0), 7.888609052210118e-31)  # 2^-100
    scale_bits = (least.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale_bits = tl.where(half > 0, scale_bits, 0)
    scale_bits = tl.where(odd > 0, 0x7FC0, scale_bits)
    zero_bits = tl.where(odd > 0, 0, zero_bits)
    scale = bf16_value(scale_bits)
    usable = finite & ((scale > 0) & in_width)[None, :]
    x = tl.div_rn(key - zero[None, :], tl.where(scale > 0, scale, 1.0)[None, :])
    x = tl.where(usable, tl.floor(x + 0.5), 0.0)
    codes = tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int32)
    weight = tl.where(in_width, 1 + d % 31, 0)
    raw = scale_bits & 0xFFFF
    first = tl.sum(tl.sum(codes * weight[None, :], 1), 0) + tl.sum(tl.where(in_width, raw, 0), 0)
    second = tl.sum(weight * (3 * raw + 5 * (zero_bits & 0xFFFF)), 0)
    return codes, scale_bits, zero_bits, first, second


@triton.jit
def _quantize_value_tile(value, seen, in_groups):
    """Values [BLOCK, groups, 16] -> (codes, words, check0's part of the words, squared errors and
    squared norms [BLOCK])."""
    low = tl.min(value, 2)
    high = tl.max(value, 2)
    odd = tl.sum((value != value).to(tl.int32), 2) > 0  # a minimum may drop a NaN
    low = tl.where(odd, float("nan"), low)
    zero = low.to(tl.float16)
    base = zero.to(tl.float32)
    scale = tl.maximum(tl.div_rn(high - base, 15.0), 0.0).to(tl.float16)
    step = scale.to(tl.float32)
    good = (step > 0) & (step < float("inf"))
    x = tl.floor(tl.div_rn(value - base[:, :, None], tl.where(good, step, 1.0)[:, :, None]) + 0.5)
    x = tl.where(good[:, :, None] & (x == x), x, 0.0)
    codes = tl.minimum(tl.maximum(x, 0.0), 15.0).to(tl.int32)
    keep = seen[:, None] & in_groups[None, :]
    codes = tl.where(keep[:, :, None], codes, 0)
    error = value - (codes.to(tl.float32) * step[:, :, None] + base[:, :, None])
    squares = tl.sum(tl.sum(tl.where(keep[:, :, None], error * error, 0.0), 2), 1)
    norms = tl.sum(tl.sum(tl.where(keep[:, :, None], value * value, 0.0), 2), 1)
    scale_bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    zero_bits = zero.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    words = tl.where(keep, scale_bits | (zero_bits << 16), 0)
    part = tl.sum(tl.sum(tl.where(keep, scale_bits + 3 * zero_bits, 0), 1), 0)
    return codes, words, part, squares, norms


@triton.jit
def _quantize(
    k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress, lengths, start, key_mask,
    S, N, programs, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """One program's share of the missing blocks of one row's head."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    until = tl.maximum(length - low, 0) // BLOCK
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    g = tl.arange(0, HALF_P)
    c = tl.arange(0, 16)
    in_width = d < D
    COLUMNS: tl.constexpr = HALF * 16
    k_at = k + b * k_b + h.to(tl.int64) * k_h + d[None, :]
    channel = g[:, None] * 16 + c[None, :]
    v_at = v + b * v_b + h.to(tl.int64) * v_h + channel[None, :, :]
    for j in range(blocks_done(progress, b, low) + tl.program_id(0), until, programs):
        at = low + j * BLOCK + n
        seen = at >= 0
        if key_mask is not None:
            seen = tl.load(key_mask + b * mask_b + at) != 0
        tokens = at.to(tl.int64)
        block = (b * tl.num_programs(1) + h) * N + j
        loadable = seen[:, None] & in_width[None, :]
        key = tl.load(k_at + tokens[:, None] * k_s, mask=loadable, other=0.0).to(tl.float32)
        codes, scale_bits, zero_bits, first, second = _quantize_key_tile(key, seen, in_width, d)
        code_at = k_codes + block * (BLOCK * D) + n[:, None] * D + d[None, :]
        tl.store(code_at, codes.to(tl.int8), mask=in_width[None, :])
        tl.store(k_meta + block * (2 * D) + d, scale_bits.to(tl.int16), mask=in_width)
        tl.store(k_meta + block * (2 * D) + D + d, zero_bits.to(tl.int16), mask=in_width)

        low_groups = g < HALF
        high_groups = low_groups & (g + HALF < D // 16)
        token_at = v_at + tokens[:, None, None] * v_s
        low_mask = seen[:, None, None] & low_groups[None, :, None]
        high_mask = seen[:, None, None] & high_groups[None, :, None]
        low_value = tl.load(token_at, mask=low_mask, other=0.0).to(tl.float32)
        high_value = tl.load(token_at + COLUMNS, mask=high_mask, other=0.0).to(tl.float32)
        low_codes, low_words, part, squares, norms = _quantize_value_tile(
            low_value, seen, low_groups
        )
        first += part
        high_codes, high_words, part, more_squares, more_norms = _quantize_value_tile(
            high_value, seen, high_groups
        )
        error = tl.sqrt(squares + more_squares)
        norm = tl.sqrt(norms + more_norms)
        odd = tl.sum((~((error < float("inf")) & (norm < float("inf")))).to(tl.int32), 0) > 0
        eta = tl.where(odd, float("inf"), tl.max(error, 0) * 1.0009765625 + 8.881784197001252e-16)
        nu = tl.where(odd, float("inf"), tl.max(norm, 0) * 1.0009765625 + 8.881784197001252e-16)
        codes_v = low_codes | (high_codes << 4)
        weight = 1 + channel % 31
        weight = tl.where(low_groups[:, None], weight, 0)
        first += part + tl.sum(tl.sum(tl.sum(codes_v * weight[None, :, :], 2), 1), 0)
        place = block * (BLOCK * COLUMNS) + n[:, None, None] * COLUMNS + channel[None, :, :]
        tl.store(v_codes + place, codes_v.to(tl.uint8), mask=low_groups[None, :, None])
        word_at = v_meta + block * (BLOCK * 2 * HALF) + n[:, None] * (2 * HALF) + g[None, :]
        tl.store(word_at, low_words, mask=low_groups[None, :])
        tl.store(word_at + HALF, high_words, mask=low_groups[None, :])
        tl.store(summary + block * 2, eta)
        tl.store(summary + block * 2 + 1, nu)
        tl.store(check + block * 2, 100000007 + 7919 * j + first)
        second += 100000007 + 7919 * j + fold_bits(eta) + 7 * fold_bits(nu)
        tl.store(check + block * 2 + 1, second)


@triton.jit
def _note(
    progress, lengths, start, S, BLOCK: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    note_progress(progress, b, low, tl.maximum(length - low, 0) // BLOCK)


def launch_quantize_kv(
    k,
    v,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    summary,
    check,
    progress,
    lengths,
    start,
    key_mask,
    block,
):
    """Run the kernels; tensors as in `quantize_kv`, on a GPU or in Triton's interpreter."""
    batch, heads, size, width = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    key_mask = mask_bytes(key_mask)
    # Enough programs to fill a GPU when a whole prompt is new, few where nothing is.
    programs = max(1, min(512 // (batch * heads), check.shape[2]))
    half = v_codes.shape[4] // 16
    steps = row_step(lengths), row_step(start)
    _quantize[(programs, heads, batch)](
        k, v, k_codes, k_meta.view(torch.int16), v_codes, v_meta, summary, check, progress,
        lengths, start, key_mask, size, check.shape[2], programs, *k.stride()[:3], *v.stride()[:3],
        0 if key_mask is None else key_mask.stride(0), width, triton.next_power_of_2(width), block,
        half, triton.next_power_of_2(half), *steps,
        num_warps=8 if block * width > 4096 else 4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _note[(batch,)](progress, lengths, start, size, block, *steps, num_warps=1)


_quantize_kv = define_op(
    "quantize_kv(Tensor k, Tensor v, Tensor(a!) k_codes, Tensor(b!) k_meta, Tensor(c!) v_codes, "
    "Tensor(d!) v_meta, Tensor(e!) summary, Tensor(f!) check, Tensor(g!) progress, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, int block) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_quantize_kv,
)
