"""Summaries of key blocks, kept beside a KV cache: what a block's keys can score at most.

    bounds[b, h, j, 0] = max of the keys of block j,   bounds[b, h, j, 1] = their min  (elementwise)
    relu(q) . max - relu(-q) . min  >=  q . key        for every query and every key of the block

or, with one part instead of two, the mean of the block's keys. Blocks are numbered from each row's
first real token: block j is keys start + block j up to start + block (j + 1) - 1. Keys that the key
mask hides enter nothing. A complete block never changes until the cache is cropped, so `progress`
says how many leading blocks are done, for which start, and only what is missing is read.
Source: Quest (Tang et al., 2024), as in "Attention Pays Its Bill" (shared/papers/000).
"""

import numba
import numpy as np
import torch
import triton
import triton.language as tl

from attnplug.errors import ArgumentError
from attnplug.ops._define import (
    DTYPES,
    HEAD_DIMS,
    check_sequence_inputs,
    define_op,
    mask_bytes,
    refuse_gradients,
    require,
    row_step,
    rows_on_cpu,
)

BLOCKS = (16, 32, 64, 128)
NO_MASK = np.empty((1, 0), np.bool_)


def block_bounds(
    k: torch.Tensor,
    bounds: torch.Tensor,
    progress: torch.Tensor,
    *,
    block: int,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> None:
    """Bring the summaries of all complete blocks up to date, in place.

    Elementwise max and min of a block's keys (`parts` 2) or their mean (`parts` 1). A NaN among
    the keys gives NaN; a block without a visible key gives 0.

    Args:
        k: `[B, Hkv, S, D]`, float32, float16 or bfloat16.
        bounds: `[B, Hkv, ceil(S / block), parts, D]` like k, contiguous; written.
        progress: int32 `[B, 2]`, contiguous; written. Of each row, how many leading blocks of
            `bounds` are done, and the start that they are counted from: another start does them
            anew. Begin with zeros; whoever shortens or replaces the keys lowers the count.
        block: keys a block: 16, 32, 64 or 128.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("block_bounds", k)
    _block_bounds(k, bounds, progress, lengths, start, key_mask, block)


def _allocate(k, bounds, progress, lengths, start, key_mask, block):
    name = "block_bounds"
    if k.dim() != 4:
        raise ArgumentError(f"{name}: k has {k.dim()} dimensions, needs [B,H,S,D]")
    if k.dtype not in DTYPES:
        raise ArgumentError(f"{name}: k is {k.dtype}, needs float32, float16 or bfloat16")
    if k.shape[3] not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ArgumentError(f"{name}: head dimension {k.shape[3]} is not one of {sizes}")
    check_sequence_inputs(name, k, k, lengths, start, key_mask)
    check_bounds(name, k, bounds, progress, block)


def check_bounds(name, k, bounds, progress, block):
    """The checks of a cache's summaries, shared with the op that scores them."""
    if block not in BLOCKS:
        raise ArgumentError(f"{name}: block is {block}, needs {', '.join(map(str, BLOCKS))}")
    batch, heads, size, width = k.shape
    shape = tuple(bounds.shape)
    if shape not in [(batch, heads, -(-size // block), parts, width) for parts in (1, 2)]:
        raise ArgumentError(
            f"{name}: bounds has shape {shape}, needs [B,Hkv,ceil(S/block),2 or 1,D] = "
            f"[{batch}, {heads}, {-(-size // block)}, 2 or 1, {width}]"
        )
    if tuple(progress.shape) != (batch, 2) or progress.dtype != torch.int32:
        raise ArgumentError(
            f"{name}: progress is {progress.dtype} {tuple(progress.shape)}, needs int32 [B,2] = "
            f"[{batch}, 2]"
        )
    require(bounds.dtype == k.dtype, name, f"bounds is {bounds.dtype} but k is {k.dtype}")
    for label, tensor in (("bounds", bounds), ("progress", progress)):
        if tensor.device != k.device:
            raise ArgumentError(f"{name}: {label} is on {tensor.device}, k on {k.device}")
        require(tensor.is_contiguous(), name, f"{label} is not contiguous")


# --- CPU: the specification ------------------------------------------------------------------


@numba.njit(cache=True)
def _summarise(k, mask, out):
    """Keys `k [block, D]` into `out [parts, D]`; an empty `mask` hides nothing."""
    seen = 0
    for n in range(k.shape[0]):
        if mask.shape[0] > 0 and not mask[n]:
            continue
        for d in range(k.shape[1]):
            x = k[n, d]
            if out.shape[0] == 1:
                out[0, d] = x if seen == 0 else out[0, d] + x
            else:  # a NaN comes in and stays
                high, low = out[0, d], out[1, d]
                out[0, d] = x if seen == 0 or x > high or x != x else high
                out[1, d] = x if seen == 0 or x < low or x != x else low
        seen += 1
    if seen == 0:
        out[:] = 0.0
    elif out.shape[0] == 1:
        for d in range(k.shape[1]):
            out[0, d] /= seen


@numba.njit(parallel=True, cache=True)
def _reference(k, mask, bounds, done, until, start, offset, block):
    """`_summarise` for blocks done..until-1 of every row and head, in parallel; `k` holds the keys
    from `offset` on."""
    batch, heads = k.shape[:2]
    for item in numba.prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        for j in range(done[b], until[b]):
            first = start[b] + j * block
            part = hidden[first : first + block] if hidden.shape[0] > 0 else hidden
            _summarise(k[b, h, first - offset : first - offset + block], part, bounds[b, h, j])


def refresh_on_cpu(k, key_mask, bounds, progress, start, until, block):
    """Do the blocks before `until` (int64 `[B]`) that `progress` lacks, and note that."""
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0).long()
    missing = done < until
    if bool(missing.any()):
        first = int((start + done * block)[missing].min())
        last = int((start + until * block)[missing].max())
        wide = bounds.float()  # bounds itself where it is float32
        _reference(
            k[:, :, first:last].float().numpy(),
            NO_MASK if key_mask is None else key_mask.numpy(),
            wide.numpy(),
            done.numpy(),
            until.numpy(),
            start.numpy(),
            first,
            block,
        )
        if wide is not bounds:
            bounds.copy_(wide)
    progress[:, 0] = torch.maximum(done, until)
    progress[:, 1] = start


def _cpu(k, bounds, progress, lengths, start, key_mask, block):
    lengths, start = rows_on_cpu(k, lengths, start)
    refresh_on_cpu(
        k, key_mask, bounds, progress, start, (lengths - start).clamp(min=0) // block, block
    )


# --- CUDA ------------------------------------------------------------------------------------


@triton.jit
def row_span(
    lengths, start, b, S, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
    NEW: tl.constexpr = 0,
):  # fmt: skip
    """(length, first real key) of row b, int32. NEW tokens are not in `lengths` yet; S + NEW then
    says that the cache is full.

    .cg: another multiprocessor's kernel, early launched ones after it, may have counted a token.
    """
    length = S
    if lengths is not None:
        length = tl.load(lengths + b * LENGTH_STEP, cache_modifier=".cg").to(tl.int32)
        length = tl.minimum(length, S) + NEW
    low = 0
    if start is not None:
        low = tl.load(start + b * START_STEP, cache_modifier=".cg").to(tl.int32)
        low = tl.maximum(low, 0)
    return length, low


@triton.jit
def blocks_done(progress, b, low):
    """Leading blocks that row b has summaries of, when counted from `low`."""
    counted = tl.load(progress + b * 2, cache_modifier=".cg")
    return tl.where(tl.load(progress + b * 2 + 1, cache_modifier=".cg") == low, counted, 0)


@triton.jit
def note_progress(progress, b, low, until):
    """Blocks before `until` are done. Only one program may run this for a row, and only after all
    that read the row's progress."""
    done = tl.maximum(blocks_done(progress, b, low), until)
    tl.debug_barrier()  # every warp loads and stores the same words
    tl.store(progress + b * 2, done)
    tl.store(progress + b * 2 + 1, low)


@triton.jit
def refresh_blocks(
    k_at, mask_at, bounds_at, begin, end, step, low, k_s,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Summarise blocks begin, begin + step, ... before end of one row's head.

    Elementwise over STEP keys at a time and across them at the end: the kernels that do this once
    in a block's life must not be made large by it.
    """
    STEP: tl.constexpr = 8
    d = tl.arange(0, DP)
    n = tl.arange(0, STEP)
    in_width = d < D
    for j in range(begin, end, step):
        high = tl.full([STEP, DP], float("-inf"), tl.float32)
        deep = tl.full([STEP, DP], float("inf"), tl.float32)
        count = tl.zeros([STEP], tl.int32)
        if PARTS == 1:
            high = tl.zeros([STEP, DP], tl.float32)
        for i in range(0, BLOCK, STEP):
            at = low + j * BLOCK + i + n
            key = tl.load(
                k_at + at.to(tl.int64)[:, None] * k_s + d[None, :],
                mask=in_width[None, :],
                other=0.0,
            ).to(tl.float32)
            seen = at >= 0
            if MASKED:
                seen = tl.load(mask_at + at) != 0
            count += seen.to(tl.int32)
            if PARTS == 1:
                high += tl.where(seen[:, None], key, 0.0)
            else:  # a NaN comes in and stays
                shown = seen[:, None]
                above, below = (
                    tl.where(shown, key, float("-inf")),
                    tl.where(shown, key, float("inf")),
                )
                high = tl.maximum(high, above, propagate_nan=tl.PropagateNan.ALL)
                deep = tl.minimum(deep, below, propagate_nan=tl.PropagateNan.ALL)
        out = bounds_at + j * (PARTS * D) + d
        seen_keys = tl.sum(count, 0)
        if PARTS == 1:
            tl.store(out, tl.sum(high, 0) / tl.maximum(seen_keys, 1), mask=in_width)
        else:  # the maximum across drops a NaN
            odd = tl.sum((high != high).to(tl.int32), 0) > 0
            top = tl.where(seen_keys > 0, tl.max(high, 0), 0.0)
            bottom = tl.where(seen_keys > 0, tl.min(deep, 0), 0.0)
            tl.store(out, tl.where(odd, float("nan"), top), mask=in_width)
            tl.store(out + D, tl.where(odd, float("nan"), bottom), mask=in_width)


@triton.jit
def _refresh(
    k, bounds, progress, lengths, start, key_mask, S, N, programs, k_b, k_h, k_s, mask_b,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """One program's share of the missing blocks of one row's head."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    until = tl.maximum(length - low, 0) // BLOCK
    mask_at = k
    if key_mask is not None:
        mask_at = key_mask + b * mask_b
    refresh_blocks(
        k + b * k_b + h.to(tl.int64) * k_h,
        mask_at,
        bounds + (b * tl.num_programs(1) + h) * N * (PARTS * D),
        blocks_done(progress, b, low) + tl.program_id(0),
        until,
        programs,
        low,
        k_s,
        D, DP, BLOCK, PARTS, key_mask is not None,
    )  # fmt: skip


@triton.jit
def _note(
    progress, lengths, start, S, BLOCK: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    note_progress(progress, b, low, tl.maximum(length - low, 0) // BLOCK)


def launch_block_bounds(k, bounds, progress, lengths, start, key_mask, block):
    """Run the kernels; tensors as in `block_bounds`, on a GPU or in Triton's interpreter."""
    batch, heads, size, width = k.shape
    k = k if k.stride(3) == 1 else k.contiguous()
    key_mask = mask_bytes(key_mask)
    # Enough programs to fill a GPU when a whole prompt is new, few where nothing is.
    programs = max(1, min(512 // (batch * heads), bounds.shape[2]))
    steps = row_step(lengths), row_step(start)
    _refresh[(programs, heads, batch)](
        k, bounds, progress, lengths, start, key_mask, size, bounds.shape[2], programs,
        *k.stride()[:3], 0 if key_mask is None else key_mask.stride(0),
        width, triton.next_power_of_2(width), block, bounds.shape[3], *steps,
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _note[(batch,)](progress, lengths, start, size, block, *steps, num_warps=1)


_block_bounds = define_op(
    "block_bounds(Tensor k, Tensor(a!) bounds, Tensor(b!) progress, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask, int block) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_block_bounds,
)
