"""What the whole quality table is: the tasks, lengths and prompts of a suite, and every policy."""

import dataclasses
from collections.abc import Mapping, Sequence
from inspect import signature
from types import MappingProxyType

from attnplug.eval.measure import DECODES
from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS
from attnplug.policies import Auto, Phase, methods


@dataclasses.dataclass(frozen=True)
class Suite:
    """A study but for its policies. `fewer` gives the number of prompts of those tasks that have
    not `trials`."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    trials: int
    fewer: Mapping[str, int]


# A decode measure compares 32 to 1,024 steps of each window, so that fewer windows say as much;
# of those of topic-change the plays have 22.
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "default": Suite(
            tasks=(*TASKS, *MEASURES),
            lengths=(4096, 8192, 32768),
            trials=50,
            fewer=MappingProxyType(dict.fromkeys(DECODES, 16)),
        )
    }
)


def all_policies() -> list[str]:
    """`dense`, then the default of every other method that attends, by name. A default has its
    crossover switched off (`min_tokens=0`): it is the method that is measured, at every length.

    `auto` is not among them, which runs one of the others, nor a method that only traces."""
    found = [(name, cls) for name, cls in sorted(methods().items()) if name != "dense"]
    return ["dense", *(_default(name, cls) for name, cls in found if _attends(cls))]


def _attends(cls: type[Phase]) -> bool:
    return bool(cls.phases & {"prefill", "decode"}) and not issubclass(cls, Auto)


def _default(name: str, cls: type[Phase]) -> str:
    return f"{name}(min_tokens=0)" if "min_tokens" in signature(cls).parameters else name
