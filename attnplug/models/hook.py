"""Hands an attention layer its cache state.

transformers calls the attention function without the cache, but everything in the attention
module's keyword arguments reaches it. `PolicyHook` adds this layer's cache object there. It is an
accelerate ModelHook attached by the module's own forward pre-hook, because
`accelerate.hooks.add_hook_to_module` replaces hooks that others attached and
`remove_hook_from_module` removes them.
"""

from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch.utils.hooks import RemovableHandle
from transformers import Cache

STATE_ARGUMENT = "attnplug_state"


class PolicyHook(ModelHook):
    """Adds `attnplug_state`, the layer's cache object, to the module's keyword arguments."""

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
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Cache) and self.layer_index < len(cache.layers):
            kwargs[STATE_ARGUMENT] = cache.layers[self.layer_index]
        return args, kwargs

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.pre_forward(module, *args, **kwargs)
