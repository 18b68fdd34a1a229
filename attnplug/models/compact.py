"""The mask of a model with an indexer, where it is a plain causal one: which keys are real, instead
of queries by keys."""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from attnplug.models.hf import plug_mask


def index_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """transformers' mask function for a model with an indexer, which takes its mask apart and so
    needs one always: of a plain causal mask real keys `[B,1,1,T]`, or ones `[1,1,1,1]` where all
    are, uint8 for several queries and bool for one (see `hf`). Other masks are transformers'."""
    mask = plug_mask(batch_size, q_length, kv_length, *args, **kwargs)
    if mask is None:
        kind = torch.bool if q_length == 1 else torch.uint8
        return torch.ones((1, 1, 1, 1), dtype=kind, device=kwargs.get("device"))
    return mask


def is_compact(mask: torch.Tensor, queries: int) -> bool:
    """Whether a mask `[B,1,S,T]` is `index_mask`'s of a plain causal one."""
    return mask.dtype == (torch.bool if queries == 1 else torch.uint8)


def key_mask(mask: torch.Tensor, rows: int, tokens: int) -> torch.Tensor | None:
    """Which of the keys are real, `[B,T]`, of a compact mask `[B,1,1,T]`; None where all are."""
    if mask.shape[-1] == 1:
        return None
    return mask[:, 0, 0, :tokens].bool().expand(rows, tokens)


def lengths_of(layer: Any) -> torch.Tensor | None:
    """How many tokens of a static layer are valid, `[1]` on its device; None of another layer, all
    of whose tokens are."""
    return layer.cumulative_length.reshape(1) if isinstance(layer, StaticLayer) else None
