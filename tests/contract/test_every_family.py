"""Every causal family that transformers has computes under a policy what it computes without, or is
refused; and no code of transformers asks for the attention's name where nobody has looked at it."""

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from every_family import FEW, KINDS, WINDOW_OR_NOT, NoTinyModel, build, forms

import attnplug
from attnplug.models.layers import _asks_for_sdpa, asks_for_sdpa, find_attention_layers
from attnplug.models.names import CACHE

TINY = {kind: (kind, {}) for kind in KINDS}
TINY |= {f"{kind}, no window": (kind, {"sliding_window": None}) for kind in WINDOW_OR_NOT}
TOLERANCE = 1e-4  # of the largest logit; what is wrong is off by a tenth and more
MODELS = Path(inspect.getfile(transformers)).parent / "models"
ASKS = re.compile(r"""_attn_implementation\s*(?:==|!=|in\b|not in\b)[^\n]*["']sdpa["']""")
# Modelling files in which not the attention asks, but the model: whether it may leave the prompt's
# first queries out of layers that share another's keys. attnplug knows where the others stand.
LOOKED_AT = {"gemma4", "gemma4_unified"}


@torch.no_grad()
def outcome(form, model) -> torch.Tensor | Exception:
    try:
        return form(model)
    except Exception as error:  # stock raises for many of these calls, and so may we
        return error


@pytest.mark.parametrize("calls", ["few", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("model", list(TINY))
def test_logits_are_those_of_stock(model, calls):
    kind, options = TINY[model]
    every = forms(("dynamic", "static")).items()
    compared = {name: form for name, form in every if calls == "all" or name in FEW}
    warnings.simplefilter("ignore")
    try:
        model = build(kind, **options)
    except NoTinyModel as why:
        pytest.skip(f"no tiny model of this family: {why}")
    wanted = {name: outcome(form, model) for name, form in compared.items()}
    try:
        attnplug.apply(model, "dense")
    except attnplug.UnsupportedModelError:
        return
    if all(isinstance(each, Exception) for each in wanted.values()):
        pytest.skip(f"stock computes no logits of text alone: {next(iter(wanted.values()))}")
    for name, form in compared.items():
        expected = wanted[name]
        if isinstance(expected, Exception):
            continue
        found = outcome(form, model)
        assert not isinstance(found, Exception), (name, found)
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE, (name, float(error))


def test_who_asks_for_the_attentions_name_is_known():
    """Attention that asks for "sdpa" is seen and left alone; other code that asks was looked at."""
    files = MODELS.glob("*/modeling_*.py")
    asking = {path.stem: path.parent.name for path in files if ASKS.search(path.read_text())}
    for stem, family in asking.items():
        source = importlib.import_module(f"transformers.models.{family}.{stem}")
        kinds = [each for name, each in vars(source).items() if name.endswith("Attention")]
        assert any(map(_asks_for_sdpa, kinds)) or family in LOOKED_AT, stem
    assert "modeling_falcon" in asking


@pytest.mark.parametrize("kind", ["minimax_m3_vl_text", "deepseek_v32", "glm_moe_dsa", "axk2"])
def test_a_model_that_asks_for_the_name_finds_its_own(kind):
    if kind not in KINDS:
        pytest.skip("this transformers has no such family")
    model = build(kind)
    assert any(asks_for_sdpa(layer.module) for layer in find_attention_layers(model))
    with attnplug.applied(model, "gather(min_tokens=0)"):
        assert {
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "config")
        } == {"sdpa"}
        layers = attnplug.report(model).layers
        assert all(layer.decode == "sdpa (dense)" and layer.reason for layer in layers)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bart", "bert", "gpt2", "mbart", "musicgen", "roberta"])
def test_decoders_that_read_an_encoder(kind, padded):
    """Their cross-attention sees all of its states, in calls with a cache and without."""
    model = build(kind, add_cross_attention=True)
    seeded = torch.Generator().manual_seed(1)
    states = torch.randn(2, 12, 128, generator=seeded)
    ids = torch.randint(3, 97, (2, 20), generator=seeded)
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0

    def logits():
        alone = model(ids, attention_mask=mask, encoder_hidden_states=states, use_cache=False)
        first = model(ids, attention_mask=mask, encoder_hidden_states=states, use_cache=True)
        longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
        options = {"encoder_hidden_states": states, CACHE: first[CACHE]}
        step = model(ids[:, :1], attention_mask=longer, **options)
        read = [each.logits[mask.bool()] for each in (alone, first)]
        return torch.cat([*read, step.logits[:, 0]])

    wanted = logits()
    for policy in ("dense", "gather(min_tokens=0)"):
        with attnplug.applied(model, policy):
            assert (logits() - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("tokens", [10, 40])
def test_layers_that_share_keys_may_see_the_last_queries_alone(tokens, kept, padded):
    """Gemma 4 leaves the prompt's other queries out of them, where it is asked for few logits."""
    if "gemma4_text" not in KINDS:
        pytest.skip("this transformers has no Gemma 4")
    model = build("gemma4_text", num_kv_shared_layers=2, global_head_dim=64)
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    options = dict(attention_mask=mask, logits_to_keep=kept)
    wanted = model(ids, **options, use_cache=False).logits
    for policy in ("dense", "momo(min_tokens=0, top_k=16)"):
        with attnplug.applied(model, policy):
            for cache in (attnplug.make_cache(model, 64), attnplug.make_cache(model, 40), None):
                found = model(ids, **options, **{CACHE: cache}).logits
                assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
