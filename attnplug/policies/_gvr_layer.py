"""gvr's cache layer: keys, values, the keys again as INT8, and with a hint the last picks; and what
it tells of its last step."""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from transformers import Cache

from attnplug.models.cache import PlugLayer, RowBuffers
from attnplug.ops.gvr.score_tokens import quantize_keys


class LastPicks(NamedTuple):
    """The picks of the last step and of the one before, int32 `[B,Hkv,k]`; -1: none. They are
    hints, and may be anything without harm."""

    picks: torch.Tensor
    before: torch.Tensor

    def remember(self, picks: torch.Tensor) -> None:
        """Keep a step's picks, and those of the step before it."""
        self.before.copy_(self.picks)
        self.picks.copy_(picks)

    def overlap(self) -> float:
        """The share of the last picks that were picks before; reads them on the host. NaN before
        the second step."""
        now, before = (x.flatten(0, 1).cpu() for x in self)
        shares = [
            torch.isin(a[a >= 0], b[b >= 0]).float().mean()
            for a, b in zip(now, before, strict=True)
        ]
        return float(torch.stack(shares).mean()) if (before >= 0).any() else float("nan")


class GvrLayer(PlugLayer):
    """Keys, values, the keys again as INT8 `codes` `[B,Hkv,S,D]` and their `scales` `[B,Hkv,S]`
    float32, and with `hint` the `last` picks.

    `update` writes keys and codes together, so that whatever happens to the one happens to the
    other.
    """

    row_buffers: ClassVar[RowBuffers] = {"codes": None, "scales": None, "last": -1}

    codes: torch.Tensor
    scales: torch.Tensor
    last: LastPicks | None = None

    def __init__(self, max_cache_len: int, k: int, kept: int, hint: bool):
        super().__init__(max_cache_len=max_cache_len)
        self.k, self.kept, self.hint = k, kept, hint

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.keys is not None
        batch, heads, size, width = self.keys.shape
        device = self.keys.device
        self.bind_rows(
            codes=torch.zeros((batch, heads, size, width), dtype=torch.int8, device=device),
            scales=torch.zeros((batch, heads, size), dtype=torch.float32, device=device),
        )
        if self.hint:
            none = torch.full((batch, heads, self.k), -1, dtype=torch.int32, device=device)
            self.bind_rows(last=LastPicks(none, none.clone()))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = super().update(key_states, value_states, *args, **kwargs)
        tokens = key_states.shape[2]
        places = torch.arange(tokens, device=self.device) + (self.cumulative_length - tokens)
        codes, scales = quantize_keys(key_states)
        self.codes.index_copy_(2, places, codes)
        self.scales.index_copy_(2, places, scales)
        return both

    @property
    def crops_exactly(self) -> bool:
        return self.last is None  # codes of a token that comes again are written again

    def continue_from(self, source: PlugLayer) -> None:
        theirs = source.last if isinstance(source, GvrLayer) else None
        if self.last is None or theirs is None or theirs.picks.shape != self.last.picks.shape:
            return
        for mine, other in zip(self.last, theirs, strict=True):
            mine.copy_(other)


@dataclasses.dataclass(frozen=True)
class Picks:
    """What the last step of one layer's cache read: `density` of the `tokens` that were there, and
    the share of its picks that were picks of the step before (NaN before the second step, and
    without `hint`)."""

    layer: int
    tokens: int
    density: float
    overlap: float


def picks(cache: Cache) -> list[Picks]:
    """Of every layer of gvr's that holds tokens. Reads them on the host: not for a step."""
    rows = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GvrLayer) and layer.is_initialized:
            tokens = int(layer.cumulative_length)
            density = min(1.0, layer.kept / max(1, tokens))
            overlap = float("nan") if layer.last is None else layer.last.overlap()
            rows.append(Picks(index, tokens, density, overlap))
    return rows
