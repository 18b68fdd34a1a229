"""The best score of each block of keys, for the heads of an indexer that picks blocks.

    out[b, h, s, j] = max over keys t <= positions[b, s] of block j of q[b, h, s] . keys[b, t]

and -inf for a block without such a key. Block j is keys block j .. block (j + 1) - 1. All heads
have the same keys. A NaN among a block's scores makes its maximum NaN, as torch's amax.

The scores themselves, a float32 for each query, head and key, are never stored.
Source: the indexer of MiniMax-M3 (2026), up to its top-k.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import BLOCKS, DTYPES, why_not_width
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import Card, card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pipeline import BESIDE
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.gather.kernels.maxima import best_of_blocks

NAME = "block_maxima"


def block_maxima(
    q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, *, block: int
) -> torch.Tensor:
    """The best product of each query with the keys of each block.

    Args:
        q: `[B,H,S,D]`, float32, float16 or bfloat16; D a multiple of 16 up to 256.
        keys: `[B,T,D]` like q, of all heads; T is the size of the cache.
        positions: int32 or int64 `[B,S]`, the last key that each query sees; below 0: none.
        block: keys a block: 16, 32, 64 or 128.

    Returns:
        float32 `[B,H,S,ceil(T/block)]`, -inf where a query sees no key of a block.

    Raises:
        ArgumentError: a shape, dtype, device or block does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, keys)
    return _block_maxima(q, keys, positions, block)


def _allocate(q, keys, positions, block):
    require(q.dim() == 4, NAME, f"q has {q.dim()} dimensions, needs [B,H,S,D]")
    require(q.dtype in DTYPES, NAME, f"q is {q.dtype}, needs float32, float16 or bfloat16")
    batch, heads, queries, width = q.shape
    unserved = why_not_width(width)
    require(not unserved, NAME, unserved)
    require(heads >= 1, NAME, "q has no heads")
    fits = keys.dim() == 3 and keys.shape[0] == batch and keys.shape[2] == width
    if not fits or keys.dtype != q.dtype:
        raise ArgumentError(
            f"{NAME}: keys is {keys.dtype} {tuple(keys.shape)}, needs {q.dtype} [B,T,D] = "
            f"[{batch}, T, {width}]"
        )
    fits = positions.dtype in (torch.int32, torch.int64)
    if not fits or tuple(positions.shape) != (batch, queries):
        raise ArgumentError(
            f"{NAME}: positions is {positions.dtype} {tuple(positions.shape)}, needs int32 or "
            f"int64 [B,S] = [{batch}, {queries}]"
        )
    require(block in BLOCKS, NAME, f"block is {block}, needs {', '.join(map(str, BLOCKS))}")
    for label, tensor in (("keys", keys), ("positions", positions)):
        require(tensor.device == q.device, NAME, f"{label} is on {tensor.device}, q on {q.device}")
    return q.new_empty((batch, heads, queries, cdiv(keys.shape[1], block)), dtype=torch.float32)


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(q, keys, positions, block, out):
    """Every (row, query) in parallel; q is `[B,S,H,D]`, keys are `[B,D,T]`."""
    batch, queries, heads, _ = q.shape
    tile = 512
    for item in prange(batch * queries):
        b, s = item // queries, item % queries
        count = min(max(positions[b, s] + 1, 0), keys.shape[2])
        for h in range(heads):
            out[b, h, s] = -np.inf
        for first in range(0, count, tile):
            size = min(tile, count - first)
            scores = np.zeros((heads, size), np.float32)
            add_product(q[b, s], np.ascontiguousarray(keys[b, :, first : first + size]), scores)
            for h in range(heads):
                best = out[b, h, s]
                for i in range(size):
                    j = (first + i) // block
                    if scores[h, i] > best[j] or np.isnan(scores[h, i]):
                        best[j] = scores[h, i]  # nothing is above a NaN


def _cpu(q, keys, positions, block, out):
    _reference(
        *arrays(q.transpose(1, 2).contiguous(), keys.transpose(1, 2).contiguous()),
        *arrays(positions.to(torch.int64).contiguous(), block, out),
    )


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; chosen from static shapes alone."""

    rows: int  # pairs of a query and a head of one program
    tile: int  # keys that are multiplied at a time
    programs: int  # that share the blocks of those queries
    warps: int
    stages: int  # 1 where a block is several tiles


def shared_bytes(plan: Plan, width: int, itemsize: int) -> int:
    """Bytes of shared memory of a program at most: its queries, which float32 products keep twice,
    the tiles of keys of its pipeline, and a tile of scores."""
    rows = plan.rows * (2 if itemsize == 4 else 1)
    tiles = (rows + plan.stages * plan.tile) * padded_width(width) * itemsize
    return tiles + 4 * plan.rows * plan.tile + BESIDE


@functools.lru_cache(maxsize=1024)
def plan_for(
    batch: int, pairs: int, size: int, block: int, width: int, itemsize: int, on: Card
) -> Plan:
    """The plan of a shape: `pairs` of a query and a head, in each of `batch` rows."""
    # In float32 more rows, or more keys at a time, are more than a thread's registers hold.
    most = 128 if itemsize == 2 else 16
    rows = max(16, min(most, next_power_of_two(pairs)))
    plan = Plan(rows, min(block, 128 if itemsize == 2 else 32), 1, 4 if rows <= 64 else 8, 3)
    if plan.tile < block:
        plan = plan._replace(stages=1)
    while shared_bytes(plan, width, itemsize) > on.shared:
        if plan.stages > 2:
            plan = plan._replace(stages=plan.stages - 1)
        elif plan.rows > 64:
            plan = plan._replace(rows=plan.rows // 2)
        elif plan.tile > 16:
            plan = plan._replace(tile=plan.tile // 2, stages=1)
        elif plan.rows > 16:
            plan = plan._replace(rows=plan.rows // 2)
        elif plan.stages > 1:
            plan = plan._replace(stages=1)
        else:
            break
    wanted = 4 * on.processors // max(1, batch * cdiv(pairs, plan.rows))
    return plan._replace(programs=max(1, min(cdiv(size, block), wanted)))


def launch_block_maxima(q, keys, positions, block, out, plan=None):
    """Run the kernel; tensors as in `block_maxima`, on a GPU or in Triton's interpreter."""
    batch, heads, queries, width = q.shape
    if out.numel() == 0:
        return
    q, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys))
    if plan is None:
        shape = batch, heads * queries, keys.shape[1], block, width, q.element_size()
        plan = plan_for(*shape, card(q.device))
    pdl, dependent = early(q.device)
    launch_kernel(
        best_of_blocks,
        grid=(plan.programs, cdiv(heads * queries, plan.rows), batch),
        q=q,
        keys=keys,
        positions=positions,
        out=out,
        S=queries,
        T=keys.shape[1],
        blocks=out.shape[3],
        programs=plan.programs,
        q_strides=q.stride()[:3],
        keys_strides=keys.stride()[:2],
        positions_strides=positions.stride(),
        H=heads,
        ROWS=plan.rows,
        D=width,
        DP=padded_width(width),
        BLOCK=block,
        TILE=plan.tile,
        STAGES=plan.stages,
        PRECISION=card(q.device).precision,
        PDL=pdl,
        **{"num_warps": plan.warps, **dependent},
    )


_block_maxima = define_op(
    f"{NAME}(Tensor q, Tensor keys, Tensor positions, int block) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_block_maxima,
)
