"""The kernel that lists many blocks (`select_many`), by itself, on scores of every kind."""

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from attnplug.ops.gather.select_blocks import Scores, launch_choice
from attnplug.ops.gather.select_plan import Plan

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)]
if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICES.insert(0, "cpu")
NO_CANDIDATE = -0x80000000
BLOCK = 16


def keys_of(scores):
    """What the score kernel stores: larger for larger scores."""
    bits = scores.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def listed(scores, candidates, top_k, members, warps, device, **choices):
    """The list of each row of `scores [rows, blocks]`, of which `candidates` are True."""
    rows, blocks = scores.shape
    keys = torch.where(candidates, keys_of(scores), NO_CANDIDATE)
    best = keys
    if members:
        room = torch.full((rows, -blocks % members), NO_CANDIDATE, dtype=torch.int32)
        best = torch.cat([keys, room], 1).unflatten(1, (-1, members)).amax(2)
    plan = Plan(chunk=16, members=members, warps=4, select_warps=warps, **choices)
    left = Scores(keys.flatten().to(device), best.flatten().to(device), plan)
    k = torch.empty(1, device=device).expand(1, rows, blocks * BLOCK, 16)
    length = torch.tensor([blocks * BLOCK], device=device)  # all but the last, the local one
    out = torch.full((1, rows, 1, top_k), -7, dtype=torch.int32, device=device)
    launch_choice(left, k, None, BLOCK, top_k, 1, length, None, blocks, out)
    return out[0, :, 0].cpu()


def wanted(scores, candidates, top_k):
    """The best in ascending order, ties to the lower block."""
    lists = []
    for row, usable in zip(scores.tolist(), candidates.tolist(), strict=True):
        blocks = [j for j in range(len(row) - 1) if usable[j]]
        best = sorted(sorted(blocks, key=lambda j, row=row: (-row[j], j))[:top_k])
        lists.append(best + [-1] * (top_k - len(best)))
    return torch.tensor(lists, dtype=torch.int32)


KINDS = {
    "bell": lambda x: x,
    "negative": lambda x: x - 9,
    "all magnitudes": lambda x: (40 * x).sinh(),
    "few values": lambda x: x.round(),
    "two values": lambda x: (x > 1.5).float(),
    "equal": lambda x: x * 0 - 1,
    "infinite": lambda x: torch.where(x.abs() > 1.5, x * torch.inf, x),
    "neighbours": lambda x: 1 + x.round() * 2.0**-23,
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("device", DEVICES)
def test_lists_the_best_in_order(device, data):
    draw = data.draw
    blocks = draw(st.sampled_from([40, 130, 700, 1500]))
    members, warps = draw(st.sampled_from([0, 1, 4, 8, 16])), draw(st.sampled_from([2, 4, 8]))
    top_k, share = draw(st.sampled_from([33, 64, 100])), draw(st.sampled_from([1.0, 0.3, 0.02, 0]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    drawn = torch.randn(2, blocks, generator=random)
    kinds = draw(st.tuples(*[st.sampled_from(sorted(KINDS))] * 2))
    scores = torch.stack([KINDS[kind](row) for kind, row in zip(kinds, drawn, strict=True)]) + 0.0
    candidates = torch.rand(2, blocks, generator=random) < share
    direct = draw(st.booleans())
    found = listed(scores, candidates, top_k, members, warps, device, direct=direct)
    assert torch.equal(found, wanted(scores, candidates, top_k))


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "members"), [(8192, 0), (8192, 8), (65536, 16), (65536, 32)])
@pytest.mark.parametrize("warps", [4, 8, 16])
@pytest.mark.parametrize("direct", [False, True])
def test_lists_the_best_of_many(blocks, members, warps, direct):
    random = torch.Generator().manual_seed(blocks + members)
    drawn = torch.randn(len(KINDS), blocks, generator=random)
    scores = torch.stack([kind(row) for kind, row in zip(KINDS.values(), drawn, strict=True)]) + 0.0
    candidates = torch.ones_like(scores, dtype=torch.bool)
    found = listed(scores, candidates, 256, members, warps, "cuda", direct=direct)
    assert torch.equal(found, wanted(scores, candidates, 256))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_all_of_a_second_level_are_counted(device):
    """256 groups of 128 hold 32,768 blocks, all above the first level's cut: a count of 16 bits
    whose highest is set."""
    members, top_k = 128, 256
    scores = torch.full((1, 300 * members), 1e-3)
    random = torch.Generator().manual_seed(0)
    hot = torch.randperm(299, generator=random)[:top_k]
    scores.view(300, members)[hot] = 100 + torch.rand(top_k, members, generator=random)
    candidates = torch.ones_like(scores, dtype=torch.bool)
    found = listed(scores, candidates, top_k, members, 8, device)
    assert torch.equal(found, wanted(scores, candidates, top_k))
