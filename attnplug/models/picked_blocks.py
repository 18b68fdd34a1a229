"""Layers whose model picks blocks of keys for each KV head (MiniMax-M3's sparse attention).

An indexer takes the best score of each block of 128 keys, and attention reads the best 16 blocks of
a query. transformers computes float32 scores `[B,heads,S,T]` for that, and for sdpa a mask of
`[B,Hq,S,T]`. Here an op takes the blocks' best scores without keeping the others, for a slab of
queries at a time. Under the name of attnplug's attention no mask is built: the picks come to the
attention function, where an op reads these blocks alone. No tensor grows with S times T.

transformers counts blocks from the cache's first slot and a query's keys by its position id, while
the causal mask is over slots. Where rows are padded on the left the two differ, and a query may be
left without a key that it sees: the mask hides all keys alike then, and softmax gives each of them
the same weight. So it is here.
"""

import sys
from typing import Any

import torch

from attnplug.call import AttentionCall, PickedBlocks, Served
from attnplug.errors import UnsupportedCallError
from attnplug.models import known_blocks
from attnplug.models.hf import Binding, as_autocast, stock_function
from attnplug.models.known_code import same_code
from attnplug.models.own_code import names_of, own_code, why_replaced
from attnplug.ops import block_maxima
from attnplug.ops.common.checks import BLOCKS, why_not_width
from attnplug.ops.common.sizes import cdiv

WORKSPACE = 64 << 20  # bytes of the blocks' scores at a time
ROTATE = "apply_rotary_pos_emb"  # of the file of an indexer
PICKS = "block_indices"  # by which name an attention function is handed the picks


def picks_blocks(module: Any) -> bool:
    """Whether an attention module has an indexer that picks blocks."""
    return hasattr(getattr(module, "indexer", None), "build_block_mask")


def why_not_blocks(module: Any) -> str:
    """Why the picks of such a module cannot be served; "" where they can."""
    indexer, kind = module.indexer, type(module.indexer)
    known = same_code(kind.forward, known_blocks.forward)
    known = known and same_code(kind.build_block_mask, known_blocks.build_block_mask)
    rotate = getattr(sys.modules.get(kind.__module__), ROTATE, None)  # that `pick_blocks` calls
    if not known or rotate is not names_of(kind).get(ROTATE):
        return f"{kind.__name__} picks in a way that attnplug does not know"
    replaced = why_replaced(indexer, "build_block_mask")
    if replaced:
        return replaced
    code = getattr(own_code(type(module).forward), "__code__", None)
    constants = () if code is None else code.co_consts
    if not any(isinstance(each, tuple) and PICKS in each for each in constants):
        return f"{type(module).__name__} does not hand its picks to its attention function"
    heads_kv = module.config.num_key_value_heads
    if indexer.num_heads != heads_kv:
        return f"{kind.__name__} picks for {indexer.num_heads} heads, not for each of {heads_kv}"
    if indexer.block_size not in BLOCKS:
        served = ", ".join(map(str, BLOCKS))
        return f"{kind.__name__} picks blocks of {indexer.block_size} keys, not of {served}"
    return why_not_width(module.head_dim) or why_not_width(indexer.head_dim)


def pick_blocks(
    indexer: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    cache: Any,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """The picks `[B,H,S,K]` of an indexer: its forward (see known_blocks.py), but that an op takes
    the place of scores and their maxima, for a slab of queries at a time."""
    rows, tokens, _ = hidden_states.shape
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb  # pyright: ignore[reportAttributeAccessIssue]
    shape = rows, tokens, -1, indexer.head_dim
    with torch.no_grad():
        q = indexer.q_norm(indexer.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = indexer.k_norm(indexer.k_proj(hidden_states).view(shape)).transpose(1, 2)
        q, k = rotate(q, k, *(each[..., : indexer.head_dim] for each in position_embeddings))
        if cache is not None:
            k = cache.layers[indexer.layer_idx].update_index(k)
        q = q.to(k.dtype)  # autocast mixes precisions
        slab = max(1, WORKSPACE // (4 * rows * q.shape[1] * cdiv(k.shape[2], indexer.block_size)))
        if tokens <= slab:
            return _best_blocks(indexer, q, k, position_ids)
        found = []
        for begin in range(0, tokens, slab):
            here = slice(begin, min(begin + slab, tokens))
            found.append(_best_blocks(indexer, q[:, :, here], k, position_ids[:, here]))
        return torch.cat(found, 2)


def _best_blocks(
    indexer: Any, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """The end of an indexer's forward, from the maxima of the blocks on."""
    scores = block_maxima(q, k[:, 0], position_ids, block=indexer.block_size)
    if indexer.local_blocks > 0:
        back = torch.arange(indexer.local_blocks, device=q.device)
        local = (position_ids[..., None] // indexer.block_size - back).clamp(min=0)
        scores.scatter_(-1, local[:, None].expand(-1, q.shape[1], -1, -1), float("inf"))
    best, index = scores.topk(min(indexer.topk_blocks, scores.shape[-1]), -1)
    return index.masked_fill(best == float("-inf"), -1)


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
    assert binding.policy is not None  # all layers of a model have one, or none has the name
    out = binding.policy.attend(call)
    binding.note_served(queries, Served(call.served_by), call.state)
    return out.transpose(1, 2).contiguous(), None


def refuse_missing_picks(module: Any, index: torch.Tensor | None) -> None:
    """Raise UnsupportedCallError where a layer that picks has handed on no picks."""
    if index is None and picks_blocks(module):
        raise UnsupportedCallError(
            f"{type(module).__name__} has an indexer and calls its attention without "
            f"{PICKS}: its code was changed after attnplug.apply. Remove the policy first."
        )
