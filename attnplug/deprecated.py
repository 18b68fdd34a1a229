"""Old names, kept for one release: each still works and warns with the new one."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that serves its old names.

    `moved` maps an old name to where the thing is now, "attnplug.call.EdgeWriter". Any other name
    raises AttributeError.
    """

    def __getattr__(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = moved[name].rpartition(".")
        warn_renamed(f"{module}.{name}", moved[name], stacklevel=3)
        return getattr(importlib.import_module(home), new)

    return __getattr__


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Tell the caller `stacklevel` frames up (as warnings.warn counts) to use the new name."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
