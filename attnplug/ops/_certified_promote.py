"""The Triton kernel of `certified_attention` that chooses what is read exactly, sums up what the
bounds need of the rest, and reads what was chosen. To the base 2.

A row's KV head has CHUNKS programs, block j belonging to chunk j % CHUNKS. Each of them chooses for
the whole head, which costs no time as they all do it at once, and needs no list; then it sees to
its own blocks. As many programs as a group has heads merge the partial results meanwhile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops._certified_attend import (
    capped,
    load_codes,
    quantized_blocks,
    split_dot,
    values_of,
)
from attnplug.ops._certified_exact import load_values
from attnplug.ops._certified_select import block_sums, choose, marked, merge_head, norms
from attnplug.ops._quantize_kv_triton import bf16_value
from attnplug.ops.block_bounds import row_span


@triton.jit
def _insert(
    v, n, v0, n0, v1, n1, v2, n2, v3, n3, DEPTH: tl.constexpr
):  # fmt: skip
    """(v, n) put in its place in a descending list of up to four, after its equals."""
    up = v > v0
    v0, v = tl.where(up, v, v0), tl.where(up, v0, v)
    n0, n = tl.where(up, n, n0), tl.where(up, n0, n)
    if DEPTH > 1:
        up = v > v1
        v1, v = tl.where(up, v, v1), tl.where(up, v1, v)
        n1, n = tl.where(up, n, n1), tl.where(up, n1, n)
        up = v > v2
        v2, v = tl.where(up, v, v2), tl.where(up, v2, v)
        n2, n = tl.where(up, n, n2), tl.where(up, n2, n)
        up = v > v3
        v3, n3 = tl.where(up, v, v3), tl.where(up, n, n3)
    return v0, n0, v1, n1, v2, n2, v3, n3


@triton.jit
def promote(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, progress, lengths, start, key_mask, base,
    delta, noise, logs, partial, partial_lse, merged, found, counts, heads, changes, flags,
    coverage, least, most, v_tol, budget, key_tolerance, explore, scale, cap, S, N, splits,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr, OWN: tl.constexpr,
    FIELDS: tl.constexpr, DEPTH: tl.constexpr, FEW: tl.constexpr, COVERS: tl.constexpr,
    EXPANDS: tl.constexpr, BUDGETED: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of a KV head's blocks, or the merge of one of its heads. `found` gets FIELDS
    numbers of each head and chunk, `counts` how many blocks were taken, whole, and for their
    values' error, and whether rung 1 was climbed. Scores and values must be within their bounds."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0) - GROUP
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = b * tl.num_programs(1) + h
    if chunk < 0:
        merge_head(
            merged, partial, partial_lse, group * GROUP + tl.program_id(0), splits, D, DP, SPLITS
        )
        return
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    blocks = quantized_blocks(progress, b, length, low, BLOCK)
    g = tl.arange(0, GP)
    in_heads = g < GROUP
    row_g = group * GROUP + g
    norm, tail = norms(partial_lse, row_g, in_heads, splits, GP, SPLITS)
    empty = norm == float("-inf")
    shown = tl.where(empty, 0.0, norm)
    own = tl.where(empty, 1.0, tl.exp2(tail - shown))
    if chunk == 0:
        tl.store(heads + row_g * 2, norm, mask=in_heads)
        tl.store(heads + row_g * 2 + 1, tail, mask=in_heads)
    logs_at = logs + row_g * N
    delta_at = delta + row_g * N
    summary_at = summary + group * N * 2
    x, worth_x, climbed = choose(
        logs_at, delta_at, summary_at, shown, own, coverage, least, most, v_tol, budget,
        key_tolerance, blocks, in_heads, GP, TILE, FEW, COVERS, EXPANDS, BUDGETED,
    )  # fmt: skip

    i = tl.arange(0, OWN)
    j = chunk + i * CHUNKS
    there = j < blocks
    mask = there[:, None] & in_heads[None, :]
    log = tl.load(logs_at[None, :] + j[:, None], mask=mask, other=float("-inf"))
    deviation = tl.load(delta_at[None, :] + j[:, None], mask=mask, other=0.0)
    quiet = tl.load(noise + row_g[None, :] * N + j[:, None], mask=mask, other=0.0)
    eta = tl.load(summary_at + j * 2, mask=there, other=0.0)
    nu = tl.load(summary_at + j * 2 + 1, mask=there, other=0.0)
    mass = tl.exp2(log - shown[None, :])
    score = tl.log2(tl.max(mass, 1) + 1e-37)
    keys, values, worthy = marked(score, eta, x, worth_x, there, j, group, length, explore)
    over, under, plain, grown, left, worst, reach, largest, loudest, widest = block_sums(
        log, deviation, quiet, eta, nu, mass, keys
    )
    at = found + row_g * (FIELDS * CHUNKS) + chunk
    tl.store(at, over, mask=in_heads)
    tl.store(at + CHUNKS, under, mask=in_heads)
    tl.store(at + 2 * CHUNKS, plain, mask=in_heads)
    tl.store(at + 3 * CHUNKS, grown, mask=in_heads)
    tl.store(at + 4 * CHUNKS, left, mask=in_heads)
    tl.store(at + 5 * CHUNKS, worst, mask=in_heads)
    tl.store(at + 6 * CHUNKS, reach, mask=in_heads)
    tl.store(at + 7 * CHUNKS, largest, mask=in_heads)
    tl.store(at + 8 * CHUNKS, loudest, mask=in_heads)
    tl.store(at + 9 * CHUNKS, widest, mask=in_heads)
    taken = tl.sum(keys.to(tl.int32), 0)
    at = counts + group * (4 * CHUNKS) + chunk
    tl.store(at, taken)
    tl.store(at + CHUNKS, tl.sum(values.to(tl.int32), 0))
    tl.store(at + 2 * CHUNKS, tl.sum(worthy.to(tl.int32), 0))
    tl.store(at + 3 * CHUNKS, climbed)

    r = tl.arange(0, ROWS)
    in_group = r < GROUP
    row = group * GROUP + r
    at = found + row * (FIELDS * CHUNKS) + chunk
    if taken == 0:
        tl.store(at + 10 * CHUNKS, tl.full([ROWS], float("-inf"), tl.float32), mask=in_group)
        return
    rank = tl.cumsum(keys.to(tl.int32), 0)
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    head = h * GROUP + r
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    scaled = query.to(tl.float32) * scale
    k_at = k + b * k_b + h.to(tl.int64) * k_h
    v_at = v + b * v_b + h.to(tl.int64) * v_h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    held = tl.zeros([ROWS], tl.float32)
    error_held = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    v0, v1, v2, v3, n0, n1, n2, n3 = top, top, top, top, total, total, total, total
    w0, w1, w2, w3, m0, m1, m2, m3 = top, top, top, top, total, total, total, total
    for index in range(taken):
        this = keys & (rank == index + 1)
        name = tl.sum(tl.where(this, j * 2 + values.to(tl.int32), 0), 0)
        block = name // 2
        whole = name % 2  # values too
        place = group * N + block
        tokens = low + block * BLOCK + n
        seen = tokens >= 0
        if key_mask is not None:
            seen = tl.load(key_mask + b * mask_b + tokens) != 0
        bits = tl.load(k_meta + place * (2 * D) + d, mask=in_width, other=0)
        codes_at = k_codes + place * (BLOCK * D) + n[:, None] * D + d[None, :]
        codes = tl.load(codes_at, mask=in_width[None, :], other=0)
        key_at = k_at + tokens.to(tl.int64)[:, None] * k_s + d[None, :]
        key = tl.load(key_at, mask=seen[:, None] & in_width[None, :], other=0.0)
        value_codes, low_words, high_words = load_codes(
            v_codes + place * (BLOCK * COLUMNS), v_meta + place * (BLOCK * 2 * HALF),
            BLOCK, HALF, HALF_P,
        )  # fmt: skip
        bias = tl.load(base + row * N + block, mask=in_group, other=0.0)
        limit = tl.load(delta + row * N + block, mask=in_group, other=0.0)
        eta_b = tl.load(summary_at + block * 2)
        nu_b = tl.load(summary_at + block * 2 + 1)
        nothing = tl.zeros([ROWS, BLOCK], tl.float32)
        rough = split_dot(scaled * bf16_value(bits)[None, :], codes.to(QK).T, nothing, QK, PARTS)
        rough += bias[:, None]
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:
            rough = capped(rough, cap)
            s = capped(s, cap)
        off = ~(tl.abs(s - rough) <= limit[:, None]) & in_group[:, None] & seen[None, :]
        wrong = tl.maximum(wrong, tl.max(off.to(tl.int32), 0))
        s = tl.where(seen[None, :], s, float("-inf"))
        rough = tl.where(seen[None, :], rough, float("-inf"))
        best = tl.maximum(top, tl.maximum(tl.max(s, 1), tl.max(rough, 1)))
        shift = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(s - shift[:, None])
        old = tl.exp2(rough - shift[:, None])
        decay = tl.exp2(top - shift)
        top = best
        mass_r = tl.sum(p, 1)
        total = total * decay + mass_r
        held = held * decay + mass_r * tl.where(whole > 0, nu_b, nu_b + eta_b)
        error_held = error_held * decay + tl.where(whole > 0, 0.0, mass_r * eta_b)
        name_r = block.to(tl.float32) + mass_r * 0
        v0, n0, v1, n1, v2, n2, v3, n3 = _insert(
            shift + tl.log2(tl.sum(old, 1)), name_r, v0, n0, v1, n1, v2, n2, v3, n3, DEPTH
        )
        w0, m0, w1, m1, w2, m2, w3, m3 = _insert(
            shift + tl.log2(mass_r), name_r, w0, m0, w1, m1, w2, m2, w3, m3, DEPTH
        )
        change = p - old
        value_low = values_of(value_codes & 15, low_words, BLOCK, CP)
        acc_low = split_dot(change, value_low.to(PV), acc_low * decay[:, None], PV, PARTS)
        value_high = values_of(value_codes >> 4, high_words, BLOCK, CP)
        acc_high = split_dot(change, value_high.to(PV), acc_high * decay[:, None], PV, PARTS)
        if whole > 0:
            new_low, new_high, _norm = load_values(v_at, tokens, v_s, seen, D, COLUMNS, CP)
            in_low = (c < COLUMNS)[None, :] & seen[:, None]
            in_high = in_low & (c + COLUMNS < D)[None, :]
            error_low = tl.where(in_low, new_low.to(tl.float32) - value_low, 0.0)
            error_high = tl.where(in_high, new_high.to(tl.float32) - value_high, 0.0)
            error = tl.sqrt(tl.sum(error_low * error_low, 1) + tl.sum(error_high * error_high, 1))
            wrong = tl.maximum(wrong, (seen & ~(error <= eta_b)).to(tl.int32))
            acc_low = split_dot(p, error_low.to(PV), acc_low, PV, PARTS)
            acc_high = split_dot(p, error_high.to(PV), acc_high, PV, PARTS)

    tl.store(flags + group * 2, 1, mask=tl.max(wrong, 0) > 0)
    nobody = total == 0
    divisor = tl.where(nobody, 1.0, total)
    lse = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(at + 10 * CHUNKS, tl.where(nobody, float("-inf"), lse), mask=in_group)
    tl.store(at + 11 * CHUNKS, held / divisor, mask=in_group)
    tl.store(at + 12 * CHUNKS, error_held / divisor, mask=in_group)
    tl.store(at + 13 * CHUNKS, top, mask=in_group)
    if DEPTH > 0:
        tl.store(at + 14 * CHUNKS, v0, mask=in_group)
        tl.store(at + 15 * CHUNKS, n0, mask=in_group)
        tl.store(at + 16 * CHUNKS, w0, mask=in_group)
        tl.store(at + 17 * CHUNKS, m0, mask=in_group)
    if DEPTH > 1:
        tl.store(at + 18 * CHUNKS, v1, mask=in_group)
        tl.store(at + 19 * CHUNKS, n1, mask=in_group)
        tl.store(at + 20 * CHUNKS, w1, mask=in_group)
        tl.store(at + 21 * CHUNKS, m1, mask=in_group)
        tl.store(at + 22 * CHUNKS, v2, mask=in_group)
        tl.store(at + 23 * CHUNKS, n2, mask=in_group)
        tl.store(at + 24 * CHUNKS, w2, mask=in_group)
        tl.store(at + 25 * CHUNKS, m2, mask=in_group)
        tl.store(at + 26 * CHUNKS, v3, mask=in_group)
        tl.store(at + 27 * CHUNKS, n3, mask=in_group)
        tl.store(at + 28 * CHUNKS, w3, mask=in_group)
        tl.store(at + 29 * CHUNKS, m3, mask=in_group)
    out_at = changes + (row * CHUNKS + chunk)[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low, mask=mask)
    tl.store(out_at + COLUMNS, acc_high, mask=mask & (c + COLUMNS < D)[None, :])
