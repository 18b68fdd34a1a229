"""momo as a whole: what its paper and methods/momo.md say must be true."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Momo, PolicyError
from attnplug.ops import block_sparse_attention
from attnplug.policies import AttentionCall, Dense, LayerShape

SHAPE = dict(gamma=8, block=16, query_block=32, tail=0, min_tokens=0)
MOMO = Momo(**SHAPE, top_k=3, exact_k=1, delta=0.5)


def call(tokens: int, *, heads=(4, 2), dim=64, batch=1, seed=0, device="cpu") -> AttentionCall:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, h, tokens, dim, generator=random).to(device)
        for h in (heads[0], heads[1], heads[1])
    )
    return AttentionCall(q, k, v, scale=dim**-0.5)


def exact(c: AttentionCall) -> torch.Tensor:
    """fp64 causal attention."""
    groups = c.q.shape[1] // c.k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (c.k, c.v))
    scores = c.q.double() @ k.transpose(2, 3) * c.scale
    seen = torch.ones(scores.shape[-2:], device=scores.device).tril(c.k.shape[2] - c.q.shape[2])
    return scores.masked_fill(seen == 0, -torch.inf).softmax(-1) @ v


SELECTIONS = st.sampled_from(["joint", "exact", "tournament", "estimated"])


@given(tokens=st.integers(1, 150), selection=SELECTIONS, seed=st.integers(0, 9))
def test_a_budget_that_covers_everything_is_dense(tokens, selection, seed):
    c = call(tokens, seed=seed)
    covering = dataclasses.replace(MOMO, top_k=16, exact_k=16, selection=selection)
    assert (covering.attend(c) - exact(c)).abs().max() < 1e-4


@pytest.mark.parametrize("selection", ["joint", "exact", "tournament"])
def test_only_estimated_minds_exact_k(selection):
    few = Momo(**SHAPE, top_k=2, selection=selection)
    assert few.exact_k > few.top_k
    least = dataclasses.replace(few, exact_k=0)
    assert torch.equal(few.attend(call(150)), least.attend(call(150)))
    with pytest.raises(PolicyError, match="exact_k=8, needs 0 to 2"):
        dataclasses.replace(few, selection="estimated")


@given(tokens=st.integers(1, 150), selection=SELECTIONS, seed=st.integers(0, 9))
def test_measured_rows_are_dense_at_any_budget(tokens, selection, seed):
    c = call(tokens, seed=seed)
    found = dataclasses.replace(MOMO, selection=selection).attend(c)
    assert (found - exact(c))[:, :, :: MOMO.gamma].abs().max() < 1e-4


def test_delta_brings_the_rows_between_nearer_to_dense(device):
    """On queries that vary slowly a measured row's error is its neighbours' too."""
    c = call(512, device=device)
    c.q = c.q[:, :, :1] + 0.3 * c.q
    blocks = MOMO.select(c).blocks
    sparse, _ = block_sparse_attention(
        c.q, c.k, c.v, blocks, scale=c.scale, query_block=32, block=16, sink=1
    )
    wanted = exact(c)
    corrected = {w: dataclasses.replace(MOMO, delta=w).attend(c) for w in (0, 0.5, 1.0)}
    followers = torch.arange(512, device=device) % MOMO.gamma != 0
    assert torch.equal(corrected[0][:, :, followers], sparse[:, :, followers])
    errors = [(corrected[w] - wanted).norm() for w in (0, 0.5, 1.0)]
    assert errors[2] < 0.7 * (sparse - wanted).norm()
    assert errors[2] < errors[1] < errors[0] < (sparse - wanted).norm()
    assert torch.equal(MOMO.attend(c), corrected[0.5])


WITHOUT_VALUES = dataclasses.replace(MOMO, delta=None)


@given(tokens=st.integers(1, 150), seed=st.integers(0, 9))
def test_without_values_a_covering_budget_is_dense(tokens, seed):
    c = call(tokens, seed=seed)
    covering = dataclasses.replace(WITHOUT_VALUES, top_k=16)
    assert (covering.attend(c) - exact(c)).abs().max() < 1e-4


@pytest.mark.parametrize("sinks", [False, True])
def test_without_values_all_rows_are_sparse(device, sinks):
    """The same blocks are chosen, and no value is read but theirs."""
    c = call(512, device=device)
    blocks = MOMO.select(c).blocks
    sparse, lse = block_sparse_attention(
        c.q, c.k, c.v, blocks, scale=c.scale, query_block=32, block=16, sink=1
    )
    if sinks:
        c.sinks = torch.linspace(-1, 3, 4, device=device)
        share = torch.sigmoid(lse - c.sinks[:, None])
        sparse = sparse * share[..., None]
    rows = WITHOUT_VALUES.select(c)
    assert torch.equal(rows.blocks, blocks) and rows.out.shape == (1, 4, 64, 0)
    found = WITHOUT_VALUES.attend(c)
    assert (found - sparse).abs().max() < 1e-5
    assert (MOMO.attend(c) - sparse).abs().max() > 1e-2


@pytest.mark.parametrize("selection", ["exact", "estimated"])
def test_rows_with_lists_need_no_correction_either(selection, device):
    """No row is dense then; its list is the one that it has with a correction."""
    c = call(512, device=device)
    listed = dataclasses.replace(MOMO, selection=selection)
    blocks = listed.select(c).blocks
    sparse, _ = block_sparse_attention(
        c.q, c.k, c.v, blocks, scale=c.scale, query_block=32, block=16, sink=1
    )
    found = dataclasses.replace(listed, delta=None).attend(c)
    assert (found - sparse).abs().max() < 1e-5
    assert (listed.attend(c) - sparse).abs().max() > 1e-2


def test_delta_is_a_share_or_none():
    with pytest.raises(PolicyError, match="delta=2, needs 0 to 1, or None"):
        Momo(delta=2)
    assert str(Momo(delta=None)) == "momo" and str(Momo(delta=1)) == "momo(delta=1)"
    assert Momo(tail=0).density(1 << 20) < Momo(delta=0.5, tail=0).density(1 << 20) / 2


def test_joint_lists_keep_at_least_what_merged_ones_do(device):
    """Of the measured rows, joint lists are the best of their size, whatever the rows list."""
    c = call(1024, device=device)
    weights = exact_weights(c)[:, :, :: MOMO.gamma]
    masses = weights.unflatten(-1, (-1, MOMO.block)).sum(-1)
    masses = masses.unflatten(2, (-1, MOMO.query_block // MOMO.gamma)).sum(3)
    kept = {}
    for selection in ("joint", "exact", "estimated"):
        blocks = dataclasses.replace(MOMO, selection=selection).select(c).blocks.long()
        listed = masses.gather(-1, blocks.clamp(min=0)).masked_fill(blocks < 0, 0.0)
        kept[selection] = listed.sum(-1)
    for selection in ("exact", "estimated"):
        assert (kept["joint"] >= kept[selection] * 0.999).all()
        assert (kept["joint"] > kept[selection] * 1.001).any()


def exact_weights(c: AttentionCall) -> torch.Tensor:
    """fp64 softmax weights `[B,Hq,T,S]`."""
    k = c.k.double().repeat_interleave(c.q.shape[1] // c.k.shape[1], 1)
    seen = torch.ones(c.q.shape[2], c.k.shape[2], device=c.q.device).tril()
    scores = (c.q.double() @ k.transpose(2, 3) * c.scale).masked_fill(seen == 0, -torch.inf)
    return scores.softmax(-1)


def test_merge_is_for_rows_with_lists():
    with pytest.raises(PolicyError, match="merge='mean', needs 'mass' where selection='joint'"):
        Momo(merge="mean")


def test_no_future_block_is_selected(device):
    c = call(300, device=device)
    blocks = MOMO.select(c).blocks
    first = torch.arange(blocks.shape[2], device=device) * MOMO.query_block
    last_seen = (first + MOMO.query_block - 1).clamp(max=299)[None, None, :, None]
    assert (blocks * MOMO.block <= last_seen).all()
    assert (blocks >= -1).all() and (blocks[:, :, 3:] >= 0).any()


def test_lists_name_nothing_that_is_read_anyway(device):
    """Neither the sink nor the local part takes a place, whatever offset and padding are."""
    whole = call(320, device=device)
    policy = dataclasses.replace(MOMO, sink=2, window=20)
    blocks = policy.select(whole).blocks
    first = torch.arange(10, device=device)[None, None, :, None] * 32
    assert (blocks[blocks >= 0] >= 2).all() and (blocks < ((first - 20).clamp(min=0) // 16)).all()
    full = (first[..., 0] - 20) // 16 - 2 >= 3
    assert torch.equal((blocks >= 0).all(-1), full.expand(1, 4, -1))
    chunk = dataclasses.replace(whole, q=whole.q[:, :, 96:])
    assert torch.equal(policy.select(chunk).blocks, blocks[:, :, 3:])
    padded = call(320, batch=2, device=device)
    padded.start = torch.tensor([0, 64], dtype=torch.int32, device=device)
    padded.key_mask = torch.arange(320, device=device) >= padded.start[:, None]
    alone = AttentionCall(*(x[1:, :, 64:] for x in (padded.q, padded.k, padded.v)), padded.scale)
    found = policy.select(padded).blocks[1:, :, :8]
    assert torch.equal(found, policy.select(alone).blocks)


def test_left_padding_does_not_change_a_row(device):
    padded = call(150, batch=2, device=device)
    padded.start = torch.tensor([0, 37], dtype=torch.int32, device=device)
    padded.key_mask = torch.arange(150, device=device) >= padded.start[:, None]
    found = MOMO.attend(padded)
    alone = AttentionCall(*(x[1:, :, 37:] for x in (padded.q, padded.k, padded.v)), padded.scale)
    assert (found[1, :, 37:] - MOMO.attend(alone)[0]).abs().max() < 1e-5
    assert (found[1, :, :37] == 0).all()


def test_a_chunk_of_a_static_cache_equals_the_whole(device):
    whole = call(160, device=device)
    wanted = MOMO.attend(whole)
    buffer = [torch.full((1, 2, 200, 64), torch.nan, device=device) for _ in range(2)]
    for target, source in zip(buffer, (whole.k, whole.v), strict=True):
        target[:, :, :160] = source
    chunk = AttentionCall(
        whole.q[:, :, 96:], *buffer, whole.scale, lengths=torch.tensor([160], device=device)
    )
    assert (MOMO.attend(chunk) - wanted[:, :, 96:]).abs().max() < 1e-5


def test_sinks_and_softcap_reach_both_passes(device):
    c = call(120, device=device)
    c.softcap, c.sinks = 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    covering = dataclasses.replace(MOMO, top_k=16, exact_k=16)
    assert (covering.attend(c) - Dense().attend(c)).abs().max() < 1e-4


def test_below_the_crossover_it_is_dense(device):
    c = call(100, device=device)
    late = dataclasses.replace(MOMO, min_tokens=101)
    assert torch.equal(late.attend(c), Dense().attend(c))
    assert not torch.equal(dataclasses.replace(MOMO, min_tokens=100).attend(c), Dense().attend(c))


def test_the_note_names_the_crossover_and_the_papers_density():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cpu"))
    late = Momo(gamma=16, top_k=128, min_tokens=4096)
    # B_k K + S + W of C tokens and C / gamma dense rows, the paper's equation 9; of C / gamma only
    # the tail is dense by default
    density = f"density {(64 * 128 + 64 + 0 + 1024) / 131072:.1%} at 131,072"
    assert (
        late.note(shape) == f"dense in prefills below 4,096 tokens, as min_tokens asks; {density}"
    )
    reads = dataclasses.replace(shape, positions=8192)  # a model that reads no more
    assert late.note(reads).endswith(f"; density {late.density(8192):.1%} at 8,192")
    never = dataclasses.replace(late, min_tokens=8193).note(reads)
    assert never == "dense in prefills below 8,193 tokens, as min_tokens asks"
    # A window counts as much as a sink's block.
    forced = Momo(top_k=128, min_tokens=0, sink=0, window=64)
    assert forced.note(shape) == density
    assert dataclasses.replace(late, min_tokens=1 << 20).note(shape).endswith("at 1,048,576")
    corrected = Momo(gamma=16, top_k=128, delta=0.5, tail=0)
    assert corrected.density(131072) == (64 * 128 + 64 + 131072 / 16) / 131072
    assert Momo().density(1000) == 1.0 and corrected.density(1 << 20) < 0.0704


@pytest.mark.parametrize("limit", [1, 10_000])
def test_heads_in_parts_equal_all_heads_at_once(device, monkeypatch, limit):
    """Row lists that are too large for memory are made some KV heads at a time."""
    c = call(200, heads=(10, 5), batch=2, device=device)
    wanted = MOMO.attend(c)
    monkeypatch.setattr("attnplug.policies.momo.LIST_BYTES", limit)
    parts = MOMO._by_heads(c, *MOMO.spans())
    assert [part.k.shape[1] for part in parts] == ([1] * 5 if limit == 1 else [4, 1])
    assert torch.equal(MOMO.attend(c), wanted)


@pytest.mark.parametrize("merge", ["mass", "mean"])
def test_every_merge_attends(merge, device):
    c = call(200, device=device)
    found = dataclasses.replace(MOMO, selection="exact", merge=merge).attend(c)
    assert (found - exact(c)).norm() < exact(c).norm()
