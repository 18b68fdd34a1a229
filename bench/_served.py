"""Which rows tell of what a user gets: where a row's method would run dense of its own accord, its
time is no speed of attnplug's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from attnplug.policies import methods, parse
from attnplug.policies.auto import CANDIDATES, Auto
from attnplug.policies.base import Phase
from attnplug.policies.crossover import DenseBelow

Row = dict[str, Any]

CUDA = torch.device("cuda")  # where all timings come from
SAME = {"tiered": "gather"}  # a row's `op` that is a method by another name


def is_served(row: Row) -> bool:
    """Whether the row's policy, with the crossover of its options, is what runs a batch of the
    row's size and length; in a whole call, in either phase. Of an op alone, of dense and of a
    trace there is no such question."""
    policy = row.get("policy") or ""
    if row["case"] == "call":  # has both phases
        found = _methods_of(policy)
    else:
        found = (_method(policy, SAME.get(row["op"], row["op"])),)
    below = [method for method in found if isinstance(method, DenseBelow)]
    return not below or any(each.serves(row["batch"], row["n"], CUDA) for each in below)


def serves_from(asked: str) -> str:
    """From which length on a default's methods serve one row, prompts and caches."""
    told = []
    for method, what in zip(_methods_of(asked), ("prompts", "caches"), strict=True):
        least = method.crossover(CUDA) if isinstance(method, DenseBelow) else 0
        if least:
            told.append(f"{what} of {least:,}")
    return ", ".join(told) or "any length"


def served(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_served(row)]


@functools.cache
def _methods_of(policy: str) -> tuple[Phase | None, ...]:
    """What serves prefill and decode under a policy, with auto's first candidates for auto."""
    parsed, found = parse(policy), []
    for slot in ("prefill", "decode"):
        method = getattr(parsed, slot)
        is_auto = isinstance(method, Auto)
        found.append(CANDIDATES[method.quality][slot][0].method if is_auto else method)
    return tuple(found)


@functools.cache
def _method(policy: str, name: str) -> Phase | None:
    """What of the policy a row of this op has timed; None of a row that names no method."""
    if not policy or name not in methods():
        return None
    parsed = parse(policy)
    (found,) = {phase for phase in (parsed.prefill, parsed.decode) if phase and phase.name == name}
    if isinstance(found, Auto):
        return CANDIDATES[found.quality]["decode"][0].method
    return found
