"""The cases of transformers' GenerationTesterMixin, by its names without `test_`, under every
policy with a budget that covers them: tokens and logits are stock's.

NAMES are the mixin's cases at MIXIN, the tag of transformers' repository nearest to the versions
that attnplug is tested with. SERVED has a function for each that runs here: it uses a model and
returns what came of it, once without a policy and once with. SKIPPED has the reason for the others.
The mixin itself runs by bench/generation_suite.py, from a checkout. `output_attentions=True`, which
the mixin's `dict_output` cases ask of eager attention, is refused.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, GenerationMixin
from transformers.cache_utils import QuantizedLayer
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.testing.policy import tiny_model

MIXIN = "5.15.0"
NAMES = """
assisted_decoding_matches_greedy_search_0_random assisted_decoding_matches_greedy_search_1_same
assisted_decoding_sample beam_sample_generate beam_sample_generate_dict_output beam_search_generate
beam_search_generate_dict_output beam_search_generate_dict_outputs_use_cache
custom_4d_attention_mask eager_matches_fa2_generate eager_matches_fa3_generate
eager_matches_fa4_generate eager_matches_sdpa_generate
eager_padding_matches_padding_free_with_position_ids executorch_export_dynamic
executorch_export_generate_dynamic executorch_export_generate_dynamic_static_cache
executorch_export_generate_static executorch_export_generate_static_static_cache
executorch_export_static flash_attention_2_continue_generate_with_position_ids
flash_attention_2_padding_matches_padding_free_with_position_ids
flash_attention_2_padding_matches_padding_free_with_position_ids_and_fa_kwargs
flash_attention_3_padding_matches_padding_free_with_position_ids
flash_attention_3_padding_matches_padding_free_with_position_ids_and_fa_kwargs
flash_attention_4_padding_matches_padding_free_with_position_ids
flash_attention_4_padding_matches_padding_free_with_position_ids_and_fa_kwargs
forward_with_logits_to_keep generate_compilation_all_outputs
generate_compile_model_forward_fullgraph generate_continue_from_inputs_embeds
generate_continue_from_past_key_values generate_from_inputs_embeds_0_greedy
generate_from_inputs_embeds_1_beam_search generate_from_inputs_embeds_with_static_cache
generate_from_random_inputs_embeds generate_methods_with_logits_to_keep
generate_with_and_without_position_ids generate_with_mtp generate_with_quant_cache
generate_with_static_cache generate_without_input_ids greedy_generate greedy_generate_dict_outputs
greedy_generate_dict_outputs_use_cache inherits_generation_mixin left_padding_compatibility
model_parallel_beam_search onnx_export_dynamic onnx_export_generate_dynamic
onnx_export_generate_dynamic_static_cache onnx_export_generate_static
onnx_export_generate_static_static_cache onnx_export_static past_key_values_format
prepare_inputs_for_generation_kwargs_forwards prompt_lookup_decoding_matches_greedy_search
prompt_lookup_decoding_stops_at_eos recurrent_layers_mask_padding_on_continued_forward
sample_generate sample_generate_dict_output sdpa_padding_matches_padding_free_with_position_ids
static_cache_no_recompile_with_smaller_length torch_export_dynamic torch_export_generate_dynamic
torch_export_generate_dynamic_static_cache torch_export_generate_static
torch_export_generate_static_static_cache torch_export_static
""".split()

SKIPPED = {
    "flash_attention": "flash attention is another attention function, which a policy replaces",
    "eager_matches_fa": "flash attention is another attention function, which a policy replaces",
    "torch_export": "tests/hostile/test_export.py exports every policy, also with generate's cache",
    "onnx_export": "ONNX has no attnplug ops, and the suite does not install it",
    "executorch_export": "ExecuTorch has no attnplug ops, and the suite does not install it",
    "model_parallel_beam_search": "two GPUs; tests/contract has a device map, and beams are served",
    "generate_with_mtp": "neither model has layers for several tokens: the mixin skips it as well",
    "recurrent_layers": "neither model has recurrent layers: the mixin skips it as well",
}

TOKENS, NEW = 27, 4
Outputs = list[torch.Tensor]
Way = Callable[[Any], Outputs]
SERVED: dict[str, Way] = {}


def served(*names: str) -> Callable[[Way], Way]:
    def register(way: Way) -> Way:
        SERVED.update(dict.fromkeys(names, way))
        return way

    return register


def inputs(model: Any, rows: int = 2) -> dict[str, torch.Tensor]:
    """A prompt, with padding on the left of the last of several rows."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 97, (rows, TOKENS), generator=random)
    mask = torch.ones_like(ids)
    mask[-1, : 5 * (rows - 1)] = 0
    return dict(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))


def generate(model: Any, *, seed: int = 0, **options: Any) -> Any:
    """generate's outputs by name. Greedy unless told, compiled only where told."""
    fields: dict[str, Any] = dict(
        do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True,
        disable_compile="compile_config" not in options,
    )  # fmt: skip
    torch.manual_seed(seed)
    return model.generate(**(fields | options))


def tensors(out: Any) -> Outputs:
    hidden = out.get("hidden_states")
    return [out.sequences, *out.logits, *([] if hidden is None else [hidden[-1][-1][:, -1]])]


def way(rows: int = 2, **options: Any) -> Way:
    """A plain call of generate."""
    return lambda model: tensors(generate(model, **inputs(model, rows), **options))


SAMPLING = dict(do_sample=True, top_k=10, top_p=0.7, temperature=0.7)
PROCESSORS = dict(bad_words_ids=[[1, 0]], repetition_penalty=1.2, remove_invalid_values=True)
ALL = dict(output_scores=True, output_hidden_states=True, **PROCESSORS)
BEAMS = dict(num_beams=2, length_penalty=2.0, early_stopping=False)
PLAIN: dict[str, dict[str, Any]] = {
    "greedy_generate": PROCESSORS,
    "greedy_generate_dict_outputs": dict(use_cache=False, **ALL),
    "greedy_generate_dict_outputs_use_cache": ALL,
    "sample_generate": dict(**SAMPLING, **PROCESSORS),
    "sample_generate_dict_output": dict(use_cache=False, num_return_sequences=2, **SAMPLING, **ALL),
    "beam_search_generate": dict(**BEAMS, **PROCESSORS),
    "beam_search_generate_dict_output": dict(use_cache=False, **BEAMS, **ALL),
    "beam_search_generate_dict_outputs_use_cache": dict(**BEAMS, **ALL),
    "beam_sample_generate": dict(**BEAMS, **SAMPLING, **PROCESSORS),
    "beam_sample_generate_dict_output": dict(use_cache=False, **BEAMS, **SAMPLING, **ALL),
    "prompt_lookup_decoding_matches_greedy_search": dict(rows=1, prompt_lookup_num_tokens=2),
    "generate_methods_with_logits_to_keep": dict(logits_to_keep=0),
    "generate_with_static_cache": dict(cache_implementation="static"),
}
SERVED.update({name: way(**options) for name, options in PLAIN.items()})


@served("assisted_decoding_matches_greedy_search_0_random")
def with_another_assistant(model: Any) -> Outputs:
    helper = tiny_model(seed=3, device=model.device.type)
    return assisted(model, helper)


def assisted(model: Any, helper: Any, **options: Any) -> Outputs:
    helper.generation_config.num_assistant_tokens = 2
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    return tensors(generate(model, **inputs(model, 1), assistant_model=helper, **options))


SERVED["assisted_decoding_matches_greedy_search_1_same"] = lambda model: assisted(model, model)
SERVED["assisted_decoding_sample"] = lambda model: assisted(model, model, **SAMPLING)


@served("prompt_lookup_decoding_stops_at_eos")
def lookup_stops_at_the_end(model: Any) -> Outputs:
    """The candidate holds a token that ends the text, and so may its verification."""
    prompt = inputs(model, 1)
    prompt["input_ids"] = prompt["input_ids"][:, :8].repeat(1, 4)
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    end = int(prompt["input_ids"][0, 3])
    return tensors(generate(model, **prompt, prompt_lookup_num_tokens=4, eos_token_id=end))


@served("generate_without_input_ids")
def without_a_prompt(model: Any) -> Outputs:
    return tensors(generate(model))


@served("left_padding_compatibility")
def left_padding(model: Any) -> Outputs:
    ids = inputs(model)["input_ids"]
    padded = torch.cat([ids.new_zeros(2, 32), ids], 1)
    mask = (torch.arange(TOKENS + 32, device=ids.device) >= 32).long().expand(2, -1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=places, use_cache=False)
    found, wanted = found.logits[:, -1], model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    return [found, wanted]


@served("past_key_values_format")
def cache_format(model: Any) -> Outputs:
    cache = model(**inputs(model), use_cache=True).past_key_values
    assert cache.get_seq_length() == TOKENS and len(cache) == model.config.num_hidden_layers
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


def embedded(model: Any) -> dict[str, torch.Tensor]:
    prompt = inputs(model)
    embeds = model.get_input_embeddings()(prompt["input_ids"])
    return dict(inputs_embeds=embeds, attention_mask=prompt["attention_mask"])


@served("generate_from_inputs_embeds_0_greedy")
def from_embeddings(model: Any, **options: Any) -> Outputs:
    found = tensors(generate(model, **embedded(model), **options))
    wanted = generate(model, **inputs(model), **options)
    assert torch.equal(found[0], wanted.sequences[:, TOKENS:])
    return found


SERVED["generate_from_inputs_embeds_1_beam_search"] = lambda m: from_embeddings(m, num_beams=2)


@served("generate_from_inputs_embeds_with_static_cache")
def from_embeddings_with_a_static_cache(model: Any) -> Outputs:
    out = generate(model, **embedded(model), cache_implementation="static")
    assert out.past_key_values.is_compileable
    assert out.past_key_values.layers[-1].max_cache_len == TOKENS + NEW - 1
    return tensors(out)


@served("generate_from_random_inputs_embeds")
def from_random_embeddings(model: Any) -> Outputs:
    prompt = embedded(model)
    random = torch.Generator().manual_seed(2)
    embeds = torch.rand(prompt["inputs_embeds"].shape, generator=random).to(model.device)
    return tensors(generate(model, **(prompt | {"inputs_embeds": embeds})))


@served("generate_continue_from_past_key_values")
def in_two_calls(model: Any) -> Outputs:
    whole, prompt = generate(model, **inputs(model)), inputs(model)
    first = generate(model, **prompt, max_new_tokens=NEW - 1)
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, NEW - 1), value=1)
    options = dict(attention_mask=mask, past_key_values=first.past_key_values)
    second = generate(model, input_ids=first.sequences, max_new_tokens=1, **options)
    assert torch.equal(second.sequences, whole.sequences)
    return [second.sequences, *first.logits, *second.logits]


@served("generate_continue_from_inputs_embeds")
def in_two_calls_from_embeddings(model: Any) -> Outputs:
    embeds = embedded(model)["inputs_embeds"]
    whole = generate(model, inputs_embeds=embeds)
    first = generate(model, inputs_embeds=embeds, max_new_tokens=NEW - 1)
    embeds = torch.cat([embeds, model.get_input_embeddings()(first.sequences)], 1)
    second = generate(
        model, inputs_embeds=embeds, past_key_values=first.past_key_values, max_new_tokens=1
    )
    assert torch.equal(torch.cat([first.sequences, second.sequences], 1), whole.sequences)
    return [whole.sequences, *first.logits, *second.logits]


@served("inherits_generation_mixin")
def keeps_its_class(model: Any) -> Outputs:
    assert type(model) in (type(tiny_model()), Gemma2ForCausalLM)
    assert isinstance(model, GenerationMixin)
    return []


@served("prepare_inputs_for_generation_kwargs_forwards")
def prepares_inputs(model: Any) -> Outputs:
    ids = inputs(model)["input_ids"]
    places = torch.arange(TOKENS, device=ids.device).expand(2, -1)
    options = dict(output_hidden_states=True, custom_arg="test_value", numeric_arg=42)
    found = model.prepare_inputs_for_generation(input_ids=ids, position_ids=places, **options)
    assert {name: found[name] for name in options} == options
    return [found["input_ids"]]


@served("custom_4d_attention_mask")
def four_dimensional_mask(model: Any) -> Outputs:
    """Three texts with one prefix in a row, by a mask of their own."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]], device=model.device)
    seen = torch.tril(torch.ones(6, 6, dtype=torch.bool, device=model.device))
    seen[3:, 3:] = torch.eye(3, dtype=torch.bool, device=model.device)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    places = torch.tensor([[0, 1, 2, 3, 3, 3]], device=model.device)
    shared = model(ids, attention_mask=mask, position_ids=places).logits[0, -3:]
    alone = torch.stack([torch.cat([ids[0, :3], ids[0, i : i + 1]]) for i in (3, 4, 5)])
    wanted = model(alone).logits[:, -1]
    torch.testing.assert_close(shared, wanted, rtol=1e-3, atol=1e-3)
    return [shared]


@served("forward_with_logits_to_keep")
def last_logits(model: Any) -> Outputs:
    ids = inputs(model)["input_ids"]
    found = [model(ids, logits_to_keep=keep).logits for keep in (0, 1)]
    torch.testing.assert_close(found[0][:, -1:], found[1], rtol=1e-3, atol=1e-3)
    return found


@served("generate_with_and_without_position_ids")
def with_positions(model: Any) -> Outputs:
    prompt = inputs(model)
    places = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    found = generate(model, **prompt, position_ids=places)
    assert torch.equal(found.sequences, generate(model, **prompt).sequences)
    return tensors(found)


@served(
    "sdpa_padding_matches_padding_free_with_position_ids",
    "eager_padding_matches_padding_free_with_position_ids",
)
def packed(model: Any) -> Outputs:
    """Two texts in one row, told apart by their positions, as each in a row of its own."""
    prompt = inputs(model)
    keep = prompt["attention_mask"].bool()
    places = (prompt["attention_mask"].cumsum(-1) - 1)[keep][None]
    found = model(prompt["input_ids"][keep][None], position_ids=places, use_cache=False).logits[0]
    places = (prompt["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    wanted = model(**prompt, position_ids=places, use_cache=False).logits[keep]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    return [found]


@served(
    "generate_compile_model_forward_fullgraph",
    "generate_compilation_all_outputs",
    "static_cache_no_recompile_with_smaller_length",
)
def compiled(model: Any) -> Outputs:
    """Three calls, with other tokens and then fewer of them, by the graphs of the first."""
    torch.compiler.reset()
    # generate compiles only on GPUs unless told. tests/contract holds inductor.
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    options = dict(compile_config=config, cache_implementation="static", **ALL)
    prompt = inputs(model)
    found = tensors(generate(model, **prompt, **options))
    assert hasattr(model, "_compiled_call")
    prompt["input_ids"] = prompt["input_ids"].roll(1, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        found += tensors(generate(model, **prompt, **options))
        return found + tensors(generate(model, **prompt, **(options | {"max_new_tokens": 2})))


def custom_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    for _ in range(3):
        logits = model(input_ids, use_cache=False).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
    return input_ids


@served("custom_generate")
def with_a_loop_of_its_own(model: Any) -> Outputs:
    ids = inputs(model)["input_ids"]
    return [model.generate(ids, max_new_tokens=3, custom_generate=custom_loop)]


class RoundedLayer(QuantizedLayer):
    """A quantized cache without a library: multiples of a sixteenth."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return (tensor * 16).round().to(torch.int16)

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor / 16


@served("generate_with_quant_cache")
def with_a_quantized_cache(model: Any) -> Outputs:
    """The mixin's own needs optimum-quanto; the layer here goes through the same base class."""
    cache = DynamicCache()
    cache.layers = [RoundedLayer(residual_length=4) for _ in range(2)]
    return tensors(generate(model, **inputs(model), past_key_values=cache))


@functools.cache
def llama(device: str) -> Any:
    return tiny_model(device=device)


@functools.cache
def gemma(device: str) -> Any:
    """Sliding windows shorter than the prompt, and softcaps, which only eager attention has."""
    config = Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=20, pad_token_id=0,
        eos_token_id=None, attn_logit_softcapping=5.0, query_pre_attn_scalar=64,
        initializer_range=0.3, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config).eval().to(device)
    model.generation_config.eos_token_id = None
    return model


# Where a window that rolls, a softcap or eager attention could make a difference. Without assisted
# decoding: stock itself fails there with transformers 5.17.
WINDOWED = """
beam_sample_generate_dict_output beam_search_generate_dict_outputs_use_cache
eager_padding_matches_padding_free_with_position_ids
generate_continue_from_past_key_values generate_from_inputs_embeds_with_static_cache
generate_with_quant_cache generate_with_static_cache greedy_generate_dict_outputs
greedy_generate_dict_outputs_use_cache left_padding_compatibility past_key_values_format
""".split()
MODELS = {"llama": llama, "gemma2": gemma}


@pytest.fixture(autouse=True)
def as_it_was(device) -> Iterator[None]:
    """A case may compile a model that others share, keep its cache, and set how it assists."""
    kept = {name: copy.deepcopy(make(device).generation_config) for name, make in MODELS.items()}
    yield
    for name, make in MODELS.items():
        model = make(device)
        model.generation_config = kept[name]
        for attribute in ("_compiled_call", "_cache", "_previous_max_cache_length"):
            vars(model).pop(attribute, None)


@functools.cache
def wanted(name: str, model: str, device: str) -> Outputs:
    with torch.no_grad():
        return SERVED[name](MODELS[model](device))


def hold(name: str, model: str, policy: str, device: str) -> None:
    stock = wanted(name, model, device)
    with torch.no_grad(), attnplug.applied(MODELS[model](device), policy) as subject:
        found = SERVED[name](subject)
    assert len(found) == len(stock)
    for ours, theirs in zip(found, stock, strict=True):
        exact = {} if theirs.is_floating_point() else dict(rtol=0, atol=0)
        torch.testing.assert_close(ours, theirs, **(exact or dict(rtol=1e-3, atol=1e-3)))


@pytest.mark.parametrize("name", {way: name for name, way in SERVED.items()}.values())
def test_a_case_gives_what_stock_gives(name, exact, device):
    hold(name, "llama", exact, device)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_case_gives_what_stock_gives_with_windows_and_softcaps(name, exact, device):
    hold(name, "gemma2", exact, device)


def test_eager_matches_sdpa_generate(exact, device):
    """A model that was loaded with eager attention, against stock sdpa."""
    stock = wanted("greedy_generate", "llama", device)
    model = attnplug.apply(tiny_model(device=device, attn_implementation="eager"), exact)
    found = SERVED["greedy_generate"](model)
    assert torch.equal(found[0], stock[0])
    torch.testing.assert_close(found[1:], stock[1:], rtol=1e-3, atol=1e-3)


def test_every_case_of_the_mixin_is_served_or_has_a_reason():
    skipped = {name for name in NAMES if name.startswith(tuple(SKIPPED))}
    assert set(NAMES) - skipped == {*SERVED, "eager_matches_sdpa_generate"} - {"custom_generate"}
    assert all(any(name.startswith(start) for name in NAMES) for start in SKIPPED)


def test_attention_weights_are_refused(exact):
    model = attnplug.apply(tiny_model(attn_implementation="eager"), exact)
    with pytest.raises(attnplug.UnsupportedCallError, match="never builds the attention matrix"):
        generate(model, **inputs(model), output_attentions=True)
