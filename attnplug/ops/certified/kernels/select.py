"""How `certified_attention` chooses on the device what is read exactly, and what the bounds need of
the rest. To the base 2; `_certified_reference` is the specification."""

import triton
import triton.language as tl

from attnplug.ops.certified.kernels.search import log_masses, masses, search, search_few


@triton.jit
def _explored(j, row, length, share):
    """`_certified_reference.explored`."""
    x = j.to(tl.int64) * 1103515245 + row.to(tl.int64) * 747796405
    x = (x + length.to(tl.int64) * 1664525 + 12345) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 739982445) & 0xFFFFFFFF
    x = x ^ (x >> 12)
    x = (x * 695872825) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    return (x >> 8).to(tl.float32) < share * 16777216.0


@triton.jit
def names_sum(j, values, keys):
    """One number that tells sets of promoted blocks, and which of them are read whole, apart."""
    name = j * 4 + 1 + values.to(tl.int32)
    return tl.sum(tl.where(keys, (name * name + 7) * 747796405, 0), 0)


@triton.jit
def key_bound(over, under, plain, grown, mass, exact):
    """The tight bound of `_certified_reference.key_bound`."""
    up = over / (1 + over)
    down = under / (1 - under)
    tight = exact * tl.maximum(up, down) + grown / (1 - under) - plain
    tight += tl.maximum(0.0, up - down) * plain + plain * 9.5367431640625e-07
    tight = tl.where(under < 1, tight * 1.0009765625, float("inf"))
    return tl.where(mass == 0, 0.0, tight)


@triton.jit
def _four(a, b, c, d):
    """[.., 2, 2] of four tensors; `_apart` takes them apart again."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _apart(x):
    """a, b, c, d of `_four(a, b, c, d)`."""
    first, second = tl.split(x)
    a, c = tl.split(first)
    b, d = tl.split(second)
    return a, b, c, d


@triton.jit
def marked(score, eta, x, worth_x, there, j, row, length, explore, EXPLORES: tl.constexpr):
    """Which blocks are read exactly: keys, values too, values for their error's sake, and both for
    nothing but a spot check."""
    worthy = there & (score + tl.log2(eta + 1e-37) >= worth_x)
    values = worthy
    if EXPLORES:
        values = worthy | (there & _explored(j, row, length, explore))
    keys = there & (score >= x)
    return keys | values, values, worthy, values & ~(keys | worthy)


@triton.jit
def block_sums(log, deviation, quiet, eta, nu, mass, keys):
    """What the bounds need of some blocks [n, GP], promoted ones (`keys`) left out of the sums:
    over, under, plain, grown, mass, worst, reach and the largest deviation, noise and width."""
    mass = tl.where(keys[:, None], 0.0, mass)
    up = tl.exp2(deviation)
    high = tl.where(keys[:, None], float("-inf"), log + deviation)
    heavy = mass * nu[:, None]
    over, under, plain, grown = _apart(tl.sum(_four(
        mass * (up - 1 + 1.9073486328125e-06),
        mass * (1 - tl.exp2(-deviation) + 1.9073486328125e-06), heavy, heavy * up,
    ), 0))  # fmt: skip
    odd = tl.where(high != high, 1.0, 0.0)
    left, worst, odd, _ = _apart(tl.sum(_four(mass, mass * eta[:, None], odd, odd), 0))
    wide = (eta + nu)[:, None] + mass * 0
    reach, largest, loudest, widest = _apart(tl.max(_four(high, deviation, quiet, wide), 0))
    reach = tl.where(odd > 0, float("nan"), reach)
    return over, under, plain, grown, left, worst, reach, largest, loudest, widest


@triton.jit
def _estimate(
    logs_at, delta_at, summary_at, norm, x, blocks, in_group, GP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The tight bound of each head if blocks with score >= x are promoted; how many these are."""
    i = tl.arange(0, TILE)
    over = tl.zeros([GP], tl.float32)
    under, plain, grown, left, widest = over, over, over, over, over
    taken = 0
    for first in range(0, blocks, TILE):
        j = first + i
        there = j < blocks
        mask = there[:, None] & in_group[None, :]
        log = log_masses(logs_at, j, blocks, in_group)
        score, mass = masses(log, summary_at, norm, j, blocks, False)
        deviation = tl.load(delta_at[None, :] + j[:, None], mask=mask, other=0.0)
        eta = tl.load(summary_at + j * 2, mask=there, other=0.0)
        nu = tl.load(summary_at + j * 2 + 1, mask=there, other=0.0)
        keys = there & (score >= x)
        taken += tl.sum(keys.to(tl.int32), 0)
        a, b, c, d, e, _, _, _, _, f = block_sums(
            mass, deviation, deviation, eta, nu, mass, keys
        )  # fmt: skip
        over += a
        under += b
        plain += c
        grown += d
        left += e
        widest = tl.maximum(widest, f)
    exact = (1 - tl.minimum(left, 1.0)) * widest
    return key_bound(over, under, plain, grown, left, exact), taken


@triton.jit
def merge_head(
    merged, partial, partial_lse, row, splits, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The sum of one head's partial results, relative to their log-sum-exp."""
    i = tl.arange(0, SPLITS)
    lse = tl.load(partial_lse + row * splits + i, mask=i < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    odd = tl.sum((lse != lse).to(tl.int32), 0) > 0  # a maximum may drop a NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    shift += tl.where(odd, float("nan"), tl.log2(tl.sum(tl.exp2(lse - shift), 0)))
    shift = tl.where(top == float("-inf"), 0.0, shift)
    d = tl.arange(0, DP)
    p = tl.arange(0, 32)
    acc = tl.zeros([DP], tl.float32)
    for first in tl.range(0, splits, 32, num_stages=3):
        there = first + p < splits
        one = tl.load(partial_lse + row * splits + first + p, mask=there, other=float("-inf"))
        part_at = partial + (row * splits + first + p)[:, None] * D + d[None, :]
        part = tl.load(part_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(one - shift)[:, None], 0)
    tl.store(merged + row * D + d, acc, mask=d < D)


@triton.jit
def norms(partial_lse, row, in_group, splits, GP: tl.constexpr, SPLITS: tl.constexpr):
    """Log-sum-exps of the heads [GP] over all partial results and over what is not quantized."""
    i = tl.arange(0, SPLITS)
    mask = (i < splits)[:, None] & in_group[None, :]
    lse = tl.load(
        partial_lse + row[None, :] * splits + i[:, None], mask=mask, other=float("-inf")
    )  # fmt: skip
    tail = tl.load(partial_lse + row * splits, mask=in_group, other=float("-inf"))
    top = tl.max(lse, 0)
    odd = tl.max((lse != lse).to(tl.int32), 0) > 0  # a maximum may drop a NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    norm = shift + tl.log2(tl.sum(tl.exp2(lse - shift[None, :]), 0))
    return tl.where(odd, float("nan"), norm), tail


@triton.jit
def choose(
    head_at, N, logs_at, delta_at, summary_at, base, own, coverage, least, most, v_tol, budget,
    key_tolerance, blocks, in_group,
    GROUP: tl.constexpr, GP: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
    FEW: tl.constexpr, COVERS: tl.constexpr, EXPANDS: tl.constexpr, BUDGETED: tl.constexpr,
):  # fmt: skip
    """Scores from which on keys and values are read exactly, whether rung 1 was climbed, and where
    FEW are promoted all blocks' scores and their order. The log-masses lie at `head_at`, N for each
    head; `logs_at` is where each head's begin. TILE and HELD as in `search`."""
    goal = tl.zeros([GP], tl.float32) + coverage
    if FEW:
        x, scores, order = search_few(head_at, N, base, least, most, blocks, GROUP, GP, TILE)
    else:
        x = search(
            logs_at, summary_at, base, own, goal, least, most, 0, blocks, in_group, GP, TILE, HELD,
            False, COVERS,
        )  # fmt: skip
        scores, order = x, x
    climbed = 0
    if EXPANDS:
        bound, taken = _estimate(
            logs_at, delta_at, summary_at, base, x, blocks, in_group, GP, TILE
        )  # fmt: skip
        loose = tl.sum((in_group & ~(bound <= key_tolerance)).to(tl.int32), 0)
        if loose > 0:
            climbed = 1
            x = search(
                logs_at, summary_at, base, own, goal, least, 2 * most, 2 * tl.maximum(taken, least),
                blocks, in_group, GP, TILE, HELD, False, COVERS,
            )  # fmt: skip
    worth_x = tl.log2(v_tol + 1e-37)
    if BUDGETED:
        total = tl.zeros([GP], tl.float32)
        for first in range(0, blocks, TILE):
            j = first + tl.arange(0, TILE)
            log = log_masses(logs_at, j, blocks, in_group)
            total += tl.sum(masses(log, summary_at, base, j, blocks, True)[1], 0)
        rest = 0.9375 * budget - total
        budget_x = search(
            logs_at, summary_at, base, rest, tl.zeros([GP], tl.float32), 0, blocks + 1, 0, blocks,
            in_group, GP, TILE, HELD, True, True,
        )  # fmt: skip
        worth_x = tl.minimum(worth_x, budget_x)
    return x, worth_x, climbed, scores, order
