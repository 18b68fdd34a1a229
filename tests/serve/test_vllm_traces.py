"""Traces of prompts in a server, without one: a file holds what the tracing method says of the
whole prompt, however its chunks came, and there are never more files or bytes than allowed."""

import gc
import logging

import numpy as np
import pytest
import torch

from attnplug import Momo, Stream, trace
from attnplug.errors import ServeError
from attnplug.policies import AttentionCall, Dense
from attnplug.serve.paged.layer import ServedLayer
from attnplug.serve.paged.pages import Pages
from attnplug.serve.paged.phases import Phases
from attnplug.serve.paged.rows import batch_of
from attnplug.serve.vllm.options import TraceOptions
from attnplug.serve.vllm.traces import Prompt, Traces
from attnplug.trace.view import write_page

HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 4, 2, 64, 16, 2
STREAM = Stream(top_k=3, block=16, query_block=16, weights="value", measure=4)
MOMO = Momo(gamma=8, block=16, query_block=16, top_k=3, tail=0, min_tokens=0)


def traces_in(folder, *, label: str = "", **options) -> Traces:
    made = Traces(TraceOptions(folder=str(folder), **options), {"model": "made up"}, label=label)
    made.layers |= {0, 1}
    return made


class Server:
    """Two layers of made-up rows on shuffled pages, whose prompts are traced."""

    def __init__(self, traces: Traces, phases: Phases, rows: int = 2, tokens: int = 240):
        self.traces = traces
        common = dict(scale=0.125, softcap=0.0, sinks=None, device=torch.device("cpu"))
        self.layers = [ServedLayer(phases, index=i, **common) for i in range(LAYERS)]
        draw = torch.Generator().manual_seed(1)
        order = torch.randperm(rows * tokens // PAGE, generator=draw)
        self.table = order.reshape(rows, -1).to(torch.int32)
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        self.made = {
            name: torch.randn(LAYERS, rows, tokens, count, WIDTH, generator=draw)
            for name, count in heads.items()
        }
        shape = LAYERS, rows * tokens // PAGE, KV_HEADS, PAGE, WIDTH
        self.pages = [torch.full(shape, torch.nan) for _ in range(2)]
        for x, pages in zip((self.made["k"], self.made["v"]), self.pages, strict=True):
            for row in range(rows):
                blocks = x[:, row].unflatten(1, (-1, PAGE)).transpose(2, 3)
                pages[:, self.table[row].long()] = blocks

    def step(self, prompts: dict[int, Prompt], parts: list[tuple[int, int, int]]) -> None:
        """One batch: row r's tokens from `first` to `last - 1`, for each (r, first, last)."""
        starts = np.cumsum([0, *(last - first for _, first, last in parts)]).tolist()
        batch = batch_of(starts, [last for _, _, last in parts])
        places = {i: prompts[r] for i, (r, _, _) in enumerate(parts) if r in prompts}
        table = self.table[[r for r, _, _ in parts]]
        traced = self.traces.rows(batch, places)
        for layer in self.layers:
            q, k, v = (
                torch.cat([x[layer.index, r, first:last] for r, first, last in parts])
                for x in self.made.values()
            )
            pages = Pages(*(x[layer.index] for x in self.pages))
            for row in traced:
                layer.trace_prompt(row, q, k, v, pages, table)

    def edges(self, row: int, first: int, last: int, served=None) -> list[np.ndarray]:
        """What the method says of one call: [layer, head, query block, key block, weight]."""
        found = []
        for layer in self.layers:
            q, k, v = (x[layer.index, row, :last].transpose(0, 1)[None] for x in self.made.values())
            call = AttentionCall(q[:, :, first:].contiguous(), k, v, scale=0.125)
            edges = layer.phases.trace.observe(call, served or Dense())
            for _, h, i, place in torch.nonzero(edges.index >= 0).tolist():
                at = 0, h, i, place
                weight = float(edges.weight[at])
                found.append((layer.index, h, i, int(edges.index[at]), weight))
        return found


def rows_of(path) -> list[tuple]:
    table = trace.read(path).edges().to_pylist()
    names = ("layer", "head", "q_block", "k_block", "weight")
    return [tuple(row[name] for name in names) for row in table]


def same(found: list[tuple], wanted: list[tuple]) -> None:
    assert [row[:4] for row in sorted(found)] == [row[:4] for row in sorted(wanted)]
    weights = [np.array([row[4] for row in sorted(rows)]) for rows in (found, wanted)]
    # BLAS rounds by the number of rows of a call.
    assert np.allclose(*weights, rtol=16 * np.finfo(np.float32).eps, atol=0)


@pytest.mark.parametrize("chunks", [[200], [64, 128, 200], [16, 17, 49, 200]])
def test_a_prompts_chunks_give_the_trace_of_the_whole(tmp_path, chunks):
    """Beside another row of the batch, from views of it first and from pages later. A chunk of one
    token is not looked at."""
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    ids = list(range(100, 300))
    prompt, other = server.traces.prompt(ids, "mine"), Prompt([], 0)
    first = 0
    for last in chunks:
        order = [(1, first, last), (0, 0, 48)] if last - first > 1 else [(1, first, last)]
        other.closed = True
        server.step({1: prompt, 0: other}, order)
        first = last
    path = tmp_path / "prompt-0001-mine.parquet"
    found = trace.read(path)
    found.verify()
    assert not list(tmp_path.glob("*.part"))
    meta = found.meta
    assert meta["tokens"] == [200] and meta["kv_heads"] == KV_HEADS and meta["heads"] == HEADS
    assert (meta["model"], meta["request"], meta["prompt_tokens"]) == ("made up", "mine", 200)
    assert meta["cached_tokens"] == 0 and found.token_ids[0].tolist() == ids
    assert set(meta["captured"]) == {"0", "1"}
    starts = [0, *chunks[:-1]]
    looked = [(a, b) for a, b in zip(starts, chunks, strict=True) if b - a > 1]
    assert [(step["first"], step["queries"]) for step in meta["steps"]] == [
        ([a], [b - a]) for a, b in looked
    ]
    wanted, before = [], 0
    for a, b in looked:
        wanted += [(la, h, i + before, k, w) for la, h, i, k, w in server.edges(1, a, b)]
        before += -(-(b - a) // 16)
    same(rows_of(path), wanted)
    if all(chunk % 16 == 0 for chunk in chunks[:-1]):  # on the grid of query blocks
        same(rows_of(path), server.edges(1, 0, 200))
    assert write_page(path, tmp_path / "page.html") > 1e6


def test_a_trace_follows_momo_where_it_serves(tmp_path):
    """The blocks that momo read, of a prompt that it served; none of one that is too short."""
    momo = Momo(gamma=8, block=16, query_block=16, top_k=3, tail=0, min_tokens=100)
    phases = Phases(prefill=momo, trace=Stream(of="policy"))
    server = Server(traces_in(tmp_path), phases)
    long, short = (server.traces.prompt([7] * count, True) for count in (200, 99))
    server.step({0: long, 1: short}, [(0, 0, 200), (1, 0, 99)])
    assert sorted(path.name for path in tmp_path.glob("*.parquet*")) == ["prompt-0001.parquet"]
    same(rows_of(tmp_path / "prompt-0001.parquet"), server.edges(0, 0, 200, served=MOMO))
    assert trace.read(tmp_path / "prompt-0001.parquet").meta["query_block"] == 16


def test_what_the_prefix_cache_had_is_not_in_the_trace(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vllm.attnplug")
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    prompt, whole = server.traces.prompt([7] * 150, True), server.traces.prompt([7] * 49, True)
    server.step({1: whole}, [(1, 48, 49)])  # hit but for its last token
    server.step({0: prompt}, [(0, 96, 150)])
    found = trace.read(tmp_path / "prompt-0001.parquet")
    assert found.meta["cached_tokens"] == 96 and found.meta["steps"][0]["first"] == [96]
    assert found.query_blocks()[0].tolist() == [96, 112]
    same(rows_of(found.path), server.edges(0, 96, 150))
    assert "Its first 96 were in the prefix cache." in caplog.text
    assert "no trace of prompt 2, 49 tokens: they were in the prefix cache" in caplog.text
    assert len(list(tmp_path.glob("*.parquet*"))) == 1


def test_a_last_token_that_comes_alone_completes_the_file(tmp_path):
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    prompt = server.traces.prompt([7] * 65, True)
    server.step({0: prompt}, [(0, 0, 64)])
    assert not (tmp_path / "prompt-0001.parquet").exists()
    server.step({0: prompt}, [(0, 64, 65)])
    found = trace.read(tmp_path / "prompt-0001.parquet")
    assert found.meta["tokens"] == [64] and found.meta["prompt_tokens"] == 65
    for token in range(65, 70):  # its steps
        server.step({0: prompt}, [(0, token, token + 1)])
    assert len(list(tmp_path.glob("*.parquet*"))) == 1


def test_a_token_that_comes_alone_is_no_hit_and_has_no_block(tmp_path):
    """vLLM sets a request's first chunk behind longer ones that have begun, as a prompt's."""
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    new, hit = server.traces.prompt([7] * 65, True), server.traces.prompt([7] * 97, True)
    server.step({1: hit}, [(1, 32, 33)])  # behind a prefix hit of 32
    server.step({0: new, 1: hit}, [(1, 33, 49), (0, 0, 1)])
    server.step({0: new, 1: hit}, [(0, 1, 65), (1, 49, 97)])
    for number, cached, chunks in ((1, 0, [1]), (2, 32, [33, 49])):
        found = trace.read(tmp_path / f"prompt-{number:04}.parquet")
        assert found.meta["cached_tokens"] == cached
        assert [step["first"] for step in found.meta["steps"]] == [[first] for first in chunks]
    same(rows_of(tmp_path / "prompt-0001.parquet"), server.edges(0, 1, 65))
    alone = server.traces.prompt([7], True)
    server.step({0: alone}, [(1, 0, 16), (0, 0, 1)])
    assert alone.closed and len(list(tmp_path.glob("*.parquet*"))) == 2


def test_a_prompt_that_is_computed_anew_is_recorded_anew(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vllm.attnplug")
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    prompt = server.traces.prompt([7] * 150, True)
    server.step({0: prompt}, [(0, 0, 80)])
    server.step({0: prompt}, [(0, 64, 150)])
    assert "no trace of prompt 1, 150 tokens: vLLM computes it anew" in caplog.text
    same(rows_of(tmp_path / "prompt-0001.parquet"), server.edges(0, 64, 150))
    gone = server.traces.prompt([7] * 150, True)
    server.step({0: gone}, [(0, 0, 80)])
    server.traces.drop(gone, "its request left")
    assert len(list(tmp_path.glob("*.parquet*"))) == 1 and server.traces.files == 1


def test_there_are_never_more_files_than_allowed(tmp_path, caplog):
    """Those of a server before count, and those that are begun."""
    (tmp_path / "prompt-0007-old.parquet").write_bytes(b"x" * 1000)
    (tmp_path / "other.parquet").write_bytes(b"x")
    server = Server(traces_in(tmp_path, files=3), Phases(trace=STREAM))
    prompts = {row: server.traces.prompt([7] * 64, True) for row in (0, 1)}
    assert [prompt.number for prompt in prompts.values()] == [8, 9]
    server.step(prompts, [(0, 0, 32), (1, 0, 64)])
    assert not server.traces.full
    late = server.traces.prompt([7] * 64, True)
    server.step({1: late}, [(1, 0, 64)])  # the third place is taken, by the one that goes on
    server.step({0: prompts[0]}, [(0, 32, 64)])
    names = sorted(path.name for path in tmp_path.glob("prompt*"))
    assert names == ["prompt-0007-old.parquet", "prompt-0008.parquet", "prompt-0009.parquet"]
    assert "no more prompts are traced" in caplog.text and "it holds 3 files" in caplog.text
    assert server.traces.prompt([7] * 64, True) is None


def test_there_are_never_more_bytes_than_allowed(tmp_path, caplog):
    """What would pass the limit is given up between two layers, and leaves no file."""
    dry, folder = tmp_path / "dry", tmp_path / "traces"
    server = Server(traces_in(dry), Phases(trace=STREAM))
    server.step({0: server.traces.prompt([7] * 40, True)}, [(0, 0, 40)])
    size = (dry / "prompt-0001.parquet").stat().st_size
    server = Server(traces_in(folder, megabytes=(size + 3000) / 1e6), Phases(trace=STREAM))
    server.step({0: server.traces.prompt([7] * 40, True)}, [(0, 0, 40)])
    given_up = server.traces.prompt([7] * 200, True)
    for first in range(0, 192, 16):
        server.step({0: given_up}, [(0, first, first + 16)])
        assert sum(path.stat().st_size for path in folder.iterdir()) <= size + 3000
    assert given_up.closed and given_up.recording is None
    assert "no more prompts are traced" in caplog.text and "megabytes" in caplog.text
    assert [path.name for path in folder.glob("prompt*")] == ["prompt-0001.parquet"]
    assert server.traces.prompt([7] * 64, True) is None
    assert server.traces.nbytes == size and not server.traces.open


def test_a_disk_that_cannot_be_written_ends_no_server(tmp_path, caplog):
    folder = tmp_path / "traces"
    server = Server(traces_in(folder), Phases(trace=STREAM))
    prompt = server.traces.prompt([7] * 64, True)
    (folder / ".lock").unlink()
    folder.rmdir()
    server.step({0: prompt}, [(0, 0, 64)])
    assert "no more prompts are traced" in caplog.text and "is no folder" in caplog.text


def test_two_servers_do_not_share_a_folder(tmp_path):
    first = traces_in(tmp_path)
    with pytest.raises(ServeError, match="another server writes traces to"):
        traces_in(tmp_path)
    traces_in(tmp_path, label="@rank1")  # a process of the same server
    del first
    gc.collect()
    traces_in(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ServeError, match="name another folder"):
        traces_in(file)


def test_what_a_server_left_unfinished_takes_no_room(tmp_path):
    server = Server(traces_in(tmp_path), Phases(trace=STREAM))
    prompt = server.traces.prompt([7] * 65, True)
    server.step({0: prompt}, [(0, 0, 64)])
    (left,) = tmp_path.glob("prompt-0001.parquet.*.part")
    held = left.read_bytes()
    server.traces.drop(prompt, "the server ends")
    del server
    gc.collect()
    left.write_bytes(held)
    old = tmp_path / "prompt-0001.parquet.part"
    old.write_bytes(held)  # of an older attnplug
    other = tmp_path / "prompt-0002@rank1.parquet.0123abcd.part"
    other.write_bytes(held)  # of a process that may be at it
    traces = traces_in(tmp_path, files=1)
    assert not left.exists() and not old.exists() and other.exists()
    assert (traces.files, traces.nbytes, traces.full, traces.numbered) == (0, 0, "", 2)


def test_ranks_number_prompts_alike_and_count_their_own_files(tmp_path):
    (tmp_path / "prompt-0003-a@rank0.parquet").write_bytes(b"x" * 10)
    ranks = [traces_in(tmp_path, label=f"@rank{i}") for i in range(2)]
    assert [(rank.files, rank.nbytes) for rank in ranks] == [(1, 10), (0, 0)]
    for rank in ranks:
        server = Server(rank, Phases(trace=STREAM))
        server.step({0: rank.prompt([7] * 64, True)}, [(0, 0, 64)])
    names = {path.name for path in tmp_path.glob("prompt-0004*")}
    assert names == {"prompt-0004@rank0.parquet", "prompt-0004@rank1.parquet"}


def test_nothing_is_recorded_that_was_not_asked_for(tmp_path):
    traces = traces_in(tmp_path)
    assert traces.prompt([1, 2], False) is None
    assert traces.prompt([1, 2], True).name == "" and traces.prompt([1, 2], "a").name == "a"
