"""Finds a model's attention layers and says of each whether a policy can serve it, or why not."""

import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.call import LayerShape
from attnplug.errors import UnsupportedModelError
from attnplug.models.indexed import why_not_indexed
from attnplug.models.latents import has_latents, numbers_a_token, why_not_latents
from attnplug.models.names import CACHE_ARGUMENTS
from attnplug.models.parallel import Split, split_of
from attnplug.models.picked_entries import entry_sizes, reads_entries
from attnplug.ops.common.checks import DTYPES, WIDE_HEAD_DIMS, why_not_width

# Of Zamba's shared blocks, HRM's cycles and Dory's loops: where in the cache to put keys.
SLOT_ARGUMENTS = ("layer_idx", "cycle_offset", "cache_offset")
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # which the files of attention layers have
INDEXED = "indexed"  # the kind of a layer whose model picks the tokens that it reads
PICKING_KINDS = (INDEXED, "minimax_m3_sparse")  # as configs call it
IMPLEMENTATION = "_attn_implementation"  # of a config: what apply changes in those of served layers


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: where it is, what it looks like on this rank, why it must stay dense
    ("" if a policy can serve it), and how tensor parallelism has split it (None: not at all)."""

    index: int
    name: str
    module: torch.nn.Module
    config: PreTrainedConfig
    kind: str
    shape: LayerShape
    reason: str
    split: Split | None = None


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """The PreTrainedModel itself, out of torch.compile's wrapper and PEFT's."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif callable(getattr(inner, "get_base_model", None)):
            inner = inner.get_base_model()
        else:
            raise UnsupportedModelError(
                f"a {type(inner).__name__} is not a transformers PreTrainedModel; {_hint(inner)}"
            )
    return inner


def _hint(model: torch.nn.Module) -> str:
    if isinstance(getattr(model, "module", None), torch.nn.Module):
        return f"a policy goes onto the model before {type(model).__name__}, or onto its .module"
    return "load one, as with AutoModelForCausalLM.from_pretrained"


def find_attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """The attention layers of a decoder, by layer index.

    Raises UnsupportedModelError if the model has none that go through transformers' attention
    interface, is an encoder-decoder, reads another model's keys alone, or is split over ranks that
    cannot share its heads evenly.
    """
    family = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{family} is an encoder-decoder; attnplug serves decoder-only models."
        )
    modules = [(name, each) for name, each in model.named_modules() if is_attention(each)]
    foreign = [module for _, module in modules if _has_foreign_forward(module)]
    if len(foreign) == len(modules):
        raise UnsupportedModelError(
            f"{family}: no attention layer goes through transformers' attention interface "
            "(AttentionInterface), so no policy can reach it. Models such as Llama, Qwen, Mistral, "
            "Gemma, Phi, OLMo, Granite and gpt-oss do."
        )
    if all(getattr(module, "is_kv_shared_layer", False) for _, module in modules):
        raise UnsupportedModelError(
            f"{family} has no keys of its own: its layers read the keys of the model that it "
            "assists. Apply the policy to that model."
        )
    found = [_describe(name, module, model) for name, module in modules]
    for module in foreign:
        why = (
            f"{type(module).__name__} has a forward of its own that goes around transformers' "
            "attention interface, and reads the config that this layer shares"
        )
        config = _config(module)
        found = [replace(x, reason=x.reason or why) if x.config is config else x for x in found]
    indexed = {type(x.module) for x in found if x.shape.indexed}  # which ask of their picks alone
    others = (x.module for x in found if type(x.module) not in indexed)
    asking = next((type(module).__name__ for module in others if asks_for_sdpa(module)), "")
    if asking:
        why = (
            f"{asking} computes otherwise where the config's attention is not called sdpa or eager"
        )
        found = [replace(layer, reason=layer.reason or why) for layer in found]
    twice = slot_filled_twice(model)
    if twice:
        found = [replace(layer, reason=layer.reason or twice) for layer in found]
    return sorted(found, key=lambda layer: layer.index)


def _uses_interface(kind: type) -> bool:
    return hasattr(sys.modules.get(kind.__module__), INTERFACE)


def _has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether an attention's class has its forward from a file without the attention interface,
    such as a user's subclass: nobody knows what of the config, masks and caches that reads."""
    kinds = type(module).__mro__
    return not _uses_interface(next(kind for kind in kinds if "forward" in vars(kind)))


def asks_for_sdpa(module: torch.nn.Module) -> bool:
    """Whether the code of a module, or of a part of it, asks if its config's attention is called
    "sdpa": it builds a mask of its own only then (MiniMax-M3, DeepSeek-V3.2), and must find the
    name that the model had. A model's layers share their config, so all of them are left to it."""
    return any(_asks_for_sdpa(type(part)) for part in module.modules())


@functools.cache
def _asks_for_sdpa(kind: type[torch.nn.Module]) -> bool:
    own = (base for base in kind.__mro__ if base not in torch.nn.Module.__mro__)
    functions = [each for base in own for each in vars(base).values() if inspect.isfunction(each)]
    codes = (getattr(x, "__code__", None) for each in functions for x in _wrapped(each))
    return any(_asks(code) for code in codes if code is not None)


def _wrapped(function: Any) -> Iterator[Any]:
    """A function and all that it wraps, each of which may ask."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _asks(code: CodeType) -> bool:
    """Whether code reads the name of a config's attention and knows that of sdpa."""
    known = (x for each in code.co_consts for x in (each if isinstance(each, tuple) else (each,)))
    return IMPLEMENTATION in code.co_names and "sdpa" in known


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is an attention layer that goes through transformers' interface."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "is_causal")
        and any(map(_uses_interface, type(module).__mro__))
    )


def _index(module: torch.nn.Module) -> int:
    """The layer of the cache that the module says is its own."""
    return module.layer_idx  # pyright: ignore[reportReturnType]


def _describe(name: str, module: torch.nn.Module, model: PreTrainedModel) -> AttentionLayer:
    index = _index(module)
    weights = _weights(module) or _weights(model)
    split = split_of(model, name, *_heads(module))
    shape = _shape(module, weights, split)
    kind = _kind(module, index)
    if kind == INDEXED and split is None:
        latent = numbers_a_token(module) if has_latents(module) else 0
        sizes = entry_sizes(module) if reads_entries(module) else None
        shape = replace(shape, indexed=not why_not_indexed(module), latent=latent, entries=sizes)
    elif has_latents(module) and split is None and not why_not_latents(module):
        shape = replace(shape, latent=numbers_a_token(module))
    reason = _reason(module, kind, shape, weights)
    return AttentionLayer(index, name, module, _config(module), kind, shape, reason, split)


def _config(module: torch.nn.Module) -> PreTrainedConfig:
    config = module.config
    assert isinstance(config, PreTrainedConfig)  # every attention of transformers has one
    return config


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The module's tensors, parameters first. Quantized layers may have no parameters: GPTQ and
    AWQ keep buffers, and torch.ao's dynamic layers pack weights into an object of their own."""
    return [*module.parameters(), *module.buffers()]


def config_heads(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, KV heads and head dimension of a decoder's config, all ranks together."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, dim


def positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a decoder can read, with what its config says of rope scaling; None where it
    does not say.

    A scaling's `factor` counts from `original_max_position_embeddings`. Where a linear or dynamic
    one names no such number, it counts from `max_position_embeddings`, unless the config has a rope
    for each kind of layer: such a config's positions are those of the whole model, scaling
    included.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    if type(longest) is not int or longest < 1:
        return None
    ropes = getattr(text, "rope_parameters", None) or {}
    each = [rope for rope in ropes.values() if isinstance(rope, dict)]
    found = [longest]
    for rope in each or [ropes]:
        grows = not each and rope.get("rope_type") in ("linear", "dynamic")
        original = rope.get("original_max_position_embeddings") or (longest if grows else 0)
        found.append(int(original * (rope.get("factor") or 1)))
    return max(found)


def _own_config(module: torch.nn.Module) -> PreTrainedConfig:
    """The config of the module's own layer, where a config says other numbers of each layer."""
    config, index = _config(module), _index(module)
    if getattr(config, "is_heterogeneous", False) and index >= 0:
        return config.per_layer_config[index]
    return config


def _heads(module: torch.nn.Module) -> tuple[int, int]:
    """Query heads and KV heads, of all ranks together."""
    config = _own_config(module)
    heads = getattr(config, "num_attention_heads", 0)
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _shape(module: torch.nn.Module, weights: list[torch.Tensor], split: Split | None) -> LayerShape:
    config = _own_config(module)
    heads, heads_kv = _heads(module)
    hidden = getattr(config, "hidden_size", 0)
    head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    softcap = getattr(module, "attn_logit_softcapping", None)
    of_rank = (heads, heads_kv) if split is None else split.of_rank
    return LayerShape(
        heads_q=of_rank[0],
        heads_kv=of_rank[1],
        head_dim=head_dim or (hidden // heads if heads else 0),
        softcap=softcap or 0.0,
        sinks=hasattr(module, "sinks"),
        device=_device(module, weights),
        positions=positions(config),
    )


def _device(module: torch.nn.Module, weights: list[torch.Tensor]) -> torch.device:
    """Where the module computes: where its weights are, or, where accelerate has offloaded them,
    where its hooks bring them."""
    if not weights:
        return torch.device("cpu")  # torch.ao packs weights on the CPU only
    if weights[0].is_meta:
        return next(_hooked_devices(module), weights[0].device)
    return weights[0].device


def _hooked_devices(module: torch.nn.Module) -> Iterator[torch.device]:
    """The devices that accelerate's hooks have a module's parts compute on."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            device = getattr(each, "execution_device", None)
            if device is not None:
                number = type(device) is int
                yield torch.device("cuda", device) if number else torch.device(device)


def _kind(module: torch.nn.Module, index: int) -> str:
    """ "full", "sliding", "chunked" and so on, as the config's layer types say it."""
    if reads_entries(module):
        return INDEXED
    config = _config(module)
    types = getattr(config, "layer_types", None)
    if types and index >= 0:
        kind = str(types[index]).removesuffix("_attention")
        return INDEXED if kind in PICKING_KINDS else kind
    if getattr(module, "sliding_window", None) is not None:
        return "sliding"
    config = _own_config(module)
    uses_window = getattr(config, "use_sliding_window", True)
    if uses_window and getattr(config, "sliding_window", None) is not None:
        return "sliding"
    return "full"


def takes_cache(module: torch.nn.Module) -> bool:
    """Whether the module is handed its cache under a name that the hook knows."""
    return not inspect.signature(type(module).forward).parameters.keys().isdisjoint(CACHE_ARGUMENTS)


def has_own_slot(module: torch.nn.Module) -> bool:
    """Whether the module fills one layer of the cache, the one that its `layer_idx` names. A block
    that several layers share, or that runs several times a pass, is told elsewhere where to put
    its keys."""
    parameters = inspect.signature(type(module).forward).parameters.keys()
    return _index(module) >= 0 and parameters.isdisjoint(SLOT_ARGUMENTS)


def slot_filled_twice(model: torch.nn.Module) -> str:
    """Which two layers of a list fill one layer of the cache, in a sentence, or "": one module that
    stands in two places, or a copy that kept its `layer_idx`. Such a model computes as it was meant
    to without a cache alone; with one, the second layer reads the first one's keys, too, at places
    that follow from how a cache grows."""
    places: dict[tuple[str, int], str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not (is_attention(module) and has_own_slot(module)):
            continue
        parts = name.split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
        if last is not None:
            parts[last] = "*"
        first = places.setdefault((".".join(parts), _index(module)), name)
        if first != name:
            return f"{first} and {name} fill one layer of the cache"
    return ""


def _reason(
    module: torch.nn.Module, kind: str, shape: LayerShape, weights: list[torch.Tensor]
) -> str:
    parameters = inspect.signature(type(module).forward).parameters.values()
    if not has_own_slot(module):
        return "one module fills several layers of the cache"
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return f"{type(module).__name__}.forward takes no extra keyword arguments"
    if shape.device.type not in ("cpu", "cuda", "meta"):
        return f"attnplug has no kernels for the device {shape.device.type}"
    if kind in ("sliding", "chunked"):
        return f"{kind} attention reads few keys already"
    if kind not in ("full", INDEXED):
        return f"attnplug has no kernel for {kind} attention"
    if not module.is_causal:
        return "attention is not causal"
    if kind == INDEXED and not shape.indexed:
        return why_not_indexed(module) or "its heads are split over several processes"
    if not (shape.indexed or shape.reads_latents):
        if has_latents(module):
            return why_not_latents(module) or "its heads are split over several processes"
        if hasattr(module, "kv_lora_rank"):
            return "multi-head latent attention"
        value_dim = getattr(module, "v_head_dim", None) or shape.head_dim
        if value_dim != shape.head_dim:
            return f"keys of {shape.head_dim} and values of {value_dim} channels"
    if not takes_cache(module):
        return "its cache argument has a name that attnplug does not know"
    if any(tensor.dtype == torch.float64 for tensor in weights[:1]):
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"dtype float64 is not one of {served}"
    if shape.indexed or shape.reads_latents:
        return ""
    return why_not_width(shape.head_dim, WIDE_HEAD_DIMS)
