"""numba's threads beside torch's, and beside the user's own threads and forks."""

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numba
import torch

from attnplug.errors import UnsupportedCallError


class _Guard:
    """What keeps numba from ending the process. `before_fork` is the threading layer that ran in
    the process that this one was forked from, "" where none did."""

    def __init__(self, before_fork: str = ""):
        self.before_fork = before_fork
        self.starting = threading.Lock()
        self.one_call = threading.RLock()  # an op may run another


GUARD = _Guard()


def _running_layer() -> str:
    """The name of numba's threading layer, "" where its threads have not started."""
    try:
        return numba.threading_layer()  # pyright: ignore[reportPrivateImportUsage]
    except ValueError:  # not initialized
        return ""


def _after_fork() -> None:
    """In a forked child: another thread of the parent may hold the locks for ever."""
    global GUARD
    GUARD = _Guard(_running_layer())


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def start_threads() -> str:
    """Start numba's threads, leave torch the number of its own, and return numba's layer.

    Both may run on one OpenMP. There numba's first parallel call sets the number of threads for
    torch too: a limit that the user gave torch would be gone, and what Dynamo has compiled would
    compile anew."""
    with GUARD.starting:
        return _start_threads()


@functools.cache
def _start_threads() -> str:
    threads = torch.get_num_threads()
    numba.get_num_threads()  # which starts them
    torch.set_num_threads(threads)
    return numba.threading_layer()  # pyright: ignore[reportPrivateImportUsage]


def with_threads(fill: Callable[..., None]) -> Callable[..., None]:
    """`fill`, which runs on numba's threads once they have started.

    numba's layer "workqueue", the only one where neither OpenMP nor TBB is installed, aborts the
    process when two threads compute at once: there they take turns. GNU OpenMP, numba's layer
    "omp" on Linux, ends a forked child whose parent has used it: there a call raises
    UnsupportedCallError."""

    def run(*args: Any) -> None:
        if GUARD.before_fork == "omp" and sys.platform == "linux":
            raise UnsupportedCallError(
                "this process was forked from one in which numba had started its OpenMP threads, "
                "and they cannot compute here. Start processes with multiprocessing's spawn, fork "
                "before the first call on a CPU, or set NUMBA_THREADING_LAYER=workqueue"
            )
        if start_threads() != "workqueue":
            fill(*args)
            return
        with GUARD.one_call:
            fill(*args)

    return run
