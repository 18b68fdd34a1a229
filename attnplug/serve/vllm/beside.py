"""Two pieces of a layer's work beside each other in a CUDA graph: vLLM's FlashAttention for some
rows, and the method that decodes for the others. Neither waits for the other's kernels then."""

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the method's kernels while a graph is captured, one for all layers."""
    return torch.cuda.Stream(device)


def run_beside(
    dense: Callable[[], Any] | None,
    method: Callable[[], Any],
    device: torch.device,
    *,
    beside: bool,
) -> tuple[Any, bool]:
    """Run `dense` (None: nothing), and `method` with it: what `method` returns, and whether its
    kernels are the last ones on the current stream.

    With `beside` they run beside each other while a graph is captured. Outside of graphs the host
    launches one after the other anyway. What `method` allocates belongs to the side stream. Its
    memory is given away to that stream alone, which first waits for the current one, hence for
    whoever reads.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if dense is None or not (beside and captured):
        if dense is not None:
            dense()
        return method(), True
    side, current = side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    dense()
    with torch.cuda.stream(side):
        found = method()
    current.wait_stream(side)
    return found, False
