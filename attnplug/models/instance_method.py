"""What `apply` puts in the place of one model's own methods."""

import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

# Of functions; transformers looks into that of generate's steps in each call.
SIGNATURES: weakref.WeakKeyDictionary[Any, inspect.Signature] = weakref.WeakKeyDictionary()
PUT = "_attnplug_put"  # by name, what stands on an object in the place of its methods


class InstanceMethod:
    """A function in the place of the method `name` of one model, with that method's signature,
    which transformers looks into. It is no `types.MethodType`, which pickle takes for the class's
    method of the function's name: a model that was pickled would lose it.

    `replaced` holds the attribute that stood there before, if there was one. Whoever has wrapped
    this method goes on calling it after it was taken off: it is the `stock` method then."""

    def __init__(
        self,
        function: Callable[..., Any],
        model: Any,
        name: str,
        replaced: tuple[Any, ...] = (),
    ):
        self.function: Callable[..., Any] | None = function
        self.model, self.__name__, self.replaced = model, name, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            return self.stock(*args, **kwargs)
        return self.function(self.model, *args, **kwargs)

    @property
    def stock(self) -> Callable[..., Any]:
        """What the model would call without this: an attribute of its own, or its class's method.
        Looked up each time, as the class may change."""
        if self.replaced:
            return self.replaced[0]
        return MethodType(getattr(type(self.model), self.__name__), self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        stock = self.stock
        function = stock.__func__ if isinstance(stock, MethodType) else None
        if function is None:
            return inspect.signature(stock)
        if function not in SIGNATURES:
            SIGNATURES[function] = inspect.signature(stock)
        return SIGNATURES[function]

    def __repr__(self) -> str:
        return f"<attnplug's {self.__name__} of {type(self.model).__name__}>"


def put_method(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Have `model.name(...)` call `function(model, ...)`, on this instance only."""
    _put(model, name, name, function)


def _put(model: Any, name: str, slot: str, function: Callable[..., Any]) -> None:
    own = vars(model)
    method = InstanceMethod(function, model, name, (own[slot],) if slot in own else ())
    own[PUT] = own.get(PUT, {}) | {name: method}  # a new dict: a shallow copy has the old one
    own[slot] = method


def stock_method(model: Any, name: str) -> Callable[..., Any]:
    """What `model.name` would be had `put_method` not put another one in its place; what it is
    where that was taken off again during a call."""
    put = vars(model).get(PUT, {}).get(name)
    return getattr(model, name) if put is None else put.stock


def is_put(model: Any, name: str) -> bool:
    """Whether `put_method` has put this method, and nobody has put another one since."""
    return isinstance(vars(model).get(name), InstanceMethod)


def is_replaced(model: Any, name: str, *, since: bool = True) -> bool:
    """Whether somebody else's attribute is in the place of a method of the model's class: one that
    `put_method` has replaced, or, unless `since` is false, one that has replaced attnplug's."""
    own, put = vars(model).get(name), vars(model).get(PUT, {}).get(name)
    if put is None:
        return own is not None
    return bool(put.replaced) or (since and own is not None and own is not put)


def slot_of(module: Any) -> str:
    """Where a module keeps its forward: accelerate's hooks put their own in front of it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def put_forward(module: Any, function: Callable[..., Any]) -> None:
    """Have a module's forward be `function`, behind accelerate's hooks."""
    _put(module, "forward", slot_of(module), function)


def take_methods(model: Any, *names: str) -> None:
    """Undo `put_forward`, wherever accelerate's hooks have moved it, and `put_method` of these
    names. What stood there before is back; what somebody has put there since stays."""
    for name in names:
        _take(model, name, name)
    _take(model, "forward", slot_of(model))
    if hasattr(model, "_hf_hook") and "_old_forward" not in vars(model):
        model._old_forward = MethodType(type(model).forward, model)


def _take(model: Any, name: str, slot: str) -> None:
    own = vars(model)
    put = dict(own.get(PUT, {}))
    method = put.pop(name, None)
    if method is None:
        return
    before = method.replaced[0] if method.replaced else None
    if isinstance(before, InstanceMethod) and before.function is not None:
        put[name] = before  # attnplug's own, under another one of attnplug's
    if own.get(slot) is method:  # in one go, as an interrupt may end this between two
        if method.replaced:
            own[slot] = before
        else:
            del own[slot]
    method.function = None
    if put:
        own[PUT] = put
    else:
        del own[PUT]
