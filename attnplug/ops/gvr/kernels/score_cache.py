"""The kernel of `score_tokens`, `share_tokens` and `top_tokens`: a row and KV head's cache, several
programs. For `top_tokens` they also keep their best scores, as `sift` does in topk_sift.py.

Names as in `score`; a part is what one set of slots is kept of.
"""

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.score import choosable, in_halves, token_scores
from attnplug.ops.gvr.kernels.topk_select import clean
from attnplug.ops.gvr.kernels.topk_sift import keep_best


@triton.jit
def _keep_part(
    out_at,
    reach,
    part,
    parts,
    row,
    S,
    kept,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
    ASM: tl.constexpr,
):
    """Keep the best of a part's scores, which this program has stored at `out_at`."""
    slot_scores, slot_index, floors, least, _ = kept
    tl.debug_barrier()  # other warps have stored some of them
    e = tl.arange(0, PART)
    i = (e // CHUNK * parts + part) * CHUNK + e % CHUNK
    # Whole groups of four, so that a thread loads them together; a chunk is stored to its end.
    inside = (i < (reach + 3) // 4 * 4) & (i < S)
    x = tl.load(out_at + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    at = row * parts + part
    outputs = (slot_scores, slot_index, floors)
    keep_best(clean(x), i, at, least, outputs, ROOM, PART, ASM)


@triton.jit
def score(
    q,
    codes,
    scales,
    lengths,
    start,
    key_mask,
    table,
    shares,
    cap,
    scores,
    kept,
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
    EACH: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One of `programs` of a row and KV head: it scores every `programs`-th of their parts, which
    are EACH times as many. With a `table`, codes and scales are those of pages of PAGE keys. With
    `shares` the scores are shares. With `kept` = (slots' scores, slots' indices, floors, least, k)
    it keeps the best ROOM of each part, PART tokens at most, in rows longer than k."""
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
    norm = None
    factor = None
    if shares is not None:
        norms, factor = shares
        norm = tl.load(norms + row * GROUP + g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
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
    parts = programs * EACH
    WIDE: tl.constexpr = TILE // CHUNK
    if CHUNK < TILE:  # a part has every `parts`-th chunk of CHUNK tokens
        n = n // CHUNK * CHUNK * parts + n % CHUNK
    for each in range(0, EACH):
        part = program + each * programs
        # Two loops, so that a short row in a long buffer costs its own reads and -inf for the rest.
        tiles = tl.cdiv(tl.maximum(reach - part * CHUNK, 0), parts * TILE)
        for i in tl.range(0, tiles, num_stages=STAGES):
            at = (part + i * parts * WIDE) * CHUNK + n
            seen = choosable(at, length, low, mask_at, SINK, WINDOW)
            read = at
            if WHOLE and CHUNK < TILE:  # a tile's last chunks may lie past the cache
                read = tl.minimum(at, S - 1)
            best = token_scores(
                at=read,
                seen=seen,
                query=query,
                norm=norm,
                codes_at=codes_at,
                scales_at=scales_at,
                row_table=row_table,
                codes_strides=codes_strides,
                scales_strides=scales_strides,
                in_group=g < GROUP,
                in_width=in_width,
                factor=factor,
                cap=cap,
                PAGE=PAGE,
                KEYS_FIRST=KEYS_FIRST,
                WHOLE=WHOLE,
                HALVES=HALVES,
                unit=unit,
            )
            tl.store(out_at + at, best, mask=at < S)
        if kept is not None:
            if length > kept[4]:
                _keep_part(out_at, reach, part, parts, row, S, kept, CHUNK, PART, ROOM, PDL)
        for first in range((part + tiles * parts * WIDE) * CHUNK, end, parts * TILE):
            tl.store(out_at + first + n, none, mask=first + n < S)
