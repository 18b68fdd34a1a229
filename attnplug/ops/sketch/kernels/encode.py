"""The Triton code that makes the codes of tokens."""

from attnplug.ops.common.rows import blocks_done, note_progress, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.sketch.kernels.codes import BLOCK, CHUNK, near_block


@triton.jit
def _coordinates(
    key_at,
    encoder,
    seen,
    first,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """COUNT coordinates from `first` on of CHUNK tokens, in steps of their codes, [CHUNK, COUNT];
    NaN where a key is not finite."""
    d = tl.arange(0, DEPTH)
    c = tl.arange(0, COUNT)
    bias = tl.load(encoder + D * R + first + c)
    x = tl.zeros([CHUNK, COUNT], tl.float32) + bias[None, :]
    for d0 in tl.range(0, DP, DEPTH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        inside = d0 + d < D
        key = tl.load(
            key_at + (d0 + d)[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        weight = tl.load(
            encoder + (d0 + d)[:, None] * R + first + c[None, :], mask=inside[:, None], other=0.0
        )
        # "tf32x3" is three products of tf32 parts: keys of 16 bits are exact in one.
        x = tl.dot(key, weight, x, input_precision=PRECISION)
    return x


@triton.jit
def _rounded(x, MOST: tl.constexpr):
    """The nearest code to each coordinate; of a NaN it is 0."""
    x = tl.floor(x + 0.5)
    return tl.where(x > 0, tl.minimum(x, MOST), 0.0).to(tl.int32)


@triton.jit
def _halves(x):
    """The first and the second half of the columns of [N, 2 J]."""
    shape: tl.constexpr = (x.shape[0], 2, x.shape[1] // 2)
    return tl.split(tl.permute(tl.reshape(x, shape), (0, 2, 1)))


@triton.jit
def store_codes(codes, slot, written, x, y, CODE: tl.constexpr):
    """Store the codes of tokens at `slot` [N], of their coordinates of 4 and of 2 bits; of those
    that are `written` [N], or of all where that is None."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    low_half, high_half = _halves(_rounded(x, 15.0))
    ab, cd = _halves(_rounded(y, 3.0))
    p0, p1 = _halves(ab)
    p2, p3 = _halves(cd)
    slot = slot[:, None]
    mask = None if written is None else written[:, None]
    tl.store(
        codes.fine + slot * (R4 // 2) + tl.arange(0, R4 // 2)[None, :],
        (low_half | (high_half << 4)).to(tl.uint8),
        mask=mask,
    )
    tl.store(
        codes.coarse + slot * (R2 // 4) + tl.arange(0, R2 // 4)[None, :],
        (p0 | (p1 << 2) | (p2 << 4) | (p3 << 6)).to(tl.uint8),
        mask=mask,
    )


@triton.jit
def encode_chunks(
    cache,
    encoder,
    codes,
    mask_at,
    begin,
    end,
    step,
    low,
    place,
    b,
    h,
    S,
    chunks,
    D: tl.constexpr,
    DP: tl.constexpr,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Codes of chunks begin, begin + step, ... before end of one row's KV head. `mask_at`: where
    the row's key mask begins, or None."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    n = tl.arange(0, CHUNK)
    R: tl.constexpr = R4 + R2
    DEPTH: tl.constexpr = 32
    d = tl.arange(0, DEPTH)
    encoder += place * ((D + 1) * R)
    for chunk in tl.range(begin, end, step, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = (low + chunk * CHUNK + n).to(tl.int64)
        seen = at >= 0
        if mask_at is not None:
            seen = tl.load(mask_at + at) != 0
        key_at = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h + at[:, None] * cache.k_s
        x = _coordinates(key_at, encoder, seen, 0, D, DP, R, R4, DEPTH, PRECISION)
        y = _coordinates(key_at, encoder, seen, R4, D, DP, R, R2, DEPTH, PRECISION)
        store_codes(codes, place * S + at, None, x, y, CODE)
        value_at = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h + at[:, None] * cache.v_s
        wrong = 0
        for d0 in tl.range(0, DP, DEPTH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            shown = seen[:, None] & (d0 + d < D)[None, :]
            value = tl.load(value_at + (d0 + d)[None, :], mask=shown, other=0.0).to(tl.float32)
            key = tl.load(key_at + (d0 + d)[None, :], mask=shown, other=0.0).to(tl.float32)
            finite = (tl.abs(value) < float("inf")) & (tl.abs(key) < float("inf"))
            wrong = tl.maximum(wrong, tl.max(tl.max(1 - finite.to(tl.int32), 1), 0))
        tl.store(codes.odd + place * chunks + chunk, wrong.to(tl.uint8))


@triton.jit
def encode(
    cache,
    rows,
    encoder,
    codes,
    chunks,
    programs,
    D: tl.constexpr,
    DP: tl.constexpr,
    CODE: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program's share of the missing codes of one row's KV head."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    done = tl.maximum(blocks_done(codes.progress, b, low), 1)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    PER: tl.constexpr = BLOCK // CHUNK
    encode_chunks(
        cache=cache,
        encoder=encoder,
        codes=codes,
        mask_at=mask_at,
        begin=done * PER + tl.program_id(0),
        end=near_block(length, low) * PER,
        step=programs,
        low=low,
        place=b * tl.num_programs(1) + h,
        b=b,
        h=h,
        S=rows.S,
        chunks=chunks,
        D=D,
        DP=DP,
        CODE=CODE,
        PRECISION=PRECISION,
    )


@triton.jit
def _leading(weight):
    """The part of float32 numbers that tf32 holds."""
    return (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _projected(key, top, rest, bias):
    """key @ (top + rest) + bias in float32, of keys that tf32 holds as they are."""
    x = tl.zeros([key.shape[0], bias.shape[0]], tl.float32) + bias[None, :]
    x = tl.dot(key, rest, x, input_precision="tf32")
    return tl.dot(key, top, x, input_precision="tf32")


@triton.jit
def encode_tiles(
    cache,
    rows,
    encoder,
    codes,
    chunks,
    programs,
    D: tl.constexpr,
    DP: tl.constexpr,
    CODE: tl.constexpr,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """What `encode` makes, TOKENS of a block at a time, of keys of 16 bits.

    A tile's keys and values are read once and are all on their way at once, and both parts of the
    encoder stay in shared memory; `encode` loads 32 channels after the other and waits for each.
    A prompt of 131,072 tokens takes a quarter of its time on an H200 (docs/log/sketch.md)."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(rows, b, STEPS)
    done = tl.maximum(blocks_done(codes.progress, b, low), 1)
    place = b * tl.num_programs(1) + h
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    R: tl.constexpr = R4 + R2
    PER: tl.constexpr = TOKENS // CHUNK
    n = tl.arange(0, TOKENS)
    d = tl.arange(0, DP)
    c4 = tl.arange(0, R4)
    c2 = tl.arange(0, R2)
    encoder += place * ((D + 1) * R)
    weight_at = encoder + d[:, None] * R
    fine = tl.load(weight_at + c4[None, :], mask=(d < D)[:, None], other=0.0)
    coarse = tl.load(weight_at + R4 + c2[None, :], mask=(d < D)[:, None], other=0.0)
    fine_top = _leading(fine)
    coarse_top = _leading(coarse)
    fine_bias = tl.load(encoder + D * R + c4)
    coarse_bias = tl.load(encoder + D * R + R4 + c2)
    keys = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h + d[None, :]
    values = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h + d[None, :]
    begin = done * (BLOCK // TOKENS) + tl.program_id(0)
    end = near_block(length, low) * (BLOCK // TOKENS)
    for tile in tl.range(begin, end, programs, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = (low + tile * TOKENS + n).to(tl.int64)
        shown = (d < D)[None, :] & (at >= 0)[:, None]
        if rows.key_mask is not None:
            shown &= (tl.load(rows.key_mask + b * rows.mask_b + at) != 0)[:, None]
        key = tl.load(keys + at[:, None] * cache.k_s, mask=shown, other=0.0)
        value = tl.load(values + at[:, None] * cache.v_s, mask=shown, other=0.0).to(tl.float32)
        key = key.to(tl.float32)
        x = _projected(key, fine_top, fine - fine_top, fine_bias)
        y = _projected(key, coarse_top, coarse - coarse_top, coarse_bias)
        store_codes(codes, place * rows.S + at, None, x, y, CODE)
        finite = (tl.abs(value) < float("inf")) & (tl.abs(key) < float("inf"))
        wrong = tl.max(tl.reshape(tl.max(1 - finite.to(tl.int32), 1), [PER, CHUNK]), 1)
        flag_at = codes.odd + place * chunks + tile * PER + tl.arange(0, PER)
        tl.store(flag_at, wrong.to(tl.uint8))


@triton.jit
def note(rows, progress, STEPS: tl.constexpr):
    b = tl.program_id(0)
    length, low = row_span(rows, b, STEPS)
    note_progress(progress, b, low, near_block(length, low))
