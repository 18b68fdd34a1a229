"""A method in the place of a model's own survives copies and has the signature it stands for."""

import copy
import inspect
import pickle

import pytest

from attnplug.models.instance_method import put_method


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
