"""The kernel of pool_keys: the compressed keys of blocks of tokens."""

from typing import Any, NamedTuple

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


class Turns(NamedTuple):
    """Cosines and sines `[B, T', P]` and their strides."""

    cos: Any
    sin: Any
    cos_strides: Any
    sin_strides: Any


@triton.jit
def _add_rows(acc, at, slot, stride, channel, live, in_width):
    """acc plus the channels of a key of each block."""
    places = at + slot.to(tl.int64)[:, None] * stride + channel[None, :]
    return acc + tl.load(places, mask=live[:, None] & in_width[None, :], other=0.0).to(tl.float32)


@triton.jit
def _turn_of(at, strides, b, slot, channel, there):
    """What to turn channels by, `[TILE, channels]`, at each block's first token."""
    t_b, t_t, t_p = strides
    places = at + b * t_b + slot.to(tl.int64)[:, None] * t_t + channel[None, :] * t_p
    return tl.load(places, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, inverse, weight, channel, in_width):
    """The norm of channels, given the inverse root of their mean square."""
    w = tl.load(weight + channel, mask=in_width, other=0.0).to(tl.float32)
    return x * inverse[:, None] * (1.0 + w)[None, :]


@triton.jit
def pool_blocks(
    pooled,
    keys,
    turns,
    weight,
    since,
    until,
    slots,
    slots_b,
    most,
    programs,
    eps,
    pooled_strides,
    keys_strides,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALFP: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every `programs`-th tile of row b's blocks from `since` to `until`. Channels are in three
    parts: two halves that are turned together, and the rest."""
    p_b, p_j = pooled_strides
    k_b, k_t = keys_strides
    b = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(since + b, cache_modifier=".cg")
    end = tl.load(until + b, cache_modifier=".cg")
    begin = tl.minimum(tl.maximum(begin, 0), most).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), most).to(tl.int32)
    half = tl.arange(0, HALFP)
    rest = 2 * HALF + tl.arange(0, REST)
    in_half = half < HALF
    in_rest = rest < D
    keys_at = keys + b * k_b
    for i in range(begin // TILE + tl.program_id(0), tl.cdiv(end, TILE), programs):
        j = i * TILE + tl.arange(0, TILE)
        live = (j >= begin) & (j < end)
        low = tl.zeros([TILE, HALFP], tl.float32)
        high = tl.zeros([TILE, HALFP], tl.float32)
        other = tl.zeros([TILE, REST], tl.float32)
        first = j * RATIO
        if slots is not None:
            first = tl.load(slots + b * slots_b + first, mask=live, other=0)
        for m in range(RATIO):
            t = j * RATIO + m
            if slots is not None:
                t = tl.load(slots + b * slots_b + t, mask=live, other=0)
            low = _add_rows(low, keys_at, t, k_t, half, live, in_half)
            high = _add_rows(high, keys_at, t, k_t, half + HALF, live, in_half)
            other = _add_rows(other, keys_at, t, k_t, rest, live, in_rest)
        low, high, other = low / RATIO, high / RATIO, other / RATIO
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(other * other, 1)
        inverse = tl.rsqrt(square / D + eps)
        low = _scaled(low, inverse, weight, half, in_half)
        high = _scaled(high, inverse, weight, half + HALF, in_half)
        other = _scaled(other, inverse, weight, rest, in_rest)

        there = live[:, None] & in_half[None, :]
        cos, sin = turns.cos, turns.sin
        low_cos = _turn_of(cos, turns.cos_strides, b, first, half, there)
        low_sin = _turn_of(sin, turns.sin_strides, b, first, half, there)
        high_cos = _turn_of(cos, turns.cos_strides, b, first, half + HALF, there)
        high_sin = _turn_of(sin, turns.sin_strides, b, first, half + HALF, there)
        out = pooled + b * p_b + j.to(tl.int64)[:, None] * p_j
        tl.store(out + half[None, :], low * low_cos - high * low_sin, mask=there)
        turned = high * high_cos + low * high_sin
        tl.store(out + (half + HALF)[None, :], turned, mask=there)
        tl.store(out + rest[None, :], other, mask=live[:, None] & in_rest[None, :])
