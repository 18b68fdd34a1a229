"""How gather_attention cuts its work: chosen from static shapes alone, by what was timed on an H200
(docs/log/gather.md)."""

import functools
from typing import NamedTuple

from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width

MOST_AHEAD = 1024  # slots that a program looks up at once: its code grows with them


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    tile: int  # keys that a program attends to at a time
    splits: int  # pieces that the kept keys are cut in; 1: fused
    warps: int
    stages: int
    columns: int  # of the head dimension, for one program of the reduction
    ahead: bool = False  # a program looks its blocks up before it reads keys


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int,
    group: int,
    keys: int,
    block: int,
    width: int,
    itemsize: int,
    multiprocessors: int,
    masked: bool = False,
) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head, query) triples keep `keys` each, in
    blocks of `block`. `masked`: there is a key mask, which each turn must load."""
    row_bytes = padded_width(width) * itemsize
    tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 1024 else 16  # a block of 128 has several
    tiles = -(-keys // tile)
    # Only cases that were compared on a GPU are pipelined: Triton 3.6 silently compiled a loop over
    # gathered keys to wrong code (block_sparse_attention).
    pipelined = row_bytes <= 256 and block % tile == 0
    plan = Plan(
        tile=tile,
        splits=tiles,
        warps=4 if group <= 16 else 8,
        stages=2 if pipelined else 1,  # one turn: key and value load at once
        columns=32 if rows * group <= 4096 else padded_width(width),
    )
    if rows * tiles <= 8 * multiprocessors:
        return plan
    # Bandwidth counts: few, long programs, two a multiprocessor.
    splits = max(1, min(tiles, 2 * multiprocessors // rows))
    if pipelined:
        return plan._replace(splits=splits, stages=4)
    if row_bytes <= 512 and tile % block == 0 and not masked:
        return plan._replace(splits=splits, stages=3, ahead=True)
    return plan._replace(splits=max(1, min(tiles, 4 * multiprocessors // rows)))


def looked_up(
    plan: Plan, keys: int, block: int, page: int = 0, plain: bool = True
) -> tuple[int, int]:
    """(of how many slots a program looks the blocks up before its loop, padded; the stages of the
    loop). `keys`: those of all slots; `page`: of a page, 0 without a table; `plain`: without a
    key mask. What does not fit looks its blocks up in each turn, and is not
    pipelined: of loads whose addresses are loaded Triton 3.6 makes wrong code."""
    if not plan.ahead:
        return 0, 1 if page else plan.stages
    if not plain or plan.tile % block or page % block:
        return 0, 1
    turns = cdiv(cdiv(keys, plan.tile), plan.splits)
    slots = next_power_of_two(turns * (plan.tile // block))
    return (slots, plan.stages) if slots <= MOST_AHEAD else (0, 1)
