"""Tensors of a GPU that lie in host memory.

The GPU reads and writes managed memory whose place is the host by itself, over the link, inside
CUDA graphs too. A tensor that *says* it is the GPU's goes through every op, kernel, graph and
compiler as any other: nothing has to know where its bytes are.

Managed, and not registered or from cudaHostAlloc: single tokens out of 2 GiB a layer come at 47
GB/s on an H200 whatever their order, and at 17 from memory of the other kinds (docs/log/sketch.md).
The driver seems to map managed memory in larger pages.
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnplug.errors import HostMemoryError

ALIGNED = 16  # bytes: kernels load as many at once
GLOBAL, HOST = 1, -1  # CU_MEM_ATTACH_GLOBAL, CU_DEVICE_CPU
LIVES_AT, READ_BY = 3, 5  # CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_MEM_ADVISE_SET_ACCESSED_BY


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """A function of CUDA's driver. Raises MemoryError."""
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        raise MemoryError(f"{name}: {status}")


class _HostMemory:
    """Bytes of host memory that a GPU reads in place, kept as long as a tensor of them is there."""

    def __init__(self, count: int, device: torch.device):
        there = _available()
        if count > there:  # touching more would end the process, not raise
            raise MemoryError(f"{there / 2**30:.2f} GiB are free")
        torch.cuda.synchronize(device)  # the driver wants a context
        place, size = ctypes.c_uint64(), ctypes.c_size_t(count)
        _call("cuMemAllocManaged", ctypes.byref(place), size, ctypes.c_uint(GLOBAL))
        self.place, self.count, self.device = place.value, count, device
        weakref.finalize(self, _release, self.place, device).atexit = False
        _call("cuMemAdvise", place, size, LIVES_AT, HOST)
        _call("cuMemAdvise", place, size, READ_BY, torch.cuda.current_device())
        bytes_there = (ctypes.c_ubyte * count).from_address(self.place)
        torch.frombuffer(bytes_there, dtype=torch.uint8).zero_()  # several threads touch the pages

    def since(self, offset: int) -> torch.Tensor:
        """The bytes from `offset` on, as a tensor of the GPU. Each has a storage of its own to
        torch, whose compiler would join tensors of one."""
        try:
            there = torch.as_tensor(_Bytes(self, offset), device=self.device)
        except RuntimeError as why:
            raise HostMemoryError(f"{self.device} cannot read host memory: {why}") from why
        if there.data_ptr() != self.place + offset:
            raise HostMemoryError(f"{self.device} cannot read host memory in place")
        return there


class _Bytes:
    """How torch is told of foreign memory, which lives as long as this."""

    def __init__(self, memory: _HostMemory, offset: int):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.count - offset,),
            "typestr": "|u1",
            "data": (memory.place + offset, False),
            "version": 3,
        }


_LEFT: list[int] = []  # places that are nobody's any more, but a graph was being captured


def _release(place: int, device: torch.device) -> None:
    """Give pages back, once the GPU has done with them."""
    _LEFT.append(place)
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
        while _LEFT:
            _call("cuMemFree_v2", ctypes.c_uint64(_LEFT.pop()))


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
    memory = _take(count, device, instead)
    return memory.since(0)[:count].view(dtype).view(tuple(shape))


def host_rows(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    instead: str,
) -> list[torch.Tensor]:
    """Zeros of each shape as `host_zeros`, whose rows in the last dimension lie next to one
    another: key and value of a token are one run of bytes, and one address to translate.

    The shapes differ in their last dimension only. On a CPU, ordinary memory.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return [torch.zeros(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    (lead,) = {tuple(shape[:-1]) for shape in shapes}
    widths = [-(-shape[-1] * dtype.itemsize // ALIGNED) * ALIGNED for shape in shapes]
    memory = _take(torch.Size(lead).numel() * sum(widths), device, instead)
    row = sum(widths) // dtype.itemsize
    strides = [row * torch.Size(lead[i + 1 :]).numel() for i in range(len(lead))]
    found = []
    for i, shape in enumerate(shapes):
        there = memory.since(sum(widths[:i])).view(dtype)
        found.append(there.as_strided(tuple(shape), (*strides, 1)))
    return found


def _take(count: int, device: torch.device, instead: str) -> _HostMemory:
    try:
        with torch.cuda.device(device):
            return _HostMemory(max(count, 1), device)
    except (RuntimeError, MemoryError, OSError) as error:
        raise HostMemoryError(
            f"{count / 2**30:.2f} GiB of host memory cannot be had ({error}). Free some, "
            f"make a shorter cache, or {instead}."
        ) from error
