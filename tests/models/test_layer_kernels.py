"""Kernels of a layer's norms, rotary embeddings and activations: which modules have them, and that
a call of generate is the model's own."""

import copy
import functools
import pickle

import pytest
import torch
from fuse_cases import FAMILIES, family, layer_of, tokens_of
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

import attnplug
from attnplug.models import layer_kernels
from attnplug.models.layer_kernels import GATES, KERNELS, NORMS, TURNS, LayerKernels
from attnplug.ops.common.triton import INSTALLED
from attnplug.testing import tiny_model

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="kernels are Triton's"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # numpy's, in the interpreter
]


@pytest.fixture(autouse=True)
def all_prompts_are_long(monkeypatch):
    monkeypatch.setattr(layer_kernels, "SHORT", 0)


def found_in(model) -> LayerKernels:
    kernels = LayerKernels()
    kernels.find(model)
    return kernels


def forwards_of(model):
    return [module for module in model.modules() if "forward" in vars(module)]


def test_a_llama_has_all_three():
    assert found_in(tiny_model()).counts == {NORMS: 5, TURNS: 2, GATES: 2}
    gelu = found_in(tiny_model(hidden_act="gelu_pytorch_tanh"))
    assert gelu.counts == {NORMS: 5, TURNS: 2, GATES: 2}


def test_an_unknown_activation_and_other_code_stay_the_models():
    assert found_in(tiny_model(hidden_act="relu")).counts == {NORMS: 5, TURNS: 2}

    class Own(type(tiny_model().model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + 0

    model = tiny_model()
    model.model.norm.__class__ = Own
    assert found_in(model).counts[NORMS] == 4


def test_a_replaced_rotary_function_stays(monkeypatch):
    assert found_in(family("Qwen2")).counts[TURNS] == 2
    monkeypatch.setattr(modeling_qwen2, "rotate_half", lambda x: x)
    assert TURNS not in found_in(family("Qwen2")).counts


@pytest.mark.parametrize(
    ("owner", "name"),
    [(modeling_qwen2, "apply_rotary_pos_emb"), (modeling_qwen2.Qwen2Attention, "forward")],
    ids=["rotary", "attention"],
)
def test_a_function_that_somebody_has_wrapped_stays(owner, name, monkeypatch):
    """functools.wraps has a wrapper look like the function in it."""
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(own)(lambda *args, **more: own(*args, **more)))
    assert TURNS not in found_in(family("Qwen2")).counts


def test_a_norm_that_calls_other_code_stays():
    model = family("Gemma")
    assert found_in(model).counts[NORMS] == 5

    class Own(type(model.model.norm)):
        def _norm(self, x):
            return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)

    model.model.norm.__class__ = Own
    assert found_in(model).counts[NORMS] == 4


def test_what_is_no_function_is_unknown(monkeypatch):
    """As where hub kernels have wrapped it, in Llama's file and in the family's."""
    for module in (modeling_llama, modeling_qwen2):
        monkeypatch.setattr(module, "apply_rotary_pos_emb", nn.Identity())
    assert TURNS not in found_in(family("Qwen2")).counts


def test_steps_of_models_that_kernels_serve_in_part_are_compiled(monkeypatch):
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cpu"})
    assert LayerKernels().serves(tiny_model())
    assert not LayerKernels().serves(tiny_model(hidden_act="relu"))
    mixed = tiny_model()
    mixed.model.layers[1].mlp = nn.Identity()
    assert not LayerKernels().serves(mixed)


def test_a_norm_of_nothing_runs_the_models_own_code(monkeypatch):
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(layer_kernels, "rms_norm", None)  # which nobody may call
    norm = tiny_model().model.norm
    with torch.no_grad():
        assert layer_kernels._norm(norm, False)(torch.empty(2, 0, 64)).shape == (2, 0, 64)


def test_nothing_is_left_on_the_model(device):
    model = tiny_model(device=device)
    with attnplug.applied(model, "dense"):
        tokens_of(model)
        assert not forwards_of(model)
        copied = copy.deepcopy(model)
        assert vars(copied)[KERNELS].forwards == []
        assert isinstance(pickle.loads(pickle.dumps(vars(model)[KERNELS])), LayerKernels)
    assert KERNELS not in vars(model)
    with attnplug.applied(model, "dense", fuse=False):
        assert KERNELS not in vars(model)


def test_a_call_that_records_gradients_is_the_models_own(monkeypatch):
    """Another thread may train while one generates."""
    model = tiny_model()
    kernels = found_in(model)
    ids = torch.arange(3, 30)[None]
    wanted = model(ids).logits
    for name in ("rms_norm", "rotate", "gated"):
        monkeypatch.setattr(layer_kernels, name, None)  # which nobody may call
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cpu"})
    with kernels.on(model):
        assert len(forwards_of(model)) == 9
        found = model(ids).logits
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_forward_is_made_once_and_follows_its_file(monkeypatch):
    """What somebody changes in a family's file after `apply` counts."""
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cpu"})
    model, kernels = family("Qwen2"), LayerKernels()

    def forward():
        with kernels.on(model):
            return layer_of(model).forward.__func__

    first = forward()
    assert forward() is first and first is not type(layer_of(model)).forward
    monkeypatch.setattr(modeling_qwen2, "ALL_ATTENTION_FUNCTIONS", {})
    assert forward().__globals__["ALL_ATTENTION_FUNCTIONS"] == {}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_models_own(device, name, dtype, monkeypatch):
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})  # the interpreter's, too
    called = []
    for kernel in ("rms_norm", "rotate", "gated"):
        own = getattr(layer_kernels, kernel)
        monkeypatch.setattr(
            layer_kernels,
            kernel,
            lambda *a, own=own, kernel=kernel: called.append(kernel) or own(*a),
        )
    model = family(name, device).to(dtype)
    with attnplug.applied(model, "dense", fuse=False):
        wanted = tokens_of(model)
    assert not called
    with attnplug.applied(model, "dense"):
        found = tokens_of(model)
        text = attnplug.report(model).kernels
    assert called and "a kernel each for" in text
    if dtype == torch.float32:
        assert found == wanted


def negate(module, x):
    return -x


def mlp_of(model):
    return model.model.layers[0].mlp


def subclass(module):
    module.__class__ = type("Own", (type(module),), {"forward": negate})


CHANGES = {
    "class of an mlp": lambda model, patch: subclass(mlp_of(model)),
    "class of a norm": lambda model, patch: subclass(model.model.norm),
    "code of a class": lambda model, patch: patch.setattr(type(mlp_of(model)), "forward", negate),
    "activation": lambda model, patch: setattr(mlp_of(model), "act_fn", nn.Tanh()),
    "hook on the activation": lambda model, patch: mlp_of(model).act_fn.register_forward_hook(
        lambda *call: -call[-1]
    ),
    "forward of the activation": lambda model, patch: setattr(
        mlp_of(model).act_fn, "forward", torch.tanh
    ),
    "function of the file": lambda model, patch: patch.setattr(
        modeling_llama, "rotate_half", lambda x: x
    ),
    "rotation of the file": lambda model, patch: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *rest, **options: (q, k)
    ),
}


@pytest.mark.parametrize(
    ("name", "is_before"),
    [
        *((name, False) for name in CHANGES),
        ("class of an mlp", True),
        ("function of the file", True),
    ],
)
def test_a_change_of_the_model_counts(device, name, is_before, monkeypatch):
    """Between two calls, or before `apply`."""
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})
    model = tiny_model(device=device)
    stock = copy.deepcopy(model)
    attnplug.apply(model, "dense")
    first = tokens_of(model, new=8)
    if is_before:
        attnplug.remove(model)
    for each in (model, stock):
        CHANGES[name](each, monkeypatch)
    wanted = tokens_of(stock, new=8)
    assert wanted != first
    if is_before:
        attnplug.apply(model, "dense")
    assert tokens_of(model, new=8) == wanted


@pytest.fixture
def called(monkeypatch):
    """The kernels that a prefill runs, where a CPU has kernels, too."""
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})
    seen, own = [], layer_kernels.rms_norm
    monkeypatch.setattr(layer_kernels, "rms_norm", lambda *a: seen.append(1) or own(*a))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_of_few_ops_is_the_models_own(device, dtype, monkeypatch):
    """Bit for bit on a CPU; a GPU may sum in another order."""
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})
    norm = tiny_model().model.norm.to(device, dtype)
    seeded = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64, generator=seeded))
        x = 3 * torch.randn(2, 500, 64, generator=seeded).to(device, dtype)
        found, wanted = layer_kernels._norm_of_few_ops(norm)(x), norm(x)
    if device == "cpu":
        assert torch.equal(found, wanted)
    assert (found != wanted).float().mean() < (1 if dtype == torch.float32 else 1e-3)
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_short_prompts_have_no_kernels_but_norms_of_few_ops(device, monkeypatch, called):
    few, own_norm = [], torch.nn.functional.rms_norm
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda *a: few.append(1) or own_norm(*a))
    numbers = 2 * 30 * 64  # two rows of 30 tokens, 64 numbers each
    model = tiny_model(device=device)
    wanted = tokens_of(model, new=1)
    attnplug.apply(model, "dense")
    for short, runs in ((numbers, True), (numbers + 1, False)):
        monkeypatch.setattr(layer_kernels, "SHORT", short)
        called.clear()
        few.clear()
        assert tokens_of(model, new=1) == wanted and bool(called) == runs
        assert len(few) == (0 if runs else 5)
        assert not forwards_of(model)
    monkeypatch.setattr(layer_kernels, "SHORT", numbers)
    called.clear()
    assert tokens_of(model, new=1, prefill_chunk_size=20) == wanted and not called
    embeds = model.get_input_embeddings()(torch.arange(3, 33, device=device).repeat(2, 1))
    model.generate(inputs_embeds=embeds.detach(), max_new_tokens=1)
    assert called


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_a_short_prompt_counts(device, name, monkeypatch, called):
    """It comes between a short prompt, which has its norms in few ops, and a long one."""
    model = tiny_model(device=device)
    stock = copy.deepcopy(model)
    attnplug.apply(model, "dense")
    monkeypatch.setattr(layer_kernels, "SHORT", 2 * 30 * 64)
    first = tokens_of(model, new=1)
    assert called
    assert tokens_of(model, tokens=20, new=8) == tokens_of(stock, tokens=20, new=8)
    for each in (model, stock):
        CHANGES[name](each, monkeypatch)
    for tokens in (20, 30):  # short, long
        options = dict(tokens=tokens, new=8)
        assert tokens_of(model, **options) == tokens_of(stock, **options)
    assert tokens_of(stock, new=1) != first


@torch.no_grad()
@pytest.mark.parametrize("short", [0, 1 << 20])
def test_parts_that_are_compiled_alone_keep_their_own_code(device, short, monkeypatch):
    """Also those that are compiled between two calls."""
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(layer_kernels, "SHORT", short)
    model = tiny_model(device=device)
    wanted = tokens_of(model)
    attnplug.apply(model, "dense")
    assert tokens_of(model) == wanted
    kernels: LayerKernels = vars(model)[KERNELS]
    assert kernels.counts == {NORMS: 5, TURNS: 2, GATES: 2}
    model.model.layers[1].compile(backend="eager")
    assert tokens_of(model) == wanted
    assert kernels.counts == {NORMS: 3, TURNS: 1, GATES: 1}
    model.model.layers[0].mlp.compile(backend="eager")
    assert tokens_of(model) == wanted
    assert kernels.counts == {NORMS: 3, TURNS: 1}


def test_hooks_gradients_and_compilation_see_the_model(device, monkeypatch):
    monkeypatch.setattr(layer_kernels, "DEVICES", {"cuda", "cpu"})
    model = attnplug.apply(tiny_model(device=device), "dense")
    ids = torch.arange(3, 30, device=device)[None]
    wanted = tokens_of(model)
    seen = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    assert tokens_of(model) == wanted and seen
    handle.remove()
    with torch.no_grad():
        eager = model(ids).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
    torch.testing.assert_close(compiled, eager)
    attnplug.remove(model)
    with layer_kernels.LayerKernels().on(model):
        model(ids).logits.sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    scaled = copy.deepcopy(model)
    nn.init.constant_(scaled.model.norm.weight, 3.0)
    with torch.no_grad(), layer_kernels.LayerKernels().on(scaled):
        torch.testing.assert_close(scaled(ids).logits, model(ids).logits * 3, rtol=1e-4, atol=1e-4)
