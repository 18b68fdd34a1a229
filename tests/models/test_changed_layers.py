"""A model whose layers are taken out, put elsewhere or doubled after `apply`: its tokens are those
of the model as it is now, or the call is refused, and `remove` leaves nothing on any layer."""

import copy

import pytest
import torch
from test_regional import tokens_of
from torch import nn
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, StaticCache

import attnplug
from attnplug.errors import UnsupportedCallError, UnsupportedModelError
from attnplug.models.hf import binding_of
from attnplug.models.hook import hooks_of
from attnplug.models.names import CACHE
from attnplug.testing.policy import tiny_model

GATHER = "gather(k=64, block=16, sink=1, local=2, min_tokens=0)"
AGAIN = "attnplug.remove.* and apply again"
TOKENS = 12


def model_of(device):
    return tiny_model(device=device, num_hidden_layers=3)


def count_anew(model, layers):
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def drop_the_first(model):
    count_anew(model, list(model.model.layers)[1:])


def turn_around(model):
    count_anew(model, list(model.model.layers)[::-1])


def double_the_first(model):
    layers = list(model.model.layers)
    count_anew(model, [*layers, copy.deepcopy(layers[0])])


@pytest.mark.parametrize("change", [drop_the_first, turn_around, double_the_first])
def test_layers_that_moved_in_the_cache_are_refused_until_applied_again(change, device):
    model = model_of(device)
    stock = copy.deepcopy(model)
    attnplug.apply(model, GATHER)
    tokens_of(model, tokens=TOKENS)
    change(model)
    change(stock)
    with pytest.raises(UnsupportedCallError, match=AGAIN):
        tokens_of(model, tokens=TOKENS)
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        attnplug.report(model)
    attnplug.remove(model)
    assert not any(binding_of(each) or hooks_of(each) for each in model.modules())
    attnplug.apply(model, GATHER)
    wanted = tokens_of(stock, tokens=TOKENS, disable_compile=True)
    assert tokens_of(model, tokens=TOKENS, disable_compile=True) == wanted


def test_report_tells_of_a_layer_that_came_later(device):
    model = attnplug.apply(model_of(device), GATHER)
    model.model.layers[0].self_attn = model_of(device).model.layers[0].self_attn
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        attnplug.report(model)


def new_attention(model, other):
    model.model.layers[0].self_attn = other.model.layers[0].self_attn


def new_layer(model, other):
    model.model.layers[2] = other.model.layers[2]


def one_layer_more(model, other):
    count_anew(model, [*model.model.layers, other.model.layers[0]])


@pytest.mark.parametrize("change", [new_attention, new_layer, one_layer_more])
def test_generate_refuses_a_layer_that_came_later(change, device):
    """Its own attention would compute over the empty part of the cache."""
    model = attnplug.apply(model_of(device), GATHER)
    other = tiny_model(device=device, num_hidden_layers=3, seed=5)
    tokens_of(model, tokens=TOKENS)
    change(model, other)
    with pytest.raises(UnsupportedCallError, match=f"was put there after apply.*{AGAIN}"):
        tokens_of(model, tokens=TOKENS)
    with pytest.raises(UnsupportedCallError, match=AGAIN):
        attnplug.make_cache(model, 2 * TOKENS)
    with pytest.raises(UnsupportedCallError, match=AGAIN):
        model.init_continuous_batching()
    attnplug.remove(model)
    wanted = tokens_of(model, tokens=TOKENS, disable_compile=True)
    attnplug.apply(model, GATHER)
    assert tokens_of(model, tokens=TOKENS, disable_compile=True) == wanted


@torch.no_grad()
@pytest.mark.parametrize("policy", ["dense", GATHER])
def test_a_layer_that_is_no_longer_causal_computes_as_stock_does(policy, device):
    """An embedding model made of a decoder reads in both directions."""
    model = attnplug.apply(model_of(device), policy)
    stock = model_of(device)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    causal = stock(ids).logits
    for each in (model, stock):
        each.model.layers[1].self_attn.is_causal = False
    wanted = stock(ids).logits
    assert (wanted - causal).abs().max() > 1e-2 * wanted.abs().max()
    for options in ({}, {"use_cache": False}, {CACHE: attnplug.make_cache(model, 64)}):
        found = model(ids, **options).logits
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("own", [False, True], ids=["static", "make_cache"])
def test_layers_in_another_order_know_a_first_prompt_from_the_next(own, device):
    """Each keeps its place in the cache, and another one runs first."""
    model = model_of(device)
    stock = copy.deepcopy(model)
    attnplug.apply(model, GATHER)
    for each in (model, stock):
        each.model.layers = nn.ModuleList(list(each.model.layers)[::-1])
    ids = torch.randint(3, 97, (2, 4 * TOKENS), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def logits(of, cache):
        parts = ids.to(device).split(TOKENS, 1)
        return torch.cat([of(part, **{CACHE: cache}, use_cache=True).logits for part in parts])

    room = 8 * TOKENS
    cache = attnplug.make_cache(model, room) if own else StaticCache(model.config, room)
    wanted = logits(stock, StaticCache(stock.config, room))
    assert (logits(model, cache) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_mask_that_is_wider_than_a_window_is_refused_as_stock_does(device):
    """Its first columns are about keys that the window has forgotten."""
    fields = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **fields,
    )  # fmt: skip
    model: Gemma3ForCausalLM = Gemma3ForCausalLM(config).eval().to(device)
    ids = torch.randint(3, 97, (1, 40), device=device)
    mask = torch.ones(1, 1, 1, 41, dtype=torch.bool, device=device)

    @torch.no_grad()
    def step(kind):
        cache = DynamicCache(config=model.config)
        model(ids, **{CACHE: cache}, use_cache=True)
        with pytest.raises(kind):
            model(ids[:, :1], attention_mask=mask, **{CACHE: cache}, use_cache=True)

    step(RuntimeError)
    with attnplug.applied(model, "dense"):
        step(UnsupportedCallError)


def test_a_step_with_a_mask_of_more_keys_than_there_are_is_refused(device):
    model = attnplug.apply(model_of(device), "dense")
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, 97, (1, 40), device=device)
    mask = torch.ones(1, 1, 1, 45, dtype=torch.bool, device=device)
    with torch.no_grad():
        model(ids, **{CACHE: cache}, use_cache=True)
        with pytest.raises(UnsupportedCallError, match="45 keys"):
            model(ids[:, :1], attention_mask=mask, **{CACHE: cache}, use_cache=True)


def steps_of(model, ids, **options):
    """Logits of a prompt and of a few tokens behind it."""
    first = model(ids[:, :TOKENS], use_cache=True, **options)
    cache = getattr(first, CACHE)
    return torch.cat([first.logits, model(ids[:, TOKENS:], **{CACHE: cache}).logits], 1)


@torch.no_grad()
@pytest.mark.parametrize("change", [new_attention, new_layer])
@pytest.mark.parametrize("before", [False, True])
def test_forward_passes_refuse_a_layer_that_came_later(change, before, device):
    """Its own attention would compute with the masks that are made for attnplug's."""
    model = attnplug.apply(model_of(device), GATHER)
    other = tiny_model(device=device, num_hidden_layers=3, seed=5)
    ids = torch.randint(3, 97, (1, 2 * TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    if before:
        steps_of(model, ids)
    old = list(model.model.layers), [layer.self_attn for layer in model.model.layers]
    change(model, other)
    padding = torch.ones_like(ids)
    padding[:, :2] = 0
    for options in ({}, {"attention_mask": padding}, {"use_cache": False}):
        with pytest.raises(UnsupportedCallError, match=f"was put there after apply.*{AGAIN}"):
            model(ids, **options)
    for index, (layer, attention) in enumerate(zip(*old, strict=True)):
        layer.self_attn = attention
        model.model.layers[index] = layer
    wanted = steps_of(model_of(device), ids)
    assert (steps_of(model, ids) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
def test_a_model_of_one_layer_refuses_another_one(device):
    model = attnplug.apply(tiny_model(device=device, num_hidden_layers=1), "dense")
    model.model.layers[0] = tiny_model(device=device, num_hidden_layers=1, seed=5).model.layers[0]
    with pytest.raises(UnsupportedCallError, match=f"was put there after apply.*{AGAIN}"):
        model(torch.ones(1, TOKENS, dtype=torch.int64, device=device))


@torch.no_grad()
def test_a_copied_decoder_is_free_of_hooks_after_remove(device):
    model = attnplug.apply(model_of(device), "dense")
    model.model = copy.deepcopy(model.model)
    attnplug.remove(model)
    assert not any(each._forward_pre_hooks for each in model.modules())


def windows_of(device):
    """A model of a layer with a window, one without, and another one with."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=16)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=97, layer_types=kinds, pad_token_id=0, eos_token_id=None, **sizes, **heads
    )
    model: Gemma3ForCausalLM = Gemma3ForCausalLM(config).eval().to(device)
    return model


def drop(model):
    del model.model.layers[0]


def skip(model):
    model.model.layers[0].forward = lambda hidden_states, **kwargs: hidden_states


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("change", [drop, skip])
def test_a_model_without_its_first_layer_goes_behind_the_tokens_of_the_others(
    change, padded, device
):
    """Which keep their layers of the cache, whose first is empty. Stock with a cache asks it for
    the keys of its masks, so that the tokens are held against those without one."""
    model = model_of(device)
    attnplug.apply(model, "dense")
    change(model)
    found = tokens_of(model, padded=padded)
    assert not attnplug.report(model).loop
    ids = torch.full((1, 9), 5, device=device)
    kept = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    cache = getattr(kept, CACHE)
    assert cache.layers[1].max_cache_len < 200
    model(torch.full((1, 200), 5, device=device), **{CACHE: cache})  # grows
    attnplug.remove(model)
    assert found == tokens_of(model, padded=padded, use_cache=False)


def test_windows_whose_first_holds_nothing_are_those_of_the_others(device):
    model = windows_of(device)
    skip(model)
    wanted = tokens_of(model)
    attnplug.apply(model, "dense")
    assert tokens_of(model) == wanted
    assert not attnplug.report(model).loop


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_full_attention_are_refused_in_a_layer_with_a_window(attention, device):
    """Which gets them where a layer before it was dropped: the model counts types by place."""
    model = windows_of(device)
    model.set_attn_implementation(attention)
    attnplug.apply(model, "dense")
    del model.model.layers[1]
    with pytest.raises(UnsupportedCallError, match=r"config\.layer_types"):
        tokens_of(model, padded=True)


@torch.no_grad()
@pytest.mark.parametrize("family", [model_of, windows_of])
@pytest.mark.parametrize("place", [0, 1])
def test_layers_that_are_compiled_alone_take_a_prompt_and_its_steps(family, place, device):
    """Code that is compiled tells no layer behind it that the pass has begun."""
    model = family(device)
    ids = torch.randint(3, 97, (2, 3 * TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    wanted, logits = tokens_of(model), steps_of(model, ids)
    attnplug.apply(model, "dense")
    model.model.layers[place].compile(backend="eager")
    assert tokens_of(model) == wanted
    found = steps_of(model, ids, **{CACHE: attnplug.make_cache(model, 4 * TOKENS)})
    assert (found - logits).abs().max() < 1e-4 * logits.abs().max()


def stand_twice(model):
    model.model.layers[2] = model.model.layers[0]


def copy_with_its_index(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def share_an_attention(model):
    model.model.layers[2].self_attn = model.model.layers[0].self_attn


@pytest.mark.parametrize("change", [stand_twice, copy_with_its_index, share_an_attention])
@pytest.mark.parametrize("use_cache", [True, False])
def test_layers_that_fill_one_layer_of_the_cache_are_the_models_own(change, use_cache, device):
    stock, model, late = (model_of(device) for _ in range(3))
    change(stock)
    change(model)
    attnplug.apply(model, GATHER)
    assert "fill one layer of the cache" in str(attnplug.report(model))
    ids = torch.arange(3, 23, device=device)[None]
    with torch.no_grad():
        found, wanted = (x(ids, use_cache=use_cache).logits for x in (model, stock))
    assert torch.equal(found, wanted)
    assert tokens_of(model) == tokens_of(stock)
    attnplug.apply(late, GATHER)
    tokens_of(late)
    change(late)
    with torch.no_grad(), pytest.raises(UnsupportedCallError, match=AGAIN):
        late(ids, use_cache=use_cache)
    with pytest.raises(UnsupportedCallError, match=AGAIN):
        tokens_of(late)
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        attnplug.report(late)
    attnplug.remove(late)
    assert tokens_of(late) == tokens_of(stock)
