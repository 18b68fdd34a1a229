"""trained: the sparsity that a model was trained with, at the cost of what it reads.

DeepSeek-V3.2's indexer scores a cache's tokens for each query, and its attention reads the best
2,048 of them. So do GLM-5, dots.note, A.X K2, Hunyuan 4 and Mistral Large 4. There is nothing to
approximate: the picks are the model's own, and the output is that of dense attention over them. A
query reads picks and index keys, where transformers computes masks and expanded keys of all tokens.

With W_k and W_v, a head's parts of the matrix that expands a latent c to key and value, and the
rotated parts q', k' of query and key:

    scores_t = scale ((W_k^T q) . c_t + q' . k'_t)        out = W_v sum_t softmax(scores)_t c_t

so that the latents are read as they lie in the cache, once for all heads. MiniMax-M3's indexer
picks blocks of plain keys and values for each KV head, which the op of `gather` reads. Qwen4-Exp's
picks blocks of 4 tokens by their compressed keys, which `gvr`'s op reads token by token, and
GLM-5.3's pools of 16 tokens. DeepSeek-V4 reads a window and compressed entries, which are latents
themselves. (DeepSeek-V2, 2024, DeepSeek-V3.2, 2025, MiniMax-M3, Qwen4-Exp, GLM-5.3 and DeepSeek-V4,
2026.)
"""

import dataclasses
from typing import Any, ClassVar

import torch

from attnplug.call import (
    AttentionCall,
    LatentCall,
    LayerShape,
    PickedBlocks,
    PickedCompressed,
    PickedEntries,
)
from attnplug.models.cache import PlugLayer
from attnplug.ops import gather_attention, gather_tokens_attention
from attnplug.ops.common.device import card
from attnplug.policies._absorbed import attend_absorbed
from attnplug.policies._indexed_layer import IndexedLayer
from attnplug.policies.base import Phase

INDEXES = ("model", "fp8")
WIDE = (
    "its index keys were in the model's dtype, not in fp8: make the cache with attnplug.make_cache"
)
SLAB = 4096  # queries whose latents are there at a time: `[4096,Hq,R]`, 0.5 GiB for 128 heads
LISTS = 64 << 20  # bytes of lists of picked tokens that are there at a time
PROGRAMS = 65535  # of queries and KV heads: CUDA starts no more along a grid's second dimension


@dataclasses.dataclass(frozen=True)
class Trained(Phase):
    """Prefill and decode of layers whose model picks the tokens, or blocks, that they read.

    `"trained"` serves these layers and leaves others to what the policy says besides
    ("momo+gather+trained"); `auto` takes it wherever a layer has an indexer. How many tokens a
    query reads is the model's config (`index_topk`).

    Args:
        index: in what the cache keeps the keys of an indexer that scores tokens. "model": in the
            model's dtype, as transformers does, so that the picks are the model's own. "fp8": in
            float8_e4m3fn with a factor for each key, as DeepSeek's own code does: half of the
            memory, longer steps, and a few other picks. Indexers of blocks, of pools and of
            compressed keys keep theirs as they are, and so do calls without a cache, or with
            one that attnplug did not make: `report(model).last` says so.
    """

    index: str = "model"

    name: ClassVar[str] = "trained"
    phases: ClassVar[frozenset[str]] = frozenset({"trained"})
    on_request: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})

    def __post_init__(self) -> None:
        self.check("index", self.index in INDEXES, " or ".join(INDEXES))

    def refusal(self, shape: LayerShape) -> str | None:
        if not shape.indexed:
            return "trained: the layer has no indexer"
        if self.index == "fp8" and shape.device.type == "cuda" and not card(shape.device).fp8:
            return "trained(index='fp8'): this GPU does not convert float8_e4m3fn"
        return None

    def note(self, shape: LayerShape) -> str:
        if shape.entries:
            window, rate, _ = shape.entries
            return f"keeps {window:,} tokens" + (f" and an entry for every {rate}" if rate else "")
        return f"keeps latents, {shape.latent:,} numbers a token" if shape.latent else ""

    def cache_layer(self, max_length: int) -> PlugLayer:
        return IndexedLayer(max_cache_len=max_length, in_fp8=self.index == "fp8")

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Over the blocks that the model has picked."""
        if isinstance(call.picked, PickedCompressed):
            return _attend_compressed(call, call.picked)
        assert call.picked is not None  # another layer is refused
        queries = call.q.shape[2]
        slab = max(1, min(SLAB, PROGRAMS // call.k.shape[1]))
        if queries <= slab:
            out, lse = _attend_blocks(call, 0, queries)
        else:
            parts = [
                _attend_blocks(call, begin, min(begin + slab, queries))
                for begin in range(0, queries, slab)
            ]
            out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
        if call.key_mask is None:
            return out
        sees = lse > float("-inf")
        return torch.where(sees[..., None], out, _mean_value(call))

    def attend_latents(self, call: LatentCall) -> torch.Tensor:
        call.served_by, slab = self.name, SLAB
        of_tokens = isinstance(call.picks, torch.Tensor)
        if of_tokens and self.index == "fp8" and not getattr(call.state, "in_fp8", False):
            call.why_other = WIDE
        if isinstance(call.picks, PickedEntries):
            slab = max(1, min(SLAB, LISTS // (8 * len(call.q) * call.picks.most)))
        return attend_absorbed(call, slab)


def _attend_compressed(call: AttentionCall, picked: PickedCompressed) -> torch.Tensor:
    """Over the tokens of picked blocks, for a slab of queries at a time: a query that sees none
    gives 0."""
    (rows, _, queries, _), heads = call.q.shape, call.k.shape[1]
    each = 8 * rows * max(2, heads) * picked.most  # bytes of a query's list while it is made
    slab = max(1, min(SLAB, PROGRAMS // heads, LISTS // each))

    def part(begin: int, end: int) -> torch.Tensor:
        q, k, v, lengths, _ = _part(call, begin, end)
        index = picked.tokens(begin, end)[:, None].expand(-1, heads, -1, -1)
        options = {"scale": call.scale, "sink": 0, "window": 0, "lengths": lengths}
        return gather_tokens_attention(q, k, v, index, **options)[0]

    if queries <= slab:  # a loop would have compiled code know the number of queries
        return part(0, queries)
    begins = range(0, queries, slab)
    return torch.cat([part(begin, min(begin + slab, queries)) for begin in begins], 2)


def _attend_blocks(call: AttentionCall, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out `[B,Hq,T,D]`, lse `[B,Hq,T]`) of the queries from `begin` to `end`."""
    assert isinstance(call.picked, PickedBlocks)
    q, k, v, lengths, mask = _part(call, begin, end)
    return gather_attention(
        q,
        k,
        v,
        call.picked.blocks[:, :, begin:end],
        scale=call.scale,
        block=call.picked.size,
        sink=0,
        local=0,
        lengths=lengths,
        key_mask=mask,
    )


def _part(call: AttentionCall, begin: int, end: int) -> tuple[Any, ...]:
    """q, k, v, lengths and key mask of the queries from `begin` to `end`, as a call of their own:
    the last of fewer tokens."""
    behind, size = call.q.shape[2] - end, call.k.shape[2]
    lengths, mask = call.lengths, call.key_mask
    if lengths is not None:
        lengths = lengths - behind
    else:
        size -= behind
    k, v = call.k[:, :, :size], call.v[:, :, :size]
    return call.q[:, :, begin:end], k, v, lengths, None if mask is None else mask[:, :size]


def _mean_value(call: AttentionCall) -> torch.Tensor:
    """`[B,Hq,1,D]`: what a query gives that sees no key, as its picks are padding. transformers'
    mask hides all keys alike then, so that they have equal weights: all that the cache holds, or
    in a static cache of its own all slots."""
    values = call.v.float()
    if call.lengths is not None and isinstance(call.state, PlugLayer):
        there = torch.arange(values.shape[2], device=values.device) < call.lengths
        mean = values.masked_fill(~there[:, None], 0).sum(2, keepdim=True) / call.lengths
    else:
        mean = values.mean(2, keepdim=True)
    group = call.q.shape[1] // call.v.shape[1]
    return mean.to(call.q.dtype).repeat_interleave(group, 1)
