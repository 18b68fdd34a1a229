"""What shared memory a loop over tiles of keys and values takes, and what fits a card.

A program multiplies `rows` queries by a tile of keys, and what comes of that by a tile of values.
Triton keeps the tiles of one turn less than the loop has stages, and without a pipeline one tile.
"""

import functools
from typing import NamedTuple

BESIDE = 1024  # bytes for sums over a row, and what is as small


class Loop(NamedTuple):
    """The tiles of a program, the stages of its pipeline, and whether it keeps the tiles of all of
    them, as the compiler was seen to do for some loops over float32."""

    rows: int
    keys: int
    stages: int
    keeps_all: bool = False

    def shared(self, row_bytes: int, itemsize: int, masked: bool = False) -> int:
        """Bytes of shared memory at most: queries and keys have `row_bytes`, padded to a power of
        two, and elements of `itemsize`. With a mask values are cleared, which takes a tile more.

        Cards that multiply by warp groups keep a turn more, and have far more than is asked here.
        """
        tile = self.keys * row_bytes
        turn = 2 * tile + 8 * self.keys  # and the pages of the keys
        turns = self.stages if self.keeps_all else self.stages - 1
        kept = turn // 2 if self.stages == 1 else turn * turns
        beside = self.rows * (row_bytes + self.keys * itemsize) + masked * tile
        return kept + beside + BESIDE


@functools.lru_cache(maxsize=1024)
def stages_that_fit(
    loop: Loop, row_bytes: int, itemsize: int, shared: int, masked: bool = False
) -> int:
    """The stages of a loop, or as many as `shared` bytes are enough for."""
    while loop.stages > 1 and loop.shared(row_bytes, itemsize, masked) > shared:
        loop = loop._replace(stages=loop.stages - 1)
    return loop.stages


@functools.lru_cache(maxsize=1024)
def loop_that_fits(
    loop: Loop, row_bytes: int, itemsize: int, shared: int, fewest_keys: int = 16
) -> Loop:
    """A loop with smaller tiles, `fewest_keys` at least, where `shared` bytes are not enough for
    it. Halves of the rows and the keys go before the pipeline does."""
    while loop.shared(row_bytes, itemsize) > shared:
        if loop.stages > 2:
            loop = loop._replace(stages=loop.stages - 1)
        elif loop.rows > 64:
            loop = loop._replace(rows=loop.rows // 2)
        elif loop.keys > max(32, fewest_keys):
            loop = loop._replace(keys=loop.keys // 2)
        elif loop.stages > 1:
            loop = loop._replace(stages=1)
        elif loop.keys > max(16, fewest_keys):
            loop = loop._replace(keys=loop.keys // 2)
        elif loop.rows > 16:
            loop = loop._replace(rows=loop.rows // 2)
        else:
            break
    return loop
