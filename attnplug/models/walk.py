"""All modules and tensors of a model, without their names: torch builds a name for each module that
it walks past, and `generate` looks at all of them several times a call."""

from collections.abc import Iterator

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


def all_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, a shared one as often as it is there."""
    for module in all_modules(model):
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor
