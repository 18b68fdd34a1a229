"""What momo reads and keeps of a real model's attention, against the best mask of its size."""

from dataclasses import dataclass
from typing import Any

import torch

from attnplug.eval.capture import capture_layers
from attnplug.eval.mass import BlockMass, block_mass, captured_mass, mask_density, oracle_blocks
from attnplug.policies import AttentionCall, Momo


@dataclass(frozen=True)
class LayerMask:
    """One layer: its exact masses, momo's lists `[1,Hq,NQ,K]`, the share of causal key blocks that
    they read, and the mean share of attention that they and the oracle's lists keep."""

    layer: int
    mass: BlockMass
    index: torch.Tensor
    density: float
    captured: float
    oracle: float


def measure_masks(model: Any, ids: torch.Tensor, momo: Momo, count: int = 4) -> list[LayerMask]:
    """The masks of `count` layers, spread over the depth, for the prompt `ids` `[1,T]`. All heads,
    all query blocks, float32."""
    depth = model.config.num_hidden_layers
    chosen = sorted({int((i + 0.5) * depth / count) for i in range(count)})
    calls = capture_layers(model, ids, chosen)
    return [measure_mask(layer, call, momo) for layer, call in calls.items()]


def measure_mask(layer: int, call: AttentionCall, momo: Momo) -> LayerMask:
    """One layer's mask from its captured call."""
    mass = block_mass(
        call.q,
        call.k,
        scale=call.scale,
        query_block=momo.query_block,
        block=momo.block,
        sink=momo.sink,
        window=momo.window,
        dtype=torch.float32,
    )
    index = momo.select(call).blocks
    best = oracle_blocks(mass, momo.top_k)
    return LayerMask(
        layer,
        mass,
        index,
        mask_density(mass, index),
        captured_mass(mass, index).mean().item(),
        captured_mass(mass, best).mean().item(),
    )
