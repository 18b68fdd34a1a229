"""The branches of `stream_mask`'s refinement, as its kernels keep them.

A branch is one int64 key: (score, representative) in the total order of the selection. The
representative and the number of splits determine the branch's interval, because branches are
disjoint. For the same reason no two valid candidates share a representative, so the last two places
of the order (branch, part) never decide.

Names: r is a key block. What a query block may look at follows from three arguments:

    allowed_at  where its row of the block mask begins; None: there is no block mask
    after_at    where the row's next shown keys (`after`) begin; None: there is no key mask
    limits      (stride of `allowed_at`, the row's first real key `low`, the block's last position
                `top`)
"""

from attnplug.ops.common.triton import tl, triton

NONE = tl.constexpr(0x7FFFFFFF)  # the representative of a part without a valid block
_LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def pack(score, rep):
    """An int64 key, larger for the candidate that comes first."""
    score = tl.where(rep == NONE, float("-inf"), tl.where(score == 0.0, 0.0, score))  # -0.0 ties
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (rep ^ NONE).to(tl.int64)


@triton.jit
def representative(key):
    """The representative in a key of `pack`."""
    return (key & _LOW).to(tl.int32) ^ NONE


@triton.jit
def score_of(key):
    """The score in a key of `pack`."""
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_branches(old, new, branches, KP: tl.constexpr):
    """The best `branches` of both, sorted; the rest is empty."""
    key = tl.topk(tl.reshape(tl.join(old, new), [2 * KP]), KP)
    i = tl.arange(0, KP)
    empty = pack(tl.full([KP], float("-inf"), tl.float32), tl.full([KP], NONE, tl.int32))
    return tl.where(i < branches, key, empty)


@triton.jit
def valid_blocks(r, inside, allowed_at, after_at, limits, BLOCK: tl.constexpr):
    """Which of the blocks r that are `inside` the query block may look at, by both masks."""
    allowed_k, low, top = limits
    if allowed_at is not None:
        inside &= tl.load(allowed_at + r.to(tl.int64) * allowed_k, mask=inside, other=0) != 0
    if after_at is not None:
        seen = tl.load(after_at + low + r * BLOCK, mask=inside, other=NONE)
        inside &= (seen <= top) & (seen < low + (r + 1) * BLOCK)
    return inside


@triton.jit
def _first_valid(begin, end, allowed_at, after_at, limits, BLOCK: tl.constexpr, KP: tl.constexpr):
    """The first valid block of every interval [begin, end), NONE where there is none."""
    _, low, top = limits
    found = tl.full([KP], NONE, tl.int32)
    if allowed_at is not None:
        WIDE: tl.constexpr = 16
        for offset in range(0, tl.max(end - begin, 0), WIDE):
            r = (begin + offset)[:, None] + tl.arange(0, WIDE)[None, :]
            valid = valid_blocks(r, r < end[:, None], allowed_at, after_at, limits, BLOCK)
            found = tl.minimum(found, tl.min(tl.where(valid, r, NONE), 1))
    elif after_at is not None:
        seen = tl.load(after_at + low + begin * BLOCK, mask=begin < end, other=NONE)
        r = (tl.minimum(seen, top + 1) - low) // BLOCK
        found = tl.where((seen <= top) & (r < end), r, found)
    else:
        found = tl.where(begin < end, begin, found)
    return found


@triton.jit
def interval(allowed_at, after_at, before_at, limits, BLOCK: tl.constexpr):
    """(first valid block, number of blocks from it to the last valid one, both included)."""
    _, low, top = limits
    first = 0
    last = (top - low) // BLOCK
    if allowed_at is not None:
        WIDE: tl.constexpr = 256
        i = tl.arange(0, WIDE)
        lowest = tl.full([WIDE], NONE, tl.int32)
        highest = tl.full([WIDE], -1, tl.int32)
        for offset in range(0, last + 1, WIDE):
            r = offset + i
            valid = valid_blocks(r, r <= last, allowed_at, after_at, limits, BLOCK)
            lowest = tl.minimum(lowest, tl.where(valid, r, NONE))
            highest = tl.maximum(highest, tl.where(valid, r, -1))
        first = tl.min(lowest, 0)
        last = tl.max(highest, 0)
    elif after_at is not None:
        seen = tl.load(after_at + low)
        last = tl.load(before_at + top)
        first = tl.where(seen <= top, (tl.minimum(seen, top) - low) // BLOCK, NONE)
        last = tl.where(last >= low, (tl.maximum(last, low) - low) // BLOCK, -1)
    return first, tl.where(last >= 0, last - first + 1, 0)


@triton.jit
def descend(rep, first, width, branches, splits):
    """The interval [begin, end) of the branch that contains `rep`, after `splits` splits."""
    size = width // tl.maximum(branches, 1)
    longer = width - size * branches  # the first so many branches have one block more
    x = rep - first
    in_longer = x < longer * (size + 1)
    of_longer = x // (size + 1)
    of_others = longer + (x - longer * (size + 1)) // tl.maximum(size, 1)
    branch = tl.where(in_longer, of_longer, of_others)
    begin = first + branch * size + tl.minimum(branch, longer)
    end = begin + size + (branch < longer).to(tl.int32)
    for _ in range(splits):
        cut = begin + (end - begin + 1) // 2
        right = rep >= cut
        begin = tl.where(right, cut, begin)
        end = tl.where(right, end, cut)
    return begin, end


@triton.jit
def other_part(
    rep, begin, end, allowed_at, after_at, limits, BLOCK: tl.constexpr, KP: tl.constexpr
):
    """The representative of the part of [begin, end) without the branch's own: the right part's, or
    NONE where the left part has no valid block."""
    cut = tl.where(rep == NONE, end, begin + (end - begin + 1) // 2)
    cut = tl.where(rep < cut, cut, end)
    return _first_valid(cut, end, allowed_at, after_at, limits, BLOCK, KP)


@triton.jit
def start_branches(
    first, width, branches, allowed_at, after_at, limits, BLOCK: tl.constexpr, KP: tl.constexpr
):
    """Representatives of the first branches, and of their other parts."""
    branch = tl.arange(0, KP)
    size = width // tl.maximum(branches, 1)
    longer = width - size * branches
    begin = first + branch * size + tl.minimum(branch, longer)
    end = tl.where(branch < branches, begin + size + (branch < longer).to(tl.int32), begin)
    rep = _first_valid(begin, end, allowed_at, after_at, limits, BLOCK, KP)
    return rep, other_part(rep, begin, end, allowed_at, after_at, limits, BLOCK, KP)
