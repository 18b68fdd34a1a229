"""The Triton kernel of `merge_sketch`."""

from attnplug.ops.common.rows import note_progress, row_of, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.sketch.kernels.codes import begin, load_variance, near_block

RATIO = tl.constexpr(4.0)  # rho is within 1/RATIO..RATIO


@triton.jit
def _load_pieces(pieces, row, d, D: tl.constexpr, PIECES: tl.constexpr):
    """Log-sum-exps [PIECES] and outputs [PIECES, columns] of a head's pieces."""
    j = tl.arange(0, PIECES)
    number = pieces.number
    piece_lse = tl.load(
        pieces.lse + row * number + j, mask=j < number, other=float("-inf"), cache_modifier=".cg"
    )
    piece = tl.load(
        pieces.out + (row * number + j)[:, None] * D + d[None, :],
        mask=(j < number)[:, None] & (d < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return piece_lse, tl.where((piece_lse == float("-inf"))[:, None], 0.0, piece)


@triton.jit
def merge(
    projected,
    fixed,
    picked,
    pick_sums,
    scanned,
    cut,
    v_mean,
    output,
    rows,
    progress,
    counted,
    hint,
    heads,
    group,
    counts,
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
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
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
    home = place
    if STEPS.QUERIES > 1:
        kv_heads = heads // group
        home = row_of(place // kv_heads, STEPS) * kv_heads + place % kv_heads
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    near_lse, near = _load_pieces(fixed, row, d, D, FIXED)
    base = tl.load(scanned.norm + row, cache_modifier=".cg")
    i = tl.arange(0, PARTS)
    parts = scanned.parts
    at = scanned.sums + (row * parts + i) * 2
    mass = tl.sum(tl.load(at, mask=i < parts, other=0.0, cache_modifier=".cg"), 0)
    moment = tl.sum(tl.load(at + 1, mask=i < parts, other=0.0, cache_modifier=".cg"), 0)
    poison = mass * 0  # NaN where a code may hide one
    value, mean, along, variance = 0.0, 0.0, 0.0, 0.0
    if TAIL != "drop":
        value = tl.load(v_mean + home * D + d, mask=d < D, other=0.0)
        variance = tl.sum(load_variance(projected, row, R, RP, 1, 1), 0)
        facts = projected.at + row * projected.columns
        mean = tl.load(facts + R + 1, cache_modifier=".cg")
        along = tl.load(facts + 2 * R + 2 + d, mask=d < D, other=0.0, cache_modifier=".cg")
    if CHAINED:
        if tl.program_id(1) == 0:
            if progress is not None:
                if row < counts:  # the program that counts a length is the only one that reads it
                    for b in range(row, BATCH, counts):
                        _note(rows, progress, b, STEPS, NEW)
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
    at = pick_sums + (row * picked.number + j) * 4
    picked_mass = tl.load(at, mask=j < picked.number, other=0.0, cache_modifier=".cg")
    picked_moment = tl.load(at + 1, mask=j < picked.number, other=0.0, cache_modifier=".cg")
    exact = tl.load(at + 2, mask=j < picked.number, other=0.0, cache_modifier=".cg")
    guess = tl.load(at + 3, mask=j < picked.number, other=0.0, cache_modifier=".cg")
    pick_lses, pick_outs = _load_pieces(picked, row, d, D, PIECES)
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
    merged = tl.sum(near * weight_near[:, None], 0) + tl.sum(pick_outs * weight_picked[:, None], 0)
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
    if output.sinks is not None:
        sink = tl.load(output.sinks + row % heads).to(tl.float32)
        denominator += tl.exp2(sink * 1.4426950408889634 - shift)
    merged = (merged / denominator).to(output.out.dtype.element_ty)
    tl.store(output.out + row * D + d, merged, mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(output.lse + row, result * 0.6931471805599453)
        if hint is not None:
            leads = row % group == 0
            if STEPS.QUERIES > 1:  # the last of a row's queries hands its own on
                leads = leads & (row // heads % STEPS.QUERIES == STEPS.QUERIES - 1)
            if leads:
                tl.store(hint + home, coming)


@triton.jit
def _note(rows, progress, b, STEPS: tl.constexpr, NEW: tl.constexpr):
    length, low = row_span(rows, (b + 1) * STEPS.QUERIES - 1, STEPS, NEW)  # of all its tokens
    note_progress(progress, b, low, near_block(tl.minimum(length, rows.S), low))
