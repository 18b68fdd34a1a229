"""stream_mask against plain transcriptions of its searches (the paper's appendices A and B for
one of them), on the numba reference and on the Triton kernels: the same bits wherever the
arithmetic is exact."""

import math

import pytest
import torch
from cases import FEW
from hypothesis import given
from hypothesis import strategies as st
from stream_cases import (
    DEFAULTS,
    block_scores,
    calls,
    dtypes,
    pair,
    random,
    same,
    seen_pairs,
    specified,
    trace,
)

from attnplug.errors import ArgumentError
from attnplug.ops.stream import stream_mask as op


@pytest.fixture(params=op.SEARCHES)
def search(request):
    return request.param


@FEW
@given(data=st.data())
def test_equals_the_specification_bit_for_bit(device_path, search, data):
    q, k, options = data.draw(calls(device_path, whole=True))
    options["search"] = search
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


@pytest.mark.parametrize(
    ("queries", "blocks", "top_k"), [(16, 150, 128), (16, 150, 100), (1, 300, 2), (1, 129, 1)]
)
def test_many_blocks(device_path, search, queries, blocks, top_k):
    q, k = pair(top_k, 1, 1, 1, queries, blocks * 16 - 3)
    options = {"top_k": top_k, "search": search}
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


@pytest.mark.parametrize(
    ("width", "query_block", "block"),
    [(16, 128, 16), (48, 16, 128), (112, 32, 32), (128, 64, 64), (256, 16, 16)],
)
def test_every_head_dimension(device_path, search, width, query_block, block):
    q, k = pair(width, 1, 3, 1, 17, 300, width)
    options = {"query_block": query_block, "block": block, "search": search}
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


def test_ties_go_to_the_lower_block(device_path, search):
    """Equal keys: of equal candidates the lower ones stay, and so the first blocks or branches."""
    q, k = pair(0, 1, 2, 2, 32, 320)
    k = k[:, :, :1].expand(1, 2, 320, 64)
    options = {"top_k": 4, "search": search}
    index, score = trace(device_path, q, k, **options)
    assert index[..., 1:].gt(index[..., :-1]).all()
    assert score.eq(score[..., :1]).all()
    same((index, score), specified(q, k, **options)[:2])


def test_signed_zeros_tie(device_path, search):
    """Products that underflow may leave -0.0, which is not below 0.0."""
    q, k = torch.full((1, 1, 16, 64), -1e-30), torch.zeros(1, 1, 160, 64)
    k[:, :, :80] = 1e-30
    index, score = trace(device_path, q, k, search=search)
    assert score.eq(0).all()
    assert torch.equal(index, trace(device_path, q, torch.zeros_like(k), search=search)[0])


@given(data=st.data())
def test_lists_valid_blocks_once(device, search, data):
    device_path = (device, "reference")
    q, k, options = data.draw(calls(device_path, whole=False))
    options["search"] = search
    index, score = trace(device_path, q, k, **options)
    assert (index.eq(-1) == score.eq(-math.inf)).all()
    assert (index[..., 1:].eq(-1) | index[..., :-1].ne(-1)).all()  # -1 only at the end
    for b, h, i in torch.cartesian_prod(*map(torch.arange, index.shape[:3])).tolist():
        named = [r for r in index[b, h, i].tolist() if r >= 0]
        seen, rows, columns = seen_pairs(q, k, b, h, **options)
        valid = set(columns[seen[rows == i].any(0)].tolist())
        assert len(named) == len(set(named)) and set(named) <= valid
        budget = options.get("budget")
        if budget is None:
            assert bool(named) == bool(valid)
        else:
            mine = int(budget[b % budget.shape[0], h % budget.shape[1], i])
            assert len(named) <= max(mine, 0) and bool(named) == bool(valid and mine > 0)


@pytest.mark.parametrize("seed", range(3))
def test_real_values_differ_only_where_scores_are_too_close(device_path, search, seed):
    dtype = dtypes(device_path)[seed - 1]
    q, k = pair(seed, 1, 2, 1, 48, 400, 128, dtype, whole=False)
    options = DEFAULTS | {"top_k": 4, "search": search}
    index, score = trace(device_path, q, k, **options)
    wanted, _, gaps = specified(q, k, **options)
    # Any order of 128 sums errs by at most 128 roundings of the sum of the magnitudes.
    room = 128 * 2**-23 * float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max())
    equal = (index == wanted).all(-1)
    wide = 128 * 2**-23 * float(q.float().norm(dim=-1).max() * k.float().abs().amax(2).norm())
    assert (equal | (gaps <= 2 * (room if search == "branches" else wide))).all()
    assert equal.float().mean() > 0.7
    for h, i in torch.cartesian_prod(*map(torch.arange, index.shape[1:3])).tolist():
        exact = block_scores(q, k, 0, h, i, **options)
        for r, value in zip(index[0, h, i].tolist(), score[0, h, i].tolist(), strict=True):
            assert abs(exact[r] - value) <= room


def test_runs_give_the_same_bits(device_path, search):
    """Whatever runs beside a row: alone, in a batch, twice."""
    q, k = pair(0, 2, 2, 1, 20, 300, whole=False)
    both = trace(device_path, q, k, search=search)
    same(both, trace(device_path, q, k, search=search))
    for b in range(2):
        own = (x[b : b + 1].contiguous() for x in (q, k))
        alone = trace(device_path, *own, search=search)
        same(alone, tuple(x[b : b + 1] for x in both))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("tile", [16, 32])
def test_any_plan_gives_the_same_bits(device_path, heads, tile):
    q, k = pair(0, 1, 3, 1, 16, 300)
    plan = op.Plan(heads, tile, seed_warps=4, warps=4) if device_path[1] == "kernel" else None
    same(trace(device_path, q, k, plan, block=32), specified(q, k, block=32)[:2])


def test_a_key_one_past_the_first_query_is_its_alone_not_to_see(device_path, search):
    """Key blocks that end one key after a query block's first position, with that key its best."""
    q, k = pair(6, 1, 3, 1, 80 - 14, 80)
    q[:, :, :, 0], k[:, :, :, 0] = 0, 0
    q[:, :, ::16, 0], k[:, :, 15::16, 0] = 1, 50
    options = {"top_k": 2, "search": search}
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


@pytest.mark.parametrize("limited", [False, True])
def test_a_pipeline_changes_no_bit(device, limited):
    """Its loop is compiled on a GPU alone: there the plan that has one, against one without."""
    block, width, size = (64, 128, 8000) if device == "cuda" else (16, 64, 80)
    q, k = (x.to(device).half() for x in pair(5, 1, 4, 1, size, size, width))
    none = (None, None, None)
    args = (block, block, 4, None, torch.tensor([size - 9], device=device) if limited else None)
    found = []
    plan = op.plan_for(block, 4, block, width, 2, True)
    for each in (plan, plan._replace(stages=1), plan._replace(seed_stages=3)):
        found.append(op._allocate(q, k, *args, *none, "branches", None))
        op.launch_stream_mask(q, k, *args, *none, "branches", None, *found[-1], plan=each)
    assert device == "cpu" or plan.stages > 1
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_hidden_keys_enter_nothing(device_path, search):
    """Keys that nobody sees, permuted or spoilt: masked, before `start`, after `lengths`."""
    q, k = pair(0, 2, 2, 1, 20, 300)
    options = {
        "key_mask": random(7, 2, 300) > 0,
        "start": torch.tensor([0, 40]),
        "lengths": torch.tensor([290, 270]),
        "search": search,
    }
    index, score = trace(device_path, q, k, **options)
    at = torch.arange(300)
    hidden = ~options["key_mask"] | (at < options["start"][:, None])
    hidden |= at >= options["lengths"][:, None]
    for b in range(2):
        places = hidden[b].nonzero()[:, 0]
        k[b, :, places] = k[b, :, places.flip(0)]
    same(trace(device_path, q, k, **options), (index, score))
    for b in range(2):
        k[b, :, hidden[b]] = torch.nan
    same(trace(device_path, q, k, **options), (index, score))


def test_left_padding_does_not_change_a_row(device_path, search):
    """Nor does room in the cache: blocks, branches and iterations count from `start`."""
    q, k = pair(0, 2, 2, 1, 36, 330)
    options = {"start": torch.tensor([0, 37]), "lengths": torch.tensor([330, 310])}
    index, score = trace(device_path, q, k, search=search, **options)
    same((index[1:], score[1:]), trace(device_path, q[1:], k[1:, :, 37:310], search=search))
    # A row with padding inside the call: its query blocks begin at the first real query.
    options = {"start": torch.tensor([0, 304])}
    index, score = trace(device_path, q, k, search=search, **options)
    alone = trace(device_path, q[1:, :, 10:], k[1:, :, 304:], search=search)
    same((index[1:, :, :2], score[1:, :, :2]), alone)
    assert index[1:, :, 2:].eq(-1).all() and score[1:, :, 2:].eq(-math.inf).all()


def test_a_budget_is_a_smaller_top_k(device_path, search):
    q, k = pair(0, 1, 1, 1, 64, 400)
    budget = torch.tensor([[[1, 5, 3, 0]]])
    index, score = trace(device_path, q, k, top_k=5, budget=budget, search=search)
    for i, count in enumerate([1, 5, 3]):
        alone = trace(device_path, q, k, top_k=count, search=search)
        same((index[:, :, i, :count], score[:, :, i, :count]), tuple(x[:, :, i] for x in alone))
        assert index[:, :, i, count:].eq(-1).all()
    assert index[:, :, 3].eq(-1).all()


def test_a_gap_lists_what_a_query_prefers(device_path, search):
    """Each of three queries has one block of its own, with products of 100, 10 and 1; what is half
    as good for a query stays or goes by that query's best, not by the list's."""
    q = torch.zeros(1, 1, 16, 64)
    k = torch.zeros(1, 1, 256, 64)
    for row, (size, r) in enumerate([(100, 2), (10, 5), (1, 8)]):
        q[0, 0, row::3, row] = 1  # every query is of one of the three
        k[0, 0, 16 * r + 3, row] = size
        k[0, 0, 16 * (r + 1) + 3, row] = size / 2
    named = {None: [2, 3, 5, 6, 8, 9], 0: [2, 5, 8], 4: [2, 5, 8, 9], 5: [2, 5, 6, 8, 9]}
    for gap, wanted in named.items():
        index, score = trace(device_path, q, k, top_k=8, gap=gap, search=search)
        found = index[0, 0, 0]
        listed = [r for r in wanted if r in found.tolist()]
        assert listed == wanted
        if gap in (0, 4):  # at 4 blocks without a product tie with the last of the best
            assert score[0, 0, 0, 0] == 100
    flat = trace(device_path, q.zero_(), k, top_k=8, gap=0, search=search)
    assert flat[0].ge(0).all()  # all scores are alike


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_gap_lists_no_block_without_a_score(device_path, search, bad):
    q, k = pair(0, 1, 1, 1, 16, 128)
    k[0, 0, 32:48, 3] = bad
    options = {"top_k": 8, "gap": 6.0, "search": search}
    index, score = trace(device_path, q, k, **options)
    same((index, score), specified(q, k, **options)[:2])
    assert bool((index == 2).any()) == (bad == math.inf)
    nothing = trace(device_path, torch.full_like(q, math.nan), k, **options)
    assert nothing[0].eq(-1).all() and nothing[1].eq(-math.inf).all()


def test_a_decode_step_names_the_needle(device_path, search):
    """One query; the key like it stands in the middle of nothing but is its part's first block."""
    q, k = random(0, 1, 4, 1, 64), 0.1 * random(1, 1, 2, 512, 64)
    q = q[:, :1].expand(1, 4, 1, 64)
    k[0, :, 201] = q[0, 0, 0]
    index, score = trace(device_path, q, k, top_k=4, search=search)
    assert index[..., 0].eq(201 // 16).all()
    assert torch.allclose(score[..., 0], q[0, 0, 0].square().sum())


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_blocks_without_a_visible_key(device_path, search, top_k):
    """In front, between and behind; and the same where a block mask says nothing on top."""
    q, k = pair(top_k, 2, 2, 1, 17, 500)
    mask = random(7, 2, 500) > 1.9
    mask[:, :40] = mask[:, 480:] = False
    mask[0, 499] = True
    options = {"top_k": top_k, "key_mask": mask, "search": search}
    wanted = specified(q, k, **options)[:2]
    same(trace(device_path, q, k, **options), wanted)
    allowed = torch.ones(1, 1, 2, 32, dtype=torch.bool)
    same(trace(device_path, q, k, block_mask=allowed, **options), wanted)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_nan_counts_as_minus_infinity(device_path, search, bad):
    """A pair's NaN, even where it is all that a block has: the block stays valid."""
    q, k = pair(0, 1, 2, 1, 48, 200)
    k[0, 0, 35, 5] = bad
    k[0, 0, 64:80, 3] = bad
    for top_k in (2, 13):
        found = trace(device_path, q, k, top_k=top_k, search=search)
        same(found, specified(q, k, top_k=top_k, search=search)[:2])
        assert (top_k == 2) or (found[0] == 4).any(-1).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device, search):
    torch._dynamo.reset()
    q, k = (x.to(device) for x in pair(0, 1, 4, 2, 1, 300))

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, lengths):
        return op.stream_mask(q * 2, k, lengths=lengths, **DEFAULTS | {"search": search})

    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 170, 300):
            lengths = torch.tensor([length])
            found = step(q, k, lengths.to(device))
            wanted = specified(2 * q.cpu(), k.cpu(), lengths=lengths, search=search)[:2]
            same(tuple(x.cpu() for x in found), wanted)


WRONG = [
    ({"query_block": 48}, "query_block is 48, needs 16, 32, 64, 128"),
    ({"block": 8}, "block is 8, needs"),
    ({"top_k": 0}, "top_k is 0, needs 1 to 128"),
    ({"top_k": 129}, "top_k is 129"),
    ({"budget": torch.ones(1, 1, 3)}, "budget is torch.float32"),
    ({"budget": torch.ones(1, 1, 2, dtype=torch.int32)}, r"budget has shape \(1, 1, 2\)"),
    ({"block_mask": torch.ones(1, 1, 3, 3)}, "block_mask is torch.float32"),
    ({"block_mask": torch.ones(1, 3, 3, 3, dtype=torch.bool)}, r"needs .* = \[1, 4, 3, 3\]"),
    ({"search": "flat"}, "search is 'flat', needs branches or bounds"),
    ({"gap": -1.0}, "gap is -1.0, needs a number from 0 on"),
    ({"gap": math.nan}, "gap is nan"),
    ({"gap": math.inf}, "gap is inf"),
    ({"q": torch.zeros(1, 4, 40, 128)}, "q has head dimension 128"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 40, 64), "k": torch.zeros(1, 2, 40, 64)}
    with pytest.raises(ArgumentError, match="^stream_mask: .*" + message):
        op.stream_mask(**(inputs | DEFAULTS | change))


@pytest.mark.gpu
def test_a_million_tokens_times_sixteen(search):
    """Offsets past 2^31: each row's and head's needle is the first block of its last branch."""
    size = 1 << 20
    k = torch.zeros(8, 2, size, 128, dtype=torch.bfloat16, device="cuda")
    q = random(0, 8, 4, 1, 128, dtype=torch.bfloat16, whole=True).cuda()
    place = size // 32 * 31
    k[:, :, place + 5] = q[:, ::2, 0]
    index, score = op.stream_mask(q, k, search=search)
    assert index[:, ::2, 0, 0].eq(place // 64).all()
    assert torch.equal(score[:, ::2, 0, 0], q[:, ::2, 0].float().square().sum(-1))


@pytest.mark.gpu
def test_memory_is_linear_and_a_graph_replays(search):
    """Nothing beside the outputs is allocated, and for bounds the summaries and four int32 for each
    place of a list; a captured call follows the lengths."""
    used = []
    for size in (1 << 14, 1 << 16):
        q, k = (x.cuda() for x in pair(0, 1, 4, 2, size, size, dtype=torch.bfloat16))
        lengths = torch.tensor([size], device="cuda")
        op.stream_mask(q, k, lengths=lengths, search=search)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = op.stream_mask(q, k, lengths=lengths, search=search)
        used.append(torch.cuda.max_memory_allocated() - before)
        room = sum(x.nbytes for x in out)
        room += 4 * out[0].nbytes + 2 * k.nbytes // 64 if search == "bounds" else 0
        assert used[-1] <= 1.1 * room + 4096
    assert used[1] <= 4.1 * used[0]
    q, k = (x.cuda() for x in pair(0, 1, 4, 2, 40, 300))
    lengths = torch.tensor([300], device="cuda")
    options = DEFAULTS | {"search": search}
    op.stream_mask(q, k, lengths=lengths, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op.stream_mask(q, k, lengths=lengths, **options)
    for length in (60, 300):
        lengths.fill_(length)
        graph.replay()
        wanted = specified(q.cpu(), k.cpu(), lengths=torch.tensor([length]), search=search)
        same(tuple(x.cpu() for x in out), wanted[:2])
