"""The launch of the two kernels of `topk` that read a long row once:

sift    each program of a row keeps its best scores, at least several times its part of k
finish  one program a row selects from these; a row whose k-th they cannot tell is searched
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr.kernels import topk_short_rows as short_rows
from attnplug.ops.gvr.kernels.topk_finish import finish
from attnplug.ops.gvr.kernels.topk_sift import sift

LARGEST = 16384  # scores of a program of `sift`, and slots of a row: counts of 16 bits, registers
FEW = 8  # rows
CAPACITY = 4096  # of the list of a search, or twice k


class Sift(NamedTuple):
    """How the two kernels divide a row."""

    parts: int  # programs of a row
    room: int  # slots of each
    least: int  # scores that each keeps at least, unless it has fewer
    warps: int  # of `sift`
    finish_warps: int
    chunk: int = 8  # neighbours that one program reads; the fewer, the evener are the parts' shares
    ranked: int = 256  # scores in the k-th's bin that can be ranked
    searched: int = 4096  # scores that a search reads at once


def sift_for(size: int, k: int, rows: int, parts: int | None = None, chunk: int = 8) -> Sift:
    """Programs and slots for `rows` of `size` scores. Where rows are few, `finish` is what takes
    time, and it takes less of fewer slots."""
    if parts is None:
        most = 32 if rows <= FEW and size <= 2**17 else 64
        parts = min(max(16, next_power_of_two(cdiv(size, 2048))), most)
        parts = max(parts, next_power_of_two(cdiv(size, LARGEST)))
    mean = k / parts
    least = int(mean + 6 * mean**0.5 + 6)  # a part's share of k scores anywhere in the row
    room = max(16, next_power_of_two(int(1.25 * least)))
    warps = max(1, min(16, tile_of(size, parts, chunk) // 512))
    finish_warps = max(4, min(16, next_power_of_two(parts * room) // 512))
    return Sift(parts, room, least, warps, finish_warps, chunk)


def tile_of(size: int, parts: int, chunk: int) -> int:
    """Scores of a program of `sift`."""
    return next_power_of_two(cdiv(cdiv(size, chunk), parts)) * chunk


class Slots(NamedTuple):
    """What `sift` leaves to `finish`."""

    scores: torch.Tensor  # [rows, parts * room] float32, -inf where empty
    indices: torch.Tensor  # [rows, parts * room] int32
    floors: torch.Tensor  # [rows, parts] int32, keys: a part keeps all of its scores from there on


def empty_slots(rows: int, plan: Sift, device: torch.device) -> Slots:
    new = functools.partial(torch.empty, device=device)
    slots = rows, plan.parts * plan.room
    return Slots(
        new(slots, dtype=torch.float32),
        new(slots, dtype=torch.int32),
        new((rows, plan.parts), dtype=torch.int32),
    )


def launch_sifted_rows(scores, k, lengths, indices, values, how, plan: Sift, pdl):
    """Run the kernels; tensors as in `topk`."""
    rows, size = scores.shape
    slots = empty_slots(rows, plan, scores.device)
    launch_kernel(
        sift,
        grid=(plan.parts * rows,),
        **_of_both(scores, k, lengths, slots, plan, pdl),
        least=plan.least,
        CHUNK=plan.chunk,
        TILE=tile_of(size, plan.parts, plan.chunk),
        ASM=pdl,
        num_warps=plan.warps,
    )
    _launch_finish(scores, k, lengths, slots, indices, values, how, plan, pdl)


def _of_both(scores, k, lengths, slots, plan, pdl):
    """The arguments that both kernels take."""
    return {
        "scores": scores,
        "lengths": lengths,
        "slot_scores": slots.scores,
        "slot_index": slots.indices,
        "floors": slots.floors,
        "N": scores.shape[1],
        "scores_stride": scores.stride(0),
        "parts": plan.parts,
        "K": k,
        "ROOM": plan.room,
        "LENGTH_STEP": row_step(lengths),
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }


def _launch_finish(scores, k, lengths, slots, indices, values, how, plan: Sift, pdl):
    """Run `finish` behind `sift`, which has filled the slots."""
    rows = len(scores)
    new = functools.partial(torch.empty, device=indices.device)
    capacity = max(CAPACITY, 2 * next_power_of_two(k))
    size = max(512 * plan.finish_warps, next_power_of_two(plan.parts * plan.room))
    launch_kernel(
        finish,
        grid=(rows,),
        **_of_both(scores, k, lengths, slots, plan, pdl),
        entries=new((rows, plan.ranked + short_rows.TILE), dtype=torch.int64),
        list_index=new((rows, 2, capacity), dtype=torch.int32),
        list_score=new((rows, 2, capacity), dtype=torch.float32),
        indices=indices,
        values=values,
        stats=how,
        K_PAD=max(2, next_power_of_two(k)),
        PARTS=next_power_of_two(plan.parts),
        HALVES=size // (512 * plan.finish_warps),
        WARPS=plan.finish_warps,
        LIST=plan.ranked,
        CAPACITY=capacity,
        SEARCHED=plan.searched,
        WIDTH=short_rows.WIDTH,
        num_warps=plan.finish_warps,
    )
