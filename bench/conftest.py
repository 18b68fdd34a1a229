"""The GPU timing fixture: CUDA events over graph replays, ours and the peer's in turn.

pytest-benchmark keeps the rows. Its timer is replaced by a clock that moves by device time, so its
own statistics are those of the same samples that `extra_info` summarises.
"""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug.bench.ceilings import ceilings
from attnplug.bench.rows import make_row
from attnplug.bench.timing import ROUNDS, rotated_sets, time_in_turn


class DeviceClock:
    """Seconds of device time recorded so far; `advance` moves it, calling it reads it."""

    def __init__(self):
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


CLOCK = DeviceClock()


def device_clock() -> float:
    return CLOCK.seconds


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.benchmark(timer=device_clock))
            # a bench measures: what a library warns of is shown and not fatal
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.pop("node", None)
    if torch.cuda.is_available():
        machine_info["ceilings"] = ceilings()


@pytest.fixture(scope="session")
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("bench needs a CUDA device and torch sees none", pytrace=False)


@pytest.fixture
def gpu_bench(cuda, benchmark):
    """Call it once per test: `gpu_bench(op=, ..., fns=[...], peer=, peer_fns=[...])` measures, and
    `gpu_bench.record(..., times_us=[...], peer_times_us=[...])` takes times measured elsewhere."""
    return GpuBench(benchmark)


# Compile the kernels and time nothing: what several processes can do at once, before one times.
DRY = os.environ.get("ATTNPLUG_BENCH_DRY") == "1"


class GpuBench:
    def __init__(self, benchmark):
        self.benchmark = benchmark

    @staticmethod
    def sets(nbytes: int) -> int:
        """How many rotated sets of inputs of `nbytes` each keep a run from reading the L2."""
        return 1 if DRY else rotated_sets(nbytes)

    def __call__(
        self,
        *,
        fns: Sequence[Callable[[], Any]],
        peer: str | None = None,
        peer_fns: Sequence[Callable[[], Any]] | None = None,
        replays: int | None = None,
        rounds: int = ROUNDS,
        graph: bool = True,
        peer_graph: bool | None = None,
        **row: Any,
    ) -> dict[str, Any]:
        """Time `fns` (zero-argument, one per rotated set of inputs) and `peer_fns` alternately.

        Each list becomes one CUDA graph that runs all its sets in order; a sample is the device
        time of `replays` graph replays divided by the calls in them. `replays=None` takes enough
        for 2 ms. `graph=False` (for both) and `peer_graph=False` call without capture, for what
        cannot be captured and runs longer than a millisecond. Returns the row.
        """
        if DRY:
            fns[0]()
            torch.cuda.synchronize()
            pytest.skip("compiled, not timed")
        sides, graphs = [fns], [graph]
        if peer_fns:
            sides.append(peer_fns)
            graphs.append(graph if peer_graph is None else peer_graph)
        samples = [*time_in_turn(sides, graphs=graphs, replays=replays, rounds=rounds), []]
        return self.record(times_us=samples[0], peer=peer, peer_times_us=samples[1] or None, **row)

    def record(
        self,
        *,
        op: str,
        case: str,
        n: int,
        batch: int,
        heads_q: int,
        heads_kv: int,
        head_dim: int,
        dtype: torch.dtype | str,
        times_us: Sequence[float],
        bytes: float,
        flops: float,
        options: str = "",
        peer: str | None = None,
        peer_times_us: Sequence[float] | None = None,
        ceiling: Callable[[float], float] | None = None,
        policy: str | None = None,
        memory: int | None = None,
    ) -> dict[str, Any]:
        """Write the row of `times_us` (one sample a round, microseconds a call). `ceiling` gives
        the share of another ceiling than the GPU's own, of the seconds of a call."""
        row = make_row(
            op=op, case=case, n=n, batch=batch, heads_q=heads_q, heads_kv=heads_kv,
            head_dim=head_dim, dtype=dtype, options=options, times_us=times_us, peer=peer,
            peer_times_us=peer_times_us, bytes=bytes, flops=flops, ceiling=ceiling, policy=policy,
            memory=memory,
        )  # fmt: skip
        feed = itertools.cycle(times_us)
        self.benchmark.pedantic(lambda: CLOCK.advance(next(feed) * 1e-6), rounds=len(times_us))
        self.benchmark.extra_info.update(row)
        if file := os.environ.get("ATTNPLUG_BENCH_ROWS"):
            with open(file, "a") as rows:  # pytest-benchmark writes at the end of a session only
                print(json.dumps(row), file=rows)
        print(summary(row))
        return row


def summary(row: dict[str, Any]) -> str:
    """One line for the terminal (pytest -s)."""
    line = (
        f"{row['op']} {row['case']} n={row['n']} batch={row['batch']} "
        f"{row['heads_q']}/{row['heads_kv']}x{row['head_dim']} {row['dtype']} {row['options']} "
        f"p50={row['p50_us']:.2f}us"
    )
    if row["ceiling_fraction"] is not None:
        line += f" ceiling={row['ceiling_fraction']:.2f}"
    if row["peer"]:
        line += f" {row['peer']}={row['peer_p50_us']:.2f}us ratio={row['ratio']:.3f}"
    return line
