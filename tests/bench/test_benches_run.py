"""Benches that need a GPU, run here at tiny sizes with "cuda" taken for "cpu": that they make their
inputs, call what they time, and count what they say. Nothing is timed."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from attnplug.bench import quick, rows
from attnplug.policies import methods

BENCH = Path(__file__).parents[2] / "bench"
TINY = dict(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, vocab_size=99, max_position_embeddings=4096, attn_implementation="sdpa",
)  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what was to be made on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") in ("cuda", torch.device("cuda")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Bench:
    """As the fixture `gpu_bench`, but that it calls each function once."""

    rows: list

    def __init__(self):
        self.rows = []

    @staticmethod
    def sets(nbytes):
        return 2

    def __call__(self, *, fns, peer=None, peer_fns=None, graph=True, rounds=0, **row):
        for fn in fns:
            fn()
        assert (peer is None) == (peer_fns is None)
        return self.record(times_us=[2.0], peer=peer, peer_times_us=[4.0] if peer else None, **row)

    def record(self, **row):
        self.rows.append(rows.make_row(**{"ceiling": None} | row))
        return self.rows[-1]


@pytest.fixture
def bench(monkeypatch):
    """(a bench's module by its name, the fixture that it gets)."""
    monkeypatch.syspath_prepend(str(BENCH))
    for path in BENCH.glob("*.py"):  # test modules of the same names may be there already
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    before = set(sys.modules)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(rows, "ceilings", lambda: {"read": 4e12, "copy": 4e12, "gemm": 7e14})
    monkeypatch.setattr(rows, "ceiling_fraction", lambda *_: 0.5)
    with OnCpu():
        yield importlib.import_module, Bench()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.mark.parametrize("new", ["all", 1])
@pytest.mark.parametrize("form", ["band, block=16", "bounds, block=128"])
def test_block_bounds(bench, form, new):
    module, gpu_bench = bench[0]("test_block_bounds"), bench[1]
    blocks = 512 // module.FORMS[form]
    module.bench(gpu_bench, 512, form, blocks if new == "all" else new)
    assert gpu_bench.rows[0]["options"].endswith("whole prompt" if new == "all" else "one block")


@pytest.mark.parametrize("name", quick.DECODES)
def test_steps_write_their_own_token(bench, monkeypatch, name):
    """Where a model's step does; again and again the same one. Others find it written."""
    module = bench[0]("test_steps")
    policy = methods()[name](**({} if name == "dense" else {"min_tokens": 0}))
    call, k, _ = quick.decode_call(quick.Heads(4, 2, 64), quick.PLANS["cpu"], 192, policy, 0)
    wanted, writes = policy.attend(call), name in ("gather", "sketch")
    step = module.step_of(policy, call)
    module.count_no_token(monkeypatch)
    for _ in range(2):
        if writes:
            call.k[:, :, -1], call.v[:, :, -1] = torch.nan, torch.nan
        torch.testing.assert_close(step(), wanted)
        assert not writes or torch.equal(call.k[:, :, -1], k[:, :, -1])
        assert int(call.state.cumulative_length) == 192 - writes


def test_gather_attention(bench):
    module, gpu_bench = bench[0]("test_gather_attention"), bench[1]
    module.test_gather_attention(gpu_bench, "k=8, block=128", 1, 4096)
    assert gpu_bench.rows[0]["flops"] == 4 * 28 * 13 * 128 * 128


@pytest.mark.parametrize("weights", ["score", "value"])
def test_stream_edges(bench, weights):
    module, gpu_bench = bench[0]("test_stream_edges"), bench[1]
    module.test_stream_edges(gpu_bench, weights, 128)
    heads, pairs = 32, 3  # of blocks that see each other
    products = {"score": 1, "value": 2}[weights]
    assert gpu_bench.rows[0]["flops"] == 2 * products * heads * pairs * 64 * 64 * 128


@pytest.mark.parametrize("search", ["branches", "bounds"])
def test_stream_mask(bench, monkeypatch, search):
    module, gpu_bench = bench[0]("test_stream"), bench[1]
    monkeypatch.setattr(module.peers, "causal_peers", lambda: ["cudnn"])
    monkeypatch.setattr(module.peers, "causal", lambda *_: lambda: None)
    event = SimpleNamespace(elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(module, "timed", lambda fn: (event, fn()))
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    module.test_stream_mask(gpu_bench, 192, search)
    ranked = {"branches": 0, "bounds": 3}[search]  # and 6 scored, of 3 query blocks
    assert gpu_bench.rows[0]["flops"] == 2 * 32 * 128 * (64 * 64 * 6 + 2 * ranked)


@pytest.mark.parametrize(("new", "originals"), [(4, "device"), (1, "host")])
def test_quantize_kv(bench, new, originals):
    module, gpu_bench = bench[0]("test_quantize_kv"), bench[1]
    module.bench(gpu_bench, 256, 64, new, originals)
    assert gpu_bench.rows[0]["bytes"] > new * 64 * 8 * 128 * 4


@pytest.mark.parametrize("name", ["dense", "gather", "gvr", "sketch", "certified"])
def test_steps(bench, name, monkeypatch):
    module, gpu_bench = bench[0]("test_steps"), bench[1]
    monkeypatch.setattr(module.quick, "MOST_SETS", 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(module, "cudnn_attention", lambda q, k, v, scale: q)
    module.test_step(gpu_bench, monkeypatch, name, 2, 256)
    (row,) = gpu_bench.rows
    assert row["policy"] == name and row["batch"] == 2 and "memory" in row
    assert (row["ceilings"] is None) == (name != "dense")


@pytest.mark.parametrize("part", ["score_tokens", "topk", "top_tokens", "gather_tokens_attention"])
def test_parts_of_gvr(bench, part):
    module, gpu_bench = bench[0]("test_gvr"), bench[1]
    module.test_part(gpu_bench, part, 2560)
    assert gpu_bench.rows[0]["op"] == part


def shrink(module, monkeypatch, config, model):
    """Have an end-to-end bench run on a tiny model, uncompiled."""
    monkeypatch.setattr(module, "CONFIG", config)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    torch.manual_seed(0)
    return model(config).to(torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["gvr", "sketch"])
def test_e2e_policies(bench, name, monkeypatch):
    module, gpu_bench = bench[0]("test_e2e_policies"), bench[1]
    made = shrink(module, monkeypatch, Qwen2Config(**TINY), Qwen2ForCausalLM)
    monkeypatch.setattr(module, "model", lambda: made)
    monkeypatch.setattr(module, "LENGTHS", [96, 200])
    monkeypatch.setattr(module, "CHUNK", 64)
    lengths = []

    def time_steps(decoder, steps):
        decoder.step()
        lengths.append(int(decoder.cache.layers[0].cumulative_length))
        return [3.0]

    monkeypatch.setattr(module, "time_steps", time_steps)
    for n in (96, 200):
        module.test_e2e_policies(gpu_bench, name, n)
    assert lengths == [96 + module.WARMUP + 1, 200 + module.WARMUP + 1] * 2
    assert [row["policy"] for row in gpu_bench.rows] == [name] * 2


def test_first_tokens_of_long_prompts(bench, monkeypatch):
    module, gpu_bench = bench[0]("test_e2e_ttft"), bench[1]
    config = LlamaConfig(**TINY | {"hidden_size": 512})
    made = shrink(module, monkeypatch, config, LlamaForCausalLM)
    monkeypatch.setattr(sys.modules["_models"], "PART", 64)
    monkeypatch.setattr(module, "WARM", 64)
    monkeypatch.setattr(module.peers, "causal", lambda *_: lambda: "dense")
    seconds = {"dense": 5.0}

    def timed(fn):
        found = fn()
        return seconds[found] if isinstance(found, str) else 2.0

    monkeypatch.setattr(module, "timed", timed)
    module.test_long(gpu_bench, made, 256)
    (row,) = gpu_bench.rows
    assert row["p50_us"] == 2e6 and row["peer_p50_us"] == (2 + 32 * (5 - 2)) * 1e6
    assert "forward" not in vars(made.model.layers[0].mlp)
