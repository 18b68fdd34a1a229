"""The kernel of `score_tokens` and `share_tokens`: a row and KV head's cache, several programs.

Names as in `score`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.rows import row_span
from attnplug.ops.gvr.kernels.score import choosable, in_halves, token_scores
from attnplug.ops.gvr.kernels.topk_sift import keep_best


@triton.jit
def _tokens(e, program, programs, CHUNK: tl.constexpr):
    """The tokens that are the e-th of a program, whose chunks of CHUNK are every `programs`-th."""
    return (e // CHUNK * programs + program) * CHUNK + e % CHUNK


@triton.jit
def _keep_best(
    out_at, S, program, programs, slots, ROOM, KEPT: tl.constexpr, CHUNK: tl.constexpr, ASM
):
    """Keep the best of what this program has scored, as `sift` of topk_sift.py does."""
    outputs, place, least = slots
    tl.debug_barrier()  # a thread reads what others have stored
    at = _tokens(tl.arange(0, KEPT), program, programs, CHUNK)
    x = tl.load(out_at + at, mask=at < S, other=float("-inf"), cache_modifier=".cg")
    keep_best(x + 0.0, at, place, least, outputs, ROOM, KEPT, ASM)


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
    slots=None,
    least=0,
    CHUNK: tl.constexpr = 0,
    ROOM: tl.constexpr = 0,
    KEPT: tl.constexpr = 0,
    ASM: tl.constexpr = False,
):
    """One of `programs` of a row and KV head: it scores every `programs`-th tile. With a `table`,
    codes and scales are those of pages of PAGE keys. With `shares` the scores are shares. With
    CHUNK its tiles are made of chunks from all over the row. With `slots` it also keeps the best
    of its scores, KEPT or fewer in all, as the first kernel of a `topk` would."""
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
    norm = None
    factor = None
    if shares is not None:
        norms, factor = shares
        row = b * tl.num_programs(1) + h
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
    out_at = scores + (b * tl.num_programs(1) + h) * S
    # Two loops, so that a short row in a long buffer costs its own reads and -inf for the rest.
    reach = tl.minimum(tl.maximum(length - WINDOW, 0), S)
    if CHUNK == 0:
        tiles = tl.cdiv(tl.maximum(reach - program * TILE, 0), programs * TILE)
    else:
        chunks = tl.cdiv(tl.maximum(reach - program * CHUNK, 0), programs * CHUNK)
        tiles = tl.cdiv(chunks * CHUNK, TILE)
    for i in tl.range(0, tiles, num_stages=STAGES):
        if CHUNK == 0:
            at = (program + i * programs) * TILE + n
        else:
            at = _tokens(i * TILE + n, program, programs, CHUNK)
        seen = choosable(at, length, low, mask_at, SINK, WINDOW)
        best = token_scores(
            at=at,
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
    end = S
    if table is not None:
        end = length
    none = tl.full([TILE], float("-inf"), tl.float32)
    if CHUNK == 0:
        for first in range((program + tiles * programs) * TILE, end, programs * TILE):
            tl.store(out_at + first + n, none, mask=first + n < S)
    else:
        for i in range(tiles, tl.cdiv(tl.cdiv(end, programs), TILE) + 1):
            at = _tokens(i * TILE + n, program, programs, CHUNK)
            tl.store(out_at + at, none, mask=at < S)
    if slots is not None:
        place = (b * tl.num_programs(1) + h) * programs + program
        kept = (slots, place, least)
        _keep_best(out_at, S, program, programs, kept, ROOM, KEPT, CHUNK, ASM)
