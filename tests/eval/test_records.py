"""The log of a study knows a record again."""

import json

from attnplug.eval.records import KEY, Records

RECORD = dict.fromkeys(KEY, 0) | {"policy": "momo(selection='exact')"}


def test_a_record_under_an_options_old_name_is_known(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(RECORD | {"policy": "momo(topk='exact')"}) + "\n")
    records = Records(path)
    records.add([RECORD, RECORD | {"trial": 1}])
    assert len(records.known) == len(path.read_text().splitlines()) == 2
