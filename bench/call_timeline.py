"""Where a whole call of generate waits: what the host does while the GPU has nothing to do.

    python bench/call_timeline.py --tokens 131072 --new 8 --policies 'dense;sketch' [--small]

The model is whole_calls.py's. One call of each policy is recorded, after `--before` others. Printed
are the parts of the call on the host (the prompt is what `run` does before `_begin`), each with its
begin, its length, and what it asks of the driver; the launches at which the host waited, as a GPU
queues about a thousand; and the gaps of the GPU of at least `--gap` milliseconds, with when the
kernel behind a gap was launched. Times are milliseconds since the call began.
"""

import argparse
import collections
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from whole_calls import CONFIG, SMALL, Calls, built

WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
WAITS = 1.0  # milliseconds from which on a launch counts as one that waited
Event = dict[str, Any]


def parts() -> list[tuple[Any, str]]:
    """What is named in a timeline: functions of the loop, by where they are looked up."""
    from attnplug.models import captured, decode_loop
    from attnplug.policies import _sketch_layer

    loop = decode_loop.Decoding
    named: list[tuple[Any, str]] = [(loop, each) for each in ("run", "_begin", "_prepare_layers")]
    named += [(decode_loop, "decode_step"), (captured, "capture"), (loop, "_result")]
    return [*named, (_sketch_layer, "fit_bases"), (_sketch_layer, "encode_keys")]


def name_parts() -> Callable[[], None]:
    """Have the parts of a call name themselves to the profiler; what is returned undoes that."""

    def named(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(work)
        def run(*arguments: Any, **options: Any) -> Any:
            with record_function(f"part: {name}"):
                return work(*arguments, **options)

        return run

    kept = [(owner, name, getattr(owner, name)) for owner, name in parts()]
    for owner, name, work in kept:
        setattr(owner, name, named(work, name))

    def undo() -> None:
        for owner, name, work in kept:
            setattr(owner, name, work)

    return undo


def recorded(work: Callable[[], Any]) -> list[Event]:
    """The events of a call, in the order of their beginnings, in milliseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    events = [each for each in events if each.get("ph") == "X" and "cat" in each]
    begin = min(e["ts"] for e in events if e["name"] == "part: run")
    for each in events:
        each["at"] = (each["ts"] - begin) / 1e3
        each["took"] = each["dur"] / 1e3
        each["end"] = each["at"] + each["took"]
    return sorted(events, key=lambda each: each["at"])


def told(events: list[Event], gap: float) -> None:
    launches = [e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")]
    kernels = [e for e in events if e["cat"] in WORK]
    by_number = {e["args"].get("correlation"): e for e in launches}
    for part in (
        e for e in events if e["name"].startswith("part: ") and e["cat"] != "gpu_user_annotation"
    ):
        inside = [e for e in launches if part["at"] <= e["at"] < part["end"]]
        counts = collections.Counter(e["name"] for e in inside)
        common = ", ".join(f"{count} {name}" for name, count in counts.most_common(4))
        print(f"  {part['at']:9.1f} {part['took']:8.1f} {part['name'][6:]:16} {common}")
    waits = [e for e in launches if e["took"] >= WAITS]
    for wait in waits[:12]:
        print(f"  host waits at {wait['at']:.1f} for {wait['took']:.1f} in {wait['name']}")
    if len(waits) > 12:
        print(f"  host waits {len(waits)} times, {sum(e['took'] for e in waits):.1f} in all")
    done, before = 0.0, "the call's begin"
    idle = 0.0
    for kernel in kernels:
        lost = kernel["at"] - done
        if kernel["at"] > 0 and lost > 0:
            idle += lost
        if lost >= gap:
            launch = by_number.get(kernel["args"].get("correlation"))
            when = f"launched at {launch['at']:.1f}" if launch else "launch unknown"
            print(f"  GPU idle {done:.1f} to {kernel['at']:.1f} ({lost:.1f}), {when}")
            print(f"      after {before[:70]}\n      until {kernel['name'][:70]}")
        if kernel["end"] > done:
            done, before = kernel["end"], kernel["name"]
    print(f"  the GPU was idle for {idle:.1f} of {done:.1f}, {len(kernels)} kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--policies", default="dense;sketch")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--before", type=int, default=2)
    parser.add_argument("--gap", type=float, default=1.0)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    import attnplug

    model = built(SMALL if asked.small else CONFIG, "cpu" if asked.small else "cuda")
    call = Calls(model, asked.batch)
    for policy in asked.policies.split(";"):
        attnplug.apply(model, policy)
        times = [call(asked.tokens, asked.new) for _ in range(asked.before)]
        undo = name_parts()
        events = recorded(lambda: call(asked.tokens, asked.new))
        undo()
        once_more = call(asked.tokens, asked.new)
        print(
            f"{policy}, {asked.tokens:,} tokens, {asked.new} new; seconds of calls: "
            + ", ".join(f"{x:.3f}" for x in (*times, once_more))
        )
        told(events, asked.gap)
        attnplug.remove(model)


if __name__ == "__main__":
    sys.exit(main())
