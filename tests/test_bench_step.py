"""The bench of a decode step builds what the loop of generate has today."""

import importlib
from argparse import Namespace
from pathlib import Path

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
