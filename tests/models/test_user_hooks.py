"""Forward hooks run at every step, whenever they came, and whatever steps were compiled before."""

import functools

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from test_regional import as_it_is, compiling, model_of, tokens_of
from torch.nn.modules.module import register_module_forward_hook

import attnplug
from attnplug.models import regional
from attnplug.models.user_hooks import user_hooks

NEW = 12


@pytest.fixture(autouse=True)
def uncompiled_pieces(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(regional, "_compile", as_it_is)


def plain(model) -> list[list[int]]:
    return tokens_of(model, new=NEW, compile_config=compiling())


class Steer(ModelHook):
    def post_forward(self, module, output):
        return output + push(output)


def push(output: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape[-1], generator=generator).to(output) * 3


def steer_output(model):
    return model.model.layers[0].register_forward_hook(lambda module, args, out: out + push(out))


def steer_input(model):
    def before(scale, module, args):
        return (args[0] + scale * push(args[0]), *args[1:])

    return model.model.layers[1].register_forward_pre_hook(functools.partial(before, 1.0))


def forbid(model):
    def filtered(module, args, logits):
        return logits.index_fill(-1, torch.arange(50, device=logits.device), -torch.inf)

    return model.lm_head.register_forward_hook(filtered)


def steer_keys(model):
    """On a projection that steps fuse on a GPU."""
    return model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, a, out: -out)


def steer_all_norms(model):
    kind = type(model.model.norm)
    return register_module_forward_hook(lambda m, a, out: 2 * out if type(m) is kind else out)


def steer_by_accelerate(model):
    add_hook_to_module(model.model.layers[0].mlp, Steer())

    class Handle:
        def remove(self):
            layer = model.model.layers[0].mlp
            layer.forward = layer._old_forward
            del layer._hf_hook, layer._old_forward

    return Handle()


KINDS = [steer_output, steer_input, forbid, steer_keys, steer_all_norms, steer_by_accelerate]


@pytest.mark.parametrize("hook", KINDS)
def test_hooks_that_come_and_go_give_the_tokens_of_stock(hook, device):
    stock = model_of(device)
    wanted = tokens_of(stock, new=NEW)
    handle = hook(stock)
    changed = tokens_of(stock, new=NEW)
    handle.remove()
    assert changed != wanted

    model = attnplug.apply(model_of(device), "dense")
    assert plain(model) == wanted  # compiled
    handle = hook(model)
    try:
        assert plain(model) == changed
        assert "a forward hook, which runs at every step" in attnplug.report(model).steps
    finally:
        handle.remove()
    assert plain(model) == wanted and attnplug.report(model).steps == ""


def test_a_hook_that_records_sees_every_step(device):
    model = attnplug.apply(model_of(device), "dense")
    wanted = plain(model)
    seen = []
    handle = model.model.layers[0].register_forward_hook(
        lambda m, a, out: seen.append(out.shape[1])
    )
    assert plain(model) == wanted
    handle.remove()
    assert seen == [70] + [1] * (NEW - 1)


def test_transformers_own_loop_runs_hooks_as_well(device):
    """It compiles steps by itself wherever a static cache is."""
    model = attnplug.apply(model_of(device), "dense")
    stock = model_of(device)
    options = dict(output_scores=True, return_dict_in_generate=True)

    def tokens(model) -> list[list[int]]:
        ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1)).to(device)
        found = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
        return found.sequences[:, 40:].tolist()

    assert tokens(model) == tokens(stock)
    assert "output_scores" in attnplug.report(model).loop
    for each in (model, stock):
        steer_output(each)
    assert tokens(model) == tokens(stock)


def test_hooks_of_the_libraries_do_not_count():
    model = attnplug.apply(model_of(), "dense")  # which has attnplug's own
    assert user_hooks(model) == ""
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    add_hook_to_module(model.model.layers[0].mlp, ModelHook())
    assert user_hooks(model) == ""
    add_hook_to_module(model.model.layers[0].mlp, Steer(), append=True)
    assert user_hooks(model) == "model.layers.0.mlp has a forward hook"
