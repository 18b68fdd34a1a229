"""A decode step over pages for all rows of a batch, in one chain of kernels: gather for the rows
that are far, all keys for the others.

    out[b] = gather_decode's output of row b              where lengths[b] > 0
    out[b] = dense_decode's over its near[b] keys         elsewhere

Near rows have no kernels of their own. The kernels that score and select find nothing to do for
them, and the one that attends starts before these have ended: its programs read a near row whole
without waiting for them. So a step of near rows alone costs what `dense_decode` does, and two
launches that end at once. The first kernel also makes the summaries of the blocks that the step
completes, in all rows, as that of `gather_pieces`.

Source: Flash-Decoding, as in `attnplug.ops.common.splits`.
"""

from typing import NamedTuple

import torch

from attnplug.ops.common.checks import check_sinks
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.pipeline import Loop, stages_that_fit
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.common.softmax import base_two
from attnplug.ops.common.splits import pieces_of
from attnplug.ops.common.views import (
    Cache,
    Output,
    cache_of,
    query_of,
    rows_of,
    shape_of,
    steps_of,
)
from attnplug.ops.gather.attend_plan import looked_up
from attnplug.ops.gather.gather_decode import Call, Plan, plan_of, selection
from attnplug.ops.gather.gather_pieces import (
    check_step,
    descaled_on_cpu,
    merge_on_cpu,
    merge_rows,
    note_apart,
    pieces_on_cpu,
    step_of,
)
from attnplug.ops.gather.kernels.attend import Turns
from attnplug.ops.gather.kernels.attend_rows import attend_rows
from attnplug.ops.gather.kernels.slots import Keep
from attnplug.ops.gather.select_blocks import launch_choice, launch_scores

NAME = "gather_rows"

# Of near rows: programs for each multiprocessor, and the stages of a program's pipeline. There are
# LONG_STAGES where far rows have few and long programs. `bench/vllm_rows.py` compares others.
PROGRAMS, STAGES, LONG_STAGES = 2, 3, 4


def gather_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    near: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    block: int,
    top_k: int,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """One step, into `out`.

    Args:
        q, k, v, bounds, table, slots, k_scale, v_scale: as `gather_pieces` has them; bounds are
            written with slots.
        lengths: int32 or int64 `[B]`, keys of each far row; 0 for the others.
        near: like lengths, keys of each row that `lengths` has 0 for. Those of far rows are not
            looked at. A row with neither, which pads a batch, gives 0.
        out: `[B, Hq, 1, D]` like q, contiguous; written.
        scale, block, top_k, sink, local, scoring: as `select_blocks` has them.
        softcap, sinks: as `gather_attention` has them.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        CardError: the GPU does not convert float8_e4m3fn.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, out, sinks, k_scale, v_scale)
    choice = scale, block, top_k, sink, local, scoring, softcap, k_scale, v_scale
    _gather_rows(q, k, v, bounds, table, lengths, near, out, sinks, slots, *choice)


def _check(q, k, v, bounds, table, lengths, near, out, sinks, slots, *choice):
    check_step(NAME, q, k, v, bounds, table, lengths, slots, *choice)
    fits = near.dtype in (torch.int32, torch.int64) and near.shape == lengths.shape
    found = f"near is {near.dtype} {tuple(near.shape)}"
    require(fits, NAME, f"{found}, needs int32 or int64 [B] = [{q.shape[0]}]")
    fits = out.dtype == q.dtype and out.shape == q.shape and out.is_contiguous()
    found = f"out is {out.dtype} {tuple(out.shape)}"
    require(fits, NAME, f"{found}, needs {q.dtype} {tuple(q.shape)}, contiguous")
    same = near.device == out.device == q.device
    require(same, NAME, f"q is on {q.device}, near or out are not")
    require(q.stride(3) == 1, NAME, f"q has a stride of {q.stride(3)} in D, needs 1")
    for label, x in (("k", k), ("v", v)):
        require(x.stride(3) == 1, NAME, f"{label} has a stride of {x.stride(3)} in D, needs 1")
    if sinks is not None:
        check_sinks(NAME, q, sinks)


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(q, k, v, bounds, table, lengths, near, out, sinks, slots, *choice):
    pieces = q.new_empty((q.shape[0] * q.shape[1] * (q.shape[3] + 1),), dtype=torch.float32)
    pieces_on_cpu(q, k, v, bounds, table, lengths, slots, *choice, pieces)
    near = near.masked_fill(lengths > 0, 0)  # a far row's is not looked at
    *choice, k_scale, v_scale = choice
    call = step_of(q, k, v, bounds, near, *choice)
    everything = cdiv(capacity(k, table), call.block)
    call = call._replace(sink=everything, sinks=sinks)  # a sink of all blocks: the row is whole
    index = q.new_empty((q.shape[0], k.shape[1], 1, 0), dtype=torch.int32)
    whole = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    descaled_on_cpu(call, index, near, table, k_scale, v_scale, whole, lse)
    out.copy_(whole)
    merge_on_cpu(pieces, lengths, out, sinks, True)


# --- CUDA: score, select, attend, merge ------------------------------------------------------


class Whole(NamedTuple):
    """How a near row is cut; chosen from static shapes alone."""

    tile: int  # keys that a program attends to at a time
    splits: int  # pieces
    stages: int


def whole_of(call: Call, plan: Plan) -> Whole:
    """The pre-tuned plan of a shape, beside the `plan` of far rows: two programs a multiprocessor,
    or four where two would leave a tenth of the multiprocessors idle."""
    row_bytes = padded_width(call.q.shape[3]) * call.q.element_size()
    tile = min(max(16, 16384 // row_bytes), 128)  # 16 KiB of keys
    pairs, processors = call.q.shape[0] * call.k.shape[1], card(call.q.device).processors
    splits = PROGRAMS * processors // pairs
    if splits * pairs < 0.9 * PROGRAMS * processors:
        splits = 2 * PROGRAMS * processors // pairs
    return Whole(tile, max(1, splits), LONG_STAGES if plan.attend.ahead else STAGES)


def rows_plan(call: Call, table: torch.Tensor) -> Plan:
    """The plan of far rows: gather_decode's, but that programs of one tile of small blocks have
    twice as large a one. A row then has half as many places for pieces, which near rows leave empty
    and the merge passes."""
    plan = plan_of(call, table)
    attend, row_bytes = plan.attend, padded_width(call.q.shape[3]) * call.q.element_size()
    if attend.ahead or call.block >= attend.tile or row_bytes > 256:
        return plan
    splits = cdiv(attend.splits, 2)
    return plan._replace(attend=attend._replace(tile=2 * attend.tile, splits=splits))


def launch_gather_rows(
    q, k, v, bounds, table, lengths, near, out, sinks, slots, *choice, plan=None, whole=None
):
    """Run the kernels: arguments as those of `gather_rows`, on a GPU or in Triton's interpreter."""
    *choice, k_scale, v_scale = choice
    call = step_of(q, k, v, bounds, lengths, *choice)
    batch, kv_heads, top_k = q.shape[0], k.shape[1], call.top_k
    if batch == 0:
        return
    plan = plan or rows_plan(call, table)
    whole = whole or whole_of(call, plan)
    slots, scores = note_apart(call, slots), None
    index = q.new_empty((batch, kv_heads, 1, top_k), dtype=torch.int32)
    if top_k > 0:
        step = {"plan": plan.select, "table": table, "slots": slots}
        scores = launch_scores(*selection(call, lengths), **step)
        blocks = cdiv(capacity(k, table), call.block)
        rows = lengths, None, blocks, index
        launch_choice(scores, k, None, call.block, top_k, call.local, *rows, table=table)
    places = max(plan.attend.splits, whole.splits)
    output = Output(pieces_of(out, places), out, None, sinks)
    cache = cache_of(k, v, table, (k_scale, v_scale))
    _launch_attend(call, cache, near, index, output, plan, whole, places)
    more = {"kept_splits": plan.attend.splits, "whole_splits": whole.splits}
    merge_rows(output, lengths, places, True, **more)
    del scores  # until here: a kernel that starts early must not be given its memory


def _launch_attend(
    call: Call,
    cache: Cache,
    near: torch.Tensor,
    index: torch.Tensor,
    output: Output,
    plan: Plan,
    whole: Whole,
    places: int,
) -> None:
    q, k, lengths, table, attend = call.q, call.k, call.lengths, cache.table, plan.attend
    pdl, dependent = early(q.device)
    factor, cap = base_two(call.scale, call.softcap)
    size, found, shape = capacity(k, table), card(q.device), shape_of(q, k, table)
    keep = Keep.of(call.block, call.sink, call.local, call.top_k)
    ahead, stages = looked_up(attend, keep.keys, call.block, shape.PAGE)
    shared = shape.DP * q.element_size(), q.element_size(), found.shared
    stages = stages_that_fit(Loop(shape.ROWS, attend.tile, stages), *shared)
    near_stages = stages_that_fit(Loop(shape.ROWS, whole.tile, whole.stages), *shared)
    launch_kernel(
        attend_rows,
        grid=(places * k.shape[1], q.shape[0]),
        q=query_of(q),
        cache=cache,
        rows=rows_of(size, lengths),
        near=near,
        index=index,
        output=output,
        scale=factor,
        cap=cap,
        splits=attend.splits,
        whole_splits=whole.splits,
        places=places,
        SHAPE=shape,
        KV_HEADS=k.shape[1],
        KEEP=keep,
        TURNS=Turns(attend.tile, stages, ahead),
        WHOLE_TURNS=Turns(whole.tile, near_stages),
        STEPS=steps_of(lengths),
        NEAR_STEPS=steps_of(near),
        CAPPED=call.softcap > 0,
        CHAINED=call.top_k > 0,
        ASM=found.asm,
        PDL=pdl and call.top_k > 0,
        **{"num_warps": attend.warps, **(dependent if call.top_k > 0 else {})},
    )


_gather_rows = define_op(
    "gather_rows(Tensor q, Tensor k, Tensor v, Tensor(a!) bounds, Tensor table, Tensor lengths, "
    "Tensor near, Tensor(b!) out, Tensor? sinks, Tensor? slots, float scale, int block, "
    "int top_k, int sink, int local, str scoring, float softcap, Tensor? k_scale, "
    "Tensor? v_scale) -> ()",
    allocate=_check,
    cpu=_cpu,
    cuda=launch_gather_rows,
)
