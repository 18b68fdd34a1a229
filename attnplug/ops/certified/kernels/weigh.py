"""The Triton kernel of `certified_attention` that says what each head needs: how much every
quantized block would add to its bound, and from which share on blocks must be read exactly for the
bound to meet the tolerance. To the base 2.

A program has one head, so that a block's share and the search for the threshold are one vector in
registers. `choose_blocks` promotes what any head of the group needs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.search import search
from attnplug.ops.certified.kernels.select import merge_head, query_norms, weight_change
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span


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
    R.MOST_NEEDED. And in `head_lse` the threshold: blocks below it add less than the tolerance."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // SHAPE.GROUP
    length, low = row_span(rows.lengths, rows.start, b, S, STEPS.length, STEPS.start)
    blocks = quantized_blocks(tier.progress, b, length, low, SHAPE.BLOCK)
    out = merge_head(merged, splits, row, pieces, SHAPE.D, SHAPE.DP, SPLITS)
    size = tl.sqrt(tl.sum(out * out, 0))
    i = tl.arange(0, SPLITS)
    lse = tl.load(splits.lse + row * pieces + i, mask=i < pieces, other=float("-inf"))
    top = tl.max(lse, 0)
    has_nan = tl.sum((lse != lse).to(tl.int32), 0) > 0  # a maximum may drop a NaN
    norm = tl.where(top == float("-inf"), 0.0, top)
    norm += tl.log2(tl.sum(tl.exp2(lse - norm), 0))
    norm = tl.where(has_nan, float("nan"), norm)
    head_at = head_lse + row * R.HEAD_FIELDS
    tl.store(head_at + R.HEAD_LSE, norm)
    tl.store(head_at + R.HEAD_REST_LSE, tl.load(splits.lse + row * pieces))

    one = tl.arange(0, 1)
    moved = tl.sum(query_norms(q, q_strides, b, head, scale, 1, SHAPE), 0)
    budget = tolerance * size * R.NEED_SHARE
    factor = 1 / tl.maximum(budget, 1e-30)
    n = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    block_at = row * N
    needs_at = needs + block_at
    summary_at = tier.summary + group * N * R.SUMMARY_FIELDS
    for first in range(0, blocks, TILE):
        j = first + n
        there = j < blocks
        log = tl.load(scores.logs + block_at + j, mask=there, other=float("-inf"))
        square = tl.load(scores.squares + block_at + j, mask=there, other=float("-inf"))
        delta = tl.load(scores.delta + block_at + j, mask=there, other=0.0)
        noise = tl.load(scores.noise + block_at + j, mask=there, other=0.0)
        at = summary_at + j * R.SUMMARY_FIELDS
        eta = tl.load(at + R.ETA, mask=there, other=0.0)
        nu = tl.load(at + R.NU, mask=there, other=0.0)
        of_keys = tl.load(at + R.KEY_SPECTRUM, mask=there, other=0.0)
        of_values = tl.load(at + R.VALUE_SPECTRUM, mask=there, other=0.0)
        mass = tl.exp2(log - norm)
        root = tl.exp2(square * 0.5 - norm) + R.SQUARE_FLOOR
        change, _under = weight_change(mass, root, delta, noise, of_keys * moved)
        adds = change * (nu + size) + tl.minimum(mass * eta, root * of_values)
        share = adds * factor
        share = tl.where(share < R.MOST_NEEDED, share, R.MOST_NEEDED)  # so is a NaN
        total += tl.where(there, share, 0.0)
        tl.store(needs_at + j, tl.log2(share + R.LOG_FLOOR), mask=there)
    tl.debug_barrier()  # the search reads what other warps have written
    left = tl.sum(total, 0)
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
