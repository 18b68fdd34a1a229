"""A method in the place of a model's own survives copies and has the signature it stands for, and
leaves what others have put there."""

import copy
import inspect
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from attnplug.models.instance_method import (
    PUT,
    is_replaced,
    put_forward,
    put_method,
    stock_method,
    take_methods,
)


class Model:
    def __init__(self, name):
        self.name = name

    def call(self, x, *, scale=1):
        return self.name, x * scale


def doubled(model, *args, **kwargs):
    return type(model).call(model, *args, **kwargs) * 2


@pytest.fixture
def model():
    model = Model("a")
    put_method(model, "call", doubled)
    return model


def test_it_is_called_with_its_model(model):
    assert model.call(3, scale=2) == ("a", 6) * 2
    assert Model("b").call(3) == ("b", 3)


def test_it_has_the_signature_of_the_method(model):
    assert inspect.signature(model.call) == inspect.signature(Model("b").call)
    assert model.call.__name__ == "call"


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_its_own(model, twin_of):
    twin = twin_of(model)
    twin.name = "twin"
    assert twin.call(1) == ("twin", 1) * 2 and model.call(1) == ("a", 1) * 2
    assert twin.call.model is twin
    del twin.call
    assert twin.call(1) == ("twin", 1)


def test_what_it_has_replaced_is_called_and_comes_back():
    model = Model("a")
    model.call = mine = lambda x: ("mine", x)
    put_method(model, "call", lambda model, x: stock_method(model, "call")(x * 2))
    assert model.call(3) == ("mine", 6) and inspect.signature(model.call) == inspect.signature(mine)
    assert is_replaced(model, "call")
    take_methods(model, "call")
    assert vars(model) == {"name": "a", "call": mine}


def test_it_is_taken_off_under_a_wrapper(model):
    wrapped = model.call
    model.call = mine = lambda x: wrapped(x)
    assert is_replaced(model, "call") and not is_replaced(model, "call", since=False)
    assert model.call(1) == ("a", 1) * 2
    take_methods(model, "call")
    assert vars(model) == {"name": "a", "call": mine} and model.call(1) == ("a", 1)


def test_one_may_stand_upon_another(model):
    first = model.call
    put_method(model, "call", lambda model, x: stock_method(model, "call")(x) * 2)
    assert model.call(1) == ("a", 1) * 4
    take_methods(model, "call")
    assert model.call is first and model.call(1) == ("a", 1) * 2 and not is_replaced(model, "call")
    take_methods(model, "call")
    assert vars(model) == {"name": "a"}


class Layer(torch.nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("hooked", ["never", "before", "since", "before only"])
def test_a_forward_comes_back_wherever_accelerate_has_moved_it(hooked):
    layer = Layer()
    if hooked.startswith("before"):
        add_hook_to_module(layer, ModelHook())
    put_forward(layer, lambda layer, x: x + 1)
    if hooked == "since":
        add_hook_to_module(layer, ModelHook())
    assert layer(1) == 2
    if hooked == "before only":
        remove_hook_from_module(layer)
        assert layer(1) == 2
    take_methods(layer)
    assert layer(1) == 1 and PUT not in vars(layer)
    remove_hook_from_module(layer)
    assert layer(1) == 1


def test_a_forward_of_somebody_else_stays():
    layer = Layer()
    put_forward(layer, lambda layer, x: x + 1)
    ours = layer.forward
    layer.forward = mine = lambda x: ours(x) * 10
    take_methods(layer)
    assert vars(layer)["forward"] is mine and layer(1) == 10
