"""The flat search of stream_mask: what its bounds promise, and what its kernels could get wrong
where the hierarchical search has no say. Its equality with the specification is in
test_stream_mask."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_cases import block_scores, pair, random, same, specified, trace

from attnplug.ops.common.rows import NO_MASK
from attnplug.ops.stream import reference
from attnplug.ops.stream.bounds import RankPlan

BOUNDS = {"query_block": 16, "block": 16, "top_k": 2, "search": "bounds"}


@given(seed=st.integers(0, 999), queries=st.sampled_from([1, 3, 16]), hidden=st.booleans())
def test_no_key_is_above_its_blocks_bound(seed, queries, hidden):
    q, k = random(seed, queries, 64), random(seed + 1, 1, 1, 100, 64) + random(seed + 2, 64)
    start, lengths = torch.tensor([3]), torch.tensor([97])
    mask = random(seed + 3, 1, 100) > 0 if hidden else None
    rows = lengths.numpy(), start.numpy(), NO_MASK if mask is None else mask.numpy()
    summaries = reference.summarise(k.numpy(), *rows, 16)[0, 0]
    mean = reference._mean(q.numpy(), 16)
    assert torch.allclose(torch.from_numpy(mean), q.sum(0) / 16, atol=1e-5)
    for r in range(94 // 16):
        keys = k[0, 0, 3 + 16 * r : 19 + 16 * r].double()
        shown = keys if mask is None else keys[mask[0, 3 + 16 * r : 19 + 16 * r]]
        m, bound = q.double().sum(0) / 16, reference._bound(mean, *summaries[r])
        assert (shown @ m <= bound + 1e-4).all()
        wide = torch.maximum(m * shown.amax(0), m * shown.amin(0)).sum() if len(shown) else 0
        assert abs(bound - wide) < 1e-4  # nor is it looser than said


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_up_to_four_earlier_blocks_a_place_it_is_exact(device_path, top_k):
    queries = 16 * (4 * top_k + 1)
    q, k = pair(top_k, 1, 2, 1, queries, queries)
    index, score = trace(device_path, q, k, **BOUNDS | {"top_k": top_k})
    for h in range(2):
        for i in range(index.shape[2]):
            scores = block_scores(q, k, 0, h, i, **BOUNDS)
            wanted = sorted(scores, key=lambda r: (-scores[r], r))[:top_k]
            assert index[0, h, i].tolist() == wanted + [-1] * (top_k - len(wanted))
            assert score[0, h, i, : len(wanted)].tolist() == [scores[r] for r in wanted]


def test_it_finds_what_a_branch_hides(device_path):
    """A block that is not the first of any branch's part, among blocks that score less."""
    q, k = random(0, 1, 2, 1, 64), 0.01 * random(1, 1, 1, 512, 64)
    q = q[:, :1].expand(1, 2, 1, 64)
    k[0, :, 0], k[0, :, 13 * 16 + 5] = 0.1 * q[0, 0, 0], q[0, 0, 0]
    found = trace(device_path, q, k, **BOUNDS | {"top_k": 1})[0]
    assert found.eq(13).all()
    assert trace(device_path, q, k, **BOUNDS | {"top_k": 1, "search": "branches"})[0].eq(0).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (5, 1), (12, 2), (20, 1)])
def test_any_group(device_path, heads, kv_heads):
    """More heads than a program has lists; and more query blocks than fit into one."""
    q, k = pair(heads, 1, heads, kv_heads, 1 if heads > 2 else 17 * 16, 300)
    options = BOUNDS | {"top_k": 1}
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


@pytest.mark.parametrize("plan", [RankPlan(16, 4, 16, 4), RankPlan(64, 8, 32, 4)])
def test_any_plan_gives_the_same_bits(device_path, plan):
    q, k = pair(0, 1, 3, 1, 16, 700)
    options = BOUNDS | {"block": 32}
    found = trace(device_path, q, k, plan if device_path[1] == "kernel" else None, **options)
    same(found, specified(q, k, **options)[:2])


def test_the_best_blocks_come_last(device_path):
    """Every tile of summaries replaces all that the one before it left."""
    q, k = torch.ones(1, 1, 1, 64), torch.zeros(1, 1, 300 * 16, 64)
    k[..., 0] = (torch.arange(300 * 16) // 16).float()
    index, score = trace(device_path, q, k, **BOUNDS)
    assert index[0, 0, 0].tolist() == [299, 298] and score[0, 0, 0].tolist() == [299, 298]


def test_a_part_of_a_prompt_has_the_lists_of_the_whole(device_path):
    """No list depends on keys behind its query block, nor on where a chunk begins."""
    q, k = pair(3, 1, 2, 1, 96, 320)
    index, score = trace(device_path, q, k, **BOUNDS)
    chunk = trace(device_path, q[:, :, 32:], k, **BOUNDS)
    same(chunk, (index[:, :, 2:], score[:, :, 2:]))
    prefix = trace(device_path, q[:, :, :48], k[:, :, : 320 - 48], **BOUNDS)
    same(prefix, (index[:, :, :3], score[:, :, :3]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_query_that_is_not_finite_ranks_nothing(device_path, bad):
    q, k = pair(4, 1, 2, 1, 32, 320)
    q[0, 0, 5, 7] = bad
    options = BOUNDS | {"top_k": 1}
    same(trace(device_path, q, k, **options), specified(q, k, **options)[:2])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_block_with_a_key_that_is_not_finite_is_looked_at(device_path, bad):
    """However low the rest of it makes the bound; a hidden key makes none."""
    q, k = torch.ones(1, 1, 1, 64), torch.zeros(1, 1, 400, 64)
    k[..., 0] = (torch.arange(400) // 16).float()
    k[0, 0, 35], k[0, 0, 36] = bad, 100.0  # block 2
    k[0, 0, 52] = bad  # block 3, hidden
    k[0, 0, 53, 0] = 1.0
    mask = (torch.arange(400) != 52)[None]
    index, score = trace(device_path, q, k, key_mask=mask, **BOUNDS | {"top_k": 1})
    assert index.item() == 2 and score.item() == 6400
    mask[0, 35] = False
    same(trace(device_path, q, k, key_mask=mask, **BOUNDS | {"top_k": 1}), (index, score))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_many_queries_are_not_rounded(device_path, dtype):
    """Block 4 is above blocks 0 to 3 by less than two 16-bit parts of a mean could tell: the means
    are 1 + 2^-13 + 2^-21 and 1 + 2^-13. One of the five has to go."""
    if device_path == ("cpu", "kernel") and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cannot multiply bfloat16")
    q = torch.zeros(1, 1, 64, 64, dtype=dtype)
    q[..., :2], q[0, 0, 0, :2] = 1.0, 1 + 2.0**-7
    q[0, 0, 2:4, 0] = torch.tensor([2.0**-15, 2.0])
    k = torch.zeros(1, 1, 8 * 16 + 64, 64, dtype=dtype)
    k[0, 0, : 4 * 16 : 16, 1] = k[0, 0, 4 * 16, 0] = 64.0
    index, score = trace(device_path, q, k, **BOUNDS | {"top_k": 1, "query_block": 64})
    assert index.item() == 4 and score.item() == 128
