"""What `sketch_ops.py` and `gather_ops.py` share: rows as they come, inputs of small cases, and the
time of a call in a CUDA graph."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from attnplug.bench.timing import runner
from attnplug.ops import dense_decode

FAILURES = (
    TritonError,
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
)


class Rows:
    """Rows as they come, in a file and for the table."""

    def __init__(self, path: Path, seconds: float):
        self.file = path.open("w")
        self.end = time.monotonic() + seconds
        self.table: list[str] = []
        self.failed = 0

    def add(self, **row: Any) -> None:
        print(json.dumps(row), file=self.file, flush=True)
        text = f"{row['p50_us']:9.2f} us" if "p50_us" in row else row.get("result", "")
        self.table.append(f"{row['what']:10} {row['case']:28} {row['variant']:34} {text}")
        print(self.table[-1], flush=True)

    def attempt(self, what: str, case: str, variant: str, run: Callable[..., Any], *args: Any):
        """The row of `run(*args)`, or of the error that it ends in."""
        if time.monotonic() > self.end:
            self.add(what=what, case=case, variant=variant, result="skipped: out of time")
            return None
        try:
            row = run(*args)
            torch.cuda.synchronize()
        except FAILURES as error:
            self.failed += 1
            text = f"{type(error).__name__}: {error}"
            self.add(what=what, case=case, variant=variant, result="FAILED " + text[:300])
            return None
        self.add(what=what, case=case, variant=variant, **row)
        return row


def near(label: str, found: torch.Tensor, wanted: torch.Tensor, allowed: float) -> str:
    """Raise AssertionError unless all elements agree; NaN and infinities must be the same."""
    found, wanted = found.double().cpu(), wanted.double()
    odd = ~wanted.isfinite()
    same = torch.equal(found[odd].nan_to_num(7.0), wanted[odd].nan_to_num(7.0))
    error = (found - wanted)[~odd].abs().max().item() if bool((~odd).any()) else 0.0
    assert same and error <= allowed, f"{label}: error {error:.3g} > {allowed:.3g}, odd {same}"
    return f"{label} {error:.1e}"


def inputs(dtype, width, group, tokens, padded, masked, seed=0, batch=2, kv_heads=2):
    """q, k, v, lengths, start and key mask of a small case, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, kv_heads, tokens, width, generator=random)
    k[..., 3] *= 6
    q = torch.randn(batch, kv_heads * group, 32, width, generator=random)
    lengths = torch.tensor([tokens, tokens - 301])
    start = torch.tensor([3, 131]) if padded else None
    mask = torch.rand(batch, tokens, generator=random) < 0.9 if masked else None
    return q.to(dtype), k.to(dtype), v.to(dtype), lengths, start, mask


ROTATE = 256 << 20  # bytes that steps read before one reads the same again
MOST = 24 << 30  # bytes of caches for that, at most


def sets_for(read: int, held: int) -> int:
    """How many caches of `held` bytes a graph goes through. What a step reads of one decides, and
    not what it has: a few MB of 268 at 128K, which would stay in the L2."""
    return max(1, min(-(-ROTATE // read), MOST // held))


def dense_steps(layers: Sequence[Any]) -> list[Callable[[], Any]]:
    """dense's step over each layer's `q`, `k`, `v` and `lengths`."""
    return [
        lambda x=x: dense_decode(x.q, x.k, x.v, scale=x.k.shape[3] ** -0.5, lengths=x.lengths)
        for x in layers
    ]


def microseconds(
    calls: list[Callable[[], Any]], between: Callable[[], Any] | None = None
) -> dict[str, float]:
    """p20, p50 and p80 of one call, of graphs that make all calls at least 16 times in all. With
    `between` in front of each call, whose own time, in a graph of its own, is taken off."""
    if between is not None:
        both = [lambda call=call: (between(), call()) for call in calls]
        alone = microseconds([between])["p50_us"]
        return {name: time - alone for name, time in microseconds(both).items()}
    repeats = -(-16 // len(calls))
    replay = runner(calls * repeats)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    cuts = statistics.quantiles(times[2:], n=10, method="inclusive")
    return {"p20_us": cuts[1], "p50_us": cuts[4], "p80_us": cuts[7]}
