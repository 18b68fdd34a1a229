"""`attnplug doctor`: what is installed, what works here, and what to do about what does not."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from attnplug.models import pretrained
from attnplug.serve import vllm
from attnplug.serve.vllm.options import REQUESTS

Status = Literal["ok", "note", "fail"]
STYLES = {"ok": "green", "note": "yellow", "fail": "red"}

# Runs in a process of its own: a broken GPU or threading layer can end the interpreter, and
# doctor must still print its table. Prints the largest error against torch's attention.
SMOKE = """
import torch
from attnplug.ops import dense_decode
from attnplug.policies import AttentionCall, Momo
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, 512, 64).to(device) for heads in (4, 2, 2))
want = torch.nn.functional.scaled_dot_product_attention(
    q.double(), k.double(), v.double(), is_causal=True, scale=0.125, enable_gqa=True).float()
prefill = Momo(top_k=16, min_tokens=0).attend(AttentionCall(q, k, v, 0.125))
decode, _ = dense_decode(q[:, :, -1:].contiguous(), k, v, scale=0.125)
print(max((prefill - want).abs().max().item(), (decode - want[:, :, -1:]).abs().max().item()))
"""
# momo with every block listed is dense up to rounding; TF32 products on a GPU are the coarsest.
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    status: Status
    detail: str


def examine() -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [
        Check("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        *_packages(),
        _gpu(),
        _compiler(),
        _vllm(),
        *_weights(),
        _ops(),
    ]


def table(checks: list[Check]) -> Table:
    """The checks as a rich table."""
    shown = Table(title=f"attnplug {importlib.metadata.version('attnplug')}")
    for column in ("check", "result", "what is here"):
        shown.add_column(column)
    for check in checks:
        shown.add_row(check.name, Text(check.status, STYLES[check.status]), Text(check.detail))
    return shown


def _packages() -> list[Check]:
    """Each run-time dependency of the installed attnplug against the version that it asks for."""
    checks = []
    for text in importlib.metadata.requires("attnplug") or []:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(need.name, "fail", f"missing; pip install '{text}'"))
            continue
        # Without the local part: 2.13.0+cpu is 2.13.0.
        fits = need.specifier.contains(found.split("+")[0], prereleases=True)
        wanted = (
            "" if fits else f", needs {need.specifier}; pip install '{need.name}{need.specifier}'"
        )
        checks.append(Check(need.name, "ok" if fits else "fail", found + wanted))
    return checks


def _gpu() -> Check:
    if not torch.cuda.is_available():
        return Check("GPU", "note", "none that torch can use: ops run on the CPU (numba)")
    device = torch.cuda.get_device_properties(0)
    memory = device.total_memory / 2**30
    detail = f"{device.name}, {memory:.0f} GiB, capability {device.major}.{device.minor}"
    if device.major < 8:
        return Check("GPU", "note", f"{detail}; bfloat16 needs capability 8.0")
    return Check("GPU", "ok", detail)


def _compiler() -> Check:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name) or shutil.which("clang++")
    if path is None:
        return Check("C++ compiler", "note", f"no {name}: torch.compile on the CPU needs one")
    return Check("C++ compiler", "ok", f"{path} (torch.compile on the CPU)")


def _vllm() -> Check:
    """Whether the installed vLLM is one that attnplug serves, and would find it."""
    found, reason = vllm.version(), vllm.unsupported()
    if found is None:
        return Check("vLLM", "note", "not installed; pip install 'attnplug[vllm]' to serve with it")
    if reason:
        return Check("vLLM", "note", reason)
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "attnplug" not in group.names:
        detail = f"{found}, which does not find attnplug: install attnplug again"
        return Check("vLLM", "fail", detail)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "attnplug" not in allowed.split(","):
        return Check("vLLM", "note", f"{found}; VLLM_PLUGINS={allowed} leaves attnplug out")
    traces = f"--logits-processors {REQUESTS}"
    detail = f"{found}, with --attention-backend CUSTOM; traces of prompts with {traces} besides"
    return Check("vLLM", "ok", detail)


def _weights() -> list[Check]:
    checks = []
    for name in pretrained.names():
        folder = pretrained.checkpoint_dir(name)
        here = folder.is_dir()
        detail = str(folder) if here else "not in the cache; the first load fetches them with pip"
        checks.append(Check(f"weights {name}", "ok" if here else "note", detail))
    return checks


def _ops() -> Check:
    result = subprocess.run([sys.executable, "-c", SMOKE], capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return Check("ops", "fail", f"exit {result.returncode}: {lines[-1] if lines else ''}")
    error = float(result.stdout.splitlines()[-1])
    # A NaN is a failure too: it is not below the tolerance.
    status: Status = "ok" if error < TOLERANCE else "fail"
    return Check("ops", status, f"momo and dense_decode within {error:.1e} of exact attention")
