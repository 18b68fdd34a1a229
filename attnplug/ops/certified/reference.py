"""The numba reference of `certified_attention`: the specification, in natural logarithms.

One (row, KV head) at a time: score with the quantized keys, choose what is read exactly, attend to
the mixture, bound the error, check. Only the check of a whole row (rung 4) looks at other heads.

This file is over 450 lines because numba's cache of a compiled function looks at the file in which
the function stands, and not at the files of what it calls. `PROOF` guards what comes from
`proof.py`.
"""

import numba
import numpy as np

from attnplug.ops.certified.proof import (
    BOUND,
    BOUNDARY,
    BUDGET_SHARE,
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
    EXPANDED,
    EXPM1_SLACK,
    HEAD,
    LOG_FLOOR,
    NOISE_FLOOR,
    RANKING,
    REFERENCE_SUMS,
    REFERENCE_TOKEN,
    ROUND_FLOOR,
    ROUNDS,
    ROW,
    SCORE,
    SCORE_CARE,
    SUM_SLACK,
    VALUES,
    WAYS,
)
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import reference_rows

PROOF = "3044f1073df8bc31"  # `proof.digest()` of the constants that numba compiles in here


@numba.njit(cache=True)
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


@numba.njit(cache=True)
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
    for i in range(2):
        second += (1 + 6 * i) * np.int64(bits[i])
    return first, second


@numba.njit(cache=True)
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


@numba.njit(cache=True)
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


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _search(score, mass, own, coverage, least, most, target):
    """The largest x of a fixed grid such that blocks with score >= x are enough: `target` of them
    or, where that is 0, `least` that cover every head's mass, or `most`. If it takes more than
    `most`, the smallest that do not."""
    low, high = DEEPEST, 1.0
    for _ in range(ROUNDS):
        step = (high - low) / (WAYS + 1)
        passed = 0
        for i in range(WAYS):
            count, short = _above(score, mass, own, low + step * (i + 1), coverage)
            enough = count >= target if target > 0 else count >= least and not short
            passed += enough or count >= most
        low, high = low + step * passed, low + step * (passed + 1)
    return low if _above(score, mass, own, low, coverage)[0] <= most else high


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def key_bound(tail, top):
    """The tight bound and the paper's, of one head.

    `tail` [6]: over the blocks left quantized, with the final masses m, the sums of m (e^D - 1),
    m (1 - e^-D), m nu, m nu e^D and m, and the largest nu of all blocks; `top` [2]: the exactly
    scored tokens' mass-weighted norms, and the largest D of all blocks."""
    over, under, plain, grown, mass, largest = tail
    exact, deviation = top
    if mass == 0:
        return 0.0, 0.0
    if not under < 1:
        return np.inf, np.inf
    up, down = over / (1 + over), under / (1 - under)
    slack = plain * SUM_SLACK
    tight = exact * max(up, down) + grown / (1 - under) - plain + max(0.0, up - down) * plain
    ratio = np.exp(2 * deviation)
    return (tight + slack) * CARE, 2 * largest * ratio * mass * (ratio - 1) * CARE


@numba.njit(cache=True)
def _tail(logs, delta, eta, nu, marks, norm):
    """Sums of one head over the blocks left quantized, for `key_bound`; and of their m eta, and the
    largest log-mass that one of them can have. `norm` is the logarithm of the denominator."""
    sums = np.zeros(6)
    worst, reach = 0.0, -np.inf
    for j in range(logs.shape[0]):
        sums[5] = max(sums[5], nu[j] + eta[j])
        if marks[j] == 0:
            m = np.exp(np.float64(logs[j]) - norm)
            sums[0] += m * (np.expm1(delta[j]) + EXPM1_SLACK)
            sums[1] += m * (-np.expm1(-delta[j]) + EXPM1_SLACK)
            sums[2] += m * nu[j]
            sums[3] += m * nu[j] * np.exp(delta[j])
            sums[4] += m
            worst += m * eta[j]
            high = logs[j] + delta[j]
            reach = high if high > reach or high != high else reach
    return sums, worst, reach


@numba.njit(cache=True)
def _choose(logs, delta, eta, nu, own, norm, row, length, options, marks):
    """Which blocks of a KV head are read exactly: marks 1 keys, 3 keys and values, 7 both for a
    spot check only. Returns the rungs that were climbed."""
    group, blocks = logs.shape
    coverage, least, most, v_tol, budget, key_tolerance, explore = options
    mass = np.exp(logs - norm.reshape(-1, 1))
    score, worth = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for j in range(blocks):
        top = 0.0  # a head's NaN counts for nothing: it is recomputed anyway
        for g in range(group):
            if mass[g, j] > top:
                top = mass[g, j]
        score[j] = np.log(np.float64(top) + LOG_FLOOR) / np.log(2.0)
        worth[j] = score[j] + np.log(np.float64(eta[j]) + LOG_FLOOR) / np.log(2.0)
    x = _search(score, mass, own, coverage, least, most, 0)
    rung = 0
    marks[:] = (score >= x).astype(np.int32)
    if key_tolerance < np.inf and _loose(logs, delta, eta, nu, own, norm, marks, key_tolerance):
        x = _search(score, mass, own, coverage, least, 2 * most, 2 * max(marks.sum(), least))
        marks[:] = (score >= x).astype(np.int32)
        rung = EXPANDED
    x = np.log(v_tol + LOG_FLOOR) / np.log(2.0)
    if budget < np.inf:  # enough: what is promoted leaves at most the budget, with some room
        share = mass * eta.reshape(1, -1)
        own = np.empty(group, np.float32)
        for g in range(group):
            own[g] = BUDGET_SHARE * budget - share[g].sum()
        x = min(x, _search(worth, share, own, 0.0, 0, blocks + 1, 0))
    for j in range(blocks):
        if worth[j] >= x:
            marks[j], rung = 3, rung | VALUES
        elif explored(j, row, length, explore):
            marks[j] = 3 if marks[j] > 0 else 7
    return rung


@numba.njit(cache=True)
def _loose(logs, delta, eta, nu, own, norm, marks, key_tolerance):
    """Whether some head's tight bound, estimated from the quantized masses, is above tolerance."""
    for g in range(logs.shape[0]):
        tail, _, _ = _tail(logs[g], delta[g], eta, nu, marks, norm[g])
        exact = np.array([(1 - min(1.0, tail[4])) * tail[5], 0.0])
        if not key_bound(tail, exact)[0] <= key_tolerance:
            return True
    return False


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _values(codes, meta, out):
    """Dequantized values [block, D] of one block; `meta` [block, groups, 2] is (scale, zero)."""
    columns = codes.shape[1]
    for n in range(out.shape[0]):
        for c in range(out.shape[1]):
            code = codes[n, c % columns] >> 4 * (c // columns) & 15
            out[n, c] = code * meta[n, c // 16, 0] + meta[n, c // 16, 1]


@numba.njit(cache=True)
def _add(p, values, seen, acc, norms):
    """acc [G, D] += p values, norms [G] += p ||v||; p [G, n] float64."""
    for n in range(values.shape[0]):
        if not seen[n]:
            continue
        size = 0.0
        for d in range(values.shape[1]):
            size += np.float64(values[n, d]) ** 2
        size = np.sqrt(size)
        for g in range(p.shape[0]):
            norms[g] += p[g, n] * size
            for d in range(values.shape[1]):
                acc[g, d] += p[g, n] * values[n, d]


@numba.njit(cache=True)
def certify_group(
    q,
    k,
    v,
    seen,
    codes,
    meta,
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
    tolerance,
    unit,
    options,
    out,
    lse,
    bounds,
    rung,
    counts,
    marks,
):
    """The heads `q [G, D]` of one (row, KV head), up to what only they need. Returns whether a
    score or value was further off than its bound. `k, v` are the row's originals, `codes` and the
    rest its quantized blocks, `seen [S]` what the key mask shows."""
    group, width = q.shape
    blocks, block = codes.shape[0], codes.shape[1]
    edge = low + blocks * block  # from here on the originals are read
    scaled = q * np.float32(scale)
    eta, nu = summary[:, 0].copy(), summary[:, 1].copy()
    scores = np.empty((blocks, group, block), np.float32)
    logs = np.full((group, blocks), -np.inf, np.float32)
    delta, noise = np.zeros((group, blocks)), np.zeros((group, blocks))
    for j in range(blocks):
        at = low + j * block
        keys = codes[j] * meta[j, 0] + meta[j, 1]
        _scores(scaled, keys, seen[at : at + block], softcap, scores[j])
        _deviations(scaled, meta[j], softcap, delta[:, j], noise[:, j])
        for g in range(group):
            logs[g, j] = _log_sum(scores[j, g])
    rest = np.empty((group, max(0, length - edge)), np.float32)
    _scores(scaled, k[edge:length], seen[edge:length], softcap, rest)
    norm, own = np.empty(group, np.float32), np.empty(group, np.float32)
    for g in range(group):
        last = _log_sum(rest[g])
        norm[g] = np.logaddexp(np.float64(_log_sum(logs[g])), last)
        own[g] = np.exp(last - norm[g]) if norm[g] > -np.inf else 1.0
    climbed = _choose(logs, delta, eta, nu, own, norm, row, length, options, marks)
    exact, wrong = logs.copy(), False
    mixed = np.empty((group, block), np.float32)
    for j in range(blocks):
        if marks[j] == 0:
            continue
        at = low + j * block
        _scores(scaled, k[at : at + block], seen[at : at + block], softcap, mixed)
        for g in range(group):
            for n in range(block):
                off = abs(mixed[g, n] - scores[j, g, n])
                wrong = wrong or (seen[at + n] and not off <= delta[g, j])
            exact[g, j] = _log_sum(mixed[g])
        scores[j] = mixed
    counts[0], counts[1] = (marks > 0).sum(), (marks & 2 > 0).sum()

    final = np.empty(group)  # of the denominators' logarithms, sinks included
    for g in range(group):
        lse[g] = np.logaddexp(np.float64(_log_sum(exact[g])), np.float64(_log_sum(rest[g])))
        final[g] = np.logaddexp(lse[g], sinks[g]) if sinks.shape[0] > 0 else lse[g]
    acc, norms = np.zeros((group, width)), np.zeros((group, 2))
    values = np.empty((block, width), np.float32)
    weights = np.empty((group, block))
    for j in range(blocks):
        at = low + j * block
        _values(v_codes[j], v_meta[j], values)
        if marks[j] & 2 > 0:
            for n in range(block):
                error = 0.0
                for d in range(width):
                    error += (np.float64(values[n, d]) - v[at + n, d]) ** 2
                wrong = wrong or (seen[at + n] and not np.sqrt(error) <= eta[j])
            values[:] = v[at : at + block]
        for g in range(group):
            for n in range(block):
                weights[g, n] = np.exp(np.float64(scores[j, g, n]) - final[g])
        _add(weights, values, seen[at : at + block], acc, norms[:, marks[j] & 1])
    weights = np.empty((group, max(0, length - edge)))
    for g in range(group):
        for n in range(length - edge):
            weights[g, n] = np.exp(np.float64(rest[g, n]) - final[g])
    _add(weights, v[edge:length], seen[edge:length], acc, norms[:, 1])
    widest, reach_q = _extremes(scaled, k[edge:length], v[edge:length], seen[edge:length])
    for g in range(group):
        if lse[g] == -np.inf:  # nothing to see
            acc[g] = 0.0
        out[g] = acc[g]
        rung[g] = climbed
        tail, worst, reach = _tail(logs[g], delta[g], eta, nu, marks, final[g])
        held = norms[g, 1]
        for j in range(blocks):
            if marks[j] == 1:  # exact keys, quantized values
                m = np.exp(np.float64(exact[g, j]) - final[g])
                worst += m * eta[j]
                held += m * eta[j]
        highest = delta[g].max() if blocks > 0 else 0.0
        tight, paper = key_bound(tail, np.array([held, highest]))
        bounds[g, 0], bounds[g, 3] = tight, tight
        bounds[g, 1], bounds[g, 4] = worst * CARE, worst * CARE
        bounds[g, 5] = paper
        loudest = noise[g].max() if blocks > 0 else 0.0
        bounds[g, 2] = rounding(
            max(tail[5], widest), max(loudest, reach_q[g]), np.sqrt((out[g] ** 2).sum()), unit
        )
        agree, safe = ranks_agree(logs[g], exact[g], marks, reach, depth)
        rung[g] |= (0 if agree else RANKING) | (0 if safe else BOUNDARY)
        whole = bounds[g, 0] + bounds[g, 1] + bounds[g, 2]
        fits = whole < np.inf and whole <= tolerance and bounds[g, 1] <= options[4]
        rung[g] |= 0 if fits or blocks == 0 else BOUND
        rung[g] |= CAPACITY if counts[0] > capacity else 0
    return wrong


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def rounding(widest, noise, size, unit):
    """What arithmetic alone can make of an output of norm `size`: sums of values up to `widest`
    with exact scores off by `noise`, stored in a dtype of unit roundoff `unit`."""
    return (widest * (REFERENCE_SUMS + SCORE_CARE * noise) + unit * size) * CARE + ROUND_FLOOR


@numba.njit(cache=True)
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


@numba.njit(parallel=True, cache=True)
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
    counts,
    marks,
):
    """Certify every (row, KV head), then recompute what failed; both in parallel."""
    batch, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wrong = np.zeros(batch * kv_heads, np.int32)
    codes, meta, v_codes, v_meta, summary = tier
    k_bits, v_words, check = raw
    for index in numba.prange(batch * kv_heads):
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
        if certify_group(
            q[b, own],
            k[b, h],
            v[b, h],
            shown,
            codes[b, h, :n],
            meta[b, h, :n],
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
            tolerance,
            unit,
            options,
            out[b, own],
            lse[b, own],
            bounds[b, own],
            rungs[b, own],
            counts[b, h],
            marks[b, h, :n],
        ):
            wrong[item] |= SCORE
    for index in numba.prange(batch * kv_heads):
        item = np.int64(index)
        b, h = item // kv_heads, item % kv_heads
        own = slice(h * group, h * group + group)
        row = 0
        for i in range(b * kv_heads, b * kv_heads + kv_heads):
            row |= wrong[i]
        for i in range(h * group, h * group + group):
            if rungs[b, i] & (RANKING | BOUNDARY | BOUND | CAPACITY) > 0:
                rungs[b, i] |= HEAD
            if row > 0:
                rungs[b, i] |= row | ROW
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
