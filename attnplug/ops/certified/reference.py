"""The numba reference of `certified_attention`: the specification, in natural logarithms.

One (row, KV head) at a time: attend to the quantized keys and values; then choose what is read
exactly, attend to the mixture, bound the error, check. The heads of a row share out the error that
their layer may have between these two, and in the end look at what became of it.

This file is over 450 lines because numba's cache of a compiled function looks at the file in which
the function stands, and not at the files of what it calls. `PROOF` guards what comes from
`proof.py`.
"""

from typing import NamedTuple

import numpy as np

from attnplug.ops.certified.proof import (
    BOUND,
    BOUNDARY,
    CAP_SLACK,
    CAPACITY,
    CARE,
    CHECK,
    CHECK_SEED,
    CHECK_STEP,
    CODE_REACH,
    DEEPEST,
    DELTA_CARE,
    DOT_EXTRA,
    DOT_SLACK,
    EXPM1_SLACK,
    HEAD,
    LOG_FLOOR,
    MASS_FLOOR,
    MOST_NEEDED,
    NEED_SHARE,
    NEEDED,
    NOISE_FLOOR,
    NORM_SHARE,
    OWN_PART,
    RANKING,
    READ_SHARE,
    REFERENCE_SUMS,
    REFERENCE_TOKEN,
    ROUND_FLOOR,
    ROUNDS,
    ROW,
    SCORE,
    SCORE_CARE,
    SHARED_NEED,
    SHARING,
    SQUARE_FLOOR,
    VALUES,
    VANISHED,
    WAYS,
)
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import reference_rows

PROOF = "e7e871618e29a220"  # `proof.digest()` of the constants that numba compiles in here


class Pass(NamedTuple):
    """What the pass over the quantized blocks leaves of one (row, KV head)."""

    scores: np.ndarray  # [blocks, G, block] float32
    parts: np.ndarray  # [blocks, G, D] float64, what each block adds to the outputs
    logs: np.ndarray  # [G, blocks] float32, log-masses
    squares: np.ndarray  # the same of squared weights
    delta: np.ndarray  # [G, blocks] float64, `_deviations`
    noise: np.ndarray
    acc: np.ndarray  # [G, D] float64, of what is in no block: what it adds to the outputs,
    held: np.ndarray  # [G] its weighted norms of values,
    last: np.ndarray  # [G] float32, its log-sum-exp,
    own: np.ndarray  # [G] float32, its share of the denominator,
    reach: np.ndarray  # [G] what arithmetic can move its scores,
    widest: np.ndarray  # [1] and its largest ||v||
    norm: np.ndarray  # [G] float32, the logarithm of the denominator
    shown: np.ndarray  # [G] float64, what the norms of the blocks' outputs come to
    size: np.ndarray  # [G] and the norm of the output


@njit()
def explored(j, row, length, share):
    """Whether block j of a (row, KV head) is spot-checked at this length: a hash, the same on every
    device."""
    x = (j * 1103515245 + row * 747796405 + length * 1664525 + 12345) & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 739982445 & 0xFFFFFFFF
    x ^= x >> 12
    x = x * 695872825 & 0xFFFFFFFF
    x ^= x >> 15
    return (x >> 8) < share * 16777216.0


@njit()
def check_words(j, k_codes, k_bits, v_codes, v_words, summary):
    """Both check words of one block, as `quantize_kv` writes them."""
    size, width = k_codes.shape
    half = v_words.shape[1] // 2
    first = second = np.int64(CHECK_SEED + CHECK_STEP * j)
    for n in range(size):
        for d in range(width):
            first += (1 + d % 31) * np.int64(k_codes[n, d])
        for c in range(v_codes.shape[1]):
            first += (1 + 2 * (c // 4)) * (np.int64(v_codes[n, c]) << 8 * (c % 4))
        for g in range(v_words.shape[1]):
            weight = (1 + 2 * (g // half)) * (1 + 2 * (g % half))
            first += weight * (np.int64(v_words[n, g]) & 0xFFFFFFFF)
    for d in range(width):
        scale, zero = np.int64(k_bits[0, d]) & 0xFFFF, np.int64(k_bits[1, d]) & 0xFFFF
        first += scale << 16 * (d % 2)
        second += (1 + 2 * (d // 2)) * (scale + 3 * zero << 16 * (d % 2))
    bits = summary.view(np.int32)
    for i in range(summary.shape[0]):
        second += (1 + 6 * i) * np.int64(bits[i])
    return first, second


@njit()
def _scores(q, keys, seen, softcap, out):
    """out [G, n] = q keys^T, capped; -inf where not seen. q carries the scale."""
    out[:] = 0.0
    add_product(q, np.ascontiguousarray(keys.T), out)
    for g in range(out.shape[0]):
        for n in range(out.shape[1]):
            if not seen[n]:
                out[g, n] = -np.inf
            elif softcap > 0:
                out[g, n] = softcap * np.tanh(out[g, n] / softcap)


@njit()
def _log_sum(x):
    top = -np.inf
    for y in x:
        top = max(top, y)
    if not top > -np.inf:
        return np.nan if np.isnan(x).any() else -np.inf
    total = 0.0
    for y in x:
        total += np.exp(np.float64(y) - top)
    return top + np.log(total)


@njit()
def _log_squares(x):
    """The logarithm of the sum of squared exponentials."""
    top = _log_sum(x)
    if not abs(top) < np.inf:
        return top
    total = 0.0
    for y in x:
        total += np.exp(2 * (np.float64(y) - top))
    return 2 * top + np.log(total)


@njit()
def _deviations(q, meta, softcap, delta, noise):
    """Per head of the group: what the scores of one block can be off by (delta), and the part of
    it that float32 arithmetic alone can make (noise)."""
    width = q.shape[1]
    for g in range(q.shape[0]):
        half, reach = 0.0, 0.0
        for d in range(width):
            size = abs(np.float64(q[g, d]))
            half += size * meta[0, d] / 2
            reach += size * abs(meta[1, d])
        noise[g] = (width + DOT_EXTRA) * DOT_SLACK * (reach + CODE_REACH * half) + NOISE_FLOOR
        if softcap > 0:
            noise[g] += softcap * CAP_SLACK
        delta[g] = half * DELTA_CARE + noise[g]


@njit()
def _search(score, mass, own, coverage, least, most):
    """The largest x of a fixed grid such that blocks with score >= x are enough: `least` of them
    that cover every head's mass, or `most`. If it takes more than `most`, the smallest that do
    not."""
    low, high = DEEPEST, 1.0
    for _ in range(ROUNDS):
        step = (high - low) / (WAYS + 1)
        passed = 0
        for i in range(WAYS):
            count, short = _above(score, mass, own, low + step * (i + 1), coverage)
            passed += count >= most or (count >= least and not short)
        low, high = low + step * passed, low + step * (passed + 1)
    return low if _above(score, mass, own, low, coverage)[0] <= most else high


@njit()
def _above(score, mass, own, x, coverage):
    """(blocks with score >= x, whether they leave some head's mass short of the coverage)."""
    count, short = 0, False
    held = own.copy()
    for j in range(score.shape[0]):
        if score[j] >= x:
            count += 1
            held += mass[:, j]
    for g in range(held.shape[0]):
        short = short or not held[g] >= coverage
    return count, short


@njit()
def _change(mass, root, delta, noise, moved):
    """(what the weights of a block can change by in all, and shrink by). Its tokens have `mass` and
    squares of weights whose sum has the `root`; their scores are off by `delta` at most, and as a
    vector by `moved`, and each of them by `noise`."""
    most = (mass + MASS_FLOOR) * (np.expm1(delta) + EXPM1_SLACK)
    change = min(most, np.exp(delta) * ((root + SQUARE_FLOOR) * moved + mass * noise))
    return change, min(change, mass * (-np.expm1(-delta) + EXPM1_SLACK))


@njit()
def _error(mass, root, summary):
    """What the quantized values of a block of such a mass can be off by."""
    return min(mass * summary[0], (root + SQUARE_FLOOR) * summary[3])


@njit()
def key_bound(tail, centre, loss, deviation):
    """The tight bound and the paper's, of one head.

    `tail` [6]: over the blocks left quantized, with the final masses m, the sums of what weights
    change by (A), shrink by, of A nu, m (nu + eta) and m, and the largest nu + eta of all blocks.
    `centre` is at least the norm of the output with these weights and exact values, `loss` what
    the weights of exactly read tokens can shrink by, `deviation` the largest D of all blocks."""
    change, under, moved, _, mass, largest = tail
    if change == 0:
        return 0.0, 0.0
    left = 1 - under - loss
    tight = (moved + change * centre) / left * CARE if left > 0 else np.inf
    ratio = np.exp(2 * deviation)
    return tight, 2 * largest * ratio * mass * (ratio - 1) * CARE


@njit()
def _tail(logs, squares, delta, noise, moved, summary, marks, norm):
    """Sums of one head over the blocks left quantized, for `key_bound`; and of what their values
    are off by, and the largest log-mass that one of them can have. `norm` is the logarithm of the
    denominator, `moved` the norm of the query."""
    sums = np.zeros(6)
    worst, reach = 0.0, -np.inf
    for j in range(logs.shape[0]):
        eta, nu = summary[j, 0], summary[j, 1]
        sums[5] = max(sums[5], nu + eta)
        if marks[j] == 0:
            m = np.exp(np.float64(logs[j]) - norm)
            root = np.exp(np.float64(squares[j]) / 2 - norm)
            change, under = _change(m, root, delta[j], noise[j], moved * summary[j, 2])
            sums[0] += change
            sums[1] += under
            sums[2] += change * nu
            sums[3] += m * (nu + eta)
            sums[4] += m
            worst += _error(m, root, summary[j])
            high = logs[j] + delta[j]
            reach = high if high > reach or high != high else reach
    return sums, worst, reach


@njit()
def _reads_off(noise, reach, softcap):
    """e^x - 1, x being what exactly read scores can be off by: a share of the `noise` of quantized
    ones, or of the `reach` of those that are in no block."""
    loudest = noise.max() if len(noise) > 0 else 0.0
    return np.expm1(READ_SHARE * max(loudest, reach) + softcap * CAP_SLACK)


@njit()
def _hidden_norm(mass, root, wide, shown):
    """About how much of a block's weighted norms of values does not show in the norm of its output:
    NORM_SHARE of what does not at most. None is above `wide`, `shown` is what shows of all mass."""
    spread = 2 * (mass - root * root / max(mass, LOG_FLOOR)) * wide
    return NORM_SHARE * max(min(spread, mass * (wide - shown)), 0.0)


@njit()
def _shares(logs, squares, delta, noise, moved, summary, norm, output, off, limit, share, gain):
    """Of one head, as shares of `limit`: what each block adds to the bound if it is left quantized
    (`share`), and by how much that is more than what it adds to E_round if it is read (`gain`, 0
    at least). `output` is as in `_needed`, `off` is `_reads_off`. Returns all hidden norms."""
    size, shown = output[0], output[1]
    hidden = 0.0
    for j in range(len(share)):
        eta, nu = summary[j, 0], summary[j, 1]
        m = np.exp(np.float64(logs[j]) - norm)
        root = np.exp(np.float64(squares[j]) / 2 - norm)
        change, under = _change(m, root, delta[j], noise[j], moved * summary[j, 2])
        apart = _hidden_norm(m, root, nu + eta, shown)
        # E_round takes a block that is left for as wide as its widest value.
        adds = change * (nu + size) + _error(m, root, summary[j])
        adds += (m * (nu + eta) - apart) * REFERENCE_SUMS
        part = adds / limit + under
        share[j] = part if part < MOST_NEEDED else MOST_NEEDED  # so is a NaN
        part = share[j] - off * (apart + m * (shown + size)) / limit
        gain[j] = part if part > 0 else 0.0
        hidden += apart
    return hidden


@njit()
def limits(size, tolerance, group, out):
    """What each head of a row may add to the layer's error, `out` [H]: the root of the sum of their
    squares is NEED_SHARE, or SHARED_NEED, of what `layer_holds` will allow, if the norms `size` [H]
    stay what they are."""
    share = SHARED_NEED if group >= SHARING else NEED_SHARE
    whole = 0.0
    for x in size:
        if x < np.inf:
            whole += x * x
    for h in range(len(size)):
        part = OWN_PART * size[h] ** 2 + (1 - OWN_PART) * whole / len(size)
        out[h] = share * tolerance / (1 + tolerance) * np.sqrt(part)


@njit()
def _needed(
    logs, squares, delta, noise, moved, summary, norm, output, off, unit, most, limit, marks
):
    """Mark the blocks that one head needs: those whose reading gains most, until its bound, E_round
    included, is at most `limit`. None if all are not enough: the head is likely to be recomputed,
    whatever is read. Whether any is marked.

    `output`: the norm of the output with all blocks quantized, what the norms of the blocks'
    outputs come to, the weighted norms of values that are in no block, and their mass."""
    size, shown, held, mass = output
    if not (norm > -np.inf and size < np.inf and 0 < limit < np.inf):
        return False
    share, gain = np.empty(len(logs), np.float32), np.empty((1, len(logs)), np.float32)
    hidden = _shares(
        logs, squares, delta, noise, moved, summary, norm, output, off, limit, share, gain[0]
    )
    around = (shown + hidden + held) * REFERENCE_SUMS + unit * size + ROUND_FLOOR
    around += off * (held + mass * size)
    total = around / limit + share.astype(np.float64).sum()
    if not total - gain.astype(np.float64).sum() <= 1:
        return False
    score = np.log2(gain[0] + np.float32(LOG_FLOOR))
    x = _search(score, gain, np.array([1 - total], np.float32), 0.0, 0, most)
    some = False
    for j in range(len(score)):
        if score[j] >= x:
            marks[j], some = 3, True
    return some


@njit()
def _choose(logs, eta, own, norm, row, length, options, marks):
    """Which blocks of a KV head are read exactly, beside those that a head needs: marks 1 keys, 3
    keys and values, 7 both for a spot check only. Returns the rungs that were climbed."""
    group, blocks = logs.shape
    coverage, least, most, v_tol, explore = options
    mass = np.exp(logs - norm.reshape(-1, 1))
    score, worth = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for j in range(blocks):
        top = 0.0  # a head's NaN counts for nothing: it is recomputed anyway
        for g in range(group):
            if mass[g, j] > top:
                top = mass[g, j]
        score[j] = np.log(np.float64(top) + LOG_FLOOR) / np.log(2.0)
        worth[j] = score[j] + np.log(np.float64(eta[j]) + LOG_FLOOR) / np.log(2.0)
    x = _search(score, mass, own, coverage, least, most)
    marks[:] = np.maximum(marks, (score >= x).astype(np.int32))
    rung = 0
    x = np.log(v_tol + LOG_FLOOR) / np.log(2.0)
    for j in range(blocks):
        if worth[j] >= x:
            marks[j], rung = 3, VALUES
        elif explored(j, row, length, explore):
            marks[j] = 3 if marks[j] > 0 else 7
    return rung


@njit()
def ranks_agree(rough, exact, marks, reach, depth):
    """(the first `depth` of the marked blocks by quantized and by exact log-mass are the same, and
    no other block can be among them). Ties go to the lower block."""
    if depth == 0:
        return True, True
    done_r, done_e = np.zeros(len(marks), np.bool_), np.zeros(len(marks), np.bool_)
    agree, least = True, np.inf
    for _ in range(depth):
        best_r, best_e = -1, -1
        for j in range(len(marks)):
            if marks[j] > 0:
                if not done_r[j] and (best_r < 0 or rough[j] > rough[best_r]):
                    best_r = j
                if not done_e[j] and (best_e < 0 or exact[j] > exact[best_e]):
                    best_e = j
        if best_r < 0:
            return agree, not reach > -np.inf
        done_r[best_r], done_e[best_e] = True, True
        agree, least = agree and best_r == best_e, exact[best_e]
    return agree, not reach >= least


@njit()
def _values(codes, meta, out):
    """Dequantized values [block, D] of one block; `meta` [block, groups, 2] is (scale, zero)."""
    columns = codes.shape[1]
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            code = codes[n, c % columns] >> 4 * (c // columns) & 15
            out[n, c] = code * meta[n, c // 16, 0] + meta[n, c // 16, 1]


@njit()
def _add(p, values, seen, extra, acc, norms):
    """acc [G, D] += p values, norms [G] += p (||v|| + extra); p [G, n] float64."""
    for n in range(values.shape[0]):
        if not seen[n]:
            continue
        size = 0.0
        for d in range(values.shape[1]):
            size += np.float64(values[n, d]) ** 2
        size = np.sqrt(size) + extra
        for g in range(p.shape[0]):
            norms[g] += p[g, n] * size
            for d in range(values.shape[1]):
                acc[g, d] += p[g, n] * values[n, d]


@njit()
def _quantized_scores(q, codes, meta, seen, low, softcap, found):
    """Of each block, by its INT8 keys, into `found`: scores; and per head the logarithms of the sum
    of exponentials and of their squares, and both of `_deviations`."""
    block = codes.shape[1]
    delta, noise = np.empty(q.shape[0]), np.empty(q.shape[0])
    for j in range(codes.shape[0]):
        at = low + j * block
        keys = codes[j] * meta[j, 0] + meta[j, 1]
        _scores(q, keys, seen[at : at + block], softcap, found.scores[j])
        _deviations(q, meta[j], softcap, delta, noise)
        for g in range(q.shape[0]):
            found.logs[g, j] = _log_sum(found.scores[j, g])
            found.squares[g, j] = _log_squares(found.scores[j, g])
            found.delta[g, j], found.noise[g, j] = delta[g], noise[g]


@njit()
def attend_group(q, k, v, seen, codes, meta, v_codes, v_meta, low, length, scale, softcap, found):
    """The pass of the heads `q [G, D]` of one (row, KV head) over its quantized blocks, and over
    what is in none, into the `Pass` `found`. `k, v` are the row's originals, `codes` and the rest
    its quantized blocks, `seen [S]` what the key mask shows."""
    group = q.shape[0]
    blocks, block = codes.shape[:2]
    edge = low + blocks * block  # from here on the originals are read
    scaled = q * np.float32(scale)
    rest = np.empty((group, max(0, length - edge)), np.float32)
    _scores(scaled, k[edge:length], seen[edge:length], softcap, rest)
    _quantized_scores(scaled, codes, meta, seen, low, softcap, found)
    for g in range(group):
        last = found.last[g] = _log_sum(rest[g])
        norm = found.norm[g] = np.logaddexp(np.float64(_log_sum(found.logs[g])), np.float64(last))
        found.own[g] = np.exp(last - norm) if norm > -np.inf else 1.0
    found.acc[:], found.held[:], found.parts[:] = 0.0, 0.0, 0.0
    weights = _weights(rest, found.norm)
    _add(weights, v[edge:length], seen[edge:length], 0.0, found.acc, found.held)
    found.widest[0], found.reach[:] = _extremes(
        scaled, k[edge:length], v[edge:length], seen[edge:length]
    )
    values, norms = np.empty((block, q.shape[1]), np.float32), np.zeros(group)
    for j in range(blocks):
        at = low + j * block
        _values(v_codes[j], v_meta[j], values)
        weights = _weights(found.scores[j], found.norm)
        _add(weights, values, seen[at : at + block], 0.0, found.parts[j], norms)
    for g in range(group):
        whole = found.acc[g].copy()  # the output with all blocks quantized
        shown = 0.0
        for j in range(blocks):
            whole += found.parts[j, g]
            shown += np.sqrt((found.parts[j, g] ** 2).sum())
        found.size[g], found.shown[g] = np.sqrt((whole**2).sum()), shown


@njit()
def _rescore(q, k, seen, low, softcap, marks, delta, scores, exact):
    """Put exact scores into the marked blocks' `scores` and `exact` [G, blocks], their
    log-masses. Whether a score was further off than its bound."""
    group, block = q.shape[0], scores.shape[2]
    wrong = False
    mixed = np.empty((group, block), np.float32)
    for j in range(len(marks)):
        if marks[j] == 0:
            continue
        at = low + j * block
        _scores(q, k[at : at + block], seen[at : at + block], softcap, mixed)
        for g in range(group):
            for n in range(block):
                off = abs(mixed[g, n] - scores[j, g, n])
                wrong = wrong or (seen[at + n] and not off <= delta[g, j])
            exact[g, j] = _log_sum(mixed[g])
        scores[j] = mixed
    return wrong


@njit()
def _add_marked(scores, final, v, v_codes, v_meta, eta, seen, low, marks, acc, held):
    """Add the marked blocks to the outputs `acc` and to `held`, the weighted norms of values.
    Whether an exactly read value was further off than its bound."""
    block = scores.shape[2]
    wrong = False
    values = np.empty((block, acc.shape[1]), np.float32)
    for j in range(len(marks)):
        if marks[j] == 0:
            continue
        at = low + j * block
        _values(v_codes[j], v_meta[j], values)
        if marks[j] & 2 > 0:
            for n in range(block):
                error = 0.0
                for d in range(values.shape[1]):
                    error += (np.float64(values[n, d]) - v[at + n, d]) ** 2
                wrong = wrong or (seen[at + n] and not np.sqrt(error) <= eta[j])
            values[:] = v[at : at + block]
        _add(_weights(scores[j], final), values, seen[at : at + block], eta[j], acc, held)
    return wrong


@njit()
def _bounds(tail, worst, mass, held, size, widest, reach, delta, noise, softcap, unit, bounds, end):
    """Write one head's six `bounds`, and into `end` what `layer_holds` needs of it: the whole
    bound, and what the norm of its exact output is at least. Whether the bound is finite. A head
    whose values are zero is exact.

    `tail` and `worst` are `_tail`'s, the latter with what exactly read keys add; `mass` is the
    mass of exactly read tokens, `held` their values' weighted norms, `size` the output's norm,
    `widest` and `reach` are `_extremes`', `delta` and `noise` [blocks] are `_deviations`'."""
    highest = delta.max() if len(delta) > 0 else 0.0
    off = _reads_off(noise, reach, softcap)
    around = ((tail[3] + held) * REFERENCE_SUMS + unit * size) * CARE + ROUND_FLOOR
    centre = min(size + worst * CARE + around, (tail[3] + held) * CARE)
    tight, paper = key_bound(tail, centre, mass * off, highest)
    left = 1 - tail[1] - mass * off
    wide = max(widest, tail[5])
    apart = 2 * wide  # two means of values, whatever the weights
    moves = (held + mass * centre) * off / left if left > 0 else np.inf
    around += min(apart, moves) * CARE
    bounds[0], bounds[3] = tight, tight
    bounds[1], bounds[4] = worst * CARE, worst * CARE
    bounds[2], bounds[5] = around, paper
    full = tight + bounds[1] + around
    finite = full < np.inf
    counts = finite and wide > VANISHED
    end[0] = full if counts else 0.0
    end[1] = max(size * (1 - 2 * unit) / CARE - full, 0.0) if counts else 0.0
    return finite


@njit()
def certify_group(
    q,
    k,
    v,
    seen,
    v_codes,
    v_meta,
    summary,
    low,
    length,
    row,
    scale,
    softcap,
    sinks,
    depth,
    capacity,
    unit,
    options,
    found,
    limit,
    out,
    lse,
    bounds,
    ends,
    rung,
    counts,
    marks,
):
    """The heads `q [G, D]` of one (row, KV head), up to what only they need, from what
    `attend_group` has `found`; `limit` [G] is `limits`'. Returns whether a score or value was
    further off than its bound."""
    group, blocks = q.shape[0], len(marks)
    scaled = q * np.float32(scale)
    eta = summary[:, 0].copy()
    # Copies are contiguous, and what is read exactly is put into the scores.
    logs, squares = found.logs.copy(), found.squares.copy()
    delta, noise = found.delta.copy(), found.noise.copy()
    scores, parts, norm, own = found.scores, found.parts, found.norm, found.own
    moved = np.empty(group)
    climbed = 0
    marks[:] = 0
    for g in range(group):
        moved[g] = np.sqrt((scaled[g].astype(np.float64) ** 2).sum()) * CARE
        if _needed(
            logs[g],
            squares[g],
            delta[g],
            noise[g],
            moved[g],
            summary,
            norm[g],
            (found.size[g], found.shown[g], found.held[g], np.float64(own[g])),
            _reads_off(noise[g], found.reach[g], softcap),
            unit,
            options[2],
            limit[g],
            marks,
        ):
            climbed = NEEDED
    climbed |= _choose(logs, eta, own, norm, row, length, options, marks)
    counts[0], counts[1] = (marks > 0).sum(), (marks & 2 > 0).sum()
    exact = logs.copy()
    wrong = _rescore(scaled, k, seen, low, softcap, marks, delta, scores, exact)

    final = np.empty(group)  # of the denominators' logarithms, sinks included
    acc, held = np.empty((group, q.shape[1])), np.empty(group)
    for g in range(group):
        lse[g] = np.logaddexp(np.float64(_log_sum(exact[g])), np.float64(found.last[g]))
        final[g] = np.logaddexp(lse[g], sinks[g]) if sinks.shape[0] > 0 else lse[g]
        here = np.exp(norm[g] - final[g]) if norm[g] > -np.inf else 0.0
        acc[g], held[g] = found.acc[g] * here, found.held[g] * here
        for j in range(blocks):
            if marks[j] == 0:
                acc[g] += parts[j, g] * here
    wrong |= _add_marked(scores, final, v, v_codes, v_meta, eta, seen, low, marks, acc, held)
    for g in range(group):
        sees = lse[g] > -np.inf or np.isnan(lse[g])
        out[g] = acc[g] if sees else np.zeros_like(acc[g])
        base = 0.0 if final[g] == -np.inf else final[g]
        tail, worst, reach = _tail(
            logs[g], squares[g], delta[g], noise[g], moved[g], summary, marks, base
        )
        mass = np.exp(np.float64(found.last[g]) - base)
        for j in range(blocks):
            if marks[j] > 0:
                m = np.exp(np.float64(exact[g, j]) - base)
                mass += m
                worst += m * eta[j] if marks[j] == 1 else 0.0
        finite = _bounds(
            tail,
            worst,
            mass,
            held[g],
            np.sqrt((out[g].astype(np.float64) ** 2).sum()),
            found.widest[0],
            found.reach[g],
            delta[g],
            noise[g],
            softcap,
            unit,
            bounds[g],
            ends[g],
        )
        agree, safe = ranks_agree(logs[g], exact[g], marks, reach, depth)
        rung[g] = climbed | (0 if agree else RANKING) | (0 if safe else BOUNDARY)
        rung[g] |= 0 if finite or blocks == 0 else BOUND
        rung[g] |= CAPACITY if counts[0] > capacity else 0
        if blocks == 0 or not sees:
            ends[g] = 0.0  # nothing is quantized, or nothing is there
    return wrong


@njit()
def layer_holds(ends, rung, tolerance, layer):
    """Mark the heads of a row that must be recomputed for its layer's sake: in the order of their
    bounds, those from which on the root of the sum of the squares is above `tolerance` times the
    norm that the exact heads have at least. `ends` [H, 2] are both of each head. Writes what came
    of it into `layer`: the root for the heads that are returned as they are, and the norm."""
    whole = np.sqrt((ends[:, 1] ** 2).sum())
    limit = tolerance * whole if tolerance < np.inf else np.inf
    kept = 0.0
    for h in range(len(rung)):
        if rung[h] & (RANKING | BOUNDARY | BOUND | CAPACITY) > 0:
            rung[h] |= HEAD
    for h in np.argsort(ends[:, 0], kind="mergesort"):
        if rung[h] & HEAD == 0:
            spent = kept + ends[h, 0] ** 2
            if np.sqrt(spent) * CARE <= limit:
                kept = spent
            else:
                rung[h] |= BOUND | HEAD
    layer[0], layer[1] = np.sqrt(kept) * CARE, whole


@njit()
def _weights(scores, norm):
    """Softmax weights of scores [G, n] relative to the logarithms `norm` [G], in float64."""
    weights = np.empty(scores.shape)
    for g in range(scores.shape[0]):
        for n in range(scores.shape[1]):
            weights[g, n] = np.exp(np.float64(scores[g, n]) - np.float64(norm[g]))
    return weights


@njit()
def _extremes(q, k, v, seen):
    """Of exactly read tokens: the largest ||v||, and per head what arithmetic can move a score."""
    widest, noise = 0.0, np.zeros(q.shape[0])
    for n in range(k.shape[0]):
        if not seen[n]:
            continue
        size = 0.0
        for d in range(k.shape[1]):
            size += np.float64(v[n, d]) ** 2
        widest = max(widest, np.sqrt(size))
        for g in range(q.shape[0]):
            reach = 0.0
            for d in range(k.shape[1]):
                reach += abs(np.float64(q[g, d]) * k[n, d])
            noise[g] = max(noise[g], (k.shape[1] + DOT_EXTRA) * DOT_SLACK * reach)
    return widest, noise


@njit()
def rounding(widest, noise, size, unit):
    """What arithmetic alone can make of an output of norm `size`: sums of values up to `widest`
    with exact scores off by `noise`, stored in a dtype of unit roundoff `unit`."""
    return (widest * (REFERENCE_SUMS + SCORE_CARE * noise) + unit * size) * CARE + ROUND_FLOOR


@njit()
def exact_group(q, k, v, mask, low, length, scale, softcap, sinks, unit, out, lse, bounds, rung):
    """Recompute the flagged heads of one (row, KV head) from the originals."""
    again = False
    for g in range(q.shape[0]):
        again = again or rung[g] & (HEAD | ROW) > 0
    if not again:
        return
    group, width = q.shape
    fresh = np.empty((group, 1, width), np.float32)
    fresh_lse = np.empty((group, 1), np.float32)
    tokens = np.ascontiguousarray(q).reshape(group, 1, width)
    reference_rows(tokens, k, v, mask, length - 1, low, 0, sinks, scale, softcap, fresh, fresh_lse)
    seen = np.ones(length - low, np.bool_)
    if mask.shape[0] > 0:
        seen = mask[low:length]
    widest, noise = _extremes(q * np.float32(scale), k[low:length], v[low:length], seen)
    sums = (
        REFERENCE_SUMS + (length - low) * REFERENCE_TOKEN
    )  # of as many terms, one after the other
    for g in range(group):
        if rung[g] & (HEAD | ROW) > 0:
            out[g], lse[g] = fresh[g, 0], fresh_lse[g, 0]
            bounds[g, 0], bounds[g, 1] = 0.0, 0.0
            size = np.sqrt((out[g].astype(np.float64) ** 2).sum())
            bounds[g, 2] = rounding(widest, noise[g] + sums, size, unit)


@njit()
def _passes(items, blocks, group, block, width):
    """Room for the `Pass` of so many (row, KV head)s, in one more dimension: its fields, as numba
    takes no named tuple into a parallel loop."""
    per_block, of_heads = (items, group, blocks), (items, group)
    return (
        np.empty((items, blocks, group, block), np.float32),
        np.empty((items, blocks, group, width)),
        np.empty(per_block, np.float32),
        np.empty(per_block, np.float32),
        np.empty(per_block),
        np.empty(per_block),
        np.empty((items, group, width)),
        np.empty(of_heads),
        np.empty(of_heads, np.float32),
        np.empty(of_heads, np.float32),
        np.empty(of_heads),
        np.empty((items, 1)),
        np.empty(of_heads, np.float32),
        np.empty(of_heads),
    )


@njit()
def _pass_of(every, size, item, blocks):
    """The `Pass` of one (row, KV head) of so many blocks."""
    scores, parts, logs, squares, delta, noise = every[:6]
    acc, held, last, own, reach, widest, norm, shown = every[6:]
    return Pass(
        scores[item, :blocks],
        parts[item, :blocks],
        logs[item, :, :blocks],
        squares[item, :, :blocks],
        delta[item, :, :blocks],
        noise[item, :, :blocks],
        acc[item],
        held[item],
        last[item],
        own[item],
        reach[item],
        widest[item],
        norm[item],
        shown[item],
        size[item],
    )


@njit(parallel=True)
def reference(
    q,
    k,
    v,
    tier,
    raw,
    blocks,
    lengths,
    start,
    mask,
    scale,
    softcap,
    sinks,
    depth,
    capacity,
    tolerance,
    unit,
    options,
    out,
    lse,
    bounds,
    rungs,
    layer,
    counts,
    marks,
):
    """Attend to the quantized blocks of every (row, KV head), certify them, and recompute what
    failed; each in parallel."""
    batch, heads, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wrong = np.zeros(batch * kv_heads, np.int32)
    codes, meta, v_codes, v_meta, summary = tier
    every = _passes(batch * kv_heads, marks.shape[2], group, codes.shape[3], width)
    size, ends = np.empty((batch * kv_heads, group)), np.empty((batch, heads, 2))
    limit = np.empty((batch, heads))
    k_bits, v_words, check = raw
    for index in prange(batch * kv_heads):
        # Of one type: in parallel it is another, and all that it is given to compiles twice.
        item = np.int64(index)
        b, h = item // kv_heads, item % kv_heads
        own = slice(h * group, h * group + group)
        shown = np.ones(k.shape[2], np.bool_)
        if mask.shape[1] > 0:
            shown = mask[b, : k.shape[2]]
        n = blocks[b]
        for j in range(n):
            words = check_words(
                j,
                codes[b, h, j],
                k_bits[b, h, j],
                v_codes[b, h, j],
                v_words[b, h, j],
                summary[b, h, j],
            )
            for i in range(2):
                if (words[i] - check[b, h, j, i]) & 0xFFFFFFFF != 0:
                    wrong[item] |= CHECK
        attend_group(
            q[b, own],
            k[b, h],
            v[b, h],
            shown,
            codes[b, h, :n],
            meta[b, h, :n],
            v_codes[b, h, :n],
            v_meta[b, h, :n],
            start[b],
            lengths[b],
            scale,
            softcap,
            _pass_of(every, size, item, n),
        )
    for b in range(batch):
        norms = size[b * kv_heads : b * kv_heads + kv_heads].ravel()
        limits(norms, tolerance, group, limit[b])
    for index in prange(batch * kv_heads):
        item = np.int64(index)
        b, h = item // kv_heads, item % kv_heads
        own = slice(h * group, h * group + group)
        shown = np.ones(k.shape[2], np.bool_)
        if mask.shape[1] > 0:
            shown = mask[b, : k.shape[2]]
        n = blocks[b]
        if certify_group(
            q[b, own],
            k[b, h],
            v[b, h],
            shown,
            v_codes[b, h, :n],
            v_meta[b, h, :n],
            summary[b, h, :n],
            start[b],
            lengths[b],
            item,
            scale,
            softcap,
            sinks[own],
            depth,
            capacity,
            unit,
            options,
            _pass_of(every, size, item, n),
            limit[b, own],
            out[b, own],
            lse[b, own],
            bounds[b, own],
            ends[b, own],
            rungs[b, own],
            counts[b, h],
            marks[b, h, :n],
        ):
            wrong[item] |= SCORE
    for b in range(batch):
        layer_holds(ends[b], rungs[b], tolerance, layer[b])
        row = 0
        for i in range(b * kv_heads, b * kv_heads + kv_heads):
            row |= wrong[i]
        if row > 0:  # a tier that is not to be trusted says nothing of norms either
            for i in range(heads):
                rungs[b, i] |= row | ROW
            layer[b] = 0.0
    for index in prange(batch * kv_heads):
        item = np.int64(index)
        b, h = item // kv_heads, item % kv_heads
        own = slice(h * group, h * group + group)
        exact_group(
            q[b, own],
            k[b, h],
            v[b, h],
            mask[b * len(mask) // batch],
            start[b],
            lengths[b],
            scale,
            softcap,
            sinks[own],
            unit,
            out[b, own],
            lse[b, own],
            bounds[b, own],
            rungs[b, own],
        )
