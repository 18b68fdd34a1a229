"""What a vLLM server may be asked for, and what it is told where it may not."""

import importlib.metadata
import logging
import types

import pytest

from attnplug import Gather, Gvr, Momo, PolicyError
from attnplug.errors import ServeError
from attnplug.policies import names
from attnplug.serve import vllm as plugin
from attnplug.serve.vllm.options import (
    KEY,
    VARIABLE,
    Phases,
    check_server,
    phases_of,
    policy_of,
    read_policy,
)


def server(**changes) -> types.SimpleNamespace:
    """What attnplug reads of vLLM's configuration; `changes` name fields by part__field."""
    parts = dict(
        parallel_config=dict(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=dict(cache_dtype="auto"),
        model_config=dict(use_mla=False),
    )
    whole = dict(additional_config={}, kv_transfer_config=None, speculative_config=None)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            whole[part] = value
    made = {name: types.SimpleNamespace(**fields) for name, fields in parts.items()}
    return types.SimpleNamespace(**made, **whole)


def test_a_string_is_the_policy_of_all_layers():
    policy = policy_of(server(additional_config={KEY: "momo(top_k=64)+gather(k=32, block=128)"}))
    assert policy.of_layer(0) == policy.of_layer(99)
    assert policy.of_layer(0) == Phases(Momo(top_k=64), Gather(k=32, block=128))
    assert policy.decode == Gather(k=32, block=128)


def test_spans_of_layers_have_their_own():
    option = {"policy": "momo+gather", "layers": {"0-1": "dense", "7": "momo"}}
    policy = read_policy(option)
    assert [policy.of_layer(i).sparse for i in (0, 1, 2, 7)] == [False, False, True, True]
    assert policy.of_layer(7) == Phases(Momo(), None)
    assert policy.decode == Gather()


def test_dense_is_a_policy_without_phases():
    assert phases_of("dense") == Phases() and not phases_of("dense").sparse
    assert phases_of("momo") == Phases(prefill=Momo())
    assert phases_of("gather") == Phases(decode=Gather())
    assert phases_of("momo+gvr(k=512)") == Phases(Momo(), Gvr(k=512))


def test_the_variable_serves_where_no_option_is_given(monkeypatch):
    monkeypatch.setenv(VARIABLE, "momo")
    assert policy_of(server(additional_config=None)).whole == Phases(prefill=Momo())
    assert policy_of(server(additional_config={KEY: "gather"})).whole == Phases(decode=Gather())


def test_no_policy_is_an_error_with_an_example(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ServeError, match=r'--additional-config.attnplug "momo\+gather"'):
        policy_of(server())


@pytest.mark.parametrize(
    "option, message",
    [
        (["momo"], "needs a policy, or a mapping"),
        ({"layers": {"0": "momo"}}, "needs a policy, or a mapping"),
        ({"policy": "momo", "more": 1}, "needs a policy, or a mapping"),
        ({"policy": "momo", "layers": {"*.3": "dense"}}, "needs an index or '4-7'"),
        (
            {"policy": "gather", "layers": {"0": "gather(k=32)"}},
            "different decode methods, gather and gather",
        ),
        ({"policy": "gather", "layers": {"0": "gvr"}}, "different decode methods, gather and gvr"),
        ("certified", "certified is not served; use vLLM's own quantized cache"),
        ("sketch", "sketch is not served; use gather or gvr"),
        ("auto", "use the methods by name"),
        ("momo+stream", "stream is not served; use attnplug.trace.record"),
        ("gather(kv='host')", "--kv-offloading-size"),
        ("gather(bounds='int8')", "use bounds='exact'"),
    ],
)
def test_what_pages_cannot_serve_is_refused(option, message):
    with pytest.raises(ServeError, match=message):
        read_policy(option)


@pytest.mark.parametrize("name", sorted(set(names()) - {"dense", "momo", "gather", "gvr"}))
def test_every_other_method_is_refused(name):
    with pytest.raises(ServeError, match=f"{name} is not served; use"):
        phases_of(name if name != "stream" else "dense+stream")


def test_a_policy_that_is_none_says_so():
    with pytest.raises(PolicyError, match="no method 'mumu'"):
        read_policy("mumu")


@pytest.mark.parametrize(
    "change, policy, message",
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "momo", "--tensor-parallel-size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "momo", "--tensor-parallel-size"),
        ({"kv_transfer_config": object()}, "gather", "use 'momo'"),
        ({"kv_transfer_config": object()}, "gvr", "use 'momo'"),
        ({"cache_config__cache_dtype": "fp8"}, "momo", "--kv-cache-dtype fp8"),
        ({"speculative_config": object()}, "momo", "drop --speculative-config"),
        ({"model_config__use_mla": True}, "momo", "vLLM's own MLA backends"),
    ],
)
def test_conflicting_options_are_refused(change, policy, message):
    with pytest.raises(ServeError, match=message):
        check_server(server(**change), read_policy(policy))


def test_what_does_not_conflict_starts():
    check_server(server(), read_policy("momo+gather"))
    check_server(server(cache_config__cache_dtype="bfloat16"), read_policy("momo+gather"))
    check_server(server(kv_transfer_config=object()), read_policy("momo"))


@pytest.mark.parametrize("found", ["0.20.2", "0.22.1", "0.22.1+cpu"])
def test_supported_versions(monkeypatch, found):
    monkeypatch.setattr(plugin, "version", lambda: found)
    assert plugin.unsupported() == ""


@pytest.mark.parametrize("found", ["0.20.1", "0.23.0", "0.33.0"])
def test_other_versions_are_left_alone_and_told(monkeypatch, caplog, found):
    """Nothing of vLLM is imported: there is none here, and that would raise."""
    monkeypatch.setattr(plugin, "version", lambda: found)
    with caplog.at_level(logging.WARNING, logger="vllm.attnplug"):
        plugin.register()
    assert f"vLLM {found} is not supported" in caplog.text
    assert "vllm<0.23,>=0.20.2" in caplog.text


def test_vllm_finds_the_plugin():
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    mine = [entry for entry in entries if entry.name == "attnplug"]
    if not mine:
        pytest.skip("attnplug is installed without this entry point; pip install -e . renews it")
    assert mine[0].load() is plugin.register
