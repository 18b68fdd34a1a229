"""gvr: decode that reads the best tokens, found exactly among all of them at each step.

A step scores every cached token of each KV head from INT8 keys, takes the exact top k of these
scores (Guess-Verify-Refine, which starts from the picks of the step before), and attends to the
sink, the window and the picks:

    keep = tokens 0..sink-1, the last `window`, and the top k of the others by max_g q[g] . k

Source: "Guess-Verify-Refine" (shared/papers/002); token selection as in DeepSeek's sparse
attention, with the model's own keys in place of a trained indexer. Prefill is another phase's
business.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from transformers import Cache

from attnplug.models.cache import PlugLayer
from attnplug.ops import gather_tokens_attention, score_tokens, topk
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.ops.gvr.topk import MAX_K
from attnplug.policies.base import AttentionCall, LayerShape, Phase, check_option
from attnplug.policies.dense import Dense

# A cache smaller than this many times the tokens that a step keeps is read whole, and one below so
# many tokens in any case: on an H200 a step was slower than dense at 32K and faster at 128K, and
# the two lines cross at about 64K.
CROSSOVER_FACTOR = 4
CROSSOVER_FLOOR = {"cuda": 98304, "cpu": 8192}


@dataclasses.dataclass(frozen=True)
class Gvr(Phase):
    """Token-sparse decode with an exact selection.

    k: tokens that each KV head picks at each step. sink: first tokens that are always read.
    window: last tokens that are always read, the query's own included. min_tokens: caches below so
    many tokens are read whole, by `dense`; None is a multiple of what a step keeps, but not below a
    floor for the kind of device.
    """

    k: int = 2048
    sink: int = 16
    window: int = 256
    min_tokens: int | None = None

    name: ClassVar[str] = "gvr"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        def check(option: str, valid: bool, needed: str) -> None:
            check_option(self.name, option, getattr(self, option), valid, needed)

        for option in ("k", "sink", "window"):
            check(option, type(getattr(self, option)) is int, "an integer")
        check("k", 1 <= self.k <= MAX_K, f"1 to {MAX_K}")
        check("sink", self.sink >= 0, "at least 0")
        check("window", self.window >= 1, "at least 1, the query's own token")
        tokens = self.min_tokens
        valid = tokens is None or (type(tokens) is int and tokens >= 0)
        check("min_tokens", valid, "None or an integer, at least 0")

    @property
    def kept(self) -> int:
        """The most tokens that a step reads, of a row that is long enough."""
        return self.sink + self.window + self.k

    def crossover(self, device: torch.device) -> int:
        """Tokens of a cache below which dense attention runs on such a device."""
        if self.min_tokens is not None:
            return self.min_tokens
        kind = "cpu" if device.type == "cpu" else "cuda"
        return max(CROSSOVER_FLOOR[kind], CROSSOVER_FACTOR * self.kept)

    def note(self, shape: LayerShape) -> str:
        tokens = self.crossover(shape.device)
        small = f" below {tokens:,} tokens and in those" if tokens else ""
        density = f", {self.kept / 131072:.1%} of 131,072"
        return (
            f"reads {self.kept:,} tokens{density}, and INT8 keys to choose them; dense in caches"
            f"{small} that attnplug did not make for it"
        )

    def cache_layer(self, max_length: int) -> "GvrLayer":
        return GvrLayer(max_length, self.k, self.kept)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        state = call.state
        if call.k.shape[2] < self.crossover(call.q.device) or not self._serves(state, call.k):
            return Dense().attend(call)
        assert isinstance(state, GvrLayer)
        options: dict[str, Any] = {
            "sink": self.sink,
            "window": self.window,
            "lengths": call.lengths,
            "start": call.first_key,
            "key_mask": call.key_mask,
        }
        rows = call.lengths
        if rows is not None and rows.shape[0] > 1:  # topk's rows are (sequence, KV head) pairs
            rows = rows.repeat_interleave(call.k.shape[1])
        # Not by the softcap: it changes no order.
        scores = score_tokens(call.q, state.codes, state.steps, **options)
        # Where a row has fewer than k others, -inf is picked too; attention passes over those.
        picks, _ = topk(scores, self.k, hint=state.picks.flatten(0, 1), lengths=rows)
        picks = picks.view(state.picks.shape)
        out, _ = gather_tokens_attention(
            call.q,
            call.k,
            call.v,
            picks.unsqueeze(2),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            **options,
        )
        state.remember(picks)  # last: the kernels before it start one another early
        return out

    def _serves(self, state: object, k: torch.Tensor) -> bool:
        """Whether the layer's codes are those of these keys: the layer is one that this method
        made, and not lent to another layer's keys (Gemma 3n shares some)."""
        return isinstance(state, GvrLayer) and state.keys is k and state.k == self.k


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
