"""The benches of decode steps and of whole calls run what generate has today."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import attnplug
from attnplug.models import decode_loop

BENCH = Path(__file__).parent.parent / "bench"


def test_a_step_of_the_bench_begins(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    step_7b = importlib.import_module("step_7b")
    monkeypatch.setattr(decode_loop, "BY_LAYER", decode_loop.BY_LAYER)  # a variant sets it
    options = Namespace(small=True, device="cpu", policy="dense")
    stepper = step_7b.Stepper(2, step_7b.VARIANTS["layers"], options)
    stepper.fill(30)
    assert stepper.logits().shape == (step_7b.SMALL["vocab_size"],)
    assert [int(x) for x in (stepper.buffers.position, stepper.buffers.slot)] == [30, 30]


@pytest.mark.parametrize(
    "command",
    [
        ["whole_calls.py", "--tokens", "20", "--new", "1,3", "--policies", "stock;dense;momo"],
        [
            "whole_calls.py",
            "--tokens",
            "20",
            "--new",
            "1,3",
            "--policies",
            "stock;dense",
            "--beside",
        ],
        ["exact_steps.py", "--tokens", "200", "--m", "2", "--accepted", "1"],
    ],
    ids=lambda command: "".join((command[0], *command[7:])),
)
def test_benches_of_calls_run_on_a_small_model(command, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--small", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *command, *options], cwd=BENCH, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == (3 if "exact" in command[0] else 4 if "--beside" in command else 6)
    if "exact" in command[0]:
        assert rows[-1]["rounds"] > 0 and rows[-1]["accepted"] >= rows[-1]["rounds"] - 1


def test_trained_is_timed_in_the_loop_that_decodes_its_calls(monkeypatch, tmp_path):
    """attnplug's own loop, which a streamer would keep from running."""
    monkeypatch.syspath_prepend(BENCH)
    trained_calls = importlib.import_module("trained_calls")
    monkeypatch.setattr(trained_calls, "NEW", 4)
    model = trained_calls.make("deepseek_v32", True, "cpu")
    bench = trained_calls.Bench(model, "deepseek_v32", "cpu", tmp_path / "rows.jsonl", None)
    count = decode_loop.Decoding.count_token
    with attnplug.applied(model, "trained"):
        bench.calls(40)
        assert not attnplug.report(model).loop
    bench.file.close()
    assert decode_loop.Decoding.count_token is count
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["call", "call", "step"]
    assert 0 < rows[-1]["step_ms"] < 1e3 * rows[1]["call_s"]
