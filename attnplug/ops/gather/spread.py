"""Spread summaries of key blocks: mean and variance of a block's keys in each channel, as INT8
codes, and how `select_blocks` scores blocks by them (scoring "spread").

    mean_jd ~ m_jc code_jd,   variance_jd ~ v_jc code_jd        channel d of the 32 channels c
    e_gj = scale q_g . mean_j + 3 sqrt(sum_d (scale q_gd)^2 variance_jd)
    score_j = log sum_g exp(e_gj - N_g),   N_g = log sum_s exp(e_gs)

over the query heads g of the group. N_g is taken from a sample of 32 candidates s, at equal
distances from the first one on: it says how long a head's scores are, so that each head counts by
the share of attention that it expects in a block.

Each block has its own scales m and v, bfloat16, for 32 channels each, and shares nothing with other
blocks. A page of a paged cache may therefore be part of several sequences.

The bytes of one row's head are codes `[blocks, 2, D]`, then scales `[2, D / 32, blocks]`.
"""

import numpy as np
import torch

from attnplug.ops.common.device import card, early
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gather.kernels import score_spread as scoring
from attnplug.ops.gather.kernels import spread as kernels

CHANNELS, LEAST = kernels.CHANNELS.value, kernels.LEAST.value
SAMPLE, DEVIATIONS = scoring.SAMPLE.value, scoring.DEVIATIONS.value


def spread_rows(blocks: int, width: int) -> int:
    """Rows `[2, D]` of the spread summaries of so many blocks: codes, then scales."""
    return blocks + -(-2 * cdiv(width, CHANNELS) * blocks // width)


def spread_parts(bounds: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of spread summaries of so many blocks: int8 codes `[B, Hkv, blocks, 2, D]`, and the
    bits of their bfloat16 scales, int16 `[B, Hkv, 2, ceil(D / 32), blocks]`."""
    width = bounds.shape[4]
    groups, codes = cdiv(width, CHANNELS), blocks * 2 * width
    behind = bounds.flatten(2)[:, :, codes:].view(torch.int16)[:, :, : 2 * groups * blocks]
    return bounds[:, :, :blocks].view(torch.int8), behind.unflatten(2, (2, groups, blocks))


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _mean_and_variance(k, mask, out):
    """Of the visible keys of `k [block, D]`, into `out [2, D]`; an empty `mask` hides nothing."""
    out[:] = 0.0
    seen = 0
    for n in range(k.shape[0]):
        if mask.shape[0] == 0 or mask[n]:
            seen += 1
            for d in range(k.shape[1]):
                out[0, d] += k[n, d]
    count = np.float32(max(seen, 1))
    for d in range(k.shape[1]):
        out[0, d] /= count
    for n in range(k.shape[0]):
        if mask.shape[0] == 0 or mask[n]:
            for d in range(k.shape[1]):
                away = k[n, d] - out[0, d]
                out[1, d] += away * away
    for d in range(k.shape[1]):
        out[1, d] /= count


@njit()
def _encode_channels(values, codes):
    """Codes of `values [channels]` into `codes`; returns the bits of their bfloat16 scale, rounded
    up so that no code exceeds 127. Zeros and the bits of NaN where a value is not finite."""
    top = np.float32(0.0)
    for x in values:
        if not abs(x) < np.inf:
            codes[:] = 0
            return np.int16(0x7FC0)
        top = max(top, abs(x))
    scale = np.empty(1, np.float32)
    scale[0] = max(top * np.float32(1 / 127), np.float32(LEAST))
    bits = (int(scale.view(np.int32)[0]) + 0xFFFF) >> 16
    scale.view(np.int32)[0] = bits << 16
    inverse = np.float32(1.0) / scale[0]
    for d in range(values.shape[0]):
        codes[d] = np.int8(np.rint(min(max(values[d] * inverse, -127.0), 127.0)))
    return np.int16(bits)


@njit(parallel=True)
def summarise_spread(k, mask, codes, scales, done, until, start, offset, block):
    """Blocks done..until-1 of every row and head, in parallel; `k` holds the keys from `offset`
    on."""
    batch, heads = k.shape[:2]
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        hidden = mask[b * len(mask) // batch]
        wide = np.empty(codes.shape[3:], np.float32)
        for j in range(done[b], until[b]):
            first = start[b] + j * block
            part = hidden[first : first + block] if hidden.shape[0] > 0 else hidden
            _mean_and_variance(k[b, h, first - offset : first - offset + block], part, wide)
            for p in range(2):
                for c in range(scales.shape[3]):
                    own = slice(c * CHANNELS, min((c + 1) * CHANNELS, wide.shape[1]))
                    scales[b, h, p, c, j] = _encode_channels(wide[p, own], codes[b, h, j, p, own])


@njit()
def _levels(values, top):
    """`values` as integers of 15 bits, `top / 16256` each."""
    inverse = np.float32(16256) / top if 0 < top < np.inf else np.float32(0.0)
    level = np.zeros(values.shape[0], np.int64)
    for d in range(values.shape[0]):
        exact = values[d] * inverse
        level[d] = int(np.rint(exact)) if abs(exact) <= 16257 else 0
    return level


@njit()
def _part_score(level, codes, bits):
    """The product of integers `level [D]` and `codes [D]` with scales of these `bits`."""
    total = np.float32(0.0)
    scale = np.empty(1, np.float32)
    for c in range(bits.shape[0]):
        product = 0
        for d in range(c * CHANNELS, min((c + 1) * CHANNELS, level.shape[0])):
            product += level[d] * codes[d]
        scale.view(np.int32)[0] = int(bits[c]) << 16
        total += np.float32(product) * scale[0]
    return total


@njit()
def _log_sum_exp(x):
    """Of what is below infinity; -inf where there is nothing."""
    top = np.float32(-np.inf)
    for value in x:
        top = max(top, value) if value < np.inf else top
    if top == -np.inf:
        return top
    total = np.float32(0.0)
    for value in x:
        total += np.exp(value - top) if value < np.inf else np.float32(0.0)
    return top + np.log(total)


@njit()
def spread_scores(q, codes, bits, allowed, scale):
    """float32 scores `[blocks]` of candidates with codes `[blocks, 2, D]` and scales' bits
    `[2, C, blocks]`, of which `allowed` has those that the key mask lets through."""
    group, blocks = q.shape[0], codes.shape[0]
    heads = np.empty((group, blocks), np.float32)
    norms = np.zeros(group, np.float32)
    step = max(blocks // SAMPLE, 1)
    for g in range(group):
        top, odd = np.float32(0.0), np.float32(0.0)
        for x in q[g]:
            top, odd = max(top, abs(x)), odd + x * np.float32(0.0)
        linear, square = _levels(q[g], top), _levels(q[g] * q[g], top * top)
        quantum = np.float32(1 / 16256)
        for j in range(blocks):
            mean = _part_score(linear, codes[j, 0], bits[0, :, j]) * (top * quantum) + odd
            variance = _part_score(square, codes[j, 1], bits[1, :, j]) * (top * top * quantum)
            score = scale * (mean + np.float32(DEVIATIONS) * np.sqrt(max(variance, 0.0)))
            finite = abs(mean) < np.inf and abs(variance) < np.inf and abs(score) < np.inf
            heads[g, j] = score if finite else np.inf
        sample = heads[g, : SAMPLE * step : step][allowed[: SAMPLE * step : step]]
        norm = _log_sum_exp(sample)
        norms[g] = norm if norm > -np.inf else np.float32(0.0)
    scores = np.empty(blocks, np.float32)
    for j in range(blocks):
        odd = (heads[:, j] == np.inf).any()
        scores[j] = np.inf if odd else _log_sum_exp(heads[:, j] - norms)
    return scores


def launch_spread(
    q, k, bounds, progress, lengths, start, key_mask, table, scale, block, sink, local, plan, keys,
    best, new,
):  # fmt: skip
    """Score blocks into `keys` and `best`; tensors as in the launcher of `select_blocks`."""
    batch, heads, queries, width = q.shape
    kv_heads, size = k.shape[1], capacity(k, table)
    blocks, stored = cdiv(size, block), cdiv(k.shape[0] * k.shape[2], block)
    pdl, dependent = early(q.device)
    scoring.score_spread.run(
        grid=(cdiv(blocks, plan.chunk * plan.repeat), kv_heads * queries, batch),
        warmup=False,
        q=q,
        k=k,
        bounds=bounds,
        progress=progress,
        lengths=lengths,
        start=start,
        key_mask=key_mask,
        table=table,
        scores=keys,
        best=best,
        scale=scale,
        T=queries,
        S=size,
        N=blocks,
        places=None if table is None else stored,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        mask_stride=0 if key_mask is None else key_mask.stride(0),
        table_stride=None if table is None else table.stride(0),
        GROUP=heads // kv_heads,
        HEADS=max(8, next_power_of_two(heads // kv_heads)),
        D=width,
        DP=next_power_of_two(width),
        BLOCK=block,
        SINK=sink,
        LOCAL=local,
        CHUNK=plan.chunk,
        MEMBERS=plan.members,
        REPEAT=plan.repeat,
        STAGES=plan.stages,
        NEW=new,
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        PAGE=0 if table is None else k.shape[2],
        PDL=pdl,
        **{
            "num_warps": plan.warps,
            **card(q.device).limit(plan.registers),
            **(dependent if new else {}),
        },
    )
