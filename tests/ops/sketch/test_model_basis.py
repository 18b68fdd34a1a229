"""The basis that a model has once: its turning of keys, beside complex numbers and sums over
positions; and that its codes keep the scores of a prompt, wherever in it a key stands."""

import pytest
import torch
from sketch_cases import random

from attnplug.errors import ArgumentError
from attnplug.ops.sketch.model_basis import (
    BAND,
    SPAN,
    ModelBasis,
    Moments,
    _Pairs,
    back_to_start,
    fit_model_basis,
    size_for,
    turn,
)
from attnplug.ops.sketch.state import COORDINATES


def frequencies(pairs, theta=10000.0):
    return (theta ** (-torch.arange(pairs).double() / pairs)).float()


def moments_of(k, q):
    """Of keys `[H, N, D]` and queries, by the definition."""
    k, q = k.double(), q.double()
    return Moments(k.mean(1), k.mT @ k / k.shape[1], q.mT @ q / q.shape[1])


@pytest.mark.parametrize("pairs, width", [(32, 64), (16, 64), (0, 64), (24, 80)])
def test_a_turn_is_ropes_and_can_be_taken_back(pairs, width):
    x = random(0, 2, 5, width).double()
    angles = torch.arange(5).double()[:, None] * frequencies(pairs).double()
    turned = turn(x, angles)
    z = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.polar(
        torch.ones_like(angles), angles
    )
    wanted = torch.cat((z.real, z.imag, x[..., 2 * pairs :]), -1)
    assert torch.allclose(turned, wanted, atol=1e-12)
    assert torch.allclose(turn(turned, -angles), x, atol=1e-12)


@pytest.mark.parametrize("pairs, width", [(32, 64), (16, 64), (24, 80)])
def test_moments_over_positions_are_sums_over_positions(pairs, width):
    """The closed form is an integral: beside it the mean over steps of a tenth of a position."""
    inv_freq, k = frequencies(pairs), random(1, 2, 40, width).double()
    m = moments_of(k, k)
    found = _Pairs.of(inv_freq, width)
    steps = (torch.arange(640).double() + 0.5) / 10
    angles = steps[:, None] * inv_freq.double()
    each = torch.stack([turn(m.k_mean[:, None], a[None])[:, 0] for a in angles])
    assert torch.allclose(found.mean_turned(m.k_mean, 64), each.mean(0), atol=1e-4)
    pairs_each = [turn(turn(m.k_pairs, a[None]).mT, a[None]).mT for a in angles]
    wanted = torch.stack(pairs_each).mean(0)
    assert torch.allclose(found.pairs_turned(m.k_pairs, 64), wanted, atol=1e-3)


def rotated(x, inv_freq, at):
    return turn(x.double(), at.double()[:, None] * inv_freq.double()).float()


@pytest.mark.parametrize("size, width, partial", [(24, 64, 1), (32, 128, 1), (16, 80, 2)])
def test_scores_are_kept_at_every_position(size, width, partial):
    """Of keys with leading directions: the part of the scores' variance that the codes lose is the
    same in the first band and half a million tokens later, and small."""
    inv_freq = frequencies(width // 2 // partial)
    strong = 0.8 ** torch.arange(width)
    k = random(2, 2, 3000, width) * strong + random(3, 2, 1, width)
    q = random(4, 6, 500, width) * strong.flip(0).add(0.2)
    basis = fit_model_basis(moments_of(k, q), inv_freq, size=size)
    fine, coarse = COORDINATES[size]
    most = torch.tensor([15.0] * fine + [3.0] * coarse)
    lost = []
    for begin in (300, 524_288 + 1500):
        at = begin + torch.arange(1000)
        turned = rotated(k[:, :1000], inv_freq, at)
        query = rotated(q[:, :1], inv_freq, at[-1:] + 1)[:, 0].unflatten(0, (2, 3))
        angles = back_to_start(inv_freq, (begin + 1000) // BAND + 1)
        scores, exact = [], []
        for n, key in zip(at.tolist(), turned.unbind(1), strict=True):
            angle = angles[n // BAND][None]
            x = turn(key[:, None].double(), angle).float() @ basis.encoder[:, :-1]
            codes = torch.minimum((x[:, 0] + basis.encoder[:, -1] + 0.5).floor().clamp(0), most)
            facts = turn(query.double(), angle).float() @ basis.scorer
            scores.append((facts[..., :-1] * codes[:, None]).sum(-1) + facts[..., -1])
            exact.append((query * key[:, None]).sum(-1))
        scores, exact = torch.stack(scores, -1), torch.stack(exact, -1)
        lost.append(((scores - exact).var(-1) / exact.var(-1)).mean().item())
    assert max(lost) < 0.12 and max(lost) < 1.5 * min(lost)


def test_the_turn_back_is_exact_where_float32_is_not():
    inv_freq, bands = frequencies(32), SPAN // BAND
    angles = back_to_start(inv_freq, bands)
    assert angles.dtype == torch.float64 and angles.shape == (bands, 32)
    assert torch.equal(angles[-1], -(bands - 1) * BAND * inv_freq.double())


def test_what_does_not_fit_is_refused():
    m = moments_of(random(0, 2, 50, 64), random(1, 4, 50, 64))
    with pytest.raises(ArgumentError, match="bytes is 32, 96 coordinates"):
        fit_model_basis(m, frequencies(32), size=32)
    with pytest.raises(ArgumentError, match=r"inv_freq has shape \(33,\)"):
        fit_model_basis(m, frequencies(33))
    with pytest.raises(ArgumentError, match="3 query heads are no multiple of 2 KV heads"):
        fit_model_basis(m._replace(q_pairs=m.q_pairs[:3]), frequencies(32))


def test_a_width_has_its_size():
    assert [size_for(width) for width in (64, 80, 96, 128, 256)] == [24, 24, 32, 32, 32]
    m = moments_of(random(0, 2, 500, 128), random(1, 4, 500, 128))
    basis = fit_model_basis(m, frequencies(64))
    assert isinstance(basis, ModelBasis)
    assert basis.encoder.shape == (2, 129, 96) and basis.scorer.shape == (2, 128, 97)


def test_zeros_give_finite_numbers():
    """Layers may be dead, and a text may be too short to say anything of a head."""
    m = Moments(torch.zeros(1, 64).double(), *(torch.zeros(n, 64, 64).double() for n in (1, 2)))
    assert all(x.isfinite().all() for x in fit_model_basis(m, frequencies(32)))
