"""Policies, caches and steps of the tests of gather."""

import dataclasses

import torch
from transformers.cache_utils import StaticLayer

from attnplug import Gather
from attnplug.ops.gather.block_bounds import frame_of
from attnplug.ops.gather.spread import spread_parts
from attnplug.policies import AttentionCall
from attnplug.policies.gather import GatherLayer

GATHER = Gather(k=2, block=16, sink=1, local=2, scoring="bounds", min_tokens=0, bounds="int8")
EXACT = dataclasses.replace(GATHER, bounds="exact")
SPREAD = dataclasses.replace(GATHER, bounds=None, scoring="spread")
SIZE, HEADS, KV_HEADS, DIM = 200, 4, 2, 64


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys and values of `count` new tokens, `[2,B,Hkv,count,D]`; neighbours are alike, so that
    blocks differ."""
    drift = random(seed, 2, batch, KV_HEADS, count // 8 + 1, DIM).repeat_interleave(8, 3)
    return (drift[:, :, :, :count] + 0.5 * random(seed + 1, 2, batch, KV_HEADS, count, DIM)).to(
        device
    )


def filled(policy: Gather, kv: torch.Tensor, size: int = SIZE) -> GatherLayer:
    """The policy's cache layer with these keys and values in it."""
    layer = policy.cache_layer(size)
    layer.update(kv[0], kv[1])
    return layer


def step(layer: StaticLayer, seed: int = 0, mask: torch.Tensor | None = None, **options):
    """The call of a decode step whose token is in the layer already."""
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    q = random(seed, keys.shape[0], HEADS, 1, DIM).to(keys.device)
    lengths = layer.cumulative_length.reshape(1)
    return AttentionCall(
        q, keys, values, DIM**-0.5, lengths=lengths, key_mask=mask, state=layer, **options
    )


def bounds_of(layer: GatherLayer) -> torch.Tensor:
    """What the summaries say, `[B,Hkv,blocks,2,D]` fp64: max and min, or mean and variance."""
    if not layer.form[1]:
        return layer.bounds.double().cpu()
    blocks = -(-SIZE // layer.block)
    if layer.form[1] == torch.uint8:
        codes, bits = (x.cpu() for x in spread_parts(layer.bounds, blocks))
        scales = bits.contiguous().view(torch.bfloat16).double().permute(0, 1, 4, 2, 3)
        return codes.double() * scales.repeat_interleave(32, -1)[..., :DIM]
    centre, unit, scale = (x.double().cpu() for x in frame_of(layer.bounds, blocks))
    codes = layer.bounds[:, :, :blocks].double().cpu()
    step = (unit[:, :, None] * scale[..., None])[:, :, :, None]
    return centre[:, :, None, None] + step * codes
