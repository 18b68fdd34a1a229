"""A word on the log where an op's first call takes long: it may be compiling."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

SILENT_S = 2.0  # how long a first call may take without a word
LOG = logging.getLogger("attnplug")


def announced(fill: Callable[..., None], name: str, compiler: str) -> Callable[..., None]:
    """`fill`, of which the first call with each dtype says what it is doing after `SILENT_S`."""
    called: set[torch.dtype] = set()

    def run(*args: Any) -> None:
        if args[0].dtype in called:
            return fill(*args)
        called.add(args[0].dtype)
        text = "the first call of %s in %s takes long: %s compiles it where no earlier process has"
        timer = threading.Timer(SILENT_S, LOG.warning, (text, name, args[0].dtype, compiler))
        timer.daemon = True
        timer.start()
        try:
            return fill(*args)
        finally:
            timer.cancel()

    return run
