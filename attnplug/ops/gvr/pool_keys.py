"""The compressed keys of an indexer that scores blocks of tokens: the mean of a block's keys, its
norm, and the rotary embedding of the block's first token.

    pooled[b, j] = rotate(norm(mean over i of keys[b, t(j r + i)]), t(j r))     i = 0 .. r - 1
    norm(x) = x / sqrt(mean(x^2) + eps) (1 + weight)
    rotate(x, t)[p] = x[p] cos[b, t, p] + turned(x)[p] sin[b, t, p]             p < P

where t(n) is the slot of a row's n-th token that is not padding, and turned(x) is x's first P
channels with the halves exchanged, the second negated; channels from P on are left alone.

Only the blocks from `since` to `until` of a row are written, so that each is made once, as it
completes. All is computed in float32.
Source: the indexer of Qwen4-Exp (2026), between its cache and its scores.
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import DTYPES, why_not_width
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr.kernels.pool import Turns, pool_blocks

NAME = "pool_keys"


def pool_keys(
    pooled: torch.Tensor,
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor,
    since: torch.Tensor,
    until: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    slots: torch.Tensor | None = None,
) -> None:
    """Write the compressed keys of some blocks, in place.

    Args:
        pooled: `[B,J,D]`, float32, float16 or bfloat16, contiguous; D a multiple of 16 up to 256.
            Blocks that are not asked for keep what they have.
        keys: `[B,T,D]`, of one of these dtypes, channels contiguous. T is the size of the cache.
        cos, sin: `[B,T',P]`, of one of these dtypes, any strides; P even, up to D. T' may be less
            than T where no block begins behind it.
        weight: `[D]`, of one of these dtypes, what the norm adds to 1.
        since, until: int64 `[B]`, the first block that is written, and the one after the last. No
            block from J on is written, nor a block that reaches behind T tokens.
        ratio: tokens a block, 1 to 256.
        eps: of the norm.
        slots: int32 `[B,N]`, where each row's n-th token lies; N at least the tokens of the blocks
            that are written. None: in slot n.

    Raises:
        ArgumentError: a shape, stride, dtype, device or ratio does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, pooled, keys, cos, sin, weight)
    _pool_keys(pooled, keys, cos, sin, weight, since, until, ratio, eps, slots)


def _allocate(pooled, keys, cos, sin, weight, since, until, ratio, eps, slots):
    require(pooled.dim() == 3, NAME, f"pooled has {pooled.dim()} dimensions, needs [B,J,D]")
    dtype = pooled.dtype
    require(dtype in DTYPES, NAME, f"pooled is {dtype}, needs float32, float16 or bfloat16")
    batch, _, width = pooled.shape
    unserved = why_not_width(width)
    require(not unserved, NAME, unserved)
    require(pooled.is_contiguous(), NAME, "pooled is not contiguous")
    fits = keys.dim() == 3 and keys.shape[0] == batch and keys.shape[2] == width
    what = f"keys has shape {tuple(keys.shape)}, needs [B,T,D] = [{batch}, T, {width}]"
    require(fits, NAME, what)
    require(keys.stride(2) == 1, NAME, f"keys has stride {keys.stride(2)} in D, needs 1")
    turned = cos.shape[2] if cos.dim() == 3 else 0
    fits = cos.dim() == 3 and cos.shape[0] == batch and cos.shape == sin.shape
    even = turned % 2 == 0 and 2 <= turned <= width
    if not (fits and even) or cos.dtype != sin.dtype:
        raise ArgumentError(
            f"{NAME}: cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} "
            f"{tuple(sin.shape)}, need [B,T',P] = [{batch}, T', even up to {width}]"
        )
    shape = tuple(weight.shape)
    require(shape == (width,), NAME, f"weight has shape {shape}, needs [D] = [{width}]")
    for label, tensor in (("keys", keys), ("cos", cos), ("weight", weight)):
        known = tensor.dtype in DTYPES
        require(known, NAME, f"{label} is {tensor.dtype}, needs float32, float16 or bfloat16")
    for label, tensor in (("since", since), ("until", until)):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (batch,):
            raise ArgumentError(
                f"{NAME}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs int64 [B] = "
                f"[{batch}]"
            )
    require(1 <= ratio <= 256, NAME, f"ratio is {ratio}, needs 1 to 256")
    if slots is not None:
        fits = slots.dim() == 2 and slots.shape[0] == batch and slots.dtype == torch.int32
        what = f"slots is {slots.dtype} {tuple(slots.shape)}, needs int32 [B,N] = [{batch}, N]"
        require(fits, NAME, what)
    others = {"keys": keys, "cos": cos, "sin": sin, "weight": weight, "since": since}
    for label, tensor in (others | {"until": until, "slots": slots}).items():
        if tensor is not None and tensor.device != pooled.device:
            raise ArgumentError(f"{NAME}: {label} is on {tensor.device}, pooled on {pooled.device}")


def _most_blocks(pooled, keys, ratio, slots):
    """The blocks that there is room and that there are tokens for."""
    tokens = keys.shape[1] if slots is None else slots.shape[1]
    return min(pooled.shape[1], tokens // ratio)


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(keys, cos, sin, weight, since, until, slots, ratio, eps, pooled):
    """The blocks of each row in parallel; `weight` has its 1 in it."""
    batch, _, width = keys.shape
    half = cos.shape[2] // 2
    for b in prange(batch):
        for j in range(since[b], until[b]):
            x = np.zeros(width, np.float32)
            for i in range(ratio):
                x += keys[b, slots[b, j * ratio + i]]
            x /= np.float32(ratio)
            square = np.float32(0.0)
            for d in range(width):
                square += x[d] * x[d]
            x = x / np.sqrt(square / np.float32(width) + eps) * weight
            pooled[b, j] = x
            first = slots[b, j * ratio]
            for p in range(half):
                low, high = x[p], x[p + half]
                pooled[b, j, p] = low * cos[b, first, p] - high * sin[b, first, p]
                p += half
                pooled[b, j, p] = high * cos[b, first, p] + low * sin[b, first, p]


def _cpu(pooled, keys, cos, sin, weight, since, until, ratio, eps, slots):
    most = _most_blocks(pooled, keys, ratio, slots)
    since, until = (x.clamp(0, most).contiguous() for x in (since, until))
    if slots is None:
        slots = torch.arange(most * ratio, dtype=torch.int32, device="cpu").expand(len(keys), -1)
    result = pooled.float()
    _reference(
        *(x.float().contiguous().numpy() for x in (keys, cos, sin, 1.0 + weight.float())),
        since.numpy(),
        until.numpy(),
        slots.contiguous().numpy(),
        ratio,
        np.float32(eps),
        result.numpy(),
    )
    if result is not pooled:
        pooled.copy_(result)


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; chosen from static shapes alone."""

    tile: int  # blocks of a program at a time
    programs: int  # that share a row's blocks


def plan_for(batch: int, blocks: int, processors: int) -> Plan:
    """The plan of a shape. How many blocks there are to write is known on the device alone."""
    return Plan(16, max(1, min(cdiv(blocks, 16), 4 * processors // max(1, batch))))


def launch_pool_keys(pooled, keys, cos, sin, weight, since, until, ratio, eps, slots, plan=None):
    """Run the kernel; tensors as in `pool_keys`, on a GPU or in Triton's interpreter."""
    batch, _, width = pooled.shape
    most = _most_blocks(pooled, keys, ratio, slots)
    if batch == 0 or most == 0:
        return
    if plan is None:
        plan = plan_for(batch, most, card(pooled.device).processors)
    half = cos.shape[2] // 2
    if slots is not None and slots.stride(1) != 1:
        slots = slots.contiguous()
    pdl, dependent = early(pooled.device)
    launch_kernel(
        pool_blocks,
        grid=(plan.programs, batch),
        pooled=pooled,
        keys=keys,
        turns=Turns(cos, sin, cos.stride(), sin.stride()),
        weight=weight.contiguous(),
        since=since.contiguous(),
        until=until.contiguous(),
        slots=slots,
        slots_b=None if slots is None else slots.stride(0),
        most=most,
        programs=plan.programs,
        eps=eps,
        pooled_strides=pooled.stride()[:2],
        keys_strides=keys.stride()[:2],
        RATIO=ratio,
        D=width,
        HALF=half,
        HALFP=next_power_of_two(half),
        REST=next_power_of_two(max(1, width - 2 * half)),
        TILE=plan.tile,
        PDL=pdl,
        **{"num_warps": 4, **dependent},
    )


_pool_keys = define_op(
    f"{NAME}(Tensor(a!) pooled, Tensor keys, Tensor cos, Tensor sin, Tensor weight, Tensor since, "
    "Tensor until, int ratio, float eps, Tensor? slots) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_pool_keys,
)
