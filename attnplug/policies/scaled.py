"""Crossovers for a card on which nothing was measured, scaled from an H200's.

A step of a method that reads a part of the cache pays from the length at which reading the rest
takes as long as what the method costs besides: its launches, and the work of choosing and gathering
what it reads. With the bytes in tokens, and `read` what a step of the method reads,

    n - read(n) = cost x bandwidth / bytes of a token

The cost is a time. A launch takes the same time on every card, and work takes longer on one with
fewer multiprocessors. Which part of the cost is which is not known, so a card with fewer of them
pays all of it as if it were work, and one with more as if it were launches: either way dense serves
for longer. Clocks are not counted, nor that only Hopper and later cards start a kernel early.

Every Hopper card has an H200's crossovers, as rows of H100s were measured beside them; with their
lower bandwidth, dense serves there for longer than this rule would have it.
"""

import math
from collections.abc import Callable

from attnplug.call import StepReads
from attnplug.ops.common.device import Card

BANDWIDTH, PROCESSORS = 4.8e12, 132  # of an H200, as its data sheet says
STEP = 256  # tokens; a crossover is a multiple


def scaled(tokens: int, reads: Callable[[int], StepReads], head_dim: int, card: Card) -> int | None:
    """The crossover on a card of a method that pays on an H200 from `tokens` on. `reads(n)` is what
    a step reads of n tokens. None where the H200's crossover holds: on Hopper, where the bandwidth
    is not known, and where a step leaves nothing out."""

    def left_out(n: int) -> float:
        keys, scanned = reads(n)
        return n - keys - scanned / (4 * head_dim)

    ratio = card.bandwidth / BANDWIDTH * max(1.0, PROCESSORS / card.processors)
    wanted, n = ratio * left_out(tokens), 0
    if card.wgmma or wanted <= 0:
        return None
    while (lacking := wanted - left_out(n)) > 0:
        n += math.ceil(lacking / STEP) * STEP
    return n
