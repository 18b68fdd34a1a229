"""Room for the next turn: the cache that generate prepares grows where a later call needs more, as
transformers' dynamic cache does. A cache of attnplug.make_cache keeps the length it was made with.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.cache import MakeLayer, PlugCache, PlugLayer
from attnplug.models.edits import first_filled
from attnplug.models.layers import positions
from attnplug.models.static import static_cache

LEAST_GROWTH = 64  # tokens: an assistant model asks for a few more in every round
LONGEST = 1 << 20  # tokens that a model reads whose config does not say how many
SLACK = 2  # times that: calls a little too long for a model decode as others


def first_room(config: PreTrainedConfig, generation: Any, length: int) -> int:
    """How many tokens a cache has room for at first where a call may come to `length`: all of them,
    unless the call asks for far more new tokens than the model reads. Such a call has no limit in
    mind, and its cache grows as the answer does."""
    reads, new = positions(config) or LONGEST, generation.max_new_tokens
    new = length if new is None else min(new, length)
    return length if new <= SLACK * reads else length - new + reads


@dataclass(frozen=True)
class Growth:
    """What makes longer layers: the config that the model's static caches are made of, and the
    maker of PlugLayers."""

    config: PreTrainedConfig
    make_layer: MakeLayer

    def layer(self, index: int, max_length: int) -> PlugLayer:
        """A layer of a length that the next call, or the next turn, does not have."""
        layer = self.make_layer(index, max_length)
        layer.any_length = True
        return layer


class GrowingCache(PlugCache):
    """A PlugCache that gets longer layers where tokens would not fit.

    `generate` reserves what a call may come to before it begins, and a forward pass of eager code
    what it needs. Compiled and captured code cannot grow a cache: it has the addresses of the
    buffers, so that it must be compiled or captured anew afterwards.
    """

    growth: Growth | None = None  # None: the length is fixed

    @classmethod
    def begin(cls, cache: StaticCache, growth: Growth) -> "GrowingCache":
        """Of a fresh static cache, as `from_static`."""
        made = cls.from_static(cache, growth.layer)
        made.growth = growth
        return made

    def prepare(self, tokens: int) -> None:
        """Make room for a forward pass of `tokens` tokens where the host knows that they do not
        fit."""
        layer = first_filled(layer for layer in self.layers if isinstance(layer, PlugLayer))
        length = None if layer is None else layer.known_length(tokens)
        if length is not None:
            self.reserve(length + tokens)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all, for a quarter more than there was at least: many
        small turns then copy the cache a few times only. Reads the number of tokens on the host.

        Raises UnsupportedCallError where layers keep more than keys and values, or where a sliding
        window has forgotten what a longer one would hold.
        """
        had = self.room
        if had is None or length <= had:
            return
        if self.growth is None or not all(map(_may_grow, self.layers)):
            super().reserve(length)
            return
        size = max(length, had + max(had // 4, LEAST_GROWTH))
        static = static_cache(self.growth.config, size)
        longer = PlugCache.from_static(static, self.growth.layer)
        pairs = list(zip(self.layers, longer.layers, strict=True))
        windows = [_longer_window(*pair) for pair in pairs]  # raises before anything has moved
        for index, window in enumerate(windows):  # one by one: an old layer's memory is freed
            old, new = pairs.pop(0)
            if isinstance(old, PlugLayer) and isinstance(new, PlugLayer):
                _move(old, new)
                self.layers[index] = new
            elif window is not None:
                self.layers[index] = window


def _may_grow(layer: Any) -> bool:
    """Other static layers keep more than keys and values; layers that are not static have no
    length."""
    movable = isinstance(layer, (PlugLayer, StaticSlidingWindowLayer))
    return movable or not isinstance(layer, StaticLayer)


def _move(old: PlugLayer, new: PlugLayer) -> None:
    """Give an empty layer the tokens of another, in the precision that they have."""
    device = old._buffers()[0].device.type if old.is_initialized else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        new.adopt(old)
        if old.is_initialized:
            new.continue_from(old)


def _longer_window(old: Any, new: Any) -> StaticSlidingWindowLayer | None:
    """A window that was cut to a short cache, with more of its own size; None of another layer,
    or of one that has its whole size."""
    if not isinstance(old, StaticSlidingWindowLayer) or new.max_cache_len == old.max_cache_len:
        return None
    tokens = old.cumulative_length_int
    if tokens > old.max_cache_len:
        raise UnsupportedCallError(
            f"a sliding window of {old.max_cache_len} tokens, cut to a short cache, has rolled on "
            f"to {tokens}: what it forgot cannot be had back. Give a fresh cache."
        )
    if old.is_initialized:
        assert old.keys is not None and old.values is not None
        new.update(old.keys[:, :, :tokens], old.values[:, :, :tokens])
    return new
