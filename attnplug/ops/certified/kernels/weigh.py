"""The Triton kernels of `certified_attention` that merge what the pass has left of each head, and
say what each needs: how much its bound, E_round included, gains by reading each block exactly, and
from which gain on blocks must be read for the layer to meet the tolerance. To the base 2.

A program has one head, so that a block's share and the search for the threshold are one vector in
registers. What a head may add to the layer's error depends on the outputs of all heads of the row,
which is why they are merged by a kernel of their own. `choose_blocks` promotes what any head of the
group needs.
"""

from attnplug.ops.certified.kernels.rounding import (
    left_behind,
    lost_by_sums,
    lost_by_vanishing,
    reads_off,
)
from attnplug.ops.certified.kernels.search import search, search_few
from attnplug.ops.certified.kernels.select import (
    apart,
    four,
    head_norm,
    merge_head,
    query_norms,
    weight_change,
)
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


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
def _hidden_norm(mass, root, wide, shown):
    """`reference._hidden_norm`."""
    spread = 2 * (mass - root * root / tl.maximum(mass, R.LOG_FLOOR)) * wide
    return tl.maximum(tl.minimum(spread, mass * (wide - shown)), 0.0) * R.NORM_SHARE


@triton.jit
def _shares(seen, there, norm, output, factor, rates):
    """`reference._shares` of some blocks: (share, gain, hidden norms). `output` is (its norm, what
    the norms of the pass's outputs come to, the query's norm), `factor` is 1 / limit, and `rates`
    is what E_round counts: (of weighted norms, besides of those that are read, `reads_off`)."""
    log, square, delta, noise, eta, nu, of_keys, of_values = seen
    size, shown, moved = output
    sums, reads, off = rates
    mass = tl.exp2(log - norm)
    root = tl.exp2(square * 0.5 - norm) + R.SQUARE_FLOOR
    change, under = weight_change(mass, root, delta, noise, of_keys * moved)
    hidden = _hidden_norm(mass, root, nu + eta, shown)
    adds = change * (nu + size) + tl.minimum(mass * eta, root * of_values)
    adds += (mass * (nu + eta) - hidden) * sums
    share = adds * factor + under
    share = tl.where(share < R.MOST_NEEDED, share, R.MOST_NEEDED)  # so is a NaN
    gain = share - ((hidden + mass * shown) * reads + mass * size * off) * factor
    gain = tl.where(there & (gain > 0), gain, 0.0)
    return tl.where(there, share, 0.0), gain, tl.where(there, hidden, 0.0)


@triton.jit
def merge_heads(
    splits,
    merged,
    head_sums,
    pieces,
    SHAPE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the `pieces` of the first pass of one head into `merged` and `head_sums`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: what is next reads of the pass without a wait
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    norm = head_norm(splits.lse, row, pieces, SPLITS)
    out, shown = merge_head(merged, splits, row, pieces, norm, SHAPE.D, SHAPE.DP)
    at = head_sums + row * R.HEAD_FIELDS
    tl.store(at + R.HEAD_LSE, norm)
    tl.store(at + R.HEAD_REST_LSE, tl.load(splits.lse + row * pieces))
    tl.store(at + R.HEAD_SIZE, tl.sqrt(tl.sum(out * out, 0)))
    tl.store(at + R.HEAD_SHOWN, shown)


@triton.jit
def _limit(head_sums, first, heads, size, tolerance, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """`reference.limits` of a head whose output's norm is `size`, of a row whose heads begin at
    `first`."""
    h = tl.arange(0, HEADS)
    at = head_sums + (first + h) * R.HEAD_FIELDS + R.HEAD_SIZE
    sizes = tl.load(at, mask=h < heads, other=0.0)
    whole = tl.sum(tl.where(sizes < float("inf"), sizes * sizes, 0.0), 0)
    part = R.OWN_PART * size * size + (1 - R.OWN_PART) * whole / heads
    SHARE: tl.constexpr = R.SHARED_NEED if GROUP >= R.SHARING else R.NEED_SHARE
    return SHARE * tolerance / (1 + tolerance) * tl.sqrt(part)


@triton.jit
def weigh_heads(
    q,
    tier,
    rows,
    scores,
    head_sums,
    needs,
    rest_norms,
    scale,
    cap,
    tolerance,
    unit_p,
    unit,
    most,
    N,
    pieces,
    kv_heads,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Leave in `needs` the log of what one head's bound gains by reading each block, as a share of
    what it may be. And in `head_sums` the threshold: with the blocks from it on read, the bound is
    no more than that. It is infinity where no blocks are enough, as such a head is likely to be
    recomputed, whatever is read. Where TILE has room for all N blocks, they are loaded before
    anything is waited for. `merge_heads` runs beside all that does not need what it leaves: it lets
    this kernel start when the pass has ended."""
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // SHAPE.GROUP
    n = tl.arange(0, TILE)
    block_at = row * N
    needs_at = needs + block_at
    summary_at = tier.summary + group * N * R.SUMMARY_FIELDS
    first = _load_blocks(scores, summary_at, block_at, n, n < N)
    moved = tl.sum(query_norms(q, b, head, scale, 1, SHAPE), 0)
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(tier.progress, b, length, low, SHAPE.BLOCK)
    noise = tl.where(n < blocks, first[3], 0.0)
    wide = tl.where(n < blocks, first[4] + first[5], 0.0)
    for start in range(TILE, blocks, TILE):
        seen = _load_blocks(scores, summary_at, block_at, start + n, start + n < blocks)
        noise = tl.maximum(noise, seen[3])
        wide = tl.maximum(wide, seen[4] + seen[5])
    noise, wide = tl.split(tl.max(tl.join(noise, wide), 0))
    rest_at = rest_norms + row * R.REST_FIELDS
    rest_norm = tl.load(rest_at + R.REST_NORM)
    wide = tl.maximum(wide, tl.load(rest_at + R.REST_WIDEST))
    off = reads_off(noise, tl.load(rest_at + R.REST_REACH), cap, SHAPE.D)
    longest = blocks // (pieces - 1) + 1
    sums = lost_by_sums(longest, pieces - 1, unit_p, SHAPE.BLOCK)
    # Of the pass. What vanishes of promoted blocks is little, and NEED_SHARE has room for it.
    vanishing = lost_by_vanishing(longest, unit_p, SHAPE.BLOCK) * wide

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head_at = head_sums + row * R.HEAD_FIELDS
    norm = tl.load(head_at + R.HEAD_LSE)
    rest = tl.load(head_at + R.HEAD_REST_LSE)
    size = tl.load(head_at + R.HEAD_SIZE)
    shown = tl.load(head_at + R.HEAD_SHOWN)
    heads = tl.num_programs(0)
    limit = _limit(head_sums, b * heads, heads, size, tolerance, HEADS, SHAPE.GROUP)
    factor = 1 / tl.maximum(limit, 1e-30)
    output = (size, shown, moved)
    rates = (sums, left_behind(noise, cap, SHAPE.D) + off, off)
    share, gain, hidden = _shares(first, n < blocks, norm, output, factor, rates)
    score = tl.where(n < blocks, tl.log2(gain + R.LOG_FLOOR), float("-inf"))
    tl.store(needs_at + n, score, mask=n < blocks)
    total, gains = share, gain
    for start in range(TILE, blocks, TILE):
        j = start + n
        seen = _load_blocks(scores, summary_at, block_at, j, j < blocks)
        share_j, gain_j, hidden_j = _shares(seen, j < blocks, norm, output, factor, rates)
        tl.store(needs_at + j, tl.log2(gain_j + R.LOG_FLOOR), mask=j < blocks)
        total += share_j
        gains += gain_j
        hidden += hidden_j
    left, gains, hidden, _ = apart(tl.sum(four(total, gains, hidden, hidden), 0))
    rest_mass = tl.exp2(rest - norm)
    norms = rest_norm * rest_mass
    around = (shown + hidden + norms) * sums + unit * size + vanishing + R.ROUND_FLOOR
    left += (around + off * (norms + rest_mass * size)) * factor
    x, found = left, blocks <= TILE
    if found:
        x, found = search_few(gain, score, left, most)
    if not found:
        tl.debug_barrier()  # the search reads what other warps have written
        one = tl.arange(0, 1)
        x = search(
            logs_at=needs_at + one * 0,
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
            COVERS=True,
        )
    hopeful = (norm > float("-inf")) & (size < float("inf")) & (left - gains <= 1)
    hopeful = hopeful & (limit > 0) & (limit < float("inf"))
    tl.store(head_at + R.HEAD_NEED, tl.where(hopeful, x, float("inf")))
