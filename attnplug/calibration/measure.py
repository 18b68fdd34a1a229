"""The moments of a model's keys and queries before RoPE, of one dense pass over each kind of text.

A layer is measured by a policy of its own, so this goes the way that every policy goes."""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from attnplug.api import applied, report
from attnplug.call import AttentionCall
from attnplug.errors import UnsupportedModelError
from attnplug.ops.sketch.model_basis import Moments, turn
from attnplug.ops.sketch.state import BLOCK
from attnplug.policies import Dense, Phase, Policy

PROBE = "sketch(bytes=24, min_tokens=0)"  # which layers sketch serves by the smaller of its codes


@dataclasses.dataclass(frozen=True)
class Measured(Phase):
    """Dense attention that adds up what `Moments` are of, without the first block of a text, the
    sink, whose keys are like no others."""

    inv_freq: torch.Tensor
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list, repr=False)

    name: ClassVar[str] = "measured"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def attend(self, call: AttentionCall) -> torch.Tensor:
        found = [self._before_rope(x) for x in (call.k, call.q)]
        new = [found[0].sum(1), *(x.mT @ x for x in found)]
        count = torch.tensor(found[0].shape[1], dtype=torch.float64, device=call.k.device)
        new = [*(x.double() for x in new), count]
        if self.sums:
            for total, more in zip(self.sums, new, strict=True):
                total += more
        else:
            self.sums.extend(new)
        return Dense().attend(call)

    def _before_rope(self, x: torch.Tensor) -> torch.Tensor:
        """`[H, N, D]` of x `[1, H, T, D]`."""
        at = torch.arange(BLOCK, x.shape[2], device=x.device, dtype=torch.float64)
        angles = -at[:, None] * self.inv_freq.to(x.device, torch.float64)
        return turn(x[0, :, BLOCK:].float(), angles)

    def moments(self) -> Moments:
        k, pairs, asked, count = self.sums
        return Moments(k / count, pairs / count, asked / count)

    def __str__(self) -> str:
        return self.name


def measure(model: Any, texts: Iterable[list[int]]) -> tuple[torch.Tensor, dict[int, Moments]]:
    """(inv_freq, moments of each layer that sketch serves) of a model without a policy.

    Raises UnsupportedModelError where it has no such layer, or a rope of another form."""
    with applied(model, PROBE):
        layers = [
            layer.index for layer in report(model).layers if layer.decode.startswith("sketch")
        ]
    if not layers:
        raise UnsupportedModelError(
            "sketch serves no layer of this model, so it needs no basis: `attnplug report MODEL "
            "--policy sketch` says why"
        )
    inv_freq = frequencies(model)
    recorders = {layer: Measured(inv_freq) for layer in layers}
    policies: dict[int | range | str, Policy] = {
        layer: Policy(prefill=recorder) for layer, recorder in recorders.items()
    }
    device = next(model.parameters()).device
    with applied(model, policies), torch.inference_mode():
        for ids in texts:
            model.base_model(torch.tensor([ids], dtype=torch.int64, device=device), use_cache=False)
    # Tensors of inference mode may be used in no other.
    return inv_freq, {
        layer: Moments(*(x.clone() for x in recorder.moments()))
        for layer, recorder in recorders.items()
    }


def frequencies(model: Any) -> torch.Tensor:
    """The angle of a position in each pair of channels, float32, of the layers that see everything;
    empty where no rope is found. The pairs must be (d, P + d).

    Raises UnsupportedModelError for pairs of neighbours, as Cohere's models have them, and where
    layers differ."""
    found = [
        buffer.detach().float().cpu()
        for name, buffer in model.base_model.named_buffers()
        if name.rpartition(".")[2] in ("inv_freq", "full_attention_inv_freq")
    ]
    if any(not torch.equal(x, found[0]) for x in found[1:]):
        raise UnsupportedModelError("the layers of this model turn their keys by different angles")
    for module in model.modules():
        half = getattr(sys.modules.get(type(module).__module__), "rotate_half", None)
        numbers = torch.arange(4, dtype=torch.float32, device="cpu")
        if half is not None and half(numbers).tolist() != [-2.0, -3.0, 0.0, 1.0]:
            raise UnsupportedModelError(
                "this model's rope turns pairs of neighbouring channels, and sketch's basis of a "
                "model is made for halves"
            )
    return found[0] if found else torch.empty(0, dtype=torch.float32, device="cpu")
