"""The codes and the basis in sketch's cache layer, whatever happens to the cache."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sketch_layer_cases import SIZE, SKETCH, filled, prefill, tokens
from step_cases import DIM, KV_HEADS, random, step
from transformers.cache_utils import StaticLayer

import attnplug
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.state import Basis, empty_codes
from attnplug.policies import refit
from attnplug.policies._sketch_layer import FEW, LATE, QUERIES, RING, SOON, SketchLayer


def test_what_stands_for_padding_makes_no_basis(device):
    new = tokens(0, 900, batch=2, device=device)
    mask = torch.arange(SIZE, device=device) >= torch.tensor([[300], [600]], device=device)
    basis = filled(SKETCH, new, mask).basis
    for row, start in enumerate((300, 600)):
        new[:, row, :, :start] = torch.nan
    assert all(map(torch.equal, basis, filled(SKETCH, new, mask).basis))


def codes_of(layer: SketchLayer, mask: torch.Tensor | None):
    """The codes of all blocks that have some, made at once in the layer's basis."""
    whole = empty_codes(layer.keys, layer.size)
    start = None if mask is None else mask.int().argmax(-1).to(torch.int32)
    rows = {"lengths": layer.cumulative_length.reshape(1), "start": start, "key_mask": mask}
    encode_keys(layer.keys, layer.values, layer.basis.encoder, *whole, **rows)
    return whole


def check(layer: SketchLayer, pads: torch.Tensor, seed: int) -> None:
    mask = torch.arange(SIZE) >= pads[:, None] if bool(pads.any()) else None
    found = SKETCH.attend(step(layer, seed, mask))
    whole = codes_of(layer, mask)
    done, start = layer.codes.progress.unbind(1)  # what a crop has left of them may be more
    assert (done >= whole.progress[:, 0]).all() and torch.equal(start, whole.progress[:, 1])
    for row, (near, start) in enumerate(whole.progress.tolist()):
        part = slice(start + 128, start + 128 * near)
        for own, wanted in zip(layer.codes[:2], whole[:2], strict=True):
            assert torch.equal(own[row, :, part], wanted[row, :, part])
    fresh = SKETCH.cache_layer(SIZE)
    length = int(layer.cumulative_length)
    fresh.update(layer.keys[:, :, :length], layer.values[:, :, :length])
    fresh.bind_rows(basis=Basis(*(x.clone() for x in layer.basis)))
    fresh.is_fitted, fresh.due = True, SIZE + 1
    assert torch.equal(SKETCH.attend(step(fresh, seed, mask)), found)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(2, 300)),
        st.tuples(st.just("step"), st.integers(1, 140)),
        st.tuples(st.just("crop"), st.integers(0, 400)),
        st.tuples(st.just("reorder"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=3,
    max_size=8,
)


@settings(max_examples=12)
@given(actions=ACTIONS, padded=st.booleans())
@example(actions=[("crop", 400), ("append", 290), ("append", 200)], padded=False)
@example(actions=[("crop", 400), ("step", 140), ("step", 140), ("step", 140)], padded=True)
def test_codes_follow_whatever_happens_to_the_cache(actions, padded):
    """Prefills in chunks, steps, crops, beams, batch changes, resets: the codes are those of the
    tokens that are there, in the basis that is there."""
    layer, seed = SKETCH.cache_layer(SIZE), 1
    pads = torch.tensor([0, 75]) if padded else torch.tensor([0, 0])

    def mask():
        return torch.arange(SIZE) >= pads[:, None] if padded else None

    prefill(layer, tokens(0, 900, batch=2), mask())
    check(layer, pads, seed)
    for action, number in actions:
        length, seed = int(layer.cumulative_length), seed + 3
        if action == "append" and length + number <= SIZE:
            prefill(layer, tokens(seed, number, batch=len(pads)), mask())
        elif action == "step" and length + number <= SIZE:
            for k, v, _ in tokens(seed, number, batch=len(pads))[:, :, :KV_HEADS].unbind(3):
                layer.update(k[:, :, None], v[:, :, None])
        elif action == "crop":
            layer.crop(-min(number, length - 80))
        elif action == "reorder":
            order = torch.tensor([number * (row + 1) // 3 % len(pads) for row in range(len(pads))])
            layer.reorder_cache(order)
            pads = pads[order]
        elif action == "repeat" and len(pads) < 5:
            layer.batch_repeat_interleave(number)
            pads = pads.repeat_interleave(number)
        elif action == "select":
            chosen = torch.arange(len(pads))[: number + 1].flip(0)
            layer.batch_select_indices(chosen)
            pads = pads[chosen]
        elif action == "reset":
            layer.reset()
            prefill(layer, tokens(seed, 800, batch=len(pads)), mask())
        check(layer, pads, seed)


def test_beams_are_reordered_in_place(device):
    """A CUDA graph goes on reading the old addresses."""
    layer = filled(SKETCH, tokens(0, 1300, batch=3, device=device))
    SKETCH.attend(step(layer))
    buffers = [layer.keys, *layer.codes, *layer.basis, layer.recent]
    addresses = [x.data_ptr() for x in buffers]
    want = [x[[2, 0, 0]] for x in buffers]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    now = [layer.keys, *layer.codes, *layer.basis, layer.recent]
    assert addresses == [x.data_ptr() for x in now]
    assert all(map(torch.equal, want, now))


def test_the_basis_is_of_the_prompt_and_its_last_queries():
    new = tokens(3, 1200, batch=2)
    layer = filled(SKETCH, new)
    k, v, q = new
    at = torch.arange(1200 - QUERIES, 1200) % RING
    assert torch.equal(layer.recent[:, :, at], q[:, :, -QUERIES:])
    keys, values = (torch.zeros(2, KV_HEADS, SIZE, DIM) for _ in range(2))
    keys[:, :, :1200], values[:, :, :1200] = k[:, :KV_HEADS], v[:, :KV_HEADS]
    wanted = fit_basis(keys, values, layer.recent, lengths=torch.tensor([1200]))
    assert all(map(torch.equal, layer.basis, wanted))


def test_a_step_keeps_its_query():
    layer = filled(SKETCH, tokens(3, 900))
    call = step(layer)
    SKETCH.attend(call)
    assert torch.equal(layer.recent[:, :, (900 - 1) % RING], call.q[:, :, 0])


def fitted_at(layer: SketchLayer, span: int, host: str) -> list[int]:
    """The lengths at which the basis was made anew in `span` steps."""
    found = []
    for at in range(span):
        k, v, _ = tokens(at, 1)
        layer.update(k[:, :KV_HEADS], v[:, :KV_HEADS])
        if host == "generate":
            layer.prepare_step(int(layer.cumulative_length), None)
        before = layer.fitted_at
        SKETCH.attend(step(layer, at))
        if host == "generate":
            assert layer.fitted_at == before  # the step has nothing to do
        if layer.fitted_at not in (0, *found[-1:]):
            found.append(layer.fitted_at)
    return found


@pytest.mark.parametrize("host", ["step", "generate"])
def test_the_basis_is_made_anew_as_a_short_prompt_grows(host):
    """After as many tokens again, and 512 at least; of fewer than 64 queries after 64 tokens."""
    assert fitted_at(filled(SKETCH, tokens(0, 100)), 1300, host)[1:] == [100 + SOON, 1224]
    short = filled(SKETCH, tokens(0, 10))
    assert fitted_at(short, 80, host)[1:] == [10 + FEW]


def test_a_prefill_in_chunks_fits_when_it_has_grown_by_a_quarter():
    layer, lengths = dataclasses.replace(SKETCH).cache_layer(40000), []
    for chunk in range(16):
        prefill(layer, tokens(chunk, 2400))
        lengths.append(layer.fitted_at)
    kept = sorted(set(lengths))
    assert kept[0] == 2400 and all(b >= a * 5 // 4 for a, b in itertools.pairwise(kept))
    assert all(b - a >= min(max(a, SOON), LATE) for a, b in itertools.pairwise(kept))
    SKETCH.attend(step(layer))
    assert layer.seen - layer.fitted_at < LATE


def test_what_is_adopted_brings_its_queries():
    source = filled(SKETCH, tokens(0, 1200))
    layer = SKETCH.cache_layer(SIZE)
    layer.adopt(source)
    assert not layer.is_fitted
    found = SKETCH.attend(step(layer))
    assert layer.is_fitted and all(map(torch.equal, layer.basis, source.basis))
    assert torch.equal(found, SKETCH.attend(step(source)))


def test_without_queries_the_basis_is_that_of_the_keys_and_soon_another():
    other = StaticLayer(max_cache_len=SIZE)
    k, v, _ = tokens(0, 1200)[:, :, :KV_HEADS]
    other.update(k, v)
    layer = SKETCH.cache_layer(SIZE)
    layer.adopt(other)
    SKETCH.attend(step(layer))
    wanted = fit_basis(layer.keys, layer.values, k[:, :, :1] * 0, lengths=torch.tensor([1200]))
    assert layer.fitted_at == 1200 and torch.equal(layer.basis.encoder, wanted.encoder)
    assert fitted_at(layer, 70, "step")[1:] == [1200 + FEW]


def test_refit_is_for_the_asking():
    layer = filled(SKETCH, tokens(0, 1200))
    before = layer.basis.encoder.clone()
    layer.recent.copy_(random(9, *layer.recent.shape) ** 3)
    refit(attnplug.models.cache.PlugCache(layers=[layer, StaticLayer(max_cache_len=4)]))
    assert layer.fitted_at == 1200 and not torch.equal(before, layer.basis.encoder)
    check(layer, torch.tensor([0]), 0)
