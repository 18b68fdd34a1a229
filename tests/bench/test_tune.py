"""`attnplug tune` finds where a method's time crosses dense's, and keeps it for `apply`."""

import json
import subprocess
import sys
import threading
import time

import pytest
import torch
from typer.testing import CliRunner

import attnplug
from attnplug.bench import tune
from attnplug.bench.quick import Heads
from attnplug.bench.tune import BATCH, Point, crossing, crossovers
from attnplug.cli import app
from attnplug.policies import tuned
from attnplug.policies.auto import MEASURED_TOKENS, MeasuredMomo, RoomySketch
from attnplug.policies.crossover import NEVER, RowCrossover
from attnplug.testing import tiny_model

HEADS = Heads(4, 2, 64)
CPU = torch.device("cpu")
ENTRY = {"row": 300, "alone": 700, "points": []}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "crossovers.json"
    monkeypatch.setenv(tuned.PATH, str(path))
    return path


def line(lengths, ours, dense, batch=1, method="gather"):
    """Points of two lines, each (microseconds to begin with, microseconds a token)."""
    return [
        Point(method, batch, n, ours[0] + ours[1] * n, dense[0] + dense[1] * n) for n in lengths
    ]


@pytest.mark.parametrize(
    ("lengths", "ours", "dense", "least", "most"),
    [
        ((4096, 16384, 65536), (80.0, 0.001), (0.0, 0.005), 20000, 22528),  # 80 / 0.004
        ((4096, 16384), (80.0, 0.001), (0.0, 0.005), 20000, 22528),  # behind the longest
        ((4096, 16384), (80.0, 0.001), (0.0, 0.0015), NEVER, NEVER),  # ten times behind it
        ((4096, 16384), (80.0, 0.006), (0.0, 0.005), NEVER, NEVER),
        ((4096, 16384), (1.0, 0.001), (2.0, 0.005), 4096, 4096),  # the shortest that was measured
        ((4096,), (80.0, 0.001), (0.0, 0.005), NEVER, NEVER),  # a length alone is no line
        ((), (0.0, 0.0), (0.0, 0.0), NEVER, NEVER),
    ],
)
def test_the_crossing_is_a_little_behind_the_place_where_both_take_as_long(
    lengths, ours, dense, least, most
):
    assert least <= crossing(line(lengths, ours, dense)) <= most


def test_a_method_that_loses_at_a_longer_length_serves_behind_it():
    points = [Point("x", 1, n, 10.0 + gap, 10.0) for n, gap in ((1024, -1), (4096, 2), (8192, -2))]
    assert 6144 <= crossing(points) < 8192


def test_eight_rows_tell_what_each_saves():
    rule = RowCrossover(row=5000, alone=40000)
    each = rule.least(BATCH)
    points = [Point("x", 1, n, 40000 / tune.MARGIN, float(n)) for n in (4096, 65536)]
    points += [Point("x", BATCH, n, each / tune.MARGIN, float(n)) for n in (2048, 32768)]
    found = crossovers(points)["x"]
    assert abs(found["alone"] - rule.alone) <= 256 and abs(found["row"] - rule.row) <= 512
    assert len(found["points"]) == 4


def test_steps_and_prompts_are_timed_and_taken_back(monkeypatch):
    monkeypatch.setitem(tune.LENGTHS, "cpu", {1: (256, 512), 2: (128,)})
    monkeypatch.setitem(tune.PROMPTS, "cpu", (128, 256))
    made, step = [], tune._step

    def noted(policy, call, token):
        before = int(call.state.cumulative_length), call.state.pending
        step(policy, call, token)
        assert (int(call.state.cumulative_length), call.state.pending) == before
        made.append(policy.decode.name)

    monkeypatch.setattr(tune, "_step", noted)
    told = []
    points = list(tune.measure(HEADS, "cpu", lambda what, left: told.append(left)))
    assert told == list(range(14, 0, -1))
    counted = {(point.method, point.batch, point.n) for point in points}
    cases = {(name, *case) for name in tune.DECODES for case in ((1, 256), (1, 512), (2, 128))}
    assert counted == cases | {("momo", 1, 128), ("momo", 1, 256)}
    assert all(point.us > 0 and point.dense_us > 0 for point in points)
    assert set(made) == {"dense", *tune.DECODES}


def test_processes_compile_a_share_each(monkeypatch):
    monkeypatch.setitem(tune.LENGTHS, "cpu", {1: (256, 512), 2: (128,)})
    monkeypatch.setitem(tune.PROMPTS, "cpu", (128, 256))
    asked = [json.dumps([4, 2, 64, "cpu", ["gather", "momo"], i, 3]) for i in range(3)]
    assert [tune.run_share(each) for each in asked] == [2, 2, 1]
    ended, told = [], []

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            ended.append(super().wait(timeout))
            return ended[-1]

    monkeypatch.setattr(tune.subprocess, "Popen", Process)
    monkeypatch.setattr(tune, "PROCESSES", 2)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 4)
    begin = lambda what, left: told.append((what, left))  # noqa: E731
    tune.compile_ahead(Heads(2, 1, 16), "cpu", ["momo"], begin)
    assert told == [("compiling kernels", 2), ("compiling kernels", 1)] and ended == [0] * 4


def test_an_interrupt_ends_the_processes_that_compile(monkeypatch):
    made = []

    class Process(subprocess.Popen):
        def __init__(self, command, **options):
            made.append(self)
            super().__init__([sys.executable, "-c", "import time; time.sleep(99)"], **options)

    def begin(what, left):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.subprocess, "Popen", Process)
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 3)
    with pytest.raises(KeyboardInterrupt):
        tune.compile_ahead(HEADS, "cpu", [], begin)
    assert len(made) == 3 and all(process.poll() is not None for process in made)


def test_apply_reads_what_was_kept_for_these_heads(file):
    assert tuned.keep(CPU, "4/2x64", "2026-01-02", {"gather": ENTRY}) == file
    model = attnplug.apply(tiny_model(), "momo+gather")
    note = attnplug.report(model).layers[0].reason
    assert "dense in caches below 700 tokens (350 at batch 8)" in note
    assert "as measured on this machine on 2026-01-02" in note
    ids = torch.arange(650)[None] % 31
    for new, served in ((20, False), (80, True)):
        model.generate(ids, max_new_tokens=new, do_sample=False)
        assert attnplug.report(model).last[0].decode.startswith("gather") == served
    attnplug.remove(model)
    attnplug.apply(model, "gather(min_tokens=0)")
    assert "measured on this machine" not in attnplug.report(model).layers[0].reason


def test_what_was_measured_with_other_versions_or_heads_is_left_alone(file, monkeypatch):
    assert tuned.lookup(CPU, "4/2x64", "gather") is None
    tuned.keep(CPU, "4/2x64", "2026-01-02", {"gather": ENTRY})
    assert tuned.lookup(CPU, "4/2x64", "gather") == (300, 700, "2026-01-02")
    assert tuned.lookup(CPU, "4/4x64", "gather") is None
    assert tuned.lookup(CPU, "4/2x64", "gather(k=8)") is None
    monkeypatch.setattr(tuned, "measured_with", lambda: "another torch")
    assert tuned.lookup(CPU, "4/2x64", "gather") is None
    tuned.keep(CPU, "4/2x64", "2026-01-03", {"gvr": ENTRY})
    kept = json.loads(file.read_text())["cpu"]["4/2x64"]
    assert set(kept["methods"]) == {"gvr"} and kept["versions"] == "another torch"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "nonsense",
        '{"cpu": 3}',
        '{"cpu": {"4/2x64": []}}',
        '{"cpu": {"4/2x64": {"versions": "1", "date": "1"}}}',
        '{"cpu": {"4/2x64": {"versions": "1", "date": 1, "methods": {}}}}',
        '{"cpu": {"4/2x64": {"versions": "1", "date": "1", "methods": {"gather": {"row": -1}}}}}',
        '{"x": {"y": {"versions": "1", "date": "1", "methods": {"z": {"row": 1, "alone": "1"}}}}}',
    ],
)
def test_a_damaged_file_is_named(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(attnplug.FileError, match="cannot be read as crossovers; delete it"):
        attnplug.apply(tiny_model(), "gather")


def test_auto_keeps_the_lengths_that_its_tasks_were_measured_at(file):
    shape = HEADS.shape("cpu")
    tuned.keep(shape.device, shape.heads, "2026-01-02", {"momo": ENTRY, "sketch": ENTRY})
    for method in (MeasuredMomo(), RoomySketch()):
        rule = method.on_this_machine(shape).row_crossover(shape.device)
        assert rule == RowCrossover(MEASURED_TOKENS, MEASURED_TOKENS)


def test_the_command_shows_and_keeps_crossovers(file, monkeypatch):
    points = line((4096, 16384, 65536), (80.0, 0.001), (0.0, 0.005))
    points += line((4096, 16384), (80.0, 0.006), (0.0, 0.005), method="momo")
    monkeypatch.setattr(tune, "measure", lambda *_: iter(points))
    run = CliRunner().invoke(app, ["tune", "smollm2-135m", "--device", "cpu"])
    assert run.exit_code == 0, run.output
    assert "9/3x64, CPU" in run.output and "never" in run.output and "22,016" in run.output
    assert set(json.loads(file.read_text())["cpu"]["9/3x64"]["methods"]) == {"gather", "momo"}
    run = CliRunner().invoke(app, ["tune", "--device", "cpu", "--json"])
    assert json.loads(run.stdout)["gather"]["alone"] == 22016
    run = CliRunner().invoke(app, ["tune", "--device", "cpu", "--method", "dense"])
    assert run.exit_code == 1 and "'dense' has no crossover to measure" in run.stderr


@pytest.mark.parametrize("there", ["no folder", "damaged"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(file, there, monkeypatch):
    if there == "no folder":
        file.parent.write_text("")
    else:
        file.parent.mkdir()
        file.write_text("{")
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("the work began"))
    run = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["tune", "--device", "cpu"])
    assert run.exit_code == 1
    wanted = "set ATTNPLUG_CROSSOVERS" if there == "no folder" else "delete it"
    assert wanted in run.stderr and "Traceback" not in run.output


def test_two_that_tune_at_once_lose_nothing(file, monkeypatch):
    """Each writes the file anew; what the other writes meanwhile stays."""
    write, begun = tuned.files.write_text, threading.Event()

    def slowly(path, text):
        if not begun.is_set():
            begun.set()
            time.sleep(0.3)
        write(path, text)

    monkeypatch.setattr(tuned.files, "write_text", slowly)
    device, entry = torch.device("cpu"), {"momo": dict(row=1, alone=2)}
    first = threading.Thread(target=tuned.keep, args=(device, "2/1x64", "today", entry))
    first.start()
    begun.wait()
    tuned.keep(device, "4/1x64", "today", entry)
    first.join()
    assert tuned.lookup(device, "2/1x64", "momo") and tuned.lookup(device, "4/1x64", "momo")
