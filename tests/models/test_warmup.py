"""warm compiles what generate needs and leaves no other trace."""

import pytest
import torch
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug import Gather, Sketch
from attnplug.testing.policy import tiny_model


def compiling() -> CompileConfig:
    config = CompileConfig(mode=None, backend="eager", fullgraph=True)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("padded", [False, True])
def test_no_call_compiles_after_warm(padded, capsys):
    torch._dynamo.reset()
    model = attnplug.apply(tiny_model(), "dense")
    options = dict(compile_config=compiling())
    state, before = torch.get_rng_state(), set(vars(model))
    seconds = attnplug.warm(model, lengths=[70, 90], padded=padded, **options)
    assert list(seconds) == [70, 90] and min(seconds.values()) > 0
    assert "70 tokens: ready" in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), state)
    assert before >= {name for name in vars(model) if "cache" in name}  # later ones stay short
    ids = torch.randint(2, 97, (1, 130))
    mask = torch.ones_like(ids)
    mask[0, : 9 * padded] = 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        model.generate(ids, attention_mask=mask, max_new_tokens=5, **options)
    assert attnplug.report(model).loop == ""


@pytest.mark.parametrize("policy", [Gather(k=2, sink=1, local=2), Sketch(k=8)], ids=str)
def test_a_method_compiles_no_third_time_between_its_limits(policy, monkeypatch):
    """One length below and one above the crossover serve all: 200 is past what a row costs, and
    dense all the same."""
    torch._dynamo.reset()
    monkeypatch.setattr(type(policy), "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(type(policy), "measured_row_crossover", lambda *_: 110)
    model = attnplug.apply(tiny_model(), policy)
    options = dict(compile_config=compiling())
    attnplug.warm(model, lengths=[60, 450], **options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (80, 200, 300, 500):
        model.generate(torch.randint(2, 97, (1, length)), max_new_tokens=5, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_ranks_with_unlike_random_states_warm_with_the_same_prompts(monkeypatch):
    """Else one might end before another, which would wait for it."""
    model, seen = attnplug.apply(tiny_model(), "dense"), []
    monkeypatch.setattr(model, "generate", lambda ids, **_: seen.append(ids))
    for rank in range(2):
        torch.manual_seed(rank)
        attnplug.warm(model, lengths=[70, 90], batch=2)
    assert [tuple(ids.shape) for ids in seen] == 2 * [(2, 70), (2, 90)]
    assert all(torch.equal(one, other) for one, other in zip(seen[:2], seen[2:], strict=True))


def test_a_length_that_the_model_does_not_read_is_told():
    model = attnplug.apply(tiny_model(), "dense")
    model.config.max_position_embeddings = 60
    with pytest.warns(RuntimeWarning, match="warm: 61 tokens are more than the 60 that this model"):
        attnplug.warm(model, lengths=[8, 61])


def test_bad_arguments_are_named():
    model = tiny_model()
    with pytest.raises(attnplug.NotAppliedError):
        attnplug.warm(model, lengths=[8])
    attnplug.apply(model, "dense")
    with pytest.raises(attnplug.ArgumentError, match="lengths=0"):
        attnplug.warm(model, lengths=[0])
    with pytest.raises(attnplug.ArgumentError, match="batch=True"):
        attnplug.warm(model, lengths=[8], batch=True)
    with pytest.raises(attnplug.ArgumentError, match="lengths=8, needs a list"):
        attnplug.warm(model, lengths=8)
    with pytest.raises(attnplug.ArgumentError, match="lengths=1"):
        attnplug.warm(model, lengths=[1], padded=True)
