"""Quantized weights: attention modules without parameters are served, and every policy that is
exact gives the tokens of the same quantized model without one."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import attnplug
from attnplug.models.layers import find_attention_layers
from attnplug.testing.policy import tiny_model


class BufferLinear(torch.nn.Module):
    """A linear layer as GPTQ and AWQ build theirs: integers and scales, all of them buffers."""

    def __init__(self, source: torch.nn.Linear):
        super().__init__()
        weight = source.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales).T.to(x.dtype)


def buffers_only(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.model.layers:
        for name, child in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, BufferLinear(child))
    return model


def torch_dynamic(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in wide use
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)


def torchao(name: str, **options: object) -> Callable[[torch.nn.Module], torch.nn.Module]:
    def quantize(model: torch.nn.Module) -> torch.nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, name)(**options))
        return model

    return quantize


def bitsandbytes(model: torch.nn.Module) -> torch.nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    for layer in model.model.layers:
        for name, child in list(layer.self_attn.named_children()):
            made = bnb.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.float32
            )
            made.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False)
            setattr(layer.self_attn, name, made.to("cpu"))
    return model


KINDS = {
    "buffers only": buffers_only,
    "torch.ao dynamic int8": torch_dynamic,
    "torchao int8 weights": torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4 weights": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "bitsandbytes nf4": bitsandbytes,
}


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def model(request) -> Iterator[torch.nn.Module]:
    yield request.param(tiny_model())


@torch.no_grad()
def tokens(model: torch.nn.Module) -> list[list[int]]:
    ids = torch.randint(2, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return found.tolist()


def test_a_quantized_model_gives_its_own_tokens(model, exact):
    wanted = tokens(model)
    attnplug.apply(model, exact)
    assert tokens(model) == wanted
    assert not any("(dense)" in layer.prefill for layer in attnplug.report(model).layers)
    attnplug.remove(model)
    assert tokens(model) == wanted


def test_a_model_of_buffers_reports_their_device():
    with torch.device("meta"):
        model = buffers_only(tiny_model(device="meta"))
    assert {layer.shape.device.type for layer in find_attention_layers(model)} == {"meta"}


def test_float64_is_seen_in_buffers():
    model = buffers_only(tiny_model())
    for layer in model.model.layers:
        for child in layer.self_attn.children():
            child.qweight = child.qweight.double()
    assert all("float64" in layer.reason for layer in find_attention_layers(model))
