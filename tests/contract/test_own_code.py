"""Where attnplug's code stands in for a model's, a model whose own was changed, for a class or for
one module, computes what it would without attnplug, or says why it cannot. Of every family whose
layers pick what they read, and of latent attention."""

import ast
import copy
import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_execution_device_hook
from every_family import KINDS
from indexed_cases import V4
from indexed_cases import models as picking_models
from latent_cases import models as latent_models
from test_indexed import ids_of, new_tokens
from test_picked_blocks import near

import attnplug
from attnplug.models import picked_entries
from attnplug.models.layers import find_attention_layers
from attnplug.models.own_code import names_of, own_code
from attnplug.models.rewritten import body_of

MADE: dict[str, Callable[[], Any]] = picking_models() | latent_models()
FAMILIES = [
    "deepseek_v32",
    "minimax_m3-0",
    "qwen4_exp-1",
    "deepseek_v4-0",
    "glm5_next-0",
    "deepseek_v3",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("glm_moe_dsa", "mistral_large4-0")),
]
TOKENS = 60
needs_v4 = pytest.mark.skipif(V4 not in KINDS, reason="this transformers has no such family")


@pytest.fixture(params=FAMILIES)
def model(request):
    if request.param not in MADE:
        pytest.skip("this transformers has no such family")
    return MADE[request.param]()


def policy_of(model) -> str:
    return "trained" if find_attention_layers(model)[0].shape.indexed else "dense"


def layer_of(model) -> Any:
    """Its first attention whose parts are all there: the second, unless that one has no indexer."""
    found = [x.module for x in find_attention_layers(model)]
    parts = [len(list(each.modules())) for each in found]
    return found[parts.index(max(parts))]


def other(value: Any) -> Any:
    """A value of the same kind that means something else."""
    if isinstance(value, tuple):
        return tuple(map(other, value))
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bool:
        return torch.ones_like(value)
    if value.is_floating_point():
        return torch.where(value.isinf(), value, -value)  # of masks
    if (value[0, 0] < 0).all():  # picks of entries, of which the first query has none
        return torch.where(value == value.amax(-1, keepdim=True), -1, value)
    return value.clamp(max=0)


def otherwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's wrapper of a function, which looks like that one."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return other(function(*args, **kwargs))

    return wrapper


def serves(model) -> bool:
    return {"trained", "dense"} & {
        layer.prefill for layer in attnplug.report(model).layers
    } != set()


# What transformers wrote: functions, by the text or the instructions that attnplug knows.


def texts_of(function: Any, *, docstring: bool) -> list[str]:
    """A function's source as it is, and with each of its statements left out."""
    found = body_of(function)
    assert found is not None
    node = copy.deepcopy(found[0])
    node.decorator_list = []
    if not docstring and ast.get_docstring(node) is not None:
        del node.body[0]
    texts, places = [ast.unparse(node)], []
    for parent in ast.walk(node):
        for name in ("body", "orelse"):
            statements = getattr(parent, name, None)
            if isinstance(statements, list):
                places += [(statements, index) for index in range(len(statements))]
    for statements, index in places:
        before = statements[index]
        if isinstance(before, ast.Expr) and isinstance(before.value, ast.Constant):
            continue  # a docstring
        statements[index] = ast.Pass()
        texts.append(ast.unparse(node))
        statements[index] = before
    return texts


@needs_v4
@pytest.mark.parametrize("name", picked_entries.KNOWN)
def test_a_function_with_another_statement_is_not_known(name, tmp_path):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as code

    kept = own_code(functools.reduce(getattr, name.split("."), code))
    texts = texts_of(kept, docstring=True)
    plain = texts_of(kept, docstring=False)[0]
    assert len(texts) > 3
    file, made = tmp_path / "code.py", []
    short = name.rpartition(".")[2]
    file.write_text(
        "".join(f"{text}\nmade.append({short})\n" for text in [*texts, plain]), encoding="utf-8"
    )
    for level in (0, 2):  # 2: as python -OO compiles it, without docstrings
        made.clear()
        compiled = compile(file.read_text(), str(file), "exec", optimize=level)
        exec(compiled, {**vars(code), "made": made})
        for function in made:
            function.__qualname__ = name
        known = [picked_entries._is_known(function) for function in made]
        assert known == [True, *[False] * (len(texts) - 1), True]


def own_functions(model) -> dict[str, tuple[Any, str]]:
    """Who has each function of a model's file that its attention layers may call, and its name:
    functions beside the classes, and methods of the attention and its parts."""
    attention = layer_of(model)
    code = sys.modules[type(attention).__module__]
    beside = ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward")
    found: dict[str, tuple[Any, str]] = {x: (code, x) for x in beside if hasattr(code, x)}
    for kind in dict.fromkeys(type(part) for part in attention.modules()):
        if kind.__module__ == code.__name__:
            for name, function in vars(kind).items():
                if isinstance(function, FunctionType) and name not in ("__init__", "extra_repr"):
                    found[f"{kind.__name__}.{name}"] = kind, name
    return found


@torch.no_grad()
def test_functions_that_somebody_has_wrapped(model, monkeypatch):
    """functools.wraps has a wrapper look like the function in it. A class that was served before
    it was changed is not served as it was."""
    ids, policy = ids_of(2, TOKENS), policy_of(model)
    plain = model(ids).logits
    with attnplug.applied(copy.deepcopy(model), policy) as served:
        assert serves(served)
        assert near(served(ids).logits, plain)
    changed = []
    for name, (owner, attribute) in own_functions(model).items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, otherwise(getattr(owner, attribute)))
            wanted = model(ids).logits
            with attnplug.applied(copy.deepcopy(model), policy) as served:
                assert near(served(ids).logits, wanted), name
            changed += [name] * (not near(wanted, plain))
    assert len(changed) >= 3, changed


# What somebody has put on one module.


def put_forward(module):
    module.forward = otherwise(module.forward)


def put_hook(module):
    module.register_forward_hook(lambda module, inputs, output: other(output))


def put_pre_hook(module):
    module.register_forward_pre_hook(
        lambda module, args, kwargs: (other(args), {x: other(y) for x, y in kwargs.items()}),
        with_kwargs=True,
    )


@pytest.mark.parametrize("change", [put_forward, put_hook])
@torch.no_grad()
def test_modules_that_somebody_has_changed(model, change):
    """Before `apply` and behind it, each part of an attention."""
    ids, policy = ids_of(2, TOKENS), policy_of(model)
    plain, changed = model(ids).logits, []
    for name, _ in layer_of(model).named_modules():
        stock = copy.deepcopy(model)
        change(layer_of(stock).get_submodule(name))
        wanted = stock(ids).logits
        changed += [name] * (not near(wanted, plain))
        before = copy.deepcopy(model)
        change(layer_of(before).get_submodule(name))
        behind = attnplug.apply(copy.deepcopy(model), policy)
        change(layer_of(behind).get_submodule(name))
        for when, served in (("before", attnplug.apply(before, policy)), ("behind", behind)):
            try:
                found = served(ids).logits
            except attnplug.UnsupportedCallError as why:
                assert "hook" in str(why) or "replaced" in str(why), (name, when)
                assert when == "behind", name
            else:
                assert near(found, wanted), (name, when)
            attnplug.remove(served)
    assert len(changed) >= 3, changed


@needs_v4
@pytest.mark.parametrize("change", [put_forward, put_hook, put_pre_hook])
@torch.no_grad()
def test_a_scorer_that_somebody_has_changed(change):
    ids, model = ids_of(2, TOKENS), MADE["deepseek_v4-0"]()
    behind = attnplug.apply(copy.deepcopy(model), "trained")
    for each in (model, behind):
        change(layer_of(each).compressor.indexer.scorer)
    wanted = model(ids).logits
    attnplug.apply(model, "trained")
    reasons = " ".join(layer.reason for layer in attnplug.report(model).layers)
    assert "DeepseekV4IndexerScorer" in reasons and not serves(model)
    assert torch.equal(model(ids).logits, wanted)
    with pytest.raises(attnplug.UnsupportedCallError, match="DeepseekV4IndexerScorer"):
        behind(ids)


METHODS = ("expand_kv", "build_attention_mask_from_topk", "indexer.build_block_mask",
           "indexer.get_pooled_states", "indexer.k_layernorm._norm")  # fmt: skip


@torch.no_grad()
def test_methods_that_somebody_has_replaced(model):
    """Of one module, before `apply`."""
    ids, policy = ids_of(2, TOKENS), policy_of(model)
    for path in METHODS:
        owner, _, method = path.rpartition(".")
        changed = copy.deepcopy(model)
        module = dict(layer_of(changed).named_modules()).get(owner)
        if not hasattr(module, method):
            continue
        setattr(module, method, otherwise(getattr(module, method)))
        wanted = changed(ids).logits
        attnplug.apply(changed, policy)
        reasons = [layer.reason for layer in attnplug.report(changed).layers]
        assert any(f"somebody has replaced the {method}" in reason for reason in reasons)
        assert near(changed(ids).logits, wanted), path


@torch.no_grad()
def test_hooks_of_accelerate_stay(model):
    """As a device map puts them in front of each module."""
    ids, policy = ids_of(2, 40), policy_of(model)
    wanted = new_tokens(model, ids)
    attach_execution_device_hook(model, "cpu")
    parts = [m for m in model.modules() if hasattr(m, "_hf_hook")]
    before = [(m.forward, m._old_forward) for m in parts]
    attnplug.apply(model, policy)
    assert serves(model)
    assert torch.equal(new_tokens(model, ids), wanted)
    attnplug.remove(model)
    assert [(m.forward, m._old_forward) for m in parts] == before
    assert torch.equal(new_tokens(model, ids), wanted)


# Subclasses in another file than transformers' own.


@torch.no_grad()
def test_a_subclass_without_a_forward_of_its_own_is_served(model):
    ids, policy = ids_of(2, TOKENS), policy_of(model)
    wanted = new_tokens(model, ids)
    attention = layer_of(model)
    attention.__class__ = type("Mine", (type(attention),), {"__module__": __name__})
    count = len(find_attention_layers(model))
    attnplug.apply(model, policy)
    layers = attnplug.report(model).layers
    assert len(layers) == count and serves(model)
    assert torch.equal(new_tokens(model, ids), wanted)


@pytest.mark.parametrize("all_layers", [False, True])
@torch.no_grad()
def test_with_a_forward_from_another_file_no_layer_is_served(model, all_layers):
    ids, policy = ids_of(2, TOKENS), policy_of(model)
    kind = type(layer_of(model))

    class Mine(kind):
        def forward(self, *args, **kwargs):
            return other(super().forward(*args, **kwargs))

    chosen = [x.module for x in find_attention_layers(model) if type(x.module) is kind]
    for attention in chosen if all_layers else [layer_of(model)]:
        attention.__class__ = Mine
    wanted, tokens = model(ids).logits, new_tokens(model, ids)
    if all_layers and len(find_all(model, Mine)) == len(find_all(model, object)):
        with pytest.raises(attnplug.UnsupportedModelError, match="attention interface"):
            attnplug.apply(model, policy)
        return
    attnplug.apply(model, policy)
    assert not any(layer.prefill == policy for layer in attnplug.report(model).layers)
    reasons = [layer.reason for layer in attnplug.report(model).layers]
    assert any("Mine has a forward of its own" in reason for reason in reasons)
    assert torch.equal(model(ids).logits, wanted)
    assert torch.equal(new_tokens(model, ids), tokens)


def find_all(model, kind: type) -> list[Any]:
    parts = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    return [m for m in parts if hasattr(m, "is_causal") and isinstance(m, kind)]


def test_whose_wrappers_are_looked_through():
    def mine(self, x):
        return x

    no_grad = torch.no_grad()(mine)
    assert own_code(no_grad) is mine
    for wrapper in (
        otherwise(mine),
        torch.autocast("cpu", torch.bfloat16)(mine),
        otherwise(no_grad),
    ):
        assert own_code(wrapper) is wrapper
    renamed = transformers_wrapper(mine)
    assert own_code(renamed) is mine
    assert own_code(transformers_wrapper(otherwise(mine))).__code__ is otherwise(mine).__code__
    wrapper, plain = body_of(own_code(otherwise(mine))), body_of(mine)
    assert wrapper is not None and plain is not None and wrapper[1] != plain[1]
    assert body_of(functools.wraps(mine)(lambda x: -x)) is None
    kind = type("Mine", (torch.nn.Module,), {"forward": renamed})
    assert names_of(kind) is globals()


def transformers_wrapper(function):
    from transformers.utils.deprecation import deprecate_kwarg

    return deprecate_kwarg("old", "99.0.0", new_name="x")(function)
