"""numba's threads beside torch's."""

import functools
from collections.abc import Callable
from typing import Any

import numba
import torch


@functools.cache
def start_threads() -> None:
    """Start numba's threads, and leave torch the number of its own.

    Both may run on one OpenMP. There numba's first parallel call sets the number of threads for
    torch too: a limit that the user gave torch would be gone, and what Dynamo has compiled would
    compile anew."""
    threads = torch.get_num_threads()
    numba.get_num_threads()  # which starts them
    torch.set_num_threads(threads)


def with_threads(fill: Callable[..., None]) -> Callable[..., None]:
    """`fill`, which runs on numba's threads once they have started."""

    def run(*args: Any) -> None:
        start_threads()
        fill(*args)

    return run
