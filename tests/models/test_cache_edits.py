"""A PlugCache is a whole transformers cache, with sliding windows too: after each edit the tokens
are those of a call that was never edited."""

import copy

import pytest
import torch
from test_sliding import GATHER, SHAPE, model_of
from transformers import Lfm2Config, Lfm2ForCausalLM, StaticCache

import attnplug
from attnplug.testing.policy import tiny_model

FAMILIES = ["llama", "gemma3", "gpt-oss"]
WINDOW = 64


def prompt(rows: int = 2, tokens: int = 30, seed: int = 1) -> torch.Tensor:
    return torch.randint(41, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def model_with(family: str, policy: str, window: int = WINDOW):
    model = tiny_model() if family == "llama" else model_of(family, window)
    return attnplug.apply(model, policy)


@torch.no_grad()
def steps(model, cache, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that are fed one by one."""
    return torch.cat(
        [model(token, past_key_values=cache).logits for token in tokens.split(1, 1)], 1
    )


@torch.no_grad()
def filled(model, ids: torch.Tensor):
    cache = attnplug.make_cache(model, 60)
    model(ids, past_key_values=cache)
    return cache


# What is done to a cache of rows, and the rows that a cache would have without it.
EDITS = {
    "crop": (lambda cache: cache.crop(-7), lambda ids: ids[:, :-7]),
    "crop of nothing": (lambda cache: cache.crop(0), lambda ids: ids),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), lambda ids: ids[[0, 0, 0, 1, 1, 1]]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda ids: ids[1:]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda ids: ids[[1, 1]]),
    "copy": (lambda cache: vars(cache).update(vars(copy.deepcopy(cache))), lambda ids: ids),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("policy", ["dense", GATHER], ids=["dense", "gather"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_cache_goes_on_as_if_it_had_been_so(family, policy, edit):
    model, ids = model_with(family, policy), prompt()
    change, without = EDITS[edit]
    cache = filled(model, ids)
    change(cache)
    wanted = filled(model, without(ids))
    assert cache.batch_size == wanted.batch_size
    assert int(cache.get_seq_length()) == int(wanted.get_seq_length())
    more = prompt(len(without(ids)), 9, seed=2)
    torch.testing.assert_close(
        steps(model, cache, more), steps(model, wanted, more), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cache_that_was_reset_takes_other_rows(family):
    model = model_with(family, "dense")
    cache = filled(model, prompt())
    cache.reset()
    found = model(prompt(3), past_key_values=cache).logits
    torch.testing.assert_close(found, model(prompt(3)).logits)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_a_window_that_has_rolled_refuses_a_crop_and_no_layer_has_changed(family):
    model = model_with(family, "dense", window=8)
    cache = filled(model, prompt())
    lengths = [int(layer.get_seq_length()) for layer in cache.layers]
    with pytest.raises(
        attnplug.UnsupportedCallError, match="window of 8 tokens has rolled on to 30"
    ):
        cache.crop(-3)
    with pytest.raises(ValueError, match="pass a negative number"):
        cache.crop(3)
    cache.crop(0)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == lengths


def test_edits_that_a_layer_of_transformers_lacks_are_refused_in_a_sentence():
    kinds = ["conv", "full_attention"]
    model = Lfm2ForCausalLM(Lfm2Config(**(SHAPE | {"layer_types": kinds}))).eval()
    model = attnplug.apply(model, "dense")
    cache = filled(model, prompt())
    for edit, about in (("crop", "states"), ("repeat", "no such"), ("select", "no such")):
        with pytest.raises(attnplug.UnsupportedCallError, match=about):
            EDITS[edit][0](cache)
    assert int(cache.get_seq_length(1)) == 30 and cache.layers[1].keys.shape[0] == 2


def test_one_system_prompt_serves_a_batch_of_questions():
    model, system = model_with("gemma3", GATHER), prompt(1, 30)
    whole = torch.cat([system.expand(3, -1), prompt(3, 9, seed=5)], 1)
    wanted = model.generate(whole, max_new_tokens=8, do_sample=False)
    cache = filled(model, system)
    cache.batch_repeat_interleave(3)
    found = model.generate(whole, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, wanted)


WRITERS = {
    "in place": lambda old, new: old.copy_(new),
    "a slice": lambda old, new: old[:, :, :20].copy_(new[:, :, :20]),
    "zeroed": lambda old, new: old[:, :, 3:9].zero_(),
}
METHODS = [GATHER, "gvr(k=8, min_tokens=0)", "sketch(k=8, min_tokens=0)",
           "certified(block=16, min_tokens=0)"]  # fmt: skip


def continued(model, cache, ids, more):
    """Step by step, or by attnplug's own loop: which of the two, the cache does not know."""
    logits = steps(model, cache, more)
    given = torch.cat([ids, more, logits[:, -1:].argmax(-1)], 1)
    return model.generate(given, past_key_values=cache, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("method", METHODS, ids=lambda text: text.partition("(")[0])
@pytest.mark.parametrize("write", WRITERS)
@torch.no_grad()
def test_keys_that_somebody_has_written_are_looked_at_again(write, method):
    model, ids, more = model_with("llama", method), prompt(1, 45), prompt(1, 3, seed=2)
    other = filled(model, prompt(1, 45, seed=4))
    cache, wanted = filled(model, ids), filled(model, ids)
    for each in (cache, wanted):
        continued(model, each, ids, more)
        each.crop(-9)
        for layer, source in zip(each.layers, other.layers, strict=True):
            WRITERS[write](layer.keys, source.keys)
            WRITERS[write](layer.values, source.values)
    fresh = attnplug.make_cache(model, 60)
    fresh.adopt(wanted)
    for layer in fresh.layers:  # what is not kept beside the tokens would be made anew
        layer.versions = None
    assert torch.equal(continued(model, cache, ids, more), continued(model, fresh, ids, more))


@torch.no_grad()
def test_only_what_somebody_has_written_is_looked_at_again(monkeypatch):
    model, ids = model_with("llama", GATHER), prompt()
    renewed = []
    kind = type(attnplug.make_cache(model, 60).layers[0])
    monkeypatch.setattr(kind, "renew", lambda layer: renewed.append(layer))
    for change, without in EDITS.values():
        cache = filled(model, ids)
        change(cache)
        steps(model, cache, prompt(len(without(ids)), 3, seed=2))
    cache = filled(model, ids[:1])
    continued(model, cache, ids[:1], prompt(1, 3, seed=2))
    assert not renewed
    cache.layers[1].values[0, 0, 5] = 3.0
    cache.crop(0)
    cache.crop(-1)
    assert renewed == [cache.layers[1]]
    cache.refresh()
    assert renewed[1:] == list(cache.layers)


def facts(cache) -> list[object]:
    """What a cache says of itself, by every name that this version of transformers has for it; but
    for `is_croppable`, which the static caches of older versions are not, and attnplug's are."""
    names = ("get_max_length", "is_compileable", "is_sliding", "batch_size", "is_initialized",
             "is_dummy", "is_linear", "has_previous_state")  # fmt: skip
    found: list[object] = []
    for name in names:
        try:
            value = getattr(cache, name, None)
            found.append((name, value() if callable(value) else value))
        except ValueError as error:  # of layers that have no such state
            found.append((name, str(error)))
    for layer in range(len(cache)):
        found += [int(cache.get_seq_length(layer)), cache.get_mask_sizes(1, layer)]
    return found


@pytest.mark.parametrize("early", [False, True], ids=["lazily", "early"])
@pytest.mark.parametrize("method", ["dense", *METHODS], ids=lambda text: text.partition("(")[0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cache_tells_what_stocks_static_cache_tells(family, method, early):
    model = model_with(family, method)
    ours, stock = attnplug.make_cache(model, 60), StaticCache(model.config, max_cache_len=60)
    told = []
    for cache in (ours, stock):
        if cache is stock:
            attnplug.remove(model)
        if early:
            keys = model.config.num_key_value_heads, getattr(model.config, "head_dim", None) or 64
            cache.early_initialization(2, *keys, torch.float32, torch.device("cpu"))
        before = facts(cache)
        model(prompt(), past_key_values=cache)
        logits = model(prompt(2, 1), past_key_values=cache).logits
        cache.offload(0)
        told.append((before, facts(cache), logits))
    assert told[0][:2] == told[1][:2]
    if method == "dense":
        torch.testing.assert_close(told[0][2], told[1][2], rtol=1e-3, atol=1e-3)
