"""gvr's cache layer: keys, values, the keys again as INT8, and the last picks; and what it tells of
its last step."""

import dataclasses

import torch
from transformers import Cache

from attnplug.models.cache import PlugLayer
from attnplug.ops.gvr.score_tokens import quantize_keys


class GvrLayer(PlugLayer):
    """Keys, values, the keys again as INT8 `codes` `[B,Hkv,S,D]` and their `steps` `[B,Hkv,S]`
    float32, and the `picks` of the last step and of the one before, int32 `[B,Hkv,k]`.

    `update` writes keys and codes together, so that whatever happens to the one happens to the
    other. Picks are hints: they may be anything without harm.
    """

    codes: torch.Tensor
    steps: torch.Tensor
    picks: torch.Tensor
    before: torch.Tensor

    def __init__(self, max_cache_len: int, k: int, kept: int):
        super().__init__(max_cache_len=max_cache_len)
        self.k, self.kept = k, kept

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        assert self.keys is not None
        batch, heads, size, width = self.keys.shape
        device = self.keys.device
        none = torch.full((batch, heads, self.k), -1, dtype=torch.int32, device=device)
        self._bind(
            torch.zeros((batch, heads, size, width), dtype=torch.int8, device=device),
            torch.zeros((batch, heads, size), dtype=torch.float32, device=device),
            none,
            none.clone(),
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = super().update(key_states, value_states, *args, **kwargs)
        tokens = key_states.shape[2]
        places = torch.arange(tokens, device=self.device) + (self.cumulative_length - tokens)
        codes, steps = quantize_keys(key_states)
        self.codes.index_copy_(2, places, codes)
        self.steps.index_copy_(2, places, steps)
        return both

    def remember(self, picks: torch.Tensor) -> None:
        """Keep a step's picks, and those of the step before it."""
        self.before.copy_(self.picks)
        self.picks.copy_(picks)

    def overlap(self) -> float:
        """The share of the last step's picks that were picks of the step before; reads them on the
        host. NaN before the second step."""
        now, before = (x.flatten(0, 1).cpu() for x in (self.picks, self.before))
        shares = [
            torch.isin(a[a >= 0], b[b >= 0]).float().mean()
            for a, b in zip(now, before, strict=True)
        ]
        return float(torch.stack(shares).mean()) if (before >= 0).any() else float("nan")

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self.picks.fill_(-1)
            self.before.fill_(-1)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            for buffer in self._state():
                buffer.copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.is_initialized:
            self._bind(*(x.repeat_interleave(repeats, 0) for x in self._state()))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.is_initialized:
            self._bind(*(x[indices] for x in self._state()))

    def _state(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.steps, self.picks, self.before

    def _bind(self, codes, steps, picks, before) -> None:
        self.codes, self.steps, self.picks, self.before = codes, steps, picks, before
        if not torch.compiler.is_compiling():  # as the base does: it cannot be traced
            for buffer in self._state():
                torch._dynamo.mark_static_address(buffer)


@dataclasses.dataclass(frozen=True)
class Picks:
    """What the last step of one layer's cache read: `density` of the `tokens` that were there, and
    the share of its picks that were picks of the step before (NaN before the second step)."""

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
            rows.append(Picks(index, tokens, density, layer.overlap()))
    return rows
