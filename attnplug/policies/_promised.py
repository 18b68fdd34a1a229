"""What a method promises by its class and by what it returns, and a sentence where it does not keep
it: methods come from third parties, too."""

import inspect
import keyword
from collections.abc import Set
from functools import lru_cache
from typing import NoReturn

from attnplug.call import LayerShape, shown
from attnplug.errors import PolicyError
from attnplug.policies.base import SLOTS, DraftingPhase, Phase, TracingPhase
from attnplug.policies.paged import PagedPhase

# What each kind of method has to write itself, and what its class has to subclass for that.
OWN = {"rounds": DraftingPhase, "observe": TracingPhase, "attend_pages": PagedPhase}


@lru_cache(maxsize=256)
def check_class(cls: type[Phase]) -> None:
    """Raise PolicyError where a class of a method lacks what attnplug calls, or has it in a form
    that attnplug would not call."""
    named = f"the method {cls.__name__}"
    name, phases = getattr(cls, "name", None), getattr(cls, "phases", frozenset())
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise PolicyError(f"{named}: its name is {name!r}, needs an identifier")
    if not isinstance(phases, Set) or not phases or not phases <= SLOTS:
        raise PolicyError(
            f"{named}: its phases are {phases!r}, needs some of 'prefill', 'decode', 'trace' in a "
            "frozenset"
        )
    if not isinstance(cls.on_request, Set) or not cls.on_request <= SLOTS:
        raise PolicyError(f"{named}: its on_request is {cls.on_request!r}, needs a frozenset")
    if not isinstance(cls.head_dims, tuple):
        raise PolicyError(f"{named}: its head_dims are {cls.head_dims!r}, needs a tuple")
    _check_bases(cls, named, phases | cls.on_request)
    _check_forms(cls, named)


def _check_bases(cls: type[Phase], named: str, phases: Set[str]) -> None:
    """Whether a class subclasses what its methods are of, and has the methods of what it
    subclasses."""
    needed: list[tuple[str, type[Phase]]] = []
    if phases & {"prefill", "decode"}:
        needed.append(("attend", Phase))
    if "trace" in phases:
        needed.append(("observe", TracingPhase))
    if issubclass(cls, DraftingPhase):
        needed.append(("rounds", DraftingPhase))
    if issubclass(cls, PagedPhase) and cls.pages_refusal is PagedPhase.pages_refusal:
        needed.append(("attend_pages", PagedPhase))
    for name, base in OWN.items():
        written = inspect.isfunction(inspect.getattr_static(cls, name, None))
        if not issubclass(cls, base) and (written or (name, base) in needed):
            verb = "has" if written else "lacks"
            raise PolicyError(
                f"{named} {verb} {name}, and does not subclass "
                f"attnplug.policies.{base.__name__}, by which attnplug would know that it has it"
            )
    for name, base in needed:
        if getattr(cls, name) is getattr(base, name):
            raise PolicyError(f"{named} has no {name}, which each {base.__name__} has to write")


def _check_forms(cls: type[Phase], named: str) -> None:
    """Whether what is called can be called, and what is read is no method."""
    for base in (Phase, *OWN.values()):
        for name, own in vars(base).items() if issubclass(cls, base) else ():
            if name.startswith("_"):
                continue
            if inspect.isfunction(own) and not callable(getattr(cls, name)):
                raise PolicyError(f"{named}: its {name} is no method")
            if isinstance(own, property) and inspect.isfunction(getattr(cls, name)):
                raise PolicyError(f"{named}: its {name} is a method, needs @property")


def choose(method: Phase, slot: str, shape: LayerShape, layers: int) -> tuple[Phase, str]:
    """The method that serves a layer in the place of `method`, and why."""
    found = method.resolve(slot, shape, layers)
    match found:
        case (Phase() as chosen, str() as why):
            here = chosen.on_this_machine(shape)
            if not isinstance(here, Phase):
                refuse(chosen, "on_this_machine", here, "a method")
            return here, why
    refuse(method, "resolve", found, "a method and why it was chosen")


def refusal_of(method: Phase, shape: LayerShape) -> str | None:
    """Why a method cannot serve a layer, or None."""
    found = method.refusal(shape)
    if found is not None and not isinstance(found, str):
        refuse(method, "refusal", found, "a sentence or None")
    return found


def rounds_of(method: DraftingPhase) -> int:
    """Drafts a round."""
    found = method.rounds()
    if type(found) is not int or found < 0:
        refuse(method, "rounds", found, "an integer of at least 0")
    return found


def refuse(method: Phase, what: str, found: object, needed: str) -> NoReturn:
    """Raise PolicyError: `what` of a method returned something else than is needed."""
    raise PolicyError(f"{method.name}: its {what} returned {shown(found)}, needs {needed}")
