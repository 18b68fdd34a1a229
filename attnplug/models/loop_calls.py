"""Which calls of generate attnplug's decode loop serves, and why another one keeps transformers'.

Each function here returns the reason as text, "" where the loop serves. Whatever it does not know
by its exact type, a method that a model's class has of its own or an argument of a newer
transformers, keeps transformers' loop.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import logits_process, stopping_criteria, utils
from transformers.generation.configuration_utils import GenerationMode

from attnplug.models.cache import PlugCache, PlugLayer
from attnplug.models.growth import first_room
from attnplug.models.instance_method import is_replaced
from attnplug.models.names import CACHE
from attnplug.models.own_code import own_code
from attnplug.models.sliding import SlidingLayer, sliding_layers
from attnplug.models.walk import devices_of

STOCK: Any = utils
DEVICES = frozenset({"cpu", "cuda"})  # where the loop has been seen to give transformers' tokens
# What transformers' loop calls of a model between two tokens, and this loop does not call.
OWN_METHODS = (
    "generate",
    "_sample",
    "_prefill",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_has_unfinished_sequences",
)
# They compute scores on the device, without a state or a look from the host, from scores and how
# many tokens there are; and the last one from which tokens these are.
OF_LENGTH = tuple(
    getattr(logits_process, name)
    for name in (
        "EpsilonLogitsWarper",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
PROCESSORS = (*OF_LENGTH, logits_process.RepetitionPenaltyLogitsProcessor)
CRITERIA = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
INPUTS = {CACHE, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
MIXIN: Any = GenerationMixin  # which pyright takes for a protocol's
ARGUMENTS = inspect.signature(MIXIN.generate)


def unserved_model(model: PreTrainedModel, kinds: Iterable[str]) -> str:
    """Why no call of this model's generate takes the loop; `kinds` are those of its attention
    layers."""
    kinds = {*kinds}
    others = sorted(kinds - {"full", "sliding", "indexed"})
    if others:
        return f"the caches of its {others[0]} layers are counted on the host"
    family = type(model)
    # Only a model that names its layers' types takes a mask for each type of them.
    if "sliding" in kinds and not getattr(model.config.get_text_config(), "layer_types", None):
        return f"{family.__name__} takes one mask for all of its layers"
    return _foreign_method(model)


def _foreign_method(model: PreTrainedModel) -> str:
    """Which of OWN_METHODS is neither transformers' own nor attnplug's on the model, if any. Asked
    in each call: the model, its class, or one that this is derived from, may have changed since."""
    family = type(model)
    for name in OWN_METHODS:
        # Whoever has replaced attnplug's generate since calls it: it is what asks here.
        if is_replaced(model, name, since=name != "generate"):
            return f"{name} was replaced on this model"
        found = getattr(family, name, None)
        if found is not getattr(MIXIN, name, None):
            return f"{family.__name__} has its own {name}"
        code = getattr(own_code(found), "__code__", None)
        if found is not None and (code is None or code.co_filename != STOCK.__file__):
            return f"{name} of transformers' {MIXIN.__name__} was replaced"
    if hasattr(model, "create_masks_for_generate"):
        return f"{family.__name__} makes its own masks"
    return ""


def unserved_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> str:
    """Why generate must not be told of the loop: it leaves arguments of these out for a loop that
    is not its own."""
    if model.device.type not in DEVICES:
        return f"attnplug's own has not been verified on {model.device.type} yet"
    foreign = _foreign_method(model)
    if foreign:
        return foreign
    options: Mapping[str, Any] = arguments.get("kwargs", {})
    names = ("custom_generate", "assistant_model", "streamer", "synced_gpus")
    given = [name for name in names if arguments.get(name)]
    given += [name for name in ("tokenizer", "assistant_tokenizer") if options.get(name)]
    if given:
        return f"generate was given {given[0]}"
    if _goes_on_for_others(model):
        return "several processes that share each weight generate together"
    mode = _mode(model, arguments.get("generation_config"), options)
    return "" if mode in MODES else f"generate was asked for {mode.value}"


def _goes_on_for_others(model: PreTrainedModel) -> bool:
    """Whether a process that has ended must still run steps, as others want its part of a weight.
    Ranks of tensor parallelism compute the same tokens and end together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    shared = STOCK.is_deepspeed_zero3_enabled() or STOCK.is_fsdp_managed_module(model)
    return shared and torch.distributed.get_world_size() > 1


def _mode(
    model: PreTrainedModel, config: GenerationConfig | None, options: Mapping[str, Any]
) -> GenerationMode:
    """The generation mode that a call comes to, as generate finds it from its options, the config
    that it was given, and the model's."""
    fields = dict(_defaults())
    for source in (model.generation_config, config):
        if source is not None:
            fields |= {name: value for name, value in vars(source).items() if value is not None}
    fields |= {name: value for name, value in options.items() if name in fields}
    merged: Any = SimpleNamespace(**fields)
    return GenerationConfig.get_generation_mode(merged)


@functools.cache
def _defaults() -> dict[str, Any]:
    """What a generation config says where nobody has set it."""
    return vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()


def unserved_call(
    model: PreTrainedModel,
    ids: torch.Tensor,
    processors: list[Any],
    criteria: list[Any],
    config: Any,
    inputs: Mapping[str, Any],
) -> str:
    """Why a call that generate has prepared keeps transformers' loop."""
    unknown = sorted(inputs.keys() - INPUTS)
    if unknown:
        return f"the model is given {unknown[0]}"
    if not inputs.get("use_cache"):
        return "use_cache=False"
    asked = [name for name in OUTPUTS if getattr(config, name) and config.return_dict_in_generate]
    if asked:
        return f"{asked[0]} was asked for"
    for each, known in ((processors, PROCESSORS), (criteria, CRITERIA)):
        strange = [type(item).__name__ for item in each if type(item) not in known]
        if strange:
            return f"the loop does not know {strange[0]}"
    if config.is_assistant:
        return "the model assists another"
    room = first_room(model.config, config, config.max_length)
    if room < config.max_length:
        return f"the call may come to {config.max_length:,} tokens, and has room for {room:,} first"
    return _unserved_inputs(model, ids, config, inputs)


def _unserved_inputs(
    model: PreTrainedModel, ids: torch.Tensor, config: Any, inputs: Mapping[str, Any]
) -> str:
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None or positions.dim() != 2 or (mask is not None and mask.dim() != 2):
        return "position ids and masks of one row a sequence are served"
    cache = inputs[CACHE]
    if not isinstance(cache, PlugCache):
        return f"generate has a {type(cache).__name__}"
    known = PlugLayer, SlidingLayer
    strange = [type(layer).__name__ for layer in cache.layers if not isinstance(layer, known)]
    if strange:
        return f"the cache has layers of another kind, {strange[0]}"
    if not any(isinstance(layer, PlugLayer) for layer in cache.layers):
        return "the cache has sliding windows only"
    if len({layer.max_cache_len for layer in sliding_layers(cache.layers)}) > 1:
        return "its sliding windows are of several sizes"
    # A prompt that gives the only token has no steps, which are what must find all in one place.
    steps = ids.shape[1] + 1 < config.max_length
    if steps and devices_of(model) != {ids.device}:
        return "the prompt and all of the model are not on one device"
    if config._eos_token_tensor is not None and config._pad_token_tensor is None:
        return "there is no pad_token_id"
    return ""
