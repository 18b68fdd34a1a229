"""Projections of one input decode as one product on views of one buffer: the same model, tokens and
memory, wherever its weights go."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
import transformers
from fuse_cases import FAMILIES, WHOLE, family, layer_of, memory_of, tokens_of
from torch import nn
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.streamers import BaseStreamer

import attnplug
from attnplug.models.fuse import Fusion
from attnplug.testing.policy import tiny_model


def compiling(**options) -> CompileConfig:
    config = CompileConfig(mode=None, fullgraph=True, **options)
    config._compile_all_devices = True
    return config


COUNTS: list[int] = []  # matrix products of each graph


def counting(graph, inputs):
    """A backend that counts matrix products and runs a graph as it is. Nothing may be read past the
    end of an input: inductor times kernels on inputs of its own."""
    targets = [node.target for node in graph.graph.nodes]
    assert "as_strided" not in targets and torch.as_strided not in targets
    COUNTS.append(targets.count(torch._C._nn.linear))
    return graph


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_decode_gives_the_models_tokens_with_fewer_products(name, device):
    model = family(name, device)
    before, memory = copy.deepcopy(model.state_dict()), memory_of(model)
    wanted = tokens_of(model)
    COUNTS.clear()
    with attnplug.applied(model, "dense", fuse=True):
        assert memory_of(model) == memory
        assert tokens_of(model) == wanted
        assert tokens_of(model, compile_config=compiling(backend=counting)) == wanted
        report = attnplug.report(model)
        assert report.loop == "" and report.fused == WHOLE and WHOLE in str(report)
        assert COUNTS == [2 * 4 + 1]  # qkv, output, gate and up, down; the head
        with torch.no_grad():  # under another's compilation nothing is fused, or wrong
            ids = torch.full((1, 9), 7, device=device)
            compiled = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
            assert torch.equal(compiled, model(ids).logits)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert memory_of(model) == memory
    alone = (p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert all(alone) and tokens_of(model) == wanted


def test_parameters_stay_the_same_objects_and_train_after_remove():
    model = tiny_model()
    parameters = list(model.parameters())
    attnplug.apply(model, "dense", fuse=True)
    attention = layer_of(model)
    ends = attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes
    assert attention.k_proj.weight.data_ptr() == ends
    attnplug.remove(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    stock = tiny_model()
    for each in (model, stock):
        ids = torch.arange(3, 20)[None]
        each(ids, labels=ids).loss.backward()
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_step_of_an_optimizer_is_seen():
    model, stock = tiny_model(), tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    for each in (model, stock):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(each.parameters(), lr=0.05).step()
    assert tokens_of(model) == tokens_of(stock)
    assert attnplug.report(model).fused == WHOLE


def moved_by_dtype(model):
    model.to(torch.bfloat16)
    return model.to(torch.float32)


def replaced_weights(model):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model


def rebound_data(model):
    weight = layer_of(model).k_proj.weight
    weight.data = weight.data * 2
    return model


MOVES = {
    "dtype": moved_by_dtype,
    "assign": replaced_weights,
    "data": rebound_data,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_weights_that_moved_are_read_where_they_are(move):
    model, stock = tiny_model(), move(tiny_model())
    attnplug.apply(model, "dense", fuse=True)
    config = compiling(backend="eager")
    tokens_of(model, compile_config=config)
    memory = memory_of(model)
    moved = move(model)
    assert tokens_of(moved, compile_config=config) == tokens_of(stock)
    assert attnplug.report(moved).fused == WHOLE
    assert memory_of(moved) == memory
    attnplug.remove(moved)
    assert tokens_of(moved) == tokens_of(stock)


def test_a_pickled_model_keeps_its_loop_and_what_it_fused():
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    read = pickle.loads(pickle.dumps(model))
    assert tokens_of(read) == tokens_of(tiny_model())
    assert attnplug.report(read).fused == WHOLE and memory_of(read) == memory_of(model)
    attnplug.remove(read)
    assert "generate" not in vars(read) and tokens_of(read) == tokens_of(tiny_model())


def test_a_replaced_generate_is_reported():
    model = attnplug.apply(tiny_model(), "dense")
    model.generate = type(model).generate.__get__(model)
    assert "apply it" in attnplug.report(model).loop


class OtherLinear(nn.Linear):
    """A linear layer of another kind, as quantized ones are."""


class Adapter(nn.Module):
    """What PEFT puts in the place of a projection."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        torch.manual_seed(5)
        self.base_layer = base_layer
        self.low = nn.Linear(base_layer.in_features, 4, bias=False)
        self.high = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.high(self.low(x))


def with_other_kind(attention):
    other = OtherLinear(64, 128, bias=False)
    other.load_state_dict(attention.k_proj.state_dict())
    attention.k_proj = other


def with_one_bias(attention):
    attention.v_proj.bias = nn.Parameter(torch.ones(128))


def with_shared_memory(attention):
    both = torch.cat([attention.k_proj.weight.data, attention.k_proj.weight.data])
    attention.k_proj.weight.data = both[:128]


def with_transposed_memory(attention):
    weight = attention.k_proj.weight
    weight.data = weight.data.t().contiguous().t()


def with_computed_weight(attention):
    nn.utils.parametrizations.weight_norm(attention.k_proj)


def with_old_weight_norm(attention):
    weight = attention.k_proj.weight.data
    del attention.k_proj.weight
    attention.k_proj.weight = weight.clone()


def with_forward(attention):
    attention.q_proj.forward = lambda x: nn.functional.linear(x, attention.q_proj.weight)


REFUSED = {
    "another kind": (with_other_kind, "a projection is a OtherLinear"),
    "parametrized": (with_computed_weight, "a projection is a ParametrizedLinear"),
    "no parameter": (with_old_weight_norm, "a weight is computed"),
    "one bias": (with_one_bias, "only some of the projections have a bias"),
    "shared": (with_shared_memory, "a weight shares its memory"),
    "strides": (with_transposed_memory, "a weight is not contiguous"),
    "forward": (with_forward, "another forward is on a projection"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_stays_as_it_is_and_says_why(change, late):
    make, why = REFUSED[change]
    model, stock = tiny_model(), tiny_model()
    make(layer_of(stock))
    options = {"compile_config": compiling(backend="eager")} if late else {}
    if not late:
        make(layer_of(model))
    attnplug.apply(model, "dense", fuse=True)
    if late:  # compiled steps have been made of the model as it was
        tokens_of(model, **options)
        make(layer_of(model))
    assert tokens_of(model, **options) == tokens_of(stock)
    report = attnplug.report(model).fused
    assert "q_proj, k_proj, v_proj in 1 layers" in report
    assert "not fused in 1 places: " in report and why in report
    attnplug.remove(model)
    assert tokens_of(model) == tokens_of(stock)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_adapters_go_about_fused_projections(late):
    model, stock = tiny_model(), tiny_model()
    COUNTS.clear()
    layer_of(stock).k_proj = Adapter(layer_of(stock).k_proj)
    if not late:
        layer_of(model).k_proj = Adapter(layer_of(model).k_proj)
    attnplug.apply(model, "dense", fuse=True)
    if late:
        tokens_of(model)
        layer_of(model).k_proj = Adapter(layer_of(model).k_proj)
    assert tokens_of(model, compile_config=compiling(backend=counting)) == tokens_of(stock)
    assert COUNTS == [2 * 4 + 1 + 2] and attnplug.report(model).fused == WHOLE


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_peft_merges_and_leaves(late):
    peft = pytest.importorskip("peft")
    model, stock = tiny_model(), tiny_model()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)
    torch.manual_seed(1)
    stock = peft.get_peft_model(stock, config)
    if late:
        attnplug.apply(model, "dense", fuse=True)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    if not late:
        attnplug.apply(model, "dense", fuse=True)
    for step in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        assert tokens_of(model) == tokens_of(stock)
        models = [getattr(each, step)() or each for each in (model, stock)]
    assert tokens_of(models[0]) == tokens_of(models[1])
    assert attnplug.report(models[0]).fused == WHOLE


def test_keys_of_another_input_are_not_taken_from_the_product():
    model, stock = tiny_model(), tiny_model()

    class Scaled(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x * 0.5)

    for each in (model, stock):
        layer_of(each).k_proj = Scaled(layer_of(each).k_proj)
    attnplug.apply(model, "dense", fuse=True)
    assert tokens_of(model) == tokens_of(stock)


def test_a_fused_model_is_saved_as_it_was(tmp_path):
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    model.save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in tiny_model().state_dict().items():
        assert torch.equal(read.state_dict()[name], value)


def test_lengths_compile_once_and_moves_do_not_compile():
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    config = compiling(backend="eager")
    tokens_of(model, compile_config=config)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (31, 40, 55):
            tokens_of(model, tokens=tokens, compile_config=config)
        tokens_of(rebound_data(model), compile_config=config)


def test_inductors_step_is_the_models():
    model = family("Qwen2")
    wanted = tokens_of(model)
    attnplug.apply(model, "dense", fuse=True)
    assert tokens_of(model, compile_config=compiling()) == wanted


def test_an_exported_model_is_not_fused():
    model = tiny_model()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        attnplug.apply(model, "dense", fuse=True)
        mask = torch.ones_like(ids)
        inputs = dict(input_ids=ids, attention_mask=mask, use_cache=False)
        exported = torch.export.export(model, (), inputs, strict=False)
        torch.testing.assert_close(exported.module()(**inputs).logits, wanted)


@contextmanager
def failing_step(model):
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    try:
        yield
    finally:
        handle.remove()


def test_a_call_that_fails_leaves_no_forward_behind():
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    with failing_step(model), pytest.raises(ZeroDivisionError):
        tokens_of(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert tokens_of(model) == tokens_of(tiny_model())


class Streamer(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


def test_report_says_where_nothing_is_fused():
    model = tiny_model()
    attnplug.apply(model, "dense", fuse=True)
    ids = torch.full((1, 9), 7)
    wanted = tiny_model().generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=4, streamer=Streamer()), wanted)
    assert attnplug.report(model).fused == "" and "streamer" in attnplug.report(model).loop
    attnplug.remove(model)
    attnplug.apply(model, "dense")
    assert attnplug.report(model).fused == ""
    sliding = family("Mistral")
    sliding.config.sliding_window = 8
    for layer in sliding.model.layers:
        layer.self_attn.sliding_window = 8
    attnplug.apply(sliding, "dense", fuse=True)
    assert "nothing is fused" in attnplug.report(sliding).fused
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in sliding.parameters())
    assert "no projections of one input" in str(Fusion.of(nn.Linear(3, 3)))
