"""A row of a bench, as bench/results has them and docs read them."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnplug.bench.ceilings import ceiling_fraction, ceilings
from attnplug.bench.provenance import KEYS, provenance
from attnplug.bench.timing import quantiles
from attnplug.policies import Phase, Policy, parse

Row = dict[str, Any]


def policy_name(policy: str | Phase | Policy) -> str:
    """How rows spell a policy: without `min_tokens=0` and without options that are the default's.
    A row is of the method, at lengths below its crossover too, and a default's row carries the bare
    name. Raises PolicyError for what `parse` does not know."""
    served = parse(policy)
    slots = {field.name: getattr(served, field.name) for field in dataclasses.fields(served)}
    return str(Policy(**{slot: phase and _unswitched(phase) for slot, phase in slots.items()}))


def _unswitched(method: Phase) -> Phase:
    """The method with its own crossover, where that was switched off."""
    off = getattr(method, "min_tokens", None) == 0
    changed = {"min_tokens": None} if off else {}
    return dataclasses.replace(method, **changed)  # pyright: ignore[reportArgumentType]


def make_row(
    *,
    op: str,
    case: str,
    n: int,
    batch: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    dtype: torch.dtype | str,
    times_us: Sequence[float],
    bytes: float,
    flops: float,
    options: str = "",
    peer: str | None = None,
    peer_times_us: Sequence[float] | None = None,
    ceiling: Callable[[float], float | None] | None = None,
    policy: str | None = None,
    memory: int | None = None,
) -> Row:
    """The row of `times_us` (one sample a round, microseconds a call), with the keys of KEYS;
    `policy` where one ran, and `memory`, the bytes of the GPU that its cache takes, where they were
    counted. `ceiling` gives the share of another ceiling than the GPU's own, of the seconds of a
    call, or None where none is known; without it the row keeps the `ceilings` that it was held
    against. Raises ValueError where only one of peer and its times is given."""
    if (peer is None) != (peer_times_us is None):
        raise ValueError("peer and its functions (or times) come together")
    p20, p50, p80 = quantiles(times_us)
    peer_p50 = statistics.median(peer_times_us) if peer_times_us else None
    seconds = p50 * 1e-6
    row = {
        "op": op,
        "case": case,
        "n": n,
        "batch": batch,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
        "options": options,
        "p20_us": p20,
        "p50_us": p50,
        "p80_us": p80,
        "peer": peer,
        "peer_p50_us": peer_p50,
        "ratio": peer_p50 / p50 if peer_p50 else None,
        "bytes": bytes,
        "flops": flops,
        "ceiling_fraction": (
            ceiling(seconds) if ceiling else ceiling_fraction(bytes, flops, seconds)
        ),
        "ceilings": None if ceiling else ceilings(),
        **provenance(),
    }
    assert list(row) == KEYS
    more = {"policy": policy, "memory": memory}
    return row | {key: value for key, value in more.items() if value is not None}
