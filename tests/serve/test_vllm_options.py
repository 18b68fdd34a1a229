"""What a vLLM server may be asked for, and what it is told where it may not."""

import importlib.metadata
import logging
import types

import pytest
import torch

from attnplug import Gather, Gvr, Momo, PolicyError, Stream
from attnplug.errors import ServeError
from attnplug.policies import names
from attnplug.serve import vllm as plugin
from attnplug.serve.paged.phases import VARIABLE, Phases
from attnplug.serve.vllm.options import (
    KEY,
    REQUESTS,
    TraceOptions,
    check_server,
    phases_of,
    policy_of,
    read_policy,
)


def server(**changes) -> types.SimpleNamespace:
    """What attnplug reads of vLLM's configuration; `changes` name fields by part__field."""
    parts = dict(
        parallel_config=dict(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False
        ),
        cache_config=dict(cache_dtype="auto"),
        model_config=dict(
            dtype=torch.bfloat16,
            use_mla=False,
            runner_type="generate",
            logits_processors=[REQUESTS],
            get_total_num_hidden_layers=lambda: 8,
        ),
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
        ({"policy": "momo", "layers": {"5-3": "dense"}}, "names '5-3', needs '3-5'"),
        ({"policy": "momo", "layers": ["0-1"]}, r"layers is \['0-1'\], needs a mapping"),
        (
            {"policy": "gather", "layers": {"0": "gather(k=32)"}},
            "different decode methods, gather and gather",
        ),
        ({"policy": "gather", "layers": {"0": "gvr"}}, "different decode methods, gather and gvr"),
        ("certified", "certified is not served; use vLLM's own quantized cache"),
        ("sketch(kv='host')", "--kv-offloading-size"),
        ("sketch(bytes=16)", "codes of pages have 32 bytes, or 24 where"),
        ("sketch(tail='drop')", r"sketch\(tail='drop'\) is not served: the rest is always"),
        ("momo+sketch(audit=64)", "audits look at a cache of transformers; drop audit"),
        ({"policy": "gvr", "layers": {"0": "sketch"}}, "different decode methods, gvr and sketch"),
        ("momo+trained", "trained is not served; use vLLM's own kernels for models with an"),
        ("auto", "use the methods by name"),
        ("prefill=stream", "stream is not served; use it as what looks on, such as 'momo"),
        ("gather+stream(of='policy')", "follows the method that serves prefill"),
        (
            {"policy": "momo+stream", "layers": {"0": "momo+stream(top_k=8)"}},
            r"traced by stream and stream\(top_k=8\); one file",
        ),
        (
            {
                "policy": "momo+stream(of='policy')",
                "layers": {"0": "momo(block=32)+stream(of='policy')"},
            },
            "blocks of several sizes",
        ),
        ({"policy": "momo", "traces": {}}, "no layer is traced; use a policy that traces"),
        ({"policy": "momo+stream", "traces": {"files": 0}}, "files=0, needs an integer above 0"),
        ({"policy": "momo+stream", "traces": {"files": True}}, "files=True, needs an integer"),
        ({"policy": "momo+stream", "traces": {"megabytes": "9"}}, "megabytes='9', needs a number"),
        ({"policy": "momo+stream", "traces": {"folder": ""}}, "folder='', needs a path"),
        ({"policy": "momo+stream", "traces": {"asked": 1}}, "asked=1, needs true or false"),
        ({"policy": "momo+stream", "traces": {"fils": 3}}, "any of folder, files, megabytes, ask"),
        ({"policy": "momo+stream", "traces": "here"}, "needs a mapping with any of folder"),
        ("gather(kv='host')", "--kv-offloading-size"),
    ],
)
def test_what_pages_cannot_serve_is_refused(option, message):
    with pytest.raises(ServeError, match=message):
        read_policy(option)


SERVED = {"dense", "momo", "gather", "gvr", "sketch", "stream"}


@pytest.mark.parametrize("name", sorted(set(names()) - SERVED))
def test_every_other_method_is_refused(name):
    with pytest.raises(ServeError, match=f"{name} is not served; use"):
        phases_of(name)


def test_a_policy_may_trace():
    assert phases_of("momo+gather+stream(top_k=8)") == Phases(Momo(), Gather(), Stream(top_k=8))
    assert not phases_of("stream").sparse  # dense serves
    asked = {"policy": "gvr+stream", "layers": {"0-1": "gvr"}, "traces": {"files": 4}}
    policy = read_policy(asked)
    assert policy.trace == Stream() and policy.of_layer(1).trace is None
    assert policy.traces == TraceOptions(files=4) and policy.text == "gvr+stream"
    assert read_policy("momo").trace is None
    both = {"policy": "momo(block=32)+stream(of='policy')", "layers": {"0": "momo(block=128)"}}
    assert read_policy(both).trace == Stream(of="policy")  # the other layer is not traced


class Requests:
    """As a logits processor that was given as a class."""

    __module__, __qualname__ = REQUESTS.split(":")


@pytest.mark.parametrize("given", [[REQUESTS], ["a.b:C", REQUESTS], [Requests]])
def test_a_trace_needs_to_know_whose_a_row_is(given):
    check_server(server(model_config__logits_processors=given), read_policy("stream"))


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
        ({"cache_config__cache_dtype": "fp8_e5m2"}, "momo", "16 bits or in fp8 .e4m3.; use auto"),
        ({"cache_config__cache_dtype": "fp8"}, "gvr", "--kv-cache-dtype fp8: gvr .* use gather"),
        (
            {"cache_config__cache_dtype": "fp8", "model_config__dtype": torch.float16},
            "momo+gather",
            "--kv-cache-dtype fp8: vLLM's FlashAttention .* add --dtype bfloat16",
        ),
        ({"cache_config__cache_dtype": "fp8"}, "momo+stream", "stream looks on at keys in 16"),
        (
            {"cache_config__cache_dtype": "fp8_e4m3"},
            "gather(bounds='exact')",
            "--kv-cache-dtype fp8_e4m3: .* drop bounds='exact'",
        ),
        ({"speculative_config": object()}, "momo", "drop --speculative-config"),
        ({"model_config__use_mla": True}, "momo", "vLLM's own MLA backends"),
        ({"model_config__logits_processors": None}, "stream", f"--logits-processors {REQUESTS}"),
        ({"model_config__logits_processors": ["a:B"]}, "stream", f"add --logits-pro.* {REQUESTS}"),
        ({"model_config__runner_type": "pooling"}, "stream", "attnplug.trace.record"),
        ({"parallel_config__use_ubatching": True}, "stream", "drop --enable-dbo"),
        ({"use_v2_model_runner": True}, "stream", "set VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_conflicting_options_are_refused(change, policy, message):
    with pytest.raises(ServeError, match=message):
        check_server(server(**change), read_policy(policy))


def test_layers_that_the_model_does_not_have_are_refused():
    asked = {"policy": "momo", "layers": {"0-1": "dense", "8-9": "dense"}}
    with pytest.raises(ServeError, match="names layer 8, and the model's are 0 to 7"):
        check_server(server(), read_policy(asked))
    check_server(server(), read_policy(asked | {"layers": {"4-99": "dense"}}))


def test_the_first_span_that_names_a_layer_serves_it():
    policy = read_policy({"policy": "momo", "layers": {"0-3": "dense", "2-5": "gather"}})
    assert [policy.of_layer(i).decode for i in (2, 3, 4)] == [None, None, Gather()]


def test_what_does_not_conflict_starts():
    check_server(server(), read_policy("momo+gather"))
    for dtype in ("bfloat16", "fp8", "fp8_e4m3"):
        check_server(server(cache_config__cache_dtype=dtype), read_policy("momo+gather"))
    check_server(server(kv_transfer_config=object()), read_policy("momo"))
    check_server(server(use_v2_model_runner=True), read_policy("momo+gather"))
    check_server(server(model_config__logits_processors=None), read_policy("momo"))


@pytest.mark.parametrize("found", ["0.20.2", "0.22.1+cpu", "0.33.0"])
def test_supported_versions(monkeypatch, found):
    monkeypatch.setattr(plugin, "version", lambda: found)
    assert plugin.unsupported() == ""


@pytest.mark.parametrize("found", ["0.20.1", "0.34.0"])
def test_other_versions_are_left_alone_and_told(monkeypatch, caplog, found):
    """Nothing of vLLM is imported: there is none here, and that would raise."""
    monkeypatch.setattr(plugin, "version", lambda: found)
    with caplog.at_level(logging.WARNING, logger="vllm.attnplug"):
        plugin.register()
    assert f"vLLM {found} is not supported" in caplog.text
    assert "vllm<0.34,>=0.20.2" in caplog.text


def test_vllm_finds_the_plugin():
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    mine = [entry for entry in entries if entry.name == "attnplug"]
    if not mine:
        pytest.skip("attnplug is installed without this entry point; pip install -e . renews it")
    assert mine[0].load() is plugin.register
