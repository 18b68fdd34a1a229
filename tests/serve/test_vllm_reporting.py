"""What `attnplug.serve.vllm.report` says of an engine: the rows that attnplug's backend has really
served. vLLM's own engines are in test_vllm_engine.py."""

import types

import pytest
from vllm_backend_cases import NAME, Layer

from attnplug.errors import ServeError
from attnplug.serve.vllm import REPORTING, report
from attnplug.serve.vllm.reporting import Reporting

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm_cpu.sh")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
POLICY = "momo(min_tokens=64, top_k=512)+gather(min_tokens=100)"


def engine_of(*layers: Layer, names=(NAME,), extension: str = REPORTING):
    """What `report` needs of an LLM whose workers have a layer each."""
    workers = []
    for name, layer in zip(names, layers, strict=True):
        layer.config.compilation_config.static_forward_context = {name: layer.layer}
        worker = Reporting()
        worker.vllm_config = layer.config
        workers.append(worker)
    parallel = types.SimpleNamespace(worker_extension_cls=extension)
    config = types.SimpleNamespace(parallel_config=parallel)
    return types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(vllm_config=config),
        collective_rpc=lambda order: [getattr(worker, order)() for worker in workers],
    )


def test_every_row_is_counted_by_what_served_it(backend, monkeypatch):
    layer = Layer(backend, monkeypatch, POLICY)
    llm = engine_of(layer)
    found = report(llm)
    assert found.policy.startswith("momo(") and found.layers[0].name == NAME
    assert (found.layers[0].index, found.layers[0].reason) == (0, "")
    assert found.layers[0].prefill == "momo(top_k=512, min_tokens=64)"
    assert (found.last[0].prefill, found.last[0].decode) == ("", "")  # nothing came
    layer.step([(0, 0, 90)])
    layer.step([(0, 90, 91)])
    last = report(llm).last[0]
    assert last.prefill == "momo"
    reason = "gather serves rows of 100 tokens, or of 100 alone in a batch; these had up to 91"
    assert last.decode == f"dense ({reason})"
    layer.step([(0, 91, 200), (1, 0, 50)])  # a chunk of momo's, and a prompt that is too short
    layer.step([(0, 200, 201), (1, 50, 60)])  # a far step beside a chunk
    layer.step([(0, 201, 202), (1, 60, 61)], padding=2)
    last = report(llm).last[0]
    reason = (
        "momo serves chunks of 64 queries that see 64 keys; these had up to 50 and saw up to 60"
    )
    assert last.prefill == f"momo (1 of 3 chunks of prompts, else dense: {reason})"
    reason = "gather serves rows of 100 tokens, or of 100 alone in a batch; these had up to 61"
    assert last.decode == f"gather (2 of 3 rows of steps, else dense: {reason})"
    layer.step([(0, 202, 203)])
    assert str(report(llm)).endswith("\nlast call, layers 0: decode by gather")


def test_batches_that_vllm_makes_up_to_capture_are_not_counted(backend, monkeypatch):
    layer = Layer(backend, monkeypatch, POLICY)
    layer.step([(0, 0, 200)])
    build = layer.builder.build

    def capture(common_prefix_len, common):
        monkeypatch.setattr(layer.builder, "build", build)
        return layer.builder.build_for_cudagraph_capture(common)

    monkeypatch.setattr(layer.builder, "build", capture)
    layer.step([(0, 200, 201)])
    assert report(engine_of(layer)).last[0].decode == ""
    layer.step([(0, 200, 201)])
    assert report(engine_of(layer)).last[0].decode == "gather"


def test_a_layer_left_to_flash_attention_says_why(backend, monkeypatch):
    layer = Layer(backend, monkeypatch, {"policy": "momo+gather", "layers": {"0": "dense"}})
    llm = engine_of(layer)
    layer.step([(0, 0, 90)])
    layer.step([(0, 90, 91)])
    assert (report(llm).last[0].prefill, report(llm).layers[0].decode) == ("dense", "dense")
    other = Layer(backend, monkeypatch, "gather")
    other.step([(0, 0, 90)])
    other.step([(0, 90, 91)])
    found = report(engine_of(other))
    why = found.layers[0].reason  # requests have up to 512 tokens here
    assert "requests have up to 512" in why
    assert found.last[0].decode == f"dense ({why})"


def test_ranks_that_agree_are_told_once_and_others_each(backend, monkeypatch):
    first, second = (Layer(backend, monkeypatch, POLICY) for _ in range(2))
    llm = engine_of(first, second, names=(NAME, NAME))
    for layer in (first, second):
        layer.step([(0, 0, 90)])
    assert report(llm).last[0].prefill == "momo"
    first.step([(0, 90, 180)])
    second.step([(1, 0, 50)])
    prefill = report(llm).last[0].prefill
    assert prefill.startswith("momo | dense (momo serves chunks of 64")
    pipeline = engine_of(first, second, names=("model.layers.1.attn", "model.layers.0.attn"))
    assert [layer.index for layer in report(pipeline).layers] == [0, 1]


@pytest.mark.parametrize("extension", ["", "types.SimpleNamespace"])
def test_an_engine_without_the_extension_is_told_how_to_start(extension, backend, monkeypatch):
    llm = engine_of(Layer(backend, monkeypatch, POLICY), extension=extension)
    with pytest.raises(ServeError, match=f"worker_extension_cls='{REPORTING}'"):
        report(llm)


def test_an_engine_without_the_backend_is_told(backend, monkeypatch):
    layer = Layer(backend, monkeypatch, POLICY)
    layer.layer.impl = object()
    with pytest.raises(ServeError, match="no layer has attnplug's backend"):
        report(engine_of(layer))
