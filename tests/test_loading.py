"""on_load and `attnplug run`: a policy on models that a program loads by itself."""

import json
import logging
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from harness_task import TASK, write_checkpoint, write_task
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    pipeline,
)

import attnplug
from attnplug.errors import ArgumentError, NotAppliedError, PolicyError
from attnplug.program import find

POLICY = "momo(min_tokens=0)+gather(min_tokens=0)"
IDS = torch.arange(2, 82)[None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model with a tokenizer, in a folder."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def policy_of(model):
    try:
        return attnplug.report(model).policy
    except NotAppliedError:
        return None


def test_a_model_that_is_loaded_meanwhile_has_the_policy_and_keeps_it(checkpoint):
    own = vars(PreTrainedModel)["from_pretrained"]
    with attnplug.on_load(POLICY):
        auto = AutoModelForCausalLM.from_pretrained(checkpoint)
        direct = LlamaForCausalLM.from_pretrained(checkpoint)
        whole, told = LlamaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
        pipe = pipeline("text-generation", str(checkpoint))
        assert "missing_keys" in told
    assert vars(PreTrainedModel)["from_pretrained"] is own
    for model in (auto, direct, whole, pipe.model):
        assert policy_of(model) == POLICY
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert policy_of(stock) is None
    options = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(auto.generate(IDS, **options), stock.generate(IDS, **options))
    attnplug.remove(auto)


def test_it_lasts_until_it_is_closed_and_the_newest_decides(checkpoint):
    outer = attnplug.on_load("momo")
    with attnplug.on_load("gather"):
        assert policy_of(AutoModelForCausalLM.from_pretrained(checkpoint)) == "gather"
    assert policy_of(AutoModelForCausalLM.from_pretrained(checkpoint)) == "momo"
    outer.close()
    outer.close()
    assert policy_of(AutoModelForCausalLM.from_pretrained(checkpoint)) is None


def test_a_string_names_the_policy_of_one_model(checkpoint):
    named = dict(attn_implementation="attnplug:momo+gather(k=8)")
    for policy in (None, "dense"):
        with attnplug.on_load(policy):
            for load in (AutoModelForCausalLM.from_pretrained, LlamaForCausalLM.from_pretrained):
                assert policy_of(load(checkpoint, **named)) == "momo+gather(k=8)"
                assert policy_of(load(checkpoint)) == policy
            other = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
            assert policy_of(other) == policy
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="attnplug:momo"):
        AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="attnplug:momo")


def test_mappings_and_mistakes(checkpoint):
    with pytest.raises(PolicyError, match="Did you mean momo"):
        attnplug.on_load("momoo")
    with attnplug.on_load({0: "momo"}):
        assert policy_of(AutoModelForCausalLM.from_pretrained(checkpoint)) == "{0: momo}"
        with pytest.raises(PolicyError, match="no method"):
            AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="attnplug:mo")
    with attnplug.on_load({99: "momo"}), pytest.raises(PolicyError, match="no attention layer"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_model_that_cannot_be_served_stays_and_the_log_says_why(tmp_path, caplog):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_channels=1)
    ResNetModel(config).save_pretrained(tmp_path)
    with attnplug.on_load("momo"), caplog.at_level(logging.WARNING, "attnplug"):
        model = AutoModel.from_pretrained(tmp_path)
    assert policy_of(model) is None
    assert "ResNetModel stays as it is: " in caplog.text


PROGRAM = """
import sys
import torch
from transformers import AutoModelForCausalLM
import beside
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.generate(torch.arange(2, 82)[None], max_new_tokens=2, do_sample=False)
import attnplug
print(attnplug.report(model).policy, beside.VALUE, sys.argv[2:], __name__)
raise SystemExit(3)
"""


def attnplug_run(*words, policy=POLICY, cwd=None):
    command = [sys.executable, "-m", "attnplug", "run", "--policy", policy, "--", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_a_program_runs_as_python_runs_it(checkpoint, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    asked = (checkpoint, "--policy", "its own", "--help")
    by_name = attnplug_run(tmp_path / "program.py", *asked)
    as_module = attnplug_run("-m", "program", *asked, cwd=tmp_path)
    for done in (by_name, as_module):
        said = f"{POLICY} 7 ['--policy', 'its own', '--help'] __main__\n"
        assert (done.stdout, done.returncode) == (said, 3), done.stderr
        assert f"attnplug on LlamaForCausalLM: policy {POLICY}\n" in done.stderr


def test_a_module_of_the_current_folder_runs_though_the_script_is_elsewhere(tmp_path):
    """`python -m` looks in the current folder; attnplug's script has its own in that place."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "attnplug"
    script.write_text("from attnplug.cli import app\napp()\n")
    (tmp_path / "module_of_here.py").write_text("print('it ran')\n")
    words = ["run", "--policy", "dense", "--", "-m", "module_of_here"]
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "it ran\n", done.stderr


def test_modules_run_as_python_runs_them(tmp_path):
    """One in an archive; a package, whose own code sees Python's arguments; and one that asks for
    a module which is not there, as its traceback says."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("in_archive.py", "print('it ran')\n")
    package = tmp_path / "package_of_here"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (package / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (package / "broken.py").write_text("import no_such_dependency\n")

    def run(*words):
        command = [sys.executable, "-m", "attnplug", "run", "--policy", "dense", "--", "-m", *words]
        path = [str(tmp_path / "archive.zip"), *filter(None, [os.environ.get("PYTHONPATH")])]
        place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(path)}}
        return subprocess.run(command, capture_output=True, text=True, **place)

    assert run("in_archive").stdout == "it ran\n"
    assert run("package_of_here", "a", "b").stdout == "['-m', 'a', 'b']\n['a', 'b']\n"
    broken = run("package_of_here.broken")
    assert broken.returncode == 1 and "Traceback" in broken.stderr
    assert "No module named 'no_such_dependency'" in broken.stderr


def test_a_programs_own_error_keeps_its_traceback(tmp_path):
    (tmp_path / "program.py").write_text("open('/nowhere/file')\n")
    done = attnplug_run(tmp_path / "program.py")
    assert done.returncode == 1 and "Traceback" in done.stderr and "/nowhere/file" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a program after --"),
        (["-m"], "name a program after --"),
        (["no-such-program"], "no program 'no-such-program'"),
        (["sh"], "not a Python program"),
    ],
)
def test_what_is_no_python_program_is_refused(words, message):
    with pytest.raises(ArgumentError, match=message):
        find(words)


def test_lm_evaluation_harness_runs_under_a_policy(checkpoint, tmp_path):
    """Its own command line, on a tiny task: the answers are the model's own, as the budgets cover
    these prompts."""
    write_task(tmp_path)
    harness = ["--model", "hf", "--model_args", f"pretrained={checkpoint}", "--device", "cpu"]
    harness += ["--tasks", TASK, "--include_path", str(tmp_path), "--log_samples"]
    done = attnplug_run("-m", "lm_eval", *harness, "--output_path", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"policy {POLICY}\n" in done.stderr and TASK in done.stdout
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    scores = [float(each[0]) for row in found for each in row["filtered_resps"]]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    wanted = [
        log_probability(model, tokenizer, row["doc"]["q"], f" {choice}")
        for row in found
        for choice in row["doc"]["choices"]
    ]
    assert len(scores) == 8
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def log_probability(model, tokenizer, text: str, more: str) -> float:
    """Of `more` behind a text."""
    ids = tokenizer(text + more, return_tensors="pt").input_ids
    begin = len(tokenizer(text).input_ids)
    logits = model(ids).logits[0, begin - 1 : -1].log_softmax(-1)
    return float(logits.gather(-1, ids[0, begin:, None]).sum())
