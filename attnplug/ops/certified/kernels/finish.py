"""The Triton kernel of `certified_attention` that merges the pieces of a head and bounds its error.
To the base 2."""

from attnplug.ops.certified.kernels.rounding import (
    left_behind,
    lost_by_sums,
    lost_by_vanishing,
    reads_off,
)
from attnplug.ops.certified.kernels.select import key_bound
from attnplug.ops.certified.kernels.tier import quantized_blocks
from attnplug.ops.certified.records import R
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _load_ranks(at, PIECES: tl.constexpr, DEPTH: tl.constexpr):
    """The log-masses and blocks [PIECES, 1 or R.RANKS] of every piece's first blocks, by quantized
    and by exact keys."""
    COUNT: tl.constexpr = R.RANKS if DEPTH > 1 else 1
    rank = tl.arange(0, COUNT)[None, :]
    at = at + (R.PROMOTED_RANKS + R.RANK_FIELDS * rank) * PIECES + tl.arange(0, PIECES)[:, None]
    rough = tl.load(at + R.RANK_ROUGH * PIECES)
    rough_block = tl.load(at + R.RANK_ROUGH_BLOCK * PIECES)
    exact = tl.load(at + R.RANK_EXACT * PIECES)
    return rough, rough_block, exact, tl.load(at + R.RANK_EXACT_BLOCK * PIECES)


@triton.jit
def _ranks_agree(rough, rough_block, exact, exact_block, some, count, reach, DEPTH: tl.constexpr):
    """`reference.ranks_agree`, of the first blocks of every piece that has any."""
    mask = some[:, None]
    rough = tl.where(mask, rough, float("-inf"))
    rough_block = tl.where(mask, rough_block, -1.0)
    exact = tl.where(mask, exact, float("-inf"))
    exact_block = tl.where(mask, exact_block, -1.0)
    agree = count >= 0
    least = float("inf")
    for step in tl.static_range(DEPTH):
        if step < count:
            top_rough = tl.max(tl.max(rough, 1), 0)
            top_exact = tl.max(tl.max(exact, 1), 0)
            first = tl.where(rough == top_rough, rough_block, 3e9)
            best_rough = tl.min(tl.min(first, 1), 0)
            first = tl.where(exact == top_exact, exact_block, 3e9)
            best_exact = tl.min(tl.min(first, 1), 0)
            agree = agree & (best_rough == best_exact)
            least = top_exact
            rough = tl.where(rough_block == best_rough, float("-inf"), rough)
            exact = tl.where(exact_block == best_exact, float("-inf"), exact)
    safe = tl.where(count < DEPTH, ~(reach > float("-inf")), ~(reach >= least))
    return agree, safe


@triton.jit
def finish(
    found,
    sinks,
    progress,
    rows,
    merged,
    rest_norms,
    left_sums,
    head_sums,
    promotion,
    head_ends,
    raised,
    cap,
    unit_p,
    unit,
    capacity,
    splits,
    kv_heads,
    SHAPE: tl.constexpr,
    CHUNKS: tl.constexpr,
    PIECES: tl.constexpr,
    LISTED: tl.constexpr,
    KV: tl.constexpr,
    DEPTH: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add what promotion changes to one head's sum, bound its error, and say into `raised` whether
    it must be recomputed for its own or its row's sake. The programs that summed up and the
    programs that read must have selected the same blocks; else the row is recomputed. All loads
    come first, also of pieces that no program wrote: a mask would wait for another load."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = SHAPE.GROUP
    D: tl.constexpr = SHAPE.D
    BLOCK: tl.constexpr = SHAPE.BLOCK
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    row = b * tl.num_programs(0) + head
    group = b * kv_heads + head // GROUP
    length, low = row_span(rows, b, STEPS)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    i = tl.arange(0, CHUNKS)
    at = promotion.counts + group * (R.COUNT_FIELDS * CHUNKS) + i
    promoted_i = tl.load(at + R.COUNT_KEYS * CHUNKS)
    worthy_i = tl.load(at + R.COUNT_WORTHY * CHUNKS)
    climbed_i = tl.load(at + R.COUNT_NEEDED * CHUNKS)
    at = left_sums + row * (R.LEFT_FIELDS * CHUNKS) + i
    change = tl.load(at + R.LEFT_CHANGE * CHUNKS)
    under = tl.load(at + R.LEFT_UNDER * CHUNKS)
    plain = tl.load(at + R.LEFT_NORM * CHUNKS)
    moved = tl.load(at + R.LEFT_MOVED * CHUNKS)
    left = tl.load(at + R.LEFT_MASS * CHUNKS)
    error = tl.load(at + R.LEFT_ERROR * CHUNKS)
    reach_i = tl.load(at + R.LEFT_REACH * CHUNKS)
    largest = tl.load(at + R.ALL_DELTA * CHUNKS)
    noise = tl.load(at + R.ALL_NOISE * CHUNKS)
    widest = tl.load(at + R.ALL_NORM * CHUNKS)
    p = tl.arange(0, PIECES)
    at = promotion.promoted_sums + row * (R.PROMOTED_FIELDS * PIECES) + p
    exact = tl.load(at + R.PROMOTED_LSE * PIECES)
    held = tl.load(at + R.PROMOTED_NORM * PIECES)
    value = tl.load(at + R.PROMOTED_ERROR * PIECES)
    tops = tl.load(at + R.PROMOTED_TOP * PIECES)
    before = tl.load(at + R.PROMOTED_BEFORE * PIECES)
    rough_rank, rough_block, exact_rank, exact_block = exact, exact, exact, exact
    if DEPTH > 0:
        rough_rank, rough_block, exact_rank, exact_block = _load_ranks(
            promotion.promoted_sums + row * (R.PROMOTED_FIELDS * PIECES), PIECES, DEPTH
        )
    rest_norm = tl.load(rest_norms + row * R.REST_FIELDS + R.REST_NORM)
    rest_widest = tl.load(rest_norms + row * R.REST_FIELDS + R.REST_WIDEST)
    rest_reach = tl.load(rest_norms + row * R.REST_FIELDS + R.REST_REACH)
    norm = tl.load(head_sums + row * R.HEAD_FIELDS + R.HEAD_LSE)
    rest = tl.load(head_sums + row * R.HEAD_FIELDS + R.HEAD_REST_LSE)
    d = tl.arange(0, SHAPE.DP)
    acc = tl.load(merged + row * D + d, mask=d < D, other=0.0)
    h = tl.arange(0, KV)
    in_row = h < kv_heads
    flag_at = promotion.flags + (b * kv_heads + h) * R.FLAG_FIELDS
    score_wrong = tl.load(flag_at + R.FLAG_SCORE, mask=in_row, other=0)
    check_wrong = tl.load(flag_at + R.FLAG_CHECK, mask=in_row, other=0)
    if not LISTED:
        digest = ((b * kv_heads + h[:, None]) * R.COUNT_FIELDS + R.COUNT_DIGEST) * CHUNKS
        at = promotion.counts + digest + i[None, :]
        summed = tl.sum(tl.load(at, mask=in_row[:, None], other=0), 1)
        read = tl.load(promotion.read_digest + b * kv_heads + h, mask=in_row, other=0)
        check_wrong = tl.maximum(check_wrong, (summed != read).to(tl.int32))
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * R.LOG2E
    part_at = promotion.changes + (row * PIECES + p)[:, None] * D + d[None, :]
    part = tl.load(part_at, mask=(d < D)[None, :], other=0.0)

    promoted = tl.sum(promoted_i, 0)
    some = p < promoted
    exact, held = tl.where(some, exact, float("-inf")), tl.where(some, held, 0.0)
    value, tops = tl.where(some, value, 0.0), tl.where(some, tops, float("-inf"))
    part = tl.where(some[:, None], part, 0.0)
    before = tl.where(some, before, 0.0)
    worthy = tl.sum(worthy_i, 0)
    change, under, plain = tl.sum(change, 0), tl.sum(under, 0), tl.sum(plain, 0)
    moved, climbed = tl.sum(moved, 0), tl.max(climbed_i, 0) * R.NEEDED
    left, error = tl.sum(left, 0), tl.sum(error, 0)
    largest, noise, widest = tl.max(largest, 0), tl.max(noise, 0), tl.max(widest, 0)
    has_nan = tl.max((reach_i != reach_i).to(tl.int32), 0) > 0
    reach = tl.where(has_nan, float("nan"), tl.max(reach_i, 0))
    agree, safe = promoted >= 0, promoted >= 0
    if DEPTH > 0:
        agree, safe = _ranks_agree(
            rough=rough_rank,
            rough_block=rough_block,
            exact=exact_rank,
            exact_block=exact_block,
            some=some,
            count=promoted,
            reach=reach,
            DEPTH=DEPTH,
        )
    top = tl.maximum(tl.maximum(norm, tl.max(exact, 0)), tl.maximum(rest, sink))
    shift = tl.where(top == float("-inf"), 0.0, top)
    here = tl.where(norm == float("-inf"), 0.0, tl.exp2(norm - shift))
    weight = tl.exp2(exact - shift)
    seen = left * here + tl.exp2(rest - shift) + tl.sum(weight, 0)
    total = seen + tl.exp2(sink - shift)
    divisor = tl.where(total == 0, 1.0, total)
    acc = acc * here + tl.sum(part * tl.exp2(tops - shift)[:, None], 0)
    acc = acc / divisor
    acc = tl.where(seen == 0, 0.0, acc)
    size = tl.sqrt(tl.sum(acc * acc, 0))
    tl.store(found.out + row * D + d, acc.to(found.out.dtype.element_ty), mask=d < D)
    result = tl.where(seen == 0, float("-inf"), shift + tl.log2(tl.where(seen == 0, 1.0, seen)))
    tl.store(found.lse + row, result * R.LN2)

    ratio = here / divisor
    mass_rest = tl.exp2(rest - shift) / divisor
    mass_exact = tl.sum(weight, 0) / divisor + mass_rest
    held = tl.sum(weight * held, 0) / divisor + rest_norm * mass_rest
    pieces_top = tl.exp2(tops - shift) / divisor
    taken = tl.sum(before * pieces_top, 0) * R.CARE
    after = (held + plain * ratio) * R.CARE
    before = taken + (rest_norm * mass_rest + plain * ratio) * R.CARE
    value = (error * ratio + tl.sum(weight * value, 0) / divisor) * R.CARE
    # Sums of probabilities and values, of the pass and of what promotion changes.
    longest = tl.maximum(blocks // splits, promoted // PIECES) + 1
    sums = lost_by_sums(longest, splits, unit_p, BLOCK)
    around = (tl.maximum(after, before) * sums + unit * size) * R.CARE + R.ROUND_FLOOR
    wide = tl.maximum(widest, rest_widest) * R.CARE
    vanishing = lost_by_vanishing(longest, unit_p, BLOCK)
    around += vanishing * wide * (ratio + 2 * tl.sum(pieces_top, 0))
    behind = taken * left_behind(noise, cap, D)
    around += tl.where(taken == 0, 0.0, behind)
    centre = tl.minimum(size + value + around, after)
    noise = reads_off(noise, rest_reach, cap, D)
    loss = mass_exact * noise
    key = key_bound(
        change=change * ratio,
        under=under * ratio,
        moved=moved * ratio,
        centre=centre,
        loss=loss,
    )
    remains = 1 - under * ratio - loss
    moves = (held + mass_exact * centre) * noise * R.CARE
    apart = 2 * wide  # two means of values, whatever the weights
    around += tl.where(remains > 0, tl.minimum(moves / remains, apart), apart)
    growth = tl.exp2(2 * largest)
    paper = 2 * widest * growth * (left * ratio) * (growth - 1) * R.CARE
    paper = tl.where(left * ratio == 0, 0.0, paper)

    full = key + value + around
    finite = full < float("inf")
    rung = climbed | tl.where(worthy > 0, R.VALUES, 0)
    rung |= tl.where(agree, 0, R.RANKING) | tl.where(safe, 0, R.BOUNDARY)
    rung |= tl.where(finite | (blocks == 0), 0, R.BOUND) | tl.where(
        promoted > capacity, R.CAPACITY, 0
    )
    rung |= tl.where(rung >= R.RANKING, R.HEAD, 0)
    wrong = tl.max(score_wrong, 0) * R.SCORE + tl.max(check_wrong, 0) * R.CHECK
    rung |= wrong | tl.where(wrong > 0, R.ROW, 0)
    tl.store(raised + row, rung)
    # Of what is returned, which is rounded. A mean of zeros is exact, and has no norm.
    counts = finite & (blocks > 0) & ~(seen == 0) & (wide > R.VANISHED)
    at = head_ends + row * R.END_FIELDS
    tl.store(at + R.END_BOUND, tl.where(counts, full, 0.0))
    least = tl.maximum(size * (1 - 2 * unit) / R.CARE - full, 0.0)
    tl.store(at + R.END_NORM, tl.where(counts, least, 0.0))
    at = found.bounds + row * R.BOUND_FIELDS
    tl.store(at + R.BOUND_KEY, key)
    tl.store(at + R.BOUND_VALUE, value)
    tl.store(at + R.BOUND_ROUND, around)
    tl.store(at + R.BOUND_KEY_BEFORE, key)
    tl.store(at + R.BOUND_VALUE_BEFORE, value)
    tl.store(at + R.BOUND_PAPER, paper)
