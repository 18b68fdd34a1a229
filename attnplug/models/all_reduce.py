"""Sums over the ranks of tensor parallelism in one kernel: each GPU reads what the others hold.

A decode step sums `[B,1,hidden]` over the ranks twice a layer, some kilobytes, in which NCCL's
protocol costs more than the bytes. PyTorch has a kernel that reads them out of the other GPUs'
memory, and inductor takes it for small sums of groups that have symmetric memory. Its order of
addition is that of the ranks, so all of them have the same bits.
"""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from attnplug.models.parallel import is_split, tensor_parallel_mesh

RANKS = (2, 4, 8)  # that the kernel is compiled for
DTYPES = (torch.bfloat16, torch.float32)
SHARES_MEMORY: dict[str, bool] = {}  # of each group that was asked
LOG = logging.getLogger("attnplug")


def one_shot_options(model: Any) -> dict[str, Any]:
    """Options of inductor with which it sums over the ranks of a model in one kernel, where the
    GPUs reach each other's memory; none elsewhere, where NCCL sums.

    For steps that are captured by a graph of ours. Those of torch (mode="reduce-overhead") refuse
    the pointers that the kernel keeps: "tensor(s) in the cudagraph pool not tracked as outputs".
    """
    if not is_split(model) or not _reaches_all(model):
        return {}
    group = tensor_parallel_mesh(model).get_group()
    if group.group_name not in SHARES_MEMORY:
        SHARES_MEMORY[group.group_name] = _shares_memory(group, model.device)
    return {"_collective.auto_select": True} if SHARES_MEMORY[group.group_name] else {}


def _shares_memory(group: Any, device: torch.device) -> bool:
    """Whether the ranks of a group can open each other's memory. A container may forbid it, so they
    try, and agree on what came of it."""
    from torch.distributed import _symmetric_memory as memory  # not every build of torch has it

    why = ""
    memory.enable_symm_mem_for_group(group.group_name)
    try:
        memory.rendezvous(memory.empty(16, dtype=torch.float32, device=device), group)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        LOG.warning("NCCL sums over the ranks of a decode step: %s", why)
    worked = torch.tensor(int(not why), device=device, dtype=torch.int64)
    dist.all_reduce(worked, dist.ReduceOp.MIN, group=group)
    return bool(worked)


def _reaches_all(model: Any) -> bool:
    """Whether this rank's GPU may read the memory of all other ranks' GPUs, as far as ranks agree
    on it without a word: all on one host, each with a GPU that all of them see."""
    device, ranks = model.device, tensor_parallel_mesh(model).size()
    is_mixed = torch.is_autocast_enabled("cuda")
    if device.type != "cuda" or ranks not in RANKS or model.dtype not in DTYPES or is_mixed:
        return False
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local != str(dist.get_world_size()) or torch.cuda.device_count() < int(local):
        return False
    others = [each for each in range(int(local)) if each != device.index]
    return all(torch.cuda.can_device_access_peer(device, each) for each in others)
