"""Who may use what a model keeps from one call of generate to the next."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A lock that a thread may take again. In a forked child it is free: the thread of the parent
    that held it is not there, and would never give it back."""

    def __init__(self) -> None:
        self.lock, self.process = threading.RLock(), os.getpid()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and have it within the block."""
        if self.process != os.getpid():
            self.lock, self.process = threading.RLock(), os.getpid()
        with self.lock:
            yield
