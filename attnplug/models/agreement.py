"""What ranks tell each other before they compute together: a call that differs between them, or
that one of them refuses, raises on all of them, and none waits for another."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from attnplug.errors import ArgumentError, AttnplugError, RankError

Facts = Mapping[str, str]  # "prompt": "1 x 4096 tokens"; in the order in which they are compared


def check_mesh(mesh: Any) -> DeviceMesh:
    """The mesh, if it has one dimension and this process in it; else ArgumentError. A rank cannot
    tell others of this."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh is a {type(mesh).__name__}, needs a torch DeviceMesh such as "
            'init_device_mesh("cuda", (2,))'
        )
    if mesh.ndim != 1:
        raise ArgumentError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}, needs one: name it, as in "
            'mesh["pieces"]'
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"rank {dist.get_rank()} is not in the mesh, {mesh.mesh.tolist()}")
    return mesh


def agree(group: dist.ProcessGroup, facts: Facts, refused: AttnplugError | None) -> None:
    """Raise where any rank of the group has refused the call, or is about another one: its own
    error on a rank that has refused, RankError on the others. Every rank calls this."""
    told: list[Any] = [None] * group.size()
    with together("agree on the call"):
        dist.all_gather_object(told, ("" if refused is None else str(refused), facts), group=group)
    if refused is not None:
        raise refused
    for rank, (problem, _) in enumerate(told):
        if problem:
            raise RankError(f"rank {rank} of the mesh cannot take part: {problem}")
    first = told[0][1]
    for rank, (_, others) in enumerate(told):
        for name, value in others.items():
            if value != first.get(name):
                raise RankError(
                    f"the ranks of the mesh were called with different things: the {name} of rank "
                    f"0 is {first.get(name)}, that of rank {rank} {value}"
                )


@contextmanager
def together(what: str) -> Iterator[None]:
    """Within it ranks talk: what torch raises where one is gone becomes a RankError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error, AttnplugError):
            raise
        raise RankError(
            f"the ranks of the mesh could not {what}: one of them has ended, or has not come. "
            f"torch.distributed says: {error}"
        ) from error


def fingerprint(model: torch.nn.Module) -> str:
    """A short text that differs between models with other parameters, by their names, shapes,
    dtypes and a sample: the first row of each. Quantized weights are not sampled."""
    known, sums = hashlib.sha256(), []
    for name, parameter in model.named_parameters():
        known.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if own.is_floating_point() and own.numel() and not own.is_meta:
            row = own.detach()[:1] if own.dim() else own.detach()
            sums.append(row.to(torch.float64).sum().reshape(1))
    known.update(torch.cat(sums).cpu().numpy().tobytes() if sums else b"")
    return known.hexdigest()[:12]


def digest(tensor: torch.Tensor) -> str:
    """A short text that differs between tensors of other content."""
    content = tensor.detach().cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:12]
