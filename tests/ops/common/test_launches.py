"""Calls that are made again: right for other arguments of the same form, and only where nothing but
launches happens."""

import ctypes
import re
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import attnplug
from attnplug.ops.common import launches
from attnplug.ops.common.launches import launch_kernel, repeated


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None
    step: int = 1


def at(pointer, count):
    """Float32 numbers where a tensor, or a pointer as a driver gets it, points to."""
    if isinstance(pointer, torch.Tensor):
        pointer = pointer.data_ptr()
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(pointer))


class Kernel:
    """Stands for one of Triton's: computes with pointers on the host."""

    def __init__(self, function, *names, constants=()):
        self.function, self.launched, self.packed_metadata = function, 0, "how"
        parameter = lambda x: types.SimpleNamespace(  # noqa: E731
            name=x, is_constexpr=x in constants, default=None
        )
        self.params = [parameter(x) for x in names]

    def run(self, *args, grid=None, warmup=None, **named):
        """`JITFunction.run`, which compiles; and `CompiledKernel.run`, which has its values in
        order."""
        self.launched += 1
        if named:
            assert warmup is False
            self.function(*(named.get(x.name) for x in self.params))
            return self
        size, (stream, function, how, *hooks), values = args[:3], args[3:9], args[9:]
        assert (size, stream) == ((2, 1, 1), 7) and (function, how) == (self.function, "how")
        assert hooks == [None] * 3
        self.function(*values)
        return None


def scale_into(pair, out, N, FACTOR):
    at(out, N)[:] = FACTOR * at(pair[0], N) + (0 if pair[1] is None else at(pair[1], N))


SCALE = "pair", "out", "N", "FACTOR"


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(launches, "REPEATING", True)
    active = types.SimpleNamespace(get_current_stream=lambda index: 7)
    monkeypatch.setattr(launches, "driver", types.SimpleNamespace(active=active))


class Op:
    """out = factor (2 x + y) behind the first `skip` numbers, by two launches and memory between
    them; `runs` counts how often more than launches are done."""

    def __init__(self, extra=lambda x: None):
        self.kernel, self.runs = Kernel(scale_into, *SCALE, constants=("FACTOR",)), 0
        self.extra, self.call = extra, repeated(self.run)

    def run(self, x, y, factor, skip):
        self.runs += 1
        self.extra(x)
        size = len(x) - skip
        between = torch.empty(3, len(x))[1, skip:]
        spare, out = x.new_empty(0), x.new_empty(size)
        launch = {"grid": (2,), "N": size}
        pair = Pair(x[skip:], None if y is None else y[skip:])
        launch_kernel(self.kernel, pair=pair, out=between, FACTOR=2, **launch)
        pair = Pair(between, spare if y is None else None)
        launch_kernel(self.kernel, pair=pair._replace(y=None), out=out, FACTOR=factor, **launch)
        return out, spare


def numbers(seed, size=40):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("skip", [0, 4])
@pytest.mark.parametrize("with_y", [False, True])
def test_a_call_is_made_again_with_its_own_pointers(skip, with_y):
    op, kept = Op(), []
    for seed in range(6):
        x, y = numbers(seed), numbers(seed + 50) if with_y else None
        out, spare = op.call(x, y, 3, skip)
        kept.append((out, 3 * (2 * x + (0 if y is None else y))[skip:]))
        assert spare.shape == (0,) and op.kernel.launched == 2 * (seed + 1)
    assert op.runs == 2  # the second is written down
    assert all(torch.equal(found, wanted) for found, wanted in kept)


OTHERS = {
    "shape": lambda x: (x[:32], 3),
    "stride": lambda x: (x[:80:2], 3),
    "dtype": lambda x: (x[:40].view(torch.int32), 3),
    "alignment": lambda x: (x[1:41], 3),
    "option": lambda x: (x[:40], 4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_form_is_another_call(what):
    op, x = Op(), numbers(0, 80)
    for runs in (1, 2, 2, 2):
        op.call(x[:40], None, 3, 0)
        assert op.runs == runs
    other, factor = OTHERS[what](x)
    op.call(other, None, factor, 0)
    assert op.runs == 3


def test_what_else_is_done_is_done_each_time():
    """Such as a copy, which no launch shows."""
    op = Op(extra=lambda x: x.add_(1))
    for seed in range(5):
        x = numbers(seed)
        wanted = 3 * 2 * (x + 1)
        assert torch.equal(op.call(x, None, 3, 0)[0], wanted)
    assert op.runs == 5


def test_pointers_that_may_be_of_two_inputs_are_not_guessed():
    op = Op()
    for seed in range(4):
        x = numbers(seed)
        assert torch.equal(op.call(x, x, 3, 0)[0], 3 * (2 * x + x))
    assert op.runs == 4
    for seed in range(4):  # parts of one tensor are no such case
        x, y = numbers(seed, 80).chunk(2)
        assert torch.equal(op.call(x, y, 3, 4)[0], 3 * (2 * x + y)[4:])
    assert op.runs == 6


def test_memory_from_elsewhere_is_not_taken_for_temporary():
    held = torch.ones(40)
    kernel = Kernel(scale_into, *SCALE, constants=("FACTOR",))
    runs = []

    def run(x):
        runs.append(1)
        out = torch.empty_like(x)
        launch_kernel(kernel, grid=(2,), pair=Pair(x, held), out=out, N=40, FACTOR=2)
        return out

    call = repeated(run)
    for seed in range(4):
        x = numbers(seed)
        assert torch.equal(call(x), 2 * x + 1)
    assert len(runs) == 4


def test_a_profiler_is_told_of_every_launch(monkeypatch):
    op = Op()
    for _ in range(3):
        op.call(numbers(0), None, 3, 0)
    assert op.runs == 2
    monkeypatch.setattr(launches, "_is_watched", lambda: True)
    op.call(numbers(0), None, 3, 0)
    assert op.runs == 3


def test_a_call_within_a_call_is_written_down_with_it():
    inner = Op()
    outer = Op(extra=lambda x: inner.call(x, None, 3, 0))
    for seed in range(5):
        x = numbers(seed)
        assert torch.equal(outer.call(x, None, 3, 0)[0], 6 * x)
    assert outer.runs == 2 and inner.kernel.launched == outer.kernel.launched == 10


def test_forms_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(launches, "MOST_FORMS", 3)
    op = Op()
    for size in (40, 40, 40, 41, 42, 43, 40):
        op.call(numbers(0, size), None, 3, 0)
    assert op.runs == 6


def test_an_error_leaves_nothing_behind():
    calls = []

    def run(x):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no")
        return x.new_empty(3)

    call = repeated(run)
    call(numbers(0))
    with pytest.raises(ValueError, match="no"):
        call(numbers(0))
    assert launches.WRITING.notes is None
    call(numbers(0))
    assert len(calls) == 3


def test_every_launch_comes_through_it():
    """Of the ops: `layer/` has functions that are no ops."""
    root = Path(attnplug.__file__).parent / "ops"
    for path in root.rglob("*.py"):
        if path.parent.name != "layer" and path.name != "launches.py":
            text = path.read_text()
            assert not re.search(r"\.run\(|warmup|\w\[(grid|\(.*,\))\]\(", text), path
