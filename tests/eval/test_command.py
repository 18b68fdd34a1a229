"""`attnplug eval` from end to end, on a model in a folder."""

import json

from typer.testing import CliRunner

from attnplug.cli import app

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


def test_the_time_limit_leaves_a_table_and_says_so(tiny, tokenizer, tmp_path):
    tiny.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    command = ["eval", str(tmp_path / "m"), "--policy", "dense", "--limit-seconds", "0"]
    result = runner.invoke(app, [*command, "--lengths", "200", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "stopped at the time limit; the same command goes on from here" in result.output
    assert "No complete pair" in (tmp_path / "out" / "tables.md").read_text()
