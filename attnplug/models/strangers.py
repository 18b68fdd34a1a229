"""Attention layers that have come to a model since a policy was applied to it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from attnplug.errors import UnsupportedCallError
from attnplug.models.autocast import autocast_dtype
from attnplug.models.hf import binding_of
from attnplug.models.layers import AttentionLayer, is_attention, slot_filled_twice
from attnplug.models.refusals import refuse_float64
from attnplug.models.walk import all_modules

Children = dict[str, nn.Module | None]  # of a module, by name


def refuse_strangers(model: nn.Module) -> None:
    """Raise UnsupportedCallError where an attention layer has come to the model since `apply`, or
    stands in another place, too. Its own attention would get masks and caches that are made for
    attnplug's, or fill another's part of a cache again."""
    for module in all_modules(model):
        if "layer_idx" not in vars(module):  # most, of which the rest would take a call's time
            continue
        if is_attention(module) and binding_of(module) is None:
            name = next(name for name, each in model.named_modules() if each is module)
            raise UnsupportedCallError(
                f"{name} was put there after apply, unknown to the policy. Call "
                "attnplug.remove(model) and apply again."
            )
    twice = slot_filled_twice(model)
    if twice:
        raise UnsupportedCallError(
            f"{twice} since apply. Call attnplug.remove(model) and apply again."
        )


@dataclass
class Way:
    """All steps from a module down to its attention layers: among which `children` each is found,
    under which `names`, which `modules` these are, and of how many children (`sizes`)."""

    children: list[Children] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def holds(self) -> bool:
        """Whether nothing has changed; every pass asks, so that it may take no time."""
        found = list(map(dict.get, self.children, self.names))
        return bool(found) and found == self.modules and self.sizes == list(map(len, self.children))

    def lead_from(self, module: nn.Module) -> bool:
        """Add the steps below a module; whether there are attention layers."""
        leads = False
        for name, child in module._modules.items():
            if child is not None and (binding_of(child) is not None or self.lead_from(child)):
                leads = True
                self.children.append(module._modules)
                self.names.append(name)
                self.modules.append(child)
                self.sizes.append(len(module._modules))
        return leads


class LayerWatch:
    """Looks for strangers among a module's attention layers. It walks over the module only where
    something has changed on the way from it to these layers since it looked last."""

    def __init__(self) -> None:
        self.way = Way()

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerWatch, ()  # a copy has other modules

    def look(self, module: nn.Module) -> bool:
        """`refuse_strangers`; whether something has changed."""
        if self.way.holds():
            return False
        self.way = Way()
        refuse_strangers(module)
        self.way.lead_from(module)
        return True


class DecoderHook:
    """Refuses a forward pass of a decoder before any of its layers has begun: one over layers that
    have come since `apply`, and one of layers with a policy that were cast to float64 since.
    Compiled code is not looked at."""

    def __init__(self) -> None:
        self.handle: RemovableHandle | None = None
        self.watch = LayerWatch()
        self.served: nn.Module | None = None  # the first attention layer with a policy

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"served": None}  # a copy has other modules

    @classmethod
    def on(cls, decoder: nn.Module) -> Self:
        """Attached to a decoder."""
        hook = cls()
        hook.handle = decoder.register_forward_pre_hook(hook._before_forward)
        return hook

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        return module

    def _before_forward(self, decoder: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if self.watch.look(decoder):
            self.served = next(
                (x for x in all_modules(decoder) if getattr(binding_of(x), "policy", None)), None
            )
        weight = None if self.served is None else next(self.served.parameters(), None)
        if weight is not None and autocast_dtype(weight.device) is None:
            refuse_float64(weight.dtype)


def hook_decoders(model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
    """Put hooks on the modules whose lists have these layers; on the model itself where a layer is
    in no list."""
    owners: dict[nn.Module, None] = {}
    for layer in layers:
        parts = layer.name.split(".")
        modules = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
        lists = (i for i, each in enumerate(modules) if isinstance(each, nn.ModuleList))
        owners[modules[max(next(lists, 0) - 1, 0)]] = None
    for owner in owners:
        DecoderHook.on(owner)


def unhook_decoders(model: nn.Module) -> None:
    """Take these hooks off all parts of a model, also off copies of parts."""
    for module in all_modules(model):
        for hook in list(module._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, DecoderHook):
                owner.detach_hook(module)
