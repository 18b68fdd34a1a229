"""The Triton kernels of `sketch` over pages: codes of written slots, and what a step knows before
it reads a code."""

from typing import Any, NamedTuple

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.sketch.kernels.codes import BINS, BLOCK, REACH, in_units, near_block
from attnplug.ops.sketch.kernels.encode import store_codes
from attnplug.ops.sketch.kernels.prepare import PIECE, store_partial

SAMPLE = tl.constexpr(2048)  # tokens that the regression is made of
DEPTH = tl.constexpr(32)  # channels that are multiplied at a time


class Weights(NamedTuple):
    """A query's weights of codes in each band: int8 `[B, Hq, bands, r]`, and their unit and the
    score of no code, float32 `[B, Hq, bands, 2]`."""

    whole: Any
    facts: Any
    bands: Any


class Sampled(NamedTuple):
    """Sums over parts of the sample: float32 `[B, Hq, parts, 2 + D]` of s, s^2 and s v, and `[B,
    Hkv, parts, D]` of v."""

    scores: Any
    totals: Any  # a tuple of Triton's has `values` of its own
    parts: Any


class Roles(NamedTuple):
    """Programs of a row's KV head, in this order."""

    PIECES: int  # that attend to a piece of the fixed part
    SAMPLES: int  # that add up a part of the sample
    PROJECTIONS: int  # that turn and project the query for some bands


@triton.jit
def _turned(x_at, turn_at, seen, d, D: tl.constexpr, HALF: tl.constexpr):
    """Channels d of R(-s) x, [N, DEPTH] float32, of rows at `x_at` [N] whose cosines and sines
    are at `turn_at` [N]."""
    pair = d < 2 * HALF
    left = d < HALF
    partner = tl.where(left, d + HALF, tl.where(pair, d - HALF, d))
    angle = tl.where(left, d, d - HALF)
    own_mask = seen[:, None] & (d < D)[None, :]
    own = tl.load(x_at[:, None] + d[None, :], mask=own_mask, other=0.0).to(tl.float32)
    if HALF > 0:
        turns = seen[:, None] & pair[None, :]
        other = tl.load(x_at[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        cos = tl.load(turn_at[:, None] + angle[None, :], mask=turns, other=1.0)
        sin = tl.load(turn_at[:, None] + HALF + angle[None, :], mask=turns, other=0.0)
        own = own * cos + other * tl.where(left[None, :], -sin, sin)
    return own


@triton.jit(do_not_specialize=["count", "stored"])  # of any batch, of a cache of any size
def encode_written(
    cache,
    encoder,
    turns,
    sketch,
    slots,
    positions,
    count,
    stored,
    bands,
    slot_stride,
    position_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    EACH: tl.constexpr,
    BAND: tl.constexpr,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Codes of EACH written slots of head h."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    R: tl.constexpr = R4 + R2
    h = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * EACH + tl.arange(0, EACH)
    listed = i < count
    i = i.to(tl.int64)
    slot = tl.load(slots + i * slot_stride, mask=listed, other=-1).to(tl.int64)
    position = tl.load(positions + i * position_stride, mask=listed, other=-1).to(tl.int64)
    band = position // BAND
    written = (slot >= 0) & (slot < stored) & (position >= 0) & (band < bands)
    band = tl.where(written, band, 0)
    page, in_page = slot // PAGE, slot % PAGE
    key_at = cache.k + page * cache.k_b + h * cache.k_h + in_page * cache.k_s
    value_at = cache.v + page * cache.v_b + h * cache.v_h + in_page * cache.v_s
    turn_at = turns + band * (2 * HALF)
    encoder += h * ((D + 1) * R)
    c4 = tl.arange(0, R4)
    c2 = tl.arange(0, R2)
    x = tl.zeros([EACH, R4], tl.float32) + tl.load(encoder + D * R + c4)[None, :]
    y = tl.zeros([EACH, R2], tl.float32) + tl.load(encoder + D * R + R4 + c2)[None, :]
    wrong = tl.zeros([EACH], tl.int32)
    for d0 in tl.range(0, DP, DEPTH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        d = d0 + tl.arange(0, DEPTH)
        key = _turned(key_at, turn_at, written, d, D, HALF)
        shown = written[:, None] & (d < D)[None, :]
        raw = tl.load(key_at[:, None] + d[None, :], mask=shown, other=0.0).to(tl.float32)
        value = tl.load(value_at[:, None] + d[None, :], mask=shown, other=0.0).to(tl.float32)
        finite = (tl.abs(raw) < float("inf")) & (tl.abs(value) < float("inf"))
        wrong = tl.maximum(wrong, tl.max(1 - finite.to(tl.int32), 1))
        weight_at = encoder + d[:, None] * R
        inside = (d < D)[:, None]
        fine = tl.load(weight_at + c4[None, :], mask=inside, other=0.0)
        x = tl.dot(key, fine, x, input_precision=PRECISION)
        coarse = tl.load(weight_at + R4 + c2[None, :], mask=inside, other=0.0)
        y = tl.dot(key, coarse, y, input_precision=PRECISION)
    place = (page * tl.num_programs(1) + h) * PAGE + in_page
    store_codes(sketch, place, written, x, y, CODE)
    tl.store(sketch.odd + place, wrong.to(tl.uint8), mask=written)


@triton.jit
def fixed_attention(
    q_at,
    cache,
    own_table,
    output,
    piece,
    h,
    row,
    length,
    scale,
    cap,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """A group's queries against one piece of the tokens that are read exactly."""
    r = tl.arange(0, SHAPE.ROWS)
    d = tl.arange(0, SHAPE.DP)
    in_group, in_width = r < SHAPE.GROUP, d < SHAPE.D
    k_at, v_at = begin_of(cache, 0, h)
    query = tl.load(q_at + d[None, :], mask=in_group[:, None] & in_width[None, :], other=0.0)
    top = tl.full([SHAPE.ROWS], float("-inf"), tl.float32)
    total = tl.full([SHAPE.ROWS], 0.0, tl.float32)
    acc = tl.full([SHAPE.ROWS, SHAPE.DP], 0.0, tl.float32)
    for i in tl.range(0, PIECE // TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        slot = piece * PIECE + i * TILE + tl.arange(0, TILE)
        at = slot + tl.where(slot < BLOCK, 0, (near_block(length, 0) - 1) * BLOCK)
        seen = at < length
        page = page_of(own_table, at, seen, SHAPE.PAGE)
        loadable = seen[:, None] & in_width[None, :]
        key_at = k_at + page * cache.k_b + (at % SHAPE.PAGE) * cache.k_s
        value_at = v_at + page * cache.v_b + (at % SHAPE.PAGE) * cache.v_s
        key = tl.load(key_at[:, None] + d[None, :], mask=loadable, other=0.0)
        value = tl.load(value_at[:, None] + d[None, :], mask=loadable, other=0.0)
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)
    place = (row + r) * PIECES + piece
    store_partial(top, total, acc, output, place, d, in_group, in_width, SHAPE.D)


@triton.jit
def sample_sums(
    q_at,
    cache,
    own_table,
    sampled,
    part,
    h,
    place,
    row,
    length,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Sums over one part of the sample, evenly spaced candidates: of exact scores to the base 2,
    before a cap, and of values."""
    D: tl.constexpr = SHAPE.D
    COLUMNS: tl.constexpr = 2 + D
    r = tl.arange(0, SHAPE.ROWS)
    d = tl.arange(0, SHAPE.DP)
    in_group, in_width = r < SHAPE.GROUP, d < D
    k_at, v_at = begin_of(cache, 0, h)
    query = tl.load(q_at + d[None, :], mask=in_group[:, None] & in_width[None, :], other=0.0)
    candidates = ((near_block(length, 0) - 1) * BLOCK).to(tl.int64)
    one = tl.full([SHAPE.ROWS], 0.0, tl.float32)
    two = tl.full([SHAPE.ROWS], 0.0, tl.float32)
    along = tl.full([SHAPE.ROWS, SHAPE.DP], 0.0, tl.float32)
    total = tl.full([SHAPE.DP], 0.0, tl.float32)
    EACH: tl.constexpr = SAMPLE // SAMPLES
    for i in tl.range(0, EACH // TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        j = part * EACH + i * TILE + tl.arange(0, TILE)
        spaced = j * candidates // SAMPLE
        at = tl.where(candidates > SAMPLE, spaced, j) + BLOCK
        seen = at < candidates + BLOCK
        page = page_of(own_table, at, seen, SHAPE.PAGE)
        loadable = seen[:, None] & in_width[None, :]
        key_at = k_at + page * cache.k_b + (at % SHAPE.PAGE) * cache.k_s
        value_at = v_at + page * cache.v_b + (at % SHAPE.PAGE) * cache.v_s
        key = tl.load(key_at[:, None] + d[None, :], mask=loadable, other=0.0)
        value = tl.load(value_at[:, None] + d[None, :], mask=loadable, other=0.0).to(tl.float32)
        s = tl.dot(query, key.to(query.dtype).T, input_precision="ieee") * scale
        one += tl.sum(s, 1)
        two += tl.sum(s * s, 1)
        along = tl.dot(s, value, along, input_precision="ieee")
        total += tl.sum(value, 0)
    at = sampled.scores + ((row + r).to(tl.int64) * SAMPLES + part) * COLUMNS
    tl.store(at, one, mask=in_group)
    tl.store(at + 1, two, mask=in_group)
    shown = in_group[:, None] & in_width[None, :]
    tl.store(at[:, None] + 2 + d[None, :], along, mask=shown)
    tl.store(sampled.totals + (place * SAMPLES + part) * D + d, total, mask=in_width)


@triton.jit
def project_bands(
    q_at,
    scorer,
    turns,
    weights,
    first,
    h,
    row,
    scale,
    SHAPE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    CODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The weights of codes of a group's queries in PER bands from `first` on, head by head."""
    R4: tl.constexpr = CODE.R4
    R2: tl.constexpr = CODE.R2
    R: tl.constexpr = R4 + R2
    D: tl.constexpr = SHAPE.D
    i = tl.arange(0, ROWS)
    g, band = i // PER, first + i % PER
    seen = (g < SHAPE.GROUP) & (band < weights.bands)
    c4 = tl.arange(0, R4)
    c2 = tl.arange(0, R2)
    scorer += h.to(tl.int64) * (D * (R + 1))
    x = tl.zeros([ROWS, R4], tl.float32)
    y = tl.zeros([ROWS, R2], tl.float32)
    offset = tl.zeros([ROWS], tl.float32)
    for d0 in tl.range(0, SHAPE.DP, DEPTH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        d = d0 + tl.arange(0, DEPTH)
        inside = d < D
        query = _turned(q_at, turns + band * (2 * HALF), seen, d, D, HALF)
        at = scorer + d[:, None] * (R + 1)
        fine = tl.load(at + c4[None, :], mask=inside[:, None], other=0.0)
        x = tl.dot(query, fine, x, input_precision=PRECISION)
        coarse = tl.load(at + R4 + c2[None, :], mask=inside[:, None], other=0.0)
        y = tl.dot(query, coarse, y, input_precision=PRECISION)
        bare = tl.load(scorer + d * (R + 1) + R, mask=inside, other=0.0)
        offset += tl.sum(query * bare[None, :], 1)
    x, y = x * scale, y * scale
    most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    unit = tl.maximum(most / REACH, 1e-30)
    place = (row + g).to(tl.int64) * weights.bands + band
    own = weights.whole + place[:, None] * R
    tl.store(own + c4[None, :], in_units(x, unit[:, None]), mask=seen[:, None])
    tl.store(own + R4 + c2[None, :], in_units(y, unit[:, None]), mask=seen[:, None])
    tl.store(weights.facts + place * 2, unit, mask=seen)
    tl.store(weights.facts + place * 2 + 1, offset * scale, mask=seen)


@triton.jit
def prepare(
    q,
    cache,
    rows,
    scorer,
    turns,
    weights,
    fixed,
    sampled,
    total,
    marks,
    mark_count,
    q_scale,
    scale,
    cap,
    SHAPE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    MARKS: tl.constexpr,
    ROLES: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    CODE: tl.constexpr,
    CAPPED: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One piece of the fixed part, one part of the sample, or the weights of a few bands. In the
    chain the first program also clears the histogram `total` and the `marks` of `pick`."""
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    row = place * SHAPE.GROUP
    length, _ = row_span(rows, b, STEPS)
    own_table = cache.table + b * cache.table_b
    r = tl.arange(0, SHAPE.ROWS)
    q_at = q.at + b * q.b + (h * SHAPE.GROUP + r).to(tl.int64)[:, None] * q.h
    MEASURED: tl.constexpr = ROLES.PIECES + ROLES.SAMPLES
    if part == 0:
        if total is not None:
            bins = tl.arange(0, BINS)
            tl.store(total + place * BINS + bins, tl.zeros([BINS], tl.int32))
        if marks is not None:
            i = tl.arange(0, MARKS)
            mark_at = marks + place * mark_count + i
            tl.store(mark_at, tl.zeros([MARKS], tl.int64), mask=i < mark_count)
    if part < ROLES.PIECES:
        fixed_attention(
            q_at=q_at,
            cache=cache,
            own_table=own_table,
            output=fixed,
            piece=part,
            h=h,
            row=row,
            length=length,
            scale=scale,
            cap=cap,
            SHAPE=SHAPE,
            TILE=TILE,
            PIECES=ROLES.PIECES,
            CAPPED=CAPPED,
        )
    elif part < MEASURED:
        sample_sums(
            q_at=q_at,
            cache=cache,
            own_table=own_table,
            sampled=sampled,
            part=part - ROLES.PIECES,
            h=h,
            place=place,
            row=row,
            length=length,
            scale=q_scale,
            SHAPE=SHAPE,
            TILE=TILE,
            SAMPLES=ROLES.SAMPLES,
        )
    else:
        first = (part - MEASURED) * PER
        if first * BAND < near_block(length, 0) * BLOCK:  # it has candidates
            g = tl.arange(0, ROWS) // PER
            own_at = q.at + b * q.b + (h * SHAPE.GROUP + g).to(tl.int64) * q.h
            project_bands(
                q_at=own_at,
                scorer=scorer,
                turns=turns,
                weights=weights,
                first=first,
                h=h,
                row=row,
                scale=q_scale,
                SHAPE=SHAPE,
                HALF=HALF,
                ROWS=ROWS,
                PER=PER,
                CODE=CODE,
                PRECISION=PRECISION,
            )
