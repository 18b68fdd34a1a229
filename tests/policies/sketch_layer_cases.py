"""sketch's cache layer, filled with tokens."""

import torch
from step_cases import DIM, HEADS, KV_HEADS, random

from attnplug import Sketch
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall
from attnplug.policies._sketch_layer import SketchLayer

SKETCH = Sketch(k=40, min_tokens=0)

SIZE = 1500


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys, values and queries of `count` new tokens, `[3,B,Hq,count,D]`; keys and values have the
    first KV_HEADS heads."""
    return random(seed, 3, batch, HEADS, count, DIM).to(device)


def prefill(layer: PlugLayer, new: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """What a model's prefill does with a layer of sketch's: `mask` `[B,S]` is of the buffer."""
    k, v, q = new
    keys, values = layer.update(k[:, :KV_HEADS], v[:, :KV_HEADS])
    layer.note_buffers(keys, values)
    start = None if mask is None else mask.int().argmax(-1).to(torch.int32)
    lengths = layer.cumulative_length.reshape(1)
    call = AttentionCall(
        q, keys, values, DIM**-0.5, lengths=lengths, start=start, key_mask=mask, state=layer
    )
    SKETCH.note_queries(call)


def filled(policy: Sketch, new: torch.Tensor, mask: torch.Tensor | None = None) -> SketchLayer:
    layer = policy.cache_layer(SIZE)
    prefill(layer, new, mask)
    return layer
