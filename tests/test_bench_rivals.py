"""bench/rivals.py: what the methods of the literature read, and how much."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

import attnplug
from attnplug import Policy
from attnplug.eval.generate import replies
from attnplug.eval.mass import BlockMass
from attnplug.models.names import CACHE
from attnplug.policies import AttentionCall, Dense, parse
from attnplug.testing import tiny_model

BENCH = Path(__file__).parent.parent / "bench"
NAMES = "Streaming MatchedWindow Quest DoubleSparsity Loki SnapKV PooledBlocks VerticalSlash"
PREFILLS = ("PooledBlocks", "VerticalSlash")
DIM = 16


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("rivals")
    sys.path.remove(str(BENCH))
    for name in ("rivals", "rival_prefills", "rival_masks"):
        sys.modules.pop(name, None)


def method_of(bench, name, keys):
    """A rival that reads so many keys, or blocks."""
    if name in PREFILLS:
        return getattr(bench, name)(top_k=keys)
    if name in ("Streaming", "MatchedWindow"):
        return getattr(bench, name)(sink=4, window=keys)
    return getattr(bench, name)(sink=4, window=24, k=keys)


@torch.no_grad()
def logits(model, method, ids, mask, steps=3):
    """Of a prompt's last token and of the steps behind it, `[B,steps,V]`."""
    phase = "prefill" if "prefill" in method.phases else "decode"
    with attnplug.applied(model, Policy(**{phase: method})):
        cache = attnplug.make_cache(model, ids.shape[1] + 8)
        place = (mask.cumsum(-1) - 1).clamp(min=0)
        begin, found = 0, []
        for end in range(ids.shape[1] - steps, ids.shape[1] + 1):
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=place[:, begin:end],
                use_cache=True,
                **{CACHE: cache},
            )
            begin = end
            found.append(out.logits[:, -1])
    return torch.stack(found, 1)


@pytest.fixture(scope="module")
def prompts():
    """Two of 600 tokens, of which the second begins with 150 of padding."""
    ids = torch.randint(2, 90, (2, 600), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :150] = 0
    return ids, mask


@pytest.mark.parametrize("name", NAMES.split())
def test_a_budget_of_everything_is_dense_and_padding_changes_no_row(bench, prompts, name):
    model, (ids, mask) = tiny_model(), prompts
    for last in (9, 600):
        part = ids[:, -last:], mask[:, -last:]
        dense = logits(model, Dense(), *part)
        whole = logits(model, method_of(bench, name, 1000), *part)
        assert (whole - dense).abs().max() < 1e-4
    few = method_of(bench, name, 2 if name in PREFILLS else 40)
    both = logits(model, few, ids, mask)
    assert (both - dense).abs().max() > 1e-3
    alone = logits(model, few, ids[1:, 150:], mask[1:, 150:])
    assert (both[1:] - alone).abs().max() < 1e-4


def call_of(k, q, queries=1):
    """One KV head `k [n,D]`; the last query is `q [D]`, those before it are nothing."""
    asked = torch.zeros(1, 1, queries, DIM)
    asked[0, 0, -1] = q
    v = torch.randn(1, 1, len(k), DIM, generator=torch.Generator().manual_seed(1))
    return AttentionCall(asked, k[None, None], v, 1.0, lengths=torch.tensor([len(k)]))


def over(call, places):
    """Attention over the keys at these places."""
    at = torch.tensor(sorted(places))
    k, v = call.k[0, 0, at].double(), call.v[0, 0, at].double()
    return (k @ call.q[0, 0, -1].double()).softmax(-1) @ v


def keys_of():
    """Small ones of 96 tokens, one of which, at 45, is large in its channel 3."""
    k = 0.1 * torch.randn(96, DIM, generator=torch.Generator().manual_seed(2))
    k[45, 3] = 5.0
    return k, torch.eye(DIM)[3]


def test_streaming_reads_its_ends(bench):
    call = call_of(*keys_of())
    for name, sink in (("Streaming", 4), ("MatchedWindow", 2)):
        out = getattr(bench, name)(sink=sink, window=20).attend(call)
        assert torch.allclose(out[0, 0, 0].double(), over(call, {*range(sink), *range(76, 96)}))


def test_quest_reads_the_page_of_the_needle(bench):
    call = call_of(*keys_of())
    out = bench.Quest(sink=2, window=4, k=8, page=8).attend(call)
    assert torch.allclose(out[0, 0, 0].double(), over(call, {0, 1, *range(40, 48), *range(92, 96)}))


def learnt(bench, method, call):
    """A step after a prompt that ended with the call's query."""
    layer = method.cache_layer(call.k.shape[2])
    layer.lazy_initialization(call.k[:, :, :0], call.v[:, :, :0])
    call.state = layer
    method.note_queries(call)
    step = AttentionCall(call.q[:, :, -1:], call.k, call.v, 1.0, lengths=call.lengths, state=layer)
    return layer.learnt, method.attend(step)


def test_double_sparsity_looks_at_the_channels_that_matter(bench):
    k, _ = keys_of()
    q = torch.eye(DIM)[3] + 0.5 * torch.eye(DIM)[9]
    call = call_of(k, q, queries=96)
    found, out = learnt(bench, bench.DoubleSparsity(sink=2, window=4, k=1, channels=2), call)
    assert found[0, 0, :DIM].nonzero()[:, 0].tolist() == [3, 9]
    assert torch.allclose(out[0, 0, 0].double(), over(call, {0, 1, 45, *range(92, 96)}))


def test_loki_finds_the_directions_of_the_keys(bench):
    """Keys that lie in a plane, turned: two components say all of them."""
    turn = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(3)))[0]
    k = torch.zeros(96, DIM)
    k[:, :2] = torch.randn(96, 2, generator=torch.Generator().manual_seed(4))
    k[45, 0] = 3.0
    call = call_of(k @ turn, 4 * turn[0], queries=96)
    found, out = learnt(bench, bench.Loki(sink=2, window=4, k=1, channels=2), call)
    basis = found[0, 0, :DIM].T
    assert torch.allclose((basis @ turn.T)[:, 2:], torch.zeros(2, DIM - 2), atol=1e-5)
    best = int((call.k[0, 0, 2:92] @ call.q[0, 0, -1]).argmax()) + 2
    assert torch.allclose(out[0, 0, 0].double(), over(call, {0, 1, best, *range(92, 96)}))


def test_snapkv_reads_what_the_prompt_looked_at_in_every_step(bench):
    k, q = keys_of()
    call = call_of(k, q, queries=96)
    method = bench.SnapKV(sink=2, window=4, k=3, pool=1)
    found, out = learnt(bench, method, call)
    assert found.argmax(-1).item() == 45 and found.shape == (1, 1, 1, 96)
    votes = found[0, 0, 0].clone()
    votes[[0, 1, *range(92, 96)]] = 0
    picks = votes.topk(3).indices.tolist()
    assert 45 in picks and torch.allclose(
        out[0, 0, 0].double(), over(call, {0, 1, *picks, *range(92, 96)})
    )
    other = AttentionCall(-call.q[:, :, -1:], call.k, call.v, 1.0, state=call.state)
    now = method.attend(other)[0, 0, 0].double()
    assert torch.allclose(now, over(other, {0, 1, *picks, *range(92, 96)}))


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_reads_the_block_or_column_of_the_needle(bench, name):
    """Of 10 blocks, the last query block's own, the first, and one: where all queries look."""
    k = torch.zeros(640, DIM)
    k[4 * 64 : 5 * 64 if name == "PooledBlocks" else 4 * 64 + 1, 3] = 12.0
    q = torch.eye(DIM)[3].expand(1, 1, 640, DIM).contiguous()
    v = torch.randn(1, 1, 640, DIM, generator=torch.Generator().manual_seed(1))
    out = getattr(bench, name)(top_k=1 if name == "PooledBlocks" else 2).attend(
        AttentionCall(q, k[None, None], v, 1.0)
    )
    call = AttentionCall(q, k[None, None], v, 1.0)
    if name == "PooledBlocks":
        wanted = over(call, {*range(64), *range(4 * 64, 5 * 64), *range(512, 640)})
        assert torch.allclose(out[0, 0, -1].double(), wanted, atol=1e-6)
    else:
        _, columns = bench.VerticalSlash(top_k=2).mask(call, mass_of(bench, call))
        assert columns[0, 4 * 64] and columns.sum() == 64
        assert (out[0, 0, -1] - v[0, 0, 256]).norm() < 0.5 * v[0, 0, 256].norm()


def mass_of(bench, call):
    number = call.q.shape[2] // 128
    values = torch.empty(1, 1, number, call.k.shape[2] // 64)
    return BlockMass(values, torch.arange(number), 128, 64, 1, 0)


@pytest.mark.parametrize("like", ["gather", "sketch", "gather(k=192)"])
@pytest.mark.parametrize("name", NAMES.split()[:6])
@pytest.mark.parametrize(("tokens", "width"), [(32768, 256), (65536, 256), (8192, 64)])
def test_bytes_are_those_of_the_policy_that_it_is_like(bench, name, like, tokens, width):
    rival, target = getattr(bench, name)(like=like), parse(like).decode
    read, wanted = (each.step_reads(tokens, width) for each in (rival, target))
    if wanted.keys < tokens:
        size, other = (4 * width * each.keys + each.scanned for each in (read, wanted))
        assert abs(size - other) <= 4 * width and read.keys > rival.sink
    else:
        assert read.keys <= tokens


@torch.no_grad()
def test_what_a_rival_learns_is_of_its_own_prefill(bench):
    """Beside another policy of the same prefill method it replies as it does alone."""

    class Letters:
        pad_token_id = 0

        def decode(self, tokens, skip_special_tokens):
            return str(tokens.tolist())

    model = tiny_model()
    ids = [torch.randint(2, 90, (1, 300), generator=torch.Generator().manual_seed(5))]
    kept = {"snapkv": Policy(decode=bench.SnapKV(sink=1, window=2, k=60, pool=1))}
    beside = {"gather": parse("gather(k=1, sink=1, local=1, min_tokens=0)"), **kept}
    alone = replies(model, Letters(), ids, kept, 24)["snapkv"]
    assert replies(model, Letters(), ids, beside, 24)["snapkv"] == alone
    assert len(set(map(str, replies(model, Letters(), ids, beside, 24).values()))) == 2


def test_options_that_cannot_be(bench):
    for options, message in (
        ({"like": "dense"}, "says what its steps read"),
        ({"sink": -1}, "sink=-1"),
        ({"page": 0}, "page=0, needs at least 1"),
    ):
        with pytest.raises(attnplug.PolicyError, match=message):
            bench.Quest(**options)
    with pytest.raises(attnplug.PolicyError, match="reads more than what is scanned"):
        bench.Quest(like="gather(k=16)").step_reads(65536, 256)
    assert math.isclose(bench.Loki(channels=8).scanned(100, 64), 400)
