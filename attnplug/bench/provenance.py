"""What stands beside every measured number: machine, versions, commit and date."""

import datetime
import functools
import os
import subprocess
from pathlib import Path
from shutil import which

import torch

from attnplug.ops.common.triton import triton
from attnplug.version import __version__

# A row of results has these keys; tables, docs and checks read exactly these.
KEYS = (
    "op case n batch heads_q heads_kv head_dim dtype options p20_us p50_us p80_us peer peer_p50_us "
    "ratio bytes flops ceiling_fraction ceilings gpu torch triton commit date"
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
    return __version__


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
