"""A word on the log where a first call takes long, as it may be compiling: one a process."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

SILENT_S = 2.0  # how long a first call may take without a word
LOG = logging.getLogger("attnplug")
SAID = threading.Event()  # the log has it


def remark(text: str, *args: object) -> threading.Timer:
    """Started, it puts a line on the log after `SILENT_S`, unless it is cancelled before or another
    one has done so."""

    def say() -> None:
        if not SAID.is_set():
            SAID.set()
            LOG.warning(text, *args)

    timer = threading.Timer(SILENT_S, say)
    timer.daemon = True
    return timer


def announced(fill: Callable[..., None], name: str, compiler: str) -> Callable[..., None]:
    """`fill`, of which the first call with each dtype says what it is doing if it takes long."""
    called: set[torch.dtype] = set()

    def run(*args: Any) -> None:
        if args[0].dtype in called:
            return fill(*args)
        called.add(args[0].dtype)
        timer = remark("%s is compiling attnplug's %s, once on this machine", compiler, name)
        timer.start()
        try:
            return fill(*args)
        finally:
            timer.cancel()

    return run
