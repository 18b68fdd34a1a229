"""Layers that were trained to read few tokens (DeepSeek-V3.2's sparse attention and its heirs).

An indexer scores the cached tokens for each query, and attention over latents reads the best of
them. transformers computes the scores `[B,S,heads,T]`, a mask `[B,S,T]`, and keys and values of all
heads for the whole cache. Here an op picks without keeping the scores, and another one attends to
the picked latents as they lie in the cache.

A model's own code runs but for three places, on the instance: the end of the indexer's `forward`,
from the scores on (the part is recognised by its text, and a layer with another one is left to the
model); `expand_kv`, which hands the latents on as they are; and the attention function, which is
registered under a name of its own so that the model passes it the picks.
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from attnplug.call import AttentionCall, LatentCall, PickedCompressed, Served
from attnplug.models.cache import PlugLayer
from attnplug.models.compact import index_mask, is_compact, key_mask, lengths_of
from attnplug.models.hf import (
    SERVES,
    as_autocast,
    binding_of,
    stock_function,
)
from attnplug.models.instance_method import put_forward, put_method, take_methods
from attnplug.models.known_latents import expands_as_known
from attnplug.models.latents import (
    attend_latents,
    bind_latents,
    has_latents,
    unbind_latents,
    up_of,
    why_not_expanded,
    why_not_weight,
)
from attnplug.models.names import CACHE_ARGUMENTS, INDEXED_NAME
from attnplug.models.own_code import own_code, why_replaced
from attnplug.models.picked_blocks import (
    attend_blocks,
    pick_blocks,
    picks_blocks,
    refuse_missing_picks,
    why_not_blocks,
)
from attnplug.models.picked_compressed import (
    attend_compressed,
    bind_compressed,
    picks_compressed,
    unbind_compressed,
    why_not_compressed,
)
from attnplug.models.picked_entries import (
    bind_entries,
    reads_entries,
    unbind_entries,
    why_not_entries,
)
from attnplug.models.picked_pools import (
    attend_pools,
    bind_pools,
    picks_pools,
    unbind_pools,
    why_not_pools,
)
from attnplug.models.refusals import refuse_options
from attnplug.models.rewritten import Forward, body_of, rewritten, run_rewritten
from attnplug.ops import index_topk
from attnplug.ops.common.checks import FP8, why_not_width

# The end of an indexer's forward, as ast.unparse writes it.
SCORES = "scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))"
TAIL = """scores = F.relu(scores)
{weights}
index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
if attention_mask.dtype == torch.bool:
    index_scores = index_scores.masked_fill(~attention_mask, float('-inf'))
else:
    index_scores = index_scores + attention_mask
topk = min(self.index_topk, index_scores.shape[-1])
return index_scores.topk(topk, dim=-1).indices.to(torch.int32)"""
PICK_METHOD = "_attnplug_pick_tokens"  # of an indexer
PICKING: dict[Any, Forward] = {}  # by the forward of an indexer's class: the same with our end


def why_not_indexed(module: Any) -> str:
    """Why the picks of such a module cannot be served; "" where they can."""
    kind = type(module).__name__
    if picks_blocks(module):
        return why_not_blocks(module)
    if picks_pools(module):
        return why_not_pools(module)
    if picks_compressed(module):
        return why_not_compressed(module)
    if reads_entries(module):
        return why_not_entries(module)
    if not has_latents(module):
        return f"{kind} picks tokens, but not for attention over latents"
    if not expands_as_known(type(module)):
        return f"{kind} expands its latents in a way that attnplug does not know"
    unexpanded = why_not_expanded(module) or why_not_weight(module.kv_b_proj)
    if unexpanded:
        return unexpanded
    indexer = getattr(module, "indexer", None)
    if indexer is not None and picking_forward(type(indexer)) is None:
        return f"{type(indexer).__name__} picks in a way that attnplug does not know"
    return "" if indexer is None else why_replaced(indexer) or why_not_width(indexer.head_dim)


def picking_forward(kind: type[torch.nn.Module]) -> Forward | None:
    """The forward of an indexer's class, but from the scores on `pick_tokens`; None where the
    class's own ends otherwise."""
    own = kind.forward
    if own not in PICKING:
        made = _with_our_end(own_code(own))
        if made is None:
            return None
        PICKING[own] = made
    return PICKING[own]


def _with_our_end(forward: Any) -> Forward | None:
    found = body_of(forward)
    if found is None:
        return None
    function, texts = found
    begin = next((i for i, text in enumerate(texts) if text.startswith("scores = ")), None)
    names = inspect.signature(forward).parameters.keys()
    cache = next((name for name in CACHE_ARGUMENTS if name in names), None)
    if begin is None or cache is None or len(texts) < begin + 3:
        return None
    weights = texts[begin + 2]
    known = texts[begin] in (SCORES, f"{SCORES} * self.softmax_scale")
    tail = "\n".join(texts[begin + 1 :])
    if not (known and weights.startswith("weights = ") and tail == TAIL.format(weights=weights)):
        return None
    scale = "1.0" if texts[begin] == SCORES else "self.softmax_scale"
    end = f"{weights}\nreturn self.{PICK_METHOD}(q, k, weights, {scale}, attention_mask, {cache})"
    return rewritten(forward, function, slice(begin, None), end)


def bind_indexed(module: torch.nn.Module) -> None:
    """Have an attention module, and its indexer, leave picks and latents to attnplug."""
    if picks_pools(module):
        bind_pools(module)
        return
    if picks_blocks(module):
        put_forward(module.indexer, pick_blocks)
        return
    if picks_compressed(module):
        bind_compressed(module)
        return
    if reads_entries(module):
        bind_entries(module)
        return
    bind_latents(module)
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        put_forward(indexer, _indexer_forward)
        put_method(indexer, PICK_METHOD, pick_tokens)


def unbind_indexed(module: torch.nn.Module) -> None:
    """Undo `bind_indexed`."""
    if picks_pools(module):
        unbind_pools(module)
        return
    if picks_compressed(module):
        unbind_compressed(module)
        return
    if reads_entries(module):
        unbind_entries(module)
        return
    unbind_latents(module)
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        take_methods(indexer, PICK_METHOD)


def _indexer_forward(indexer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return run_rewritten(picking_forward(type(indexer)), indexer, *args, **kwargs)


def pick_tokens(
    indexer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """The picks `[B,S,K]` int32 of an indexer's queries `[B,S,H,D]`, with weights `[B,S,H]`, among
    its keys `[B,T,D]`. `mask` `[B,S,T]` is one of the user's own, or `index_mask`'s."""
    mask = mask[:, None]
    layer = None if cache is None else cache.layers[indexer.layer_idx]
    key_scale = None if layer is None or k.dtype != FP8 else layer.index_scale
    if not is_compact(mask, q.shape[1]):
        if key_scale is not None:
            k = k.float() * key_scale[..., None]
        scores = torch.einsum("bsht,bsh->bst", (_products(q, k) * scale).relu(), weights)
        hidden = ~mask if mask.dtype == torch.bool else mask < 0
        scores = scores.masked_fill(hidden[:, 0, :, : k.shape[1]], float("-inf"))
        return scores.topk(min(indexer.index_topk, k.shape[1]), -1).indices.to(torch.int32)
    lengths = None if layer is None else lengths_of(layer)
    return index_topk(
        # autocast, and norms that are kept in float32, mix precisions
        q if key_scale is not None else q.to(k.dtype),
        weights,
        k,
        indexer.index_topk,
        scale=scale,
        lengths=lengths,
        key_mask=key_mask(mask, *k.shape[:2]),
        key_scale=key_scale,
    )


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bshd,btd->bsht", q.float(), k.float())


def attend_indexed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    picked_compressed: PickedCompressed | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function of a model with indexers. `key` and `value` are latents
    `[B,1,T,R]` and rotated keys `[B,1,T,P]` where there are `indices` `[B,S,K]`. With
    `block_indices` `[B,Hkv,S,K]` or `picked_compressed` they are keys and values, and other layers
    of the model are `plug_attention`'s. Returns `[B,S,Hq,Dv]` and no weights."""
    binding = binding_of(module)
    policy = None if binding is None else binding.policy
    if picked_compressed is not None and binding is not None and attention_mask is not None:
        refuse_options(query, dropout, kwargs)
        call = _block_call(query, key, value, scaling, attention_mask, kwargs)
        return attend_compressed(binding, call, picked_compressed), None
    refuse_missing_picks(module, block_indices)
    if picks_pools(module) and binding and policy and attention_mask is not None:
        given = attention_mask, dropout, scaling
        return attend_pools(module, binding, query, key, value, *given, kwargs)
    if block_indices is not None and binding is not None and attention_mask is not None:
        refuse_options(query, dropout, kwargs)
        call = _block_call(query, key, value, scaling, attention_mask, kwargs)
        own = None if is_compact(attention_mask, query.shape[2]) else attention_mask
        return attend_blocks(module, binding, call, block_indices, own, kwargs)
    if binding is None or policy is None or indices is None or attention_mask is None:
        mask = None if attention_mask is None or attention_mask.shape[-1] == 1 else attention_mask
        return attend_latents(
            module, query, key, value, mask, dropout, scaling, s_aux=s_aux, **kwargs
        )
    refuse_options(query, dropout, kwargs)
    if not is_compact(attention_mask, query.shape[2]):
        binding.note_served(query.shape[2], Served(binding.stock, "the call has a mask of its own"))
        expanded = type(module).expand_kv(module, key, value)  # pyright: ignore[reportAttributeAccessIssue]
        mask = _picked_mask(indices, attention_mask)
        stock = stock_function(module, binding.stock)
        return stock(module, query, *expanded, mask, scaling=scaling, s_aux=s_aux, **kwargs)
    state = kwargs.get("attnplug_state")
    query, key, value = as_autocast(query, key, value, state)
    lengths = lengths_of(state)
    if lengths is not None and kwargs.get("attnplug_fresh") == query.shape[2]:
        key, value, lengths = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], None
    call = LatentCall(
        query,
        latents=key[:, 0],
        rope=value[:, 0],
        up=up_of(module, query.shape[1]),
        picks=indices,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sinks=s_aux,
        lengths=lengths,
        key_mask=key_mask(attention_mask, len(key), key.shape[2]),
        state=state if isinstance(state, StaticLayer) else None,
    )
    out = policy.attend_latents(call)
    binding.note_served(query.shape[2], Served(call.served_by, call.why_other), state)
    return out, None


def _block_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor,
    kwargs: dict[str, Any],
) -> AttentionCall:
    """The call of a layer that attends to picked keys and values."""
    state = kwargs.get("attnplug_state")
    lengths = lengths_of(state)
    if isinstance(state, PlugLayer) and kwargs.get("attnplug_fresh") == query.shape[2]:
        key, value, lengths = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], None
    compact = is_compact(mask, query.shape[2])
    return AttentionCall(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        lengths=lengths,
        key_mask=key_mask(mask, len(key), key.shape[2]) if compact else None,
        state=state if isinstance(state, StaticLayer) else None,
    )


def _picked_mask(picks: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of the user's own with what was not picked hidden, `[B,1,S,T]`."""
    hidden = torch.ones_like(mask, dtype=torch.bool).scatter(-1, picks.long()[:, None], False)
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


SERVES[INDEXED_NAME] = attend_indexed, index_mask
