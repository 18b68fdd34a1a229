"""The model's configs while it has a policy: copies that name attnplug's attention, and the way
back to the objects that the model had, with what others changed in the meantime."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

MISSING = object()


class AppliedName(str):
    """attnplug's name for an attention as a config holds it. A deep copy of the config alone gets
    the `stock` name, so that a model built from it has its own attention; a copy or a pickle of
    the model keeps this one."""

    stock: str | None

    def __new__(cls, name: str, stock: str | None) -> "AppliedName":
        made = super().__new__(cls, name)
        made.stock = stock
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        # copy.deepcopy notes every object before its content: a module there is being copied.
        if any(isinstance(made, torch.nn.Module) for made in memo.values()):
            return AppliedName(str(self), self.stock)
        return self.stock

    def __reduce__(self) -> tuple[Any, ...]:
        return AppliedName, (str(self), self.stock)


@dataclass
class SwitchedConfig:
    """One config object of the model, the copy that the model has instead, and the attributes that
    this copy began with."""

    original: PreTrainedConfig
    applied: PreTrainedConfig
    began: dict[str, Any]


@dataclass
class SwitchedConfigs:
    """Every config that `switch_configs` has replaced, and the modules that it gave copies to."""

    configs: list[SwitchedConfig]
    modules: list[torch.nn.Module]

    def restore(self, model: PreTrainedModel) -> None:
        """Give every module its own config object back. What was set, changed or deleted on a copy
        since (resize_token_embeddings does) is set, changed or deleted on the original."""
        originals = {id(entry.applied): entry.original for entry in self.configs}
        for entry in self.configs:
            _carry_changes(entry, originals)
        for module in {*self.modules, *model.modules()}:
            config = vars(module).get("config")
            if id(config) in originals:
                vars(module)["config"] = originals[id(config)]
        for entry in self.configs:  # someone else may have taken the copy for a model of his own
            name = entry.applied._attn_implementation
            if isinstance(name, AppliedName):
                entry.applied._attn_implementation_internal = name.stock


def switch_configs(model: PreTrainedModel, switched: dict[int, str]) -> SwitchedConfigs:
    """Give the model's modules configs of their own, as another model may share the object, and
    set the attention's name in those copies whose original's id is in `switched`."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)  # text configs stay one object with their parts
    modules, found = [], {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            modules.append(module)
            vars(module)["config"] = copy.deepcopy(config, memo)
            found |= {id(part): part for part in _with_parts(config)}
    for key, name in switched.items():
        config = memo[key]
        config._attn_implementation_internal = AppliedName(name, config._attn_implementation)
    copies = {id(memo[key]) for key in found}
    configs = [
        SwitchedConfig(part, memo[key], _snapshot(memo[key], copies)) for key, part in found.items()
    ]
    return SwitchedConfigs(configs, modules)


def _with_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and the configs that it holds."""
    parts = [config]
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            parts += _with_parts(value)
    return parts


def _snapshot(config: PreTrainedConfig, copies: set[int]) -> dict[str, Any]:
    """The config's attributes, copied, but for configs that are compared on their own."""
    return {
        name: value
        if isinstance(value, AppliedName) or id(value) in copies
        else copy.deepcopy(value)
        for name, value in vars(config).items()
    }


def _carry_changes(entry: SwitchedConfig, originals: dict[int, PreTrainedConfig]) -> None:
    now = dict(vars(entry.applied))
    for name in [*now, *(name for name in entry.began if name not in now)]:
        value = now.get(name, MISSING)
        if _alike(value, entry.began.get(name, MISSING)):
            continue
        if value is MISSING:
            vars(entry.original).pop(name, None)
        else:
            vars(entry.original)[name] = originals.get(id(value), value)


def _alike(now: Any, began: Any) -> bool:
    """Whether a value is what it was. Objects without an equality of their own are compared by
    their attributes."""
    if now is began:
        return True
    if type(now) is not type(began):
        return False
    if isinstance(now, (list, tuple)):
        return len(now) == len(began) and all(map(_alike, now, began))
    if isinstance(now, dict):
        return now.keys() == began.keys() and all(_alike(now[key], began[key]) for key in now)
    if type(now).__eq__ is object.__eq__ and hasattr(now, "__dict__"):
        return _alike(vars(now), vars(began))
    return bool(now == began)
