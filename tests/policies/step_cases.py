"""Small cache layers and decode steps, of four query heads and two of keys, for the policies'
tests."""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

import attnplug
from attnplug.policies import AttentionCall

HEADS, KV_HEADS, DIM = 4, 2, 64


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(policy: Any, kv: torch.Tensor, size: int = 200) -> Any:
    """The policy's cache layer with these keys and values in it."""
    layer = policy.cache_layer(size)
    layer.update(kv[0], kv[1])
    return layer


def step(
    layer: StaticLayer,
    seed: int = 0,
    mask: torch.Tensor | None = None,
    queries: int = 1,
    **options: Any,
) -> AttentionCall:
    """The call of a decode step, or of a few queries, whose tokens are in the layer already."""
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    q = random(seed, keys.shape[0], HEADS, queries, DIM).to(keys.device)
    if queries > 1 and mask is not None:
        options["start"] = mask.int().argmax(-1).to(torch.int32)
    lengths = layer.cumulative_length.reshape(1)
    return AttentionCall(
        q, keys, values, DIM**-0.5, lengths=lengths, key_mask=mask, state=layer, **options
    )


@torch.no_grad()
def stepped(model: Any, ids: torch.Tensor, room: int, new: int = 24) -> tuple[torch.Tensor, Any]:
    """`ids` and the greedy tokens of `new` steps made by hand, over a cache with room for so many
    tokens, and the cache."""
    cache = attnplug.make_cache(model, room)
    logits = model(ids, past_key_values=cache).logits
    for _ in range(new):
        token = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], 1)
        logits = model(token, past_key_values=cache).logits
    return ids, cache
