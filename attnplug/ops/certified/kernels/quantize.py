"""The Triton kernels of `quantize_kv`."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.device import machine
from attnplug.ops.common.rows import blocks_done, mask_bytes, note_progress, row_span, row_step

WAVES = 1


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
    first = tl.sum(tl.sum(codes * weight[None, :], 1), 0)
    first += tl.sum(tl.where(in_width, raw << 16 * (d % 2), 0), 0)
    words = (raw + 3 * (zero_bits & 0xFFFF)) << 16 * (d % 2)
    second = tl.sum(tl.where(in_width, (1 + 2 * (d // 2)) * words, 0), 0)
    return codes, scale_bits, zero_bits, first, second


@triton.jit
def _quantize_value_tile(value, seen, in_groups, weight):
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
    part = tl.sum(tl.sum(words * weight[None, :], 1), 0)
    return codes, words, part, squares, norms


@triton.jit
def _quantize(
    k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress, lengths, start, key_mask,
    S, N, programs, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program's share of the missing blocks of one row's head."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
            low_value, seen, low_groups, 1 + 2 * g
        )
        first += part
        high_codes, high_words, part, more_squares, more_norms = _quantize_value_tile(
            high_value, seen, high_groups, 3 + 6 * g
        )
        error = tl.sqrt(squares + more_squares)
        norm = tl.sqrt(norms + more_norms)
        odd = tl.sum((~((error < float("inf")) & (norm < float("inf")))).to(tl.int32), 0) > 0
        eta = tl.where(odd, float("inf"), tl.max(error, 0) * 1.0009765625 + 8.881784197001252e-16)
        nu = tl.where(odd, float("inf"), tl.max(norm, 0) * 1.0009765625 + 8.881784197001252e-16)
        codes_v = low_codes | (high_codes << 4)
        weight = tl.where(low_groups[:, None], (1 + 2 * (channel // 4)) << 8 * (channel % 4), 0)
        first += part + tl.sum(tl.sum(tl.sum(codes_v * weight[None, :, :], 2), 1), 0)
        place = block * (BLOCK * COLUMNS) + n[:, None, None] * COLUMNS + channel[None, :, :]
        tl.store(v_codes + place, codes_v.to(tl.uint8), mask=low_groups[None, :, None])
        word_at = v_meta + block * (BLOCK * 2 * HALF) + n[:, None] * (2 * HALF) + g[None, :]
        tl.store(word_at, low_words, mask=low_groups[None, :])
        tl.store(word_at + HALF, high_words, mask=low_groups[None, :])
        tl.store(summary + block * 2, eta)
        tl.store(summary + block * 2 + 1, nu)
        tl.store(check + block * 2, 100000007 + 7919 * j + first)
        second += 100000007 + 7919 * j + eta.to(tl.int32, bitcast=True)
        second += 7 * nu.to(tl.int32, bitcast=True)
        tl.store(check + block * 2 + 1, second)


@triton.jit
def _note(
    progress, lengths, start, S, BLOCK: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    # One program a multiprocessor, which is what its registers let run at once: in most steps
    # nothing is due, and every further wave of programs would find that out after the last one.
    multiprocessors, pdl = machine(k.device)
    programs = max(1, min(multiprocessors * WAVES // (batch * heads), check.shape[2]))
    half = v_codes.shape[4] // 16
    steps = row_step(lengths), row_step(start), pdl
    early: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    _quantize[(programs, heads, batch)](
        k, v, k_codes, k_meta.view(torch.int16), v_codes, v_meta, summary, check, progress,
        lengths, start, key_mask, size, check.shape[2], programs, *k.stride()[:3], *v.stride()[:3],
        0 if key_mask is None else key_mask.stride(0), width, triton.next_power_of_2(width), block,
        half, triton.next_power_of_2(half), *steps,
        num_warps=8 if block * width > 4096 else 4, **early,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _note[(batch,)](progress, lengths, start, size, block, *steps, num_warps=1, **early)
