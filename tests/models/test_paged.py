"""Continuous batching gives the tokens of generate, with and without CUDA graphs."""

import dataclasses

import pytest
import torch
from batching_cases import (
    ENDLESS,
    GATHER,
    GVR,
    MOMO,
    NEW,
    SETTINGS,
    batched,
    gemma,
    llama,
    one_by_one,
    prompts,
    settings,
)

import attnplug
from attnplug.policies import Dense, Gather, Gvr

# Pages keep a band as codes, and rows as short as these exactly: of two blocks that score alike one
# or the other is listed.
EXACT = GATHER[:-1] + ", bounds='exact')"


@pytest.fixture(scope="module")
def expected():
    """Tokens of generate, by policy: each is asked for once."""
    known = {}

    def tokens(model, policy):
        if policy not in known:
            known[policy] = one_by_one(model, prompts())
        return known[policy]

    return tokens


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", ["dense", EXACT, GVR])
def test_gives_the_tokens_of_generate(policy, setting, expected):
    with attnplug.applied(llama(), policy) as model:
        assert batched(model, prompts(), **SETTINGS[setting]) == expected(model, policy)
        assert one_by_one(model, prompts()[:1]) == expected(model, policy)[:1]  # and generate back


@pytest.mark.parametrize("policy", [EXACT, GVR])
def test_the_budget_changes_tokens_here(expected, policy):
    """Else the test above would hold nothing."""
    with attnplug.applied(llama(), policy) as model:
        sparse = expected(model, policy)
    assert sparse != one_by_one(llama(), prompts())


def test_a_covering_budget_gives_stock_tokens(expected):
    with attnplug.applied(llama(), "gather(min_tokens=0)") as model:
        assert batched(model, prompts(), **SETTINGS["block table"]) == one_by_one(
            llama(), prompts()
        )


def test_momo_serves_whole_prompts_and_shares_no_pages(expected):
    ids = [*prompts((96, 200)), prompts((200,))[0][:96] + prompts((40,))[0]]
    with attnplug.applied(llama(), MOMO) as model:
        want = one_by_one(model, ids)
        assert want != one_by_one(llama(), ids)
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=64))
        assert not manager.continuous_batching_config.allow_block_sharing
        manager.stop()
        assert batched(model, ids, num_blocks=64, max_batch_tokens=1024) == want


def test_momo_leaves_pieces_of_prompts_to_dense():
    """Which a batch's other requests cut: they must not change a request's tokens."""
    ids = prompts((333,))
    with attnplug.applied(llama(), MOMO) as model:
        got = batched(model, ids, **SETTINGS["chunks"])
    assert got == one_by_one(llama(), ids)


@pytest.mark.parametrize("policy", ["dense", EXACT, GVR, "sketch(min_tokens=0)"])
def test_sliding_layers_stay_the_models_own(policy):
    """They have no block table, and sketch decodes dense."""
    with attnplug.applied(gemma(), policy) as model:
        served = "dense" if policy.startswith("sketch") else policy
        notes = attnplug.report(model).batching
        assert ("sketch needs rows of a cache of its own: dense decodes" in notes) == (
            policy.startswith("sketch")
        )
        found = [batched(model, prompts(), **SETTINGS[x]) for x in ("block table", "chunks")]
    with attnplug.applied(gemma(), served) as model:
        assert found == [one_by_one(model, prompts())] * 2


def test_layers_without_a_policy():
    with attnplug.applied(llama(), {1: EXACT}) as model:
        want = one_by_one(model, prompts())
        assert batched(model, prompts(), **SETTINGS["block table"]) == want


# --- methods on pages ------------------------------------------------------------------------


@pytest.fixture
def step():
    """A step of four rows on shuffled pages: of 320, 150, 0 and 149 keys."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 40, 2, 32, 64, generator=generator)
    table = torch.randperm(40, generator=generator).view(4, 10).int()
    lengths = torch.tensor([320, 150, 0, 149], dtype=torch.int32)
    q = torch.randn(4, 4, 1, 64, generator=generator)

    def of(method):
        state = method.page_state(k)
        method.note_pages(k, state, torch.arange(40 * 32))
        return attnplug.call.PagedCall(q, k, v, table, lengths, 0.125, state=state)

    return of


@pytest.mark.parametrize(
    "method", [Gather(k=2, block=16, sink=1, local=2), Gvr(k=24, sink=2, window=9)], ids=str
)
def test_rows_below_the_crossover_are_read_whole(step, method):
    """Decided on the device: rows on both sides of it in one step."""
    method = dataclasses.replace(method, min_tokens=150)
    call = step(method)
    every = dataclasses.replace(method, min_tokens=0).attend_pages(call)
    found, dense = method.attend_pages(call), Dense().attend_pages(call)
    assert torch.equal(found[:2], every[:2]) and not torch.allclose(found[:2], dense[:2])
    assert (found[2] == 0).all() and torch.allclose(found[3], dense[3], atol=1e-6)
    assert not torch.allclose(every[3], dense[3], atol=1e-3)


@pytest.mark.parametrize("alone, far", [(399, [0, 1, 3]), (400, [])])
def test_the_tokens_of_all_rows_decide(step, monkeypatch, alone, far):
    """Those past 110 of each: 210, 40 and 39 come to 289, which is 399 less 110."""
    monkeypatch.setattr(Gather, "measured_crossover", lambda *_: alone)
    monkeypatch.setattr(Gather, "measured_row_crossover", lambda *_: 110)
    method = Gather(k=2, block=16, sink=1, local=2)
    call = step(method)
    every = dataclasses.replace(method, min_tokens=0).attend_pages(call)
    found, dense = method.attend_pages(call), Dense().attend_pages(call)
    for row in (0, 1, 3):
        assert torch.allclose(found[row], (every if row in far else dense)[row], atol=1e-6)
    assert (found[2] == 0).all()


def test_pages_that_are_no_multiple_of_blocks_run_dense():
    k = torch.randn(5, 2, 24, 64)
    assert Gather(block=16, min_tokens=0).page_state(k) is None
    call = attnplug.call.PagedCall(
        torch.randn(1, 4, 1, 64), k, k, torch.arange(5).int()[None], torch.tensor([100]).int(), 0.1
    )
    assert torch.equal(Gather(min_tokens=0).attend_pages(call), Dense().attend_pages(call))


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [None, False])
@pytest.mark.parametrize("policy", ["dense", EXACT])
def test_tokens_on_a_gpu_with_and_without_graphs(policy, graphs):
    """Batches of 3, 5 and 7 requests are padded to powers of two."""
    ids = prompts((333, 200, 40, 100, 64, 65, 127))
    with attnplug.applied(llama().cuda(), policy) as model:
        want = one_by_one(model, ids)
        for count in (3, 5, 7):
            options = SETTINGS["block table"] | {"use_cuda_graph": graphs}
            found = batched(model, ids[:count], warmup=graphs is None, **options)
            assert found == want[:count]


@pytest.mark.gpu
def test_steps_are_captured_on_a_gpu():
    with attnplug.applied(llama().cuda(), EXACT) as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=64))
        assert tuple(manager.continuous_batching_config.use_cuda_graph) == (False, True)
        manager.warmup()
        manager.start()
        ids = prompts((333, 200, 40))
        names = [manager.add_request(x, max_new_tokens=NEW) for x in ids]
        found = [manager.get_result(request_id=x, timeout=60).generated_tokens for x in names]
        pairs = manager.batch_processor.inputs_and_outputs.io_pairs
        graphs = list(pairs[0].device_io.graphs._storage)
        manager.stop()  # which empties them
        assert graphs
        assert found == one_by_one(model, ids)
