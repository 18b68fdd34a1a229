"""How select_blocks cuts its work: chosen from static shapes alone, by what was timed on an H200
(docs/log/gather.md)."""

from typing import NamedTuple

from attnplug.ops.common.sizes import next_power_of_two, padded_width
from attnplug.ops.gather.reference import RANKED


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    chunk: int  # blocks that are scored together
    members: int  # blocks whose maximum the score kernel hands on; 0: none, the selection is flat
    warps: int
    select_warps: int
    repeat: int = 1  # chunks of one program of the score kernel
    stages: int = 1  # of its pipeline
    soon: bool = False  # read summaries before the length is known; one chunk a program
    registers: int | None = None  # limit of a thread of the score kernel, so that more programs fit
    # For a row that is short in a large room:
    spaced: bool = False  # a program's chunks of bounds lie as far apart as there are programs
    direct: bool = False  # rows of no more blocks than the second level takes have no first level


FLAT = 512  # candidates up to which one program selects among all of them
ONE_LEVEL = 2048  # candidates of a long list up to which its threshold is searched among all
GROUPS = 4096  # of blocks, whose maxima are searched first where there are more
FEW = 8192  # candidates of all rows up to which latency counts, and not bandwidth


def candidates_of(blocks: int, local: int) -> int:
    """How many of a row's blocks can be listed: the last `local`, the query's own among them, are
    read anyway. A plan goes by this and not by the room: with a few tokens of room past a power of
    two, padding would double a search, while local blocks take those tokens off. A row that is full
    before its token comes has one more, and no output."""
    return max(1, blocks - local)


def plan_for(
    rows: int,
    candidates: int,
    top_k: int,
    width: int,
    itemsize: int,
    pipelined: bool,
) -> Plan:
    """The pre-tuned plan of a shape. `candidates` is how many blocks a full cache has to choose
    from, `itemsize` that of their summaries. `pipelined` allows a pipeline: only cases compared on
    a GPU get one, because Triton 3.6 compiles some wrong."""
    if top_k > RANKED:
        return _plan_for_many(rows, candidates, width, itemsize, pipelined)
    total, row_bytes = rows * candidates, padded_width(width) * itemsize
    int8, few, flat = itemsize == 1, total <= FEW, next_power_of_two(candidates) <= FLAT
    chunk = (32 if few else 64) * (2 if int8 else 1)
    chunk = max(16, min(chunk, (8192 if few else 16384) // row_bytes))
    members = 0
    if not flat:
        members = 32 if (candidates > 4096 and top_k <= 8) or candidates > 16384 else 16
        members = min(chunk, 8 if top_k > 8 and candidates <= 1024 else members)
    many = top_k > 64 or (not flat and top_k > 8) or candidates > 4096
    plan = Plan(chunk, members, 4, 8 if many else 4)
    if few:
        return plan._replace(soon=True)
    if not pipelined or row_bytes > 256:
        return plan
    if int8:  # many bytes on their way need no long programs
        if total <= 2**15 and rows <= 8:
            return plan
        return plan._replace(repeat=2 if total <= 2**17 else 4, stages=2, registers=128)
    return plan._replace(repeat=2 if total <= 2**17 else 4, stages=3, registers=128)


def _plan_for_many(rows: int, candidates: int, width: int, itemsize: int, pipelined: bool) -> Plan:
    """The plan of a selection by a threshold."""
    row_bytes, total, int8 = padded_width(width) * itemsize, rows * candidates, itemsize == 1
    chunk = 32 if total <= FEW or not int8 else 64 if total <= 2**16 else 128
    chunk = max(16, min(chunk, 16384 // row_bytes))
    members = 0 if candidates <= ONE_LEVEL else 8 if candidates <= 4 * ONE_LEVEL else 16
    members = min(chunk, max(members, next_power_of_two(candidates) // GROUPS))
    plan = Plan(chunk, members, 4, 4 if candidates <= 16384 else 8, direct=candidates > 16384)
    if total <= FEW or not (pipelined and int8):
        return plan
    if total <= 2**15 and row_bytes <= 128:
        return plan._replace(chunk=128)
    if total <= 2**17:
        return plan._replace(repeat=2, stages=2, spaced=True)
    if total <= 2**18:  # two programs a multiprocessor, of as many stages as fit
        return plan._replace(repeat=8, stages=3, spaced=True)
    return plan._replace(repeat=4, stages=2, registers=128, spaced=True)
