"""The backend's traces of prompts, on a CPU: what stream writes beside the methods that serve."""

import pytest
import torch
from vllm_backend_cases import (
    COVERING,
    HEADS,
    KV_HEADS,
    NAME,
    WIDTH,
    Layer,
    configuration,
    requests_made,
)

from attnplug import Stream, trace
from attnplug.policies import AttentionCall, Dense
from attnplug.serve.vllm.options import REQUESTS

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm_cpu.sh")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


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
    assert found.meta["versions"]["vllm"].startswith("0.")


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
    from attnplug.serve.vllm.requests import note_traced

    layer = Layer(backend, monkeypatch, traced("momo", tmp_path))
    layer.config.model_config.logits_processors = None
    with pytest.raises(ServeError, match=f"--logits-processors {REQUESTS}"):
        backend.PlugImpl(HEADS, WIDTH, 0.125, KV_HEADS, None, None, "auto")
    del layer.requests
    with pytest.raises(ServeError, match="no logits processors here"):
        note_traced(configuration("momo+stream"), {0})


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
