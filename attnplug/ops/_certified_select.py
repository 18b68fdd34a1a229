"""The Triton kernel of `certified_attention` that chooses what is read exactly, and sums up what
the bounds need of the rest. To the base 2; `_certified_reference` is the specification."""

import triton
import triton.language as tl

from attnplug.ops._certified_attend import quantized_blocks
from attnplug.ops.block_bounds import row_span


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
def _masses(logs_at, summary_at, norm, j, blocks, in_group, BUDGET: tl.constexpr):
    """(score [TILE], mass [GP, TILE]) of some blocks; for the value budget both times eta."""
    there = j < blocks
    mask = in_group[:, None] & there[None, :]
    mass = tl.exp2(tl.load(logs_at + j[None, :], mask=mask, other=float("-inf")) - norm[:, None])
    score = tl.log2(tl.max(mass, 0) + 1e-37)
    if BUDGET:
        eta = tl.load(summary_at + j * 2, mask=there, other=0.0)
        score += tl.log2(eta + 1e-37)
        mass = mass * eta[None, :]
    return tl.where(there, score, float("-inf")), mass


@triton.jit
def _search(
    logs_at, summary_at, norm, own, coverage, least, most, target, blocks, in_group,
    GP: tl.constexpr, TILE: tl.constexpr, BUDGET: tl.constexpr,
):  # fmt: skip
    """`_certified_reference._search`."""
    i = tl.arange(0, TILE)
    way = tl.arange(0, 8)
    low = tl.min(norm * 0, 0) - 40.0
    high = low + 41.0
    below = low > 0  # whether `low` itself was found to take at most `most`
    for _ in range(4):
        step = (high - low) / 9
        count = tl.zeros([8], tl.int32)
        held = tl.zeros([GP, 8], tl.float32)
        lowest = 0
        for first in range(0, blocks, TILE):
            score, mass = _masses(
                logs_at, summary_at, norm, first + i, blocks, in_group, BUDGET
            )  # fmt: skip
            lowest += tl.sum((score >= low).to(tl.int32), 0)
            for w in tl.static_range(8):
                keep = score >= low + step * (w + 1)
                here = tl.sum(keep.to(tl.int32), 0)
                count += tl.where(way == w, here, 0)
                kept = tl.sum(tl.where(keep[None, :], mass, 0.0), 1)
                held += tl.where((way == w)[None, :], kept[:, None], 0.0)
        short = ~(held + own[:, None] >= coverage[:, None]) & in_group[:, None]
        some = tl.sum(short.to(tl.int32), 0) > 0
        if target > 0:
            enough = count >= target
        else:
            enough = (count >= least) & ~some
        passed = tl.sum((enough | (count >= most)).to(tl.int32), 0)
        at = tl.sum(tl.where(way == passed - 1, count, 0), 0)
        at = tl.where(passed == 0, lowest, at)
        below = at <= most
        low, high = low + step * passed, low + step * (passed + 1)
    return tl.where(below, low, high)


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
def _sums(
    logs_at, delta_at, noise_at, summary_at, chosen_at, norm, x, worth_x, blocks, in_group, row,
    length, explore, C, GP: tl.constexpr, TILE: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """One sweep over the blocks with what is promoted left out of the sums: over, under, plain,
    grown, mass, worst, reach and the largest deviation, noise and width. FINAL: values and spot
    checks are promoted too, the list is written, and how many are in it."""
    i = tl.arange(0, TILE)
    over = tl.zeros([GP], tl.float32)
    under = tl.zeros([GP], tl.float32)
    plain = tl.zeros([GP], tl.float32)
    grown = tl.zeros([GP], tl.float32)
    left = tl.zeros([GP], tl.float32)
    worst = tl.zeros([GP], tl.float32)
    odd = tl.zeros([GP], tl.int32)
    reach = tl.full([GP], float("-inf"), tl.float32)
    largest = tl.zeros([GP], tl.float32)
    loudest = tl.zeros([GP], tl.float32)
    widest = tl.zeros([TILE], tl.float32)
    taken = 0
    whole = 0
    worthy = 0
    for first in range(0, blocks, TILE):
        j = first + i
        there = j < blocks
        mask = in_group[:, None] & there[None, :]
        log = tl.load(logs_at + j[None, :], mask=mask, other=float("-inf"))
        mass = tl.exp2(log - norm[:, None])
        deviation = tl.load(delta_at + j[None, :], mask=mask, other=0.0)
        eta = tl.load(summary_at + j * 2, mask=there, other=0.0)
        nu = tl.load(summary_at + j * 2 + 1, mask=there, other=0.0)
        score = tl.log2(tl.max(mass, 0) + 1e-37)
        keys = there & (score >= x)
        if FINAL:
            values = there & (score + tl.log2(eta + 1e-37) >= worth_x)
            worthy += tl.sum(values.to(tl.int32), 0)
            values = values | (there & _explored(j, row, length, explore))
            keys = keys | values
            at = taken + tl.cumsum(keys.to(tl.int32), 0) - 1
            tl.store(chosen_at + at, j * 2 + values.to(tl.int32), mask=keys & (at < C))
            whole += tl.sum(values.to(tl.int32), 0)
            quiet = tl.load(noise_at + j[None, :], mask=mask, other=0.0)
            loudest = tl.maximum(loudest, tl.max(quiet, 1))
        taken += tl.sum(keys.to(tl.int32), 0)
        mass = tl.where(keys[None, :], 0.0, mass)
        up = tl.exp2(deviation)
        over += tl.sum(mass * (up - 1 + 1.9073486328125e-06), 1)
        under += tl.sum(mass * (1 - tl.exp2(-deviation) + 1.9073486328125e-06), 1)
        plain += tl.sum(mass * nu[None, :], 1)
        grown += tl.sum(mass * (nu[None, :] * up), 1)
        left += tl.sum(mass, 1)
        worst += tl.sum(mass * eta[None, :], 1)
        high = tl.where(keys[None, :], float("-inf"), log + deviation)
        odd += tl.sum((high != high).to(tl.int32), 1)
        reach = tl.maximum(reach, tl.max(high, 1))
        largest = tl.maximum(largest, tl.max(deviation, 1))
        widest = tl.maximum(widest, eta + nu)
    reach = tl.where(odd > 0, float("nan"), reach)
    return (
        over, under, plain, grown, left, worst, reach, largest, loudest, tl.max(widest, 0),
        taken, whole, worthy,
    )  # fmt: skip


@triton.jit
def select(
    logs, delta, noise, summary, progress, lengths, start, partial_lse, chosen, counts, tails,
    coverage, least, most, v_tol, budget, key_tolerance, explore, S, N, C, splits,
    GROUP: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, EXPANDS: tl.constexpr, BUDGETED: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """Choose what one KV head reads exactly, and sum up what is left."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    group = b * tl.num_programs(0) + h
    g = tl.arange(0, GP)
    in_group = g < GROUP
    row = group * GROUP + g
    i = tl.arange(0, SPLITS)
    mask = in_group[:, None] & (i < splits)[None, :]
    lse_at = partial_lse + row[:, None] * splits + i[None, :]
    lse = tl.load(lse_at, mask=mask, other=float("-inf"))
    top = tl.max(lse, 1)
    odd = tl.sum((lse != lse).to(tl.int32), 1) > 0  # a maximum may drop a NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    norm = shift + tl.log2(tl.sum(tl.exp2(lse - shift[:, None]), 1))
    norm = tl.where(odd, float("nan"), norm)
    tail = tl.sum(tl.where((i == 0)[None, :], lse, 0.0), 1)  # split 0 read the originals
    empty = norm == float("-inf")
    base = tl.where(empty, 0.0, norm)
    own = tl.where(empty, 1.0, tl.exp2(tail - base))
    logs_at = logs + row[:, None] * N
    delta_at = delta + row[:, None] * N
    noise_at = noise + row[:, None] * N
    summary_at = summary + group * N * 2
    goal = tl.zeros([GP], tl.float32) + coverage
    x = _search(
        logs_at, summary_at, base, own, goal, least, most, 0, blocks, in_group, GP, TILE, False
    )
    climbed = 0
    if EXPANDS:
        over, under, plain, grown, left, _, _, _, _, widest, taken, _, _ = _sums(
            logs_at, delta_at, noise_at, summary_at, chosen, base, x, 0.0, blocks, in_group, group,
            length, 0.0, C, GP, TILE, False,
        )  # fmt: skip
        exact = (1 - tl.minimum(left, 1.0)) * widest
        bound = key_bound(over, under, plain, grown, left, exact)
        loose = tl.sum((in_group & ~(bound <= key_tolerance)).to(tl.int32), 0)
        if loose > 0:
            climbed = 1
            x = _search(
                logs_at, summary_at, base, own, goal, least, 2 * most, 2 * tl.maximum(taken, least),
                blocks, in_group, GP, TILE, False,
            )  # fmt: skip
    worth_x = tl.log2(v_tol + 1e-37)
    if BUDGETED:
        total = tl.zeros([GP], tl.float32)
        for first in range(0, blocks, TILE):
            j = first + tl.arange(0, TILE)
            total += tl.sum(_masses(logs_at, summary_at, base, j, blocks, in_group, True)[1], 1)
        rest = 0.9375 * budget - total
        budget_x = _search(
            logs_at, summary_at, base, rest, tl.zeros([GP], tl.float32), 0, blocks + 1, 0, blocks,
            in_group, GP, TILE, True,
        )  # fmt: skip
        worth_x = tl.minimum(worth_x, budget_x)
    (
        over, under, plain, grown, left, worst, reach, largest, loudest, widest, taken, whole,
        worthy,
    ) = _sums(
        logs_at, delta_at, noise_at, summary_at, chosen + group * C, base, x, worth_x, blocks,
        in_group, group, length, explore, C, GP, TILE, True,
    )  # fmt: skip
    climbed += tl.where(worthy > 0, 2, 0)
    tl.store(counts + group * 2, taken)
    tl.store(counts + group * 2 + 1, whole * 4 + climbed)
    out = tails + row * 12
    tl.store(out, over, mask=in_group)
    tl.store(out + 1, under, mask=in_group)
    tl.store(out + 2, plain, mask=in_group)
    tl.store(out + 3, grown, mask=in_group)
    tl.store(out + 4, left, mask=in_group)
    tl.store(out + 5, worst, mask=in_group)
    tl.store(out + 6, reach, mask=in_group)
    tl.store(out + 7, largest, mask=in_group)
    tl.store(out + 8, loudest, mask=in_group)
    tl.store(out + 9, tl.zeros([GP], tl.float32) + widest, mask=in_group)
    tl.store(out + 10, norm, mask=in_group)
    tl.store(out + 11, tail, mask=in_group)
