"""Promotion by need, E_round included: a head whose tolerance can be met is not recomputed, one
whose tolerance cannot be met reads nothing before, and no head reads much more than it needs. On
the numba reference and on the Triton kernels."""

import numpy as np
import pytest
import torch
from cases import FEW
from certified_cases import (
    KERNEL_PATHS,
    LOOSE,
    attend,
    counted,
    gaussian,
    hold,
    keep_promise,
    op,
    random,
    rounding,
    rungs,
)
from hypothesis import given
from hypothesis import strategies as st

from attnplug.ops.certified import plan as plans
from attnplug.ops.certified import proof, reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def narrow(device_path):
    """Triton's interpreter cannot multiply bfloat16."""
    return torch.float16 if device_path == ("cpu", "kernel") else torch.bfloat16


def seeds(device_path):
    """Several where they cost little; the interpreter takes its time."""
    return range(1 if device_path == ("cpu", "kernel") else 3)


def half_cancels(seed):
    """Two KV heads whose outputs are about as large. The values of the second cancel for the most
    part, so that more is lost of them, and its scores are louder."""
    case = gaussian(seed, batch=1, size=320)
    case.q[:, :2] *= 0.3
    case.v[:, 0] += 3
    case.v[:, 1] *= 16
    return case


def read(telemetry):
    return telemetry[:, :, 0, op.TELEMETRY.index("key_tokens")]


@FEW
@given(data=st.data())
def test_a_head_with_room_is_not_recomputed(device_path, data):
    """Where E_round is up to 0.6 of the tolerance if all is read, and whatever makes it that."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, narrow(device_path)]))
    size, width = draw(st.sampled_from([150, 400])), draw(st.sampled_from([64, 128]))
    group = draw(st.sampled_from([1, 3]))
    case = gaussian(draw(st.integers(0, 9999)), dtype, 1, 2, group, size, width)
    case.v = case.v + draw(st.sampled_from([0.0, 0.3, 1.0, 3.0]))  # the less, the more it cancels
    case.scale *= draw(st.sampled_from([0.2, 1.0]))
    case.block = draw(st.sampled_from([16, 32]))
    if draw(st.booleans()):
        case.more["softcap"] = draw(st.sampled_from([2.5, 50.0]))
    if draw(st.booleans()):
        case.more["sinks"] = 3 * random(4, 2 * group, dtype=dtype)
    tolerance = float(rounding(device_path, case).max()) / draw(st.sampled_from([0.1, 0.3, 0.6]))
    found = attend(device_path, case, **LOOSE | {"k_max": 128, "tolerance": tolerance})
    hold(found, case)
    assert not rungs(found, "head").any()


def test_a_head_without_room_reads_nothing_before_it_is_recomputed(device_path):
    """Its own program does not ask for blocks. A head beside it that has room does."""
    for seed in seeds(device_path):
        case = gaussian(seed, narrow(device_path), batch=1, size=320)
        case.v += 1
        tolerance = float(rounding(device_path, case).min()) / 2
        found, telemetry = counted(device_path, case, **LOOSE | {"tolerance": tolerance})
        hold(found, case)
        assert rungs(found, "head").all() and not rungs(found, "needed").any()
        assert (read(telemetry) == 320).all()
        mixed = half_cancels(seed)
        few, many = rounding(device_path, mixed)[0].unflatten(0, (2, 2)).unbind(0)
        tolerance = float(few.max() * many.min()) ** 0.5
        assert tolerance > 2 * few.max() and tolerance < many.min() / 2
        found, telemetry = counted(device_path, mixed, **LOOSE | {"tolerance": tolerance})
        hold(found, mixed)
        keep_promise(found, mixed, tolerance)
        assert rungs(found, "head").tolist() == [[False, False, True, True]]
        assert rungs(found, "needed").tolist() == [[True, True, False, False]]


def test_no_head_reads_much_more_than_it_needs(device_path):
    """Where blocks are many and alike, what they leave comes near the tolerance."""
    for seed in seeds(device_path):
        for dtype in (torch.float32, narrow(device_path)):
            case = gaussian(seed, dtype, batch=1, group=1, size=640)
            case.v += 1
            tolerance = 2 * float(rounding(device_path, case).max()) + 0.05
            found, telemetry = counted(device_path, case, **LOOSE | {"tolerance": tolerance})
            keep_promise(found, case, tolerance)
            assert (hold(found, case) <= 1).all() and rungs(found, "needed").all()
            assert (found.layer[:, 0] > 0.8 * tolerance * found.layer[:, 1]).all()
            assert (read(telemetry) < 640).all() and not rungs(found, "head").any()


@pytest.mark.parametrize("device_path", KERNEL_PATHS)
def test_what_is_noisy_or_wide_in_a_later_tile_counts(device_path, monkeypatch):
    """E_round depends on the largest noise and norm of all blocks, wherever they are."""
    for odd in ("keys", "values"):
        case = gaussian(1, torch.float16, batch=1, size=600)
        case.v += 1
        case.q *= 0.2
        if odd == "keys":
            case.k[:, :, 570] *= 30  # in block 35 of 37
        else:  # of a block that has no weight
            case.k[:, :, 560:576] -= 8 * case.q.unflatten(1, (2, 2)).sum(2)
            case.v[:, :, 570] *= 3000
        tolerance = float(rounding(device_path, case).max()) / 0.5
        options = LOOSE | {"k_max": 128, "tolerance": tolerance}
        whole = counted(device_path, case, **options)
        with monkeypatch.context() as patch:
            patch.setattr(plans, "HELD", 0)
            patch.setattr(plans, "WEIGHED", 16)
            tiles = counted(device_path, case, **options)
        hold(whole[0], case)
        assert not rungs(whole[0], "head").any() and rungs(whole[0], "needed").any()
        assert torch.equal(whole[1], tiles[1]) and torch.equal(whole[0].out, tiles[0].out)


@given(data=st.data())
def test_norms_are_between_what_shows_and_what_is_hidden_at_most(data):
    """Of a block's values: what the norm of their mean shows, and with it what it can hide."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    tokens, width = draw(st.sampled_from([1, 2, 16, 64])), draw(st.sampled_from([1, 8, 64]))
    weights = rng.random(tokens) ** draw(st.sampled_from([0, 1, 8, 50])) * rng.random()
    values = rng.standard_normal((tokens, width)) + rng.standard_normal(width)
    values *= 10.0 ** (draw(st.sampled_from([0, 2])) * rng.standard_normal((tokens, 1)))
    if draw(st.booleans()):  # all against the heaviest
        values = np.where(weights == weights.max(), 1.0, -1.0)[:, None] * values[:1]
    norms = np.linalg.norm(values, axis=1)
    mass, root = weights.sum(), np.sqrt((weights**2).sum())
    shown = np.linalg.norm(weights @ values)
    hidden = reference._hidden_norm(mass, root, norms.max(), shown / mass) / proof.NORM_SHARE
    true = weights @ norms
    room = 1e-9 * mass * norms.max()
    assert shown <= true + room and true <= shown + hidden + room
    assert shown + hidden <= max(mass * norms.max(), shown) + room
