"""Damaged trace files: whatever is wrong, one kind of error says so, and nothing else happens to
the process; and paths and disks that cannot take a trace."""

import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from full_disk import file_size_limit

import attnplug
from attnplug import trace
from attnplug.testing.policy import tiny_model
from attnplug.trace.layout import META, SCHEMA, TOKENS, VOCABULARY
from attnplug.trace.seal import MAGIC, TAIL, seal

SEEDS = 500


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A small trace of three row groups, its bytes and all that they say."""
    import attnplug.trace.writer as writer

    path, group = tmp_path_factory.mktemp("good") / "t.parquet", writer.GROUP
    writer.GROUP = 500
    try:
        trace.synthesize(path, tokens=2000, layers=3, heads=2)
    finally:
        writer.GROUP = group
    assert pq.read_metadata(path).num_row_groups >= 3
    return path.read_bytes(), everything(path)


def everything(path):
    """All that a reader can ask for."""
    found = trace.read(path)
    layer = found.layers[0]
    return (
        json.dumps(found.meta, sort_keys=True),
        found.edges().to_pydict(),
        found.dense(layer).tobytes(),
        found.heatmap(rows=8, columns=8).tobytes(),
        found.text(0, 50),
        found.density,
        found.find("the"),
        found.verify(),
    )


def damage(seed: int, data: bytes) -> bytes:
    """One of seven kinds of damage, half of them near the end, where the footer is."""
    rng, spoilt = random.Random(seed), bytearray(data)
    low = 0 if rng.random() < 0.5 else len(data) - min(len(data), 6000)
    at = rng.randrange(low, len(data))
    size = rng.choice([1, 1, 2, 4, 8, 64, 500])
    kind = rng.randrange(7)
    if kind == 0:
        spoilt[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        spoilt[at : at + size] = rng.randbytes(len(spoilt[at : at + size]))
    elif kind == 2:
        del spoilt[at:]
    elif kind == 3:
        del spoilt[at : at + size]
    elif kind == 4:
        spoilt[at : at + size] = bytes(len(spoilt[at : at + size]))
    elif kind == 5:
        spoilt[at:at] = spoilt[max(0, at - size) : at]
    else:
        for other in (b"layer", b"k_block", b"weight", b"tokens", b"format"):
            place = spoilt.rfind(other)
            if place >= 0 and rng.random() < 0.5:
                spoilt[place] ^= 2
    return bytes(spoilt)


@pytest.mark.parametrize("part", range(5))
def test_damage_is_one_kind_of_error_or_no_damage(good, part, tmp_path):
    data, wanted = good
    path, refused = tmp_path / "t.parquet", 0
    for seed in range(part * SEEDS // 5, (part + 1) * SEEDS // 5):
        spoilt = damage(seed, data)
        path.write_bytes(spoilt)
        try:
            assert everything(path) == wanted, f"seed {seed} is read as something else"
            assert spoilt == data, f"seed {seed} is not seen"
        except attnplug.TraceFileError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 0.9 * SEEDS / 5


def test_a_renamed_column_is_refused(good, tmp_path):
    """Also where the seal is right, as another program's may be."""
    path = tmp_path / "t.parquet"
    path.write_bytes(good[0])
    table = pq.read_table(path)
    names = [name.replace("k_block", "k_blocc") for name in SCHEMA.names]
    metadata = {META: pq.read_metadata(path).metadata[META]}
    pq.write_table(table.rename_columns(names).replace_schema_metadata(metadata), path)
    seal(path)
    with pytest.raises(attnplug.TraceFileError, match=r"has the columns .*k_blocc"):
        trace.read(path)


def test_a_sealed_file_is_plain_parquet(good, tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(good[0])
    assert pq.read_table(path).to_pydict() == good[1][1]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "none"):
        with pytest.raises(attnplug.TraceFileError, match="cannot be read as a trace"):
            trace.read(path)
    for content in (b"", b"PAR1", b"PAR1" * 9, bytes(100), b"\xff\xff\xff\xffPAR1" * 20):
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(attnplug.TraceFileError):
            trace.read(tmp_path / "odd")


class Ran(Exception):
    pass


def places(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    yield from ("folder", "pipe", "device", "none/t.parquet", "x" * 300, "a\0b")
    yield "/dev/null"


def test_a_path_that_cannot_be_is_refused_before_the_model_runs(tmp_path):
    model = attnplug.apply(tiny_model(), "momo+stream")
    for place in places(tmp_path):
        with pytest.raises(attnplug.TraceFileError, match=r"choose|path of its own|make it"):
            with trace.record(model, tmp_path / place):
                raise Ran(place)
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")


def test_a_link_to_a_file_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "t.parquet")
    trace.synthesize(tmp_path / "link", tokens=500)
    assert (tmp_path / "link").is_symlink()
    trace.read(tmp_path / "t.parquet").verify()


def full_disk(path):
    """Record more than there is room for over a good file; the error."""
    before = path.read_bytes()
    rng = np.random.default_rng(0)
    with pytest.raises(attnplug.TraceFileError, match=r"cannot be written .*What was at that path"):
        with trace.Writer(path, trace.Layout(16, 16, "mass")) as writer:
            writer.begin([0], [16 * 4000])
            for layer in range(40):
                index = rng.integers(0, 30000, (1, 2, 4000, 8), dtype=np.int32)
                writer.append(layer, index, rng.random(index.shape, np.float32))
    assert path.read_bytes() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    trace.read(path).verify()


def test_a_full_disk_keeps_what_was_there(tmp_path):
    """As a limit of a file's size, which any user can set."""
    path = tmp_path / "t.parquet"
    trace.synthesize(path, tokens=500)
    with file_size_limit(200_000):
        full_disk(path)


def test_a_full_tmpfs_keeps_what_was_there(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        path = tmp_path / "t.parquet"
        trace.synthesize(path, tokens=500)
        full_disk(path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_while_a_model_is_recorded(tmp_path):
    model = attnplug.apply(tiny_model(), "momo+stream(block=16, query_block=16)")
    path, first = tmp_path / "t.parquet", tmp_path / "first.parquet"
    with trace.record(model, first), torch.no_grad():  # numba caches what it compiles: files too
        model(torch.randint(2, 90, (1, 200)))
    first.unlink()
    trace.synthesize(path, tokens=500)
    before = path.read_bytes()
    with file_size_limit(1000), pytest.raises(attnplug.TraceFileError, match="cannot be written"):
        with trace.record(model, path), torch.no_grad():
            model(torch.randint(2, 90, (1, 200)))
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def forged_seal(data: bytes, listed: bytes) -> bytes:
    """A trace whose seal lists other segments, with a checksum that is right."""
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    (length,) = TAIL.unpack(data[begin - TAIL.size : begin])[:1]
    head, tail = data[: begin - TAIL.size - length], data[begin:]
    digest = hashlib.sha256(listed + tail).digest()
    return head + listed + TAIL.pack(len(listed), digest, MAGIC) + tail


LISTS = [
    b'{"a":1}',
    b"7",
    b"[" * 5000 + b"]" * 5000,
    b"xx",
    b"\xff",
    b'[[5,"zz"]]',
    b"[[1]]",
    b"[]",
]
LISTS += [b'[[NaN,"00"]]', b"[[1e999,2]]", b"[" + b"9" * 5000 + b"]", b"null", b'[[true,"00"]]']
LISTS += [f'[[{end},"{"00" * 32}"]]'.encode() for end in (-1, 0, 1, 1 << 40, 1 << 62, 10**30)]


@pytest.mark.parametrize("listed", LISTS, ids=range(len(LISTS)))
def test_a_forged_seal_is_refused_at_once(good, listed, tmp_path):
    (tmp_path / "t.parquet").write_bytes(forged_seal(good[0], listed))
    with pytest.raises(attnplug.TraceFileError):
        everything(tmp_path / "t.parquet")


VALUES = [None, True, -1, 0, 1, 7, 1 << 31, 1 << 40, 10**18, 10**400, 0.5, float("nan"), "x", ""]
VALUES += [[], {}, [[]], [1 << 40], [-1], ["x"], {"a": 1}, "0" * 100, "\ud800", [10**18] * 3]


def forge(rng: random.Random, value):
    """The same with another value somewhere, or with something left out."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {key: other for key, other in value.items() if key != name}
        return value | {name: forge(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], forge(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


@pytest.mark.parametrize("part", range(4))
def test_forged_words_about_a_trace_are_one_class_of_error(good, part, tmp_path):
    """What another program wrote, with seals that are right."""
    path = tmp_path / "t.parquet"
    path.write_bytes(good[0])
    table, entries = pq.read_table(path), pq.read_metadata(path).metadata
    for seed in range(part * 60, part * 60 + 60):
        rng = random.Random(seed)
        name = rng.choice([META, META, META, TOKENS, VOCABULARY])
        honest = json.loads(entries[name])
        text = json.dumps(forge(rng, honest))
        if text == json.dumps(honest):
            continue
        words = {key: entries[key] for key in (META, TOKENS, VOCABULARY)} | {name: text.encode()}
        pq.write_table(table.replace_schema_metadata(words), path, row_group_size=500)
        seal(path)
        try:
            everything(path)
        except attnplug.TraceFileError as error:
            assert str(path) in str(error)
        else:
            raise AssertionError(f"seed {seed}: {text[:200]} is believed")


@pytest.mark.parametrize("column", [name for name in SCHEMA.names if name != "weight"])
@pytest.mark.parametrize("value", [-1, 32_000, None])
def test_edges_that_are_none_of_the_files_are_refused(good, column, value, tmp_path):
    if (column, value) == ("k_block", 32_000):
        return  # a key block has no limit of its own: windows leave it out
    path = tmp_path / "t.parquet"
    path.write_bytes(good[0])
    table, words = pq.read_table(path), pq.read_metadata(path).metadata
    place = table.column_names.index(column)
    values = [value, *table.column(column).to_pylist()[1:]]
    table = table.set_column(place, SCHEMA.field(column), pa.array(values, SCHEMA.types[place]))
    kept = {key: words[key] for key in (META, TOKENS, VOCABULARY)}
    pq.write_table(table.replace_schema_metadata(kept), path, row_group_size=500)
    seal(path)
    with pytest.raises(attnplug.TraceFileError):
        everything(path)


KILLED = """
import os, sys
from attnplug import trace
with trace.Writer(sys.argv[1], trace.Layout(16, 16, "mass")):
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_recording_leaves_is_deleted_by_the_next(tmp_path):
    path = tmp_path / "t.parquet"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    trace.synthesize(path, tokens=500)
    assert list(tmp_path.iterdir()) == [path]
