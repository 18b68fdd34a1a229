"""An op says what it is doing where its first call is long, and only then."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from attnplug.ops.common import define, first_call


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(first_call, "SILENT_S", 0.05)
    monkeypatch.setattr(first_call, "SAID", threading.Event())
    return first_call.announced(lambda x, seconds: time.sleep(seconds), "my_op", "numba")


def test_a_long_first_call_says_so_for_each_dtype(op, caplog):
    for dtype in (torch.float32, torch.bfloat16):
        caplog.clear()
        first_call.SAID.clear()
        op(torch.zeros(1, dtype=dtype), 0.4)
        assert "numba is compiling attnplug's my_op, once on this machine" in caplog.text
        caplog.clear()
        first_call.SAID.clear()
        op(torch.zeros(1, dtype=dtype), 0.4)
        assert caplog.text == ""


def test_a_process_says_it_once(op, caplog):
    for dtype in (torch.float32, torch.bfloat16):
        op(torch.zeros(1, dtype=dtype), 0.4)
    assert len(caplog.records) == 1


def test_short_calls_and_calls_that_fail_say_nothing(op, caplog):
    op(torch.zeros(1), 0.0)
    with pytest.raises(TypeError):
        op(torch.zeros(1, dtype=torch.float64), "long")
    time.sleep(0.2)
    assert caplog.text == ""


def test_ops_are_announced(monkeypatch, caplog):
    implementations = {}
    library = SimpleNamespace(
        define=lambda schema: None,
        impl=lambda name, run, key, **_: implementations.update({key: run}),
    )
    monkeypatch.setattr(define, "LIBRARY", library)
    monkeypatch.setattr(torch.library, "register_fake", lambda *args, **kwargs: None)
    monkeypatch.setattr(first_call, "SILENT_S", 0.05)
    monkeypatch.setattr(first_call, "SAID", threading.Event())
    define.define_op(
        "topk(Tensor x) -> Tensor",  # a name that torch knows; nothing is registered
        allocate=torch.empty_like,
        cpu=lambda x, out: time.sleep(0.4),
        cuda=lambda x, out: None,
    )
    assert implementations.keys() == {"CPU", "CUDA"}
    implementations["CPU"](torch.zeros(1))
    assert "attnplug's topk" in caplog.text
