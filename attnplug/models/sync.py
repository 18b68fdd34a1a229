"""Whether the host may look at what the device holds."""

import torch


def may_sync(on_gpu: bool) -> bool:
    """Whether the host may read a tensor here, which is the GPU's or not: not in traced code, nor
    under graph capture. What torch.jit.trace reads would stand in the trace for ever."""
    tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if torch.compiler.is_compiling() or tracing:
        return False
    return not (on_gpu and torch.cuda.is_current_stream_capturing())
