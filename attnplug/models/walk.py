"""All modules of a model, and where its tensors are, without names: torch builds a name for each
module that it walks past, and `generate` looks at all of them several times a call."""

import torch

MOVING_ROPE = ("dynamic", "longrope")


def all_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model.modules()`, each once, in that order."""
    found: dict[torch.nn.Module, None] = {}
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
    return list(found)


def devices_of(model: torch.nn.Module) -> set[torch.device]:
    """Where parameters and buffers are."""
    tensors: list[torch.Tensor | None] = []
    for module in all_modules(model):
        tensors.extend(module._parameters.values())
        if module._buffers:
            tensors.extend(module._buffers.values())
    return {tensor.device for tensor in tensors if tensor is not None}


def has_moving_rope(module: torch.nn.Module) -> bool:
    """Whether a rotary embedding's frequencies depend on the longest position that it is given."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(name, str) and name in MOVING_ROPE for name in kinds)
