"""The methods by name: `names()` lists them, `register` adds one, `parse` reads a policy string.

Third parties register theirs with `register` or with an entry point in the group
`attnplug.policies` whose value is the method's class.
"""

import dataclasses
from importlib.metadata import EntryPoint, entry_points

from transformers import Cache

from attnplug.call import (
    AttentionCall,
    Edges,
    EdgeWriter,
    LayerShape,
    PagedCall,
    Reads,
    StepReads,
)
from attnplug.errors import PolicyError
from attnplug.policies._certified_layer import Certificates, certified_layers
from attnplug.policies._gather_layers import residency
from attnplug.policies._gvr_layer import picks
from attnplug.policies._promised import check_class
from attnplug.policies._sketch_audit import Audit
from attnplug.policies._sketch_layer import audit, audits, refit

# A row a method: this import registers and exports it ("X as X" is what tools take for an export).
from attnplug.policies.auto import Auto as Auto
from attnplug.policies.base import DraftingPhase, Phase, TracingPhase, check_option
from attnplug.policies.certified import Certified as Certified
from attnplug.policies.dense import Dense as Dense
from attnplug.policies.dense import apply_sinks
from attnplug.policies.exact import Exact as Exact
from attnplug.policies.gather import Gather as Gather
from attnplug.policies.grammar import parse_policy
from attnplug.policies.gvr import Gvr as Gvr
from attnplug.policies.momo import Momo as Momo
from attnplug.policies.paged import PagedPhase
from attnplug.policies.policy import Policy
from attnplug.policies.sketch import Sketch as Sketch
from attnplug.policies.stream import Stream as Stream
from attnplug.policies.trained import Trained as Trained

_METHODS: dict[str, type[Phase]] = {
    cls.name: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Phase) and "name" in vars(cls)
}
__all__ = [
    "AttentionCall",
    "DraftingPhase",
    "EdgeWriter",
    "Edges",
    "LayerShape",
    "PagedCall",
    "PagedPhase",
    "Phase",
    "Policy",
    "Reads",
    "StepReads",
    "TracingPhase",
    "apply_sinks",
    "audit",
    "certificates",
    "check_option",
    "methods",
    "names",
    "parse",
    "picks",
    "refit",
    "register",
    "residency",
]
# Classes first, as ruff sorts. Tools that cannot run this take the methods from "X as X" above.
__all__ += [cls.__name__ for cls in _METHODS.values()]  # pyright: ignore[reportUnsupportedDunderAll]
__all__.sort(key=lambda name: (name[0].islower(), name))  # pyright: ignore[reportUnsupportedDunderAll]


def register(cls: type[Phase]) -> type[Phase]:
    """Add a method under its `name`, so that policy strings can use it. Usable as a decorator.

    Raises PolicyError if the class is not a Phase with a name, phases and the methods that they
    need, or the name is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Phase) and dataclasses.is_dataclass(cls)):
        raise PolicyError(
            f"register: {cls!r} is not a dataclass that subclasses attnplug.policies.Phase"
        )
    check_class(cls)
    if _METHODS.get(cls.name, cls) is not cls:
        taken = _METHODS[cls.name].__name__
        raise PolicyError(f"register: the name {cls.name!r} is taken by {taken}")
    _METHODS[cls.name] = cls
    return cls


def methods() -> dict[str, type[Phase]]:
    """Every method by its name, those of installed packages' entry points included."""
    for entry in entry_points(group="attnplug.policies"):
        if entry.name not in _METHODS:
            cls = register(_load(entry))
            if cls.name != entry.name:
                raise PolicyError(
                    f"the entry point {entry.name!r} in attnplug.policies loads {cls.__name__}, "
                    f"whose name is {cls.name!r}; the two must agree"
                )
    return dict(_METHODS)


def _load(entry: EntryPoint) -> type[Phase]:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"the entry point {entry.name!r} in attnplug.policies cannot be loaded from "
            f"{entry.value!r} ({error}); reinstall or uninstall the package that brings it"
        ) from error


def names() -> list[str]:
    """The names that a policy string can use, sorted."""
    return sorted(methods())


def certificates(cache: Cache) -> list[Certificates | Audit]:
    """What is known of the errors of a cache's steps, layer by layer: of certified, bounds that
    hold (`Certificates`); of sketch, estimates (`Audit`). Reads them on the host: not for a
    step."""
    return [*certified_layers(cache), *audits(cache)]


MOST_CHARACTERS = 1000  # every option of three methods written out has fewer


def parse(policy: "str | Phase | Policy") -> Policy:
    """A Policy from a string, a single method, or a Policy.

    Raises PolicyError for anything else, unknown names and unknown options.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if len(policy) > MOST_CHARACTERS:
            raise PolicyError(
                f"a policy of {len(policy):,} characters, {policy[:40]!r}..., is longer than any; "
                'write for example "momo(gamma=16)" or "momo+dense"'
            )
        return parse_policy(policy, methods())
    if isinstance(policy, Phase):
        check_class(type(policy))
        return Policy(**dict.fromkeys(sorted(policy.phases), policy))
    raise PolicyError(
        f"a policy is a string, a method or a Policy, not {type(policy).__name__}; "
        f"methods are {', '.join(names())}"
    )
