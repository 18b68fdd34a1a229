"""The launcher that scores the blocks of a paged cache, for `select_blocks` and `gather_pieces`."""

from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.views import cache_of, query_of, rows_of, shape_of, steps_of
from attnplug.ops.gather.kernels.bounds import Form
from attnplug.ops.gather.kernels.score import Chunks
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
    (batch, _, queries, _), kv_heads = q.shape, k.shape[1]
    blocks, found = cdiv(capacity(k, table), block), card(q.device)
    programs = max(1, PROGRAMS * found.processors // (batch * kv_heads * queries))
    programs = min(cdiv(blocks, plan.chunk), programs)
    form = Form.of(bounds, block, band, framed=False)
    stages = STAGES if form.INT8 and form.DP == PIPELINED_BYTES else 1
    launch_kernel(
        score_pages,
        grid=(programs + (slots is not None), kv_heads * queries, batch),
        q=query_of(q),
        cache=cache_of(k, None, table),
        rows=rows_of(capacity(k, table), lengths),
        bounds=bounds,
        slots=slots,
        scores=keys,
        best=best,
        N=blocks,
        places=k.shape[0] * k.shape[2] // block,
        programs=programs,
        slot_stride=None if slots is None else slots.stride(0),
        SHAPE=shape_of(q, k, table, padded),
        SINK=sink,
        LOCAL=local,
        FORM=form,
        CHUNKS=Chunks(plan.chunk, plan.members, STAGES=stages),
        STEPS=steps_of(lengths),
        PDL=found.pdl,
        **{"num_warps": plan.warps, **found.limit(plan.registers)},
    )
