"""How dense_decode cuts its work: chosen from static shapes and the card alone."""

import functools
from typing import NamedTuple

from attnplug.ops.common.pipeline import Loop, stages_that_fit
from attnplug.ops.common.sizes import cdiv, padded_width


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    rows: int  # (query, head of the group) pairs of one program
    tile: int  # keys that a program attends to at a time
    splits: int  # pieces that the keys are cut in
    warps: int
    stages: int
    columns: int  # of the head dimension, for one program of the reduction


@functools.lru_cache(maxsize=1024)
def plan_for(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    size: int,
    width: int,
    itemsize: int,
    multiprocessors: int,
    masked: bool,
    shared: int,
) -> Plan:
    """The pre-tuned plan of a shape, within `shared` bytes of a card with so many multiprocessors.
    `size` is that of the cache: its valid length is unknown."""
    padded = padded_width(width)
    pairs = heads // kv_heads * queries
    rows = 16 if pairs <= 16 else 64 if pairs <= 64 or padded > 128 else 128  # 32: slower than 64
    if padded > 256:  # the sums of 64 rows take all registers
        rows = min(rows, 32)
    tile = min(max(16, 16384 // (padded * itemsize)), 128)  # 16 KiB of keys
    bytes_of = padded * itemsize, itemsize
    while rows > 16 and Loop(rows, tile, 2).shared(*bytes_of, masked) > shared:
        rows //= 2
    tiles = cdiv(size, tile)
    programs = batch * kv_heads * cdiv(pairs, rows)
    # One program a multiprocessor reads fastest. Two do where one would leave a tenth of the
    # multiprocessors idle, or where there is a key mask, whose bytes a program waits for.
    splits = (2 if masked else 1) * multiprocessors // programs
    if splits * programs < 0.9 * multiprocessors:
        splits = 2 * multiprocessors // programs
    splits = max(1, min(splits, tiles))
    loop = Loop(rows, tile, 3 if masked or tiles <= 4 * splits else 4)
    return Plan(
        rows=rows,
        tile=tile,
        splits=splits,
        warps=8 if rows == 128 or itemsize == 4 else 4,
        stages=stages_that_fit(loop, *bytes_of, shared, masked),
        columns=32 if batch * heads * queries <= 4096 else padded,
    )
