"""Online softmax of the numba references: attention of a few queries over the tiles of one row's
keys."""

from typing import Any

import numpy as np
import torch

from attnplug.ops.common.numba_cache import njit
from attnplug.ops.common.product import add_product
from attnplug.ops.common.rows import NO_MASK


def arrays(*values: Any) -> list[Any]:
    """What a numba reference is given for `values`: for tensors arrays of their memory, in float32
    where they hold floats of fewer bits, for a number its float32, and NO_MASK for a key mask that
    is None. All else as it is."""
    return [_array(x) for x in values]


def _array(x: Any) -> Any:
    if x is None:
        return NO_MASK
    if isinstance(x, float):
        return np.float32(x)
    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype == torch.bool:
        x = x.contiguous()  # numba compiles once for each layout
    return (x.float() if x.is_floating_point() else x).numpy()


def sinks_on_cpu(sinks: torch.Tensor | None) -> np.ndarray:
    """The sinks as float32, none as no element; contiguous, as numba compiles every layout."""
    if sinks is None:
        return np.empty(0, np.float32)
    return sinks.float().contiguous().numpy()


@njit()
def add_tile(s, values, top, total, acc):
    """A step of online softmax: scores `s [R, n]` of a tile, which it overwrites, and its values
    `[n, W]` go into each row's largest score `top`, its `total` and its sum `acc [R, W]`. -inf is a
    score of weight 0."""
    for r in range(s.shape[0]):
        best = top[r]
        for i in range(s.shape[1]):
            best = max(best, s[r, i])
        shift = np.float32(0.0) if best == -np.inf else best
        decay = np.exp(top[r] - shift)
        top[r] = best
        total[r] *= decay
        for d in range(acc.shape[1]):
            acc[r, d] *= decay
        for i in range(s.shape[1]):
            s[r, i] = np.exp(s[r, i] - shift)
            total[r] += s[r, i]
    add_product(s, values, acc)


@njit()
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
            for i in range(size):
                n = n0 + i
                hidden = mask.shape[0] > 0 and not mask[n]
                if hidden:
                    values[i] = 0.0  # 0 times the NaN of a hidden value would be NaN
                if hidden or n > here or (window > 0 and n <= here - window):
                    s[r, i] = -np.inf
                elif softcap > 0:
                    s[r, i] = softcap * np.tanh(s[r, i] / softcap)
        add_tile(s, values, top, total, acc)
    for r in range(group * queries):
        head, t = r // queries, r % queries
        seen = total[r] != 0
        lse[head, t] = top[r] + np.log(total[r]) if seen else -np.inf
        if seen and sinks.shape[0] > 0:
            total[r] += np.exp(sinks[head] - top[r])
        for d in range(width):
            out[head, t, d] = acc[r, d] / total[r] if seen else 0.0


@njit()
def reference_kept(q, k, v, kept, sinks, scale, softcap, out, lse):
    """`reference_rows` of one query `q [G, 1, D]` over the keys `kept` of k, v `[S, D]`."""
    keys = np.empty((len(kept), q.shape[2]), np.float32)
    values = np.empty((len(kept), q.shape[2]), np.float32)
    for i in range(len(kept)):
        keys[i], values[i] = k[kept[i]], v[kept[i]]
    unmasked = np.empty(0, np.bool_)
    reference_rows(q, keys, values, unmasked, len(kept) - 1, 0, 0, sinks, scale, softcap, out, lse)
