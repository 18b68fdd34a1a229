"""How a numba reference is compiled: once a machine where numba can keep on disk what it compiled,
else once a process."""

import contextlib
import functools
import glob
import logging
import pickle
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import prange
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

__all__ = ["njit", "prange"]
LOG = logging.getLogger("attnplug")
TORN = (EOFError, pickle.UnpicklingError)  # of files that were empty, or zeros, after a power cut


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


class CacheFiles(IndexDataCacheFile):
    """numba's files of a function: an index of the types that it was compiled for, and the code for
    each. numba writes the index first, and takes a number for the code's name. Where the code then
    finds no room, or a kill comes between, the index leads to the code of a version before, which
    has that number; likewise to that of other types, where two processes write at once. Here the
    code comes first, under a name that no other has, and what no index leads to is deleted. A file
    that cannot be read is none."""

    @classmethod
    def like(cls, files: IndexDataCacheFile) -> "CacheFiles":
        base = files._index_name.removesuffix(".nbi")
        return cls(files._cache_path, base, files._source_stamp)

    def save(self, key: Any, data: Any) -> None:
        base = self._index_name.removesuffix(".nbi")
        name = f"{base}.{secrets.token_hex(8)}.nbc"
        self._save_data(name, data)
        named = self._load_index() | {key: name}
        self._save_index(named)
        kept = {*named.values()}
        for path in Path(self._cache_path).glob(f"{glob.escape(base)}.*.nbc"):
            if path.name not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _load_index(self) -> dict[Any, str]:
        try:
            return super()._load_index()
        except (OSError, *TORN):
            return {}

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)
        except TORN as error:
            raise OSError(f"{name} was torn") from error  # which numba takes for a lost file


class OptionalCache(FunctionCache):
    """numba's cache of a function on disk, which is switched off when the disk takes no more."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = CacheFiles.like(self._cache_file)

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
