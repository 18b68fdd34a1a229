"""gvr's cache layer: keys, values, and the keys again as INT8; and how much of them its last step
read."""

import dataclasses
from typing import ClassVar

import torch
from transformers import Cache

from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.models.watched import Serves
from attnplug.ops.gvr.score_tokens import quantize_keys


class GvrLayer(PlugLayer):
    """Keys, values, the keys again as INT8 `codes` `[B,Hkv,S,D]` and their `scales` `[B,Hkv,S]`
    float32.

    `update` writes keys and codes together, so that whatever happens to the one happens to the
    other. Caches that the method does not serve (`serves`: rows, slots, device) have no codes:
    dense reads them whole.
    """

    row_buffers: ClassVar[RowBuffers] = {"codes": None, "scales": None}

    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def __init__(
        self,
        max_cache_len: int,
        k: int,
        kept: int,
        serves: Serves,
    ):
        super().__init__(max_cache_len=max_cache_len)
        self.k, self.kept, self.serves = k, kept, serves

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.keys is not None
        batch, heads, size, width = self.keys.shape
        device = self.keys.device
        if not self.holds_more(batch, device):
            self.codes = self.scales = None  # of other rows, after a reset
            return
        self.bind_rows(
            codes=torch.zeros((batch, heads, size, width), dtype=torch.int8, device=device),
            scales=torch.zeros((batch, heads, size), dtype=torch.float32, device=device),
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = super().update(key_states, value_states, *args, **kwargs)
        if self.codes is None or self.scales is None:
            return both
        tokens = key_states.shape[2]
        places = torch.arange(tokens, device=self.device) + (self.cumulative_length - tokens)
        codes, scales = quantize_keys(key_states)
        self.codes.index_copy_(2, places, codes)
        self.scales.index_copy_(2, places, scales)
        return both

    @property
    def crops_exactly(self) -> bool:
        return True  # codes of a token that comes again are written again


@dataclasses.dataclass(frozen=True)
class Picks:
    """What the last step of one layer's cache read: `density` of the `tokens` that were there."""

    layer: int
    tokens: int
    density: float


def picks(cache: Cache) -> list[Picks]:
    """Of every layer of gvr's that holds tokens and their codes. Reads them on the host: not for a
    step."""
    rows = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GvrLayer) and layer.codes is not None:
            tokens = int(layer.cumulative_length)
            density = min(1.0, layer.kept / max(1, tokens))
            rows.append(Picks(index, tokens, density))
    return rows
