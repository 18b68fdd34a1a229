"""Whether the host may look at what the device holds."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch

_FORBIDDEN = contextvars.ContextVar("attnplug: the host may read nothing", default=False)


def may_sync(on_gpu: bool) -> bool:
    """Whether the host may read a tensor here, which is the GPU's or not: not in traced code, nor
    under graph capture, nor `without_sync`. What torch.jit.trace reads would stand in the trace for
    ever."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if torch.compiler.is_compiling() or tracing:
        return False
    return not (_FORBIDDEN.get() or (on_gpu and torch.cuda.is_current_stream_capturing()))


def may_read(tensor: torch.Tensor) -> bool:
    """Whether the host may read this tensor here, and there is something to read."""
    return not tensor.is_meta and may_sync(tensor.is_cuda)


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """Have the host read nothing, as in traced code: for what such code calls at run time."""
    token = _FORBIDDEN.set(True)
    try:
        yield
    finally:
        _FORBIDDEN.reset(token)
