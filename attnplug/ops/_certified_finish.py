"""The Triton kernels of `certified_attention` that merge the pieces of a head, bound its error, say
whether it must be recomputed, and merge it again if it was. To the base 2."""

import triton
import triton.language as tl

from attnplug.ops._certified_attend import quantized_blocks
from attnplug.ops._certified_select import key_bound
from attnplug.ops.block_bounds import row_span


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
def finish(
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
    key = key_bound(over * ratio, under * ratio, plain * ratio, grown * ratio, left * ratio, held)
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
def replace(
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
