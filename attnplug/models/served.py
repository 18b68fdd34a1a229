"""What has served each attention layer in the last call, and why dense did in its method's place.

Calls of eager code note it as they come. `generate` compiles and captures its steps, which run no
code of the host, so that it is asked what their methods will do with the cache that the prefill has
filled: that follows from shapes alone.
"""

from collections.abc import Iterable
from typing import Any

import torch

from attnplug.call import Served
from attnplug.models.hf import Binding, binding_of, bindings_of
from attnplug.models.hook import state_of


def forget_served(bound: Iterable[torch.nn.Module]) -> None:
    """Nothing has been served since."""
    for module in bound:
        binding = binding_of(module)
        if binding is not None:
            binding.served.clear()


def note_steps(bound: Iterable[Any], cache: Any) -> None:
    """Note what is going to serve the steps over a cache that holds a prompt."""
    for module in bound:
        binding: Binding[Any] | None = binding_of(module)
        if binding is not None and binding.policy is not None:
            state = state_of(cache, module.layer_idx)
            binding.served["decode"] = binding.policy.serves_steps(state)


def last_served(model: torch.nn.Module) -> dict[int, dict[str, Served]]:
    """By the layer's index and by "prefill" and "decode", where anything came."""
    bound: dict[Any, Any] = bindings_of(model)
    found = {module.layer_idx: dict(binding.served) for module, binding in bound.items()}
    return {layer: served for layer, served in found.items() if served}
