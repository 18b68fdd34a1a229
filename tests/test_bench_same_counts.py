"""bench/same_counts.py: a cell that was run again, beside what is committed."""

import importlib
import json
import lzma
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
RECORD = {
    "task": "needle-noise", "model": "m", "n": 4096, "seed": 0, "policy": "gvr", "batch": 2,
    "device": "cuda", "dtype": "bfloat16", "prompt_hash": "a", "reply": "7", "score": 1.0,
}  # fmt: skip


@pytest.fixture
def same(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("same_counts")
    for name in ("same_counts", "eval_rows", "_results"):
        sys.modules.pop(name, None)


def ends(same, folder, now):
    """How a comparison of two committed prompts with these ends."""
    then = [RECORD | {"trial": trial} for trial in (0, 1)]
    text = "".join(json.dumps(record) + "\n" for record in then)
    (folder / "m.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (folder / "now.jsonl").write_text("".join(json.dumps(record) + "\n" for record in now))
    return same.main("m", folder / "now.jsonl", folder)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 0),
        ({"reply": "7 is it"}, 0),  # another text, the same answer
        ({"score": 0.0}, 1),
        ({"prompt_hash": "b"}, 1),
        ({"task": "needle-prose"}, 1),  # nothing committed
    ],
)
def test_it_ends_with_1_unless_prompts_and_sums_are_those_of_then(same, tmp_path, change, status):
    now = [RECORD | {"trial": 0}, RECORD | {"trial": 1} | change]
    assert ends(same, tmp_path, now) == status


def test_a_cell_of_fewer_prompts_or_none_is_not_the_same(same, tmp_path, capsys):
    assert ends(same, tmp_path, [RECORD | {"trial": 0}]) == 1
    assert "needle-noise\t4096\tgvr\t2 then, 1 now, 1 of 1 replies" in capsys.readouterr().out
    assert ends(same, tmp_path, []) == 1
