"""A model's own steps are replayed until compiled ones pay, and never where a graph would not do
what the steps do."""

import logging

import pytest
import torch
from test_regional import GATHER, as_it_is, model_of, tokens_of

import attnplug
from attnplug.models import captured, decode_loop, loop_calls, patience, regional
from attnplug.models.captured import CapturedStep
from attnplug.models.generate import LOOP
from attnplug.models.patience import NotReplayable, PatientStep, Replayable


@pytest.fixture
def on_cpu(monkeypatch):
    """A CPU takes the part of a GPU: a graph runs its step again."""
    monkeypatch.setattr(patience, "PATIENT", {"cpu"})
    monkeypatch.setattr(captured, "capture", lambda step, on: step)
    monkeypatch.setattr(regional, "_compile", as_it_is)

    def compiles(self, inputs, config):
        return not config.disable_compile

    monkeypatch.setattr("transformers.GenerationMixin._valid_auto_compile_criteria", compiles)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("policy", ["dense", GATHER])
def test_steps_are_compiled_once_they_pay(policy, caplog):
    """In the middle of a call; a report and the log say so."""
    model = attnplug.apply(model_of(), policy)
    loop = vars(model)[LOOP]
    loop.patience = 19
    wanted = [tokens_of(model, disable_compile=True, new=new) for new in (12, 30)]
    assert attnplug.report(model).steps == ""  # nothing has been asked of compiled steps yet
    assert tokens_of(model) == wanted[0]
    assert "are compiled after 8 more" in attnplug.report(model).steps
    assert "are compiled after 8 more" in str(attnplug.report(model))
    assert type(loop.step.now) is CapturedStep and loop.step.now.replay is not None
    with caplog.at_level(logging.WARNING, "attnplug"):
        assert tokens_of(model, new=30) == wanted[1]
    assert "compiled now" in caplog.text
    assert isinstance(loop.step.now, regional.LayeredStep)
    assert attnplug.report(model).steps == ""
    caplog.clear()
    assert tokens_of(model, new=30) == wanted[1] and caplog.text == ""


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("before", [False, True])
def test_warm_compiles_at_once(before):
    model = attnplug.apply(model_of(), "dense")
    wanted = tokens_of(model, disable_compile=True)
    if before:
        assert tokens_of(model) == wanted
    attnplug.warm(model, lengths=[70])
    assert isinstance(
        vars(model)[LOOP].step.now if before else vars(model)[LOOP].step, regional.LayeredStep
    )
    assert tokens_of(model) == wanted and attnplug.report(model).steps == ""


@pytest.mark.usefixtures("on_cpu")
def test_code_that_is_not_transformers_is_compiled_at_once(monkeypatch):
    """It may do anything on the host between two steps."""
    model = attnplug.apply(model_of(), "dense")
    monkeypatch.setattr(patience, "OWN", "another.")
    tokens_of(model)
    assert isinstance(vars(model)[LOOP].step, regional.LayeredStep)


def test_a_model_on_several_devices_is_not_captured(monkeypatch):
    model = model_of()
    assert not patience.is_capturable(model)
    monkeypatch.setattr(patience, "PATIENT", {"cpu"})
    assert patience.is_capturable(model) and patience.is_on_one_device(model)
    model.model.norm.to("meta")
    assert not patience.is_capturable(model) and not patience.is_on_one_device(model)
    model.to_empty(device="cpu")
    config, own = model._default_compile_config(), decode_loop.decode_step
    step = decode_loop._compile(config, torch.device("cpu"), False, {}, own)
    assert not isinstance(step, regional.LayeredStep)


ONE, PLACE = torch.tensor(1.0), torch.tensor([0])


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda x: int(x.sum()), "_local_scalar_dense.default asks the device"),
        (lambda x: x[x > 0], "index.Tensor asks the device"),
        (lambda x: x.index_put_((x > 0,), torch.ones(3)), "index_put_.default asks the device"),
        (
            lambda x: x.expand(3, 3).clone().index_put_((x > 0, PLACE), ONE),
            "index_put_.default asks",
        ),
        (lambda x: x.index_put((x > 0,), x[:1], True), "index_put.default asks the device"),
        (lambda x: x.nonzero(), "nonzero.default asks the device"),
        (lambda x: x.to("meta"), "_to_copy.default is about a tensor that is not on cpu"),
        (lambda x: torch.full((2,), 3.0, device="meta"), "full.default is about a tensor"),
    ],
)
def test_what_a_graph_cannot_replay_raises(op, why):
    with Replayable(torch.device("cpu")), pytest.raises(NotReplayable, match=why):
        op(torch.ones(3))


def test_what_a_graph_replays_does_not_raise():
    x, number = torch.ones(3), torch.zeros((), device="meta")
    with Replayable(torch.device("cpu")):
        assert (x * 2 + x.softmax(0).sum()).tolist() == [3.0] * 3
        assert x[torch.tensor([2, 0])].tolist() == [1.0, 1.0]
        x[torch.tensor([1])] = 5.0
        x[x > 2] = 3.0
        assert x.tolist() == [1.0, 3.0, 1.0]
        assert number.dim() == 0 and torch.full_like(number, 2).shape == ()


class Steps:
    """Steps that count what runs, on a model and a cache."""

    def __init__(self, step):
        self.step, self.ran = step, []

    def own(self, model, cache):
        self.ran.append("own")
        return self.step(cache)

    def make(self):
        def compiled(model, cache):
            self.ran.append("compiled")
            return torch.ones(1)

        return compiled


def test_a_step_that_asks_the_device_is_compiled(monkeypatch, caplog):
    """What it asked in the capture has no answer; the token that its cache has deferred comes
    again."""
    model = attnplug.apply(model_of(), "dense")
    cache = attnplug.make_cache(model, 64)

    def step_of(cache):
        for layer in cache.layers:
            layer.pending = torch.zeros(1), torch.zeros(1)
        return torch.ones(1) * int(torch.ones(1).sum())

    def capture(step, on):
        monkeypatch.setattr(patience, "is_capturing", lambda: True)
        return step()

    monkeypatch.setattr(captured, "capture", capture)
    steps = Steps(step_of)
    step = PatientStep(steps.own, steps.make)
    for _ in range(4):
        assert step(model, cache) == 1
    assert steps.ran == ["own", "own", "compiled", "compiled", "compiled"]
    assert all(layer.pending is None for layer in cache.layers)
    assert "_local_scalar_dense.default asks the device" in caplog.text


@pytest.mark.gpu
def test_a_gpu_that_must_wait_compiles(monkeypatch, caplog):
    """The capture that ended so leaves the GPU as it was."""
    monkeypatch.setattr(loop_calls, "DEVICES", {"cuda"})
    model = attnplug.apply(model_of("cuda"), "dense")

    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def look(hidden):
        if not torch.compiler.is_compiling():
            float(hidden.sum())
        return forward(hidden)

    mlp.forward = look
    wanted = tokens_of(model, disable_compile=True, new=24)
    for _ in range(2):
        assert tokens_of(model, new=24) == wanted
    assert "cannot be captured" in caplog.text and "asks the device" in caplog.text
    assert isinstance(vars(model)[LOOP].step.now, regional.LayeredStep)


@pytest.mark.gpu
def test_graphs_that_python_finds_in_cycles_end_no_capture():
    """As those of models that are gone are, while another model's step is captured."""

    def abandon():
        held: list[object] = [torch.cuda.CUDAGraph()]
        held.append(held)
        stream = torch.cuda.Stream()
        with torch.cuda.graph(held[0], stream=stream):
            torch.zeros(3, device="cuda")

    def step():
        cycles = [[] for _ in range(2000)]
        for each in cycles:
            each.append(each)
        return torch.ones(3, device="cuda")

    stream = torch.cuda.Stream()
    for _ in range(5):
        abandon()
        replay = captured.capture(step, lambda: stream)
        assert replay().tolist() == [1, 1, 1]
