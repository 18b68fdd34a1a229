"""stream: what it traces and what it serves, against dense formulas; and the blocks that momo and
gather say they read, against what they attend to."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Dense, Gather, Momo, Policy, PolicyError
from attnplug.policies import (
    AttentionCall,
    Edges,
    LayerShape,
    Phase,
    Stream,
    TracingPhase,
    register,
)
from attnplug.policies._reads import query_positions, read_blocks
from attnplug.testing import oracle_attention

STREAM = Stream(top_k=2, block=16, query_block=16)
MOMO = Momo(gamma=8, block=16, query_block=32, top_k=2, window=20, tail=0, min_tokens=0)
GATHER = Gather(k=2, block=16, local=2, min_tokens=0)


class Held:
    """An EdgeWriter that keeps what it gets."""

    def __init__(self):
        self.edges: list[Edges] = []

    def emit(self, call: AttentionCall, edges: Edges | None) -> None:
        assert edges is not None
        self.edges.append(edges)


def call(tokens: int, *, batch=2, queries=0, start=None, device="cpu", seed=0) -> AttentionCall:
    """`queries` (0: all) of `tokens` tokens, rows padded to begin at `start`; a decode step is told
    the mask only, as transformers has it."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, tokens, 64, generator=random) for h in (4, 2, 2))
    found = AttentionCall(q[:, :, tokens - (queries or tokens) :], k, v, scale=0.125)
    if start is not None:
        found.key_mask = torch.arange(tokens) >= torch.tensor(start)[:, None]
        found.start = None if queries == 1 else torch.tensor(start, dtype=torch.int32)
    for name in ("q", "k", "v", "start", "key_mask"):
        value = getattr(found, name)
        setattr(found, name, None if value is None else value.to(device))
    return found


def probabilities(c: AttentionCall, named: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 softmax `[B,Hq,T,S]` over the seen keys, only those `named` `[B,Hq,T,S]` if given; 0
    where a query sees none."""
    group, size = c.q.shape[1] // c.k.shape[1], c.k.shape[2]
    scores = c.q.double().cpu() @ c.k.double().cpu().repeat_interleave(group, 1).mT * c.scale
    at, to = torch.arange(size - c.q.shape[2], size), torch.arange(size)
    seen = (to <= at[:, None]).expand(scores.shape).clone()
    if c.key_mask is not None:
        seen &= c.key_mask.cpu()[:, None, None]
        seen &= c.key_mask.cpu()[:, at][:, None, :, None]  # padding queries see nothing
    if named is not None:
        seen &= named
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)


def named_keys(c: AttentionCall, index: torch.Tensor, query_block: int, block: int):
    """Which keys `[B,Hq,T,S]` the lists name for each query."""
    batch, heads, queries, _ = c.q.shape
    size = c.k.shape[2]
    named = torch.zeros(batch, heads, queries, size, dtype=torch.bool)
    first = [0] * batch if c.first_key is None else c.first_key.tolist()
    for b, h, i, t in torch.nonzero(index >= 0).tolist():
        at = max(0, first[b] - (size - queries)) + i * query_block
        key = first[b] + int(index[b, h, i, t]) * block
        assert not named[b, h, at, key], "a block is listed twice"
        named[b, h, at : at + query_block, key : key + block] = True
    return named


def output(c: AttentionCall, index: torch.Tensor, query_block: int, block: int) -> torch.Tensor:
    """fp64 attention over the named blocks."""
    weights = probabilities(c, named_keys(c, index.cpu(), query_block, block))
    group = c.q.shape[1] // c.k.shape[1]
    return weights @ c.v.double().cpu().repeat_interleave(group, 1)


CALLS = {
    "whole": {"tokens": 100},
    "padded": {"tokens": 100, "start": [0, 37]},
    "chunk": {"tokens": 100, "queries": 33, "start": [5, 70]},
    "step": {"tokens": 100, "queries": 1, "start": [0, 37]},
}


@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS)
def test_mass_is_the_share_of_the_named_blocks(shape, device):
    c = call(**shape, device=device)
    edges = STREAM.observe(c, Dense())
    assert edges is not None
    weights = probabilities(c, named_keys(c, edges.index.cpu(), 16, 16))
    queries, size = c.q.shape[2], c.k.shape[2]
    first = [0] * 2 if c.first_key is None else c.first_key.tolist()
    for b, h, i, t in torch.nonzero(edges.index >= 0).tolist():
        at = max(0, first[b] - (size - queries)) + i * 16
        key = first[b] + int(edges.index[b, h, i, t]) * 16
        wanted = weights[b, h, at : at + 16, key : key + 16].sum()
        assert abs(float(edges.weight[b, h, i, t]) - float(wanted)) < 1e-4
    assert edges.captured is None


@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("measure", [1, 5])
def test_captured_is_the_share_of_dense_attention(shape, measure, device):
    c = call(**shape, device=device)
    edges = dataclasses.replace(STREAM, measure=measure).observe(c, Dense())
    assert edges is not None and edges.captured is not None
    named = named_keys(c, edges.index.cpu(), 16, 16)
    share = (probabilities(c) * named).sum(-1)
    size, queries = c.k.shape[2], c.q.shape[2]
    for b in range(2):
        low = 0 if c.first_key is None else int(c.first_key[b])
        rows = torch.arange(max(0, low - (size - queries)), queries, measure)
        wanted = torch.stack([share[b][:, rows].sum(-1), torch.full((4,), float(len(rows)))], -1)
        assert torch.allclose(edges.captured[b].double().cpu(), wanted.double(), atol=1e-3)


@pytest.mark.parametrize("weights", ["score", "mass", "value"])
def test_score_and_its_op_agree(weights):
    """The score comes from the mask itself where nothing else is asked for."""
    c = call(100)
    stream = dataclasses.replace(STREAM, weights=weights)
    plain, measured = stream.observe(c, Dense()), dataclasses.replace(stream, measure=4)
    other = measured.observe(c, Dense())
    assert plain is not None and other is not None and plain.weights == weights
    assert torch.equal(plain.index, other.index) and torch.equal(plain.weight, other.weight)


@pytest.mark.parametrize("shape", [s for n, s in CALLS.items() if n != "step"])
@given(top_k=st.sampled_from([1, 3, 7]))
def test_as_prefill_it_attends_to_the_named_blocks(shape, device, top_k):
    c = call(**shape, device=device)
    stream = dataclasses.replace(STREAM, top_k=top_k)
    edges = stream.observe(c, Dense())
    assert edges is not None
    wanted = output(c, edges.index, 16, 16)
    assert (stream.attend(c).double().cpu() - wanted).abs().max() < 1e-4
    if top_k == 7:  # all there are
        dense = oracle_attention(c.q, c.k, c.v, scale=c.scale, start=c.start, key_mask=c.key_mask)
        assert (stream.attend(c).double() - dense[0]).abs().max() < 1e-4


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_as_prefill_it_hides_nothing_that_is_not_finite(where, bad):
    """Also in a block that is not read; and what the mask hides may hold what it will."""
    c = call(100, start=[0, 37])
    getattr(c, where)[1, 0, 10] = bad  # padding
    if where != "q":
        assert c.key_mask is not None
        getattr(c, where)[0, 0, 20] = bad
        c.key_mask[0, 20] = False
    if where != "q":
        assert STREAM.attend(c).isfinite().all()
    getattr(c, where)[0, 0, 50] = bad
    shown = torch.zeros(4, 100, dtype=torch.bool)
    if where == "q":
        shown[0, 50] = True
    else:
        shown[:2, 50:] = True  # the heads of the first KV head
    assert torch.equal(~STREAM.attend(c)[0].isfinite().any(-1), shown)
    assert torch.equal(~STREAM.attend(c)[0].isfinite().all(-1), shown)


@pytest.mark.parametrize("shape", [s for n, s in CALLS.items() if n != "step"])
def test_momo_reads_what_it_attends_to(shape, device):
    c = call(**shape, device=device)
    reads = MOMO.reads(c)
    assert reads is not None and (reads.query_block, reads.block) == (32, 16)
    found = dataclasses.replace(MOMO, delta=0.0).attend(c)
    error = (found.double().cpu() - output(c, reads.index, 32, 16)).abs().amax((1, 3))
    starts = [0] * len(error) if c.start is None else c.start.tolist()
    for row, start in zip(error, starts, strict=True):
        first = max(0, start - (c.k.shape[2] - c.q.shape[2]))
        followers = (torch.arange(len(row)) - first) % MOMO.gamma != 0  # the others are dense
        assert row[followers].max() < 1e-4
    assert dataclasses.replace(MOMO, min_tokens=1000).reads(c) is None  # dense


def test_a_list_may_name_what_is_read_anyway():
    """Of all blocks, none is read twice."""
    c = call(100, start=[0, 37])
    index = torch.arange(7, dtype=torch.int32).expand(2, 2, 4, 7)
    local = query_positions(c, 32) // 16
    reads = read_blocks(c, index, local, query_block=32, block=16, sink=1, most=3)
    dense = oracle_attention(c.q, c.k, c.v, scale=c.scale, start=c.start, key_mask=c.key_mask)[0]
    assert (output(c, reads.index, 32, 16) - dense).abs().max() < 1e-6


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("start", [None, [0, 37]])
def test_gather_reads_what_it_attends_to(k, start, device):
    gather = dataclasses.replace(GATHER, k=k)
    c = call(100, queries=1, start=start, device=device)
    layer = gather.cache_layer(100)
    layer.update(c.k, c.v)
    assert layer.keys is not None and layer.values is not None
    c.k, c.v, c.state = layer.keys, layer.values, layer
    reads = gather.reads(c)
    assert reads is not None
    wanted = output(c, reads.index, reads.query_block, 16)
    assert (gather.attend(c).double().cpu() - wanted).abs().max() < 1e-4
    c.state = None
    assert gather.reads(c) is None  # dense


def listed(index: torch.Tensor, b: int, h: int, i: int) -> set[int]:
    return {int(r) for r in index[b, h, i] if r >= 0}


@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS)
def test_a_gap_drops_what_is_light_to_every_query(shape, device):
    """Against fp64 logits: of the blocks that a list without the gap has, those stay of which some
    query has a logit at most so far below its best listed one."""
    c = call(**shape, device=device)
    gap = 0.02
    whole = dataclasses.replace(STREAM, top_k=7).observe(c, Dense())
    edges = dataclasses.replace(STREAM, top_k=7, gap=gap).observe(c, Dense())
    assert whole is not None and edges is not None
    # The logarithm of a probability is a logit, but for a constant of the query's.
    logits = probabilities(c, named_keys(c, whole.index.cpu(), 16, 16)).log()
    queries, size = c.q.shape[2], c.k.shape[2]
    first = [0] * 2 if c.first_key is None else c.first_key.tolist()
    dropped = 0
    for b, h, i in torch.cartesian_prod(*map(torch.arange, whole.index.shape[:3])).tolist():
        at = max(0, first[b] - (size - queries)) + i * 16
        mine = logits[b, h, at : at + 16]
        wanted = set()
        for r in listed(whole.index, b, h, i):
            here = mine[:, first[b] + 16 * r : first[b] + 16 * r + 16].amax(1)
            near = here >= mine.amax(1) - gap
            wanted |= {r} if (near & here.isfinite()).any() else set()
        assert listed(edges.index, b, h, i) == wanted
        dropped += len(listed(whole.index, b, h, i)) - len(wanted)
    assert dropped > 0


@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS)
def test_a_budget_is_a_share_of_what_is_seen(shape, device):
    c = call(**shape, device=device)
    edges = dataclasses.replace(STREAM, top_k=3, budget=0.4).observe(c, Dense())
    assert edges is not None
    queries, size = c.q.shape[2], c.k.shape[2]
    first = [0] * 2 if c.first_key is None else c.first_key.tolist()
    for b, i in torch.cartesian_prod(*map(torch.arange, (2, edges.index.shape[2]))).tolist():
        at = max(0, first[b] - (size - queries)) + i * 16
        end = min(at + 16, queries)
        if at < queries:
            seen = (size - queries + end - 1 - first[b]) // 16 + 1
            wanted = min(3, -(-2 * seen // 5))
            assert (edges.index[b, :, i] >= 0).sum(-1).tolist() == [wanted] * 4


@pytest.mark.parametrize("shape", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mask", ["far", "17:18,64:", "0:33"])
def test_a_block_mask_says_what_may_be_listed(shape, mask, device):
    c = call(**shape, device=device)
    edges = dataclasses.replace(STREAM, top_k=9, block_mask=mask).observe(c, Dense())
    assert edges is not None
    queries, size = c.q.shape[2], c.k.shape[2]
    first = [0] * 2 if c.first_key is None else c.first_key.tolist()
    named = {"17:18,64:": {1, 4, 5, 6}, "0:33": {0, 1, 2}}
    for b, i in torch.cartesian_prod(*map(torch.arange, (2, edges.index.shape[2]))).tolist():
        at = max(0, first[b] - (size - queries)) + i * 16
        own = (size - queries + min(at + 16, queries) - 1 - first[b]) // 16
        allowed = set(range(1, own - 1)) if mask == "far" else named[mask] & set(range(own + 1))
        for h in range(4):
            assert listed(edges.index, b, h, i) == (allowed if at < queries else set())


def test_of_policy_traces_the_blocks_that_are_read():
    c = call(100)
    stream = dataclasses.replace(STREAM, of="policy")
    edges, reads = stream.observe(c, MOMO), MOMO.reads(c)
    assert edges is not None and reads is not None
    assert torch.equal(edges.index, reads.index) and (edges.query_block, edges.block) == (32, 16)
    assert (edges.weight.sum(-1) - torch.tensor([32.0, 32, 32, 4])).abs().max() < 1e-3
    assert stream.observe(c, Dense()) is None


@pytest.mark.parametrize("phase", [Dense(), MOMO])
def test_a_look_changes_nothing(phase, device):
    """Bit for bit, and only where someone records."""
    c, writer = call(100, start=[0, 37], device=device), Held()
    before = [x.clone() for x in (c.q, c.k, c.v)]
    wanted = phase.attend(c)
    policy = Policy(prefill=phase, trace=dataclasses.replace(STREAM, measure=4))
    assert torch.equal(policy.attend(c), wanted) and not writer.edges
    c.trace_to = writer
    assert torch.equal(policy.attend(c), wanted) and len(writer.edges) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, (c.q, c.k, c.v), strict=True))


def test_phases():
    assert Policy(trace=Stream()).prefill == Dense()
    assert Policy(prefill=Stream()).trace is None
    with pytest.raises(PolicyError, match="stream cannot be the decode method"):
        Policy(decode=Stream())
    with pytest.raises(NotImplementedError, match="TracingPhase has no observe"):
        TracingPhase().observe(call(20), Dense())
    with pytest.raises(PolicyError, match="gather cannot be the trace method"):
        Policy(trace=Gather())
    facts = {"name": "late", "phases": frozenset({"trace"})}
    overlooked = dataclasses.dataclass(frozen=True)(type("Overlooked", (Phase,), facts))
    for use in (lambda: Policy(trace=overlooked()), lambda: register(overlooked)):
        with pytest.raises(
            PolicyError, match=r"lacks observe, and .* attnplug.policies.TracingPhase"
        ):
            use()


def test_a_softcap_is_refused():
    shape = dict(heads_q=4, heads_kv=2, head_dim=64, sinks=False, device=torch.device("cpu"))
    assert STREAM.refusal(LayerShape(softcap=50.0, **shape)) == "stream knows no softcap"
    assert STREAM.refusal(LayerShape(softcap=0.0, **shape)) is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, r"stream: top_k=0, needs 1 to 128"),
    ({"top_k": 3.0}, r"stream: top_k=3.0, needs an integer"),
    ({"block": 48}, r"stream: block=48, needs 16, 32, 64, 128"),
    ({"query_block": 256}, r"stream: query_block=256, needs 16"),
    ({"weights": "sum"}, r"stream: weights='sum', needs score, mass, value"),
    ({"of": "all"}, r"stream: of='all', needs model, policy"),
    ({"measure": -1}, r"stream: measure=-1, needs at least 0"),
    ({"search": "flat"}, r"stream: search='flat', needs branches, bounds"),
    ({"gap": -0.5}, r"stream: gap=-0.5, needs a number from 0 to 8388608"),
    ({"gap": float("nan")}, r"stream: gap=nan, needs a number"),
    ({"gap": True}, r"stream: gap=True, needs a number"),
    ({"gap": 10**400}, r"stream: gap=1000+, needs a number"),
    ({"budget": 0}, r"stream: budget=0, needs a share above 0, up to 1"),
    ({"budget": 8}, r"stream: budget=8, needs a share above 0, up to 1"),
    ({"budget": "8"}, r"stream: budget='8', needs a share"),
    ({"block_mask": "near"}, r"stream: block_mask='near', needs all, far or tokens such as"),
    ({"block_mask": "64:64"}, r"stream: block_mask='64:64', needs"),
    ({"block_mask": "5"}, r"stream: block_mask='5', needs"),
    ({"block_mask": "0:" + "9" * 30}, r"stream: block_mask='0:9+', needs"),
    ({"block_mask": None}, r"stream: block_mask=None, needs"),
    ({"of": "policy", "gap": 3}, r"stream: gap=3, needs 0 beside of='policy'"),
    ({"of": "policy", "block_mask": "far"}, r"block_mask='far', needs 'all' beside of='policy'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: str(x))
def test_wrong_options(options, message):
    with pytest.raises(PolicyError, match=message):
        Stream(**options)
