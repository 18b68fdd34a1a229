"""What really served a sample, and how many keys a step read: a policy may leave all to dense."""

from collections import Counter
from typing import Any

from attnplug.api import report
from attnplug.models.generate import LOOP
from attnplug.policies import Dense, Policy

ALL = "all"
# "prefill" and "decode" and by whom, and "accepted", the share of drafts that dense accepted.
Served = dict[str, Any]
ServedBy = dict[str, Served]  # by a policy's name


def who_served(model: Any) -> Served:
    """Who has served the phases of the last call of a model with a policy."""
    layers = report(model).last
    found: Served = {}
    for phase in ("prefill", "decode"):
        by = Counter(text.partition(" (")[0] for layer in layers if (text := getattr(layer, phase)))
        parts = [f"{method} in {count} of {by.total()} layers" for method, count in by.items()]
        if by:
            found[phase] = ", ".join(parts) if len(by) > 1 else next(iter(by))
    loop = vars(model).get(LOOP)
    if loop is not None and loop.rounds.tally.drafted:
        found["accepted"] = loop.rounds.tally.accepted / loop.rounds.tally.drafted
    return found


def keys_read(policy: Policy | None, tokens: int) -> int | str | None:
    """The most keys that a step of a policy's decode method reads of `tokens` keys: ALL where its
    budget covers them, None where the method does not say (its property `kept`)."""
    if policy is None or isinstance(policy.decode, Dense):
        return ALL
    kept = policy.decode.kept or None
    return ALL if kept is not None and kept >= tokens else kept
