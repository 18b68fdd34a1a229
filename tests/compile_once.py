"""Several test processes on one GPU: a kernel that one of them compiles, the others wait for. Each
would compile it as well, and the cores do nothing else for most of the suite."""

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def only_one(name: str) -> Iterator[None]:
    """Hold the lock of a name, machine-wide; it goes with the process that holds it."""
    folder = Path(tempfile.gettempdir()) / f"attnplug-compile-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with (folder / hashlib.sha256(name.encode()).hexdigest()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def share_compilations() -> None:
    """Have Triton compile what another process compiles only when that one has done, and then read
    it from the disk cache."""
    compile_now = JITFunction._do_compile

    @functools.wraps(compile_now)
    def wait_or_compile(self, key, *args, **options):
        with only_one(f"{self.cache_key} {key}"):
            return compile_now(self, key, *args, **options)

    JITFunction._do_compile = wait_or_compile
