"""The two searches for a threshold of certified_attention: blocks in registers, and in tiles."""

import importlib

import pytest
import torch
from certified_cases import LOOSE, attend, gaussian, op

launcher = importlib.import_module("attnplug.ops._certified_triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

COVERS = [
    LOOSE | {"coverage": 0.3, "k_min": 1},
    LOOSE | {"coverage": 0.95},
    LOOSE | {"coverage": 0.95, "k_max": 8},  # not reached
    LOOSE | {"coverage": 0.1, "k_min": 20},
    LOOSE | {"coverage": 0.3, "k_max": 8, "key_tolerance": 1e-3},  # expands
    LOOSE | {"value_budget": 0.05},
    {"coverage": 0.6, "value_budget": 0.02, "explore": 0.1},
]


@pytest.mark.parametrize(
    "device_path", [("cpu", "kernel"), pytest.param(("cuda", "kernel"), marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("options", COVERS, ids=str)
def test_both_searches_choose_alike(device_path, options, monkeypatch):
    """And as the reference does."""
    case = gaussian(3, batch=1, group=3, size=600)

    def step(path):
        telemetry = torch.zeros(1, 2, 3, len(op.TELEMETRY), dtype=torch.float64, device=path[0])
        return *attend(path, case, telemetry=telemetry, **options), telemetry.cpu()

    want, held = step(("cpu", "reference")), step(device_path)
    monkeypatch.setattr(launcher, "HELD", 0)
    monkeypatch.setattr(launcher, "CHOOSING", (16, *launcher.CHOOSING[1:]))  # three tiles
    tiles = step(device_path)
    assert all(torch.equal(a, b) for a, b in zip(held, tiles, strict=True))
    assert torch.equal(held[3], want[3])  # rungs
    for name in ("key_tokens", "value_tokens"):
        at = op.TELEMETRY.index(name)
        assert torch.equal(held[4][..., at], want[4][..., at]), name
        assert (held[4][:, :, 0, at] > 0).all()
    if "key_tolerance" in options:
        assert (held[3] & op.RUNGS["expanded"]).any()


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_what_is_held_has_room(heads):
    """80 words of a thread at most, of 255 registers."""
    for blocks in (16, 1024, 2048, 4096, 8192, 16384):
        tile = launcher.held_blocks(blocks, heads)
        assert tile in (0, max(1024, blocks)) and tile * (heads + 1) <= 80 * 8 * 32
    assert launcher.held_blocks(1024, 4) == 1024 and launcher.held_blocks(4096, 4) == 4096
