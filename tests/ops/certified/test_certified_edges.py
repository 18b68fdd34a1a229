"""Where the proof of certified_attention meets arithmetic: inputs that a bound which forgets an
underflow, a second rounding or an empty sum does not hold for; and tolerances of 0 and without end.
On the numba reference and on the Triton kernels."""

import pytest
import torch
import triton
import triton.language as tl
from certified_cases import (
    INF,
    KERNEL_PATHS,
    LOOSE,
    Case,
    aligned,
    attend,
    counted,
    exact,
    gaussian,
    hold,
    keep_promise,
    op,
    random,
    rungs,
)

from attnplug.ops.certified import launch as launcher
from attnplug.ops.certified import proof
from attnplug.ops.certified.kernels.quantize import _spectral_norm
from attnplug.ops.certified.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

ONE = Plan(splits=1, pieces=2)  # all blocks in one program, with one largest score


def few_dtypes(device_path):
    narrow = [torch.float32, torch.float16]
    return narrow if device_path == ("cpu", "kernel") else [*narrow, torch.bfloat16]


@pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])
def test_errors_in_line_reach_the_spectral_bounds_and_do_not_pass_them(device_path, values):
    for dtype in few_dtypes(device_path):
        shares = []
        for seed in (0, 2, 4):
            case = aligned(seed, dtype, batch=1, kv_heads=2, size=80, values=values)
            shares.append(hold(attend(device_path, case, plan=ONE, **LOOSE), case).max())
        assert max(shares) > 0.7, shares


def apart(width, first, then):
    """Scores of 0 and of `then` in blocks of 16: the first `first` tokens look the query's way."""
    q = torch.zeros(1, 1, 1, width)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 64, width)
    k[:, :, first:, 0] = then
    return q, k


@pytest.mark.parametrize("promoted", [0, 64])
def test_weights_that_vanish_in_16_bits_are_in_the_bound(device_path, promoted):
    """Most mass is at values of zero. What is left are weights below 2^-25 of the largest, which
    are nothing in float16, times values as large as float16 has them."""
    q, k = apart(64, 16, -18.5)
    v = torch.full((1, 1, 64, 64), 6e4)
    v[:, :, :16] = 0.0
    case = Case(q.half(), k.half(), v.half(), scale=1.0)
    options = {"coverage": float(promoted > 0), "k_max": 64, "v_tol": 0.0 if promoted else INF}
    found = attend(device_path, case, plan=ONE, **LOOSE | options)
    hold(found, case)
    assert case.oracle()[0].abs().min() > 1e-3  # what is lost can be seen
    assert found.bounds[..., 2].max() < 60  # and a bound is not merely large


@pytest.mark.parametrize("device_path", KERNEL_PATHS)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_two_roundings_of_a_promoted_blocks_score_are_in_the_bound(
    device_path, softcap, monkeypatch
):
    """The pass adds a block's quantized part, and the program that reads it takes it out again. Let
    their scores differ as much as arithmetic can make them."""
    case = gaussian(3, torch.float16, batch=1, size=128)
    case.q, case.v, case.more["softcap"] = 8 * case.q, case.v + 2, softcap
    choose = launcher._Step.choose
    share = (64 + proof.PAIR_EXTRA) / (64 + proof.DOT_EXTRA)

    def otherwise(step, *arguments):
        step.memory.scores.base.add_(0.99 * share * step.memory.scores.noise)
        choose(step, *arguments)

    options = LOOSE | {"coverage": 1.0, "k_max": 64, "v_tol": 0.0}
    before = attend(device_path, case, **options)
    monkeypatch.setattr(launcher._Step, "choose", otherwise)
    found = attend(device_path, case, **options)
    assert (found.bounds[..., :2] == 0).all()
    assert (found.out != before.out).any() and not rungs(found, "row").any()
    hold(found, case)


def test_a_mass_that_vanishes_in_float32_is_in_the_bound(device_path):
    """A block whose quantized mass is 2^-151 of all, and its exact mass 2^120 times that: its keys
    are quantized at their worst, and e^D is nearly what float32 cannot hold."""
    width, step = 64, 0.0079345703125  # what keys from -1 to 1 get
    channel = torch.arange(width)
    k, v = torch.zeros(1, 1, 32, width), torch.zeros(1, 1, 32, width)
    k[:, :, 16:] = -0.9  # as good as nothing, as are those that span the range of every channel
    k[:, :, 16:19] = torch.where(channel % 3 == torch.arange(3)[:, None], 1.0, -1.0)
    k[:, :, 28:] = (0.495 - (channel < 39).float()) * step
    v[:, :, 16:] = 6e4
    case = Case(torch.ones(1, 1, 1, width), k, v, scale=333.0)
    tier = case.tier()
    assert (tier.k_meta[0, 0, 1, 0] == step).all()
    found = attend(device_path, case, tier, plan=ONE, **LOOSE)
    hold(found, case)
    assert case.oracle()[0].norm() > 5 * found.bounds[..., 2].max()  # E_key must hold it


@pytest.mark.parametrize("device_path", KERNEL_PATHS)
def test_a_longer_chain_of_promoted_blocks_has_a_wider_bound(device_path):
    case = gaussian(0, batch=1, kv_heads=1, size=1024)
    case.q *= 0.01  # else arithmetic of scores hides that of sums
    options = LOOSE | {"coverage": 1.0, "k_max": 128, "v_tol": 0.0}

    def around(readers):
        plan = Plan(splits=32, pieces=2, list_readers=readers)
        found = attend(device_path, case, plan=plan, **options)
        hold(found, case)
        return found.bounds[..., 2]

    assert (around(1) > 1.3 * around(32)).all()


def test_a_block_without_a_useful_bound_does_not_hide_the_others(device_path):
    """What it adds is above what float32 adds the others' shares to. It is read, and so are those
    that are needed beside it."""
    case = gaussian(0, batch=1, kv_heads=2, group=1, size=512)
    case.v += 1
    case.v[:, 1] *= 17  # the head beside it has the layer's norm, so that much is allowed
    case.q *= 6
    case.q[..., 0], case.k[..., 0] = 4.8, 0.0
    case.k[:, 0, 32, 0] = -253.0 * 128  # the others of its block are quantized nearly without error
    loose = attend(device_path, case, **LOOSE)
    assert loose.bounds[:, 0, 3].min() > 2e7 * loose.out[:, 0].norm()
    found, telemetry = counted(device_path, case, **LOOSE | {"tolerance": 0.5})
    hold(found, case)
    keep_promise(found, case, 0.5)
    assert rungs(found, "needed")[:, 0].all() and not rungs(found, "head").any()
    assert 16 < int(telemetry[:, 0, :, op.TELEMETRY.index("key_tokens")]) < 256


def test_values_of_zero_are_not_recomputed(device_path):
    """Their mean has no norm that an error could be a share of, and is what it must be."""
    case = gaussian(0, batch=1, size=192)
    case.v[:, 1] = 0.0
    found = attend(device_path, case, **LOOSE | {"tolerance": 0.05})
    assert (found.out[:, 2:] == 0).all() and not rungs(found, "head")[:, 2:].any()
    case.v[:] = 0.0
    assert not attend(device_path, case, **LOOSE | {"tolerance": 0.05}).rungs.any()
    small = gaussian(0, batch=1, size=192)
    small.v[:] = 1e-9  # of these an error could be a share
    found = attend(device_path, small, **LOOSE | {"tolerance": 0.05})
    assert rungs(found, "head").all() and exact(found, small).all()


def test_a_row_that_sees_nothing_is_not_recomputed(device_path):
    case = gaussian(0, batch=2, size=192)
    case.more["key_mask"] = torch.ones(2, 192, dtype=torch.bool)
    case.more["key_mask"][1] = False
    found = attend(device_path, case, **LOOSE | {"tolerance": 0.05})
    assert not rungs(found, "head")[1].any() and (found.out[1] == 0).all()
    assert (found.lse[1] == -INF).all() and found.bounds[1].isfinite().all()


@pytest.mark.parametrize("sinks", [False, True])
def test_tolerances_of_nothing_and_of_everything(device_path, sinks):
    case = gaussian(0, batch=1, size=192)
    if sinks:
        case.more["sinks"] = 3 * random(4, 4)
    none = attend(device_path, case, **LOOSE | {"tolerance": 0.0})
    assert rungs(none, "head").all() and exact(none, case).all()
    case.v += 1  # else no bound is below the norm of its output
    for tolerance in (1e20, 1e38):
        every = attend(device_path, case, **LOOSE | {"tolerance": tolerance})
        plain = attend(device_path, case, **LOOSE)
        assert torch.equal(every.out, plain.out) and not every.rungs.any()


def test_a_layer_at_the_edge_of_its_tolerance(device_path):
    """The promise is about exact attention, and returned outputs are rounded to 16 bits."""
    for seed in range(1 if device_path == ("cpu", "kernel") else 4):
        case = gaussian(seed, torch.float16, batch=2, size=192)
        case.v += 1
        loose = attend(device_path, case, **LOOSE)
        for spent, norm in loose.layer.tolist():
            for tolerance in (0.999 * spent / norm, 1.001 * spent / norm):
                found = attend(device_path, case, **LOOSE | {"k_max": 1, "tolerance": tolerance})
                keep_promise(found, case, tolerance)


@triton.jit
def measured(norms, errors, BLOCK: tl.constexpr, D: tl.constexpr):
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    low = tl.load(errors + n[:, None] * 2 * D + d[None, :])
    high = tl.load(errors + n[:, None] * 2 * D + D + d[None, :])
    norm, _longest = _spectral_norm(low, high, True)
    tl.store(norms, norm)


MATRICES = {
    "one row": lambda e: e * (torch.arange(e.shape[0]) == 3)[:, None],
    "rank one": lambda e: e[:, :1] * e[:1],
    "equal": lambda e: torch.ones_like(e),
    "orthogonal": lambda e: torch.linalg.qr(e.T).Q.T.contiguous(),
    "any": lambda e: e,
    "rows apart": lambda e: e * 10.0 ** -torch.arange(e.shape[0])[:, None].float().clamp(max=30),
    "one channel": lambda e: e * (torch.arange(e.shape[1]) == 5),
    "near the float16 grid's ties": lambda e: (1 + 2.0**-11) * e.sign(),
    "tiny": lambda e: 1e-18 * e,
    "vanishing": lambda e: 1e-30 * e,
    "zero": lambda e: 0 * e,
    "large": lambda e: 1e17 * e,
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("block", [16, 64, 128])
def test_what_is_measured_is_never_below_the_spectral_norm(device, name, block):
    """And above it by the eighth root of the block and little more."""
    errors = MATRICES[name](random(block, block, 128)).contiguous()
    norms = torch.empty(1, device=device)
    measured[(1,)](norms, errors.to(device), block, 64)
    want = float(torch.linalg.matrix_norm(errors.double(), 2))
    assert want <= float(norms) <= 1.1 * block ** (1 / 8) * want + 2 * proof.MEASURED_FLOOR
