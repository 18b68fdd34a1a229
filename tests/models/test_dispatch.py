"""Layers over several devices, and weights offloaded by accelerate: the tokens of one device,
accelerate's hooks untouched, and a report that says what holds where the layers compute."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from transformers import AutoModelForCausalLM

import attnplug
from attnplug.models.layers import find_attention_layers
from attnplug.testing import tiny_model

# transformers 5.17 says so of every model whose first parameter is on meta.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

GATHER = "gather(k=2, block=16, sink=1, local=2, min_tokens=0)"
POLICIES = ("dense", GATHER)
LAYERS = 4
TOKENS, NEW = 100, 6
ENDS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def tokens_of(model, policy: str = "", new: int = NEW) -> list[list[int]]:
    """What a model generates, one row of two padded on the left."""
    ids = torch.randint(2, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    options: Any = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    first = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    inputs = ids.to(first), mask.to(first)

    def generate() -> list[list[int]]:
        return model.generate(inputs[0], attention_mask=inputs[1], **options)[:, TOKENS:].tolist()

    if not policy:
        return generate()
    with attnplug.applied(model, policy):
        return generate()


def hooks_of(model) -> dict[str, Any]:
    return {n: m._hf_hook for n, m in model.named_modules() if hasattr(m, "_hf_hook")}


def partly_on_disk(model, folder):
    """Layers 1 and 2 on disk, as from_pretrained loads a model that is too large."""
    where: dict[str, Any] = dict.fromkeys((*ENDS, "model.layers.0", "model.layers.3"), "cpu")
    where |= {f"model.layers.{i}": "disk" for i in (1, 2)}
    model.save_pretrained(folder / "saved")
    return AutoModelForCausalLM.from_pretrained(
        folder / "saved", dtype=torch.float32, device_map=where, offload_folder=folder / "off"
    ).eval()


WAYS = {
    "partly on disk": partly_on_disk,
    "in host memory": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "all on disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
}


@pytest.fixture(scope="module")
def wanted():
    model = tiny_model(num_hidden_layers=LAYERS)
    return {policy: tokens_of(model, policy) for policy in ("", *POLICIES)}


@pytest.mark.filterwarnings("ignore:.*:UserWarning:accelerate")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_offloaded_layers_give_the_same_tokens(way, wanted, tmp_path):
    assert wanted["dense"] == wanted[""] != wanted[GATHER]
    model = way(tiny_model(num_hidden_layers=LAYERS), tmp_path)
    before = hooks_of(model)
    assert before and next(model.model.layers[1].self_attn.parameters()).is_meta
    for policy in POLICIES:
        assert tokens_of(model, policy) == wanted[policy]
        assert tokens_of(model, policy, new=1) == [row[:1] for row in wanted[policy]]
    after = hooks_of(model)
    assert after.keys() == before.keys()
    assert all(after[name] is hook for name, hook in before.items())
    assert tokens_of(model) == wanted[""]


def test_a_model_may_be_offloaded_after_apply(wanted):
    model = attnplug.apply(tiny_model(num_hidden_layers=LAYERS), GATHER)
    cpu_offload(model, execution_device="cpu")
    assert tokens_of(model) == wanted[GATHER]
    remove_hook_from_submodules(model)
    for name, parameter in tiny_model(num_hidden_layers=LAYERS).named_parameters():
        owner, _, short = name.rpartition(".")
        model.get_submodule(owner)._parameters[short] = parameter
    assert tokens_of(model) == wanted[GATHER]  # attnplug's own hooks are still there


def test_the_report_knows_where_offloaded_layers_compute():
    on_cpu = attnplug.report(attnplug.apply(tiny_model(), "momo")).layers[1].reason
    for device in ("cpu", "cuda:1", 1):
        model: Any = tiny_model()
        for layer in model.model.layers:  # as accelerate does where a GPU computes
            cpu_offload(layer, execution_device="cpu")
        for hook in hooks_of(model).values():
            for each in getattr(hook, "hooks", [hook]):
                each.execution_device = device
        kind = "cpu" if device == "cpu" else "cuda"
        assert {layer.shape.device.type for layer in find_attention_layers(model)} == {kind}
        note = attnplug.report(attnplug.apply(model, "momo")).layers[1].reason
        assert (note == on_cpu) == (kind == "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_on_two_gpus_give_the_tokens_of_one(policy):
    one = tokens_of(tiny_model(num_hidden_layers=LAYERS, device="cuda"), policy)
    where: dict[str, Any] = dict.fromkeys((*ENDS, "model.layers.0", "model.layers.1"), 0)
    where |= dict.fromkeys(("model.layers.2", "model.layers.3", "model.norm", "lm_head"), 1)
    model = dispatch_model(tiny_model(num_hidden_layers=LAYERS), device_map=where)
    before = hooks_of(model)
    with attnplug.applied(model, policy):
        devices = {layer.shape.device for layer in find_attention_layers(model)}
        assert devices == {torch.device("cuda", 0), torch.device("cuda", 1)}
    assert tokens_of(model, policy) == one
    assert all(hooks_of(model)[name] is hook for name, hook in before.items())
