"""The ops of sketch one by one: the basis, codes, shares, picks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sketch_cases import cache, coded, random

from attnplug.ops.sketch import basis as bases
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch.basis import CLIPS, fit_basis
from attnplug.ops.sketch.estimates import BINS
from attnplug.ops.sketch.state import Codes, empty_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROWS = {"lengths": torch.tensor([1290, 1300]), "start": torch.tensor([3, 130])}
SCALE = 0.125


def decoded(basis, k, size=24):
    """x^ of every key by the definition, in float64, and B, from the published parts."""
    fine = {16: 16, 24: 32, 32: 32}[size]
    x = k.double() @ basis.encoder[..., :-1, :].double() + basis.encoder[..., -1:, :].double()
    most = torch.full((x.shape[-1],), 3.0).double()
    most[:fine] = 15
    return torch.minimum((x + 0.5).floor().clamp(min=0), most)


def unpacked(codes):
    """The codes of every token, by shifts."""
    fine = [codes.fine & 15, codes.fine >> 4]
    return torch.cat(fine + [(codes.coarse >> 2 * i) & 3 for i in range(4)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size, width", [(16, 48), (24, 128), (32, 96), (24, 208)])
def test_codes_are_the_nearest(device_path, size, width, dtype):
    q, k, v = (x.to(dtype) for x in cache(0, width=width, tokens=1300))
    basis = fit_basis(k, v, q, size=size, **ROWS)
    device, path = device_path
    codes = Codes(*(x.to(device) for x in empty_codes(k, size)))
    args = (k.to(device), v.to(device), basis.encoder.to(device), *codes)
    rows = [x.to(device) for x in ROWS.values()]
    if path == "reference" or device == "cuda":
        encode.encode_keys(*args, lengths=rows[0], start=rows[1])
    else:
        encode.launch_encode_keys(*args, *rows, None)
    codes = Codes(*(x.cpu() for x in codes))
    wanted = decoded(basis, k, size)
    for b, (length, low) in enumerate(zip(*(x.tolist() for x in ROWS.values()), strict=True)):
        near = max((length - 1 - low) // 128 - 3, 1)
        coded_tokens = slice(low + 128, low + 128 * near)
        apart = (unpacked(codes)[b, :, coded_tokens] != wanted[b, :, coded_tokens]).float().mean()
        assert apart < 1e-4  # ties
        assert codes.progress[b].tolist() == [near, low]
        assert not codes.fine[b, :, : low + 128].any() and not codes.fine[b, :, length:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_that_are_not_finite_are_flagged(device_path, dtype):
    """By a key or a value of theirs that is not hidden, and no others."""
    q, k, v = (x.to(dtype) for x in cache(0, tokens=1300))
    basis = fit_basis(k, v, q, **ROWS)
    k[0, 1, 400, 3], v[1, 0, 500, 5], k[0, 0, 600, 7] = float("inf"), float("nan"), float("nan")
    mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
    mask[0, 600] = False
    device, path = device_path
    codes = Codes(*(x.to(device) for x in empty_codes(k, 24)))
    args = (k.to(device), v.to(device), basis.encoder.to(device), *codes)
    rows = [x.to(device) for x in (*ROWS.values(), mask)]
    if path == "reference" or device == "cuda":
        encode.encode_keys(*args, lengths=rows[0], start=rows[1], key_mask=rows[2])
    else:
        encode.launch_encode_keys(*args, *rows)
    low = ROWS["start"].tolist()
    wanted = torch.zeros_like(codes.odd)
    wanted[0, 1, (400 - low[0]) // 32] = wanted[1, 0, (500 - low[1]) // 32] = 1
    assert torch.equal(codes.odd, wanted)


def test_the_basis_gives_scores():
    """With as many coordinates as channels, and no rounding, q.k is exact."""
    q, k, v = cache(1, width=64, tokens=900)
    basis = fit_basis(k, v, q, size=24)
    step_of = basis.queries[..., :64].double()
    x = k.double() @ basis.encoder[..., :-1, :].double() + basis.encoder[..., -1:, :].double()
    q_of = q.double().unflatten(1, (2, 3))
    offset = torch.einsum("bhgtd,bhd->bhgt", q_of, basis.queries[..., 64].double())
    found = torch.einsum("bhgtd,bhdr,bhnr->bhgtn", q_of, step_of, x) + offset[..., None]
    wanted = torch.einsum("bhgtd,bhnd->bhgtn", q_of, k.double())
    assert (found - wanted).abs().max() < 2e-3


def test_moments_are_those_of_the_scores():
    """Mean and variance of what the coordinates keep of the scores, and how values go with what the
    codes keep of them."""
    q, k, v = cache(2, tokens=1400)
    basis = fit_basis(k, v, q)
    wide = basis.queries.double()
    product = q[:, :, -1].double().unflatten(1, (2, 3)) @ wide
    weights, offset, mean = product[..., :64], product[..., 64:65], product[..., 65]
    keys = k[:, :, 128:].double()
    exact = keys @ basis.encoder[..., :-1, :].double() + basis.encoder[..., -1:, :].double()
    s, of_codes = (
        torch.einsum("bhgr,bhnr->bhgn", weights, x) + offset
        for x in (exact, decoded(basis, k)[:, :, 128:])
    )
    assert (s.mean(-1) - mean).abs().max() < 1e-4
    variance = product[..., 66:130].square().sum(-1)
    assert ((s.var(-1, correction=0) / variance - 1).abs() < 0.05).all()
    values = v[:, :, 128:].double()
    centred = values - values.mean(2, keepdim=True)
    along = torch.einsum("bhgn,bhnd->bhgd", of_codes, centred) / s.shape[-1]
    # A few coordinates near a tie round the other way in float32: a code more or less.
    tie = 4 * weights.abs().amax(-1) / s.shape[-1]
    room = 1e-4 * along.abs().max() + tie.max() * centred.abs().max()
    assert (along - product[..., 130:]).abs().max() < room


def test_moments_of_a_long_row_are_those_of_evenly_spaced_tokens(monkeypatch):
    """A quarter of the tokens, wherever the row lies in its buffer."""
    q, k, v = cache(3, tokens=2000)
    rows = {"lengths": torch.tensor([1700, 1900]), "start": torch.tensor([36, 748])}
    monkeypatch.setattr(bases, "SAMPLE", 256)
    found = fit_basis(k, v, q, **rows)
    for b, first, count in ((0, 36 + 128, 1536), (1, 748 + 128, 1024)):
        kept = first + torch.arange(256) * count // 256
        one = (x[b : b + 1] for x in (k[:, :, kept], v[:, :, kept], q))
        monkeypatch.setattr(bases, "BLOCK", 256)  # leaves out no sink
        wanted = fit_basis(*one)
        monkeypatch.undo()
        monkeypatch.setattr(bases, "SAMPLE", 256)
        assert all(torch.allclose(x[b : b + 1], y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("what", ["constant", "nan", "none", "zero queries"])
def test_odd_caches_give_a_finite_basis(what):
    q, k, v = cache(0, tokens=700)
    k = torch.ones_like(k) if what == "constant" else k
    k = torch.full_like(k, torch.nan) if what == "nan" else k
    q = torch.zeros_like(q) if what == "zero queries" else q
    lengths = torch.tensor([0, 0]) if what == "none" else None
    basis = fit_basis(k, v, q, lengths=lengths)
    assert all(x.isfinite().all() for x in basis)


def scanned(device_path, fixed, codes, top_k, parts, plan, **options):
    """The outputs of the scan, by the op or the launcher."""
    device, path = device_path
    rows = [options.get(name) for name in ("lengths", "start", "key_mask")]
    args = [x.to(device) for x in (fixed[0], fixed[2], *codes)]
    rows = [None if x is None else x.to(device) for x in rows]
    asked = (*args, top_k, parts, *rows, options.get("softcap", 0.0))
    outputs = scan._allocate(*asked)
    if path == "reference":
        scan._cpu(*asked, *outputs)
    else:
        scan.launch_scan_sketch(*asked, *outputs, plan=plan)
    return [x.cpu() for x in outputs]


@settings(max_examples=5)
@given(data=st.data())
def test_shares_and_picks_match_fp64(device_path, data):
    draw = data.draw
    group, parts = draw(st.sampled_from([1, 3, 12])), draw(st.sampled_from([1, 2, 5]))
    top_k, softcap = draw(st.sampled_from([1, 40, 2000])), draw(st.sampled_from([0.0, 3.0]))
    q, k, v = cache(draw(st.integers(0, 9)), group=group)
    options = {**ROWS, "softcap": softcap}
    if draw(st.booleans()):
        options["key_mask"] = random(3, 2, 1300) > -0.5
    basis, codes = coded(q, k, v, **options)
    fixed = prepare.prepare_query(q[:, :, -1:], k, v, basis.queries, scale=SCALE, **options)
    plan = scan.Plan(draw(st.sampled_from([128, 256])), 4, 2)
    found = scanned(device_path, fixed, codes, top_k, parts, plan, **options)
    shares, total, sums, norm, middle = found
    projected = fixed[0].unflatten(1, (2, group))
    weights = projected[..., :64]
    unit = weights.abs().amax(-1, keepdim=True) / 127
    weights = (weights * (1 / unit)).round().double() * unit.double()
    s = torch.einsum("bhgr,bhnr->bhgn", weights, unpacked(codes).double())
    s = s + projected[..., 64:65].double()
    cap = softcap / torch.log(torch.tensor(2.0)).double()
    scores = cap * torch.tanh(s / cap) if softcap else s
    log_share = scores - norm.double().unflatten(1, (2, group))[..., None]
    wanted = torch.logsumexp(log_share * 0.6931471805599453, 2) / 0.6931471805599453
    candidate = torch.zeros(2, 2, 1300, dtype=torch.bool)
    for b in range(2):
        low = int(ROWS["start"][b])
        near = encode.near_block(int(ROWS["lengths"][b]), low)
        candidate[b, :, low + 128 : low + 128 * near] = True
    if "key_mask" in options:
        assert (shares[candidate & ~options["key_mask"][:, None]] == -torch.inf).all()
        candidate &= options["key_mask"][:, None]
    room = 1e-3 * wanted[candidate].abs() + 0.01  # float16
    assert ((shares.double() - wanted)[candidate].abs() <= room).all()
    mass = torch.where(candidate[:, :, None], torch.exp2(log_share), 0.0).sum(-1).flatten(1, 2)
    assert torch.allclose(sums[..., 0].sum(-1).double(), mass, rtol=5e-3)
    assert torch.equal(total[..., 0], candidate.sum(-1).int())

    picks, cut = pick.pick_tokens(
        shares, total, middle, top_k=top_k, lengths=ROWS["lengths"], start=ROWS["start"]
    )
    for b in range(2):
        for h in range(2):
            listed = picks[b, h][picks[b, h] >= 0].long()
            visible = int(candidate[b, h].sum())
            assert min(top_k, visible) <= len(listed) <= picks.shape[2]
            assert (listed.diff() > 0).all() and candidate[b, h][listed].all()
            assert cut[b, h, 1] == visible - len(listed)
            if len(listed) < visible:
                left = candidate[b, h].clone()
                left[listed] = False
                width = 1 / 16 if abs(shares[b, h, listed].min() - middle[b, h]) < 5.9 else 0.5
                assert shares[b, h][left].max() <= shares[b, h, listed].min() + width + 0.02


PICK_PLANS = [(1, 1, 1024), (60, 9, 64), (300, 4, 128), (900, 20, 32)]  # top_k, pieces, tile


@pytest.mark.parametrize("top_k, pieces, tile", PICK_PLANS)
def test_picks_are_the_references(top_k, pieces, tile):
    """The kernel lists what the specification lists, in its order, ties and cuts included."""
    batch, heads, tokens = 2, 1, 1300
    shares = (random(0, batch, heads, tokens) * 2 - 9).half()
    shares[:, :, 300:500] = -8.0  # many in one bin
    shares[:, :, 600:700] = -torch.inf
    middle = torch.tensor([[-8.0], [-20.0]])
    total = torch.zeros(batch, heads, BINS, dtype=torch.int32)
    lengths, start = torch.tensor([1290, 1300]), torch.tensor([3, 130])
    scan.count_shares(*(x.numpy() for x in (shares.float(), lengths, start, middle, total)))
    asked = (shares, total, middle, top_k, lengths, start)
    wanted = pick._pick_tokens(*asked)
    found = pick._allocate(*asked)
    pick.launch_pick_tokens(*asked, *found, plan=pick.Plan(pieces, 4, tile))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["hopper", "plain", "masked and capped"])
@pytest.mark.parametrize("known", ["nothing", "the bin", "a bin too low", "a bin too high"])
def test_picks_come_from_what_the_scan_has_counted(device_path, known, kind):
    """Of every eight tokens the scan notes whether it has counted one; if it knows enough, no
    others are looked at. Pieces of a few tiles."""
    device, path = device_path
    if path == "reference":
        pytest.skip("the specification looks at all tokens")
    top_k, rows = 20, [x.to(device) for x in ROWS.values()]
    q, k, v = cache(0)
    hidden = kind == "masked and capped"
    options = {"key_mask": random(3, 2, 1300) > -0.5, "softcap": 3.0} if hidden else {}
    basis, codes = coded(q, k, v, **ROWS, **options)
    fixed = prepare.prepare_query(q[:, :, -1:], k, v, basis.queries, scale=SCALE, **ROWS, **options)
    args = [x.to(device) for x in (fixed[0], fixed[2], *codes)]
    mask = options["key_mask"].to(device) if hidden else None
    asked = (*args, top_k, 3, *rows, mask, 3.0 * hidden)
    outputs = scan._allocate(*asked)
    scan_plan = scan.PLAN._replace(hopper=kind == "hopper")
    scan.launch_scan_sketch(*asked, *outputs, plan=scan_plan)
    shares, total, _, _, middle = (x.cpu() for x in outputs)
    wanted = pick._pick_tokens(shares, total, middle, top_k, *ROWS.values())
    true = wanted[1][..., 2].contiguous()
    hint = {"nothing": 0 * true, "the bin": true, "a bin too low": true - 9}
    hint = hint.get(known, torch.full((2, 2), 250.0)).to(device)

    plan = pick.Plan(3, 4, 32)
    notes = pick.Notes.empty(outputs[0], plan)
    notes.marks.zero_()
    how = {"plan": scan_plan, "hint": hint, "counted": notes.counted}
    if known != "nothing":  # of which a long part soon counts fewer
        how["fewest"] = 1
    scan.launch_scan_sketch(*asked, *outputs, **how)
    shares, total, _, _, middle = outputs
    uncounted = 0
    for b, (length, low) in enumerate(zip(*(x.tolist() for x in ROWS.values()), strict=True)):
        since, until = low + 128, low + 128 * encode.near_block(length, low)
        found = notes.counted[b, :, : (until - since) // 32, None].int()
        bits = (found >> torch.arange(4, device=device) & 1).flatten(1).bool()
        own = shares[b, :, since:until].unflatten(1, (-1, 8))
        uncounted += int((~bits).sum())
        if known != "a bin too high":  # what nobody looks at may be anything
            own[~bits] = torch.inf
    assert uncounted == 0 if known == "nothing" else uncounted > 50
    asked = (shares, total, middle, top_k, *rows)
    picked = pick._allocate(*asked)
    pick.launch_pick_tokens(*asked, *picked, plan, notes, hint=hint)
    assert torch.equal(picked[0].cpu(), wanted[0])
    assert torch.equal(picked[1][..., :2].cpu(), wanted[1][..., :2])
    if known != "a bin too high":
        assert torch.equal(picked[1][..., 2].cpu(), pick.coming_hint(hint.cpu(), true))


def test_missing_codes_give_nan(device_path):
    q, k, v = cache(0)
    basis, codes = coded(q, k, v)
    fixed = prepare.prepare_query(q[:, :, -1:], k, v, basis.queries, scale=SCALE)
    codes.progress[1, 0] = 3
    sums = scanned(device_path, fixed, codes, 40, 1, scan.PLAN)[2]
    assert sums[1, :, :, 0].isnan().all() and sums[0].isfinite().all()


def test_clips_are_the_measured_ones():
    q, k, v = cache(0, tokens=1500)
    basis = fit_basis(k, v, q)
    x = k.double() @ basis.encoder[..., :-1, :].double() + basis.encoder[..., -1:, :].double()
    spread = x[:, :, 128:].std(2)  # in steps of the codes
    for bits, part in ((4, slice(0, 32)), (2, slice(32, 64))):
        assert torch.allclose(
            spread[..., part] * 2 * CLIPS[bits], torch.tensor(2.0**bits - 1).double(), rtol=1e-2
        )
