"""What the kernels that score tokens from INT8 keys share.

g is a head of a group, d a dimension, `at` are tokens of a row.
"""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.triton import tl, triton


@triton.jit
def best_of(s, in_group, KEYS_FIRST: tl.constexpr):
    """The largest score of a group's heads."""
    s = tl.where(s == s, s, float("inf"))
    if KEYS_FIRST:
        return tl.max(tl.where(in_group[None, :], s, float("-inf")), 1)
    else:
        return tl.max(tl.where(in_group[:, None], s, float("-inf")), 0)


@triton.jit
def _as_halves(codes, ASM: tl.constexpr):
    """INT8 as float16: a byte, its sign turned, in the low bits of 1024 is that number and 1152."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x, c; mov.b32 c, 0x64806480; xor.b32 x, $2, 0x80808080; "
            "prmt.b32 $0, x, 0x64646464, 0x4140; prmt.b32 $1, x, 0x64646464, 0x4342; "
            "sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return codes.to(tl.float16)


@triton.jit
def token_products(
    at,
    seen,
    query,
    codes_at,
    scales_at,
    row_table,
    codes_strides,
    scales_strides,
    in_width,
    PAGE: tl.constexpr,
    KEYS_FIRST: tl.constexpr = False,
    WHOLE: tl.constexpr = False,
    HALVES: tl.constexpr = 0,
    unit=None,
):
    """q . k `[ROWS, TILE]` of the tokens `at`, 0 where not `seen`; if KEYS_FIRST `[TILE, ROWS]`, of
    which a GPU makes [.., 8] where [8, ..] would be computed as [16, ..]. WHOLE: all of `at` are in
    the cache and are read, `seen` or not; what comes of those not seen is nothing to go by. HALVES:
    the query is float16, see `in_halves`. codes_at and scales_at are those of the first token,
    or with a table of page 0."""
    codes_b, _, codes_s = codes_strides
    scales_b, _, scales_s = scales_strides
    loadable = seen[:, None] & in_width[None, :]
    if row_table is None:
        wide = at.to(tl.int64)
        code_places = wide[:, None] * codes_s
        scale_places = wide * scales_s
    else:
        page = page_of(row_table, at, seen, PAGE)
        in_page = (at % PAGE).to(tl.int64)
        code_places = (page * codes_b + in_page * codes_s)[:, None]
        scale_places = page * scales_b + in_page * scales_s
    if WHOLE:
        key = tl.load(codes_at + code_places)
        scale = tl.load(scales_at + scale_places)
    else:
        key = tl.load(codes_at + code_places, mask=loadable, other=0)
        scale = tl.load(scales_at + scale_places, mask=seen, other=0.0)
    if HALVES:
        key = _as_halves(key, HALVES == 1)
    else:
        key = key.to(query.dtype)
    if KEYS_FIRST:
        s = tl.dot(key, query.T, input_precision="ieee")
        if unit is not None:  # first, as s * scale may be infinite where the score is not
            s *= unit
        return s * scale[:, None]
    else:
        s = tl.dot(query, key.T, input_precision="ieee")
        if unit is not None:
            s *= unit
        return s * scale[None, :]


@triton.jit
def in_halves(query):
    """(bfloat16 `query` in units, as float16, the unit): a power of two for which the largest
    number of the group has 9 bits before the point. What float16 then lacks of a number is 2^-33
    of the largest at most, unless that is below 2^-103. INT8 becomes float16 in fewer instructions
    than bfloat16."""
    wide = query.to(tl.float32)
    size = tl.abs(wide)
    peak = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    bits = peak.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x0C000000), 0x7F000000)  # the unit is a normal number
    unit = (bits - 0x04000000).to(tl.float32, bitcast=True)
    return (wide / unit).to(tl.float16), unit


@triton.jit
def choosable(at, length, low, mask_at, SINK: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the tokens `at` may be chosen: not the sink, the window, or what is masked."""
    seen = (at >= low + SINK) & (at < length - WINDOW)
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
    return seen
