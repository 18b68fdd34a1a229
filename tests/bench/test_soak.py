"""The soak of requests, at tiny sizes on the CPU: that it has all kinds, counts what it serves, and
sees a wrong token, a lost request and a memory that rises."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
LONGEST = 120


@pytest.fixture
def requests(monkeypatch):
    """The soak's module."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "_requests", raising=False)
    yield importlib.import_module("_requests")
    sys.modules.pop("_requests", None)


def test_ten_thousand_requests_are_of_all_kinds(requests):
    drawn = [
        requests.draw(number, 0, 100_000, requests.ADAPTERS, compared=number % 50 == 0)
        for number in range(10_000)
    ]
    kinds = Counter(kind for request in drawn for kind in request.kinds())
    assert kinds["compared"] == 200 and min(kinds.values()) >= 200
    assert {f"rows {rows}" for rows in range(1, 9)} <= set(kinds)
    assert {f"adapter {name}" for name in ("none", *requests.ADAPTERS)} <= set(kinds)
    for decade in ("100 to 1,000", "1,000 to 10,000", "10,000 to 100,000"):
        assert kinds[f"tokens {decade}"] > 1_000
    assert all(request.cancel < request.new for request in drawn)
    assert not any(request.compared and (request.sampler or request.cancel) for request in drawn)
    assert drawn[7] == requests.draw(7, 0, 100_000, requests.ADAPTERS)


def test_requests_are_served_compared_and_counted(requests, monkeypatch, tmp_path):
    monkeypatch.setattr(requests, "COMPARED", 3)
    monkeypatch.setattr(requests, "SCORES", 50_000)  # stock reads longer prompts in chunks
    monkeypatch.setattr(requests, "CHUNK", 32)
    out = tmp_path / "part.json"
    soak = requests.Requests("cpu", LONGEST, seed=1, halfway=9, out=out)
    soak.run(range(18), seconds=1e9)
    part = json.loads(out.read_text())
    counts = part["counts"]
    assert counts["begun"] == counts["answered"] == 18 and counts["compared"] == 6
    assert counts["policy certified"] + counts["policy momo+gather"] == 18
    assert counts["changes of policies"] == 1 and part["memory"]
    assert requests.joined([part], 18)["wrong"] == []
    assert requests.joined([part], 19)["wrong"] == ["18 of 19 requests were begun in this time"]

    for model in soak.models:  # what an op that is wrong would do
        model.model.layers[1].self_attn.v_proj.base_layer.weight.data.neg_()
    soak.run(range(0, 18, 3), seconds=1e9)
    assert soak.counts["faults"] and "another token at" in soak.faults[0]
    assert requests.joined([soak.facts()], 24)["wrong"] == soak.faults


def test_a_request_that_raises_is_lost(requests, monkeypatch, tmp_path):
    out = tmp_path / "part.json"
    soak = requests.Requests("cpu", LONGEST, seed=1, halfway=9, out=out)

    def generate(**_):
        raise RuntimeError("no answer")

    for model in soak.models:
        monkeypatch.setattr(model, "generate", generate)
    with pytest.raises(RuntimeError, match="no answer"):
        soak.run(range(8), seconds=1e9)
    lost = requests.joined([json.loads(out.read_text())], 8)
    assert lost["lost"] == 1 and "1 of 1 requests were lost" in lost["wrong"]


def test_answers_are_held_to_their_form(requests):
    soak = requests.Requests.__new__(requests.Requests)
    soak.counts, soak.faults = Counter(), []
    request = requests.draw(0, 0, LONGEST, ())
    fields = vars(request) | dict(rows=1, tokens=2, new=3, stream=False, cancel=0, ends=(9,))
    request = requests.Request(**fields)
    ids = torch.tensor([[5, 6]])
    answers = {
        (5, 6, 7, 7, 7): "",
        (5, 6, 7, 9): "",
        (5, 5, 7, 7, 7): "another prompt",
        (5, 6, 7, 7): "2 new tokens, not 3",
        (5, 6, 9, 7): "2 new tokens, not 1",
    }
    for answer, wrong in answers.items():
        soak.faults = []
        soak.hold_form(request, ids, torch.tensor([answer]), None)
        assert [fault.partition(":")[0] for fault in soak.faults[:1]] == ([wrong] if wrong else [])
    stream = requests.Stream(0)
    stream.put(torch.tensor([[5, 6, 7, 7]]))
    stream.end()
    soak.hold_form(request, ids, torch.tensor([[5, 6, 7, 7, 8]]), stream)
    assert soak.faults[-1].startswith("the stream has other tokens")


def test_a_memory_that_rises_is_seen(requests):
    flat = [1 << 30, 5 << 30, *[2 << 30] * 10]
    assert requests.rise(flat) == ""
    assert requests.rise([*flat, *(x << 28 for x in range(8, 16))])
    host, kernels = [size << 30 for size in (3, 4, 5, 5)], [100, 200, 300, 300]
    assert requests.late_rise(host, kernels) == ""
    assert requests.late_rise([*host, 6 << 30], [*kernels, 300])
