"""Layers whose model picks blocks of tokens by compressed keys (Qwen4-Exp's sparse attention).

An indexer scores the compressed keys of blocks of 4 tokens, and attention reads the tokens of the
best 512 blocks, for all heads the same. transformers makes the compressed keys of all blocks anew
for each query of each row, in a loop in Python, and attends to the whole cache under a mask of S x
T. Here a cache layer keeps them as they complete, and ops score them and read the picked tokens.

Blocks are of the tokens that a row's mask shows, so that padding moves them. A layer remembers the
mask that its compressed keys were made under: where a call's mask differs at an earlier token,
all compressed keys of the row are made anew, on the device.

transformers keeps all position ids in the first of these layers and has each call compute the
rotary embedding of all tokens. attnplug's layers say that they have none, keep cosines and sines
themselves, and are handed the embedding of new tokens alone.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from attnplug.call import AttentionCall, PickedCompressed, Served
from attnplug.models import known_compressed
from attnplug.models.compact import is_compact, key_mask, lengths_of
from attnplug.models.hf import Binding, as_autocast
from attnplug.models.instance_method import put_forward, put_method, take_methods
from attnplug.models.known_code import gemma_norm, rotate_half, same_code
from attnplug.models.names import CACHE_ARGUMENTS
from attnplug.models.own_code import own_code, refuse_watched, why_replaced, why_watched
from attnplug.models.rewritten import Forward, body_of, rewritten, run_rewritten
from attnplug.models.walk import MOVING_ROPE
from attnplug.ops import index_topk, pool_keys
from attnplug.ops.common.checks import why_not_width
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.gvr.topk import MAX_K

PICK_METHOD = "_attnplug_pick_compressed"  # of an attention module
# How an attention's forward begins, as ast.unparse writes it.
PICK = "selected_token_mask = self.indexer(hidden_states, position_embeddings, attention_mask, {})"
MASK = """if attention_mask.dtype == torch.bool:
    attention_mask = attention_mask & selected_token_mask
else:
    attention_mask = attention_mask.masked_fill(~selected_token_mask, \
torch.finfo(attention_mask.dtype).min)"""
OURS = f"""attention_mask, kwargs['picked_compressed'] = self.{PICK_METHOD}(
    hidden_states, position_embeddings, attention_mask, {{}}
)"""
ATTENDING: dict[Any, Forward] = {}  # by an attention class's forward: ours


class Held(NamedTuple):
    """The tokens of a cache, new ones among them: attnplug's layer or None, index keys `[B,T,D]`,
    room for compressed keys `[B,J,D]`, cosines and sines `[B,T',P]`, and how many they are."""

    layer: Any
    keys: torch.Tensor
    pooled: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    length: int | torch.Tensor


class Rows(NamedTuple):
    """What each row of a call shows. `seen` int64 `[B,S]` counts the tokens that a query sees,
    `until` `[B]` the complete blocks, and `since` `[B]` says from which on they are to be made.
    `slots` is as in `PickedCompressed`."""

    seen: torch.Tensor
    since: torch.Tensor
    until: torch.Tensor
    slots: torch.Tensor | None


def picks_compressed(module: Any) -> bool:
    """Whether an attention module has an indexer of compressed keys, one for a block of tokens."""
    indexer = getattr(module, "indexer", None)
    return hasattr(indexer, "compress_ratio") and hasattr(indexer, "token_budget")


def why_not_compressed(module: Any) -> str:
    """Why the picks of such a module cannot be served; "" where they can."""
    indexer, kind, norm = module.indexer, type(module.indexer), type(module.indexer.k_layernorm)
    code = sys.modules[kind.__module__]
    known = same_code(kind.forward, known_compressed.forward)
    for name, mine in (
        ("apply_rotary_pos_emb", known_compressed.apply_rotary_pos_emb),
        ("rotate_half", rotate_half),
    ):
        known = known and same_code(getattr(code, name, None), mine)
    known = known and same_code(norm.forward, gemma_norm)
    known = known and same_code(norm._norm, known_compressed.norm)
    if not known or indexer.k_layernorm.group_size is not None:
        return f"{kind.__name__} picks in a way that attnplug does not know"
    if attending_forward(type(module)) is None:
        return f"{type(module).__name__} takes its picks in a way that attnplug does not know"
    not_called = why_watched(indexer) or why_watched(indexer.k_layernorm, "_norm")
    if not_called or why_replaced(module):
        return not_called or why_replaced(module)
    if indexer.k_layernorm.weight.is_meta and hasattr(indexer.k_layernorm, "_hf_hook"):
        return f"the weight of {kind.__name__}'s k_layernorm is on its device only while that runs"
    rope = getattr(module.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in MOVING_ROPE:
        return f"the rotary embedding of {kind.__name__} depends on the longest position"
    if indexer.block_topk > MAX_K:
        return f"{kind.__name__} picks {indexer.block_topk} blocks, more than {MAX_K}"
    return why_not_width(module.head_dim) or why_not_width(indexer.index_head_dim)


def numbers_a_token(module: Any) -> int:
    """How many numbers the cache keeps of a token beside its keys and values: its index key, its
    cosines and sines, and its share of a compressed key."""
    width, ratio = module.indexer.index_head_dim, module.indexer.compress_ratio
    rope = module.config.rope_parameters or {}
    turned = int(module.head_dim * rope.get("partial_rotary_factor", 1.0))
    return width + 2 * turned + cdiv(width, ratio)


def attending_forward(kind: type[torch.nn.Module]) -> Forward | None:
    """The forward of an attention's class, but that it has its picks from `pick_compressed`; None
    where the class's own begins otherwise."""
    own = kind.forward
    if own not in ATTENDING:
        forward = own_code(own)
        found, names = body_of(forward), inspect.signature(forward).parameters.keys()
        cache = next((name for name in CACHE_ARGUMENTS if name in names), None)
        if found is None or found[1][:2] != [PICK.format(cache), MASK]:
            return None
        ATTENDING[own] = rewritten(forward, found[0], slice(0, 2), OURS.format(cache))
    return ATTENDING[own]


def bind_compressed(module: torch.nn.Module) -> None:
    """Have an attention module leave picks to attnplug."""
    put_forward(module, _attend)
    put_method(module, PICK_METHOD, pick_compressed)


def unbind_compressed(module: torch.nn.Module) -> None:
    """Undo `bind_compressed`."""
    take_methods(module, PICK_METHOD)


def _attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run_rewritten(attending_forward(type(module)), module, *args, **kwargs)


def pick_compressed(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    cache: Any,
) -> tuple[torch.Tensor, PickedCompressed | None]:
    """The mask and the picks of a layer's attention. A mask of the user's own comes back with what
    the model did not pick hidden, and without picks."""
    indexer, tokens = module.indexer, hidden_states.shape[1]
    refuse_watched(indexer)
    refuse_watched(indexer.k_layernorm, "_norm")
    q, new = _queries_and_keys(indexer, hidden_states, position_embeddings)
    held = _hold(indexer, cache, new, position_embeddings)
    if not is_compact(mask, tokens):
        return _mask_with_picks(module, hidden_states, mask, held), None
    ratio, norm = indexer.compress_ratio, indexer.k_layernorm
    rows = _rows(held, key_mask(mask, *held.keys.shape[:2]), tokens, ratio)
    pool_keys(
        held.pooled,
        held.keys,
        held.cos,
        held.sin,
        norm.weight,
        rows.since,
        rows.until,
        ratio=ratio,
        eps=norm.eps,
        slots=rows.slots,
    )
    q = q.to(held.pooled.dtype)
    blocks = index_topk(
        q,
        q.new_ones((), dtype=torch.float32).expand(q.shape[:3]),
        held.pooled,
        indexer.block_topk,
        scale=indexer.index_head_dim**-0.5,
        seen=rows.seen // ratio,
    )
    return mask, PickedCompressed(
        blocks, rows.seen, rows.slots, ratio, indexer.token_budget + ratio - 1
    )


def _hold(
    indexer: Any, cache: Any, new: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> Held:
    """The index keys of all tokens, after those `new` `[B,S,D]` are in the cache."""
    rows, tokens, width = new.shape
    layer = None if cache is None else cache.layers[indexer.layer_idx]
    if layer is not None and hasattr(layer, "update_compressed"):
        own = torch.cat([x[:, -tokens:] for x in turns], -1)
        length = layer.update_compressed(new, own, indexer.compress_ratio)
        cos, sin = layer.turns.chunk(2, -1)
        return Held(layer, layer.indexer_keys, layer.pooled, cos, sin, length)
    keys, before = new, lengths_of(layer)
    if cache is not None:
        keys = cache.update_indexer(new, indexer.layer_idx)
    length = keys.shape[1] if before is None else before.to(keys.device) + tokens
    cos, sin = (x.expand(rows, -1, -1) for x in turns)
    kind = torch.promote_types(keys.dtype, cos.dtype)  # autocast mixes precisions
    blocks = keys.shape[1] // indexer.compress_ratio
    return Held(None, keys, keys.new_zeros((rows, blocks, width), dtype=kind), cos, sin, length)


def _queries_and_keys(
    indexer: Any, hidden_states: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B,S,H,D]`, rotated, and keys `[B,S,D]` of new tokens: the beginning of an indexer's
    forward (see known_compressed.py)."""
    rows, tokens, _ = hidden_states.shape
    heads, width = indexer.index_n_heads, indexer.index_head_dim
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb  # pyright: ignore[reportAttributeAccessIssue]
    q, keys = indexer.index_qk_proj(hidden_states).split([heads * width, width], -1)
    q = indexer.q_layernorm(q.reshape(rows, tokens, heads, width))
    cos, sin = (x[:, -tokens:] for x in turns)
    return rotate(q, cos=cos, sin=sin, unsqueeze_dim=2), keys


def _rows(held: Held, shown: torch.Tensor | None, tokens: int, ratio: int) -> Rows:
    """What the rows show to the last `tokens`, where `shown` `[B,T]` are no padding."""
    rows, size, _ = held.keys.shape
    at = torch.arange(size, device=held.keys.device)
    before = held.length - tokens
    own, slots = at[:tokens] + before, None
    if shown is None:
        seen = (own + 1).expand(rows, -1)
        until = seen[:, -1] // ratio
    else:
        shown = shown & (at < held.length)
        count = shown.cumsum(-1)
        seen, until = count.gather(1, own.expand(rows, -1)), count[:, -1] // ratio
        places = torch.where(shown, count - 1, size)
        slots = at.new_zeros(rows, size + 1).scatter_(1, places, at.expand(rows, -1))
        slots = slots[:, :size].int()
    if held.layer is None:
        return Rows(seen, torch.zeros_like(until), until, slots)
    return Rows(seen, held.layer.compressed_made(shown, before, ratio).expand(rows), until, slots)


def _mask_with_picks(
    module: Any, hidden_states: torch.Tensor, mask: torch.Tensor, held: Held
) -> torch.Tensor:
    """A mask of the user's own with what the model does not pick under it hidden, by the model's
    own code: blocks may be others for each query."""
    if held.layer is not None:
        held.layer.forget_compressed()
    cache = SimpleNamespace(update_indexer=lambda new, index: held.keys)  # has them already
    turns = tuple(x[:, : int(held.length)] for x in (held.cos, held.sin))
    indexer = module.indexer
    picked = type(indexer).forward(indexer, hidden_states, turns, mask, cache)
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def attend_compressed(
    binding: Binding[Any], call: AttentionCall, picked: PickedCompressed
) -> torch.Tensor:
    """Attention over the picks of a layer, `[B,T,Hq,D]`: they are tokens that the mask shows."""
    call.q, call.k, call.v = as_autocast(call.q, call.k, call.v, call.state)
    call.key_mask, call.picked = None, picked
    assert binding.policy is not None  # all layers of a model have one, or none has the name
    out = binding.policy.attend(call)
    binding.note_served(call.q.shape[2], Served(call.served_by), call.state)
    return out.transpose(1, 2).contiguous()
