"""sketch as a whole: what methods/sketch.md says must be true. Its cache layer is in
test_sketch_layer.py."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import real_model
from sketch_layer_cases import SIZE, SKETCH, filled, tokens
from step_cases import HEADS, KV_HEADS, random, step, stepped
from transformers.cache_utils import StaticLayer

import attnplug
from attnplug import Dense, PolicyError, Sketch
from attnplug.eval import needle_prompt
from attnplug.models.cache import PlugLayer
from attnplug.policies import LayerShape, refit, sketch
from attnplug.testing import oracle_attention, plain_attention, tiny_model


@settings(max_examples=12)
@given(length=st.integers(1, SIZE), seed=st.integers(0, 99), capped=st.booleans())
def test_a_budget_of_everything_is_dense(length, seed, capped):
    covering = dataclasses.replace(SKETCH, k=SIZE)
    options = {"softcap": 3.0, "sinks": random(5, HEADS)} if capped else {}
    call = step(filled(covering, tokens(seed, length)), seed, **options)
    more = {"scale": call.scale, "lengths": call.lengths, **options}
    want, _ = oracle_attention(call.q, call.k, call.v, **more)
    plain, _ = plain_attention(call.q, call.k, call.v, **more)
    room = 4 * (plain - want).abs().max() + 2e-6
    assert (covering.attend(call) - want).abs().max() <= room


def test_the_budget_is_felt(device):
    call = step(filled(SKETCH, tokens(0, 1400, device=device)))
    assert (SKETCH.attend(call) - Dense().attend(call)).abs().max() > 1e-3


def test_left_padding_does_not_change_a_row(device):
    new = tokens(0, 1400, batch=3, device=device)
    starts = (0, 137, 1390)
    mask = torch.arange(SIZE, device=device) >= torch.tensor(starts, device=device)[:, None]
    call = step(filled(SKETCH, new, mask), mask=mask)
    together = SKETCH.attend(call)
    for row, start in enumerate(starts):
        alone = step(filled(SKETCH, new[:, row : row + 1, :, start:]))
        alone.q = call.q[row : row + 1]
        # The eigenvectors of a covariance that was summed in another order are a little off, and a
        # coordinate near a tie gets another code: of few numbers, and by more on a GPU, which sums
        # in orders of its own (0.0055 at most on an H200).
        off = (SKETCH.attend(alone) - together[row]).abs()
        assert off.max() < (2e-3 if device == "cpu" else 2e-2) and off.mean() < 1e-3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_surfaces_wherever_it_is(bad, device):
    new = tokens(0, 1400, device=device)
    new[0, 0, 1, 577] = bad
    call = step(filled(SKETCH, new))
    found, dense = SKETCH.attend(call), Dense().attend(call)
    assert dense[:, 2:].isnan().any() and found[:, 2:].isnan().any(-1).all()
    assert found[:, :2].isfinite().all()


def foreign_layers(new: torch.Tensor) -> dict[str, StaticLayer]:
    """Layers whose codes, if any, are not those of the call's keys under SKETCH."""
    layers = {
        "static": StaticLayer(max_cache_len=SIZE),
        "plug": PlugLayer(max_cache_len=SIZE),
        "another size": dataclasses.replace(SKETCH, bytes=16).cache_layer(SIZE),
        "small": dataclasses.replace(SKETCH, min_tokens=SIZE + 1).cache_layer(SIZE),
    }
    for layer in layers.values():
        layer.update(new[0][:, :KV_HEADS], new[1][:, :KV_HEADS])
    return layers


@pytest.mark.parametrize("kind", foreign_layers(tokens(0, 1)))
def test_without_codes_of_its_own_it_is_dense(kind, device):
    call = step(foreign_layers(tokens(0, 900, device=device))[kind])
    assert torch.equal(SKETCH.attend(call), Dense().attend(call))


def test_another_layers_keys_are_not_read_by_this_ones_codes(device):
    """Gemma 3n's last layers attend to keys of a layer that is not the one they are handed."""
    call = step(filled(SKETCH, tokens(0, 900, device=device)))
    other = filled(SKETCH, tokens(9, 900, device=device))
    call.k, call.v = other.keys, other.values
    assert torch.equal(SKETCH.attend(call), Dense().attend(call))


@pytest.mark.parametrize(
    ("slots", "picks"),
    [
        *((0, 2048), (32767, 2048), (32768, 4096), (65535, 4096)),
        *((65536, 8192), (131071, 8192), (131072, 16384), (1 << 20, 16384)),
    ],
)
def test_an_eighth_of_the_slots_is_picked_as_a_power_of_two(slots, picks):
    assert Sketch().picks(slots) == picks
    assert Sketch(k=77).picks(slots) == 77
    assert Sketch(kv="host").picks(slots) == 2048  # each comes over the link
    assert Sketch().step_reads(1 << 21, 128, slots).keys == 640 + 16384
    assert Sketch().step_reads(100, 128, slots).keys == 100


def test_a_step_picks_what_its_cache_asks_for(monkeypatch):
    """The op, audits and the report's reads are told the same number, that of the slots."""
    monkeypatch.setattr(sketch, "LEAST_K", 4)
    told, op = [], sketch.sketch_decode
    monkeypatch.setattr(
        sketch, "sketch_decode", lambda *a, **o: told.append(o["top_k"]) or op(*a, **o)
    )
    model, ids = tiny_model(), torch.randint(2, 90, (1, 700))
    with attnplug.applied(model, "sketch(min_tokens=0)"), torch.no_grad():
        for room, picks in ((720, 64), (1100, 128)):
            cache = attnplug.make_cache(model, room)
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
            assert {layer.asked.top_k for layer in cache.layers} == {picks} == set(told)
            told.clear()


def test_the_report_says_what_is_read_and_where_it_is_dense():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cpu"))
    assert Sketch().note(shape) == (
        "reads 2,688 to 17,024 tokens, an eighth of the cache, and 24 bytes a token to choose "
        "them, estimates the rest; dense in caches below 524,288 tokens and in those that attnplug "
        "did not make for it"
    )
    assert Sketch(k=9).note(shape).startswith("reads 649 tokens, and 24 bytes")
    assert Sketch(kv="host").note(shape).startswith("reads 2,688 tokens from host memory, and 24")
    assert "drops the rest" in Sketch(tail="drop").note(shape)
    assert Sketch(bytes=32).refusal(shape) == "sketch: 32 bytes are 96 coordinates, the head 64"
    model = attnplug.apply(tiny_model(), "sketch(bytes=32, min_tokens=0)")
    assert "32 bytes are 96 coordinates" in str(attnplug.report(model))


@torch.no_grad()
@pytest.mark.parametrize("prefill", ["", "momo(gamma=8, block=16, top_k=2, exact_k=1)+"])
def test_generate_runs_it_step_by_step(prefill):
    """generate's tokens are those of steps made by hand, and not those of dense; the basis that it
    has made between its steps included."""
    model = tiny_model()
    ids = torch.randint(2, 90, (2, 680), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    dense = model.generate(ids, **options)
    with attnplug.applied(model, f"{prefill}sketch(k=1, tail='drop', min_tokens=0)"):
        found = model.generate(ids, **options)
        by_hand, cache = stepped(model, ids, 710)
        assert all(layer.is_fitted for layer in cache.layers)
    assert torch.equal(found, by_hand)
    assert not torch.equal(found, dense)


@torch.no_grad()
def test_a_basis_made_between_compiled_steps_recompiles_nothing():
    torch._dynamo.reset()
    model = tiny_model()
    ids = torch.randint(2, 90, (1, 720), generator=torch.Generator().manual_seed(1))
    with attnplug.applied(model, "sketch(k=8, min_tokens=0)"):
        one, two = (attnplug.make_cache(model, 760) for _ in range(2))
        for cache in (one, two):
            model(ids[:, :700], past_key_values=cache)
        compiled = torch.compile(
            lambda token, cache: model(token, past_key_values=cache).logits,
            fullgraph=True,
            backend="aot_eager",
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for at in range(700, 720):
                token = ids[:, at : at + 1]
                if at == 710:
                    refit(one)
                    refit(two)
                got, want = compiled(token, one), model(token, past_key_values=two).logits
                assert (got - want).abs().max() < 1e-5
    for a, b in zip(one.layers, two.layers, strict=True):
        assert a.fitted_at == b.fitted_at == 710
        assert int(a.cumulative_length) == int(b.cumulative_length) == 720
        assert (a.recent - b.recent).abs().max() < 1e-5


@torch.no_grad()
def test_a_cache_that_compiled_code_has_filled_is_dense_until_the_host_makes_a_basis():
    torch._dynamo.reset()
    model = tiny_model()
    ids = torch.randint(2, 90, (1, 704), generator=torch.Generator().manual_seed(1))
    with attnplug.applied(model, "sketch(k=8, min_tokens=0)"):
        cache = attnplug.make_cache(model, 760)
        cache.early_initialization(1, 2, 64, torch.float32, model.device)
        compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        for at in (0, 352):
            compiled(ids[:, at : at + 352], past_key_values=cache)
        layer = cache.layers[0]
        assert not layer.is_fitted and layer.recent.abs().sum((0, 1, 3)).min() > 0
        compiled(ids[:, :1], past_key_values=cache)
        assert not layer.codes.progress.any()
        refit(cache)
        compiled(ids[:, :1], past_key_values=cache)
        assert layer.codes.progress[0, 0] == 2


@pytest.mark.parametrize(
    "length, k",
    [
        (1024, 32),
        pytest.param(2048, 64, marks=pytest.mark.long),
        pytest.param(4096, 128, marks=pytest.mark.long),
    ],
)
def test_it_finds_what_a_small_model_is_asked_for(length, k):
    """SmolLM2, one fact in prose, that dense finds; budgets of 3% of the context."""
    model, tokenizer = real_model("smollm2-135m")
    for seed, depth in ((0, 0.3), (1, 0.6)):
        needle = needle_prompt(tokenizer, length, depth, seed, "prose")
        with attnplug.applied(model, Sketch(k=k, min_tokens=0)):
            mask = torch.ones_like(needle.ids)
            out = model.generate(
                needle.ids, attention_mask=mask, max_new_tokens=12, do_sample=False
            )
        assert needle.found_in(tokenizer.decode(out[0, needle.ids.shape[1] :]))


WRONG = [
    ({"bytes": 20}, "bytes=20, needs 16, 24, 32"),
    ({"k": 0}, "k=0, needs 1 to 16384"),
    ({"k": True}, "k=True, needs an integer"),
    ({"tail": "half"}, "tail='half', needs drop, regression"),
    ({"min_tokens": -1}, "min_tokens=-1, needs None or"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_refuses(options, message):
    with pytest.raises(PolicyError, match=f"sketch: {message}"):
        Sketch(**options)
