"""The Triton kernel of `certified_attention` that says what each head needs: how much every
quantized block would add to its bound, and from which share on blocks must be read exactly for the
bound to meet the tolerance. To the base 2.

A program has one head, so that a block's share and the search for the threshold are one vector in
registers. `choose_blocks` promotes what any head of the group needs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.search import search, search_few
from attnplug.ops.certified.kernels.select import (
    head_norm,
    merge_head,
    query_norms,
    weight_change,
)
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span


@triton.jit
def _load_blocks(scores, summary_at, block_at, j, there):
    """What the pass has left of some blocks of a head, and their summaries."""
    log = tl.load(scores.logs + block_at + j, mask=there, other=float("-inf"))
    square = tl.load(scores.squares + block_at + j, mask=there, other=float("-inf"))
    delta = tl.load(scores.delta + block_at + j, mask=there, other=0.0)
    noise = tl.load(scores.noise + block_at + j, mask=there, other=0.0)
    at = summary_at + j * R.SUMMARY_FIELDS
    eta = tl.load(at + R.ETA, mask=there, other=0.0)
    nu = tl.load(at + R.NU, mask=there, other=0.0)
    of_keys = tl.load(at + R.KEY_SPECTRUM, mask=there, other=0.0)
    of_values = tl.load(at + R.VALUE_SPECTRUM, mask=there, other=0.0)
    return log, square, delta, noise, eta, nu, of_keys, of_values


@triton.jit
def _shares(seen, there, norm, size, moved, factor):
    """What each block adds to the bound, as a share of what all may add, or MOST_NEEDED."""
    log, square, delta, noise, eta, nu, of_keys, of_values = seen
    mass = tl.exp2(log - norm)
    root = tl.exp2(square * 0.5 - norm) + R.SQUARE_FLOOR
    change, _under = weight_change(mass, root, delta, noise, of_keys * moved)
    adds = change * (nu + size) + tl.minimum(mass * eta, root * of_values)
    share = adds * factor
    share = tl.where(share < R.MOST_NEEDED, share, R.MOST_NEEDED)  # so is a NaN
    return tl.where(there, share, 0.0)


@triton.jit
def weigh_heads(
    q,
    tier,
    rows,
    scores,
    splits,
    merged,
    head_lse,
    needs,
    scale,
    tolerance,
    most,
    S,
    N,
    pieces,
    kv_heads,
    q_strides,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the `pieces` of the first pass of one head into `merged` and `head_lse`. Then leave in
    `needs` the log of what each block adds to the bound, as a share of the tolerance, or that of
    R.MOST_NEEDED. And in `head_lse` the threshold: blocks below it add less than the tolerance.
    Where TILE has room for all N blocks, they are loaded before anything is waited for."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // SHAPE.GROUP
    n = tl.arange(0, TILE)
    block_at = row * N
    needs_at = needs + block_at
    summary_at = tier.summary + group * N * R.SUMMARY_FIELDS
    first = _load_blocks(scores, summary_at, block_at, n, n < N)
    moved = tl.sum(query_norms(q, q_strides, b, head, scale, 1, SHAPE), 0)
    length, low = row_span(rows.lengths, rows.start, b, S, STEPS.length, STEPS.start)
    blocks = quantized_blocks(tier.progress, b, length, low, SHAPE.BLOCK)
    norm = head_norm(splits.lse, row, pieces, SPLITS)
    out = merge_head(merged, splits, row, pieces, norm, SHAPE.D, SHAPE.DP)
    size = tl.sqrt(tl.sum(out * out, 0))
    head_at = head_lse + row * R.HEAD_FIELDS
    tl.store(head_at + R.HEAD_LSE, norm)
    tl.store(head_at + R.HEAD_REST_LSE, tl.load(splits.lse + row * pieces))

    budget = tolerance * size * R.NEED_SHARE
    factor = 1 / tl.maximum(budget, 1e-30)
    share = _shares(first, n < blocks, norm, size, moved, factor)
    score = tl.log2(share + R.LOG_FLOOR)
    tl.store(needs_at + n, score, mask=n < blocks)
    left = tl.sum(share, 0)
    x, found = left, blocks <= TILE
    if found:
        x, found = search_few(share, tl.where(n < blocks, score, float("-inf")), most)
    if not found:
        total = tl.zeros([TILE], tl.float32)
        for start in range(TILE, blocks, TILE):
            j = start + n
            seen = _load_blocks(scores, summary_at, block_at, j, j < blocks)
            share = _shares(seen, j < blocks, norm, size, moved, factor)
            total += share
            tl.store(needs_at + j, tl.log2(share + R.LOG_FLOOR), mask=j < blocks)
        left += tl.sum(total, 0)
        tl.debug_barrier()  # the search reads what other warps have written
        one = tl.arange(0, 1)
        x = search(
            logs_at=needs_at + one * 0,
            summary_at=summary_at,
            norm=one * 0.0,
            rest_mass=one * 0.0 + (1 - left),
            coverage=one * 0.0,
            least=0,
            most=most,
            blocks=blocks,
            in_group=one >= 0,
            GP=1,
            TILE=TILE,
            HELD=HELD,
            BUDGET=False,
            COVERS=True,
        )
    hopeless = ~((norm > float("-inf")) & (budget > 0) & (budget < float("inf")))
    tl.store(head_at + R.HEAD_NEED, tl.where(hopeless, float("inf"), x))
