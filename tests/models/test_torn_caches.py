"""A forward pass that a cache cannot take is refused before any layer takes a token of it, and a
cache that a pass has left torn is not used again in silence."""

import pytest
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, StaticCache

import attnplug
from attnplug.errors import UnsupportedCallError
from attnplug.models.names import CACHE
from attnplug.testing.policy import tiny_model

GATHER = "gather(k=64, block=16, sink=1, local=2, min_tokens=0)"
PROMPT = 12
ROOM = 64


class StopEarly(Exception):
    pass


def stop(*arguments):
    raise StopEarly


def gemma(device):
    fields = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **fields,
    )  # fmt: skip
    model: Gemma3ForCausalLM = Gemma3ForCausalLM(config).eval().to(device)
    return model


def model_of(kind, device):
    return gemma(device) if kind == "gemma3" else tiny_model(device=device, num_hidden_layers=4)


def cache_of(kind, model):
    if kind == "make_cache":
        return attnplug.make_cache(model, ROOM)
    if kind == "static":
        return StaticCache(model.config, max_cache_len=ROOM)
    return DynamicCache(config=model.config) if kind == "dynamic" else DynamicCache()


def ids_of(tokens, device, rows=1, seed=1):
    made = torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return made.to(device)


def lengths_of(cache):
    return [int(layer.get_seq_length()) for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["dense", GATHER])
@pytest.mark.parametrize("where", ["dynamic", "lazy", "static", "make_cache"])
@pytest.mark.parametrize("held, new", [(0, PROMPT), (PROMPT, 5), (PROMPT, 1)])
def test_a_torn_cache_is_refused_until_it_is_reset(kind, policy, where, held, new, device):
    """Also for one token, where transformers' own caches notice nothing."""
    model = attnplug.apply(model_of(kind, device), policy)
    if where == "static" and device != "cpu":
        pytest.skip("the host does not know what a static cache of transformers holds on a GPU")
    cache, ids = cache_of(where, model), ids_of(PROMPT + 5, device)
    if held:
        model(ids[:, :held], **{CACHE: cache})
    part = ids[:, held : held + new]
    hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(StopEarly):
        model(part, **{CACHE: cache})
    hook.remove()
    resets = where in ("static", "make_cache")
    advice = r"Call its reset\(\) or make another" if resets else "Make another cache"
    with pytest.raises(UnsupportedCallError, match=f"left this cache torn.*{advice}"):
        model(part, **{CACHE: cache})
    if resets:
        cache.reset()
    else:  # before transformers 5.18 a dynamic cache keeps its length
        cache = cache_of(where, model)
    found = model(ids, **{CACHE: cache}).logits
    wanted = model(ids, use_cache=False).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("where", ["dynamic", "make_cache"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 500), (1, 1, 5, 9), (3, 1, 5, 17), (2, 1, 4, 17)])
def test_a_refused_mask_leaves_the_cache_as_it_was(where, shape, device):
    model = attnplug.apply(model_of("llama", device), "dense")
    cache, ids = cache_of(where, model), ids_of(PROMPT + 5, device, rows=2)
    model(ids[:, :PROMPT], **{CACHE: cache})
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    with pytest.raises(UnsupportedCallError, match="attention mask"):
        model(ids[:, PROMPT:], attention_mask=mask, **{CACHE: cache})
    assert lengths_of(cache) == 4 * [PROMPT]
    found = model(ids[:, PROMPT:], **{CACHE: cache}).logits
    wanted = model(ids, use_cache=False).logits[:, PROMPT:]
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
def test_padding_of_other_rows_leaves_the_cache_as_it_was(device):
    model = attnplug.apply(model_of("llama", device), "dense")
    cache, ids = cache_of("dynamic", model), ids_of(PROMPT + 5, device, rows=2)
    model(ids[:, :PROMPT], **{CACHE: cache})
    mask = torch.ones(3, PROMPT + 5, dtype=torch.int64, device=device)
    mask[:, 0] = 0
    with pytest.raises(UnsupportedCallError, match="mask of 3 rows"):
        model(ids[:, PROMPT:], attention_mask=mask, **{CACHE: cache})
    assert lengths_of(cache) == 4 * [PROMPT]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("where", ["dynamic", "make_cache"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_leaves_the_cache_as_it_was(kind, where, dtype, device):
    model = attnplug.apply(model_of(kind, device), "dense")
    cache, ids = cache_of(where, model), ids_of(PROMPT + 5, device)
    model(ids[:, :PROMPT], **{CACHE: cache})
    with pytest.raises(UnsupportedCallError, match=str(dtype).partition(".")[2]):
        model.to(dtype)(ids[:, PROMPT:], **{CACHE: cache})
    assert lengths_of(cache) == 4 * [PROMPT]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("where", ["dynamic", "make_cache"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_other_rows_leave_the_cache_as_it_was(kind, where, tokens, device):
    model = attnplug.apply(model_of(kind, device), "dense")
    cache, ids = cache_of(where, model), ids_of(PROMPT, device, rows=2)
    model(ids, **{CACHE: cache})
    with pytest.raises(UnsupportedCallError, match="tokens of 2 rows and got 1"):
        model(ids[:1, :tokens], **{CACHE: cache})
    assert lengths_of(cache) == 4 * [PROMPT]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_reorder_cache_takes_as_many_rows_as_there_are_indices(kind, device):
    model = model_of(kind, device)
    ids, rows = ids_of(PROMPT, device, rows=2), torch.tensor([1], device=device)
    wanted = model(torch.cat([ids, ids[:, :1]], 1)).logits[1:, -1:]
    attnplug.apply(model, GATHER)
    cache = attnplug.make_cache(model, ROOM)
    model(ids, **{CACHE: cache})
    cache.reorder_cache(rows)
    with pytest.raises(UnsupportedCallError, match="tokens of 1 rows and got 2"):
        model(ids[:, :1], **{CACHE: cache})
    found = model(ids[1:, :1], **{CACHE: cache}).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@torch.no_grad()
def test_generate_works_where_new_tensors_are_of_the_meta_device():
    model = tiny_model(num_hidden_layers=2)
    ids = ids_of(PROMPT, "cpu")
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    attnplug.apply(model, GATHER)
    with torch.device("meta"):
        found = model.generate(ids, max_new_tokens=5, do_sample=False)
        cache = attnplug.make_cache(model, ROOM)
        model(ids, **{CACHE: cache})
    assert torch.equal(found, wanted)
    assert lengths_of(cache) == 2 * [PROMPT]
