"""Device time of zero-argument functions: CUDA events over graph replays, ours and the peer's in
turn; on a CPU the host's clock over calls."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnplug.models.captured import capture

Calls = Sequence[Callable[[], Any]]

ROUNDS = 25
ROUND_US = 2000.0  # device time between two events of one sample
FLUSH_BYTES = 512 << 20
ROTATION_BYTES = 180 << 20  # three times the H200's L2


def rotated_sets(nbytes: int) -> int:
    """How many rotated sets of inputs of `nbytes` each keep a run from reading the L2."""
    return max(1, -(-ROTATION_BYTES // nbytes))


def time_in_turn(
    sides: Sequence[Calls],
    *,
    graphs: Sequence[bool],
    replays: int | None = None,
    rounds: int = ROUNDS,
) -> list[list[float]]:
    """Microseconds a call of every side, one sample a round, the sides in turn.

    A side is a list of functions, one for each rotated set of inputs; with `graphs` it becomes one
    CUDA graph that runs all of them in order. A sample is the device time of `replays` replays
    divided by the calls in them. `replays=None` takes enough for 2 ms."""
    runs = [runner(fns, graph) for fns, graph in zip(sides, graphs, strict=True)]
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    repeats = [replays or _replays(run, flush) for run in runs]
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for which, run in enumerate(runs):
            elapsed = sample_us(run, repeats[which], flush)
            samples[which].append(elapsed / (repeats[which] * len(sides[which])))
    return samples


def time_on_cpu(sides: Sequence[Calls], *, rounds: int = ROUNDS) -> list[list[float]]:
    """The same by the host's clock: every function of a side once a round, after one that warms
    up. What no GPU runs, and not to be set beside GPU times."""
    samples: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for fns, found in zip(sides, samples, strict=True):
            begin = time.perf_counter()
            for fn in fns:
                fn()
            if number:
                found.append((time.perf_counter() - begin) * 1e6 / len(fns))
    return samples


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50, p80."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def runner(fns: Calls, graph: bool = True) -> Callable[[], Any]:
    """What runs every function once, through one CUDA graph when `graph`. It has run them once, for
    what must not be captured: kernels compile, workspaces are filled. All of it on the current
    stream: see `capture`."""

    def run() -> None:
        for fn in fns:
            fn()

    run()
    torch.cuda.synchronize()
    if not graph:
        return run
    torch.cuda.empty_cache()
    replay = capture(run, torch.cuda.Stream)

    def replay_alive(alive: Callable[[], None] = run) -> Any:
        """The graph writes where the functions' tensors are, which therefore live as long."""
        return replay()

    return replay_alive


def _replays(run: Callable[[], Any], flush: torch.Tensor) -> int:
    once = sample_us(run, 1, flush)
    if once < ROUND_US:  # the first may still have warmed something up
        once = min(once, sample_us(run, 1, flush), sample_us(run, 1, flush))
    return max(1, min(200, round(ROUND_US / once)))


def sample_us(run: Callable[[], Any], repeats: int, flush: torch.Tensor) -> float:
    """Device microseconds of `repeats` runs. The reductions before the first event empty the L2 of
    what the other side left there, and keep the device busy while the host enqueues."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.amax()
    flush.amax()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
