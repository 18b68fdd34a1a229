"""What really served a sample, and what a step read of it: a policy may leave all to dense."""

from collections import Counter
from typing import Any

from attnplug.api import report
from attnplug.models.generate import LOOP
from attnplug.models.layers import config_heads
from attnplug.policies import Dense, Policy

ALL, FULL = "all", "full_attention"
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


def reads_of(policy: Policy | None, served: Served, tokens: int, model: Any) -> dict[str, Any]:
    """The most `keys` that a step reads of `tokens`, and its `bytes` over all layers that keep the
    whole context: keys, values, and what it scans to choose them. Keys are ALL where dense serves
    the steps or the budget covers them; both are None where the method does not say."""
    *_, width = config_heads(model.config.get_text_config(decoder=True))
    element = 2 * width * model.dtype.itemsize  # of a token's key and value
    keys, scanned = tokens, 0.0
    if policy is not None and policy.decode is not None and not _by_dense(policy, served):
        reads = policy.decode.step_reads(tokens, width)
        if reads is None:
            return {"keys": None, "bytes": None}
        keys, scanned = reads if reads.keys < tokens else (tokens, 0.0)
    read = round(token_bytes(model) * (keys + scanned / element))
    return {"keys": ALL if keys == tokens else keys, "bytes": read}


def _by_dense(policy: Policy, served: Served) -> bool:
    return isinstance(policy.decode, Dense) or served.get("decode") == Dense.name


def token_bytes(model: Any) -> int:
    """Bytes that a token's keys and values take in the layers that keep all of them."""
    config = model.config.get_text_config(decoder=True)
    _, heads, dim = config_heads(config)
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return max(1, kinds.count(FULL)) * 2 * heads * dim * model.dtype.itemsize
