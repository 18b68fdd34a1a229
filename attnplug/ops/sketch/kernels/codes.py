"""What the kernels of `sketch` share: which tokens have codes, how codes are unpacked, and the
estimated score of a token.

A token has R4 coordinates of 4 bits and R2 of 2 bits. Coordinate i of the 4-bit part lies in byte
i % (R4 / 2), in its low half for the first R4 / 2 coordinates; coordinate i of the 2-bit part lies
in byte i % (R2 / 4), at bit 2 (i / (R2 / 4)). So unpacking four bytes at a time gives codes in the
order of the coordinates, and no byte changes its place. All logarithms and scores are to the
base 2.
"""

from typing import Any, NamedTuple

import torch

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton

BLOCK = tl.constexpr(128)  # tokens; the sink is the first block
CHUNK = tl.constexpr(32)  # tokens that share a flag
EIGHT = tl.constexpr(8)  # neighbours that share a bit of what a scan has counted
NOTED = tl.constexpr(32)  # tokens of a byte of such bits
LOCAL = tl.constexpr(4)  # last blocks that are read exactly, the one being filled included
REACH = tl.constexpr(127)  # units of the largest weight, so that int8 holds all
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to a number it leaves an integer
# Blocks of a part of the scan: where a row has so many for each, it has more parts; none has less.
PART = tl.constexpr(16)
LEAST = tl.constexpr(4)
LARGEST = tl.constexpr(100.0)  # share of a token, log2, past which it counts no more
# Bins of the histogram of shares: OCTAVE a factor of 2 within FINE bins of the middle, an eighth of
# that beyond.
BINS = tl.constexpr(256)
OCTAVE = tl.constexpr(16.0)
FINE = tl.constexpr(96.0)
MARGIN = tl.constexpr(2)  # times k: so many tokens a step means the next one to count
LOWER = tl.constexpr(2)  # bins by which the hint goes down where too few were counted to know
RISE = tl.constexpr(1)  # bins by which it goes up in a step, at most


class Code(NamedTuple):
    """How many coordinates a token's code has."""

    R4: int  # of 4 bits
    R2: int  # of 2 bits

    @classmethod
    def of(cls, fine: torch.Tensor, coarse: torch.Tensor) -> "Code":
        return cls(2 * fine.shape[3], 4 * coarse.shape[3])


class Projection(NamedTuple):
    """What `prepare_query` makes of the queries, a row of so many columns each."""

    at: Any
    columns: Any


class Scanned(NamedTuple):
    """What the scan leaves, as `scan_sketch` returns it. A kernel is given what it reads of it."""

    shares: Any = None
    total: Any = None
    sums: Any = None
    norm: Any = None
    middle: Any = None
    parts: Any = None  # of a row's sums


class Pieces(NamedTuple):
    """Attention to pieces of a row's tokens, and its log-sum-exps to the base 2."""

    out: Any
    lse: Any
    number: Any  # of a row's pieces


def projection_of(projected: torch.Tensor) -> Projection:
    return Projection(projected, projected.shape[2])


def pieces_of(out: torch.Tensor | None, lse: torch.Tensor) -> Pieces:
    return Pieces(out, lse, lse.shape[2])


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernels in front, and let the next one start: it waits likewise."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def near_block(length, low):
    """First of the last blocks, counted from `low`, that are read exactly. Tokens of blocks 1 to
    here are candidates; block 0 is the sink."""
    own = tl.maximum(length - 1 - low, 0) // BLOCK
    return tl.maximum(own - (LOCAL - 1), 1)


@triton.jit
def parts_of(near, parts, fewest):
    """How many of the `parts` programs of a row's scan share its blocks: `fewest`, or more while
    each has PART blocks, and fewer where one had less than LEAST. So a short row in a large room
    has fewer than a full one, as a program's beginning takes as long as several blocks. All
    programs where `fewest` is -1."""
    blocks = near - 1
    used = tl.minimum(tl.maximum(fewest, tl.cdiv(blocks, PART)), blocks // LEAST)
    return tl.where(fewest < 0, parts, tl.maximum(tl.minimum(used, parts), 1))


@triton.jit
def _nibbles(x, ASM: tl.constexpr):
    """The low and the high halves of bytes, int8."""
    if ASM:  # the compiler would handle one byte at a time
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 $0, $2, 0x0F0F0F0F; shr.b32 t, $2, 4; "
            "and.b32 $1, t, 0x0F0F0F0F; }",
            "=r,=r,r",
            [x],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = (x & 15).to(tl.int8), (x >> 4).to(tl.int8)
    return low, high


@triton.jit
def _pairs(x, ASM: tl.constexpr):
    """The four 2-bit parts of bytes, from the low end, int8."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 $0, $4, 0x03030303; shr.b32 t, $4, 2; "
            "and.b32 $1, t, 0x03030303; shr.b32 t, $4, 4; and.b32 $2, t, 0x03030303; "
            "shr.b32 t, $4, 6; and.b32 $3, t, 0x03030303; }",
            "=r,=r,=r,=r,r",
            [x],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        a, b = (x & 3).to(tl.int8), ((x >> 2) & 3).to(tl.int8)
        c, d = ((x >> 4) & 3).to(tl.int8), (x >> 6).to(tl.int8)
    return a, b, c, d


@triton.jit
def _joined(a, b):
    """[N, J] and [N, J] side by side, [N, 2 J]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def unpack_fine(x, ASM: tl.constexpr):
    """Bytes [N, R4 / 2] to codes int8 [N, R4], zeros after them up to 32: what a product needs."""
    low, high = _nibbles(x, ASM)
    codes = _joined(low, high)
    if codes.shape[1] < 32:
        codes = _joined(codes, tl.zeros_like(codes))
    return codes


@triton.jit
def unpack_coarse(x, ASM: tl.constexpr):
    """Bytes [N, R2 / 4] to codes int8 [N, R2]."""
    a, b, c, d = _pairs(x, ASM)
    return _joined(_joined(a, b), _joined(c, d))


@triton.jit
def in_units(weight, unit):
    """Weights in units, int8. Sums over codes stay below 2^22, so that 1.5 * 2^23 plus a sum is
    exact in float32."""
    whole = (weight * (1 / unit) + ROUND).to(tl.int32, bitcast=True) - 0x4B400000
    # No weight is larger. Without a bound, LLVM stores the low byte of the float, and ptxas 12.8
    # makes that the float's value as an integer (F2IP).
    return tl.minimum(tl.maximum(whole, -REACH), REACH).to(tl.int8)


@triton.jit
def load_weights(
    projected,
    row,
    first,
    R: tl.constexpr,
    RP: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    unit,
):
    """The weights [RP, HEADS] of R coordinates from `first` on in units, int8."""
    i = tl.arange(0, RP)
    g = tl.arange(0, HEADS)
    at = projected.at + (row + g).to(tl.int64)[None, :] * projected.columns + first + i[:, None]
    weight = tl.load(
        at, mask=(i < R)[:, None] & (g < GROUP)[None, :], other=0.0, cache_modifier=".cg"
    )
    return in_units(weight, unit[None, :])


@triton.jit
def load_unit(
    projected, row, R: tl.constexpr, RP: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr
):
    """What one unit of the weights is, [HEADS]."""
    i = tl.arange(0, RP)
    g = tl.arange(0, HEADS)
    at = projected.at + (row + g).to(tl.int64)[None, :] * projected.columns + i[:, None]
    weight = tl.load(
        at, mask=(i < R)[:, None] & (g < GROUP)[None, :], other=0.0, cache_modifier=".cg"
    )
    return tl.maximum(tl.max(tl.abs(weight), 0) / REACH, 1e-30)


@triton.jit
def load_variance(
    projected, row, R: tl.constexpr, RP: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr
):
    """Variance [HEADS] of the estimated scores, of which the projection holds R components."""
    i = tl.arange(0, RP)
    g = tl.arange(0, HEADS)
    first = projected.at + R + 2
    at = first + (row + g).to(tl.int64)[None, :] * projected.columns + i[:, None]
    part = tl.load(
        at, mask=(i < R)[:, None] & (g < GROUP)[None, :], other=0.0, cache_modifier=".cg"
    )
    return tl.sum(part * part, 0)


@triton.jit
def capped(s, cap, CAPPED: tl.constexpr):
    """cap tanh(s / cap), both to the base 2: tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    if CAPPED:
        s = cap * (1 - 2 / (tl.exp2(s * (2 * 1.4426950408889634) / cap) + 1))
    return s


@triton.jit
def estimated(fine, coarse, fine_weights, coarse_weights, unit, offset):
    """Estimated scores [N, HEADS] of tokens by their codes, without cap."""
    total = tl.dot(fine, fine_weights, out_dtype=tl.int32)
    total = tl.dot(coarse, coarse_weights, acc=total, out_dtype=tl.int32)
    return total.to(tl.float32) * unit[None, :] + offset[None, :]


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """2^x by the one instruction; results below 2^-126 are 0."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x, ASM: tl.constexpr):
    """log2 by the one instruction, within 2^-21; that of numbers below 2^-126 is -inf."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def share(e, ASM: tl.constexpr):
    """log2 of the sum of a group's shares `e [N, HEADS]`, rounded as it is stored."""
    total = tl.maximum(tl.sum(e, 1), 1.1754943508222875e-38)  # no token is out of reach
    return log2(total, ASM).to(tl.float16)


@triton.jit
def place_of(h, middle):
    """Where a share `h` is in the histogram, in bins from the middle, -128 to 127."""
    y = (h.to(tl.float32) - middle) * OCTAVE
    far = tl.abs(y) - FINE
    y = tl.where(far > 0, tl.where(y > 0, 1.0, -1.0) * (FINE + far * 0.125), y)
    return tl.minimum(tl.maximum(y, -128.0), 127.0)


@triton.jit
def bin_of(h, middle):
    """The bin of a share `h`; what is below them all goes to bin 0."""
    return tl.floor(place_of(h, middle)).to(tl.int32) + 128


@triton.jit
def lowest_counted(hint):
    """The lowest bin that a scan counts: the `hint`, or 1 where that says nothing (0, NaN)."""
    return tl.where(hint > 1, tl.minimum(hint, BINS - 1), 1).to(tl.int32)


@triton.jit
def edge_of(index, middle):
    """The lower edge of a bin."""
    y = (index - 128).to(tl.float32)
    far = tl.abs(y) - FINE
    y = tl.where(far > 0, tl.where(y > 0, 1.0, -1.0) * (FINE + far * 8), y)
    return middle + y / OCTAVE


@triton.jit
def _logaddexp2(a, b, ASM: tl.constexpr):
    top = tl.maximum(a, b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + log2(exp2(a - shift, ASM) + exp2(b - shift, ASM), ASM)


@triton.jit
def normal_quantile(p, ASM: tl.constexpr):
    """z with P(Z > z) = p for a standard normal Z, within 0.003: Abramowitz and Stegun 26.2.22."""
    small = tl.maximum(tl.minimum(p, 1 - p), 1e-9)
    t = tl.sqrt(-1.3862943611198906 * log2(small, ASM))
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    return tl.where(p < 0.5, z, -z)


@triton.jit
def placed(known, mean, variance, n_tokens, k, cap, CAPPED: tl.constexpr, ASM: tl.constexpr):
    """(norm, likely) [HEADS]: what stands for a head's log-sum-exp, that of the pieces `known`
    [PIECES, HEADS] and of scores as if they were normal, and the share that the k-th token would
    then have."""
    log_n = log2(n_tokens.to(tl.float32), ASM)
    closed = capped(mean, cap, CAPPED) + log_n + 0.34657359027997264 * variance
    if CAPPED:
        closed = tl.minimum(closed, cap + log_n)
    top = tl.max(known, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    # A NaN may be dropped by the maximum; it comes back through the sum.
    fixed = shift + log2(tl.sum(exp2(known - shift[None, :], ASM), 0), ASM)
    norm = _logaddexp2(fixed, closed, ASM)
    z = normal_quantile(k / tl.maximum(n_tokens, 1).to(tl.float32), ASM)
    return norm, capped(mean + z * tl.sqrt(variance), cap, CAPPED) - norm
