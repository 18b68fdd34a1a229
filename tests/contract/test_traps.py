"""Ways to be silently wrong that a reviewer found: each compares logits with the stock model's, as
greedy tokens hide small errors."""

import copy
import itertools

import pytest
import torch
from families import FAMILIES, VOCABULARY
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    StaticCache,
)

import attnplug
from attnplug.testing.policy import tiny_model

HYBRIDS = [family for family in FAMILIES if family.served == (1,)]
ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def steps(model, cache, spans) -> torch.Tensor:
    """The logits of passes over consecutive spans of `ids` with one cache."""
    ends = [0, *torch.tensor(spans).cumsum(0).tolist()]
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(ends)]
    return torch.cat(parts, 1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found - wanted).abs().max() < 3e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda family: family.name)
def test_a_full_rolling_window_is_not_an_empty_cache(family):
    model = family.build()
    spans = [30, 4, 1, 5]
    wanted = steps(model, StaticCache(model.config, max_cache_len=64), spans)
    with attnplug.applied(model, "dense"):
        close(steps(model, attnplug.make_cache(model, 64), spans), wanted)
        close(steps(model, StaticCache(model.config, max_cache_len=64), spans), wanted)


@pytest.mark.parametrize("policy", [{0: "dense"}, "dense"], ids=["mapping", "head dimension"])
def test_layers_left_dense_do_not_read_empty_slots(policy):
    model = tiny_model() if isinstance(policy, dict) else tiny_model(head_dim=40)
    spans = [20, 1, 1, 4, 1]
    wanted = steps(model, StaticCache(model.config, max_cache_len=64), spans)
    with attnplug.applied(model, policy):
        assert "(dense)" in str(attnplug.report(model))
        close(steps(model, attnplug.make_cache(model, 64), spans), wanted)


def test_a_shared_config_changes_one_model_only():
    config = tiny_model().config
    a, b = (LlamaForCausalLM(config).eval() for _ in range(2))
    spans = [20, 1, 4]
    wanted = steps(b, StaticCache(config, max_cache_len=64), spans)
    attnplug.apply(a, "dense")
    assert config._attn_implementation == "sdpa"
    assert torch.equal(steps(b, StaticCache(config, max_cache_len=64), spans), wanted)
    attnplug.apply(b, "momo(min_tokens=0)")
    attnplug.remove(a)
    assert b.config._attn_implementation == "attnplug"
    attnplug.remove(b)
    assert a.config is config and b.config is config and b.model.config is config
    assert torch.equal(steps(b, StaticCache(config, max_cache_len=64), spans), wanted)


def test_a_cache_by_another_name_is_found():
    options = dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY
    )
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**options, intermediate_size=64)).eval()
    spans = [20, 1, 4]
    wanted = steps(model, StaticCache(model.config, max_cache_len=64), spans)
    with attnplug.applied(model, "dense"):
        assert {layer.prefill for layer in attnplug.report(model).layers} == {"dense"}
        close(steps(model, attnplug.make_cache(model, 64), spans), wanted)


def test_layers_that_share_keys_know_how_many_are_valid():
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=128,
        hidden_size_per_layer_input=16,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        pad_token_id=0,
    )
    model = Gemma3nForCausalLM(config).eval()
    spans = [6, 1, 2, 1]
    wanted = steps(model, StaticCache(model.config, max_cache_len=64), spans)
    with attnplug.applied(model, "dense"):
        close(steps(model, attnplug.make_cache(model, 64), spans), wanted)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_users_own_over_a_static_cache(kind):
    model = tiny_model()
    mask = torch.ones(40, 64).tril().bool()
    mask[20:, 3:9] = False
    mask = mask[None, None].expand(2, 1, 40, 64)
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    wanted = model(
        ids, attention_mask=mask, past_key_values=StaticCache(model.config, max_cache_len=64)
    ).logits
    with attnplug.applied(model, "momo(min_tokens=0)"):
        cache = attnplug.make_cache(model, 64)
        close(model(ids, attention_mask=mask, past_key_values=cache).logits, wanted)


@torch.no_grad()
def test_a_row_mask_of_the_users_own_is_not_taken_for_padding():
    """`[B,1,1,S]` for many queries means those keys for every query, not causal."""
    model = tiny_model()
    mask = (torch.arange(40) % 3 > 0)[None, None, None].expand(2, 1, 1, 40)
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    with attnplug.applied(model, "dense"):
        close(model(ids, attention_mask=mask, use_cache=False).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["dense", "momo(min_tokens=0)"])
def test_compiled_without_cache_and_mask_is_refused(policy):
    """transformers hands traced code a mask for packed sequences there, and a layer that gets a
    mask it does not know runs the model's own attention: the policy would be gone, silently."""
    model = tiny_model()
    with attnplug.applied(model, policy):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedCallError.*use_cache"):
            compiled(ids, use_cache=False)
        close(compiled(ids, use_cache=True).logits, model(ids, use_cache=False).logits)
        mask = torch.ones_like(ids)
        close(compiled(ids, use_cache=False, attention_mask=mask).logits, compiled(ids).logits)


@torch.no_grad()
def test_a_mask_shorter_than_the_keys_hides_the_rest():
    model = tiny_model()
    mask = torch.ones(2, 10, dtype=torch.long)
    wanted = model(ids, attention_mask=mask).logits
    with attnplug.applied(model, "dense"):
        close(model(ids, attention_mask=mask).logits, wanted)


def test_a_part_with_a_policy_is_refused_in_the_whole():
    model = tiny_model()
    attnplug.apply(model.model, "dense")
    with pytest.raises(attnplug.AlreadyAppliedError, match="a part of this model"):
        attnplug.apply(model, "momo")
    attnplug.remove(model.model)
    attnplug.apply(model, "momo")


@torch.no_grad()
def test_a_full_static_cache_says_so():
    model = tiny_model()
    with attnplug.applied(model, "dense"):
        cache = attnplug.make_cache(model, 41)
        model(ids, past_key_values=cache)
        with pytest.raises(attnplug.UnsupportedCallError, match="holds 40 of at most 41 tokens"):
            model(ids[:, :2], past_key_values=cache)


@torch.no_grad()
def test_a_copy_of_a_model_generates_by_itself():
    model = attnplug.apply(tiny_model(), "dense")
    twin = copy.deepcopy(model)
    assert twin._prepare_cache_for_generation.model is twin
    attnplug.remove(model)
    assert attnplug.report(twin).policy == "dense"
    mask = torch.ones_like(ids)
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(twin.generate(ids, **options), model.generate(ids, **options))
    attnplug.remove(twin)
