"""bench/studies.py: which policies each comparison of options asks, and on what."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from attnplug import policies
from attnplug.cli.options import read_lengths
from attnplug.eval.command import Asked, make_study
from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(policies, "_METHODS", policies.methods())  # for this test alone
    importlib.import_module("rivals").register_rivals()
    yield importlib.import_module("studies")
    for name in ("studies", "rivals", "rival_prefills", "rival_masks"):
        sys.modules.pop(name, None)


def asked_of(arguments: list[str]) -> Asked:
    """What the command line makes of them."""
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    words: dict[str, Any] = {k.removeprefix("--"): v for k, v in pairs if k != "--policy"}
    if "lengths" in words:
        words["lengths"] = read_lengths(words["lengths"])
    trials = {"trials": int(words.pop("trials"))} if "trials" in words else {}
    return Asked(tuple(value for name, value in pairs if name == "--policy"), **words, **trials)


def test_a_study_is_what_eval_understands_and_each_policy_has_its_one_name(studies):
    asked = ((n, o) for n, o in studies.STUDIES.items() if o.trials)  # the others: by model
    for name, options in asked:
        study = make_study(
            asked_of(options.arguments()),
            seed=0,
            batch=0,
            limit_seconds=None,
        )
        assert list(study.parsed()) == list(options.policies), name
        assert set(study.tasks) <= {*TASKS, *MEASURES}
        assert {study.trials_of(task) for task in study.tasks} == {options.trials}


def test_it_prints_the_arguments_one_a_line_or_the_studies(studies, capsys):
    studies.main(["gvr"])
    assert capsys.readouterr().out.splitlines() == studies.STUDIES["gvr"].arguments()
    studies.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*studies.STUDIES]


def test_a_model_that_reads_one_length_is_asked_there_and_first_what_it_can_do(studies, tmp_path):
    options = studies.STUDIES["as-written"]
    for model, n in options.models.items():
        asked = make_study(asked_of(options.arguments(model)), 0, 0, None)
        assert list(asked.lengths) == [n] and set(asked.parsed()) == set(options.policies)
        assert asked.trials_of("multi-key") == 50 and asked.trials_of("fidelity") == 16
        look = make_study(asked_of(options.look(model)), 0, 0, None)
        assert list(look.lengths) == [n] and list(look.parsed()) == ["dense"]
        assert set(look.tasks) == set(options.tasks) & set(TASKS) and look.trials == studies.LOOK
    assert studies.STUDIES["gvr"].lengths_of("smollm2-135m") == [8192]


def test_tasks_that_the_model_cannot_do_are_left_out(studies, tmp_path, capsys):
    scores = {"multi-key": (0, 1), "needle-noise": (0, 0.3), "fidelity": (None,)}
    records = [
        dict(task=task, policy=policy) | ({} if score is None else dict(score=score))
        for task, found in scores.items()
        for score in found
        for policy in ("stock", "dense")
    ]
    file = tmp_path / "samples"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert studies.beyond(file) == ["needle-noise"]
    studies.main(["as-written", "gemma3-270m@64k", str(file)])
    told = capsys.readouterr().out.splitlines()
    tasks = told[told.index("--tasks") + 1].split(",")
    assert "needle-noise" not in tasks and {"multi-key", "fidelity", "needle-prose"} <= set(tasks)
