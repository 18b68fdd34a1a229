"""What the kernels that score tokens from INT8 keys share, and the one that counts them for `topk`
meanwhile.

`score_and_count` stands for `topk_verify.verify`: it leaves the same edges and counts to `collect`.
Where the k-th score should lie it guesses from the scores of a sample of the row, which each of its
programs computes for itself, as that of so many normal scores. No hint is needed for that: over the
decode steps of real models the k-th lay within a standard deviation of this place, and the place
that it had in the step before said no more (docs/log/gvr.md).

Names as in `topk_select`; g is a head of a group, d a dimension, `at` are tokens of a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import softcap
from attnplug.ops.gvr.kernels.topk_select import (
    EDGE_LOW,
    EDGE_SCALE,
    add_three,
    clean,
    normal_quantile,
)
from attnplug.ops.gvr.kernels.topk_verify import HUGE, count_bins, part_of_row

# Standard deviations from the guess to the edges of the bins. On real scores the k-th lay up to 1.3
# away; a bin of these 3 / 62 still holds few enough scores for `refine` to have them in registers.
_REACH = Constant(1.5)


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


@triton.jit
def _bins_of_bell(count, total, squares, K, chosen_from, BINS: tl.constexpr):
    """low and scale of the bins about the K-th of `chosen_from` normal scores, from the `count`,
    sum and sum of squares of a sample. A wrong guess costs time, never exactness."""
    mean = total / tl.maximum(count, 1.0)
    deviation = tl.sqrt(tl.maximum(squares / tl.maximum(count, 1.0) - mean * mean, 0.0))
    chosen_from = tl.maximum(chosen_from, 1.0)
    middle = normal_quantile(0.0 * chosen_from + K, chosen_from, mean, deviation)
    low = middle - _REACH * deviation
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)
    width = tl.minimum(2 * _REACH * deviation, 1e32)
    return low, (BINS - 2) / tl.where(width > 1e-30, width, 1e-30)


@triton.jit
def score_and_count(
    q,
    codes,
    scales,
    lengths,
    start,
    key_mask,
    table,
    shares,
    cap,
    scores,
    edges,
    counts,
    S,
    K,
    parts,
    q_strides,
    codes_strides,
    scales_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score one of the `parts` of a row and KV head and count its scores in the bins. What lies
    past the row's length is not written."""
    q_b, q_h = q_strides
    codes_b, codes_h, _ = codes_strides
    scales_b, scales_h, _ = scales_strides
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = b * tl.num_programs(1) + h
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    norm = None
    factor = None
    if shares is not None:
        norms, factor = shares
        norm = tl.load(norms + r * GROUP + g, mask=in_group, other=0.0, cache_modifier=".cg")
    codes_at = codes + h.to(tl.int64) * codes_h + d[None, :]
    scales_at = scales + h.to(tl.int64) * scales_h
    row_table = None
    if table is None:
        codes_at += b * codes_b
        scales_at += b * scales_b
    else:
        row_table = table + b * table_stride
    mask_at = None
    if key_mask is not None:
        mask_at = key_mask + b * mask_stride

    first_far = low + SINK
    far = tl.maximum(length - WINDOW - first_far, 0)
    count = 0.0
    total = 0.0
    squares = 0.0
    for e in tl.range(0, SAMPLE, TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        odd = 2 * (e + tl.arange(0, TILE)).to(tl.int64) + 1
        at = first_far + (odd * far // (2 * SAMPLE)).to(tl.int32)
        seen = choosable(at, length, low, mask_at, SINK, WINDOW)
        x = token_scores(
            at=at,
            seen=seen,
            query=query,
            norm=norm,
            codes_at=codes_at,
            scales_at=scales_at,
            row_table=row_table,
            codes_strides=codes_strides,
            scales_strides=scales_strides,
            in_group=in_group,
            in_width=in_width,
            factor=factor,
            cap=cap,
            PAGE=PAGE,
        )
        usable = tl.abs(x) < HUGE
        x = tl.where(usable, x, 0.0)
        counted, sums, sums_of_squares = tl.reduce((usable.to(tl.float32), x, x * x), 0, add_three)
        count += counted
        total += sums
        squares += sums_of_squares
    bin_low, bin_scale = _bins_of_bell(count, total, squares, K, far.to(tl.float32), BINS)
    if part == 0:
        tl.store(edges + r * 2 + EDGE_LOW, bin_low)
        tl.store(edges + r * 2 + EDGE_SCALE, bin_scale)

    first, last = part_of_row(length, part, parts, TILE)
    counts_of_bins = tl.zeros([BINS], tl.int32)
    for tile in tl.range(first, last, TILE, num_stages=STAGES):
        at = tile + tl.arange(0, TILE)
        seen = choosable(at, length, low, mask_at, SINK, WINDOW)
        x = token_scores(
            at=at,
            seen=seen,
            query=query,
            norm=norm,
            codes_at=codes_at,
            scales_at=scales_at,
            row_table=row_table,
            codes_strides=codes_strides,
            scales_strides=scales_strides,
            in_group=in_group,
            in_width=in_width,
            factor=factor,
            cap=cap,
            PAGE=PAGE,
        )
        tl.store(scores + r * S + at, x, mask=at < last)
        counts_of_bins += count_bins(clean(x), bin_low, bin_scale, BINS)
    count_at = counts + (r * parts + part) * BINS + tl.arange(0, BINS)
    tl.store(count_at, counts_of_bins.to(counts.dtype.element_ty))
