"""Attention over latents, in the two forms that have one result.

Absorbed: what expands a latent to a head's key moves to the query, and what expands it to a value
to the output, so that the cache is read as it lies, once for all heads (DeepSeek-V2, 2024).
Expanded: keys and values of a few heads at a time. For a prompt that is a third of the products.
"""

import dataclasses
from collections.abc import Callable

import torch

from attnplug.call import AttentionCall, LatentCall, PickedEntries
from attnplug.ops import latent_attention
from attnplug.ops.common.checks import WIDE_HEAD_DIMS

EXPANDED = 1 << 30  # bytes of the keys and values that are expanded at a time
Attend = Callable[[AttentionCall], torch.Tensor]


def attend_absorbed(call: LatentCall, slab: int) -> torch.Tensor:
    """`[B,S,Hq,Dv]` of a call, `slab` queries at a time: their latents `[B,slab,Hq,R]` are much
    memory."""
    queries = call.q.shape[2]
    if queries <= slab:
        return _attend(call)
    parts = [
        _attend(_slab(call, begin, min(begin + slab, queries))) for begin in range(0, queries, slab)
    ]
    return torch.cat(parts, 1)


def _slab(call: LatentCall, begin: int, end: int) -> LatentCall:
    """The queries from `begin` to `end` as a call of their own: the last of fewer tokens."""
    behind = call.q.shape[2] - end
    picks = _listed(call, begin, end)
    part = dataclasses.replace(call, q=call.q[:, :, begin:end], picks=picks)
    if call.lengths is not None:
        part.lengths = call.lengths - behind
        return part
    tokens = call.latents.shape[1] - behind
    part.latents, part.rope = call.latents[:, :tokens], call.rope[:, :tokens]
    part.key_mask = None if call.key_mask is None else call.key_mask[:, :tokens]
    return part


def _listed(call: LatentCall, begin: int, end: int) -> torch.Tensor | None:
    """The latents that the queries from `begin` to `end` read."""
    if isinstance(call.picks, PickedEntries):
        return call.picks.listed(begin, end)
    return None if call.picks is None else call.picks[:, begin:end]


def _attend(call: LatentCall) -> torch.Tensor:
    """`[B,S,Hq,Dv]` of `[B,Hq,S,Dk+P]`."""
    rotated = call.rope.shape[2]
    keys = call.q.shape[3] - rotated
    plain, turned = call.q.split([keys, rotated], -1)
    up = call.up.to(plain.dtype)
    bare = up.numel() == 0
    mixed = latent_attention(
        (plain if bare else plain @ up[:, :keys]).transpose(1, 2),
        turned.transpose(1, 2),
        call.latents,
        call.rope,
        _listed(call, 0, call.q.shape[2]),
        scale=call.scale,
        sinks=call.sinks,
        lengths=call.lengths,
        key_mask=call.key_mask,
    )
    if bare:
        return mixed
    return (mixed.transpose(1, 2) @ up[:, keys:].transpose(1, 2)).transpose(1, 2).contiguous()


def expanded_width(call: LatentCall) -> int | None:
    """The head dimension at which keys and values of a call are expanded, the shorter of both
    with zeros behind them; None where they are wider than what kernels serve."""
    keys = call.q.shape[3]
    values = call.up.shape[1] - (keys - call.rope.shape[2])
    return next((width for width in WIDE_HEAD_DIMS if width >= max(keys, values)), None)


def attend_expanded(call: LatentCall, width: int, attend: Attend) -> torch.Tensor:
    """`[B,S,Hq,Dv]` of a call without picks, by what attends to keys and values of `width`
    channels."""
    batch, heads, _, keys = call.q.shape
    values = call.up.shape[1] - (keys - call.rope.shape[2])
    a_head = batch * call.latents.shape[1] * 2 * width * call.latents.element_size()
    group = heads
    while group > 1 and a_head * group > EXPANDED:  # halves: compiled code is guarded by each
        group //= 2
    parts = []
    for begin in range(0, heads, group):
        few = slice(begin, begin + group)
        sinks = None if call.sinks is None else call.sinks[few]
        q = _padded(call.q[:, few], width)
        k, v = _expand(call, call.up[few].to(q.dtype), width)
        part = AttentionCall(
            q, k, v, call.scale, sinks=sinks, lengths=call.lengths, key_mask=call.key_mask
        )
        parts.append(attend(part)[..., :values])
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out.transpose(1, 2).contiguous()


def _expand(call: LatentCall, up: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[B,H,T,width]` of heads with `up` `[H,Dk+Dv,R]`."""
    plain = call.q.shape[3] - call.rope.shape[2]
    made = torch.einsum("btr,hdr->bhtd", call.latents, up)
    rope = call.rope[:, None].expand(-1, len(up), -1, -1)
    k = _padded(torch.cat((made[..., :plain], rope), -1), width)
    return k, _padded(made[..., plain:], width)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """`x` with zeros behind its last dimension."""
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
