"""Models with sliding windows decode in attnplug's loop, with transformers' tokens and windows."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.models import captured, decode_loop
from attnplug.models.decode_loop import DecodeLoop
from attnplug.models.generate import LOOP
from attnplug.models.loop_calls import unserved_model
from attnplug.models.names import CACHE
from attnplug.models.sliding import SlidingLayer, roll_in, stepping

KINDS = ["sliding_attention", "full_attention"]
SHAPE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=64,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
    eos_token_id=None, layer_types=KINDS,
)  # fmt: skip
FAMILIES = {
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        dict(attn_logit_softcapping=5.0, query_pre_attn_scalar=64, attn_implementation="eager"),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        dict(
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
}
# Shorter than every prompt of rows without padding, filled while it decodes, and never filled.
WINDOWS = [8, 30, 90]
GATHER = "gather(k=16, block=16, sink=1, local=2, min_tokens=0)"


def model_of(family: str, window: int, device: str = "cpu"):
    kind, config, options = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config(**(SHAPE | options), sliding_window=window)).eval().to(device)
    model.generation_config.eos_token_id = None
    return model


def turns(model, *, padded: bool, many: int = 2, **options):
    """Sequences of turns on one cache, the first with rows padded by 5 and 14 tokens."""
    ids = torch.randint(41, 97, (3, 24), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :5], mask[2, :14] = 0, 0
    ids, mask, cache, found = ids.to(model.device), mask.to(model.device), None, []
    for _ in range(many):
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=18, do_sample=False,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        cache = out.past_key_values
        found.append(out.sequences)
        ids = torch.cat([out.sequences, ids[:, :7].flip(1)], 1)
        mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], 1)
    return found, cache


@pytest.mark.parametrize("policy", ["dense", GATHER], ids=["dense", "gather"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_windows_are_stocks(family, window, padded, policy, device):
    model = model_of(family, window, device)
    wanted, _ = turns(model, padded=padded, disable_compile=True)
    with attnplug.applied(model, policy):
        found, cache = turns(model, padded=padded, disable_compile=True)
        assert attnplug.report(model).loop == ""
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    layer = cache.layers[0]
    assert isinstance(layer, SlidingLayer) and not layer.counts_on_device
    assert layer.get_seq_length() == found[-1].shape[1] - 1


@pytest.mark.parametrize("window", WINDOWS)
def test_compiled_steps_run_past_the_end_of_a_window_that_nobody_sees_again(window, monkeypatch):
    monkeypatch.setitem(decode_loop.LAG, "cpu", 3)
    ends = list(range(5, 40, 3))
    config = CompileConfig(mode=None, backend="eager", fullgraph=True)
    config._compile_all_devices = True
    model = model_of("gemma3", window)
    ids = torch.randint(41, 97, (2, 24), generator=torch.Generator().manual_seed(3))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, eos_token_id=ends)
    wanted = model.generate(ids, do_sample=False, **options)
    attnplug.apply(model, "dense")
    assert torch.equal(model.generate(ids, compile_config=config, **options), wanted)
    kept = model.generate(ids, compile_config=config, return_dict_in_generate=True, **options)
    assert torch.equal(kept.sequences, wanted)
    assert kept.past_key_values.layers[0].get_seq_length() == wanted.shape[1] - 1


def test_one_compilation_serves_filling_and_full_windows():
    torch._dynamo.reset()
    config = CompileConfig(mode=None, backend="eager", fullgraph=True)
    config._compile_all_devices = True
    model = attnplug.apply(model_of("gemma3", 30), "dense")
    for tokens in (40, 60, 33):
        ids = torch.full((2, tokens), 7)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 40):
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, compile_config=config
            )
        assert attnplug.report(model).loop == ""


@pytest.mark.parametrize("tokens", [0, 3, 8, 11])
def test_a_window_takes_what_transformers_window_takes(tokens):
    draw = torch.Generator().manual_seed(tokens)
    stock = StaticSlidingWindowLayer(max_cache_len=64, sliding_window=8)
    ours = SlidingLayer(max_cache_len=64, sliding_window=8)
    first = torch.randn(2, 2, tokens, 4, generator=draw)
    for layer in (stock, ours):
        layer.update(first, -first)
    with stepping([ours]):
        for _ in range(12):
            new = torch.randn(2, 2, 1, 4, generator=draw)
            for one, other in zip(ours.update(new, -new), stock.update(new, -new), strict=True):
                assert torch.equal(one, other)


def test_a_full_window_forgets_its_first():
    window, held = torch.tensor([[1.0, 2.0, 3.0, 0.0]]), torch.tensor(3)
    for number in (4, 5):
        roll_in(window, torch.tensor([[float(number)]]), held, 1)
        held = held + 1
    assert window.tolist() == [[2.0, 3.0, 4.0, 5.0]]


def test_a_model_with_one_mask_for_all_layers_keeps_the_stock_loop():
    model = model_of("gemma3", 8)
    assert unserved_model(model, ["sliding", "full"]) == ""
    model.config.layer_types = None
    assert "one mask for all of its layers" in unserved_model(model, ["sliding", "full"])


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("backend", ["inductor", "cudagraphs"])
@pytest.mark.parametrize("window", WINDOWS)
def test_captured_windows_give_the_tokens_of_those_that_are_not(window, backend, padded):
    model = attnplug.apply(model_of("gemma3", window, "cuda"), GATHER)
    wanted, _ = turns(model, padded=padded, disable_compile=True)
    config = CompileConfig(backend=backend)
    found, _ = turns(model, padded=padded, compile_config=config)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    loop = vars(model)[LOOP]
    assert isinstance(loop, DecodeLoop) and attnplug.report(model).loop == ""
    if backend == "cudagraphs":
        assert isinstance(loop.step, captured.CapturedStep) and loop.step.replay is not None


@pytest.mark.parametrize("window", WINDOWS)
def test_the_cache_of_an_interrupted_call_knows_its_tokens(window):
    """Ctrl-C between two steps, and another call with the cache."""
    model = model_of("gemma3", window)
    ids = torch.randint(41, 97, (2, 24), generator=torch.Generator().manual_seed(2))
    options = dict(max_new_tokens=12, do_sample=False)
    tokens = model.generate(ids, **options)
    attnplug.apply(model, GATHER)
    cache = model.generate(
        ids[:, :20], return_dict_in_generate=True, **options | dict(max_new_tokens=1)
    )[CACHE]
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt

    hook = model.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **{CACHE: cache}, **options)
    hook.remove()
    assert [int(cache.get_seq_length(layer)) for layer in (0, 1)] == [28, 28]
    again = torch.cat([tokens[:, :28], ids[:, :3]], 1)
    found = model.generate(again, **{CACHE: cache}, **options)
    attnplug.remove(model)
    assert torch.equal(found, model.generate(again, **options))
