"""Old names, kept for one release: each still works and warns with the new one."""

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attnplug.errors import PolicyError

MethodT = TypeVar("MethodT", bound=type)
RENAMED_OPTIONS = {"topk": "selection"}  # momo's, in the texts of older results


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


def renamed_option(old: str, new: str) -> Callable[[MethodT], MethodT]:
    """A decorator for a method's dataclass: its option `new` can still be given and read as `old`.

    The constructor raises PolicyError where both are given.
    """

    def decorate(cls: MethodT) -> MethodT:
        construct = cls.__init__
        text = f"{cls.name}'s option {old}"

        @functools.wraps(construct)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            if old in options:
                if new in options:
                    raise PolicyError(f"{cls.name}: {old} is the old name of {new}; give {new}")
                warn_renamed(text, new)
                options[new] = options.pop(old)
            construct(self, *args, **options)

        def read(self: Any) -> Any:
            warn_renamed(text, new)
            return getattr(self, new)

        cls.__init__ = __init__
        setattr(cls, old, property(read))
        cls.renamed = {**cls.renamed, old: new}
        return cls

    return decorate


def current_text(policy: str) -> str:
    """A policy's text of an older attnplug as this one writes it, so that results compare."""
    for old, new in RENAMED_OPTIONS.items():
        policy = re.sub(rf"\b{old}=", f"{new}=", policy)
    return policy


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Tell the caller `stacklevel` frames up (as warnings.warn counts) to use the new name."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
