"""Hands an attention layer its cache state.

transformers calls the attention function without the cache, but everything in the attention
module's keyword arguments reaches it. `PolicyHook` adds this layer's cache object there, and
whether the cache was empty before this forward pass. It is an accelerate ModelHook attached by the
module's own forward pre-hook, because `accelerate.hooks.add_hook_to_module` replaces hooks that
others attached and `remove_hook_from_module` removes them.
"""

from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch.utils.hooks import RemovableHandle
from transformers import Cache
from transformers.cache_utils import StaticLayer

STATE_ARGUMENT = "attnplug_state"
FRESH_ARGUMENT = "attnplug_fresh"


class PolicyHook(ModelHook):
    """Adds `attnplug_state`, the layer's cache object, and `attnplug_fresh` to the module's keyword
    arguments. Only the model's first layer asks the device for the latter, once a prefill: a
    sync in every layer would keep the host from running ahead."""

    def __init__(self, layer_index: int, *, first: bool):
        self.layer_index = layer_index
        self.first = first
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
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Cache) and self.layer_index < len(cache.layers):
            state = cache.layers[self.layer_index]
            kwargs[STATE_ARGUMENT] = state
            if not torch.compiler.is_compiling() and _hidden_states(args, kwargs).shape[1] > 1:
                if self.first:
                    vars(cache)[FRESH_ARGUMENT] = _is_empty(state)
                kwargs[FRESH_ARGUMENT] = vars(cache).get(FRESH_ARGUMENT, False)
        return args, kwargs

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.pre_forward(module, *args, **kwargs)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _is_empty(state: Any) -> bool:
    """Whether a static layer holds no token yet; False where asking would sync under capture."""
    if not isinstance(state, StaticLayer):
        return False
    if not state.is_initialized:
        return True
    length = state.cumulative_length
    if length.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return int(length) == 0
