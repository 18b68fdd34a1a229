"""The launch that takes the places of `pick_tokens` and `attend_picks` in the chain of
`sketch_decode`: every program finds the picks among its own slots and attends to them. What comes
out is theirs, in other pieces."""

import torch
import triton

from attnplug.ops.common.device import early
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import base_two
from attnplug.ops.sketch.attend_picks import SUMS
from attnplug.ops.sketch.kernels import attend_best as kernels
from attnplug.ops.sketch.pick_tokens import capacity_for

LOOK = 2048  # slots


def allocate(
    q: torch.Tensor, shares: torch.Tensor, top_k: int, pieces: int
) -> tuple[torch.Tensor, ...]:
    """(picks, cut, pick_out, pick_lse, pick_sums): `picks [B, Hkv, pieces, capacity]` is for the
    kernel alone, the others are as in `pick_tokens` and `attend_picks`."""
    batch, heads, _, width = q.shape
    return (
        shares.new_empty((*shares.shape[:2], pieces, capacity_for(top_k)), dtype=torch.int32),
        shares.new_empty((*shares.shape[:2], 3), dtype=torch.float32),
        q.new_empty((batch, heads, pieces, width), dtype=torch.float32),
        q.new_empty((batch, heads, pieces), dtype=torch.float32),
        q.new_empty((batch, heads, pieces, SUMS), dtype=torch.float32),
    )


def launch_attend_best(
    q,
    k,
    v,
    projected,
    fine,
    coarse,
    shares,
    total,
    middle,
    norm,
    scale,
    top_k,
    softcap,
    lengths,
    start,
    marks,
    picks,
    cut,
    pick_out,
    pick_lse,
    pick_sums,
    hint=None,
    is_new=False,
    tile=32,
    warps=4,
    look=None,
):
    """Run the kernel; tensors of the scan and of `allocate`, `marks` of `pick_tokens.new_marks`,
    cleared. With `is_new`, `lengths` lack a token."""
    batch, heads, _, width = q.shape
    kv_heads, size = k.shape[1], k.shape[2]
    group, pieces = heads // kv_heads, marks.shape[2]
    pdl, dependent = early(q.device)
    factor, cap = base_two(scale, softcap)
    if look is None:
        look = max(256, min(LOOK, triton.next_power_of_2(cdiv(size, pieces))))
    kernels.attend_best.run(
        grid=(pieces, kv_heads, batch),
        warmup=False,
        q=q,
        k=k,
        v=v,
        projected=projected,
        fine=fine,
        coarse=coarse,
        shares=shares,
        total=total,
        middle=middle,
        hint=hint,
        lengths=lengths,
        start=start,
        marks=marks,
        picks=picks,
        cut=cut,
        norm=norm,
        pick_out=pick_out,
        pick_lse=pick_lse,
        pick_sums=pick_sums,
        scale=factor,
        cap=cap,
        top_k=top_k,
        S=size,
        capacity=capacity_for(top_k),
        pieces=pieces,
        columns=projected.shape[2],
        q_strides=q.stride()[:2],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        HEADS=max(8, triton.next_power_of_2(group)),
        D=width,
        DP=triton.next_power_of_2(width),
        R4=2 * fine.shape[3],
        R2=4 * coarse.shape[3],
        TILE=tile,
        LOOK=look,
        PIECES=triton.next_power_of_2(pieces),
        CAPPED=softcap > 0,
        ASM=q.is_cuda,
        NEW=int(is_new),
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        PDL=pdl,
        num_warps=warps,
        **dependent,
    )
