"""The kernel of `score_tokens`: several programs share a row and KV head's cache. Names as in
`score`."""

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.score import (
    best_of,
    choosable,
    in_halves,
    token_products,
)


@triton.jit
def score(
    q,
    codes,
    scales,
    rows,
    table,
    scores,
    programs,
    codes_strides,
    scales_strides,
    table_stride,
    SHAPE: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
    QUERIES: tl.constexpr = 1,
):
    """Every `programs`-th tile of one row and KV head. With a `table`, codes and scales are those
    of pages. A tile is read once for all QUERIES, each of which has a row of scores."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    codes_b, codes_h, _ = codes_strides
    scales_b, scales_h, _ = scales_strides
    program = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(rows, b, STEPS)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    in_width = d < D
    if QUERIES == 1:
        q_at = q.at + b * q.b + (h * GROUP + g).to(tl.int64)[:, None] * q.h + d[None, :]
    else:
        head = (h * GROUP + g % GROUP).to(tl.int64)
        q_at = q.at + b * q.b + (head * q.h + g // GROUP * q.t)[:, None] + d[None, :]
    query = tl.load(q_at, mask=(g < QUERIES * GROUP)[:, None] & in_width[None, :], other=0.0)
    unit = None
    if HALVES:
        query, unit = in_halves(query)
    row = b * tl.num_programs(1) + h
    row_table = None
    if table is None:
        codes_at = codes + b * codes_b + h.to(tl.int64) * codes_h + d[None, :]
        scales_at = scales + b * scales_b + h.to(tl.int64) * scales_h
    else:
        codes_at = codes + h.to(tl.int64) * codes_h + d[None, :]
        scales_at = scales + h.to(tl.int64) * scales_h
        row_table = table + b * table_stride
    mask_at = None
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    out_at = scores + row * QUERIES * rows.S
    reach = tl.minimum(tl.maximum(length - WINDOW, 0), rows.S)
    end = rows.S
    if table is not None:
        end = length
    none = tl.full([TILE], float("-inf"), tl.float32)
    # Two loops, so that a short row in a long buffer costs its own reads and -inf for the rest.
    tiles = tl.cdiv(tl.maximum(reach - program * TILE, 0), programs * TILE)
    for i in tl.range(0, tiles, num_stages=STAGES):
        at = (program + i * programs) * TILE + n
        seen = choosable(at, length, low, mask_at, SINK, WINDOW)
        s = token_products(
            at=at,
            seen=seen,
            query=query,
            codes_at=codes_at,
            scales_at=scales_at,
            row_table=row_table,
            codes_strides=codes_strides,
            scales_strides=scales_strides,
            in_width=in_width,
            PAGE=SHAPE.PAGE,
            KEYS_FIRST=KEYS_FIRST,
            WHOLE=WHOLE,
            HALVES=HALVES,
            unit=unit,
        )
        for t in tl.static_range(QUERIES):
            if QUERIES == 1:
                best, shown = best_of(s, g < GROUP, KEYS_FIRST), seen
            else:
                best = best_of(s, g // GROUP == t, KEYS_FIRST)
                shown = seen & (at < length - (QUERIES - 1 - t) - WINDOW)
            best = tl.where(shown, best, float("-inf"))
            tl.store(out_at + t * rows.S + at, best, mask=at < rows.S)
    for first in range((program + tiles * programs) * TILE, end, programs * TILE):
        for t in tl.static_range(QUERIES):
            tl.store(out_at + t * rows.S + first + n, none, mask=first + n < rows.S)
