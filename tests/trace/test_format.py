"""The trace file: what is written is read, in the promised order, the same bytes for the same
input, and damage shows."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug import trace
from attnplug.errors import ArgumentError
from attnplug.trace import Layout, Writer
from attnplug.trace.layout import SCHEMA
from attnplug.trace.seal import seal
from attnplug.trace.synthetic import NEEDLE


def lists(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists `[B,H,NQ,K]` with holes, and weights."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(50)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))])
    index = index.reshape(shape).astype(np.int32)
    index[rng.random(shape) < 0.3] = -1
    return index, rng.random(shape, np.float32)


def rows_of(steps, layers: dict) -> list[tuple]:
    """What the file must hold, one row a Python tuple, by the definition in attnplug.trace."""
    rows, first = [], 0
    for step, blocks in enumerate(steps):
        for layer in layers[step]:
            index, weight = layers[step][layer]
            for b, h, i, t in np.ndindex(index.shape):
                if index[b, h, i, t] >= 0:
                    place = (b, layer, h, first + i, index[b, h, i, t])
                    rows.append((*map(int, place), float(weight[b, h, i, t])))
        first += blocks
    return rows


def found_rows(table) -> list[tuple]:
    return [tuple(row[name] for name in SCHEMA.names) for row in table.to_pylist()]


@given(data=st.data())
def test_what_is_written_is_read_in_order(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.parquet"
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    steps = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    chosen = sorted(data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))
    layers, first = {}, 0
    with Writer(path, Layout(16, 32, "score"), model="m") as writer:
        for step, queries in enumerate(steps):
            writer.begin([first] * batch, [queries] * batch)
            layers[step] = {}
            for layer in chosen:
                shape = (batch, heads, -(-queries // 16), 4)
                layers[step][layer] = lists(step * 100 + layer, *shape)
                writer.append(layer, *layers[step][layer])
            first += queries
    found = trace.read(path)
    wanted = rows_of([-(-queries // 16) for queries in steps], layers)
    assert found_rows(found.edges()) == wanted
    assert (
        found.layers == chosen and found.heads == heads and found.meta["tokens"] == [first] * batch
    )
    found.verify()
    layer, head = data.draw(st.sampled_from(chosen)), data.draw(st.integers(0, heads - 1))
    a, b = sorted(data.draw(st.lists(st.integers(0, 8), min_size=2, max_size=2)))
    part = [r for r in wanted if r[1] == layer and r[2] == head and a <= r[3] < b and r[4] < 30]
    assert found_rows(found.edges(layer, head, queries=(a, b), keys=(0, 30))) == part
    frame = found.to_pandas(layer, sequence=batch - 1)
    assert list(frame["weight"]) == [r[5] for r in wanted if r[1] == layer and r[0] == batch - 1]
    assert list(frame.columns) == SCHEMA.names


def test_query_blocks_are_tokens(tmp_path):
    """A prefill of 40 queries (the second row has 23 of them), a chunk of 17, two decode steps."""
    path = tmp_path / "run.parquet"
    with Writer(path, Layout(16, 16, "mass")) as writer:
        for first, queries in (([0, 0], [40, 23]), ([40, 23], [17, 17]), ([57, 40], [1, 1])):
            writer.begin(first, queries)
            writer.append(0, *lists(0, 2, 1, -(-max(queries) // 16), 2))
    found = trace.read(path)
    assert found.meta["tokens"] == [58, 41]
    wanted = [[0, 16], [16, 32], [32, 40], [40, 56], [56, 57], [57, 58]]
    assert found.query_blocks(0).tolist() == wanted
    wanted = [[0, 16], [16, 23], [23, 23], [23, 39], [39, 40], [40, 41]]
    assert found.query_blocks(1).tolist() == wanted
    assert found.key_count(0) == 4 and found.key_count(1) == 3


def test_maps_are_sums_of_edges(tmp_path):
    path = tmp_path / "run.parquet"
    trace.synthesize(path, tokens=3000, layers=2, heads=3, steps=4)
    found = trace.read(path)
    queries, keys = len(found.query_blocks()), found.key_count()
    whole = found.dense(1)
    assert whole.shape == (3, queries, keys)
    frame = found.to_pandas(1)
    for row in frame.itertuples():
        assert whole[row.head, row.q_block, row.k_block] == np.float32(row.weight)
    assert (whole > 0).sum() == (frame["weight"] > 0).sum()
    window = found.dense(1, queries=(20, 31), keys=(5, 40))
    assert np.array_equal(window, whole[:, 20:31, 5:40])
    both = whole.sum(0) + found.dense(0).sum(0)
    assert np.allclose(found.heatmap(), both, rtol=1e-5)
    small = found.heatmap(1, 2, rows=4, columns=3)
    at, to = np.arange(queries) * 4 // queries, np.arange(keys) * 3 // keys
    for i, j in np.ndindex(4, 3):
        assert np.isclose(small[i, j], whole[2][np.ix_(at == i, to == j)].sum(), rtol=1e-5)
    assert found.heatmap(count=True).sum() == found.meta["edges"]


def test_text_is_found_where_it_stands(tmp_path):
    path = tmp_path / "run.parquet"
    place = trace.synthesize(path, tokens=4096)
    found = trace.read(path)
    ((first, end),) = found.find(NEEDLE)
    assert found.text(first, end) == NEEDLE and first // found.block == place
    assert found.find("agic numb") == [(first + 2, first + 4)]
    assert found.find("") == found.find("nowhere at all") == []
    last = found.to_pandas(1, 3).query("q_block == 63")  # the needle's head, its last queries
    assert last.sort_values("weight")["k_block"].iloc[-1] == place


def test_overlapping_occurrences_are_all_found(tmp_path):
    path = tmp_path / "run.parquet"
    with Writer(path, Layout(16, 16, "mass")) as writer:
        writer.begin([0], [5])
        writer.append(0, *lists(0, 1, 1, 1, 2))
        writer.name_tokens([np.array([7, 7, 7, 9, 7])], {7: b"aa", 9: "é".encode()})
    found = trace.read(path)
    assert found.find("aaa") == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert found.find("é") == [(3, 4)] and found.text(2, 5) == "aaéaa"
    ids = np.array([7, 7, 7, 9, 7], "<i4").tobytes()
    assert found.meta["prompt_sha256"] == [hashlib.sha256(ids).hexdigest()]


def test_the_same_input_gives_the_same_bytes(tmp_path):
    """In another process with another hash seed, too."""
    code = "import sys; from attnplug import trace; trace.synthesize(sys.argv[1], tokens=5000)"
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    trace.synthesize(tmp_path / "b", tokens=5000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_damage_shows(tmp_path):
    path = tmp_path / "run.parquet"
    trace.synthesize(path, tokens=20000)
    good = path.read_bytes()
    trace.read(path).verify()
    spoilt = bytearray(good)
    spoilt[len(good) // 4] ^= 64
    path.write_bytes(spoilt)
    with pytest.raises(ArgumentError, match="is damaged"):
        trace.read(path).verify()
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(ArgumentError, match="cannot be read as a trace"):
        trace.read(path)


def test_another_weight_is_another_checksum(tmp_path):
    sums = set()
    for change in (0.0, 1.0):
        index, weight = lists(0, 1, 2, 3, 4)
        weight[0, 0, 0, 0] += change
        index[0, 0, 0, 0] = 1
        with Writer(tmp_path / "run.parquet", Layout(16, 16, "mass")) as writer:
            writer.begin([0], [40])
            writer.append(0, index, weight)
        sums.add(trace.read(tmp_path / "run.parquet").meta["checksum"])
    assert len(sums) == 2


def test_a_checksum_that_lies_is_found(tmp_path):
    """Pages have their own checksums; the file's says what the whole must be."""
    path = tmp_path / "run.parquet"
    trace.synthesize(path, tokens=2000)
    table = pq.read_table(path)
    entries = dict(pq.read_metadata(path).metadata)
    meta = json.loads(entries[b"attnplug.trace"])
    meta["model"] = "another"
    entries[b"attnplug.trace"] = json.dumps(meta).encode()
    entries.pop(b"ARROW:schema")
    pq.write_table(table.replace_schema_metadata(entries), path)
    seal(path)
    with pytest.raises(ArgumentError, match="is damaged: checksum sha256:"):
        trace.read(path).verify()


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), Writer(tmp_path / "x", Layout(16, 16, "mass")) as writer:
        writer.begin([0], [40])
        writer.append(0, *lists(0, 1, 2, 3, 4))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_memory_is_bounded_by_the_row_group(tmp_path, monkeypatch):
    """However many layers: what is held is written as soon as a group is full."""
    import attnplug.trace.writer as module

    monkeypatch.setattr(module, "GROUP", 500)
    with Writer(tmp_path / "run.parquet", Layout(16, 16, "mass")) as writer:
        writer.begin([0], [640])
        for layer in range(20):
            writer.append(layer, *lists(layer, 1, 2, 40, 4))
            assert writer._held_rows <= 500
    footer = pq.read_metadata(tmp_path / "run.parquet")
    sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    assert max(sizes) <= 500 and len(sizes) > 5
    trace.read(tmp_path / "run.parquet").verify()


def test_what_is_no_trace_is_refused(tmp_path):
    pq.write_table(SCHEMA.empty_table(), tmp_path / "other.parquet")
    with pytest.raises(ArgumentError, match="is a Parquet file and no trace"):
        trace.read(tmp_path / "other.parquet")
    with pytest.raises(ArgumentError, match=r"none\.parquet cannot be read as a trace"):
        trace.read(tmp_path / "none.parquet")
    writer = Writer(tmp_path / "x", Layout(16, 16, "mass"))
    writer.begin([0], [16])
    with pytest.raises(ArgumentError, match=r"need \[B,H,NQ,K\] both"):
        writer.append(0, np.zeros((1, 1, 1, 2), np.int32), np.zeros((1, 1, 1, 3), np.float32))
    with pytest.raises(ArgumentError, match="a step of 2 sequences after one of 1"):
        writer.begin([0, 0], [16, 16])
    writer.discard()
