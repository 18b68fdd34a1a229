"""What `apply` changes about a model's own methods, on the instance only: the cache that generate
prepares, the loop that it decodes with, and refusals of what would lose the policy."""

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from attnplug.errors import UnsupportedCallError
from attnplug.models.autocast import autocast_dtype
from attnplug.models.batching import INIT_METHOD, bind_batching
from attnplug.models.cache import MakeLayer, PlugCache, PlugLayer
from attnplug.models.decode_loop import DecodeLoop, Decoding
from attnplug.models.decode_step import layers_to_prepare, prepare_layers
from attnplug.models.growth import GrowingCache, Growth, first_room
from attnplug.models.hf import binding_of
from attnplug.models.instance_method import (
    is_put,
    is_replaced,
    put_method,
    stock_method,
    take_methods,
)
from attnplug.models.layer_kernels import KERNELS, LayerKernels, prompt_kernels
from attnplug.models.lent import Prompt
from attnplug.models.loop_calls import (
    ARGUMENTS,
    MIXIN,
    unserved_arguments,
    unserved_call,
)
from attnplug.models.names import CACHE, reads_an_encoder
from attnplug.models.parallel import LOCAL, local_weights
from attnplug.models.picked_entries import reads_entries
from attnplug.models.running import running
from attnplug.models.served import forget_served, note_steps
from attnplug.models.static import has_no_static_layers, static_cache
from attnplug.models.strangers import LayerWatch
from attnplug.models.user_hooks import user_hooks

BOUND = "_attnplug_bound"  # the modules whose attention a policy may serve
LAYER_MAKER = "_attnplug_make_layer"
LARGEST = "_attnplug_largest_cache"  # rows times tokens
LENGTHS = "_attnplug_cache_lengths"  # tokens, of the caches that later calls may share
SLACK = 4  # times the length that a call needs
LONGEST = "_previous_max_cache_length"  # transformers' own: tokens
CACHE_METHOD = "_prepare_cache_for_generation"
STEP_METHOD = "prepare_inputs_for_generation"
GENERATE_METHOD = "generate"
PREFILL_METHOD = "_prefill"
COMPILE_METHOD = "_valid_auto_compile_criteria"
LOOP = "_attnplug_loop"
WATCH = "_attnplug_watch"
SWITCH_METHOD = "set_attn_implementation"
METHODS = (
    GENERATE_METHOD,
    CACHE_METHOD,
    STEP_METHOD,
    PREFILL_METHOD,
    COMPILE_METHOD,
    SWITCH_METHOD,
    INIT_METHOD,
)
KEPT = (
    BOUND,
    LAYER_MAKER,
    LARGEST,
    LENGTHS,
    KERNELS,
    LOOP,
    WATCH,
    LOCAL,
)  # beside them, on the model


def bind_generate(
    model: PreTrainedModel,
    make_layer: MakeLayer | None,
    loop: DecodeLoop | None,
    bound: list[torch.nn.Module],
    has_kernels: bool,
) -> None:
    """Give this instance refusals, its own cache preparation unless make_layer is None, and with it
    attnplug's decode loop if there is one, and kernels of its layers if it `has_kernels`. `bound`
    are its attention modules."""
    vars(model)[BOUND] = bound
    if make_layer is not None and hasattr(model, CACHE_METHOD):
        vars(model)[LAYER_MAKER] = make_layer
        vars(model)[LARGEST] = 0
        vars(model)[LENGTHS] = ()
        put_method(model, CACHE_METHOD, _prepare_cache_for_generation)
        if hasattr(model, STEP_METHOD):
            put_method(model, STEP_METHOD, _prepare_step)
        if hasattr(type(model), PREFILL_METHOD):
            put_method(model, PREFILL_METHOD, _prefill)
        put_method(model, COMPILE_METHOD, _may_compile)
        if has_kernels:
            vars(model)[KERNELS] = LayerKernels()
        if loop is not None:
            vars(model)[LOOP] = loop
    if hasattr(model, GENERATE_METHOD):
        vars(model)[WATCH] = LayerWatch()
        put_method(model, GENERATE_METHOD, _generate)
    bind_batching(model)
    put_method(model, SWITCH_METHOD, _refuse_switch)


def own_cache(model: PreTrainedModel, served: Iterable[torch.nn.Module] = ()) -> str:
    """Why generate must prepare transformers' own cache for this model, whose attention modules
    `served` have a policy, and a static one would be silently wrong; "" where a static cache serves
    it as well."""
    family = type(model).__name__
    entries = any(map(reads_entries, served))  # attnplug's layers do what transformers' cannot
    if not (entries or getattr(model, "_can_compile_fullgraph", False)):
        return f"transformers runs no {family} on a static cache"
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is not None and not supports():
        return f"{family} makes a cache of its own"
    return ""


def last_call(model: PreTrainedModel) -> tuple[str, str, str, str]:
    """Of the last call of generate, why it decoded with transformers' loop, "" where it did not,
    what its steps have fused, "" where nobody asked them to, when they will be compiled, "" where
    they are or are not to be, and which of its layers' parts have kernels."""
    loop: DecodeLoop | None = vars(model).get(LOOP)
    kernels = str(vars(model).get(KERNELS) or "")
    if loop is None:
        return "", "", "", kernels
    if not is_put(model, GENERATE_METHOD):
        return "generate was replaced since; remove the policy and apply it", "", "", ""
    if loop.why_not:
        return loop.why_not, "", "", kernels
    return "", "" if loop.fusion is None else str(loop.fusion), loop.steps(), kernels


def unbind_generate(model: PreTrainedModel) -> None:
    """Undo `bind_generate`, also where it has come only so far, and what its loop has done to the
    weights."""
    loop: DecodeLoop | None = vars(model).get(LOOP)
    if loop is not None and loop.fusion is not None:
        loop.fusion.unpack(model)
    take_methods(model, *METHODS)
    for name in KEPT:
        vars(model).pop(name, None)


def _prepare_cache_for_generation(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """What generate calls on the instance: a PlugCache where the user did not choose otherwise."""
    stock = stock_method(model, CACHE_METHOD)
    given = model_kwargs.get(CACHE)
    room = first_room(model.config, generation_config, max_cache_length)
    speculated = _speculated(generation_config, generation_mode) + _drafted(model)
    if isinstance(given, PlugCache):
        grows = isinstance(given, GrowingCache)
        given.reserve(room + speculated if grows else max_cache_length)
    chosen = generation_config.cache_implementation not in (None, "static")
    # A method of the user's that prepares the inputs of each pass, such as PEFT's for learned
    # prompts, counts on the cache that transformers gives; one that prepares the cache chooses it.
    replaced = is_replaced(model, STEP_METHOD) or is_replaced(model, CACHE_METHOD, since=False)
    # Of a decoder that reads an encoder, cross-attention may write into the same cache.
    unused = generation_config.use_cache is False
    if given is not None or chosen or replaced or reads_an_encoder(model_kwargs) or unused:
        stock(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return
    growth = Growth(model.config.get_text_config(decoder=True), vars(model)[LAYER_MAKER])
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    rows = batch_size * copies
    alone = Prompt.of(generation_config, generation_mode, rows, max_cache_length, model.device)
    fresh = dict(model_kwargs)
    if alone is not None:
        stock(generation_config, fresh, generation_mode, batch_size, max_cache_length)
        lent = alone.cache_like(fresh.pop(CACHE, None), growth)
        if lent is not None:
            model_kwargs[CACHE] = lent
            _drop_full_mask(model_kwargs)
            return
    # The stock method sizes the static cache (beams, max_cache_len, earlier calls); its
    # full-attention layers are then replaced. The caller's config stays as it was.
    static = copy.copy(generation_config)
    static.cache_implementation = "static"
    # Whose buffers would be made ahead, as many heads in each layer: right for few families.
    static.prefill_chunk_size = None
    _bound_length(model, rows, room + speculated)
    if has_no_static_layers(growth.config):
        own = static_cache(growth.config, vars(model)[LONGEST])
    else:
        stock(static, fresh, generation_mode, batch_size, room + speculated)
        own = _static_cache(fresh)
    cache = GrowingCache.begin(own, growth)
    # Rolling windows cannot be cropped, which assisted decoding needs, and take one precision only,
    # where autocast mixes two.
    mixed = autocast_dtype(model.device) is not None
    if (mixed or _must_crop(generation_config, generation_mode)) and not _croppable(cache):
        stock(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return
    if alone is not None:
        alone.lend_to(cache)
    model_kwargs[CACHE] = cache
    _drop_full_mask(model_kwargs)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """generate, told of attnplug's loop where its arguments allow it, and with plain weights."""
    with running(model):
        if BOUND not in vars(model):  # the policy went while this call waited
            return model.generate(*args, **kwargs)
        vars(model)[WATCH].look(model)
        loop: DecodeLoop | None = vars(model).get(LOOP)
        forget_served(vars(model)[BOUND])
        if loop is not None:
            arguments = ARGUMENTS.bind(model, *args, **kwargs).arguments
            why = loop.why_not = unserved_arguments(model, arguments)
            if not why:  # threads share the loop, and another call may have set its own since
                kwargs["custom_generate"] = _decode
        with local_weights(model):
            return stock_method(model, GENERATE_METHOD)(*args, **kwargs)


@functools.wraps(MIXIN._sample)  # generate reads its signature
def _decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """What generate calls once all is prepared: attnplug's loop, or transformers'."""
    loop: DecodeLoop = vars(model)[LOOP]
    call = (input_ids, logits_processor, stopping_criteria, generation_config)
    why = loop.why_not = unserved_call(model, *call, model_kwargs)
    if why:
        return type(model)._sample(model, *call, **model_kwargs)
    return Decoding(model, *call, model_kwargs).run(loop)


vars(_decode)["__signature__"] = inspect.signature(MIXIN._sample)  # else made anew in each call


def _prefill(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: Any, **options: Any
) -> Any:
    """generate's prefill. Layers are told that steps follow which it prepares. Where the prefill
    comes in chunks, they are told of how many tokens, so that a method chooses for a chunk as it
    would for all; and chunks are not compiled, as a prefill in one piece is not: that of the last
    one has a length of its own."""
    stock, chunk = stock_method(model, PREFILL_METHOD), generation_config.prefill_chunk_size
    cache = model_kwargs.get(CACHE)
    if not isinstance(cache, PlugCache):
        return stock(input_ids, generation_config, model_kwargs, **options)
    config = generation_config
    if chunk is not None:
        config = copy.copy(generation_config)
        config.compile_config, config.disable_compile = None, True
    layers = [layer for layer in cache.layers if isinstance(layer, PlugLayer)]
    for layer in layers:
        layer.steps_are_prepared = is_put(model, STEP_METHOD)
        layer.prefill_tokens = 0 if chunk is None else input_ids.shape[1]
    try:
        with prompt_kernels(model, input_ids, config, model_kwargs):
            outputs = stock(input_ids, config, model_kwargs, **options)
        if generation_config.max_length != input_ids.shape[1] + 1:  # else no step comes
            note_steps(vars(model).get(BOUND, ()), cache)
        return outputs
    finally:
        for layer in layers:
            layer.steps_are_prepared, layer.prefill_tokens = False, 0


def _may_compile(model: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """What generate asks before it compiles a step, and attnplug's loop before it compiles or
    captures any: not where a user's hook wants to run at every step, nor where the cache grows."""
    length = generation_config.max_length
    if length is not None and first_room(model.config, generation_config, length) < length:
        return False
    compiles = stock_method(model, COMPILE_METHOD)(model_kwargs, generation_config)
    why = user_hooks(model) if compiles else ""
    if LOOP in vars(model):
        vars(model)[LOOP].hooked = why
    return compiles and not why


def _bound_length(model: Any, rows: int, length: int) -> None:
    """Have transformers make a call's cache as long as one of an earlier call, which spares a
    capture, and where windows are cut to the cache a compilation. Not as long as the longest, as it
    would: at most SLACK times what the call needs, and no more memory than any cache so far."""
    largest = max(vars(model)[LARGEST], rows * length)
    known: tuple[int, ...] = vars(model)[LENGTHS]
    most = min(SLACK * length, largest // max(rows, 1))
    shared = max((each for each in known if length <= each <= most), default=None)
    if shared is None:
        # A longer cache replaces the caches that are a little shorter, so that there are few.
        known = (*(each for each in known if each > length or SLACK * each < length), length)
    vars(model)[LENGTHS], vars(model)[LARGEST] = known, largest
    vars(model)[LONGEST] = length if shared is None else shared


def _prepare_step(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What generate calls on the instance before each forward pass, on the host: before a step the
    layers of a PlugCache get their chance."""
    cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
    # A prefill, or a chunk of one, is left alone: its tokens are not in the cache yet.
    if isinstance(cache, PlugCache) and not kwargs.get("is_first_iteration", False):
        plain = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        tokens = 0 if input_ids is None else input_ids.shape[1] - 1
        prepare_layers(layers_to_prepare(cache), tokens, plain)
    return stock_method(model, STEP_METHOD)(input_ids, *args, **kwargs)


def _drop_full_mask(model_kwargs: dict[str, Any]) -> None:
    """Forget a mask that masks nothing, once a generate: transformers before 5.23 carries it
    through decode, where dense_decode would read it at every step."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and bool(mask.all()):
        del model_kwargs["attention_mask"]


def _static_cache(model_kwargs: dict[str, Any]) -> StaticCache:
    cache = model_kwargs.get(CACHE)
    if not isinstance(cache, StaticCache):
        raise UnsupportedCallError(
            f"generate prepared a {type(cache).__name__} where a StaticCache was asked for; pass "
            f"{CACHE} yourself"
        )
    return cache


def _must_crop(generation_config: Any, generation_mode: Any) -> bool:
    return generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant


def _speculated(generation_config: Any, generation_mode: Any) -> int:
    """Tokens that a verification step may write past the final length before it crops them."""
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        return 0
    counts = (generation_config.prompt_lookup_num_tokens, generation_config.num_assistant_tokens)
    return 1 + max(count or 0 for count in counts)


def _drafted(model: Any) -> int:
    """Tokens that a round may write past the final length before it takes them back."""
    policies = [b.policy for m in vars(model).get(BOUND, ()) if (b := binding_of(m)) is not None]
    return max((each.rounds() for each in policies if each is not None), default=0)


def _croppable(cache: Cache) -> bool:
    return all(isinstance(layer, PlugLayer) for layer in cache.layers)


def _refuse_switch(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedCallError(
        "set_attn_implementation would drop the policy. Call attnplug.remove(model) first."
    )
