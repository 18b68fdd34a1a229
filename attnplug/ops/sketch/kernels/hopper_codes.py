"""Codes as Hopper's tensor cores take them: what the Gluon kernel of `scan_sketch` reads, and how
it takes bytes apart. A chunk is 128 tokens, a step four chunks; a program has four warps.

Rows of 16 bytes are one token (16 bytes of codes) or two neighbours (8 bytes). The order of the sum
over coordinates is that of the bytes: k = 16 field + byte. A thread loads the words that it
multiplies, and nothing goes through shared memory.
"""

from attnplug.ops.common.triton import gl, gluon

PAIRS = gl.constexpr(64)  # of neighbouring tokens in a chunk
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], instr_shape=[16, 8]))
CODES = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
# Of each 16 rows a thread has a word of one of the first eight, and of the row eight further.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4]
    )
)
FOUR_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1, 0], [0, 0, 0, 1]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[8, 0, 0, 0], [16, 0, 0, 0]],
        [],
        [32, 4, 2, 2],
    )
)


def _unpack(fields: int) -> tuple[str, str]:
    """PTX, and its operands' places, that takes four words of bytes apart: result `fields` j + f
    has field f of the bytes of word j."""
    bits, lines = 8 // fields, ""
    mask = f"0x{((1 << bits) - 1) * 0x01010101:08X}"
    for j in range(4):
        word = f"${4 * fields + j}"
        lines += f"and.b32 ${fields * j}, {word}, {mask};\n"
        for f in range(1, fields):
            result = f"${fields * j + f}"
            lines += f"shr.b32 t, {word}, {bits * f}; and.b32 {result}, t, {mask};\n"
    return "{ .reg .b32 t;\n" + lines + "}", ",".join(["=&r"] * (4 * fields) + ["r"] * 4)


_NIBBLES = gl.constexpr(_unpack(2)[0])
_NIBBLES_PLACES = gl.constexpr(_unpack(2)[1])
_QUARTERS = gl.constexpr(_unpack(4)[0])
_QUARTERS_PLACES = gl.constexpr(_unpack(4)[1])
_EIGHT = gl.constexpr((gl.int8,) * 8)
_SIXTEEN = gl.constexpr((gl.int8,) * 16)


@gluon.jit
def _nibble_operand(low, high, low_8, high_8):
    """Of results of `_NIBBLES` for the words of rows 0..7 and of rows 8..15 of each 16: the codes
    [64, 32]. A result's element (p, h) is byte p + 2 h of the word."""
    x = gl.join(gl.join(low, low_8), gl.join(high, high_8))
    x = gl.reshape(x, (4, 8, 4, 2, 2, 2, 2))  # warp, row, word, p, h, which eight, field
    x = gl.reshape(gl.permute(x, (0, 5, 1, 6, 2, 4, 3)), (PAIRS, 32))
    return gl.convert_layout(x, CODES)


@gluon.jit
def _quarter_operand(a, b, c, d, a_8, b_8, c_8, d_8):
    """The same for four fields: the codes [64, 64]."""
    low = gl.join(gl.join(a, a_8), gl.join(b, b_8))
    high = gl.join(gl.join(c, c_8), gl.join(d, d_8))
    x = gl.reshape(gl.join(low, high), (4, 8, 4, 2, 2, 2, 2, 2))
    x = gl.reshape(gl.permute(x, (0, 5, 1, 7, 6, 2, 4, 3)), (PAIRS, 64))
    return gl.convert_layout(x, CODES)


@gluon.jit
def _codes(one, one_8, other, other_8, FIELDS: gl.constexpr):
    """The words [32, 4] of two tensors of 64 rows as codes int8 [64, 16 FIELDS] each."""
    words = gl.join(gl.join(one, other), gl.join(one_8, other_8))
    words = gl.convert_layout(words, FOUR_WORDS)
    if FIELDS == 2:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _NIBBLES, _NIBBLES_PLACES, [words], dtype=_EIGHT, is_pure=True, pack=4
        )
        return _nibble_operand(a, b, e, f), _nibble_operand(c, d, g, h)
    else:
        a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = gl.inline_asm_elementwise(
            _QUARTERS, _QUARTERS_PLACES, [words], dtype=_SIXTEEN, is_pure=True, pack=4
        )
        one = _quarter_operand(a, b, c, d, i, j, k, m)
        return one, _quarter_operand(e, f, g, h, n, o, p, q)


@gluon.jit
def two_chunks(a, b, BYTES: gl.constexpr, FIELDS: gl.constexpr):
    """Codes of the even and the odd tokens of chunk a, and of chunk b."""
    a0, a8, a_odd0, a_odd8 = a
    b0, b8, b_odd0, b_odd8 = b
    if BYTES == 16:
        a_even, a_odd = _codes(a0, a8, a_odd0, a_odd8, FIELDS)
        b_even, b_odd = _codes(b0, b8, b_odd0, b_odd8, FIELDS)
        return a_even, a_odd, b_even, b_odd
    else:
        a_codes, b_codes = _codes(a0, a8, b0, b8, FIELDS)
        return a_codes, a_codes, b_codes, b_codes


@gluon.jit
def _rows(at, there, CHUNK_: gl.constexpr, BYTES: gl.constexpr, EVICT: gl.constexpr):
    """The words of the rows 0..7 and 8..15 of each 16 of a chunk: of even and of odd tokens if a
    token has 16 bytes, else of all. `at` are this thread's words of chunk 0."""
    ROW: gl.constexpr = BYTES // 2  # words of two tokens
    at += CHUNK_ * PAIRS * ROW
    x = gl.load(at, mask=there, other=0, eviction_policy=EVICT)
    x_8 = gl.load(at + 8 * ROW, mask=there, other=0, eviction_policy=EVICT)
    if BYTES == 16:
        odd = gl.load(at + 4, mask=there, other=0, eviction_policy=EVICT)
        odd_8 = gl.load(at + 8 * ROW + 4, mask=there, other=0, eviction_policy=EVICT)
        return x, x_8, odd, odd_8
    else:
        return x, x_8, x, x_8


@gluon.jit
def load_step(
    fine_at, coarse_at, block, there, F: gl.constexpr, C: gl.constexpr, EVICT: gl.constexpr
):
    """The words of four chunks from `block` on. They may be past the part, but they are in the
    cache: behind the candidates there are three full blocks."""
    fine_at += block * (PAIRS * F // 2)
    coarse_at += block * (PAIRS * C // 2)
    f0 = _rows(fine_at, there, 0, F, EVICT)
    c0 = _rows(coarse_at, there, 0, C, EVICT)
    f1 = _rows(fine_at, there, 1, F, EVICT)
    c1 = _rows(coarse_at, there, 1, C, EVICT)
    f2 = _rows(fine_at, there, 2, F, EVICT)
    c2 = _rows(coarse_at, there, 2, C, EVICT)
    f3 = _rows(fine_at, there, 3, F, EVICT)
    c3 = _rows(coarse_at, there, 3, C, EVICT)
    return f0, c0, f1, c1, f2, c2, f3, c3
