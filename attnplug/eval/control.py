"""A policy that is broken on purpose: what a harness must tell apart from dense."""

import dataclasses
from typing import ClassVar

import torch

from attnplug.ops import block_sparse_attention
from attnplug.policies import AttentionCall, Dense, Phase, check_option


class BlockLists:
    """Key blocks `[B,Hq,NQ,k]` of every query block, as momo's `select` returns them."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Phase):
    """Block-sparse prefill over random earlier key blocks, with no correction: the negative
    control of `attnplug.eval`. Its local part and sink are momo's."""

    top_k: int = 16
    block: int = 64
    query_block: int = 128
    sink: int = 1
    window: int = 0
    seed: int = 0

    name: ClassVar[str] = "random_blocks"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def __post_init__(self) -> None:
        check_option(self.name, "top_k", self.top_k, 1 <= self.top_k <= 1024, "1 to 1024")

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not call.whole or call.sinks is not None:
            return Dense().attend(call)
        out, _ = block_sparse_attention(
            call.q,
            call.k,
            call.v,
            self.select(call).blocks,
            query_block=self.query_block,
            block=self.block,
            sink=self.sink,
            window=self.window,
            start=call.start,
            **call.options,
        )
        return out

    def select(self, call: AttentionCall) -> BlockLists:
        """Random blocks before each query block, other ones for each head."""
        batch, heads, tokens, _ = call.q.shape
        rows, blocks = -(-tokens // self.query_block), -(-tokens // self.block)
        seeded = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(
            1, heads, rows, blocks, generator=seeded, dtype=torch.float32, device="cpu"
        ).to(call.q.device)
        last = torch.arange(rows, device=call.q.device)[:, None] * self.query_block
        ends = (torch.arange(blocks, device=call.q.device) + 1) * self.block
        scores = scores.masked_fill(ends > last, -1.0)
        best, index = scores.topk(min(self.top_k, blocks), dim=-1)
        index = index.masked_fill(best < 0, blocks).sort(-1).values
        index = index.masked_fill(index == blocks, -1).to(torch.int32)
        return BlockLists(index.expand(batch, -1, -1, -1).contiguous())
