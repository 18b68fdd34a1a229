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
