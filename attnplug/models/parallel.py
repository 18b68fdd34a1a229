"""What a rank holds of a model that transformers has split over several: which attention layers are
split by heads, how many heads that leaves, and its part of the weights."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attnplug.errors import UnsupportedModelError

PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")  # whose output has the keys
LOCAL = "_attnplug_local_weights"
RANKS_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"
SPLIT = ("colwise", "packed_colwise")  # plan styles that leave each rank its own part of the output


@dataclass(frozen=True)
class Split:
    """A layer under tensor parallelism: `ranks` share the model, `by_heads` says whether they share
    this layer's heads too, and the counts are the model's."""

    ranks: int
    by_heads: bool
    heads_q: int
    heads_kv: int

    @property
    def of_rank(self) -> tuple[int, int]:
        """Query heads and KV heads of the attention and cache of one rank."""
        parts = self.ranks if self.by_heads else 1
        return self.heads_q // parts, self.heads_kv // parts

    def __str__(self) -> str:
        if not self.by_heads:
            return (
                f"the model's plan does not split attention: each of {self.ranks} ranks computes "
                f"and caches all {self.heads_q} query heads and {self.heads_kv} KV heads"
            )
        queries, keys = self.of_rank
        return (
            f"each of {self.ranks} ranks holds {queries} of {self.heads_q} query heads and {keys} "
            f"of {self.heads_kv} KV heads"
        )


def is_split(model: torch.nn.Module) -> bool:
    """Whether tensor parallelism has split a model over ranks."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def tensor_parallel_mesh(model: Any) -> Any:
    """The mesh of the ranks that share a split model's weights, of all that it is on."""
    mesh = model._device_mesh
    return mesh["tp"] if mesh.ndim > 1 else mesh


def tensor_parallel_group(model: torch.nn.Module) -> tuple[list[int], int]:
    """The ranks that tensor parallelism has split a model over, and which of them this process is:
    ([0], 0) where it is one process's."""
    if not is_split(model):
        return [0], 0
    mesh = tensor_parallel_mesh(model)
    return mesh.mesh.flatten().tolist(), mesh.get_local_rank()


def split_of(model: torch.nn.Module, name: str, heads_q: int, heads_kv: int) -> Split | None:
    """How tensor parallelism has split an attention layer of so many heads, None where the model is
    one process's. Raises UnsupportedModelError where the ranks cannot share its heads evenly."""
    if not is_split(model):
        return None
    ranks: int = model._tp_size  # pyright: ignore[reportAssignmentType]
    split = Split(ranks, _by_heads(model, name), heads_q, heads_kv)
    if split.by_heads and (heads_q % ranks or heads_kv % ranks):
        raise UnsupportedModelError(
            f"{name} has {heads_q} query heads and {heads_kv} KV heads, which {ranks} ranks cannot "
            "share evenly: transformers itself fails in its forward pass. Load the model with a "
            "tp_size that divides both, or with a tp_plan that leaves attention whole."
        )
    return split


def _by_heads(model: Any, name: str) -> bool:
    """Whether the model's plan gives each rank its own heads of a layer. Some plans split the
    weights and gather what they give, and some leave attention alone."""
    return any(_style(model, f"{name}.{projection}") in SPLIT for projection in PROJECTIONS)


def keeps_parts(model: Any, name: str) -> bool:
    """Whether a projection gives what its own weights make of the input: its ranks keep their parts
    of the output, or there are none."""
    return not is_split(model) or _style(model, name) in (None, "colwise")


def _style(model: Any, name: str) -> str | None:
    """How the model's plan splits a module."""
    return (model.tp_plan or {}).get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def is_of_ranks(forward: Any) -> bool:
    """Whether a module's forward is the one that transformers' tensor parallelism gives it."""
    return getattr(forward, "__qualname__", "") == RANKS_FORWARD


@contextmanager
def local_weights(model: torch.nn.Module) -> Iterator[None]:
    """Within it the linear layers of a model under tensor parallelism have this rank's part of
    their weights as plain parameters. Without gradients they compute with these anyway, and the
    host of a compiled step takes every DTensor apart at every call.

    Nothing that looks at parameters, as saving does, belongs inside. The plain parameters are the
    same objects each time, so that code compiled inside is not compiled again. Other models stay
    as they are.
    """
    local = _local_weights(model)
    for module, name, _, plain in local:
        module._parameters[name] = plain
    try:
        yield
    finally:
        for module, name, split, _ in local:
            module._parameters[name] = split


def follow_local_weights(model: torch.nn.Module) -> None:
    """Have the split weights hold the memory that their plain parameters have moved to."""
    for _, _, split, plain in vars(model).get(LOCAL, []):
        if split.to_local().data_ptr() != plain.data_ptr():
            split._local_tensor = plain.data


LocalWeight = tuple[torch.nn.Module, str, torch.nn.Parameter, torch.nn.Parameter]


def _local_weights(model: torch.nn.Module) -> list[LocalWeight]:
    """(module, name, parameter, this rank's part of it as a parameter) of each linear layer's."""
    if not is_split(model) or (getattr(model, "_fsdp_size", None) or 1) > 1:
        return []
    known: list[LocalWeight] = vars(model).get(LOCAL, [])
    if not known or any(module._parameters[name] is not split for module, name, split, _ in known):
        known = vars(model)[LOCAL] = list(_find_local_weights(model))
    return known


def _find_local_weights(model: torch.nn.Module) -> Iterator[LocalWeight]:
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for name, split in module._parameters.items():
                if isinstance(split, DTensor):
                    plain = torch.nn.Parameter(split.to_local(), requires_grad=False)
                    yield module, name, split, plain
