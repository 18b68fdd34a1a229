"""`attnplug doctor`: what is installed, what works here, and what to do about what does not."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

import attnplug
from attnplug import extras
from attnplug.models import pretrained
from attnplug.serve import vllm
from attnplug.serve.vllm.options import REQUESTS

if TYPE_CHECKING:
    from attnplug.ops.common.device import Card

HOPPER_SHARED = 232448  # bytes that a program of an H100 and an H200 may have
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
# What a long prompt asks of a card: momo's prefill and a step of decode, for `tokens` of `width`
# dimensions a head. Prints the largest error against exact attention of the last 128 queries, as a
# share of the largest output.
LONG = """
import sys, torch
from attnplug.ops import dense_decode
from attnplug.policies import AttentionCall, Momo
tokens, width = map(int, sys.argv[1:])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads, tokens, width).to(device, torch.bfloat16) for heads in (4, 2, 2))
last, rows = torch.arange(tokens - 128, tokens, device=device), torch.arange(tokens, device=device)
want = torch.nn.functional.scaled_dot_product_attention(
    q[:, :, -128:].double(), k.double(), v.double(), attn_mask=rows <= last[:, None],
    scale=width**-0.5, enable_gqa=True).float()
call = AttentionCall(q, k, v, width**-0.5)
prefill = Momo(top_k=1 + tokens // 64, tail=0, min_tokens=0).attend(call)[:, :, -128:]
decode, _ = dense_decode(q[:, :, -1:].contiguous(), k, v, scale=width**-0.5)
errors = (prefill - want).abs().max(), (decode - want[:, :, -1:]).abs().max()
print((max(errors) / want.abs().max()).item())
"""
LONG_TOKENS, LONG_WIDTHS = 16384, (128, 256)
# bfloat16 keeps 8 bits of each weight and value.
LONG_TOLERANCE = 2e-2
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
        *_extras(),
        _gpu(),
        _compiler(),
        _vllm(),
        *_weights(),
        _ops(),
        *_long_prompts(),
    ]


def table(checks: list[Check]) -> Table:
    """The checks as a rich table."""
    shown = Table(title=f"attnplug {attnplug.__version__}")
    for column in ("check", "result", "what is here"):
        shown.add_column(column)
    for check in checks:
        shown.add_row(check.name, Text(check.status, STYLES[check.status]), Text(check.detail))
    return shown


def _packages() -> list[Check]:
    """Each run-time dependency of the installed attnplug against the version that it asks for."""
    checks: list[Check] = []
    try:
        needed = importlib.metadata.requires("attnplug") or []
    except importlib.metadata.PackageNotFoundError:
        return [Check("attnplug", "note", "runs from a folder; what it requires was not checked")]
    for text in needed:
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


def _extras() -> list[Check]:
    """What an extra brings that is not here: no fault, as a serving process needs none of it."""
    return [
        Check(
            f"extra {name}",
            "note",
            f"{' and '.join(missing)} missing; pip install 'attnplug[{name}]'",
        )
        for name in extras.EXTRAS
        if (missing := extras.missing(name))
    ]


def _gpu() -> Check:
    if not torch.cuda.is_available():
        return Check("GPU", "note", "none that torch can use: ops run on the CPU (numba)")
    device = torch.cuda.get_device_properties(0)
    memory = device.total_memory / 2**30
    detail = f"{device.name}, {memory:.0f} GiB, capability {device.major}.{device.minor}"
    from attnplug.ops.common.device import card  # not where torch finds no GPU: it wants Triton

    lacks = missing(card(torch.device("cuda", 0)))
    if lacks:
        return Check("GPU", "note", f"{detail}; lacks " + "; ".join(lacks))
    return Check("GPU", "ok", detail)


def missing(card: "Card") -> list[str]:
    """What a card lacks of what the kernels were tuned for, and what attnplug does there."""
    lacks = []
    if card.vendor == "nvidia" and not card.mma:
        lacks.append("products of bfloat16, which need capability 8.0")
    if not card.asm:
        lacks.append("NVIDIA's instructions: kernels do without, and were compiled but never run")
    if not card.pdl:
        lacks.append("early starts (PDL): each kernel waits for the end of the one before")
    if not card.wgmma:
        lacks.append("Hopper's products (wgmma): momo runs its plain kernels")
    if card.shared < HOPPER_SHARED:
        kib = f"{card.shared // 1024} of {HOPPER_SHARED // 1024} KiB"
        lacks.append(f"shared memory, {kib} a program: tiles are smaller, and pipelines shorter")
    return lacks


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
        status: Status = "note"
        detail = "not in the cache; the first load fetches them with pip"
        try:
            folder = pretrained.checkpoint_dir(name)
            if folder.is_dir():
                status, detail = "ok", str(folder)
        except OSError as error:  # a folder of somebody else's, or a user without a home
            detail = str(error)
        checks.append(Check(f"weights {name}", status, detail))
    return checks


def _ops() -> Check:
    return _run("ops", TOLERANCE, "of exact attention", SMOKE)


def _long_prompts() -> list[Check]:
    """Where there is a GPU, the ops on a long prompt of each head size: a card that has too little
    shared memory for one shows it there, and not on a short prompt."""
    if not torch.cuda.is_available():
        return []
    what = f"of the largest output, {LONG_TOKENS:,} tokens in bfloat16"
    return [
        _run(f"ops D={width}", LONG_TOLERANCE, what, LONG, str(LONG_TOKENS), str(width))
        for width in LONG_WIDTHS
    ]


def _run(name: str, tolerance: float, what: str, script: str, *arguments: str) -> Check:
    """The check that a script makes, which prints an error of momo and dense_decode."""
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return Check(name, "fail", f"exit {result.returncode}: {lines[-1] if lines else ''}")
    error = float(result.stdout.splitlines()[-1])
    # A NaN is a failure too: it is not below the tolerance.
    status: Status = "ok" if error < tolerance else "fail"
    return Check(name, status, f"momo and dense_decode within {error:.1e} {what}")
