"""What comes with an extra: nothing else needs it, and where it is missing one line says which."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attnplug import doctor, extras
from attnplug.errors import AttnplugError, MissingPackageError

ROOT = Path(__file__).resolve().parent.parent
EVERY = sorted({name for names in extras.EXTRAS.values() for name in names})
# What runs without any of them, and what says that it cannot: the packages, and the extra.
RUN = ["--help", "plan qwen2.5-7b", "report smollm2-135m"]
REFUSED = {
    "demo": ("gguf and matplotlib", "demo"),
    "eval m --policy dense": ("scipy and matplotlib", "eval"),
    "bench --quick --device cpu": ("matplotlib", "plot"),
    "plan qwen2.5-7b --image a.png": ("matplotlib", "plot"),
    "trace m --prompt text": ("pyarrow and plotly", "trace"),
    "trace view a.parquet": ("pyarrow and plotly", "trace"),
}
# One process for all of it: importing torch and transformers is most of the time.
SCRIPT = f"""
import json, sys
sys.modules.update(dict.fromkeys({EVERY}))
import torch
from typer.testing import CliRunner
import attnplug
from attnplug.cli import app
from attnplug.testing import tiny_model

def run(line, **variables):
    done = CliRunner(env=dict(COLUMNS="200", NO_COLOR="1") | variables).invoke(app, line.split())
    return done.exit_code, done.stdout, done.stderr

found = {{line: run(line) for line in {[*RUN, *REFUSED]}}}
found["unconverted"] = run("report smollm2-135m", ATTNPLUG_CACHE=sys.argv[1])
model = attnplug.apply(tiny_model(), "momo(min_tokens=0)+gather(min_tokens=0)")
ids = torch.arange(2, 42)[None]
done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
found["generate"] = done.shape[1], str(attnplug.report(model)), ""
try:
    attnplug.trace
except attnplug.MissingPackageError as error:
    found["import"] = 1, "", str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """(exit code, stdout, stderr) where none of the extras' packages can be imported."""
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-c", SCRIPT, str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(cache.iterdir())  # nothing was fetched
    return json.loads(done.stdout.splitlines()[-1])


def test_the_list_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]

    def packages(extra: str) -> list[str]:
        found: list[str] = []
        for text in declared[extra]:
            inner = re.fullmatch(r"attnplug\[(.*)\]", text)
            if inner:
                found += [name for each in inner[1].split(",") for name in packages(each)]
            else:
                found.append(re.match(r"[\w-]+", text)[0])
        return found

    assert {name: tuple(packages(name)) for name in extras.EXTRAS} == extras.EXTRAS
    assert set(EVERY) <= set(packages("test"))
    needed = {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]}
    assert not needed & set(EVERY)


def test_a_model_runs_without_them(bare):
    length, report, _ = bare["generate"]
    assert length == 43
    assert report.startswith("policy momo(min_tokens=0)+gather(min_tokens=0)")


@pytest.mark.parametrize("line", RUN)
def test_commands_that_need_none_run(bare, line):
    code, out, error = bare[line]
    assert code == 0 and out, error


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_names_the_extra_before_it_works(bare, line):
    lacking, extra = REFUSED[line]
    code, out, error = bare[line]
    assert code == 1 and out == ""
    assert error.endswith(f" needs {lacking}; pip install 'attnplug[{extra}]'\n")
    assert error.startswith("error: ") and error.count("\n") == 1


def test_weights_that_are_not_converted_yet_need_gguf(bare):
    code, _, error = bare["unconverted"]
    assert code == 1 and "to convert the weights of smollm2-135m, attnplug needs gguf" in error
    assert error.endswith("pip install 'attnplug[demo]'\n")


def test_the_module_of_traces_says_so_too(bare):
    assert bare["import"][2].startswith("attnplug.trace needs pyarrow and plotly")


def test_the_error_is_both(monkeypatch):
    extras.require("plot", "a picture")
    monkeypatch.setattr(extras, "EXTRAS", {"plot": ("no_such_package",)})
    with pytest.raises(MissingPackageError, match="a picture needs no_such_package") as caught:
        extras.require("plot", "a picture")
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, AttnplugError)


def test_doctor_notes_what_is_missing(monkeypatch):
    assert doctor._extras() == []
    monkeypatch.setattr(extras, "missing", lambda extra: ["pyarrow"] if extra == "trace" else [])
    (check,) = doctor._extras()
    assert (check.name, check.status) == ("extra trace", "note")
    assert check.detail == "pyarrow missing; pip install 'attnplug[trace]'"
