"""Summaries of key blocks, kept beside a KV cache: what a block's keys can score at most.

    bounds[b, h, j, 0] = max of the keys of block j,   bounds[b, h, j, 1] = their min  (elementwise)
    relu(q) . max - relu(-q) . min  >=  q . key        for every query and every key of the block

or, for a band, not max and min but

    mean + 0.8 sigma   and   mean - 0.8 sigma    of the block's keys, for each channel.

Two parts may be INT8 codes, those of max and min rounded outwards, so that the inequality holds for
what they stand for:

    centre + unit scale_j max_code >= max,   min >= centre + unit scale_j min_code

with a scale for each block, and a centre and a unit for each channel. Centre and unit are middle
and half width of the row's first block. The unit stays within a factor of SPREAD of its mean over
the channels. The INT8 codes of a row's band have one part, its middle, and one width for all
channels (those of pages: `page_bounds`):

    mean ~ centre + unit scale_j code,   its edges mean + unit width_j and mean - unit width_j
    width_j = mean over the channels of 0.8 sigma / unit

Blocks are numbered from each row's first real token: block j is keys start + block j up to
start + block (j + 1) - 1. Keys that the key mask hides enter nothing. A complete block does not
change until the cache is cropped. `progress` says how many leading blocks have summaries, and the
start that they were counted from; only missing blocks are read.

Source: Quest (Tang et al., 2024), as in "Attention Pays Its Bill" (docs/papers.md).
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    BLOCKS,
    WIDE_HEAD_DIMS,
    check_attention_inputs,
    check_sequence_inputs,
)
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.rows import NO_MASK, mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.views import cache_of, rows_of, steps_of
from attnplug.ops.gather.kernels import bounds as kernels

SLACK, MOST, LEAST, SPREAD, BAND_WIDTH = (
    x.value
    for x in (kernels.SLACK, kernels.MOST, kernels.LEAST, kernels.SPREAD, kernels.BAND_WIDTH)
)

# As many as a GPU of 132 multiprocessors runs at once: one waits for memory most of its time.
PROGRAMS = 2048


def empty_bounds(
    k: torch.Tensor, block: int, parts: int = 2, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Summaries of a fresh cache `k [B, Hkv, S, D]`, zeros: `[B, Hkv, ceil(S / block), parts, D]`
    like k. With `dtype` int8 they are codes, of bounds (2 parts) or of bands (1 part), and further
    rows hold what these stand for (`Frame`)."""
    batch, heads, size, width = k.shape
    dtype = k.dtype if dtype is None else dtype
    rows = summary_rows(-(-size // block), width, dtype, parts)
    return k.new_zeros((batch, heads, rows, parts, width), dtype=dtype)


def summary_parts(scoring: str, int8: bool, paged: bool = False) -> int:
    """Parts of the summaries that a scoring of `select_blocks` reads."""
    return 1 if scoring == "band" and int8 and not paged else 2


def summary_rows(blocks: int, width: int, dtype: torch.dtype, parts: int) -> int:
    """Rows `[parts, D]` of the summaries of so many blocks."""
    if dtype != torch.int8:
        return blocks
    numbers = 2 * width + blocks * (2 if parts == 1 else 1)  # float32, of the frame
    return blocks + -(-4 * numbers // (parts * width))


class Frame(NamedTuple):
    """What INT8 codes stand for, `centre + unit scale code`: float32 views of the rows behind the
    codes. Centre and unit are `[B, Hkv, D]`, scale and width are `[B, Hkv, blocks]`; bounds have no
    width, `[B, Hkv, 0]`."""

    centre: torch.Tensor
    unit: torch.Tensor
    scale: torch.Tensor
    width: torch.Tensor


def frame_of(bounds: torch.Tensor, blocks: int) -> Frame:
    """The frame of INT8 summaries of so many blocks."""
    parts, channels = bounds.shape[3:]
    behind = bounds.flatten(2)[:, :, blocks * parts * channels :].view(torch.float32)
    sizes = [channels, channels, blocks, blocks if parts == 1 else 0]
    return Frame(*behind[:, :, : sum(sizes)].split(sizes, 2))


def no_frame(batch: int, heads: int) -> Frame:
    """The frame of summaries that are no codes: nothing in it."""
    return Frame(*[torch.empty(batch, heads, 0, dtype=torch.float32, device="cpu")] * 4)


def block_bounds(
    k: torch.Tensor,
    bounds: torch.Tensor,
    progress: torch.Tensor,
    *,
    block: int,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    band: bool = False,
) -> None:
    """Bring the summaries of all complete blocks up to date, in place.

    Elementwise max and min of a block's keys, or a band. A NaN among the keys gives NaN; a block
    without a visible key gives 0. With INT8 codes a key that is not finite gives a scale of NaN,
    and a width of NaN.

    Args:
        k: `[B, Hkv, S, D]`, float32, float16 or bfloat16.
        bounds: `[B, Hkv, ceil(S / block), parts, D]` like k, or int8 as `empty_bounds` makes
            them; contiguous; written.
        progress: int32 `[B, 2]`, contiguous; written. Of each row: how many leading blocks have
            summaries, and the start that they are counted from; another start makes them anew.
            Begin with zeros. A caller that shortens or replaces the keys lowers the count.
        block: keys a block: 16, 32, 64 or 128.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        band: whether the summaries are bands about the keys' mean, not max and min. INT8 codes of
            one part are bands.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("block_bounds", k)
    _block_bounds(k, bounds, progress, lengths, start, key_mask, block, band)


def _allocate(k, bounds, progress, lengths, start, key_mask, block, band):
    name = "block_bounds"
    check_attention_inputs(name, None, k, head_dims=WIDE_HEAD_DIMS)
    check_sequence_inputs(name, None, k, lengths, start, key_mask)
    check_bounds(name, k, bounds, progress, block)
    check_band(name, bounds, band)


def check_band(name, bounds, band):
    parts, int8 = bounds.shape[3], bounds.dtype == torch.int8
    if band:
        fits = parts == (1 if int8 else 2)
        require(fits, name, "a band has two exact parts, its edges, or INT8 codes of one part")
    else:
        require(parts == 2, name, "INT8 codes of one part are those of a band")


def check_bounds(name, k, bounds, progress, block):
    """The checks of a cache's summaries, for `block_bounds` and for `select_blocks`."""
    if block not in BLOCKS:
        raise ArgumentError(f"{name}: block is {block}, needs {', '.join(map(str, BLOCKS))}")
    batch, heads, size, width = k.shape
    shape, coded = tuple(bounds.shape), bounds.dtype == torch.int8
    fitting = {
        parts: (batch, heads, summary_rows(cdiv(size, block), width, bounds.dtype, parts), parts)
        for parts in ((2, 1) if coded else (2,))
    }
    if shape not in [(*leading, width) for leading in fitting.values()]:
        wanted = f"[B,Hkv,ceil(S/block){' and scales' if coded else ''},parts,D]"
        sizes = " or ".join(str([*leading, width]) for leading in fitting.values())
        raise ArgumentError(f"{name}: bounds has shape {shape}, needs {wanted} = {sizes}")
    if tuple(progress.shape) != (batch, 2) or progress.dtype != torch.int32:
        raise ArgumentError(
            f"{name}: progress is {progress.dtype} {tuple(progress.shape)}, needs int32 [B,2] = "
            f"[{batch}, 2]"
        )
    fits = coded or bounds.dtype == k.dtype
    require(fits, name, f"bounds is {bounds.dtype} but k is {k.dtype}: needs that or int8")
    for label, tensor in (("bounds", bounds), ("progress", progress)):
        if tensor.device != k.device:
            raise ArgumentError(f"{name}: {label} is on {tensor.device}, k on {k.device}")
        require(tensor.is_contiguous(), name, f"{label} is not contiguous")


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _summarise(k, mask, out):
    """Max and min of keys `k [block, D]` into `out [2, D]`; an empty `mask` hides nothing."""
    seen = 0
    for n in range(k.shape[0]):
        if mask.shape[0] > 0 and not mask[n]:
            continue
        for d in range(k.shape[1]):  # a NaN comes in and stays
            x, high, low = k[n, d], out[0, d], out[1, d]
            out[0, d] = x if seen == 0 or x > high or x != x else high
            out[1, d] = x if seen == 0 or x < low or x != x else low
        seen += 1
    if seen == 0:
        out[:] = 0.0


@njit()
def _summarise_band(k, mask, out):
    """The edges of the band of keys `k [block, D]`, mean and 0.8 standard deviations, `[2, D]`."""
    seen, pivot = 0, k[0]
    first, second = np.zeros(k.shape[1], np.float32), np.zeros(k.shape[1], np.float32)
    for n in range(k.shape[0]):
        if mask.shape[0] > 0 and not mask[n]:
            continue
        if seen == 0:
            pivot = k[n]
        off = k[n] - pivot
        first += off
        second += off * off
        seen += 1
    out[:] = 0.0
    for d in range(k.shape[1] if seen > 0 else 0):
        mean = first[d] / np.float32(seen)
        square = second[d] / np.float32(seen) - mean * mean
        half = np.float32(BAND_WIDTH) * np.sqrt(square if square > 0 else np.float32(0.0))
        out[0, d], out[1, d] = pivot[d] + mean + half, pivot[d] + mean - half


@njit()
def _set_frame(wide, centre, unit):
    """The frame of a row's head, from its first block `wide [2, D]`."""
    half = (wide[0] - wide[1]) * np.float32(0.5)
    mean = half.sum() / np.float32(half.shape[0])
    usable = 1e-20 < mean < np.inf  # false for a NaN
    for d in range(half.shape[0]):
        middle = wide[0, d] * np.float32(0.5) + wide[1, d] * np.float32(0.5)
        size = min(max(half[d], mean / np.float32(SPREAD)), mean * np.float32(SPREAD))
        centre[d], unit[d] = (middle, size) if usable else (0.0, 1.0)


@njit()
def encode(wide, centre, unit, nearest, codes):
    """Max and min `wide [2, D]` into `codes [2, D]`, rounded outwards, or to the nearest; returns
    their scale."""
    codes[:] = 0
    top = np.float32(0.0)
    for d in range(wide.shape[1]):
        for part in range(2):
            wide[part, d] = (wide[part, d] - centre[d]) / unit[d]
            if not abs(wide[part, d]) < np.inf:
                return np.float32(np.nan)
            top = max(top, abs(wide[part, d]))
    scale = max(top * np.float32(1 / MOST), np.float32(LEAST))
    for d in range(wide.shape[1]):
        high, low = wide[0, d] / scale, wide[1, d] / scale
        if nearest:
            codes[0, d] = np.int8(np.floor(high + np.float32(0.5)))
            codes[1, d] = np.int8(np.floor(low + np.float32(0.5)))
        else:
            codes[0, d] = np.int8(np.ceil(high + np.float32(SLACK)))
            codes[1, d] = np.int8(np.floor(low - np.float32(SLACK)))
    return scale


@njit()
def _encode_band(wide, centre, unit, codes):
    """A band's edges `wide [2, D]` into `codes [1, D]`; returns their scale, and the width."""
    codes[:] = 0
    top, width = np.float32(0.0), np.float32(0.0)
    middle = (wide[0] * np.float32(0.5) + wide[1] * np.float32(0.5) - centre) / unit
    for d in range(middle.shape[0]):
        half = (wide[0, d] - wide[1, d]) * np.float32(0.5) / unit[d]
        if not (abs(middle[d]) < np.inf and half < np.inf):
            return np.float32(np.nan), np.float32(np.nan)
        top, width = max(top, abs(middle[d])), width + half
    scale = max(top * np.float32(1 / MOST), np.float32(LEAST))
    for d in range(middle.shape[0]):
        codes[0, d] = np.int8(np.floor(middle[d] / scale + np.float32(0.5)))
    return scale, width / np.float32(middle.shape[0])


@njit(parallel=True)
def _reference(k, mask, bounds, frame, done, until, start, offset, block, band):
    """`_summarise` for blocks done..until-1 of every row and head, in parallel; `k` holds the keys
    from `offset` on. If the frame is not empty, the bounds are codes."""
    centre, unit, scale, width = frame
    batch, heads = k.shape[:2]
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        for j in range(done[b], until[b]):
            first = start[b] + j * block
            part = hidden[first : first + block] if hidden.shape[0] > 0 else hidden
            wide = np.empty((2, bounds.shape[4]), np.float32)
            keys = k[b, h, first - offset : first - offset + block]
            if band:
                _summarise_band(keys, part, wide)
            else:
                _summarise(keys, part, wide)
            if scale.shape[2] > 0:
                if j == 0:
                    _set_frame(wide, centre[b, h], unit[b, h])
                codes, own = bounds[b, h, j], (centre[b, h], unit[b, h])
                if band:
                    scale[b, h, j], width[b, h, j] = _encode_band(wide, *own, codes)
                else:
                    scale[b, h, j] = encode(wide, *own, False, codes)
            else:
                bounds[b, h, j] = wide


def refresh_on_cpu(k, key_mask, bounds, progress, start, until, block, band=False):
    """Make the missing summaries of the blocks before `until` (int64 `[B]`), and note that."""
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0).long()
    missing = done < until
    if bool(missing.any()):
        first = int((start + done * block)[missing].min())
        last = int((start + until * block)[missing].max())
        int8, blocks = bounds.dtype == torch.int8, -(-k.shape[2] // block)
        keys = k[:, :, first:last].float().numpy()
        mask = NO_MASK if key_mask is None else key_mask.numpy()
        spans = done.numpy(), until.numpy(), start.numpy(), first, block
        frame = frame_of(bounds, blocks) if int8 else no_frame(*k.shape[:2])
        wide = bounds if int8 else bounds.float()  # bounds itself where it is float32
        _reference(
            keys,
            mask,
            wide.numpy(),
            tuple(part.numpy() for part in frame),
            *spans,
            band,
        )
        if wide is not bounds:
            bounds.copy_(wide)
    progress[:, 0] = torch.maximum(done, until)
    progress[:, 1] = start


def _cpu(k, bounds, progress, lengths, start, key_mask, block, band):
    lengths, start = rows_on_cpu(k, lengths, start)
    until = (lengths - start).clamp(min=0) // block
    refresh_on_cpu(k, key_mask, bounds, progress, start, until, block, band)


# --- CUDA ------------------------------------------------------------------------------------


def launch_block_bounds(k, bounds, progress, lengths, start, key_mask, block, band=False):
    """Run the kernels; tensors as in `block_bounds`, on a GPU or in Triton's interpreter."""
    batch, heads, size, _ = k.shape
    k = k if k.stride(3) == 1 else k.contiguous()
    blocks = cdiv(size, block)
    programs = max(1, min(PROGRAMS // (batch * heads), blocks))
    both = {
        "rows": rows_of(size, lengths, start, mask_bytes(key_mask)),
        "progress": progress,
        "STEPS": steps_of(lengths, start),
    }
    launch_kernel(
        kernels.refresh,
        grid=(programs, heads, batch),
        cache=cache_of(k, None),
        bounds=bounds,
        N=blocks,
        programs=programs,
        FORM=kernels.Form.of(bounds, block, band),
        **{"num_warps": 4, **both},
    )
    launch_kernel(kernels.note_refreshed, grid=(batch,), BLOCK=block, **{"num_warps": 1, **both})


_block_bounds = define_op(
    "block_bounds(Tensor k, Tensor(a!) bounds, Tensor(b!) progress, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask, int block, bool band) -> ()",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_block_bounds,
)
