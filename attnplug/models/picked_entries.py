"""Layers whose model reads a window of tokens and compressed entries of all (DeepSeek-V4).

An entry is a mean of the keys of r tokens, which are their values too, each channel weighted by a
softmax. Heavily compressed layers read all complete entries, compressed sparse layers the best 512
by an indexer, whose keys are entries of their own, and sliding layers none. transformers keeps a
mask of queries by entries, and attends to all of them densely. Here an op scores and picks, and
another one attends to the latents, a query's window and entries in one list.

The model's own code runs but for three parts: the end of an indexer's forward, from the scores on;
the end of a compressor's, which hands its entries and picks on; and the middle of the attention's,
from the cache to what it attends to. These forwards, that of the scorer, whose work is a part of
ours, and the functions beside them that they call are known by their texts, and a layer with any
other is left to the model. A static layer of attnplug has the methods that compressors call of
transformers' own layers, with shapes that do not depend on how many tokens there are
(`policies/_entries_layer.py`).

As in transformers, entries and windows are of slots, padding among them. How many entries a query
sees follows from its position id, but a query that comes alone to a heavily compressed layer sees
all of them.
"""

import ast
import hashlib
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import causal_mask_function, eager_mask, sliding_window_overlay

from attnplug.call import EntrySizes, LatentCall, PickedEntries, Served
from attnplug.errors import UnsupportedCallError
from attnplug.models.compact import index_mask, is_compact, key_mask
from attnplug.models.hf import SERVES, binding_of, stock_function
from attnplug.models.instance_method import put_forward, put_method, take_methods
from attnplug.models.names import ENTRIES_NAME
from attnplug.models.own_code import (
    names_of,
    own_code,
    refuse_watched,
    why_replaced,
    why_watched,
)
from attnplug.models.refusals import refuse_options
from attnplug.models.rewritten import Forward, body_of, rewritten, run_rewritten
from attnplug.models.walk import has_moving_rope
from attnplug.ops import index_topk
from attnplug.ops.common.checks import why_not_width
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.gvr.topk import MAX_K
from attnplug.ops.latent.latent_attention import WIDEST_LATENT

ATTEND_METHOD = "_attnplug_attend_entries"  # of an attention module
PICK_METHOD = "_attnplug_pick_entries"  # of an indexer
# Of transformers 5.24: a hash of each function's arguments and statements, as ast.unparse writes
# them.
KNOWN = {
    "DeepseekV4Attention.forward": "7283ad71411bf105",
    "DeepseekV4HCACompressor.forward": "6ccae9b3f8fcd804",
    "DeepseekV4CSACompressor.forward": "41b426a0d9ac9035",
    "DeepseekV4Indexer.forward": "abdf92863fcf3bb9",
    "DeepseekV4IndexerScorer.forward": "5f50a9e17f029821",
    "apply_rotary_pos_emb": "3c9643fbe7eb1bdb",
    "rotate_half": "75849d0c69be6a9b",
    "eager_attention_forward": "6daa105b80337792",
}
# By the class of a module: how the first of the statements begins that ours stand for, how the
# first one behind them does ("": there is none), and ours.
ATTEND = f"""attn_output = self.{ATTEND_METHOD}(
    q, kv, q_residual, hidden_states, position_ids, attention_mask, cache, kwargs
)
attn_weights = None"""
PICK = f"return self.{PICK_METHOD}(q, compressed_kv, hidden_states, position_ids, cache_layer)"
INDEX = """return compressed_kv, self.indexer(
    hidden_states, q_residual, position_ids, cache, layer_idx
)"""
EXCHANGED = {
    "DeepseekV4Attention": ("if cache is not None", "attn_output = apply_rotary", ATTEND),
    "DeepseekV4HCACompressor": ("compressed_len = ", "", "return compressed_kv, None"),
    "DeepseekV4CSACompressor": ("top_k_indices = ", "", INDEX),
    "DeepseekV4Indexer": ("index_scores = ", "", PICK),
}
MADE: dict[Any, Forward] = {}  # by the forward of a class: the same with ours in it


def reads_entries(module: Any) -> bool:
    """Whether an attention module is of this kind, its sliding layers among them."""
    return hasattr(module, "compressor") and hasattr(module, "o_a_proj")


def entry_sizes(module: Any) -> EntrySizes:
    """What the cache of such a module keeps."""
    compressor = module.compressor
    indexer = getattr(compressor, "indexer", None)
    rate = 0 if compressor is None else compressor.compress_rate
    width = 0 if indexer is None else indexer.head_dim
    return EntrySizes(module.sliding_window, rate, width)


def numbers_a_token(module: Any) -> int:
    """How many numbers the cache keeps of a token, beside the windows: its share of entries."""
    sizes = entry_sizes(module)
    return cdiv(module.head_dim + sizes.index_width, sizes.rate) if sizes.rate else 0


def why_not_entries(module: Any) -> str:
    """Why such a module cannot be served; "" where it can."""
    compressor = module.compressor
    indexer = getattr(compressor, "indexer", None)
    for part in _parts(module):
        kind = type(part)
        if why_replaced(part):
            return why_replaced(part)
        if forward_of(kind) is None:
            return f"{kind.__name__} computes in a way that attnplug does not know"
        if has_moving_rope(getattr(part, "rotary_emb", part)):
            return f"the rotary embedding of {kind.__name__} depends on the longest position"
    if compressor is not None and why_watched(compressor):  # hooks would see picks, not a mask
        return why_watched(compressor)
    if module.head_dim > WIDEST_LATENT:
        return f"keys of {module.head_dim} channels are wider than attnplug's kernels"
    if indexer is None:
        return ""
    if not _is_known(type(indexer.scorer).forward):
        return f"{type(indexer.scorer).__name__} scores in a way that attnplug does not know"
    if why_watched(indexer.scorer):
        return why_watched(indexer.scorer)
    if indexer.index_topk > MAX_K:
        return f"{type(indexer).__name__} picks {indexer.index_topk} entries, more than {MAX_K}"
    return why_not_width(indexer.head_dim)


def _parts(module: Any) -> list[Any]:
    """The modules whose forward has a part of ours."""
    found = [module, module.compressor, getattr(module.compressor, "indexer", None)]
    return [part for part in found if part is not None]


def _digest(function: Any) -> str:
    found = body_of(function)
    if found is None:
        return "no source"
    node, texts = found
    texts = texts if ast.get_docstring(node) is None else texts[1:]
    return hashlib.sha256("\n".join([ast.unparse(node.args), *texts]).encode()).hexdigest()[:16]


def _is_known(function: Any) -> bool:
    function = own_code(function)
    name = getattr(function, "__qualname__", "")
    return name in KNOWN and KNOWN[name] == _digest(function)


def forward_of(kind: type[torch.nn.Module]) -> Forward | None:
    """The forward of a class, with the part that is ours; None where its code is not known."""
    own = kind.forward
    beside = (names_of(kind).get(name) for name in KNOWN if "." not in name)
    if not (_is_known(own) and all(map(_is_known, beside))):
        return None
    if own not in MADE:
        forward = own_code(own)
        found = body_of(forward)
        assert found is not None  # its text is known
        first, last, ours = EXCHANGED[forward.__qualname__.partition(".")[0]]
        begin = next(i for i, text in enumerate(found[1]) if text.startswith(first))
        ends = (i for i, text in enumerate(found[1]) if last and text.startswith(last))
        MADE[own] = rewritten(forward, found[0], slice(begin, next(ends, None)), ours)
    return MADE[own]


def bind_entries(module: torch.nn.Module) -> None:
    """Have an attention module, its compressor and its indexer leave their parts to attnplug."""
    for part in _parts(module):
        put_forward(part, _forward)
    put_method(module, ATTEND_METHOD, attend_entries)
    if entry_sizes(module).index_width:
        put_method(module.compressor.indexer, PICK_METHOD, pick_entries)  # pyright: ignore[reportAttributeAccessIssue]


def unbind_entries(module: torch.nn.Module) -> None:
    """Undo `bind_entries`."""
    for part in _parts(module):
        take_methods(part, ATTEND_METHOD, PICK_METHOD)


def _forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    kind = type(module)
    made = MADE.get(kind.forward) or forward_of(kind)  # not there: read from a file
    return run_rewritten(made, module, *args, **kwargs)


def _seen(position_ids: torch.Tensor, rate: int, complete: int | torch.Tensor) -> torch.Tensor:
    """How many leading entries each query sees, as position ids say it, `[1 or B,S]`."""
    return ((position_ids + 1) // rate).clamp(max=complete)


def _complete(entries: torch.Tensor, rate: int, layer: Any) -> int | torch.Tensor:
    """How many of a layer's entries `[B,J,D]` have all of their tokens."""
    return layer.cumulative_length // rate if isinstance(layer, StaticLayer) else entries.shape[1]


def pick_entries(
    indexer: Any,
    q: torch.Tensor,
    keys: torch.Tensor,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    layer: Any,
) -> torch.Tensor:
    """The entries `[B,S,K]` int32 that score highest for queries `[B,S,H,D]`, -1 for none."""
    rows, queries = q.shape[:2]
    if keys.shape[1] == 0:
        return torch.empty((rows, queries, 0), dtype=torch.int32, device=q.device)
    scorer = indexer.scorer
    refuse_watched(scorer)
    seen = _seen(position_ids, indexer.compress_rate, _complete(keys, indexer.compress_rate, layer))
    return index_topk(
        q.to(keys.dtype),
        scorer.weights_proj(hidden_states).float() * scorer.weights_scaling,
        keys,
        indexer.index_topk,
        scale=scorer.softmax_scale,
        seen=seen.expand(rows, queries),
    )


class Held(NamedTuple):
    """What the cache gives for an attention module: `layer` of the cache or None, and whether it is
    attnplug's, thus `static`. `kv` `[B,1,T,D]` are the keys of tokens that it returns, and `whole`
    what attnplug's layer keeps, as it lies: entries before a window of tokens."""

    layer: Any
    static: bool
    kv: torch.Tensor
    whole: torch.Tensor


def _hold(module: Any, kv: torch.Tensor, cache: Any) -> Held:
    """Put the keys of new tokens `[B,1,S,D]` into the cache, if there is one."""
    if cache is None:
        return Held(None, False, kv, kv)
    index: int = module.layer_idx
    layer: Any = cache.layers[index]
    static = isinstance(layer, StaticLayer)
    if static and not hasattr(layer, "store_compression_weights"):
        raise UnsupportedCallError(
            f"a {type(layer).__name__} keeps no entries: pass attnplug.make_cache(model, length) "
            "or a DynamicCache(config=model.config)"
        )
    return Held(layer, static, *cache.update(kv, kv, index))


def _seen_by_queries(
    module: Any, position_ids: torch.Tensor, entries: torch.Tensor, layer: Any
) -> torch.Tensor:
    """How many leading entries of `[B,1,J,D]` each query sees, `[1 or B,S]`."""
    if module.compressor is None:
        return torch.zeros_like(position_ids)
    rate = entry_sizes(module).rate
    complete = _complete(entries[:, 0], rate, layer)
    if position_ids.shape[1] > 1:
        return _seen(position_ids, rate, complete)
    return torch.zeros_like(position_ids) + complete  # a query alone sees what there is


def attend_entries(
    module: Any,
    q: torch.Tensor,
    kv: torch.Tensor,
    q_residual: torch.Tensor,
    hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    mask: torch.Tensor | None,
    cache: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The attention `[B,S,H,D]` of queries `[B,H,S,D]` over new tokens `[B,1,S,D]`, the tokens in
    the cache, and entries."""
    binding = binding_of(module)
    assert binding is not None and binding.policy is not None  # its forward is ours
    refuse_options(q, module.attention_dropout if module.training else 0.0, kwargs)
    if mask is None:
        raise UnsupportedCallError(
            f"{type(module).__name__} was called without a mask: call the model, which makes one"
        )
    rows, queries, held = len(q), q.shape[2], _hold(module, kv, cache)
    entries, picks = kv[:, :, :0], None
    if module.compressor is not None:
        refuse_watched(module.compressor)
        told = hidden_states, q_residual, position_ids, cache, module.layer_idx
        entries, picks = module.compressor(*told)
    length = getattr(held.layer, "cumulative_length", queries)
    compact = is_compact(mask, queries)
    if compact and not held.static:  # a row of a mask of the user's own is of the window's keys
        compact = mask.shape[-1] == 1 or mask.shape[-1] >= length
    picked = PickedEntries(
        picks,
        _seen_by_queries(module, position_ids, entries, held.layer).expand(rows, queries),
        entries.shape[2],
        module.sliding_window,
        length,
        entries.shape[2] + held.kv.shape[2],
        key_mask(mask, rows, mask.shape[-1]) if compact else None,
    )
    if not compact:
        return _attend_masked(module, binding.stock, q, held, entries, picked, mask)
    if held.static and queries == 1:
        latents = held.whole[:, 0]
    else:
        latents = torch.cat((entries.to(held.kv.dtype), held.kv), 2)[:, 0]
    call = LatentCall(
        q.to(latents.dtype),
        latents=latents,
        rope=latents[..., :0],
        up=latents.new_empty(0),
        picks=picked,
        scale=module.scaling,
        sinks=module.sinks,
    )
    out = binding.policy.attend_latents(call)
    binding.note_served(queries, Served(call.served_by), held.layer)
    return out


def _attend_masked(
    module: Any,
    stock: str,
    q: torch.Tensor,
    held: Held,
    entries: torch.Tensor,
    picked: PickedEntries,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The model's own attention under a mask of the user's own `[B,1,S,T]`, which is of the keys
    that transformers' cache returns."""
    if held.static:
        raise UnsupportedCallError(
            "a mask of 4 dimensions is of the keys that transformers' own cache returns, of which "
            "attnplug's keeps others: pass DynamicCache(config=model.config), or use_cache=False"
        )
    binding = binding_of(module)
    assert binding is not None  # it was served until here
    queries, count = q.shape[2], entries.shape[2]
    binding.note_served(queries, Served(stock, "the call has a mask of its own"))
    listed = picked.entries_of(0, queries).long()
    hidden = q.new_full((len(q), 1, queries, count + 1), float("-inf"))
    hidden.scatter_(-1, torch.where(listed < 0, count, listed)[:, None], 0.0)
    if mask.dtype == torch.bool:
        mask = q.new_zeros(()).masked_fill(~mask, torch.finfo(q.dtype).min)
    mask = mask.expand(len(q), -1, queries, -1)
    mask = torch.cat((mask, hidden[..., :count].to(mask.dtype)), -1)
    kv = torch.cat((held.kv, entries.to(held.kv.dtype)), 2)
    return stock_function(module, stock)(module, q, kv, kv, mask, scaling=module.scaling)[0]


def entries_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' mask function of such a model. Of a plain window: which of all slots are real,
    `[B,1,1,T]`, or ones `[1,1,1,1]` where all are, as `index_mask`'s."""
    given: dict[str, Any] = {"attention_mask": attention_mask, **kwargs}
    if use_vmap or not (torch.compiler.is_compiling() or _is_window(mask_function)):
        given |= {"mask_function": mask_function, "use_vmap": use_vmap}
        return eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **given)  # pyright: ignore[reportArgumentType]
    given.pop("local_size", None)
    slots = max(2, kv_offset + kv_length)  # a mask of one says that all are real
    return index_mask(batch_size, q_length, slots, q_offset, **given)


def _is_window(mask_function: Any) -> bool:
    """Whether a mask function is that of a causal window and nothing besides."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    overlay = sliding_window_overlay(1).__code__
    for parts in cells:
        if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is causal_mask_function:
            return getattr(parts[0], "__code__", None) is overlay
    return False


def attend_stock(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """transformers' attention function of such a model, which its forward calls no more."""
    raise UnsupportedCallError(
        f"{type(module).__name__} has its own forward, and its config attnplug's attention: its "
        "code was changed after attnplug.apply. Call attnplug.remove(model) and apply again."
    )


SERVES[ENTRIES_NAME] = attend_stock, entries_mask
