"""The Triton kernels of `certified_attention` that decide: which blocks are read exactly, what the
bounds are and which heads are recomputed; and the launcher of all seven. To the base 2, as in
`_certified_attend`; `_certified_reference` is the specification."""

import torch
import triton
import triton.language as tl

from attnplug.ops import _certified_attend as kernels
from attnplug.ops._certified_attend import quantized_blocks
from attnplug.ops._define import mask_bytes, row_step
from attnplug.ops._splits import LOG2E, machine
from attnplug.ops.block_bounds import row_span

INF = float("inf")


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
def _key_bound(over, under, plain, grown, mass, exact):
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
def _select(
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
        bound = _key_bound(over, under, plain, grown, left, exact)
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


@triton.jit
def _ranks(rough, exact, count, reach, C: tl.constexpr, DEPTH: tl.constexpr):
    """`_certified_reference.ranks_agree`, of the first `count` of C slots in ascending order."""
    i = tl.arange(0, C)
    agree = count >= 0
    least = float("inf")
    for step in tl.static_range(DEPTH):
        if step < count:
            top_rough = tl.max(rough, 0)
            top_exact = tl.max(exact, 0)
            best_rough = tl.min(tl.where(rough == top_rough, i, C), 0)
            best_exact = tl.min(tl.where(exact == top_exact, i, C), 0)
            agree = agree & (best_rough == best_exact)
            least = top_exact
            rough = tl.where(i == best_rough, float("-inf"), rough)
            exact = tl.where(i == best_exact, float("-inf"), exact)
    safe = tl.where(count < DEPTH, ~(reach > float("-inf")), ~(reach >= least))
    return agree, safe


@triton.jit
def _finish(
    out, lse, bounds, rungs, telemetry, sinks, summary, progress, lengths, start, partial,
    partial_lse, extremes, delta_partial, delta_top, slots, chosen, counts, tails, flags,
    budget, tolerance, unit_p, unit, S, N, C, splits, pieces, kv_heads,
    telemetry_rows, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, DEPTH: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """Merge one head's pieces, bound its error, and say whether it must be recomputed."""
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // GROUP
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    at = tails + row * 12
    over, under = tl.load(at), tl.load(at + 1)
    plain, grown = tl.load(at + 2), tl.load(at + 3)
    left, worst = tl.load(at + 4), tl.load(at + 5)
    reach, largest = tl.load(at + 6), tl.load(at + 7)
    noise, widest = tl.load(at + 8), tl.load(at + 9)
    norm, tail = tl.load(at + 10), tl.load(at + 11)
    taken = tl.load(counts + group * 2)
    packed = tl.load(counts + group * 2 + 1)
    count = tl.minimum(taken, C)
    i = tl.arange(0, SLOTS)
    listed = i < count
    name = tl.load(chosen + group * C + i, mask=listed, other=0)
    rough = tl.load(slots + row * (2 * C) + i, mask=listed, other=float("-inf"))
    exact = tl.load(slots + row * (2 * C) + C + i, mask=listed, other=float("-inf"))
    place = summary + (group * N + name // 2) * 2
    eta = tl.load(place, mask=listed, other=0.0)
    nu = tl.load(place + 1, mask=listed, other=0.0)

    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(tl.maximum(norm, tl.max(exact, 0)), tl.maximum(tail, sink))
    shift = tl.where(top == float("-inf"), 0.0, top)
    here = tl.where(norm == float("-inf"), 0.0, tl.exp2(norm - shift))
    weight = tl.exp2(exact - shift)
    seen = left * here + tl.exp2(tail - shift) + tl.sum(weight, 0)
    total = seen + tl.exp2(sink - shift)
    divisor = tl.where(total == 0, 1.0, total)
    d = tl.arange(0, DP)
    acc = tl.zeros([DP], tl.float32)
    p = tl.arange(0, 32)
    for first in range(0, splits, 32):
        there = first + p < splits
        part_lse = tl.load(partial_lse + row * splits + first + p, mask=there, other=float("-inf"))
        empty = part_lse == float("-inf")
        part_at = partial + (row * splits + first + p)[:, None] * D + d[None, :]
        part = tl.load(part_at, mask=(there & ~empty)[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(part_lse - shift)[:, None], 0)
    for first in range(0, pieces, 32):
        there = first + p < pieces
        part_top = tl.load(delta_top + row * pieces + first + p, mask=there, other=float("-inf"))
        empty = part_top == float("-inf")
        part_at = delta_partial + (row * pieces + first + p)[:, None] * D + d[None, :]
        part = tl.load(part_at, mask=(there & ~empty)[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(part_top - shift)[:, None], 0)
    acc = acc / divisor
    acc = tl.where(seen == 0, 0.0, acc)
    size = tl.sqrt(tl.sum(acc * acc, 0))
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty), mask=d < D)
    result = tl.where(seen == 0, float("-inf"), shift + tl.log2(tl.where(seen == 0, 1.0, seen)))
    tl.store(lse + row, result * 0.6931471805599453)

    ratio = here / divisor
    weight = weight / divisor
    rest = tl.exp2(tail - shift) / divisor
    held = tl.load(extremes + row * 3) * rest
    held += tl.sum(weight * tl.where(name % 2 > 0, nu, nu + eta), 0)
    key = _key_bound(over * ratio, under * ratio, plain * ratio, grown * ratio, left * ratio, held)
    value = worst * ratio + tl.sum(weight * tl.where(name % 2 > 0, 0.0, eta), 0)
    value = value * 1.0009765625
    growth = tl.exp2(2 * largest)
    paper = 2 * widest * growth * (left * ratio) * (growth - 1) * 1.0009765625
    paper = tl.where(left * ratio == 0, 0.0, paper)
    widest = tl.maximum(widest, tl.load(extremes + row * 3 + 1))
    quiet = tl.load(extremes + row * 3 + 2) * ((D + 16) * 4.76837158203125e-07)
    noise = tl.maximum(noise, quiet) * 0.6931471805599453
    steps = (blocks // (splits - 1) + 1) * (BLOCK // 16) + 64 + splits
    sums = 4 * unit_p * tl.maximum(ratio, 1.0) + (2 * steps) * 4.76837158203125e-07 * (1 + ratio)
    around = (widest * (sums + 2.02 * noise) + unit * size) * 1.0009765625 + 9.5367431640625e-07

    agree, safe = _ranks(rough, exact, count, reach, SLOTS, DEPTH)
    fits = key + value + around < float("inf")
    fits = fits & (key + value + around <= tolerance) & (value <= budget)
    rung = packed % 4
    rung |= tl.where(agree, 0, 16) | tl.where(safe, 0, 32)
    rung |= tl.where(fits | (blocks == 0), 0, 64) | tl.where(taken > C, 128, 0)
    rung |= tl.where(rung >= 16, 4, 0)
    wrong = tl.load(flags + b * 2) * 256 + tl.load(flags + b * 2 + 1) * 512
    rung |= wrong | tl.where(wrong > 0, 8, 0)
    again = (rung & 12) > 0
    tl.store(rungs + row, rung)
    at = bounds + row * 6
    tl.store(at, tl.where(again, 0.0, key))
    tl.store(at + 1, tl.where(again, 0.0, value))
    tl.store(at + 2, around)
    tl.store(at + 3, key)
    tl.store(at + 4, value)
    tl.store(at + 5, paper)
    if telemetry is not None:
        saved = ~again & ~(paper + value + around <= tolerance)
        _record(
            telemetry + (group * telemetry_rows + head % GROUP) * 16, rung, again,
            tl.where(again, 0.0, key), tl.where(again, 0.0, value), tl.where(again, 0.0, around),
            saved,
            tl.where(head % GROUP == 0, taken * BLOCK + length - low - blocks * BLOCK, 0),
            tl.where(head % GROUP == 0, packed // 4 * BLOCK + length - low - blocks * BLOCK, 0),
        )  # fmt: skip


@triton.jit
def _record(at, rung, again, key, value, around, saved, key_tokens, value_tokens):
    """Add one step to a head's telemetry, in the order of `TELEMETRY`."""
    f = tl.arange(0, 16)
    bit = tl.where(f == 1, 1, 0) + tl.where(f == 2, 2, 0) + tl.where(f == 3, 4, 0)
    bit += tl.where(f == 4, 8, 0) + tl.where(f == 5, 16, 0) + tl.where(f == 6, 32, 0)
    bit += tl.where(f == 7, 64, 0)
    step = tl.where((f == 0) | ((bit & rung) > 0), 1.0, 0.0).to(tl.float64)
    step += tl.where(f == 8, key, 0.0) + tl.where(f == 10, value, 0.0)
    step += tl.where((f == 13) & saved, 1.0, 0.0)
    step += tl.where(f == 14, key_tokens, 0) + tl.where(f == 15, value_tokens, 0)
    peak = tl.where(f == 9, key, 0.0) + tl.where(f == 11, value, 0.0)
    peak += tl.where(f == 12, around, 0.0)
    is_peak = (f == 9) | (f == 11) | (f == 12)
    old = tl.load(at + f)
    tl.debug_barrier()  # every warp loads and stores the same words
    new = tl.where(is_peak, tl.maximum(old, peak.to(tl.float64)), old + step)
    tl.store(at + f, new)


@triton.jit
def _replace(
    out, lse, bounds, rungs, sinks, lengths, start, partial, partial_lse, extremes, unit_p, unit,
    S, splits, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr,
):  # fmt: skip
    """Merge the exact pieces of a head that was recomputed; else nothing."""
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    if tl.load(rungs + row) & 12 == 0:
        return
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    p = tl.arange(0, SPLITS)
    there = p < splits
    part_lse = tl.load(partial_lse + row * splits + p, mask=there, other=float("-inf"))
    odd = tl.sum((part_lse != part_lse).to(tl.int32), 0) > 0
    empty = part_lse == float("-inf")
    top = tl.max(part_lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(part_lse - shift)
    seen = tl.sum(weight, 0)
    seen = tl.where(odd, float("nan"), seen)
    total = seen
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - shift)
    d = tl.arange(0, DP)
    acc = tl.zeros([DP], tl.float32)
    q = tl.arange(0, 32)
    for first in range(0, splits, 32):
        inside = first + q < splits
        one_lse = tl.load(partial_lse + row * splits + first + q, mask=inside, other=float("-inf"))
        part_at = partial + (row * splits + first + q)[:, None] * D + d[None, :]
        inside = inside & ~(one_lse == float("-inf"))
        part = tl.load(part_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(one_lse - shift)[:, None], 0)
    acc = acc / tl.where(total == 0, 1.0, total)
    acc = tl.where(seen == 0, 0.0, acc)
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty), mask=d < D)
    result = tl.where(seen == 0, float("-inf"), shift + tl.log2(tl.where(seen == 0, 1.0, seen)))
    tl.store(lse + row, result * 0.6931471805599453)
    at = extremes + (row * splits + p) * 2
    widest = tl.max(tl.load(at, mask=there, other=0.0), 0)
    noise = tl.max(tl.load(at + 1, mask=there & ~empty, other=0.0), 0)
    noise = noise * ((D + 16) * 4.76837158203125e-07 * 0.6931471805599453)
    sums = 2 * unit_p + ((length - low) // 16 + 64 + splits) * 4.76837158203125e-07
    size = tl.sqrt(tl.sum(acc * acc, 0))
    around = (widest * (sums + 2.02 * noise) + unit * size) * 1.0009765625 + 9.5367431640625e-07
    tl.store(bounds + row * 6 + 2, around)


def _types(q: torch.Tensor) -> tuple[tl.dtype, tl.dtype, int]:
    """(dtype of the products with codes, with values, parts of a float32 factor)."""
    if q.dtype == torch.float32:
        return tl.float32, tl.float32, 1
    # bf16 has the range of the scales; the interpreter cannot multiply it.
    return (tl.bfloat16 if q.is_cuda else tl.float32), tl.float16, 2


def capacity_for(blocks: int, k_max: int, explore: float) -> int:
    """Blocks that one KV head can read exactly in a step, of `blocks` in the cache: what rung 1
    may promote, as many again for their values, and the spot checks with room for chance."""
    return min(blocks, 4 * k_max + 32 + int(1.5 * explore * blocks))


def splits_for(batch: int, kv_heads: int, blocks: int, multiprocessors: int) -> int:
    """Programs a KV head: eight a multiprocessor hide the latency of the codes best."""
    return 1 + max(1, min(8 * multiprocessors // (batch * kv_heads), blocks))


def launch(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, check, progress, scale, block, coverage,
    k_min, k_max, v_tol, value_budget, key_tolerance, tolerance, ranking, explore, lengths, start,
    key_mask, softcap, sinks, telemetry, out, lse, bounds, rungs, splits=None, stages=3, warps=4,
    pieces=None, checked=True, only=None,
):  # fmt: skip
    """Run the kernels; tensors as in `certified_attention`, on a GPU or in Triton's interpreter."""
    batch, heads, _, width = q.shape
    kv_heads, size, blocks = k.shape[1], k.shape[2], check.shape[2]
    group, padded = heads // kv_heads, triton.next_power_of_2(width)
    rows = max(16, triton.next_power_of_2(group + 1))
    multiprocessors, _ = machine(q.device)
    splits = splits or splits_for(batch, kv_heads, blocks, multiprocessors)
    capacity = max(1, capacity_for(blocks, k_max, explore))
    pieces = pieces or max(1, min(2 * multiprocessors // (batch * kv_heads), capacity))
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    key_mask, meta = mask_bytes(key_mask), k_meta.view(torch.int16)
    qk, pv, parts = _types(q)
    half = v_codes.shape[4] // 16
    half_p = triton.next_power_of_2(half)
    two, cap = scale * LOG2E, softcap * LOG2E
    steps = row_step(lengths), row_step(start)
    strides = (
        *q.stride()[:2], *k.stride()[:3], *v.stride()[:3],
        0 if key_mask is None else key_mask.stride(0),
    )  # fmt: skip

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    base, delta, noise, logs = floats(4, batch * heads, max(1, blocks))
    partial, partial_lse = floats(batch * heads, splits, width), floats(batch * heads, splits)
    changes, tops = floats(batch * heads, pieces, width), floats(batch * heads, pieces)
    extremes, slots = floats(batch * heads, splits, 3), floats(batch * heads, 2, capacity)
    tails = floats(batch * heads, 12)
    chosen = torch.empty((batch * kv_heads, capacity), dtype=torch.int32, device=q.device)
    counts = torch.empty((batch * kv_heads, 2), dtype=torch.int32, device=q.device)
    flags = torch.zeros((batch, 2), dtype=torch.int32, device=q.device)
    telemetry_rows = 0 if telemetry is None else telemetry.shape[2]
    unit_p, unit = torch.finfo(q.dtype).eps / 2, torch.finfo(q.dtype).eps / 2
    if q.dtype != torch.float32:
        unit_p = 2.0**-11
    tile = 32
    programs = max(1, min(triton.cdiv(blocks, tile), 4 * multiprocessors // (batch * kv_heads)))
    grid = kv_heads, batch
    if only is None or "prepare" in only:
        kernels.prepare[(programs, *grid)](
            q, meta, summary, check, progress, lengths, start, base, delta, noise, flags, two, cap,
            size, blocks, programs, *strides[:2], group, rows, width, padded, block, tile, qk,
            parts, softcap > 0, *steps, num_warps=4,
        )  # fmt: skip
    if only is None or "attend" in only:
        kernels.attend[(splits, *grid)](
            q, k, v, k_codes, meta, v_codes, v_meta, check, progress, lengths, start, key_mask,
            base, logs, partial, partial_lse, extremes, flags, two, cap, size, blocks, splits,
            *strides, group, rows, width, padded, block, half, half_p, stages, qk, pv, parts,
            softcap > 0, checked, *steps, num_warps=warps,
        )  # fmt: skip
    if only is None or "select" in only:
        _select[grid](
            logs, delta, noise, summary, progress, lengths, start, partial_lse, chosen, counts,
            tails, coverage, k_min, k_max, v_tol, min(value_budget, 1e30),
            min(key_tolerance, 1e30), explore, size, blocks, capacity, splits,
            group, triton.next_power_of_2(group), block,
            max(16, min(triton.next_power_of_2(blocks), 1024)),
            triton.next_power_of_2(splits), key_tolerance < INF, value_budget < INF, *steps,
            num_warps=8,
        )  # fmt: skip
    if only is None or "promote" in only:
        kernels.promote[(pieces, *grid)](
            q, k, v, k_codes, meta, v_codes, v_meta, summary, key_mask, lengths, start, base,
            delta, chosen, counts, slots, changes, tops, flags, two, cap, size, blocks, capacity,
            pieces, *strides, group, rows, width, padded, block, half, half_p, qk, pv, parts,
            softcap > 0, *steps, num_warps=4,
        )  # fmt: skip
    if only is None or "finish" in only:
        _finish[(heads, batch)](
            out, lse, bounds, rungs, telemetry, sinks, summary, progress, lengths, start, partial,
            partial_lse, extremes, changes, tops, slots, chosen, counts, tails, flags,
            value_budget, tolerance, unit_p, unit, size, blocks, capacity, splits, pieces, kv_heads,
            telemetry_rows, group, width, padded, block, triton.next_power_of_2(capacity), ranking,
            *steps, num_warps=4,
        )  # fmt: skip
    if only is None or "recompute" in only:
        kernels.recompute[(splits, *grid)](
            q, k, v, lengths, start, key_mask, rungs, telemetry, partial, partial_lse, extremes,
            two, cap, size, splits, telemetry_rows, *strides, group, rows, width, padded, 32, half,
            half_p, parts, softcap > 0, *steps, num_warps=4,
        )  # fmt: skip
    if only is None or "replace" in only:
        _replace[(heads, batch)](
            out, lse, bounds, rungs, sinks, lengths, start, partial, partial_lse, extremes, unit_p,
            unit, size, splits, width, padded, triton.next_power_of_2(splits), *steps, num_warps=4,
        )  # fmt: skip
