"""Tiles of the Hopper pass of `certified_attention`: how one warp holds them, and how codes become
what the tensor cores multiply. Lanes are 4 g + t.

The sums over channels and over tokens run in another order than memory's, which a sum does not
mind; it is chosen so that what a thread has read is what it multiplies. Of eight tokens the bits of
the number stand in reverse, so that the eight lanes that read shared memory at once read all of it.
"""

from attnplug.ops.common.triton import gl, gluon, tl, triton

S_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], instr_shape=[16, 8]))

# A word of four codes (a byte holds channels c and c + D/2) of each of two tokens, and the pairs of
# their scales and of their zeros for both halves, to eight pairs of float16;
# 0x6400 | x is 1024 + x.
_LINES = """
.reg .b32 x<4>, m<3>;
mov.b32 m0, 0x64006400;
mov.b32 m1, 0x2c002c00;
mov.b32 m2, 0xd400d400;
prmt.b32 x0, $8, $9, 0x5410;
prmt.b32 x2, $8, $9, 0x7632;
shr.u32 x1, x0, 8;
shr.u32 x3, x2, 8;
"""
for _i in range(4):
    _LINES += f"""
lop3.b32 ${_i}, x{_i}, 0x000f000f, m0, 0xea;
lop3.b32 ${_i + 4}, x{_i}, 0x00f000f0, m0, 0xea;
sub.f16x2 ${_i}, ${_i}, m0;
fma.rn.f16x2 ${_i + 4}, ${_i + 4}, m1, m2;
fma.rn.f16x2 ${_i}, ${_i}, $10, $11;
fma.rn.f16x2 ${_i + 4}, ${_i + 4}, $12, $13;
"""
_UNPACK = gl.constexpr("{" + _LINES + "}")
_UNPACK_PLACES = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
_HALVES = gl.constexpr((gl.float16,) * 8)
# Four integers of 23 bits plus _MAGIC, as float32, to the bytes of their three digits, each of
# -128..127, from the highest: with 128, 128 * 256 and 64 * 65536 added, a digit is a byte.
_DIGITS = gl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 c, $3, $4, 0x6262;
prmt.b32 d, $5, $6, 0x6262;
prmt.b32 c, c, d, 0x5410;
shl.b32 d, c, 1;
not.b32 d, d;
and.b32 d, d, 0x80808080;
xor.b32 $0, c, 0x40404040;
or.b32 $0, $0, d;
prmt.b32 a, $3, $4, 0x5140;
prmt.b32 b, $5, $6, 0x5140;
prmt.b32 $1, a, b, 0x7632;
prmt.b32 $2, a, b, 0x5410;
xor.b32 $1, $1, 0x80808080;
xor.b32 $2, $2, 0x80808080;
}""")
# Four words of codes as they are: byte e of word j is number e of result j.
_BYTES = gl.constexpr("mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;")
_QUARTERS = gl.constexpr((gl.int8,) * 4)
_THREE = gl.constexpr((gl.int8,) * 3)
_WITH_NAN = gl.constexpr(tl.PropagateNan.ALL)
_MAGIC = gl.constexpr(12582912.0 + 128.0 * 257)  # 1.5 * 2^23 and what makes digits bytes
_LARGEST = gl.constexpr(63.0 * 65536)  # of three digits, the highest of -64..63
# Two tokens' words (scale, zero) to the pair of scales and the pair of zeros.
_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


# Layouts of what one warp holds: 128 channels, and `step` tokens. A kernel asks for them as it is
# compiled. They are no arguments, because Triton could not tell a hook of a launch that has them.


@triton.constexpr_function
def _beyond_eight(step):
    """The tokens beyond eight, by their bits."""
    return [1 << i for i in range(3, (step - 1).bit_length())]


@triton.constexpr_function
def key_words(step):
    """Of key codes [step, 32]."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], *([n, 0] for n in _beyond_eight(step))],
        [[0, 4], [0, 8], [4, 0], [2, 0], [1, 0]],
        [],
        [],
        [step, 32],
    )


@triton.constexpr_function
def queries():
    """[8, 128]."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [8, 128],
    )


@triton.constexpr_function
def scale_pairs():
    """Of the words of a block's key scales [64]."""
    return gl.DistributedLinearLayout(
        [[1], [2], [4], [32]], [[8], [16], [0], [0], [0]], [], [], [64]
    )


@triton.constexpr_function
def scores_of(step):
    """[8, step]."""
    return gl.DistributedLinearLayout(
        [[0, 1], *([0, n] for n in _beyond_eight(step))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [8, step],
    )


@triton.constexpr_function
def value_lines(step):
    """Of value codes [step / 2, 32]."""
    return gl.DistributedLinearLayout(
        [[2, 0], [0, 1], *([n // 2, 0] for n in _beyond_eight(step))],
        [[1, 0], [0, 16], [0, 2], [0, 4], [0, 8]],
        [],
        [],
        [step // 2, 32],
    )


@triton.constexpr_function
def meta_lines(step):
    """Of the values' scales [step / 4, 32]."""
    return gl.DistributedLinearLayout(
        [[0, 4], [1, 0], *([n // 4, 0] for n in _beyond_eight(step))],
        [[0, 16], [0, 8], [0, 0], [0, 1], [0, 2]],
        [],
        [],
        [step // 4, 32],
    )


@triton.constexpr_function
def value_places(step):
    """Of the words of values [step / 2, 4, 4]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *([n // 2, 0, 0] for n in _beyond_eight(step))],
        [[1, 0, 0], [2, 0, 0], [0, 0, 2], [0, 1, 0], [0, 2, 0]],
        [],
        [],
        [step // 2, 4, 4],
    )


@triton.constexpr_function
def eight_blocks():
    """Of the words of eight blocks' key scales [8, 64]."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [8, 64],
    )


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_WITH_NAN)


@gluon.jit
def query_tile(query, words, is_check, XL: gl.constexpr, WXL: gl.constexpr, D: gl.constexpr):
    """(two digits of query [8, D] times scales over its unit [16, D], the third over nothing
    [16, D], unit [8]), channels in the order of `key_tile`; `words` hold two bf16 scales each. Rows
    of `is_check` have scales 1 and are digits as they are; their unit means nothing."""
    words = gl.convert_layout(words, gl.SliceLayout(0, WXL))[None, :]
    ones = gl.convert_layout(is_check, gl.SliceLayout(1, WXL))[:, None]
    words = gl.where(ones, 0x3F803F80, words)
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    x = query * gl.convert_layout(gl.reshape(gl.join(even, odd), (8, D)), XL)
    most = gl.reduce(gl.abs(x), 1, _larger)
    most = gl.where(most < 1e-30, 1e-30, most)  # NaN stays
    factor = gl.where(gl.convert_layout(is_check, gl.SliceLayout(1, XL)), 1.0, _LARGEST / most)
    high, middle, low = gl.inline_asm_elementwise(
        _DIGITS,
        "=&r,=&r,=&r,r,r,r,r",
        [x * factor[:, None] + _MAGIC],
        dtype=_THREE,
        is_pure=True,
        pack=4,
    )
    none = gl.full([8, D], 0, gl.int8, XL)
    return _digit_tile(high, middle, D), _digit_tile(low, none, D), most * (1 / _LARGEST)


@gluon.jit
def _digit_tile(a, b, D: gl.constexpr):
    """Digits [8, D] over digits [8, D] as an operand."""
    both = gl.reshape(gl.permute(gl.join(a, b), (2, 0, 1)), (16, D // 64, 4, 2, 2, 4))
    both = gl.reshape(gl.permute(both, (0, 1, 3, 4, 2, 5)), (16, D))
    return gl.convert_layout(both, gl.DotOperandLayout(0, S_MMA, 4))


@gluon.jit
def key_tile(words, STEP: gl.constexpr, D: gl.constexpr):
    """Words of codes [STEP, D/4] as [D, STEP]: channel 64 a + 16 t + 8 k + 4 h + e at
    64 a + 32 k + 16 h + 4 t + e, token 8 n + 4 c + 2 b + a at 8 n + 4 a + 2 b + c."""
    x = gl.inline_asm_elementwise(
        _BYTES, "=r,=r,=r,=r,r,r,r,r", [words], dtype=_QUARTERS, is_pure=True, pack=4
    )
    # x[2 k + h] [STEP, a t e], with k and h added
    wide = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    wide = gl.reshape(wide, (STEP // 8, 2, 2, 2, D // 64, 4, 4, 2, 2))
    wide = gl.reshape(gl.permute(wide, (4, 7, 8, 5, 6, 0, 3, 2, 1)), (D, STEP))
    return gl.convert_layout(wide, gl.DotOperandLayout(1, S_MMA, 4))


@gluon.jit
def two_rows(product, STEP: gl.constexpr):
    """Rows 0..7 and 8..15 of a product [16, STEP]."""
    return gl.split(gl.permute(gl.reshape(product, (2, 8, STEP)), (1, 2, 0)))


@gluon.jit
def value_words(lines, STEP: gl.constexpr):
    """Lines of value codes, two tokens each [STEP/2, 32], as [STEP/2, D/32, 4, 2]: neighbours side
    by side, in the order of `key_tile`'s tokens."""
    lines = gl.reshape(lines, (STEP // 8, 2, 2, 2, 4, 4))
    return gl.reshape(gl.permute(lines, (0, 3, 2, 4, 5, 1)), (STEP // 2, 4, 4, 2))


@gluon.jit
def scale_words(lines, STEP: gl.constexpr):
    """Lines of the words of values' scales, four tokens each [STEP/4, 32], as those of the lower
    and of the upper channels, [STEP/2, D/32, 2] each."""
    lines = gl.reshape(lines, (STEP // 8, 2, 2, 2, 2, 4))
    return gl.split(gl.reshape(gl.permute(lines, (0, 3, 2, 5, 1, 4)), (STEP // 2, 4, 2, 2)))


@gluon.jit
def value_tile(codes, low_words, high_words, STEP: gl.constexpr, D: gl.constexpr):
    """Words of codes [STEP/2, D/32, 4, 2] and of scales and zeros [STEP/2, D/32, 2], tokens side by
    side, as float16 [D, STEP]: channel (half e, D/16 g + i) at 16 i + 8 e + g."""
    HALF: gl.constexpr = D // 32
    IN: gl.constexpr = HALF // 2  # words of a thread: D / 16 channels of each half
    low = gl.inline_asm_elementwise(
        _PAIRS, "=&r,=r,r,r", [low_words], dtype=gl.int32, is_pure=True, pack=2
    )
    high = gl.inline_asm_elementwise(
        _PAIRS, "=&r,=r,r,r", [high_words], dtype=gl.int32, is_pure=True, pack=2
    )
    SPREAD: gl.constexpr = gl.SliceLayout(2, codes.type.layout)
    low = gl.expand_dims(gl.convert_layout(low, SPREAD), 2)
    high = gl.expand_dims(gl.convert_layout(high, SPREAD), 2)
    low, _codes = gl.broadcast(low, codes)
    high, _codes = gl.broadcast(high, codes)
    x = gl.inline_asm_elementwise(
        _UNPACK, _UNPACK_PLACES, [codes, low, high], dtype=_HALVES, is_pure=True, pack=2
    )
    low = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))  # [.., token, high, low bit of byte]
    high = gl.join(gl.join(x[4], x[6]), gl.join(x[5], x[7]))
    both = gl.reshape(gl.join(low, high), (STEP // 2, HALF, 4 // IN, IN, 2, 2, 2, 2))
    both = gl.reshape(gl.permute(both, (3, 5, 6, 7, 1, 2, 0, 4)), (D, STEP))
    return gl.convert_layout(both, gl.DotOperandLayout(0, S_MMA, 2))


@gluon.jit
def channels_first(x, ROWS: gl.constexpr, D: gl.constexpr):
    """[ROWS, D] with channel 64 a + 16 t + 4 w + 2 h + e at 64 a + 16 w + 8 h + 2 t + e."""
    x = gl.reshape(x, (ROWS, D // 64, 4, 4, 2, 2))
    return gl.reshape(gl.permute(x, (0, 1, 3, 4, 2, 5)), (ROWS, D))


@gluon.jit
def halves(words, D: gl.constexpr):
    """The bf16 [8, D] in words [8, D/2], as int16."""
    low = (words & 0xFFFF).to(gl.int16)
    high = (words >> 16).to(gl.int16)
    return gl.reshape(gl.join(low, high), (8, D))
