"""A decode step over pages for some rows of a batch, where another attention serves the others, in
two halves, so that the other attention can run beside the first half.

    pieces[b] = the pieces of gather_decode's output of row b        where lengths[b] > 0
    out[b]    = pieces[b], merged by their log-sum-exps              where lengths[b] > 0

A row that the other attention serves has a length of 0 here. Every program of such a row ends at
once, and the merge leaves its output as the other attention wrote it. The first half also makes the
summaries of the blocks that the step completes, in all rows: `page_bounds` needs no kernel then.

Pages in fp8 hold keys and values without their scales. A tile is converted to q's dtype as it is
stored; `k_scale` is a factor on the scores then, and `v_scale` on a piece.

Source: Flash-Decoding, as in `attnplug.ops.common.splits`.
"""

from typing import Any

import torch

from attnplug.ops.common.checks import DTYPES, check_scales, check_sinks
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import padded_width
from attnplug.ops.common.softmax import LN2, LOG2E
from attnplug.ops.common.splits import launch_merge
from attnplug.ops.common.views import Output
from attnplug.ops.gather.gather_attention import allocate_attention, attend_on_cpu
from attnplug.ops.gather.gather_decode import (
    Call,
    attention,
    launch_gather_decode,
    plan_of,
    selection,
)
from attnplug.ops.gather.page_bounds import launch_page_bounds, summarise_on_cpu
from attnplug.ops.gather.select_blocks import allocate_index, select_on_cpu

NAME, MERGE = "gather_pieces", "merge_pieces"


def gather_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    block: int,
    top_k: int,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    softcap: float = 0.0,
    slots: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first half: score, select and attend, for the rows whose length is not 0.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: pages `[pages, Hkv, page, D]` like q, or both float8_e4m3fn, the step's token in
            them.
        bounds: the pages' summaries, as `page_bounds` keeps them; written with `slots`.
        table: int32 `[B, P]`, the pages of each row.
        lengths: int32 or int64 `[B]`, keys of each row; 0 where another attention serves it.
        scale, block, top_k, sink, local, scoring: as `select_blocks` has them.
        softcap: as `gather_attention` has it.
        slots: int32 or int64 `[B]`, where this step has written the keys of all rows, as
            `page_bounds` has it. None: the summaries are made already.
        k_scale, v_scale: float32 `[]` or `[1]`, what keys and values in float8_e4m3fn are to be
            multiplied by. None: 1.

    Returns:
        float32 pieces for `merge_pieces`, as `store_piece` lays them out. Those of a row of length
        0 are not written.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        CardError: the GPU does not convert float8_e4m3fn.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, k_scale, v_scale)
    choice = scale, block, top_k, sink, local, scoring, softcap, k_scale, v_scale
    return _gather_pieces(q, k, v, bounds, table, lengths, slots, *choice)


def merge_pieces(
    pieces: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    chained: bool = True,
) -> None:
    """The second half: merge the pieces of the rows whose length is not 0, in place.

    Args:
        pieces: what `gather_pieces` returned.
        lengths: those that `gather_pieces` had.
        out: `[B, Hq, 1, D]`, contiguous; written. Rows of length 0 keep what is there.
        sinks: `[Hq]`, one more logit for each head, without a value.
        chained: whether the kernel in front is the last one of `gather_pieces`, on the same stream.
            The merge's kernel then starts before that one has ended.

    Raises:
        ArgumentError: a shape, dtype or device does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(MERGE, out, sinks)
    _merge_pieces(pieces, lengths, out, sinks, chained)


def step_of(q, k, v, bounds, lengths, scale, block, top_k, sink, local, scoring, softcap) -> Call:
    """The step as `gather_decode` has it, without the sinks: the merge counts them."""
    tensors = q, k, v, None, None, bounds, None, lengths
    return Call(*tensors, scale, block, top_k, sink, local, scoring, None, None, softcap, None)


def check_step(name, q, k, v, bounds, table, lengths, slots, *choice) -> Call:
    """The checks of a step that notes its `slots`, for this op and `gather_rows`; the step."""
    *choice, k_scale, v_scale = choice
    call = step_of(q, k, v, bounds, lengths, *choice)
    index = allocate_index(*selection(call, lengths), table=table, fp8=True)
    allocate_attention(*attention(call, index, lengths), table=table, fp8=True)
    check_scales(name, k, k_scale, v_scale)
    require(q.shape[2] == 1, name, f"q has {q.shape[2]} queries a row, needs 1")
    if slots is not None:
        fits = slots.dtype in (torch.int32, torch.int64) and tuple(slots.shape) == (q.shape[0],)
        found = f"slots is {slots.dtype} {tuple(slots.shape)}"
        require(fits, name, f"{found}, needs int32 or int64 [B] = [{q.shape[0]}]")
        require(slots.device == q.device, name, f"slots is on {slots.device}, q on {q.device}")
        require(k.stride(3) == 1, name, f"k has a stride of {k.stride(3)} in D, needs 1")
    return call


def _allocate(q, k, v, bounds, table, lengths, slots, *choice, plan=None):
    call = check_step(NAME, q, k, v, bounds, table, lengths, slots, *choice)
    splits = 1
    if plan is not None or q.device.type == "cuda":
        splits = (plan or plan_of(call, table)).attend.splits
    rows, width = q.shape[0] * q.shape[1], q.shape[3]
    return q.new_empty((rows * splits * (width + 1),), dtype=torch.float32)


def _allocate_merge(pieces, lengths, out, sinks, chained):
    fits = out.dim() == 4 and out.dtype in DTYPES
    require(fits, MERGE, f"out is {out.dtype} {tuple(out.shape)}, needs a float [B,Hq,1,D]")
    batch, heads, queries, width = out.shape
    each = batch * heads * (width + 1)
    fits = pieces.dtype == torch.float32 and pieces.dim() == 1 and pieces.is_contiguous()
    fits = fits and queries == 1 and pieces.shape[0] % max(1, each) == 0
    found = f"pieces is {pieces.dtype} {tuple(pieces.shape)}"
    require(fits, MERGE, f"{found}, needs those of gather_pieces for an out of {tuple(out.shape)}")
    require(out.is_contiguous(), MERGE, "out is not contiguous")
    wanted = lengths.dtype in (torch.int32, torch.int64) and tuple(lengths.shape) == (batch,)
    found = f"lengths is {lengths.dtype} {tuple(lengths.shape)}"
    require(wanted, MERGE, f"{found}, needs int32 or int64 [B] = [{batch}]")
    same = pieces.device == lengths.device == out.device
    require(same, MERGE, f"out is on {out.device}, pieces or lengths are not")
    if sinks is not None:
        check_sinks(MERGE, out, sinks)


# --- CPU: the specification ------------------------------------------------------------------


def descaled_on_cpu(call: Call, index, lengths, table, k_scale, v_scale, out, lse) -> None:
    """`attend_on_cpu` over pages that may be fp8, into a float32 `out`."""
    if k_scale is not None:
        call = call._replace(scale=call.scale * float(k_scale))
    attend_on_cpu(*attention(call, index, lengths), out, lse, table=table)
    if v_scale is not None:
        out *= float(v_scale)


def pieces_on_cpu(q, k, v, bounds, table, lengths, slots, *choice_and_pieces):
    """One piece a row: the whole of it."""
    *choice, k_scale, v_scale, pieces = choice_and_pieces
    call = step_of(q, k, v, bounds, lengths, *choice)
    if slots is not None:
        summarise_on_cpu(k, bounds, slots, call.block, call.scoring == "band")
    batch, heads, _, width = q.shape
    index = q.new_empty((batch, k.shape[1], 1, call.top_k), dtype=torch.int32)
    if call.top_k > 0:
        select_on_cpu(*selection(call, lengths), index, table=table)
    out, lse = pieces.split([batch * heads * width, batch * heads])
    out, lse = out.view(batch, heads, 1, width), lse.view(batch, heads, 1)
    descaled_on_cpu(call, index, lengths, table, k_scale, v_scale, out, lse)
    lse /= LN2


def merge_on_cpu(pieces, lengths, out, sinks, chained):
    batch, heads, _, width = out.shape
    rows = batch * heads
    splits = pieces.shape[0] // max(1, rows * (width + 1))
    parts, lse = pieces.split([rows * splits * width, rows * splits])
    parts, lse = parts.view(batch, heads, splits, width), lse.view(batch, heads, splits)
    shift = lse.amax(2, keepdim=True)
    shift = torch.where(shift == -torch.inf, 0.0, shift)
    weights = torch.exp2(lse - shift)
    total = weights.sum(2)
    if sinks is not None:
        total = total + torch.exp2(sinks.float()[None] * LOG2E - shift[:, :, 0])
    total = torch.where(total == 0, 1.0, total)
    parts = torch.where(lse[..., None] == -torch.inf, 0.0, parts)
    merged = (parts * weights[..., None]).sum(2) / total[..., None]
    out.copy_(torch.where(lengths[:, None, None, None] > 0, merged[:, :, None].to(out.dtype), out))


# --- CUDA ------------------------------------------------------------------------------------


def note_apart(call: Call, slots: torch.Tensor | None) -> torch.Tensor | None:
    """Launch `page_bounds` where the kernel that scores cannot make the summaries: the slots that
    are left to it.

    It makes them where no row of the step can read them: a row that has just come may share the
    block that another row completes, if it is the row's last but one (vLLM lends blocks that are
    still to be computed). With two local blocks it is no candidate.
    """
    apart = call.top_k == 0 or call.local < 2
    if slots is None or not apart:
        return slots
    launch_page_bounds(call.k, call.bounds, slots, call.block, call.scoring == "band")
    return None


def launch_gather_pieces(q, k, v, bounds, table, lengths, slots, *choice_and_pieces, plan=None):
    """Run the kernels: arguments and output as those of `gather_pieces`, on a GPU or in Triton's
    interpreter."""
    *choice, k_scale, v_scale, pieces = choice_and_pieces
    call = step_of(q, k, v, bounds, lengths, *choice)
    slots = note_apart(call, slots)
    more = {"count": False, "table": table, "slots": slots, "pieces": pieces}
    launch_gather_decode(*call, pieces, pieces, plan=plan, scales=(k_scale, v_scale), **more)


def launch_merge_pieces(pieces, lengths, out, sinks, chained):
    """Run the kernel: arguments as those of `merge_pieces`."""
    batch, heads, _, width = out.shape
    if batch * heads > 0:
        splits = pieces.shape[0] // (batch * heads * (width + 1))
        merge_rows(Output(pieces, out, None, sinks), lengths, splits, chained)


def merge_rows(output: Output, lengths: torch.Tensor, places: int, chained: bool, **more: Any):
    """Merge the pieces of each row, which has `places` for them; with `whole_splits` those of rows
    of length 0, too (`merge_splits`)."""
    batch, heads, _, width = output.out.shape
    columns = 32 if batch * heads <= 4096 else padded_width(width)
    more |= {"row_lengths": lengths, "ROW_STEP": row_step(lengths)}
    launch_merge(output, places, columns, chained, **more)


_gather_pieces = define_op(
    "gather_pieces(Tensor q, Tensor k, Tensor v, Tensor(a!) bounds, Tensor table, Tensor lengths, "
    "Tensor? slots, float scale, int block, int top_k, int sink, int local, str scoring, "
    "float softcap, Tensor? k_scale, Tensor? v_scale) -> Tensor",
    allocate=_allocate,
    cpu=pieces_on_cpu,
    cuda=launch_gather_pieces,
)

_merge_pieces = define_op(
    "merge_pieces(Tensor pieces, Tensor lengths, Tensor(a!) out, Tensor? sinks, bool chained) "
    "-> ()",
    allocate=_allocate_merge,
    cpu=merge_on_cpu,
    cuda=launch_merge_pieces,
)
