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
    row's size and length. Of an op alone, of dense and of a trace there is no such question."""
    method = _method(row.get("policy") or "", SAME.get(row["op"], row["op"]))
    return not isinstance(method, DenseBelow) or method.serves(row["batch"], row["n"], CUDA)


def serves_from(asked: str) -> str:
    """From which length on a default's methods serve one row, prompts and caches."""
    parsed, told = parse(asked), []
    for slot, what in (("prefill", "prompts"), ("decode", "caches")):
        method = getattr(parsed, slot)
        if isinstance(method, Auto):
            method = CANDIDATES[method.quality][slot][0].method
        least = method.crossover(CUDA) if isinstance(method, DenseBelow) else 0
        if least:
            told.append(f"{what} of {least:,}")
    return ", ".join(told) or "any length"


def served(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_served(row)]


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
