"""The Triton kernel that scores blocks for select_blocks: it makes missing summaries, then stores
each block's score as a key. Pages have a kernel of their own, made of the same pieces
(`kernels/score_pages.py`).

Summaries have two parts, maxima and minima or the two edges of a band, and the score of a block is
the upper bound that these give (PARTS 2). The INT8 codes of a row's bands have one part, the middle
of the band, and a width (PARTS 1)."""

from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gather.kernels.bounds import frame_at, refresh_blocks, summaries_at
from attnplug.ops.gather.kernels.select import store_keys


@triton.jit
def visible_blocks(key_mask, offset, low, j, limit, BLOCK: tl.constexpr):
    """Whether the key mask, whose row begins at `offset`, lets any key of each block j through."""
    n = tl.arange(0, BLOCK)
    at = key_mask + offset + low + j[:, None] * BLOCK + n[None, :]
    return tl.max(tl.load(at, mask=(j < limit)[:, None], other=0).to(tl.int32), 1) > 0


@triton.jit
def load_summaries(
    bounds_at,
    frame,
    N,
    j,
    place,
    limit,
    D: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
    INT8: tl.constexpr,
):
    """(maxima, minima) `[CHUNK, DP]` of blocks j, or the middles of their bands twice, and the
    scales and widths of codes; they lie at `place`. .cg: they are read once."""
    d = tl.arange(0, DP)
    at = bounds_at + place[:, None] * (PARTS * D) + d[None, :]
    readable = (j < limit)[:, None] & (d < D)[None, :]
    maxima = tl.load(at, mask=readable, other=0, cache_modifier=".cg")
    minima = maxima
    if PARTS == 2:
        minima = tl.load(at + D, mask=readable, other=0, cache_modifier=".cg")
    scales, widths = 1.0, 0.0
    if INT8:
        at = frame + 2 * D + place
        scales = tl.load(at, mask=j < limit, other=0.0, cache_modifier=".cg")
        if PARTS == 1:
            widths = tl.load(at + N, mask=j < limit, other=0.0, cache_modifier=".cg")
    return maxima, minima, scales, widths


@triton.jit
def _digits(
    query,
    frame,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    FRAMED: tl.constexpr,
):
    """Queries as INT8 digits, to be multiplied with codes: `query unit = quantum (128 a + b)`.

    Returns the digits of positive elements, those of negative ones, what a product of a row counts,
    and what to add to its score, `query . centre`, and `sum |query| unit` for each width of a band.
    The heads come twice: the first HEADS rows get the digits a, the others the digits b and nothing
    to add.
    """
    coarse = tl.arange(0, 2 * HEADS) < HEADS
    query = query.to(tl.float32)
    # An element that is not finite makes a NaN of it.
    offset = tl.sum(query * 0, 1)
    scaled = query
    if FRAMED:
        centre, unit = frame_at(frame, tl.arange(0, DP), D)
        scaled = query * unit[None, :]
        offset = tl.sum(query * centre[None, :] + query * 0, 1)
    top = tl.max(tl.abs(scaled), 1)
    level = scaled * (16256.0 / tl.where(top > 0, top, 1.0))[:, None]
    level = tl.where(tl.abs(level) <= 16257.0, level, 0.0)
    # To the nearest integer: 1.5 2^23 leaves no bits for a fraction.
    level = (level + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    first = (level + 64) >> 7
    digit = tl.where(coarse[:, None], first, level - first * 128)
    above, below = digit.to(tl.int8), digit.to(tl.int8)
    if PARTS == 2:
        above = tl.where(level > 0, digit, 0).to(tl.int8)
        below = tl.where(level < 0, digit, 0).to(tl.int8)
    quantum = top * tl.where(coarse, 128.0 / 16256.0, 1.0 / 16256.0)
    reach = 0.0
    if PARTS == 1:
        reach = tl.where(coarse, tl.sum(tl.abs(scaled), 1), 0.0)
    return above, below, quantum, tl.where(coarse, offset, 0.0), reach


@triton.jit
def prepare_query(
    query,
    frame,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
    INT8: tl.constexpr,
    FRAMED: tl.constexpr = True,
):
    """What `block_scores` needs of the queries `[HEADS, DP]` (for codes, twice), once for all
    blocks. FRAMED: codes count from a centre, in units for each channel."""
    if INT8:
        return _digits(query, frame, D, DP, HEADS, PARTS, FRAMED)
    else:
        return query, query, 1.0, 0.0, 0.0


@triton.jit
def _code_scores(digits, codes, HEADS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """`[HEADS, CHUNK]` scores of codes. Each row sums integers: the sum is exact."""
    above, below, quantum, offset, reach = digits
    maxima, minima, scales, widths = codes
    total = tl.dot(above, maxima.T, out_dtype=tl.int32)
    if PARTS == 2:
        total = tl.dot(below, minima.T, total, out_dtype=tl.int32)
    score = total.to(tl.float32) * quantum[:, None] * scales[None, :] + offset[:, None]
    if PARTS == 1:
        score += reach[:, None] * widths[None, :]
    return tl.sum(tl.reshape(score, [2, HEADS, CHUNK]), 0)


@triton.jit
def _head_scores(query, maxima, minima):
    """`[HEADS, CHUNK]` scores of blocks for every head."""
    zero = query * 0  # a NaN stays one
    above = tl.where(query > 0, query, zero).to(maxima.dtype)
    below = tl.where(query < 0, query, zero).to(maxima.dtype)
    score = tl.dot(above, maxima.T, input_precision="ieee")
    return tl.dot(below, minima.T, score, input_precision="ieee")


@triton.jit
def block_scores(
    prepared,
    summaries,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    INT8: tl.constexpr,
):
    """`[CHUNK]` scores of blocks, each that of the head which scores it highest. Takes what
    `prepare_query` and `load_summaries` return."""
    if INT8:
        score = _code_scores(prepared, summaries, HEADS, CHUNK, PARTS)
    else:
        score = _head_scores(prepared[0], summaries[0], summaries[1])
    score = tl.where(score == score, score, float("inf"))
    in_group = tl.arange(0, HEADS) < GROUP
    return tl.max(tl.where(in_group[:, None], score, float("-inf")), 0)


@triton.jit
def maxima_at(best, row, N, MEMBERS: tl.constexpr):
    """Where the maxima of a row's groups of MEMBERS blocks begin; without groups they are not
    read."""
    at = best
    if MEMBERS > 0:
        at = best + row * tl.cdiv(N, MEMBERS)
    return at


@triton.jit
def store_chunk(
    score,
    chunk,
    limit,
    key_mask,
    mask_offset,
    low,
    scores_at,
    best_at,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """Store the scores of a chunk as keys. Blocks from SINK to `limit` that the key mask lets
    through are candidates."""
    first = chunk * CHUNK
    j = first + tl.arange(0, CHUNK)
    usable = (j >= SINK) & (j < limit)
    if key_mask is not None:
        usable = usable & visible_blocks(key_mask, mask_offset, low, j, limit, BLOCK)
    store_keys(score, first, usable, scores_at, best_at, limit, CHUNK, MEMBERS)


@triton.jit
def score_blocks(
    q,
    k,
    bounds,
    progress,
    lengths,
    start,
    key_mask,
    scores,
    best,
    T,
    S,
    N,
    q_strides,
    k_strides,
    mask_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    MEMBERS: tl.constexpr,
    REPEAT: tl.constexpr,
    STAGES: tl.constexpr,
    SOON: tl.constexpr,
    SPACED: tl.constexpr,
    BAND: tl.constexpr,
    INT8: tl.constexpr,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """REPEAT chunks of blocks of one query and KV head: missing summaries, then scores.

    INT8: the summaries are codes; their products have two rows for a head. SOON (REPEAT is 1): read
    the summaries before the length is known. SPACED: the chunks lie as far apart as there are
    programs, so that a row that is short in its room keeps as many programs busy as it has chunks.
    BAND: the summaries are bands, exact edges, which are scored as bounds are, or codes.
    """
    HEADS: tl.constexpr = ROWS // 2 if INT8 else ROWS
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    chunk, apart = tl.program_id(0) * REPEAT, 1
    if SPACED:
        chunk, apart = tl.program_id(0), tl.num_programs(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if NEW > 0:
            gdc_wait()  # launched early itself
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    kv_heads = tl.num_programs(1) // T
    row = (b * kv_heads + h) * T + t
    bounds_at, frame = summaries_at(bounds, b * kv_heads + h, N, D, PARTS, INT8)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    done = blocks_done(progress, b, low)
    r = tl.arange(0, ROWS) % HEADS
    d = tl.arange(0, DP)
    q_at = q + b * q_b + (h * GROUP + r).to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(
        q_at, mask=(r < GROUP)[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg"
    )
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    score = 0.0
    if SOON:  # while the length is on its way; blocks past it count for nothing
        summaries = load_summaries(bounds_at, frame, N, j, j, N, D, DP, PARTS, INT8)
        prepared = prepare_query(query, frame, HEADS, D, DP, PARTS, INT8)
        score = block_scores(prepared, summaries, GROUP, HEADS, CHUNK, PARTS, INT8)
    limit = (length - T + t - low) // BLOCK - LOCAL + 1
    # No early return when SOON: the compiler would sink the loads above below the branch.
    if SOON or chunk * CHUNK < limit:
        SPANS: tl.constexpr = REPEAT if SPACED else 1
        for i in range(SPANS):
            first = chunk + i * apart
            end = tl.minimum((first + REPEAT // SPANS) * CHUNK, limit)
            begin = tl.maximum(first * CHUNK, done)
            if begin < end:
                mask_at = k
                if key_mask is not None:
                    mask_at = key_mask + b * mask_stride
                # The queries of one row may refresh the same blocks at once: they store the same.
                refresh_blocks(
                    k_at=k + b * k_b + h.to(tl.int64) * k_h,
                    mask_at=mask_at,
                    bounds_at=bounds_at,
                    frame=frame,
                    N=N,
                    begin=begin,
                    end=end,
                    stride=1,
                    done=done,
                    start=low,
                    k_s=k_s,
                    D=D,
                    DP=DP,
                    BLOCK=BLOCK,
                    PARTS=PARTS,
                    INT8=INT8,
                    MASKED=key_mask is not None,
                    BAND=BAND,
                )
                tl.debug_barrier()  # other warps load what one has stored
                if SOON:  # Score again here: were only the loads in this branch, both would unpack.
                    summaries = load_summaries(bounds_at, frame, N, j, j, N, D, DP, PARTS, INT8)
                    prepared = prepare_query(query, frame, HEADS, D, DP, PARTS, INT8)
                    score = block_scores(prepared, summaries, GROUP, HEADS, CHUNK, PARTS, INT8)
        best_at = maxima_at(best, row, N, MEMBERS)
        if SOON:
            store_chunk(
                score=score,
                chunk=chunk,
                limit=limit,
                key_mask=key_mask,
                mask_offset=b * mask_stride,
                low=low,
                scores_at=scores + row * N,
                best_at=best_at,
                BLOCK=BLOCK,
                SINK=SINK,
                CHUNK=CHUNK,
                MEMBERS=MEMBERS,
            )
        else:
            prepared = prepare_query(query, frame, HEADS, D, DP, PARTS, INT8)
            turns = REPEAT
            if SPACED:  # no turn past the row's end, where a short row has one
                turns = tl.minimum(tl.cdiv(tl.cdiv(limit, CHUNK) - chunk, apart), REPEAT)
            for i in tl.range(0, turns, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
                turn = chunk + i * apart
                blocks = turn * CHUNK + tl.arange(0, CHUNK)
                shown = load_summaries(
                    bounds_at, frame, N, blocks, blocks, limit, D, DP, PARTS, INT8
                )
                store_chunk(
                    score=block_scores(prepared, shown, GROUP, HEADS, CHUNK, PARTS, INT8),
                    chunk=turn,
                    limit=limit,
                    key_mask=key_mask,
                    mask_offset=b * mask_stride,
                    low=low,
                    scores_at=scores + row * N,
                    best_at=best_at,
                    BLOCK=BLOCK,
                    SINK=SINK,
                    CHUNK=CHUNK,
                    MEMBERS=MEMBERS,
                )
