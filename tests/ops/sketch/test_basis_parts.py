"""The moments that a basis is made of are the same, however many tokens are widened at a time."""

import torch

from attnplug.ops.sketch import state


def test_moments_in_parts_are_those_of_all_tokens(monkeypatch):
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 2, 3000, 64, generator=random)
    q = torch.randn(2, 4, 64, 64, generator=random)
    lengths = torch.tensor([3000, 2500])
    whole = state.fit_basis(k, v, q, size=16, lengths=lengths)
    monkeypatch.setattr(state, "STEP_ROWS", 4)  # 1,024 tokens at a time, the least
    parts = state.fit_basis(k, v, q, size=16, lengths=lengths)
    # A direction may point either way; means and what a step computes do not.
    assert torch.allclose(parts.v_mean, whole.v_mean, atol=1e-6)
    spans = [b.encoder[:, :, :-1].abs() for b in (parts, whole)]
    assert torch.allclose(*spans, rtol=1e-3, atol=1e-4)
    halves = state.fit_basis(k[:, :, :1024], v[:, :, :1024], q, size=16)
    assert not torch.allclose(halves.v_mean, whole.v_mean, atol=1e-3)
