"""certified_attention where few blocks are promoted, without a list: programs that read beside
programs that sum up. Rungs, bounds and the rest are `test_certified_attention.py`."""

import pytest
import torch
from certified_cases import KERNEL_PATHS, LOOSE, attend, counted, exact, gaussian, hold, op, rungs

from attnplug.ops.certified import launch as launcher
from attnplug.ops.certified.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

FEW = [  # k_min, k_max, blocks that are alike, size, group, (programs that sum up, that read)
    (0, 128, 6, 197, 3, (2, 2)),
    (1, 128, 6, 197, 3, (2, 2)),  # more than programs read
    (2, 128, 1, 197, 2, (4, 1)),
    (2, 128, 6, 197, 1, (16, 4)),
    (4, 128, 6, 197, 3, (1, 8)),
    (1, 1, 6, 197, 3, (2, 2)),  # more alike than may be promoted: none is
    (4, 128, 1, 37, 2, (2, 4)),  # fewer than are asked for
]


@pytest.mark.parametrize("odd", [None, 5, 165], ids=lambda at: "" if at is None else f"inf at {at}")
@pytest.mark.parametrize(("k_min", "k_max", "alike", "size", "group", "programs"), FEW, ids=str)
def test_few_blocks_are_read_each_once(
    device_path, k_min, k_max, alike, size, group, programs, odd
):
    """Where the bound decides, the largest blocks and their equals are promoted, and whole those
    whose values have no bound, as the reference does it."""
    case = gaussian(5, batch=1, group=group, size=size)
    toward = case.q.unflatten(1, (2, group)).sum(2)  # what all heads look for, in every token
    case.k[:, :, 16 : 16 * (1 + alike)] = 0.5 * toward
    if odd is not None:
        case.v[0, 1, odd % size, 3] = torch.inf
    plan = Plan(splits=3, pieces=2, inline_chunks=programs[0], inline_readers=programs[1])

    def tokens(path, **options):
        found, telemetry = counted(path, case, plan=plan, **options)
        fields = dict(zip(op.TELEMETRY, telemetry[0, :, 0].unbind(-1), strict=True))
        return found, torch.stack([fields["key_tokens"], fields["value_tokens"]])

    ranking = min(k_min, 1) if alike == 1 else 0
    options = LOOSE | {"k_min": k_min, "k_max": k_max, "ranking": ranking}
    found, read = tokens(device_path, **options)
    want, should = tokens(("cpu", "reference"), **options)
    assert torch.equal(found.rungs, want.rungs) and torch.equal(read, should)
    torch.testing.assert_close(found.out, want.out, atol=2e-5, rtol=1e-4, equal_nan=True)
    if alike == 6 and odd is None:
        promoted = 6 if 0 < k_min and 6 <= k_max else 0
        assert (read[0] == 16 * promoted + 5).all() and (read[1] == 5).all(), read
        assert (found.rungs == 0).all()


@pytest.mark.parametrize("device_path", KERNEL_PATHS)
def test_readers_must_read_the_blocks_that_are_left_out_of_the_sums(device_path, monkeypatch):
    """Else every head of the row is recomputed, and of no other row."""
    case = gaussian(5, size=197)
    finish = launcher._Step.finish

    def other_block(step, *arguments):
        step.memory.promotion.read_digest[1] += 1  # the second KV head of the first row
        finish(step, *arguments)

    monkeypatch.setattr(launcher._Step, "finish", other_block)
    found = attend(device_path, case, **LOOSE | {"k_min": 2})
    assert torch.equal(rungs(found, "row"), torch.tensor([[True] * 4, [False] * 4]))
    assert torch.equal(rungs(found, "check"), rungs(found, "row"))
    assert exact(found, case)[0].all() and (found.bounds[0, :, :2] == 0).all()
    hold(found, case)
