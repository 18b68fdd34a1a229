"""Policies, caches and steps of the tests of gather."""

import dataclasses

import torch
from step_cases import DIM, KV_HEADS, random

from attnplug import Gather
from attnplug.ops.gather.block_bounds import frame_of
from attnplug.policies.gather import GatherLayer

GATHER = Gather(k=2, block=16, sink=1, local=2, scoring="bounds", min_tokens=0, bounds="int8")
EXACT = dataclasses.replace(GATHER, bounds="exact")
BAND = dataclasses.replace(GATHER, scoring="band")
SIZE = 200


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys and values of `count` new tokens, `[2,B,Hkv,count,D]`; neighbours are alike, so that
    blocks differ."""
    drift = random(seed, 2, batch, KV_HEADS, count // 8 + 1, DIM).repeat_interleave(8, 3)
    return (drift[:, :, :, :count] + 0.5 * random(seed + 1, 2, batch, KV_HEADS, count, DIM)).to(
        device
    )


def bounds_of(layer: GatherLayer) -> torch.Tensor:
    """What the summaries say, `[B,Hkv,blocks,2,D]` fp64: max and min, or a band's edges."""
    if not layer.form[1]:
        return layer.bounds.double().cpu()
    blocks = -(-SIZE // layer.block)
    centre, unit, scale, width = (x.double().cpu() for x in frame_of(layer.bounds, blocks))
    codes = layer.bounds[:, :, :blocks].double().cpu()
    step = (unit[:, :, None] * scale[..., None])[:, :, :, None]
    said = centre[:, :, None, None] + step * codes
    if layer.form.parts == 1:
        half = (unit[:, :, None] * width[..., None])[:, :, :, None]
        said = torch.cat([said + half, said - half], 3)
    return said
