"""Tensors of a GPU that lie in pinned host memory.

The GPU reads and writes pinned host memory by itself, over the link (51 GB/s measured on an H200,
inside CUDA graphs too). A tensor that *says* it is the GPU's goes through every op, kernel, graph
and compiler as any other: nothing has to know where its bytes are.
"""

import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnplug.errors import HostMemoryError


class _HostMemory:
    """What torch asks of a foreign buffer: bytes of pinned memory, kept as long as torch has it.

    Registered by ourselves: torch's allocator rounds up to a power of two, and keeps what is freed.
    """

    def __init__(self, count: int, device: torch.device):
        there = _available()
        if count > there:  # touching more would end the process, not raise
            raise MemoryError(f"{there / 2**30:.2f} GiB are free")
        host = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        host.zero_()  # several threads touch the pages; registering would, with one
        self.place = host.data_ptr()
        runtime: Any = torch.cuda.cudart()
        status = runtime.cudaHostRegister(self.place, count, 0)
        if int(status) != 0:
            raise MemoryError(f"cudaHostRegister: {status}")
        weakref.finalize(self, _release, host, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (self.place, False),
            "version": 3,
        }


_LEFT: list[torch.Tensor] = []  # nobody's any more, but a graph was being captured


def _release(host: torch.Tensor, device: torch.device) -> None:
    """Give pages back, once the GPU has done with them."""
    _LEFT.append(host)
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
        runtime: Any = torch.cuda.cudart()
        while _LEFT:
            runtime.cudaHostUnregister(_LEFT.pop().data_ptr())


def _available() -> int:
    """Bytes of memory that this process may still take, of the machine's and of its own group's."""
    free = []
    machine, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if machine.exists():
        words = dict(line.split(":") for line in machine.read_text().splitlines())
        free.append(int(words["MemAvailable"].split()[0]) * 1024)
    if (group / "memory.max").exists():
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            free.append(int(most) - int((group / "memory.current").read_text()))
    return min(free, default=1 << 62)


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
            memory = _HostMemory(max(count, 1), device)
            there = torch.as_tensor(memory, device=device)
    except (RuntimeError, MemoryError, OSError) as error:
        raise HostMemoryError(
            f"{count / 2**30:.2f} GiB of pinned host memory cannot be had ({error}). Free some, "
            f"make a shorter cache, or {instead}."
        ) from error
    if there.data_ptr() != memory.place:
        raise HostMemoryError(f"{device} cannot read pinned host memory in place")
    return there[:count].view(dtype).view(tuple(shape))
