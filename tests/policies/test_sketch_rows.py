"""When sketch's codes and basis are made: for how many rows, and how often."""

import copy

import pytest
import torch
from step_cases import DIM, KV_HEADS, random, step

import attnplug
from attnplug import Dense, Sketch
from attnplug.models.cache import PlugCache
from attnplug.policies import _sketch_layer as sketch_layer
from attnplug.policies import audits
from attnplug.testing import tiny_model


@pytest.fixture
def fitted(monkeypatch):
    """The tokens that each basis is made of, as it comes."""
    made, fit = [], sketch_layer.fit_bases

    def counting(fits, **options):
        made.extend(int(each.lengths) for each in fits)
        return fit(fits, **options)

    monkeypatch.setattr(sketch_layer, "fit_bases", counting)
    return made


@pytest.mark.parametrize("rows", [3, 4])
def test_a_batch_has_codes_from_fewer_tokens_on(rows, monkeypatch):
    """What 200 slots have past 110 comes to 400 less 110 in four rows, and not in three."""
    monkeypatch.setattr(Sketch, "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(Sketch, "measured_row_crossover", lambda *_: 110)
    layer = Sketch().cache_layer(200)
    layer.update(*random(0, 2, rows, KV_HEADS, 190, DIM))
    assert (layer.codes is not None) == (rows == 4)
    if rows == 3:
        assert torch.equal(Sketch().attend(step(layer)), Dense().attend(step(layer)))


@pytest.mark.parametrize("kept, served", [(4, True), (1, False)])
def test_what_fewer_rows_leave_to_dense_has_no_audit(fitted, monkeypatch, kept, served):
    """A cache of four rows has codes, and one row of it is read by dense."""
    monkeypatch.setattr(Sketch, "measured_crossover", lambda *_: 900)
    monkeypatch.setattr(Sketch, "measured_row_crossover", lambda *_: 110)
    model = attnplug.apply(tiny_model(), Sketch(k=4, audit=8))
    cache = attnplug.make_cache(model, 820)
    ids = torch.randint(2, 97, (4, 700), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.batch_select_indices(torch.arange(kept))
    fitted.clear()
    model.generate(
        torch.cat([ids[:kept], ids[:kept, :1]], 1),
        past_key_values=cache,
        **dict(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0),
    )
    assert bool(audits(cache)) == served and (served or not fitted)


def test_generate_in_chunks_makes_the_basis_once_and_of_all(fitted):
    """Two turns, the second of fewer tokens than would pay for another basis."""
    made, model = fitted, attnplug.apply(tiny_model(), "sketch(k=16, min_tokens=0)")
    ids = torch.randint(2, 97, (1, 900), generator=torch.Generator().manual_seed(3))
    asked = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    whole = model.generate(ids, **asked)
    count = model.config.num_hidden_layers
    assert made == count * [900]
    cache = attnplug.make_cache(model, 1100)
    chunked = model.generate(ids, past_key_values=cache, prefill_chunk_size=128, **asked)
    assert made == 2 * count * [900] and torch.equal(chunked, whole)
    more = torch.cat([chunked, ids[:, :100]], 1)
    model.generate(more, past_key_values=cache, prefill_chunk_size=64, **asked)
    assert made == 2 * count * [900]


@pytest.mark.parametrize("chunk", [None, 128])
def test_generate_makes_the_bases_of_all_layers_together(chunk, monkeypatch):
    """At its first step, as a GPU takes as long for one of them; one token needs none."""
    calls, fit = [], sketch_layer.fit_bases
    monkeypatch.setattr(
        sketch_layer, "fit_bases", lambda fits, **o: calls.append(len(fits)) or fit(fits, **o)
    )
    model = attnplug.apply(tiny_model(), "sketch(k=16, min_tokens=0)")
    layers = model.config.num_hidden_layers
    ids = torch.randint(2, 97, (1, 700), generator=torch.Generator().manual_seed(3))
    asked = dict(do_sample=False, eos_token_id=None, pad_token_id=0, prefill_chunk_size=chunk)
    model.generate(ids, max_new_tokens=1, **asked)
    assert layers > 1 and calls == []
    model.generate(ids, max_new_tokens=4, **asked)
    assert calls == [layers]
    cache = attnplug.make_cache(model, 800)
    with torch.no_grad():
        model(ids, past_key_values=cache)  # a loop of one's own: each layer as it comes
    assert calls == [layers, *[1] * layers]
    sketch_layer.refit(cache)
    assert calls[-1] == layers


def test_layers_that_are_not_alike_are_fitted_apart(monkeypatch):
    """One cache has other query heads, another dtype, and a layer that has kept no queries."""
    calls, fit = [], sketch_layer.fit_bases
    monkeypatch.setattr(
        sketch_layer, "fit_bases", lambda fits, **o: calls.append(len(fits)) or fit(fits, **o)
    )
    layers = []
    for heads, dtype in ((4, torch.float32), (8, torch.float32), (4, torch.float16), (0, None)):
        layer = Sketch(bytes=16, k=4, min_tokens=0).cache_layer(900)
        k, v = torch.randn(2, 1, 2, 800, 64, generator=torch.Generator().manual_seed(heads))
        dtype = dtype or torch.float32
        layer.update(k.to(dtype), v.to(dtype))
        if heads:
            layer._make_ring(heads)
            layer.recent.normal_(generator=torch.Generator().manual_seed(1))
        layers += [layer, copy.deepcopy(layer)]
    sketch_layer.refit(PlugCache(layers=layers))
    assert calls == [2, 2, 2, 2] and all(layer.is_fitted for layer in layers)
    for one, two in zip(layers[::2], layers[1::2], strict=True):
        assert all(map(torch.equal, one.basis, two.basis))
        assert all(x.isfinite().all() and x.abs().sum() > 0 for x in one.basis)
