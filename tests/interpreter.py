"""Triton's interpreter looks through the whole of `triton.language` for what it must replace, in
each launch and again in each call of a device function: a third of the time of a kernel of many
small functions. What the launch has replaced stays so until it ends; once is enough."""

import functools
import inspect
from types import ModuleType

from triton.runtime import interpreter


def replace_once_a_launch() -> None:
    """Have the calls of device functions keep what their launch has replaced."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[ModuleType] = set()
    running: list[interpreter.GridExecutor] = []

    @functools.wraps(replace)
    def replace_new(fn):
        modules = languages(fn)
        if running and modules <= replaced:
            return None  # which only a launch would use, to undo it
        scope = replace(fn)
        if running:
            replaced.update(modules)
        return scope

    @functools.wraps(launch)
    def launch_and_forget(self, *args, **options):
        running.append(self)
        try:
            return launch(self, *args, **options)
        finally:
            running.pop()
            replaced.clear()

    interpreter._patch_lang = replace_new
    interpreter.GridExecutor.__call__ = launch_and_forget


@functools.cache
def languages(fn) -> frozenset[ModuleType]:
    """The modules that a function's file knows Triton's language by."""
    known = interpreter.tl, interpreter.tl.core
    return frozenset(x for x in fn.__globals__.values() if inspect.ismodule(x) and x in known)
