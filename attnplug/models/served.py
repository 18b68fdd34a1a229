"""What has served each attention layer in the last call, and why dense did in its method's place.

Calls of eager code note it as they come. `generate` compiles and captures its steps, which run no
code of the host, so that it is asked what their methods will do with the cache that the prefill has
filled: that follows from shapes alone.
"""

from typing import Any

import torch

from attnplug.call import Served
from attnplug.models.hf import bindings_of
from attnplug.models.hook import state_of


def forget_served(model: torch.nn.Module) -> None:
    """Nothing has been served since."""
    for binding in bindings_of(model).values():
        binding.served.clear()


def note_steps(model: torch.nn.Module, cache: Any) -> None:
    """Note what is going to serve the steps over a cache that holds a prompt."""
    bound: dict[Any, Any] = bindings_of(model)
    for module, binding in bound.items():
        if binding.policy is not None:
            state = state_of(cache, module.layer_idx)
            binding.served["decode"] = binding.policy.serves_steps(state)


def last_served(model: torch.nn.Module) -> dict[int, dict[str, Served]]:
    """By the layer's index and by "prefill" and "decode", where anything came."""
    bound: dict[Any, Any] = bindings_of(model)
    found = {module.layer_idx: dict(binding.served) for module, binding in bound.items()}
    return {layer: served for layer, served in found.items() if served}
