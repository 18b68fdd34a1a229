"""What vLLM's profile run compiles is all that requests need, whatever their lengths: a kernel that
is compiled for a request holds all others up for a second (served_kernels.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("served_kernels.py")
QWEN = dict(heads=28, kv_heads=4, dim=128, chunk=16384, longest=33024, rows=32)
LLAMA = dict(heads=32, kv_heads=8, dim=128, chunk=8192, longest=131072, rows=9)
SMALL = dict(heads=9, kv_heads=3, dim=64, chunk=2048, longest=8192, rows=4)


def kernels(policy: str, shape: dict[str, Any]) -> dict:
    job = json.dumps(shape | {"policy": policy})
    # The kernels are to be Triton's, which is not imported here.
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), job], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("prompts", [150, pytest.param(600, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "policy, shape",
    [
        ("momo+gather", QWEN),
        ("momo+gvr", LLAMA),
        ("momo+gather+stream", QWEN | {"rows": 2}),
        ("momo(min_tokens=1024, top_k=8)+gather(k=8, sink=1, local=4, min_tokens=1024)", SMALL),
        ("momo(min_tokens=1024, top_k=8)+gvr(k=256, sink=16, min_tokens=1024)", SMALL),
        ("stream", SMALL),
        ("momo+gather", LLAMA | {"fp8": "scaled"}),
        ("gather(k=8, sink=1, local=4, min_tokens=1024)", SMALL | {"fp8": "plain"}),
    ],
)
def test_requests_find_their_kernels_warm(policy, shape, prompts):
    found = kernels(policy, shape | {"prompts": prompts})
    assert not found["missing"], "\n".join(found["missing"])
    assert found["warmed"] >= 9
