"""What lies between two kernels of a CUDA graph, and what slows it down.

    cd bench; python3 graph_edges.py edges
    cd bench; python3 graph_edges.py steps sketch:1:131072 gather:1:131072 [--graph-before]

`edges` prints microseconds a kernel of a chain of small ones after each of twelve kernels on a
second stream: from the sixth on every graph of the process is slower. `steps` prints those of
POLICY:BATCH:TOKENS, a layer's step over rotated caches, in both states of the driver, and one
replay's kernels by step: the longest and the median one of each, and the gap in front. With
--graph-before another graph is captured and replayed first, which must change nothing: it once
wrote where caches were (docs/log/house.md). Prints lines of JSON.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_steps
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from attnplug.bench.timing import FLUSH_BYTES, ROUNDS, rotated_sets, runner, sample_us
from attnplug.policies import methods

LINKS, KERNELS = 120, 4  # of the chain, and of each link
ON_ANOTHER = 12  # kernels on a second stream
CALLS = 8  # of steps, in one graph, or more
REPLAYS = 4  # of a sample


def chain() -> Callable[[], Any]:
    """What replays a graph of LINKS times KERNELS small kernels."""
    x = torch.zeros(4096, device="cuda")
    w = torch.eye(1024, device="cuda", dtype=torch.bfloat16)
    y = torch.ones(8, 1024, device="cuda", dtype=torch.bfloat16)

    def links() -> torch.Tensor:
        z = y
        for _ in range(LINKS):
            x.add_(1)
            x.mul_(0.5)
            z = z @ w
            z = z + 0
        return z

    return runner([links])


def microseconds(replay: Callable[[], Any], flush: torch.Tensor) -> float:
    """The median of a replay."""
    return statistics.median(sample_us(replay, REPLAYS, flush) / REPLAYS for _ in range(ROUNDS))


def run_beside(count: int) -> None:
    """Run kernels on a second stream."""
    x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(count):
            x.add_(1)
    torch.cuda.synchronize()


def edges(flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    replay = chain()
    for count in range(ON_ANOTHER + 1):
        if count:
            run_beside(1)
        each = microseconds(replay, flush) / (LINKS * KERNELS)
        yield {"kernels_on_another_stream": count, "us_a_kernel": round(each, 3)}


def kernels_of(replay: Callable[[], Any], steps: int) -> dict[str, list[float]]:
    """By kernel: median and longest microseconds in one replay, and the median gap in front, which
    is negative where it starts early."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name.split("<")[0][:40])
        for event in seen.events()
        if event.device_type == DeviceType.CUDA
    )
    lasted, gaps, before = defaultdict(list), defaultdict(list), None
    for begin, end, name in spans:
        lasted[name].append(end - begin)
        if before is not None:
            gaps[name].append(begin - before)
        before = end
    return {
        f"{name} x{len(times) / steps:g}": [
            round(x, 2)
            for x in (statistics.median(times), max(times), statistics.median(gaps[name] or [0]))
        ]
        for name, times in lasted.items()
    }


def steps(cases: list[str], graph_before: bool, flush: torch.Tensor) -> Iterator[dict[str, Any]]:
    first = chain() if graph_before else None
    if first is not None:
        first()
    made = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_steps.count_no_token(monkeypatch)
        for case in cases:
            name, batch, tokens = case.split(":")
            policy = methods()[name](min_tokens=0)
            caches = test_steps.Caches(policy, int(batch), int(tokens), rotated_sets)
            calls = caches.steps * max(1, CALLS // len(caches.steps))
            made[case] = caches, len(calls), runner(calls)
        for is_slow in (False, True):
            if is_slow:
                run_beside(ON_ANOTHER)
            if first is not None:
                first()
            for case, (_, count, replay) in made.items():
                time = microseconds(replay, flush) / count
                yield {
                    "case": case, "graph_before": graph_before, "slow": is_slow,
                    "us_a_step": round(time, 2), "kernels": kernels_of(replay, count),
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("edges", "steps"))
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--graph-before", action="store_true")
    args = parser.parse_args()
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    is_edges = args.what == "edges"
    for row in edges(flush) if is_edges else steps(args.cases, args.graph_before, flush):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
