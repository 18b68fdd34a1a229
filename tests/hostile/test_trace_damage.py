"""Damaged trace files: whatever is wrong, one kind of error says so, and nothing else happens to
the process; and paths and disks that cannot take a trace."""

import json
import os
import random
import resource
import signal
import subprocess

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import attnplug
from attnplug import trace
from attnplug.testing.policy import tiny_model
from attnplug.trace.layout import META, SCHEMA
from attnplug.trace.seal import seal

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
    (tmp_path / "part.parquet.part").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    yield from ("folder", "pipe", "part.parquet", "device", "none/t.parquet", "x" * 300)
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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        full_disk(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(attnplug.TraceFileError, match="cannot be written"):
            with trace.record(model, path), torch.no_grad():
                model(torch.randint(2, 90, (1, 200)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
