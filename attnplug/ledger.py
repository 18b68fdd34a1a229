"""What `apply` did to a model, how that is undone, and the layers of other models that have come
with a policy of theirs."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from attnplug.errors import NotAppliedError
from attnplug.models.cache import MakeLayer
from attnplug.models.generate import LONGEST, unbind_generate
from attnplug.models.hf import BINDING, bindings_of
from attnplug.models.hook import PolicyHook, hooks_of
from attnplug.models.indexed import unbind_indexed
from attnplug.models.instance_method import InstanceMethod, take_methods
from attnplug.models.latents import unbind_latents
from attnplug.models.strangers import unhook_decoders
from attnplug.models.switch import SwitchedConfigs, give_stock_configs
from attnplug.reports import Report

STATE = "_attnplug_state"


@dataclass
class Ledger:
    """What `apply` did to a model, so that `remove` can undo exactly that."""

    report: Report
    make_layer: MakeLayer
    bound: list[torch.nn.Module]
    hooks: list[tuple[PolicyHook, torch.nn.Module]] = field(default_factory=list)
    indexed: list[torch.nn.Module] = field(default_factory=list)
    latent: list[torch.nn.Module] = field(default_factory=list)
    configs: SwitchedConfigs | None = None
    compiled: dict[str, Any] = field(default_factory=dict)

    def undo(self, target: PreTrainedModel) -> None:
        """Take off the model what it has of this, also where `apply` has come only so far. Where an
        interrupt ends it, `remove` goes on with it: each part may be undone again."""
        vars(target)[STATE] = self
        unbind_generate(target)
        take_compiled(target)
        vars(target).update(self.compiled)
        if self.configs is not None:
            self.configs.restore(target)
        copies = [x for x in bindings_of(target) if x not in self.bound]  # layers copied since
        for module in [*self.indexed, *_like(self.indexed, copies)]:
            unbind_indexed(module)
        for module in [*self.latent, *_like(self.latent, copies)]:
            unbind_latents(module)
        for module in [*self.bound, *copies]:
            for hook in hooks_of(module):
                hook.detach_hook(module)
        unhook_decoders(target)
        for module in [*copies, *self.bound]:
            vars(module).pop(BINDING, None)
        vars(target).pop(STATE, None)


def ledger_of(target: PreTrainedModel) -> Ledger:
    """What `apply` did to a model. Raises NotAppliedError."""
    if STATE not in target.__dict__:
        if bindings_of(target):
            where = where_applied(target)
            raise NotAppliedError(
                f"this model has no policy of its own, but a part of it has; {where}"
            )
        raise NotAppliedError("this model has no policy; call attnplug.apply(model, policy) first")
    return target.__dict__[STATE]


def where_applied(target: PreTrainedModel) -> str:
    """What to call where layers of a model have a policy that was not applied to the model."""
    if strays_of(target):
        return "it was copied or taken out of another model: attnplug.remove takes its policy off"
    parts = [name for name, module in target.named_modules() if STATE in vars(module)]
    if parts:
        named = " and ".join(f"model.{name}" for name in parts)
        return f"the policy was applied to {named}: call attnplug.remove or report on that part"
    return "the policy was applied to a larger model: call attnplug.remove or report on that one"


def strays_of(target: PreTrainedModel) -> list[torch.nn.Module]:
    """The attention modules of a model that have a policy, where it was applied neither to the
    model nor to any other that they are a part of; none where that holds for some alone."""
    if any(STATE in vars(module) for module in target.modules()):
        return []
    bindings = bindings_of(target)
    held = [x for x, each in bindings.items() if each.owner is not None and each.owner.holds(x)]
    return [] if held else list(bindings)


def strip(target: PreTrainedModel, strays: list[torch.nn.Module]) -> None:
    """Take the policy off `strays_of` a model."""
    if strays:
        give_stock_configs(target)
        unhook_decoders(target)
    for module in strays:
        for hook in hooks_of(module):
            hook.detach_hook(module)
        put = [name for name, each in vars(module).items() if isinstance(each, InstanceMethod)]
        if put:
            take_methods(module, *put)
        vars(module).pop(BINDING, None)


def take_compiled(model: PreTrainedModel) -> dict[str, Any]:
    """Take off the model what generate keeps of its own: its compiled decode step and the length of
    its static caches. A step compiled with a policy must not outlive it, nor one without."""
    kept = ("_compiled_call", "_last_compile_config", LONGEST)
    return {name: vars(model).pop(name) for name in kept if name in vars(model)}


def _like(changed: list[torch.nn.Module], copies: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The copies of modules that `apply` has changed."""
    return [module for module in copies if type(module) in set(map(type, changed))]
