"""certified_attention against fp64 torch: no bound is violated, each rung is reached and repairs;
on the numba reference and on the Triton kernels. Faults are `test_certified_faults.py`."""

import pytest
import torch
from cases import WIDTHS
from certified_cases import (
    INF,
    LOOSE,
    Case,
    adversary,
    attend,
    counted,
    errors,
    exact,
    gaussian,
    hold,
    keep_promise,
    random,
    rungs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import QuantizedKV, dense_decode, quantize_kv
from attnplug.ops.certified import certified_attention as op

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def dtypes(device_path):
    """Triton's interpreter cannot multiply bfloat16."""
    narrow = [torch.float32, torch.float16]
    return narrow if device_path == ("cpu", "kernel") else [*narrow, torch.bfloat16]


@settings(max_examples=settings.default.max_examples // 2)  # the interpreter takes a second each
@given(data=st.data())
def test_bounds_hold(device_path, data):
    """Any shape, padding, mask and option: each head is within its bound, or exact."""
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 7]))
    case = gaussian(
        draw(st.integers(0, 999)),
        draw(st.sampled_from(dtypes(device_path))),
        draw(st.integers(1, 2)),
        kv_heads,
        group,
        draw(st.integers(1, 200)),
        draw(st.sampled_from(WIDTHS)),
    )
    size, batch = case.k.shape[2], case.k.shape[0]
    case.block = draw(st.sampled_from([16, 32, 64]))
    case.scale *= draw(st.sampled_from([0.2, 1.0, 3.0]))
    if draw(st.booleans()):
        case.more["lengths"] = torch.tensor([draw(st.integers(1, size)) for _ in range(batch)])
        case.more["start"] = torch.tensor([draw(st.integers(0, size)) for _ in range(batch)])
    if draw(st.booleans()):
        case.more["key_mask"] = random(3, batch, size) > -0.5
    if draw(st.booleans()):
        case.more["softcap"] = 2.5
    if draw(st.booleans()):
        case.more["sinks"] = 3 * random(4, kv_heads * group, dtype=case.q.dtype)
    options = {
        "coverage": draw(st.sampled_from([0.0, 0.5, 0.995])),
        "k_min": draw(st.sampled_from([1, 2])),
        "k_max": draw(st.sampled_from([2, 128])),
        "v_tol": draw(st.sampled_from([0.01, 0.05, 1e30])),
        "tolerance": draw(st.sampled_from([0.05, 0.3, float("inf")])),
        "ranking": draw(st.sampled_from([0, 1])),
        "explore": draw(st.sampled_from([0.0, 0.3])),
    }
    found = attend(device_path, case, **options)
    hold(found, case)
    again = rungs(found, "head") | rungs(found, "row")
    assert not rungs(found, "row").any()
    assert (exact(found, case) | ~again).all()
    if options["tolerance"] < float("inf"):
        keep_promise(found, case, options["tolerance"])
    lse = case.oracle()[1]
    assert torch.equal(found.lse[:, :, 0] == -torch.inf, lse == -torch.inf)
    assert (found.out[:, :, 0][lse == -torch.inf] == 0).all()


@pytest.mark.parametrize("softcap", [50.0, 1e4, 1e6])
def test_a_softcap_far_above_the_scores_is_in_the_bound(device_path, softcap):
    """tanh of small numbers, computed from exp: of tokens that are not quantized, and of a head
    that is recomputed."""
    for size, options in ((15, {}), (64, {"tolerance": 0.0})):
        case = gaussian(1, batch=1, size=size)
        case.k, case.more["softcap"] = 0.05 * case.k, softcap
        found = attend(device_path, case, **LOOSE | options)
        hold(found, case)
        assert rungs(found, "head").all() == (size == 64)


@pytest.mark.parametrize("seed", range(4))
def test_adversaries_do_not_violate(device_path, seed):
    """Bounds that are nearly reached, with everything quantized and with the ladder."""
    case = adversary(seed, dtypes(device_path)[seed % 2], batch=2, kv_heads=2, group=2)
    for options in (LOOSE, LOOSE | {"coverage": 0.6, "k_min": 1, "k_max": 4}, {}):
        hold(attend(device_path, case, **options), case)


def test_the_tight_bound_is_tight_and_below_the_papers():
    """Adversaries come near it; the paper's form is never below it."""
    shares = []
    for seed in range(30):
        case = adversary(seed)
        found = attend(("cpu", "reference"), case, **LOOSE)
        shares.append(hold(found, case).max())
        tight, paper = found.bounds[..., 3], found.bounds[..., 5]
        assert (tight <= paper * (1 + 1e-3) + 1e-5 * found.bounds[..., 2]).all()
    assert max(shares) > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_equals_reference(dtype):
    """The same decisions and, but for float arithmetic, the same numbers."""
    for seed, options in enumerate(({}, LOOSE, {"coverage": 0.8, "tolerance": 0.4})):
        case = gaussian(seed, dtype)
        case.more |= {"lengths": torch.tensor([200, 150]), "start": torch.tensor([3, 20])}
        one, two = (attend(("cpu", path), case, **options) for path in ("reference", "kernel"))
        assert torch.equal(one.rungs, two.rungs)
        assert (one.out.float() - two.out.float()).abs().max() < 4 * torch.finfo(dtype).eps + 2e-3
        assert (one.lse - two.lse).abs().max() < 1e-4
        for i in (3, 4, 5):
            off = (one.bounds[..., i] - two.bounds[..., i]).abs()
            assert (off <= 0.03 * one.bounds[..., i] + 1e-4).all(), i


@pytest.mark.parametrize("block", [16, 64])
def test_all_promoted_equals_dense(device_path, block):
    case = gaussian(0, size=230)
    case.block = block
    found = attend(device_path, case, coverage=1.0, k_min=128, v_tol=0.0)
    want, lse = dense_decode(case.q, case.k, case.v, scale=case.scale)
    assert (found.out - want).abs().max() < 2e-5 and (found.lse - lse).abs().max() < 1e-5
    assert (found.bounds[..., :2] == 0).all() and not rungs(found, "head").any()


def test_what_is_not_quantized_is_read_exactly(device_path):
    """A tier that is behind, or counted from another start, costs speed and nothing else."""
    case = gaussian(1, size=100)
    want = case.oracle()[0]
    for done, start in ((0, 0), (2, 0), (6, 5)):
        tier = case.tier()
        tier.progress.copy_(torch.tensor([done, start]))
        found = attend(device_path, case, tier, **LOOSE)
        hold(found, case)
        if done != 2:
            assert (found.out[:, :, 0] - want).abs().max() < 1e-5
            assert (found.bounds[..., :2] == 0).all()


def test_left_padding_does_not_change_a_row(device_path):
    case = gaussian(2)
    case.more["start"] = torch.tensor([0, 37])
    options = {"explore": 0.0}
    found = attend(device_path, case, **options)
    alone = Case(case.q[1:], case.k[1:, :, 37:], case.v[1:, :, 37:], scale=case.scale)
    kept = [0, 1, 3, 4, 5]  # not E_round, which counts the partial sums of a launch
    for name, a, b in zip(found._fields, attend(device_path, alone, **options), found, strict=True):
        a, b = a.float(), b[1:].float()
        if name == "bounds":
            torch.testing.assert_close(a[..., 2], b[..., 2], rtol=0.02, atol=0)
            a, b = a[..., kept], b[..., kept]
        if name == "layer":  # sums of bounds with their E_round
            torch.testing.assert_close(a, b, rtol=0.02, atol=0)
        else:
            assert (a - b).abs().max() < 2e-5, name


# --- the ladder: each rung is reached and does its work ---------------------------------------


def peaked(seed=0):
    """Attention that is spread over 12 blocks, two of them ahead."""
    case = gaussian(seed, batch=1, size=192)
    for block, gain in ((2, 4.0), (7, 3.0)):
        direction = case.q.unflatten(1, (2, 2)).mean(2)  # [B,Hkv,1,D]
        case.k[:, :, block * 16 : block * 16 + 4] += gain * direction / 2
    return case


def test_coverage_promotes_and_shrinks_the_key_bound(device_path):
    case = peaked()
    none, most = (attend(device_path, case, **LOOSE | {"coverage": c}) for c in (0.0, 0.9))
    assert (most.bounds[..., 3] < none.bounds[..., 3]).all()
    assert (errors(most, case) < errors(none, case)).any()


def test_rung_1_promotes_what_a_head_needs(device_path):
    """Until the bound meets the tolerance: nothing is recomputed, and a wider tolerance reads
    less."""
    case = gaussian(0, batch=1, size=192)
    case.v += 3  # an output that does not vanish
    read = []
    for tolerance in (INF, 2.0, 0.2, 0.03):
        found, telemetry = counted(device_path, case, **LOOSE | {"tolerance": tolerance})
        assert (hold(found, case) <= 1).all() and not rungs(found, "head").any()
        assert rungs(found, "needed").any() == (tolerance < 1)
        if tolerance < INF:
            keep_promise(found, case, tolerance)
        read.append(int(telemetry[..., op.TELEMETRY.index("key_tokens")].sum()))
    assert read[0] == read[1] < read[2] < read[3] <= 2 * 192


def test_rung_2_reads_values(device_path):
    case = peaked()
    options = LOOSE | {"coverage": 0.3, "k_min": 1}
    before = attend(device_path, case, **options)
    after = attend(device_path, case, **options | {"v_tol": 0.02})
    assert not rungs(before, "values").any() and rungs(after, "values").all()
    assert (after.bounds[..., 4] < before.bounds[..., 4]).all()
    hold(after, case)


def first_blocks(case, tier):
    """The first block by exact and by quantized mass `[2,B,Hq]`, and by how much it leads."""
    heads = case.q.shape[1] // case.k.shape[1]
    step, zero = tier.k_meta.double().unsqueeze(4).unbind(3)
    found = []
    for keys in (case.k.double().unflatten(2, (-1, 16)), tier.k_codes.double() * step + zero):
        keys = keys.repeat_interleave(heads, 1)
        scores = torch.einsum("bhd,bhnid->bhni", case.q[:, :, 0].double(), keys) * case.scale
        best = scores.logsumexp(-1).topk(2)
        found.append((best.indices[..., 0], best.values[..., 0] - best.values[..., 1]))
    return torch.stack([x for x, _ in found]), torch.stack([lead for _, lead in found])


def test_rung_3_ranking(device_path):
    """Two blocks of nearly the same mass, which quantization ranks the wrong way round or not:
    exactly the former heads are recomputed."""
    case = gaussian(0, batch=8, kv_heads=2, group=1, size=64)
    case.k[:, :, 20:24] = 3 * case.q / case.q.norm(dim=-1, keepdim=True)
    case.k[:, :, 52:56] = case.k[:, :, 20:24] + 0.01 * random(5, 8, 2, 4, 64)
    tier = case.tier()
    first, lead = first_blocks(case, tier)
    assert (lead > 1e-5).all()
    wrong = first[0] != first[1]
    assert wrong.any() and not wrong.all()
    found = attend(device_path, case, tier, coverage=1.0, explore=0.0)
    assert torch.equal(rungs(found, "ranking"), wrong)
    assert torch.equal(rungs(found, "head"), wrong)
    assert exact(found, case)[wrong].all() and not rungs(found, "boundary").any()
    assert not rungs(attend(device_path, case, tier, coverage=1.0, ranking=0), "ranking").any()


def test_rung_3_boundary(device_path):
    """A block left quantized that could be the first one."""
    case = gaussian(0, batch=1, size=192)
    case.q *= 0.1
    found = attend(device_path, case, **LOOSE | {"k_min": 1, "k_max": 2, "ranking": 1})
    again = rungs(found, "boundary")
    assert again.any() and torch.equal(again, rungs(found, "head"))
    assert exact(found, case)[again].all() and (found.bounds[again][:, :2] == 0).all()
    assert (found.bounds[..., 3] > 0).all()  # what it would have been
    hold(found, case)


def test_rung_3_tolerance(device_path):
    """One block is not enough for the layer: the heads with the largest bounds are recomputed. None
    is for a wide tolerance, nor any block read."""
    case = gaussian(0, batch=1, size=192)
    case.v += 3
    before = attend(device_path, case, **LOOSE)
    spent, norm = before.layer[0].tolist()
    after = attend(device_path, case, **LOOSE | {"k_max": 1, "tolerance": spent / norm / 4})
    again = rungs(after, "head")
    assert again.any() and torch.equal(again, rungs(after, "bound"))
    assert exact(after, case)[again].all()
    keep_promise(after, case, spent / norm / 4)
    loose = attend(device_path, case, **LOOSE | {"k_max": 1, "tolerance": 100.0})
    assert torch.equal(loose.out, before.out) and not rungs(loose, "head").any()


def test_rung_3_capacity(device_path):
    case = gaussian(0, batch=1, size=3000 if device_path[1] == "reference" else 700)
    found = attend(device_path, case, **LOOSE | {"k_max": 1, "v_tol": 0.0})
    assert (rungs(found, "capacity") & rungs(found, "head")).all()
    assert exact(found, case).all()


# --- telemetry and the rest ----------------------------------------------------------------------


def test_telemetry_counts_what_the_rungs_say(device_path):
    case = peaked()
    telemetry = torch.zeros(1, 2, 5, len(op.TELEMETRY), dtype=torch.float64, device=device_path[0])
    every = [
        attend(device_path, case, telemetry=telemetry, **options)
        for options in ({}, LOOSE, LOOSE | {"tolerance": 0.3}, LOOSE | {"k_min": 1, "ranking": 1})
    ]
    assert (telemetry[:, :, 2:] == 0).all()
    rows = telemetry[:, :, :2].flatten(1, 2).cpu()
    got = dict(zip(op.TELEMETRY, rows.unbind(-1), strict=True))
    assert (got["steps"] == 4).all()
    for name in ("needed", "values", "head", "row", "ranking", "boundary", "bound"):
        assert torch.equal(got[name], sum(rungs(x, name).double() for x in every)), name
    for i, name in enumerate(("key", "value")):
        returned = torch.stack([x.bounds[..., i].double() for x in every])
        assert torch.allclose(got[f"{name}_sum"], returned.sum(0), rtol=1e-5)
        assert torch.allclose(got[f"{name}_max"], returned.amax(0), rtol=1e-5)
    shares = torch.stack([x.layer[0, 0] / x.layer[0, 1] if x.layer[0, 0] > 0 else x.layer[0, 0]
                          for x in every]).double()  # fmt: skip
    assert torch.allclose(got["layer_sum"], shares.sum().expand(1, 4), rtol=1e-5)
    assert torch.allclose(got["layer_max"], shares.amax().expand(1, 4), rtol=1e-5)
    assert (got["key_tokens"][0, ::2] > 0).all() and (got["key_tokens"][0, 1::2] == 0).all()


def test_the_tighter_bound_saves_recomputations(device_path):
    """Of a head whose bound by the paper's form alone is more than its layer may have."""
    case = gaussian(0, batch=1, kv_heads=1, group=1, size=192)
    case.v += 3
    found = attend(device_path, case, **LOOSE)
    rest = found.bounds[0, 0, 4] + found.bounds[0, 0, 2]
    tight, paper = found.bounds[0, 0, 3] + rest, found.bounds[0, 0, 5] + rest
    limit = float((tight + paper) / 2 / found.layer[0, 1])
    for tolerance in (limit, INF):
        found, telemetry = counted(device_path, case, **LOOSE | {"tolerance": tolerance})
        fields = dict(zip(op.TELEMETRY, telemetry.unbind(-1), strict=True))
        assert (fields["saved"] == (tolerance < INF)).all() and (fields["head"] == 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    torch._dynamo.reset()
    case = gaussian(0, batch=1, size=90)
    tier = QuantizedKV.empty(1, 2, 90, 64, 16, device)

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, v, tier, lengths):
        quantize_kv(k, v, tier, block=16, lengths=lengths)
        return op.certified_attention(q, k, v, tier, scale=0.125, block=16, lengths=lengths)

    args = [x.to(device) for x in (case.q, case.k, case.v)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 33, 90):
            lengths = torch.tensor([length], device=device)
            got = step(*args, tier, lengths)
            want = op.certified_attention(*args, tier, scale=0.125, block=16, lengths=lengths)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


WRONG = [
    ({"q": torch.zeros(1, 2, 2, 64)}, "q has 2 queries, needs 1"),
    ({"scale": -0.1}, "scale is -0.1, needs at least 0 and finite"),
    ({"scale": float("nan")}, "scale is nan, needs at least 0 and finite"),
    ({"coverage": 1.5}, "coverage is 1.5, needs 0 to 1"),
    ({"ranking": 1}, "k_min is 0, needs at least ranking"),
    ({"k_max": 0}, "k_max is 0, needs k_min to 1024"),
    ({"v_tol": float("nan")}, "v_tol is nan"),
    ({"tolerance": -1.0}, "tolerance is -1.0"),
    ({"ranking": 9}, "k_min is 0|ranking is 9"),
    ({"explore": 2.0}, "explore is 2.0"),
    ({"block": 48}, "block is 48, needs 16, 32, 64, 128"),
    ({"telemetry": torch.zeros(1, 2, 3)}, "telemetry is torch.float32"),
    ({"tier": QuantizedKV.empty(1, 1, 64, 64, 32, "cpu")}, "k_codes is torch.int8"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_refuses(change, message):
    k = torch.zeros(1, 1, 64, 64)
    inputs = {"q": torch.zeros(1, 2, 1, 64), "k": k, "v": k, "scale": 0.1, "block": 16}
    inputs["tier"] = QuantizedKV.empty(1, 1, 64, 64, 16, "cpu")
    with pytest.raises(ArgumentError, match=f"^certified_attention: .*({message})"):
        op.certified_attention(**(inputs | change))


def test_originals_on_another_device_are_refused():
    """Tier 2 must be where the device can read it."""
    k = torch.zeros(1, 1, 64, 64)
    tier = QuantizedKV.empty(1, 1, 64, 64, 16, "cpu")
    gone = torch.empty(1, 1, 64, 64, device="meta")
    with pytest.raises(ArgumentError, match="k is on meta but q is on cpu"):
        op.certified_attention(torch.zeros(1, 1, 1, 64), gone, k, tier, scale=0.1, block=16)
