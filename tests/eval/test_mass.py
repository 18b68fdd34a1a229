"""Captured mass against a dense fp64 softmax, and the oracle against all lists of its size."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.eval import block_mass, captured_mass, mask_density, oracle_blocks, visible_blocks


def make(tokens, heads=4, heads_kv=2, dim=16, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, tokens, dim, generator=g) * 2
    return q, torch.randn(batch, heads_kv, tokens, dim, generator=g)


def attention(q, k, scale):
    s = (
        torch.einsum(
            "bhtd,bhsd->bhts", q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        )
        * scale
    )
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


@given(
    tokens=st.integers(1, 90),
    query_block=st.sampled_from([8, 16, 32]),
    block=st.sampled_from([4, 16]),
    sink=st.integers(0, 2),
    window=st.sampled_from([0, 5, 16]),
    seed=st.integers(0, 99),
)
def test_captured_mass_is_the_attention_inside_the_token_mask(
    tokens, query_block, block, sink, window, seed
):
    q, k = make(tokens, seed=seed)
    p = attention(q, k, 0.3)
    mass = block_mass(
        q, k, scale=0.3, query_block=query_block, block=block, sink=sink, window=window
    )
    blocks = -(-tokens // block)
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, blocks, (*mass.values.shape[:3], 3), generator=g).int()
    got = captured_mass(mass, index)
    for h, n in itertools.product(range(4), range(got.shape[2])):
        rows = range(n * query_block, min((n + 1) * query_block, tokens))
        local = max(0, n * query_block - window) // block * block
        keep = [
            s // block in index[0, h, n].tolist() or s < sink * block or s >= local
            for s in range(tokens)
        ]
        want = p[0, h, list(rows)][:, keep].sum(-1).mean()
        assert got[0, h, n].item() == pytest.approx(want.item(), abs=1e-12)


@given(tokens=st.integers(20, 64), top_k=st.integers(1, 3), seed=st.integers(0, 99))
def test_no_list_of_its_size_beats_the_oracle(tokens, top_k, seed):
    q, k = make(tokens, heads=1, heads_kv=1, seed=seed)
    mass = block_mass(q, k, scale=1.0, query_block=16, block=8)
    best = captured_mass(mass, oracle_blocks(mass, top_k))[0, 0]
    blocks = mass.values.shape[-1]
    for chosen in itertools.combinations(range(blocks), min(top_k, blocks)):
        index = torch.tensor(chosen).int().expand(1, 1, best.shape[0], -1)
        assert (captured_mass(mass, index)[0, 0] <= best + 1e-12).all()


def test_the_oracle_lists_no_fixed_no_future_and_no_block_twice():
    q, k = make(200, batch=2)
    mass = block_mass(q, k, scale=0.3, query_block=32, block=8, sink=2, window=10)
    index = oracle_blocks(mass, 7)
    assert index.dtype == torch.int32 and index.shape == (2, 4, 7, 7)
    for n in range(index.shape[2]):
        local = max(0, n * 32 - 10) // 8
        for row in index[:, :, n].reshape(-1, 7).tolist():
            entries = [x for x in row if x >= 0]
            assert entries == sorted(set(entries))
            assert row[len(entries) :] == [-1] * (7 - len(entries))
            assert all(2 <= x < local for x in entries)
            assert len(entries) == min(7, max(0, local - 2))


def test_the_oracle_lists_what_each_query_block_may():
    q, k = make(200)
    mass = block_mass(q, k, scale=0.3, query_block=32, block=8)
    budgets = torch.tensor([2, 2, 5, 1, 5, 3, 2])
    index = oracle_blocks(mass, budgets)
    assert index.shape[-1] == 5
    for n, budget in enumerate(budgets.tolist()):
        alone = oracle_blocks(mass, budget)[:, :, n]
        assert torch.equal(index[:, :, n, :budget], alone) and (index[:, :, n, budget:] == -1).all()


def test_sampled_query_blocks_equal_the_full_measurement():
    q, k = make(150)
    full = block_mass(q, k, scale=0.3, query_block=16, block=8)
    some = torch.tensor([0, 3, 9])
    part = block_mass(q, k, scale=0.3, query_block=16, block=8, query_blocks=some)
    torch.testing.assert_close(part.values, full.values[:, :, some], rtol=0, atol=0)
    index = oracle_blocks(full, 3)
    torch.testing.assert_close(
        captured_mass(part, oracle_blocks(part, 3)), captured_mass(full, index)[:, :, some]
    )


def test_every_block_listed_captures_everything_and_density_counts_blocks():
    q, k = make(100)
    mass = block_mass(q, k, scale=0.3, query_block=16, block=8)
    everything = torch.arange(13).int().expand(1, 4, 7, 13)
    torch.testing.assert_close(captured_mass(mass, everything), torch.ones(1, 4, 7).double())
    assert mask_density(mass, everything) == 1.0
    nothing = torch.full((1, 4, 7, 1), -1).int()
    # Query block n reads its own two key blocks and, from n = 1 on, the sink: 2 + 6*3 - 1 (the
    # last query block has keys 96..99 only) of 2 + 4 + ... + 12 + 13 causal blocks.
    assert visible_blocks(mass, nothing).sum().item() == 4 * 19
    assert mask_density(mass, nothing) == pytest.approx(19 / 55)


def test_float32_at_32k_tokens_matches_float64_on_sampled_blocks():
    q, k = make(32768, heads=2, heads_kv=1, dim=8)
    some = torch.tensor([17, 255])
    a = block_mass(q, k, scale=0.35, query_blocks=some, dtype=torch.float32)
    b = block_mass(q, k, scale=0.35, query_blocks=some)
    torch.testing.assert_close(a.values.double(), b.values, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(b.values.sum(-1), torch.ones(1, 2, 2).double(), rtol=0, atol=1e-12)
