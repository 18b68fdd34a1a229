"""Sketch over pages: codes of written slots, the parts of a step, and the step, beside a definition
in float64 that knows neither pages nor bands' weights in units."""

import math

import pytest
import torch
from cases import FEW, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import LAYOUTS, make

from attnplug.ops.dense.dense_decode import dense_decode
from attnplug.ops.sketch import attend_pages as attend
from attnplug.ops.sketch import encode_pages as encode
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_pages as prepare
from attnplug.ops.sketch import scan_pages as scan
from attnplug.ops.sketch import sketch_pages as step
from attnplug.ops.sketch.model_basis import BAND, Moments, fit_model_basis, turn
from attnplug.ops.sketch.pages import PageSketch, empty_page_sketch, turns_of
from attnplug.ops.sketch.state import COORDINATES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCALE, LOG2E = 0.125, math.log2(math.e)
PLAN = step.Plan(pick.Plan(2, tile=1024, warps=4), 2, 4)
LONG = [2900, 700, 130, 0]  # of two bands, one, and none behind the fixed part


def frequencies(pairs):
    return (10000.0 ** (-torch.arange(pairs).double() / max(pairs, 1))).float()


class Setting:
    """Rows on pages, with a basis of their keys and the codes of all their slots."""

    def __init__(
        self, lengths=LONG, width=64, group=2, page=16, size=None, dtype=torch.float32,
        layout=LAYOUTS[1], seed=0, pairs=None, device="cpu", path="reference", shared=0,
        coding="reference",
    ):  # fmt: skip
        pages = make(
            seed, lengths, page=page, width=width, dtype=dtype, layout=layout, shared=shared
        )
        pages.kv.mul_(0.3)
        pages.rows.mul_(0.3)
        self.pages, self.width, self.group = pages, width, group
        self.inv_freq = frequencies(width // 2 if pairs is None else pairs)
        self.size = size or (32 if width >= 96 else 24 if width >= 64 else 16)
        keys = pages.rows[0].float().nan_to_num(0.0).transpose(0, 1).flatten(1, 2).double()
        q = random(seed + 5, 2 * group, 300, width).double()
        count = keys.shape[1]
        moments = Moments(keys.mean(1), keys.mT @ keys / count, q.mT @ q / 300)
        self.basis = fit_model_basis(moments, self.inv_freq, size=self.size)
        self.room = pages.table.shape[1] * page
        self.turns = turns_of(self.inv_freq, self.room)
        self.q = random(seed + 6, len(lengths), 2 * group, 1, width).to(dtype) * 2
        self.device, self.path, self.coding = device, path, coding
        k, v = (x.to(device) for x in self._pages())
        self.k, self.v = k, v
        self.sketch = PageSketch(*empty_page_sketch(k, self.size))
        positions = torch.cat([torch.arange(n) for n in lengths]).long()
        self.write(pages.slots(), positions)

    def _pages(self):
        return self.pages.kv[0], self.pages.kv[1]

    def write(self, slots, positions):
        moved = [x.to(self.device) for x in (self.basis.encoder, self.turns)]
        tensors = self.k, self.v, *moved, *self.sketch
        places = slots.to(self.device), positions.to(self.device)
        if self.coding == "kernel" and self.device == "cpu":
            encode.launch_encode_pages(*tensors, *places)
        else:
            encode.encode_pages(*tensors, *places)

    def inputs(self, table=None, lengths=None):
        """Of a step, in the order of `sketch_pages`."""
        table = self.pages.table if table is None else table
        lengths = self.pages.lengths if lengths is None else lengths
        moved = self.q, self.k, self.v, self.basis.scorer, self.turns, *self.sketch, table, lengths
        return [x.to(self.device) for x in moved]

    def step(self, top_k=60, softcap=0.0, sinks=None, **more):
        inputs = self.inputs(**more)
        sinks = None if sinks is None else sinks.to(self.device)
        if self.path == "reference" or self.device == "cuda":
            options = {"scale": SCALE, "top_k": top_k, "softcap": softcap, "sinks": sinks}
            found = step.sketch_pages(*inputs, **options)
        else:
            q = inputs[0]
            found = torch.empty_like(q), torch.empty(q.shape[:3])
            options = SCALE, top_k, softcap, sinks
            step.launch_sketch_pages(*inputs, *options, *found, plan=PLAN)
        return tuple(x.cpu() for x in found)

    def estimates(self, b, h):
        """(exact, estimated) scores `[G, n]` of row b's tokens, float64, before a cap."""
        n, heads = int(self.pages.lengths[b]), slice(h * self.group, (h + 1) * self.group)
        q, k = self.q[b, heads, 0].double(), self.pages.rows[0][b, h, :n].double()
        starts = torch.arange(n) // BAND * BAND
        back = -starts.double()[:, None] * self.inv_freq.double()
        encoder, scorer = self.basis.encoder[h].double(), self.basis.scorer[h].double()
        fine, coarse = COORDINATES[self.size]
        most = torch.tensor([15.0] * fine + [3.0] * coarse).double()
        x = turn(k, back) @ encoder[:-1] + encoder[-1]
        codes = torch.minimum((x + 0.5).floor().clamp(min=0), most)
        facts = turn(q[:, None].expand(-1, n, -1), back) @ scorer
        guess = (facts[..., :-1] * codes).sum(-1) + facts[..., -1]
        return SCALE * q @ k.T, SCALE * guess


def capped(s, cap):
    return s if cap == 0 else cap * torch.tanh(s / cap)


def definition(setting, b, h, top_k, cap, sinks=None):
    """The output of a row's KV head by the equations of docs/methods/sketch.md, and the shares'
    distance between the last pick and the first that is none."""
    exact, guess = setting.estimates(b, h)
    n = exact.shape[1]
    values = setting.pages.rows[1][b, h, :n].double()
    near = max((n - 1) // 128 - 3, 1) * 128
    sure, wide = capped(exact, cap), capped(guess, cap)
    read = torch.ones(n, dtype=torch.bool)
    read[128:near] = False
    norm = sure[:, read].logsumexp(-1, keepdim=True)
    shares = (wide - norm)[:, 128:near].logsumexp(0)
    gap, u, tail, value = math.inf, None, None, None
    order = shares.argsort(descending=True)
    best = 128 + order[:top_k]
    read[best] = True
    if len(order) > top_k:
        gap = (shares[order[top_k - 1]] - shares[order[top_k]]).item()
        low = best[top_k // 2 :]
        rho = (sure[:, low] - norm).exp().sum(-1) / (wide[:, low] - norm).exp().sum(-1)
        weight = (wide - norm)[:, ~read].exp()
        mass = weight.sum(-1)
        u = (weight * guess[:, ~read]).sum(-1) / mass
        count = near - 128
        at = torch.arange(min(count, prepare.SAMPLE))
        at = 128 + (at * count // prepare.SAMPLE if count > prepare.SAMPLE else at)
        s, v = exact[:, at], values[at]
        mean, variance = s.mean(-1), s.var(-1, correction=0)
        along = (s - mean[:, None]) @ (v - v.mean(0)) / len(at)
        reach = 8 / variance.sqrt()
        slope = ((u - mean) / variance).clamp(-reach, reach)
        value = v.mean(0) + along * slope[:, None]
        tail = rho.clamp(0.25, 4) * mass
    weight = (sure[:, read] - norm).exp()
    total, out = weight.sum(-1, keepdim=True), weight @ values[read]
    if tail is not None:
        total, out = total + tail[:, None], out + tail[:, None] * value
    lse = (total.log() + norm)[:, 0]
    if sinks is not None:
        total = total + (sinks.double()[:, None] - norm).exp()
    return out / total, lse, gap


def unpacked(sketch):
    fine = [sketch.fine & 15, sketch.fine >> 4]
    return torch.cat(fine + [(sketch.coarse >> 2 * i) & 3 for i in range(4)], -1)


@pytest.mark.parametrize(
    "size, width, pairs, layout",
    [(24, 64, 32, 0), (32, 128, 32, 1), (16, 80, 40, 2), (24, 64, 0, 0)],
)
def test_codes_are_the_nearest(device_path, size, width, pairs, layout):
    device, path = device_path
    dtype = torch.float16
    made = Setting([2200, 300], width, size=size, dtype=dtype, layout=LAYOUTS[layout], pairs=pairs,
                   device=device, coding=path)  # fmt: skip
    codes = unpacked(PageSketch(*(x.cpu() for x in made.sketch)))
    fine, coarse = COORDINATES[size]
    most = torch.tensor([15.0] * fine + [3.0] * coarse).double()
    apart, seen = 0, 0
    for b, length in enumerate(made.pages.lengths.tolist()):
        at = torch.arange(length)
        back = -(at // BAND * BAND).double()[:, None] * made.inv_freq.double()
        for h in range(2):
            encoder = made.basis.encoder[h].double()
            x = turn(made.pages.rows[0][b, h, :length].double(), back) @ encoder[:-1] + encoder[-1]
            wanted = torch.minimum((x + 0.5).floor().clamp(min=0), most)
            page = made.pages.table[b].long()[at // made.pages.page]
            found = codes[page, h, at % made.pages.page]
            apart, seen = apart + (found != wanted).sum().item(), seen + wanted.numel()
    assert apart < 3e-4 * seen  # ties, and the last bits of a turn
    assert not made.sketch.odd.any()


def test_only_what_is_written_is_coded(device_path):
    """Slots outside of the pages and positions outside of the bands are nowhere; a slot of another
    position has another code, one that is written again the newest."""
    device, path = device_path
    made = Setting([2100], device=device, coding=path)
    before = [x.clone() for x in made.sketch]
    stored = made.k.shape[0] * made.k.shape[2]
    own = made.pages.slots()[5:6]
    nowhere = torch.cat((torch.tensor([-1, stored, 1 << 40]), own, own))
    made.write(nowhere, torch.tensor([3, 3, 3, -1, len(made.turns) * BAND]))
    assert all(torch.equal(a, b) for a, b in zip(made.sketch, before, strict=True))
    made.write(own.int(), torch.tensor([BAND + 5], dtype=torch.int32))
    changed = made.sketch.fine != before[0]
    assert changed.any() and not changed.flatten(3).any(-1).sum() > 2  # of two heads
    made.write(own, torch.tensor([5]))
    assert all(torch.equal(a, b) for a, b in zip(made.sketch, before, strict=True))


@pytest.mark.parametrize("which, bad", [(0, math.nan), (0, -math.inf), (1, math.inf)])
def test_what_is_not_finite_is_flagged_and_shows(device_path, bad, which):
    """In the outputs of its own KV head, whether it is picked or not, and of no other row."""
    device, path = device_path
    made = Setting([1500, 1400], device=device, path=path, coding=path)
    good = made.step()
    slot = made.pages.slots()[600]
    page, place = slot // made.pages.page, slot % made.pages.page
    for x in (made.pages.kv, (made.k, made.v)):
        x[which][page, 1, place, 7] = bad
    made.write(slot[None], torch.tensor([600]))
    assert made.sketch.odd.sum() == 1 and made.sketch.odd[page, 1, place] == 1
    out, _ = made.step()
    assert out[0, 2:].isnan().all() and torch.equal(out[1], good[0][1])
    assert torch.equal(out[0, :2], good[0][0, :2])


@pytest.mark.parametrize("width, group, pairs", [(64, 2, 32), (128, 7, 64), (80, 1, 20)])
def test_what_a_step_knows_before_it_reads_codes(device_path, width, group, pairs):
    device, path = device_path
    made = Setting(width=width, group=group, pairs=pairs, device=device, path=path)
    q, k, v, scorer, turns, *_, table, lengths = made.inputs()
    args = q, k, v, scorer, turns, table, lengths
    if path == "reference" or device == "cuda":
        found = prepare.prepare_pages(*args, scale=SCALE)
    else:
        found = prepare.outputs(q, k, scorer, table)
        prepare.launch_prepare_pages(*args, SCALE, 0.0, *found)
    whole, facts, fixed_out, fixed_lse, scores, values = (x.cpu() for x in found)
    for b, n in enumerate(LONG):
        near = max((n - 1) // 128 - 3, 1) * 128
        for h in range(2):
            heads = slice(h * group, (h + 1) * group)
            query = made.q[b, heads, 0].double()
            for band in range(-(-near // BAND)):
                back = -torch.tensor([[band * BAND]]).double() * made.inv_freq.double()
                wanted = turn(query, back) @ made.basis.scorer[h].double() * SCALE * LOG2E
                unit, offset = facts[b, heads, band].double().unbind(-1)
                weights = whole[b, heads, band] * unit[:, None]
                assert ((weights - wanted[:, :-1]).abs() <= 0.51 * unit[:, None]).all()
                assert torch.allclose(offset, wanted[:, -1], rtol=1e-4, atol=1e-3)
            if n == 0:
                assert (fixed_lse[b] == -math.inf).all() and not scores[b].any()
                continue
            exact, _ = made.estimates(b, h)
            fixed = torch.cat((torch.arange(min(n, 128)), torch.arange(near, n)))
            lse = exact[:, fixed].logsumexp(-1)
            assert torch.allclose(
                torch.logsumexp(fixed_lse[b, heads].double() * math.log(2), -1), lse
            )
            weight = (fixed_lse[b, heads] * math.log(2) - lse[:, None]).exp()[..., None]
            pieces = torch.where(weight > 0, fixed_out[b, heads], 0.0)
            out = (weight * pieces).sum(1)
            value = made.pages.rows[1][b, h, :n].double()
            # float32 rounds a score, and so its exponential by as much of itself
            room = 4 * torch.finfo(torch.float32).eps * exact.abs().max() * value.abs().max()
            wanted = exact[:, fixed].softmax(-1) @ value[fixed]
            assert (out - wanted).abs().max() <= room, f"{(out - wanted).abs().max()}, {room}"
            count = near - 128
            at = torch.arange(min(count, 2048))
            at = 128 + (at * count // 2048 if count > 2048 else at)
            s = exact[:, at] * LOG2E
            sums = scores[b, heads].double().sum(1)
            assert torch.allclose(sums[:, 0], s.sum(-1), rtol=1e-4, atol=1e-2)
            assert torch.allclose(sums[:, 1], (s * s).sum(-1), rtol=1e-4)
            assert torch.allclose(sums[:, 2:], s @ value[at], rtol=1e-3, atol=5e-2)
            assert torch.allclose(values[b, h].double().sum(0), value[at].sum(0), atol=1e-2)


@pytest.mark.parametrize(
    "width, group, page, dtype, softcap",
    [
        (64, 2, 16, torch.float32, 0.0),
        (64, 1, 48, torch.float32, 2.0),
        (128, 7, 64, torch.float16, 0.0),
        (80, 3, 16, torch.float16, 0.0),
    ],
)
def test_a_step_is_its_definition(device_path, width, group, page, dtype, softcap, top_k=300):
    """Where the k best are not a matter of the last bits: picks go by bins, and may be more."""
    device, path = device_path
    made = Setting(width=width, group=group, page=page, dtype=dtype, device=device, path=path)
    sinks = random(3, 2 * group)
    out, lse = made.step(top_k, softcap, sinks)
    assert out.dtype == dtype and out.isfinite().all()
    for b, n in enumerate(LONG):
        if n == 0:
            assert not out[b].any() and (lse[b] == -math.inf).all()
            continue
        for h in range(2):
            heads = slice(h * group, (h + 1) * group)
            wanted, wanted_lse, _ = definition(made, b, h, top_k, softcap, sinks[heads])
            error = (out[b, heads, 0].double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            few = top_k < n - 640
            loose = 0.06 if few else 0.0  # as up to an eighth more tokens may be read
            assert (error <= loose + (2e-5 if dtype == torch.float32 else 2e-3)).all(), (
                b,
                h,
                error,
            )
            limit = 0.02 if few else 1e-4 if dtype == torch.float32 else 2e-3
            assert torch.allclose(lse[b, heads, 0].double(), wanted_lse, atol=limit, rtol=1e-4)


def test_picks_are_the_best(device_path):
    """By the shares of the definition, up to a bin's width."""
    device, path = device_path
    made, top_k = Setting(device=device, path=path), 100
    q, k, v, scorer, turns, *codes, table, lengths = made.inputs()
    args = q, k, v, scorer, turns, table, lengths
    whole, facts, _, fixed_lse, scores, values = prepare.prepare_pages(*args, scale=SCALE)
    read = whole, facts, fixed_lse, scores, values, *codes, table, lengths
    if path == "reference" or device == "cuda":
        found = scan.scan_pages(*read, top_k=top_k)
    else:
        found = scan.outputs(facts, codes[2], table, k.shape[3])
        found[0].fill_(-torch.inf)
        scan.launch_scan_pages(*read, top_k, 0.0, *found)
    shares, total, _, norm, middle, *_ = found
    picks, _ = pick.pick_tokens(shares, total, middle, top_k=top_k, lengths=lengths)
    picks, shares = picks.cpu(), shares.cpu()
    for b, n in enumerate(LONG):
        near = max((n - 1) // 128 - 3, 1) * 128
        for h in range(2):
            listed = picks[b, h][picks[b, h] >= 0].long()
            assert total[b, h, 0] == near - 128
            assert len(listed) >= min(top_k, near - 128)
            assert ((listed >= 128) & (listed < near)).all()
            if near == 128:
                continue
            _, guess = made.estimates(b, h)
            own = guess[:, 128:near] - norm[b, 2 * h : 2 * h + 2, None].cpu() * math.log(2)
            wanted = own.logsumexp(0) / math.log(2)
            assert (shares[b, h, 128:near].double() - wanted).abs().max() < 0.2  # units of int8
            rest = torch.ones(n, dtype=torch.bool)
            rest[:128] = rest[near:] = rest[listed] = False
            if rest.any():
                assert shares[b, h, listed].min() >= shares[b, h, :n][rest].max() - 0.07


@FEW
@given(st.data())
def test_a_budget_for_all_is_dense(device_path, data):
    device, path = device_path
    page = data.draw(st.sampled_from((16, 32, 48)))
    lengths = data.draw(st.lists(st.integers(0, 1100), min_size=1, max_size=2))
    made = Setting(
        lengths, page=page, group=data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 99)),
        layout=data.draw(st.sampled_from(LAYOUTS)), device=device, path=path,
    )  # fmt: skip
    out, lse = made.step(top_k=1100)
    q, k, v, *_, table, lengths_ = made.inputs()
    wanted, wanted_lse = dense_decode(q, k, v, scale=SCALE, table=table, lengths=lengths_)
    assert (out - wanted.cpu()).abs().max() < 3e-5
    seen = torch.tensor(lengths) > 0
    assert torch.allclose(lse[seen], wanted_lse.cpu()[seen], atol=2e-5)


def test_rows_do_not_see_one_another(device_path):
    """A row alone, and in a batch where another shares its pages; the table's rest may be
    anything, and so may lengths be int32."""
    device, path = device_path
    made = Setting([1400, 1400, 900], shared=40, device=device, path=path)
    assert torch.equal(made.pages.table[0, :40], made.pages.table[1, :40])
    together = made.step()
    made.q = made.q[1:2]
    table = made.pages.table[1:2].clone()
    table[:, -(-1400 // 16) :] = 1 << 30
    alone = made.step(table=table, lengths=torch.tensor([1400], dtype=torch.int32))
    for own, among in zip(alone, together, strict=True):
        if device == "cuda":  # where a batch of another size is cut into other pieces
            assert torch.allclose(own[0], among[1], atol=2e-5)
        else:
            assert torch.equal(own[0], among[1])


def test_a_step_is_reproducible(device_path):
    device, path = device_path
    made = Setting([3000], device=device, path=path)
    assert all(torch.equal(a, b) for a, b in zip(made.step(), made.step(), strict=True))


def test_attention_to_picks_has_every_band(device_path):
    """A tile of picks from three bands is scored with the weights of each."""
    device, path = device_path
    made = Setting([5000], device=device, path=path)
    q, k, v, scorer, turns, *codes, table, lengths = made.inputs()
    args = q, k, v, scorer, turns, table, lengths
    whole, facts, *_ = prepare.prepare_pages(*args, scale=SCALE)
    picks = torch.tensor([130, 2047, 2048, 2049, 4095, 4096, 4099] + [-1] * 57).int()
    picks = picks.expand(1, 2, -1).contiguous().to(device)
    cut = torch.tensor([math.inf, 9.0, 0.0]).expand(1, 2, -1).contiguous().to(device)
    norm = torch.zeros(1, 4, device=device)
    args = q, k, v, whole, facts, *codes, table, picks, cut, norm
    if path == "reference" or device == "cuda":
        found = attend.attend_pages(*args, scale=SCALE)
    else:
        found = attend.outputs(q, 1)
        attend.launch_attend_pages(*args, SCALE, 1, 0.0, *found)
    out, _, sums = (x.cpu() for x in found)
    for h in range(2):
        exact, guess = made.estimates(0, h)
        at = picks[0, h][:7].long().cpu()
        heads = slice(2 * h, 2 * h + 2)
        assert torch.allclose(sums[0, heads, 0, 0].double(), guess[:, at].exp().sum(-1), rtol=0.1)
        assert torch.allclose(sums[0, heads, 0, 2].double(), exact[:, at].exp().sum(-1), rtol=1e-4)
        value = made.pages.rows[1][0, h].double()[at]
        assert torch.allclose(
            out[0, heads, 0].double(), exact[:, at].softmax(-1) @ value, atol=1e-5
        )


@pytest.mark.gpu
def test_a_captured_step_follows_its_lengths():
    """A graph is captured once, for rows of any length, and so is the chain of launches that the op
    makes again."""
    made = Setting([2900, 700], device="cuda")
    inputs, options = made.inputs(), {"scale": SCALE, "top_k": 60}
    for _ in range(3):
        step.sketch_pages(*inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.sketch_pages(*inputs, **options)
    for lengths in ([2900, 700], [1500, 0], [2, 650]):
        inputs[-1].copy_(torch.tensor(lengths))
        graph.replay()
        wanted = step.sketch_pages(*inputs, **options)
        assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
        cpu = [x.cpu() for x in inputs]
        reference = step.sketch_pages(*cpu, **options)
        assert (captured[0].cpu() - reference[0]).abs().max() < 5e-3
