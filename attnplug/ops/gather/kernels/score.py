"""The Triton kernel that scores blocks for select_blocks: it makes missing summaries, then stores
each block's score as a key. Pages have a kernel of their own, made of the same pieces
(`kernels/score_pages.py`).

Summaries have two parts, maxima and minima or the two edges of a band, and the score of a block is
the upper bound that these give (PARTS 2). The INT8 codes of a row's bands have one part, the middle
of the band, and a width (PARTS 1)."""

from typing import NamedTuple

from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gather.kernels.bounds import frame_at, refresh_blocks, summaries_at
from attnplug.ops.gather.kernels.select import store_keys


class Chunks(NamedTuple):
    """How the kernels go through a row's blocks."""

    CHUNK: int  # blocks that are scored together
    MEMBERS: int  # of a group whose maximum is handed on; 0: none
    REPEAT: int = 1  # chunks of a program
    STAGES: int = 1
    # REPEAT is 1, and the summaries are read before the length is known.
    SOON: bool = False
    # Chunks lie as far apart as there are programs, so that a row that is short in its room keeps
    # as many programs busy as it has chunks.
    SPACED: bool = False


@triton.jit
def visible_blocks(mask_at, low, j, limit, BLOCK: tl.constexpr):
    """Whether a row's key mask, which begins at `mask_at`, lets any key of each block j through."""
    n = tl.arange(0, BLOCK)
    at = mask_at + low + j[:, None] * BLOCK + n[None, :]
    return tl.max(tl.load(at, mask=(j < limit)[:, None], other=0).to(tl.int32), 1) > 0


@triton.jit
def load_summaries(
    bounds_at,
    frame,
    N,
    j,
    place,
    limit,
    FORM: tl.constexpr,
):
    """(maxima, minima) `[CHUNK, DP]` of blocks j, or the middles of their bands twice, and the
    scales and widths of codes; they lie at `place`. .cg: they are read once."""
    D: tl.constexpr = FORM.D
    PARTS: tl.constexpr = FORM.PARTS
    d = tl.arange(0, FORM.DP)
    at = bounds_at + place[:, None] * (PARTS * D) + d[None, :]
    readable = (j < limit)[:, None] & (d < D)[None, :]
    maxima = tl.load(at, mask=readable, other=0, cache_modifier=".cg")
    minima = maxima
    if PARTS == 2:
        minima = tl.load(at + D, mask=readable, other=0, cache_modifier=".cg")
    scales, widths = 1.0, 0.0
    if FORM.INT8:
        at = frame + 2 * D + place
        scales = tl.load(at, mask=j < limit, other=0.0, cache_modifier=".cg")
        if PARTS == 1:
            widths = tl.load(at + N, mask=j < limit, other=0.0, cache_modifier=".cg")
    return maxima, minima, scales, widths


@triton.jit
def _digits(query, frame, HEADS: tl.constexpr, FORM: tl.constexpr):
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
    if FORM.FRAMED:
        centre, unit = frame_at(frame, tl.arange(0, FORM.DP), FORM.D)
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
    if FORM.PARTS == 2:
        above = tl.where(level > 0, digit, 0).to(tl.int8)
        below = tl.where(level < 0, digit, 0).to(tl.int8)
    quantum = top * tl.where(coarse, 128.0 / 16256.0, 1.0 / 16256.0)
    reach = 0.0
    if FORM.PARTS == 1:
        reach = tl.where(coarse, tl.sum(tl.abs(scaled), 1), 0.0)
    return above, below, quantum, tl.where(coarse, offset, 0.0), reach


@triton.jit
def prepare_query(query, frame, HEADS: tl.constexpr, FORM: tl.constexpr):
    """What `block_scores` needs of the queries `[HEADS, DP]` (for codes, twice), once for all
    blocks. With a frame codes count from a centre, in units for each channel."""
    if FORM.INT8:
        return _digits(query, frame, HEADS, FORM)
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
    FORM: tl.constexpr,
):
    """`[CHUNK]` scores of blocks, each that of the head which scores it highest. Takes what
    `prepare_query` and `load_summaries` return."""
    if FORM.INT8:
        score = _code_scores(prepared, summaries, HEADS, CHUNK, FORM.PARTS)
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
    mask_at,
    low,
    scores_at,
    best_at,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store the scores of a chunk as keys. Blocks from SINK to `limit` that the key mask lets
    through are candidates."""
    CHUNK: tl.constexpr = CHUNKS.CHUNK
    first = chunk * CHUNK
    j = first + tl.arange(0, CHUNK)
    usable = (j >= SINK) & (j < limit)
    if mask_at is not None:
        usable = usable & visible_blocks(mask_at, low, j, limit, BLOCK)
    store_keys(score, first, usable, scores_at, best_at, limit, CHUNK, CHUNKS.MEMBERS)


@triton.jit
def score_blocks(
    q,
    cache,
    rows,
    bounds,
    progress,
    scores,
    best,
    N,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    FORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    NEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """REPEAT chunks of blocks of one query and KV head: missing summaries, then scores. For codes
    the products have two rows for a head; bands that are exact edges are scored as bounds are."""
    BLOCK: tl.constexpr = FORM.BLOCK
    CHUNK: tl.constexpr = CHUNKS.CHUNK
    MEMBERS: tl.constexpr = CHUNKS.MEMBERS
    REPEAT: tl.constexpr = CHUNKS.REPEAT
    SOON: tl.constexpr = CHUNKS.SOON
    SPACED: tl.constexpr = CHUNKS.SPACED
    HEADS: tl.constexpr = ROWS // 2 if FORM.INT8 else ROWS
    chunk, apart = tl.program_id(0) * REPEAT, 1
    if SPACED:
        chunk, apart = tl.program_id(0), tl.num_programs(0)
    t = tl.program_id(1) % q.T
    h = tl.program_id(1) // q.T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if NEW > 0:
            gdc_wait()  # launched early itself
        gdc_launch_dependents()  # the next kernel waits for the end of this grid
    kv_heads = tl.num_programs(1) // q.T
    row = (b * kv_heads + h) * q.T + t
    bounds_at, frame = summaries_at(bounds, b * kv_heads + h, N, FORM)
    length, low = row_span(rows, b, STEPS, NEW)
    done = blocks_done(progress, b, low)
    r = tl.arange(0, ROWS) % HEADS
    d = tl.arange(0, FORM.DP)
    q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h + t * q.t + d[None, :]
    query = tl.load(
        q_at, mask=(r < GROUP)[:, None] & (d < FORM.D)[None, :], other=0.0, cache_modifier=".cg"
    )
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    score = 0.0
    if SOON:  # while the length is on its way; blocks past it count for nothing
        summaries = load_summaries(bounds_at, frame, N, j, j, N, FORM)
        prepared = prepare_query(query, frame, HEADS, FORM)
        score = block_scores(prepared, summaries, GROUP, HEADS, CHUNK, FORM)
    limit = (length - q.T + t - low) // BLOCK - LOCAL + 1
    # No early return when SOON: the compiler would sink the loads above below the branch.
    if SOON or chunk * CHUNK < limit:
        SPANS: tl.constexpr = REPEAT if SPACED else 1
        for i in range(SPANS):
            first = chunk + i * apart
            end = tl.minimum((first + REPEAT // SPANS) * CHUNK, limit)
            begin = tl.maximum(first * CHUNK, done)
            if begin < end:
                # The queries of one row may refresh the same blocks at once: they store the same.
                refresh_blocks(
                    k_at=cache.k + b * cache.k_b + h.to(tl.int64) * cache.k_h,
                    k_s=cache.k_s,
                    mask_at=mask_at,
                    bounds_at=bounds_at,
                    frame=frame,
                    N=N,
                    begin=begin,
                    end=end,
                    stride=1,
                    done=done,
                    start=low,
                    FORM=FORM,
                )
                tl.debug_barrier()  # other warps load what one has stored
                if SOON:  # Score again here: were only the loads in this branch, both would unpack.
                    summaries = load_summaries(bounds_at, frame, N, j, j, N, FORM)
                    prepared = prepare_query(query, frame, HEADS, FORM)
                    score = block_scores(prepared, summaries, GROUP, HEADS, CHUNK, FORM)
        best_at = maxima_at(best, row, N, MEMBERS)
        if SOON:
            store_chunk(
                score=score,
                chunk=chunk,
                limit=limit,
                mask_at=mask_at,
                low=low,
                scores_at=scores + row * N,
                best_at=best_at,
                BLOCK=BLOCK,
                SINK=SINK,
                CHUNKS=CHUNKS,
            )
        else:
            prepared = prepare_query(query, frame, HEADS, FORM)
            turns = REPEAT
            if SPACED:  # no turn past the row's end, where a short row has one
                turns = tl.minimum(tl.cdiv(tl.cdiv(limit, CHUNK) - chunk, apart), REPEAT)
            for i in tl.range(0, turns, num_stages=CHUNKS.STAGES):  # pyright: ignore[reportGeneralTypeIssues]
                turn = chunk + i * apart
                blocks = turn * CHUNK + tl.arange(0, CHUNK)
                shown = load_summaries(bounds_at, frame, N, blocks, blocks, limit, FORM)
                store_chunk(
                    score=block_scores(prepared, shown, GROUP, HEADS, CHUNK, FORM),
                    chunk=turn,
                    limit=limit,
                    mask_at=mask_at,
                    low=low,
                    scores_at=scores + row * N,
                    best_at=best_at,
                    BLOCK=BLOCK,
                    SINK=SINK,
                    CHUNKS=CHUNKS,
                )
