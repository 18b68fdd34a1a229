"""What really served a sample, and how many keys a step read: a policy may leave all to dense."""

from collections import Counter
from typing import Any

from attnplug.api import report
from attnplug.models.generate import LOOP
from attnplug.policies import Dense, Policy

ALL = "all"
# By a policy's name: "prefill" and "decode" and by whom, and "accepted", the share of its drafts.
ServedBy = dict[str, dict[str, Any]]


def note_served(served: ServedBy | None, name: str, model: Any) -> None:
    """Note who has served the last call of a model that has the policy of that name. A phase that
    did not come keeps what was noted before."""
    if served is None:
        return
    layers = report(model).last
    for phase in ("prefill", "decode"):
        by = Counter(text.partition(" (")[0] for layer in layers if (text := getattr(layer, phase)))
        parts = [f"{method} in {count} of {by.total()} layers" for method, count in by.items()]
        if by:
            served.setdefault(name, {})[phase] = ", ".join(parts) if len(by) > 1 else next(iter(by))
    loop = vars(model).get(LOOP)
    if loop is not None and loop.rounds.tally.drafted:
        tally = loop.rounds.tally
        served.setdefault(name, {})["accepted"] = tally.accepted / tally.drafted


def keys_read(policy: Policy | None, tokens: int) -> int | str | None:
    """The most keys that a step of a policy's decode method reads of so many, ALL where that is all
    of them; None where the method does not say (its `kept`)."""
    if policy is None or isinstance(policy.decode, Dense):
        return ALL
    kept = getattr(policy.decode, "kept", 0) or None
    return ALL if kept is not None and kept >= tokens else kept
