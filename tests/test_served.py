"""`report(model).last` says what has really served the last call, layer by layer, and why."""

import pytest
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

import attnplug
from attnplug.testing import tiny_model

IDS = torch.arange(300)[None] % 31
GATHER = "gather(k=2, min_tokens=0)"
ROWS = "its cache layer is no static one: make the cache with attnplug.make_cache"


def served(model) -> set[tuple[str, str]]:
    """What the layers were served by, prefill and decode."""
    return {(layer.prefill, layer.decode) for layer in attnplug.report(model).last}


def generated(model, ids=IDS, **options) -> set[tuple[str, str]]:
    model.generate(ids, max_new_tokens=3, do_sample=False, **options)
    return served(model)


@pytest.mark.parametrize("method", ["gather(k=2", "gvr(k=8", "sketch(k=8", "certified(k_max=8"])
def test_a_step_is_the_methods_or_names_the_reason(method):
    asked, name = f"momo(min_tokens=0, tail=0)+{method}, min_tokens=0)", method.partition("(")[0]
    model = attnplug.apply(tiny_model(), asked)
    assert attnplug.report(model).last == ()
    assert generated(model) == {("momo", name)}
    assert generated(model, disable_compile=True) == {("momo", name)}
    assert generated(model, cache_implementation="dynamic") == {("momo", f"dense ({ROWS})")}

    cache = attnplug.make_cache(model, 400)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        assert served(model) == {("momo", "")}
        model(IDS[:, :1], past_key_values=cache)
    assert served(model) == {("momo", name)}


@pytest.mark.parametrize("method", ["gather", "gvr", "sketch"])
def test_below_the_crossover_the_room_is_named(method):
    model = attnplug.apply(tiny_model(), f"momo+{method}")
    ((prefill, decode),) = generated(model)
    assert prefill == "dense (300 queries, and it serves from 65,536 on)"
    assert decode.startswith("dense (room for 302 tokens, and it serves from ")
    ((_, decode),) = generated(model, IDS.expand(2, -1))
    assert decode.startswith("dense (room for 302 tokens in each of 2 rows, and it serves from ")


def test_certified_says_that_no_length_made_it_worth_while():
    ((_, decode),) = generated(attnplug.apply(tiny_model(), "certified"))
    assert decode == "dense (no measured length made it worth while; min_tokens=0 asks for it)"


@torch.no_grad()
def test_a_cache_that_is_replaced_in_mid_call_is_noticed():
    model = attnplug.apply(tiny_model(), GATHER)
    cache, other = attnplug.make_cache(model, 400), DynamicCache()
    model(IDS, past_key_values=cache)
    model(IDS, past_key_values=other)
    model(IDS[:, :1], past_key_values=cache)
    assert served(model) == {("dense", "gather")}
    model(IDS[:, :1], past_key_values=other)
    assert served(model) == {("dense", f"dense ({ROWS})")}


def test_layers_that_are_left_to_the_model_say_so():
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = attnplug.apply(Gemma3ForCausalLM(config).eval(), GATHER)
    generated(model)
    window, full = attnplug.report(model).last
    assert (full.prefill, full.decode) == ("dense", "gather")
    assert window.index == 0 and "reads few keys already" in window.prefill
    text = str(attnplug.report(model))
    assert "last call, layers 1: prefill by dense, decode by gather" in text
    assert "last call, layers 0: prefill by sdpa (" in text


def test_continuous_batching_names_pages():
    model = attnplug.apply(tiny_model(), "momo(min_tokens=0, tail=0)+gather(k=2)")
    model.generate_batch([[3, 4, 5] * 40, [7, 8] * 30], generation_config=None, max_new_tokens=3)
    ((prefill, decode),) = served(model)
    assert decode.startswith("gather (rows of fewer than") and decode.endswith("by dense)")
    assert prefill == "momo"


def test_what_was_served_goes_with_the_policy():
    model = attnplug.apply(tiny_model(), GATHER)
    generated(model)
    attnplug.remove(model)
    attnplug.apply(model, "dense")
    assert attnplug.report(model).last == ()
