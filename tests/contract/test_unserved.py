"""Models, layers and calls that a reviewer found wrong, and that attnplug leaves to transformers or
refuses: each test compares logits with the stock model's or asks for the refusal."""

import pickle
from functools import cache
from typing import Any

import pytest
import torch
from contract_cases import METHODS
from families import FAMILIES
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)

import attnplug
from attnplug.models.cache import PlugLayer
from attnplug.models.names import ATTENTION_NAMES
from attnplug.testing.policy import tiny_model

ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
mask[0, :9] = 0
GATHER = "gather(min_tokens=0)"
POLICIES = [case.exact for case in METHODS.values()]
SHAPE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=2, moe_intermediate_size=32)
# model type: what its config needs besides SHAPE, and whether a policy serves a layer
STOCK_CACHE: dict[str, tuple[dict[str, Any], bool]] = {
    "bert": ({}, False),
    "xlm-roberta-xl": ({}, False),
    "moshi": (dict(sliding_window=16, ffn_dim=128), False),
    "minimax": (EXPERTS | dict(layer_types=["full_attention", "linear_attention"]), True),
    "deepseek_v4": (EXPERTS | dict(n_routed_experts=4, sliding_window=16), False),
    "hrm_text": (dict(H_cycles=1, L_cycles=2, num_hidden_layers=1), False),
    "zamba2": (
        dict(layers_block_type=["linear_attention", "hybrid"], mamba_d_state=16),
        False,
    ),
    "aria_text": (dict(moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1), True),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    base = CONFIG_MAPPING[name]()
    options = {key: value for key, value in SHAPE.items() if hasattr(base, key)}
    config = CONFIG_MAPPING[name](**(options | STOCK_CACHE[name][0]))
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def generate(model: Any, **options: Any) -> list[torch.Tensor]:
    """The logits of three new tokens behind a padded prompt."""
    options = dict(attention_mask=mask, pad_token_id=0, do_sample=False, max_new_tokens=3) | options
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return [*out.logits]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 3e-5 * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", STOCK_CACHE)
@torch.no_grad()
def test_models_that_run_on_no_static_cache_keep_theirs(name):
    model, served = build(name), STOCK_CACHE[name][1]
    wanted = generate(model), model(ids, attention_mask=mask).logits[mask.bool()]
    kept = type(model)._prepare_cache_for_generation
    with attnplug.applied(model, "momo(min_tokens=0)+gather(min_tokens=0)"):
        report = attnplug.report(model)
        assert model._prepare_cache_for_generation.__func__ is kept
        assert served == any("(dense)" not in layer.prefill for layer in report.layers)
        text = "keeps transformers' dynamic cache" if served else "no layer has a policy"
        assert text in report.cache and report.cache in str(report)
        close(generate(model), wanted[0])
        close([model(ids, attention_mask=mask).logits[mask.bool()]], [wanted[1]])


def test_a_decode_method_without_its_state_is_reported_and_no_cache_is_made():
    model = build("aria_text")
    with attnplug.applied(model, GATHER):
        assert (
            "gather: runs dense, its state needs a static"
            in attnplug.report(model).layers[0].reason
        )
        with pytest.raises(
            attnplug.UnsupportedModelError, match="no AriaTextForCausalLM on a stat"
        ):
            attnplug.make_cache(model, 64)


@pytest.mark.parametrize("name", ["zamba2", "hrm_text"])
def test_modules_that_fill_several_cache_layers_are_named(name):
    model = build(name)
    with attnplug.applied(model, "dense"):
        reasons = {layer.reason for layer in attnplug.report(model).layers}
    assert reasons == {"one module fills several layers of the cache"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_other_families_get_attnplugs_cache(family):
    model = family.build()
    with attnplug.applied(model, "dense"):
        assert (attnplug.report(model).cache == "") == bool(family.served)
        assert ("_prepare_cache_for_generation" in vars(model)) == bool(family.served)


@torch.no_grad()
def test_a_model_without_a_served_layer_is_left_alone():
    model = tiny_model(head_dim=40)
    config = model.config
    with attnplug.applied(model, "dense"):
        assert model.config is config and config._attn_implementation == "sdpa"
        model.set_attn_implementation("eager")
        assert model(ids, output_attentions=True).attentions[0].shape == (2, 4, 40, 40)
        assert attnplug.report(model).layers[0].prefill == "sdpa (dense)"
    assert config._attn_implementation == "eager"


@torch.no_grad()
def test_masks_of_eager_models_stay_additive():
    """Their models may do sums with them before attention comes."""
    model = next(family for family in FAMILIES if family.name == "gemma2").build()
    seen = []
    layer: Any = model.model.layers[0].self_attn  # the sliding one
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with hook:
        model(ids, attention_mask=mask)
        with attnplug.applied(model, "dense"):
            model(ids, attention_mask=mask)
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])


def steps(model: Any, cache: Any) -> torch.Tensor:
    """The logits of a prefill and three decode steps over one cache."""
    spans = (slice(0, 37), slice(37, 38), slice(38, 39), slice(39, 40))
    parts = [model(ids[:, span], past_key_values=cache).logits for span in spans]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_autocast_computes_as_the_model_would(policy):
    model = tiny_model()
    exact = steps(model, DynamicCache(config=model.config))
    with torch.autocast("cpu", torch.bfloat16):
        wanted = steps(model, DynamicCache(config=model.config))
        with attnplug.applied(model, policy):
            found = steps(model, attnplug.make_cache(model, 64))
            early = attnplug.make_cache(model, 64)  # as a chunked prefill makes it: in float32
            early.early_initialization(2, 2, 64, torch.float32, ids.device)
            found_early = steps(model, early)
            generate(model)
    room = 2 * (wanted - exact).abs().max()
    assert (found - exact).abs().max() < room and (found_early - exact).abs().max() < room


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
@torch.no_grad()
def test_autocast_generates_over_rolling_windows(name):
    model = next(family for family in FAMILIES if family.name == name).build()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = generate(model)
        with attnplug.applied(model, GATHER):
            found = generate(model)
    assert (found[0] - wanted[0]).abs().max() < 0.03 * wanted[0].abs().max().clamp(min=1)
    assert all(step.isfinite().all() for step in found)


@torch.no_grad()
def test_a_cache_keeps_its_precision():
    model = tiny_model()
    with attnplug.applied(model, "dense"):
        cache = attnplug.make_cache(model, 64)
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, past_key_values=cache)
        assert cache.layers[0].keys.dtype == torch.bfloat16
        with pytest.raises(attnplug.UnsupportedCallError, match=r"bfloat16 and got keys of .*32"):
            model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_float64_stays_the_models_own():
    model = tiny_model().double()
    wanted = generate(model)
    with attnplug.applied(model, GATHER):
        assert "dtype float64 is not one of float32," in attnplug.report(model).layers[0].reason
        close(generate(model), wanted)
    model.float()
    with attnplug.applied(model, GATHER):
        model.double()
        with pytest.raises(attnplug.UnsupportedCallError, match="cast to float64 after apply"):
            model(ids)


@pytest.mark.parametrize("size", [0, -1, "x", 1.5, None, True])
def test_the_size_of_a_cache_is_a_count(size):
    model = attnplug.apply(tiny_model(), "dense")
    with pytest.raises(attnplug.ArgumentError, match=r"max_length=.*at least 1"):
        attnplug.make_cache(model, size)


@pytest.mark.parametrize(
    "policy",
    [*POLICIES, "gather(k=1, sink=1, min_tokens=0, kv='host')", {0: "dense"}],
    ids=str,
)
@torch.no_grad()
def test_a_step_past_the_end_says_so(policy):
    model = tiny_model()
    with attnplug.applied(model, policy):
        cache = attnplug.make_cache(model, 41)
        model(ids, past_key_values=cache)
        assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()
        with pytest.raises(attnplug.UnsupportedCallError, match="holds 41 of at most 41 tokens"):
            model(ids[:, :1], past_key_values=cache)


def test_a_part_with_a_policy_is_named():
    model = tiny_model()
    attnplug.apply(model.model, "dense")
    for verb in (attnplug.remove, attnplug.report):
        with pytest.raises(attnplug.NotAppliedError, match=r"applied to model\.model: call"):
            verb(model)
    attnplug.remove(model.model)
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.NotAppliedError, match="applied to a larger model"):
        attnplug.report(model.model)


@torch.no_grad()
def test_a_model_with_a_policy_can_be_pickled(monkeypatch):
    model = attnplug.apply(tiny_model(), GATHER)
    wanted, data = generate(model), pickle.dumps(model)
    for registry in (AttentionInterface, AttentionMaskInterface):  # as in another process
        names = {k: v for k, v in registry._global_mapping.items() if k not in ATTENTION_NAMES}
        monkeypatch.setattr(registry, "_global_mapping", names)
    twin = pickle.loads(data)
    close(generate(twin), wanted)
    assert attnplug.report(twin).policy == "gather(min_tokens=0)"
    assert isinstance(attnplug.make_cache(twin, 64).layers[0], PlugLayer)
    attnplug.remove(twin)
    assert "attnplug" not in twin.config._attn_implementation
