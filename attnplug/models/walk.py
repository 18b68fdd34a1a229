"""All modules of a model, and where its tensors are, without names: torch builds a name for each
module that it walks past, and `generate` looks at all of them several times a call."""

import torch


def all_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model.modules()`, each once, in that order."""
    found: dict[torch.nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            parts = module._modules.values()
            waiting.extend(part for part in reversed(parts) if part is not None)
    return list(found)


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """Where parameters and buffers are."""
    found: set[torch.device] = set()
    for module in all_modules(model):
        for tensors in (module._parameters, module._buffers):
            found.update(tensor.device for tensor in tensors.values() if tensor is not None)
    return found
