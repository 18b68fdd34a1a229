"""The Triton kernel of `prepare_query`."""

from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.triton import gdc_launch_dependents, tl, triton
from attnplug.ops.sketch.kernels.codes import BINS, BLOCK, CHUNK, near_block
from attnplug.ops.sketch.kernels.encode import encode_chunks

PIECE = tl.constexpr(64)  # tokens of one piece


@triton.jit
def _project(
    q_at,
    queries,
    projected,
    place,
    columns,
    first,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    COUNT: tl.constexpr,
):
    """COUNT columns of the projection of a group's queries."""
    DEPTH: tl.constexpr = 128 if DP > 128 else DP  # one read of them all
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
            queries + (place * D + d0 + d)[:, None] * columns + c[None, :],
            mask=inside[:, None] & (c < columns)[None, :],
            other=0.0,
        )
        acc = tl.dot(query, matrix, acc, input_precision="ieee")
    at = projected + (place * GROUP + r)[:, None] * columns + c[None, :]
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
    k,
    v,
    new_k,
    new_v,
    mask_at,
    fixed_out,
    fixed_lse,
    piece,
    row,
    length,
    low,
    scale,
    cap,
    k_s,
    v_s,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    NEW: tl.constexpr,
):
    """A group's queries against one piece of the tokens that are read exactly. With NEW the last
    one is still in `new_k, new_v`."""
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
        seen = at < length
        if MASKED:
            seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
        loadable = seen[:, None] & in_width[None, :]
        key_at = _token_at(k, new_k, at, length - 1, k_s, NEW)
        value_at = _token_at(v, new_v, at, length - 1, v_s, NEW)
        key = tl.load(key_at[:, None] + d[None, :], mask=loadable, other=0.0)
        value = tl.load(value_at[:, None] + d[None, :], mask=loadable, other=0.0)
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)
    store_partial(
        top, total, acc, fixed_out, fixed_lse, (row + r) * SLOTS + piece, d, in_group, in_width, D
    )


@triton.jit
def store_partial(top, total, acc, out, lse, place, d, in_group, in_width, D: tl.constexpr):
    """The result of a piece, its log-sum-exp to the base 2."""
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    base = tl.where(top == float("-inf"), 0.0, top)
    result = tl.where(empty, float("-inf"), base + tl.log2(divisor))
    tl.store(lse + place, result, mask=in_group)
    tl.store(
        out + place[:, None] * D + d[None, :],
        acc / divisor[:, None],
        mask=in_group[:, None] & in_width[None, :],
    )


@triton.jit
def prepare(
    q,
    k,
    v,
    new_k,
    new_v,
    recent,
    queries,
    lengths,
    start,
    key_mask,
    projected,
    fixed_out,
    fixed_lse,
    total,
    marks,
    encoder,
    fine,
    coarse,
    odd,
    progress,
    q_scale,
    scale,
    cap,
    S,
    columns,
    chunks,
    mark_count,
    q_strides,
    k_strides,
    v_strides,
    new_k_strides,
    new_v_strides,
    mask_b,
    RING: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    COUNT: tl.constexpr,
    MARKS: tl.constexpr,
    CAPPED: tl.constexpr,
    R4: tl.constexpr,
    R2: tl.constexpr,
    COLUMN_PROGRAMS: tl.constexpr,
    CODERS: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One piece of the fixed part, a few columns of the projection, or in the chain the codes of a
    block that has left the fixed part. There the last program clears the chain's histogram and the
    marks of `pick`, writes the new token to the cache, and the query to its place in `recent`, a
    ring of RING queries a head."""
    if PDL:
        gdc_launch_dependents()
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    NEW: tl.constexpr = 0 if new_k is None else 1
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    room = length <= S
    if NEW:
        scale = tl.where(room, scale, float("nan"))  # the cache is full: the output shows it
        length = tl.minimum(length, S)
    q_b, q_h = q_strides
    r = tl.arange(0, ROWS)
    q_at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    mask_at = q
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    if part < SLOTS:
        k_at = k + b * k_b + h.to(tl.int64) * k_h
        v_at = v + b * v_b + h.to(tl.int64) * v_h
        token_k, token_v = k, v
        if NEW:
            token_k = new_k + b * new_k_strides[0] + h * new_k_strides[1]
            token_v = new_v + b * new_v_strides[0] + h * new_v_strides[1]
        _attend_piece(
            q_at,
            k_at,
            v_at,
            token_k,
            token_v,
            mask_at,
            fixed_out,
            fixed_lse,
            part,
            place * GROUP,
            length,
            low,
            scale,
            cap,
            k_s,
            v_s,
            GROUP,
            ROWS,
            D,
            DP,
            TILE,
            SLOTS,
            CAPPED,
            key_mask is not None,
            NEW,
        )
    elif part < SLOTS + COLUMN_PROGRAMS:
        _project(
            q_at,
            queries,
            projected,
            place,
            columns,
            (part - SLOTS) * COUNT,
            q_scale,
            GROUP,
            ROWS,
            D,
            DP,
            COUNT,
        )
    elif part == SLOTS + COLUMN_PROGRAMS + CODERS:
        d = tl.arange(0, DP)
        if total is not None:
            bins = tl.arange(0, BINS)
            tl.store(total + place * BINS + bins, tl.zeros([BINS], tl.int32))
        if marks is not None:
            i = tl.arange(0, MARKS)
            mark_at = marks + place * mark_count + i
            tl.store(mark_at, tl.zeros([MARKS], tl.int64), mask=i < mark_count)
        if NEW:
            # A negative length has no place in the cache, and neither has a token too many.
            written = d < tl.where(room & (length > 0), D, 0)
            key = tl.load(new_k + b * new_k_strides[0] + h * new_k_strides[1] + d, mask=written)
            value = tl.load(new_v + b * new_v_strides[0] + h * new_v_strides[1] + d, mask=written)
            end = (length - 1).to(tl.int64)
            tl.store(k + b * k_b + h.to(tl.int64) * k_h + end * k_s + d, key, mask=written)
            tl.store(v + b * v_b + h.to(tl.int64) * v_h + end * v_s + d, value, mask=written)
        if recent is not None:
            shown = (r < tl.where(length > 0, GROUP, 0))[:, None] & (d < D)[None, :]
            query = tl.load(q_at + d[None, :], mask=shown, other=0.0)
            ring = (place * GROUP + r)[:, None] * RING + (length - 1) % RING
            tl.store(recent + ring * D + d[None, :], query, mask=shown)
    elif CODERS > 0:
        PER: tl.constexpr = BLOCK // CHUNK
        done = tl.maximum(blocks_done(progress, b, low), 1)
        encode_chunks(
            k,
            v,
            encoder,
            fine,
            coarse,
            odd,
            mask_at,
            done * PER + part - SLOTS - COLUMN_PROGRAMS,
            near_block(length, low) * PER,
            CODERS,
            low,
            place,
            b,
            h,
            S,
            chunks,
            k_strides,
            v_strides,
            D,
            DP,
            R4,
            R2,
            key_mask is not None,
            PRECISION,
        )
