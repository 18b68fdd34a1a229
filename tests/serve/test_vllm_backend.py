"""The backend that vLLM sees, on a CPU. Batches of every mixture give what attention row by row
gives."""

import types

import pytest
import torch
from vllm_backend_cases import COVERING, HEADS, KV_HEADS, NAME, PAGE, WIDTH, Layer

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm_cpu.sh")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "policy, cache",
    [
        (COVERING, "auto"),
        ("momo(min_tokens=64, top_k=512)", "auto"),
        ("gather(min_tokens=100)", "auto"),
        ("gvr(min_tokens=100)", "auto"),
        ("dense", "auto"),
        (COVERING, "fp8"),
        ("momo(min_tokens=64, top_k=512)", "fp8"),
        ("dense", "fp8"),
    ],
)
def test_batches_of_every_mixture_give_attention(backend, monkeypatch, policy, cache):
    """In fp8 FlashAttention gets quantized queries, and the methods those that the model made."""
    layer = Layer(backend, monkeypatch, policy, cache=cache)
    # vLLM's layer asks for it when it is made.
    assert layer.impl.supports_quant_query_input == (cache == "auto")
    batches = [
        [(0, 0, 90)],  # a whole prompt, momo's
        [(0, 90, 170), (1, 0, 50)],  # a later chunk, momo's, beside a short prompt
        [(1, 50, 51), (0, 170, 230)],  # a short row's step beside a chunk
        [(0, 230, 231), (1, 51, 99)],  # a far row's step beside a prompt that is dense
        [(0, 231, 232), (1, 99, 100)],  # steps of a far row, and of one that becomes far
        [(1, 100, 101)],
    ]
    for batch in batches:
        error = (layer.step(batch) - layer.exact(batch)).abs().max()
        assert error < 2e-6, f"{batch}: {error}"  # float32's own error on these sums is 1e-6
    steps = [(0, 232, 233), (1, 101, 102)]
    assert (layer.step(steps, padding=2) - layer.exact(steps)).abs().max() < 2e-6


@pytest.mark.parametrize("policy", ["gather(k=1, sink=1, local=1", "gvr(k=9, sink=1, window=9"])
def test_small_budgets_leave_keys_out_of_far_rows_alone(backend, monkeypatch, policy):
    policy += ", min_tokens=100)"
    layer = Layer(backend, monkeypatch, policy)
    layer.step([(0, 0, 300)])
    layer.step([(1, 0, 60)])
    steps = [(0, 300, 301), (1, 60, 61)]
    error = (layer.step(steps) - layer.exact(steps)).abs().amax((1, 2))
    assert error[0] > 1e-2 and error[1] < 2e-6


def test_the_tokens_of_all_steps_decide_and_those_of_prompts_do_not(backend, monkeypatch):
    """Far alone from 400 tokens on, beside others from 100 on: what is far leaves keys out."""
    from attnplug import Gather

    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 100)
    layer = Layer(backend, monkeypatch, "gather(k=1, sink=1, local=1)")
    assert layer.builder.rule == (100, 400)

    def far(batch, padding=0):
        error = (layer.step(batch, padding) - layer.exact(batch)).abs().amax((1, 2))
        return [bool(e > 1e-2) for e in error]

    layer.step([(0, 0, 260)])
    layer.step([(1, 0, 230)])
    assert far([(0, 260, 261)]) == [False]
    assert far([(0, 261, 262), (1, 230, 231)]) == [False, False]  # they save 293 of 300
    assert far([(0, 262, 263)], padding=3) == [False]
    layer.step([(1, 231, 240)])
    assert far([(0, 263, 264), (1, 240, 241)]) == [True, True]
    assert far([(0, 264, 265), (1, 241, 242)], padding=2) == [True, True]
    mixed = far([(0, 265, 266), (1, 242, 250)])  # the prompt's 250 keys do not count
    assert not any(mixed)


def test_a_graph_of_too_few_rows_has_no_kernels_of_the_method(backend, monkeypatch):
    """No row can be far alone: 350 tokens is the most. Of two rows each can."""
    from attnplug import Gather

    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: 400)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 100)
    layer, calls, stock = Layer(backend, monkeypatch, "gather"), [], Gather.attend_rows
    layer.config.model_config.max_model_len = 350
    monkeypatch.setattr(Gather, "attend_rows", lambda *x: calls.append(len(x[1].q)) or stock(*x))
    layer.step([(0, 0, 300)])
    for batch, padding, launched in (
        ([(0, 300, 301)], 0, []),
        ([(0, 301, 302)], 1, [2]),
        ([(0, 302, 303), (1, 0, 90)], 0, []),
        ([(0, 303, 304), (1, 90, 91)], 0, [2]),
    ):
        calls.clear()
        assert (layer.step(batch, padding) - layer.exact(batch)).abs().max() < 2e-6
        assert calls == launched


def test_the_policy_shapes_the_cache(backend, monkeypatch):
    plug, long = backend.PlugBackend, 131072

    def served(policy, longest=long):
        Layer(backend, monkeypatch, policy).config.model_config.max_model_len = longest

    served("momo+gather(block=128, k=32)")
    assert plug.get_preferred_block_size(16) == 128
    assert plug.get_required_kv_cache_layout() == "HND"
    assert [size.base for size in plug.get_supported_kernel_block_sizes()] == [128]
    served("momo+gather(block=128, k=32)", 4096)  # no batch of 8 has a far row
    assert plug.get_preferred_block_size(16) == 16
    assert plug.get_required_kv_cache_layout() is None
    served("gvr", 2 * long)
    assert plug.get_preferred_block_size(16) == 16
    assert plug.get_required_kv_cache_layout() == "HND"
    served("momo")
    assert plug.get_preferred_block_size(16) == 16
    assert plug.get_required_kv_cache_layout() is None
    assert plug.supports_kv_cache_dtype("bfloat16")
    assert not plug.supports_kv_cache_dtype("fp8_e5m2") and not plug.supports_kv_cache_dtype("fp8")
    assert not plug.supports_per_head_quant_scales()
    # What FlashAttention says on Hopper.
    flash = backend.FlashAttentionBackend
    monkeypatch.setattr(flash, "supports_kv_cache_dtype", classmethod(lambda *_: True))
    assert plug.supports_kv_cache_dtype("fp8") and plug.supports_kv_cache_dtype("fp8_e4m3")
    assert not plug.supports_kv_cache_dtype("fp8_e5m2")


def test_a_gpu_whose_flash_attention_reads_no_fp8_is_named(backend, monkeypatch):
    from attnplug.errors import ServeError

    layer = Layer(backend, monkeypatch, "momo")
    layer.config.cache_config.cache_dtype = "fp8"
    flash = backend.FlashAttentionBackend
    monkeypatch.setattr(flash, "supports_kv_cache_dtype", classmethod(lambda *_: False))
    with pytest.raises(ServeError, match="FlashAttention's, which reads no fp8 cache on this GPU"):
        backend.PlugBackend.validate_configuration(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=None
        )


def test_a_checkpoints_own_fp8_cache_is_held_to_the_same(backend, monkeypatch):
    """With auto the configuration says nothing of it, and a layer is told."""
    from attnplug.errors import ServeError

    assert Layer(backend, monkeypatch, "gather", cache="fp8").impl.fp8
    layer = Layer(backend, monkeypatch, "gvr")
    assert layer.config.cache_config.cache_dtype == "auto"
    with pytest.raises(ServeError, match="--kv-cache-dtype fp8: gvr"):
        backend.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, "fp8")


@pytest.mark.parametrize("sizes, chosen", [([128], [128]), ([96, 128], [128]), ([48], [64])])
def test_a_size_that_flash_attention_insists_on_is_kept_where_it_is_whole_blocks(
    backend, monkeypatch, sizes, chosen
):
    """As FlashAttention 4 does for heads of 256; `spec` comes with newer versions of vLLM."""
    Layer(backend, monkeypatch, "gather(k=2, block=64)").config.model_config.max_model_len = 131072
    of_sizes = staticmethod(lambda *spec: sizes)
    flash = backend.FlashAttentionBackend
    monkeypatch.setattr(flash, "get_supported_kernel_block_sizes", of_sizes)
    monkeypatch.setattr(flash, "get_preferred_block_size", classmethod(lambda *_: sizes[-1]))
    for spec in ((), (object(),)):
        found = backend.PlugBackend.get_supported_kernel_block_sizes(*spec)
        assert [getattr(size, "base", size) for size in found] == chosen
    assert backend.PlugBackend.get_preferred_block_size(16) == chosen[0]


def test_layouts_are_known_where_vllm_asks_outside_of_its_configuration(backend, monkeypatch):
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout", reason="older vLLM has one layout")
    config = Layer(backend, monkeypatch, "gather").config
    config.model_config.max_model_len = 131072
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: None)
    monkeypatch.delattr(backend, "get_current_vllm_config")  # which would raise
    found = backend.PlugBackend.supported_kv_cache_layouts()
    assert found and all(type(each) is layouts.KVCacheLayout for each in found)
    # Axes are layers, blocks, heads, tokens, content: a head's page lies in one piece.
    assert {each.value[3:] for each in found} == {(3, 4)}
    config.model_config.max_model_len = 512  # no batch has a far row
    assert backend.PlugBackend.supported_kv_cache_layouts() is None


# What vLLM 0.20.2 to 0.33.0 asks a backend whether it can; False is said of the first line.
SAYS_NO = {"batch_invariance", "mm_prefix", "rswa", "kv_cache_update_bypass", "dcp"}
SAYS_NO |= {"per_head_quant_scales"}
ASKED = SAYS_NO | set(
    "alibi_sqrt attn_type block_size combination compute_capability dtype head_size kv_cache_dtype "
    "non_causal non_causal_dcp pcp per_head_quant_scales sink sliding_window kv_connector "
    "device_cpu_query_lens_mismatch".split()
)


def test_it_says_what_it_cannot_do(backend):
    plug = backend.PlugBackend
    asked = {name.removeprefix("supports_") for name in dir(plug) if name.startswith("supports_")}
    assert asked <= ASKED, "vLLM asks something new: read what FlashAttention's yes would mean here"
    for name in asked & SAYS_NO:
        answer = getattr(plug, f"supports_{name}")
        assert (answer() if callable(answer) else answer) is False
    # vLLM then refuses decode context parallelism.
    assert not backend.PlugImpl.supports_dcp and not backend.PlugImpl.can_return_lse_for_decode


def test_profiling_runs_every_method_once(backend, monkeypatch):
    layer = Layer(backend, monkeypatch, COVERING)
    layer.config.compilation_config.static_forward_context[NAME] = layer.layer
    served, called = layer.impl.served(NAME, torch.device("cpu")), []
    monkeypatch.setattr(served, "warm_prompts", lambda *a, **o: called.append(("prompts", a, o)))
    monkeypatch.setattr(served, "warm_steps", lambda *a, **o: called.append(("steps", a, o)))
    empty, out = torch.tensor([]), torch.full((4, HEADS, WIDTH), torch.nan)
    for _ in range(2):
        layer.impl.forward(layer.layer, out.clone(), None, None, empty, None, out)
    assert not out.any()
    assert [(name, given) for name, given, _ in called] == [
        ("prompts", (256, 512)),
        ("steps", (8, 512)),
    ]
    assert called[1][2]["fp8"] is False
    assert called[0][2]["kv_heads"] == KV_HEADS and called[1][2]["page"] == PAGE


def test_profiling_runs_methods_for_layers_in_fp8_and_for_those_left_in_16_bits(
    backend, monkeypatch
):
    """vLLM leaves layers out of an fp8 cache by `--kv-cache-dtype-skip-layers`."""
    from attnplug.serve.paged.layer import ServedLayer
    from attnplug.serve.vllm.profile import prepare

    layer, called = Layer(backend, monkeypatch, "gather(min_tokens=100)", cache="fp8"), []
    layers = layer.config.compilation_config.static_forward_context
    for name, cache in (("0", "auto"), ("1", "fp8"), ("2", "fp8")):
        impl = backend.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, cache)
        layers[f"model.layers.{name}.self_attn.attn"] = types.SimpleNamespace(impl=impl)
    monkeypatch.setattr(ServedLayer, "warm_steps", lambda *_, **o: called.append(o["fp8"]))
    prepare(impl, torch.float32, torch.device("cpu"))
    assert called == [False, True]


def test_mla_and_what_pages_cannot_serve_stop_the_server(backend, monkeypatch):
    from attnplug.errors import ServeError

    layer = Layer(backend, monkeypatch, "momo")
    layer.config.model_config.use_mla = True
    with pytest.raises(ServeError, match="MLA"):
        backend.PlugBackend.validate_configuration(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
        )
    with pytest.raises(ServeError, match="certified is not served"):
        Layer(backend, monkeypatch, "certified")
