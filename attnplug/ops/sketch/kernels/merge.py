"""The Triton kernel of `merge_sketch`."""

from attnplug.ops.common.rows import note_progress, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.sketch.kernels.codes import begin, load_variance, near_block

RATIO = tl.constexpr(4.0)  # rho is within 1/RATIO..RATIO


@triton.jit
def _pieces(out, lse, row, pieces, d, D: tl.constexpr, PIECES: tl.constexpr):
    """Log-sum-exps [PIECES] and outputs [PIECES, columns] of a head's pieces."""
    j = tl.arange(0, PIECES)
    piece_lse = tl.load(
        lse + row * pieces + j, mask=j < pieces, other=float("-inf"), cache_modifier=".cg"
    )
    piece = tl.load(
        out + (row * pieces + j)[:, None] * D + d[None, :],
        mask=(j < pieces)[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return piece_lse, tl.where((piece_lse == float("-inf"))[:, None], 0.0, piece)


@triton.jit
def merge(
    projected,
    fixed_out,
    fixed_lse,
    pick_out,
    pick_lse,
    pick_sums,
    sums,
    norm,
    cut,
    v_mean,
    sinks,
    out,
    lse,
    progress,
    lengths,
    start,
    counted,
    hint,
    heads,
    group,
    S,
    counts,
    parts,
    pieces,
    fixed,
    columns,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    FIXED: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    TAIL: tl.constexpr,
    CAPPED: tl.constexpr,
    BATCH: tl.constexpr,
    NEW: tl.constexpr,
    CHAINED: tl.constexpr,
    PDL: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):
    """A slice of one head's output: pieces read exactly, and what the others are estimated as. In
    the chain also note which blocks have codes now, keep the next step's `hint`, and count the new
    token in the `counts` entries of `counted`. There `attend` has waited for `pick` before this
    kernel starts, and nothing that runs by then reads a length or a block's progress, so that these
    can be written, and all that is the scan's or older read, before the wait."""
    if not CHAINED:
        begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row // group
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    near_lse, near = _pieces(fixed_out, fixed_lse, row, fixed, d, D, FIXED)
    base = tl.load(norm + row, cache_modifier=".cg")
    i = tl.arange(0, PARTS)
    at = sums + (row * parts + i) * 2
    mass = tl.sum(tl.load(at, mask=i < parts, other=0.0, cache_modifier=".cg"), 0)
    moment = tl.sum(tl.load(at + 1, mask=i < parts, other=0.0, cache_modifier=".cg"), 0)
    poison = mass * 0  # NaN where a code may hide one
    value, mean, along, variance = 0.0, 0.0, 0.0, 0.0
    if TAIL != "drop":
        value = tl.load(v_mean + place * D + d, mask=d < D, other=0.0)
        variance = tl.sum(load_variance(projected, row, columns, R, RP, 1, 1), 0)
        facts = projected + row * columns
        mean = tl.load(facts + R + 1, cache_modifier=".cg")
        along = tl.load(facts + 2 * R + 2 + d, mask=d < D, other=0.0, cache_modifier=".cg")
    if CHAINED:
        if tl.program_id(1) == 0:
            if progress is not None:
                if row < counts:  # the program that counts a length is the only one that reads it
                    for b in range(row, BATCH, counts):
                        _note(progress, lengths, start, b, S, NEW, LENGTH_STEP, START_STEP)
            if counted is not None:
                if row < counts:
                    before = tl.load(counted + row, cache_modifier=".cg")
                    tl.debug_barrier()  # every warp loads and stores the same word
                    tl.store(counted + row, before + 1)
        begin(PDL)
    # All is asked for before any of it is used: each wait takes as long as all of them.
    left = tl.load(cut + place * 3 + 1, cache_modifier=".cg")
    coming = tl.load(cut + place * 3 + 2, cache_modifier=".cg")
    j = tl.arange(0, PIECES)
    at = pick_sums + (row * pieces + j) * 4
    picked_mass = tl.load(at, mask=j < pieces, other=0.0, cache_modifier=".cg")
    picked_moment = tl.load(at + 1, mask=j < pieces, other=0.0, cache_modifier=".cg")
    exact = tl.load(at + 2, mask=j < pieces, other=0.0, cache_modifier=".cg")
    guess = tl.load(at + 3, mask=j < pieces, other=0.0, cache_modifier=".cg")
    pick_lses, picked = _pieces(pick_out, pick_lse, row, pieces, d, D, PIECES)
    top = tl.maximum(tl.max(near_lse, 0), tl.max(pick_lses, 0))
    mass -= tl.sum(picked_mass, 0)
    moment -= tl.sum(picked_moment, 0)
    tail = (left > 0) & (mass > 0)
    if TAIL == "drop":
        tail = tail & (left < 0)
    else:
        top = tl.maximum(top, tl.where(tail, base, float("-inf")))
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_near = tl.exp2(near_lse - shift)
    weight_picked = tl.exp2(pick_lses - shift)
    total = tl.sum(weight_near, 0) + tl.sum(weight_picked, 0) + poison
    merged = tl.sum(near * weight_near[:, None], 0) + tl.sum(picked * weight_picked[:, None], 0)
    if TAIL != "drop":
        whole_exact, whole_guess = tl.sum(exact, 0), tl.sum(guess, 0)
        known = (whole_guess > 0) & (whole_exact > 0)
        rho = tl.where(known, whole_exact, 1.0) / tl.where(known, whole_guess, 1.0)
        rho = tl.minimum(tl.maximum(rho, 1 / RATIO), RATIO)
        rest = tl.where(tail, rho * mass * tl.exp2(base - shift), 0.0)
        u = moment / tl.where(tail, mass, 1.0) + (0.0 if CAPPED else base)
        slope = (u - mean) / tl.maximum(variance, 1e-12)
        # A mean of the rest outside what normal scores can have is rounding.
        reach = 8.0 / tl.sqrt(tl.maximum(variance, 1e-12))
        value += along * tl.minimum(tl.maximum(slope, -reach), reach)
        total += rest
        merged += tl.where(rest > 0, rest * value, 0.0)
    denominator = tl.where(total == 0, 1.0, total)
    result = tl.where(total == 0, float("-inf"), shift + tl.log2(denominator))
    if sinks is not None:
        sink = tl.load(sinks + row % heads).to(tl.float32)
        denominator += tl.exp2(sink * 1.4426950408889634 - shift)
    tl.store(out + row * D + d, (merged / denominator).to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(lse + row, result * 0.6931471805599453)
        if hint is not None:
            if row % group == 0:
                tl.store(hint + place, coming)


@triton.jit
def _note(
    progress,
    lengths,
    start,
    b,
    S,
    NEW: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
):
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
    note_progress(progress, b, low, near_block(tl.minimum(length, S), low))
