"""The promise of a layer: the heads of a row that are not recomputed are together within the
tolerance of exact attention, as the model's next product sees them. On the numba reference and on
the Triton kernels, against fp64."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import FEW
from certified_cases import (
    LOOSE,
    adversary,
    aligned,
    attend,
    counted,
    gaussian,
    hold,
    keep_promise,
    op,
    rungs,
)
from hypothesis import given
from hypothesis import strategies as st

from attnplug.ops.certified import proof, reference
from attnplug.ops.certified.kernels.replace import decided, layer_bound
from attnplug.ops.certified.kernels.weigh import _limit

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def dtype_of(device_path, seed):
    """Triton's interpreter cannot multiply bfloat16."""
    narrow = torch.float16 if device_path == ("cpu", "kernel") else torch.bfloat16
    return (torch.float32, narrow)[seed % 2]


@FEW
@given(data=st.data())
def test_every_layer_keeps_its_promise(device_path, data):
    """Adversaries, errors in line and Gaussian caches, whose heads have outputs of all sizes."""
    draw = data.draw
    seed, group = draw(st.integers(0, 9999)), draw(st.sampled_from([1, 2, 3]))
    make = draw(st.sampled_from([adversary, aligned, gaussian]))
    case = make(seed, dtype_of(device_path, seed), batch=2, kv_heads=2, group=group)
    case.v[:, 1] *= draw(st.sampled_from([1.0, 0.1, 1e-3]))
    if draw(st.booleans()):
        case.v = case.v + float(case.v.float().abs().mean())
    tolerance = draw(st.sampled_from([0.02, 0.05, 0.2, 0.7]))
    found = attend(device_path, case, **LOOSE | {"tolerance": tolerance})
    hold(found, case)
    keep_promise(found, case, tolerance)


def test_heads_with_small_outputs_force_nothing(device_path):
    """By itself such a head would read many blocks, or be recomputed."""
    case = gaussian(0, dtype_of(device_path, 1), batch=1, size=320)
    case.v[:, 0] += 3
    small = gaussian(0, case.q.dtype, batch=1, size=320)
    small.q, small.k, small.v = small.q[:, 2:], small.k[:, 1:], small.v[:, 1:] * 0.02
    case.v[:, 1:] = small.v
    options = LOOSE | {"tolerance": 0.1}
    alone = attend(device_path, small, **options)
    assert (rungs(alone, "needed") | rungs(alone, "head")).all()
    found, telemetry = counted(device_path, case, **options)
    keep_promise(found, case, 0.1)
    assert not (rungs(found, "needed") | rungs(found, "head"))[:, 2:].any()
    assert rungs(found, "needed")[:, :2].all()
    read = telemetry[0, :, 0, op.TELEMETRY.index("key_tokens")]
    assert read[1] == 0 < read[0]


def ends_of(data):
    """What `finish` leaves of a row's heads: bounds and norms `[H, 2]`, ties and zeros among them,
    and rungs."""
    draw = data.draw
    heads = draw(st.sampled_from([1, 2, 6, 9]))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    ends = rng.random((heads, 2)) * [0.5, 1.0] + 2.0**-20
    ends[rng.random(heads) < 0.3, 0] = ends[0, 0]
    ends[rng.random(heads) < 0.2] = 0.0
    raised = np.array([0, proof.NEEDED, proof.RANKING, proof.ROW | proof.CHECK], np.int32)
    rung = raised[rng.choice(4, heads, p=[0.6, 0.2, 0.2, 0.0])]
    if draw(st.integers(0, 9)) == 0:
        rung |= raised[3]
    tolerance = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, float("inf")]))
    return ends.astype(np.float32), rung, tolerance


@triton.jit
def decide(rungs, layer, raised, ends, tolerance, HEADS: tl.constexpr, PADDED: tl.constexpr):
    own = tl.arange(0, PADDED)
    inside = own < HEADS
    found = decided(raised, ends, 0, HEADS, own, inside, tolerance, PADDED)
    tl.store(rungs + own, found, mask=inside)
    tl.debug_barrier()
    spent, norm = layer_bound(rungs, ends, 0, HEADS, PADDED)
    tl.store(layer, spent)
    tl.store(layer + 1, norm)


@given(data=st.data())
def test_the_heads_that_are_kept_are_as_many_as_fit(device_path, data):
    """Those with the smallest bounds, until the next one would be too much."""
    ends, raised, tolerance = ends_of(data)
    heads, row = len(raised), bool(raised[0] & proof.ROW)
    before = raised | np.where(raised >= proof.RANKING, proof.HEAD, 0).astype(np.int32)
    device, path = device_path
    if path == "reference" and row:
        return  # `reference` itself looks at faults
    if path == "reference":
        found, layer = raised.copy(), np.empty(2, np.float32)
        reference.layer_holds(ends.astype(np.float64), found, tolerance, layer)
    else:
        inputs = torch.from_numpy(before).to(device), torch.from_numpy(ends).to(device)
        rungs_of, layer = torch.empty_like(inputs[0]), torch.empty(2, device=device)
        decide[(1,)](rungs_of, layer, *inputs, tolerance, heads, triton.next_power_of_2(heads))
        found, layer = rungs_of.cpu().numpy(), layer.cpu().numpy()
    again = (before & (proof.HEAD | proof.ROW)) > 0
    norm = np.sqrt((ends[:, 1].astype(np.float64) ** 2).sum())
    spent = 0.0
    for head in np.argsort(ends[:, 0], kind="stable"):
        if not again[head]:
            more = spent + float(ends[head, 0]) ** 2
            over = more**0.5 > tolerance * norm if tolerance < float("inf") else False
            near = abs(more**0.5 - tolerance * norm) <= 2e-3 * more**0.5
            dropped = bool(found[head] & proof.HEAD)
            assert dropped == over or near
            assert dropped == bool(found[head] & proof.BOUND)
            spent = spent if dropped else more
    if row:
        assert (layer == 0).all()
    else:
        assert spent**0.5 <= layer[0] <= spent**0.5 * 1.002 + 1e-12
        assert layer[1] == pytest.approx(norm, rel=1e-5)


@triton.jit
def limit(out, sums, tolerance, HEADS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr):
    head = tl.program_id(0)
    size = tl.load(sums + head * 5 + 2)
    found = _limit(sums, 0, HEADS, size, tolerance, PADDED, GROUP)
    tl.store(out + head, found)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("group", [1, 4])
def test_what_heads_may_add_comes_to_what_the_layer_allows(device_path, tolerance, group):
    """Also where a head's output is not a number: the others know nothing of it."""
    device, path = device_path
    for size in ([1.0], [1.0, 0.0, 3.0], [2.0, float("nan"), 1e-3, 5.0, float("inf")]):
        size = np.array(size)
        if path == "reference":
            found = np.empty(len(size))
            reference.limits(size, tolerance, group, found)
        else:
            sums = torch.zeros(len(size), 5, device=device)
            sums[:, 2] = torch.from_numpy(size)
            out = torch.empty(len(size), device=device)
            padded = triton.next_power_of_2(len(size))
            limit[(len(size),)](out, sums, tolerance, len(size), padded, group)
            found = out.cpu().double().numpy()
        good = np.isfinite(size)
        whole = np.sqrt((size[good] ** 2).sum())
        share = proof.NEED_SHARE if group < proof.SHARING else proof.SHARED_NEED
        allowed = share * tolerance / (1 + tolerance) * whole
        assert np.sqrt((found[good] ** 2).sum()) <= allowed * (1 + 1e-6)
        if good.all():
            assert np.sqrt((found**2).sum()) == pytest.approx(allowed, rel=1e-6)
        assert (np.diff(found[good][np.argsort(size[good])]) >= 0).all()
