"""merge_block_rows against dictionaries in fp64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from momo_cases import call_op

from attnplug.errors import ArgumentError
from attnplug.ops.momo import merge_block_rows as op
from attnplug.ops.momo.merge_block_rows import merge_block_rows

# Each (rows, K, trim) is one compiled kernel for each merge.
SIZES = [(1, 5, 3), (4, 5, 6), (3, 2, 16), (4, 8, 32), (2, 3, 1)]


def call(device_path, index, score, lse, rows, trim, merge, sink=0, before=None):
    options = dict(rows=rows, trim=trim, merge=merge, sink=sink, before=before)
    ways = merge_block_rows, op._allocate, op.launch_merge_block_rows
    return call_op(device_path, *ways, (index, score, lse), options)


def ranks(index, score, lse, merge):
    """{block: rank} of rows `[r,K]`, from the definition."""
    named: dict[int, list[float]] = {}
    for row in range(index.shape[0]):
        for block, value in zip(index[row].tolist(), score[row].tolist(), strict=True):
            if block < 0:
                continue
            value = value if merge == "mean" else value - float(lse[row])
            named.setdefault(block, []).append(-math.inf if math.isnan(value) else value)
    if merge == "mass":
        return {block: sum(map(math.exp, values)) for block, values in named.items()}
    return {block: sum(values) / len(values) for block, values in named.items()}


def kept(line):
    """The blocks of one output list, having checked its form."""
    blocks = line[line >= 0].tolist()
    assert line.dtype == torch.int32
    assert line.tolist() == sorted(set(blocks)) + [-1] * (len(line) - len(blocks))
    return blocks


def assert_best(blocks, rank, trim, slack=0.0):
    """`blocks` are the best `trim` of `rank`, ties to the lower block; `slack`: relative rank
    difference that counts as a tie that may go either way."""
    assert set(blocks) <= set(rank)
    assert len(blocks) == min(trim, len(rank))
    if not slack:
        best = sorted(rank, key=lambda block: (-rank[block], block))[:trim]
        assert sorted(best) == blocks
        return
    worst = min((rank[block] for block in blocks), default=0.0)
    for block in set(rank) - set(blocks):
        assert rank[block] <= worst + slack * (1 + abs(worst))


def each_list(out, index, rows):
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            for place in range(out.shape[2]):
                yield out[b, h, place], (b, h, slice(place * rows, (place + 1) * rows))


@st.composite
def cases(draw):
    rows, names, trim = draw(st.sampled_from(SIZES))
    return dict(
        rows=rows,
        names=names,
        trim=trim,
        merge=draw(st.sampled_from(op.MERGES)),
        total=draw(st.sampled_from([1, rows, rows + 1, 2 * rows - 1])),
        blocks=draw(st.sampled_from([1, 4, 40, 2**31 - 1])),
        empty=draw(st.floats(0, 1)),
        seed=draw(st.integers(0, 2**31)),
    )


def tensors(case, generator):
    shape = (1, 2, case["total"], case["names"])
    index = torch.randint(0, case["blocks"], shape, generator=generator, dtype=torch.int32)
    index[torch.rand(shape, generator=generator) < case["empty"]] = -1
    return shape, index


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_keeps_the_best(device_path, case):
    generator = torch.Generator().manual_seed(case["seed"])
    shape, index = tensors(case, generator)
    score = 3 * torch.randn(shape, generator=generator)
    lse = 3 + torch.randn(shape[:3], generator=generator)
    out = call(device_path, index, score, lse, case["rows"], case["trim"], case["merge"])
    assert out.shape == (1, 2, -(-case["total"] // case["rows"]), case["trim"])
    for line, at in each_list(out, index, case["rows"]):
        rank = ranks(index[at], score[at], lse[at], case["merge"])
        assert_best(kept(line), rank, case["trim"], slack=1e-5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_ties_go_to_the_lower_block(device_path, case):
    """Scores whose sums are exact: the same sets, to the last block."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape, index = tensors(case, generator)
    score = torch.randint(-2, 3, shape, generator=generator).float()
    score[torch.rand(shape, generator=generator) < 0.1] = -torch.inf
    score[torch.rand(shape, generator=generator) < 0.1] = torch.nan
    lse = torch.randint(0, 2, shape[:3], generator=generator).float()
    out = call(device_path, index, score, lse, case["rows"], case["trim"], "mean")
    for line, at in each_list(out, index, case["rows"]):
        rank = ranks(index[at], score[at], lse[at], "mean")
        # Thirds are not exact in fp32; their order is.
        rank = {block: float(torch.tensor(value).float()) for block, value in rank.items()}
        assert_best(kept(line), rank, case["trim"])


def test_mass_counts_absent_rows_as_nothing(device_path):
    """Block 5 has the best mean, block 2 the most mass."""
    index = torch.tensor([[[[5, 2], [2, 3], [2, -1], [2, 3]]]], dtype=torch.int32)
    score = torch.tensor([[[[1.0, 0.5], [0.5, 0.0], [0.5, 9.0], [0.5, 0.0]]]])
    lse = torch.full((1, 1, 4), 2.0)
    for merge, best in (("mass", 2), ("mean", 5)):
        assert call(device_path, index, score, lse, 4, 1, merge).tolist() == [[[[best]]]]


def test_a_nan_row_takes_no_mass_away(device_path):
    index = torch.tensor([[[[3], [3], [4]]]], dtype=torch.int32)
    score = torch.tensor([[[[torch.nan], [5.0], [1.0]]]])
    assert call(device_path, index, score, torch.full((1, 1, 3), 6.0), 3, 1, "mass").item() == 3


def test_minus_zero_ties_with_zero(device_path):
    index = torch.tensor([[[[1, 2]]]], dtype=torch.int32)
    score = torch.tensor([[[[-0.0, 0.0]]]])
    assert call(device_path, index, score, torch.zeros(1, 1, 1), 1, 1, "mean").item() == 1


def test_normalisers_matter(device_path):
    """Raw scores prefer the row with the large normaliser, masses do not."""
    index = torch.tensor([[[[1], [2]]]], dtype=torch.int32)
    score = torch.tensor([[[[10.0], [1.0]]]])
    lse = torch.tensor([[[20.0, 1.5]]])
    for merge, best in (("mass", 2), ("mean", 1)):
        assert call(device_path, index, score, lse, 2, 1, merge).tolist() == [[[[best]]]]


def test_order_inside_the_rows_is_irrelevant(device_path):
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(-1, 6, (1, 1, 4, 8), generator=generator, dtype=torch.int32)
    score = torch.randn(1, 1, 4, 8, generator=generator)
    lse = torch.randn(1, 1, 4, generator=generator)
    want = call(device_path, index, score, lse, 4, 3, "mass")
    slots, rows = (torch.randperm(n, generator=generator) for n in (8, 4))
    index, score = (x[..., slots][:, :, rows] for x in (index, score))
    assert torch.equal(call(device_path, index, score, lse[..., rows], 4, 3, "mass"), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("merge", op.MERGES)
@pytest.mark.parametrize("score", [-torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("lse", [-torch.inf, torch.nan, torch.inf, 0.0])
def test_not_finite(device_path, merge, score, lse):
    """Never a duplicate, a lost slot or a number nobody named."""
    index = torch.tensor([[[[3, 1], [3, 0]]]], dtype=torch.int32)
    scores = torch.tensor([[[[score, 1.0], [0.0, score]]]])
    out = call(device_path, index, scores, torch.full((1, 1, 2), lse), 2, 4, merge)
    assert out.tolist() == [[[[0, 1, 3, -1]]]]


@pytest.mark.parametrize("merge", op.MERGES)
def test_empty_rows_give_no_block(device_path, merge):
    index = torch.full((1, 1, 5, 3), -1, dtype=torch.int32)
    score = torch.full((1, 1, 5, 3), -torch.inf)
    lse = torch.full((1, 1, 5), -torch.inf)
    assert (call(device_path, index, score, lse, 4, 6, merge) == -1).all()


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_read_anyway_is_left_out(device_path, shared):
    """`sink` and `before` are as if the blocks outside had not been named."""
    generator = torch.Generator().manual_seed(6)
    index = torch.randint(-1, 12, (2, 3, 10, 5), generator=generator, dtype=torch.int32)
    score, lse = torch.randn(2, 3, 10, 5, generator=generator), torch.zeros(2, 3, 10)
    before = torch.tensor([[0, 4, 9], [12, 6, 2]], dtype=torch.int32)[: 1 if shared else 2]
    got = call(device_path, index, score, lse, 4, 3, "mass", sink=2, before=before)
    limit = before.repeat_interleave(4, 1)[:, None, :10, None]
    unnamed = index.masked_fill((index < 2) | (index >= limit), -1)
    assert torch.equal(got, call(device_path, unnamed, score, lse, 4, 3, "mass"))
    assert (got[:, :, 1] >= 2).any() and not ((got >= 0) & (got < 2)).any()
    # a view with strides of its own
    doubled = before.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(got, call(device_path, index, score, lse, 4, 3, "mass", 2, doubled))


def test_padded_row_equals_row_alone(device_path):
    """Empty rows at the end (a left-padded sequence has fewer rows) change nothing."""
    generator = torch.Generator().manual_seed(4)
    index = torch.randint(-1, 9, (1, 1, 6, 4), generator=generator, dtype=torch.int32)
    score, lse = torch.randn(1, 1, 6, 4, generator=generator), torch.zeros(1, 1, 6)
    index[:, :, 5:] = -1
    whole = call(device_path, index, score, lse, 4, 5, "mass")
    alone = call(device_path, index[:, :, :5], score[:, :, :5], lse[:, :, :5], 4, 5, "mass")
    assert torch.equal(whole, alone)


@pytest.mark.parametrize(("rows", "names"), [(8, 128), (64, 128), (128, 128)])
def test_full_size(device, rows, names):
    """The defaults of momo and gamma=1, through the op."""
    path = (device, "reference")
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand(1, 2, 2 * rows, 1000, generator=generator)
    index = noise.topk(names).indices.int()
    score = torch.randn(1, 2, 2 * rows, names, generator=generator)
    lse = torch.full((1, 2, 2 * rows), 4.0)
    out = call(path, index, score, lse, rows, names, "mass")
    for line, at in each_list(out, index, rows):
        assert_best(kept(line), ranks(index[at], score[at], lse[at], "mass"), names, slack=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(index=torch.zeros(1, 2, 6, 4)), "index is torch.float32, needs int32"),
        (dict(score=torch.zeros(1, 2, 6, 3)), r"score has shape \(1, 2, 6, 3\)"),
        (dict(score=torch.zeros(1, 2, 6, 4).half()), "score is torch.float16"),
        (dict(lse=torch.zeros(1, 2, 5)), r"lse has shape \(1, 2, 5\)"),
        (dict(rows=0), "rows is 0"),
        (dict(trim=0), "trim is 0"),
        (dict(merge="max"), "merge is 'max', needs one of mass, mean"),
        (dict(sink=-1), "sink is -1, needs at least 0"),
        (dict(before=torch.zeros(1, 2)), r"before is \(1, 2\) torch.float32"),
        (dict(before=torch.zeros(1, 3, dtype=torch.int32)), r"needs .* = \[1,2\] int32"),
        (dict(rows=5000), "5000 . 4 = 20000 entries, at most 16384"),
    ],
)
def test_bad_arguments(change, message):
    good = dict(
        index=torch.zeros(1, 2, 6, 4, dtype=torch.int32),
        score=torch.zeros(1, 2, 6, 4),
        lse=torch.zeros(1, 2, 6),
        rows=4,
        trim=5,
    )
    with pytest.raises(ArgumentError, match=message):
        merge_block_rows(**(good | change))
