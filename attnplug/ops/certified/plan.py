"""How the kernels of `certified_attention` cut the work: pre-tuned, from static shapes alone."""

import dataclasses
from typing import NamedTuple

from attnplug.ops.certified.kernels.arguments import Search
from attnplug.ops.certified.scratch import SETS
from attnplug.ops.common.sizes import cdiv, next_power_of_two

INF = float("inf")


class Choosing(NamedTuple):
    """Of `choose_blocks`."""

    tile: int  # blocks at a time
    warps: int
    registers: int | None  # of a thread at most


class Hopper(NamedTuple):
    """Of the Hopper kernel: see `Plan`, and its programs a multiprocessor."""

    step: int
    registers: int
    programs: int
    ring: int


CHOOSING = Choosing(tile=512, warps=8, registers=None)
# Masses and scores that a program that chooses holds in registers: 80 a thread, as `search._above`
# cuts them, which is for 8 warps. Half as many where it searches more than once.
HELD = 20480
PROMOTING = (4, 255)  # warps, and registers of a thread at most
LIST_READERS = 2  # programs a multiprocessor that read a list
HOPPER = Hopper(step=32, registers=255, programs=8, ring=1)
WEIGHED = 2048  # blocks that a program weighs at a time, and loads ahead
PREPARED = 32  # blocks that a program prepares at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs of one call."""

    splits: int  # of the pass over the blocks, for each KV head
    pieces: int  # that recompute, for each KV head
    chunks: int = 2  # that choose and list, for each KV head: a power of two, SETS at most
    list_readers: int = 4  # that read a list of promoted blocks: a power of two
    inline_chunks: int = 2  # without a list, programs that choose and sum up: as chunks
    inline_readers: int = 2  # and that choose and read, or more: a power of two; 0: always a list
    step: int = 0  # tokens at a time of the Hopper kernel; 0: the kernels for all cases
    registers: int | None = None  # of a thread of the Hopper kernel at most
    ring: int = 2  # steps that it has copied to shared memory at a time
    warps: int = 4  # of the kernel for all cases
    stages: int = 3
    checked: bool = True  # compare the check words; off only to time what they cost


def plan_for(
    batch: int,
    kv_heads: int,
    group: int,
    width: int,
    blocks: int,
    block: int,
    capacity: int,
    multiprocessors: int,
    hopper: bool,
) -> Plan:
    """The plan of a shape. `hopper`: such a GPU, 16-bit queries and no key mask."""
    share = max(1, batch * kv_heads)
    # One runs on a multiprocessor, and those that merge want room beside the others. A program's
    # own blocks must not be so many that it has no registers for them.
    room = multiprocessors // share - group
    least = min(SETS, next_power_of_two(cdiv(blocks, 1024)))
    readers = 4 if room >= 12 else 2
    plan = Plan(
        splits=max(1, min(4 * multiprocessors // share, blocks)),
        pieces=max(1, min(2 * multiprocessors // share, capacity)),
        chunks=max(least, _power_of_two(max(4, min(room, SETS)))),
        list_readers=_power_of_two(max(4, min(LIST_READERS * multiprocessors // share, 64))),
        inline_chunks=max(least, _power_of_two(max(2, min(room - readers, SETS)))),
        inline_readers=readers,
    )
    # Its lines are of 128 channels, and a tensor descriptor has a line at least.
    if hopper and width == 128 and group <= 7 and blocks > 0:
        return dataclasses.replace(
            plan,
            splits=max(1, min(HOPPER.programs * multiprocessors // share, blocks)),
            step=min(HOPPER.step, block),
            registers=HOPPER.registers,
            ring=HOPPER.ring,
        )
    return plan


def capacity_for(blocks: int, k_max: int, explore: float) -> int:
    """Blocks that one KV head can read exactly in a step, of `blocks` in the cache: four times what
    a head may promote, as the others may need others, and the spot checks with room for chance."""
    return min(blocks, 4 * k_max + 32 + int(1.5 * explore * blocks))


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << n.bit_length() - 1


def held_blocks(blocks: int, heads: int) -> int:
    """How large a tile holds the masses of so many blocks (a power of two) and heads in a program's
    registers, with their scores; 0: none does."""
    tile = max(1024, blocks)
    return tile if tile * (heads + 1) <= HELD else 0


def search_for(
    blocks: int,
    group: int,
    *,
    one_sweep: bool,
    coverage: float,
    k_min: int,
    tolerance: float,
    explore: float,
) -> Search:
    """How `choose_blocks` searches so many blocks for the heads of a group."""
    every = max(16, next_power_of_two(blocks))
    heads = next_power_of_two(group)
    return Search(
        TILE=every if one_sweep else min(every, CHOOSING.tile),
        HELD=0 if one_sweep else held_blocks(every, heads),
        ONE_SWEEP=one_sweep,
        COVERS=coverage > 0,
        PROMOTES=coverage > 0 or k_min > 0,
        NEEDS=tolerance < INF,
        EXPLORES=explore > 0,
    )
