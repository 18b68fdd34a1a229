"""Tiles that Triton kernels of several families load."""

import triton
import triton.language as tl


@triton.jit
def load_query(rows_at, in_rows, D: tl.constexpr, DP: tl.constexpr, BYPASS_L1: tl.constexpr = 0):
    """Queries `[ROWS, DP]` whose vectors of D elements begin at the pointers `rows_at` `[ROWS]`;
    0 outside `in_rows` and from D on.

    A kernel that may start before q's writer has ended sets BYPASS_L1: an L1 line may be older.
    The flag is a number because Triton 3.6 takes no string as a default.
    """
    d = tl.arange(0, DP)
    at = rows_at[:, None] + d[None, :]
    mask = in_rows[:, None] & (d < D)[None, :]
    if BYPASS_L1:
        return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        return tl.load(at, mask=mask, other=0.0)
