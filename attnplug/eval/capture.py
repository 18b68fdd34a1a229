"""The queries, keys and values of chosen layers, taken from one dense forward pass.

A layer is recorded by a policy of its own, so this goes the way that every policy goes."""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from attnplug.api import applied
from attnplug.policies import AttentionCall, Dense, Phase, Policy


@dataclasses.dataclass(frozen=True)
class Recorder(Phase):
    """Dense attention that keeps the calls it gets."""

    calls: list[AttentionCall] = dataclasses.field(default_factory=list, repr=False)

    name: ClassVar[str] = "recorder"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return Dense().attend(call)

    def __str__(self) -> str:
        return self.name


def capture_layers(
    model: Any, ids: torch.Tensor, layers: Iterable[int]
) -> dict[int, AttentionCall]:
    """Layer index -> its AttentionCall (q after rotary embedding, whole sequence, no padding) in a
    forward pass over `ids` `[B,T]`. Only the decoder runs; no logits are made. The model must have
    no policy applied."""
    recorders = {layer: Recorder() for layer in layers}
    policies: dict[int | range | str, Policy] = {
        layer: Policy(prefill=recorder) for layer, recorder in recorders.items()
    }
    with applied(model, policies), torch.inference_mode():
        model.base_model(ids, use_cache=False)
    return {layer: recorder.calls[0] for layer, recorder in recorders.items()}
