"""The cache of a call whose prompt gives its only token, and that nobody sees again: layers that
keep the model's own keys and values, and copy none.

On a GPU the buffers of a short prompt take the host longer to make and to fill than its attention.
"""

from typing import Any, Self

import torch

from attnplug.models.cache import PlugCache, PlugLayer

# Rows times tokens of a prompt up to which keys and values are lent: those of some models are views
# of all that a fused projection has made, which longer prompts have no memory for in every layer.
MOST = 1024


class LentLayer(PlugLayer):
    """A layer that its prompt fills: `keys` and `values` are the tensors that it is given, and
    `count` is how many tokens these are. More do not fit, and a `GrowingCache` makes room for them
    as for those of any layer."""

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


def lend(cache: PlugCache, ids: torch.Tensor) -> None:
    """Have an empty cache keep the tensors of a prompt `[B,T]`, in layers that would hold nothing
    but keys and values, and where there are few."""
    if ids.numel() > MOST:
        return
    rows, tokens = ids.shape
    counts = torch.full((len(cache.layers),), tokens, dtype=torch.long, device=ids.device).unbind()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PlugLayer) and not layer.is_initialized:
            if type(layer) is PlugLayer or not layer.holds_more(rows, ids.device):
                cache.layers[index] = LentLayer.of(layer, counts[index], tokens)
