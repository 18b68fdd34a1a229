"""The kernel of `score_tokens`: several programs share a row and KV head's cache. Names as in
`score`."""

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.score import choosable, in_halves, token_scores


@triton.jit
def score(
    q,
    codes,
    scales,
    lengths,
    start,
    key_mask,
    table,
    scores,
    S,
    programs,
    q_strides,
    codes_strides,
    scales_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every `programs`-th tile of one row and KV head. With a `table`, codes and scales are those
    of pages of PAGE keys."""
    q_b, q_h = q_strides
    codes_b, codes_h, _ = codes_strides
    scales_b, scales_h, _ = scales_strides
    program = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    in_width = d < D
    q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=(g < GROUP)[:, None] & in_width[None, :], other=0.0)
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
    if key_mask is not None:
        mask_at = key_mask + b * mask_stride
    out_at = scores + row * S
    reach = tl.minimum(tl.maximum(length - WINDOW, 0), S)
    end = S
    if table is not None:
        end = length
    none = tl.full([TILE], float("-inf"), tl.float32)
    # Two loops, so that a short row in a long buffer costs its own reads and -inf for the rest.
    tiles = tl.cdiv(tl.maximum(reach - program * TILE, 0), programs * TILE)
    for i in tl.range(0, tiles, num_stages=STAGES):
        at = (program + i * programs) * TILE + n
        seen = choosable(at, length, low, mask_at, SINK, WINDOW)
        best = token_scores(
            at=at,
            seen=seen,
            query=query,
            codes_at=codes_at,
            scales_at=scales_at,
            row_table=row_table,
            codes_strides=codes_strides,
            scales_strides=scales_strides,
            in_group=g < GROUP,
            in_width=in_width,
            PAGE=PAGE,
            KEYS_FIRST=KEYS_FIRST,
            WHOLE=WHOLE,
            HALVES=HALVES,
            unit=unit,
        )
        tl.store(out_at + at, best, mask=at < S)
    for first in range((program + tiles * programs) * TILE, end, programs * TILE):
        tl.store(out_at + first + n, none, mask=first + n < S)
