"""bench/tensor_parallel.py over two processes: its ranks meet where they wait, and its rows count
both of them."""

import json
import os

import pytest
from ranks import TESTS, needs_gloo, run_ranks

SMALL = ("--cpu", "--layers", "2", "--tokens", "512", "--rounds", "1", "--ways", "one-shot")


@needs_gloo
def test_it_times_one_rank_and_two(tmp_path):
    bench = str(TESTS.parent / "bench")
    rows = tmp_path / "rows.jsonl"
    # A bench is no test: from the folder of tests it lies beside it.
    script = os.path.relpath(f"{bench}/tensor_parallel.py", TESTS)
    run_ranks(script, "--policies", "dense,gather", "--out", rows, *SMALL, limit=120)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["case"], row["policy"]) for row in found] == [
        ("tp-decode", "dense"),
        ("tp-decode", "gather"),
        ("tp-ttft", "momo"),
    ]
    assert all(row["options"] == "gpus=2, layers=2" for row in found)


@needs_gloo
@pytest.mark.long
def test_a_prompt_in_pieces_is_compared_with_dense_in_pieces(tmp_path):
    rows = tmp_path / "rows.jsonl"
    script = os.path.relpath(TESTS.parent / "bench" / "million_tokens.py", TESTS)
    small = ("--cpu", "--layers", "2", "--tokens", "1024", "--warm", "512")
    run_ranks(script, "--out", rows, *small, limit=120)
    (row,) = (json.loads(line) for line in rows.read_text().splitlines())
    assert (row["case"], row["policy"], row["n"]) == ("tp-ttft", "momo", 1024)
    assert (row["peer"], row["options"]) == ("dense, 2 GPUs", "gpus=2, layers=2")
