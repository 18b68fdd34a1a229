"""What a block mask reads and keeps of a real model's attention, against the best mask of its
size."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from attnplug.errors import ArgumentError
from attnplug.eval.capture import capture_layers
from attnplug.eval.mass import BlockMass, block_mass, captured_mass, mask_density, oracle_blocks
from attnplug.models.layers import find_attention_layers
from attnplug.policies import AttentionCall


class Blocks(Protocol):
    """What a block mask's `select` returns."""

    @property
    def blocks(self) -> torch.Tensor:
        """Key blocks `[B,Hq,NQ,k]` of every query block, -1 = none."""
        ...


class BlockMask(Protocol):
    """A prefill method that reads whole key blocks, listed by `select(call).blocks`, beside a sink
    and a local part: momo, or anyone's."""

    @property
    def top_k(self) -> int | None: ...
    @property
    def block(self) -> int: ...
    @property
    def query_block(self) -> int: ...
    @property
    def sink(self) -> int: ...
    @property
    def window(self) -> int: ...
    def select(self, call: AttentionCall) -> Blocks: ...


@runtime_checkable
class BudgetedMask(BlockMask, Protocol):
    """One whose query blocks may list some more blocks than others."""

    def budgets(self, call: AttentionCall) -> torch.Tensor:
        """`[NQ]`: how many blocks each query block of the call may list."""
        ...


def has_block_mask(method: Any) -> bool:
    """Whether a prefill method's mask can be measured: it has what `BlockMask` has."""
    needed = ("top_k", "block", "query_block", "sink", "window", "select")
    return all(hasattr(method, name) for name in needed)


@dataclass(frozen=True)
class LayerMask:
    """One layer: its exact masses, the mask's lists `[1,Hq,NQ,K]` and the oracle's, the `best` ones
    of that size, the share of causal key blocks that the mask's read, and the mean share of
    attention that either's keep."""

    layer: int
    mass: BlockMass
    index: torch.Tensor
    best: torch.Tensor
    density: float
    captured: float
    oracle: float


def measure_masks(
    model: Any, ids: torch.Tensor, mask: BlockMask, count: int = 4
) -> list[LayerMask]:
    """The masks of `count` layers, spread over those that a policy can serve, for the prompt `ids`
    `[1,T]`. All heads, all query blocks, float32. Raises ArgumentError where no layer is served."""
    served = [layer.index for layer in find_attention_layers(model) if not layer.reason]
    if not served:
        raise ArgumentError("no attention layer of this model can be served by a block mask")
    chosen = sorted({served[int((i + 0.5) * len(served) / count)] for i in range(count)})
    calls = capture_layers(model, ids, chosen)
    return [measure_mask(layer, call, mask) for layer, call in calls.items()]


def measure_mask(layer: int, call: AttentionCall, mask: BlockMask) -> LayerMask:
    """One layer's mask from its captured call."""
    mass = block_mass(
        call.q,
        call.k,
        scale=call.scale,
        query_block=mask.query_block,
        block=mask.block,
        sink=mask.sink,
        window=mask.window,
        dtype=torch.float32,
    )
    index = mask.select(call).blocks
    top_k = mask.budgets(call) if isinstance(mask, BudgetedMask) else mask.top_k
    assert top_k is not None  # of a mask that has no budgets
    best = oracle_blocks(mass, top_k)
    return LayerMask(
        layer,
        mass,
        index,
        best,
        mask_density(mass, index),
        captured_mass(mass, index).mean().item(),
        captured_mass(mass, best).mean().item(),
    )
