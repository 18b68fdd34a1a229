"""What this GPU can do, measured in the process that times kernels on it: the ceilings of its rows.

Bandwidth is the fastest of several ways to read or copy gibibytes of random numbers: kernels that
differ in how much a program reads at once, in the number of programs and in who reads what, torch's
own reduction, and a copy. The matrix rate is a bf16 product of 8192^3. Each is the best of its
samples, timed as rows are. Rows are medians, so that no kernel that moves what it says it moves is
faster than these, unless it finds its inputs in the L2."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnplug.bench.timing import time_in_turn
from attnplug.ops.common.triton import tl, triton

BYTES = 4 << 30  # or an eighth of the free memory, where that is less
SIZE = 8192  # rows and columns of the matrices
ROUNDS = 8


class Read(NamedTuple):
    """A way to read: words of a tile, warps of a program, programs a multiprocessor; `split` gives
    each program one stretch of the memory, else tiles go round."""

    tile: int
    warps: int
    programs: int
    split: bool


READS = (
    Read(2048, 4, 8, False),
    Read(4096, 4, 8, False),
    Read(4096, 8, 4, False),
    Read(8192, 8, 4, False),
    Read(4096, 8, 16, True),
    Read(8192, 8, 8, True),
)


@triton.jit
def _read(source, out, steps, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """Each program reads `steps` tiles and stores a number that depends on every word."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    found = tl.zeros([TILE], dtype=tl.int32)
    for step in range(steps):
        tile = program * steps + step if SPLIT else step * programs + program
        found ^= tl.load(source + tile * TILE + tl.arange(0, TILE))
    tl.store(out + program, tl.max(found, 0))


def launch_read(source: torch.Tensor, out: torch.Tensor, way: Read, processors: int) -> None:
    """Read `source` (int32, contiguous) but for less than a tile a program; `out` gets a word of
    each program."""
    programs = processors * way.programs
    _read.run(
        source=source,
        out=out,
        steps=source.numel() // (programs * way.tile),
        TILE=way.tile,
        SPLIT=way.split,
        grid=(programs,),
        warmup=False,
        num_warps=way.warps,
    )


def read_bytes(words: int, way: Read, processors: int) -> int:
    """What `launch_read` reads of so many words."""
    tiles = processors * way.programs
    return 4 * tiles * way.tile * (words // (tiles * way.tile))


@functools.cache
def ceilings() -> dict[str, float]:
    """`read` and `copy` (read + write) in bytes/s and `gemm` in FLOP/s, once a process."""
    free, _ = torch.cuda.mem_get_info()
    words = min(BYTES, free // 8) // 4
    source = torch.empty(words, dtype=torch.int32, device="cuda").random_()
    processors = torch.cuda.get_device_properties(source.device).multi_processor_count
    out = torch.empty(
        processors * max(way.programs for way in READS), dtype=torch.int32, device="cpu"
    ).cuda()
    ways: list[tuple[Callable[[], Any], int]] = [
        (
            functools.partial(launch_read, source, out, way, processors),
            read_bytes(words, way, processors),
        )
        for way in READS
    ]
    read = max(_rates([*ways, (source.amax, source.nbytes)]))
    target = torch.empty_like(source)
    copy = max(_rates([(functools.partial(target.copy_, source), 2 * source.nbytes)]))
    del source, target, ways
    a, b = torch.randn(2, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    return {"read": read, "copy": copy, "gemm": max(_rates([(product, 2 * SIZE**3)]))}


def _rates(ways: list[tuple[Callable[[], Any], int]]) -> list[float]:
    """Work a second of each way in its best sample, the ways in turn."""
    samples = time_in_turn([[fn] for fn, _ in ways], graphs=[True] * len(ways), rounds=ROUNDS)
    return [work / min(found) * 1e6 for (_, work), found in zip(ways, samples, strict=True)]


def ceiling_fraction(nbytes: float, flops: float, seconds: float) -> float:
    """How much of the nearer ceiling a run reached: bytes against the bandwidth, the higher one of
    read and copy, FLOPs against the measured product."""
    reached = ceilings()
    bandwidth = max(reached["copy"], reached["read"])
    return max(nbytes / seconds / bandwidth, flops / seconds / reached["gemm"])
