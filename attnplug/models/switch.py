"""The model's configs while it has a policy: copies that name attnplug's attention, and the way
back to the objects that the model had, with what others changed in the meantime."""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "_attn_implementation_internal"
BASE, STOCK = "_attnplug_base", "_attnplug_stock"
MISSING = object()


@functools.cache
def _applied_class(base: type[PreTrainedConfig], stock: str | None) -> type[PreTrainedConfig]:
    """A config class that is `base` but for copies: one of the config alone is a `base` with the
    `stock` attention, so that a model built from it has its own; a copy or a pickle of the model
    stays what it is. The name of the attention itself must be a plain string: torch.compile before
    2.13 traces no other."""

    def alone(self: Any, attributes: dict[str, Any]) -> Any:
        made = base.__new__(base)
        vars(made).update(attributes | {ATTENTION: stock})
        return made

    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        # copy.deepcopy notes every object before its content: a module there is being copied.
        whole = any(isinstance(made, torch.nn.Module) for made in memo.values())
        made = memo[id(self)] = _rebuild(base, stock) if whole else alone(self, {})
        name = vars(made).get(ATTENTION, self._attn_implementation)
        vars(made).update(copy.deepcopy(vars(self), memo))
        vars(made)[ATTENTION] = name
        return made

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (base, stock), vars(self)

    methods = {
        "__copy__": lambda self: alone(self, vars(self)),
        "__deepcopy__": deep_copy,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        BASE: base,
        STOCK: stock,
    }
    return type(base.__name__, (base,), methods)


def _rebuild(base: type[PreTrainedConfig], stock: str | None) -> PreTrainedConfig:
    made = _applied_class(base, stock)
    return made.__new__(made)


@dataclass
class SwitchedConfig:
    """One config object of the model, the copy that the model has instead, and the attributes that
    this copy began with."""

    original: PreTrainedConfig
    applied: PreTrainedConfig
    began: dict[str, Any]


@dataclass
class SwitchedConfigs:
    """Copies of all configs of a model, and the modules that they are for, each with its own."""

    configs: list[SwitchedConfig]
    given: list[tuple[torch.nn.Module, PreTrainedConfig]]

    def switch(self) -> None:
        """Give every module its copy."""
        for module, config in self.given:
            vars(module)["config"] = config

    def restore(self, model: PreTrainedModel) -> None:
        """Give every module its own config object back. What was set, changed or deleted on a copy
        since (resize_token_embeddings does) is set, changed or deleted on the original."""
        originals = {id(entry.applied): entry.original for entry in self.configs}
        for entry in self.configs:
            _carry_changes(entry, originals)
        for module in {*(module for module, _ in self.given), *model.modules()}:
            config = vars(module).get("config")
            if id(config) in originals:
                vars(module)["config"] = originals[id(config)]
        give_stock_configs(model)
        for entry in self.configs:  # someone else may have taken the copy for a model of his own
            kind = type(entry.applied)
            if hasattr(kind, BASE):
                vars(entry.applied)[ATTENTION] = getattr(kind, STOCK)
                entry.applied.__class__ = getattr(kind, BASE)


def copies_of_configs(model: PreTrainedModel, switched: dict[int, str]) -> SwitchedConfigs:
    """Configs for the model's modules, of their own, as another model may share the object; copies
    whose original's id is in `switched` name that attention. `switch` gives them to the modules."""
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)  # text configs stay one object with their parts
    given, found = [], {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            given.append((module, copy.deepcopy(config, memo)))
            found |= {id(part): part for part in _with_parts(config)}
    for key, name in switched.items():
        config = memo[key]
        config.__class__ = _applied_class(type(config), config._attn_implementation)
        vars(config)[ATTENTION] = name
    copies = {id(memo[key]) for key in found}
    configs = [
        SwitchedConfig(part, memo[key], _snapshot(memo[key], copies)) for key, part in found.items()
    ]
    return SwitchedConfigs(configs, given)


def give_stock_configs(model: torch.nn.Module) -> None:
    """Have modules that came with a switched config, as copied layers do, name their own attention.
    The config may be another model's, so that they get a copy."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if is_switched(config):
            vars(module)["config"] = copy.deepcopy(config, memo)


def is_switched(config: Any) -> bool:
    """Whether a config is a copy that names attnplug's attention, or holds one."""
    if not isinstance(config, PreTrainedConfig):
        return False
    return any(hasattr(type(part), BASE) for part in _with_parts(config))


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
        name: value if id(value) in copies else copy.deepcopy(value)
        for name, value in vars(config).items()
    }


def _carry_changes(entry: SwitchedConfig, originals: dict[int, PreTrainedConfig]) -> None:
    now = dict(vars(entry.applied))
    now[ATTENTION] = entry.began[ATTENTION]  # it was apply that changed this one
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
