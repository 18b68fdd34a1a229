"""The numba references of select_blocks (scores of blocks by their summaries, and the choice of the
best) and of tiered_decode's slots. They are the specification, and the CPU path."""

import numpy as np

from attnplug.ops.common.numba_cache import njit, prange

RANKED = 32  # lists of up to so many blocks are best first, longer ones ascend


@njit()
def _bound(q, high, low):
    score = np.float32(0.0)
    for d in range(q.shape[0]):
        score += q[d] * (high[d] if q[d] > 0 else low[d])
    return score


@njit()
def _scores(q, bounds):
    """float32 scores `[blocks]` of summaries `bounds [blocks, 2, D]` for a group `q [G, D]`."""
    scores = np.full(bounds.shape[0], -np.inf, np.float32)
    for j in range(bounds.shape[0]):
        for g in range(q.shape[0]):
            score = _bound(q[g], bounds[j, 0], bounds[j, 1])
            scores[j] = score if score > scores[j] or score != score else scores[j]
    return scores


@njit()
def _code_scores(q, codes, centre, unit, scale, width):
    """`_scores` of summaries in INT8: by bounds, `codes [blocks, 2, D]`, or by bands, whose codes
    have one part, and widths."""
    group, blocks = q.shape[0], codes.shape[0]
    scores = np.full(blocks, -np.inf, np.float32)
    level, last = np.empty(q.shape[1], np.int64), codes.shape[1] - 1
    for g in range(group):
        scaled = q[g] * unit
        top, middle, reach = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for d in range(q.shape[1]):
            top, reach = max(top, abs(scaled[d])), reach + abs(scaled[d])
            middle += q[g, d] * centre[d] + q[g, d] * np.float32(0.0)  # what is not finite: NaN
        inverse = np.float32(16256) / top if 0 < top < np.inf else np.float32(0.0)
        for d in range(q.shape[1]):
            exact = scaled[d] * inverse
            level[d] = int(np.rint(exact)) if abs(exact) <= 16257 else 0
        for j in range(blocks):
            total = 0
            for d in range(q.shape[1]):
                total += level[d] * codes[j, 0 if level[d] > 0 else last, d]
            quantum = top * np.float32(1 / 16256)
            score = np.float32(total) * quantum * scale[j] + middle
            if width.shape[0] > 0:
                score += reach * width[j]
            scores[j] = score if score > scores[j] or score != score else scores[j]
    return scores


@njit()
def _best(scores, allowed, out):
    """The allowed blocks of highest score, best first, into `out [top_k]`; NaN counts as inf."""
    best = np.empty(out.shape[0], np.float32)
    count = 0
    for j in range(scores.shape[0]):
        if not allowed[j]:
            continue
        score = scores[j] if scores[j] == scores[j] else np.float32(np.inf)
        if count < out.shape[0]:
            place, count = count, count + 1
        elif out.shape[0] > 0 and score > best[count - 1]:
            place = count - 1
        else:
            continue
        while place > 0 and score > best[place - 1]:
            best[place], out[place] = best[place - 1], out[place - 1]
            place -= 1
        best[place], out[place] = score, j
    out[count:] = -1


@njit()
def _ascend(listed):
    """Sort a list's blocks, -1 last."""
    count = 0
    while count < listed.shape[0] and listed[count] >= 0:
        count += 1
    listed[:count] = np.sort(listed[:count])


@njit(parallel=True)
def choose_blocks(q, bounds, frame, mask, lengths, start, block, sink, local, out):
    """Scores and choice of every (row, KV head, query), in parallel. With scales in the `frame`
    (centre, unit, scales, widths) the bounds are codes."""
    centre, unit, scales, widths = frame
    batch, heads, queries, _ = q.shape
    kv_heads = bounds.shape[1]
    group = heads // kv_heads
    for item in prange(batch * kv_heads * queries):
        b = item // (kv_heads * queries)
        h = item // queries % kv_heads
        t = item % queries
        position = lengths[b] - queries + t - start[b]
        end = max(position // block - local + 1, sink)
        allowed = np.ones(end - sink, np.bool_)
        hidden = mask[b * len(mask) // batch]
        if hidden.shape[0] > 0:
            for j in range(sink, end):
                first = start[b] + j * block
                allowed[j - sink] = hidden[first : first + block].any()
        shown = bounds[b, h, sink:end][allowed]
        scores = np.empty(end - sink, np.float32)
        query = q[b, h * group : h * group + group, t]
        if scales.shape[2] > 0:
            own_scales, own_widths = scales[b, h, sink:end][allowed], widths[b, h, sink:end]
            if widths.shape[2] > 0:
                own_widths = own_widths[allowed]
            scores[allowed] = _code_scores(
                query, shown, centre[b, h], unit[b, h], own_scales, own_widths
            )
        else:
            scores[allowed] = _scores(query, shown)
        _best(scores, allowed, out[b, h, t])
        if out.shape[3] > RANKED:
            _ascend(out[b, h, t])
        for i in range(out.shape[3]):
            out[b, h, t, i] += sink if out[b, h, t, i] >= 0 else 0


@njit()
def place_blocks(listed, start, edge, block, table, owner, used, counters):
    """Give slots to the blocks `listed` of one row's KV head that lie before `edge`. Returns the
    blocks that must be copied to their slots, which the table now holds."""
    slots = owner.shape[0]
    missing = np.empty(len(listed), np.int64)
    count = 0
    for j in listed:
        if 0 <= j < edge:
            counters[0] += 1
            if owner[table[j]] == start + j * block:
                counters[1] += 1
                used[table[j]] = 2
            else:
                missing[count], count = j, count + 1
    hand, last, given = counters[2], -1, 0
    free = np.empty(count, np.int64)
    for wanted in range(2):
        for turn in range(slots):
            slot = (hand + turn) % slots
            if given < count and used[slot] == wanted:
                free[given], given, last = turn, given + 1, max(last, turn)
    for turn in range(slots):
        slot = (hand + turn) % slots
        used[slot] = 1 if used[slot] == 2 or (used[slot] == 1 and turn > last) else 0
    for i in range(count):
        slot = (hand + free[i]) % slots
        table[missing[i]], owner[slot], used[slot] = slot, start + missing[i] * block, 0
    counters[2] = (hand + last + 1) % slots
    return missing[:count]
