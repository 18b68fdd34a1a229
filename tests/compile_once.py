"""Several test processes on one machine: what one of them compiles, the others wait for. Each would
compile it as well, and the cores do nothing else for most of the suite."""

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher


@contextlib.contextmanager
def only_one(name: str) -> Iterator[None]:
    """Hold the lock of a name, machine-wide; it goes with the process that holds it."""
    folder = Path(tempfile.gettempdir()) / f"attnplug-compile-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with (folder / hashlib.sha256(name.encode()).hexdigest()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def share_kernels() -> None:
    """Have Triton compile what another process compiles only when that one has done, and then read
    it from the disk cache."""
    from triton.runtime.jit import JITFunction

    compile_now = JITFunction._do_compile

    @functools.wraps(compile_now)
    def wait_or_compile(self, key, *args, **options):
        with only_one(f"{self.cache_key} {key}"):
            return compile_now(self, key, *args, **options)

    JITFunction._do_compile = wait_or_compile


def share_references() -> None:
    """The same for numba, whose index on disk also loses what two processes write at a time. Call
    graphs have no circles, so that no two processes wait for each other; threads of one process
    take numba's own lock first, as its compiler does."""
    compile_now = Dispatcher.compile

    @functools.wraps(compile_now)
    def wait_or_compile(self, sig):
        if not isinstance(self._cache, FunctionCache):
            return compile_now(self, sig)
        code = self.py_func.__code__
        with global_compiler_lock, only_one(f"{code.co_filename}:{code.co_firstlineno}"):
            return compile_now(self, sig)

    Dispatcher.compile = wait_or_compile
