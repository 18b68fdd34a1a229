"""A recording: what the model computes stays the same, and the file says what the ops say."""

import sys
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import attnplug
from attnplug import ArgumentError, PolicyError, UnsupportedCallError, trace
from attnplug.models.hf import BINDING
from attnplug.ops import stream_edges, stream_mask
from attnplug.testing import tiny_model

STREAM = "stream(top_k=2, block=16, query_block=16)"
MOMO = "momo(gamma=8, block=16, query_block=16, top_k=2, tail=4, min_tokens=0)"
GATHER = "gather(k=1, block=16, sink=1, local=2, min_tokens=0)"
SKETCH = "sketch(k=8, min_tokens=0)"
HOST = "sketch(k=8, min_tokens=0, kv='host')"


def ids_of(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(1)).to(device)


@torch.no_grad()
def run(model, ids, mask, steps: int = 3) -> torch.Tensor:
    """Logits of a prefill and some decode steps, with the policy's own cache."""
    cache = attnplug.make_cache(model, ids.shape[1] + 8)
    at = ids.shape[1] - steps
    parts = [model(ids[:, :at], attention_mask=mask[:, :at], past_key_values=cache).logits]
    for t in range(at, ids.shape[1]):
        step = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache)
        parts.append(step.logits)
    return torch.cat(parts, 1)


def padded(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    ids = ids_of(2, 70, device=device)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    return ids, mask


POLICIES = [MOMO, GATHER, f"{MOMO}+{GATHER}", SKETCH, f"{MOMO}+{HOST}", "dense"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_changes_no_bit(policy, device, tmp_path):
    model = tiny_model(device=device)
    ids, mask = padded(device)
    with attnplug.applied(model, policy):
        wanted = run(model, ids, mask)
    with attnplug.applied(model, f"{policy}+{STREAM[:-1]}, measure=4)"):
        assert torch.equal(run(model, ids, mask), wanted)
        with trace.record(model, tmp_path / "run.parquet") as recording:
            assert torch.equal(run(model, ids, mask), wanted)
        assert torch.equal(run(model, ids, mask), wanted)
    found = trace.read(tmp_path / "run.parquet")
    found.verify()
    assert found.meta["edges"] == recording.edges > 0 and recording.steps == 4
    assert all(0 < share <= 1.001 for s in found.meta["captured"].values() for share in s)


@torch.no_grad()
@pytest.mark.parametrize("policy", [SKETCH, HOST])
def test_a_trace_beside_sketch_is_that_of_the_model(policy, tmp_path):
    """Steps that pick, whose tokens the op writes: what the first layer attends to is what it
    attends to under dense, new tokens included, and outputs are what they are without a trace."""
    model, frames = tiny_model(), []
    ids = ids_of(1, 800)
    for each in (policy, "dense"):
        with attnplug.applied(model, each):
            wanted = run(model, ids, torch.ones_like(ids), steps=5)
        with attnplug.applied(model, f"{each}+{STREAM}"):
            with trace.record(model, tmp_path / each):
                assert torch.equal(run(model, ids, torch.ones_like(ids), steps=5), wanted)
        frame = trace.read(tmp_path / each).to_pandas()
        frames.append(frame[frame["layer"] == 0].drop(columns="weight").to_numpy())
    assert np.array_equal(*frames)
    assert len(frames[0]) > 0


@torch.no_grad()
def test_a_method_without_blocks_has_none_of_its_own_in_the_file(tmp_path):
    """sketch picks tokens: `of="policy"` has nothing to tell of its steps."""
    model, ids = tiny_model(), ids_of(1, 800)
    with attnplug.applied(model, f"{MOMO}+{SKETCH}+stream(of='policy', block=16)"):
        with trace.record(model, tmp_path / "run"):
            run(model, ids, torch.ones_like(ids), steps=2)
    found = trace.read(tmp_path / "run")
    first = found.query_blocks(0)[found.to_pandas()["q_block"], 0]
    assert len(first) > 0 and first.max() < 798


@torch.no_grad()
def test_the_file_says_what_the_ops_say(tmp_path, monkeypatch):
    """Layer by layer, prefill and steps, a padded row and one that is not."""
    model = tiny_model()
    ids, mask = padded()
    calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    emit = trace.Recording.emit

    def spy(self, layer, call, edges):
        options = dict(lengths=call.lengths, start=call.first_key, key_mask=call.key_mask)
        blocks = dict(query_block=16, block=16)
        index, _ = stream_mask(call.q, call.k, top_k=2, **blocks, **options)
        weight = stream_edges(call.q, call.k, call.v, index, scale=0.125, **blocks, **options)
        calls.append((layer, index, weight))
        emit(self, layer, call, edges)

    monkeypatch.setattr(trace.Recording, "emit", spy)
    with attnplug.applied(model, STREAM), trace.record(model, tmp_path / "run.parquet"):
        run(model, ids, mask)
    wanted, first = [], 0
    for place, (layer, index, weight) in enumerate(calls):
        for b, h, i, t in torch.nonzero(index >= 0).tolist():
            row = (b, layer, h, first + i, int(index[b, h, i, t]), float(weight[b, h, i, t]))
            wanted.append(row)
        if place % 2:  # two layers a step
            first += index.shape[2]
    table = trace.read(tmp_path / "run.parquet").edges()
    assert [tuple(row.values()) for row in table.to_pylist()] == wanted
    found = trace.read(tmp_path / "run.parquet")
    assert found.meta["tokens"] == [70, 45]
    ends = [[0, 16], [16, 32], [32, 42], [42, 42], [42, 42], [42, 43], [43, 44], [44, 45]]
    assert found.query_blocks(1).tolist() == ends
    assert [row.tolist() for row in found.token_ids or ()] == [
        ids[0].tolist(),
        ids[1, 25:].tolist(),
    ]


def test_a_padded_row_is_traced_as_alone(tmp_path):
    model = tiny_model()
    ids, mask = padded()
    parts = []
    with attnplug.applied(model, STREAM):
        for rows, name in ((slice(0, 2), "both"), (slice(1, 2), "alone")):
            cut = 25 if name == "alone" else 0
            with trace.record(model, tmp_path / name):
                run(model, ids[rows, cut:], mask[rows, cut:])
            found = trace.read(tmp_path / name)
            last = found.meta["sequences"] - 1
            spans = found.query_blocks(last)
            frame = found.to_pandas(sequence=last)
            frame["query"] = spans[frame["q_block"], 0]
            frame = frame.sort_values(["query", "layer", "head", "k_block"])
            parts.append(frame[["query", "layer", "head", "k_block", "weight"]].to_numpy())
    assert np.array_equal(parts[0][:, :4], parts[1][:, :4])
    assert np.abs(parts[0][:, 4] - parts[1][:, 4]).max() < 1e-3


def test_generate_is_traced_step_by_step_although_it_would_compile(tmp_path):
    """Two runs give the same bytes, whichever thread is faster."""
    model = tiny_model()
    ids = ids_of(1, 40)
    with attnplug.applied(model, STREAM):
        wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        for name in "ab":
            with trace.record(model, tmp_path / name, name="tiny") as recording:
                found = model.generate(ids, max_new_tokens=6, do_sample=False)
            assert torch.equal(found, wanted)
            assert recording.steps == 6
        with trace.record(model, tmp_path / "c") as recording, torch.no_grad():
            logits = compiled(ids).logits
            assert recording.steps == 1
            assert torch.equal(model(ids).logits, logits)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    read = trace.read(tmp_path / "a")
    assert len(read.query_blocks()) == 3 + 5
    assert (read.token_ids or [])[0].tolist() == wanted[0, :-1].tolist()
    assert read.meta["model"] == "tiny" and read.meta["policy"] == STREAM
    assert read.meta["options"]["top_k"] == 2 and read.meta["prompt_sha256"]


def test_chunks_are_steps(tmp_path):
    model = tiny_model()
    ids = ids_of(1, 50)
    with attnplug.applied(model, STREAM), trace.record(model, tmp_path / "run"):
        model.generate(ids, max_new_tokens=1, do_sample=False, prefill_chunk_size=32)
    found = trace.read(tmp_path / "run")
    assert [step["first"] for step in found.meta["steps"]] == [[0], [32]]
    assert found.query_blocks().tolist() == [[0, 16], [16, 32], [32, 48], [48, 50]]


@torch.no_grad()
def test_a_methods_own_blocks_are_traced(tmp_path):
    """momo's prefill and gather's steps share a file where their blocks are alike."""
    model = tiny_model()
    ids, mask = padded()
    with attnplug.applied(model, f"{MOMO}+{GATHER}+stream(of='policy')"):
        with trace.record(model, tmp_path / "run.parquet"):
            run(model, ids, mask)
    found = trace.read(tmp_path / "run.parquet")
    frame = found.to_pandas(0, 0, sequence=0)
    last = frame[frame["q_block"] == found.query_blocks().shape[0] - 1]
    assert {0, 3, 4} <= set(last["k_block"]) and len(last) == 4  # sink, local, one more
    with attnplug.applied(model, f"{GATHER}+stream(of='policy')"):
        with trace.record(model, tmp_path / "steps.parquet"):
            run(model, ids, mask)
    steps = trace.read(tmp_path / "steps.parquet")  # a dense prefill has no list
    tokens = [row.tolist() for row in steps.token_ids or ()]
    assert tokens == [ids[0].tolist(), ids[1, 25:].tolist()]
    frame = steps.to_pandas(sequence=0)
    spans = steps.query_blocks()[frame["q_block"].unique()]
    assert spans.tolist() == [[67, 68], [68, 69], [69, 70]]
    with attnplug.applied(model, "dense+stream(of='policy')"):
        with pytest.raises(UnsupportedCallError, match="read every block of this text"):
            with trace.record(model, tmp_path / "none.parquet"):
                run(model, ids, mask)
    with attnplug.applied(model, "momo(min_tokens=0)+gather(min_tokens=0)+stream(of='policy')"):
        with pytest.raises(ArgumentError, match="give the methods the same blocks"):
            with trace.record(model, tmp_path / "other.parquet"):
                run(model, ids, mask)
    assert not (tmp_path / "other.parquet").exists()


def test_only_traced_layers_are_in_the_file(tmp_path):
    model = tiny_model(num_hidden_layers=3)
    with attnplug.applied(model, {1: STREAM, "*": "dense"}):
        with trace.record(model, tmp_path / "run"), torch.no_grad():
            model(ids_of(1, 40))
            model(ids_of(1, 40))
    found = trace.read(tmp_path / "run")
    assert found.layers == [1] and len(found.meta["steps"]) == 2


def test_what_cannot_be_recorded_is_said(tmp_path):
    model = tiny_model()
    path = tmp_path / "run"
    with attnplug.applied(model, "momo"):
        with pytest.raises(PolicyError, match=r"'momo' traces no layer .* \"momo\+stream\""):
            with trace.record(model, path):
                pass
    with attnplug.applied(model, STREAM):
        with pytest.raises(UnsupportedCallError, match="no forward pass went through"):
            with trace.record(model, path):
                pass
    with attnplug.applied(model, "momo+stream(of='policy')"), torch.no_grad():
        with pytest.raises(UnsupportedCallError, match=r"read every block .* min_tokens=0"):
            with trace.record(model, path):
                model(ids_of(1, 20))
    assert not path.exists()
    with attnplug.applied(model, STREAM):
        with trace.record(model, path), torch.no_grad():
            with pytest.raises(PolicyError, match="being recorded already"):
                with trace.record(model, tmp_path / "second"):
                    pass
            model(ids_of(1, 20))
        with pytest.raises(ArgumentError, match="a step of 2 sequences after one of 1"):
            with trace.record(model, tmp_path / "third"), torch.no_grad():
                model(ids_of(1, 20))
                model(ids_of(2, 20))
    assert [x.name for x in tmp_path.iterdir()] == ["run"]


def test_an_exception_leaves_no_file_and_no_thread(tmp_path):
    model = tiny_model()
    with attnplug.applied(model, STREAM):
        before = [getattr(m, BINDING) for m in model.modules() if hasattr(m, BINDING)]
        with pytest.raises(ZeroDivisionError):
            with trace.record(model, tmp_path / "run"), torch.no_grad():
                model(ids_of(1, 20))
                raise ZeroDivisionError
        after = [getattr(m, BINDING) for m in model.modules() if hasattr(m, BINDING)]
        assert all(a is b for a, b in zip(before, after, strict=True))
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name == "attnplug-trace"]
    assert not model.get_input_embeddings()._forward_pre_hooks


def byte_level(letters: str) -> PreTrainedTokenizerFast:
    """One token a byte of GPT-2's, and one with a space in front."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_piece(letters: str) -> PreTrainedTokenizerFast:
    """Letters, "▁", and bytes for all else."""
    names = ["<unk>", "▁", *sorted(set(letters)), *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_tokens_have_their_bytes(make):
    """Joined they are the text, where single tokens are half a character."""
    from attnplug.trace.tokens import token_bytes

    tokenizer = make("abcxyz")
    text = "a b cab, zé 漢🙂 xa"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = token_bytes(tokenizer, [*ids, tokenizer.eos_token_id, 99999])
    assert b"".join(pieces[i] for i in ids).decode() == text
    assert len(ids) > len(text)
    assert pieces[tokenizer.eos_token_id] == b"<end>" and pieces[99999] == b""


@torch.no_grad()
def test_the_file_can_be_searched(tmp_path):
    model, tokenizer = tiny_model(vocab_size=300), byte_level("")
    ids = tokenizer("the needle is a pin", return_tensors="pt").input_ids
    with attnplug.applied(model, STREAM):
        with trace.record(model, tmp_path / "run", tokenizer=tokenizer):
            model(ids)
            model(inputs_embeds=model.get_input_embeddings().weight[None, :20])
    assert trace.read(tmp_path / "run").token_ids is None  # the second step's are not known
    with attnplug.applied(model, STREAM):
        with trace.record(model, tmp_path / "run", tokenizer=tokenizer):
            model(ids)
    found = trace.read(tmp_path / "run")
    assert found.find("needle") == [(4, 10)] and found.text(0, 99) == "the needle is a pin"


@torch.no_grad()
def test_a_host_that_may_not_look_is_refused(tmp_path, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(sys.modules["attnplug.trace.record"], "may_sync", lambda tensor: False)
    with attnplug.applied(model, STREAM):
        with pytest.raises(UnsupportedCallError, match="captured into a CUDA graph"):
            with trace.record(model, tmp_path / "run"):
                model(ids_of(1, 20))


@pytest.mark.gpu
@torch.no_grad()
def test_a_capture_is_refused(tmp_path):
    """With a cache: without one, the call itself is refused."""
    model = tiny_model(device="cuda").to(torch.bfloat16)
    ids = ids_of(1, 70, device="cuda")
    with attnplug.applied(model, STREAM):
        cache = attnplug.make_cache(model, 128)
        with trace.record(model, tmp_path / "run"):  # what is compiled is not captured
            model(ids[:, :20], past_key_values=cache)
            model(ids[:, 20:40], past_key_values=cache)
        with pytest.raises(UnsupportedCallError, match="captured into a CUDA graph"):
            with trace.record(model, tmp_path / "run"):
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    model(ids[:, 40:60], past_key_values=cache)
