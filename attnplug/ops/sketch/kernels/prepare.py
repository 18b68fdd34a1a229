"""The Triton kernel of `prepare_query`."""

from typing import NamedTuple

from attnplug.ops.common.rows import blocks_done, row_of, row_span, shown
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.triton import gdc_launch_dependents, tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.sketch.kernels.codes import BINS, BLOCK, CHUNK, near_block
from attnplug.ops.sketch.kernels.encode import encode_chunks

PIECE = tl.constexpr(64)  # tokens of one piece


class Programs(NamedTuple):
    """Of a row's KV head, in this order; where there is a chain one more comes last."""

    PIECES: int  # that attend to a piece of the fixed part each
    COLUMNS: int  # that project queries
    CODERS: int  # that make codes


@triton.jit
def _project(
    q_at,
    queries,
    projected,
    place,
    home,
    first,
    scale,
    SHAPE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """COUNT columns of the projection of a group's queries."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    DEPTH: tl.constexpr = 128 if DP > 128 else DP  # one read of them all
    columns = projected.columns
    r = tl.arange(0, ROWS)
    c = first + tl.arange(0, COUNT)
    d = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COUNT], tl.float32)
    for d0 in tl.range(0, DP, DEPTH, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        inside = d0 + d < D
        query = tl.load(
            q_at + (d0 + d)[None, :], mask=(r < GROUP)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        matrix = tl.load(
            queries + (home * D + d0 + d)[:, None] * columns + c[None, :],
            mask=inside[:, None] & (c < columns)[None, :],
            other=0.0,
        )
        acc = tl.dot(query, matrix, acc, input_precision="ieee")
    at = projected.at + (place * GROUP + r)[:, None] * columns + c[None, :]
    tl.store(at, acc * scale, mask=(r < GROUP)[:, None] & (c < columns)[None, :])


@triton.jit
def _token_at(cache, new, at, position, s_stride, NEW: tl.constexpr):
    """Where the keys (values) of the tokens `at` are: the newest one's is not in the cache yet."""
    token_at = cache + at.to(tl.int64) * s_stride
    if NEW:
        token_at = tl.where(at == position, new, token_at)
    return token_at


@triton.jit
def _attend_piece(
    q_at,
    cache,
    rows,
    token,
    output,
    piece,
    b,
    h,
    place,
    length,
    low,
    scale,
    cap,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """A group's queries against one piece of the tokens that are read exactly. The last one
    may be a `token` that is not in the cache yet."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    NEW: tl.constexpr = 0 if token is None else 1
    k_at, v_at = begin_of(cache, b, h)
    new_k, new_v = k_at, v_at
    if token is not None:
        new_k = token.k + b * token.k_b + h * token.k_h
        new_v = token.v + b * token.v_b + h * token.v_h
    row = place * GROUP
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_group = r < GROUP
    in_width = d < D
    query = tl.load(q_at + d[None, :], mask=in_group[:, None] & in_width[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(0, PIECE // TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        slot = piece * PIECE + i * TILE + tl.arange(0, TILE)
        at = low + slot + tl.where(slot < BLOCK, 0, (near_block(length, low) - 1) * BLOCK)
        seen = shown(rows, b, at, at < length)
        loadable = seen[:, None] & in_width[None, :]
        key_at = _token_at(k_at, new_k, at, length - 1, cache.k_s, NEW)
        value_at = _token_at(v_at, new_v, at, length - 1, cache.v_s, NEW)
        key = tl.load(key_at[:, None] + d[None, :], mask=loadable, other=0.0)
        value = tl.load(value_at[:, None] + d[None, :], mask=loadable, other=0.0)
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)
    store_partial(top, total, acc, output, (row + r) * SLOTS + piece, d, in_group, in_width, D)


@triton.jit
def store_partial(top, total, acc, pieces, place, d, in_group, in_width, D: tl.constexpr):
    """The result of a piece, its log-sum-exp to the base 2."""
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    base = tl.where(top == float("-inf"), 0.0, top)
    result = tl.where(empty, float("-inf"), base + tl.log2(divisor))
    tl.store(pieces.lse + place, result, mask=in_group)
    tl.store(
        pieces.out + place[:, None] * D + d[None, :],
        acc / divisor[:, None],
        mask=in_group[:, None] & in_width[None, :],
    )


@triton.jit
def prepare(
    q,
    cache,
    rows,
    token,
    recent,
    queries,
    projected,
    fixed,
    total,
    marks,
    encoder,
    codes,
    q_scale,
    scale,
    cap,
    chunks,
    mark_count,
    RING: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COUNT: tl.constexpr,
    MARKS: tl.constexpr,
    CAPPED: tl.constexpr,
    CODE: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One piece of the fixed part, a few columns of the projection, or in the chain the codes of a
    block that has left the fixed part. The queries of a row may make the same codes at once: they
    store the same. There the last program clears the chain's histogram and the
    marks of `pick`, writes the new token to the cache, and the query to its place in `recent`, a
    ring of RING queries a head."""
    if PDL:
        gdc_launch_dependents()
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    SLOTS: tl.constexpr = PROGRAMS.PIECES
    CODERS: tl.constexpr = PROGRAMS.CODERS
    BEFORE: tl.constexpr = SLOTS + PROGRAMS.COLUMNS
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    row = row_of(b, STEPS)
    home = row * tl.num_programs(1) + h
    NEW: tl.constexpr = 0 if token is None else 1
    length, low = row_span(rows, b, STEPS, NEW)
    room = length <= rows.S
    if NEW:
        scale = tl.where(room, scale, float("nan"))  # the cache is full: the output shows it
        length = tl.minimum(length, rows.S)
    r = tl.arange(0, ROWS)
    q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h
    if part < SLOTS:
        _attend_piece(
            q_at=q_at,
            cache=cache,
            rows=rows,
            token=token,
            output=fixed,
            piece=part,
            b=row,
            h=h,
            place=place,
            length=length,
            low=low,
            scale=scale,
            cap=cap,
            SHAPE=SHAPE,
            TILE=TILE,
            SLOTS=SLOTS,
            CAPPED=CAPPED,
        )
    elif part < BEFORE:
        first = (part - SLOTS) * COUNT
        _project(q_at, queries, projected, place, home, first, q_scale, SHAPE, COUNT)
    elif part == BEFORE + CODERS:
        d = tl.arange(0, DP)
        if total is not None:
            bins = tl.arange(0, BINS)
            tl.store(total + place * BINS + bins, tl.zeros([BINS], tl.int32))
        if marks is not None:
            i = tl.arange(0, MARKS)
            mark_at = marks + place * mark_count + i
            tl.store(mark_at, tl.zeros([MARKS], tl.int64), mask=i < mark_count)
        if token is not None:
            # A negative length has no place in the cache, and neither has a token too many.
            written = d < tl.where(room & (length > 0), D, 0)
            key = tl.load(token.k + b * token.k_b + h * token.k_h + d, mask=written)
            value = tl.load(token.v + b * token.v_b + h * token.v_h + d, mask=written)
            end = (length - 1).to(tl.int64)
            k_at = cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h
            tl.store(k_at + end * cache.k_s + d, key, mask=written)
            v_at = cache.v + b * cache.v_b + h.to(tl.int64) * cache.v_h
            tl.store(v_at + end * cache.v_s + d, value, mask=written)
        if recent is not None:
            shown_d = (r < tl.where(length > 0, GROUP, 0))[:, None] & (d < D)[None, :]
            query = tl.load(q_at + d[None, :], mask=shown_d, other=0.0)
            ring = (place * GROUP + r)[:, None] * RING + (length - 1) % RING
            tl.store(recent + ring * D + d[None, :], query, mask=shown_d)
    elif CODERS > 0:
        PER: tl.constexpr = BLOCK // CHUNK
        done = tl.maximum(blocks_done(codes.progress, row, low), 1)
        mask_at = rows.key_mask
        if rows.key_mask is not None:
            mask_at = rows.key_mask + row * rows.mask_b
        encode_chunks(
            cache=cache,
            encoder=encoder,
            codes=codes,
            mask_at=mask_at,
            begin=done * PER + part - BEFORE,
            end=near_block(length, low) * PER,
            step=CODERS,
            low=low,
            place=home,
            b=row,
            h=h,
            S=rows.S,
            chunks=chunks,
            D=D,
            DP=DP,
            CODE=CODE,
            PRECISION=PRECISION,
        )
