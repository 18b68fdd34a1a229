"""What `apply` puts in the place of one model's own methods."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class InstanceMethod:
    """A function in the place of the method `name` of one model, with that method's signature,
    which transformers looks into. It is no `types.MethodType`, which pickle takes for the class's
    method of the function's name: a model that was pickled would lose it."""

    def __init__(self, function: Callable[..., Any], model: Any, name: str):
        self.function, self.model, self.__name__ = function, model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.model, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(getattr(type(self.model), self.__name__), self.model))

    def __repr__(self) -> str:
        return f"<attnplug's {self.__name__} of {type(self.model).__name__}>"


def put_method(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Have `model.name(...)` call `function(model, ...)`, on this instance only."""
    vars(model)[name] = InstanceMethod(function, model, name)


def is_put(model: Any, name: str) -> bool:
    """Whether `put_method` has put this method, and nobody has put another one since."""
    return isinstance(vars(model).get(name), InstanceMethod)


def slot_of(module: Any) -> str:
    """Where a module keeps its forward: accelerate's hooks put their own in front of it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def put_forward(module: Any, function: Callable[..., Any]) -> None:
    """Have a module's forward be `function`, behind accelerate's hooks."""
    vars(module)[slot_of(module)] = InstanceMethod(function, module, "forward")


def take_methods(module: Any, *names: str) -> None:
    """Undo `put_forward`, and `put_method` of these names."""
    for name in (slot_of(module), *names):
        vars(module).pop(name, None)
    if hasattr(module, "_hf_hook"):
        module._old_forward = MethodType(type(module).forward, module)
