"""What has served each attention layer in the last call, and why dense did in its method's place.

Calls of eager code note it as they come. `generate` compiles and captures its steps, which run no
code of the host, so that it is asked what their methods will do with the cache that the prefill has
filled: that follows from shapes alone.
"""

from collections.abc import Iterator
from typing import Any

import torch

from attnplug.models.hf import BINDING, Binding, Served
from attnplug.models.hook import state_of


def _bindings(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Binding[Any]]]:
    for module in model.modules():
        if BINDING in vars(module):
            yield module, vars(module)[BINDING]


def forget_served(model: torch.nn.Module) -> None:
    """Nothing has been served since."""
    for _, binding in _bindings(model):
        binding.served.clear()


def note_steps(model: torch.nn.Module, cache: Any) -> None:
    """Note what is going to serve the steps over a cache that holds a prompt."""
    for module, binding in _bindings(model):
        if binding.policy is not None:
            state = state_of(cache, int(module.layer_idx))  # pyright: ignore[reportArgumentType]
            binding.served["decode"] = binding.policy.serves_steps(state)


def last_served(model: torch.nn.Module) -> dict[int, dict[str, Served]]:
    """By the layer's index and by "prefill" and "decode", where anything came."""
    found = {}
    for module, binding in _bindings(model):
        if binding.served:
            found[int(module.layer_idx)] = dict(binding.served)  # pyright: ignore[reportArgumentType]
    return found
