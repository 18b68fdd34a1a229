"""The backend over SGLang's own FlashAttention backend, batches, pools and layers, on a CPU: the
same batches as test_sglang_backend's, with kernels alone in torch. Triton's interpreter runs the
kernel that fills the page tables of SGLang's graphs."""

import random

import pytest

pytest.importorskip("sglang.srt.plugins", reason="SGLang is not installed: scripts/sglang_cpu.sh")
import sglang_cases
import sglang_real
from test_sglang_backend import CLOSE, COVERING, SMALL, draw_schedule, stale

from attnplug.errors import ServeError

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


def server(policy, page_size=32, **changes):
    return sglang_cases.Server(policy, page_size, kit=sglang_real, **changes)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("policy", [COVERING, "gather(min_tokens=100)", "dense"])
def test_batches_of_every_kind_give_attention(policy, page_size):
    made = server(policy, page_size)
    assert draw_schedule(made, random.Random(page_size), 40) < CLOSE
    assert policy == "dense" or stale(made) == 0


@pytest.mark.parametrize("policy", [COVERING, "dense"])
def test_an_fp8_cache_is_read_with_each_layers_scales(policy):
    made = server(policy, 64, cache=sglang_cases.FP8)
    assert draw_schedule(made, random.Random(1), 40) < CLOSE
    assert policy == "dense" or stale(made) == 0


def test_prompts_alone_need_no_pages_of_a_certain_size():
    assert draw_schedule(server("momo(min_tokens=64)", 1), random.Random(0), 30) < CLOSE


def test_each_row_is_served_by_what_should_serve_it():
    made = server(COVERING, layers=1)
    base = made.backend.served
    for parts, mode, calls in (
        ([(0, 200)], "", []),
        ([(0, 64), (2, 30), (3, 20)], "", ["extend 50"]),
        ([(0, 1), (2, 1)], "", []),
        ([(2, 40), (0, 1)], "MIXED", ["extend 40"]),
        ([(3, 30), (2, 1)], "MIXED", ["extend 31"]),
    ):
        base.clear()
        assert made.error(parts, mode).max() < CLOSE
        assert base == calls


def test_small_budgets_leave_keys_out_of_far_rows_alone():
    made = server(SMALL)
    made.backend.init_cuda_graph_state(4, 4)
    graph = sglang_cases.Graph(made, 4)
    made.error([(0, 300)])
    made.error([(1, 60)])
    for step in (lambda: made.error([(0, 1), (1, 1)]), lambda: graph.replay([0, 1])):
        far, near = step().unbind(1)
        assert (far > 1e-2).all() and (near < CLOSE).all()
    assert stale(made) == 0


def test_pages_with_heads_outside_are_served(monkeypatch):
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        made = server(COVERING)
    assert made.backend._pages(made.attentions[0])[0].stride(2) == sglang_cases.WIDTH
    assert draw_schedule(made, random.Random(5), 25) < CLOSE
    assert stale(made) == 0


def test_a_sliding_layer_is_left_dense():
    made = server(COVERING, layer={"sliding_window_size": 40})
    for parts in ([(0, 200)], [(0, 1)]):
        assert made.error(parts).max() < CLOSE


def test_sglang_finds_the_plugin_and_makes_the_backend(monkeypatch):
    import sglang.srt.layers.attention.attention_registry as registry
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    import attnplug.serve.sglang as room

    for _ in range(2):
        room.register()
    assert ATTENTION_BACKEND_CHOICES.count("attnplug") == 1
    create = registry.ATTENTION_BACKENDS["attnplug"]
    made = server("dense", 32)
    monkeypatch.setenv("ATTNPLUG_POLICY", COVERING)
    monkeypatch.setattr("sglang.srt.utils.get_device_capability", lambda *_: (9, 0))
    own = sglang_real.FlashAttentionBackend
    monkeypatch.setattr(sglang_real.flash, "FlashAttentionBackend", own)
    monkeypatch.setattr("attnplug.serve.sglang.backend.PlugAttention.warm", lambda self: None)
    backend = create(made.runner)
    assert isinstance(backend, own) and backend.layers[0].phases.decode is not None
    monkeypatch.setattr("sglang.srt.utils.get_device_capability", lambda *_: (10, 0))
    with pytest.raises(ServeError, match=r"compute capability 10\.0"):
        create(made.runner)
