"""Faults of certified_attention's tier and inputs: fallback or error, never a silent answer; on the
numba reference and on the Triton kernels."""

import itertools

import pytest
import torch
from certified_cases import LOOSE, attend, exact, gaussian, rungs, tier_faults

from attnplug.ops import dense_decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

FAULTS = tier_faults(block=3, value_zero=7)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_tier_is_noticed(device_path, fault):
    """The whole row is recomputed exactly; the other row is not touched."""
    case = gaussian(0, size=120)
    case.more["lengths"] = torch.tensor([100, 120])
    tier = case.tier()
    clean = attend(device_path, case, tier, **LOOSE)
    FAULTS[fault](tier)
    found = attend(device_path, case, tier, **LOOSE)
    if fault == "count":  # more blocks than there are tokens: clamped
        assert torch.equal(found.out, clean.out)
        return
    row = rungs(found, "row") & rungs(found, "check")
    assert row[0].all() and not row[1].any()
    assert exact(found, case)[0].all() and (found.bounds[0, :, :2] == 0).all()
    assert torch.equal(found.out[1], clean.out[1])


def resealed(tier, row, head, block):
    """The tier with check words that fit whatever was written to one block."""
    from attnplug.ops.certified import reference

    parts = (tier.k_codes, tier.k_meta.view(torch.int16), tier.v_codes, tier.v_meta, tier.summary)
    words = reference.check_words(block, *(x[row, head, block].numpy() for x in parts))
    tier.check[row, head, block] = torch.tensor(words).int()
    return tier


@pytest.mark.parametrize("what", ["scale", "value"])
def test_a_wrong_tier_under_a_right_check_is_noticed(device_path, what):
    """Quantized wrongly in the first place: exact scores and values of promoted blocks disagree."""
    case = gaussian(0, size=120)
    tier = case.tier()
    if what == "scale":
        tier.k_meta[1, 0, 2, 0] *= 1.5
    else:
        tier.v_meta[1, 0, 2] += 0x0200  # larger scales
    tier = resealed(tier, 1, 0, 2)
    found = attend(device_path, case, tier, coverage=1.0, k_min=64, v_tol=0.0)
    row = rungs(found, "row") & rungs(found, "score")
    assert row[1].all() and not row[0].any() and exact(found, case).all()


def test_exploration_finds_what_nothing_else_reads(device_path):
    """A block of no mass, quantized wrongly under a right check."""
    case = gaussian(0, batch=1, size=120)
    options = LOOSE | {"coverage": 0.5, "k_min": 1}
    tier = case.tier()
    tier.k_codes[0, 0, 5] = tier.k_codes[0, 0, 5].roll(1, -1)
    tier = resealed(tier, 0, 0, 5)
    found = attend(device_path, case, tier, **options | {"explore": 1.0})
    assert rungs(found, "score").all() and exact(found, case).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("where", "key"),  # of keys and values one in a block, one in the tail
    [("q", 0), *itertools.product("kv", (20, 118))],
)
def test_bad_numbers_surface_as_in_dense(device_path, bad, where, key):
    case = gaussian(0, size=120)
    getattr(case, where)[0, 1, key, 3] = bad
    found = attend(device_path, case)
    want, lse = dense_decode(case.q, case.k, case.v, scale=case.scale)
    assert torch.equal(found.out.isnan(), want.isnan())
    assert torch.equal(found.out.isinf(), want.isinf())
    assert torch.equal(found.lse.isnan(), lse.isnan())
    assert want.isnan().any() or want.isinf().any()
    good = ~want.isnan().any(-1)[..., 0] & ~want.isinf().any(-1)[..., 0]
    assert (found.out - want)[good].abs().max() < 0.3


def test_a_nan_in_the_tier_is_not_believed(device_path):
    """A scale that became NaN under a right check."""
    case = gaussian(0, size=120)
    tier = case.tier()
    tier.k_meta[0, 0, 2, 0, 7] = torch.nan
    found = attend(device_path, case, resealed(tier, 0, 0, 2))
    assert found.out.isfinite().all() and exact(found, case)[0, :2].all()
    assert (rungs(found, "head") | rungs(found, "row"))[0, :2].all()
