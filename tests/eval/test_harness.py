"""`attnplug eval --harness`: tasks of lm-evaluation-harness under policies."""

import itertools
import json
import sys
import types

import pytest
from harness_task import TASK, write_checkpoint, write_task
from typer.testing import CliRunner

from attnplug.cli import app
from attnplug.errors import ArgumentError, MissingPackageError
from attnplug.eval.harness import Harness, run_harness
from attnplug.eval.rows import make_rows
from attnplug.models.pretrained import load

COVERS = "momo(min_tokens=0)+gather(min_tokens=0)"
NEAR = "gather(k=0, sink=0, local=1, min_tokens=0)"
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def tasks_are_read_once():
    """lm_eval reads thousands of files whenever somebody names a task of its own."""
    try:
        from lm_eval.tasks._index import TaskIndex
    except ImportError:  # another version of lm_eval
        yield
        return
    build, kept = TaskIndex.build, {}

    def build_once(paths):
        key = tuple(map(str, paths))
        if key not in kept:
            kept[key] = build(paths)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(build_once))
        yield


def test_the_command_shows_dense_and_policies_beside_each_other(checkpoint, tmp_path):
    """On the same samples; budgets that cover them give dense's scores."""
    task, out = write_task(tmp_path), tmp_path / "out"
    command = ["eval", str(checkpoint), "--harness", str(task), "--policy", COVERS]
    command += ["--policy", "random_blocks(top_k=1)", "--trials", "3", "--device", "cpu"]
    result = runner.invoke(app, [*command, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert {path.name for path in out.iterdir()} == {"harness.jsonl", "rows.json", "tables.md"}
    rows = {row["policy"]: row for row in facts["rows"]}
    assert list(rows) == ["stock", COVERS, "random_blocks(top_k=1)"] and not facts["left_out"]
    assert all(row["task"] == f"{TASK} acc" and row["trials"] == 3 for row in rows.values())
    served = rows[COVERS]
    assert served["value"] == served["dense"] == rows["stock"]["value"]
    assert served["low"] < served["value"] < served["high"] and served["p_value"] == 1
    assert served["served"] == {"prefill": "dense"}  # momo's budget covers a prompt this short
    assert rows["random_blocks(top_k=1)"]["served"] == {"prefill": "random_blocks"}
    records = [json.loads(line) for line in (out / "harness.jsonl").read_text().splitlines()]
    prompts = {(r["trial"], r["prompt_hash"]) for r in records}
    assert len(records) == 9 and len(prompts) == 3
    for shown in (f"{TASK} acc", "keys a step", "bytes a step", COVERS, "stock"):
        assert shown in result.stderr


def generated(folder, **changes):
    """A task that generates, of which a reply that has an "a" is half of the answer."""
    (folder / "score.py").write_text(
        "def score(doc, results):\n"
        "    return {'half': 0.5 * ('a' in results[0]), 'size': len(results[0])}\n"
    )
    metrics = [{"metric": name, "aggregation": "mean"} for name in ("half", "size")]
    options = {"until": [], "max_gen_toks": 24, "do_sample": False}
    more = {"output_type": "generate_until", "generation_kwargs": options, "metric_list": metrics}
    path = write_task(folder, **more, **changes)
    text = path.read_text()[:-1] + ', "process_results": !function score.score}'
    path.write_text(text)
    return path


def test_steps_are_served_and_a_score_that_is_no_share_is_left_out(checkpoint, tmp_path):
    model, tokenizer = load(str(checkpoint), device="cpu")
    policies = [COVERS, NEAR, "gather"]
    asked = Harness(policies, [str(generated(tmp_path))], trials=2, batch=2)
    outcome = run_harness(model, tokenizer, "tiny", asked)
    assert outcome.left_out == {
        f"{TASK} size": "it is no mean of a share of each sample, so has no interval"
    }
    rows = {row["policy"]: row for row in make_rows(outcome.records)}
    assert {row["task"] for row in rows.values()} == {f"{TASK} half"}
    whole = rows["stock"]["bytes"]
    assert rows[COVERS]["served"] == {"prefill": "dense", "decode": "gather"}
    assert (rows[COVERS]["keys"], rows[COVERS]["bytes"]) == ("all", whole)
    assert rows[NEAR]["keys"] == 16 and rows[NEAR]["bytes"] * rows["stock"]["n"] == 16 * whole
    assert rows["gather"]["served"]["decode"] == "dense" and rows["gather"]["bytes"] == whole
    replies = {(r["policy"], r["trial"]): r["reply"] for r in outcome.records}
    for trial in (0, 1):
        assert replies[COVERS, trial] == replies["stock", trial] != replies[NEAR, trial]


def test_ruler_makes_prompts_of_each_length(checkpoint, monkeypatch):
    """Its needle without a network: the words that it asks a package for are ours."""
    model, tokenizer = load(str(checkpoint), device="cpu")
    policy = "gather(k=4, sink=1, local=2, min_tokens=0)"
    asked = Harness([policy], ["niah_single_1"], [1024, 2048], trials=1)
    monkeypatch.setattr("nltk.data.find", lambda name: name)
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(MissingPackageError, match="install the `wonderwords`"):
        run_harness(model, tokenizer, "tiny", asked)
    words = {"nouns": ["pear", "plum"], "adjectives": ["red", "new"], "verbs": ["see"]}
    package = types.SimpleNamespace(RandomWord=lambda: types.SimpleNamespace(_categories=words))
    monkeypatch.setitem(sys.modules, "wonderwords", package)
    rows = make_rows(run_harness(model, tokenizer, "tiny", asked).records)
    cells = {(row["task"], row["n"], row["policy"], row["trials"]) for row in rows}
    wanted = itertools.product(["niah_single_1"], [1024, 2048], ["stock", policy], [1])
    assert cells == set(wanted)
    assert {row["keys"] for row in rows if row["policy"] == policy} == {7 * 16}


def test_what_cannot_be_is_said_before_the_weights_or_with_the_task(checkpoint, tmp_path):
    def told(*words):
        result = runner.invoke(app, ["eval", "no-such-model", "--policy", "gather", *words])
        assert result.exit_code == 1
        return result.stderr

    assert "tasks is for attnplug's own tasks" in told("--harness", "arc_easy", "--tasks", "all")
    assert "plot is for attnplug's own" in told("--harness", "arc_easy", "--plot", "frontier")
    assert "harness is empty" in told("--harness", ",")
    assert "trials is 0" in told("--harness", "arc_easy", "--trials", "0")
    model, tokenizer = load(str(checkpoint), device="cpu")
    with pytest.raises(ArgumentError, match="'no_such_task' is not a registered task"):
        run_harness(model, tokenizer, "tiny", Harness(["dense"], ["no_such_task"]))
    task = str(write_task(tmp_path))
    with pytest.raises(ArgumentError, match=f"{TASK} has no lengths; leave --lengths out"):
        run_harness(model, tokenizer, "tiny", Harness(["dense"], [task], [512]))
    outcome = run_harness(model, tokenizer, "tiny", Harness(["dense"], [task], [1 << 20]))
    assert outcome.left_out == {"1,048,576 tokens": "the model has 2048 positions"}


def test_where_the_harness_is_missing_one_line_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = runner.invoke(app, ["eval", "m", "--policy", "gather", "--harness", "arc_easy"])
    wanted = "attnplug eval --harness needs lm_eval; pip install 'attnplug[harness]'"
    assert result.exit_code == 1 and wanted in result.stderr
