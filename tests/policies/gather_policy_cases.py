"""Policies, caches and steps of the tests of gather."""

import dataclasses

import torch
from step_cases import DIM, KV_HEADS, random

from attnplug import Gather
from attnplug.ops.gather.block_bounds import frame_of
from attnplug.ops.gather.spread import spread_parts
from attnplug.policies.gather import GatherLayer

GATHER = Gather(k=2, block=16, sink=1, local=2, scoring="bounds", min_tokens=0, bounds="int8")
EXACT = dataclasses.replace(GATHER, bounds="exact")
BAND = dataclasses.replace(GATHER, scoring="band")
SPREAD = dataclasses.replace(GATHER, bounds=None, scoring="spread")
SIZE = 200


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys and values of `count` new tokens, `[2,B,Hkv,count,D]`; neighbours are alike, so that
    blocks differ."""
    drift = random(seed, 2, batch, KV_HEADS, count // 8 + 1, DIM).repeat_interleave(8, 3)
    return (drift[:, :, :, :count] + 0.5 * random(seed + 1, 2, batch, KV_HEADS, count, DIM)).to(
        device
    )


def bounds_of(layer: GatherLayer) -> torch.Tensor:
    """What the summaries say, `[B,Hkv,blocks,2,D]` fp64: max and min, or mean and variance, or
    a band's edges."""
    if not layer.form[1]:
        return layer.bounds.double().cpu()
    blocks = -(-SIZE // layer.block)
    if layer.form[1] == torch.uint8:
        codes, bits = (x.cpu() for x in spread_parts(layer.bounds, blocks))
        scales = bits.contiguous().view(torch.bfloat16).double().permute(0, 1, 4, 2, 3)
        return codes.double() * scales.repeat_interleave(32, -1)[..., :DIM]
    centre, unit, scale, width = (x.double().cpu() for x in frame_of(layer.bounds, blocks))
    codes = layer.bounds[:, :, :blocks].double().cpu()
    step = (unit[:, :, None] * scale[..., None])[:, :, :, None]
    said = centre[:, :, None, None] + step * codes
    if layer.form.parts == 1:
        half = (unit[:, :, None] * width[..., None])[:, :, :, None]
        said = torch.cat([said + half, said - half], 3)
    return said
