"""index_topk against a stable sort of scores in float64, and the shapes and slabs that its kernels
can take. Integers of few bits make scores exact in every dtype, and many of them equal."""

import pytest
import torch
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import index_topk
from attnplug.ops.common.checks import FP8
from attnplug.ops.common.device import Card
from attnplug.ops.gvr import index_topk as op
from attnplug.ops.gvr import topk as ranking

# The kernels of topk mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALE = 0.25


def call(
    device_path,
    q,
    weights,
    keys,
    k,
    scale=SCALE,
    lengths=None,
    key_mask=None,
    seen=None,
    key_scale=None,
    **launch,
):
    """Picks on the CPU; by the public op, or by the launcher where the op would not run it."""
    device, path = device_path
    given = q, weights, keys, lengths, key_mask, seen, key_scale
    q, weights, keys, *given = (x if x is None else x.to(device) for x in given)
    lengths, key_mask, seen, key_scale = given
    if path == "reference" or (device == "cuda" and not launch):
        options = {"lengths": lengths, "key_mask": key_mask, "seen": seen, "key_scale": key_scale}
        return index_topk(q, weights, keys, k, scale=scale, **options).cpu()
    args = q, weights, keys, k, scale, lengths, key_mask, seen, key_scale
    picks = op._allocate(*args).fill_(77777)
    op.launch_index_topk(*args, picks, **launch)
    return picks.cpu()


def exact(q, weights, keys, scale=SCALE):
    """Scores `[B,S,T]`."""
    s = torch.einsum("bshd,btd->bsht", q.double(), keys.double()) * scale
    return torch.einsum("bsh,bsht->bst", weights.double(), s.relu())


def visible(q, keys, lengths=None, key_mask=None):
    """Which tokens `[B,S,T]` a query sees."""
    (batch, queries), size = q.shape[:2], keys.shape[1]
    length = torch.tensor([size]) if lengths is None else lengths.long().clamp(0, size)
    own = length.expand(batch)[:, None] - queries + torch.arange(queries)
    seen = torch.arange(size) <= own[:, :, None]
    return seen if key_mask is None else seen & key_mask[:, None]


def assert_best(picks, scores, seen, k):
    """The set of a stable sort; -1 behind it."""
    batch, queries, size = scores.shape
    assert picks.dtype == torch.int32 and picks.shape == (batch, queries, min(k, size))
    hidden = scores.masked_fill(~seen, -torch.inf)
    order = hidden.sort(dim=-1, descending=True, stable=True).indices
    for b in range(batch):
        for s in range(queries):
            count = min(k, int(seen[b, s].sum()))
            wanted = order[b, s][seen[b, s][order[b, s]]][:count]
            assert picks[b, s, :count].sort().values.tolist() == wanted.sort().values.tolist()
            assert (picks[b, s, count:] == -1).all()


def integers(seed, *shape, most=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def inputs(seed, batch, queries, heads, size, width, dtype=torch.float32):
    """Integers: products and sums are exact, and few of their values differ."""
    q = integers(seed, batch, queries, heads, width, most=1).to(dtype)
    keys = integers(seed + 1, batch, size, width, most=1).to(dtype)
    return q, integers(seed + 2, batch, queries, heads), keys


@given(data=st.data())
def test_picks_the_best(device_path, data):
    draw = data.draw
    batch, queries = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 5, 17]))
    heads, width = draw(st.sampled_from([1, 3, 8, 20])), draw(st.sampled_from([16, 48]))
    size = queries + draw(st.sampled_from([0, 1, 30, 64, 150]))
    k, seed = draw(st.sampled_from([1, 7, 40, 300])), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes(device_path)))
    q, weights, keys = inputs(seed, batch, queries, heads, size, width, dtype)
    options = {}
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(-2, size + 9), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 3, batch, size) > draw(st.sampled_from([-0.5, 9]))
    found = call(device_path, q, weights, keys, k, **options)
    assert_best(found, exact(q, weights, keys), visible(q, keys, **options), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_picks_score_as_the_best_do(device_path, dtype):
    """Of real numbers, whose scores round: none that was left out is better than the worst."""
    if dtype not in dtypes(device_path):
        pytest.skip("the interpreter cannot multiply bfloat16")
    q, weights = random(1, 2, 6, 5, 64, dtype=dtype), random(2, 2, 6, 5)
    keys = random(3, 2, 300, 64, dtype=dtype)
    picks = call(device_path, q, weights, keys, 40, 0.125).long()
    scores, seen = exact(q, weights, keys, 0.125), visible(q, keys)
    wide = (q.float(), weights, keys.float())
    s = torch.einsum("bshd,btd->bsht", wide[0], wide[2]) * 0.125
    plain = torch.einsum("bsh,bsht->bst", weights, s.relu())
    allowed = 4 * (plain - scores).abs().max() + 1e-5
    chosen = torch.zeros_like(seen).scatter(2, picks, True)
    worst = scores.masked_fill(~chosen, torch.inf).amin(2)
    best = scores.masked_fill(chosen | ~seen, -torch.inf).amax(2)
    assert (seen | ~chosen).all() and (chosen.sum(2) == 40).all()
    assert (best - worst <= allowed).all()


@pytest.mark.parametrize("k", [9, 60])
@pytest.mark.parametrize("slab", [2, 100])
def test_counts_of_what_a_query_sees(device_path, k, slab):
    """In the place of lengths: more queries than keys, and counts that do not ascend."""
    q, weights, keys = inputs(20, 2, 30, 4, 25, 16)
    seen = torch.randint(-3, 29, (2, 30), generator=torch.Generator().manual_seed(1))
    launch = {} if device_path[1] == "reference" else {"workspace": slab * 25 * 4}
    for kind in (torch.int64, torch.int32):
        found = call(device_path, q, weights, keys, k, seen=seen.to(kind), **launch)
        shown = torch.arange(25) < seen[..., None]
        assert_best(found, exact(q, weights, keys), shown, k)


@given(data=st.data())
def test_keys_of_eight_bits(device_path, data):
    """With a factor each, a power of two, so that scores stay exact: as of the keys that are meant.
    Strides of factors, of a cache of all layers for example, are any."""
    draw = data.draw
    batch, queries = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 17]))
    size = queries + draw(st.sampled_from([1, 30, 150]))
    k, seed = draw(st.sampled_from([1, 7, 300])), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes(device_path)))
    q, weights, keys = inputs(seed, batch, queries, 8, size, 32, dtype)
    key_scale = 2.0 ** integers(seed + 4, 3, size, batch, most=2)[1].mT
    options = {}
    if draw(st.booleans()):
        options["lengths"] = torch.tensor([draw(st.integers(1, size))])
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 3, batch, size) > -0.5
    found = call(device_path, q, weights, keys.to(FP8), k, key_scale=key_scale, **options)
    meant = keys.double() * key_scale[..., None]
    assert_best(found, exact(q, weights, meant), visible(q, keys, **options), k)


def test_a_factor_of_nan_surfaces_and_behind_the_length_none_is_read(device_path):
    q, weights, keys = inputs(8, 1, 1, 4, 90, 16)
    key_scale = torch.ones(1, 90)
    key_scale[0, [40, 70]] = torch.nan
    how = {"lengths": torch.tensor([60]), "key_scale": key_scale}
    found = call(device_path, q, weights, keys.to(FP8), 5, **how)
    assert 40 in found and 70 not in found


def test_of_equal_scores_the_earlier_token(device_path):
    """All are 0 but a few: the first of the zeros fill the picks up, and no token below 0."""
    keys = torch.zeros(1, 200, 16)
    keys[0, :, 0] = -1.0  # relu makes 0 of it
    keys[0, [50, 130]] = 1.0
    keys[0, ::3, 1] = 2.0  # of the head that weighs below 0
    q = torch.zeros(1, 4, 2, 16)
    q[:, :, 0, 0] = q[:, :, 1, 1] = 1.0
    weights = torch.tensor([1.0, -1.0]).expand(1, 4, 2)
    for k in (2, 3, 60, 110, 150):
        found = call(device_path, q, weights, keys, k)
        assert_best(found, exact(q, weights, keys), visible(q, keys), k)


def test_order_is_the_same_in_every_run(device_path):
    q, weights, keys = inputs(5, 2, 9, 4, 300, 16)
    first = call(device_path, q, weights, keys, 33)
    assert torch.equal(first, call(device_path, q, weights, keys, 33))
    if device_path[1] == "reference":
        assert torch.equal(first, first.sort(-1).values)


@pytest.mark.parametrize("k", [300, 301, 4096])
def test_all_that_is_seen_ascends(device_path, k):
    q, weights, keys = inputs(6, 2, 5, 3, 300, 16)
    mask = random(7, 2, 300) > 0
    for options in ({}, {"lengths": torch.tensor([3])}, {"key_mask": mask}):
        found = call(device_path, q, weights, keys, k, **options)
        for row, seen in zip(
            found.flatten(0, 1), visible(q, keys, **options).flatten(0, 1), strict=True
        ):
            wanted = seen.nonzero()[:, 0].tolist()
            assert row.tolist() == wanted + [-1] * (300 - len(wanted))


@pytest.mark.parametrize("slab", [1, 4, 9, 18, 27])
@pytest.mark.parametrize("masked", [False, True])
def test_slabs(device_path, slab, masked):
    """Queries of one row, or rows, and the rest of both."""
    if device_path[1] == "reference":
        pytest.skip("has no slabs")
    q, weights, keys = inputs(8, 5, 9, 4, 130, 16)
    options = {"lengths": torch.tensor([130, 9, 77, 0, 100])}
    if masked:
        options["key_mask"] = random(9, 5, 130) > -0.5
    found = call(device_path, q, weights, keys, 20, workspace=slab * 130 * 4, **options)
    assert_best(found, exact(q, weights, keys), visible(q, keys, **options), 20)


def test_a_slab_takes_what_the_workspace_holds():
    assert op.slab_for(8, 4096, 32768, 64 << 20) == (1, 512)
    assert op.slab_for(8, 1, 131072, 64 << 20) == (8, 1)
    assert op.slab_for(64, 1, 1 << 20, 64 << 20) == (16, 1)
    assert op.slab_for(2, 100, 1000, 64 << 20) == (2, 100)


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 130])
@pytest.mark.parametrize("queries, together", [(1, 1), (5, 1), (5, 4)])
def test_plans(device_path, heads, queries, together):
    """Heads in blocks, several queries a program, several programs a query."""
    if device_path[1] == "reference":
        pytest.skip("has no plans")
    q, weights, keys = inputs(10, 2, queries, heads, 150, 32)
    plan = op.Plan(32, together, 3, 4, 2, 16 if heads < 64 else 64)
    found = call(device_path, q, weights, keys, 30, plan=plan)
    assert_best(found, exact(q, weights, keys), visible(q, keys), 30)


CARDS = {
    "4090": Card.made("nvidia", (8, 9), 128, 101376),
    "H200": Card.made("nvidia", (9, 0), 132, 232448),
    "MI300X": Card.made("amd", (9, 4), 304, 65536),
}


# Two blocks of heads of float32 are more than the card has: its error says so.
LARGE = ("MI300X", 4, 256)


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [48, 128, 256])
def test_plans_fit_every_card(name, itemsize, width):
    for slab in (op.Slab(1, 1), op.Slab(8, 1), op.Slab(1, 512), op.Slab(2, 9)):
        for heads in (1, 16) if (name, itemsize, width) == LARGE else (1, 20, 64, 200):
            plan = op.plan_for(slab, heads, 32768, width, itemsize, CARDS[name])
            asked = op.shared_bytes(plan, heads, width, itemsize, CARDS[name].wgmma)
            assert asked <= CARDS[name].shared and plan.programs >= 1


def test_views(device_path):
    """Keys in a larger cache, queries and weights from transposes."""
    q, weights, keys = inputs(11, 2, 7, 4, 90, 32)
    wanted = call(device_path, q, weights, keys, 20)
    cache = torch.full((2, 100, 3, 32), torch.nan)
    cache[:, 5:95, 1] = keys
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    cast = q.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)  # channels apart
    for mine in (strided, cast):
        found = call(device_path, mine, turned, cache[:, 5:95, 1], 20)
        assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)


def test_what_is_not_seen_is_not_read(device_path):
    q, weights, keys = inputs(12, 1, 3, 2, 120, 16)
    mask = torch.ones(1, 120, dtype=torch.bool)
    mask[:, 10:20] = False
    options = {"lengths": torch.tensor([80]), "key_mask": mask}
    seen = visible(q, keys, **options)
    for hidden in (torch.nan, torch.inf):
        x = keys.clone()
        x[:, 10:20] = x[:, 80:] = hidden
        assert_best(
            call(device_path, q, weights, x, 9, **options), exact(q, weights, keys), seen, 9
        )


def test_a_nan_is_picked(device_path):
    """So that it surfaces in attention; -inf is not mistaken for a hidden token."""
    q, weights, keys = torch.ones(1, 1, 3, 16), -torch.ones(1, 1, 3), torch.ones(1, 100, 16)
    keys[0, 70, 3] = torch.nan
    assert call(device_path, q, weights, keys, 1).tolist() == [[[70]]]
    keys[0, 70] = 3e38
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[0, :3] = False
    found = call(device_path, q, weights, keys, 99, key_mask=mask)
    assert found[0, 0, :97].sort().values.tolist() == list(range(3, 100))
    assert found[0, 0, 97:].tolist() == [-1, -1]


@pytest.mark.gpu
@pytest.mark.parametrize("queries, size", [(1, 2**15), (1, 2**19), (700, 2**14)])
def test_full_size(queries, size):
    q, weights, keys = inputs(13, 1, queries, 64, size, 128, torch.bfloat16)
    lengths = torch.tensor([size - 77])
    found = call(("cuda", "kernel"), q, weights, keys, 2048, lengths=lengths)
    rows = slice(max(0, queries - 9), None)
    wanted = exact(q[:, rows], weights[:, rows], keys)
    seen = visible(q, keys, lengths=lengths)[:, rows]
    assert_best(found[:, rows], wanted, seen, 2048)


@pytest.mark.gpu
def test_replays_of_a_graph():
    """Nothing waits for the host, which the length is not read on."""
    torch.use_deterministic_algorithms(False)
    q, weights, keys = (x.cuda() for x in inputs(14, 1, 1, 64, 2**15, 128, torch.bfloat16))
    lengths = torch.full((1,), 2**15, device="cuda")
    index_topk(q, weights, keys, 2048, scale=SCALE, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = index_topk(q, weights, keys, 2048, scale=SCALE, lengths=lengths)
    for length in (2**15, 2**14, 2049, 2048, 5):
        lengths.fill_(length)
        graph.replay()
        host = q.cpu(), weights.cpu(), keys.cpu()
        seen = visible(host[0], host[2], lengths=lengths.cpu())
        assert_best(found.cpu(), exact(*host), seen, 2048)


# ---- the op -------------------------------------------------------------------------------------


def test_compiles_as_one_graph(device):
    q, weights, keys = (x.to(device) for x in inputs(15, 2, 3, 2, 90, 16))
    compiled = torch.compile(
        lambda q: index_topk(q, weights, keys, 9, scale=1.0), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q), index_topk(q, weights, keys, 9, scale=1.0))


def test_no_queries_and_no_rows(device):
    for batch, queries in ((0, 1), (2, 0)):
        q, weights, keys = (x.to(device) for x in inputs(17, batch, queries, 2, 20, 16))
        assert index_topk(q, weights, keys, 9, scale=1.0).shape == (batch, queries, 9)


KEYS = torch.zeros(1, 40, 16)
WRONG = [
    ({"q": torch.zeros(1, 3, 16)}, r"q has 3 dimensions, needs \[B,S,H,D\]"),
    ({"q": torch.zeros(1, 3, 2, 16).double()}, "q is torch.float64, needs float32"),
    ({"q": torch.zeros(1, 3, 2, 20)}, "head dimension 20 is not a multiple of 16"),
    ({"q": torch.zeros(1, 3, 0, 16)}, "q has no heads"),
    ({"weights": torch.zeros(1, 3, 2).half()}, "weights is torch.float16"),
    ({"weights": torch.zeros(1, 3, 1)}, r"weights is torch.float32 \(1, 3, 1\), needs float32"),
    ({"keys": KEYS.half()}, r"keys is torch.float16 \(1, 40, 16\), needs torch.float32"),
    ({"keys": torch.zeros(2, 40, 16)}, r"needs torch.float32 \[B,T,D\] = \[1, T, 16\]"),
    ({"keys": torch.zeros(1, 16, 40).mT}, "keys has stride 40 in D, needs 1"),
    ({"keys": torch.zeros(1, 2, 16)}, "q has 3 queries, more than keys' 2 tokens"),
    ({"k": 0}, "k is 0, needs 1 to 4096"),
    ({"k": 4097}, "k is 4097"),
    ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32"),
    ({"lengths": torch.tensor([1, 2])}, r"lengths has shape \(2,\), needs \[1\] or \[B\]"),
    ({"keys": KEYS.to(FP8)}, "keys is torch.float8_e4m3fn, which needs a key_scale"),
    ({"key_scale": torch.ones(1, 40)}, "key_scale is for torch.float8_e4m3fn keys"),
    (
        {"keys": KEYS.to(FP8), "key_scale": torch.ones(1)},
        r"key_scale is torch.float32 \(1,\), needs float32 \[B,T\] = \[1, 40\]",
    ),
    ({"keys": KEYS.to(FP8), "key_scale": torch.ones(1, 40).half()}, "key_scale is torch.float16"),
    (
        {"keys": KEYS.to(FP8), "key_scale": torch.ones(1, 40, device="meta")},
        "key_scale is on meta, keys on cpu",
    ),
    ({"key_mask": torch.zeros(1, 40)}, "key_mask is torch.float32, needs bool"),
    ({"key_mask": torch.zeros(1, 39) > 0}, r"key_mask has shape \(1, 39\), needs \[B,T\]"),
    ({"key_mask": torch.zeros(1, 40, device="meta") > 0}, "key_mask is on meta, keys on cpu"),
    ({"weights": torch.zeros(1, 3, 2, device="meta")}, "weights is on meta, q on cpu"),
    ({"seen": torch.zeros(1, 3)}, "seen is torch.float32"),
    ({"seen": torch.zeros(1, 2).long()}, r"\(1, 2\), needs int32 or int64 \[B,S\] = \[1, 3\]"),
    ({"seen": torch.zeros(1, 3, device="meta").long()}, "seen is on meta, q on cpu"),
    (
        {"seen": torch.zeros(1, 3).long(), "lengths": torch.tensor([1])},
        "seen stands in the place of lengths",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    made = {"q": torch.zeros(1, 3, 2, 16), "weights": torch.zeros(1, 3, 2), "keys": KEYS, "k": 9}
    with pytest.raises(ArgumentError, match="^index_topk: .*" + message):
        index_topk(**(made | change), scale=1.0)


def test_refuses_more_tokens_than_topk():
    q, weights = torch.empty(1, 1, 1, 16, device="meta"), torch.empty(1, 1, 1, device="meta")
    keys = torch.empty(1, ranking.MAX_SCORES + 1, 16, device="meta")
    with pytest.raises(ArgumentError, match="index_topk: keys has 4194305 tokens a row"):
        index_topk(q, weights, keys, 9, scale=1.0)
