"""The last kernel of a long row of `topk`, one program a row: select the rest from the list that
the row's programs have collected, or search the row where that list overflowed.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.ops.gvr.kernels.topk_select import (
    ALL,
    GVR,
    LEAST,
    LOW,
    MOST,
    RADIX,
    READY,
    clean,
    fifth,
    key_of,
    length_of,
    pick,
    pick_list,
    take_all,
    tighten,
    write,
)

_ALL, _GVR, _RADIX = (tl.constexpr(path) for path in (ALL, GVR, RADIX))


@triton.jit
def _four(key, ok, t1, t2, t3, t4):
    """Which of four thresholds each key reaches, as four 16-bit counts."""
    return (
        (ok & (key >= t1.to(tl.int32))).to(tl.int64)
        + ((ok & (key >= t2.to(tl.int32))).to(tl.int64) << 16)
        + ((ok & (key >= t3.to(tl.int32))).to(tl.int64) << 32)
        + ((ok & (key >= t4.to(tl.int32))).to(tl.int64) << 48)
    )


@triton.jit
def _search(
    x_at, n, low, high, at_low, at_high, out_i, out_x, list_i, list_x,
    K, CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Radix path: split the keys low..high in five, pass by pass over the row, until the part with
    the k-th fits the list, or is a single key. Then write output and list as collect would."""
    lane = tl.arange(0, TILE)
    passes = at_low * 0 + 1
    while (at_low - at_high > CAPACITY) & (high - low > 1):
        t1 = fifth(low, high, 1)
        t2 = fifth(low, high, 2)
        t3 = fifth(low, high, 3)
        t4 = fifth(low, high, 4)
        sums = tl.zeros([TILE], tl.int64)  # a lane sees n / TILE scores: 16 bits hold the count
        for s in range(0, n, TILE):
            i = s + lane
            x = clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
            sums += _four(key_of(x), i < n, t1, t2, t3, t4)
        c1 = tl.sum((sums & 0xFFFF).to(tl.int32), 0)
        c2 = tl.sum(((sums >> 16) & 0xFFFF).to(tl.int32), 0)
        c3 = tl.sum(((sums >> 32) & 0xFFFF).to(tl.int32), 0)
        c4 = tl.sum(((sums >> 48) & 0xFFFF).to(tl.int32), 0)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t1, c1, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t2, c2, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t3, c3, K)
        low, high, at_low, at_high = tighten(low, high, at_low, at_high, t4, c4, K)
        passes += 1
    sure = at_low * 0
    inbin = at_low * 0
    for s in range(0, n, TILE):
        i = s + lane
        x = clean(tl.load(x_at + i, mask=i < n, other=float("-inf")))
        key = key_of(x)
        f = tl.where(key >= high.to(tl.int32), 1, tl.where(key >= low.to(tl.int32), 1 << 16, 0))
        f = tl.where(i < n, f, 0)
        sure, inbin = write(x, i, f, sure, inbin, out_i, out_x, list_i, list_x, K, CAPACITY, 1)
    return sure, inbin, passes


@triton.jit
def _hold(list_i, list_x, SIZE: tl.constexpr):
    """The first of a list, whose length is on its way too."""
    q = tl.arange(0, SIZE)
    i = tl.load(list_i + q, cache_modifier=".cg")
    return i, tl.load(list_x + q, cache_modifier=".cg")


@triton.jit
def refine(
    scores, lengths, words, ranges, list_i, list_x, out_i, out_x, stats, N, x_r,
    P, K, K_PAD: tl.constexpr, TILE: tl.constexpr,
    CAPACITY: tl.constexpr, SMALL: tl.constexpr, SLOTS: tl.constexpr, LOOKED_BACK: tl.constexpr,
    LENGTH_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    x_at = scores + r * x_r
    list_i += r * 2 * CAPACITY
    list_x += r * 2 * CAPACITY
    out_i += r * K
    out_x += r * K
    stats += r * 3
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = length_of(lengths, r, N, LENGTH_STEP)
    if n <= K:
        take_all(x_at, n, out_i, out_x, K, K_PAD)
        tl.store(stats, _ALL)
        tl.store(stats + 1, 0)
        tl.store(stats + 2, n)
    else:
        first_i, first_x = _hold(list_i + CAPACITY, list_x + CAPACITY, SMALL)
        q = tl.arange(0, SLOTS)
        if LOOKED_BACK:  # each program left a word; otherwise the first one the totals
            w = tl.load(words + r * P + q, mask=q < P, other=READY, cache_modifier=".cg")
            counted = tl.sum(w & (READY - 1), 0)
        else:
            counted = tl.load(words + r * P, cache_modifier=".cg") & (READY - 1)
        sure = (counted >> 31).to(tl.int32)
        m = (counted & LOW).to(tl.int32)
        at = tl.full([], CAPACITY, tl.int32)
        path = tl.full([], _GVR, tl.int32)
        passes = tl.full([], 1, tl.int32)
        candidates = sure + m
        low = tl.full([], LEAST, tl.int64)
        high = tl.full([], MOST + 1, tl.int64)
        at_low = tl.full([], 0, tl.int32) + n
        at_high = tl.full([], 0, tl.int32)
        if sure >= K:  # maxima were counted, and k scores are above the bin: select from those
            m = sure
            sure = at_high
            at = at_high
            candidates = m
        elif m > CAPACITY:
            key_low = tl.load(
                ranges + (r * P + q) * 2, mask=q < P, other=MOST, cache_modifier=".cg"
            )
            key_high = tl.load(
                ranges + (r * P + q) * 2 + 1, mask=q < P, other=LEAST, cache_modifier=".cg"
            )
            low = tl.min(key_low, 0).to(tl.int64)
            high = tl.max(key_high, 0).to(tl.int64) + 1
            at_low = sure + m
            at_high = sure
        # Equal scores need no search: the list has the first of them, which are the winners.
        if (m > CAPACITY) & (high - low > 1):
            sure, m, passes = _search(
                x_at, n, low, high, at_low, at_high, out_i, out_x, list_i, list_x,
                K, CAPACITY, TILE,
            )  # fmt: skip
            at = tl.full([], CAPACITY, tl.int32)
            path = tl.full([], _RADIX, tl.int32)
            candidates = sure + m
            tl.debug_barrier()
        m = tl.minimum(m, CAPACITY)
        need = K - sure
        if (m <= SMALL) & (path == _GVR) & (at == CAPACITY):
            ok = tl.arange(0, SMALL) < m
            x = tl.where(ok, first_x, float("-inf"))
            pick(x, first_i, ok, m, need, out_i + sure, out_x + sure, False)
        else:
            pick_list(list_i + at, list_x + at, m, need, out_i + sure, out_x + sure, CAPACITY)
        tl.store(stats, path)
        tl.store(stats + 1, passes)
        tl.store(stats + 2, candidates)
