"""Which key blocks a decode step should read: the best of each KV head by a score of their
summaries.

    bounds   max_g relu(q_g) . max_j - relu(-q_g) . min_j          no key of block j scores higher
    band     max_g q_g . mean_j + 0.8 sum_d |q_gd| deviation_jd

over the query heads g of the group. Candidates are the blocks between the first `sink` and the
last `local` blocks. A block whose keys the mask hides entirely is no candidate. The best `top_k`
are taken, ties to the lower index. A block with a NaN or infinite key has a NaN or infinite score
and comes first: the key must surface. Missing summaries are made on the way (`block_bounds`).

Bounds and bands may be INT8 codes. The query, times the channels' units, is then rounded to 15
bits relative to its largest element, and the products are of integers. Of a band's deviations such
codes have one width for all channels: q_g . mean_j + width_j sum_d |q_gd| unit_d.

Sources: Quest (Tang et al., 2024); "Attention Pays Its Bill" (docs/papers.md).
"""

from typing import NamedTuple

import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import WIDE_HEAD_DIMS, check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.pages import capacity, table_at
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.views import cache_of, query_of, rows_of, steps_of
from attnplug.ops.gather.block_bounds import (
    check_bounds,
    frame_of,
    no_frame,
    refresh_on_cpu,
    summary_parts,
)
from attnplug.ops.gather.kernels.bounds import Form
from attnplug.ops.gather.kernels.score import Chunks, score_blocks
from attnplug.ops.gather.kernels.select import select_best, select_many
from attnplug.ops.gather.page_bounds import check_page_bounds, rows_of_summaries
from attnplug.ops.gather.page_scores import launch_page_scores
from attnplug.ops.gather.reference import RANKED, choose_blocks
from attnplug.ops.gather.select_plan import Plan, candidates_of, plan_for

SCORINGS = ("bounds", "band")
MAX_BLOCKS = 256


def select_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    bounds: torch.Tensor,
    progress: torch.Tensor | None,
    *,
    block: int,
    top_k: int,
    sink: int = 1,
    local: int = 4,
    scoring: str = "bounds",
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best distant key blocks of every query and KV head; makes missing summaries first.

    The query at position p of a row looks at the blocks from `sink` to
    `(p - start) // block - local`, both included: all of them are complete.

    Args:
        q: `[B, Hq, T, D]`, float32, float16 or bfloat16; the last T tokens of each row.
        k: `[B, Hkv, S, D]` like q, a cache that holds these tokens already. With a table pages
            `[pages, Hkv, page, D]`, `page` a multiple of `block`; S is `P * page`.
        bounds: `[B, Hkv, ceil(S / block), 2, D]` like k, or int8 codes as `empty_bounds` makes
            them, for "band" with 1 part. Written. With a table those of all pages, as `page_bounds`
            keeps them; read only.
        progress: int32 `[B, 2]`; written. Both as `block_bounds` keeps them. None with a table.
        block: keys a block: 16, 32, 64 or 128.
        top_k: blocks to take, 0 to 256.
        sink: first blocks that are read anyway.
        local: last blocks that are read anyway, the query's own included; at least 1.
        scoring: "bounds" or "band".
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        table: int32 `[B, P]`, the pages of each row, as `dense_decode` has it. Sequences share a
            page's summaries, which know of no row's padding: there is no start and no key_mask.

    Returns:
        int32 `[B, Hkv, T, top_k]`, blocks counted from `start`, -1 where there are fewer. Lists
        of up to 32 blocks are best first, longer ones ascend.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("select_blocks", q, k)
    options = block, top_k, sink, local, scoring, lengths, start, key_mask
    if table is not None:
        return _select_blocks_paged(q, k, bounds, progress, table, *options)
    return _select_blocks(q, k, bounds, progress, *options)


def allocate_index(
    q, k, bounds, progress, block, top_k, sink, local, scoring, lengths, start, key_mask,
    table=None, fp8=False,
):  # fmt: skip
    name = "select_blocks"
    check_attention_inputs(name, q, k, k, table, head_dims=WIDE_HEAD_DIMS, fp8=fp8)
    check_sequence_inputs(name, q, k, lengths, start, key_mask, table)
    if table is None:
        check_bounds(name, k, bounds, progress, block)
    else:
        check_page_bounds(name, k, bounds, block)
        lone = progress is None and start is None and key_mask is None
        require(lone, name, "with a table there are no progress, no start and no key_mask")
    if not 0 <= top_k <= MAX_BLOCKS:
        raise ArgumentError(f"{name}: top_k is {top_k}, needs 0 to {MAX_BLOCKS}")
    if sink < 0:
        raise ArgumentError(f"{name}: sink is {sink}, needs at least 0")
    if local < 1:
        raise ArgumentError(f"{name}: local is {local}, needs at least 1, the query's own block")
    if scoring not in SCORINGS:
        raise ArgumentError(f"{name}: scoring is {scoring!r}, needs {', '.join(SCORINGS)}")
    parts = summary_parts(scoring, bounds.dtype == torch.int8, table is not None)
    if bounds.shape[3] != parts:
        raise ArgumentError(
            f"{name}: bounds has {bounds.shape[3]} parts of {bounds.dtype}, scoring {scoring!r} "
            f"needs {parts}"
        )
    shape = (q.shape[0], k.shape[1], q.shape[2], top_k)
    return q.new_empty(shape, dtype=torch.int32)


# --- CPU: the specification ------------------------------------------------------------------


def select_on_cpu(
    q, k, bounds, progress, block, top_k, sink, local, scoring, lengths, start, key_mask, out,
    table=None,
):  # fmt: skip
    lengths, start = rows_on_cpu(k, lengths, start, table)
    until = ((lengths - 1 - start).clamp(min=0) // block - local + 1).clamp(min=0)
    blocks, rows = cdiv(k.shape[2], block), (len(q), k.shape[1])
    if table is None:
        band = scoring == "band"
        refresh_on_cpu(k, key_mask, bounds, progress, start, until, block, band)
    else:
        blocks = max(int(until.max()), sink, 1)
        bounds = rows_of_summaries(bounds, table, blocks, k, block)
    # numba compiles every layout: whole tensors are contiguous, and a part is read where it lies
    shown = bounds
    frame = no_frame(*rows)
    if bounds.dtype == torch.int8:
        frame = frame_of(bounds, blocks)
    elif bounds.dtype != torch.float32:
        shown = bounds[:, :, : max(int(until.max()), sink)].float()
    choose_blocks(
        *arrays(q.contiguous(), shown, tuple(part.contiguous().numpy() for part in frame)),
        *arrays(key_mask, lengths, start, block, sink, local, out),
    )


# --- CUDA: refresh and score, then select ----------------------------------------------------


class Scores(NamedTuple):
    """What the score kernel leaves of all blocks, and the maxima of groups of them: int64 keys for
    lists of up to RANKED, and the scores as int32 in their order for longer ones."""

    keys: torch.Tensor
    best: torch.Tensor
    plan: Plan

    def widths(self, top_k: int, candidates: int) -> tuple[int, int]:
        """(padded top_k, padded number of keys that the first level selects from)."""
        members, kept = self.plan.members, max(2, next_power_of_two(top_k))
        wide = cdiv(candidates, members) if members else candidates
        return kept, max(2 * kept, next_power_of_two(wide))


def launch_scores(
    q,
    k,
    bounds,
    progress,
    block,
    top_k,
    sink,
    local,
    scoring,
    lengths,
    start,
    key_mask,
    plan=None,
    new=0,
    table=None,
    slots=None,
):
    """Make missing summaries and score the blocks. `new` tokens are neither in the cache nor
    counted by `lengths` yet; a chain of kernels then begins, of which each may start early. With
    `slots` the summaries of the blocks of pages that they complete are made too."""
    (batch, _, queries, width), kv_heads = q.shape, k.shape[1]
    size = capacity(k, table)
    group, rows, blocks = q.shape[1] // kv_heads, batch * kv_heads * queries, cdiv(size, block)
    if plan is None:
        plain = key_mask is None and table is None
        candidates = candidates_of(blocks, local)
        plan = plan_for(rows, candidates, top_k, width, bounds.element_size(), plain)
    if table is not None:  # no summary is read before the length says that it is one
        plan = plan._replace(soon=False, repeat=1, stages=1)
    pdl, dependent = early(q.device)
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    band, form = scoring == "band", Form.of(bounds, block, scoring == "band")
    made = {"dtype": torch.int32 if top_k > RANKED else torch.int64, "device": q.device}
    keys = torch.empty(rows * blocks, **made)
    best = keys
    if plan.members:
        groups = rows * cdiv(blocks, plan.members)
        best = torch.empty(groups, **made)
    padded = max(16, next_power_of_two(group) * (2 if form.INT8 else 1))
    if table is not None:
        how = block, sink, local, band, padded, plan
        launch_page_scores(q, k, bounds, table, lengths, slots, *how, keys, best)
    else:
        launch_kernel(
            score_blocks,
            grid=(cdiv(blocks, plan.chunk * plan.repeat), kv_heads * queries, batch),
            q=query_of(q),
            cache=cache_of(k, None),
            rows=rows_of(size, lengths, start, mask_bytes(key_mask)),
            bounds=bounds,
            progress=progress,
            scores=keys,
            best=best,
            N=blocks,
            GROUP=group,
            ROWS=padded,
            SINK=sink,
            LOCAL=local,
            FORM=form,
            CHUNKS=Chunks(
                plan.chunk, plan.members, plan.repeat, plan.stages, plan.soon, plan.spaced
            ),
            STEPS=steps_of(lengths, start),
            NEW=new,
            PDL=pdl,
            **{
                "num_warps": plan.warps,
                **card(q.device).limit(plan.registers),
                **(dependent if new else {}),
            },
        )
    return Scores(keys, best, plan)


def launch_choice(
    scores, k, progress, block, top_k, local, lengths, start, blocks, out, new=0, table=None
):
    """Select from what `launch_scores` left, into `out [B,Hkv,T,top_k]`."""
    batch, kv_heads, queries, _ = out.shape
    plan = scores.plan
    kept, wide = scores.widths(top_k, candidates_of(blocks, local))
    pdl, dependent = early(k.device)
    select, more = (select_best, {}) if top_k <= RANKED else (select_many, {"DIRECT": plan.direct})
    launch_kernel(
        select,
        grid=(batch * kv_heads * queries,),
        scores=scores.keys,
        best=scores.best,
        progress=progress,
        rows=rows_of(capacity(k, table), lengths, start),
        out=out,
        T=queries,
        N=blocks,
        kv_heads=kv_heads,
        BLOCK=block,
        LOCAL=local,
        K=top_k,
        KP=kept,
        WIDE=wide,
        MEMBERS=plan.members,
        STEPS=steps_of(lengths, start),
        NEW=new,
        PDL=pdl,
        **{"num_warps": plan.select_warps, **more, **dependent},
    )


def launch_select_blocks(*args, plan=None, new=0, table=None):
    """Run the kernels; arguments and output as those of `select_blocks`, on a GPU or in Triton's
    interpreter."""
    *call, out = args
    _, k, _, progress, block, top_k, _, local, _, lengths, start, _ = call
    scores = launch_scores(*call, plan=plan, new=new, table=table)
    rows = lengths, start, cdiv(capacity(k, table), block)
    launch_choice(scores, k, progress, block, top_k, local, *rows, out, new, table)


_select_blocks = define_op(
    "select_blocks(Tensor q, Tensor k, Tensor(a!) bounds, Tensor(b!) progress, "
    "int block, int top_k, int sink, int local, str scoring, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask) -> Tensor",
    allocate=allocate_index,
    cpu=select_on_cpu,
    cuda=launch_select_blocks,
    repeats=True,
)

_select_blocks_paged = define_op(
    "select_blocks_paged(Tensor q, Tensor k, Tensor bounds, Tensor? progress, Tensor table, "
    "int block, int top_k, int sink, int local, str scoring, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask) -> Tensor",
    allocate=table_at(4, allocate_index),
    cpu=table_at(4, select_on_cpu),
    cuda=table_at(4, launch_select_blocks),
    repeats=True,
)
