"""Triton code of `certified_attention` that reads chosen blocks exactly and says what that changes;
and the kernel that does so for a list of them. To the base 2."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attnplug.ops.certified.kernels.attend import (
    arrived,
    capped,
    load_codes,
    load_query,
    split_dot,
    values_of,
)
from attnplug.ops.certified.kernels.exact import load_values
from attnplug.ops.certified.kernels.quantize import bf16_value
from attnplug.ops.certified.scratch import source, words_of
from attnplug.ops.common.rows import row_span


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
def _entry(listed, group, index, ends, taken, CHUNKS: tl.constexpr, OWN: tl.constexpr):
    """A KV head's promoted block `index`: (its name, the places of its keys and of its values). A
    name is the block's number times four, plus two for a spot check, plus one for values too."""
    before = ends <= index
    chunk = tl.sum(before.to(tl.int32), 0)
    rest = index - tl.sum(tl.where(before, taken, 0), 0)
    at = listed + ((group * CHUNKS + chunk) * OWN + rest) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _sealed(word, item, place, seals_at):
    """Compare the seal of a slot that was read, or write that of one that is being filled; whether
    it did not fit."""
    slot = tl.where(place >= 0, place, -2 - place)
    seal = word + item * 7919 + 100000007
    stored = tl.load(seals_at + slot, mask=place >= 0, other=0)
    tl.store(seals_at + slot, seal, mask=place < -1)
    return (place >= 0) & (stored != seal)


@triton.jit
def read_blocks(
    query, k, v, k_codes, k_meta, v_codes, v_meta, summary, key_mask, base, delta, gained, changes,
    flags, slots, owner, seals, scale, cap, N, SLOTS, b, h, group, low, piece, pieces, first, count,
    step, rank, name, listed, ends, taken,
    k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, CHUNKS: tl.constexpr,
    OWN: tl.constexpr, DEPTH: tl.constexpr, LISTED: tl.constexpr, QK: tl.constexpr,
    PV: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Read the promoted blocks first, first + step, .. below `count` of a KV head: those in the
    list (LISTED), from slots where they are there, or a program's own, by their `rank` and `name`.
    `gained` gets twenty numbers of each head as number `piece` of `pieces`, `changes` what is to
    be added. Scores and values must be within their bounds, and slots as they were filled: one
    that is not is dropped."""
    r = tl.arange(0, ROWS)
    in_group = r < GROUP
    row = group * GROUP + r
    at = gained + row * (20 * pieces) + piece
    COLUMNS: tl.constexpr = HALF * 16
    CP: tl.constexpr = HALF_P * 16
    d = tl.arange(0, DP)
    n = tl.arange(0, BLOCK)
    c = tl.arange(0, CP)
    in_width = d < D
    query = arrived(query, PDL)
    scaled = query.to(tl.float32) * scale
    k_at = k + b * k_b + h.to(tl.int64) * k_h
    v_at = v + b * v_b + h.to(tl.int64) * v_h
    summary_at = summary + group * N * 2
    slots_at, owner_at, seals_at = slots, owner, seals
    if slots is not None:
        slots_at = slots + group * SLOTS * (BLOCK * D)
        owner_at = owner + group * SLOTS
        seals_at = seals + group * SLOTS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    held = tl.zeros([ROWS], tl.float32)
    error_held = tl.zeros([ROWS], tl.float32)
    acc_low = tl.zeros([ROWS, CP], tl.float32)
    acc_high = tl.zeros([ROWS, CP], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    v0, v1, v2, v3, n0, n1, n2, n3 = top, top, top, top, total, total, total, total
    w0, w1, w2, w3, m0, m1, m2, m3 = top, top, top, top, total, total, total, total
    ahead, key_ahead, value_ahead = -1, -1, -1  # the next block's entry, loaded beside this block
    if LISTED:
        ahead, key_ahead, value_ahead = _entry(listed, group, first, ends, taken, CHUNKS, OWN)
    for index in range(first, count, step):
        this, key_place, value_place = ahead, key_ahead, value_ahead
        if LISTED:
            following = tl.minimum(index + step, count - 1)
            ahead, key_ahead, value_ahead = _entry(
                listed, group, following, ends, taken, CHUNKS, OWN
            )
        else:
            this = tl.sum(tl.where(rank == index + 1, name, 0), 0)
        block = this // 4
        whole = this & 1  # values too
        place = group * N + block
        tokens = low + block * BLOCK + n
        item = 2 * (low + block * BLOCK)
        seen = tokens >= 0
        if key_mask is not None:
            seen = tl.load(key_mask + b * mask_b + tokens) != 0
        bits = tl.load(k_meta + place * (2 * D) + d, mask=in_width, other=0)
        codes_at = k_codes + place * (BLOCK * D) + n[:, None] * D + d[None, :]
        codes = tl.load(codes_at, mask=in_width[None, :], other=0)
        loadable = seen[:, None] & in_width[None, :]
        if slots is None:
            key_at = k_at + tokens.to(tl.int64)[:, None] * k_s + d[None, :]
            key = tl.load(key_at, mask=loadable, other=0.0)
        else:
            rows_at, row_0, row_step = source(
                key_place, slots_at, k_at, low + block * BLOCK, k_s, BLOCK * D, D
            )
            key_at = rows_at + (row_0 + n).to(tl.int64)[:, None] * row_step + d[None, :]
            # Not .cg: a thread has 32 bytes, loaded by two instructions, and without the L1 each of
            # them would have the whole sectors sent, over the link twice.
            key = tl.load(key_at, mask=loadable, other=0.0)
        value_codes, low_words, high_words = load_codes(
            v_codes + place * (BLOCK * COLUMNS), v_meta + place * (BLOCK * 2 * HALF),
            BLOCK, HALF, HALF_P,
        )  # fmt: skip
        bias = tl.load(base + row * N + block, mask=in_group, other=0.0)
        limit = tl.load(delta + row * N + block, mask=in_group, other=0.0)
        eta_b = tl.load(summary_at + block * 2)
        nu_b = tl.load(summary_at + block * 2 + 1)
        bits, codes, key = arrived(bits, PDL), arrived(codes, PDL), arrived(key, PDL)
        value_codes = arrived(value_codes, PDL)
        low_words, high_words = arrived(low_words, PDL), arrived(high_words, PDL)
        nothing = tl.zeros([ROWS, BLOCK], tl.float32)
        rough = split_dot(scaled * bf16_value(bits)[None, :], codes.to(QK).T, nothing, QK, PARTS)
        rough += bias[:, None]
        s = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:
            rough = capped(rough, cap)
            s = capped(s, cap)
        off = ~(tl.abs(s - rough) <= limit[:, None]) & in_group[:, None] & seen[None, :]
        off_n = tl.max(off.to(tl.int32), 0)
        if slots is not None:
            bad = _sealed(words_of(key, 1), item, key_place, seals_at)
            fill = slots_at - (2 + key_place).to(tl.int64) * (BLOCK * D) + n[:, None] * D
            tl.store(fill + d[None, :], key, mask=(d < tl.where(key_place < -1, D, 0))[None, :])
            off_n = tl.maximum(off_n, bad.to(tl.int32))
            bad = (key_place >= 0) & (tl.max(off_n, 0) > 0)
            tl.store(owner_at + key_place, -1, mask=bad)
        wrong = tl.maximum(wrong, off_n)
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
            if slots is None:
                new_low, new_high = load_values(v_at, tokens, v_s, seen, D, COLUMNS, CP)
            else:
                rows_at, row_0, row_step = source(
                    value_place, slots_at, v_at, low + block * BLOCK, v_s, BLOCK * D, D
                )
                new_low, new_high = load_values(rows_at, row_0 + n, row_step, seen, D, COLUMNS, CP)
            new_low, new_high = arrived(new_low, PDL), arrived(new_high, PDL)
            in_low = (c < COLUMNS)[None, :] & seen[:, None]
            in_high = in_low & (c + COLUMNS < D)[None, :]
            error_low = tl.where(in_low, new_low.to(tl.float32) - value_low, 0.0)
            error_high = tl.where(in_high, new_high.to(tl.float32) - value_high, 0.0)
            error = tl.sqrt(tl.sum(error_low * error_low, 1) + tl.sum(error_high * error_high, 1))
            off_n = (seen & ~(error <= eta_b)).to(tl.int32)
            if slots is not None:
                word = words_of(new_low, 1) + words_of(new_high, 2 * BLOCK * CP + 1)
                bad = _sealed(word, item + 1, value_place, seals_at)
                fill = slots_at - (2 + value_place).to(tl.int64) * (BLOCK * D) + n[:, None] * D
                room = tl.where(value_place < -1, D, 0)
                tl.store(fill + c[None, :], new_low, mask=(c < tl.minimum(room, COLUMNS))[None, :])
                in_high_n = ((c < COLUMNS) & (c + COLUMNS < room))[None, :]
                tl.store(fill + COLUMNS + c[None, :], new_high, mask=in_high_n)
                off_n = tl.maximum(off_n, bad.to(tl.int32))
                bad = (value_place >= 0) & (tl.max(off_n, 0) > 0)
                tl.store(owner_at + value_place, -1, mask=bad)
            wrong = tl.maximum(wrong, off_n)
            acc_low = split_dot(p, error_low.to(PV), acc_low, PV, PARTS)
            acc_high = split_dot(p, error_high.to(PV), acc_high, PV, PARTS)

    tl.store(flags + group * 2, 1, mask=tl.max(wrong, 0) > 0)
    nobody = total == 0
    divisor = tl.where(nobody, 1.0, total)
    lse = tl.where(top == float("-inf"), 0.0, top) + tl.log2(divisor)
    tl.store(at, tl.where(nobody, float("-inf"), lse), mask=in_group)
    tl.store(at + pieces, held / divisor, mask=in_group)
    tl.store(at + 2 * pieces, error_held / divisor, mask=in_group)
    tl.store(at + 3 * pieces, top, mask=in_group)
    if DEPTH > 0:
        tl.store(at + 4 * pieces, v0, mask=in_group)
        tl.store(at + 5 * pieces, n0, mask=in_group)
        tl.store(at + 6 * pieces, w0, mask=in_group)
        tl.store(at + 7 * pieces, m0, mask=in_group)
    if DEPTH > 1:
        tl.store(at + 8 * pieces, v1, mask=in_group)
        tl.store(at + 9 * pieces, n1, mask=in_group)
        tl.store(at + 10 * pieces, w1, mask=in_group)
        tl.store(at + 11 * pieces, m1, mask=in_group)
        tl.store(at + 12 * pieces, v2, mask=in_group)
        tl.store(at + 13 * pieces, n2, mask=in_group)
        tl.store(at + 14 * pieces, w2, mask=in_group)
        tl.store(at + 15 * pieces, m2, mask=in_group)
        tl.store(at + 16 * pieces, v3, mask=in_group)
        tl.store(at + 17 * pieces, n3, mask=in_group)
        tl.store(at + 18 * pieces, w3, mask=in_group)
        tl.store(at + 19 * pieces, m3, mask=in_group)
    out_at = changes + (row * pieces + piece)[:, None] * D + c[None, :]
    mask = in_group[:, None] & (c < COLUMNS)[None, :]
    tl.store(out_at, acc_low, mask=mask)
    tl.store(out_at + COLUMNS, acc_high, mask=mask & (c + COLUMNS < D)[None, :])


@triton.jit
def promote(
    q, k, v, k_codes, k_meta, v_codes, v_meta, summary, progress, lengths, start, key_mask, base,
    delta, counts, listed, gained, changes, flags, slots, owner, seals, scale, cap, S, N, SLOTS,
    q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, CHUNKS: tl.constexpr,
    OWN: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr,
    QK: tl.constexpr, PV: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every PIECES-th of the blocks that `choose_blocks` has listed for a KV head."""
    if PDL:
        gdc_wait()  # the end is launched when the last of these has ended, and finds room
    piece = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    group = b * tl.num_programs(1) + h
    query = load_query(q, b, h, q_b, q_h, GROUP, GROUP, ROWS, D, DP)
    taken = tl.load(counts + group * (5 * CHUNKS) + tl.arange(0, CHUNKS))
    count = tl.sum(taken, 0)
    if piece >= count:
        return
    _length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    read_blocks(
        query, k, v, k_codes, k_meta, v_codes, v_meta, summary, key_mask, base, delta, gained,
        changes, flags, slots, owner, seals, scale, cap, N, SLOTS, b, h, group, low, piece, PIECES,
        piece, count, PIECES, taken, taken, listed, tl.cumsum(taken, 0), taken,
        k_b, k_h, k_s, v_b, v_h, v_s, mask_b,
        GROUP, ROWS, D, DP, BLOCK, HALF, HALF_P, CHUNKS, OWN, DEPTH, True, QK, PV, PARTS, CAPPED,
        PDL,
    )  # fmt: skip
