"""What stands beside every measured number: machine, versions, commit, date, and the ceilings that
this very card reached in this very session."""

import datetime
import functools
import os
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from shutil import which

import torch
import triton

# A row of results has these keys; tables, docs and checks read exactly these.
KEYS = (
    "op case n batch heads_q heads_kv head_dim dtype options p20_us p50_us p80_us peer peer_p50_us "
    "ratio bytes flops ceiling_fraction gpu torch triton commit date"
).split()


@functools.cache
def commit() -> str:
    """What code ran: $ATTNPLUG_COMMIT, else git's HEAD of the checkout that the package is in
    ("-dirty" appended when tracked files differ), else the package's version."""
    if named := os.environ.get("ATTNPLUG_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = Path(__file__).parent
    if (folder.parents[1] / ".git").exists() and which("git"):
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    return version("attnplug")


@functools.cache
def provenance() -> dict[str, str]:
    """The keys `gpu`, `torch`, `triton`, `commit`, `date` (UTC day) of a row."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


@functools.cache
def ceilings() -> dict[str, float]:
    """Measured once per process: `copy` (read + write) and `read` bandwidth in bytes/s, `gemm`, the
    bf16 8192^3 matrix product in FLOP/s. Medians of ten."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    words = source.view(torch.int32)
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    c = torch.empty_like(a)
    return {
        "copy": 2 * source.nbytes / _median_seconds(lambda: target.copy_(source)),
        "read": source.nbytes / _median_seconds(lambda: words.amax()),
        "gemm": 2 * size**3 / _median_seconds(lambda: torch.mm(a, b, out=c)),
    }


def ceiling_fraction(nbytes: float, flops: float, seconds: float) -> float:
    """How much of the nearer ceiling a run reached: bytes against the better of copy and read
    bandwidth, FLOPs against the measured GEMM."""
    reached = ceilings()
    bandwidth = max(reached["copy"], reached["read"])
    return max(nbytes / seconds / bandwidth, flops / seconds / reached["gemm"])


def _median_seconds(fn: Callable[[], object]) -> float:
    for _ in range(3):
        fn()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return sorted(times)[len(times) // 2]
