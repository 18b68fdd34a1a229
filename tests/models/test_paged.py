"""Continuous batching gives the tokens of generate, its summaries stay those of the keys, and what
it cannot do is refused."""

import dataclasses
import threading

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import attnplug
from attnplug.models import paged
from attnplug.models.batching import SESSION
from attnplug.models.hf import tracing
from attnplug.ops import page_bounds
from attnplug.ops.gather.page_bounds import empty_page_bounds, rows_of_summaries
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.policies import Dense, Gather, Gvr

PAGE, NEW = 32, 6
GATHER = "gather(k=2, block=16, sink=1, local=2, min_tokens=0)"
GVR = "gvr(k=6, sink=1, window=4, min_tokens=0)"
MOMO = "momo(top_k=2, block=16, query_block=16, gamma=16, min_tokens=0)"
LENGTHS = (1, 5, 40, 200, 333)
SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
SETTINGS = {
    "block table": dict(num_blocks=96, max_batch_tokens=1024),
    "indices": dict(num_blocks=96, max_batch_tokens=1024, max_blocks_per_request=0),
    "evicted": dict(num_blocks=26, max_batch_tokens=512, safety_margin=0.0),
    "chunks": dict(num_blocks=96, max_batch_tokens=64, allow_block_sharing=False),
}
SIZES = dict(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
)
ENDLESS = GenerationConfig(
    max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0, disable_compile=True
)


def llama():
    """Attention of it is peaked enough that gather's few blocks change tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SIZES)).eval()
    for weight in model.parameters():
        weight.data *= 3
    return model


def gemma():
    """A sliding layer before each full one."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=2, head_dim=64, sliding_window=48, layer_types=kinds, **SIZES
    )
    model = Gemma3ForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data *= 2
    return model


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def one_by_one(model, ids):
    found = []
    for x in ids:
        row = torch.tensor([x], device=model.device)
        out = model.generate(row, generation_config=ENDLESS, attention_mask=torch.ones_like(row))
        found.append(out[0, len(x) :].tolist())
    return found


def settings(**options):
    return ContinuousBatchingConfig(**{SIZE: PAGE}, **options)


def batched(model, ids, generation=ENDLESS, warmup=False, **options):
    got = model.generate_batch(
        ids,
        generation_config=generation,
        continuous_batching_config=settings(**options),
        warmup=warmup,
    )
    assert {x.error for x in got.values()} == {None}
    return [x.generated_tokens for x in got.values()]


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
@pytest.mark.parametrize("policy", ["dense", GATHER, GATHER[:-1] + ", scoring='spread')", GVR])
def test_gives_the_tokens_of_generate(policy, setting, expected):
    with attnplug.applied(llama(), policy) as model:
        assert batched(model, prompts(), **SETTINGS[setting]) == expected(model, policy)
        assert one_by_one(model, prompts()[:1]) == expected(model, policy)[:1]  # and generate back


@pytest.mark.parametrize("policy", [GATHER, GVR])
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


@pytest.mark.parametrize("policy", ["dense", GATHER, GVR, "sketch(min_tokens=0)"])
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
    with attnplug.applied(llama(), {1: GATHER}) as model:
        want = one_by_one(model, prompts())
        assert batched(model, prompts(), **SETTINGS["block table"]) == want


# --- summaries -------------------------------------------------------------------------------


class Watch:
    """Compares the summaries of every complete block of every request, at every step."""

    watched = Gather

    def __init__(self, monkeypatch):
        self.compared, self.seen = 0, set()
        stock = self.watched.attend_pages

        def attend_pages(method, call):
            self.compare(method, call)
            return stock(method, call)

        monkeypatch.setattr(self.watched, "attend_pages", attend_pages)

    def compare(self, method, call):
        right = empty_page_bounds(call.k, method.block, dtype=method._page_form[1])
        every = torch.arange(call.k.shape[0] * call.k.shape[2])
        page_bounds(call.k, right, every, block=method.block)
        most = int(call.lengths.max()) // method.block
        if most == 0:
            return
        found, wanted = (
            rows_of_summaries(x, call.table, most, call.k, method.block)
            for x in (call.state, right)
        )
        for row, length in enumerate(call.lengths.tolist()):
            complete = length // method.block
            assert torch.equal(found[row, :, :complete], wanted[row, :, :complete])
            self.compared += complete
            self.seen.update(call.table[row, : -(-length // call.k.shape[2])].tolist())


class WatchCodes(Watch):
    """Compares the codes of every key of every request, at every step."""

    watched = Gvr

    def compare(self, method, call):
        for row, length in enumerate(call.lengths.tolist()):
            n = torch.arange(length)
            page, place = call.table[row].long()[n // call.k.shape[2]], n % call.k.shape[2]
            for found, wanted in zip(
                call.state, quantize_keys(call.k[page, :, place]), strict=True
            ):
                assert torch.equal(found[page, :, place], wanted)
            self.compared += length


@pytest.mark.parametrize("setting", ["block table", "indices", "evicted"])
def test_codes_follow_shared_and_reused_pages(monkeypatch, setting):
    watch = WatchCodes(monkeypatch)
    common = prompts((160,))[0]
    ids = [common + x for x in prompts((7, 40, 65))] + [common]
    with attnplug.applied(llama(), GVR) as model:
        batched(model, ids * 2, **SETTINGS[setting])
    assert watch.compared > 5000


@pytest.mark.parametrize("setting", ["block table", "indices", "evicted"])
def test_summaries_follow_shared_and_reused_pages(monkeypatch, setting):
    """Prompts with a common beginning, and fewer pages than the requests want."""
    watch = Watch(monkeypatch)
    common = prompts((160,))[0]
    ids = [common + x for x in prompts((7, 40, 65))] + [common]
    with attnplug.applied(llama(), GATHER) as model:
        batched(model, ids * 2, **SETTINGS[setting])
    assert watch.compared > 500


def test_summaries_follow_forks(monkeypatch):
    watch, copied = Watch(monkeypatch), []
    stock = paged.Kept.note_copies
    monkeypatch.setattr(
        paged.Kept, "note_copies", lambda *x: (copied.extend(x[2]), stock(*x)) and None
    )
    generation = GenerationConfig(**ENDLESS.to_dict())
    generation.num_return_sequences = 3  # the constructor refuses several greedy sequences
    with attnplug.applied(llama(), GATHER) as model:
        found = batched(model, prompts((60, 75)), generation, **SETTINGS["block table"])
    # transformers 5.17 gives back one of a request's three.
    assert len(found) == (2 if SIZE == "block_size" else 6)
    assert watch.compared > 50
    assert copied and watch.seen.issuperset(copied)


class HostMemory:
    """Where a request's pages go and come back from: transformers' own needs pinned memory."""

    def __init__(self, cache, stored):
        self.cache, self.stored = cache, stored

    def restore_scheduled_requests(self, requests):
        for request in requests:
            for allocator in self.cache.cache_allocators.values():
                blocks = allocator.block_table[request.state.request_id]
                allocator._copy_view[blocks] = self.stored


class Restored:
    def __init__(self):
        self.state = self
        self.request_id, self.is_cpu_offloaded = "r", True


@pytest.mark.skipif(SIZE == "block_size", reason="the cache of transformers 5.17 has other names")
def test_summaries_follow_pages_that_come_back():
    """Bytes of pages are restored to other pages, and nothing tells a method but the hook."""
    with attnplug.applied(llama(), GATHER) as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=64))
        cache = manager._create_batch_processor().cache
        allocator, (pages, method, state) = cache.layer_to_allocator[0], kept_layer(cache)
        source, target = [2, 3, 4], [9, 7, 12]
        pages.k[source] = torch.randn(3, *pages.k.shape[1:])
        paged.kept_of(cache).note_copies(pages.group, source)
        memory = HostMemory(cache, allocator._copy_view[source].clone())
        allocator.block_table["r"] = target
        vars(cache).pop(paged.KEPT)
        paged.adopt(cache, {0: paged.binding_of(first_layer(model)).policy}, memory, torch.no_grad)
        memory.restore_scheduled_requests([Restored()])
        manager.stop()
    found, per = kept_layer(cache)[2], PAGE // method.block
    for old, new in zip(source, target, strict=True):
        own, want = (x[0][:, p * per : (p + 1) * per] for x, p in ((found, new), (state, old)))
        assert want.abs().sum() > 0 and torch.equal(own, want)


def kept_layer(cache):
    return paged.kept_of(cache).layers[0]


def first_layer(model):
    return next(x for x in model.modules() if paged.binding_of(x) is not None)


# --- the life of a manager -------------------------------------------------------------------


def test_generate_while_batching_runs_is_refused():
    with attnplug.applied(llama(), "dense") as model:
        before = dict(vars(model))
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        manager.start()
        try:
            request = manager.add_request(prompts((40,))[0], max_new_tokens=NEW)
            with pytest.raises(attnplug.UnsupportedCallError, match="continuous batching runs"):
                model.generate(torch.tensor(prompts((5,))))
            with pytest.raises(attnplug.UnsupportedCallError, match="stop its manager first"):
                with torch.no_grad():
                    model(torch.tensor(prompts((5,))))
            with pytest.raises(attnplug.UnsupportedCallError, match="already"):
                model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
            with pytest.raises(attnplug.UnsupportedCallError, match="stop its manager first"):
                attnplug.remove(model)
            result = manager.get_result(request_id=request, timeout=60)
            assert result is not None and result.error is None
        finally:
            manager.stop()
        assert SESSION not in vars(model) and vars(model).keys() == before.keys()
        assert len(one_by_one(model, prompts((5,)))[0]) == NEW


def test_a_manager_that_stops_in_the_background():
    """generate comes back when its thread has ended, and not before."""
    with attnplug.applied(llama(), "dense") as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        alive, running = threading.Event(), manager.is_running
        manager.is_running = lambda: not alive.is_set()
        manager.stop()
        with pytest.raises(attnplug.UnsupportedCallError, match="continuous batching runs"):
            model.generate(torch.tensor(prompts((5,))))
        alive.set()
        assert model.generate(torch.tensor(prompts((5,))), generation_config=ENDLESS).shape[1] == 11
        manager.is_running = running


def test_a_manager_kept_for_the_next_session_goes_with_the_policy():
    ids = prompts((40, 100))
    with attnplug.applied(llama(), GATHER) as model:
        want = one_by_one(model, ids)
        for _ in range(2):
            got = model.generate_batch(
                ids,
                generation_config=ENDLESS,
                continuous_batching_config=settings(num_blocks=32),
                persistent_manager=True,
                warmup=False,
            )
            assert [x.generated_tokens for x in got.values()] == want
        assert model._cached_continuous_batching_manager is not None
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert batched(model, ids, num_blocks=32) == one_by_one(llama(), ids)  # stock again


def test_a_manager_made_before_apply():
    """It is refused, not served by half: it knows neither the name nor the summaries."""
    model = llama()
    model.generate_batch(
        prompts((5,)),
        generation_config=ENDLESS,
        continuous_batching_config=settings(num_blocks=32),
        persistent_manager=True,
        warmup=False,
    )
    with attnplug.applied(model, "dense"):
        with pytest.raises(attnplug.UnsupportedCallError, match="made before attnplug"):
            model.init_continuous_batching(ENDLESS, settings(num_blocks=32))
        assert SESSION not in vars(model)
        model.destroy_cached_continuous_batching_manager()
        assert len(batched(model, prompts((5,)), num_blocks=32)[0]) == NEW


def test_a_trace_of_batching_is_refused():
    """It would be empty: a request's calls carry no number of their own."""
    with attnplug.applied(llama(), "dense+stream") as model:
        with tracing({first_layer(model): object()}):
            got = model.generate_batch(
                prompts((40,)),
                generation_config=ENDLESS,
                continuous_batching_config=settings(num_blocks=32),
                warmup=False,
            )
    assert "a trace is recorded of generate" in next(iter(got.values())).error


def test_the_users_settings_stay_as_they_are():
    own = settings(num_blocks=32, max_blocks_per_request=7)
    with attnplug.applied(llama(), MOMO) as model:
        manager = model.init_continuous_batching(ENDLESS, own)
        assert manager.continuous_batching_config.max_blocks_per_request == 7
        manager.stop()
    assert own.allow_block_sharing and own.use_cuda_graph is None


def test_a_failed_manager_leaves_the_model_alone():
    with attnplug.applied(llama(), "dense") as model:
        before = dict(vars(model))
        with pytest.raises(TypeError):
            model.init_continuous_batching(nonsense=1)
        with pytest.raises(AttributeError):
            model.init_continuous_batching(ENDLESS, object())
        assert vars(model).keys() == before.keys()
        assert len(one_by_one(model, prompts((5,)))[0]) == NEW


def test_report_says_what_batching_serves_otherwise():
    with attnplug.applied(llama(), "momo+sketch") as model:
        text = str(attnplug.report(model))
    assert "continuous batching: momo serves prompts that come whole, dense serves pieces" in text
    assert "sketch needs rows of a cache of its own: dense decodes" in text
    with attnplug.applied(llama(), GATHER) as model:
        assert "continuous batching" not in str(attnplug.report(model))


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
@pytest.mark.parametrize("policy", ["dense", GATHER, GATHER[:-1] + ", scoring='spread')"])
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
    with attnplug.applied(llama().cuda(), GATHER) as model:
        manager = model.init_continuous_batching(ENDLESS, settings(num_blocks=64))
        assert tuple(manager.continuous_batching_config.use_cuda_graph) == (False, True)
        manager.warmup()
        manager.start()
        ids = prompts((333, 200, 40))
        names = [manager.add_request(x, max_new_tokens=NEW) for x in ids]
        found = [manager.get_result(request_id=x, timeout=60).generated_tokens for x in names]
        graphs = manager.batch_processor.inputs_and_outputs.io_pairs[0].device_io.graphs._storage
        manager.stop()
        assert graphs
        assert found == one_by_one(model, ids)


@pytest.mark.gpu
def test_summaries_follow_pages_from_host_memory(monkeypatch):
    """transformers' own swap: fewer pages than the requests want, and room on the host."""
    restored = []
    stock = paged.Kept.note_copies
    monkeypatch.setattr(
        paged.Kept, "note_copies", lambda *x: (restored.extend(x[2]), stock(*x)) and None
    )
    ids = prompts((300, 310, 320, 333))
    with attnplug.applied(llama().cuda(), GATHER) as model:
        want = one_by_one(model, ids)
        options = dict(num_blocks=38, max_batch_tokens=512, cpu_offload_space=0.05)
        assert batched(model, ids, safety_margin=0.0, **options) == want
    assert restored
