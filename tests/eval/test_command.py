"""`attnplug eval` from end to end, on a model in a folder."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from attnplug.cli import app
from attnplug.eval import suite
from attnplug.eval.command import Asked, make_study
from attnplug.eval.measure import DECODES
from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS
from attnplug.policies import names, parse

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_the_command_writes_samples_rows_tables_and_a_heat_map(tiny, tokenizer, tmp_path):
    folder, out = tmp_path / "tiny-llama", tmp_path / "out"
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = ["eval", str(folder), "--policy", "dense", "--policy", "random_blocks(top_k=1)"]
    command += ["--tasks", "needle-noise,captured-mass", "--lengths", "200,300", "--trials", "2"]
    command += ["--device", "cpu", "--out", str(out)]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("tiny-llama on cpu, float32\n")
    assert "left out: captured-mass of dense: its prefill has no block mask" in result.output
    assert "random_blocks(top_k=1)" in result.output
    names = {path.name for path in out.iterdir()}
    assert names == {"samples.jsonl", "rows.json", "tables.md", "heatmap.png"}
    written = json.loads((out / "rows.json").read_text())
    assert {row["model"] for row in written["rows"]} == {"tiny-llama"}
    assert len([row for row in written["rows"] if row["task"] == "needle-noise"]) == 6
    samples = (out / "samples.jsonl").read_bytes()
    assert runner.invoke(app, command).exit_code == 0
    assert (out / "samples.jsonl").read_bytes() == samples
    assert json.loads((out / "rows.json").read_text())["rows"] == written["rows"]
    nothing = [*command[:-1], str(tmp_path / "none"), "--lengths", "4K,8K"]
    result = runner.invoke(app, nothing)
    assert result.exit_code == 1 and not (tmp_path / "none" / "tables.md").exists()
    assert "error: nothing was measured: " in result.output
    assert "4,096 tokens: the model has 1024 positions; 8,192 tokens: the" in result.output
    printed = runner.invoke(app, [*command, "--json"]).stdout
    assert json.loads(printed)["rows"] == written["rows"]


def test_the_time_limit_leaves_a_table_and_says_so(tiny, tokenizer, tmp_path):
    tiny.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    command = ["eval", str(tmp_path / "m"), "--policy", "dense", "--limit-seconds", "0"]
    result = runner.invoke(app, [*command, "--lengths", "200", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "stopped at the time limit; the same command goes on from here" in result.output
    assert "No complete pair" in (tmp_path / "out" / "tables.md").read_text()


def test_all_is_dense_and_the_default_of_every_method_that_attends():
    policies = suite.all_policies()
    assert policies[0] == "dense" and len(set(policies)) == len(policies)
    ours = {"certified", "gather", "gvr", "momo", "sketch"}
    assert {f"{name}(min_tokens=0)" for name in ours} <= set(policies)
    assert not {"auto", "stream"} & {text.split("(")[0] for text in policies}
    assert {"auto", "stream"} < set(names())
    for text in policies:
        assert str(parse(text)) == text


def test_the_default_suite_is_the_whole_table(tokenizer):
    study = make_study(Asked(policies="all", suite="default"), 0, 0, None)
    assert study.policies == suite.all_policies()
    assert list(study.tasks) == [*TASKS, *MEASURES] and list(study.lengths) == [4096, 8192, 32768]
    assert all(study.trials_of(task) == 50 for task in [*TASKS, "perplexity", "captured-mass"])
    for task, measure in DECODES.items():  # the texts have all of these windows
        last = study.trials_of(task) - 1
        assert measure.window(tokenizer, 32768, last).shape == (1, 32768)


def test_options_override_the_suite():
    asked = Asked(["random_blocks"], "all", "default", "fidelity,needle-noise", (512,), 3)
    study = make_study(asked, 0, 0, None)
    assert study.policies == [*suite.all_policies(), "random_blocks"]
    assert (study.tasks, study.lengths) == (["fidelity", "needle-noise"], [512])
    assert study.trials_of("fidelity") == study.trials_of("needle-noise") == 3


@pytest.mark.slow
def test_the_suite_of_every_policy_resumes_where_it_was_cut(tiny, tokenizer, tmp_path, monkeypatch):
    """A smaller suite, by the command a user gives; it asks the model's lengths only."""
    small = suite.Suite(("needle-noise", "fidelity"), (200, 4096), 2, {"fidelity": 1})
    monkeypatch.setattr("attnplug.eval.command.SUITES", {"default": small})
    tiny.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    command = ["eval", str(tmp_path / "m"), "--suite", "default", "--policies", "all"]
    command += ["--device", "cpu", "--out"]
    whole = runner.invoke(app, [*command, str(tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    assert "left out: 4,096 tokens: the model has 1024 positions" in whole.output
    samples = (tmp_path / "whole" / "samples.jsonl").read_text().splitlines(keepends=True)
    policies = len(suite.all_policies()) + 1
    kinds = Counter((r["task"], r["n"]) for r in map(json.loads, samples))
    assert kinds == {(t, 200): small.fewer.get(t, 2) * policies for t in small.tasks}
    part = tmp_path / "part"
    part.mkdir()
    (part / "samples.jsonl").write_text("".join(samples[: policies + 3]))
    again = runner.invoke(app, [*command, str(part)])
    assert again.exit_code == 0, again.output
    done, wanted = (
        json.loads((folder / "rows.json").read_text())["rows"]
        for folder in (part, tmp_path / "whole")
    )
    assert done == wanted
    noise = {row["policy"]: row["value"] for row in done if row["task"] == "kl"}
    assert noise["dense"] <= max(noise.values()) and "stock" not in noise
