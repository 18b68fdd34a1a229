"""Loads of the quantized tier (`QuantizedKV`), as the Triton kernels of `certified_attention` read
it. Key metadata come as int16 words, value metadata as int32 words of two float16."""

from attnplug.ops.common.triton import tl, triton


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
def quantized_blocks(progress, b, length, low, BLOCK: tl.constexpr):
    """Complete blocks of row b that the tier holds, counted from `low`."""
    done = tl.load(progress + b * 2, cache_modifier=".cg")
    at = tl.load(progress + b * 2 + 1, cache_modifier=".cg")
    done = tl.where(at == low, done, 0)
    return tl.minimum(done, tl.maximum(length - low, 0) // BLOCK)


@triton.jit
def load_key_scales(k_meta, place, SHAPE: tl.constexpr):
    """The bits [DP] of the scales of one block's keys."""
    d = tl.arange(0, SHAPE.DP)
    return tl.load(k_meta + place * (2 * SHAPE.D) + d, mask=d < SHAPE.D, other=0)


@triton.jit
def load_key_codes(k_codes, place, SHAPE: tl.constexpr):
    """One block's key codes [BLOCK, DP]."""
    n = tl.arange(0, SHAPE.BLOCK)
    d = tl.arange(0, SHAPE.DP)
    at = k_codes + place * (SHAPE.BLOCK * SHAPE.D) + n[:, None] * SHAPE.D + d[None, :]
    return tl.load(at, mask=(d < SHAPE.D)[None, :], other=0)


@triton.jit
def load_value_codes(v_codes, v_meta, place, SHAPE: tl.constexpr):
    """One block's value codes [BLOCK, groups, 16], and the words of scale and zero of the groups
    [BLOCK, groups] in the low and in the high channels, as they lie in memory."""
    codes_at = v_codes + place * (SHAPE.BLOCK * (SHAPE.HALF * 16))
    meta_at = v_meta + place * (SHAPE.BLOCK * 2 * SHAPE.HALF)
    n = tl.arange(0, SHAPE.BLOCK)
    g = tl.arange(0, SHAPE.HALF_P)
    c = tl.arange(0, 16)
    there = (g < SHAPE.HALF)[None, :]
    word = n[:, None, None] * (SHAPE.HALF * 16) + g[None, :, None] * 16 + c[None, None, :]
    codes = tl.load(codes_at + word, mask=there[:, :, None], other=0)
    words_at = meta_at + n[:, None] * (2 * SHAPE.HALF) + g[None, :]
    low_words = tl.load(words_at, mask=there, other=0)
    high_words = tl.load(words_at + SHAPE.HALF, mask=there, other=0)
    return codes, low_words, high_words


@triton.jit
def values_of(codes, words, BLOCK: tl.constexpr, CP: tl.constexpr):
    """Codes 0..15 with their words as float32 [BLOCK, CP]."""
    value = codes.to(tl.float32) * fp16_value(words)[:, :, None]
    return tl.reshape(value + fp16_value(words >> 16)[:, :, None], [BLOCK, CP])
