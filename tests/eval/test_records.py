"""The log of a study knows a record again."""

import itertools
import json
import os
import random

import pytest
from full_disk import file_size_limit

from attnplug.errors import FileError
from attnplug.eval.records import KEY, Records

RECORD = dict.fromkeys(KEY, 0) | {"policy": "momo(selection='exact')"}


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    line = json.dumps(RECORD)
    for whole, kept in itertools.product((f"{line}\n", ""), (1, 2, 20)):
        path.write_text(whole + line[:kept])
        assert len(Records(path).known) == bool(whole)
        assert path.read_text() == whole


@pytest.mark.parametrize(
    ("content", "number"),
    [("my notes", 1), ("{}\n", 1), ("[1]\n", 1), (json.dumps(RECORD) + "\nx\n", 2)],
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content, number):
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    with pytest.raises(FileError, match=f"line {number}, is no sample of a study"):
        Records(path)
    assert path.read_text() == content


def filled(path, samples=200):
    path.write_text("".join(json.dumps(RECORD | {"trial": i}) + "\n" for i in range(samples)))
    return path.read_text()


def test_a_full_disk_loses_no_sample_when_a_torn_line_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = filled(path)
    path.write_text(whole + '{"task": "nee')
    with file_size_limit(4096):
        assert len(Records(path).known) == 200
    assert path.read_text() == whole


@pytest.mark.parametrize("room", [0, 1, 50, 150])
def test_a_full_disk_adds_all_of_a_batch_or_none(tmp_path, room):
    path = tmp_path / "log.jsonl"
    whole = filled(path, 3)
    records = Records(path)
    batch = [RECORD | {"trial": 10}, RECORD | {"trial": 11}]
    with file_size_limit(len(whole) + room), pytest.raises(FileError, match="cannot be written"):
        records.add(batch)
    assert path.read_text() == whole and len(records.known) == 3
    records.add(batch)
    assert Records(path).known == records.known and len(records.known) == 5


def test_a_line_that_another_process_left_torn_is_dropped_before_the_next_is_added(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = filled(path, 3)
    records = Records(path)
    path.write_text(whole + '{"task"' + "x" * 200_000)
    records.add([RECORD | {"trial": 10}])
    assert path.read_text() == whole + json.dumps(RECORD | {"trial": 10}) + "\n"


@pytest.mark.parametrize("seed", range(300))
def test_damaged_samples_are_read_or_refused_with_one_class_of_error(tmp_path, seed):
    path, rng = tmp_path / "log.jsonl", random.Random(seed)
    data = bytearray(filled(path, 4).encode())
    at, size = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 60])
    data[at : at + size] = rng.choice([rng.randbytes(size), b"[" * size * 2000, b"", b'"\n{"'])
    path.write_bytes(data)
    try:
        known = Records(path).known
    except FileError as error:
        assert str(path) in str(error) and path.read_bytes() == data
    else:
        assert len(known) <= 6


def test_a_place_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for place in ("folder", "pipe", "file/log.jsonl"):
        with pytest.raises(FileError):
            Records(tmp_path / place)
