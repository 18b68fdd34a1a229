"""The only place that knows how transformers calls attention: the mask function and the attention
function registered under one name, and the way back to the model's own attention.

The mask function keeps a plain causal mask small: None where nothing is padded, else which keys
are real, `[B,1,1,S]`: uint8 for several queries, so that no mask of a user's is taken for it, and
bool for one, whose row it is. Everything else (sliding windows, packed sequences, custom masks)
stays transformers' 4-dimensional mask, and layers that get one run the model's own attention.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnplug.call import AttentionCall, EdgeWriter, Served, Serves, causal_mask
from attnplug.errors import PolicyError, UnsupportedCallError
from attnplug.models.autocast import autocast_dtype
from attnplug.models.bands import sdpa_in_bands
from attnplug.models.cache import PlugLayer
from attnplug.models.names import ADDITIVE_NAME, ATTENTION_NAME, CACHE
from attnplug.models.own_code import eager_function
from attnplug.models.owner import Owner
from attnplug.models.refusals import refuse_float64, refuse_options
from attnplug.models.sync import may_read, may_sync
from attnplug.models.walk import all_modules

BINDING = "_attnplug_binding"
MASK_ROWS = 4096  # queries whose part of a window's mask is made at once
PolicyT = TypeVar("PolicyT", bound=Serves, covariant=True)


@dataclass(frozen=True)
class Binding(Generic[PolicyT]):
    """What `apply` decided for one attention module: its policy, or why it stays dense or was
    chosen, and the model's own attention ("sdpa" or "eager") for the case that it stays dense.
    `owner` is the model that the policy was applied to. `trace_to` is set while a trace is
    recorded, `pieces` while a prompt runs in pieces. `served` says by "prefill" and "decode" what
    the last call was served by."""

    policy: PolicyT | None
    reason: str
    stock: str
    owner: Owner | None = field(default=None, compare=False)
    trace_to: EdgeWriter | None = None
    pieces: Any = None
    served: dict[str, Served] = field(default_factory=dict, compare=False)

    def note_served(self, queries: int, served: Served, state: Any = None) -> None:
        """Note what has served a call; with a prefill a new one begins. Traced code notes none, nor
        does a layer whose cache `state` is in a round of generate's, which has noted its steps."""
        if torch.compiler.is_compiling() or getattr(state, "round_part", ""):
            return
        if queries > 1:
            self.served.clear()
        self.served["decode" if queries == 1 else "prefill"] = served

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register attnplug's names: a model that was saved whole may be read where `apply` has
        never run, and transformers silently leaves out the masks of a name it does not know."""
        register_names()
        vars(self).update(state)


def binding_of(module: torch.nn.Module) -> Binding[Any] | None:
    """What `apply` decided for an attention module, None where it has not been applied."""
    return vars(module).get(BINDING)


def bindings_of(model: torch.nn.Module) -> dict[torch.nn.Module, Binding[Any]]:
    """What `apply` decided, for each attention module of a model that it has seen."""
    return {m: binding for m in all_modules(model) if (binding := binding_of(m)) is not None}


@contextmanager
def tracing(writers: Mapping[torch.nn.Module, EdgeWriter]) -> Iterator[None]:
    """Within it, each of these modules with a policy hands the edges of its calls to its writer.
    Raises PolicyError where a module has one already."""
    before = {module: binding_of(module) for module in writers}
    if any(binding is not None and binding.trace_to is not None for binding in before.values()):
        raise PolicyError("this model is being recorded already; one file at a time")
    try:
        for module, binding in before.items():
            if binding is not None:
                setattr(module, BINDING, replace(binding, trace_to=writers[module]))
        yield
    finally:
        for module, binding in before.items():
            if binding is not None:
                setattr(module, BINDING, binding)


def register_names() -> None:
    """Make transformers know attnplug's names (idempotent; the registries are its own)."""
    for name, (attention, mask) in SERVES.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def stock_function(module: torch.nn.Module, stock: str) -> Any:
    """The model's own dense attention, "sdpa" or "eager"."""
    return sdpa_attention_forward if stock == "sdpa" else eager_function(module)


def plug_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask function. Plain causal: None, or real keys `[B,1,1,kv_length]`."""
    plain = local_size is None and not use_vmap and mask_function is causal_mask_function
    if not plain:
        cacheless = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
        if cacheless and attention_mask is None and local_size is None and not use_vmap:
            _refuse_unknown_packing()
        additive = getattr(kwargs.get("config"), "_attn_implementation", None) == ADDITIVE_NAME
        mask = rowwise_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and not additive,
            use_vmap=use_vmap,
            **kwargs,
        )
        return _additive(mask, kwargs["dtype"]) if additive else mask
    if attention_mask is None:
        return None
    # Host syncs once a prefill buy the unmasked kernels; decode steps and traced code never sync.
    if q_length > 1 and may_read(attention_mask) and bool(attention_mask.all()):
        if attention_mask.shape[-1] >= int(q_offset) + q_length:  # else the missing tail is hidden
            return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    keys = attention_mask[:, kv_offset : kv_offset + kv_length]
    return keys.to(torch.bool if q_length == 1 else torch.uint8)[:, None, None, :]


def rowwise_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask `[B,1,T,S]`, made MASK_ROWS queries at a time where it is large: made at
    once it takes three times its own size, which is 17 GB for a window at 131,072 tokens."""

    def make(first: int, end: int) -> Any:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=end - first,
            kv_length=kv_length,
            q_offset=q_offset + first,  # pyright: ignore[reportArgumentType]
            **kwargs,
        )

    small = q_length <= MASK_ROWS or torch.compiler.is_compiling()
    if small or kwargs.get("local_size") is None or kv_length < kwargs["local_size"]:
        return make(0, q_length)
    part = make(0, MASK_ROWS)
    rows = 1 if part.stride(0) == 0 else batch_size  # one mask for all rows that have no padding
    mask = part.new_empty(rows, 1, q_length, kv_length)
    mask[:, :, :MASK_ROWS] = part[:rows]
    for first in range(MASK_ROWS, q_length, MASK_ROWS):
        mask[:, :, first : first + MASK_ROWS] = make(first, min(first + MASK_ROWS, q_length))[:rows]
    return mask.expand(batch_size, -1, -1, -1)


def _refuse_unknown_packing() -> None:
    """In code that is compiled or captured transformers cannot look whether position ids restart:
    a call with neither cache nor mask gets a mask for packed sequences, whatever its tokens are."""
    if not may_sync(torch.cuda.is_available()):
        raise UnsupportedCallError(
            "compiled, traced or captured, with neither a cache nor an attention mask, "
            "transformers treats the prompt as packed sequences, which attnplug does not serve. "
            "Pass use_cache=True (fastest) or attention_mask=torch.ones_like(input_ids); packed "
            "sequences need the policy removed."
        )


def plug_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attnplug_state: Any = None,
    attnplug_fresh: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: runs the module's policy, or its own dense attention
    where `apply` or the mask says so. Returns `[B,T,Hq,D]` and no weights."""
    refuse_options(query, dropout, kwargs)
    if kwargs.get("write_index") is not None:
        raise UnsupportedCallError(
            "this manager of continuous batching was made before attnplug.apply and knows nothing "
            "of the policy: stop it, and make another one."
        )
    if kwargs.get("cache") is not None:
        raise UnsupportedCallError(f"this version of transformers takes a cache as {CACHE}.")
    binding: Binding[Serves] | None = getattr(module, BINDING, None)
    state = attnplug_state
    ours = isinstance(state, PlugLayer)
    if ours and query.shape[2] > 1:  # steps defer their write by it
        state.note_buffers(key, value)
    query, key, value = as_autocast(query, key, value, state)
    key, value, lengths = valid_part(query, key, value, state, attnplug_fresh)
    call = AttentionCall(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        lengths=lengths,
        state=state if ours or isinstance(state, StaticLayer) else None,
    )
    compact = set_key_mask(call, attention_mask)
    exotic = is_exotic(module, kwargs)
    if state is None and compact and not exotic:
        refuse_unknown_keys(module, query, key)
    if binding is None or binding.policy is None or not compact or exotic:
        call.flush()
        if binding is not None and getattr(state, "round", None) is None:
            why = binding.reason if binding.policy is None else "the call has a mask of its own"
            binding.note_served(query.shape[2], Served(binding.stock, why))
        return stock_attention(
            module, binding, call, attention_mask, compact, kwargs, attnplug_fresh
        )
    refuse_float64(query.dtype)
    call.trace_to = binding.trace_to
    out = binding.policy.attend(call)
    if ours:
        state.note_writes()  # a step's op may have written the pending token
    queries = 1 if call.is_step else query.shape[2]
    binding.note_served(queries, Served(call.served_by, call.why_dense), state)
    return out.transpose(1, 2).contiguous(), None


def as_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three in autocast's dtype where it is on, as sdpa casts them: rotary embeddings leave
    keys and queries in float32."""
    cast = autocast_dtype(query.device)
    if cast is None:
        return query, key, value
    if isinstance(state, PlugLayer) and key.dtype != cast:
        state.flush()  # a copy of the buffers must have the pending token
    return query.to(cast), key.to(cast), value.to(cast)


def refuse_unknown_keys(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """Without a cache in sight, causal attention can only be over the queries' own keys."""
    if key.shape[2] != query.shape[2] and getattr(module, "is_causal", True):
        if not hasattr(module, BINDING):
            raise UnsupportedCallError(
                f"{type(module).__name__} names attnplug's attention, but attnplug.apply has never "
                "seen it. If its keys are another model's, such as an image encoder's, it needs "
                "the policy removed. Else its config is that of a model with a policy: build it "
                "from copy.deepcopy(model.config), or call attnplug.apply on it."
            )
        raise UnsupportedCallError(
            f"{type(module).__name__} got {key.shape[2]} keys for {query.shape[2]} queries and no "
            "cache that attnplug can see, so it cannot know which keys are valid. Pass the cache "
            f"as {CACHE}."
        )


def valid_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: Any, fresh: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys and values, and how many of them are valid where a static cache returned its buffer."""
    queries = query.shape[2]
    if fresh and fresh == queries == key.shape[2]:
        return key, value, None
    if not isinstance(state, StaticLayer) or isinstance(state, StaticSlidingWindowLayer):
        return key, value, None
    if fresh == queries:
        # A first prefill attends to its own tokens only: with that known, dense needs no mask.
        return key[:, :, :queries], value[:, :, :queries], None
    return key, value, state.cumulative_length.reshape(1)


def set_key_mask(call: AttentionCall, mask: torch.Tensor | None) -> bool:
    """Put a compact mask into the call. False where the mask is not a compact one."""
    if mask is None:
        return True
    row = mask.dtype == torch.bool and call.q.shape[2] == 1
    if not (row or mask.dtype == torch.uint8) or mask.shape[1] != 1:
        return False
    batch, keys = call.k.shape[0], call.k.shape[2]
    if row:
        _refuse_wide(mask, keys)
    call.key_mask = mask[:, 0, 0, :keys].bool().expand(batch, keys)
    if call.q.shape[2] > 1:
        call.start = call.first_key
    return True


def is_exotic(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the call wants something else than causal attention: a bias of positions, or both
    directions, which its caller or, since `apply`, its layer asks for (`is_causal=False`)."""
    return kwargs.get("position_bias") is not None or not _is_causal(module, kwargs)


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    told = kwargs.get("is_causal")
    return (getattr(module, "is_causal", True) if told is None else told) is not False


def stock_attention(
    module: torch.nn.Module,
    binding: Binding[Serves] | None,
    call: AttentionCall,
    mask: torch.Tensor | None,
    compact: bool,
    kwargs: dict[str, Any],
    fresh: int = 0,
) -> tuple[torch.Tensor, None]:
    """The model's own dense attention, given the mask that it expects."""
    # sdpa has neither softcaps nor sinks, and older transformers drops them silently.
    needs_eager = call.softcap != 0.0 or call.sinks is not None
    stock = "eager" if needs_eager else "sdpa" if binding is None else binding.stock
    # The mask of a window or a chunk is transformers' own, also where it is None: the buffer of a
    # static layer then holds the prompt first, and sdpa's is_causal reads it from the upper left.
    rolls = isinstance(call.state, StaticSlidingWindowLayer)
    own = rolls or kwargs.get("sliding_window") is not None
    queries = call.q.shape[2]
    masked = call.lengths is not None or call.key_mask is not None
    causal = _is_causal(module, kwargs)  # without a mask, others read all keys: an encoder's, say
    if compact and not own and (masked or (causal and queries > 1 and not call.whole)):
        mask = causal_mask(call)
    elif own and mask is None and queries > 1:
        call, mask = _last_queries(call, fresh)
    elif mask is not None:
        mask = _of_these_keys(mask, call, fresh)
    if stock == "sdpa":
        return sdpa_in_bands(module, call.q, call.k, call.v, mask, scaling=call.scale, **kwargs)
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, call.k.shape[2], dtype=torch.bool, device=call.q.device).tril()[
            None, None
        ]
    out, _ = eager_function(module)(
        module,
        call.q,
        call.k,
        call.v,
        _additive(mask, call.q.dtype),
        scaling=call.scale,
        softcap=call.softcap or None,
        s_aux=call.sinks,
        **kwargs,
    )
    return out, None


def _of_these_keys(mask: torch.Tensor, call: AttentionCall, fresh: int) -> torch.Tensor:
    """A mask without the empty slots of a static cache, which a first prefill leaves out. Raises
    UnsupportedCallError for one that `plug_mask` has kept small: no window is in it."""
    if mask.dtype == torch.uint8:
        raise UnsupportedCallError(
            "the mask of full attention came to a layer with a sliding window: the layers do not "
            "stand in the order that model.config.layer_types names. Set it to the types of the "
            "layers as they are now."
        )
    if fresh == call.q.shape[2] and isinstance(call.state, StaticLayer):
        return mask[..., : call.k.shape[2]]
    _refuse_wide(mask, call.k.shape[2])
    return mask


def _refuse_wide(mask: torch.Tensor, keys: int) -> None:
    """Nobody knows which columns of a mask are about a layer's keys where it has more, such as a
    user's own in a layer with a window."""
    if not torch.compiler.is_compiling() and mask.shape[-1] > keys:
        raise UnsupportedCallError(
            f"an attention mask for {mask.shape[-1]} keys came to a layer that has {keys}. Give "
            "the model a mask of two dimensions, or one for each type of its layers."
        )


def _last_queries(call: AttentionCall, fresh: int) -> tuple[AttentionCall, torch.Tensor | None]:
    """The call and mask of a layer that shares another's keys, where the model gives it the last
    queries of a prompt alone (Gemma 4): is_causal would take these for the first."""
    keys = fresh if isinstance(call.state, StaticLayer) else call.k.shape[2]
    if call.q.shape[2] >= keys:
        return call, None
    call = replace(call, k=call.k[:, :, :keys], v=call.v[:, :, :keys], lengths=None)
    return call, causal_mask(call)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


# By the name in a config: the attention function and the mask function.
SERVES: dict[str, tuple[Any, Any]] = {
    ATTENTION_NAME: (plug_attention, plug_mask),
    ADDITIVE_NAME: (plug_attention, plug_mask),
}
