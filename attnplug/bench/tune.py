"""`attnplug tune`: from which length on each method pays on this machine's own card.

A method's step and dense's are timed in turn over caches of a few lengths, for one row and for
eight: a layer's token is written, then attended to, as in a step of generate. Between a length at
which the method loses and one at which it wins, the difference of the two times is taken for a
line; the crossover is a tenth behind the place where that line is zero. Prefill methods are timed
on whole prompts.
"""

import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnplug.bench.quick import (
    PLANS,
    Heads,
    Plan,
    gaussian,
    lacks_memory,
    repeats,
    rotated_calls,
    times_of,
)
from attnplug.bench.timing import quantiles
from attnplug.call import AttentionCall, LayerShape
from attnplug.errors import ArgumentError
from attnplug.models.cache import PlugLayer
from attnplug.policies import Phase, Policy, methods
from attnplug.policies.crossover import NEVER, DenseBelow, RowCrossover
from attnplug.policies.tuned import card_name, keep, make_place

BATCH = 8
LENGTHS = {
    "cuda": {1: (4096, 16384, 65536, 262144), BATCH: (2048, 8192, 32768, 131072)},
    "cpu": {1: (1024, 4096, 16384), BATCH: (512, 2048, 8192)},
}
PROMPTS = {"cuda": (4096, 16384, 65536), "cpu": (1024, 4096)}
DECODES, PREFILLS = ("gather", "sketch", "gvr", "certified"), ("momo",)
ROUNDS = 9
PROCESSES = 8  # that compile, at most: each has the GPU's context and a cache of its own
MARGIN, FARTHEST = 1.1, 4  # behind the crossing, and times the longest length beyond which it is
STEP = 256  # tokens; a crossover is a multiple


class Point(NamedTuple):
    """Microseconds of a layer's step, or of its prompt, by a method and by dense: the fifth part
    of the samples took less, as other programs may slow the rest."""

    method: str
    batch: int
    n: int
    us: float
    dense_us: float


def measure(
    heads: Heads,
    device: str,
    begin: Callable[[str, int], None],
    names: Sequence[str] = (),
    share: tuple[int, int] | None = None,
) -> Iterator[Point]:
    """Time each method of `names` (all, where there are none) against dense. `begin` is told what
    comes next, and how many are still to come. Lengths that find no memory are left out. A `share`
    (i, n) takes every n-th case from the i-th on, in a single round (`compile_ahead`)."""
    plan, wanted = PLANS[device], names or (*DECODES, *PREFILLS)
    plan = dataclasses.replace(plan, rounds=min(ROUNDS, plan.rounds) if share is None else 1)
    cases = [
        (name, batch, n)
        for name in wanted
        for batch, lengths in (
            LENGTHS[device].items() if name in DECODES else [(1, PROMPTS[device])]
        )
        for n in lengths
    ]
    if share is not None:
        cases = cases[share[0] :: share[1]]
    for number, (name, batch, n) in enumerate(cases):
        asked: dict[str, Any] = {"min_tokens": 0}
        method = methods()[name](**asked)
        begin(f"{name}, {batch} x {n:,}", len(cases) - number)
        if method.refusal(heads.shape(plan.device)) or lacks_memory(heads, plan, batch * n):
            continue
        time = _time_steps if name in DECODES else _time_prompts
        ours, dense = time(heads, plan, n, batch, method)
        yield Point(name, batch, n, ours, dense)


def _time_steps(heads: Heads, plan: Plan, n: int, batch: int, method: Phase) -> tuple[float, float]:
    sides = []
    for phase in (method, methods()["dense"]()):
        made = list(rotated_calls(heads, plan, n, phase, batch=batch, room=1))
        steps = [
            functools.partial(_step, Policy(decode=phase), call, (k[:, :, :1].clone(), v[:, :, :1]))
            for call, k, v in made
        ]
        sides.append(steps * repeats(plan, len(made)))
    return _times(plan, sides)


def _step(policy: Policy, call: AttentionCall, token: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A step of generate in one layer, which writes a token; taken back."""
    layer = call.state
    assert isinstance(layer, PlugLayer)
    layer.defer_next = layer.defers_write and layer.exposes_buffers
    layer.update(*token)
    policy.attend(call)
    layer.cumulative_length.sub_(1)
    layer.counted -= 1


def _time_prompts(
    heads: Heads, plan: Plan, n: int, batch: int, method: Phase
) -> tuple[float, float]:
    normal = gaussian(plan, 0)
    q = normal(batch, heads.query, n, heads.dim)
    k, v = normal(2, batch, heads.kv, n, heads.dim)
    sides = [
        [functools.partial(phase.attend, AttentionCall(q, k, v, heads.dim**-0.5))]
        for phase in (method, methods()["dense"]())
    ]
    return _times(plan, sides)


def _times(plan: Plan, sides: Sequence[Any]) -> tuple[float, float]:
    ours, dense = (quantiles(times)[0] for times in times_of(plan, sides))
    return ours, dense


def crossovers(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """`row` and `alone` of each method, as RowCrossover has them, and the points that they are
    from. NEVER where no length comes near."""
    found = {}
    for name in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == name]
        alone = crossing([point for point in own if point.batch == 1])
        batched = [point for point in own if point.batch == BATCH]
        row = alone
        if batched and alone < NEVER:
            # Eight rows at their crossing have saved what one row at its own has.
            each = crossing(batched)
            row = max(0, min(alone, (BATCH * each - alone) // (BATCH - 1)))
        measured = [[point.batch, point.n, point.us, point.dense_us] for point in own]
        found[name] = {"row": row, "alone": alone, "points": measured}
    return found


def crossing(points: Sequence[Point]) -> int:
    """Tokens from which on a method is not slower than dense, as far as was measured: the shortest
    length where it never loses; NEVER where it loses for longer than can be told."""
    line = sorted((point.n, point.us - point.dense_us) for point in points)
    if not line:
        return NEVER
    lost = [place for place, (_, gap) in enumerate(line) if gap > 0]
    if not lost:
        return line[0][0]
    last = lost[-1]
    pair = line[last : last + 2] if last + 1 < len(line) else line[-2:]
    if len(pair) < 2 or pair[1][1] >= pair[0][1]:  # the method falls behind
        return NEVER
    (n0, gap0), (n1, gap1) = pair
    at = MARGIN * (n0 + (n1 - n0) * gap0 / (gap0 - gap1))
    return NEVER if at > FARTHEST * line[-1][0] else -(-int(at) // STEP) * STEP


def compile_ahead(
    heads: Heads, device: str, names: Sequence[str], begin: Callable[[str, int], None]
) -> None:
    """Compile what `measure` is going to time, in several processes: a process compiles a kernel at
    a time, and what it has compiled Triton keeps on disk, where the others find it. Each runs its
    share of the cases once, and leaves what it cannot run, for want of memory for example, to the
    process that times. `begin` is told what comes next, as by `measure`."""
    count = min(PROCESSES, os.cpu_count() or 1)
    if count < 2:
        return
    running: list[subprocess.Popen[bytes]] = []
    try:
        for share in range(count):
            asked = json.dumps(
                [heads.query, heads.kv, heads.dim, device, list(names), share, count]
            )
            command = [sys.executable, "-m", "attnplug.bench.tune", asked]
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        for number, process in enumerate(running):
            begin("compiling kernels", count - number)
            process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_share(asked: str) -> int:
    """Run what `compile_ahead` asked of this process; how many cases there were."""
    query, kv, dim, device, names, share, count = json.loads(asked)
    heads = Heads(query, kv, dim)
    return len(list(measure(heads, device, lambda what, left: None, names, (share, count))))


def run(heads: Heads, device: str, names: Sequence[str], console: Console) -> dict[str, Any]:
    """Measure, keep what was found in the user's file, and show it beside the methods' own
    crossovers. Raises ArgumentError for a method that has none."""
    unknown = [name for name in names if name not in (*DECODES, *PREFILLS)]
    if unknown:
        known = ", ".join((*DECODES, *PREFILLS))
        raise ArgumentError(f"tune: {unknown[0]!r} has no crossover to measure; {known} have")
    make_place()  # which should not wait for the work
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def begin(what: str, left: int) -> None:
            total = bar.tasks[task].total or left
            bar.update(task, description=what, total=total, completed=total - left)

        if device == "cuda":
            compile_ahead(heads, device, names, begin)
            bar.reset(task, total=None)
        found = crossovers(list(measure(heads, device, begin, names)))
    shape, today = heads.shape(device), datetime.datetime.now(datetime.UTC).date().isoformat()
    path = keep(shape.device, shape.heads, today, found)
    console.print(table(shape, found))
    console.print(f"kept in {path}, for models of these heads; apply reads it", highlight=False)
    return found


def table(shape: LayerShape, found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Crossovers as measured and as the methods have them: tokens of a row alone, and of each of
    eight rows."""
    where = card_name(shape.device) if shape.device.type == "cuda" else "CPU"
    shown = Table(
        title=f"tokens from which on a method serves: {shape.heads}, {where}",
        caption="never: it was slower than dense at every length that was measured",
    )
    shown.add_column("method")
    for name in ("one row", "of eight rows", "one row by default", "of eight rows"):
        shown.add_column(name, justify="right")
    for name, entry in found.items():
        own = methods()[name]()
        assert isinstance(own, DenseBelow)  # names were checked
        measured = RowCrossover(entry["row"], entry["alone"])
        rules = (measured, own.on_this_card(shape).row_crossover(shape.device))
        shown.add_row(
            name, *(_tokens(n) for rule in rules for n in (rule.alone, rule.least(BATCH)))
        )
    return shown


def _tokens(count: int) -> str:
    return "never" if count >= NEVER else f"{count:,}"


if __name__ == "__main__":  # a process of `compile_ahead`
    run_share(sys.argv[1])
