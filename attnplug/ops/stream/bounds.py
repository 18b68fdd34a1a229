"""How `stream_mask` launches its flat search, `search="bounds"`: summaries of key blocks, the
earlier blocks of highest bound, and the scores of these."""

from typing import Any, NamedTuple

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.stream.kernels import bounds as kernels

LISTS, WIDER = kernels.LISTS.value, kernels.WIDER.value


class RankPlan(NamedTuple):
    """How the kernels of the flat search cut the work; chosen from static shapes alone."""

    blocks: int  # summaries that a program compares at once
    rank_warps: int
    tile: int  # keys that a program scores at once
    warps: int
    stages: int = 1  # of the pipeline over keys; more only after a GPU has compared it


def rank_plan_for(
    rows: int, block: int, width: int, itemsize: int, top_k: int, shared: int
) -> RankPlan:
    """The plan of a shape, `rows` queries a block, within `shared` bytes of shared memory: a
    program keeps its queries, tiles of keys (of summaries two), and their products in float32."""
    key_bytes = padded_width(width) * itemsize
    blocks = max(16, min(128, 32768 // key_bytes))
    while blocks > 16 and 2 * blocks * key_bytes + rows * (key_bytes + 4 * blocks) > shared:
        blocks //= 2
    tile = max(16, min(block, 32768 // key_bytes))
    while tile > 16 and tile * key_bytes + rows * (key_bytes + 4 * tile) > shared:
        tile //= 2
    return RankPlan(blocks, 8 if WIDER * top_k > 256 else 4, tile, 8 if rows == 128 else 4)


def _summaries(shared: dict[str, Any]) -> torch.Tensor:
    """Max and min of the shown keys of every complete block, `[B, Hkv, NK, 2, D]` like k; max is
    NaN where one of them is not finite. The other blocks are not written."""
    k, shape, block = shared["cache"].k, shared["SHAPE"], shared["SEARCH"].BLOCK
    batch, kv_heads, size, width = k.shape
    blocks = cdiv(size, block)
    summaries = k.new_empty((batch, kv_heads, blocks, 2, width))
    launch_kernel(
        kernels.summarise,
        grid=(blocks, kv_heads, batch),
        **{name: shared[name] for name in ("cache", "rows", "STEPS")},
        summaries=summaries,
        D=width,
        DP=shape.DP,
        BLOCK=block,
        num_warps=4,
    )
    return summaries


def launch_bounds(shared: dict[str, Any], plan: RankPlan | None = None) -> None:
    """Run the kernels with the arguments that both searches `share`, on a GPU or in Triton's
    interpreter. They need memory for two numbers of k's dtype a block and channel, and for WIDER
    int32 a place of a list."""
    q, rows, shape, index = (shared[name] for name in ("q", "rows", "SHAPE", "index"))
    (batch, heads, slots, top_k), kv_heads = index.shape, shared["cache"].k.shape[1]
    if plan is None:
        of_plan = shape.ROWS, shared["SEARCH"].BLOCK, shape.D, q.at.element_size()
        plan = rank_plan_for(*of_plan, top_k, card(index.device).shared)
    summaries, group = _summaries(shared), shape.GROUP
    chosen = index.new_empty((batch, heads, slots, WIDER * top_k))
    together = min(next_power_of_two(group), LISTS)
    launch_kernel(
        kernels.rank,
        grid=(cdiv(slots, LISTS // together), kv_heads * cdiv(group, together), batch),
        **{
            name: shared[name]
            for name in ("after", "allowed", "budget", "SHAPE", "SEARCH", "STEPS")
        },
        q=q.at,
        summaries=summaries,
        chosen=chosen,
        lengths=rows.lengths,
        start=rows.start,
        T=q.T,
        S=rows.S,
        N=summaries.shape[2],
        slots=slots,
        q_strides=(q.b, q.h, q.t),
        TILE=plan.blocks,
        CP=max(2, next_power_of_two(WIDER * top_k)),
        HEADS=together,
        num_warps=plan.rank_warps,
    )
    launch_kernel(
        kernels.rescore,
        grid=(slots, heads, batch),
        **{name: value for name, value in shared.items() if name != "before"},
        chosen=chosen,
        TILE=plan.tile,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
