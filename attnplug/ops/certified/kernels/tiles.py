"""Tiles of queries and their products, as the Triton kernels of `certified_attention` compute them.
Logarithms and scores are to the base 2."""

from attnplug.ops.certified.records import R
from attnplug.ops.common.triton import tl, triton


@triton.jit
def arrived(x, PDL: tl.constexpr):
    """x itself. The compiler changes a tensor's layout right behind its load and needs barriers for
    it, so that one load would wait for the one before. It cannot see through this instruction, and
    keeps all loads in front of it under way at once. Not for the interpreter."""
    if PDL:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        word = x.to(tl.int32, bitcast=True) if PACK == 1 else x
        word = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [word], dtype=word.dtype, is_pure=False, pack=PACK
        )
        x = word.to(x.dtype, bitcast=True)
    return x


@triton.jit
def split_dot(a, b, acc, dtype: tl.constexpr, PARTS: tl.constexpr):
    """acc + a b with float32 `a` in one or two parts of `b`'s dtype."""
    high = a.to(dtype)
    acc = tl.dot(high, b, acc, input_precision="ieee")
    if PARTS == 2:
        acc = tl.dot((a - high.to(tl.float32)).to(dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit
def capped(s, cap):
    """cap tanh(s / cap), both to the base 2: tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    return cap * (1 - 2 / (tl.exp2(s * (2 * R.LOG2E) / cap) + 1))


@triton.jit
def load_query(q, b, h, heads, SHAPE: tl.constexpr):
    """Queries [ROWS, DP] of so many heads of a KV head's group."""
    r = tl.arange(0, SHAPE.ROWS)
    d = tl.arange(0, SHAPE.DP)
    at = q.at + b * q.b + (h * SHAPE.GROUP + r).to(tl.int64)[:, None] * q.h + d[None, :]
    return tl.load(at, mask=(r < heads)[:, None] & (d < SHAPE.D)[None, :], other=0.0)
