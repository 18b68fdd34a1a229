"""Layers of multi-head latent attention (DeepSeek-V2 and its heirs), whose cache keeps a latent and
a rotated key of each token for all heads together.

transformers expands keys and values of all heads from all of the cache at every step. A module that
is bound here hands latents and rotated keys on as they are, and its policy's method decides: a step
reads them as they lie in the cache, a prompt expands its own.
"""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from attnplug.call import AttentionCall, LatentCall, Served
from attnplug.errors import UnsupportedCallError
from attnplug.models.hf import (
    SERVES,
    as_autocast,
    binding_of,
    is_exotic,
    plug_attention,
    plug_mask,
    refuse_unknown_keys,
    set_key_mask,
    stock_attention,
    valid_part,
)
from attnplug.models.instance_method import is_put, put_method, take_methods
from attnplug.models.known_latents import ends_as_known, expands_as_known
from attnplug.models.names import LATENT_NAME
from attnplug.models.own_code import why_method_replaced, why_watched
from attnplug.models.refusals import refuse_options
from attnplug.models.user_hooks import is_hooked
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.latent.latent_attention import WIDEST_LATENT, WIDEST_ROPE

EXPAND = "expand_kv"  # the method that makes keys and values of latents
HOOKED = "kv_b_proj has a forward hook"


def has_latents(module: Any) -> bool:
    """Whether an attention module's cache keeps latents."""
    return hasattr(module, EXPAND) and hasattr(module, "kv_lora_rank")


def why_not_expanded(module: Any) -> str:
    """Why an op cannot do what a module's `expand_kv` does; "" where it can."""
    kind = type(module).__name__
    projection: Any = module.kv_b_proj
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        return f"the latents of {kind} are expanded by a {type(projection).__name__}"
    if projection.weight.is_meta and hasattr(projection, "_hf_hook"):
        return f"the weight of {kind}'s kv_b_proj is on its device only while that runs"
    widths = module.kv_lora_rank, module.qk_rope_head_dim
    if widths[0] > WIDEST_LATENT or widths[1] > WIDEST_ROPE:
        return f"latents of {widths[0]} and {widths[1]} channels are wider than attnplug's kernels"
    return why_method_replaced(module, EXPAND)


def why_not_weight(projection: torch.nn.Module) -> str:
    """Why a projection must be called, and not be read by its weight; "" where it need not."""
    if is_hooked(projection):
        return HOOKED
    return "somebody has replaced the forward of kv_b_proj" if why_watched(projection) else ""


def why_not_latents(module: Any) -> str:
    """Why a layer of latent attention without picks cannot be served; "" where it can."""
    kind = type(module)
    if not (has_latents(module) and expands_as_known(kind) and ends_as_known(kind)):
        return f"multi-head latent attention of {kind.__name__} that attnplug does not know"
    return why_not_expanded(module)


def numbers_a_token(module: Any) -> int:
    """How many numbers the cache keeps of a token for such a layer: a latent and a rotated key,
    unless those are another layer's, and what an indexer of its own scores."""
    own = getattr(module, "kv_a_proj_with_mqa", None) is not None
    kept = module.kv_lora_rank + module.qk_rope_head_dim if own else 0
    indexer = getattr(module, "indexer", None)
    if indexer is None:
        return kept
    pool = getattr(indexer, "index_kpool", 0)  # tokens whose keys come with gates, and share a key
    width = getattr(indexer, "head_dim", 0)  # an unknown indexer's layer is refused
    return kept + (2 * width + 1 + cdiv(width, pool) if pool else width)


def bind_latents(module: torch.nn.Module) -> None:
    """Have an attention module leave its latents to attnplug's attention function."""
    put_method(module, EXPAND, _keep_latents)


def unbind_latents(module: torch.nn.Module) -> None:
    """Undo `bind_latents`."""
    take_methods(module, EXPAND)


def _keep_latents(
    module: torch.nn.Module, latents: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rope


def attend_latents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    attnplug_state: Any = None,
    attnplug_fresh: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function of a model with latent attention. `key` and `value` are
    latents `[B,1,T,R]` and rotated keys `[B,1,T,P]` of a module that was bound; another one's are
    keys and values, for `plug_attention`. Returns `[B,S,Hq,Dv]` and no weights."""
    binding, state = binding_of(module), attnplug_state
    options: dict[str, Any] = {"s_aux": s_aux, "attnplug_state": state, **kwargs}
    if binding is None or binding.policy is None or not is_put(module, EXPAND):
        options |= {"attnplug_fresh": attnplug_fresh}
        return plug_attention(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    refuse_options(query, dropout, kwargs)
    query, key, value = as_autocast(query, key, value, state)
    key, value, lengths = valid_part(query, key, value, state, attnplug_fresh)
    call = AttentionCall(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sinks=s_aux,
        lengths=lengths,
        state=state if isinstance(state, StaticLayer) else None,
    )
    compact = set_key_mask(call, attention_mask)
    exotic = is_exotic(module, kwargs)
    if state is None and compact and not exotic:
        refuse_unknown_keys(module, query, key)
    why = "" if compact and not exotic else "the call has a mask of its own"
    why = why or why_not_weight(module.kv_b_proj)  # pyright: ignore[reportArgumentType]
    if why:
        binding.note_served(query.shape[2], Served(binding.stock, why))
        call.k, call.v = type(module).expand_kv(module, key, value)  # pyright: ignore[reportAttributeAccessIssue]
        return stock_attention(
            module, binding, call, attention_mask, compact, kwargs, attnplug_fresh
        )
    latent = LatentCall(
        call.q,
        latents=call.k[:, 0],
        rope=call.v[:, 0],
        up=up_of(module, query.shape[1]),
        picks=None,
        scale=call.scale,
        sinks=s_aux,
        lengths=lengths,
        key_mask=call.key_mask,
    )
    out = binding.policy.attend_all_latents(latent)
    binding.note_served(query.shape[2], Served(latent.served_by), state)
    return out, None


def up_of(module: Any, heads: int) -> torch.Tensor:
    """What makes a head's keys and values of latents, `[Hq,Dk+Dv,R]`."""
    projection = module.kv_b_proj
    if type(projection) is not torch.nn.Linear:
        raise UnsupportedCallError(
            f"kv_b_proj became a {type(projection).__name__} after apply, and its latents are read "
            "by its weight: call attnplug.remove(model) and apply again."
        )
    why = why_not_weight(projection) or why_method_replaced(module, EXPAND)
    if why:
        raise UnsupportedCallError(f"{why}, and its latents are read by its weight: take it off")
    return projection.weight.view(heads, -1, projection.weight.shape[1])


SERVES[LATENT_NAME] = attend_latents, plug_mask
