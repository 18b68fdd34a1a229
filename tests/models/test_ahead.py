"""A call whose kind has run before captures its step in front of what its layers prepare."""

import contextlib

import pytest
import torch
from test_patience import on_cpu
from test_regional import model_of

import attnplug
from attnplug.models import ahead, captured, decode_loop, pace, rounds
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


@pytest.fixture
def steps(monkeypatch):
    """ "step" where a step runs as it is, "capture" and "replay", as they come."""
    seen: list[str] = []
    step, capture = decode_loop.decode_step, captured.capture

    def replayed(replay):
        seen.append("replay")
        return replay()

    def captures(step, on):
        seen.append("capture")
        size = len(seen)
        replay = capture(step, on)
        del seen[size:]  # a graph runs its step as it is captured
        return lambda: replayed(replay)

    def as_it_is(*arguments):
        if seen[-1:] != ["replay"]:
            seen.append("step")
        return step(*arguments)

    monkeypatch.setattr(decode_loop, "decode_step", as_it_is)
    monkeypatch.setattr(captured, "capture", captures)
    return seen


@pytest.fixture
def as_they_are(monkeypatch):
    """Of each step whether it runs as it is, and not as a graph, as they come."""
    seen: list[bool] = []
    run = captured.CapturedStep.__call__

    def noted(self, *arguments):
        seen.append(self.first)
        return run(self, *arguments)

    monkeypatch.setattr(captured.CapturedStep, "__call__", noted)
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


class Switched(torch.nn.Linear):
    """A projection that also does something else where it is told to."""

    on = ()

    def forward(self, input):
        found = super().forward(input)
        return torch.special.bessel_j0(found) if self.on else found


class TestOnACPU:
    pytestmark = pytest.mark.usefixtures("on_cpu")

    @pytest.mark.parametrize("padded", [False, True])
    def test_the_second_call_captures_first(self, events, padded):
        model = attnplug.apply(model_of(), SKETCH)
        inputs = prompts_of("cpu", padded=padded)
        found = [model.generate(**inputs, max_new_tokens=NEW).tolist() for _ in range(3)]
        assert found[0] == found[1] == found[2]
        assert events == ["fit", "capture", "capture", "fit", "capture", "fit"]

    @pytest.mark.parametrize("policy", ["dense", "momo+gather", "auto"])
    def test_where_steps_are_dense_the_second_call_runs_none_as_it_is(self, steps, policy):
        model = attnplug.apply(model_of(), policy)
        inputs = prompts_of("cpu")
        first = model.generate(**inputs, max_new_tokens=NEW)
        assert steps == ["step", "capture", *["replay"] * (NEW - 2)]
        for _ in range(2):
            steps.clear()
            assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), first)
            assert steps == ["capture", *["replay"] * (NEW - 1)]
        steps.clear()
        model.generate(**inputs, max_new_tokens=2)
        assert steps == ["step"]

    @pytest.mark.parametrize(
        ("policy", "alike"),
        [
            ("gather(k=1, block=16, min_tokens=0)", True),
            ("gather(k=1, block=16, kv='host', min_tokens=0)", False),
            ("gvr(k=8, min_tokens=0)", False),
        ],
    )
    def test_a_sparse_steps_first_one_is_captured_where_it_is_like_others(
        self, steps, policy, alike
    ):
        model = attnplug.apply(model_of(), policy)
        as_it_is = ["step", "capture", *["replay"] * (NEW - 2)]
        ahead = ["capture", *["replay"] * (NEW - 1)]
        answers = []
        for wanted in (as_it_is, ahead if alike else as_it_is):
            steps.clear()
            answers.append(model.generate(**prompts_of("cpu"), max_new_tokens=NEW))
            assert steps == wanted
        assert torch.equal(*answers)

    @pytest.mark.parametrize("rows", [1, 2])
    def test_the_second_calls_rounds_run_no_step_as_it_is(self, as_they_are, rows, monkeypatch):
        """Drafts, verifications, and the dense steps that follow where rounds have ended."""
        monkeypatch.setattr(pace.Pace, "pays", lambda self, left: left > 12)
        policy = "exact(draft='gather(k=1, block=16)', m=2, min_tokens=0)"
        model = attnplug.apply(model_of(), policy)
        answers = []
        for first in (True, False):
            as_they_are.clear()
            inputs = prompts_of("cpu", rows)
            answers.append(model.generate(**inputs, max_new_tokens=40, min_new_tokens=40))
            assert model.__dict__[LOOP].rounds.tally.ended
            assert sum(as_they_are) == (3 if first else 0)
        assert torch.equal(*answers)

    def test_a_draft_is_of_another_kind_than_a_dense_step_over_the_same_cache(
        self, as_they_are, monkeypatch
    ):
        """As of a call that is too short for rounds."""
        model = attnplug.apply(
            model_of(), "exact(draft='gather(k=1, block=16)', m=2, min_tokens=0)"
        )
        options = {"max_new_tokens": 20, "min_new_tokens": 20}
        with monkeypatch.context() as patched:
            patched.setattr(rounds, "_too_short", lambda call, drafts: "it is short")
            for first in (True, False):
                as_they_are.clear()
                model.generate(**prompts_of("cpu", 1), **options)
                assert sum(as_they_are) == first and len(as_they_are) == 19
        as_they_are.clear()
        model.generate(**prompts_of("cpu", 1), **options)
        assert sum(as_they_are) == 2  # a draft and a verification

    def test_calls_whose_kernels_may_differ_are_of_other_kinds(self, steps):
        """A padded row; weights of other shapes; a layer that is told to do something else, as
        adapters are switched."""
        model = model_of()
        down = model.model.layers[0].mlp.down_proj
        switched = Switched(down.in_features, down.out_features, bias=False)
        switched.weight = down.weight
        model.model.layers[0].mlp.down_proj = switched
        attnplug.apply(model, "dense")

        def first(padded=False):
            steps.clear()
            model.generate(**prompts_of("cpu", padded=padded), max_new_tokens=NEW)
            return steps[0]

        assert [first(), first(), first(padded=True), first(padded=True), first()] == [
            *("step", "capture"),
            *("step", "capture"),
            "capture",
        ]
        switched.on = ["an adapter"]
        assert [first(), first()] == ["step", "capture"]
        switched.bias = torch.nn.Parameter(torch.zeros(down.out_features))
        assert [first(), first()] == ["step", "capture"]

    def test_a_model_keeps_a_number_of_each_kind(self, steps):
        model = attnplug.apply(model_of(), "dense")
        for new in (10, 200, 400):
            model.generate(**prompts_of("cpu"), max_new_tokens=new, min_new_tokens=3)
        known = vars(model)[LOOP].step.now.known
        assert known and {type(kind) for kind in known} == {int}

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


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("policy", ["dense", "auto", "momo+gather"])
def test_a_gpus_dense_calls_are_alike(steps, policy, padded):
    model = attnplug.apply(model_of("cuda"), policy)
    inputs = prompts_of("cuda", padded=padded)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True}
    first, *later = [model.generate(**inputs, **options) for _ in range(3)]
    again = ["capture", *["replay"] * (NEW - 1)]
    assert steps == ["step", "capture", *["replay"] * (NEW - 2), *again, *again]
    for call in later:
        assert torch.equal(call.sequences, first.sequences)
        for layer, wanted in zip(call[CACHE].layers, first[CACHE].layers, strict=True):
            assert int(layer.cumulative_length) == int(wanted.cumulative_length)
            assert torch.equal(layer.keys, wanted.keys)


@pytest.mark.gpu
def test_a_gpus_calls_of_other_kinds_are_right(steps):
    """Rows without padding and with it, and a layer that is switched in between."""
    model = model_of("cuda")
    mlp = model.model.layers[0].mlp
    inner, outer = mlp.down_proj.in_features, mlp.down_proj.out_features
    mlp.down_proj = Switched(inner, outer, bias=False).to(mlp.down_proj.weight)
    attnplug.apply(model, "dense")
    for on in ([], ["an adapter"], []):
        mlp.down_proj.on = on
        for padded in (False, True):
            inputs = prompts_of("cuda", padded=padded)
            wanted = model.generate(**inputs, max_new_tokens=NEW, disable_compile=True)
            for _ in range(2):
                assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), wanted)
