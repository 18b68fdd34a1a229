"""bench/frontier.py: selectors that are what they say, rows that add up, and their plot."""

import dataclasses
import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from attnplug import Dense, Gather, Sketch
from attnplug.policies import AttentionCall, Phase
from attnplug.testing import tiny_model

BENCH = Path(__file__).parent.parent / "bench"
LENGTH, HEADS, KV_HEADS, DIM = 1600, 4, 2, 64


@pytest.fixture
def bench(monkeypatch):
    """A bench's module by its name."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in ("frontier", "_selectors", "_frontier_plot", "_plots"):
        sys.modules.pop(name, None)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call_of(seed: int, length: int = LENGTH) -> AttentionCall:
    k, v = random(seed, 2, 1, KV_HEADS, LENGTH, DIM)
    q = random(seed + 1, 1, HEADS, 1, DIM)
    return AttentionCall(q, 3 * k, v, DIM**-0.5, lengths=torch.tensor([length]))


def every(selectors):
    return [selectors.Selector(kind, 128, 16) for kind in selectors.NAMES]


def test_a_budget_of_everything_is_dense(bench):
    selectors = bench("_selectors")
    for selector in every(selectors):
        whole = selectors.Selector(selector.kind, LENGTH, 16)
        call = call_of(1)
        assert (whole.attend(call) - Dense().attend(call)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [700, 1500, 1600])
def test_each_reads_its_budget_beside_the_fixed_part(bench, length):
    """128 first tokens and the last four blocks; of pages that do not divide the middle, less than
    one is missing."""
    selectors = bench("_selectors")
    near = ((length - 1) // 128 - 3) * 128
    for selector in every(selectors):
        call = call_of(2, length)
        kept = selector.kept(call)
        assert kept.shape == (KV_HEADS, length) and kept[:, :128].all() and kept[:, near:].all()
        chosen = kept[:, 128:near].sum(-1)
        assert (chosen == min(128, near - 128)).all(), selector.kind
        out = selector.attend(call)
        scores = call.q[0, :, 0].view(KV_HEADS, -1, DIM) @ call.k[0, :, :length].mT / 8
        scores = scores.masked_fill(~kept[:, None], -math.inf).softmax(-1)
        assert (out[0, :, 0] - (scores @ call.v[0, :, :length]).flatten(0, 1)).abs().max() < 1e-5


def test_exact_scores_take_the_tokens_with_the_largest_shares(bench):
    selectors = bench("_selectors")
    call = call_of(3)
    kept = selectors.Selector("exact", 128).kept(call)
    dense = selectors.shares(call).sum(1)[:, 128:1152]
    least = dense.masked_fill(~kept[:, 128:1152], math.inf).amin(-1)
    assert (dense.masked_fill(kept[:, 128:1152], 0.0).amax(-1) <= least).all()


def test_a_bound_is_no_less_than_any_score_of_its_page(bench):
    selectors = bench("_selectors")
    k, q = random(4, KV_HEADS, 320, DIM), random(5, KV_HEADS, 3, DIM)
    made = selectors.Summaries("bounds", 16, k, q)
    assert made.page == 2 * DIM // 16
    best = (q @ k.mT).unflatten(2, (-1, made.page)).amax(-1)
    assert (made.scores(q, k) >= best - 1e-5).all()


def test_what_scores_are_estimated_from(bench):
    """Codes of a few bits find most of what they are made to find: scores that hang on 32 channels
    (Double Sparsity), and keys of few components (Loki)."""
    selectors = bench("_selectors")
    few = random(6, KV_HEADS, 900, DIM)
    few[..., 32:] *= 0.01
    turned = few @ torch.linalg.qr(random(7, DIM, DIM))[0]
    for kind, k in (("double", few), ("loki", turned)):
        q = random(8, KV_HEADS, 3, DIM)
        made = selectors.Summaries(kind, 16, k, q.flatten(0, 1)[:, None])
        found, wanted = (x - x.mean(-1, keepdim=True) for x in (made.scores(q, k), q @ k.mT))
        assert (found * wanted).sum() / (found.norm() * wanted.norm()) > 0.9, kind


def test_names_are_of_one_policy_each(bench):
    frontier = bench("frontier")
    cases = [*frontier.own([1024, 2048], [16, 24], 256), *frontier.emulated([1024], [16, 24])]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {"sketch(k=2048)", "gather(k=64)", "gvr", "quest(bytes=16, k=1024)"} <= set(names)
    sketch = next(case for case in cases if case.name == "sketch(bytes=16, k=1024)")
    assert isinstance(sketch.method, Sketch) and sketch.method.audit == 0
    assert (sketch.size, sketch.read) == (16, 1664)


@torch.no_grad()
def test_a_window_of_a_model(bench):
    """What reads everything loses nothing, what reads less loses some, and a policy's step is
    judged by what it has read: of gather's blocks and sketch's picks no more than the budget."""
    frontier, selectors = bench("frontier"), bench("_selectors")
    ids = torch.randint(2, 90, (1, 1100), generator=torch.Generator().manual_seed(0))
    own = [
        frontier.Case(method, str(method), 16, 0)
        for method in (
            Sketch(bytes=16, k=2000, min_tokens=0),
            Sketch(bytes=16, k=64, tail="drop", min_tokens=0),
            Gather(k=4, min_tokens=0),
            Gather(k=100, min_tokens=0),
        )
    ]
    other = [selectors.Selector("exact", k) for k in (64, 2000)]
    literature = [frontier.Case(method, str(method), 16, 0) for method in other]
    found = frontier.window(tiny_model(), ids, own, literature)
    for name in (own[0].name, own[3].name, literature[1].name):
        assert found[name, "captured-attention"] == pytest.approx(1, abs=1e-5)
        assert found[name, "output-error"] < 1e-4 and abs(found[name, "kl"]) < 1e-6
    best = found[literature[0].name, "captured-attention"]
    for name in (own[1].name, own[2].name):
        assert 0.5 < found[name, "captured-attention"] <= best + 1e-3
        assert found[name, "output-error"] > 1e-3 and found[name, "kl"] > 1e-6


@dataclasses.dataclass(frozen=True)
class Last(Phase):
    """Somebody's method: the last tokens."""

    window: int = 64

    name = "last"
    phases = frozenset({"decode"})

    @property
    def kept(self) -> int:
        return self.window

    def attend(self, call):
        last = torch.arange(call.k.shape[2]) >= call.lengths - self.window
        return Dense().attend(dataclasses.replace(call, key_mask=last[None]))


@torch.no_grad()
def test_anybodys_method_is_placed_by_what_it_says_it_reads(bench):
    frontier = bench("frontier")
    with pytest.raises(SystemExit, match="dense does not say how many keys"):
        frontier.named(["dense"])
    [case] = frontier.named(["gather(k=4, min_tokens=0)"])
    assert (case.name, case.read) == ("gather(k=4)", case.method.kept)
    ids = torch.randint(2, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    found = frontier.window(tiny_model(), ids, [frontier.Case(Last(), "last", 0.0, 64)], [])
    assert set(found) == {("last", "output-error"), ("last", "kl")}
    assert found["last", "output-error"] > 1e-3


def test_windows_of_one_commit_are_put_together(bench, tmp_path):
    frontier, path = bench("frontier"), tmp_path / "frontier.json"
    case = frontier.Case(Dense(), "sketch", 24, 2688)
    about = {"model": "m", "n": 32768, "head_dim": 128, "commit": "a", "date": "2026-01-01"}

    def add(commit, values):
        samples = {("sketch", "kl"): values}
        frontier.add(samples, {"sketch": case}, about | {"commit": commit}, path)
        [row] = json.loads(path.read_text())["rows"]
        return row

    assert add("a", {0: 0.1, 1: 0.3})["trials"] == 2
    row = add("a", {1: 0.5, 2: 0.9})
    assert row["trials"] == 3 and row["value"] == pytest.approx(0.5)
    assert row["step_bytes"] == 24 * 32768 + 512 * 2688
    assert add("b", {0: 0.25})["value"] == 0.25


def rows(policies):
    made = dict(study="frontier", task="output-error", model="m", n=32768, head_dim=128)
    return [
        made | dict(policy=policy, value=0.1 / k, low=0.05 / k, high=0.2 / k, read=640 + k)
        | dict(step_bytes=1000 * k)
        for policy, k in policies
    ]  # fmt: skip


def test_the_plot(bench):
    plot = bench("_frontier_plot")
    shown = rows([("sketch(k=512)", 1), ("sketch", 2), ("quest(bytes=16, k=512)", 3)])
    timing = dict(plot.TIMED) | dict(op="sketch", p50_us=20.0, policy="sketch(k=512)")
    dense = dict(plot.TIMED) | dict(op="dense_decode", p50_us=65.0)
    short = dict(timing, n=8192, policy="sketch")
    assert plot.times([timing, dense, short]) == {"sketch(k=512)": 20.0, "dense": 65.0}
    [(name, figure)] = plot.draw_frontiers(shown, [timing, dense, short]).items()
    assert name == "frontier-m.png" and len(figure.axes) == 2
    drawn = [[list(c[0].get_xdata()) for c in axes.containers] for axes in figure.axes]
    whole = 4 * 128 * 32768
    assert drawn == [[[1000 / whole, 2000 / whole], [3000 / whole]], [[20.0]]]
    [alone] = plot.draw_frontiers(shown, []).values()
    assert len(alone.axes) == 1
    assert plot.draw_frontiers([], []) == {}
    other = [row | {"study": "", "task": "kl"} for row in shown]
    assert plot.draw_frontiers(other, []) == {}


@pytest.mark.parametrize(
    "policy, line",
    [
        ("sketch", "sketch"),
        ("gather(k=64)", "gather"),
        ("gather(k=64, scoring='bounds')", "gather(scoring='bounds')"),
        ("quest(bytes=16, k=1024)", "quest(bytes=16)"),
        ("sketch(bytes=16, k=512, tail='drop')", "sketch(bytes=16, tail='drop')"),
    ],
)
def test_a_line_is_a_policy_at_all_its_budgets(bench, policy, line):
    assert bench("_frontier_plot").line_of(policy) == line


def test_lines_look_different(bench):
    plot = bench("_frontier_plot")
    names = ["sketch", "sketch(bytes=16)", "gather", "gvr", "loki(bytes=16)", "quest(bytes=16)"]
    looks = plot.looks_of([{"policy": name} for name in names])
    assert all(a != b for a, b in itertools.combinations(looks.values(), 2))
    assert looks["sketch"][0] == looks["sketch(bytes=16)"][0]
