"""The moments that a basis is made of are the same, however many tokens are widened at a time; and
so are bases that are made together."""

import torch

from attnplug.ops.sketch import basis as bases


def test_moments_in_parts_are_those_of_all_tokens(monkeypatch):
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 2, 3000, 64, generator=random)
    q = torch.randn(2, 4, 64, 64, generator=random)
    lengths = torch.tensor([3000, 2500])
    whole = bases.fit_basis(k, v, q, size=16, lengths=lengths)
    monkeypatch.setattr(bases, "AT_ONCE", 4)  # a row at a time, the least
    parts = bases.fit_basis(k, v, q, size=16, lengths=lengths)
    # A direction may point either way; means and what a step computes do not.
    assert torch.allclose(parts.v_mean, whole.v_mean, atol=1e-6)
    spans = [b.encoder[:, :, :-1].abs() for b in (parts, whole)]
    assert torch.allclose(*spans, rtol=1e-3, atol=1e-4)
    halves = bases.fit_basis(k[:, :, :1024], v[:, :, :1024], q, size=16)
    assert not torch.allclose(halves.v_mean, whole.v_mean, atol=1e-3)


def test_bases_together_are_those_of_each_alone():
    """Layers of a model, of lengths and paddings of their own."""
    random = torch.Generator().manual_seed(1)
    layers = []
    for tokens in (900, 400, 900):
        k, v = torch.randn(2, 2, 3, 900, 64, generator=random)
        q = torch.randn(2, 6, 64, 64, generator=random)
        mask = torch.rand(2, 900, generator=random) > 0.2
        lengths, start = torch.tensor([tokens]), torch.tensor([0, 77])
        layers.append(bases.Fit(k, v, q, lengths, start, mask))
    together = bases.fit_bases(layers, size=16)
    assert len(together) == len(layers)
    for basis, (k, v, q, *rows) in zip(together, layers, strict=True):
        options = dict(zip(("lengths", "start", "key_mask"), rows, strict=True))
        alone = bases.fit_basis(k, v, q, size=16, **options)
        assert all(map(torch.equal, basis, alone))
    assert not torch.equal(together[0].encoder, together[2].encoder)
