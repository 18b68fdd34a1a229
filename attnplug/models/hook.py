"""Hands an attention layer its cache state.

transformers calls the attention function without the cache, but everything in the attention
module's keyword arguments reaches it. `PolicyHook` adds this layer's cache object there, and how
many tokens a forward pass puts into an empty cache. It is an accelerate ModelHook attached by the
module's own forward pre-hook, because `accelerate.hooks.add_hook_to_module` replaces hooks that
others attached and `remove_hook_from_module` removes them.
"""

from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch.utils.hooks import RemovableHandle
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

from attnplug.errors import UnsupportedCallError
from attnplug.models.cache import PlugLayer
from attnplug.models.edits import check_room
from attnplug.models.hf import SERVES, plug_mask
from attnplug.models.names import (
    ATTENTION_NAMES,
    CACHE_ARGUMENTS,
    FRESH_ARGUMENT,
    STATE_ARGUMENT,
    reads_an_encoder,
)
from attnplug.models.refusals import refuse_layer
from attnplug.models.sync import may_read
from attnplug.models.torn import (
    Pass,
    layer_of,
    refuse_mask,
    refuse_other_dtype,
    refuse_rows,
    refuse_torn,
    tokens_in,
)


class PolicyHook(ModelHook):
    """Adds `attnplug_state`, the layer's cache object, and `attnplug_fresh` to the module's keyword
    arguments: how many tokens this pass puts into a static cache that was empty, 0 if it was not or
    nobody can tell. Only the first layer that runs asks the device for it, once a prefill: a sync
    in every layer would keep the host from running ahead."""

    def __init__(self, layer_index: int):
        self.layer_index = layer_index
        self.handle: RemovableHandle | None = None

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.handle = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        return module

    def pre_forward(
        self, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._before_forward(module, args, kwargs)

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = _cache_in(kwargs)
        if cache is not None and not _is_cross_attention(module, kwargs):
            self._refuse_other_slot(module)
            hidden = _hidden_states(args, kwargs)
            refuse_layer(module, hidden, kwargs)
            state = kwargs[STATE_ARGUMENT] = state_of(cache, self.layer_index)
            tokens = hidden.shape[1]
            if tokens == 1 and self._may_defer(module, cache, state):
                state.defer_next = True
            if not torch.compiler.is_compiling():
                fresh = self._begin(module, cache, hidden, kwargs.get("attention_mask"))
                if tokens > 1:
                    kwargs[FRESH_ARGUMENT] = fresh
        return args, kwargs

    def is_astray(self, module: torch.nn.Module) -> bool:
        """Whether the module fills another layer of the cache than when the policy was applied."""
        return bool(module.layer_idx != self.layer_index)

    def _refuse_other_slot(self, module: torch.nn.Module) -> None:
        """Raise where the module now fills another layer of the cache than when `apply` chose what
        each of them keeps: layers were taken out, added or put in another order since."""
        if self.is_astray(module):
            raise UnsupportedCallError(
                f"the attention of layer {module.layer_idx} was that of layer {self.layer_index} "
                "when the policy was applied. Call attnplug.remove(model) and apply again."
            )

    def _begin(self, module: torch.nn.Module, cache: Cache, hidden: torch.Tensor, mask: Any) -> int:
        """Refuse what the layer's cache cannot take, before it takes any; how many tokens of the
        pass go into an empty cache."""
        now = self._pass(cache, hidden)
        now.told.add(self.layer_index)
        if getattr(module, "is_kv_shared_layer", False):  # it reads what another one has taken
            return now.fresh
        layer = layer_of(cache, self.layer_index)
        known = isinstance(layer, CacheLayerMixin)
        if now.held != 0 or not known or layer.is_initialized:  # else both are empty
            refuse_torn(cache, self.layer_index, now)
            if known:
                refuse_rows(layer, len(hidden))
        if not (known and isinstance(mask, torch.Tensor)):
            return now.fresh
        if SERVES.get(_attention_of(module) or "", (None, None))[1] is plug_mask:
            refuse_mask(mask, layer, hidden, bool(now.fresh))
        return now.fresh

    def _pass(self, cache: Cache, hidden: torch.Tensor) -> Pass:
        """The pass that runs. A layer that was told before is in a new one, and one that is given
        the last of its tokens alone (Gemma 4) is not."""
        before: Pass | None = vars(cache).get(FRESH_ARGUMENT)
        tokens = hidden.shape[1]
        if before is not None and before.tokens >= tokens and self.layer_index not in before.told:
            return before
        held = tokens_in(layer_of(cache, self.layer_index))
        now = Pass(tokens, hidden.dtype, self.layer_index, held)
        refuse_other_dtype(before, now, hidden.device)
        now.fresh = tokens if tokens > 1 and _is_empty(cache, tokens, self.layer_index) else 0
        vars(cache)[FRESH_ARGUMENT] = now
        return now

    def _may_defer(self, module: torch.nn.Module, cache: Cache, state: Any) -> bool:
        """Whether the layer's cache may leave the write of its token to the attention that follows:
        the layer is the module's own, and attnplug's attention gets the buffers themselves."""
        if not (isinstance(state, PlugLayer) and state.defers_write and state.exposes_buffers):
            return False
        own = self.layer_index < len(cache.layers) and cache.layers[self.layer_index] is state
        return own and _attention_of(module) in ATTENTION_NAMES


def hooks_of(module: torch.nn.Module) -> list[PolicyHook]:
    """The policy hooks on a module, also where it is a copy that was made with its hooks."""
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, PolicyHook)]


def _cache_in(kwargs: dict[str, Any]) -> Cache | None:
    """The cache of the tokens themselves: of a decoder that reads an encoder, a part of it."""
    for name in CACHE_ARGUMENTS:
        cache = kwargs.get(name)
        if isinstance(cache, EncoderDecoderCache):
            return cache.self_attention_cache
        if isinstance(cache, Cache):
            return cache
    return None


def _is_cross_attention(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether an attention is called as cross-attention: its keys are an encoder's, whatever the
    cache holds of the tokens. A causal one may be given the encoder's states, but reads none."""
    return reads_an_encoder(kwargs) and not getattr(module, "is_causal", True)


def _attention_of(module: torch.nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _is_full_static(layer: Any) -> bool:
    return isinstance(layer, StaticLayer) and not isinstance(layer, StaticSlidingWindowLayer)


def state_of(cache: Cache, index: int) -> Any:
    """The layer's cache object. A layer that shares another's keys (Gemma 3n) has none of its own:
    it gets that of the full-attention layer before it, whose length is the same."""
    layer = layer_of(cache, index)
    if isinstance(layer, CacheLayerMixin):
        return layer
    before = [layer for layer in cache.layers[:index] if _is_full_static(layer)]
    return before[-1] if before else cache


def _is_empty(cache: Cache, tokens: int, index: int) -> bool:
    """Whether a static cache holds no token yet, as the pass comes to the layer `index`; False
    where asking would sync under capture.

    Asks that layer: those before it may have run in compiled code, unseen, and may have taken the
    tokens. A rolling window that has begun stops counting on the device once it is full, so that a
    full-attention layer is asked. Raises UnsupportedCallError if the new tokens do not fit.
    """
    own = layer_of(cache, index)
    full = (layer for layer in (own, *cache.layers) if _is_full_static(layer))
    layer: Any = next(full, None)
    if layer is None:
        return False
    length = 0
    begun = not isinstance(own, StaticSlidingWindowLayer) or tokens_in(own) != 0
    if layer.is_initialized and begun:
        if not may_read(layer.cumulative_length):
            return False
        length = int(layer.cumulative_length)
    check_room(length, tokens, layer.max_cache_len)
    return length == 0
