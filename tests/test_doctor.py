"""attnplug doctor: what it finds of this machine, and what it says of faults."""

import importlib.metadata
import json
import types

import pytest
import torch
from cli_cases import run

import attnplug
import attnplug.cli
from attnplug import doctor
from attnplug.ops.common.device import Card
from attnplug.policies import tuned


def test_doctor_is_json(monkeypatch):
    checks = [doctor.Check("a", "ok", "fine"), doctor.Check("b", "fail", "broken")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["version"] == attnplug.__version__
    assert found["checks"][1] == {"name": "b", "status": "fail", "detail": "broken"}
    assert result.stderr.startswith("running the ops")


def test_doctor_finds_this_machine_healthy():
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in ("torch", "transformers", "GPU", "weights smollm2-135m", "within"):
        assert word in result.output
    assert "fail" not in result.output


def test_doctor_fails_where_the_ops_do(monkeypatch):
    monkeypatch.setattr(doctor, "SMOKE", "raise RuntimeError('no [device] kernel image')")
    result = run("doctor")
    assert result.exit_code == 1
    assert "exit 1: RuntimeError: no [device] kernel image" in result.output


def test_doctor_fails_where_the_ops_return_nan(monkeypatch):
    monkeypatch.setattr(doctor, "SMOKE", "print('nan')")
    assert [check.status for check in doctor.examine() if check.name == "ops"] == ["fail"]


@pytest.mark.parametrize("width", [128, 256])
def test_doctors_long_prompt_is_exact_attention(width):
    check = doctor._run("ops", doctor.LONG_TOLERANCE, "", doctor.LONG, "512", str(width))
    assert check.status == "ok", check.detail
    assert float(check.detail.split()[-1]) > 0


def test_doctor_tries_long_prompts_on_a_gpu_alone(monkeypatch):
    assert doctor._long_prompts() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "LONG", "import sys; print(0.5 if sys.argv[2] == '256' else 1e-3)")
    found = [(check.name, check.status) for check in doctor._long_prompts()]
    assert found == [("ops D=128", "ok"), ("ops D=256", "fail")]
    monkeypatch.setattr(doctor, "LONG", "raise SystemExit('CardError: wants 104,448 bytes')")
    assert all("CardError: wants 104,448" in check.detail for check in doctor._long_prompts())


@pytest.mark.parametrize(
    ("card", "lacks"),
    [
        (("nvidia", (9, 0), 132, 232448), []),
        (("nvidia", (10, 0), 148, 232448), ["wgmma"]),
        (("nvidia", (8, 9), 128, 101376), ["PDL", "wgmma", "99 of 227 KiB"]),
        (("nvidia", (7, 5), 40, 65536), ["bfloat16", "PDL", "wgmma", "64 of 227 KiB"]),
        (("amd", (9, 4), 304, 65536), ["NVIDIA's", "PDL", "wgmma", "64 of 227 KiB"]),
    ],
)
def test_doctor_says_what_a_card_lacks(card, lacks):
    found = doctor.missing(Card.made(*card))
    assert len(found) == len(lacks)
    assert all(word in said for word, said in zip(lacks, found, strict=True))


def test_doctor_names_a_package_that_is_too_old(monkeypatch):
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", lambda name: ["numpy>=99", "no-such-package>=1"]
    )
    old, missing = doctor._packages()
    assert old.status == "fail" and old.detail.endswith("needs >=99; pip install 'numpy>=99'")
    assert missing.status == "fail" and "pip install 'no-such-package>=1'" in missing.detail


def test_doctor_runs_where_attnplug_is_a_folder_on_the_path(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert [(check.name, check.status) for check in doctor._packages()] == [("attnplug", "note")]
    assert f"attnplug {attnplug.__version__}," in tuned.measured_with()


@pytest.mark.parametrize(
    "found, plugins, status, detail",
    [
        (None, None, "note", "not installed"),
        ("0.99.0", None, "note", "vLLM 0.99.0 is not supported"),
        ("0.20.2", "other", "note", "VLLM_PLUGINS=other leaves attnplug out"),
        ("0.20.2", None, "ok", "--attention-backend CUSTOM"),
        ("0.20.2", None, "ok", "--logits-processors attnplug.serve.vllm.requests:Requests"),
    ],
)
def test_doctor_knows_vllm(monkeypatch, found, plugins, status, detail):
    monkeypatch.setattr(doctor.vllm, "version", lambda: found)
    group = types.SimpleNamespace(names={"attnplug"})
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: group)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    check = doctor._vllm()
    assert check.status == status and detail in check.detail
