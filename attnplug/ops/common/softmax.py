"""The online softmax of a Triton kernel, in base 2: logits are scaled by log2(e), so that exp2
serves. Source: Milakov and Gimelshein, Online normalizer calculation for softmax,
arXiv:1805.02867.
"""

from attnplug.ops.common.triton import tl, triton

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def base_two(scale: float, softcap: float) -> tuple[float, float]:
    """(factor on q.k, cap) that a kernel takes for `scale` and `softcap` (0: off): logits in units
    of log 2, or where they are capped what `softcap` below expects."""
    return scale * LOG2E if softcap == 0 else 2 * LOG2E * scale / softcap, softcap * LOG2E


@triton.jit
def softcap(s, cap):
    """cap tanh(s / (2 log2(e))): tanh(y) = 1 - 2 / (exp(2y) + 1)."""
    return cap * (1 - 2 / (tl.exp2(s) + 1))


@triton.jit
def online_softmax(s, top, total):
    """One step over logits `s [ROWS, TILE]`: (weights, the factor on what was summed before, the
    new maximum, the new sum)."""
    best = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(best == float("-inf"), 0.0, best)
    # The maximum may drop a NaN score; it comes back through p.
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    return p, decay, best, total * decay + tl.sum(p, 1)


@triton.jit
def attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED: tl.constexpr):
    """One step of attention over a tile of keys and values, which are converted to the dtype of
    `query`; `seen [TILE]` holds for all of its rows. Returns the new (top, total, acc)."""
    key, value = key.to(query.dtype), value.to(query.dtype)
    s = tl.dot(query, key.T, input_precision="ieee") * scale
    if CAPPED:
        s = softcap(s, cap)
    s = tl.where(seen[None, :], s, float("-inf"))
    p, decay, top, total = online_softmax(s, top, total)
    acc = tl.dot(p.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return top, total, acc
