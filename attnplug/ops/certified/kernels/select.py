"""How `certified_attention` chooses on the device what is read exactly, and what the bounds need of
the rest. To the base 2; `reference.py` is the specification."""

from attnplug.ops.certified.kernels.search import (
    search,
    search_one_sweep,
)
from attnplug.ops.certified.records import R
from attnplug.ops.common.triton import tl, triton


@triton.jit
def _explored(j, row, length, share):
    """`reference.explored`."""
    x = j.to(tl.int64) * 1103515245 + row.to(tl.int64) * 747796405
    x = (x + length.to(tl.int64) * 1664525 + 12345) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 739982445) & 0xFFFFFFFF
    x = x ^ (x >> 12)
    x = (x * 695872825) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    return (x >> 8).to(tl.float32) < share * 16777216.0


@triton.jit
def set_digest(j, values, keys):
    """One number that tells sets of promoted blocks, and which of them are read whole, apart."""
    name = j * R.NAME_STEP + 1 + values.to(tl.int32)
    return tl.sum(tl.where(keys, (name * name + 7) * 747796405, 0), 0)


@triton.jit
def key_bound(change, under, moved, centre, loss):
    """The tight bound of `reference.key_bound`."""
    left = 1 - under - loss
    tight = tl.where(left > 0, (moved + change * centre) / left * R.CARE, float("inf"))
    return tl.where(change == 0, 0.0, tight)


@triton.jit
def query_norms(q, b, first_head, scale, GP: tl.constexpr, SHAPE: tl.constexpr):
    """At least the norms of the queries [GP] of a KV head's group, times the scale's size, to the
    base e."""
    g = tl.arange(0, GP)
    d = tl.arange(0, SHAPE.DP)
    at = q.at + b * q.b + (first_head + g).to(tl.int64)[:, None] * q.h + d[None, :]
    mask = (g < SHAPE.GROUP)[:, None] & (d < SHAPE.D)[None, :]
    query = tl.load(at, mask=mask, other=0.0).to(tl.float32) * scale
    widest = tl.max(tl.abs(query), 1)  # squares relative to it: its own may vanish
    query = query / tl.where(widest > 0, widest, 1.0)[:, None]
    return tl.sqrt(tl.sum(query * query, 1)) * widest * (R.LN2 * R.CARE)


@triton.jit
def weight_change(mass, root, delta, noise, moved):
    """`reference._change`, of deviations to the base 2; `moved` to the base e."""
    up = tl.exp2(delta)
    most = (mass + R.MASS_FLOOR) * (up - 1 + R.EXP2_SLACK)
    change = tl.minimum(most, up * (root * moved + mass * noise * R.LN2))
    return change, tl.minimum(change, mass * (1 - tl.exp2(-delta) + R.EXP2_SLACK))


@triton.jit
def four(a, b, c, d):
    """[.., 2, 2] of four tensors; `apart` takes them apart again."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def apart(x):
    """a, b, c, d of `four(a, b, c, d)`."""
    first, second = tl.split(x)
    a, c = tl.split(first)
    b, d = tl.split(second)
    return a, b, c, d


@triton.jit
def marked(
    score,
    eta,
    key_threshold,
    value_threshold,
    there,
    j,
    row,
    length,
    explore,
    EXPLORES: tl.constexpr,
):
    """Which blocks are read exactly: keys, values too, values for their error's sake, and both for
    nothing but a spot check."""
    worthy = there & (score + tl.log2(eta + R.LOG_FLOOR) >= value_threshold)
    values = worthy
    if EXPLORES:
        values = worthy | (there & _explored(j, row, length, explore))
    keys = there & (score >= key_threshold)
    return keys | values, values, worthy, values & ~(keys | worthy)


@triton.jit
def block_sums(log, delta, noise, summary_at, j, there, mass, root, moved, keys):
    """What the bounds need of some blocks [n, GP], promoted ones (`keys`) left out of the sums:
    change, under, moved, norm, mass, error, reach and the largest delta, noise and norm
    (`left_sums` in records.py)."""
    at = summary_at + j * R.SUMMARY_FIELDS
    eta = tl.load(at + R.ETA, mask=there, other=0.0)
    nu = tl.load(at + R.NU, mask=there, other=0.0)
    of_keys = tl.load(at + R.KEY_SPECTRUM, mask=there, other=0.0)
    of_values = tl.load(at + R.VALUE_SPECTRUM, mask=there, other=0.0)
    high = tl.where(keys[:, None], float("-inf"), log + delta)
    change, under = weight_change(mass, root, delta, noise, of_keys[:, None] * moved[None, :])
    off = tl.minimum(mass * eta[:, None], root * of_values[:, None])
    left = (there & ~keys)[:, None]
    is_nan = tl.where(high != high, 1.0, 0.0)
    sums = four(
        tl.where(left, change, 0.0),
        tl.where(left, under, 0.0),
        tl.where(left, change * nu[:, None], 0.0),
        tl.where(left, mass * (nu + eta)[:, None], 0.0),
    )
    change, under, shift, norm = apart(tl.sum(sums, 0))
    sums = four(tl.where(left, mass, 0.0), tl.where(left, off, 0.0), is_nan, is_nan)
    total, error, is_nan, _ = apart(tl.sum(sums, 0))
    wide = (eta + nu)[:, None] + mass * 0
    reach, largest, loudest, widest = apart(tl.max(four(high, delta, noise, wide), 0))
    reach = tl.where(is_nan > 0, float("nan"), reach)
    return change, under, shift, norm, total, error, reach, largest, loudest, widest


@triton.jit
def head_norm(splits_lse, row, count, COUNT: tl.constexpr):
    """The log-sum-exp of one head over its `count` pieces: -inf where all are, NaN where one is."""
    i = tl.arange(0, COUNT)
    lse = tl.load(splits_lse + row * count + i, mask=i < count, other=float("-inf"))
    top = tl.max(lse, 0)
    has_nan = tl.sum((lse != lse).to(tl.int32), 0) > 0  # a maximum may drop a NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    norm = shift + tl.log2(tl.sum(tl.exp2(lse - shift), 0))
    return tl.where(has_nan, float("nan"), norm)


@triton.jit
def merge_head(merged, splits, row, count, norm, D: tl.constexpr, DP: tl.constexpr):
    """(the sum [DP] of one head's `count` pieces, relative to their log-sum-exp `norm`, left in
    `merged`; the sum of the norms of all of them but the first, which is what is not quantized)."""
    shift = tl.where(norm == float("-inf"), 0.0, norm)
    d = tl.arange(0, DP)
    p = tl.arange(0, 32)
    acc = tl.zeros([32, DP], tl.float32)  # a sum over pieces crosses warps: once, at the end
    shown = tl.zeros([32], tl.float32)
    for first in tl.range(0, count, 32, num_stages=3):
        there = first + p < count
        one = tl.load(splits.lse + row * count + first + p, mask=there, other=float("-inf"))
        part_at = splits.out + (row * count + first + p)[:, None] * D + d[None, :]
        part = tl.load(part_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
        weight = tl.exp2(one - shift)
        acc += part * weight[:, None]
        shown += tl.where(first + p > 0, tl.sqrt(tl.sum(part * part, 1)) * weight, 0.0)
    out = tl.sum(acc, 0)
    tl.store(merged + row * D + d, out, mask=d < D)
    return out, tl.sum(shown, 0)


@triton.jit
def head_norms(splits_lse, row, in_group, count, COUNT: tl.constexpr):
    """Log-sum-exps of the heads [GP] over all `count` pieces and over what is not quantized."""
    i = tl.arange(0, COUNT)
    mask = (i < count)[:, None] & in_group[None, :]
    at = splits_lse + row[None, :] * count + i[:, None]
    lse = tl.load(at, mask=mask, other=float("-inf"))
    rest = tl.load(splits_lse + row * count, mask=in_group, other=float("-inf"))
    top = tl.max(lse, 0)
    has_nan = tl.max((lse != lse).to(tl.int32), 0) > 0  # a maximum may drop a NaN
    shift = tl.where(top == float("-inf"), 0.0, top)
    norm = shift + tl.log2(tl.sum(tl.exp2(lse - shift[None, :]), 0))
    return tl.where(has_nan, float("nan"), norm), rest


@triton.jit
def choose(
    head_at,
    N,
    logs_at,
    norm,
    rest_mass,
    choice,
    blocks,
    in_group,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """(score from which on keys are read exactly, and values, and with SEARCH.ONE_SWEEP all
    blocks' scores and ranks). The log-masses lie at `head_at`, N for each
    head; `logs_at` is where each head's begin. `choice` is a `Choice`."""
    coverage = tl.zeros([GP], tl.float32) + choice.coverage
    least, most = choice.least, choice.most
    if SEARCH.ONE_SWEEP:
        key_threshold, scores, order = search_one_sweep(
            head_at=head_at,
            N=N,
            norm=norm,
            least=least,
            most=most,
            blocks=blocks,
            GROUP=GROUP,
            GP=GP,
            TILE=SEARCH.TILE,
        )
    elif SEARCH.PROMOTES:
        key_threshold = search(
            logs_at=logs_at,
            norm=norm,
            rest_mass=rest_mass,
            coverage=coverage,
            least=least,
            most=most,
            blocks=blocks,
            in_group=in_group,
            GP=GP,
            TILE=SEARCH.TILE,
            HELD=SEARCH.HELD,
            COVERS=SEARCH.COVERS,
        )
        scores, order = key_threshold, key_threshold
    else:
        key_threshold = tl.min(norm * 0, 0) + float("inf")
        scores, order = key_threshold, key_threshold
    value_threshold = tl.log2(choice.v_tol + R.LOG_FLOOR)
    return key_threshold, value_threshold, scores, order
