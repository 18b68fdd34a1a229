"""Layers whose model picks blocks of keys for each KV head (MiniMax-M3's sparse attention).

An indexer takes the best score of each block of 128 keys, and attention reads the best 16 blocks of
a query. transformers computes float32 scores `[B,heads,S,T]` for that, and for sdpa a mask of
`[B,Hq,S,T]`. Under the name of attnplug's attention no mask is built, and the picks come to the
attention function, where an op reads these blocks alone. A long prompt goes through the indexer's
own code in slabs of queries, so that no tensor grows with S times T.

transformers counts blocks from the cache's first slot and a query's keys by its position id, while
the causal mask is over slots. Where rows are padded on the left the two differ, and a query may be
left without a key that it sees: the mask hides all keys alike then, and softmax gives each of them
the same weight. So it is here.
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from attnplug.call import AttentionCall, PickedBlocks, Served
from attnplug.errors import UnsupportedCallError
from attnplug.models import known_blocks
from attnplug.models.cache import PlugLayer
from attnplug.models.hf import Binding, as_autocast, stock_function
from attnplug.models.known_code import same_code
from attnplug.ops.common.checks import BLOCKS, why_not_width

WORKSPACE = 256 << 20  # bytes of an indexer's scores at a time, of which it makes a few copies
PICKS = "block_indices"  # by which name an attention function is handed the picks


def picks_blocks(module: Any) -> bool:
    """Whether an attention module has an indexer that picks blocks."""
    return hasattr(getattr(module, "indexer", None), "build_block_mask")


def why_not_blocks(module: Any) -> str:
    """Why the picks of such a module cannot be served; "" where they can."""
    indexer, kind = module.indexer, type(module.indexer)
    known = same_code(kind.forward, known_blocks.forward)
    if not (known and same_code(kind.build_block_mask, known_blocks.build_block_mask)):
        return f"{kind.__name__} picks in a way that attnplug does not know"
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    if not any(isinstance(each, tuple) and PICKS in each for each in constants):
        return f"{type(module).__name__} does not hand its picks to its attention function"
    heads_kv = module.config.num_key_value_heads
    if indexer.num_heads != heads_kv:
        return f"{kind.__name__} picks for {indexer.num_heads} heads, not for each of {heads_kv}"
    if indexer.block_size not in BLOCKS:
        served = ", ".join(map(str, BLOCKS))
        return f"{kind.__name__} picks blocks of {indexer.block_size} keys, not of {served}"
    return why_not_width(module.head_dim)


class _Parts:
    """What an indexer is given in the place of a cache while a prompt goes through it in parts:
    `layers[index].update_index` adds the keys of a part to those of the layer, or keeps them by
    itself where there is no cache. `behind` tokens of the prompt come after the part."""

    def __init__(self, index: int, layer: Any):
        self.layers = {index: self}
        self.layer, self.behind = layer, 0
        self.keys: torch.Tensor | None = None

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, PlugLayer):
            return self.layer.update_index(keys, behind=self.behind)  # pyright: ignore[reportAttributeAccessIssue]
        if self.layer is not None:
            return self.layer.update_index(keys)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], -2)
        return self.keys


def pick_blocks(
    indexer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """The picks `[B,H,S,K]` of an indexer by its own forward, of as many queries at a time as have
    `WORKSPACE` bytes of scores."""
    forward, index = type(indexer).forward, indexer.layer_idx
    rows, tokens = hidden_states.shape[:2]
    layer = None if cache is None else cache.layers[index]
    slab = max(1, WORKSPACE // (4 * rows * indexer.num_heads * _slots(layer, tokens)))
    with torch.no_grad():
        if tokens <= slab:
            return forward(indexer, hidden_states, position_embeddings, cache, position_ids)
        parts, found = _Parts(index, layer), []
        for begin in range(0, tokens, slab):
            here = slice(begin, min(begin + slab, tokens))
            parts.behind = tokens - here.stop
            turns = tuple(each[:, here] for each in position_embeddings)
            found.append(
                forward(indexer, hidden_states[:, here], turns, parts, position_ids[:, here])
            )
    most = max(each.shape[3] for each in found)  # the first parts may see fewer blocks
    pad = torch.nn.functional.pad
    return torch.cat([pad(each, (0, most - each.shape[3]), value=-1) for each in found], 2)


def _slots(layer: Any, tokens: int) -> int:
    """How many keys an indexer scores at most, known from shapes."""
    if layer is None:
        return tokens
    if isinstance(layer, StaticLayer):
        return layer.max_cache_len
    return layer.get_seq_length()  # the layer's update has counted the new ones


def attend_blocks(
    module: Any,
    binding: Binding[Any],
    call: AttentionCall,
    index: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention over the picks `[B,Hkv,T,K]` of a layer. `mask` is one of the user's own, which the
    model's own attention takes together with the picks, or None. Returns `[B,T,Hq,D]`."""
    queries = call.q.shape[2]
    if mask is not None:
        binding.note_served(queries, Served(binding.stock, "the call has a mask of its own"))
        keys, ids = call.k.shape[2], kwargs.get("position_ids")
        made = module.indexer.build_block_mask(
            index, mask[..., :keys], keys, call.q.dtype, call.q.device, ids
        )
        stock = stock_function(module, binding.stock)
        return stock(module, call.q, call.k, call.v, made, scaling=call.scale, **kwargs)[0], None
    call.q, call.k, call.v = as_autocast(call.q, call.k, call.v, call.state)
    call.picked = PickedBlocks(index.to(torch.int32), module.indexer.block_size)
    out = binding.policy.attend(call)
    if not (isinstance(call.state, PlugLayer) and call.state.round_part):
        binding.note_served(queries, Served(call.served_by))
    return out.transpose(1, 2).contiguous(), None


def refuse_missing_picks(module: Any, index: torch.Tensor | None) -> None:
    """Raise UnsupportedCallError where a layer that picks has handed on no picks."""
    if index is None and picks_blocks(module):
        raise UnsupportedCallError(
            f"{type(module).__name__} has an indexer and calls its attention without "
            f"{PICKS}: its code was changed after attnplug.apply. Remove the policy first."
        )
