"""Tiles that Triton kernels of several families load."""

import triton
import triton.language as tl


@triton.jit
def load_query(rows_at, in_rows, D: tl.constexpr, DP: tl.constexpr, CACHE: tl.constexpr = ""):
    """Queries `[ROWS, DP]` whose vectors of D elements begin at the pointers `rows_at` `[ROWS, 1]`;
    0 outside `in_rows` `[ROWS]` and from D on.

    A kernel that may start before q's writer has ended passes CACHE=".cg": an L1 line may be older.
    """
    d = tl.arange(0, DP)
    return tl.load(
        rows_at + d[None, :],
        mask=in_rows[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=CACHE,
    )
