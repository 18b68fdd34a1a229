"""The pass of `certified_attention` over the quantized blocks for Hopper (sm_90), in Gluon.

A program is one warp. Codes go from memory into registers as the tensor cores want them: nothing
passes through shared memory, nothing waits for another warp, and the next tokens are read while
these are multiplied. For that, the sums over channels and over tokens run in another order than
memory's, which a sum does not mind, and output channels are put in their places at the end.

    scores   [16, tokens] = q' codes^T: rows 0..7 heads, 8..15 what their float16 rounding left;
             q' = query times the block's scales, over 2^-14 times the sum of their absolute values
    output   [D, 8] = v'^T p^T, with v' dequantized to float16

Row 7 sums the key codes for the check words. `_certified_attend.attend` does the same for all else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from attnplug.ops._certified_attend import quantized_blocks
from attnplug.ops.block_bounds import row_span

CHECK_ROW = gl.constexpr(7)  # of a tile of 8 query rows: a group has 7 heads at most
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
# Two words of four int8 codes each to four pairs of float16: with its sign bit flipped a byte is
# 128 more.
_WIDEN = gl.constexpr("""{
.reg .b32 x<2>, m;
mov.b32 m, 0x64806480;
xor.b32 x0, $4, 0x80808080;
xor.b32 x1, $5, 0x80808080;
prmt.b32 $0, x0, 0x64646464, 0x4140;
prmt.b32 $1, x0, 0x64646464, 0x4342;
prmt.b32 $2, x1, 0x64646464, 0x4140;
prmt.b32 $3, x1, 0x64646464, 0x4342;
sub.f16x2 $0, $0, m;
sub.f16x2 $1, $1, m;
sub.f16x2 $2, $2, m;
sub.f16x2 $3, $3, m;
}""")
_QUARTERS = gl.constexpr((gl.float16,) * 4)
# Two tokens' words (scale, zero) to the pair of scales and the pair of zeros.
_PAIRS = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")

_FETCH = gl.constexpr("""{
.reg .pred p;
.reg .b32 lane;
mov.u32 lane, %laneid;
setp.eq.u32 p, lane, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0;
}""")
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.9 and 3.6


def layouts(width: int, step: int) -> tuple[gl.DistributedLinearLayout, ...]:
    """How one warp holds channels and tokens, for head dimension `width` and `step` tokens at a
    time: the words of key codes [step, width / 4], queries [8, width], the words of a block's
    scales [width / 2], scores [8, step], the words of value codes [step / 2, width / 32, 4], and
    the words of eight blocks' scales [8, width / 2]. Lanes are 4 g + t."""
    half = width // 32  # groups of 16 channels in the lower half
    high = [64 << i for i in range(width // 64 - 1)]  # channels
    more = [1 << i for i in range(3, (step - 1).bit_length())]  # tokens beyond eight
    rows = [[1, 0], [2, 0], [4, 0]]
    keys = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *([0, d // 4] for d in high), *([n, 0] for n in more)],
        [[0, 4], [0, 8], *rows], [], [], [step, width // 4],
    )  # fmt: skip
    query = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], *([0, d] for d in high)],
        [[0, 16], [0, 32], *rows], [], [], [8, width],
    )  # fmt: skip
    scales = gl.DistributedLinearLayout(
        [[1], [2], [4], *([d // 2] for d in high)], [[8], [16], [0], [0], [0]], [], [], [width // 2]
    )
    scores = gl.DistributedLinearLayout(
        [[0, 1], *([0, n] for n in more)], [[0, 2], [0, 4], *rows], [], [], [8, step]
    )
    words = [[0, 0, 1], [0, 0, 2], *([0, 1 << i, 0] for i in range((half - 1).bit_length()))]
    own = len(words) - 3  # words of a token beside each other in one thread
    values = gl.DistributedLinearLayout(
        [*words[:own], *([n // 2, 0, 0] for n in more)],
        [[1, 0, 0], [2, 0, 0], *words[own:]], [], [], [step // 2, half, 4],
    )  # fmt: skip
    blocks = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *([0, d // 2] for d in high)], [[0, 8], [0, 16], *rows], [], [],
        [8, width // 2],
    )  # fmt: skip
    return keys, query, scales, scores, values, blocks


@gluon.jit
def _capped(s, cap):
    return cap * (1 - 2 / (gl.exp2(s * (2 * 1.4426950408889634) / cap) + 1))


@gluon.jit
def _query_tile(query, words, factor, is_check, XL: gl.constexpr, D: gl.constexpr):
    """q' [16, D], channels in the order of `_key_tile`; `words` hold two bf16 scales each."""
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    scales = gl.convert_layout(gl.reshape(gl.join(even, odd), (D,)), gl.SliceLayout(0, XL))
    x = (query * factor[:, None]) * gl.where(is_check[:, None], 1.0, scales[None, :])
    high = x.to(gl.float16)
    low = (x - high.to(gl.float32)).to(gl.float16)
    both = gl.reshape(gl.permute(gl.join(high, low), (2, 0, 1)), (16, D // 64, 4, 4, 2, 2))
    both = gl.reshape(gl.permute(both, (0, 1, 3, 4, 2, 5)), (16, D))
    return gl.convert_layout(both, gl.DotOperandLayout(0, S_MMA, 2))


@gluon.jit
def _key_tile(words, STEP: gl.constexpr, D: gl.constexpr):
    """Words of codes [STEP, D/4] as float16 [D, STEP]: channel 64 a + 16 t + 4 w + 2 h + e at
    64 a + 16 w + 8 h + 2 t + e, so that what a thread has read is what it multiplies."""
    x = gl.inline_asm_elementwise(
        _WIDEN, "=&r,=&r,=&r,=&r,r,r", [words], dtype=_QUARTERS, is_pure=True, pack=2
    )
    # x[2 w + h] holds pairs of channels of word 2 v + w: [STEP, a t v e] with w and h added
    wide = gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3]))
    wide = gl.reshape(wide, (STEP, D // 64, 4, 2, 2, 2, 2))
    wide = gl.reshape(gl.permute(wide, (1, 3, 5, 6, 2, 4, 0)), (D, STEP))
    return gl.convert_layout(wide, gl.DotOperandLayout(1, S_MMA, 2))


@gluon.jit
def _value_tile(codes, low_words, high_words, STEP: gl.constexpr, D: gl.constexpr):
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
def _channels_first(x, ROWS: gl.constexpr, D: gl.constexpr):
    """[ROWS, D] with channel 64 a + 16 t + 4 w + 2 h + e at 64 a + 16 w + 8 h + 2 t + e."""
    x = gl.reshape(x, (ROWS, D // 64, 4, 4, 2, 2))
    return gl.reshape(gl.permute(x, (0, 1, 3, 4, 2, 5)), (ROWS, D))


@gluon.jit
def _halves(words, D: gl.constexpr):
    """The bf16 [8, D] in words [8, D/2], as int16."""
    low = (words & 0xFFFF).to(gl.int16)
    high = (words >> 16).to(gl.int16)
    return gl.reshape(gl.join(low, high), (8, D))


@gluon.jit
def _prepare(
    query, meta_at, summary_at, check_at, base_at, delta_at, noise_at, unit_at, first, last, cap,
    in_group, D: gl.constexpr, XL: gl.constexpr, SL: gl.constexpr, PL: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    """`_certified_attend.prepare` for the blocks first..last-1 of one KV head, eight at a time; how
    many second check words did not fit. `query` [8, D] carries the scale."""
    A: gl.constexpr = gl.DotOperandLayout(0, S_MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S_MMA, 2)
    BLOCKS: gl.constexpr = gl.SliceLayout(1, PL)
    high = query.to(gl.bfloat16)
    low = (query - high.to(gl.float32)).to(gl.bfloat16)
    both = gl.reshape(gl.permute(gl.join(high, low), (2, 0, 1)), (16, D))
    both = gl.convert_layout(_channels_first(both, 16, D), A)
    size = gl.abs(high.to(gl.float32)) * 1.00390625  # at least |query|
    size = size.to(gl.bfloat16)
    size = gl.reshape(gl.permute(gl.join(size, size), (2, 0, 1)), (16, D))
    size = gl.convert_layout(_channels_first(size, 16, D), A)
    n = gl.arange(0, 8, layout=BLOCKS)
    c = gl.arange(0, D // 2, layout=gl.SliceLayout(0, PL))
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, SL))
    wrong = gl.full([8], 0, gl.int32, BLOCKS)
    for block in range(first, last, 8):
        j = block + n
        there = j < last
        at = meta_at + j.to(gl.int64)[:, None] * D + c[None, :]
        scales = gl.load(at, mask=there[:, None], other=0)
        zeros = gl.load(at + D // 2, mask=there[:, None], other=0)
        eta = gl.load(summary_at + j.to(gl.int64) * 2, mask=there, other=0)
        nu = gl.load(summary_at + j.to(gl.int64) * 2 + 1, mask=there, other=0)
        stored = gl.load(check_at + j.to(gl.int64) * 2 + 1, mask=there, other=0)
        words = gl.sum((1 + 2 * c)[None, :] * (scales + 3 * zeros), 1)
        words += 100000007 + 7919 * j + eta + 7 * nu
        wrong += (there & (words != stored)).to(gl.int32)

        z = _channels_first(_halves(zeros, D), 8, D)
        x = _channels_first(_halves(scales, D), 8, D)
        z_size = gl.convert_layout(
            gl.permute((z & 0x7FFF).to(gl.bfloat16, bitcast=True), (1, 0)), B
        )
        z = gl.convert_layout(gl.permute(z.to(gl.bfloat16, bitcast=True), (1, 0)), B)
        x = gl.convert_layout(gl.permute(x.to(gl.bfloat16, bitcast=True), (1, 0)), B)
        nothing = gl.full([16, 8], 0.0, gl.float32, S_MMA)
        product = gl.sum(gl.reshape(mma_v2(both, z, nothing), (2, 8, 8)), 0)
        # both halves are the same
        half = gl.max(gl.reshape(mma_v2(size, x, nothing), (2, 8, 8)), 0) * 0.5
        reach = gl.max(gl.reshape(mma_v2(size, z_size, nothing), (2, 8, 8)), 0)
        product = gl.convert_layout(product, SL)
        half = gl.convert_layout(half, SL)
        reach = gl.convert_layout(reach, SL)
        quiet = (D + 16) * 4.76837158203125e-07 * (reach + 254 * half) + 1e-18
        if CAPPED:
            quiet += cap * 9.5367431640625e-07
        place = (block + i).to(gl.int64)[None, :]
        mask = in_group[:, None] & (block + i < last)[None, :]
        gl.store(base_at[:, None] + place, product, mask=mask)
        gl.store(noise_at[:, None] + place, quiet, mask=mask)
        gl.store(delta_at[:, None] + place, half * 1.0234375 + quiet, mask=mask)
        # at least 2^-14 of the sum of |query scale|, so that q' stays below 65504
        gl.store(unit_at[:, None] + place, gl.maximum(half, 1e-30) * 0.0001220703125, mask=mask)
    return gl.sum(wrong, 0)


@gluon.jit
def _fetch(k_codes, v_codes, v_meta, place, BLOCK: gl.constexpr, D: gl.constexpr):
    """Have a block brought into the L2."""
    _fetch_bytes(k_codes + place * (BLOCK * D // 4), BLOCK * D)
    _fetch_bytes(v_codes + place * (BLOCK * D // 8), BLOCK * D // 2)
    _fetch_bytes(v_meta + place * (BLOCK * D // 16), BLOCK * D // 4)


@gluon.jit
def _fetch_bytes(at, SIZE: gl.constexpr):
    gl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [at.to(gl.int64, bitcast=True), SIZE], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def attend_blocks(
    q, k_codes, k_meta, v_codes, v_meta, summary, check, progress, lengths, start, base, delta,
    noise, unit, logs, partial, partial_lse, flags, scale, cap, S, N, splits, q_b, q_h,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STEP: gl.constexpr,
    KL: gl.constexpr, XL: gl.constexpr, WL: gl.constexpr, SL: gl.constexpr, VL: gl.constexpr,
    PL: gl.constexpr, AHEAD: gl.constexpr, CAPPED: gl.constexpr, CHECKED: gl.constexpr,
    LENGTH_STEP: gl.constexpr, START_STEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All heads of one KV head against one split of its quantized blocks; first what `prepare` does
    for these. Compares the check words of its split. Codes, metadata and summaries come as words of
    four bytes. Split 0 of the partial results is what is not quantized (`attend_rest`)."""
    split = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    HALF: gl.constexpr = D // 32
    STEPS: gl.constexpr = BLOCK // STEP
    ML: gl.constexpr = gl.SliceLayout(2, VL)
    ROW: gl.constexpr = gl.SliceLayout(1, SL)
    QUARTER: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [0], [0], [0]], [], [], [4])
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    group = b * gl.num_programs(1) + h

    r = gl.arange(0, 8, layout=ROW)
    row = group.to(gl.int32) * GROUP + r
    in_group = r < GROUP
    rx = gl.arange(0, 8, layout=gl.SliceLayout(1, XL))
    dx = gl.arange(0, D, layout=gl.SliceLayout(0, XL))
    q_at = q + b * q_b + (h * GROUP + rx).to(gl.int64)[:, None] * q_h + dx[None, :]
    shown = (rx < GROUP)[:, None] & (dx >= 0)[None, :]
    query = gl.load(q_at, mask=shown, other=0.0).to(gl.float32) * scale

    nk = gl.arange(0, STEP, layout=gl.SliceLayout(1, KL))
    wk = gl.arange(0, D // 4, layout=gl.SliceLayout(0, KL))
    keys_at = k_codes + group * N * (BLOCK * D // 4) + (nk[:, None] * (D // 4) + wk[None, :])
    pair = gl.arange(0, STEP // 2, layout=gl.SliceLayout(1, ML))
    gamma = gl.arange(0, HALF, layout=gl.SliceLayout(0, ML))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, VL)))
    even_at = (pair[:, None] * (8 * HALF) + gamma[None, :] * 4)[:, :, None] + word[None, None, :]
    even_at = v_codes + group * N * (BLOCK * 4 * HALF) + even_at
    meta_at = pair[:, None] * (4 * HALF) + gamma[None, :]
    meta_at = v_meta + group * N * (BLOCK * 2 * HALF) + meta_at
    scales_at = k_meta + group * N * D + gl.arange(0, D // 2, layout=WL)
    base_at = base + row.to(gl.int64) * N
    unit_at = unit + row.to(gl.int64) * N
    for i in gl.static_range(AHEAD):
        if first + i < last:
            _fetch(k_codes, v_codes, v_meta, group * N + first + i, BLOCK, D)
    wrong = _prepare(
        query, k_meta + group * N * D, summary + group * N * 2, check + group * N * 2, base_at,
        delta + row.to(gl.int64) * N, noise + row.to(gl.int64) * N, unit_at, first, last, cap,
        in_group, D, XL, SL, PL, CAPPED,
    )  # fmt: skip
    weight = (1 + dx % 31).to(gl.float32)
    query = gl.where((rx == CHECK_ROW)[:, None], weight[None, :], query)
    near = gl.allocate_shared_memory(gl.float32, [8, D], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    near.store(query)
    barrier()  # other threads have written units and products of a program's blocks

    top = gl.full([8], float("-inf"), gl.float32, ROW)
    total = gl.full([8], 0.0, gl.float32, ROW)
    acc = gl.full([D, 8], 0.0, gl.float32, S_MMA)
    sums_k = gl.full([8], 0, gl.int32, ROW)
    sums_s = gl.full([4], 0, gl.int32, QUARTER)
    sums_v = gl.full([STEP // 2, HALF, 4], 0, gl.int32, VL)
    sums_w = gl.full([STEP // 2, HALF], 0, gl.int32, ML)

    at = gl.minimum(first, gl.maximum(last - 1, 0)).to(gl.int64)
    codes = gl.load(keys_at + at * (BLOCK * D // 4))
    even = gl.load(even_at + at * (BLOCK * 4 * HALF))
    odd = gl.load(even_at + at * (BLOCK * 4 * HALF) + 4 * HALF)
    words_at = meta_at + at * (BLOCK * 2 * HALF)
    low_even, high_even = gl.load(words_at), gl.load(words_at + HALF)
    low_odd, high_odd = gl.load(words_at + 2 * HALF), gl.load(words_at + 3 * HALF)
    scales = gl.load(scales_at + at * D)
    zero = gl.load(base_at + at, mask=in_group, other=0.0)
    size = gl.load(unit_at + at, mask=in_group, other=1.0)
    for j in range(first, last):
        factor = gl.convert_layout(1 / size, gl.SliceLayout(1, XL))
        tile = _query_tile(near.load(XL), scales, factor, rx == CHECK_ROW, XL, D)
        if CHECKED:
            own = gl.sum(gl.sum(gl.reshape(scales, (D // 64, 4, 8)), 2), 0)
            sums_s += gl.convert_layout(own, QUARTER)
        zero_now, size_now = zero, size
        at = gl.minimum(j + 1, last - 1).to(gl.int64)
        scales = gl.load(scales_at + at * D)
        zero = gl.load(base_at + at, mask=in_group, other=0.0)
        size = gl.load(unit_at + at, mask=in_group, other=1.0)
        held = gl.full([8], 0.0, gl.float32, ROW)
        if j + AHEAD < last:
            _fetch(k_codes, v_codes, v_meta, group * N + j + AHEAD, BLOCK, D)
        for u in range(STEPS):
            step = gl.minimum(j * STEPS + u + 1, last * STEPS - 1).to(gl.int64)
            codes_now, even_now, odd_now = codes, even, odd
            codes = gl.load(keys_at + step * (STEP * D // 4))
            even = gl.load(even_at + step * (STEP * 4 * HALF))
            odd = gl.load(even_at + step * (STEP * 4 * HALF) + 4 * HALF)
            w0, w1, w2, w3 = low_even, high_even, low_odd, high_odd
            words_at = meta_at + step * (STEP * 2 * HALF)
            low_even, high_even = gl.load(words_at), gl.load(words_at + HALF)
            low_odd, high_odd = gl.load(words_at + 2 * HALF), gl.load(words_at + 3 * HALF)

            s = gl.full([16, STEP], 0.0, gl.float32, S_MMA)
            s = mma_v2(tile, _key_tile(codes_now, STEP, D), s)
            s = gl.convert_layout(gl.sum(gl.reshape(s, (2, 8, STEP)), 0), SL)
            if CHECKED:
                sums_k += gl.convert_layout(gl.sum(s, 1), ROW).to(gl.int32)
                sums_v += even_now + odd_now
                sums_w += (w0 + w2) + 3 * (w1 + w3)
            s = s * size_now[:, None] + zero_now[:, None]
            if CAPPED:
                s = _capped(s, cap)
            best = gl.maximum(top, gl.convert_layout(gl.max(s, 1), ROW))
            shift = gl.where(best == float("-inf"), 0.0, best)
            # A NaN score may be dropped by the maximum; it comes back through p.
            p = gl.exp2(s - shift[:, None])
            decay = gl.exp2(top - shift)
            top = best
            mass = gl.convert_layout(gl.sum(p, 1), ROW)
            total = total * decay + mass
            held = held * decay + mass
            values = _value_tile(
                gl.join(even_now, odd_now), gl.join(w0, w2), gl.join(w1, w3), STEP, D
            )
            weights = gl.convert_layout(
                gl.permute(p.to(gl.float16), (1, 0)), gl.DotOperandLayout(1, S_MMA, 2)
            )
            acc *= gl.convert_layout(decay, gl.SliceLayout(0, S_MMA))[None, :]
            acc = mma_v2(values, weights, acc)
        shift = gl.where(top == float("-inf"), 0.0, top)
        gl.store(logs + row.to(gl.int64) * N + j, shift + gl.log2(held), mask=in_group)

    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    if CHECKED:
        found = gl.sum(gl.where(r == CHECK_ROW, sums_k, 0), 0)
        found += gl.sum(sums_s, 0)
        column = (gamma[None, :] * 4)[:, :, None] + word[None, None, :]
        found += gl.sum(gl.sum(gl.sum(sums_v * (1 + 2 * column), 2), 1), 0)
        found += gl.sum(gl.sum(sums_w * (1 + 2 * gamma[None, :]), 1), 0)
        i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        stored = gl.full([32], 0, gl.int32, i.type.layout)
        for j in range(first, last, 32):
            mine = j + i < last
            words = gl.load(check + (group * N + j + i) * 2, mask=mine, other=0)
            stored += words - gl.where(mine, 100000007 + 7919 * (j + i), 0)
        gl.store(flags + group * 2 + 1, 1, mask=(found != gl.sum(stored, 0)) | (wrong > 0))
    piece = row.to(gl.int64) * (splits + 1) + split + 1
    empty = total == 0
    divisor = gl.where(empty, 1.0, total)
    result = gl.where(top == float("-inf"), 0.0, top) + gl.log2(divisor)
    gl.store(partial_lse + piece, gl.where(empty, float("-inf"), result), mask=in_group)
    m = gl.arange(0, D, layout=gl.SliceLayout(1, S_MMA))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, S_MMA))
    channel = m // 8 % 2 * (D // 2) + m % 8 * (D // 16) + m // 16
    row_g = (group.to(gl.int32) * GROUP + g).to(gl.int64)
    out_at = partial + ((row_g * (splits + 1) + split + 1) * D)[None, :] + channel[:, None]
    acc = acc / gl.convert_layout(divisor, gl.SliceLayout(0, S_MMA))[None, :]
    gl.store(out_at, acc, mask=(g < GROUP)[None, :] & (m >= 0)[:, None])
