"""The Triton kernels of `quantize_kv`."""

from typing import Any

import torch

from attnplug.ops.certified.kernels.tier import bf16_value
from attnplug.ops.certified.records import R
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import blocks_done, mask_bytes, note_progress, row_span
from attnplug.ops.common.sizes import next_power_of_two, padded_width
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.common.views import cache_of, rows_of, steps_of

WAVES = 1


@triton.jit
def _quantize_key_tile(key, seen, in_width, d):
    """Keys [BLOCK, DP] -> (codes, scale bits, zero bits, errors, their parts of check0 and
    check1)."""
    finite = seen[:, None] & (tl.abs(key) < float("inf"))
    bad = tl.sum((seen[:, None] & ~(tl.abs(key) < float("inf"))).to(tl.int32), 0)
    low = tl.min(tl.where(finite, key, float("inf")), 0)
    high = tl.max(tl.where(finite, key, float("-inf")), 0)
    some = in_width & (high >= low)
    low = tl.where(some, low, 0.0)
    high = tl.where(some, high, 0.0)
    bits = (low * 0.5 + high * 0.5).to(tl.int32, bitcast=True)
    zero_bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    zero = bf16_value(zero_bits)
    half = tl.maximum(high - zero, zero - low) * R.HALF_CARE
    # rounded to nearest, as the reference divides: a compiled `/` is an approximation
    least = tl.maximum(tl.div_rn(half, 127.0), R.LEAST_SCALE)
    scale_bits = (least.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    scale_bits = tl.where(half > 0, scale_bits, 0)
    scale_bits = tl.where(bad > 0, 0x7FC0, scale_bits)
    zero_bits = tl.where(bad > 0, 0, zero_bits)
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
    error = tl.where(seen[:, None], key - (codes.to(tl.float32) * scale + zero), 0.0)
    error = tl.where(in_width[None, :], error, 0.0)
    return codes, scale_bits, zero_bits, error, first, second


@triton.jit
def _quantize_value_tile(value, seen, in_groups, weight):
    """Values [BLOCK, groups, 16] -> (codes, words, check0's part of the words, errors, squared
    norms [BLOCK])."""
    low = tl.min(value, 2)
    high = tl.max(value, 2)
    has_nan = tl.sum((value != value).to(tl.int32), 2) > 0  # a minimum may drop a NaN
    low = tl.where(has_nan, float("nan"), low)
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
    error = tl.where(keep[:, :, None], error, 0.0)
    norms = tl.sum(tl.sum(tl.where(keep[:, :, None], value * value, 0.0), 2), 1)
    scale_bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    zero_bits = zero.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    words = tl.where(keep, scale_bits | (zero_bits << 16), 0)
    part = tl.sum(tl.sum(words * weight[None, :], 1), 0)
    return codes, words, part, error, norms


@triton.jit
def _spectral_norm(low, high, TWO: tl.constexpr):
    """`quantize_kv._spectral_norm` of errors [BLOCK, n], `high` beside `low` with TWO; and the
    length of the longest row. NaN and infinity give infinity."""
    squares = tl.sum(low * low, 1)
    if TWO:
        squares += tl.sum(high * high, 1)
    bad = tl.sum((~(squares < float("inf"))).to(tl.int32), 0) > 0
    longest = tl.sqrt(tl.max(squares, 0))
    factor = tl.where((longest > 0) & ~bad, 1 / tl.maximum(longest, 1e-30), 0.0)
    near = (low * factor).to(tl.float16)  # no entry is above 1, here and in the product
    gram = tl.dot(near, near.T)
    if TWO:
        near = (high * factor).to(tl.float16)
        gram = tl.dot(near, near.T, gram)
    half = gram.to(tl.float16)
    fourth = tl.dot(half, half)
    square = tl.sqrt(tl.sum(tl.sum(fourth * fourth, 1), 0))
    square = tl.sqrt(square + R.SPECTRAL_SLACK * tl.sum(tl.sum(gram * gram, 1), 0))
    square += R.SPECTRAL_SLACK * tl.sum(squares * (factor * factor), 0)
    norm = longest * tl.sqrt(square) * R.CARE + R.MEASURED_FLOOR
    return tl.where(bad, float("inf"), norm), longest


@triton.jit
def _quantize(
    cache,
    rows,
    k_codes,
    k_meta,
    v_codes,
    v_meta,
    summary,
    check,
    progress,
    N,
    programs,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_P: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's share of the missing blocks of one row's head."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    until = tl.maximum(length - low, 0) // BLOCK
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    g = tl.arange(0, HALF_P)
    c = tl.arange(0, 16)
    in_width = d < D
    COLUMNS: tl.constexpr = HALF * 16
    k_at = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h + d[None, :]
    channel = g[:, None] * 16 + c[None, :]
    v_at = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h + channel[None, :, :]
    for j in range(blocks_done(progress, b, low) + tl.program_id(0), until, programs):
        at = low + j * BLOCK + n
        seen = at >= 0
        if rows.key_mask is not None:
            seen = tl.load(rows.key_mask + b * rows.mask_b + at) != 0
        tokens = at.to(tl.int64)
        block = (b * tl.num_programs(1) + h) * N + j
        loadable = seen[:, None] & in_width[None, :]
        key = tl.load(k_at + tokens[:, None] * cache.k_s, mask=loadable, other=0.0).to(tl.float32)
        codes, scale_bits, zero_bits, error, first, second = _quantize_key_tile(
            key, seen, in_width, d
        )
        of_keys, _longest = _spectral_norm(error, error, False)
        code_at = k_codes + block * (BLOCK * D) + n[:, None] * D + d[None, :]
        tl.store(code_at, codes.to(tl.int8), mask=in_width[None, :])
        tl.store(k_meta + block * (2 * D) + d, scale_bits.to(tl.int16), mask=in_width)
        tl.store(k_meta + block * (2 * D) + D + d, zero_bits.to(tl.int16), mask=in_width)

        low_groups = g < HALF
        high_groups = low_groups & (g + HALF < D // 16)
        token_at = v_at + tokens[:, None, None] * cache.v_s
        low_mask = seen[:, None, None] & low_groups[None, :, None]
        high_mask = seen[:, None, None] & high_groups[None, :, None]
        low_value = tl.load(token_at, mask=low_mask, other=0.0).to(tl.float32)
        high_value = tl.load(token_at + COLUMNS, mask=high_mask, other=0.0).to(tl.float32)
        low_codes, low_words, part, low_error, norms = _quantize_value_tile(
            low_value, seen, low_groups, 1 + 2 * g
        )
        first += part
        high_codes, high_words, part, high_error, more_norms = _quantize_value_tile(
            high_value, seen, high_groups, 3 + 6 * g
        )
        low_error = tl.reshape(low_error, [BLOCK, HALF_P * 16])
        high_error = tl.reshape(high_error, [BLOCK, HALF_P * 16])
        of_values, longest = _spectral_norm(low_error, high_error, True)
        norm = tl.sqrt(norms + more_norms)
        bad = tl.sum((~(norm < float("inf"))).to(tl.int32), 0) > 0
        bad = bad | (of_values == float("inf"))
        eta = tl.where(bad, float("inf"), longest * R.CARE + R.MEASURED_FLOOR)
        nu = tl.where(bad, float("inf"), tl.max(norm, 0) * R.CARE + R.MEASURED_FLOOR)
        codes_v = low_codes | (high_codes << 4)
        weight = tl.where(low_groups[:, None], (1 + 2 * (channel // 4)) << 8 * (channel % 4), 0)
        first += part + tl.sum(tl.sum(tl.sum(codes_v * weight[None, :, :], 2), 1), 0)
        place = block * (BLOCK * COLUMNS) + n[:, None, None] * COLUMNS + channel[None, :, :]
        tl.store(v_codes + place, codes_v.to(tl.uint8), mask=low_groups[None, :, None])
        word_at = v_meta + block * (BLOCK * 2 * HALF) + n[:, None] * (2 * HALF) + g[None, :]
        tl.store(word_at, low_words, mask=low_groups[None, :])
        tl.store(word_at + HALF, high_words, mask=low_groups[None, :])
        tl.store(summary + block * R.SUMMARY_FIELDS + R.ETA, eta)
        tl.store(summary + block * R.SUMMARY_FIELDS + R.NU, nu)
        tl.store(summary + block * R.SUMMARY_FIELDS + R.KEY_SPECTRUM, of_keys)
        tl.store(summary + block * R.SUMMARY_FIELDS + R.VALUE_SPECTRUM, of_values)
        check_at = check + block * R.CHECK_FIELDS
        # Constants on the right: the interpreter makes a constant of what stands at one's right.
        seed = j * R.CHECK_STEP + R.CHECK_SEED
        tl.store(check_at + R.CHECK_PASS, seed + first)
        second += seed + eta.to(tl.int32, bitcast=True)
        second += 7 * nu.to(tl.int32, bitcast=True)
        second += 13 * of_keys.to(tl.int32, bitcast=True)
        second += 19 * of_values.to(tl.int32, bitcast=True)
        tl.store(check_at + R.CHECK_PREPARE, second)


@triton.jit
def _note(progress, rows, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr):
    """Row b's complete blocks are done."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0)
    length, low = row_span(rows, b, STEPS)
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
    rows = rows_of(size, lengths, start, mask_bytes(key_mask))
    # One program a multiprocessor, which is what its registers let run at once: in most steps
    # nothing is due, and every further wave of programs would find that out after the last one.
    found = card(k.device)
    programs = max(1, min(found.processors * WAVES // (batch * heads), check.shape[2]))
    half = v_codes.shape[4] // 16
    shared: dict[str, Any] = {
        "progress": progress,
        "rows": rows,
        "BLOCK": block,
        "STEPS": steps_of(lengths, start),
        "PDL": found.pdl,
    }
    if found.pdl:
        shared["launch_pdl"] = True
    launch_kernel(
        _quantize,
        grid=(programs, heads, batch),
        cache=cache_of(k, v),
        k_codes=k_codes,
        k_meta=k_meta.view(torch.int16),
        v_codes=v_codes,
        v_meta=v_meta,
        summary=summary,
        check=check,
        N=check.shape[2],
        programs=programs,
        D=width,
        DP=padded_width(width),
        HALF=half,
        HALF_P=next_power_of_two(half),
        num_warps=8 if block * width > 4096 else 4,
        **shared,
    )
    launch_kernel(_note, grid=(batch,), num_warps=1, **shared)
