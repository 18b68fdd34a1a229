"""Triton code of `certified_attention` that decides which heads are recomputed for their layer's
sake; and the kernel that puts in place what was recomputed, and keeps the books. To the base 2."""

from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _norm_of(least):
    """The root of the sum of squares. 0, which allows nothing, where float32 cannot hold it."""
    squares = tl.sum(least * least, 0)
    return tl.sqrt(tl.where(squares < float("inf"), squares, 0.0))


@triton.jit
def decided(raised, head_ends, first, heads, own, in_group, tolerance, HEADS: tl.constexpr):
    """`reference.layer_holds` of the heads `own` of a row whose `heads` begin at `first`: their
    rungs."""
    h = tl.arange(0, HEADS)
    there = h < heads
    at = head_ends + (first + h) * R.END_FIELDS
    bound = tl.load(at + R.END_BOUND, mask=there, other=0.0)
    norm = _norm_of(tl.load(at + R.END_NORM, mask=there, other=0.0))
    is_open = tl.load(raised + first + h, mask=there, other=R.HEAD) & (R.HEAD | R.ROW) == 0
    squares = tl.where(is_open, bound * bound, 0.0)
    limit = tl.where(tolerance < float("inf"), tolerance * norm, float("inf"))
    rung = tl.load(raised + first + own, mask=in_group, other=0)
    end_at = head_ends + (first + own) * R.END_FIELDS + R.END_BOUND
    end = tl.load(end_at, mask=in_group, other=0.0)
    before = (bound[:, None] == end[None, :]) & (h[:, None] <= own[None, :])
    before = before | (bound[:, None] < end[None, :])
    spent = tl.sqrt(tl.sum(tl.where(before, squares[:, None], 0.0), 0)) * R.CARE
    holds = (spent <= limit) | (rung & (R.HEAD | R.ROW) > 0)
    return rung | tl.where(holds, 0, R.BOUND | R.HEAD)


@triton.jit
def layer_bound(rungs, head_ends, first, heads, HEADS: tl.constexpr):
    """What `reference.layer_holds` writes of a row: (the root of the sum of the squared bounds of
    the heads that are returned as they are, the norm that all exact heads have at least)."""
    h = tl.arange(0, HEADS)
    there = h < heads
    rung = tl.load(rungs + first + h, mask=there, other=R.HEAD)
    at = head_ends + (first + h) * R.END_FIELDS
    bound = tl.load(at + R.END_BOUND, mask=there, other=0.0)
    least = tl.load(at + R.END_NORM, mask=there, other=0.0)
    kept = tl.where(rung & (R.HEAD | R.ROW) == 0, bound, 0.0)
    spent = tl.sqrt(tl.sum(kept * kept, 0)) * R.CARE
    wrong = tl.max((there & (rung & R.ROW > 0)).to(tl.int32), 0) > 0
    return tl.where(wrong, 0.0, spent), tl.where(wrong, 0.0, _norm_of(least))


@triton.jit
def _rounding(widest, noise, sums, size, unit):
    """E_round, as `reference.rounding`: sums of values up to `widest` that lose the share `sums`,
    with exact scores off by `noise`, stored as an output of norm `size` in a dtype of unit roundoff
    `unit`."""
    return (widest * (sums + R.SCORE_CARE * noise) + unit * size) * R.CARE + R.ROUND_FLOOR


@triton.jit
def _record(at, rung, again, key, value, around, share, saved, key_tokens, value_tokens):
    """Add one step to a head's telemetry (`TELEMETRY`)."""
    f = tl.arange(0, R.TELEMETRY_PADDED)
    there = f < R.TELEMETRY_FIELDS
    bit = tl.where(f == R.T_NEEDED, R.NEEDED, 0) + tl.where(f == R.T_VALUES, R.VALUES, 0)
    bit += tl.where(f == R.T_HEAD, R.HEAD, 0)
    more = tl.where(f == R.T_ROW, R.ROW, 0) + tl.where(f == R.T_RANKING, R.RANKING, 0)
    bit += more + tl.where(f == R.T_BOUNDARY, R.BOUNDARY, 0)
    bit += tl.where(f == R.T_BOUND, R.BOUND, 0)
    step = tl.where((f == R.T_STEPS) | ((bit & rung) > 0), 1.0, 0.0).to(tl.float64)
    step += tl.where(f == R.T_KEY_SUM, key, 0.0) + tl.where(f == R.T_VALUE_SUM, value, 0.0)
    step += tl.where(f == R.T_LAYER_SUM, share, 0.0)
    step += tl.where((f == R.T_SAVED) & saved, 1.0, 0.0)
    tokens = tl.where(f == R.T_KEY_TOKENS, key_tokens, 0)
    step += tokens + tl.where(f == R.T_VALUE_TOKENS, value_tokens, 0)
    peak = tl.where(f == R.T_KEY_MAX, key, 0.0) + tl.where(f == R.T_VALUE_MAX, value, 0.0)
    peak += tl.where(f == R.T_ROUND_MAX, around, 0.0) + tl.where(f == R.T_LAYER_MAX, share, 0.0)
    is_peak = (f == R.T_KEY_MAX) | (f == R.T_VALUE_MAX)
    is_peak = is_peak | (f == R.T_ROUND_MAX) | (f == R.T_LAYER_MAX)
    old = tl.load(at + f, mask=there, other=0.0)
    tl.debug_barrier()  # every warp loads and stores the same words
    new = tl.where(is_peak, tl.maximum(old, peak.to(tl.float64)), old + step)
    tl.store(at + f, new, mask=there)


@triton.jit
def replace(
    found,
    telemetry,
    sinks,
    progress,
    rows,
    promotion,
    head_ends,
    pieces,
    exact_norms,
    tolerance,
    unit_p,
    unit,
    count,
    kv_heads,
    telemetry_rows,
    SHAPE: tl.constexpr,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the `count` exact pieces of a head that was recomputed. And say of each row what the
    bounds of the other heads come to, and of each head what the step was."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * heads + head
    length, low = row_span(rows, b, STEPS)
    rung = tl.load(found.rungs + row)
    again = (rung & (R.HEAD | R.ROW)) > 0
    spent, norm = layer_bound(found.rungs, head_ends, b * heads, heads, HEADS)
    tl.store(found.layer + b * 2, spent, mask=head == 0)
    tl.store(found.layer + b * 2 + 1, norm, mask=head == 0)
    bounds_at = found.bounds + row * R.BOUND_FIELDS
    if telemetry is not None:
        key = tl.load(bounds_at + R.BOUND_KEY_BEFORE)
        value = tl.load(bounds_at + R.BOUND_VALUE_BEFORE)
        around = tl.load(bounds_at + R.BOUND_ROUND)
        alone = tl.load(bounds_at + R.BOUND_PAPER) + value + around
        # Alone it would be more than the layer's heads may have.
        saved = ~again & ~(alone <= tolerance * norm) & (tolerance < float("inf"))
        group = b * kv_heads + head // SHAPE.GROUP
        g = tl.arange(0, SHAPE.ROWS)
        group_at = found.rungs + b * heads + head // SHAPE.GROUP * SHAPE.GROUP + g
        shared = tl.load(group_at, mask=g < SHAPE.GROUP, other=0) & (R.HEAD | R.ROW)
        at = promotion.counts + group * (R.COUNT_FIELDS * CHUNKS) + tl.arange(0, CHUNKS)
        promoted = tl.sum(tl.load(at + R.COUNT_KEYS * CHUNKS), 0)
        whole = tl.sum(tl.load(at + R.COUNT_VALUES * CHUNKS), 0)
        # The group's first head keeps count of what its KV head reads.
        rest = length - low - quantized_blocks(progress, b, length, low, SHAPE.BLOCK) * SHAPE.BLOCK
        rest += tl.where(tl.max(shared, 0) > 0, length - low, 0)
        first = head % SHAPE.GROUP == 0
        _record(
            at=telemetry + (group * telemetry_rows + head % SHAPE.GROUP) * R.TELEMETRY_FIELDS,
            rung=rung,
            again=again,
            key=tl.where(again, 0.0, key),
            value=tl.where(again, 0.0, value),
            around=tl.where(again, 0.0, around),
            share=tl.where(spent > 0, spent / norm, 0.0),
            saved=saved,
            key_tokens=tl.where(first, promoted * SHAPE.BLOCK + rest, 0),
            value_tokens=tl.where(first, whole * SHAPE.BLOCK + rest, 0),
        )
    if not again:
        return
    p = tl.arange(0, COUNT)
    there = p < count
    part_lse = tl.load(pieces.lse + row * count + p, mask=there, other=float("-inf"))
    has_nan = tl.sum((part_lse != part_lse).to(tl.int32), 0) > 0
    empty = part_lse == float("-inf")
    top = tl.max(part_lse, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(part_lse - shift)
    seen = tl.sum(weight, 0)
    seen = tl.where(has_nan, float("nan"), seen)
    total = seen
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * R.LOG2E - shift)
    d = tl.arange(0, SHAPE.DP)
    acc = tl.zeros([DP], tl.float32)
    i = tl.arange(0, 32)
    for first in range(0, count, 32):
        inside = first + i < count
        lse_at = pieces.lse + row * count + first + i
        one_lse = tl.load(lse_at, mask=inside, other=float("-inf"))
        part_at = pieces.out + (row * count + first + i)[:, None] * D + d[None, :]
        inside = inside & ~(one_lse == float("-inf"))
        part = tl.load(part_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * tl.exp2(one_lse - shift)[:, None], 0)
    acc = acc / tl.where(total == 0, 1.0, total)
    acc = tl.where(seen == 0, 0.0, acc)
    tl.store(found.out + row * D + d, acc.to(found.out.dtype.element_ty), mask=d < D)
    result = tl.where(seen == 0, float("-inf"), shift + tl.log2(tl.where(seen == 0, 1.0, seen)))
    tl.store(found.lse + row, result * R.LN2)
    at = exact_norms + (row * count + p) * R.EXACT_FIELDS
    widest = tl.max(tl.load(at + R.EXACT_WIDEST, mask=there, other=0.0), 0)
    noise = tl.max(tl.load(at + R.EXACT_REACH, mask=there & ~empty, other=0.0), 0)
    noise = noise * ((D + R.DOT_EXTRA) * R.DOT_SLACK * R.LN2)
    chain = (length - low) // R.CHAIN_TOKENS + R.CHAIN_EXTRA + count
    sums = 2 * unit_p + chain * R.CHAIN_SLACK
    size = tl.sqrt(tl.sum(acc * acc, 0))
    around = _rounding(widest, noise, sums, size, unit)
    tl.store(bounds_at + R.BOUND_KEY, 0.0)
    tl.store(bounds_at + R.BOUND_VALUE, 0.0)
    tl.store(bounds_at + R.BOUND_ROUND, around)
