"""Rows of a batch and views of vLLM's cache, against lists and loops written here."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.serve.paged.pages import contiguous_row
from attnplug.serve.paged.rows import Row, batch_of
from attnplug.serve.vllm.layout import pages

STEPS, PROMPTS = st.lists(st.just(1), max_size=4), st.lists(st.integers(2, 9), max_size=5)


@given(STEPS, PROMPTS, st.integers(0, 3), st.data())
def test_rows_and_runs_cover_the_batch(steps, prompts, padding, data):
    queries = [*steps, *prompts, *[0] * padding]
    starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
    seen = [n + data.draw(st.integers(0, 50)) if n else 0 for n in queries]
    batch = batch_of(starts, seen)
    assert batch.steps == (len(steps) if prompts else len(queries))
    assert batch.step_keys == tuple(seen[: batch.steps])
    chosen = set(data.draw(st.lists(st.integers(0, 9))))
    runs = list(batch.runs(lambda row: row.index in chosen))
    covered = [row for run in runs for row in run.rows]
    assert covered == list(batch.prompts)
    assert [row.queries for row in covered] == prompts
    for row in covered:
        assert row == Row(row.index, starts[row.index], queries[row.index], seen[row.index])
    for run in runs:
        tokens = [t for r in run.rows for t in range(r.first, r.first + r.queries)]
        assert list(range(run.tokens.start, run.tokens.stop)) == tokens
        assert run.sparse == all(row.index in chosen for row in run.rows)
        assert len(run.rows) == 1 or not run.sparse
        assert run.longest == max(row.queries for row in run.rows)


@pytest.mark.parametrize("pages_first", [False, True])  # from vLLM 0.23 on
@pytest.mark.parametrize("memory", ["NHD", "HND", "cpu"])
def test_pages_see_every_layout_alike(memory, pages_first):
    k, v = torch.randn(2, 7, 3, 16, 64)  # [pages, Hkv, page, D], what all of them stand for
    whole = torch.stack([k, v], int(pages_first))
    if memory == "NHD":
        cache = whole.transpose(2, 3).contiguous()
    elif memory == "HND":
        cache = whole.contiguous().transpose(2, 3)
    else:
        cache = whole
    found = pages(cache, heads_first=memory == "cpu", stacked=int(pages_first))
    assert torch.equal(found[0], k) and torch.equal(found[1], v)
    assert found[0].data_ptr() == cache.data_ptr()  # a view


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_pages_see_keys_and_values_side_by_side(order):
    """As newer vLLM has them, in whatever order of pages, heads and tokens they lie in memory."""
    k, v = torch.randn(2, 7, 3, 16, 64)
    lying = torch.cat([k, v], -1).permute(order).contiguous()
    cache = lying.permute([order.index(axis) for axis in range(4)])
    found = pages(cache, heads_first=False, stacked=1)
    assert torch.equal(found[0], k) and torch.equal(found[1], v)
    assert found[0].data_ptr() == lying.data_ptr() and found[1].stride(3) == 1


@given(st.integers(1, 100), st.sampled_from([16, 32]), st.randoms(use_true_random=False))
def test_a_row_is_gathered_through_its_table(length, page, random):
    count = -(-length // page)
    numbers = random.sample(range(12), count) if count <= 12 else None
    if numbers is None:
        return
    cache = torch.randn(12, 2, page, 64)
    table = torch.tensor(numbers + [0] * 3, dtype=torch.int32)
    found = contiguous_row(cache, table, length, cache.dtype)
    assert found.shape == (1, 2, length, 64)
    for n in range(length):
        assert torch.equal(found[0, :, n], cache[numbers[n // page], :, n % page])
    fp8 = cache.to(torch.float8_e4m3fn)
    found = contiguous_row(fp8, table, length, torch.bfloat16)
    want = contiguous_row(fp8.float(), table, length, torch.bfloat16)
    assert torch.equal(found, want) and found.dtype == torch.bfloat16
