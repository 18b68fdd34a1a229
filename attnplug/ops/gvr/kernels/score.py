"""What the kernels that score tokens from INT8 keys share.

g is a head of a group, d a dimension, `at` are tokens of a row.
"""

import triton
import triton.language as tl

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.softmax import softcap


@triton.jit
def _best(s, in_group):
    """The largest score of a group's heads."""
    s = tl.where(s == s, s, float("inf"))
    return tl.max(tl.where(in_group[:, None], s, float("-inf")), 0)


@triton.jit
def _share(s, norm, in_group, factor, cap):
    """log2 of the sum of a group's shares 2^(logit - norm), `norm [ROWS]`."""
    y = s * factor
    if cap is not None:
        y = softcap(y, cap)
    y -= norm[:, None]
    y = tl.where(y == y, y, float("inf"))
    y = tl.where(in_group[:, None], y, float("-inf"))
    top = tl.max(y, 0)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    return base + tl.log2(tl.sum(tl.exp2(y - base[None, :]), 0))


@triton.jit
def token_products(
    at,
    seen,
    query,
    codes_at,
    scales_at,
    row_table,
    codes_strides,
    scales_strides,
    in_width,
    PAGE: tl.constexpr,
):
    """q . k of the tokens `at`, 0 where not `seen`. codes_at and scales_at are those of the row's
    first token, or with a table of page 0."""
    codes_b, _, codes_s = codes_strides
    scales_b, _, scales_s = scales_strides
    loadable = seen[:, None] & in_width[None, :]
    if row_table is None:
        wide = at.to(tl.int64)
        code_places = wide[:, None] * codes_s
        scale_places = wide * scales_s
    else:
        page = page_of(row_table, at, seen, PAGE)
        in_page = (at % PAGE).to(tl.int64)
        code_places = (page * codes_b + in_page * codes_s)[:, None]
        scale_places = page * scales_b + in_page * scales_s
    key = tl.load(codes_at + code_places, mask=loadable, other=0)
    scale = tl.load(scales_at + scale_places, mask=seen, other=0.0)
    return tl.dot(query, key.to(query.dtype).T, input_precision="ieee") * scale[None, :]


@triton.jit
def token_scores(
    at,
    seen,
    query,
    norm,
    codes_at,
    scales_at,
    row_table,
    codes_strides,
    scales_strides,
    in_group,
    in_width,
    factor,
    cap,
    PAGE: tl.constexpr,
):
    """The group's scores of the tokens `at`, -inf where not `seen`; shares if there is a `norm`.
    The others as in `token_products`."""
    s = token_products(
        at=at,
        seen=seen,
        query=query,
        codes_at=codes_at,
        scales_at=scales_at,
        row_table=row_table,
        codes_strides=codes_strides,
        scales_strides=scales_strides,
        in_width=in_width,
        PAGE=PAGE,
    )
    if norm is None:
        score = _best(s, in_group)
    else:
        score = _share(s, norm, in_group, factor, cap)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def choosable(at, length, low, mask_at, SINK: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the tokens `at` may be chosen: not the sink, the window, or what is masked."""
    seen = (at >= low + SINK) & (at < length - WINDOW)
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + at, mask=seen, other=0) != 0)
    return seen
