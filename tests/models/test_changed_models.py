"""Whatever a user changes about a model between two calls, the second call is that of the changed
model, whichever steps were compiled or captured before."""

import copy

import pytest
import torch
from test_regional import as_it_is, compiling, tokens_of
from torch import nn

import attnplug
from attnplug.models import regional
from attnplug.testing.policy import tiny_model

NEW = 12


@pytest.fixture(autouse=True)
def uncompiled_pieces(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(regional, "_compile", as_it_is)


class Negative(nn.Module):
    def forward(self, x):
        return -x


def other(weight: torch.Tensor) -> torch.Tensor:
    made = (
        torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * weight.std().cpu()
    )
    return made.to(weight)


def layer(model, index: int = 0):
    return model.model.layers[index]


def rebind_data(model):
    weight = layer(model).self_attn.k_proj.weight
    weight.data = other(weight)


def assign_weights(model):
    state = {name: other(weight) for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_mlp(model):
    layer(model).mlp = Negative()


def replace_head(model):
    torch.manual_seed(3)
    made = nn.Linear(*reversed(model.lm_head.weight.shape), bias=True)
    model.lm_head = made.to(model.lm_head.weight)
    model.lm_head.weight.data = other(model.lm_head.weight)


def patch_forward(model):
    mlp = layer(model).mlp
    mlp.forward = lambda x: -type(mlp).forward(mlp, x)


def patch_class(model):
    kind = type(layer(model).mlp)
    layer(model).mlp.__class__ = type(kind.__name__, (kind,), {"forward": lambda mlp, x: -x})


def drop_layer(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def change_activation(model):
    layer(model).mlp.act_fn = nn.Tanh()


def change_scale(model):
    layer(model).self_attn.scaling *= 5


def resize(model):
    torch.manual_seed(3)
    model.resize_token_embeddings(model.config.vocab_size + 40, mean_resizing=False)


def half(model):
    model.to(torch.bfloat16)


CHANGES = [assign_weights, rebind_data, replace_mlp, replace_head, patch_forward, patch_class,
           drop_layer, change_activation, change_scale, resize, half]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_call_is_that_of_the_model_as_it_is_now(change, device):
    torch._dynamo.reset()
    model = tiny_model(device=device)
    stock = copy.deepcopy(model)
    attnplug.apply(model, "dense")
    first = tokens_of(model, new=NEW, compile_config=compiling())
    assert first == tokens_of(model, new=NEW, compile_config=compiling())
    change(model)
    change(stock)
    wanted = tokens_of(stock, new=NEW, disable_compile=True)
    assert wanted != first
    assert tokens_of(model, new=NEW, compile_config=compiling()) == wanted
