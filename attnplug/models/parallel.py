"""What a rank holds of a model that transformers has split over several: which attention layers are
split by heads, and how many heads that leaves."""

import re
from dataclasses import dataclass
from typing import Any

import torch

from attnplug.errors import UnsupportedModelError

PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")  # whose output has the keys
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


def split_of(model: torch.nn.Module, name: str, heads_q: int, heads_kv: int) -> Split | None:
    """How tensor parallelism has split an attention layer of so many heads, None where the model is
    one process's. Raises UnsupportedModelError where the ranks cannot share its heads evenly."""
    ranks = getattr(model, "_tp_size", None) or 1
    if ranks == 1:
        return None
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
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    plan = model.tp_plan or {}
    return any(plan.get(f"{generic}.{projection}") in SPLIT for projection in PROJECTIONS)
