"""The Triton kernel that scores blocks by their spread summaries for `select_blocks`: it makes the
missing ones, then stores a key of each block's score."""

from attnplug.ops.common.pages import place_of_block
from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gather.kernels.score import visible_blocks
from attnplug.ops.gather.kernels.select import store_keys
from attnplug.ops.gather.kernels.spread import CHANNELS, refresh_spread, spread_at

SAMPLE = tl.constexpr(32)  # candidates that a head's normaliser is taken from
DEVIATIONS = tl.constexpr(3.0)  # above the mean, in the score


@triton.jit
def _digits(values, top, coarse):
    """`values [ROWS, CHANNELS]` as INT8 digits: values = top / 16256 (128 a + b). Rows of `coarse`
    get the digits a, the others b."""
    level = values * (16256.0 / tl.where(top > 0, top, 1.0))[:, None]
    level = tl.where(tl.abs(level) <= 16257.0, level, 0.0)
    level = (level + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    first = (level + 64) >> 7
    return tl.where(coarse[:, None], first, level - first * 128).to(tl.int8)


@triton.jit
def _query_digits(
    q_at, readable, top, coarse, part: tl.constexpr, c: tl.constexpr, D: tl.constexpr
):
    """The digits of channels 32 c and on of the queries (part 0), or of their squares (part 1)."""
    d = c * CHANNELS + tl.arange(0, CHANNELS)
    query = tl.load(
        q_at[:, None] + d[None, :],
        mask=readable[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    ).to(tl.float32)
    if part == 0:
        return _digits(query, top, coarse)
    else:
        return _digits(query * query, top * top, coarse)


@triton.jit
def _all_digits(q_at, readable, top, coarse, part: tl.constexpr, D: tl.constexpr):
    """`_query_digits` of every 32 channels, a tuple."""
    GROUPS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    first = _query_digits(q_at, readable, top, coarse, part, 0, D)
    second = _query_digits(q_at, readable, top, coarse, part, 1, D)
    if GROUPS == 2:
        return first, second
    else:
        third = _query_digits(q_at, readable, top, coarse, part, 2, D)
        if GROUPS == 3:
            return first, second, third
        else:
            fourth = _query_digits(q_at, readable, top, coarse, part, 3, D)
            if GROUPS == 4:
                return first, second, third, fourth
            else:
                fifth = _query_digits(q_at, readable, top, coarse, part, 4, D)
                sixth = _query_digits(q_at, readable, top, coarse, part, 5, D)
                seventh = _query_digits(q_at, readable, top, coarse, part, 6, D)
                eighth = _query_digits(q_at, readable, top, coarse, part, 7, D)
                return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def _part_scores(
    digits,
    part: tl.constexpr,
    codes_at,
    scales_at,
    j,
    place,
    limit,
    N,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`[HEADS, CHUNK]`: products of queries, or of their squares, in units of top / 16256, with the
    means (part 0) or variances of blocks j, whose summaries lie at `place` among N. The digits'
    products are joined as integers, which is exact and converts half as many."""
    GROUPS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    weight = tl.where(tl.arange(0, 2 * HEADS) < HEADS, 128, 1)
    score = tl.zeros([HEADS, CHUNK], tl.float32)
    for c in tl.static_range(GROUPS):
        d = c * CHANNELS + tl.arange(0, CHANNELS)
        code = tl.load(
            codes_at + (place * 2 + part)[:, None] * D + d[None, :],
            mask=(j < limit)[:, None] & (d < D)[None, :],
            other=0,
            cache_modifier=".cg",
        )
        bits = tl.load(
            scales_at + (part * GROUPS + c) * N + place,
            mask=j < limit,
            other=0,
            cache_modifier=".cg",
        )
        scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        total = tl.dot(digits[c], code.T, out_dtype=tl.int32) * weight[:, None]
        total = tl.sum(tl.reshape(total, [2, HEADS, CHUNK]), 0)
        score += total.to(tl.float32) * scale[None, :]
    return score


@triton.jit
def _head_scores(
    means,
    squares,
    top,
    offset,
    codes_at,
    scales_at,
    j,
    place,
    limit,
    N,
    scale,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`[HEADS, CHUNK]`: mean plus DEVIATIONS standard deviations of each head's scores of blocks j.
    `top` `[HEADS]` is the largest channel of each query, `offset` NaN for one that is not finite.
    What is not finite comes back as infinity."""
    mean = _part_scores(means, 0, codes_at, scales_at, j, place, limit, N, D, HEADS, CHUNK)
    mean = mean * (top * (1.0 / 16256.0))[:, None] + offset[:, None]
    square = _part_scores(squares, 1, codes_at, scales_at, j, place, limit, N, D, HEADS, CHUNK)
    square = square * (top * top * (1.0 / 16256.0))[:, None]
    square = tl.where(square > 0, square, tl.where(square == square, 0.0, square))
    score = scale * (mean + DEVIATIONS * tl.sqrt(square))
    return tl.where(tl.abs(score) < float("inf"), score, float("inf"))


@triton.jit
def _log_sum_exp(x):
    """Of each row's values below infinity; -inf where there is none."""
    x = tl.where(x < float("inf"), x, float("-inf"))
    top = tl.max(x, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - shift[:, None]), 1)
    result = shift + tl.log(tl.where(total > 0, total, 1.0))
    return tl.where(total > 0, result, float("-inf"))


@triton.jit
def _shares(x):
    """log sum exp over the heads, `[CHUNK]`, -inf where all are; infinity where one is. One
    reduction finds the largest and what is not finite."""
    top = tl.max(x, 0)
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    total = tl.sum(tl.exp(x - shift[None, :]), 0)
    return tl.where(top < float("inf"), shift + tl.log(total), float("inf"))


@triton.jit
def score_spread(
    q,
    k,
    bounds,
    progress,
    lengths,
    start,
    key_mask,
    table,
    scores,
    best,
    scale,
    T,
    S,
    N,
    places,
    q_strides,
    k_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
    REPEAT: tl.constexpr,
    STAGES: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """REPEAT chunks of blocks of one query and KV head: missing summaries, then keys of scores.

    A block's score is log sum_g exp(e_gj - N_g) over the heads of the group. N_g is the log-sum-exp
    of e_g over SAMPLE candidates at equal distances, so each program finds the same one by itself
    and needs no result of another. It makes these candidates' summaries too where they are missing;
    programs that make the same summary store the same bytes. With a `table` of pages of PAGE keys,
    the summaries are those of all pages' blocks, `places` many, and none is missing.
    """
    ROWS: tl.constexpr = 2 * HEADS
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    chunk = tl.program_id(0) * REPEAT
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if NEW > 0:
            gdc_wait()  # launched early itself
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    kv_heads = tl.num_programs(1) // T
    row = (b * kv_heads + h) * T + t
    if table is None:
        places = N
        codes_at, scales_at = spread_at(bounds, b * kv_heads + h, N, D)
    else:
        codes_at, scales_at = spread_at(bounds, h.to(tl.int64), places, D)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    limit = (length - T + t - low) // BLOCK - LOCAL + 1
    if chunk * CHUNK < limit:
        done = 0
        if table is None:
            done = blocks_done(progress, b, low)
        step = tl.maximum((limit - SINK) // SAMPLE, 1)
        if table is None:
            mask_at = k
            if key_mask is not None:
                mask_at = key_mask + b * mask_stride
            for own in range(2):  # this program's blocks, then the sample
                sampled = SINK + tl.cdiv(tl.maximum(done - SINK, 0), step) * step
                begin = tl.where(own == 0, tl.maximum(chunk * CHUNK, done), sampled)
                end = tl.where(own == 0, (chunk + REPEAT) * CHUNK, SINK + SAMPLE * step)
                refresh_spread(
                    k_at=k + b * k_b + h.to(tl.int64) * k_h,
                    mask_at=mask_at,
                    codes_at=codes_at,
                    scales_at=scales_at,
                    begin=begin,
                    end=tl.minimum(end, limit),
                    stride=tl.where(own == 0, 1, step),
                    start=low,
                    N=N,
                    k_s=k_s,
                    D=D,
                    DP=DP,
                    BLOCK=BLOCK,
                    MASKED=key_mask is not None,
                )
            tl.debug_barrier()  # other warps load what one has stored
        r = tl.arange(0, ROWS) % HEADS
        coarse = tl.arange(0, ROWS) < HEADS
        d = tl.arange(0, DP)
        q_at = q + b * q_b + (h * GROUP + r).to(tl.int64) * q_h + t * q_t
        query = tl.load(
            q_at[:, None] + d[None, :],
            mask=(r < GROUP)[:, None] & (d < D)[None, :],
            other=0.0,
            cache_modifier=".cg",
        ).to(tl.float32)
        top = tl.max(tl.abs(query), 1)
        means = _all_digits(q_at, r < GROUP, top, coarse, 0, D)
        squares = _all_digits(q_at, r < GROUP, top, coarse, 1, D)
        # Of each head once; its two rows hold the same.
        offset = tl.sum(tl.reshape(tl.sum(query * 0, 1), [2, HEADS]), 0)
        top = tl.max(tl.reshape(top, [2, HEADS]), 0)
        in_group = tl.arange(0, HEADS) < GROUP

        picks = SINK + tl.arange(0, SAMPLE) * step
        e = _head_scores(
            means=means,
            squares=squares,
            top=top,
            offset=offset,
            codes_at=codes_at,
            scales_at=scales_at,
            j=picks,
            place=place_of_block(table, b, table_stride, picks, picks < limit, BLOCK, PAGE),
            limit=limit,
            N=places,
            scale=scale,
            D=D,
            HEADS=HEADS,
            CHUNK=SAMPLE,
        )
        shown = picks < limit
        if key_mask is not None:
            shown = shown & visible_blocks(key_mask, b * mask_stride, low, picks, limit, BLOCK)
        norm = _log_sum_exp(tl.where(shown[None, :], e, float("-inf")))
        norm = tl.where(norm == float("-inf"), 0.0, norm)

        best_at = best
        if MEMBERS > 0:
            best_at = best + row * tl.cdiv(N, MEMBERS)
        for i in tl.range(0, REPEAT, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            first = (chunk + i) * CHUNK
            j = first + tl.arange(0, CHUNK)
            score = _head_scores(
                means=means,
                squares=squares,
                top=top,
                offset=offset,
                codes_at=codes_at,
                scales_at=scales_at,
                j=j,
                place=place_of_block(table, b, table_stride, j, j < limit, BLOCK, PAGE),
                limit=limit,
                N=places,
                scale=scale,
                D=D,
                HEADS=HEADS,
                CHUNK=CHUNK,
            )
            share = tl.where(in_group[:, None], score - norm[:, None], float("-inf"))
            share = _shares(share)
            usable = (j >= SINK) & (j < limit)
            if key_mask is not None:
                usable = usable & visible_blocks(key_mask, b * mask_stride, low, j, limit, BLOCK)
            store_keys(share, first, usable, scores + row * N, best_at, limit, CHUNK, MEMBERS)
