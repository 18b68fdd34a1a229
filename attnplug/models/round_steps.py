"""The steps of rounds as functions of tensors that never move (rounds.py): one dense pass that
verifies drafts, and a dense step where rounds have ended."""

from dataclasses import dataclass
from typing import Any

import torch

from attnplug.models.cache import PlugCache
from attnplug.models.decode_step import argmax, decode_step, masks_by_type
from attnplug.models.names import CACHE
from attnplug.models.sliding import round_of, sliding_layers
from attnplug.models.slots import full_layers, take_back


@dataclass
class Feed:
    """What a verification is given and leaves, at fixed addresses: each row's last token and the
    drafts behind it `[B,m+1]`, how many of these the round has made `[]`, and how many dense
    accepts, then its own tokens `[B,m+2]`."""

    tokens: torch.Tensor
    drafted: torch.Tensor
    found: torch.Tensor

    @property
    def place(self) -> tuple[int, int, torch.device]:
        """How many rows and drafts there are room for, and where."""
        return len(self.tokens), self.tokens.shape[1] - 1, self.tokens.device

    @classmethod
    @torch.inference_mode(False)  # it serves calls outside of it, too
    def empty(cls, rows: int, drafts: int, device: torch.device) -> "Feed":
        zeros = torch.zeros
        return cls(
            zeros((rows, drafts + 1), dtype=torch.int64, device=device),
            zeros((), dtype=torch.int64, device=device),
            zeros((rows, drafts + 2), dtype=torch.int64, device=device),
        )


def verify_step(
    model: Any,
    cache: PlugCache,
    tokens: torch.Tensor,
    drafted: torch.Tensor,
    found: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    mask: torch.Tensor | None,
    going: torch.Tensor,
    greedy: bool,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Take back what the drafts have fed, and feed the last tokens with all drafts. If this round
    has made fewer drafts than there is room for, drafts of earlier rounds fill the rest. Where
    `greedy`, settle the round; else return the logits `[B,m+1,V]` in float32."""
    fed = tokens.shape[1]
    take_back(full_layers(cache), drafted)
    position.sub_(drafted)
    places = torch.arange(fed, device=tokens.device, dtype=position.dtype)
    masks: Any = None
    if mask is not None:
        slot.sub_(drafted)
        mask.index_fill_(3, slot + places, True)
        slot.add_(fed)
        masks = mask.view(torch.uint8)  # as `plug_mask` has it
    beside = round_of(cache.layers)
    if beside is not None:
        masks = masks_by_type(masks, beside.mask(fed))
    outputs = model(
        input_ids=tokens,
        position_ids=position + places,
        attention_mask=masks,
        use_cache=True,
        return_dict=True,
        **{CACHE: cache},
        **options,
    )
    logits = outputs.logits.to(dtype=torch.float32, copy=True)
    if not greedy:
        return logits
    chosen = argmax(logits.flatten(0, 1)).unflatten(0, tokens.shape)
    settle(cache, tokens, drafted, found, token, position, slot, mask, going, chosen)
    return None


def settle(
    cache: PlugCache,
    tokens: torch.Tensor,
    drafted: torch.Tensor,
    found: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    mask: torch.Tensor | None,
    going: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Accept the drafts of this round that equal what dense has `chosen` behind the last token and
    them `[B,drafted+1]`, or more, before the first that does not, and have the caches hold or show
    these alone. Rows that are not `going` `[B]` stay where they ended. Nothing is read on the
    host."""
    fed, known = tokens.shape[1], chosen.shape[1]
    same = chosen[:, :-1] == tokens[:, 1:known]
    accepted = same.int().cumprod(1).sum(1, keepdim=True, dtype=torch.int64)
    accepted = torch.minimum(accepted, drafted)
    if mask is None:
        take_back(full_layers(cache), (fed - 1 - accepted).reshape(()))
    else:
        places = torch.arange(fed, device=tokens.device)
        mask[:, 0, 0].scatter_(1, (slot - fed + places).expand_as(tokens), places <= accepted)
        take_back(full_layers(cache), fed - 1 - drafted)
        slot.sub_(fed - 1 - drafted)
    beside = round_of(cache.layers)
    if beside is not None:
        beside.settle(sliding_layers(cache.layers), accepted + 1)
    position.add_((accepted + 1) * going[:, None])
    token.copy_(chosen.gather(1, accepted).clamp(min=0))  # -1, which is looked at, is no token
    found[:, :1].copy_(accepted)
    found[:, 1 : known + 1].copy_(chosen)


def dense_step(
    model: Any,
    cache: PlugCache,
    token: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    mask: torch.Tensor | None,
    window: torch.Tensor | None,
    going: torch.Tensor,
    *others: Any,
) -> torch.Tensor | None:
    """A `decode_step` between rounds: windows move on by its token, and rows that are not `going`
    `[B]` stay where they ended."""
    state = token, position, slot, mask, window, going
    found = decode_step(model, cache, *state, *others)
    position.sub_((~going).long()[:, None])
    beside = round_of(cache.layers)
    if beside is not None:
        beside.settle(sliding_layers(cache.layers), torch.ones_like(position))
    return found
