"""Which calls of a model run, so that its policy comes and goes between calls only: one that began
with a policy and goes on without it, or the other way around, would end in wrong tokens."""

import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin, PreTrainedModel

from attnplug.errors import UnsupportedCallError
from attnplug.models.turn import Turn

TURN = Turn()
CALLS = frozenset({"forward", "generate"})
GENERATE = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__
PATIENCE = 0.25  # seconds in which a generate comes to a forward pass
Call = tuple[int, int, CodeType]  # its process, its thread and what runs it
# The calls of generate that have a policy; in a forked child also those of its parent.
_running: "WeakKeyDictionary[torch.nn.Module, list[Call]]" = WeakKeyDictionary()


@contextmanager
def running(model: torch.nn.Module) -> Iterator[None]:
    """Within it a call of the model runs. Waits while a policy comes or goes."""
    runs = sys._getframe(2).f_code  # behind contextlib's
    call = os.getpid(), threading.get_ident(), runs
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
        refuse_running(model, what)
        yield


def refuse_running(model: torch.nn.Module, what: str) -> None:
    """Raise UnsupportedCallError where a call of the model runs."""
    noted = any(map(_goes_on, _running.get(model, ())))
    if noted or _runs_here(model) or _runs_elsewhere(model):
        raise UnsupportedCallError(
            f"{what}: a call of this model is running, in this thread or another one, and "
            "would end in wrong tokens; wait until it has ended"
        )


def _goes_on(call: Call) -> bool:
    """Whether a call that was noted still runs: an interrupt may have ended it before it could be
    crossed out."""
    process, thread, runs = call
    top = sys._current_frames().get(thread)
    return process == os.getpid() and any(frame.f_code is runs for frame in _frames(top))


def _runs_here(model: torch.nn.Module) -> bool:
    """Whether this thread is in a forward or a generate of the model or of a part of it."""
    parts = {id(module) for module in model.modules()}
    return any(
        frame.f_code.co_name in CALLS
        and frame.f_code.co_varnames[:1] == ("self",)
        and id(frame.f_locals.get("self")) in parts
        for frame in _frames(sys._getframe())
    )


def _runs_elsewhere(model: torch.nn.Module) -> bool:
    """Whether another thread is in a forward pass of the model, or of another of its class, or in a
    generate that nothing tells from the model's: a call without a policy is noted nowhere. Looks at
    what code the threads run alone, as reading the variables of a frame that runs in another thread
    ends CPython 3.11 by a signal. A generate is asked again until it is in a forward pass."""
    kinds = {type(each) for each in model.modules() if isinstance(each, PreTrainedModel)}
    own = {inspect.unwrap(kind.forward).__code__ for kind in kinds or {type(model)}}
    waits = time.monotonic() + PATIENCE
    while True:
        here = threading.get_ident()
        tops = [top for thread, top in sys._current_frames().items() if thread != here]
        stacks = [{frame.f_code for frame in _frames(top)} for top in tops]
        del tops
        if any(own & stack for stack in stacks):
            return True
        unknown = [GENERATE in stack and not any(map(_is_forward, stack)) for stack in stacks]
        if not any(unknown) or time.monotonic() > waits:
            return any(unknown)
        time.sleep(PATIENCE / 50)


def _is_forward(code: CodeType) -> bool:
    return code.co_name == "forward" and code.co_varnames[:1] == ("self",)


def _frames(top: FrameType | None) -> Iterator[FrameType]:
    while top is not None:
        yield top
        top = top.f_back
