"""Rows divided in one launch are those that the rule of the policies says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops.common import divide_rows as module
from attnplug.ops.common.divide_rows import divide_rows
from attnplug.policies.crossover import RowCrossover


def divided(device_path, lengths, row, alone, steps):
    lengths = lengths.to(device_path[0])
    made = torch.full_like(lengths, -7), torch.full_like(lengths, -7)
    made = *made, torch.zeros_like(lengths, dtype=torch.bool)
    if device_path == ("cpu", "kernel"):
        module._allocate(lengths, *made, row, alone, steps)
        module.launch_divide_rows(lengths, *made, row, alone, steps)
    else:
        divide_rows(lengths, *made, row=row, alone=alone, steps=steps)
    return [x.cpu() for x in made]


@given(data=st.data())
def test_rows_are_divided_as_the_rule_says(device_path, data):
    draw = data.draw
    row = draw(st.sampled_from([0, 1, 100, 2**20]))
    alone = row + draw(st.sampled_from([0, 1, 150, 2**30]))
    near_row = st.sampled_from([0, 1, max(row - 1, 0), row, row + 1, row + 75, alone])
    length = st.one_of(near_row, st.integers(0, 2**30 - 1))
    lengths = draw(st.lists(length, min_size=1, max_size=70))
    steps = draw(st.integers(0, len(lengths)))
    lengths = torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    near, far, chosen = divided(device_path, lengths, row, alone, steps)
    saved = sum(max(0, n - row) for n in lengths[:steps].tolist())
    enough = saved >= alone - row
    wanted = [i < steps and n >= max(1, row) and enough for i, n in enumerate(lengths.tolist())]
    assert chosen.tolist() == wanted
    if steps:
        rule = RowCrossover(row, alone).far(lengths[:steps].long())
        assert torch.equal(rule, chosen[:steps])
    assert torch.equal(far, lengths * chosen) and torch.equal(near, lengths * ~chosen)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": torch.zeros(3)}, "lengths is torch.float32"),
        ({"near": torch.zeros(3, dtype=torch.int64)}, "near is torch.int64"),
        ({"far": torch.zeros(2, dtype=torch.int32)}, r"far is torch.int32 \(2,\)"),
        ({"chosen": torch.zeros(3, dtype=torch.int32)}, "chosen is torch.int32"),
    ],
)
def test_refuses(change, message):
    lengths = torch.zeros(3, dtype=torch.int32)
    inputs = dict(lengths=lengths, near=lengths, far=lengths, chosen=lengths.bool())
    with pytest.raises(ArgumentError, match="^divide_rows: " + message):
        divide_rows(**(inputs | change), row=1, alone=2)
