"""A row of a batch, that is one sequence: its length, its first real key, its key mask, and how
many of its blocks have summaries ("progress"). For launchers, CPU references and kernels.
"""

# Kernels read fields of constants, which pyright takes for plain `constexpr`s.
# pyright: reportAttributeAccessIssue=false

import numpy as np
import torch

from attnplug.ops.common.pages import capacity
from attnplug.ops.common.triton import tl, triton

# Stands for "no key mask" in a numba reference.
NO_MASK = np.empty((1, 0), np.bool_)


def row_step(tensor: torch.Tensor | None) -> int:
    """The stride from a row's entry to the next one's in `[1 or B, ...]`: 0 where all share one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def rows_as_given(
    batch: int, size: int, lengths: torch.Tensor | None, start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, start) as int64 `[B]` on a CPU; without them rows have all of `size` keys."""
    row = {"dtype": torch.int64, "device": "cpu"}
    lengths = torch.full((1,), size, **row) if lengths is None else lengths.long()
    start = torch.zeros(1, **row) if start is None else start.long()
    return lengths.expand(batch), start.expand(batch)


def rows_on_cpu(
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, start) as int64 `[B]`, both within the buffer."""
    batch, size = (k if table is None else table).shape[0], capacity(k, table)
    lengths, start = rows_as_given(batch, size, lengths, start)
    return lengths.clamp(0, size).contiguous(), start.clamp(0, size).contiguous()


def mask_bytes(key_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The key mask as bytes, its rows contiguous."""
    if key_mask is None:
        return None
    return (key_mask if key_mask.stride(1) == 1 else key_mask.contiguous()).view(torch.uint8)


@triton.jit
def row_of(b, STEPS: tl.constexpr):
    """The row of the batch that b belongs to: the queries of a row follow each other."""
    if STEPS.QUERIES > 1:
        b = b // STEPS.QUERIES
    return b


@triton.jit
def row_span(rows, b, STEPS: tl.constexpr, NEW: tl.constexpr = 0, BYPASS_L1: tl.constexpr = 1):  # pyright: ignore[reportArgumentType]
    """(length, first real key) of row b, int32; of one of its QUERIES the tokens up to its own, as
    if those behind it had not come. NEW tokens are not counted in `rows.lengths` yet; a
    length of S + NEW then says that the cache is full, and one of 0 where NEW is 1 that the length
    is negative. Whatever `rows.lengths` holds, int64 too, the length is 0 to S + NEW.

    BYPASS_L1 is set because another kernel may have counted a token just before: an L1 line may be
    older. A kernel that starts only when the ones in front of it have ended may clear it.
    """
    length = rows.S
    row = row_of(b, STEPS)
    if rows.lengths is not None:
        length = _load_number(rows.lengths + row * STEPS.LENGTH, BYPASS_L1)
        # Before int64 becomes int32: a length past 2^31 would wrap around to a place in the cache.
        length = tl.maximum(tl.minimum(length, rows.S), -NEW).to(tl.int32) + NEW
    if STEPS.QUERIES > 1:
        length = tl.maximum(length - (STEPS.QUERIES - 1) + b % STEPS.QUERIES, 0).to(tl.int32)
    low = 0
    if rows.start is not None:
        low = _load_number(rows.start + row * STEPS.START, BYPASS_L1)
        low = tl.maximum(tl.minimum(low, rows.S), 0).to(tl.int32)
    return length, low


@triton.jit
def shown(rows, b, at, seen):
    """Which of the keys `at` of row b that are `seen` its key mask lets through."""
    if rows.key_mask is not None:
        seen = seen & (tl.load(rows.key_mask + b * rows.mask_b + at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _load_number(at, BYPASS_L1: tl.constexpr):
    # A flag and not the modifier itself: Triton 3.6 takes no string as a default.
    if BYPASS_L1:
        return tl.load(at, cache_modifier=".cg")
    else:
        return tl.load(at)


@triton.jit
def blocks_done(progress, b, low):
    """How many leading blocks of row b have summaries, blocks counted from `low`. `progress [B, 2]`
    holds that number and the first key that it was counted from."""
    counted = tl.load(progress + b * 2, cache_modifier=".cg")
    return tl.where(tl.load(progress + b * 2 + 1, cache_modifier=".cg") == low, counted, 0)


@triton.jit
def note_progress(progress, b, low, until):
    """Note that the blocks of row b before `until` have summaries. One program a row runs this,
    after every program that reads the row's progress."""
    store_progress(progress, b, low, tl.maximum(known_progress(progress, b, low), until))


@triton.jit
def known_progress(progress, b, low):
    """`blocks_done`, for the program that stores the row's progress later: it may ask well before,
    while it waits for others."""
    done = blocks_done(progress, b, low)
    tl.debug_barrier()  # every warp loads and stores the same words
    return done


@triton.jit
def store_progress(progress, b, low, done):
    """Store how many blocks of row b have summaries, as `blocks_done` reads it."""
    tl.store(progress + b * 2, done)
    tl.store(progress + b * 2 + 1, low)
