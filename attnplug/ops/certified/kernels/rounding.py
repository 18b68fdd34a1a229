"""What arithmetic alone can make of an output (E_round), part by part: `finish` adds up what it was
in a step, `weigh_heads` estimates what it will be. To the base 2, but for results: they are shares
of weighted norms of values."""

from attnplug.ops.certified.records import R
from attnplug.ops.common.triton import tl, triton


@triton.jit
def lost_by_sums(longest, splits, unit_p, BLOCK: tl.constexpr):
    """Of probabilities and values, where a program adds up `longest` blocks: in the pass, and in
    what promotion changes."""
    chain = longest * (BLOCK // R.CHAIN_TOKENS) + R.CHAIN_EXTRA + splits
    return 4 * unit_p + (4 * chain) * R.CHAIN_SLACK


@triton.jit
def lost_by_vanishing(longest, unit_p, BLOCK: tl.constexpr):
    """Of the largest norm and a program's largest probability."""
    return (longest * BLOCK) * (unit_p * R.VANISHING_SHARE)


@triton.jit
def left_behind(noise, cap, D: tl.constexpr):
    """What promotion leaves behind of the pass, whose scores were not bit for bit its own."""
    pair = noise * ((D + R.PAIR_EXTRA) / (D + R.DOT_EXTRA)) + cap * R.CAP_SLACK
    return tl.exp2(pair) - 1 + R.EXP2_SLACK


@triton.jit
def reads_off(noise, rest_reach, cap, D: tl.constexpr):
    """e^x - 1 for what scores that are read exactly are off by: at most x (1 + x) where x is at
    most 1."""
    noise = tl.maximum(noise, rest_reach * ((D + R.DOT_EXTRA) * R.DOT_SLACK))
    noise = (noise * R.READ_SHARE + cap * R.CAP_SLACK) * R.LN2
    return tl.where(noise <= 1, noise * (1 + noise), float("inf"))
