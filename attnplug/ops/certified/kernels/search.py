"""The thresholds of `certified_attention` on the device: the score from which on blocks are read
exactly. All heads of a KV head choose together. To the base 2; `reference._search` is the
specification."""

from attnplug.ops.certified.records import R
from attnplug.ops.common.triton import tl, triton

FEW = tl.constexpr(8)  # blocks that one head may need and `search_few` finds


@triton.jit
def log_masses(logs_at, j, blocks, in_group):
    """Log-masses [n, GP] of some blocks."""
    mask = (j < blocks)[:, None] & in_group[None, :]
    return tl.load(logs_at[None, :] + j[:, None], mask=mask, other=float("-inf"))


@triton.jit
def _score(share):
    return tl.log2(share + R.LOG_FLOOR)


@triton.jit
def score_of(mass):
    """What blocks [n] are chosen by: the log of the largest share that a head gives them. A NaN
    counts for nothing, as in `search_one_sweep`: its head is recomputed anyway."""
    return _score(tl.max(tl.maximum(mass, 0.0), 1))


@triton.jit
def masses(log, norm, j, blocks):
    """(score [TILE], mass [TILE, GP]) of some blocks."""
    mass = tl.exp2(log - norm[None, :])
    return tl.where(j < blocks, score_of(mass), float("-inf")), mass


@triton.jit
def _whole_range(norm):
    """(low, high) that every search begins with, of the type that its rounds end with."""
    low = tl.min(norm * 0, 0) + R.DEEPEST
    return low, low + (1.0 - R.DEEPEST)


@triton.jit
def _narrower(
    count,
    held,
    lowest,
    low,
    step,
    rest_mass,
    coverage,
    least,
    most,
    in_group,
    COVERS: tl.constexpr,
):
    """What a round leaves: (low, high, how many blocks score >= low). `count` [8] blocks score at
    least low + step, low + 2 step, .. and hold `held` [GP, 8] of each head; `lowest` at least
    low."""
    lacking = count < 0  # whether some head lacks some of its coverage
    if COVERS:
        short = ~(held + rest_mass[:, None] >= coverage[:, None]) & in_group[:, None]
        lacking = tl.max(short.to(tl.int32), 0) > 0
    enough = (count >= least) & ~lacking
    passed = tl.sum((enough | (count >= most)).to(tl.int32), 0)
    at = tl.sum(tl.where(tl.arange(0, R.WAYS) == passed - 1, count, 0), 0)
    lowest = tl.where(passed == 0, lowest, at)
    return low + step * passed, low + step * (passed + 1), lowest


@triton.jit
def _search_tiles(
    logs_at,
    norm,
    rest_mass,
    coverage,
    least,
    most,
    blocks,
    in_group,
    GP: tl.constexpr,
    TILE: tl.constexpr,
    COVERS: tl.constexpr,
):
    """Any number of blocks, read again in every round. Without COVERS the coverage is 0, which all
    have: also a NaN head, which is recomputed, so that the rest of its group may get fewer blocks
    than by the specification."""
    i = tl.arange(0, TILE)
    way = tl.arange(0, R.WAYS)
    low, high = _whole_range(norm)
    lowest = tl.sum(i * 0, 0)
    for _ in range(R.ROUNDS):
        step = (high - low) / (R.WAYS + 1)
        # Sums over the tiles stay where their terms are: reductions cost more than all else here.
        counts = tl.zeros([TILE, R.WAYS], tl.int32)
        lowest_i = tl.zeros([TILE], tl.int32)
        held_i = tl.zeros([TILE if COVERS else 1, GP, R.WAYS], tl.float32)
        ahead = log_masses(logs_at, i, blocks, in_group)
        for first in range(0, blocks, TILE):
            log = ahead
            ahead = log_masses(logs_at, first + TILE + i, blocks, in_group)
            score, mass = masses(log, norm, first + i, blocks)
            keep = score[:, None] >= (low + step * (way + 1))[None, :]
            counts += keep.to(tl.int32)
            lowest_i += (score >= low).to(tl.int32)
            if COVERS:
                held_i += tl.where(keep[:, None, :], mass[:, :, None], 0.0)
        low, high, lowest = _narrower(
            count=tl.sum(counts, 0),
            held=tl.sum(held_i, 0),
            lowest=tl.sum(lowest_i, 0),
            low=low,
            step=step,
            rest_mass=rest_mass,
            coverage=coverage,
            least=least,
            most=most,
            in_group=in_group,
            COVERS=COVERS,
        )
    return tl.where(lowest <= most, low, high)


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """Eight tensors [..] as one [.., 2, 2, 2], in this order."""
    return tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def _above(score, mass, x, TILE: tl.constexpr, GP: tl.constexpr):
    """How many blocks score at least x, and each head's mass in them, summed over the blocks that a
    thread holds: of 1,024 it has four in a row."""
    keep = score >= x
    count = tl.reshape(keep.to(tl.int32), [TILE // 1024, 256, 4])
    held = tl.reshape(tl.where(keep[:, None], mass, 0.0), [TILE // 1024, 256, 4, GP])
    return tl.sum(tl.sum(count, 2), 0), tl.sum(tl.sum(held, 2), 0)


@triton.jit
def _search_held(
    logs_at,
    norm,
    rest_mass,
    coverage,
    least,
    most,
    blocks,
    in_group,
    GP: tl.constexpr,
    TILE: tl.constexpr,
):
    """All blocks in one tile of registers: loaded once, and summed by the threads that hold them
    before anything crosses lanes. With thresholds as a dimension of the tile its layout changed in
    every round, which took three quarters of the time."""
    i = tl.arange(0, TILE)
    log = log_masses(logs_at, i, blocks, in_group)
    score, mass = masses(log, norm, i, blocks)
    low, high = _whole_range(norm)
    lowest = tl.sum((score >= low).to(tl.int32), 0)
    for _ in range(R.ROUNDS):
        step = (high - low) / (R.WAYS + 1)
        c1, h1 = _above(score, mass, low + step, TILE, GP)
        c2, h2 = _above(score, mass, low + step * 2, TILE, GP)
        c3, h3 = _above(score, mass, low + step * 3, TILE, GP)
        c4, h4 = _above(score, mass, low + step * 4, TILE, GP)
        c5, h5 = _above(score, mass, low + step * 5, TILE, GP)
        c6, h6 = _above(score, mass, low + step * 6, TILE, GP)
        c7, h7 = _above(score, mass, low + step * 7, TILE, GP)
        c8, h8 = _above(score, mass, low + step * 8, TILE, GP)
        count = tl.reshape(tl.sum(_eight(c1, c2, c3, c4, c5, c6, c7, c8), 0), [R.WAYS])
        held = tl.reshape(tl.sum(_eight(h1, h2, h3, h4, h5, h6, h7, h8), 0), [GP, R.WAYS])
        low, high, lowest = _narrower(
            count=count,
            held=held,
            lowest=lowest,
            low=low,
            step=step,
            rest_mass=rest_mass,
            coverage=coverage,
            least=least,
            most=most,
            in_group=in_group,
            COVERS=True,
        )
    return tl.where(lowest <= most, low, high)


@triton.jit
def search(
    logs_at,
    norm,
    rest_mass,
    coverage,
    least,
    most,
    blocks,
    in_group,
    GP: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
    COVERS: tl.constexpr,
):
    """`reference._search`, of up to HELD blocks in registers or in tiles of TILE. `norm` [GP] is
    what log-masses are relative to, `rest_mass` [GP] what each head has outside the blocks, and
    `coverage` [GP] what it must have."""
    if HELD > 0 and COVERS:
        x = _search_held(
            logs_at=logs_at,
            norm=norm,
            rest_mass=rest_mass,
            coverage=coverage,
            least=least,
            most=most,
            blocks=blocks,
            in_group=in_group,
            GP=GP,
            TILE=HELD,
        )
    else:
        x = _search_tiles(
            logs_at=logs_at,
            norm=norm,
            rest_mass=rest_mass,
            coverage=coverage,
            least=least,
            most=most,
            blocks=blocks,
            in_group=in_group,
            GP=GP,
            TILE=TILE,
            COVERS=COVERS,
        )
    return x


@triton.jit
def search_one_sweep(
    head_at,
    N,
    norm,
    least,
    most,
    blocks,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    TILE: tl.constexpr,
):
    """`search` where the coverage is 0 and few blocks (`least`) are enough, all in one tile: a
    threshold is low enough if it is not above the score of the last of these few. Returns
    (threshold, all scores, the rank of each of the few counted from 1, else 0)."""
    i = tl.arange(0, TILE)
    g = tl.arange(0, GP)
    mass = tl.zeros([TILE], tl.float32)
    for head in tl.static_range(GROUP):  # one by one: few registers, so that many blocks fit
        norm_h = tl.sum(tl.where(g == head, norm, 0.0), 0)
        log = tl.load(head_at + head * N + i, mask=i < blocks, other=float("-inf"))
        mass = tl.maximum(mass, tl.exp2(log - norm_h))
    score = tl.where(i < blocks, _score(mass), float("-inf"))
    rest = score
    enough = float("inf")
    order = i * 0
    for place in range(least):
        enough = tl.max(rest, 0)
        first = tl.min(tl.where(rest == enough, i, TILE), 0)
        order = tl.where((i == first) & (order == 0), place + 1, order)  # once, if all are taken
        rest = tl.where(i == first, float("-inf"), rest)
    return _threshold(score, enough, most, norm), score, order


@triton.jit
def _threshold(score, enough, most, norm):
    """What `search` finds where the blocks that score at least `enough` are enough, and no fewer
    of the best are."""
    way = tl.arange(0, R.WAYS)
    low, high = _whole_range(norm)
    for _ in range(R.ROUNDS):
        step = (high - low) / (R.WAYS + 1)
        passed = tl.sum((low + step * (way + 1) <= enough).to(tl.int32), 0)
        low, high = low + step * passed, low + step * (passed + 1)
    count = tl.sum((score >= low).to(tl.int32), 0)
    return tl.where(count <= most, low, high)


@triton.jit
def search_few(share, score, left, most):
    """`search` for one head that needs few blocks, if any: (threshold, whether FEW of the largest
    shares [n] were enough to leave at most 1 of `left`, and no more than `most`). It gives up as
    soon as FEW cannot be, none being larger than the last."""
    taken = tl.sum((share < 0).to(tl.int32), 0)  # 0, of the type that it ends with
    enough = left * 0 + R.MOST_NEEDED
    rest = share
    while (left > 1) & (left <= 1 + enough * (FEW - taken)):
        enough = tl.max(rest, 0)
        largest = rest == enough
        left -= tl.sum(tl.where(largest, rest, 0.0), 0)
        taken += tl.sum(largest.to(tl.int32), 0)
        rest = tl.where(largest, 0.0, rest)
    enough = tl.where(taken > 0, _score(enough), float("inf"))
    norm = tl.zeros([1], tl.float32)
    return _threshold(score, enough, most, norm), (left <= 1) & (taken <= most)
