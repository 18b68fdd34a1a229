"""Forward hooks that a user has put on a model: code that runs on the host at every step.

torch.compile does not notice a hook that comes after it has traced (`skip_nnmodule_hook_guards`),
and a CUDA graph replays kernels without running any hook. transformers' own loop, which compiles
nothing by default, runs each of them at each step, and may record, steer or forbid by it.
"""

import functools
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as registry

from attnplug.models.walk import all_modules

# Whose hooks prepare inputs and outputs alike at every step, and are there when steps are traced.
KNOWN = frozenset({"torch", "transformers", "accelerate", "attnplug"})
OF_MODULE = ("_forward_pre_hooks", "_forward_hooks")
GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks")


def user_hooks(model: torch.nn.Module) -> str:
    """Where the first hook is that is neither torch's, transformers', accelerate's nor attnplug's,
    as a reason not to compile or capture steps; "" without one."""
    if any(map(_is_users, chain.from_iterable(getattr(registry, x).values() for x in GLOBAL))):
        return "all modules of torch have a forward hook"
    for module in all_modules(model):
        if is_hooked(module):
            name = next(name for name, each in model.named_modules() if each is module)
            return f"{name or type(module).__name__} has a forward hook"
    return ""


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether a user's hook runs when this module does."""
    return any(map(_is_users, _hooks(module)))


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """The forward hooks of a module: torch's, and accelerate's in the place of a forward."""
    for name in OF_MODULE:
        yield from getattr(module, name).values()
    hook = vars(module).get("_hf_hook")
    parts: Iterable[Any] = getattr(hook, "hooks", () if hook is None else (hook,))
    yield from parts


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.partition(".")[0] not in KNOWN
