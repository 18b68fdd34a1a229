"""The launch of the kernels of `topk` that give a long row several programs:

verify   guesses a range of scores from the hint and counts the row's scores in its bins
collect  finds the bin that holds the k-th score; scores above it are sure and go to the output,
         scores in it go to a list
refine   one program a row selects the rest from the list
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr.kernels.topk_collect import collect
from attnplug.ops.gvr.kernels.topk_refine import refine
from attnplug.ops.gvr.kernels.topk_verify import verify


class _Buffers(NamedTuple):
    """What the kernels of long rows hand each other (topk_select.py has the layouts)."""

    programs: int  # of `collect`, a row
    slots: int  # a power of two from `programs` on
    groups_of_row: int  # 0: no maxima
    edges: torch.Tensor
    counts: torch.Tensor
    words: torch.Tensor
    ranges: torch.Tensor
    list_index: torch.Tensor
    list_score: torch.Tensor
    maxima: torch.Tensor | None
    groups: torch.Tensor | None


def _allocate_buffers(scores, k, plan) -> _Buffers:
    rows, size = scores.shape
    grouped = plan.group > 1
    groups_of_row = cdiv(size, plan.group) if grouped else 0
    programs = max(plan.verifiers, cdiv(groups_of_row, plan.here))
    # Most that is counted one by one in a part: int16 holds the counts if they fit.
    counted = min(size, 2 * plan.group * k) if grouped else size
    part = cdiv(cdiv(counted, plan.verify_tile), plan.verifiers) * plan.verify_tile
    count_dtype = torch.int16 if part < 2**15 else torch.int32
    new = functools.partial(torch.empty, device=scores.device)
    return _Buffers(
        programs=programs,
        slots=max(128, next_power_of_two(programs)),  # few sizes: few kernels to compile
        groups_of_row=groups_of_row,
        edges=new((rows, 2), dtype=torch.float32),
        counts=new((rows, plan.verifiers, plan.bins), dtype=count_dtype),
        words=new((rows, programs), dtype=torch.int64),
        ranges=new((rows, programs, 2), dtype=torch.int32),
        list_index=new((rows, 2, plan.capacity), dtype=torch.int32),
        list_score=new((rows, 2, plan.capacity), dtype=torch.float32),
        maxima=new((rows, groups_of_row), dtype=torch.float32) if grouped else None,
        groups=new((rows, groups_of_row), dtype=torch.int32) if grouped else None,
    )


def launch_long_rows(scores, k, hint, lengths, indices, values, how, plan, pdl):
    """Run the three kernels; tensors as in `topk`, `plan` a `topk.Plan`."""
    buffers = _allocate_buffers(scores, k, plan)
    of_all = _of_all(scores, k, lengths, buffers, pdl)
    launch_kernel(
        verify,
        grid=(plan.verifiers * len(scores),),
        **of_all,
        hint=hint,
        edges=buffers.edges,
        counts=buffers.counts,
        maxima=buffers.maxima,
        hints=0 if hint is None else hint.shape[1],
        groups_of_row=buffers.groups_of_row,
        hint_stride=0 if hint is None else hint.stride(0),
        parts=plan.verifiers,
        BINS=plan.bins,
        SAMPLE=plan.sample,
        TILE=plan.verify_tile,
        GROUP=plan.group,
        WORDS=next_power_of_two(cdiv(buffers.programs, plan.verifiers)),
        num_warps=plan.verify_warps,
    )
    _launch_after_counts(of_all, len(scores), k, indices, values, how, plan, buffers)


def _of_all(scores, k, lengths, buffers, pdl):
    """The arguments that all three kernels take."""
    return {
        "scores": scores,
        "lengths": lengths,
        "words": buffers.words,
        "N": scores.shape[1],
        "scores_stride": scores.stride(0),
        "programs": buffers.programs,
        "K": k,
        "LENGTH_STEP": row_step(lengths),
        "PDL": pdl,
        "num_stages": 1,
        **({"launch_pdl": True} if pdl else {}),
    }


def _launch_after_counts(of_all, rows, k, indices, values, how, plan, buffers):
    """Run collect and refine."""
    shared = of_all | {
        "ranges": buffers.ranges,
        "list_index": buffers.list_index,
        "list_score": buffers.list_score,
        "indices": indices,
        "values": values,
        "CAPACITY": plan.capacity,
        "SLOTS": buffers.slots,
    }
    launch_kernel(
        collect,
        grid=(buffers.programs * rows,),
        **shared,
        edges=buffers.edges,
        counts=buffers.counts,
        maxima=buffers.maxima,
        groups=buffers.groups,
        groups_of_row=buffers.groups_of_row,
        BINS=plan.bins,
        parts=plan.verifiers,
        PARTS_PAD=next_power_of_two(plan.verifiers),
        PART_TILE=plan.verify_tile,
        TILE=plan.collect_tile,
        HERE=plan.here,
        GROUP=plan.group,
        BATCH=plan.batch,
        num_warps=plan.collect_warps,
    )
    launch_kernel(
        refine,
        grid=(rows,),
        **shared,
        stats=how,
        K_PAD=max(2, next_power_of_two(k)),
        TILE=plan.refine_tile,
        SMALL=plan.small,
        LOOKED_BACK=plan.group > 1,
        num_warps=plan.refine_warps,
    )
