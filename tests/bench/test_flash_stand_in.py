"""bench/_flash_stand_in.py: transformers' continuous batching attends through it, by a reference of
the op that refuses what vLLM's build refuses; and bench/test_generate_batch.py never hangs."""

import functools
import importlib
import lzma
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

MODELS = Path(__file__).parents[1] / "models"
BENCH = Path(__file__).parents[2] / "bench"
# As `strings` finds it in the library of vLLM 0.20.2.
SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k) -> Tensor[]"
)
TAKEN = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table")
TAKEN += ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "s_aux")
TAKEN += ("num_splits",)
DEFAULTS = dict(is_rotary_interleaved=True, sm_margin=0, cp_world_size=1, cp_rank=0)


def dense(
    q, k, v, scale, *, causal=True, left=-1, right=-1, softcap=0.0, sinks=None, dtype=torch.double
):
    """q `[S,Hq,D]` over k and v `[T,Hkv,D]`; the last query stands at the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("shd,thd->hst", q.to(dtype), k) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    here, there = (torch.arange(n, device=q.device) for n in (len(q), len(k)))
    ahead = there - here[:, None] - len(k) + len(q)
    right = 0 if causal else right
    hidden = (ahead > right) & (right >= 0) | (-ahead > left) & (left >= 0)
    logits = logits.masked_fill(hidden, -math.inf)
    sink = torch.full_like(logits[..., :1], -math.inf)
    sink = sink if sinks is None else sinks.to(dtype)[:, None, None].expand_as(sink)
    weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hst,thd->shd", weights, v)


def assert_close(found, *given, **options):
    """The error is that of a plain dense attention in the inputs' own dtype, or a little more."""
    wanted = dense(*given, **options)
    plain = dense(*given, **options, dtype=found.dtype)
    assert (found - wanted).norm() <= 3 * (plain - wanted).norm() + 1e-6 * wanted.norm()


class Op:
    """A reference of `_vllm_fa3_C.fwd` that counts its calls: over rows, and over pages."""

    def __init__(self):
        self.rows = self.pages = 0

    def __call__(self, q, k, v, *given):
        names = [x.split()[-1] for x in SCHEMA.split("(")[1].split(")")[0].split(",")][3:]
        asked = dict(zip(names, given, strict=True))
        for name, value in asked.items():  # what else the build refuses, or nobody asks for
            assert name in TAKEN or value == DEFAULTS.get(name), name
        assert asked["num_splits"] in (0, 1)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"):
            assert asked[name] is None or asked[name].dtype == torch.int32, name
        one = functools.partial(
            dense, scale=asked["softmax_scale"], causal=asked["is_causal"], sinks=asked["s_aux"],
            left=asked["window_size_left"], right=asked["window_size_right"],
            softcap=asked["softcap"],
        )  # fmt: skip
        table = asked["page_table"]
        return [(self.over_rows if table is None else self.over_pages)(q, k, v, one, asked)]

    def over_rows(self, q, k, v, one, asked):
        self.rows += 1
        queries, keys = asked["cu_seqlens_q"].tolist(), asked["cu_seqlens_k"].tolist()
        out = torch.zeros_like(q)
        for a, b, c, d in zip(queries, queries[1:], keys, keys[1:], strict=False):
            assert b - a <= asked["max_seqlen_q"] and d - c <= asked["max_seqlen_k"]
            if b > a:
                out[a:b] = one(q[a:b], k[c:d], v[c:d]).to(q.dtype)
        return out

    def over_pages(self, q, k, v, one, asked):
        self.pages += 1
        out, size = torch.zeros_like(q), k.shape[1]
        for row, length in enumerate(asked["seqused_k"].tolist()):
            pages = asked["page_table"][row, : -(-length // size)]
            assert (pages >= 0).all()
            if length:
                own = (x[pages].flatten(0, 1)[:length] for x in (k, v))
                out[row] = one(q[row], *own).to(q.dtype)
        return out


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of bench/, or the small models of tests/models."""
    for folder in (BENCH, MODELS):
        monkeypatch.syspath_prepend(str(folder))
    for path in BENCH.glob("*.py"):  # test modules of the same names may be there already
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield importlib.import_module
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def op():
    """The reference in the place of the op."""
    made, library = Op(), torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(SCHEMA)
    library.impl("fwd", made, "CPU")
    yield made
    library._destroy()


@pytest.fixture
def put(device, bench, request):
    """Moves tensors to the device, where the op takes them: the reference on a CPU, or its own."""
    if device == "cpu":
        request.getfixturevalue("op")
        return lambda *tensors: tensors
    peers = bench("peers")
    if not (peers.FA3_LIBRARY.exists() or peers.FA3_PACKED.exists()):
        pytest.skip("carry .peers, which bench/gpu_pack.sh makes")
    peers.load_fa3()
    return lambda *tensors: [
        x.to(device, torch.bfloat16 if x.is_floating_point() else x.dtype) for x in tensors
    ]


@pytest.fixture
def believing(monkeypatch):
    """transformers takes the CPU for a GPU where it looks for flash attention."""
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    known = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]
    monkeypatch.setitem(known, "supported_devices", ((lambda: True, "cuda"),))


def batch(cases, model, ids, blocks):
    """Tokens of stock continuous batching, with block tables of so many blocks a request."""
    manager = model.init_continuous_batching(
        cases.ENDLESS, cases.settings(num_blocks=96, max_batch_tokens=256)
    )
    manager.continuous_batching_config.max_blocks_per_request = blocks  # a CPU has 0
    order, found = manager.add_requests(ids), {}  # beforehand: it begins with all of them
    manager.start()
    try:
        while len(found) < len(ids):
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None, result
            found[result.request_id] = result.generated_tokens
    finally:
        manager.stop(hard_stop=True)
    return [found[x] for x in order]


@pytest.mark.parametrize("blocks", [0, 16])
def test_stock_batching_attends_through_it(bench, op, believing, blocks):
    """A prompt of 333 tokens comes in two pieces; requests of several lengths decode together."""
    stand_in, cases = bench("_flash_stand_in"), bench("batching_cases")
    model, ids = cases.llama(), cases.prompts()
    before = model.config._attn_implementation
    wanted = cases.one_by_one(model, ids)
    assert batch(cases, model, ids, 0) == wanted and op.rows == op.pages == 0
    with stand_in.attending_by_flash(model):
        assert import_utils.is_flash_attn_3_available()
        assert batch(cases, model, ids, blocks) == wanted
    layers = model.config.num_hidden_layers
    assert op.rows >= 2 * layers and op.pages == (cases.NEW - 1) * layers * (blocks > 0)
    assert model.config._attn_implementation == before == "sdpa"
    assert stand_in.MODULE not in sys.modules and not import_utils.is_flash_attn_3_available()
    assert stand_in.MODULE not in stand_in.distributions()
    assert cases.one_by_one(model, ids[:2]) == wanted[:2]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("options", [{}, dict(window_size=(20, 0)), dict(softcap=2.0), "sinks"])
def test_pages_get_the_new_keys_and_are_attended_to(bench, put, options):
    """Rows of 0, 31, 32 and 70 cached tokens, and one that pads the batch."""
    stand_in = bench("_flash_stand_in")
    options = dict(s_aux=put(random(6))[0]) if options == "sinks" else options
    # Another layer's pages lie between two of this one, as from transformers 5.19 on.
    k_pages, v_pages = put(random(14, 2, 32, 2, 64), random(14, 2, 32, 2, 64))
    k_cache, v_cache = k_pages[:, 1], v_pages[:, 0]
    before = k_cache.clone()
    table = torch.tensor([[5, -1, -1], [1, -1, -1], [3, 8, -1], [2, 13, 7], [-1, -1, -1]])
    table, cached = put(table.int(), torch.tensor([0, 31, 32, 70, -1]).int())
    q, k, v = put(random(5, 1, 6, 64), random(5, 1, 2, 64), random(2, 5, 1, 64).movedim(0, 2))
    found = stand_in.flash_attn_with_kvcache(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, cache_seqlens=cached, block_table=table,
        causal=True, **options,
    )  # fmt: skip
    assert found.shape == q.shape
    how = dict(left=options.get("window_size", (-1,))[0], softcap=options.get("softcap", 0.0))
    for row, length in enumerate(cached[:4].tolist()):
        page, slot = table[row, length // 32], length % 32
        assert torch.equal(k_cache[page, slot], k[row, 0])
        assert torch.equal(v_cache[page, slot], v[row, 0])
        before[page, slot] = k[row, 0]
        keys, values = (x[table[row]].flatten(0, 1)[: length + 1] for x in (k_cache, v_cache))
        assert_close(found[row], q[row], keys, values, 0.125, sinks=options.get("s_aux"), **how)
    assert torch.equal(k_cache, before)  # nothing else was written


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_one_length(bench, put, causal):
    stand_in = bench("_flash_stand_in")
    q, k, v = put(random(3, 5, 4, 64), random(3, 9, 2, 64), random(3, 9, 2, 64) + 1)
    found = stand_in.flash_attn_func(q, k, v, causal=causal, softmax_scale=0.3)
    for row in zip(found, q, k, v, strict=True):
        assert_close(*row, 0.3, causal=causal)


def test_the_peer_of_prefill(bench, put):
    """peers.py calls the same op, heads before tokens, and has it not split."""
    q, k, v = put(random(2, 4, 9, 64), random(2, 2, 9, 64), random(2, 2, 9, 64) + 1)
    found = bench("peers").causal("fa3", q, k, v, 0.2)().unflatten(0, (2, 9))
    for out, *row in zip(found, q, k, v, strict=True):
        assert_close(out, *(x.transpose(0, 1) for x in row), 0.2)


def test_a_library_that_is_not_there_is_named(bench, monkeypatch, tmp_path):
    """And one that came packed is unpacked, once."""
    stand_in, peers = bench("_flash_stand_in"), bench("peers")
    library = tmp_path / ".peers" / peers.FA3_LIBRARY.name
    monkeypatch.setattr(peers, "FA3_LIBRARY", library)
    with (
        pytest.raises(FileNotFoundError, match=r"\.peers.*bench/gpu_pack\.sh"),
        stand_in.flash_attention_3(),
    ):
        pass
    library.parent.mkdir()
    library.with_name(f"{library.name}.xz").write_bytes(lzma.compress(b"a library"))
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    for content in (b"a library", b"it, changed"):
        with pytest.raises(RuntimeError, match=r"no op.*bench/gpu_pack\.sh"):
            peers.load_fa3()
        assert library.read_bytes() == content and loaded.pop() == str(library)
        library.write_bytes(b"it, changed")
    assert len(list(library.parent.iterdir())) == 2
    assert stand_in.MODULE not in sys.modules


def test_a_call_that_is_late_fails_and_the_next_one_runs(bench, op, believing, monkeypatch):
    module, cases = bench("test_generate_batch"), bench("batching_cases")
    model, ids = cases.llama(), cases.prompts()
    small = functools.partial(
        ContinuousBatchingConfig, num_blocks=96, max_batch_tokens=64, **{cases.SIZE: cases.PAGE}
    )
    monkeypatch.setattr(module, "ContinuousBatchingConfig", small)
    monkeypatch.setattr(module, "model", lambda: model)
    monkeypatch.setattr(module, "LIMIT", 0)
    with module.side("") as made:
        with pytest.raises(pytest.fail.Exception, match=r"\d of 5 requests are done after 0 s"):
            module.call(made, ids, 400)
        assert 0 < op.rows < 400 * made.config.num_hidden_layers  # it did not run to its end
        assert made.config._attn_implementation == "flash_attention_3"
        monkeypatch.setattr(module, "LIMIT", 60)
        taken, name = module.call(made, ids, cases.NEW)
        assert taken > 0 and module.PEER in name and op.rows
    with module.side("dense") as made:
        assert "attnplug" in module.call(made, ids, cases.NEW)[1]
