"""The Triton kernel of block_maxima."""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _of_tile(
    x,
    keys_at,
    keys_t,
    first,
    position,
    reach,
    best,
    unknown,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`best` with the scores of the keys from `first` on, and whether one was NaN."""
    d = tl.arange(0, DP)
    n = first + tl.arange(0, TILE)
    key = tl.load(
        keys_at + n.to(tl.int64)[:, None] * keys_t + d[None, :],
        mask=(n < reach)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    s = tl.dot(x, key.T, input_precision=PRECISION)
    s = tl.where(n[None, :] <= position[:, None], s, float("-inf"))
    unknown = tl.maximum(unknown, tl.max((s != s).to(tl.int32), 1))
    return tl.maximum(best, tl.max(s, 1)), unknown


@triton.jit
def best_of_blocks(
    q,
    keys,
    positions,
    out,
    S,
    T,
    blocks,
    programs,
    q_strides,
    keys_strides,
    positions_strides,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS pairs of a query and a head against every `programs`-th block, of which TILE keys are
    multiplied at a time. Blocks that none of these queries sees are not read."""
    q_b, q_h, q_s = q_strides
    keys_b, keys_t = keys_strides
    positions_b, positions_s = positions_strides
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    query, head = pair // H, pair % H
    live = query < S
    d = tl.arange(0, DP)
    q_at = q + b * q_b + head.to(tl.int64) * q_h + query.to(tl.int64) * q_s
    x = tl.load(q_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    at = positions + b * positions_b + query.to(tl.int64) * positions_s
    position = tl.load(at, mask=live, other=-1)
    position = tl.minimum(tl.maximum(position, -1), T - 1).to(tl.int32)
    reach = tl.max(position, 0) + 1
    seen = tl.cdiv(reach, BLOCK)
    keys_at = keys + b * keys_b
    out_at = out + ((b * H + head) * S + query) * blocks
    first = tl.program_id(0)
    for j in tl.range(first, seen, programs, num_stages=STAGES):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        unknown = tl.zeros([ROWS], tl.int32)
        if TILE == BLOCK:  # which the pipeline of this loop takes
            best, unknown = _of_tile(
                x,
                keys_at,
                keys_t,
                j * BLOCK,
                position,
                reach,
                best,
                unknown,
                D,
                DP,
                TILE,
                PRECISION,
            )
        else:
            for part in tl.range(0, BLOCK // TILE, num_stages=1):
                n = j * BLOCK + part * TILE
                best, unknown = _of_tile(
                    x, keys_at, keys_t, n, position, reach, best, unknown, D, DP, TILE, PRECISION
                )
        # As torch's amax: the maximum of numbers of which one is NaN is NaN.
        tl.store(out_at + j, tl.where(unknown > 0, float("nan"), best), mask=live)
    passed = tl.cdiv(tl.maximum(seen - first, 0), programs) * programs
    for j in tl.range(first + passed, blocks, programs, num_stages=1):
        tl.store(out_at + j, tl.full([ROWS], float("-inf"), tl.float32), mask=live)
