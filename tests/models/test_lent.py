"""Calls whose prompt gives the only token: their cache lends the model's own keys and values, and
nobody can tell it from another."""

import pytest
import torch
import transformers

import attnplug
from attnplug.models import decode_loop, lent
from attnplug.models.lent import LentLayer
from attnplug.policies import methods
from attnplug.testing import tiny_model

FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "GPTNeoX": {},  # whose values are a view of queries, keys and values
    "Gemma2": {"sliding_window": 16},  # every other layer
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16},
}
SKETCH = "sketch(k=4096, min_tokens=0)"


def family(name: str, device: str):
    shape = dict(
        vocab_size=97, hidden_size=256, intermediate_size=96, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**(shape | FAMILIES[name]))
    torch.manual_seed(3)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().to(device)


def ids_of(model, tokens: int = 40, rows: int = 2) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(tokens)
    return torch.randint(3, 97, (rows, tokens), generator=seeded).to(model.device)


def answer(model, tokens: int = 40, **options) -> list[list[int]]:
    """The only token of each of two rows, the second padded on the left."""
    ids = ids_of(model, tokens)
    mask = torch.ones_like(ids)
    mask[1, : tokens // 3] = 0
    torch.manual_seed(7)
    options = {"max_new_tokens": 1, "do_sample": False, "attention_mask": mask} | options
    return model.generate(ids, **options).tolist()


@pytest.fixture
def caches(monkeypatch):
    """The caches of all calls of the loop."""
    seen, run = [], decode_loop.Decoding._run

    def noted(self, loop):
        found = run(self, loop)
        seen.append(self.cache)
        return found

    monkeypatch.setattr(decode_loop.Decoding, "_run", noted)
    return seen


def is_lent(cache) -> list[bool]:
    return [isinstance(layer, LentLayer) for layer in cache.layers]


@pytest.mark.parametrize("policy", ["dense", "auto", "momo+gather", "exact", "certified"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_token_is_stocks(name, policy, device, caches):
    model = family(name, device)
    ways = [{}, {"attention_mask": None}, {"do_sample": True}, {"tokens": 16}, {"tokens": 2}]
    wanted = [answer(model, **way) for way in ways]
    with attnplug.applied(model, policy):
        assert [answer(model, **way) for way in ways] == wanted
    assert len(caches) == len(ways) and all(any(is_lent(cache)) for cache in caches)


def test_every_method_leaves_a_short_prompt_as_it_is(device, caches):
    """Below their crossovers no method reads what it would keep beside keys and values."""
    model, names = tiny_model(device=device), ["auto", *methods()]
    for name in names:
        with attnplug.applied(model, name):
            answer(model)
    assert [all(is_lent(cache)) for cache in caches] == [True] * len(names)


def test_it_is_lent_up_to_so_many_tokens(monkeypatch, device, caches):
    model = tiny_model(device=device)
    wanted = answer(model)
    attnplug.apply(model, "dense")
    for most in (80, 79):  # two rows of 40
        monkeypatch.setattr(lent, "MOST", most)
        assert answer(model) == wanted
    assert [is_lent(cache) for cache in caches] == [[True, True], [False, False]]


def test_who_sees_the_cache_again_has_buffers(device, caches):
    model = attnplug.apply(tiny_model(device=device), "dense")
    kept = model.generate(ids_of(model), max_new_tokens=1, return_dict_in_generate=True)
    model.generate(ids_of(model), max_new_tokens=2)
    given = attnplug.make_cache(model, 60)
    model.generate(ids_of(model), max_new_tokens=1, past_key_values=given)
    model.generate(ids_of(model), max_new_tokens=1, prefill_chunk_size=16)
    assert len(caches) == 4 and not any(any(is_lent(cache)) for cache in caches)
    assert int(kept.past_key_values.get_seq_length()) == int(given.get_seq_length()) == 40


def test_a_hook_finds_the_keys_of_its_layer(device):
    model, found = tiny_model(device=device), []

    def look(module, args, kwargs, output):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        layer = cache.layers[module.layer_idx]
        found.append((layer.keys[:, :, :40].clone(), layer.values[:, :, :40].clone()))
        assert int(cache.get_seq_length(module.layer_idx)) == 40

    for each in model.model.layers:
        each.self_attn.register_forward_hook(look, with_kwargs=True)
    answer(model)
    wanted, found[:] = list(found), []
    attnplug.apply(model, "dense")
    answer(model)
    for mine, stocks in zip(found, wanted, strict=True):
        for one, other in zip(mine, stocks, strict=True):
            torch.testing.assert_close(one[:, :, 14:], other[:, :, 14:])


def test_more_tokens_find_room(device, caches):
    """Nothing feeds them. They would come to a cache that has grown."""
    model = tiny_model(device=device)
    ids = ids_of(model, 48)
    with torch.no_grad():
        wanted = model(ids).logits[:, 40:]
        attnplug.apply(model, "dense")
        model.generate(ids[:, :40], max_new_tokens=1)
        (cache,) = caches
        assert all(is_lent(cache))
        found = [model(ids[:, at : at + 4], past_key_values=cache).logits for at in (40, 44)]
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-4)
    assert not any(is_lent(cache)) and int(cache.get_seq_length()) == 48
    cache.crop(-3)
    assert int(cache.get_seq_length()) == 45


def test_edits_of_a_lent_cache_count_for_each_layer(device, caches):
    model = attnplug.apply(tiny_model(device=device), "dense")
    answer(model)
    (cache,) = caches
    cache.crop(-3)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [37, 37]
    cache.batch_select_indices(torch.tensor([1], device=device))
    assert all(len(layer.keys) == 1 for layer in cache.layers)
    cache.reset()
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("method", ["gather", "gvr", "certified", "sketch"])
def test_layers_that_keep_more_are_not_lent(method, device, caches):
    model = attnplug.apply(tiny_model(device=device), f"{method}(min_tokens=0)")
    answer(model)
    assert not any(is_lent(caches[0]))


@pytest.mark.parametrize("one_token", [{}, {"max_new_tokens": None, "max_length": 41}])
def test_report_tells_of_no_step_where_none_came(device, caches, one_token):
    model = attnplug.apply(tiny_model(device=device), SKETCH)
    answer(model, max_new_tokens=2)
    with_steps = attnplug.report(model).last
    answer(model, **one_token)
    assert [is_lent(cache)[0] for cache in caches] == [False, False]
    for one, other in zip(with_steps, attnplug.report(model).last, strict=True):
        assert one.prefill == other.prefill == "dense"
        assert one.decode == "sketch" and other.decode == ""


def test_autocast_and_inference_mode(device):
    model = tiny_model(device=device)
    for around in (torch.autocast(device, torch.bfloat16), torch.inference_mode()):
        with around:
            wanted = answer(model)
            with attnplug.applied(model, "dense"):
                assert answer(model) == wanted
    with attnplug.applied(model, "dense"):
        assert answer(model) == answer(model)


def test_a_compiled_model(device, caches):
    model = tiny_model(device=device)
    wanted = [answer(model, tokens) for tokens in (20, 30, 40, 50)]
    attnplug.apply(model, "dense")
    model.compile(backend="eager")
    assert [answer(model, tokens) for tokens in (20, 30, 40, 50)] == wanted


def test_a_change_between_two_calls_counts(device):
    """A short prompt, then the model is not what it was."""
    model = tiny_model(device=device)
    stock = tiny_model(device=device)
    attnplug.apply(model, "dense")
    assert answer(model) == answer(stock)
    for each in (model, stock):
        each.model.layers[0].self_attn.v_proj.register_forward_hook(lambda m, a, out: -out)
    assert answer(model) == answer(stock)
    for each in (model, stock):
        mlp = each.model.layers[1].mlp
        mlp.__class__ = type("Own", (type(mlp),), {"forward": lambda self, x: -x})
    assert answer(model) == answer(stock)
    for each in (model, stock):
        each.to(torch.bfloat16)
    assert answer(model) == answer(stock)
    assert answer(model, max_new_tokens=6) == answer(stock, max_new_tokens=6)
