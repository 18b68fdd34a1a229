"""Which calls of a model run, so that its policy comes and goes between calls only: one that began
with a policy and goes on without it, or the other way around, would end in wrong tokens."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakKeyDictionary

import torch

from attnplug.errors import UnsupportedCallError
from attnplug.models.turn import Turn

TURN = Turn()
CALLS = frozenset({"forward", "generate"})
# The calls of generate that have a policy, as process and thread: a forked child has none.
_running: "WeakKeyDictionary[torch.nn.Module, list[tuple[int, int]]]" = WeakKeyDictionary()


@contextmanager
def running(model: torch.nn.Module) -> Iterator[None]:
    """Within it a call of the model runs. Waits while a policy comes or goes."""
    call = os.getpid(), threading.get_ident()
    with TURN.taken():
        _running.setdefault(model, []).append(call)
    try:
        yield
    finally:
        with TURN.taken():
            _running[model].remove(call)


@contextmanager
def between_calls(model: torch.nn.Module, what: str) -> Iterator[None]:
    """Within it no call of generate begins that has a policy. Raises UnsupportedCallError where a
    call of the model runs, in this thread (a hook, a streamer) or in another one."""
    with TURN.taken():
        counted = any(process == os.getpid() for process, _ in _running.get(model, ()))
        if counted or _is_computing(model):
            raise UnsupportedCallError(
                f"{what}: a call of this model is running, in this thread or another one, and "
                "would end in wrong tokens; wait until it has ended"
            )
        yield


def _is_computing(model: torch.nn.Module) -> bool:
    """Whether some thread is in a forward or a generate of the model or of a part of it. Looks at
    the threads' stacks: nothing else knows of calls of a model that has no policy."""
    parts = {id(module) for module in model.modules()}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_name in CALLS and code.co_varnames[:1] == ("self",):
                if id(frame.f_locals.get("self")) in parts:
                    return True
            frame = frame.f_back
    return False
