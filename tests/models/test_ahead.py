"""A call whose kind has run before captures its step in front of what its layers prepare."""

import contextlib

import pytest
import torch
from test_patience import on_cpu
from test_regional import model_of

import attnplug
from attnplug.models import ahead, captured
from attnplug.models.generate import LOOP
from attnplug.models.names import CACHE
from attnplug.policies import _sketch_layer

SKETCH = "sketch(k=8, min_tokens=0)"
PROMPT, NEW = 90, 12
__all__ = ["on_cpu"]


@pytest.fixture
def events(monkeypatch):
    """ "fit" and "capture", as they come."""
    seen: list[str] = []

    def noted(name, work):
        def run(*arguments, **options):
            seen.append(name)
            return work(*arguments, **options)

        return run

    monkeypatch.setattr(_sketch_layer, "fit_bases", noted("fit", _sketch_layer.fit_bases))
    monkeypatch.setattr(captured, "capture", noted("capture", captured.capture))
    return seen


def prompts_of(device, rows=2, padded=False):
    seeded = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 97, (rows, PROMPT), generator=seeded)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def fitted_at(cache):
    return [(layer.fitted_at, layer.due, layer.seen, layer.is_expected) for layer in cache.layers]


class TestOnACPU:
    pytestmark = pytest.mark.usefixtures("on_cpu")

    @pytest.mark.parametrize("padded", [False, True])
    def test_the_second_call_captures_first(self, events, padded):
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu", padded=padded)
        found = [model.generate(**inputs, max_new_tokens=NEW).tolist() for _ in range(3)]
        assert found[0] == found[1] == found[2]
        assert events == ["fit", "capture", "capture", "fit", "capture", "fit"]

    def test_another_kind_of_call_runs_its_first_step(self, events):
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu")
        alone = {name: value[:1] for name, value in inputs.items()}
        for given in (inputs, alone):
            model.generate(**given, max_new_tokens=NEW)
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=NEW)
        model.generate(**inputs, max_new_tokens=NEW, do_sample=True)
        assert events == 4 * ["fit", "capture"]
        events.clear()
        model.generate(**alone, max_new_tokens=NEW)
        assert events == ["capture", "fit"]

    def test_a_call_that_has_no_second_step_captures_none(self, events):
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu")
        model.generate(**inputs, max_new_tokens=NEW)
        events.clear()
        model.generate(**inputs, max_new_tokens=2)
        assert events == ["fit"]

    def test_what_a_first_step_may_do_alone_keeps_it_first(self, events):
        """A cache of the caller's, autocast."""
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu")
        for _ in range(2):
            cache = attnplug.make_cache(model, PROMPT + NEW)
            model.generate(**inputs, max_new_tokens=NEW, **{CACHE: cache})
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model.generate(**inputs, max_new_tokens=NEW)
        assert events == 4 * ["fit", "capture"]

    def test_an_interrupt_leaves_no_layer_waiting(self, monkeypatch):
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu")
        wanted = model.generate(**inputs, max_new_tokens=NEW).tolist()
        caches = []

        def interrupted(step, on):
            caches.append(True)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(captured, "capture", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate(**inputs, max_new_tokens=NEW)
        assert caches
        assert model.generate(**inputs, max_new_tokens=NEW).tolist() == wanted

    def test_layers_are_expected_within_alone(self):
        model = attnplug.apply(model_of(), SKETCH)
        layers = attnplug.make_cache(model, 64).layers
        with contextlib.suppress(ValueError), ahead._expected(layers):
            assert all(layer.is_expected for layer in layers)
            raise ValueError
        assert not any(layer.is_expected for layer in layers)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", [SKETCH, "sketch(k=8, min_tokens=0, bytes=16)"])
def test_a_gpus_calls_are_alike(events, policy, padded):
    model = attnplug.apply(model_of("cuda"), policy)
    inputs = prompts_of("cuda", padded=padded)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    calls = [model.generate(**inputs, **options) for _ in range(3)]
    assert events == ["fit", "capture", "capture", "fit", "capture", "fit"]
    first, *later = calls
    for call in later:
        assert torch.equal(call.sequences, first.sequences)
        assert fitted_at(call[CACHE]) == fitted_at(first[CACHE])
        for layer, wanted in zip(call[CACHE].layers, first[CACHE].layers, strict=True):
            assert int(layer.cumulative_length) == int(wanted.cumulative_length)
            for found, first_ones in zip(layer.codes, wanted.codes, strict=True):
                assert torch.equal(found, first_ones)
    assert vars(model)[LOOP].why_not == ""
