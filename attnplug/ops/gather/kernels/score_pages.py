"""The Triton kernel that scores the blocks of a paged cache for select_blocks. `page_bounds` keeps
the summaries, so that none is missing; on request the kernel makes those that a step completes."""

from attnplug.ops.common.pages import place_of_block
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, tl, triton
from attnplug.ops.gather.kernels.bounds import summaries_at
from attnplug.ops.gather.kernels.page_bounds import summarise_slot
from attnplug.ops.gather.kernels.score import (
    block_scores,
    load_summaries,
    maxima_at,
    prepare_query,
    store_chunk,
)


@triton.jit(do_not_specialize=["places"])  # one kernel for caches of all sizes
def score_pages(
    q,
    cache,
    rows,
    bounds,
    slots,
    scores,
    best,
    N,
    places,
    programs,
    slot_stride,
    SHAPE: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every `programs`-th chunk of blocks of one query and KV head, up to the row's own length: a
    grid for the longest rows would be mostly empty.

    The summaries are those of all pages' blocks, `places` many. With `slots` `[B]` (T is 1), where
    the step has written its keys, one program more for each row and head makes the summary of the
    block that the slot completes. No program of the grid may read it: the launcher sees to that.
    """
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    PAGE: tl.constexpr = SHAPE.PAGE
    BLOCK: tl.constexpr = FORM.BLOCK
    CHUNK: tl.constexpr = CHUNKS.CHUNK
    # Products of codes have two rows for a head.
    HEADS: tl.constexpr = ROWS // 2 if FORM.INT8 else ROWS
    first = tl.program_id(0)
    t = tl.program_id(1) % q.T
    h = tl.program_id(1) // q.T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    if slots is not None:
        if first == programs:
            slot = tl.load(slots + b * slot_stride).to(tl.int64)
            summarise_slot(cache, bounds, slot, h.to(tl.int64), places, PAGE, FORM)
            return
    length, _ = row_span(rows, b, STEPS)
    limit = (length - q.T + t) // BLOCK - LOCAL + 1
    if first * CHUNK < limit:
        kv_heads = tl.num_programs(1) // q.T
        row = (b * kv_heads + h) * q.T + t
        bounds_at, frame = summaries_at(bounds, h.to(tl.int64), places, FORM)
        r = tl.arange(0, ROWS) % HEADS
        d = tl.arange(0, FORM.DP)
        q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h + t * q.t + d[None, :]
        query = tl.load(
            q_at, mask=(r < GROUP)[:, None] & (d < FORM.D)[None, :], other=0.0, cache_modifier=".cg"
        )
        prepared = prepare_query(query, frame, HEADS, FORM)
        best_at = maxima_at(best, row, N, CHUNKS.MEMBERS)
        last = tl.cdiv(limit, CHUNK)
        for chunk in tl.range(first, last, programs, num_stages=CHUNKS.STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            blocks = chunk * CHUNK + tl.arange(0, CHUNK)
            place = place_of_block(
                cache.table, b, cache.table_b, blocks, blocks < limit, BLOCK, PAGE
            )
            shown = load_summaries(bounds_at, frame, 0, blocks, place, limit, FORM)
            store_chunk(
                score=block_scores(prepared, shown, GROUP, HEADS, CHUNK, FORM),
                chunk=chunk,
                limit=limit,
                mask_at=None,
                low=0,
                scores_at=scores + row * N,
                best_at=best_at,
                BLOCK=BLOCK,
                SINK=SINK,
                CHUNKS=CHUNKS,
            )
