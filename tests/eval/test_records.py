"""The log of a study knows a record again."""

import itertools
import json

import pytest

from attnplug.errors import ArgumentError
from attnplug.eval.records import KEY, Records

RECORD = dict.fromkeys(KEY, 0) | {"policy": "momo(selection='exact')"}


def test_a_record_under_an_options_old_name_is_known(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(RECORD | {"policy": "momo(topk='exact')"}) + "\n")
    records = Records(path)
    records.add([RECORD, RECORD | {"trial": 1}])
    assert len(records.known) == len(path.read_text().splitlines()) == 2


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
    with pytest.raises(ArgumentError, match=f"line {number}, is no sample of a study"):
        Records(path)
    assert path.read_text() == content
