"""A CPU without Triton, as on macOS and Windows. Every policy serves there, with equal tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_cases import CASES, shipped

import attnplug
from attnplug.errors import UnsupportedCallError
from attnplug.ops.common.no_triton import Constexpr, Triton
from attnplug.testing import tiny_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
POLICIES = {name: case.policy for name, case in CASES.items()}
EVERYTHING = """
import importlib, pkgutil
import attnplug
for module in pkgutil.walk_packages(attnplug.__path__, "attnplug."):
    if not module.name.startswith("attnplug.serve.vllm.") and "__main__" not in module.name:
        importlib.import_module(module.name)
"""
ON_A_GPU = """
import torch
from attnplug.ops import dense_decode
q = torch.zeros(1, 1, 1, 64, device="cuda")
dense_decode(q, q, q, scale=1.0)
"""


def tokens() -> dict[str, list[int]]:
    """The first three tokens of every policy."""
    ids = torch.arange(48)[None] % 31
    found = {}
    for name, policy in POLICIES.items():
        with attnplug.applied(tiny_model(), policy) as model, torch.no_grad():
            out = model.generate(ids, max_new_tokens=3, do_sample=False, disable_compile=True)
        found[name] = out[0, ids.shape[1] :].tolist()
    return found


def without_triton(*args: str) -> subprocess.CompletedProcess[str]:
    paths = [ROOT / "scripts" / "without_triton", ROOT, HERE, HERE.parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, cwd=ROOT
    )


def test_every_module_is_imported_and_every_policy_gives_the_same_tokens():
    assert "ModuleNotFoundError" in without_triton("-c", "import triton").stderr
    assert {policy.partition("(")[0] for policy in POLICIES.values()} >= set(shipped())
    program = "import json, test_without_triton as t; print(json.dumps(t.tokens()))"
    run = without_triton("-c", EVERYTHING + program)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == tokens()


def test_doctor_finds_nothing_amiss():
    run = without_triton("-m", "attnplug", "doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "exact attention" in run.stdout


@pytest.mark.gpu
def test_a_gpu_needs_it():
    assert "UnsupportedCallError: Triton is not installed" in without_triton("-c", ON_A_GPU).stderr


def test_a_launch_says_what_is_missing():
    triton = Triton()

    @triton.jit(noinline=True)
    def kernel(x):
        return x

    with pytest.raises(UnsupportedCallError, match="Triton is not installed"):
        kernel.run(grid=(1,), warmup=False, x=1)
    with pytest.raises(UnsupportedCallError, match="Triton is not installed"):
        kernel[(1,)](1)
    assert Constexpr(Constexpr(3)) == 3 and Constexpr(3).value == 3 and Constexpr(3) != Constexpr(4)
