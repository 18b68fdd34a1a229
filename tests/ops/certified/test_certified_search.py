"""The searches for a threshold of certified_attention: all blocks in registers, and in tiles."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from certified_cases import KERNEL_PATHS, LOOSE, counted, gaussian, op

from attnplug.ops.certified import plan as plans
from attnplug.ops.certified import reference
from attnplug.ops.certified.kernels.search import FEW, search, search_few

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@triton.jit
def found_by(
    x_at,
    logs,
    norm,
    own,
    goal,
    least,
    most,
    blocks,
    N,
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    TILE: tl.constexpr,
    HELD: tl.constexpr,
):
    """The threshold of one KV head."""
    g = tl.arange(0, GP)
    there = g < GROUP
    x = search(
        logs_at=logs + g * N,
        norm=tl.load(norm + g, mask=there, other=0.0),
        rest_mass=tl.load(own + g, mask=there, other=1.0),
        coverage=tl.load(goal + g, mask=there, other=0.0),
        least=least,
        most=most,
        blocks=blocks,
        in_group=there,
        GP=GP,
        TILE=TILE,
        HELD=HELD,
        COVERS=True,
    )
    tl.store(x_at, x)


CELL = 41 / 9**4  # how finely thresholds lie
EDGE = -40 + 600 * 9 * CELL  # one that three of the four rounds can end with
SEARCHES = {  # blocks, of how many, heads, (least, most), coverage, what is odd
    "one head": (5, 5, 1, (1, 128), 0.995, None),
    "a tile and a bit": (1025, 1025, 4, (2, 1024), 0.995, None),
    "two tiles": (2048, 2049, 4, (2, 1024), 0.9, None),
    "two and a half": (2600, 3001, 2, (2, 1024), 0.5, None),
    "eight heads": (1500, 2048, 7, (0, 1024), 0.4, None),
    "not reached": (2048, 2048, 3, (1, 8), 1.0, None),
    "few": (2048, 2048, 4, (40, 256), 0.0, None),
    # More alike than may be promoted: none is. Just above what the last round begins with, and
    # between its second threshold and its third.
    "alike": (1300, 1300, 2, (1, 128), 0.5, EDGE + CELL / 2),
    "alike, above": (1300, 1300, 2, (1, 128), 0.5, EDGE + 2.5 * CELL),
    "NaN": (1100, 1100, 4, (2, 128), 0.9, "nan"),
    "none": (0, 16, 4, (2, 128), 0.9, None),
}


def masses(blocks, heads, odd):
    """Log-masses [heads, N], which are 1 with the own shares, norms and own shares [heads]."""
    random = np.random.default_rng(blocks + heads)
    own = 2.0 ** -random.integers(3, 8, heads).astype(np.float32)
    share = random.lognormal(0, 1, (heads, blocks))
    logs = np.log2(share / share.sum(1, keepdims=True) * (1 - own[:, None])).astype(np.float32)
    if isinstance(odd, float):
        logs[:] = -30.0
        logs[:, 7:700] = odd
    if odd == "nan":
        logs[1, 1050] = np.nan
    return logs, np.zeros(heads, np.float32), own


@pytest.mark.parametrize(
    ("blocks", "size", "heads", "counts", "coverage", "odd"), SEARCHES.values(), ids=SEARCHES
)
def test_a_search_is_the_references(device, blocks, size, heads, counts, coverage, odd):
    logs, norm, own = masses(size, heads, odd)
    least, most = counts
    rows = [torch.from_numpy(x).to(device) for x in (logs, norm, own)]
    goal = torch.full((heads,), coverage, device=device)
    every, width = triton.next_power_of_2(size), triton.next_power_of_2(heads)
    held = plans.held_blocks(every, width)
    assert held > 0
    found = []
    for tile, in_registers in ((512, held), (512, 0), (64, 0)):
        x = torch.full((1,), torch.nan, device=device)
        found_by[(1,)](
            x, *rows, goal, least, most, blocks, size, heads, width,
            max(16, min(every, tile)), in_registers, num_warps=8,
        )  # fmt: skip
        found.append(float(x))
    mass = np.exp2(logs[:, :blocks])
    score = np.log2(np.nanmax(mass, 0, initial=0.0) + np.float32(1e-37)).astype(np.float32)
    want = reference._search(score, mass, own, coverage, least, most)
    chosen = [score >= x for x in (*found, want)]
    assert all((one == chosen[-1]).all() for one in chosen)
    if isinstance(odd, float):
        assert not chosen[-1].any()
    elif blocks > 5:
        assert 0 < chosen[-1].sum() < blocks


@triton.jit
def few_found_by(x_at, found_at, shares, most, N, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    share = tl.load(shares + i, mask=i < N, other=0.0)
    score = tl.where(i < N, tl.log2(share + 1e-37), float("-inf"))
    x, found = search_few(share, score, tl.sum(share, 0), most)
    tl.store(x_at, x)
    tl.store(found_at, found.to(tl.int32))


FEWS = {  # the largest shares, what the others are in all, most, blocks that are needed
    "none": ([0.3], 0.6, 128, 0),
    "none of nothing": ([0.0], 0.0, 128, 0),
    "one": ([1.9], 0.9, 128, 1),
    "as large as each other": ([0.4, 0.4, 0.4], 0.1, 128, 3),
    "three": ([1.9, 0.7, 0.6, 0.1], 0.8, 128, 3),
    "as many as it finds": ([1.9] * FEW.value, 0.9, 128, FEW.value),
    "one more": ([1.9 - i / 100 for i in range(FEW.value + 1)], 0.9, 128, None),
    "more than may be": ([1.9, 1.5, 1.2], 0.9, 2, None),
}


@pytest.mark.parametrize(("largest", "others", "most", "needed"), FEWS.values(), ids=FEWS)
def test_a_few_blocks_are_the_references(device, largest, others, most, needed):
    share = np.full(300, others / (300 - len(largest)), np.float32)
    share[11 : 11 + len(largest)] = largest
    x, found = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    there = torch.from_numpy(share).to(device)
    few_found_by[(1,)](x, found, there, most, 300, 512, num_warps=8)
    assert bool(found) == (needed is not None)
    if needed is None:
        return  # `weigh_heads` searches on
    score = np.log2(share + np.float32(1e-37))
    own = np.array([1 - share.sum()], np.float32)
    want = reference._search(score, share[:, None], own, 0.0, 0, most)
    assert (score >= float(x)).sum() == (score >= want).sum() == needed


COVERS = [
    LOOSE | {"coverage": 0.3, "k_min": 1},
    LOOSE | {"coverage": 0.95},
    LOOSE | {"tolerance": 0.5},
    LOOSE | {"tolerance": 0.28, "coverage": 0.3, "k_min": 1},
]


@pytest.mark.parametrize("device_path", KERNEL_PATHS)
@pytest.mark.parametrize("options", COVERS, ids=str)
def test_both_searches_choose_alike(device_path, options, monkeypatch):
    """And as the reference does."""
    case = gaussian(4, batch=1, group=3, size=600)  # no block of it lies at the very edge

    def step(path):
        found, telemetry = counted(path, case, **options)
        return *found, telemetry

    want, held = step(("cpu", "reference")), step(device_path)
    monkeypatch.setattr(plans, "HELD", 0)
    monkeypatch.setattr(plans, "WEIGHED", 16)
    monkeypatch.setattr(plans, "CHOOSING", plans.CHOOSING._replace(tile=16))  # three tiles
    tiles = step(device_path)
    assert all(torch.equal(a, b) for a, b in zip(held, tiles, strict=True))
    assert torch.equal(held[3], want[3])  # rungs
    # The kernels foresee more rounding than the reference, and may need a block more for it.
    room = case.block if "tolerance" in options else 0
    for name in ("key_tokens", "value_tokens"):
        at = op.TELEMETRY.index(name)
        off = (held[-1][..., at] - want[-1][..., at]).abs()
        assert (off <= room).all(), name
    tail = 600 % case.block  # tokens that are read exactly in any case
    assert (held[-1][:, :, 0, op.TELEMETRY.index("key_tokens")] > tail).all()
    whole = held[-1][:, :, 0, op.TELEMETRY.index("value_tokens")]
    assert (whole > tail).all() == ("tolerance" in options)
    if "tolerance" in options:
        assert (held[3] & op.RUNGS["needed"]).any()


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_what_is_held_has_room(heads):
    """80 words of a thread at most, of 255 registers."""
    threads = 32 * plans.CHOOSING.warps
    for blocks in (16, 1024, 2048, 4096, 8192, 16384):
        tile = plans.held_blocks(blocks, heads)
        assert tile in (0, max(1024, blocks)) and tile * (heads + 1) <= 80 * threads
    assert plans.held_blocks(4096, 4) == 4096
