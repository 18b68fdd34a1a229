"""The launcher that scores the blocks of a paged cache, for `select_blocks` and `gather_pieces`."""

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.gather.kernels.score_pages import score_pages

# Programs for each multiprocessor. More would find nothing where rows are shorter than the table
# has room for, which is where most rows of a server are. STAGES: of the pipeline of a program's
# chunks, where codes have so many bytes as were compared on a GPU, lists included: their addresses
# are loaded (`bench/vllm_rows.py` compares others).
PROGRAMS, STAGES, PIPELINED_BYTES = 4, 3, 128


def launch_page_scores(
    q,
    k,
    bounds,
    table,
    lengths,
    slots,
    block,
    sink,
    local,
    band,
    padded,
    plan,
    keys,
    best,
):
    """Score the blocks of pages into `keys` and `best`, as `launch_scores` makes them. `slots`
    `[B]`, or None: where this step has written its keys, whose summaries it makes then; `band`:
    those are the edges of bands. `padded`: the rows of a product with queries."""
    batch, heads, queries, width = q.shape
    kv_heads, size = k.shape[1], capacity(k, table)
    group, rows, blocks = heads // kv_heads, batch * kv_heads * queries, cdiv(size, block)
    chunks, found = cdiv(blocks, plan.chunk), card(q.device)
    programs = min(chunks, max(1, PROGRAMS * found.processors // rows))
    int8 = bounds.dtype == torch.int8
    score_pages.run(
        grid=(programs + (slots is not None), kv_heads * queries, batch),
        warmup=False,
        q=q,
        k=k,
        bounds=bounds,
        lengths=lengths,
        table=table,
        slots=slots,
        scores=keys,
        best=best,
        T=queries,
        S=size,
        N=blocks,
        places=k.shape[0] * k.shape[2] // block,
        programs=programs,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        table_stride=table.stride(0),
        slot_stride=None if slots is None else slots.stride(0),
        GROUP=group,
        ROWS=padded,
        D=width,
        DP=padded_width(width),
        BLOCK=block,
        SINK=sink,
        LOCAL=local,
        BAND=band,
        INT8=int8,
        CHUNK=plan.chunk,
        MEMBERS=plan.members,
        LENGTH_STEP=row_step(lengths),
        PAGE=k.shape[2],
        STAGES=STAGES if int8 and padded_width(width) == PIPELINED_BYTES else 1,
        PDL=found.pdl,
        **{"num_warps": plan.warps, **found.limit(plan.registers)},
    )
