"""The decode steps of an evaluation: one token a row at a time over static caches, from the second
step on a CUDA graph where there is a GPU.

A step of a small model leaves a GPU idle: its host launches hundreds of kernels for it. The graph
launches the same kernels without the host, and so gives the same logits."""

from collections.abc import Sequence
from typing import Any

import torch

from attnplug.eval.own_attention import own_attention
from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.captured import CapturedStep, Step
from attnplug.models.decode_step import (
    StepBuffers,
    decode_step,
    due_layers,
    layers_to_prepare,
    prepare_layers,
)
from attnplug.models.names import CACHE
from attnplug.models.sliding import SlidingLayer, count_on_device, window_mask


class Steps:
    """A model's decode steps over a cache that holds prompts, of which `real` `[B,T]` (bool) says
    what is no padding. `masked`: the model's own attention reads the cache, and must be told which
    slots are filled."""

    def __init__(self, model: Any, cache: PlugCache, real: torch.Tensor, masked: bool):
        self.model, self.cache = model, cache
        rows, self.tokens = real.shape
        room = cache.room if masked or not bool(real.all()) else None
        window = window_mask(cache.layers, real, rows)
        size = 0 if window is None else window.shape[3]
        self.buffers = made = StepBuffers.empty(rows, rows, room, size, 0, real.device)
        made.position.copy_(real.sum(-1, keepdim=True))
        made.slot.fill_(self.tokens)
        if made.mask is not None:
            made.show(real)
        if made.window is not None and window is not None:
            made.window.copy_(window)
        count_on_device(cache.layers)
        self.step: Step = decode_step
        if real.is_cuda:
            self.step = CapturedStep(decode_step)

    @torch.inference_mode()
    def logits(self, token: torch.Tensor) -> torch.Tensor:
        """Logits `[B,V]` (float32) after the next token `[B,1]` of each row."""
        made = self.buffers
        made.token.copy_(token)
        due = due_layers(layers_to_prepare(self.cache), self.tokens)
        mask = None
        if due and made.mask is not None:
            mask = made.mask[:, 0, 0, : self.tokens + 1].long()
            mask[:, -1] = 1  # the step's own token
        prepare_layers(due, self.tokens, mask)
        self.tokens += 1
        found = self.step(self.model, self.cache, *made.stepped(), False, {})
        assert found is not None  # it was not asked to choose
        return found.clone()  # a replay writes it where the last one did


@torch.inference_mode()
def own_steps(model: Any, prompts: Sequence[torch.Tensor], room: int) -> tuple[torch.Tensor, Steps]:
    """Logits `[B,V]` after prompts `[1,T]`, and the steps from there on, by the attention of a
    model without a policy. Each prompt is read alone, so that none is padded."""
    with own_attention(model):
        prefills = [model(ids, use_cache=True, logits_to_keep=1) for ids in prompts]
    logits = torch.cat([out.logits[:, -1] for out in prefills]).float()
    caches = [out[CACHE] for out in prefills]
    longest = max(ids.shape[1] for ids in prompts)
    slots = torch.arange(longest, device=logits.device)
    real = torch.stack([slots >= longest - ids.shape[1] for ids in prompts])
    config = model.config.get_text_config(decoder=True)
    cache = PlugCache.for_config(config, room, lambda _, length: PlugLayer(length))
    for index, layer in enumerate(cache.layers):
        _fill(layer, [each.layers[index] for each in caches], longest)
    return logits, Steps(model, cache, real, masked=True)


def _fill(layer: Any, rows: Sequence[Any], tokens: int) -> None:
    """Put rows that were read alone into one layer, padded on the left to `tokens`."""
    held = min(tokens, layer.max_cache_len)
    pairs = [[_padded(each, held) for each in (row.keys, row.values)] for row in rows]
    keys, values = (torch.cat(each) for each in zip(*pairs, strict=True))
    layer.update(keys, values)
    if isinstance(layer, SlidingLayer):
        layer.cumulative_length_int = tokens


def _padded(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """The last `tokens` of keys or values `[1,Hkv,T,D]`, with zeros before them where T is less."""
    last = states[:, :, -tokens:]
    return torch.nn.functional.pad(last, (0, 0, tokens - last.shape[2], 0))
