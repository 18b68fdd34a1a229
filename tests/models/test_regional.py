"""Steps compiled layer by layer give the tokens of uncompiled ones from three pieces of code, and
captured ones replay only what stays where it is."""

import copy
import functools
import gc
import types
import weakref

import pytest
import torch
from torch._inductor import async_compile
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.models import captured, decode_loop, loop_calls, regional
from attnplug.models.generate import LOOP
from attnplug.testing.policy import tiny_model

GATHER = "gather(k=16, block=16, sink=1, local=2, min_tokens=0)"
POLICIES = ["dense", GATHER, "gvr(k=16, sink=2, window=8, min_tokens=0)"]
LAYERS = 4
PIECES: list[int] = []  # nodes of each piece that was compiled


def as_it_is(piece, options):
    """In inductor's place: nothing to wait for."""
    PIECES.append(len(piece.graph.nodes))
    return piece


@pytest.fixture
def pieces(monkeypatch):
    PIECES.clear()
    monkeypatch.setattr(regional, "_compile", as_it_is)
    return PIECES


def test_inductor_gets_the_options():
    seen = []

    def noted(graph):
        seen.append(graph)

    backend = functools.partial(regional.compile_by_layer, options={"pre_grad_custom_pass": noted})
    torch._dynamo.reset()
    double = torch.compile(lambda x: 2 * x, backend=backend, fullgraph=True)
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert len(seen) == 1


def model_of(device: str = "cpu", **config):
    return tiny_model(device=device, num_hidden_layers=LAYERS, **config)


def compiling(mode: str | None = None) -> CompileConfig:
    config = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return config


def tokens_of(model, *, tokens: int = 70, padded: bool = False, new: int = 12, **options):
    ids = torch.randint(3, 97, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    torch.manual_seed(5)
    inputs = dict(attention_mask=mask.to(model.device), do_sample=False)
    found = model.generate(ids.to(model.device), max_new_tokens=new, **(inputs | options))
    return found[:, tokens:].tolist()


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_share_a_piece(policy, padded, pieces):
    model = attnplug.apply(model_of(), policy)
    wanted = tokens_of(model, padded=padded, disable_compile=True)
    assert tokens_of(model, padded=padded, compile_config=compiling()) == wanted
    kinds = len(pieces)  # before, a layer, after
    assert kinds == 3 and attnplug.report(model).loop == ""
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (75, 81, 90):
            wanted = tokens_of(model, tokens=tokens, padded=padded, disable_compile=True)
            found = tokens_of(model, tokens=tokens, padded=padded, compile_config=compiling())
            assert found == wanted
    assert len(pieces) == kinds


def test_sampled_steps_are_cut_too(pieces):
    model = attnplug.apply(model_of(), "dense")
    options = dict(do_sample=True, top_k=9)
    wanted = tokens_of(model, disable_compile=True, **options)
    assert tokens_of(model, compile_config=compiling(), **options) == wanted
    assert len(pieces) == 3


def test_layers_that_differ_have_pieces_of_their_own(pieces):
    policies = {"0-1": "dense", "2-3": GATHER}
    model = attnplug.apply(model_of(), policies)
    wanted = tokens_of(model, disable_compile=True)
    assert tokens_of(model, compile_config=compiling()) == wanted
    # Before, dense, gather, after; and gather once more: the lengths of its pages have two symbols,
    # as `_compare_sizes` compares with the buffers of the first layer only.
    assert len(pieces) == 5


def test_fused_projections_are_cut_too(pieces):
    model, stock = model_of(), model_of()
    attnplug.apply(model, "dense", fuse=True)
    assert tokens_of(model, compile_config=compiling()) == tokens_of(stock)
    assert len(pieces) == 3


class Constant(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = torch.full((3,), value)

    def forward(self, x):
        return x * self.value


def test_pieces_that_differ_in_a_constant_are_not_the_same():
    """The name of an attribute is the same in both graphs, and no input."""
    one, other = (torch.fx.symbolic_trace(Constant(float(x))) for x in (1, 2))
    assert regional._key(one) == regional._key(one) != regional._key(other)


def test_inductor_compiles_the_pieces():
    model = attnplug.apply(model_of(), "dense")
    wanted = tokens_of(model, disable_compile=True)
    assert tokens_of(model, compile_config=compiling()) == wanted
    with torch._dynamo.config.patch(error_on_recompile=True):
        wanted = tokens_of(model, tokens=90, disable_compile=True)
        assert tokens_of(model, tokens=90, compile_config=compiling()) == wanted


def test_a_step_with_a_graph_break_is_compiled_whole(caplog):
    model = attnplug.apply(tiny_model(), "dense")  # inductor compiles each of its layers
    wanted = tokens_of(model)
    forward = model.model.norm.forward

    def broken(hidden):
        torch._dynamo.graph_break()
        return forward(hidden)

    model.model.norm.forward = broken
    config = CompileConfig(mode=None)
    config._compile_all_devices = True
    with caplog.at_level("WARNING", logger="attnplug"):
        assert tokens_of(model, compile_config=config) == wanted
    assert "compiled whole" in caplog.text
    assert isinstance(vars(model)[LOOP].step, regional.LayeredStep)


def test_more_kinds_of_calls_than_torch_keeps_graphs_for_are_answered(pieces, caplog):
    """Each with the tokens of uncompiled steps; the kinds that have a graph go on using it."""
    model = attnplug.apply(model_of(), "dense")
    kinds = [dict(), dict(padded=True), dict(do_sample=True), dict(do_sample=True, padded=True)]
    wanted = [tokens_of(model, **kind, disable_compile=True) for kind in kinds]

    def answers() -> list[str]:
        found = []
        for kind, tokens in zip(kinds, wanted, strict=True):
            assert tokens_of(model, **kind, compile_config=compiling()) == tokens
            found.append(attnplug.report(model).steps)
        return found

    with torch._dynamo.config.patch(recompile_limit=2):
        assert answers()[:2] == ["", ""] and "ran uncompiled" in caplog.text
        compiled = len(pieces)
        texts = answers()
        assert "calls that ran so: 4" in texts[-1] and "keeps 2 compiled kinds" in texts[-1]
        assert texts[:2] == ["", ""] and len(pieces) == compiled


def test_a_config_that_names_a_backend_gets_it(pieces):
    model = attnplug.apply(model_of(), "dense")
    config = CompileConfig(mode=None, backend="eager")
    config._compile_all_devices = True
    tokens_of(model, compile_config=config)
    assert not pieces


class Replays:
    """In the place of CUDA graphs: a capture runs nothing, and a replay runs the step, whose graph
    does not replay meanwhile."""

    def __init__(self, guarded=None):
        self.guarded, self.captures, self.replays = guarded, 0, 0

    def __call__(self, step, on):
        self.captures += 1

        def replay():
            self.replays += 1
            if self.guarded is None:
                return step()
            before, self.guarded.replay = self.guarded.outputs, None
            found = step()
            self.guarded.replay = replay
            if before is not None:  # a graph writes to where it wrote
                for old, new in zip(before, self.guarded.outputs, strict=True):
                    old.copy_(new)
                self.guarded.outputs = before
            return found

        return replay


def test_a_captured_step_replays_for_one_call(monkeypatch):
    replays = Replays()
    monkeypatch.setattr(captured, "capture", replays)
    model = attnplug.apply(model_of(), "dense")
    tokens_of(model, compile_config=(config := compiling()), new=1)
    loop = vars(model)[LOOP]
    step = loop.compiled(model, config)
    monkeypatch.setattr(step, "now", captured.CapturedStep(decode_loop.decode_step))
    cache = attnplug.make_cache(model, 256)
    options = dict(past_key_values=cache, compile_config=config)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    stock = model_of().generate(ids, max_new_tokens=9, do_sample=False)
    first = model.generate(ids, max_new_tokens=9, do_sample=False, **options)
    assert torch.equal(first, stock)
    assert (replays.captures, replays.replays) == (1, 7)  # of eight steps the first was not
    stock = model_of().generate(first, max_new_tokens=5, do_sample=False)
    again = model.generate(first, max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(again, stock)
    assert (replays.captures, replays.replays) == (2, 7 + 3)  # the same cache, another call


def test_a_guarded_step_replays_where_guards_and_inputs_are_the_same(monkeypatch):
    step = guarded()
    monkeypatch.setattr(captured, "capture", replays := Replays(step))
    model, stock = attnplug.apply(model_of(), "dense"), model_of()
    tokens_of(model, compile_config=(config := compiling()), new=1)
    monkeypatch.setattr(vars(model)[LOOP].compiled(model, config), "now", step)
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(1))

    def check(cache):
        options = dict(max_new_tokens=9, do_sample=False)
        found = model.generate(ids, past_key_values=cache, compile_config=config, **options)
        assert torch.equal(found, stock.generate(ids, **options))
        return replays.captures, replays.replays

    first = attnplug.make_cache(model, 256)
    assert check(first) == (1, 7)
    first.reset()
    assert check(first) == (1, 7 + 8)
    first.reset()
    assert check(copy.copy(first)) == (1, 7 + 8 + 8)  # another cache on the same memory
    assert check(attnplug.make_cache(model, 256)) == (2, 30)  # on memory of its own
    for each in (model, stock):  # which the guards see
        each.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    first.reset()
    assert check(first) == (3, 37)


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_what_dynamo_traced_with_does_not_keep_a_cache(backend, pieces, monkeypatch):
    collected = []
    own = types.SimpleNamespace(collect=lambda: collected.append(gc.collect()))
    monkeypatch.setattr(decode_loop, "gc", own)
    model, config = attnplug.apply(model_of(), "dense"), compiling()
    config.backend = backend
    ids = torch.arange(3, 43)[None]
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            cache = attnplug.make_cache(model, 64)
            model.generate(ids, past_key_values=cache, max_new_tokens=4, compile_config=config)
            buffers = [weakref.ref(layer.keys) for layer in cache.layers]
            del cache
            assert not any(buffer() is not None for buffer in buffers)
            assert len(collected) == 1  # the second call traces nothing
    finally:
        gc.enable()
    assert bool(pieces) == (backend == "inductor")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_processes_for_triton_start_before_the_trace(kind, monkeypatch):
    warmed = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: warmed.append(kind))
    step = decode_loop.decode_step
    regional.LayeredStep(step, CompileConfig(), torch.device(kind), {}, step)
    assert warmed == ["cuda"] * (kind == "cuda")


def test_a_step_between_leaves_a_captured_graph_its_outputs(monkeypatch):
    step = guarded()
    monkeypatch.setattr(captured, "capture", replays := Replays(step))
    model = attnplug.apply(model_of(), "dense")
    tokens_of(model, compile_config=(config := compiling()), new=1)
    monkeypatch.setattr(vars(model)[LOOP].compiled(model, config), "now", step)
    ids, cache = torch.arange(3, 43)[None], attnplug.make_cache(model, 256)

    def generate(tokens, **options):
        cache.reset()
        torch.manual_seed(1)
        options |= dict(max_new_tokens=tokens, past_key_values=cache, compile_config=config)
        return model.generate(ids, **options).tolist()

    wanted = generate(9, do_sample=True, top_k=50)
    generate(2, do_sample=False)  # one step, of another graph: nothing is captured
    assert generate(9, do_sample=True, top_k=50) == wanted
    assert replays.captures == 1


def guarded():
    code = decode_loop.decode_step.__code__.replace()
    own = types.FunctionType(code, decode_loop.decode_step.__globals__)

    def compiled(around):
        backend = functools.partial(regional.compile_by_layer, around=around)
        return torch.compile(own, backend=backend, fullgraph=True)

    return captured.GuardedStep(compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_steps_give_the_tokens_of_steps_that_are_not(policy, padded, monkeypatch):
    monkeypatch.setattr(loop_calls, "DEVICES", {"cuda"})
    model = attnplug.apply(model_of("cuda"), policy)
    for tokens in (70, 75, 90):  # the second has a cache of its own, and the same code
        for options in ({}, dict(do_sample=True, top_k=9)):
            options = options | dict(tokens=tokens, padded=padded, new=24)
            wanted = tokens_of(model, disable_compile=True, **options)
            assert tokens_of(model, compile_config=CompileConfig(), **options) == wanted
            assert attnplug.report(model).loop == ""
    step = vars(model)[LOOP].step
    assert isinstance(step.now, captured.CapturedStep) and step.now.replay is not None


@pytest.mark.gpu
def test_a_second_turn_replays_on_the_same_cache(monkeypatch):
    monkeypatch.setattr(loop_calls, "DEVICES", {"cuda"})
    model, stock = attnplug.apply(model_of("cuda"), "dense"), model_of("cuda")
    cache, ids = attnplug.make_cache(model, 256), torch.full((1, 40), 7, device="cuda")
    wanted = ids
    for _ in range(3):
        # Without a mask generate makes one, and takes some of the new tokens for padding.
        options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        ids = model.generate(ids, past_key_values=cache, **options)
        wanted = stock.generate(wanted, **options)
        assert torch.equal(ids, wanted)


def test_a_captured_step_keeps_no_cache_alive(monkeypatch):
    monkeypatch.setattr(captured, "capture", lambda step, on: int)
    model = attnplug.apply(model_of(), "dense")
    step, cache = captured.CapturedStep(lambda *arguments: None), attnplug.make_cache(model, 64)
    for _ in range(3):
        step(model, cache)
    seen = weakref.ref(cache)
    del cache
    gc.collect()
    assert seen() is None


def test_a_removed_policy_leaves_no_captured_graph(monkeypatch):
    """torch keeps every backend and what it compiled."""
    model, config = attnplug.apply(model_of(), "dense"), compiling()
    tokens_of(model, compile_config=config, new=1)
    step = guarded()
    monkeypatch.setattr(captured, "capture", Replays(step))
    monkeypatch.setattr(vars(model)[LOOP].compiled(model, config), "now", step)
    ids = torch.arange(3, 43)[None]
    model.generate(ids, max_new_tokens=9, do_sample=False, compile_config=config)
    replay = weakref.ref(step.replay)  # as long as its graph
    assert replay() is not None
    monkeypatch.undo()
    attnplug.remove(model)
    del step
    gc.collect()
    assert replay() is None
