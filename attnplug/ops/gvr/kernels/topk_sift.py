"""The first of the two kernels of a long row of `topk` that reads the row once, several programs a
row. Each keeps its own best scores, in the `finish` of topk_finish.py one program a row selects.

A program's scores lie in chunks all over the row, so that every program has about as many of the
row's best ones. It keeps at least `least` of its scores and at most ROOM, namely all from its own
floor on, a threshold that it finds by counting; `least` is far more than its part of k. If k of the
kept scores reach the highest floor of the row, then what was dropped is smaller than k others.

Names as in `topk_select`; a slot is a place for a kept score.
"""

from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.topk_select import (
    LEAST,
    MOST,
    clamped_key,
    clean,
    fifth,
    key_of,
    key_range,
    length_of,
    normal_quantile,
    reaches,
    score_of,
    try_four,
)

NOWHERE = tl.constexpr(0x7FFFFFFF)  # the index in an empty slot, whose score is -inf


@triton.jit
def _add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _first_keys(low, high, count, mean, deviation, ROOM: tl.constexpr):
    """Four thresholds that ROOM scores and fewer reach, were they normal."""
    return (
        clamped_key(normal_quantile(1.6 * ROOM, count, mean, deviation), low, high),
        clamped_key(normal_quantile(0.86 * ROOM, count, mean, deviation), low, high),
        clamped_key(normal_quantile(0.66 * ROOM, count, mean, deviation), low, high),
        clamped_key(normal_quantile(0.4 * ROOM, count, mean, deviation), low, high),
    )


@triton.jit
def _next_keys(x, low, high, rounds):
    """Four thresholds between low and high, evenly apart by the scores or by their keys, in turn.
    Also low and high, moved to the scores that are there where the scores between are infinite."""
    a = score_of(low.to(tl.int32))
    b = score_of((high - 1).to(tl.int32))
    if ~(tl.abs(b - a) < float("inf")):
        between = reaches(x, low) & ~reaches(x, high) & (x > float("-inf"))
        least, most = key_range(key_of(x), between)
        low = tl.maximum(low, least.to(tl.int64))
        high = tl.minimum(high, most.to(tl.int64) + 1)
        a = score_of(low.to(tl.int32))
        b = score_of((high - 1).to(tl.int32))
    width = b - a
    by_key = ~(width < float("inf")) | (rounds % 2 == 1)
    t1 = tl.where(by_key, fifth(low, high, 1), clamped_key(a + 0.2 * width, low, high))
    t2 = tl.where(by_key, fifth(low, high, 2), clamped_key(a + 0.4 * width, low, high))
    t3 = tl.where(by_key, fifth(low, high, 3), clamped_key(a + 0.6 * width, low, high))
    t4 = tl.where(by_key, fifth(low, high, 4), clamped_key(a + 0.8 * width, low, high))
    return low, high, (t1, t2, t3, t4)


@triton.jit
def floor_of(x, least, ROOM: tl.constexpr, TILE: tl.constexpr):
    """(key, count): `least` to ROOM of the clean scores x reach the key, if any key is like that;
    all that are not -inf, if those are ROOM at most."""
    usable = tl.abs(x) < 1e30
    y = tl.where(usable, x, 0.0)
    real = (x > float("-inf")).to(tl.int32)
    real, count, total, squares = tl.reduce((real, usable.to(tl.float32), y, y * y), 0, _add_four)
    few = real <= ROOM
    low = tl.full([], LEAST, tl.int64)
    high = tl.where(few, LEAST + 1, MOST + 1).to(tl.int64)
    at_low = tl.full([], TILE, tl.int32)
    at_high = tl.where(few, real, 0)
    if ~few:
        mean = total / tl.maximum(count, 1.0)
        deviation = tl.sqrt(tl.maximum(squares / tl.maximum(count, 1.0) - mean * mean, 0.0))
        if (deviation < float("inf")) & (count >= 1.0):
            keys = _first_keys(low, high, count, mean, deviation, ROOM)
            low, high, at_low, at_high = try_four(
                x, low, high, at_low, at_high, keys, ROOM + 1, True
            )
        rounds = at_low * 0
        while (at_high < least) & (high - low > 1):
            low, high, keys = _next_keys(x, low, high, rounds)
            low, high, at_low, at_high = try_four(
                x, low, high, at_low, at_high, keys, ROOM + 1, True
            )
            rounds += 1
    return high, at_high


@triton.jit
def _keep(x, i, kept, scores_at, index_at, ASM: tl.constexpr):
    """Store the scores that are `kept` and their indices, one after the other."""
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    if ASM:  # a store of Triton's would carry addresses and values through shared memory first
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.s32 p, $6, 0; mad.wide.s32 at, $3, 4, $1; "
            "@p st.global.b32 [at], $4; mad.wide.s32 at, $3, 4, $2; "
            "@p st.global.b32 [at], $5; mov.b32 $0, 0; }",
            "=r,l,l,r,r,r,r",
            [
                scores_at.to(tl.int64),
                index_at.to(tl.int64),
                place,
                x.to(tl.int32, bitcast=True),
                i,
                kept.to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(scores_at + place, x, mask=kept)
        tl.store(index_at + place, i, mask=kept)


@triton.jit
def keep_best(x, i, at, least, outputs, ROOM: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr):
    """Keep the best of a program's scores x (clean, -inf where there is none) with indices i, in
    the `at`-th place of `outputs` = (slots' scores, slots' indices, floors)."""
    slot_scores, slot_index, floors = outputs
    floor, count = floor_of(x, least, ROOM, TILE)
    tl.store(floors + at, floor)
    slot_scores += at * ROOM
    slot_index += at * ROOM
    _keep(x, i, reaches(x, floor), slot_scores, slot_index, ASM)
    w = tl.arange(0, ROOM)
    tl.store(slot_scores + w, tl.full([ROOM], float("-inf"), tl.float32), mask=w >= count)
    tl.store(slot_index + w, tl.full([ROOM], NOWHERE, tl.int32), mask=w >= count)


@triton.jit
def sift(
    scores,
    lengths,
    slot_scores,
    slot_index,
    floors,
    N,
    scores_stride,
    parts,
    least,
    K,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One of `parts` programs of row r. Its chunks are every `parts`-th of CHUNK scores."""
    part = tl.program_id(0) % parts
    r = (tl.program_id(0) // parts).to(tl.int64)
    e = tl.arange(0, TILE)
    i = (e // CHUNK * parts + part) * CHUNK + e % CHUNK
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    if n > K:
        # Whole groups of four, so that a thread loads them together.
        inside = (i < (n + 3) // 4 * 4) & (i < N)
        x = tl.load(scores + r * scores_stride + i, mask=inside, other=float("-inf"))
        x = tl.where(i < n, clean(x), float("-inf"))
        outputs = (slot_scores, slot_index, floors)
        keep_best(x, i, tl.program_id(0).to(tl.int64), least, outputs, ROOM, TILE, ASM)
