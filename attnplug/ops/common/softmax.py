"""One step of the online softmax in a Triton kernel, in base 2."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


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
