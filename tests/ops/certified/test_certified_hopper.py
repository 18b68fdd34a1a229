"""The Hopper pass of certified_attention: its source run in numpy (`gluon_numpy`) against what the
tier's format says, and compiled, on the GPU, against the kernels for all cases."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from certified_cases import LOOSE, OPTIONS, adversary, attend, gaussian, hold, tier_faults
from gluon_numpy import Lines, Pointer, Tensor, kernel, rounded, run

from attnplug.ops import QuantizedKV, quantize_kv
from attnplug.ops.certified import certified_attention as op
from attnplug.ops.certified import launch as launcher
from attnplug.ops.certified import plan as plans
from attnplug.ops.certified import records
from attnplug.ops.certified.kernels import hopper, hopper_tiles
from attnplug.ops.certified.kernels.arguments import BlockScores, Shape, Splits
from attnplug.ops.common.views import Query, Rows, RowSteps

FILES = [hopper_tiles.__file__, hopper.__file__]
LOG2E = 1.4426950408889634
HEADS, KV_HEADS, SPLITS = 6, 2, 3
CONSTANTS = SimpleNamespace(**{n: x.value for n, x in records.R.value._asdict().items()})
LINES = ("k_codes", "v_codes", "v_meta")  # read through tensor descriptors


def attended(block, step, size, ring=2, softcap=0.0, fault=None, width=128):
    """What the kernel leaves of a random cache: its scratch memory by name, cache and tier."""
    random = torch.Generator().manual_seed(width + size)
    q = torch.randn(1, HEADS, 1, width, generator=random).bfloat16()
    k, v = torch.randn(2, 1, KV_HEADS, size, width, generator=random).bfloat16()
    k[..., 5] += 30
    k[..., 7] *= 100
    tier = QuantizedKV.empty(1, KV_HEADS, size, width, block, "cpu")
    quantize_kv(k, v, tier, block=block)
    if fault is not None:
        fault(tier)
    blocks = tier.check.shape[2]
    made = {name: np.full(HEADS * blocks, np.nan, np.float32)
            for name in ("base", "delta", "noise", "logs", "squares")}  # fmt: skip
    made |= {
        "partial": np.full(HEADS * (SPLITS + 1) * width, np.nan, np.float32),
        "partial_lse": np.full(HEADS * (SPLITS + 1), np.nan, np.float32),
        "flags": np.zeros(KV_HEADS * 2, np.int32),
    }
    names = ("k_codes", "k_meta", "v_codes", "v_meta", "summary", "check")
    words = {name: getattr(tier, name).flatten().view(torch.int32).numpy() for name in names}
    whole = size // block
    program = kernel(
        FILES,
        "attend_blocks",
        row_span=lambda *args: (size, 0),
        quantized_blocks=lambda *args: whole,
        R=CONSTANTS,
    )
    pointers = {name: Pointer(x) for name, x in made.items()}
    run(
        program,
        (SPLITS, KV_HEADS, 1),
        Query(Pointer(q.float().flatten().numpy()), HEADS * width, width, width, 1),
        **{name: (Lines if name in LINES else Pointer)(x) for name, x in words.items()},
        progress=None,
        rows=Rows(None, None, None, None, size),
        scores=BlockScores(*(pointers[name] for name in BlockScores._fields)),
        splits=Splits(pointers["partial"], pointers["partial_lse"]),
        flags=pointers["flags"],
        scale=width**-0.5 * LOG2E,
        cap=softcap * LOG2E,
        N=blocks,
        count=SPLITS,
        SHAPE=Shape(HEADS // KV_HEADS, 16, width, width, block, width // 32, width // 32),
        STEP=step,
        RING=ring,
        CAPPED=softcap > 0,
        CHECKED=True,
        STEPS=RowSteps(0, 0),
        PDL=False,
    )
    shaped = {name: x.reshape(HEADS, -1) for name, x in made.items() if name != "flags"}
    return shaped | {"flags": made["flags"]}, q, k, v, tier, whole


def dequantized(tier, width):
    scale, zero = tier.k_meta.double().unsqueeze(4).unbind(3)
    codes = tier.v_codes.int()
    channels = torch.cat([codes & 15, codes >> 4], -1)[..., :width]
    halves = tier.v_meta.view(torch.float16).unflatten(-1, (-1, 2)).double()
    step, least = (x.repeat_interleave(16, -1)[..., :width] for x in halves.unbind(-1))
    return tier.k_codes.double() * scale + zero, channels * step + least, scale, zero


@pytest.mark.parametrize(
    ("block", "step", "size", "ring", "softcap"),
    [(64, 32, 650, 2, 0.0), (16, 16, 200, 4, 3.0), (32, 16, 100, 2, 0.0), (64, 64, 150, 1, 0.0)],
)
def test_what_it_leaves(block, step, size, ring, softcap):
    width = 128
    made, q, _k, _v, tier, blocks = attended(block, step, size, ring, softcap)
    keys, values, scales, zeros = (x[0, :, :blocks] for x in dequantized(tier, width))
    query = q[0, :, 0].double().unflatten(0, (KV_HEADS, -1)) * width**-0.5 * LOG2E
    s = torch.einsum("hgd,hjnd->hgjn", query, keys)
    half = torch.einsum("hgd,hjd->hgj", query.abs(), scales[:, :, 0]) / 2
    reach = torch.einsum("hgd,hjd->hgj", query.abs(), zeros[:, :, 0].abs())
    noise = (width + 16) * 2.0**-21 * (reach + 254 * half)
    if softcap:
        s = softcap * LOG2E * torch.tanh(s / softcap / LOG2E)
        noise += softcap * LOG2E * 2.0**-20

    def got(name):
        return torch.from_numpy(made[name][:, :blocks]).double().unflatten(0, (KV_HEADS, -1))

    base = torch.einsum("hgd,hjd->hgj", query, zeros[:, :, 0])
    assert ((got("base") - base).abs() <= 2.0**-15 * reach).all()
    assert ((got("noise") / noise - 1).abs() < 0.02).all()
    assert (
        (got("delta") >= half + noise * 0.98) & (got("delta") <= half * 1.05 + 1.02 * noise)
    ).all()
    logs = s.mul(np.log(2)).logsumexp(-1) * LOG2E
    assert (got("logs") - logs).abs().max() < 1e-3
    squares = s.mul(2 * np.log(2)).logsumexp(-1) * LOG2E
    assert (got("squares") - squares).abs().max() < 2e-3
    lse = torch.from_numpy(made["partial_lse"][:, 1:]).double()
    assert (lse.mul(np.log(2)).logsumexp(1) * LOG2E - logs.mul(np.log(2)).logsumexp(2).flatten()
            * LOG2E).abs().max() < 1e-3  # fmt: skip
    weights = torch.exp2(lse - lse.mul(np.log(2)).logsumexp(1, keepdim=True) * LOG2E)
    parts = torch.from_numpy(made["partial"]).double().unflatten(1, (SPLITS + 1, width))[:, 1:]
    out = (parts * weights.unsqueeze(2)).sum(1)
    p = s.flatten(2).mul(np.log(2)).softmax(-1)
    want = torch.einsum("hgn,hnd->hgd", p, values.flatten(1, 2)).flatten(0, 1)
    assert (out - want).abs().max() < 4e-3 * want.abs().max()
    assert (made["flags"] == 0).all()


def rebuilt(query, scales):
    """(query times scales as the three digits give it, unit) [8, 128], [8]."""
    words = (scales.view(np.uint32) >> 16).reshape(-1, 2)
    words = (words[:, 0] | words[:, 1] << 16).view(np.int32)
    tile = kernel(FILES, "query_tile")
    with np.errstate(all="ignore"):
        high, low, unit = (
            x.a
            for x in tile(Tensor(query), Tensor(words), Tensor(np.arange(8) == 7), None, None, 128)
        )
    digits = np.stack([high[:8], high[8:], low[:8]]).astype(np.int64)
    digits = digits.reshape(3, 8, 2, 2, 2, 4, 4).transpose(0, 1, 2, 5, 3, 4, 6).reshape(3, 8, 128)
    whole = (digits[0] * 256 + digits[1]) * 256 + digits[2]
    with np.errstate(invalid="ignore"):
        return whole * unit.astype(np.float64)[:, None], unit


@pytest.mark.parametrize(
    "kind", ["random", "one channel", "halves", "tiny", "huge", "wide", "nothing"]
)
def test_three_digits_cost_a_quarter_of_what_is_allowed(kind):
    random = np.random.default_rng(len(kind))
    for _ in range(40):
        query, scales = random.standard_normal((8, 128)), np.abs(random.standard_normal(128)) + 1e-3
        if kind == "one channel":
            query[:, 5] *= 10 ** random.uniform(0, 7)
        elif kind == "halves":
            query[:], scales[:] = random.choice([-0.5, 0.5], (8, 128)) * 1.0001 / (63 * 65536), 1
            query[:, 0] = 1
        elif kind == "tiny":
            query *= 10 ** random.uniform(-37, -20)
        elif kind == "huge":
            query *= 10 ** random.uniform(10, 30)
        elif kind == "wide":
            query = np.exp(60 * random.uniform(-1, 1, (8, 128)))
        elif kind == "nothing":
            query[:4], scales[:64] = 0, 0
        query, scales = query.astype(np.float32), rounded(scales)
        exact = query.astype(np.float64) * scales
        found, _ = rebuilt(query, scales)
        lost = 127 * np.abs(found - exact).sum(1)
        allowed = (128 + 16) * 2.0**-21 * 254 * np.abs(exact).sum(1) / 2 + 1e-18
        assert (lost[:7] <= allowed[:7] / 4).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_digits_of_what_is_not_finite_have_no_finite_unit(bad):
    query, scales = np.ones((8, 128), np.float32), np.ones(128, np.float32)
    query[2, 9] = bad
    unit = rebuilt(query, scales)[1]
    assert not np.isfinite(unit[2]) and np.isfinite(np.delete(unit, 2)).all()
    query[2, 9], scales[9] = 1, bad
    assert not np.isfinite(rebuilt(query, scales)[1][:7]).any()


READ = (  # what the pass itself looks at
    "key code", "key scale", "key zero", "value code", "value scale", "value zero", "eta",
    "key spectrum", "value spectrum", "second check", "swapped",
)  # fmt: skip
FAULTS = {name: tier_faults(block=2, value_zero=4)[name] for name in READ}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupted_tier_is_noticed(fault):
    made, *_ = attended(16, 16, 100, fault=FAULTS[fault])
    assert made["flags"].tolist() == [0, 0, 0, 1]


def test_which_shapes_it_takes():
    shape = {"batch": 1, "kv_heads": 8, "group": 4, "width": 128, "blocks": 2048, "block": 64}
    more = {"capacity": 10, "multiprocessors": 132, "hopper": True}
    assert plans.plan_for(**shape, **more).step == 32
    assert plans.plan_for(**shape | {"block": 16}, **more).step == 16
    assert plans.plan_for(**shape | {"group": 7}, **more).step == 32
    others = {"width": 64}, {"width": 256}, {"group": 8}, {"blocks": 0}
    assert all(plans.plan_for(**shape | other, **more).step == 0 for other in others)
    assert plans.plan_for(**shape, **more | {"hopper": False}).step == 0


def beside(case, tier, plan, **options):
    """The op on the GPU with a plan of its own."""
    inputs = [x.cuda() for x in (case.q, case.k, case.v)]
    rows = [None if case.more.get(n) is None else case.more[n].cuda() for n in ("lengths", "start")]
    more = [*rows, None, case.more.get("softcap", 0.0), None, *[None] * 6]
    args = [*inputs, *tier, case.scale, case.block, *(OPTIONS | options).values(), *more]
    found = op.CertifiedOutput(*op._allocate(*args))
    launcher.launch(*args, *found, plan=plan)
    return op.CertifiedOutput(*(x.cpu() for x in found))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "block", "softcap"), [(4, 64, 0.0), (1, 16, 3.0), (7, 32, 0.0)])
@pytest.mark.parametrize("options", [{}, LOOSE, LOOSE | {"tolerance": 0.3}], ids=str)
def test_compiled_it_equals_the_kernels_for_all_cases(dtype, group, block, softcap, options):
    case = gaussian(group, dtype, group=group, size=700, width=128)
    case.block, case.more["softcap"] = block, softcap
    case.more |= {"lengths": torch.tensor([700, 431]), "start": torch.tensor([0, 37])}
    tier = case.tier("cuda")
    other = beside(case, tier, plans.Plan(splits=3, pieces=2, chunks=4), **options)
    for step in (16, 32):
        plan = plans.Plan(5, 2, 8, 8, step=min(step, block), registers=255)
        one = beside(case, tier, plan, **options)
        hold(one, case)
        assert torch.equal(one.rungs, other.rungs)
        assert (one.out.float() - other.out.float()).abs().max() < 8 * torch.finfo(dtype).eps + 2e-3
        assert (one.lse - other.lse).abs().max() < 1e-3
        for i in (3, 4, 5):
            off = (one.bounds[..., i] - other.bounds[..., i]).abs()
            assert (off <= 0.03 * other.bounds[..., i] + 1e-3).all(), i


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_compiled_it_notices_a_corrupted_tier(fault):
    case = gaussian(0, torch.bfloat16, size=120, width=128)
    case.more["lengths"] = torch.tensor([100, 120])
    tier = case.tier("cuda")
    clean = attend(("cuda", "kernel"), case, tier, **LOOSE)
    FAULTS[fault](tier)
    found = attend(("cuda", "kernel"), case, tier, **LOOSE)
    row = (found.rungs & op.ROW) > 0
    assert not ((clean.rungs & op.ROW) > 0).any() and row[0].all() and not row[1].any()
    assert torch.equal(found.out[1], clean.out[1])
    hold(found, case)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_compiled_no_adversary_violates_its_bounds(seed):
    dtype = torch.bfloat16 if seed % 2 else torch.float16
    case = adversary(seed, dtype, batch=4, kv_heads=4, group=1 + seed % 7, width=128)
    for options in (LOOSE, LOOSE | {"coverage": 0.6, "k_min": 1, "k_max": 4}, {}):
        hold(attend(("cuda", "kernel"), case, **options), case)
