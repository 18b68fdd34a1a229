"""The scan of `scan_sketch` for Hopper (sm_90), in Gluon: groups of up to 8 heads, no key mask and
no cap. `scan.scan` does the same for all else.

    scores   [64, 8] = 1.5 * 2^23 + codes weights, integers, for the 64 even and for the 64 odd
             tokens of a chunk. The bits of such an integer are the float32 of the same value,
             so none is converted.
    shares   [64, 8]: of each row two tokens of four chunks. A product with a matrix of ones in one
             column adds up a group's heads and leaves each token's sum in one thread.

Where a row of 16 bytes is two tokens (`hopper_codes.py`), the weights of even tokens are 0 where
odd tokens have their codes.
"""

from attnplug.ops.common.hopper import gdc_launch_dependents, gdc_wait
from attnplug.ops.common.rows import blocks_done, row_of, row_span
from attnplug.ops.common.triton import gl, gluon, mma_v2
from attnplug.ops.sketch.kernels.codes import (
    BINS,
    BLOCK,
    CHUNK,
    LARGEST,
    NOTED,
    REACH,
    edge_of,
    exp2,
    log2,
    lowest_counted,
    near_block,
    parts_of,
    placed,
)
from attnplug.ops.sketch.kernels.hopper_codes import (
    MMA,
    PAIRS,
    WORDS,
    load_step,
    two_chunks,
)

WARPS = gl.constexpr(4)
CHUNKS = gl.constexpr(4)  # of a step
WEIGHTS = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
SUMMED = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 1))
ONES = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 1))
# What a program reads of the projection lies in rows, which the lanes of a warp read together. The
# layout of the operands would have each lane read a row of its own, in all four warps.
ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
PER_HEAD = gl.constexpr(gl.SliceLayout(0, ROWS.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))
FLAT = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
MAGIC = gl.constexpr(0x4B400000)  # the bits of 1.5 * 2^23
SMALLEST = gl.constexpr(2.0**-126)

# Count the shares of two pairs, $2 and $3, in their bins, as `bin_of`: $4 is the address of bin 0,
# $8 the least share that can count (in both halves), $10 the middle, $14 the least bin that counts.
# $0 becomes a bit for every eight tokens of a warp, of which $18 is the place of a thread's first:
# whether any can count. Few can, so that a thread looks at one after the other.
_COUNT = gl.constexpr("""{
.reg .b16 a, b;
.reg .b32 index, one, two, left, place;
.reg .b64 at;
.reg .f32 y, far, t;
.reg .pred p, q, r, s, first, second;
setp.ge.f16x2 p|q, $2, $8;
setp.ge.f16x2 r|s, $3, $8;
or.pred first, p, q;
or.pred second, r, s;
selp.b32 one, 1, 0, first;
selp.b32 two, 4, 0, second;
or.b32 one, one, two;
shl.b32 one, one, $18;
redux.sync.or.b32 $0, one, 0xffffffff;
mov.b32 $1, 0;
or.pred first, first, second;
@!first bra DONE;
selp.b32 left, 1, 0, p;
selp.b32 two, 2, 0, q;
or.b32 left, left, two;
selp.b32 two, 4, 0, r;
or.b32 left, left, two;
selp.b32 two, 8, 0, s;
or.b32 left, left, two;
NEXT:
bfind.u32 place, left;
shl.b32 one, 1, place;
xor.b32 left, left, one;
mad.lo.u32 place, place, 0x22, 0x10;
prmt.b32 one, $2, $3, place;
mov.b32 {a, b}, one;
cvt.f32.f16 y, a;
sub.f32 y, y, $10;
mul.f32 y, y, 0f41800000;
abs.f32 far, y;
sub.f32 far, far, 0f42C00000;
fma.rn.f32 t, far, 0f3E000000, 0f42C00000;
copysign.f32 t, y, t;
setp.gt.f32 p, far, 0f00000000;
selp.f32 y, t, y, p;
min.f32 y, y, 0f42FE0000;
max.f32 y, y, 0fC3000000;
add.rm.f32 y, y, 0f4B400000;
mov.b32 index, y;
sub.s32 index, index, 0x4B3FFF80;
setp.ge.s32 p, index, $14;
mad.wide.s32 at, index, 4, $4;
@p red.relaxed.gpu.global.add.u32 [at], 1;
setp.ne.u32 p, left, 0;
@p bra NEXT;
DONE:
}""")


@gluon.jit
def _weights(projected, columns, first, FIELDS: gl.constexpr, BYTES: gl.constexpr, GROUP):
    """Weights [16 FIELDS, 8] in the order of a row's bytes, of both its tokens if it has two."""
    k = gl.arange(0, 16 * FIELDS, layout=gl.SliceLayout(1, ROWS))
    g = gl.arange(0, 8, layout=PER_HEAD)
    coordinate = k // 16 * BYTES + k % BYTES
    mask = (g < GROUP)[None, :] & (k >= 0)[:, None]
    at = projected + g[None, :] * columns + first + coordinate[:, None]
    return gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _both_in_units(weight, unit, FIELDS: gl.constexpr, BYTES: gl.constexpr):
    """Weights in units, int8, for even and for odd tokens: where a row has two tokens, the weights
    of one are 0 where the other has its codes."""
    whole = (weight * (1 / unit)[None, :] + 12582912.0).to(gl.int32, bitcast=True) - MAGIC
    # No weight is larger: see `codes.in_units`.
    whole = gl.convert_layout(gl.minimum(gl.maximum(whole, -REACH), REACH), WEIGHTS)
    if BYTES == 16:
        same = whole.to(gl.int8)
        return same, same
    else:
        k = gl.arange(0, 16 * FIELDS, layout=gl.SliceLayout(1, WEIGHTS))
        even = gl.where((k % 16 < 8)[:, None], whole, 0)
        return even.to(gl.int8), (whole - even).to(gl.int8)


@gluon.jit
def _products(fine, coarse, fine_weights, coarse_weights):
    """Sums over the codes of 64 tokens, plus MAGIC, as float32 [64, 8]."""
    total = mma_v2(fine, fine_weights, gl.full([PAIRS, 8], MAGIC, gl.int32, MMA))
    total = mma_v2(coarse, coarse_weights, total)
    return total.to(gl.float32, bitcast=True)


@gluon.jit
def _heads_in_order(e, other):
    """[64, 8] of even and of odd tokens as [64, 16], the heads in the order in which threads hold
    them."""
    x = gl.reshape(gl.join(e, other), (PAIRS, 4, 2, 2))  # heads 2 i + j, parity
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 3, 2, 1)), (PAIRS, 16)), SUMMED)


@gluon.jit
def _half_step(
    fine_a,
    fine_b,
    coarse_a,
    coarse_b,
    weights,
    unit,
    shift,
    limit_a,
    limit_b,
    mass,
    moment,
    sums,
    FIRST: gl.constexpr,
    R4: gl.constexpr,
    R2: gl.constexpr,
):
    """Add chunks FIRST and FIRST + 1 of a step to what the heads and the tokens add up to."""
    f0, f1, f2, f3 = two_chunks(fine_a, fine_b, R4 // 2, 2)
    c0, c1, c2, c3 = two_chunks(coarse_a, coarse_b, R2 // 4, 4)
    mass, moment, sums = _chunk(
        f0, f1, c0, c1, weights, unit, shift, limit_a, mass, moment, sums, FIRST
    )
    return _chunk(f2, f3, c2, c3, weights, unit, shift, limit_b, mass, moment, sums, FIRST + 1)


@gluon.jit
def _chunk(
    fine_even,
    fine_odd,
    coarse_even,
    coarse_odd,
    weights,
    unit,
    shift,
    limit,
    mass,
    moment,
    sums,
    INDEX: gl.constexpr,
):
    """Add a chunk to the heads' sums, and its tokens' sums over heads to two columns of `sums`."""
    fine_weights, coarse_weights = weights
    for_fine_even, for_fine_odd = fine_weights
    for_coarse_even, for_coarse_odd = coarse_weights
    even = _products(fine_even, coarse_even, for_fine_even, for_coarse_even)
    odd = _products(fine_odd, coarse_odd, for_fine_odd, for_coarse_odd)
    even = gl.fma(even, unit[None, :], shift[None, :])  # two roundings would lose a unit
    odd = gl.fma(odd, unit[None, :], shift[None, :])
    e = exp2(gl.minimum(even, limit), True)
    o = exp2(gl.minimum(odd, limit), True)
    mass += e
    mass += o
    moment += e * even
    moment += o * odd
    k = gl.arange(0, 16, layout=gl.SliceLayout(1, ONES))
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, ONES))
    ones = (n[None, :] == 2 * INDEX + k[:, None] // 8).to(gl.float32)
    sums = mma_v2(_heads_in_order(e, o), ones, sums, input_precision="tf32")
    return mass, moment, sums


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _begin():
    """`begin`, in Gluon."""
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def _any_odd(flags, first, last):
    """Whether a flag is set of the blocks from `first` to before `last`."""
    bins = gl.arange(0, BINS, layout=FLAT)
    odd = gl.full([BINS], 0, gl.int32, FLAT)
    end = last * (BLOCK // CHUNK)
    for at in range(first * (BLOCK // CHUNK), end, BINS):
        flag = gl.load(flags + at + bins, mask=at + bins < end, other=0, cache_modifier=".cg")
        odd |= (flag != 0).to(gl.int32)
    return gl.max(odd, 0)


@gluon.jit
def _below(index, centre):
    """A share below a bin's edge, which float16 does not round to one above it."""
    edge = edge_of(index, centre)
    return edge - (0.01 + 0.002 * gl.abs(edge))


@gluon.jit
def scan(
    projected,
    fixed,
    codes,
    rows,
    hint,
    counted,
    scanned,
    k,
    chunks,
    fewest,
    patience,
    GROUP: gl.constexpr,
    CODE: gl.constexpr,
    PIECES: gl.constexpr,
    CHECKED: gl.constexpr,
    EVICT: gl.constexpr,
    NEW: gl.constexpr,
    STEPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One part of the candidates of one row's KV head, as `scan.scan`."""
    R4: gl.constexpr = CODE.R4
    R2: gl.constexpr = CODE.R2
    part = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    place = b * gl.num_programs(1) + h
    own_row = row_of(b, STEPS)
    home = own_row * gl.num_programs(1) + h
    row = place * GROUP
    length, low = row_span(rows, b, STEPS, NEW)
    near = near_block(gl.minimum(length, rows.S), low)
    used = parts_of(near, scanned.parts, fewest)
    if part >= used:
        if PDL:
            _begin()
        heads = gl.arange(0, 8, layout=COLUMN)
        idle = scanned.sums + ((row + heads) * scanned.parts + part) * 2
        gl.store(idle, gl.full([8], 0.0, gl.float32, COLUMN), mask=heads < GROUP)
        gl.store(idle + 1, gl.full([8], 0.0, gl.float32, COLUMN), mask=heads < GROUP)
        return
    first = part * (near - 1) // used  # blocks after the sink
    last = (part + 1) * (near - 1) // used
    some = last > first
    slot = home * rows.S + low + BLOCK
    F: gl.constexpr = R4 // 2  # bytes of a token
    C: gl.constexpr = R2 // 4
    m = gl.arange(0, 32, layout=gl.SliceLayout(1, WORDS))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, WORDS))
    m = m // 8 * 16 + m % 8
    fine_at = codes.fine.to(gl.pointer_type(gl.int32), bitcast=True) + slot * (F // 4)
    fine_at += m[:, None] * (F // 2) + word[None, :]
    coarse_at = codes.coarse.to(gl.pointer_type(gl.int32), bitcast=True) + slot * (C // 4)
    coarse_at += m[:, None] * (C // 2) + word[None, :]
    # The kernel in front may make codes of the blocks from `done` on. Others it does not touch, but
    # the last of those can share 32 bytes with them, which would stay in the L1 as they were.
    done = blocks_done(codes.progress, own_row, low)
    soon = some & (1 + gl.minimum(first + CHUNKS, last) < done)
    ahead = load_step(fine_at, coarse_at, first, soon, F, C, EVICT)
    floor = 1
    if hint is not None:  # of the step before
        floor = lowest_counted(gl.load(hint + home, cache_modifier=".cg"))
    flags = codes.odd + home * chunks
    bad = _any_odd(flags, 1 + first, gl.minimum(1 + last, done)) > 0
    if PDL:
        _begin()
    if some & (soon == 0):
        ahead = load_step(fine_at, coarse_at, first, some, F, C, EVICT)

    columns, row_at = projected.columns, projected.at + row * projected.columns
    fine_weights = _weights(row_at, columns, 0, 2, F, GROUP)
    coarse_weights = _weights(row_at, columns, R4, 4, C, GROUP)
    g = gl.arange(0, 8, layout=PER_HEAD)
    facts = row_at + g * columns + R4 + R2
    in_group = g < GROUP
    offset = gl.load(facts, mask=in_group, other=0.0, cache_modifier=".cg")
    mean = gl.load(facts + 1, mask=in_group, other=0.0, cache_modifier=".cg")
    RP: gl.constexpr = 64 if R4 + R2 <= 64 else 128
    i = gl.arange(0, RP, layout=gl.SliceLayout(1, ROWS))
    spread = gl.load(
        facts[None, :] + 2 + i[:, None],
        mask=in_group[None, :] & (i < R4 + R2)[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    j = gl.arange(0, PIECES, layout=gl.SliceLayout(1, ROWS))
    known = gl.load(
        fixed.lse + (row + g)[None, :] * fixed.number + j[:, None],
        mask=in_group[None, :] & (j < fixed.number)[:, None],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    most = gl.maximum(gl.max(gl.abs(fine_weights), 0), gl.max(gl.abs(coarse_weights), 0))
    unit = gl.maximum(most / REACH, 1e-30)
    weights = (
        _both_in_units(fine_weights, unit, 2, F),
        _both_in_units(coarse_weights, unit, 4, C),
    )
    variance = gl.sum(spread * spread, 0)
    base, likely = placed(known, mean, variance, (near - 1) * BLOCK, k, 0.0, False, True)
    centre = gl.max(gl.where(in_group, likely, float("-inf")), 0)
    centre = gl.where(gl.abs(centre) < 1e30, centre, 0.0)
    # Scores are computed as 1.5 * 2^23 units and more, less as many: the norm is what a float of
    # that size leaves of it. Heads that pad the group have no share of anything.
    shift = gl.where(in_group, gl.fma(unit, -12582912.0, offset - base), float("-inf"))
    if part == 0:
        gl.store(scanned.norm + row + g, offset - gl.fma(unit, 12582912.0, shift), mask=in_group)
        gl.store(scanned.middle + place, centre)
    shift = gl.convert_layout(shift, COLUMN)
    unit = gl.convert_layout(unit, COLUMN)

    mass = gl.full([PAIRS, 8], 0.0, gl.float32, MMA)
    moment = gl.full([PAIRS, 8], 0.0, gl.float32, MMA)
    edge = gl.where(floor > 1, _below(floor, centre), float("-inf"))
    # A look at `total` takes as long as a step: a short part does without, and who has a hint.
    looks = (floor == 1) & (last - first >= patience * CHUNKS)
    due = gl.where(looks, first + CHUNKS, last)
    bins = gl.arange(0, BINS, layout=FLAT)
    total = scanned.total + place * BINS
    shares = scanned.shares + slot
    if STEPS.QUERIES > 1:
        shares += (place - home) * rows.S
    if counted is not None:
        counted += place * (rows.S // NOTED)
    for block in range(first, last, CHUNKS):
        f0, c0, f1, c1, f2, c2, f3, c3 = ahead
        after = gl.minimum(block + CHUNKS, last - 1)
        ahead = load_step(fine_at, coarse_at, after, True, F, C, EVICT)
        totals = gl.full([PAIRS, 8], SMALLEST, gl.float32, MMA)
        none = float("-inf")
        limit = LARGEST
        limit_1 = gl.where(block + 1 < last, LARGEST, none)
        mass, moment, totals = _half_step(
            f0, f1, c0, c1, weights, unit, shift, limit, limit_1, mass, moment, totals, 0, R4, R2
        )
        limit_2 = gl.where(block + 2 < last, LARGEST, none)
        limit_3 = gl.where(block + 3 < last, LARGEST, none)
        mass, moment, totals = _half_step(
            f2, f3, c2, c3, weights, unit, shift, limit_2, limit_3, mass, moment, totals, 2, R4, R2
        )
        share = log2(totals, True).to(gl.float16)
        share = gl.reshape(share, (PAIRS, 4, 2))
        LAYOUT: gl.constexpr = share.type.layout
        pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        p = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        own = block + c[None, :, None] < last
        at = (c * BLOCK)[None, :, None] + (2 * pair)[:, None, None] + p[None, None, :]
        own = own & (at >= 0)
        gl.store(shares + block * BLOCK + at, share, mask=own)
        if block == due:
            so_far = gl.load(total + bins, cache_modifier=".cg")
            reached = gl.associative_scan(so_far, 0, _add, reverse=True)
            index = gl.sum((reached >= k).to(gl.int32), 0) - 1
            floor = gl.maximum(floor, index)
            edge = _below(floor, centre)
            due += 2 * (due - first)
        counts = gl.where(own, share, float("-inf"))
        least = gl.full([PAIRS, 4, 2], 0.0, gl.float16, LAYOUT) + edge.to(gl.float16)
        # Rows of 16 pairs are two times four eights, of four chunks.
        first_bit = 4 * c[None, :, None] + (pair % 8 // 4)[:, None, None]
        found = gl.inline_asm_elementwise(
            _COUNT,
            "=&r,=&r,r,r,l,l,l,l,r,r,f,f,f,f,r,r,r,r,r,r,r,r",
            [counts, total.to(gl.int64), least, centre, floor, first_bit],
            dtype=gl.int16,
            is_pure=False,
            pack=4,
        )
        if counted is not None:
            byte = (found.to(gl.int32) >> 4 * c[None, :, None]) & 15
            there = (pair % 16 == 0)[:, None, None] & (p == 0)[None, None, :]
            byte_at = (4 * (block + c))[None, :, None] + (pair // 16)[:, None, None]
            byte_at += gl.full([PAIRS, 4, 2], 0, gl.int32, LAYOUT)
            gl.store(counted + byte_at, byte.to(gl.uint8), mask=there & own)

    seen_tokens = (last - first) * BLOCK
    gl.atomic_add(total, seen_tokens, sem="relaxed")
    if done <= last:
        bad = bad | (_any_odd(flags, gl.maximum(1 + first, done), 1 + last) > 0)
    if CHECKED:
        bad = bad | (done < near) & (near > 1)
    poison = gl.where(bad, float("nan"), 0.0)
    g = gl.arange(0, 8, layout=COLUMN)
    sums = scanned.sums + ((row + g) * scanned.parts + part) * 2
    gl.store(sums, gl.sum(mass, 0) + poison, mask=g < GROUP)
    gl.store(sums + 1, gl.sum(moment, 0), mask=g < GROUP)
