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
    k,
    bounds,
    lengths,
    table,
    slots,
    scores,
    best,
    T,
    S,
    N,
    places,
    programs,
    q_strides,
    k_strides,
    table_stride,
    slot_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    BAND: tl.constexpr,
    INT8: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every `programs`-th chunk of blocks of one query and KV head, up to the row's own length: a
    grid for the longest rows would be mostly empty.

    The summaries are those of all pages' blocks, `places` many. With `slots` `[B]` (T is 1), where
    the step has written its keys, one program more for each row and head makes the summary of the
    block that the slot completes. No program of the grid may read it: the launcher sees to that.
    """
    HEADS: tl.constexpr = ROWS // 2 if INT8 else ROWS  # products of codes have two rows for a head
    q_b, q_h, q_t = q_strides
    first = tl.program_id(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    if slots is not None:
        if first == programs:
            summarise_slot(
                k=k,
                bounds=bounds,
                slot=tl.load(slots + b * slot_stride).to(tl.int64),
                h=h.to(tl.int64),
                places=places,
                k_strides=k_strides,
                D=D,
                DP=DP,
                BLOCK=BLOCK,
                PAGE=PAGE,
                BAND=BAND,
                INT8=INT8,
            )
            return
    length, _ = row_span(lengths, None, b, S, LENGTH_STEP, 0)
    limit = (length - T + t) // BLOCK - LOCAL + 1
    if first * CHUNK < limit:
        kv_heads = tl.num_programs(1) // T
        row = (b * kv_heads + h) * T + t
        bounds_at, frame = summaries_at(bounds, h.to(tl.int64), places, D, 2, INT8)
        r = tl.arange(0, ROWS) % HEADS
        d = tl.arange(0, DP)
        q_at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
        query = tl.load(
            q_at, mask=(r < GROUP)[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg"
        )
        prepared = prepare_query(query, frame, HEADS, D, DP, 2, INT8, False)
        best_at = maxima_at(best, row, N, MEMBERS)
        last = tl.cdiv(limit, CHUNK)
        for chunk in tl.range(first, last, programs, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            blocks = chunk * CHUNK + tl.arange(0, CHUNK)
            place = place_of_block(table, b, table_stride, blocks, blocks < limit, BLOCK, PAGE)
            shown = load_summaries(bounds_at, frame, 0, blocks, place, limit, D, DP, 2, INT8)
            store_chunk(
                score=block_scores(prepared, shown, GROUP, HEADS, CHUNK, 2, INT8),
                chunk=chunk,
                limit=limit,
                key_mask=None,
                mask_offset=0,
                low=0,
                scores_at=scores + row * N,
                best_at=best_at,
                BLOCK=BLOCK,
                SINK=SINK,
                CHUNK=CHUNK,
                MEMBERS=MEMBERS,
            )
