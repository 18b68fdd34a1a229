"""The crossover of a batch's rows: the tokens of all of them decide, on the device, and what the
rule calls far is what the committed rows measured to be faster."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Certified, Gather, Gvr, Sketch
from attnplug.policies import auto, parse
from attnplug.policies.crossover import RowCrossover

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CUDA = torch.device("cuda")
LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=9)


def counted(rule: RowCrossover, lengths: list[int]) -> list[bool]:
    """The rule by its words: what all rows save is what the step's price comes to, or more."""
    saved = sum(n - rule.row for n in lengths if n > rule.row)
    return [n > 0 and n >= rule.row and saved >= rule.alone - rule.row for n in lengths]


@given(st.integers(0, 200), st.integers(0, 300), LENGTHS, st.booleans())
def test_the_tokens_of_all_rows_decide(row, more, lengths, wide):
    rule = RowCrossover(row, row + more)
    given_lengths = torch.tensor(lengths, dtype=torch.int64 if wide else torch.int32)
    found = rule.far(given_lengths)
    assert found.dtype == torch.bool and found.tolist() == counted(rule, lengths)
    assert rule.far(given_lengths.flip(0)).tolist() == found.tolist()[::-1]
    padded = torch.cat([given_lengths, given_lengths.new_zeros(5)])
    assert rule.far(padded).tolist() == [*found.tolist(), *[False] * 5]
    if found.any():  # a longer row never takes a far one away
        assert rule.far(given_lengths + 1)[found].all()
    for length in lengths:  # a row alone goes by the crossover that was measured
        assert rule.far(torch.tensor([length])).item() == (length > 0 and length >= rule.alone)


@given(st.integers(0, 200), st.integers(0, 300), st.integers(1, 9), st.integers(1, 600))
def test_what_is_not_reachable_never_happens(row, more, rows, room):
    rule = RowCrossover(row, row + more)
    assert rule.reachable(rows, room) == bool(rule.far(torch.full((rows,), room)).any())


@given(st.integers(0, 200), st.integers(0, 300), st.integers(1, 9))
def test_the_least_room_is_the_first_that_is_reachable(row, more, rows):
    rule = RowCrossover(row, row + more)
    least = rule.least(rows)
    assert rule.reachable(rows, least) and not rule.reachable(rows, least - 1)


@pytest.mark.parametrize("method, alone", [(Gather(), 65536), (Sketch(), 98304)], ids=str)
def test_rows_of_one_cache_share_the_price(method, alone):
    rule = method.row_crossover(CUDA)
    for rows in (1, 2, 8):
        assert method.serves(rows, rule.least(rows), CUDA)
        assert not method.serves(rows, rule.least(rows) - 1, CUDA)
    assert rule.least(1) == method.crossover(CUDA) == alone
    assert rule.least(8) < 32768 < rule.least(2)
    asked = dataclasses.replace(method, min_tokens=65536)
    assert asked.serves(8, 65536, CUDA) and not asked.serves(8, 65535, CUDA)


def test_auto_serves_no_batch_of_shorter_rows_than_were_measured():
    sketch = next(c for c in auto.CANDIDATES["faithful"]["decode"] if c.method.name == "sketch")
    assert sketch.method.row_crossover(CUDA) == (32768, 98304)


def test_a_sum_past_32_bits_is_still_a_sum():
    rule = RowCrossover(0, 2**33)
    assert rule.far(torch.full((5,), 2**31 - 1, dtype=torch.int32)).all()
    assert not rule.far(torch.full((4,), 2**31 - 1, dtype=torch.int32)).any()


def test_lengths_stay_on_the_device():
    """No value is asked for: fake tensors have none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert RowCrossover(5, 9).far(torch.empty(3, dtype=torch.int32)).shape == (3,)


def test_eight_rows_of_32k_are_far_where_one_is_not():
    rule = Gather().row_crossover(CUDA)
    assert not rule.far(torch.tensor([8192])) and not rule.far(torch.tensor([32768]))
    assert rule.far(torch.full((8,), 32768)).all()
    assert rule.far(torch.tensor([131072]))
    mixed = rule.far(torch.tensor([131072, 8192, 0, 16384]))
    assert mixed.tolist() == [True, False, False, True]  # the second saves nothing


def test_an_explicit_min_tokens_knows_no_batch():
    """The results of a request then do not depend on the others."""
    rule = Gather(min_tokens=20_000).row_crossover(CUDA)
    assert rule == (20_000, 20_000)
    assert rule.far(torch.tensor([19_999] * 64 + [20_000])).tolist() == [False] * 64 + [True]


def test_without_rows_of_batches_each_row_counts_alone():
    assert Gvr().row_crossover(CUDA) == (163840, 163840)
    cpu = torch.device("cpu")
    assert Gather().row_crossover(cpu) == (Gather().crossover(cpu),) * 2


@pytest.mark.parametrize("method", [Gvr(), Certified(), Certified(tolerance=None, explore=0.0)])
def test_on_a_cpu_what_lost_at_every_length_waits_as_long_as_sketch(method):
    cpu = torch.device("cpu")
    assert method.crossover(cpu) >= Sketch().crossover(cpu) == 524288
    assert not method.serves(64, 262144, cpu)


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def default_of(row: dict) -> Gather:
    """The row's policy with the crossover of its options."""
    import dataclasses

    decode = parse(row["policy"]).decode
    assert isinstance(decode, Gather)
    return dataclasses.replace(decode, min_tokens=None)


E2E = [
    row
    for row in rows_of("e2e_gather") + rows_of("gather")
    if row["case"] == "e2e-decode" and row.get("peer") == "dense"
]


@pytest.mark.parametrize(
    "row", E2E, ids=lambda r: f"{r['heads_q']}-{r['n']}x{r['batch']}-{r['options']}"
)
def test_far_rows_are_those_that_whole_models_measured_faster(row):
    far = default_of(row).row_crossover(CUDA).far(torch.full((row["batch"],), row["n"]))
    assert not far.any() or row["ratio"] >= 1


def test_a_row_costs_no_more_than_the_rule_counts():
    """Between batch 1 and 8, at 128K: a row's microseconds, in keys that dense reads meanwhile."""
    times = {
        (r["options"], r["batch"]): (r["p50_us"], r["peer_p50_us"])
        for r in rows_of("gather")
        if r["n"] == 131072 and r["options"] in ("k=8", "k=32")
    }
    for options in ("k=8", "k=32"):
        (one, dense_one), (eight, dense_eight) = times[options, 1], times[options, 8]
        keys = 131072 * (eight - one) / (dense_eight - dense_one)
        policy = Gather(k=int(options[2:]), block=128, sink=1, local=4)
        summaries = 131072 / policy.block / 2  # INT8
        assert keys - summaries <= policy.row_crossover(CUDA).row


def test_many_short_rows_are_far_where_the_op_measured_so():
    row = next(r for r in rows_of("gather") if r["batch"] == 64 and r["options"] == "k=8")
    assert default_of(row).row_crossover(CUDA).far(torch.full((64,), row["n"])).all()
    assert row["ratio"] >= 1
