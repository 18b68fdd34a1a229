"""What `dense_decode`, `gather_attention` and `gather_tokens_attention` share: attention of few
queries whose keys are cut in pieces ("splits"), a program each, and the merge of the pieces by
their log-sum-exps.

    lse = log sum over pieces of exp(lse_i),   out = sum over pieces of exp(lse_i - lse) out_i

Source: Dao et al., Flash-Decoding for long-context inference (2023).
"""

import functools

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attnplug.ops._define import require
from attnplug.ops._product import add_product

LOG2E = 1.4426950408889634


def check_sinks(name, q, sinks):
    require(
        tuple(sinks.shape) == (q.shape[1],),
        name,
        f"sinks has shape {tuple(sinks.shape)}, needs [Hq] = [{q.shape[1]}]",
    )
    require(sinks.is_floating_point(), name, f"sinks is {sinks.dtype}, needs a float dtype")
    require(sinks.device == q.device, name, f"sinks is on {sinks.device}, q on {q.device}")


@numba.njit(cache=True)
def reference_rows(q, k, v, mask, position, start, window, sinks, scale, softcap, out, lse):
    """Online softmax of one block of queries `q [G, t, D]`, a group's heads, over the tiles of
    `k, v [S, D]`; `position` is that of the first query. Empty `mask`, `sinks` stand for none."""
    group, queries, width = q.shape
    tile = 128
    scaled = np.empty((group * queries, width), np.float32)
    for r in range(group * queries):
        for d in range(width):
            scaled[r, d] = q[r // queries, r % queries, d] * scale
    top = np.full(group * queries, -np.inf, np.float32)
    total = np.zeros(group * queries, np.float32)
    acc = np.zeros((group * queries, width), np.float32)
    first = max(0, start, position - window + 1) if window > 0 else max(0, start)
    for n0 in range(first, position + queries, tile):
        size = min(tile, position + queries - n0)
        keys = np.ascontiguousarray(k[n0 : n0 + size].T)
        values = v[n0 : n0 + size].copy()
        s = np.zeros((group * queries, size), np.float32)
        add_product(scaled, keys, s)
        for r in range(group * queries):
            here = position + r % queries
            best = top[r]
            for i in range(size):
                n = n0 + i
                hidden = mask.shape[0] > 0 and not mask[n]
                if hidden:
                    values[i] = 0.0  # 0 times the NaN of a hidden value would be NaN
                if hidden or n > here or (window > 0 and n <= here - window):
                    s[r, i] = -np.inf
                elif softcap > 0:
                    s[r, i] = softcap * np.tanh(s[r, i] / softcap)
                best = max(best, s[r, i])
            shift = np.float32(0.0) if best == -np.inf else best
            decay = np.exp(top[r] - shift)
            top[r] = best
            total[r] *= decay
            for d in range(width):
                acc[r, d] *= decay
            for i in range(size):
                s[r, i] = np.exp(s[r, i] - shift)
                total[r] += s[r, i]
        add_product(s, values, acc)
    for r in range(group * queries):
        head, t = r // queries, r % queries
        seen = total[r] != 0
        lse[head, t] = top[r] + np.log(total[r]) if seen else -np.inf
        if seen and sinks.shape[0] > 0:
            total[r] += np.exp(sinks[head] - top[r])
        for d in range(width):
            out[head, t, d] = acc[r, d] / total[r] if seen else 0.0


@numba.njit(cache=True)
def reference_kept(q, k, v, kept, sinks, scale, softcap, out, lse):
    """`reference_rows` of one query `q [G, 1, D]` over the keys `kept` of k, v `[S, D]`."""
    keys = np.empty((len(kept), q.shape[2]), np.float32)
    values = np.empty((len(kept), q.shape[2]), np.float32)
    for i in range(len(kept)):
        keys[i], values[i] = k[kept[i]], v[kept[i]]
    unmasked = np.empty(0, np.bool_)
    reference_rows(q, keys, values, unmasked, len(kept) - 1, 0, 0, sinks, scale, softcap, out, lse)


@triton.jit
def attend_tile(
    query, key, value, seen, top, total, acc, scale, cap, CAPPED: tl.constexpr
):  # fmt: skip
    """One step of the online softmax over a tile of keys that all rows of `query` see alike."""
    s = tl.dot(query, key.T, input_precision="ieee") * scale
    if CAPPED:  # cap tanh(y), tanh(y) = 1 - 2 / (exp(2y) + 1); scale holds 2 log2(e) / cap
        s = cap * (1 - 2 / (tl.exp2(s) + 1))
    s = tl.where(seen[None, :], s, float("-inf"))
    best = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(best == float("-inf"), 0.0, best)
    # A NaN score may be dropped by the maximum; it comes back through p.
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return best, total, acc


@triton.jit
def store_piece(
    top, total, acc, sinks, partial, out, lse, head, row, rows, d, in_group, in_width, split,
    splits, D: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """The result of one of `splits` pieces of a row, one of `rows`: what `merge_splits` reads, or
    if FUSED (one piece) the output and its natural log-sum-exp."""
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    base = tl.where(top == float("-inf"), 0.0, top)
    result = tl.where(empty, float("-inf"), base + tl.log2(divisor))
    if FUSED:
        if sinks is not None:
            logit = tl.load(sinks + head, mask=in_group, other=float("-inf")).to(tl.float32)
            divisor += tl.exp2(logit * 1.4426950408889634 - base)
        tl.store(lse + row, result * 0.6931471805599453, mask=in_group)
        out_at = out + row[:, None] * D + d[None, :]
    else:
        row = row * splits + split
        tl.store(partial + rows * splits * D + row, result, mask=in_group)
        out_at = partial + row[:, None] * D + d[None, :]
    tl.store(
        out_at,
        (acc / divisor[:, None]).to(out_at.dtype.element_ty),
        mask=in_group[:, None] & in_width[None, :],
    )


@triton.jit
def merge_splits(
    partial, sinks, out, lse, heads, T, splits,
    D: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
    lengths=None, counters: tl.constexpr = 0,
):  # fmt: skip
    """Merge the pieces of one (row, slice of the head dimension) by their log-sum-exps. Where there
    are `lengths`, of so many rows, count the token of the step in them: their readers are done."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, SPLITS)
    in_splits = j < splits
    lse_at = partial + tl.num_programs(0).to(tl.int64) * splits * D
    if PDL:
        gdc_wait()
    # .cg: an L1 line may be older than the pieces, which other multiprocessors wrote.
    piece_lse = tl.load(
        lse_at + row * splits + j, mask=in_splits, other=float("-inf"), cache_modifier=".cg"
    )
    piece = tl.load(
        partial + (row * splits + j)[:, None] * D + d[None, :],
        mask=in_splits[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    empty = piece_lse == float("-inf")  # such a piece may never have been written
    piece = tl.where(empty[:, None], 0.0, piece)
    top = tl.max(piece_lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(piece_lse - shift)
    total = tl.sum(weight, 0)
    denominator = tl.where(total == 0, 1.0, total)
    result = tl.where(total == 0, float("-inf"), shift + tl.log2(denominator))
    if sinks is not None:
        sink = tl.load(sinks + row // T % heads).to(tl.float32)
        denominator += tl.exp2(sink * 1.4426950408889634 - shift)
    merged = tl.sum(piece * weight[:, None], 0) / denominator
    tl.store(out + row * D + d, merged.to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(lse + row, result * 0.6931471805599453)
        if lengths is not None:
            if row < counters:
                tl.atomic_add(lengths + row, 1, sem="relaxed")


@functools.cache
def machine(device: torch.device) -> tuple[int, bool]:
    """(multiprocessors, programmatic dependent launch); the interpreter gets 8 and False."""
    if device.type != "cuda":
        return 8, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9
