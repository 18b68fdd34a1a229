"""Runs a script over several processes that torch.distributed joins by gloo, as torchrun would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
TESTS = Path(__file__).resolve().parent


def run_ranks(script: str, *args: str | Path, ranks: int = 2, limit: float = 240) -> None:
    """Run `tests/SCRIPT ARGS` in so many processes, each told its rank by torchrun's variables.
    Fails with the output of a rank that failed, or of all where the limit (seconds) has passed."""
    # The ranks meet at a store of this process, as torchrun's agent has one: a port that is found
    # free here, for rank 0 to listen on, can be taken until rank 0 has imported torch.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = os.environ | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "contract")]),
    }
    command = [sys.executable, str(TESTS / script), *map(str, args)]
    started = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = []
    try:
        for process in started:
            said.append(process.communicate(timeout=limit)[0])
    finally:
        for process in started:
            process.kill()
    failed = [text for process, text in zip(started, said, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
