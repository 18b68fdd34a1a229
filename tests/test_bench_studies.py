"""bench/studies.py: which policies each comparison of options asks, and on what."""

import importlib
import sys
from pathlib import Path

import pytest

from attnplug.cli.options import read_lengths
from attnplug.eval.command import Asked, make_study
from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("studies")
    sys.modules.pop("studies", None)


def asked_of(arguments: list[str]) -> Asked:
    """What the command line makes of them."""
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    words = {name.removeprefix("--"): value for name, value in pairs if name != "--policy"}
    if "lengths" in words:
        words["lengths"] = read_lengths(words["lengths"])
    trials = {"trials": int(words.pop("trials"))} if "trials" in words else {}
    return Asked(tuple(value for name, value in pairs if name == "--policy"), **words, **trials)


def test_a_study_is_what_eval_understands_and_each_policy_has_its_one_name(studies):
    for name, options in studies.STUDIES.items():
        study = make_study(asked_of(options.arguments()), seed=0, batch=0, limit_seconds=None)
        assert list(study.parsed()) == list(options.policies), name
        assert set(study.tasks) <= {*TASKS, *MEASURES}
        assert {study.trials_of(task) for task in study.tasks} == {options.trials}


def test_it_prints_the_arguments_one_a_line_or_the_studies(studies, capsys):
    studies.main(["gvr"])
    assert capsys.readouterr().out.splitlines() == studies.STUDIES["gvr"].arguments()
    studies.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*studies.STUDIES]
