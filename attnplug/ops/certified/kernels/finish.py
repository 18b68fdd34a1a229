"""The Triton kernels of `certified_attention` that merge the pieces of a head, bound its error, say
whether it must be recomputed, and merge it again if it was. To the base 2."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.certified.kernels.attend import quantized_blocks
from attnplug.ops.certified.kernels.select import key_bound
from attnplug.ops.common.rows import row_span


@triton.jit
def _load_best(at, PIECES: tl.constexpr, DEPTH: tl.constexpr):
    """The log-masses and names [PIECES, 1 or 4] of every piece's best blocks, by quantized and by
    exact keys."""
    SLOTS: tl.constexpr = 4 if DEPTH > 1 else 1
    slot = tl.arange(0, SLOTS)[None, :]
    at = at + (4 + 4 * slot) * PIECES + tl.arange(0, PIECES)[:, None]
    rough, rough_name = tl.load(at), tl.load(at + PIECES)
    return rough, rough_name, tl.load(at + 2 * PIECES), tl.load(at + 3 * PIECES)


@triton.jit
def _ranks(
    rough, rough_name, exact, exact_name, some, count, reach, DEPTH: tl.constexpr
):  # fmt: skip
    """`_certified_reference.ranks_agree`, of the best blocks of every piece that has any."""
    mask = some[:, None]
    rough = tl.where(mask, rough, float("-inf"))
    rough_name = tl.where(mask, rough_name, -1.0)
    exact = tl.where(mask, exact, float("-inf"))
    exact_name = tl.where(mask, exact_name, -1.0)
    agree = count >= 0
    least = float("inf")
    for step in tl.static_range(DEPTH):
        if step < count:
            top_rough = tl.max(tl.max(rough, 1), 0)
            top_exact = tl.max(tl.max(exact, 1), 0)
            first = tl.where(rough == top_rough, rough_name, 3e9)
            best_rough = tl.min(tl.min(first, 1), 0)
            first = tl.where(exact == top_exact, exact_name, 3e9)
            best_exact = tl.min(tl.min(first, 1), 0)
            agree = agree & (best_rough == best_exact)
            least = top_exact
            rough = tl.where(rough_name == best_rough, float("-inf"), rough)
            exact = tl.where(exact_name == best_exact, float("-inf"), exact)
    safe = tl.where(count < DEPTH, ~(reach > float("-inf")), ~(reach >= least))
    return agree, safe


@triton.jit
def finish(
    out, lse, bounds, rungs, telemetry, sinks, progress, lengths, start, merged, extremes, found,
    counts, heads, gained, changes, flags, named, budget, tolerance, unit_p, unit, S, C, splits,
    kv_heads, telemetry_rows,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, PIECES: tl.constexpr, LISTED: tl.constexpr, KV: tl.constexpr,
    DEPTH: tl.constexpr, LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add what promotion changes to one head's sum, bound its error, and say whether it must be
    recomputed. Those who summed up and those who read must have meant the same blocks. All loads
    come first, also of pieces that nobody wrote: a mask would wait for another load."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // GROUP
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    i = tl.arange(0, CHUNKS)
    at = counts + group * (5 * CHUNKS) + i
    taken_i = tl.load(at)
    whole_i = tl.load(at + CHUNKS)
    worthy_i = tl.load(at + 2 * CHUNKS)
    climbed = tl.load(counts + group * (5 * CHUNKS) + 3 * CHUNKS)
    at = found + row * (10 * CHUNKS) + i
    over, under, plain = tl.load(at), tl.load(at + CHUNKS), tl.load(at + 2 * CHUNKS)
    grown, left, worst = (
        tl.load(at + 3 * CHUNKS), tl.load(at + 4 * CHUNKS), tl.load(at + 5 * CHUNKS),
    )  # fmt: skip
    reach_i, largest, noise = (
        tl.load(at + 6 * CHUNKS), tl.load(at + 7 * CHUNKS), tl.load(at + 8 * CHUNKS),
    )  # fmt: skip
    widest = tl.load(at + 9 * CHUNKS)
    p = tl.arange(0, PIECES)
    at = gained + row * (20 * PIECES) + p
    exact, held = tl.load(at), tl.load(at + PIECES)
    value, tops = tl.load(at + 2 * PIECES), tl.load(at + 3 * PIECES)
    rough, rough_name, best, best_name = exact, exact, exact, exact
    if DEPTH > 0:
        rough, rough_name, best, best_name = _load_best(
            gained + row * (20 * PIECES), PIECES, DEPTH
        )  # fmt: skip
    rest_held, rest_widest = tl.load(extremes + row * 3), tl.load(extremes + row * 3 + 1)
    rest_reach = tl.load(extremes + row * 3 + 2)
    norm = tl.load(heads + row * 2)
    tail = tl.load(heads + row * 2 + 1)
    d = tl.arange(0, DP)
    acc = tl.load(merged + row * D + d, mask=d < D, other=0.0)
    h = tl.arange(0, KV)
    off = tl.load(flags + (b * kv_heads + h) * 2, mask=h < kv_heads, other=0)
    changed = tl.load(flags + (b * kv_heads + h) * 2 + 1, mask=h < kv_heads, other=0)
    if not LISTED:
        at = counts + ((b * kv_heads + h[:, None]) * 5 + 4) * CHUNKS + i[None, :]
        summed = tl.sum(tl.load(at, mask=(h < kv_heads)[:, None], other=0), 1)
        read = tl.load(named + b * kv_heads + h, mask=h < kv_heads, other=0)
        changed = tl.maximum(changed, (summed != read).to(tl.int32))
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    part_at = changes + (row * PIECES + p)[:, None] * D + d[None, :]
    part = tl.load(part_at, mask=(d < D)[None, :], other=0.0)

    taken = tl.sum(taken_i, 0)
    some = p < taken
    exact, held = tl.where(some, exact, float("-inf")), tl.where(some, held, 0.0)
    value, tops = tl.where(some, value, 0.0), tl.where(some, tops, float("-inf"))
    part = tl.where(some[:, None], part, 0.0)
    whole, worthy = tl.sum(whole_i, 0), tl.sum(worthy_i, 0)
    over, under, plain, grown = (
        tl.sum(over, 0),
        tl.sum(under, 0),
        tl.sum(plain, 0),
        tl.sum(grown, 0),
    )
    left, worst = tl.sum(left, 0), tl.sum(worst, 0)
    largest, noise, widest = tl.max(largest, 0), tl.max(noise, 0), tl.max(widest, 0)
    odd = tl.max((reach_i != reach_i).to(tl.int32), 0) > 0
    reach = tl.where(odd, float("nan"), tl.max(reach_i, 0))
    agree, safe = taken >= 0, taken >= 0
    if DEPTH > 0:
        agree, safe = _ranks(
            rough, rough_name, best, best_name, some, taken, reach, DEPTH
        )  # fmt: skip
    top = tl.maximum(tl.maximum(norm, tl.max(exact, 0)), tl.maximum(tail, sink))
    shift = tl.where(top == float("-inf"), 0.0, top)
    here = tl.where(norm == float("-inf"), 0.0, tl.exp2(norm - shift))
    weight = tl.exp2(exact - shift)
    seen = left * here + tl.exp2(tail - shift) + tl.sum(weight, 0)
    total = seen + tl.exp2(sink - shift)
    divisor = tl.where(total == 0, 1.0, total)
    acc = acc * here + tl.sum(part * tl.exp2(tops - shift)[:, None], 0)
    acc = acc / divisor
    acc = tl.where(seen == 0, 0.0, acc)
    size = tl.sqrt(tl.sum(acc * acc, 0))
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty), mask=d < D)
    result = tl.where(seen == 0, float("-inf"), shift + tl.log2(tl.where(seen == 0, 1.0, seen)))
    tl.store(lse + row, result * 0.6931471805599453)

    ratio = here / divisor
    held = tl.sum(weight * held, 0) / divisor
    held += rest_held * (tl.exp2(tail - shift) / divisor)
    key = key_bound(over * ratio, under * ratio, plain * ratio, grown * ratio, left * ratio, held)
    value = (worst * ratio + tl.sum(weight * value, 0) / divisor) * 1.0009765625
    growth = tl.exp2(2 * largest)
    paper = 2 * widest * growth * (left * ratio) * (growth - 1) * 1.0009765625
    paper = tl.where(left * ratio == 0, 0.0, paper)
    widest = tl.maximum(widest, rest_widest)
    quiet = rest_reach * ((D + 16) * 4.76837158203125e-07)
    noise = tl.maximum(noise, quiet) * 0.6931471805599453
    steps = (blocks // splits + 1) * (BLOCK // 16) + 64 + splits
    sums = 4 * unit_p * tl.maximum(ratio, 1.0) + (2 * steps) * 4.76837158203125e-07 * (1 + ratio)
    around = (widest * (sums + 2.02 * noise) + unit * size) * 1.0009765625 + 9.5367431640625e-07

    fits = key + value + around < float("inf")
    fits = fits & (key + value + around <= tolerance) & (value <= budget)
    rung = climbed | tl.where(worthy > 0, 2, 0)
    rung |= tl.where(agree, 0, 16) | tl.where(safe, 0, 32)
    rung |= tl.where(fits | (blocks == 0), 0, 64) | tl.where(taken > C, 128, 0)
    rung |= tl.where(rung >= 16, 4, 0)
    wrong = tl.max(off, 0) * 256 + tl.max(changed, 0) * 512
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
            tl.where(head % GROUP == 0, whole * BLOCK + length - low - blocks * BLOCK, 0),
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
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the exact pieces of a head that was recomputed; else nothing."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
