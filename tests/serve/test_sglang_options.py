"""What an SGLang server may be asked for, and what it is told where it may not."""

import importlib.metadata
import logging
import types

import pytest
import sglang_stand_in as stand_in
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Gather, Momo, PolicyError
from attnplug.errors import ServeError
from attnplug.policies import names
from attnplug.serve import sglang as plugin
from attnplug.serve.paged.phases import VARIABLE, Phases, read_policy
from attnplug.serve.paged.rows import Row
from attnplug.serve.sglang.options import (
    SGLANG,
    check_card,
    check_model,
    check_server,
    page_error,
    policy_of,
)
from attnplug.serve.sglang.rows import extend_of


def policy(text="momo+gather"):
    return read_policy(text, SGLANG)


def runner(**changes):
    """What is read of a model runner; `changes` name its fields, or those of config and pool."""
    pool = stand_in.MHATokenToKVPool(64, 16, 1, 1, 64, torch.bfloat16)
    layers = [torch.nn.Identity()] * 4
    made = stand_in.model_runner(layers, pool, None, page_size=16, context=512)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        place = {"config": made.model_config, "pool": pool}.get(part) if field else made
        setattr(place, field or name, value)
    return made


def test_the_variable_is_the_policy(monkeypatch):
    monkeypatch.setenv(VARIABLE, "momo(top_k=64)+gather(k=32)")
    found = policy_of()
    assert found.of_layer(0) == found.of_layer(99) == Phases(Momo(top_k=64), Gather(k=32))


def test_the_variable_may_be_a_mapping(monkeypatch):
    monkeypatch.setenv(VARIABLE, ' {"policy": "momo+gather", "layers": {"0-1": "dense"}}')
    found = policy_of()
    assert [found.of_layer(i).sparse for i in (0, 1, 2)] == [False, False, True]
    assert found.decode == Gather()


@pytest.mark.parametrize("value", [None, ""])
def test_no_policy_is_an_error_with_an_example(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ServeError, match=r"attnplug in SGLang: no policy .* set ATTNPLUG_POLICY=m"):
        policy_of()


@pytest.mark.parametrize(
    "value, message",
    [
        ('{"policy": "momo"', "which is no JSON"),
        ('{"layers": {}}', "ATTNPLUG_POLICY is {'layers': {}}, needs a policy"),
        ('{"policy": "momo", "traces": {}}', "needs a policy, or a mapping"),
        ('{"policy": "gather", "layers": {"0": "gather(k=32)"}}', "different decode methods"),
        ('{"policy": "momo", "layers": {"0": "gvr"}}', "gvr is not served; use gather"),
        ("momo+gvr", "gvr is not served; use gather"),
        ("momo+stream", "stream is not served; use attnplug.trace.record in transformers"),
        ("certified", "certified is not served; use --kv-cache-dtype fp8_e4m3"),
        ("gather(kv='host')", "since SGLang owns the pages"),
        ("auto", "use the methods by name"),
    ],
)
def test_what_pages_cannot_serve_is_refused(monkeypatch, value, message):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ServeError, match=message):
        policy_of()


@pytest.mark.parametrize("name", sorted(set(names()) - {"dense", "momo", "gather"}))
def test_every_other_method_is_refused(monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ServeError, match=f"{name} is not served; use"):
        policy_of()


def test_a_policy_that_is_none_says_so(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mumu")
    with pytest.raises(PolicyError, match="no method 'mumu'"):
        policy_of()


FULL = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="full"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"decode_attention_backend": "fa3"}, "prefill is attnplug's and decode fa3's"),
        ({"prefill_attention_backend": "fa3"}, "--attention-backend attnplug for both"),
        ({"speculative_algorithm": "EAGLE"}, "drop --speculative-algorithm"),
        ({"dllm_algorithm": "LowConfidence"}, "drop --dllm-algorithm"),
        ({"disaggregation_mode": "prefill"}, "drop --disaggregation-mode"),
        ({"enable_dp_attention": True}, "and --enable-dp-attention"),
        ({"attn_dp_size": 2}, "drop --attn-dp-size"),
        ({"dcp_size": 2}, "--tp-size, which splits heads"),
        ({"attn_cp_size": 2}, "--tp-size, which splits heads"),
        ({"enable_two_batch_overlap": True}, "drop --enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "and --enable-pdmux"),
        ({"enable_torch_compile": True}, "drop --enable-torch-compile"),
        ({"cuda_graph_config": FULL}, "--cuda-graph-backend-prefill breakable"),
        ({"enable_hierarchical_cache": True}, "drop --enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"enable_flexkv": True}, "--enable-flexkv"),
        ({"radix_cache_backend": "other"}, "--radix-cache-backend"),
        ({"enable_unified_memory": True}, "drop --enable-unified-memory"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"enable_hisparse": True}, "--enable-hisparse chooses keys itself"),
        ({"prefill_only_disable_kv_cache": True}, "drop --prefill-only-disable-kv-cache"),
    ],
)
def test_conflicting_options_are_refused(change, message):
    with pytest.raises(ServeError, match=message):
        check_server(stand_in.server_args(**change), policy())


def test_what_does_not_conflict_starts():
    check_server(stand_in.server_args(), policy())
    check_server(stand_in.server_args(cuda_graph_config=None), policy())
    split = dict(prefill_attention_backend="attnplug", decode_attention_backend="fa3")
    check_server(stand_in.server_args(**split), policy("momo"))
    both = dict(attention_backend=None) | dict.fromkeys(split, "attnplug")
    check_server(stand_in.server_args(**both), policy())
    check_model(runner(), policy())
    for capability in ((8, 0), (8, 9), (9, 0)):
        check_card(capability)


FP8 = {"kv_cache_dtype": torch.float8_e4m3fn, "kv_cache_dtype_str": "fp8_e4m3"}


def test_an_fp8_cache_is_served_on_hopper():
    check_model(runner(**FP8), policy())
    check_card((9, 0), torch.float8_e4m3fn)
    with pytest.raises(ServeError, match=r"fp8_e4m3: gather's .* drop bounds='exact'"):
        check_model(runner(**FP8), policy("gather(bounds='exact')"))
    for capability in ((8, 0), (8, 9)):
        with pytest.raises(ServeError, match=r"on Hopper alone.*--kv-cache-dtype auto"):
            check_card(capability, torch.float8_e4m3fn)


class HybridLinearKVPool:
    post_capture_active = False


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_mla_backend": True}, "SGLang's own MLA backends"),
        ({"config__is_encoder_decoder": True}, "the model has an encoder"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "the cache's keys are torch.float8_e5m2"),
        (FP8 | {"kv_cache_dtype_str": "mxfp8"}, "--kv-cache-dtype mxfp8.*one scale for a layer"),
        ({"token_to_kv_pool": HybridLinearKVPool()}, "the cache is a HybridLinearKVPool"),
        ({"pool__post_capture_active": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ({"config__num_hidden_layers": 2}, "names layer 3, and the model's are 0 to 1"),
    ],
)
def test_models_and_caches_that_cannot_be_served_are_refused(change, message):
    asked = {"policy": "momo", "layers": {"3-9": "dense"}}
    with pytest.raises(ServeError, match=message):
        check_model(runner(**change), policy(asked))


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_cards_without_flash_attention_3_are_refused(capability):
    with pytest.raises(ServeError, match="compute capability {}.{};".format(*capability)):
        check_card(capability)


@pytest.mark.parametrize("block, page, asked", [(16, 1, 64), (64, 96, 64), (128, 64, 128)])
def test_pages_hold_whole_blocks(block, page, asked):
    assert f"add --page-size {asked}" in str(page_error(Gather(block=block), page))
    assert page_error(Gather(block=block), 2 * block) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=6))
def test_prompts_come_first_and_steps_behind(given):
    queries, prefixes = [n for n, _ in given], [n for _, n in given]
    batch, first_step, first_token = extend_of(queries, prefixes)
    steps = queries[first_step:]
    assert steps == [1] * len(steps) and batch.steps == len(steps)
    assert first_step == 0 or queries[first_step - 1] > 1
    assert first_token == sum(queries[:first_step])
    assert batch.step_keys == tuple(n + 1 for n in prefixes[first_step:])
    assert batch.prompts == tuple(
        Row(i, sum(queries[:i]), queries[i], prefixes[i] + queries[i]) for i in range(first_step)
    )


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23", "0.5.23+cu130"])
def test_supported_versions(monkeypatch, found):
    monkeypatch.setattr(plugin, "version", lambda: found)
    assert plugin.unsupported() == ""


@pytest.mark.parametrize("found", [None, "0.5.21", "0.5.24", "0.6.0"])
def test_other_versions_are_left_alone_and_told(monkeypatch, caplog, found):
    """Nothing of SGLang is imported: there is none here, and that would raise."""
    monkeypatch.setattr(plugin, "version", lambda: found)
    with caplog.at_level(logging.WARNING, logger="sglang.attnplug"):
        plugin.register()
    told = "SGLang is not installed" if found is None else f"SGLang {found} is not supported"
    assert told in caplog.text and "sglang<0.5.24,>=0.5.22" in caplog.text


def test_sglang_finds_the_plugin():
    entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
    mine = [entry for entry in entries if entry.name == "attnplug"]
    if not mine:
        pytest.skip("attnplug is installed without this entry point; pip install -e . renews it")
    assert mine[0].load() is plugin.register
