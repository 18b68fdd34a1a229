"""Where gather is dense, what it reports and refuses, and which form its summaries have."""

import dataclasses

import pytest
import torch
from gather_policy_cases import BAND, EXACT, GATHER, SIZE, bounds_of, tokens
from step_cases import DIM, KV_HEADS, filled, step
from transformers.cache_utils import StaticLayer

import attnplug
from attnplug import Dense, Gather, PolicyError
from attnplug.models.cache import PlugLayer
from attnplug.policies import LayerShape
from attnplug.policies import gather as policy_module
from attnplug.testing import tiny_model


def test_the_layer_is_sized_once():
    layer = GATHER.cache_layer(SIZE)
    layer.crop(-3)  # of nothing, as generate may
    layer.reset()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    assert not layer.is_initialized
    kv = tokens(0, 3).bfloat16()
    layer.update(kv[0], kv[1])
    assert layer.bounds.shape == (1, KV_HEADS, 18, 2, DIM) and layer.bounds.dtype == torch.int8
    assert layer.progress.shape == (1, 2)
    exact = EXACT.cache_layer(SIZE)
    exact.update(kv[0], kv[1])
    assert exact.bounds.shape == (1, KV_HEADS, 13, 2, DIM) and exact.bounds.dtype == torch.bfloat16
    band = dataclasses.replace(BAND, block=128).cache_layer(SIZE)
    band.update(kv[0], kv[1])
    assert band.bounds.shape == (1, KV_HEADS, 11, 1, DIM)


def foreign_layers(kv: torch.Tensor) -> dict[str, StaticLayer | None]:
    """Layers whose summaries, if any, are not those of the call's keys under GATHER."""
    layers = {
        "static": StaticLayer(max_cache_len=SIZE),
        "plug": PlugLayer(max_cache_len=SIZE),
        "another block": dataclasses.replace(GATHER, block=32).cache_layer(SIZE),
        "another scoring": BAND.cache_layer(SIZE),
        "other bounds": EXACT.cache_layer(SIZE),
    }
    for layer in layers.values():
        layer.update(kv[0], kv[1])
    return layers


@pytest.mark.parametrize("kind", foreign_layers(tokens(0, 1)))
def test_without_summaries_of_its_own_it_is_dense(kind, device):
    call = step(foreign_layers(tokens(0, 190, device=device))[kind])
    assert torch.equal(GATHER.attend(call), Dense().attend(call))


def test_the_crossover_grows_with_the_keep_set():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert Gather(k=8).crossover(cpu) == 4096 and Gather(k=8).crossover(cuda) == 32768
    kept = (8 + 32 + 256) * 16
    assert Gather().crossover(cuda) == 65536 and Gather().crossover(cpu) == 32768
    assert Gather(block=64).crossover(cuda) == 10 * (8 + 32 + 256) * 64
    published = Gather(k=32, block=128, sink=1, local=4)  # keeps as many keys
    assert published.crossover(cuda) == 10 * kept
    assert dataclasses.replace(GATHER, min_tokens=5).crossover(cuda) == 5


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_batch_is_served_from_fewer_tokens_on(rows, monkeypatch):
    """What 200 slots have past 110 comes to 400 less 110 in four rows, and not in three."""
    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 110)
    batched = dataclasses.replace(GATHER, min_tokens=None)
    call = step(filled(batched, tokens(0, 190, batch=rows), SIZE))
    call.state.exposes_buffers = True  # as a prompt's attention finds
    batched.note_queries(call)
    assert call.state.progress.any() == (rows == 4)
    other = GATHER if rows == 4 else Dense()
    assert torch.equal(batched.attend(call), other.attend(call))
    assert not torch.allclose(GATHER.attend(call), Dense().attend(call), atol=1e-3)


def test_the_report_says_what_is_read_and_where_it_is_dense():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cpu"))
    assert Gather(k=8, block=128, sink=1, local=4).note(shape) == (
        "reads 13 blocks of 128 keys; dense in caches below 4,096 tokens and in those that "
        "attnplug did not make for it"
    )
    gpu = LayerShape(28, 4, 128, 0.0, False, torch.device("cuda"))
    assert "dense in caches below 65,536 tokens (20,624 at batch 8) and in" in Gather().note(gpu)
    model = attnplug.apply(tiny_model(), GATHER)
    name = "gather(k=2, sink=1, local=2, scoring='bounds', min_tokens=0, bounds='int8')"
    assert f"decode {name}; gather: reads 5 blocks" in str(attnplug.report(model))


def test_large_caches_have_int8_bounds():
    """And small ones, and who asks for it, exact ones."""
    forms = {
        (16384, "bounds", None): True,
        (16383, "bounds", None): False,
        (99999, "bounds", "exact"): False,
        (99, "bounds", "int8"): True,
        (99999, "band", None): True,
        (99, "band", None): False,
    }
    for (size, scoring, bounds), int8 in forms.items():
        layer = Gather(scoring=scoring, bounds=bounds).cache_layer(size)
        parts = 1 if scoring == "band" and int8 else 2
        assert layer.form == (parts, torch.int8 if int8 else None, scoring == "band")


WRONG = [
    ({"k": -1}, "k=-1, needs 0 to 256"),
    ({"k": 257}, "k=257, needs 0 to 256"),
    ({"k": True}, "k=True, needs an integer"),
    ({"k": 8.0}, "k=8.0, needs an integer"),
    ({"block": 100}, "block=100, needs 16, 32, 64, 128"),
    ({"sink": -1}, "sink=-1, needs at least 0"),
    ({"local": 0}, "local=0, needs at least 1"),
    ({"scoring": "max"}, "scoring='max', needs bounds, band"),
    ({"bounds": "fp8"}, "bounds='fp8', needs None, 'int8' or 'exact'"),
    ({"min_tokens": -1}, "min_tokens=-1, needs None or"),
    ({"min_tokens": "8K"}, "min_tokens='8K', needs None or"),
    ({"kv": "disk"}, "kv='disk', needs 'gpu' or 'host'"),
    ({"resident": 64}, "resident=64, needs kv='host'"),
    ({"kv": "host", "resident": 32}, "resident=32, needs an integer, at least sink \\+ k = 264"),
    ({"kv": "host", "resident": 64.0}, "resident=64.0, needs an integer"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_refuses(options, message):
    with pytest.raises(PolicyError, match=f"gather: {message}"):
        Gather(**options)


@torch.no_grad()
def test_compiled_steps_meet_caches_of_several_sizes(monkeypatch):
    """The second size makes it a symbol of the compiler's, which decides the summaries' form."""
    monkeypatch.setattr(policy_module, "INT8_FROM", 100)
    torch._dynamo.reset()
    model = tiny_model()
    ids = torch.randint(3, 90, (2, 44), generator=torch.Generator().manual_seed(0))
    with attnplug.applied(model, "gather(k=1, sink=1, local=1, scoring='bounds', min_tokens=0)"):
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        for size in (64, 48, 128):
            one, two = (attnplug.make_cache(model, size) for _ in range(2))
            for cache in (one, two):
                model(ids[:, :40], past_key_values=cache)
            for t in range(40, 44):
                got = step(ids[:, t : t + 1], past_key_values=one).logits
                assert (
                    got - model(ids[:, t : t + 1], past_key_values=two).logits
                ).abs().max() < 1e-5
            assert one.layers[0].form == (2, torch.int8 if size >= 100 else None, False)


@pytest.mark.parametrize("policy", [GATHER, EXACT, BAND], ids=str)
def test_a_prompt_has_its_summaries_when_it_has_come(policy, device):
    """In chunks and padded on the left: those that a step would make, and no step makes more."""
    model, ids = tiny_model(device=device), torch.arange(2, 92, device=device)[None].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :21] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with attnplug.applied(model, policy), torch.no_grad():
        cache = attnplug.make_cache(model, SIZE)
        for begin, end, wanted in ((0, 50, [[3, 0], [1, 21]]), (50, 90, [[5, 0], [4, 21]])):
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            )
            assert all(layer.progress.tolist() == wanted for layer in cache.layers)
        made = [bounds_of(layer) for layer in cache.layers]
        for layer in cache.layers:
            layer.bounds.zero_()
            layer.progress.zero_()
        model(
            ids[:, :1],
            attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1),
            position_ids=positions[:, -1:] + 1,
            past_key_values=cache,
        )
        for layer, before in zip(cache.layers, made, strict=True):
            assert layer.progress[:, 0].tolist() == [4, 3]  # a step wants none of its local blocks
            for row, count in enumerate((4, 3)):
                assert torch.equal(bounds_of(layer)[row, :, :count], before[row, :, :count])


def test_a_cache_that_dense_reads_has_no_summaries(device):
    model = tiny_model(device=device)
    far = dataclasses.replace(GATHER, min_tokens=SIZE + 1)
    with attnplug.applied(model, far), torch.no_grad():
        cache = attnplug.make_cache(model, SIZE)
        model(torch.arange(2, 92, device=device)[None], past_key_values=cache)
    assert all(layer.progress.tolist() == [[0, 0]] for layer in cache.layers)
