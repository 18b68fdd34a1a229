"""Sums over the ranks of tensor parallelism in one kernel: each GPU reads what the others hold.

A decode step sums `[B,1,hidden]` over the ranks twice a layer, some kilobytes, in which NCCL's
protocol costs more than the bytes. PyTorch has a kernel that reads them out of the other GPUs'
memory, and inductor takes it for small sums of groups that have symmetric memory. Its order of
addition is that of the ranks, so all of them have the same bits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist

from attnplug.models.parallel import is_split, tensor_parallel_group

RANKS = (2, 4, 8)  # that the kernel is compiled for
DTYPES = (torch.bfloat16, torch.float32)


@contextmanager
def one_shot_all_reduce(model: Any) -> Iterator[None]:
    """Within it inductor compiles the small sums of a model under tensor parallelism to one kernel
    where the GPUs reach each other's memory, and to NCCL's elsewhere."""
    if not is_split(model) or not _reaches_all(model):
        yield
        return
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(_group(model).group_name)
    with inductor.patch({"_collective.auto_select": True}):
        yield


def _group(model: Any) -> Any:
    mesh = model._device_mesh
    return (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()


def _reaches_all(model: Any) -> bool:
    """Whether this rank's GPU may read the memory of all other ranks' GPUs, as far as ranks agree
    on it without a word: all on one host, each with a GPU that all of them see."""
    device, ranks = model.device, len(tensor_parallel_group(model)[0])
    is_mixed = torch.is_autocast_enabled("cuda")
    if device.type != "cuda" or ranks not in RANKS or model.dtype not in DTYPES or is_mixed:
        return False
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local != str(dist.get_world_size()) or torch.cuda.device_count() < int(local):
        return False
    others = [each for each in range(int(local)) if each != device.index]
    return all(torch.cuda.can_device_access_peer(device, each) for each in others)
