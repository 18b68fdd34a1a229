"""Prefills of the literature as policies for evaluation only, of as many blocks as momo's default
lists. bench/rival_masks.py says how they choose what to read, bench/rivals.py has the commands.

    pooled_blocks    MInference's block-sparse heads (Jiang et al., 2024): pooled queries and keys
    vertical_slash   MInference's heads of that name

They compute all scores, a query block at a time, and mask them."""

import dataclasses
from typing import ClassVar

import torch
from rival_masks import (
    BLOCK,
    QUERY_BLOCK,
    diagonals,
    last_attention,
    mean_pooling,
    slash_blocks,
)

from attnplug import Momo
from attnplug.eval.mass import BlockMass, visible_blocks
from attnplug.policies import AttentionCall, Dense, LayerShape, Phase


def logits_of(call: AttentionCall, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled (and capped) products of `q [...,m,d]` and `k [...,n,d]`."""
    logits = q @ k.mT * call.scale
    return call.softcap * torch.tanh(logits / call.softcap) if call.softcap else logits


@dataclasses.dataclass(frozen=True)
class MaskedPrefill(Phase):
    """Prefill over whole blocks, and keys of some columns; `top_k` 0 is as many blocks as momo's
    default lists."""

    top_k: int = 0

    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def __post_init__(self) -> None:
        self.check_integers("top_k")
        self.check("top_k", self.top_k >= 0, "at least 0")

    def refusal(self, shape: LayerShape) -> str | None:
        if shape.sinks:
            return f"{self.name}: attention sinks"
        return super().refusal(shape)

    def mask(self, call: AttentionCall, mass: BlockMass) -> tuple[torch.Tensor, torch.Tensor]:
        """Key blocks `[Hq,NQ,NB]` that each query block reads, and columns `[Hq,T]` that all do, of
        one prompt."""
        raise NotImplementedError

    def budgets(self, call: AttentionCall) -> torch.Tensor:
        """`[NQ]`: blocks for each query block."""
        if self.top_k == 0:
            return Momo(block=BLOCK, query_block=QUERY_BLOCK).budgets(call)
        return call.q.new_full((-(-call.q.shape[2] // QUERY_BLOCK),), self.top_k, dtype=torch.int64)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not call.whole:
            return Dense().attend(call)
        out = torch.zeros_like(call.q)
        firsts = [0] * len(call.q) if call.first_key is None else call.first_key.tolist()
        for row, first in enumerate(firsts):
            parts = {name: getattr(call, name)[row : row + 1, :, first:] for name in "qkv"}
            one = dataclasses.replace(call, **parts, start=None, key_mask=None)
            hidden = None if call.key_mask is None else ~call.key_mask[row, first:]
            out[row, :, first:] = self._attend(one, hidden)
        return out

    def _attend(self, call: AttentionCall, hidden: torch.Tensor | None) -> torch.Tensor:
        """One prompt `[Hq,T,D]`, a query block at a time."""
        heads, tokens = call.q.shape[1:3]
        number = -(-tokens // QUERY_BLOCK)
        values = call.q.new_empty(1, heads, number, -(-tokens // BLOCK))
        at = torch.arange(tokens, device=call.q.device)
        mass = BlockMass(values, at[:number], QUERY_BLOCK, BLOCK, 1, 0)
        blocks, columns = self.mask(call, mass)
        k, v = (x[0].float().repeat_interleave(heads // len(x[0]), 0) for x in (call.k, call.v))
        out = torch.empty_like(call.q[0])
        for block in range(number):
            first, end = block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, tokens)
            read = blocks[:, block].repeat_interleave(BLOCK, -1)[:, :end] | columns[:, :end]
            read = read[:, None] & (at[:end] <= at[first:end, None])
            if hidden is not None:
                read = read & ~hidden[:end]
            logits = logits_of(call, call.q[0, :, first:end].float(), k[:, :end])
            shares = logits.masked_fill(~read, -torch.inf).softmax(-1)
            out[:, first:end] = (shares @ v[:, :end]).to(out.dtype)
        return out


@dataclasses.dataclass(frozen=True)
class PooledBlocks(MaskedPrefill):
    name: ClassVar[str] = "pooled_blocks"

    def mask(self, call: AttentionCall, mass: BlockMass) -> tuple[torch.Tensor, torch.Tensor]:
        budgets = self.budgets(call)
        lists = mean_pooling(call, mass, int(budgets.max()))
        rank = torch.arange(lists.shape[-1], device=lists.device)
        lists = lists.masked_fill(rank >= budgets[:, None], -1)
        none = torch.zeros(call.q.shape[1:3], dtype=torch.bool, device=call.q.device)
        return visible_blocks(mass, lists)[0], none


@dataclasses.dataclass(frozen=True)
class VerticalSlash(MaskedPrefill):
    """Half of the budget in diagonals, half in columns, the same for all query blocks."""

    name: ClassVar[str] = "vertical_slash"

    def mask(self, call: AttentionCall, mass: BlockMass) -> tuple[torch.Tensor, torch.Tensor]:
        half, tokens = int(self.budgets(call).float().mean()) // 2, call.q.shape[2]
        attention = last_attention(call)
        slashes = slash_blocks(diagonals(attention, tokens), mass, half)
        best = attention.sum(1).topk(min(tokens, half * BLOCK), -1).indices
        columns = torch.zeros(call.q.shape[1:3], dtype=torch.bool, device=call.q.device)
        return visible_blocks(mass, slashes)[0], columns.scatter_(1, best, True)
