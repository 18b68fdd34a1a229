"""topk against torch's stable sort: always the same set, whatever the row and the hint."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from topk_cases import HINTS, KINDS, PLANS, SMALL, assert_exact, call, make, make_hint, op, stable

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import topk

# The kernels mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 2, 31, 64, 65, 200, 256, 300]))
    k = draw(st.sampled_from([1, 5, 31, 64]))
    return dict(
        size=size, k=k, kind=draw(st.sampled_from(KINDS)), hint=draw(st.sampled_from(HINTS)),
        length=draw(st.sampled_from([None, 0, k - 1, k, k + 1, size - 1, size, size + 9, -3])),
        plan=draw(st.sampled_from(list(PLANS))), sorted=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


@given(case=cases())
def test_is_the_stable_sort(device_path, case):
    generator = torch.Generator().manual_seed(case["seed"])
    k = case["k"]
    scores = make(case["kind"], case["size"], k, generator)
    hint = make_hint(case["hint"], scores, k, generator)
    lengths = None if case["length"] is None else torch.tensor([case["length"]])
    found = call(device_path, scores, k, hint, lengths, case["sorted"], PLANS[case["plan"]])
    assert_exact(found, scores, k, lengths, case["sorted"])


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_plan(device_path, kind, plan):
    """Few programs of few scores on the CPU, the sizes that the plan is for on the GPU."""
    if device_path == ("cpu", "reference"):
        plan = "default"  # the reference knows no plans
    generator = torch.Generator().manual_seed(3)
    scores = make(kind, 301, 33, generator)
    found = call(device_path, scores, 33, None, None, False, PLANS[plan])
    assert_exact(found, scores, 33)


@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("plan", list(PLANS))
def test_about_as_many_real_scores_as_picks(device_path, plan, spare):
    """Padding, -inf or NaN, is picked where real scores run out, and nothing is stored behind the
    row's picks."""
    if device_path == ("cpu", "reference"):
        plan = "default"  # the reference knows no plans
    generator = torch.Generator().manual_seed(5)
    rows, size, k, guard = 3, 300, 33, 1024
    scores = torch.full((rows, size), -torch.inf)
    scores[:, 1::7] = torch.nan
    for r, value in enumerate((torch.randn(k + spare, generator=generator), 2.0, torch.inf)):
        scores[r, torch.randperm(size, generator=generator)[: k + spare]] = value
    found = call(device_path, scores, k, sorted=True) if plan == "default" else None
    if found is None:
        device = device_path[0]
        kinds = (k, torch.int32), (k, torch.float32), (3, torch.int32)
        whole = [torch.full((rows + 2 * guard, n), 77, dtype=t, device=device) for n, t in kinds]
        inner = [x[guard : guard + rows] for x in whole]
        op.launch_topk(scores.to(device), k, None, None, True, *inner, plan=PLANS[plan])
        assert all((x[:guard] == 77).all() and (x[-guard:] == 77).all() for x in whole)
        found = tuple(x.cpu() for x in inner)
    assert_exact(found, scores, k, sorted=True)


@pytest.mark.parametrize("kind", ["normal", "odd", "cluster", "relu"])
def test_the_hint_changes_nothing_but_the_way(device_path, kind):
    generator = torch.Generator().manual_seed(4)
    scores = make(kind, 300, 20, generator)
    for hint in HINTS:
        hint = make_hint(hint, scores, 20, generator)
        assert_exact(call(device_path, scores, 20, hint, plan=PLANS["groups"]), scores, 20)


def test_the_best_hint_is_no_trap(device_path):
    """All at the hint are picks: no score below them tells how far down to look."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(1, 300, generator=generator)
    hint = stable(scores[0], 32, 300)[0].int()
    for named in (hint, hint[:9], hint[:1].repeat(32)):
        found = call(device_path, scores, 32, named[None], plan=PLANS["programs"])
        assert_exact(found, scores, 32)


# ---- the ways a row can go ----------------------------------------------------------------------


def path_of(found):
    return [op.PATHS[path] for path in found[2][:, 0].tolist()]


def test_paths(device_path):
    """A row of every way, each exact: its own length, its own way, in one call."""
    generator = torch.Generator().manual_seed(6)
    k, size = 30, 300
    easy = torch.randn(1, size, generator=generator)
    ties = torch.zeros(1, size)
    # Far more than the list holds share one bin, and differ.
    hard = make("wide", size, k, generator)
    scores = torch.cat([easy, ties, hard, easy])
    lengths = torch.tensor([size, size, size, k])
    found = call(device_path, scores, k, None, lengths, plan=PLANS["programs"])
    assert_exact(found, scores, k, lengths)
    passes, candidates = found[2][:, 1].tolist(), found[2][:, 2].tolist()
    if device_path[1] == "reference":
        assert path_of(found) == ["gvr", "radix", "radix", "all"]
        assert 1 <= passes[0] <= 5
        assert k <= candidates[0] <= 3 * k
    else:  # of equal scores, the first in the list win: no search
        assert path_of(found) == ["gvr", "gvr", "radix", "all"]
        assert passes[:2] == [1, 1] and passes[2] > 1
        assert k <= candidates[0] < size // 2
    assert passes[3] == 0 and candidates[3] == k


@pytest.mark.parametrize("plan", ["programs", "tiles", "groups"])
def test_a_sample_that_lies(device_path, plan):
    """Only the sampled scores are high, and they are fewer than k: the range is above the k-th,
    and what lies below it does not fit the list."""
    k, size, sample = 40, 301, SMALL["sample"]
    scores = torch.randn(1, size, generator=torch.Generator().manual_seed(14))
    scores[0, (2 * torch.arange(sample) + 1) * size // (2 * sample)] += 50
    found = call(device_path, scores, k, plan=PLANS[plan])
    assert_exact(found, scores, k)
    if device_path[1] == "kernel":
        assert path_of(found) == ["radix"]


@pytest.mark.parametrize("plan", ["whole_row", "short_list", "programs", "tiles", "groups"])
def test_just_k_above_a_gap(device_path, plan):
    """Bins between hold nothing, and the one below the gap begins where the k-th ends."""
    k, size = 32, 300
    generator = torch.Generator().manual_seed(15)
    scores = torch.rand(1, size, generator=generator)
    scores[0, torch.randperm(size, generator=generator)[:k]] += 9
    hint = torch.arange(0, size, 3, dtype=torch.int32)[None]
    found = call(device_path, scores, k, hint, plan=PLANS[plan])
    assert_exact(found, scores, k)
    if device_path[1] == "kernel" and plan in ("programs", "tiles"):
        assert path_of(found) == ["gvr"] and found[2][0, 2] == k


@pytest.mark.parametrize("plan", ["programs", "tiles"])
def test_all_below_the_range_fits_the_list(device_path, plan):
    """As where the sample lies, in a row so short that no search is needed."""
    k, size, sample = 40, 90, SMALL["sample"]
    scores = torch.randn(1, size, generator=torch.Generator().manual_seed(16))
    scores[0, (2 * torch.arange(sample) + 1) * size // (2 * sample)] += 50
    found = call(device_path, scores, k, plan=PLANS[plan])
    assert_exact(found, scores, k)
    if device_path[1] == "kernel":
        assert path_of(found) == ["gvr"] and found[2][0, 2] == size


def test_a_short_row_in_a_long_buffer(device_path):
    """Too few groups for the maxima to say anything: the scores themselves are counted."""
    generator = torch.Generator().manual_seed(7)
    k = 16
    scores = torch.randn(3, 512, generator=generator)
    lengths = torch.tensor([512, 2 * 4 * k, 2 * 4 * k - 1])  # the last has too few
    found = call(device_path, scores, k, None, lengths, plan=PLANS["groups"])
    assert_exact(found, scores, k, lengths)


def test_a_group_holds_many_picks(device_path):
    """Picks stand together, so many scores are above the bin of the k-th maximum."""
    generator = torch.Generator().manual_seed(8)
    k = 16
    scores = torch.randn(1, 512, generator=generator)
    for together in (k, 40, 100):
        x = scores.clone()
        x[:, 40 : 40 + together] += 20
        found = call(device_path, x, k, None, None, plan=PLANS["groups"])
        assert_exact(found, x, k)


@pytest.mark.parametrize("plan", list(PLANS))
def test_nothing_is_written_past_a_row(device, plan):
    scores = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(device)
    outputs = op._allocate(torch.cat([scores, scores]), 31, None, None, False)
    for out in outputs:
        out.fill_(7)
    mine = [out[:3] for out in outputs]
    op.launch_topk(scores, 31, None, None, False, *mine, plan=PLANS[plan])
    assert_exact([out.cpu() for out in mine], scores.cpu(), 31)
    assert all((out[3:] == 7).all() for out in outputs)


@pytest.mark.parametrize("warps", [2, 8])
def test_tokens_that_must_not_be_picked_cost_no_round(device, warps):
    """gvr's scores hold -inf; of what is finite the first bins leave a short list. NaN is -inf."""
    scores = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    scores[1, ::5] = scores[2, :700] = torch.nan
    scores[:, :16] = scores[:, -256:] = -torch.inf
    outputs = op._allocate(scores.to(device), 100, None, None, False)
    op.launch_topk(
        scores.to(device),
        100,
        None,
        None,
        False,
        *outputs,
        plan=op.Plan(True, small=64, refine_warps=warps),
    )
    assert (outputs[2][:, 1] == 1).all()
    assert_exact([out.cpu() for out in outputs], scores, 100)


# A thread holds 16 or 32 scores.
ONE_PASS = [op.Plan(True, small=256, refine_warps=warps) for warps in (1, 4)]


@pytest.mark.parametrize("plan", ONE_PASS)
@pytest.mark.parametrize("far", [-100.0, 30.0])
def test_a_bell_that_misses_is_looked_beside(device, far, plan):
    """A few scores far away move and widen the bell: the k-th is in none of the first bins, and
    too many share that of the wider ones."""
    generator = torch.Generator().manual_seed(17)
    scores = torch.randn(3, 1000, generator=generator)
    scores[:, torch.randperm(1000, generator=generator)[:40]] = far
    found = call((device, "kernel"), scores, 150, plan=plan)
    assert ((found[2][:, 1] > 1) & (found[2][:, 1] <= 4)).all()
    assert_exact(found, scores, 150)


@pytest.mark.parametrize("plan", ONE_PASS)
@pytest.mark.parametrize("levels", [1, 7, 150])
def test_a_list_of_several_tiles(device, levels, plan):
    """Many share the bin of the k-th, and where they are equal the lower indices win."""
    generator = torch.Generator().manual_seed(18)
    k, size = 200, 1000
    scores = torch.randn(3, size, generator=generator)
    near = torch.randperm(size, generator=generator)[:150]
    scores[:, near] = 0.8 + 1e-6 * torch.randint(0, levels, (3, 150), generator=generator)
    found = call((device, "kernel"), scores, k, plan=plan)
    assert (found[2][:, 1] <= 4).all()  # no thresholds
    assert_exact(found, scores, k)


def test_what_lies_behind_the_length_is_not_read(device_path):
    generator = torch.Generator().manual_seed(9)
    scores = torch.randn(2, 300, generator=generator)
    lengths = torch.tensor([130, 64], dtype=torch.int32)
    for tail in (torch.nan, torch.inf):
        x = scores.clone()
        for r in range(2):
            x[r, lengths[r] :] = tail
        hint = torch.arange(300, dtype=torch.int32).repeat(2, 1)
        for plan in ("list", "programs"):
            found = call(device_path, x, 20, hint, lengths, plan=PLANS[plan])
            assert_exact(found, scores, 20, lengths)


def test_any_strides(device_path):
    generator = torch.Generator().manual_seed(10)
    wide = torch.randn(4, 600, generator=generator)
    hints = torch.randint(0, 300, (4, 60), generator=generator, dtype=torch.int32)
    for scores, hint in ((wide[::2, :300], hints[::2, :30]), (wide[:2, ::2], hints[:2, ::2])):
        for plan in ("whole_row", "short_list", "programs"):
            found = call(device_path, scores, 20, hint, plan=PLANS[plan])
            assert_exact(found, scores.contiguous(), 20)


def test_signed_zeros_tie(device_path):
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0] * 13])
    for plan in ("whole_row", "short_list", "programs"):
        found = call(device_path, scores, 3, sorted=True, plan=PLANS[plan])
        assert found[0].tolist() == [[0, 1, 2]]


def test_deterministic(device_path):
    """The same picks in the same order, however the programs were scheduled."""
    generator = torch.Generator().manual_seed(11)
    scores = torch.randn(2, 300, generator=generator)
    for plan in ("programs", "groups"):
        one = call(device_path, scores, 20, plan=PLANS[plan])
        for _ in range(20 if device_path[0] == "cuda" else 1):
            again = call(device_path, scores, 20, plan=PLANS[plan])
            assert all(map(torch.equal, one, again))


def test_no_rows_and_no_scores(device_path):
    assert call(device_path, torch.empty(0, 9), 4)[0].shape == (0, 4)
    for length in (None, torch.tensor([5])):
        found = call(device_path, torch.empty(2, 0), 4, None, length)
        assert (found[0] == -1).all() and (found[1] == -torch.inf).all()


def test_stats_are_given_on_request(device):
    scores = torch.randn(2, 50, device=device)
    assert len(topk(scores, 3)) == 2
    assert topk(scores, 3, stats=True)[2].shape == (2, 3)


# ---- full sizes ---------------------------------------------------------------------------------

# Round ones too: Triton 3.6 miscompiled a loop over gathered pointers only at multiples of 16.
FULL = [(8192, 2048), (8200, 4096), (16384, 64), (32768, 2048), (131072, 2048), (2**20, 2048)]


@pytest.mark.parametrize(("size", "k"), [*FULL, (2**20 + 3, 2048), (2**22, 4096)])
def test_full_size(device, size, k):
    generator = torch.Generator().manual_seed(12)
    kinds = ("normal", "cluster") if size < 2**20 else ("cluster",)
    for kind in kinds:
        scores = make(kind, size, k, generator, rows=2 if size < 2**20 else 1)
        hint = make_hint("before", scores, k, generator)
        found = call((device, "reference"), scores, k, hint, sorted=kind == "cluster")
        assert_exact(found, scores, k, sorted=kind == "cluster")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8192, 65536, 100003, 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_full_size_of_every_kind(kind, size):
    """The pre-tuned plans: one program a row, several, and counted maxima."""
    generator = torch.Generator().manual_seed(13)
    rows = 8 if size < 2**20 else 3
    scores = make(kind, size, 2048, generator, rows=rows)
    lengths = torch.randint(0, size + 1, (rows,), generator=generator)
    lengths[0] = size
    for hint in ("none", "before", "noise"):
        hint = make_hint(hint, scores, 2048, generator)
        found = call(("cuda", "kernel"), scores, 2048, hint, lengths, sorted=True)
        assert_exact(found, scores, 2048, lengths, sorted=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [4096, 131072])
def test_many_replays_of_a_graph(size):
    """Nothing waits for the host, and a replay leaves nothing behind for the next."""
    torch.use_deterministic_algorithms(False)
    scores = torch.randn(8, size, device="cuda")
    hint = torch.zeros(8, 2048, dtype=torch.int32, device="cuda")
    lengths = torch.full((8,), size, device="cuda")
    topk(scores, 2048, hint=hint, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk(scores, 2048, hint=hint, lengths=lengths, stats=True)
    for step in range(100):
        scores.normal_()
        lengths.fill_(size - 37 * step)
        graph.replay()
        if step % 10 == 0:
            assert_exact([x.cpu() for x in found], scores.cpu(), 2048, lengths.cpu())
        hint.copy_(found[0])


# ---- the op -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scores=torch.zeros(60)), r"scores has 1 dimensions, needs \[R,N\]"),
        (dict(scores=torch.zeros(2, 60).half()), "scores is torch.float16, needs float32"),
        (dict(k=0), "k is 0, needs 1 to 4096"),
        (dict(k=4097), "k is 4097"),
        (dict(hint=torch.zeros(2, 5)), "hint is torch.float32, needs int32"),
        (dict(hint=torch.zeros(3, 5).int()), r"hint has shape \(3, 5\), needs \[R,M\] with R = 2"),
        (dict(lengths=torch.zeros(2)), "lengths is torch.float32"),
        (dict(lengths=torch.zeros(3).int()), r"lengths has shape \(3,\), needs \[1\] or \[R\]"),
        (dict(scores=torch.empty(1, 2**22 + 1, device="meta")), "at most 4194304"),
        (dict(hint=torch.empty(2, 5, device="meta").int()), "hint is on meta, scores on cpu"),
    ],
)
def test_bad_arguments(change, message):
    good = dict(scores=torch.zeros(2, 60), k=4)
    with pytest.raises(ArgumentError, match=message):
        topk(**(good | change))


def test_gradients_are_refused():
    with pytest.raises(GradientError, match="topk"):
        topk(torch.zeros(2, 60, requires_grad=True), 4)
