"""One step of `sketch` over pages: score all tokens by their codes, read the best, estimate the
rest. See docs/methods/sketch.md, "Over pages".

    out = (N_r + rho Z_t v_t) / (Z_r + rho Z_t)

Five kernels in a chain, the parts that stand in files of their own: `prepare_pages`, `scan_pages`,
`pick_tokens`, `attend_pages` and `merge_sketch`. Nothing is kept of a sequence but its pages' keys,
values and codes, and rows may share pages.
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.checks import check_sinks
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.sketch import attend_pages as attend
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_pages as prepare
from attnplug.ops.sketch import scan_pages as scan
from attnplug.ops.sketch.pages import check_pages

NAME = "sketch_pages"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor scorer, Tensor turns, Tensor fine, "
    "Tensor coarse, Tensor odd, Tensor table, Tensor lengths, float scale, int top_k, "
    "float softcap, Tensor? sinks) -> (Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def sketch_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scorer: torch.Tensor,
    turns: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    top_k: int = 2048,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last token of each row, which is in its pages and has its code.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[pages, Hkv, page, D]` like q, Hkv dividing Hq.
        scorer: float32 `[Hkv, D, r + 1]` of `fit_model_basis`.
        turns: float32 `[bands, 2, P]` of `turns_of`, for as many tokens as a row has room for.
        fine, coarse, odd: of `encode_pages`, uint8 `[pages, Hkv, page, bytes]` twice and
            `[pages, Hkv, page]`; those of every token in front of the last four blocks of 128 are
            read.
        table: int32 `[B, pages a row]`; entries from a row's length on may be anything.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the query's own the last. A row of
            length 0 gives 0 and -inf.
        scale: factor on q.k, commonly `D ** -0.5`.
        top_k: tokens that are read exactly beside the sink and the last blocks.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32 (natural logarithm, sinks left
        out).

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, sinks)
    codes, options = (fine, coarse, odd), (scale, top_k, softcap, sinks)
    return _sketch_pages(q, k, v, scorer, turns, *codes, table, lengths, *options)


def _allocate(*args):
    call = Call(*args)
    q, k = call.q, call.k
    prepare.check_paged_step(NAME, q, k, call.v, call.table, call.lengths, call.softcap)
    check_pages(NAME, k, call.fine, call.coarse, call.odd)
    prepare.check_scorer(NAME, call.scorer, call.turns, k, call.table)
    rank = 2 * call.fine.shape[3] + 4 * call.coarse.shape[3]
    fits = call.scorer.shape[2] == rank + 1
    require(fits, NAME, f"scorer has {call.scorer.shape[2]} columns, codes need {rank + 1}")
    require(call.top_k >= 1, NAME, f"top_k is {call.top_k}, needs at least 1")
    if call.sinks is not None:
        check_sinks(NAME, q, call.sinks)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(*args):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    q, codes, softcap = call.q, (call.fine, call.coarse, call.odd), call.softcap
    rows, kv = (call.table, call.lengths), (call.k, call.v)
    whole, facts, *fixed, scores, values = prepare._prepare_pages(
        q, *kv, call.scorer, call.turns, *rows, call.scale, softcap
    )
    read = whole, facts, fixed[1], scores, values
    shares, total, sums, norm, middle, estimate, v_mean = scan._scan_pages(
        *read, *codes, *rows, call.top_k, softcap
    )
    picks, cut = pick._pick_tokens(shares, total, middle, call.top_k, call.lengths, None)
    picked = attend._attend_pages(
        q, *kv, whole, facts, *codes, call.table, picks, cut, norm, call.scale, 1, softcap
    )
    rest = sums, norm, cut, v_mean, "regression", softcap, call.sinks
    merge._cpu(q, estimate, *fixed, *picked, *rest, out, lse)


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    pick: pick.Plan
    pieces: int  # of the list of picks
    attend_warps: int


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int, size: int, top_k: int, width: int, itemsize: int, multiprocessors: int
) -> Plan:
    """The plan of a shape: `rows` (sequence, KV head) pairs with room for `size` tokens."""
    steps = pick.capacity_for(top_k) // attend.TILE
    pieces = max(1, min(steps, 3 * multiprocessors // rows))  # all at once
    pieces = -(-steps // -(-steps // pieces))
    warps = 8 if width * itemsize > 256 else 4
    return Plan(pick.plan_for(rows, size, multiprocessors), pieces, warps)


def launch_sketch_pages(*args, plan=None):
    """Run the kernels: arguments and outputs as those of the op, on a GPU or in Triton's
    interpreter."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    q, k, softcap = call.q, call.k, call.softcap
    codes, rows, kv = (call.fine, call.coarse, call.odd), (call.table, call.lengths), (k, call.v)
    prepared = prepare.outputs(q, k, call.scorer, call.table)
    whole, facts, *fixed, scores, values = prepared
    scanned = scan.outputs(facts, call.odd, call.table, k.shape[3])
    shares, total, sums, norm, middle, estimate, v_mean = scanned
    if plan is None:
        processors = card(out.device).processors
        shape = len(q) * k.shape[1], shares.shape[2], call.top_k, k.shape[3], q.element_size()
        plan = plan_for(*shape, processors)
    marks = pick.Notes.empty(shares, plan.pick).marks
    prepare.launch_prepare_pages(
        *(q, *kv, call.scorer, call.turns, *rows, call.scale, softcap, *prepared),
        total=total,
        marks=marks,
    )
    read = whole, facts, fixed[1], scores, values
    scan.launch_scan_pages(*read, *codes, *rows, call.top_k, softcap, *scanned, chained=True)
    picks, cut = pick.outputs(shares, call.top_k)
    notes = pick.Notes(marks)
    pick.launch_pick_tokens(
        shares, total, middle, call.top_k, call.lengths, None, picks, cut, plan.pick, notes
    )
    picked = attend.outputs(q, plan.pieces)
    attend.launch_attend_pages(
        *(q, *kv, whole, facts, *codes, call.table, picks, cut, norm),
        *(call.scale, plan.pieces, softcap, *picked),
        warps=plan.attend_warps,
    )
    merge.launch_merge_sketch(
        *(q, estimate, *fixed, *picked, sums, norm, cut),
        *(v_mean, "regression", softcap, call.sinks, out, lse),
    )


_sketch_pages = define_op(
    SCHEMA, allocate=_allocate, cpu=_cpu, cuda=launch_sketch_pages, repeats=True
)
