"""A few queries at once over a long cache: each is what a step of its own would be."""

import dataclasses
import types

import pytest
import torch
from gather_policy_cases import BAND, EXACT, GATHER, SIZE, tokens
from sketch_layer_cases import SIZE as SKETCH_SIZE
from sketch_layer_cases import SKETCH
from sketch_layer_cases import filled as filled_sketch
from sketch_layer_cases import tokens as tokens_of_sketch
from step_cases import HEADS, filled, random, step
from test_gather import expected, hold
from test_gvr import GVR
from test_gvr import expected as expected_of_gvr
from test_gvr import hold as hold_gvr

import attnplug
from attnplug import Dense, Gather, Gvr, Sketch
from attnplug.policies import _few_queries
from attnplug.policies import gvr as gvr_policy
from attnplug.testing import tiny_model

POLICIES = [GATHER, GVR, SKETCH]
LENGTHS = {"gather": (167, SIZE), "gvr": (167, SIZE), "sketch": (1288, SKETCH_SIZE)}  # and rooms

COVERING = "gather(k=64, block=16, sink=1, local=1, min_tokens=0)"
SMALL = "gather(k=1, block=16, sink=1, local=1, min_tokens=0)"
GVR_COVERING = "gvr(k=256, sink=1, window=2, min_tokens=0)"
GVR_SMALL = "gvr(k=4, sink=1, window=2, min_tokens=0)"
SKETCHED = "sketch(k=8, min_tokens=0)"  # the fixed part of small caches is all that they hold


def filled_layer(policy, length, batch=1, device="cpu", mask=None):
    """The policy's cache layer behind a prompt of so many tokens."""
    if isinstance(policy, Sketch):
        return filled_sketch(policy, tokens_of_sketch(0, length, batch, device), mask)
    return filled(policy, tokens(0, length, batch, device))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("queries", [2, 16])
@pytest.mark.parametrize("capped", [False, True], ids=["", "capped"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_query_is_a_step_of_its_own(policy, queries, capped, padded, device):
    """Over the tokens up to it, some of them in another block than the first's; of rows of a batch
    that begin elsewhere."""
    length, size = LENGTHS[policy.name]
    mask = None
    if padded:
        mask = torch.ones((3, size), dtype=torch.bool, device=device)
        mask[1, :37] = mask[2, : length // 2] = mask[0, 80:96] = mask[0, 101] = False
    options = {"softcap": 3.0, "sinks": random(5, HEADS).to(device)} if capped else {}
    layer = filled_layer(policy, length, 3, device, mask)
    call = step(layer, mask=mask, queries=queries, **options)
    assert policy.serves_few(call)
    found = policy.attend(call)
    assert (found - Dense().attend(call)).abs().max() > 1e-3
    for t in range(queries):
        lengths = call.lengths - (queries - 1 - t)
        alone = dataclasses.replace(call, q=call.q[:, :, t : t + 1], lengths=lengths, start=None)
        assert (policy.attend(alone) - found[:, :, t : t + 1]).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("length", [20, 49, 64, 130, 131, 145, 200])
@pytest.mark.parametrize("policy", [GATHER, EXACT, BAND], ids=["int8", "exact", "band"])
def test_queries_attend_to_what_they_pick(policy, length, queries, device):
    layer = filled(policy, tokens(0, length, batch=2, device=device))
    call = step(layer, queries=queries)
    assert policy.serves_few(call)
    hold(policy, call)
    hold(policy, step(layer, queries=queries, softcap=3.0, sinks=random(5, HEADS).to(device)))


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("length", [20, 24, 45, 49, 130, 200])
@pytest.mark.parametrize("window", [1, 20])
def test_gvrs_queries_attend_to_what_they_pick(length, queries, window, device):
    """Fewer tokens than picks, too."""
    policy = dataclasses.replace(GVR, window=window)
    layer = filled(policy, tokens(0, length, batch=2, device=device))
    call = step(layer, queries=queries)
    assert policy.serves_few(call)
    hold_gvr(policy, call)
    hold_gvr(policy, step(layer, queries=queries, softcap=3.0, sinks=random(5, HEADS).to(device)))


def test_gvrs_masked_rows(device):
    kv = tokens(0, 170, batch=3, device=device)
    mask = torch.ones((3, SIZE), dtype=torch.bool, device=device)
    mask[1, :37] = mask[2, :165] = mask[0, 80:96] = mask[0, 101] = False
    call = step(filled(GVR, kv), mask=mask, queries=7)
    found, wanted = GVR.attend(call).cpu(), expected_of_gvr(call, GVR)
    assert (found[:2] - wanted[:2]).abs().max() < 1e-5
    assert (found[2, :, 2:] - wanted[2, :, 2:]).abs().max() < 1e-5  # two queries are padding
    assert found[2, :, :2].abs().max() == 0


def test_masked_rows(device):
    kv = tokens(0, 170, batch=3, device=device)
    mask = torch.ones((3, SIZE), dtype=torch.bool, device=device)
    mask[1, :37] = mask[2, :165] = mask[0, 80:96] = mask[0, 101] = False
    policy = dataclasses.replace(EXACT, k=3)
    call = step(filled(policy, kv), mask=mask, queries=7)
    found, wanted = policy.attend(call).cpu(), expected(call, policy)
    assert (found[:2] - wanted[:2]).abs().max() < 1e-5
    assert (found[2, :, 2:] - wanted[2, :, 2:]).abs().max() < 1e-5  # two queries are padding
    assert found[2, :, :2].abs().max() == 0


def test_a_keep_set_of_everything_is_dense(device):
    for policy, k in ((GATHER, 12), (GVR, 200)):
        covering = dataclasses.replace(policy, k=k)
        call = step(filled(covering, tokens(1, 180, device=device)), queries=9)
        assert (covering.attend(call) - Dense().attend(call)).abs().max() < 2e-6
        call = step(filled(policy, tokens(1, 180, device=device)), queries=9)
        assert (policy.attend(call) - Dense().attend(call)).abs().max() > 1e-2


def test_no_distant_blocks_is_a_window(device):
    policy = dataclasses.replace(GATHER, k=0)
    hold(policy, step(filled(policy, tokens(0, 180, device=device)), queries=9))


@pytest.mark.parametrize("policy", [GATHER, GVR], ids=["gather", "gvr"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_key_surfaces(bad, policy, device):
    kv = tokens(0, 190, device=device)
    kv[0, 0, 1, 70] = bad
    out = policy.attend(step(filled(policy, kv), queries=4))
    assert out[:, 2:].isnan().all() and out[:, :2].isfinite().all()


def test_traced_reads_are_the_blocks(device):
    policy = dataclasses.replace(EXACT, k=3)
    call = step(filled(policy, tokens(0, 135, device=device)), queries=9)  # 7 in another block
    reads = policy.reads(call)
    assert reads is not None and reads.index.shape[:3] == (1, HEADS, 1)
    rows = reads.index[0, :, 0].tolist()
    picks = policy._select(call, call.state, policy._options(call) | {"lengths": call.lengths})
    for head, row in enumerate(rows):
        listed = [j for j in row if j >= 0]
        assert len(listed) == len(set(listed))
        assert set(listed) == {0, 6, 7, 8} | set(picks[0, head // 2].flatten().tolist()) - {-1}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_which_calls_are_few(policy, device, monkeypatch):
    length, size = LENGTHS[policy.name]
    call = step(filled_layer(policy, length, device=device), queries=4)
    assert policy.serves_few(call)
    one = dataclasses.replace(call, q=call.q[:, :, :1])
    many = dataclasses.replace(call, q=call.q[:, :, :1].expand(-1, -1, 17, -1))
    assert not policy.serves_few(one) and not policy.serves_few(many)
    assert not policy.serves_few(dataclasses.replace(call, lengths=None))
    assert not policy.serves_few(dataclasses.replace(call, state=None))
    assert not dataclasses.replace(policy, **OTHER[policy.name]).serves_few(call)
    for least, serves in ((size // 4, True), (size // 4 + 1, False)):
        assert dataclasses.replace(policy, min_tokens=least).serves_few(call) is serves


OTHER = {"gather": {"block": 32}, "gvr": {"k": 1}, "sketch": {"bytes": 16}}  # than the layer's


def test_gvrs_programs_hold_so_many_queries(device, monkeypatch):
    call = step(filled_layer(GVR, 167, device=device), queries=4)
    monkeypatch.setattr(gvr_policy, "MOST_NUMBERS", 4 * 2 * 64)
    assert GVR.serves_few(call)
    monkeypatch.setattr(gvr_policy, "MOST_NUMBERS", 4 * 2 * 64 - 1)
    assert not GVR.serves_few(call)


def test_measured_rows_decide_where_nothing_is_asked(monkeypatch):
    """By the number of queries, on a GPU; without a row dense serves them."""
    default = dataclasses.replace(GATHER, min_tokens=None)
    call = step(filled_layer(GATHER, 167), queries=4)
    assert not _few_queries.asks_for_few(default, call)
    on_gpu = types.SimpleNamespace(shape=call.q.shape, is_cuda=True, device=call.q.device)
    there = dataclasses.replace(call, q=on_gpu)
    assert not _few_queries.asks_for_few(default, there)
    for rows, serves in (({4: SIZE}, True), ({4: SIZE + 1}, False), ({2: 1}, False)):
        monkeypatch.setitem(_few_queries.MEASURED, "gather", rows)
        assert _few_queries.asks_for_few(default, there) is serves
        assert not _few_queries.asks_for_few(default, call)


@pytest.fixture
def model(device):
    return tiny_model(device=device)


def ids_of(tokens=150, rows=1, seed=1):
    return torch.randint(4, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model, ids, pieces, mask=None, room=256):
    """The logits of all pieces but the first, fed one after the other."""
    cache, end, out = attnplug.make_cache(model, room), 0, []
    for piece in pieces:
        begin, end = end, end + piece
        options = {} if mask is None else {"attention_mask": mask[:, :end].to(model.device)}
        part = ids[:, begin:end].to(model.device)
        out.append(model(part, past_key_values=cache, **options).logits)
    return torch.cat(out[1:], 1)


@pytest.mark.parametrize(("covering", "small"), [(COVERING, SMALL), (GVR_COVERING, GVR_SMALL)])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_models_logits(model, padded, covering, small):
    ids, pieces, mask = ids_of(180, rows=3), [130, 7, 1, 16, 2, 9], None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :9] = mask[2, :60] = 0
    with attnplug.applied(model, "dense"):
        wanted = logits_of(model, ids, pieces, mask)
    with attnplug.applied(model, covering):
        assert (logits_of(model, ids, pieces, mask) - wanted).abs().max() < 1e-3
        last = attnplug.report(model).last
        assert {each.decode for each in last} == {covering.split("(")[0]}
    with attnplug.applied(model, small):
        assert (logits_of(model, ids, pieces, mask) - wanted).abs().max() > 0.1


@pytest.mark.parametrize(
    ("policy", "method", "oracle"),
    [(SMALL, Gather, expected), (GVR_SMALL, Gvr, expected_of_gvr)],
    ids=["gather", "gvr"],
)
@pytest.mark.parametrize("pieces", [[150, 8], [150, 1, 1, 16]])
def test_a_models_layers_attend_as_the_policy(model, pieces, policy, method, oracle, monkeypatch):
    """Each layer's output is the fp64 one over what the layer's own queries pick."""
    seen, attend = [], method.attend

    def held(self, call):
        out = attend(self, call)
        if call.q.shape[2] > 1:
            seen.append(call.q.shape[2])
            assert (out.cpu() - oracle(call, self)).abs().max() < 1e-4
        return out

    monkeypatch.setattr(method, "attend", held)
    with attnplug.applied(model, policy):
        logits_of(model, ids_of(sum(pieces)), pieces)
    assert seen == [pieces[-1]] * 2


@pytest.mark.parametrize("policy", [SMALL, GVR_SMALL, SKETCHED])
def test_a_models_few_tokens_are_its_steps(model, policy):
    """The logits of tokens that come together are those of tokens one after the other, with
    steps behind them too. On a GPU products of one and of several tokens round differently, and a
    last pick that is decided by that has a few tokens see other keys."""
    ids, first = ids_of(1100, rows=2), 1050
    with attnplug.applied(model, policy):
        found = logits_of(model, ids, [first, 9, 1, 16, 24 - 8, 8], room=1200)
        wanted = logits_of(model, ids, [first, *[1] * 50], room=1200)
        assert {each.decode for each in attnplug.report(model).last} == {policy.split("(")[0]}
    errors = (found - wanted).abs().amax(-1)
    assert (errors < 1e-3).float().mean() > (0.5 if model.device.type == "cuda" else 0.999)
    with attnplug.applied(model, "dense"):
        dense = logits_of(model, ids, [first, *[1] * 50], room=1200)
    assert ((found - dense).abs().amax(-1) > 1e-2).float().mean() > 0.5


def test_speculative_decoding_is_served(model):
    """Candidates are verified by the method that decodes; with all keys they are dense's."""
    ids = ids_of(20).repeat(1, 8).to(model.device)
    options = dict(max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=5)
    found = {}
    for policy in ("dense", COVERING, SMALL, GVR_COVERING, GVR_SMALL):
        with attnplug.applied(model, policy):
            found[policy] = model.generate(ids, **options).tolist()
            last = attnplug.report(model).last
        assert {each.decode for each in last} <= {policy.split("(")[0], ""}
    assert found["dense"] == found[COVERING] == found[GVR_COVERING]
    assert found["dense"] not in (found[SMALL], found[GVR_SMALL])


def test_the_end_of_a_prompt_is_the_prefills(model, monkeypatch):
    attend = Gather.attend

    def steps_alone(self, call):
        assert call.q.shape[2] == 1
        return attend(self, call)

    monkeypatch.setattr(Gather, "attend", steps_alone)
    options = dict(max_new_tokens=4, do_sample=False, prefill_chunk_size=128)
    ids = ids_of(136).to(model.device)
    with attnplug.applied(model, SMALL):
        model.generate(ids, **options)


@pytest.mark.parametrize("policy", [SMALL, GVR_SMALL, SKETCHED])
def test_it_compiles_whole(model, policy):
    ids = ids_of(170)
    with attnplug.applied(model, policy), torch.no_grad():
        wanted = logits_of(model, ids, [150, 9, 9])
        step = torch.compile(model.forward, backend="eager", fullgraph=True)
        cache = attnplug.make_cache(model, 256)
        model(ids[:, :150].to(model.device), past_key_values=cache)
        for begin in (150, 159):
            part = ids[:, begin : begin + 9].to(model.device)
            place = torch.arange(begin, begin + 9, device=model.device)[None]
            found = step(part, past_key_values=cache, position_ids=place).logits
            assert torch.allclose(found, wanted[:, begin - 150 : begin - 141], atol=1e-4)
