"""The probes that rows are held against: that a read reads every word it counts."""

import pytest
import torch

from attnplug.bench import ceilings


@pytest.mark.parametrize("split", [False, True])
def test_a_read_depends_on_every_word_that_it_counts(split):
    way = ceilings.Read(tile=16, warps=1, programs=2, split=split)
    source = torch.randint(0, 1 << 20, (2 * 3 * 2 * 16 + 5,), dtype=torch.int32)  # 3 processors
    out = torch.zeros(6, dtype=torch.int32)
    ceilings.launch_read(source, out, way, 3)
    tiles = source[:192].view(-1, 16)
    tiles = tiles.view(6, 2, 16) if split else tiles.view(2, 6, 16).transpose(0, 1)
    assert torch.equal(out, (tiles[:, 0] ^ tiles[:, 1]).amax(1).to(torch.int32))
    assert ceilings.read_bytes(len(source), way, 3) == 4 * 192


def test_a_fraction_is_of_the_nearer_ceiling(monkeypatch):
    reached = {"read": 5e12, "copy": 4e12, "gemm": 1e15}
    monkeypatch.setattr(ceilings, "ceilings", lambda: reached)
    assert ceilings.ceiling_fraction(5e9, 1e11, 2e-3) == pytest.approx(0.5)
    assert ceilings.ceiling_fraction(5e8, 1e12, 2e-3) == pytest.approx(0.5)
