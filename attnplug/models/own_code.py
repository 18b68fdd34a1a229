"""Whether a model runs transformers' own code: where attnplug's stands in for a function or a
module's forward, nobody else may have changed what that does."""

import os
import sys
from typing import Any

import torch
import transformers

from attnplug.errors import UnsupportedCallError
from attnplug.models.instance_method import InstanceMethod, slot_of
from attnplug.models.user_hooks import is_hooked

TRANSFORMERS = os.path.join(os.path.dirname(transformers.__file__), "")
NO_GRAD = torch.no_grad()(lambda: None).__code__  # of what decorating with it makes


def own_code(function: Any) -> Any:
    """The function that transformers' decorators wrap, which rename arguments or turn gradients
    off. A wrapper of anybody else's is itself what runs, though functools.wraps makes it look like
    what it wraps."""
    while hasattr(function, "__wrapped__") and _is_transparent(function):
        function = function.__wrapped__
    return function


def _is_transparent(wrapper: Any) -> bool:
    code = getattr(wrapper, "__code__", None)
    if code is NO_GRAD:
        cells = (cell.cell_contents for cell in wrapper.__closure__)
        return any(type(getattr(each, "__self__", None)) is torch.no_grad for each in cells)
    return code is not None and code.co_filename.startswith(TRANSFORMERS)


def names_of(kind: type) -> dict[str, Any]:
    """The names that the forward of a class looks up: those of the file that it is written in."""
    return getattr(own_code(kind.forward), "__globals__", {})


def eager_function(module: torch.nn.Module) -> Any:
    """The eager attention of a module: of the file of its class, or of one that this is derived
    from."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise UnsupportedCallError(f"there is no eager attention for a {type(module).__name__}")


def why_replaced(module: torch.nn.Module, *methods: str) -> str:
    """Why the forward of a module, or another of its methods, is not that of its class; "" where
    it is, or attnplug's."""
    for name in ("forward", *methods):
        why = why_method_replaced(module, name)
        if why:
            return why
    return ""


def why_method_replaced(module: torch.nn.Module, name: str) -> str:
    """Why a method of a module is not that of its class; "" where it is, or attnplug's."""
    own = vars(module).get(slot_of(module) if name == "forward" else name)
    if own is None or isinstance(own, InstanceMethod):
        return ""
    if getattr(own, "__func__", None) is getattr(type(module), name):
        return ""
    return f"somebody has replaced the {name} of this {type(module).__name__}"


def why_watched(module: torch.nn.Module, *methods: str) -> str:
    """Why the work of a module cannot be done without a call of it; "" where it can."""
    replaced = why_replaced(module, *methods)
    if replaced:
        return replaced
    name, outer = type(module).__name__, vars(module).get("forward")
    if slot_of(module) != "forward" and not _is_accelerates(outer):
        return f"somebody has replaced the forward of this {name}"
    return f"a {name} has a forward hook" if is_hooked(module) else ""


def _is_accelerates(forward: Any) -> bool:
    """Whether a forward is what accelerate's hooks put in front of a module's own."""
    function = getattr(forward, "func", forward)
    return getattr(function, "__module__", None) == "accelerate.hooks"


def refuse_watched(module: torch.nn.Module, *methods: str) -> None:
    """Raise UnsupportedCallError where `apply` would leave the work of a module to it now."""
    why = why_watched(module, *methods)
    if why:
        raise UnsupportedCallError(
            f"{why}, which is not called: its work was left to attnplug before. Take it off, or "
            "call attnplug.remove(model) and apply again."
        )
