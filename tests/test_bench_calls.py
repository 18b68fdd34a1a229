"""Rows of whole calls: what they are compared with."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from call_rows import rows_of_calls, rows_of_steps

RUN = {"gpu": "H", "torch": "2", "triton": "3", "commit": "c", "date": "d", "root": ""}


def call(policy, times, **more):
    about = {"n": 8, "batch": 1, "new": 1, "warm": False, "call_s": times[0], "times_s": times}
    return about | RUN | {"policy": policy} | more


def test_calls_are_compared_with_stock_or_else_with_dense():
    rows = rows_of_calls(
        [
            call("stock", [2.0, 4.0, 3.0]),
            call("dense", [1.5, 1.5, 1.5]),
            call("momo(top_k=8)+gather", [1.0, 1.0, 1.0]),
            call("dense", [1.0], new=128),
            call("auto", [0.5], new=128),
        ]
    )
    assert [(r["op"], r["options"], r["peer"]) for r in rows] == [
        ("dense", "1 new token", "stock"),
        ("momo", "1 new token", "stock"),
        ("auto", "128 new tokens", "dense"),
    ]
    assert [row["ratio"] for row in rows] == [2.0, 3.0, 2.0]
    assert rows[0]["p50_us"] == 1.5e6 and rows[0]["peer_p50_us"] == 3e6


@pytest.mark.parametrize(
    "more", [{"commit": "e"}, {"gpu": "A"}, {"root": "old"}, {"batch": 8}, {"warm": True}]
)
def test_calls_that_are_not_alike_make_no_row(more):
    assert rows_of_calls([call("stock", [2.0]), call("dense", [1.0], **more)]) == []


def test_a_line_that_is_no_call_makes_none():
    assert rows_of_calls([{"policy": "dense", "warm_s": 3.0} | RUN]) == []


def test_exacts_steps_are_compared_with_dense_and_say_what_was_accepted():
    about = RUN | {"n": 8, "batch": 1}
    mine = {"policy": "exact(draft='gather', m='auto')", "ms_a_token": 4.0} | about
    dense = {"policy": "dense", "ms_a_token": 6.0, "imposed": None} | about
    draft = {"policy": "gather(min_tokens=0)", "ms_a_token": 3.0, "imposed": None} | about
    other = dense | {"batch": 8, "ms_a_token": 9.0}
    rows = rows_of_steps([other, dense, draft, mine | {"imposed": 0.5}, mine | {"imposed": 8}])
    assert [(r["op"], r["policy"], r["options"], r["ratio"]) for r in rows] == [
        ("exact", "exact", "drafts accepted with chance 0.5", 1.5),
        ("exact", "exact", "8 drafts accepted a round", 1.5),
    ]
