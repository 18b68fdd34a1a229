"""How a numba reference is compiled: once a machine where numba can keep on disk what it compiled,
else once a process."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numba
from numba import prange
from numba.core.caching import FunctionCache, NullCache

__all__ = ["njit", "prange"]
LOG = logging.getLogger("attnplug")


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(cache=True, **options)`, which also works where no folder is writable. There
    numba's own raises as soon as a module is imported, even on a GPU, where no reference runs."""

    def compile_once(function: Callable[..., Any]) -> Any:
        compiled: Any = numba.njit(**options)(function)  # a Dispatcher, whose _cache is not typed
        try:
            compiled._cache = OptionalCache(function)
        except RuntimeError:  # numba may write neither beside the file nor in the user's folder
            compiled._cache = NoCache()
        return compiled

    return compile_once


class OptionalCache(FunctionCache):
    """numba's cache of a function on disk, which is switched off when the disk takes no more."""

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self.disable()
            say_uncached(str(error.strerror))


class NoCache(NullCache):
    """Keeps nothing, and says so when there would have been something to keep."""

    def save_overload(self, sig: Any, cres: Any) -> None:
        say_uncached("it found no folder to write to")


@functools.cache
def say_uncached(why: str) -> None:
    """Say on the log, once a process, that each process compiles again."""
    text = "numba keeps nothing of what it compiles: %s. NUMBA_CACHE_DIR can name another folder"
    LOG.warning(text, why)
