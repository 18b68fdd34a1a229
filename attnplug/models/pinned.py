"""Tensors of a GPU that lie in pinned host memory.

The GPU reads and writes pinned host memory by itself, over the link (51 GB/s measured on an H200,
inside CUDA graphs too). A tensor that *says* it is the GPU's goes through every op, kernel, graph
and compiler as any other: nothing has to know where its bytes are.
"""

from collections.abc import Sequence

import torch

from attnplug.errors import HostMemoryError


class _HostMemory:
    """What torch asks of a foreign buffer; it keeps the pinned memory alive."""

    def __init__(self, host: torch.Tensor):
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def host_zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    instead: str = "keep the originals on the GPU: originals='device'",
) -> torch.Tensor:
    """Zeros `shape` that kernels of `device` can read and write in place, in host memory.

    On a CPU, ordinary memory. Raises HostMemoryError where the memory cannot be had or the GPU
    cannot reach it, which also says what can be done `instead`: a cache that promises its originals
    must not begin without them.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    count = torch.Size(shape).numel() * dtype.itemsize
    try:
        with torch.cuda.device(device):
            host = torch.zeros(max(count, 1), dtype=torch.uint8, pin_memory=True)
            there = torch.as_tensor(_HostMemory(host), device=device)
    except (RuntimeError, MemoryError) as error:
        raise HostMemoryError(
            f"{count / 2**30:.2f} GiB of pinned host memory cannot be had ({error}). Free some, "
            f"make a shorter cache, or {instead}."
        ) from error
    if there.data_ptr() != host.data_ptr():
        raise HostMemoryError(f"{device} cannot read pinned host memory in place")
    return there[:count].view(dtype).view(tuple(shape))
