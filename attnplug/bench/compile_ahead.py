"""Compile what `tune` is going to time, in several processes: a process compiles a kernel at a
time, and what it has compiled Triton keeps on disk, where the other processes find it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from attnplug.bench.quick import Heads

PROCESSES = 8  # at most; each has the GPU's context and a cache of its own in memory


def compile_ahead(
    heads: Heads, device: str, names: Sequence[str], begin: Callable[[str, int], None]
) -> None:
    """Run every case of `tune.measure` once, each process its share of them. `begin` is told what
    comes next, as by `measure`. What a process cannot run, for want of memory for example, it
    leaves to the one that times."""
    count = min(PROCESSES, os.cpu_count() or 1)
    if count < 2:
        return
    running: list[subprocess.Popen[bytes]] = []
    try:
        for share in range(count):
            asked = json.dumps(
                [heads.query, heads.kv, heads.dim, device, list(names), share, count]
            )
            command = [sys.executable, "-m", __spec__.name, asked]
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        for number, process in enumerate(running):
            begin("compiling kernels", count - number)
            process.wait()
    finally:
        for process in running:
            process.kill()
            process.wait()


def run_share(asked: str) -> int:
    """Run what `compile_ahead` asked of this process; how many cases there were."""
    from attnplug.bench.tune import measure

    query, kv, dim, device, names, share, count = json.loads(asked)
    heads = Heads(query, kv, dim)
    return len(list(measure(heads, device, lambda what, left: None, names, (share, count))))


if __name__ == "__main__":
    run_share(sys.argv[1])
