"""`bench/ptx.py fits`: compile what the default policies launch for cards that are not here, and
hold the shared memory of each launch against the card's. Each case is compiled in a process of its
own: a compiler may end it, or print an error and go on, as AMD's assembler does."""

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _ptx_gpu
from _ptx_gpu import TARGETS, aim, resources
from _ptx_models import Case, model_cases
from triton.runtime.jit import JITFunction

LAUNCH = JITFunction.run
AMD_RESOURCES = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "stack": r"\.private_segment_fixed_size:\s+(\d+)",
}
PRINTED_ERROR = re.compile(r"^.*\berror:.*$", re.M)


class Running(NamedTuple):
    """A case that a process compiles."""

    target: str
    case: Case
    folder: Path
    began: float


def fits(targets: list[str], quick: bool, only: str | None) -> int:
    """Compile the cases for each target and print what is wrong; 1 if anything is."""
    import attnplug.ops  # noqa: F401 - once, before the processes part

    waiting = [
        (x, case)
        for x in targets
        for case in model_cases(quick, only)
        if TARGETS[x].fp8 or not case.fp8
    ]
    running: dict[int, Running] = {}
    wrong, start, done = 0, time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                target, case = waiting.pop(0)
                own = Path(folder, str(len(waiting)))
                own.mkdir()
                running[_start(target, case, own)] = Running(target, case, own, time.monotonic())
            pid, status = os.wait()
            ended, done = running.pop(pid), done + 1
            wrong += _judge(ended, status)
    seconds = time.monotonic() - start
    print(f"{done} cases for {', '.join(targets)} in {seconds:.0f} s, {wrong} with a fault")
    return wrong > 0


def _start(target: str, case: Case, folder: Path) -> int:
    """Compile a case in a process of its own; its id."""
    pid = os.fork()
    if pid:
        return pid
    with open(folder / "stderr", "wb") as file:
        os.dup2(file.fileno(), 2)  # what the compilers print, too
    launches: list[dict[str, Any]] = []
    aim(TARGETS[target])
    JITFunction.run = _compile_only(launches)  # pyright: ignore
    failed = 1
    try:
        case.call()
        failed = 0
    except BaseException:  # everything that a compiler raises, to be printed by the parent
        traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()
    (folder / "launches").write_text(json.dumps(launches))
    os._exit(failed)


def _compile_only(launches: list[dict[str, Any]]) -> Callable[..., Any]:
    """What a launch does instead: compile, and note the kernel."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = LAUNCH(self, *args, grid=grid, warmup=True, **kwargs)
        found = {"kernel": self.fn.__name__, "shared": kernel.metadata.shared}
        if _ptx_gpu.target.hip:
            text = kernel.asm["amdgcn"]
            for name, pattern in AMD_RESOURCES.items():
                found[name] = max(map(int, re.findall(pattern, text)), default=0)
        else:
            found |= resources(kernel.asm["cubin"])
        launches.append(found)
        return kernel

    return run


def _judge(ended: Running, status: int) -> bool:
    """Print a line for the case, and what is wrong with it; whether anything is."""
    path, limit = ended.folder / "launches", TARGETS[ended.target].shared
    launches = json.loads(path.read_text()) if path.exists() else []
    printed = (ended.folder / "stderr").read_text(errors="replace")
    wrong = [
        f"{x['kernel']} wants {x['shared']} of {limit} bytes of shared memory"
        for x in launches
        if x["shared"] > limit
    ]
    wrong += PRINTED_ERROR.findall(printed)
    if status:
        said = [x for x in printed.splitlines() if "rror" in x] or ["nothing printed"]
        wrong.append(f"ended with {os.waitstatus_to_exitcode(status)}: {said[-1]}")
    if not launches:
        wrong.append("launched nothing")
    largest = max((x["shared"] for x in launches), default=0)
    spills = [f"{x['kernel']} {x['stack']}" for x in launches if x.get("stack", 0) > 0]
    seconds = time.monotonic() - ended.began
    print(
        f"{ended.target:7} {ended.case.name:40} {len(launches):2} launches, {largest:7,} bytes "
        f"shared, {seconds:5.1f} s" + (f"; stack: {', '.join(spills)}" if spills else ""),
        *(f"    {x}" for x in dict.fromkeys(wrong)),
        sep="\n",
        flush=True,
    )
    return bool(wrong)
