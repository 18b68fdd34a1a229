"""bench/missing.py: which of the rows that the docs need are not there."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def missing():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("missing")
    for name in ("missing", "report", "stale", *(path.stem for path in BENCH.glob("_*.py"))):
        sys.modules.pop(name, None)


class History:
    def state(self, row):
        return importlib.import_module("stale").State(row.get("word", ""))


def words(missing, timing, quality):
    return {
        (cell.what, cell.case, cell.where): word
        for cell, word in missing.judged(timing, quality, History())
    }


def test_every_default_is_asked_on_every_task_that_it_has(missing):
    asked = list(missing.cells())
    assert len(asked) == len({cell[:3] for cell in asked})
    whole = {(c.what, c.case.partition(" ")[0]) for c in asked if c.where == "gemma3-270m"}
    tasks = set(missing.SUITE.tasks) - {"fidelity", "long-decode", "topic-change", "captured-mass"}
    for policy in ("momo", "gather", "gvr", "sketch", "certified"):
        assert tasks <= {task for what, task in whole if what == policy}
    assert {what for what, task in whole if task == "captured-mass"} == {"momo"}
    assert not any(c.where == "smollm2-135m" and c.case.endswith("32K") for c in asked)


def test_a_cell_says_what_is_wrong_with_its_best_row(missing):
    row = dict(policy="gvr", task="multi-key", model="gemma3-270m", n=4096, study="")
    key = ("gvr", "multi-key 4K", "gemma3-270m")
    assert words(missing, [], [])[key] == "missing"
    assert words(missing, [], [row | dict(trials=50, study="x")])[key] == "missing"
    assert words(missing, [], [row | dict(trials=49)])[key] == "few"
    old = row | dict(trials=50, word="stale")
    assert words(missing, [], [old, row | dict(trials=49)])[key] == "stale"
    assert words(missing, [], [old, row | dict(trials=60)])[key] == ""
    step = dict(op="gvr", case="step", n=8192, policy="gvr")
    assert words(missing, [step], [])["gvr", "8K", "step"] == ""
    assert words(missing, [step | dict(n=9)], [])["gvr", "8K", "step"] == "missing"
    assert words(missing, [step | dict(policy="gvr(k=64)")], [])["gvr", "8K", "step"] == "missing"
    row |= dict(study="gvr", task="agreement", n=8192, trials=20, policy="gvr(k=64)")
    asked = words(missing, [], [row])
    assert asked["study gvr", "gvr(k=64) fidelity 8K", "gemma3-270m"] == ""
    assert asked["study gvr", "gvr(k=64) fidelity 32K", "gemma3-270m"] == "missing"
    mask = dict(study="masks", policy="mean-pooling(k=16)", model="smollm2-135m", n=8192, trials=2)
    assert words(missing, [], [mask])["mean-pooling", "8K", "smollm2-135m"] == ""


def test_what_users_write_is_asked_by_its_string_and_only_of_what_the_model_can_do(missing):
    about = dict(study="as-written", task="multi-key", model="gemma3-270m@128k", n=131072)
    row = about | dict(policy="gvr", trials=50, dense=0.5)
    where = "study as-written", "gemma3-270m@128k"

    def word(policy, rows):
        return words(missing, [], rows)[where[0], f"{policy} multi-key 128K", where[1]]

    assert word("gvr", []) == "missing" and word("gvr", [row]) == ""
    assert word("gvr(min_tokens=0)", [row]) == "missing"
    assert word("gvr", [row | dict(trials=12)]) == "few"
    stock = row | dict(policy="stock", trials=12, dense=0.1)
    assert word("gvr", [stock]) == "" and word("sketch", [stock | dict(dense=0.3)]) == "missing"
    assert word("gvr", [stock | dict(n=65536)]) == "missing"


def test_it_ends_with_1_while_something_is_missing(missing, tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps({"rows": []}))
    assert missing.main(tmp_path, tmp_path) == 1
    out = capsys.readouterr().out
    assert "What older code measured is not told" in out and out.endswith(" missing\n")
