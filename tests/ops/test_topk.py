"""topk against torch's stable sort: always the same set, whatever the row and the hint."""

import importlib
import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug.errors import ArgumentError, GradientError
from attnplug.models.pretrained import load
from attnplug.ops import topk

op = importlib.import_module("attnplug.ops.topk")

# The kernels mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Small enough for a list of 64 to overflow and for several programs to share 300 scores.
SMALL = dict(
    verifiers=2, verify_tile=64, collect_tile=64, capacity=64, small=16, refine_tile=64, bins=32,
    sample=32, batch=4,
)  # fmt: skip
PLANS = {
    "default": None,
    "whole_row": op.Plan(True, refine_warps=1, small=0),
    "list": op.Plan(True, refine_warps=8),
    "short_list": op.Plan(True, refine_warps=1, small=16),
    "programs": op.Plan(False, **SMALL),
    "tiles": op.Plan(False, **SMALL | {"verifiers": 5, "collect_tile": 32}),
    "groups": op.Plan(False, group=4, here=32, **SMALL),
}


def call(device_path, scores, k, hint=None, lengths=None, sorted=False, plan=None):
    """(indices, values, stats) on the CPU; by the reference, or by the kernels under a plan."""
    device, path = device_path
    scores, hint, lengths = (
        x if x is None else x.to(device) if x.is_contiguous() or device == "cpu" else strided(x)
        for x in (scores, hint, lengths)
    )
    if path == "reference" or (plan is None and device == "cuda"):
        found = topk(scores, k, hint=hint, lengths=lengths, sorted=sorted, stats=True)
    else:
        found = op._allocate(scores, k, hint, lengths, sorted)
        op.launch_topk(scores, k, hint, lengths, sorted, *found, plan=plan)
    return tuple(x.cpu() for x in found)


def strided(x):
    """The same strides on the GPU."""
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return moved.copy_(x)


def stable(scores, k, n):
    """The first k of the stable sort of scores[:n], largest first, and the values."""
    x = torch.where(scores[:n].isnan(), -torch.inf, scores[:n])
    order = x.sort(descending=True, stable=True).indices[:k]
    return order, x[order]


def assert_exact(found, scores, k, lengths=None, sorted=False):
    indices, values, _ = found
    rows, size = scores.shape
    assert indices.dtype == torch.int32 and values.dtype == torch.float32
    assert indices.shape == values.shape == (rows, k)
    for r in range(rows):
        n = size if lengths is None else int(lengths[r % len(lengths)].clamp(0, size))
        order, value = stable(scores[r], k, n)
        got = indices[r, : len(order)].long()
        assert (indices[r, len(order) :] == -1).all()
        assert (values[r, len(order) :] == -torch.inf).all()
        if sorted:
            assert got.tolist() == order.tolist()
            assert torch.equal(values[r, : len(order)], value)
        else:
            assert got.sort().values.tolist() == order.sort().values.tolist()
            x = torch.where(scores[r].isnan(), -torch.inf, scores[r])
            assert torch.equal(values[r, : len(order)], x[got])


KINDS = (
    "normal", "constant", "ascending", "descending", "two", "relu", "denormal", "odd", "cluster",
    "heavy", "sink", "masked", "wide", "together", "pile",
)  # fmt: skip


def make(kind, size, k, generator, rows=1):
    """Rows that are easy to get wrong."""
    x = torch.randn(rows, size, generator=generator)
    i = torch.arange(size)
    if kind == "constant":
        x = torch.full_like(x, float(x[0, 0]))
    elif kind == "ascending":
        x = i.float().repeat(rows, 1)
    elif kind == "descending":
        x = -i.float().repeat(rows, 1)
    elif kind == "two":
        x = (x > 1).float()
    elif kind == "relu":
        x = (x - 1).relu() * torch.where(i % 2 == 0, 1.0, -0.0)
    elif kind == "denormal":
        x = x * 1e-41
    elif kind == "odd":
        x[:, i % 3 == 0] = -torch.inf
        x[:, i % 7 == 1] = torch.nan
        x[:, i % 11 == 2] = torch.inf
    elif kind == "cluster":  # many within a few steps of the k-th score
        near = torch.rand(rows, size, generator=generator) < min(1.0, 3 * k / max(size, 1))
        steps = torch.randint(0, 9, (rows, size), generator=generator, dtype=torch.int32)
        close = (torch.tensor(2.0).view(torch.int32) + steps).view(torch.float32)
        x = torch.where(near, close, x)
    elif kind == "heavy":
        x = (4 * x).exp()
    elif kind == "sink":
        x[:, i % 97 == 0] = 1e6
    elif kind == "masked":
        x[:, i > size // 2] = torch.finfo(torch.float32).min
    elif kind == "wide":
        x = x.sign() * torch.exp2(40 * x)
    elif kind == "pile":  # the k-th is one of many equals, and what is near shares their bin
        near = torch.rand(rows, size, generator=generator) < 0.3
        x = torch.where(near, 1 - 1e-5 * torch.rand(rows, size, generator=generator), 1.0)
        x[:, i % 61 == 3] = -100.0
        x[:, i % 67 == 4] = 100.0
    elif kind == "together":
        x[:, size // 3 : size // 3 + k] += 9
    return x


HINTS = ("none", "empty", "before", "noise", "same", "outside")


def make_hint(kind, scores, k, generator):
    rows, size = scores.shape
    if kind == "none":
        return None
    if kind == "before":  # the picks of a step whose scores were close
        noise = torch.randn(rows, size, generator=generator) * 0.3
        return (scores.nan_to_num() + noise).sort(descending=True).indices[:, :k].int()
    if kind == "outside":
        return torch.tensor([[-1, size, 2**31 - 1, -(2**31)]], dtype=torch.int32).repeat(rows, 9)
    shape = (rows, 0 if kind == "empty" else 33)
    noise = torch.randint(-9, 2 * size + 1, shape, generator=generator, dtype=torch.int32)
    return torch.full_like(noise, max(size - 1, 0)) if kind == "same" else noise


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


def test_what_lies_behind_the_length_is_not_read(device_path):
    generator = torch.Generator().manual_seed(9)
    scores = torch.randn(2, 300, generator=generator)
    lengths = torch.tensor([130, 64], dtype=torch.int32)
    for tail in (torch.nan, torch.inf):
        x = scores.clone()
        for r in range(2):
            x[r, lengths[r] :] = tail
        hint = torch.arange(300, dtype=torch.int32).repeat(2, 1)
        found = call(device_path, x, 20, hint, lengths, plan=PLANS["programs"])
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


# ---- real scores --------------------------------------------------------------------------------


STEPS = 1000


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def decode_scores(request):
    """Scores of STEPS consecutive decode steps and the one before, [heads, STEPS + 1, key]: per KV
    head the best of its group's q . k, in three layers of a model that reads what topk is. Later
    keys are NaN."""
    model, tokenizer = load(request.param, device="cpu")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 30
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    wanted = {full[0], full[len(full) // 2], full[-1]}
    seen = []

    def attention(module, query, key, value, attention_mask, **options):
        if module.layer_idx in wanted:
            group = query.shape[1] // key.shape[1]
            query_of = query[:, :, -STEPS - 1 :].unflatten(1, (-1, group))
            seen.append((query_of @ key[:, :, None].mT).amax(2)[0])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("test_topk", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("test_topk", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("test_topk")
    tokens = tokenizer(inspect.getsource(op), return_tensors="pt").input_ids[:, : STEPS + 65]
    with torch.no_grad():
        model.model(tokens)
    scores = torch.cat(seen)
    future = torch.ones(scores.shape[1:]).triu(scores.shape[2] - scores.shape[1] + 1).bool()
    return scores.masked_fill(future, torch.nan)


def test_real_decode_steps(device_path, decode_scores):
    """Every one of 1,000 steps equals the stable sort, with the picks of the step before it as the
    hint."""
    k, size = 64, decode_scores.shape[2]
    few = device_path == ("cpu", "kernel")  # the interpreter takes its time
    scores = decode_scores[:2, -4:] if few else decode_scores
    picks = torch.stack([stable_picks(step, k) for step in scores.unbind(1)], 1)
    before, want = picks[:, :-1].flatten(0, 1), picks[:, 1:].flatten(0, 1)
    same = torch.stack([torch.isin(a, b).float().mean() for a, b in zip(want, before, strict=True)])
    assert same.mean() > 0.3  # the steps do resemble each other
    rows = scores[:, 1:].flatten(0, 1)
    assert few or len(rows) >= 3 * STEPS
    lengths = torch.arange(size - scores.shape[1] + 2, size + 1).repeat(len(scores))
    indices, _, ways = call(
        device_path, rows, k, before.int(), lengths, plan=PLANS["programs"]
    )  # fmt: skip
    assert torch.equal(indices.long().sort(1).values, want)
    if device_path == ("cpu", "reference"):  # the paper: 94.8% of its rows within three passes
        found = ways[:, 0] == op.GVR
        assert found.float().mean() > 0.98
        assert (ways[found, 1] <= 3).float().mean() > 0.9


def stable_picks(scores, k):
    x = torch.where(scores.isnan(), -torch.inf, scores)
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values


# ---- the op -------------------------------------------------------------------------------------


def test_opcheck(device):
    scores = torch.randn(2, 60, device=device)
    hint = torch.zeros(2, 5, dtype=torch.int32, device=device)
    lengths = torch.tensor([60], device=device)
    for arguments in itertools.product((None, hint), (None, lengths), (False, True)):
        torch.library.opcheck(op._topk, (scores, 4, *arguments))


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
