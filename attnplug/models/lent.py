"""The cache of a call whose prompt gives its only token, and that nobody sees again: layers that
keep the model's own keys and values, and copy none.

On a GPU the buffers of a short prompt take the host longer to make and to fill than its attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.growth import GrowingCache, Growth
from attnplug.models.loop_calls import DEVICES, MODES

# The largest prompt, in rows times tokens, whose keys and values are lent. In some models they are
# views of a whole fused projection, and a longer prompt has no memory for that in every layer.
MOST = 1024


class LentLayer(PlugLayer):
    """A layer that its prompt fills: `keys` and `values` are the tensors that it is given, and
    `count` is how many tokens these are. There is no room for further tokens; a `GrowingCache`
    makes some when they come, as it does in any layer."""

    count: torch.Tensor

    @classmethod
    def of(cls, layer: PlugLayer, count: torch.Tensor, tokens: int) -> Self:
        """In the place of an empty layer. `count` is `tokens` on the device."""
        made = cls.__new__(cls)
        vars(made).update(vars(layer), count=count, max_cache_len=tokens)
        return made

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_initialized or key_states.shape[2] != self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values, self.device = key_states, value_states, key_states.device
        self.cumulative_length = self.count.to(self.device)
        self.counted, self.is_initialized = self.max_cache_len, True
        return key_states, value_states

    def known_length(self, tokens: int) -> int:
        return self.counted

    def flush(self) -> None:
        """No token is pending, and nothing is kept beside the tokens."""

    def note_writes(self) -> None:
        """See `flush`."""


@dataclass(frozen=True)
class Prompt:
    """One that gives a call's only token, of a call whose cache nobody sees again."""

    rows: int
    tokens: int
    device: torch.device

    @classmethod
    def of(cls, config: Any, mode: Any, rows: int, tokens: int, device: Any) -> Self | None:
        """The prompt of the call that `generate` prepares, where it brings `rows` rows of `tokens`
        tokens into the cache and gives the only new token; else None."""
        kept = config.return_dict_in_generate or config.is_assistant
        if kept or config.max_new_tokens != 1 or rows * tokens > MOST:
            return None
        if mode not in MODES or config.prefill_chunk_size is not None:
            return None
        if device.type not in DEVICES:  # such as meta, where weights are elsewhere
            return None
        return cls(rows, tokens, device)

    def counts(self, layers: int) -> Sequence[torch.Tensor]:
        """The number of tokens on the device, for each layer one that is its own."""
        size = (layers,)
        return torch.full(size, self.tokens, dtype=torch.long, device=self.device).unbind()

    def lend_to(self, cache: PlugCache) -> None:
        """Have an empty cache keep the prompt's tensors in layers that would hold nothing but keys
        and values."""
        counts = self.counts(len(cache.layers))
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PlugLayer) and not layer.is_initialized:
                if type(layer) is PlugLayer or not layer.holds_more(self.rows, self.device):
                    cache.layers[index] = LentLayer.of(layer, counts[index], self.tokens)

    def cache_like(self, cache: Any, growth: Growth) -> GrowingCache | None:
        """A lent cache in the place of an empty dynamic one, of which all layers are full attention
        and would hold nothing but keys and values; else None."""
        if type(cache) is not DynamicCache or {*map(type, cache.layers)} != {DynamicLayer}:
            return None
        maker: Any = growth.make_layer
        if maker.holds_more(self.rows, self.tokens, self.device):
            return None
        like = PlugLayer(max_cache_len=self.tokens)
        counts = self.counts(len(cache.layers))
        made = GrowingCache(layers=[LentLayer.of(like, count, self.tokens) for count in counts])
        made.growth = growth
        return made
