"""Attention layers that have come to a model since a policy was applied to it."""

import torch

from attnplug.errors import UnsupportedCallError
from attnplug.models.hf import binding_of
from attnplug.models.layers import is_attention
from attnplug.models.walk import all_modules


def refuse_strangers(model: torch.nn.Module) -> None:
    """Raise UnsupportedCallError where an attention layer has come to the model since `apply`. Its
    own attention would get masks and caches that are made for attnplug's."""
    for module in all_modules(model):
        if "layer_idx" not in vars(module):  # most, of which the rest would take a call's time
            continue
        if is_attention(module) and binding_of(module) is None:
            name = next(name for name, each in model.named_modules() if each is module)
            raise UnsupportedCallError(
                f"{name} was put there after apply, unknown to the policy. Call "
                "attnplug.remove(model) and apply again."
            )
