"""Layers that have come with a policy of another model, and a policy that comes only half way."""

import copy
import io
import pickle
import threading

import pytest
import torch

import attnplug
from attnplug import api, trace
from attnplug.errors import AlreadyAppliedError, NotAppliedError, UnsupportedCallError
from attnplug.ledger import STATE
from attnplug.models import generate, running
from attnplug.models.hf import BINDING, bindings_of
from attnplug.models.hook import hooks_of
from attnplug.models.switch import is_switched
from attnplug.testing import tiny_model

pytestmark = pytest.mark.usefixtures("without_gradients")
IDS = torch.randint(2, 90, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


def answer(model) -> list[int]:
    return model.generate(IDS, max_new_tokens=5, do_sample=False)[0].tolist()


def traces_of(model) -> list[str]:
    """What a policy leaves on a model, if anything."""
    found = [name for name in vars(model) if "attnplug" in name]
    for name, module in model.named_modules():
        found += [f"{name}.{each}" for each in vars(module) if each == BINDING]
        found += [f"{name} {hook}" for hook in hooks_of(module)]
        if is_switched(vars(module).get("config")):
            found.append(f"{name}.config")
    return found


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    stream = io.BytesIO()
    torch.save(model, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("lives", [True, False])
def test_a_part_that_was_copied_loses_its_policy(how, lives):
    model = tiny_model()
    wanted = model.model(IDS)[0]
    attnplug.apply(model, "gather(min_tokens=0)")
    part = copied(model.model, how)
    if not lives:
        del model
    with pytest.raises(NotAppliedError, match=r"copied or taken out .* attnplug.remove takes"):
        attnplug.report(part)
    attnplug.remove(part)
    assert traces_of(part) == [] and torch.equal(part(IDS)[0], wanted)
    with pytest.raises(NotAppliedError):
        attnplug.remove(part)
    if lives:
        assert len(bindings_of(model)) == 2 and attnplug.report(model)


def test_apply_takes_the_place_of_a_copied_parts_policy():
    model = attnplug.apply(tiny_model(), "momo(min_tokens=0)+gather(min_tokens=0)")
    part = copy.deepcopy(model.model)
    attnplug.apply(part, "dense")
    assert {str(each.policy) for each in bindings_of(part).values()} == {"dense"}
    assert attnplug.report(part).policy == "dense"
    attnplug.remove(part)
    assert traces_of(part) == []


def test_a_layer_of_another_model_comes_without_its_policy():
    model, other = attnplug.apply(tiny_model(), "dense"), tiny_model()
    other.model.layers[1] = copy.deepcopy(model.model.layers[1])
    attnplug.apply(other, "gather(min_tokens=0)")
    assert {str(each.policy.decode) for each in bindings_of(other).values()} == {
        "gather(min_tokens=0)"
    }
    attnplug.remove(other)
    assert traces_of(other) == []


def test_a_layer_that_has_left_its_model_loses_its_policy_there():
    """Its config is still the model's, which keeps its policy."""
    model, other = tiny_model(), tiny_model()
    attnplug.apply(model, "dense")
    taken, model.model.layers[1] = model.model.layers[1], copy.deepcopy(model.model.layers[1])
    other.model.layers[1] = taken
    attnplug.remove(other)
    assert traces_of(other) == [] and is_switched(model.config)
    attnplug.remove(model)
    assert traces_of(model) == []


def test_a_part_of_a_model_that_has_a_policy_keeps_it():
    model = attnplug.apply(tiny_model(), "dense")
    for whole in (model, copy.deepcopy(model)):
        with pytest.raises(NotAppliedError, match="larger model"):
            attnplug.remove(whole.model)
        with pytest.raises(AlreadyAppliedError, match="larger model"):
            attnplug.apply(whole.model, "dense")
        assert len(bindings_of(whole)) == 2
    for how in ("deepcopy", "pickle", "save"):
        whole = copied(model, how)
        attnplug.remove(whole)
        assert traces_of(whole) == []


@pytest.mark.parametrize(
    ("part", "step"),
    [
        *((api, name) for name in ("_hooked", "copies_of_configs", "DecodeLoop", "bind_generate")),
        *((api, "take_compiled"), (generate, "bind_batching")),
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_policy_that_comes_half_way_goes_again(part, step, error, monkeypatch):
    model = tiny_model()
    wanted, config = answer(model), model.config
    before = {name: set(vars(module)) for name, module in model.named_modules()}

    def interrupted(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(part, step, interrupted)
        with pytest.raises(error):
            attnplug.apply(model, "momo+gather")
    assert traces_of(model) == [] and model.config is config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert answer(model) == wanted
    attnplug.remove(attnplug.apply(model, "dense"))


def test_a_config_that_cannot_be_copied_leaves_the_model_as_it_was():
    model = tiny_model()
    model.config.handle = threading.Lock()
    with pytest.raises(TypeError):
        attnplug.apply(model, "dense")
    del model.config.handle
    assert traces_of(model) == []
    attnplug.remove(attnplug.apply(model, "dense"))


def test_a_call_that_begins_while_a_policy_comes_takes_it_off_again(monkeypatch):
    model, looks = tiny_model(), []

    def computing(each):
        looks.append(STATE in vars(each))
        return looks[-1]

    monkeypatch.setattr(running, "_runs_elsewhere", computing)
    with pytest.raises(UnsupportedCallError, match="apply: a call of this model is running"):
        attnplug.apply(model, "dense")
    assert looks == [False, True] and traces_of(model) == []


def test_a_policy_does_not_go_while_it_is_recorded(tmp_path):
    model = attnplug.apply(tiny_model(), "stream")
    with trace.record(model, tmp_path / "a.trace"):
        model(IDS)
        with pytest.raises(UnsupportedCallError, match="is being recorded"):
            attnplug.remove(model)
        model(IDS)
    attnplug.remove(model)
    assert traces_of(model) == []
