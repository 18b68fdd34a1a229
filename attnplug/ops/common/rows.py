"""A row of a batch: its length, its first real key, the mask of its keys and how many of its blocks
are done; on the host, for the CPU references, and inside kernels."""

import numpy as np
import torch
import triton
import triton.language as tl

# What a numba reference gets for a key mask that is not there.
NO_MASK = np.empty((1, 0), np.bool_)


def row_step(tensor: torch.Tensor | None) -> int:
    """What a row adds to the address of its entry in `[1 or B, ...]`: 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def rows_on_cpu(
    k: torch.Tensor, lengths: torch.Tensor | None, start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, start) as int64 `[B]`, both within the buffer."""
    batch, size = k.shape[0], k.shape[2]
    lengths = torch.tensor([size]) if lengths is None else lengths.to(torch.int64)
    start = torch.tensor([0]) if start is None else start.to(torch.int64)
    lengths, start = lengths.clamp(max=size), start.clamp(min=0)
    return lengths.expand(batch).contiguous(), start.expand(batch).contiguous()


def mask_bytes(key_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The key mask as bytes, its rows contiguous."""
    if key_mask is None:
        return None
    return (key_mask if key_mask.stride(1) == 1 else key_mask.contiguous()).view(torch.uint8)


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
