"""A long search for a violated bound: adversaries of `certified_cases`, every dtype, all blocks
quantized, with the ladder, and with faults of the tier; on a GPU half of them in the shapes of the
Hopper pass. HYPOTHESIS_PROFILE=long takes fifty times the cases; `-rP` shows how many.

A part has one dtype and on a GPU one shape: the kernels of a shape take a minute to compile."""

import hypothesis
import pytest
import torch
from certified_cases import LOOSE, adversary, aligned, attend, errors, gaussian, op, random

LONG = hypothesis.settings.default.max_examples >= 300
PARTS = 6  # a multiple of the dtypes and of the two widths
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SETTINGS = [
    LOOSE,
    LOOSE | {"coverage": 0.6, "k_min": 1, "k_max": 3},
    {"ranking": 0, "explore": 0.2},
    {"tolerance": 0.05},
    LOOSE | {"tolerance": 0.2},
]


def search(device, seeds, make, fault=None):
    """(head-steps, violations, largest error / bound, head-steps that were recomputed)."""
    cases, violated, worst, again = 0, 0, 0.0, 0
    for seed in seeds:
        case = make(seed, DTYPES[seed % 3])
        tier = case.tier(device)
        if fault is not None:
            fault(tier, seed)
        for options in SETTINGS:
            path = (device, "kernel" if device == "cuda" else "reference")
            found = attend(path, case, tier, **options)
            bound = found.bounds[..., :3].double().sum(-1)
            share = errors(found, case) / bound
            cases += share.numel()
            violated += int((~(share <= 1)).sum())
            worst = max(worst, float(share.max()))
            again += int(((found.rungs & (op.HEAD | op.ROW)) > 0).sum())
    print(f"{cases} head-steps, {violated} violated, error / bound {worst:.3f}, {again} recomputed")
    return cases, violated, worst, again


def shape(device, part):
    """Every other part on a GPU has 128 channels, which the Hopper pass takes with 16 bits."""
    return {"width": 128, "group": 1 + part} if device == "cuda" and part % 2 else {}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_adversary_violates_a_bound(device, part):
    seeds = range(part, 1200 if LONG else 24, PARTS)
    cases, violated, worst, _ = search(
        device, seeds, lambda seed, dtype: adversary(seed, dtype, **shape(device, part))
    )
    assert violated == 0 and cases >= 16 * 4 * len(seeds) and worst > 0.3


@pytest.mark.parametrize("part", range(PARTS))
def test_no_errors_in_line_violate_a_bound(device, part):
    """Those of keys and of values in turn, for which spectral norms are equalities."""

    def make(seed, dtype):
        return aligned(seed, dtype, values=seed // PARTS % 2 > 0, **shape(device, part))

    seeds = range(part, 1200 if LONG else 24, PARTS)
    cases, violated, worst, _ = search(device, seeds, make)
    assert violated == 0 and cases >= 16 * 4 * len(seeds) and worst > 0.6


@pytest.mark.parametrize("part", range(PARTS))
def test_no_gaussian_cache_violates_a_bound(device, part):
    """Wide, narrow and peaked attention, ties included."""

    sizes = {"batch": 4, "kv_heads": 2, "group": 3} | shape(device, part)

    def make(seed, dtype):
        case = gaussian(seed, dtype, size=150, **sizes)
        case.q *= 10 ** (seed % 5 - 2)
        if seed % 4 == 0:
            case.k[:, :, 32:64] = case.k[:, :, 64:96]  # blocks alike
        if seed % 7 == 0:
            case.v[..., 5] *= 100
        return case

    seeds = range(part, 400 if LONG else 8, PARTS)
    cases, violated, _, _ = search(device, seeds, make)
    heads = 4 * 2 * sizes["group"] * len(seeds)
    assert violated == 0 and cases == heads * len(SETTINGS)


def corrupt(tier, seed):
    """Flip bits of one tensor of the tier at some places, as a faulty memory would."""
    tensor = tier[(seed + seed // PARTS) % 6]  # each part has each of them
    flat = tensor.view(torch.uint8).flatten()
    places = torch.randint(0, flat.numel(), (3,), generator=torch.Generator().manual_seed(seed))
    flat[places.to(flat.device)] ^= 1 << seed % 8


@pytest.mark.parametrize("part", range(PARTS))
def test_no_flipped_bit_is_believed(device, part):
    """Rows whose quantized blocks were written to are exact; nothing violates a bound."""

    def make(seed, dtype):
        return gaussian(seed, dtype, size=160, **shape(device, part))

    seeds = range(part, 600 if LONG else 12, PARTS)
    cases, violated, _, again = search(device, seeds, make, corrupt)
    assert violated == 0 and again > cases / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_and_tiny_scales(device, dtype):
    """Down to where float16 metadata vanishes and up to where it overflows."""
    for exponent in (-30, -12, -5, 4, 6, 15):
        case = gaussian(1, torch.float32, size=100)
        limit = torch.finfo(dtype).max / 4
        case.k = (case.k * 10.0**exponent).clamp(-limit, limit)
        case.v = (case.v * 10.0 ** min(exponent, 4)).clamp(-limit, limit)
        case.scale = 0.125 / float(case.k.abs().max())
        case.q = random(2, *case.q.shape)
        case.q, case.k, case.v = (x.to(dtype) for x in (case.q, case.k, case.v))
        for options in SETTINGS:
            path = (device, "kernel" if device == "cuda" else "reference")
            found = attend(path, case, **options)
            bound = found.bounds[..., :3].double().sum(-1)
            assert bound.isfinite().all() and (errors(found, case) <= bound).all(), exponent
