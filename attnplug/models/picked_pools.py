"""Layers whose model picks pools of tokens (GLM-5.3's sparse attention over latents).

A pool is 16 tokens, counted from a row's first real one, with one key that is a weighted mean of
theirs. An indexer picks the best of the complete pools, and a query also reads the
tokens behind the last complete one. transformers makes the keys of all pools anew at every step,
and of the picks a mask `[B,1,S,T]`. Here a pool's key is kept in the cache when its tokens come, an
op picks without keeping scores, and another one attends to the latents of the picks.

The op knows queries that see one key more than the query before. Queries that are a pool's length
apart see one pool more, so that each residue of a query's place is a row of its own for the op.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from attnplug.call import LatentCall, Served
from attnplug.errors import UnsupportedCallError
from attnplug.models.compact import lengths_of
from attnplug.models.hf import Binding, as_autocast
from attnplug.models.instance_method import put_forward, put_method, take_methods
from attnplug.models.known_latents import expands_as_known
from attnplug.models.known_pools import PICKS, picks_as_known, reads_as_known
from attnplug.models.latents import (
    bind_latents,
    unbind_latents,
    up_of,
    why_not_expanded,
    why_not_weight,
)
from attnplug.models.own_code import why_method_replaced, why_replaced
from attnplug.models.refusals import refuse_options
from attnplug.ops import index_topk
from attnplug.ops.common.checks import why_not_width
from attnplug.ops.common.sizes import cdiv

MASK_METHOD = "build_attention_mask_from_topk"  # of an attention module, of what it is handed
MOST = 4096  # tokens that index_topk picks


def picks_pools(module: Any) -> bool:
    """Whether an attention module reads picked pools, which it or a layer before it has picked."""
    return hasattr(module, MASK_METHOD)


def why_not_pools(module: Any) -> str:
    """Why the picks of such a module cannot be served; "" where they can."""
    kind, indexer = type(module), module.indexer
    if not (expands_as_known(kind) and reads_as_known(kind)):
        return f"{kind.__name__} reads its picks in a way that attnplug does not know"
    unexpanded = why_not_expanded(module) or why_not_weight(module.kv_b_proj)
    if unexpanded or indexer is None:
        return unexpanded or why_method_replaced(module, MASK_METHOD)
    if not picks_as_known(type(indexer)):
        return f"{type(indexer).__name__} picks in a way that attnplug does not know"
    if not 1 <= indexer.index_topk // indexer.index_kpool <= MOST:
        return f"{type(indexer).__name__} picks {indexer.index_topk // indexer.index_kpool} pools"
    replaced = why_method_replaced(module, MASK_METHOD) or why_replaced(indexer, *PICKS)
    return replaced or why_not_width(indexer.head_dim)


def bind_pools(module: Any) -> None:
    """Have an attention module, and its indexer, leave picks and latents to attnplug."""
    bind_latents(module)
    put_method(module, MASK_METHOD, _hand_on_picks)
    if module.indexer is not None:
        put_forward(module.indexer, pick_pools)


def unbind_pools(module: Any) -> None:
    """Undo `bind_pools`."""
    unbind_latents(module)
    take_methods(module, MASK_METHOD)
    if module.indexer is not None:
        take_methods(module.indexer)


def _hand_on_picks(
    module: Any, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int
) -> torch.Tensor:
    return topk_indices


class Real(NamedTuple):
    """Which tokens of a cache are real: `first` `[B]` is a row's first one, T where there is none,
    and `counts` `[B,T+1]` how many are among the first t. Both int32."""

    first: torch.Tensor
    counts: torch.Tensor

    def among(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """How many of the tokens from `begin` to `end`, each `[B,N]`, are real."""
        last = self.counts.shape[1] - 1
        upto = (self.counts.gather(1, each.clamp(0, last)) for each in (end.long(), begin.long()))
        return next(upto) - next(upto)


def pick_pools(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """The tokens `[B,S,K]` int32 that an indexer picks, -1 for none: its forward (see
    known_pools.py). `attention_mask` `[B,S]` says which of the queries are real."""
    rows, queries, _ = hidden_states.shape
    with torch.no_grad():
        q = indexer.wq_b(q_resid).view(rows, queries, -1, indexer.head_dim)
        k = indexer.k_norm(indexer.wk(hidden_states))
        gates = F.linear(hidden_states, indexer.index_kpool_compress_gate)
        packed = torch.cat([k, gates, attention_mask.to(k.dtype)[..., None]], -1)
        length: int | torch.Tensor = queries
        layer = None
        if cache is not None:
            layer = cache.layers[indexer.layer_idx]
            packed = cache.update_indexer(packed, indexer.layer_idx)
            length = layer.get_seq_length()
        hidden = hidden_states.to(indexer.weights_proj.weight.dtype)
        weights = indexer.weights_proj(hidden).float() * indexer.n_heads**-0.5
        real = _real(packed, length)
        places = torch.arange(queries, device=q.device) + (length - queries)
        keys = _pool_keys(indexer, packed, real, length, queries, layer)
        best = _best_pools(indexer, q.to(keys.dtype), weights, keys, real, length)
        picks = _tokens_of(indexer, best, real, places)
        return picks.masked_fill(~attention_mask.bool()[..., None], -1)


def _real(packed: torch.Tensor, length: int | torch.Tensor) -> Real:
    """Of the states `[B,T,2D+1]` of a cache, whose last channel says which tokens are real, and of
    which `length` are valid."""
    shown = packed[..., -1].bool()
    shown = shown & (torch.arange(packed.shape[1], device=packed.device) < length)
    counts = F.pad(shown.cumsum(1, dtype=torch.int32), (1, 0))
    return Real((counts[:, 1:] == 0).sum(1, dtype=torch.int32), counts)


def _pool_keys(
    indexer: Any,
    packed: torch.Tensor,
    real: Real,
    length: int | torch.Tensor,
    queries: int,
    layer: Any,
) -> torch.Tensor:
    """The keys of all pools that a cache has room for, `[B,N,D]`. attnplug's layer keeps them, and
    only those are made that the last `queries` tokens belong to."""
    rows, tokens, _ = packed.shape
    size, width = indexer.index_kpool, indexer.head_dim
    pools = cdiv(tokens, size)
    begin = torch.zeros_like(real.first)
    kept = getattr(layer, "pool_keys", None)
    if not hasattr(layer, "pool_keys"):
        return _make_keys(indexer, packed, real, length, begin, pools)
    if kept is None or len(kept) != rows:
        layer.bind_rows(pool_keys=packed.new_zeros((rows, pools + 1, width)))
        new = pools
    else:
        begin = ((length - queries - real.first) // size).clamp(min=0)
        new = min(pools, cdiv(queries - 1, size) + 1)
    made = _make_keys(indexer, packed, real, length, begin, new)
    slots = begin[:, None] + torch.arange(new, device=packed.device)
    slots = slots.clamp(max=pools)  # behind the last pool is one that nobody reads
    made = made.to(layer.pool_keys.dtype)  # autocast sums in float32
    layer.pool_keys.scatter_(1, slots.long()[..., None].expand(-1, -1, width), made)
    return layer.pool_keys[:, :pools]


def _make_keys(
    indexer: Any,
    packed: torch.Tensor,
    real: Real,
    length: int | torch.Tensor,
    begin: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The keys `[B,count,D]` of the pools from `begin` `[B]` on."""
    size, width = indexer.index_kpool, indexer.head_dim
    slots = torch.arange(count * size, device=packed.device)
    slots = (real.first + begin * size).long()[:, None] + slots
    inside = slots < length
    slots = slots.clamp(max=packed.shape[1] - 1)
    states = packed.gather(1, slots[..., None].expand(-1, -1, packed.shape[2]))
    shown = (states[..., -1].bool() & inside).unflatten(1, (count, size))
    keys, gates = (x.unflatten(1, (count, size)) for x in states[..., :-1].split(width, -1))
    logits = gates.float() + indexer.index_kpool_compress_ape.float()
    logits = logits.masked_fill(~shown[..., None], float("-inf"))
    shares = torch.nan_to_num(logits.softmax(2)).to(keys.dtype)
    return (shares * keys).sum(2)


def _best_pools(
    indexer: Any,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    real: Real,
    length: int | torch.Tensor,
) -> torch.Tensor:
    """The complete pools of real tokens `[B,S,K]` that score highest for queries `[B,S,H,D]`, -1
    for none."""
    (rows, queries), (pools, width) = q.shape[:2], keys.shape[1:]
    size, device = indexer.index_kpool, q.device
    ends = real.first[:, None] + (torch.arange(pools, device=device) + 1) * size
    whole = real.among(ends - size, ends) == size
    apart = min(size, queries)
    missing = -queries % apart
    if missing:
        q, weights = F.pad(q, (0, 0, 0, 0, missing, 0)), F.pad(weights, (0, 0, missing, 0))
    last = torch.arange(1 - apart, 1, device=device) + length  # as many tokens see the last queries
    seen = (last - real.first[:, None]) // size
    best = index_topk(
        q.unflatten(1, (-1, apart)).transpose(1, 2).flatten(0, 1),
        weights.unflatten(1, (-1, apart)).transpose(1, 2).flatten(0, 1),
        keys[:, None].expand(-1, apart, -1, -1).reshape(rows * apart, pools, width),
        indexer.index_topk // size,
        scale=indexer.softmax_scale,
        lengths=seen.flatten().clamp(min=0),
        key_mask=whole[:, None].expand(-1, apart, -1).flatten(0, 1),
    )
    return best.unflatten(0, (rows, apart)).transpose(1, 2).flatten(1, 2)[:, missing:]


def _tokens_of(indexer: Any, best: torch.Tensor, real: Real, places: torch.Tensor) -> torch.Tensor:
    """The tokens of pools `[B,S,K]`, and those behind the last complete pool that the queries at
    `places` `[S]` see."""
    size = indexer.index_kpool
    step = torch.arange(size, device=best.device, dtype=torch.int32)
    first = real.first[:, None]
    tokens = first[..., None, None] + best[..., None] * size + step
    tokens = tokens.masked_fill(best[..., None] < 0, -1).flatten(-2)
    if not indexer.index_kpool_always_select_tail or size == 1:
        return tokens
    seen = real.counts.index_select(1, places + 1)
    rest = seen % size
    tail = (first + seen - rest)[..., None] + step[:-1]
    shown = (step[:-1] < rest[..., None]) & (tail <= places[:, None])
    flat = tail.flatten(1)
    shown = shown & (real.among(flat, flat + 1) > 0).view_as(shown)
    # Tokens that are hidden among real ones let the rest fall into a pool that may be picked.
    picked = (best == (seen // size)[..., None]).any(-1, keepdim=True)
    return torch.cat([tokens, tail.masked_fill(~shown | picked, -1)], -1)


def attend_pools(
    module: Any,
    binding: Binding[Any],
    query: torch.Tensor,
    latents: torch.Tensor,
    rope: torch.Tensor,
    picks: torch.Tensor,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention over the picks `[B,S,K]` among latents `[B,1,T,R]`. Returns `[B,S,Hq,Dv]`."""
    refuse_options(query, dropout, kwargs)
    if picks.dtype != torch.int32:
        raise UnsupportedCallError(
            f"{type(module).__name__} calls its attention without its picks: its code was changed "
            "after attnplug.apply. Remove the policy first."
        )
    state, queries = kwargs.get("attnplug_state"), query.shape[2]
    query, latents, rope = as_autocast(query, latents, rope, state)
    lengths = lengths_of(state)
    if lengths is not None and kwargs.get("attnplug_fresh") == queries:
        latents, rope, lengths = latents[:, :, :queries], rope[:, :, :queries], None
    call = LatentCall(
        query,
        latents=latents[:, 0],
        rope=rope[:, 0],
        up=up_of(module, query.shape[1]),
        picks=picks,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        lengths=lengths,
    )
    assert binding.policy is not None  # all layers of a model have one, or none has the name
    out = binding.policy.attend_latents(call)
    binding.note_served(queries, Served(call.served_by), state)
    return out, None
