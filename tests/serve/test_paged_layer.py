"""One served layer on shuffled pages: what momo and gather give there is what they give on a
contiguous cache, whatever the chunks, and the crossovers count what they should."""

import dataclasses

import pytest
import torch

from attnplug import Gather, Gvr, Momo, Sketch
from attnplug.ops import (
    dense_decode,
    gather_attention,
    gather_tokens_attention,
    score_tokens,
    select_blocks,
    topk,
)
from attnplug.ops.gather.block_bounds import empty_bounds, frame_of
from attnplug.ops.gather.page_bounds import page_summaries
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.policies import AttentionCall
from attnplug.policies.momo import LEAST_CHUNK
from attnplug.serve.paged.layer import Far, LayerTraits, ServedLayer, phases_for
from attnplug.serve.paged.pages import Pages
from attnplug.serve.paged.phases import Phases
from attnplug.serve.paged.rows import Row
from attnplug.serve.paged.state import share_of_cache

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 64, 16
MOMO = Momo(gamma=8, block=16, query_block=32, top_k=3, tail=0, min_tokens=0)


def served(phases: Phases, device: torch.device = CPU) -> ServedLayer:
    return ServedLayer(phases, scale=0.125, softcap=0.0, sinks=None, device=device)


class Cache:
    """Pages of some rows in a shuffled order, and their block tables."""

    def __init__(self, rows: int, tokens: int, dtype=torch.float32):
        random = torch.Generator().manual_seed(5)
        blocks = -(-tokens // PAGE)
        order = torch.randperm(rows * blocks, generator=random) + 1  # page 0 is nobody's
        self.table = order.reshape(rows, blocks).to(torch.int32)
        shape = 1 + rows * blocks, KV_HEADS, PAGE, WIDTH
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))

    def write(self, row: int, first: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write keys `[tokens, Hkv, D]` at a row's tokens from `first` on; returns their slots."""
        at = torch.arange(first, first + k.shape[0])
        slots = self.table[row, at // PAGE].long() * PAGE + at % PAGE
        for pages, new in ((self.k, k), (self.v, v)):
            pages[slots // PAGE, :, slots % PAGE] = new
        return slots


def tokens(count: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(count, heads, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [32, 96, 224])
def test_chunks_on_the_grid_give_what_the_whole_prompt_gives(chunk):
    count = 235
    q, k, v = tokens(count, HEADS, 1), tokens(count, KV_HEADS, 2), tokens(count, KV_HEADS, 3)
    layer = served(Phases(prefill=MOMO))
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    whole = MOMO.attend(AttentionCall(*rows, scale=0.125))[0].transpose(0, 1)
    for beside in (0, 3):  # tokens of other rows in front of the row's in the batch
        cache, out = Cache(2, 256), torch.full((count, HEADS, WIDTH), torch.nan)
        for first in range(0, count, chunk):
            last = min(first + chunk, count)
            cache.write(1, first, k[first:last], v[first:last])
            others = [torch.zeros(beside, *x.shape[1:]) for x in (q, k, v)]
            parts = zip(others, (q, k, v), strict=True)
            batch = [torch.cat([other, x[first:last]]) for other, x in parts]
            made = torch.full((beside + last - first, HEADS, WIDTH), torch.nan)
            row = Row(index=1, first=beside, queries=last - first, seen=last)
            layer.attend_prompt(row, *batch, Pages(cache.k, cache.v), cache.table, made)
            assert made[:beside].isnan().all()  # nobody else's output is touched
            out[first:last] = made[beside:]
        # The reference multiplies the rows of a call at once, and BLAS rounds by their number.
        room = torch.finfo(torch.float32).eps * whole.abs().max()
        assert (out - whole).abs().max() <= room


FP8, K_SCALE, V_SCALE = torch.float8_e4m3fn, 0.03, 1.7


def in_fp8(cache: Cache) -> tuple[Pages, Pages]:
    """A cache's pages in fp8, and the same descaled."""
    scales = torch.tensor([K_SCALE]), torch.tensor(V_SCALE)  # as engines have them
    k, v = (cache.k / scales[0]).to(FP8), (cache.v / scales[1]).to(FP8)
    meant = Pages(k.float() * K_SCALE, v.float() * V_SCALE)
    return Pages(k.view(torch.uint8), v.view(torch.uint8)).in_fp8(*scales), meant


@pytest.mark.parametrize("chunk", [64, 235])
def test_a_prompt_over_fp8_pages_reads_what_is_stored(chunk):
    """A whole prompt too, whose keys are at hand in 32 bits: a prefix hit reads the same."""
    count, cache = 235, Cache(2, 256)
    q, k, v = tokens(count, HEADS, 1), tokens(count, KV_HEADS, 2), tokens(count, KV_HEADS, 3)
    cache.write(1, 0, k, v)
    layer, (fp8, meant), made = served(Phases(prefill=MOMO)), in_fp8(cache), []
    for pages, new in ((fp8, (k, v)), (meant, (None, None))):
        out = torch.full((count, HEADS, WIDTH), torch.nan)
        for first in range(0, count, chunk):
            last = min(first + chunk, count)
            rows = [None if x is None else x[first:last] for x in (q, *new)]
            row = Row(index=1, first=0, queries=last - first, seen=last)
            layer.attend_prompt(row, *rows, pages, cache.table, out[first:last])
        made.append(out)
    room = 1e-5 * made[1].abs().max()
    assert (made[0] - made[1]).abs().max() <= room


def test_steps_over_fp8_pages_read_what_is_stored():
    """A far row, a near one and one that pads, in halves and in one chain, with summaries of the
    stored keys."""
    phase = Gather(k=3, block=PAGE, sink=1, local=2, min_tokens=200)
    cache, lengths = Cache(3, 320), torch.tensor([304, 160, 0], dtype=torch.int32)
    k, v, q = tokens(320, KV_HEADS, 2), tokens(320, KV_HEADS, 3), tokens(3, HEADS, 4)
    slots = torch.cat([cache.write(i, 0, k[:n], v[:n]) for i, n in enumerate(lengths.tolist())])
    made, rule = [], served(Phases(decode=phase)).rule
    chosen = rule.far(lengths)
    far = Far(lengths * chosen, chosen, lengths * ~chosen)
    for pages in in_fp8(cache):
        layer = served(Phases(decode=phase))
        layer.state.update(pages.k, slots)
        assert layer.state.of(pages.k).dtype == torch.int8
        for more in ({}, {"dense": lambda: None}):
            out = torch.zeros_like(q)
            layer.attend_steps(q, pages, cache.table, far, out, **more)
            made.append(out)
    halves, chain, want_halves, want_chain = made
    assert halves[0].any() and not halves[1:].any() and chain[1].any()
    for found, want in ((halves, want_halves), (chain, want_chain)):
        assert (found - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_crossover_counts_the_keys_seen():
    layer = served(Phases(prefill=dataclasses.replace(MOMO, min_tokens=20_000)))
    chunk = 16_384
    assert not layer.serves_prompt(Row(0, 0, chunk, seen=chunk))
    assert layer.serves_prompt(Row(0, 0, chunk, seen=2 * chunk))
    assert layer.serves_prompt(Row(0, 0, LEAST_CHUNK, seen=20_000))
    assert not layer.serves_prompt(Row(0, 0, LEAST_CHUNK - 1, seen=200_000))  # a question
    assert not served(Phases()).serves_prompt(Row(0, 0, chunk, seen=2 * chunk))
    assert served(Phases(prefill=MOMO)).serves_prompt(Row(0, 0, 2, seen=2))


def test_a_chunk_that_steps_beside_it_cut_short_reaches_the_crossover():
    """A batch of 16,384 tokens has 16,353 of a prompt's beside 31 steps."""
    device = torch.device("cuda")
    layer = served(Phases(prefill=Momo()), device)
    assert Momo().crossover(device) == 16_384
    assert layer.serves_prompt(Row(31, 31, 16_353, seen=16_353))
    assert layer.serves_prompt(Row(0, 0, 8192, seen=12_288))
    assert not layer.serves_prompt(Row(0, 0, 12_287, seen=12_287))


@pytest.mark.parametrize(
    "change, phases, why",
    [
        ({}, Phases(MOMO, Gather()), ""),
        ({"left_dense": "the layer has ALiBi"}, Phases(), "the layer has ALiBi"),
        ({"head_dim": 72}, Phases(), "head dimension 72"),
        ({"longest": 2048}, Phases(MOMO), "gather serves from 32,768 tokens on"),
        ({"longest": 32767, "rows": 999}, Phases(MOMO), "gather serves from 32,768 tokens on"),
    ],
)
def test_a_layer_that_a_method_cannot_serve_is_left_dense(change, phases, why):
    traits = LayerTraits(**{"head_dim": 64, "longest": 100_000, "rows": 4, "device": CPU} | change)
    found, reason = phases_for(Phases(MOMO, Gather()), traits)
    assert found == phases
    assert why in reason and bool(why) == bool(reason)


@pytest.mark.parametrize("scoring", ["bounds", "band"])
def test_gather_on_pages_is_gather_on_a_contiguous_cache(scoring):
    """Three rows in pages: one far, one near, one that pads the batch."""
    phase = Gather(
        k=3, block=PAGE, sink=1, local=2, scoring=scoring, bounds="exact", min_tokens=200
    )
    layer, cache, lengths = served(Phases(decode=phase)), Cache(3, 320), [301, 199, 0]
    k, v = tokens(320, KV_HEADS, 2), tokens(320, KV_HEADS, 3)
    for row, length in enumerate(lengths):
        for first in range(0, length, 80):  # as an engine writes them, chunk by chunk
            last = min(first + 80, length)
            slots = cache.write(row, first, k[first:last], v[first:last])
            layer.state.update(cache.k, torch.cat([torch.tensor([-1]), slots]))
    q, out = tokens(3, HEADS, 4), torch.full((3, HEADS, WIDTH), 7.0)
    chosen = layer.rule.far(torch.tensor(lengths))
    far = Far((torch.tensor(lengths) * chosen).int(), chosen)
    layer.attend_steps(q, Pages(cache.k, cache.v), cache.table, far, out)
    assert (out[1:] == 7.0).all()  # what serves those rows stays
    keys, values = (x[:301].transpose(0, 1)[None].contiguous() for x in (k, v))
    bounds = empty_bounds(keys, PAGE)
    progress, query = torch.zeros(1, 2, dtype=torch.int32), q[:1].unsqueeze(2)
    common = dict(block=PAGE, sink=1, local=2)
    index = select_blocks(query, keys, bounds, progress, top_k=3, scoring=scoring, **common)
    want, _ = gather_attention(query, keys, values, index, scale=0.125, **common)
    assert torch.equal(out[:1], want[:, :, 0])
    whole, _ = dense_decode(query, keys, values, scale=0.125)
    assert not torch.allclose(out[:1], whole[:, :, 0], atol=1e-3)  # it left keys out


def gvr_of_a_row(q, k, v, phase):
    """gvr's step `[1, Hq, D]` on one row's keys `[tokens, Hkv, D]`, side by side."""
    keys, values = (x.transpose(0, 1)[None].contiguous() for x in (k, v))
    kept, query = dict(sink=phase.sink, window=phase.window), q[None, :, None]
    picks, _ = topk(score_tokens(query, *quantize_keys(keys), **kept), phase.k)
    index = picks.view(1, KV_HEADS, 1, phase.k)
    out, _ = gather_tokens_attention(query, keys, values, index, scale=0.125, **kept)
    return out[:, :, 0]


def test_gvr_on_pages_is_gvr_on_a_contiguous_cache_wherever_its_rows_move():
    """Step after step: requests change places, rows pad the batch, and a request comes back with
    another's pages."""
    phase = Gvr(k=20, sink=2, window=9, min_tokens=150)
    layer, cache = served(Phases(decode=phase)), Cache(3, 320)
    k, v = tokens(960, KV_HEADS, 2).unflatten(0, (3, 320)), tokens(960, KV_HEADS, 3)
    v = v.unflatten(0, (3, 320))
    for row in range(3):
        for first in range(0, 300, 77):
            last = min(first + 77, 300)
            slots = cache.write(row, first, k[row, first:last], v[row, first:last])
            layer.state.update(cache.k, torch.cat([slots, torch.tensor([-1])]))
    moves = [[0, 1, 2], [0, 1, 2], [2, 0], [1, None, 0], [0], [2, 1, 0, None]]
    for step, order in enumerate(moves):
        at, held = 300 + step, [row for row in order if row is not None]
        for row in range(3):
            slots = cache.write(row, at, k[row, at : at + 1], v[row, at : at + 1])
            layer.state.update(cache.k, slots)
        if step == 3:  # preempted: its pages went to nobody, and it has new ones in another order
            cache.k[cache.table[1].long()] = cache.v[cache.table[1].long()] = torch.nan
            cache.table[1] = cache.table[1].flip(0)
            slots = cache.write(1, 0, k[1, : at + 1], v[1, : at + 1])
            layer.state.update(cache.k, slots)
        q, out = tokens(len(order), HEADS, 40 + step), torch.full((len(order), HEADS, WIDTH), 7.0)
        lengths = torch.tensor([0 if row is None else at + 1 for row in order])
        table = cache.table[[0 if row is None else row for row in order]]
        chosen = layer.rule.far(lengths)
        assert chosen.sum() == len(held)
        layer.attend_steps(q, Pages(cache.k, cache.v), table, Far(lengths.int(), chosen), out)
        for place, row in enumerate(order):
            if row is None:
                assert (out[place] == 7.0).all()
                continue
            want = gvr_of_a_row(q[place], k[row, : at + 1], v[row, : at + 1], phase)
            assert torch.equal(out[place], want[0])
    whole, _ = dense_decode(q[:1, :, None], *(x[2, :306].transpose(0, 1)[None] for x in (k, v)),
                            scale=0.125)  # fmt: skip
    assert not torch.allclose(out[:1], whole[:, :, 0], atol=1e-3)  # it left keys out


def test_steps_below_a_covering_budget_are_dense():
    layer, cache = served(Phases(decode=Gather(min_tokens=0))), Cache(1, 320)
    k, v, q = tokens(320, KV_HEADS, 2), tokens(320, KV_HEADS, 3), tokens(1, HEADS, 4)
    layer.state.update(cache.k, cache.write(0, 0, k, v))
    far, out = Far(torch.tensor([320], dtype=torch.int32), torch.tensor([True])), q.clone()
    layer.attend_steps(q, Pages(cache.k, cache.v), cache.table, far, out)
    rows = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*rows, scale=0.125, enable_gqa=True)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), scale=0.125, enable_gqa=True
    )
    error = (out - want[0].transpose(0, 1)).abs().max()
    assert error <= 4 * (plain - want).abs().max()


def test_a_step_notes_what_it_writes_and_runs_the_other_rows_attention_first():
    """What `dense` writes stays in near rows; the block that the step completes is summarised."""
    phase = Gather(k=3, block=PAGE, sink=1, local=2, min_tokens=200)
    layer, cache, lengths = served(Phases(decode=phase)), Cache(3, 320), [304, 160, 0]
    k, v = tokens(320, KV_HEADS, 2), tokens(320, KV_HEADS, 3)
    written = [cache.write(row, 0, k[:n], v[:n]) for row, n in enumerate(lengths)]
    layer.state.update(cache.k, torch.cat([x[:-1] for x in written]))
    slots = torch.tensor([int(written[0][-1]), int(written[1][-1]), -1])
    state = layer.state.of(cache.k)
    before, ends = state.clone(), slots[:2] // PAGE
    chosen = torch.tensor([True, False, False])
    far = Far((torch.tensor(lengths) * chosen).int(), chosen)
    q, out = tokens(3, HEADS, 4), torch.full((3, HEADS, WIDTH), torch.nan)

    def dense():
        out.fill_(5.0)

    assert layer.notes_in_step and not served(Phases(decode=Gvr())).notes_in_step
    steps = q, Pages(cache.k, cache.v), cache.table, far, out
    layer.attend_steps(*steps, slots=slots, dense=dense)
    assert (out[1:] == 5.0).all() and not (out[0] == 5.0).any()
    at = (slots[:2] // PAGE, slice(None))
    middle, half = cache.k[at].mean(2), 0.8 * cache.k[at].std(2, unbiased=False)
    want = torch.stack([middle + half, middle - half], 2)  # [2, Hkv, 2, D]
    scale = frame_of(state, len(cache.k)).scale[0][:, ends, None, None]  # a page is a block
    said = state[0][:, ends].float() * scale
    assert ((said - want.transpose(0, 1)).abs() <= 0.501 * scale).all()
    others = torch.ones(len(cache.k), dtype=torch.bool)
    others[ends] = False
    for now, old in zip(*(page_summaries(x, cache.k, PAGE) for x in (state, before)), strict=True):
        assert torch.equal(now[others], old[others])


def test_warming_runs_every_method_without_a_trace(monkeypatch):
    layer = served(Phases(prefill=MOMO, decode=Gather(k=3, min_tokens=0)))
    calls = []
    gather, momo = Gather.begin_far, Momo.attend

    def gathered(self, call):
        calls.append(f"{len(call.q)} rows")
        return gather(self, call)

    def prompted(self, call):
        calls.append((call.q.shape[2], call.k.shape[2]))
        return momo(self, call)

    monkeypatch.setattr(Gather, "begin_far", gathered)
    monkeypatch.setattr(Momo, "attend", prompted)
    shape = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=WIDTH, dtype=torch.float32, device=CPU)
    layer.warm_prompts(64, 128, **shape)
    layer.warm_steps(3, 128, page=PAGE, **shape)
    assert calls[-6:] == [f"{n} rows" for n in (1, 1, 2, 2, 3, 3)]  # alone and beside a prompt
    # A whole prompt and a chunk behind others, and all powers of two (test_served_kernels).
    assert {(64, 64), (63, 63), (64, 128), (64, 127), (24, 24), (48, 48)} <= set(calls[:-6])
    assert layer.state._made is None  # nothing is kept
    for scaled in (True, False):
        layer.warm_steps(1, 128, page=PAGE, fp8=True, scaled=scaled, **shape)
    calls.clear()
    monkeypatch.setattr("attnplug.policies.momo.FAR", 100)  # where a span ends
    layer = served(Phases(prefill=dataclasses.replace(MOMO, gamma=None, top_k=3, min_tokens=64)))
    layer.warm_prompts(64, 128, **shape)
    assert {(36, 100), (64, 99)} <= set(calls)  # on the grid of query blocks and off it
    assert min(keys for _, keys in calls) == 63


def test_a_layer_is_served_where_a_batch_can_be_long_enough():
    """A GPU's crossover counts the tokens of all rows that the server takes."""
    traits = LayerTraits(head_dim=64, longest=32768, rows=8, device=torch.device("cuda"))
    assert phases_for(Phases(decode=Gather()), traits)[0].decode == Gather()
    alone = dataclasses.replace(traits, rows=1)
    assert phases_for(Phases(decode=Gather()), alone)[0].decode is None


def test_the_states_share_of_memory():
    """Two bytes a channel for a block's keys and values, and a float32; two numbers for exact
    bounds; a byte a channel and a float32 for gvr's keys."""
    assert share_of_cache(Gvr(), 128, torch.bfloat16) == 132 / 512
    assert share_of_cache(Gvr(), 64, torch.float16) == Gvr().page_share(2)
    codes = 260 / (16 * 512)  # and what a cache of this size has for a frame
    assert codes < share_of_cache(Gather(block=16), 128, torch.bfloat16) < 1.01 * codes
    assert 2 * codes < share_of_cache(Gather(block=16), 128, FP8) < 2.02 * codes
    bounds = Gather(block=16, scoring="bounds")
    assert share_of_cache(bounds, 128, torch.bfloat16) == 1 / 16
    bounds = dataclasses.replace(bounds, block=128)
    assert share_of_cache(bounds, 128, torch.bfloat16) == 1 / 128


@pytest.mark.parametrize("most", [2, 3])
def test_batches_of_few_rows_need_no_other_attention_where_gather_reads_near_rows(
    most, monkeypatch
):
    """A far row, a near one and one that pads, with room for as many rows or not."""
    monkeypatch.setattr(Gather, "rows_whole", most)
    layer = served(Phases(decode=Gather(k=3, block=PAGE, sink=1, local=2, min_tokens=200)))
    cache, lengths = Cache(3, 320), torch.tensor([304, 160, 0], dtype=torch.int32)
    k, v = tokens(320, KV_HEADS, 2), tokens(320, KV_HEADS, 3)
    slots = torch.cat([cache.write(i, 0, k[:n], v[:n]) for i, n in enumerate(lengths.tolist())])
    layer.state.update(cache.k, slots)
    chosen = layer.rule.far(lengths)
    far, q = Far(lengths * chosen, chosen, lengths * ~chosen), tokens(3, HEADS, 4)
    steps, called = (q, Pages(cache.k, cache.v), cache.table), []
    gathered = torch.full_like(q, 7.0)
    layer.attend_steps(*steps, far, gathered)
    assert (gathered[1:] == 7.0).all()  # nobody else is there, and none is asked to read them
    out = torch.full_like(q, 7.0)
    layer.attend_steps(*steps, far, out, dense=lambda: called.append(out[1:].fill_(5.0)))
    assert torch.equal(out[0], gathered[0]) and len(called) == int(most < 3)
    rows = {"lengths": far.near, "table": cache.table}
    whole, _ = dense_decode(q.unsqueeze(2), cache.k, cache.v, scale=0.125, **rows)
    want = whole[1:, :, 0] if most == 3 else torch.full_like(q[1:], 5.0)
    assert torch.equal(out[1:], want)


@pytest.mark.parametrize("longest, picks", [(131_072, 16_384), (32_768, 4096), (16_384, 2048)])
def test_rows_of_sketch_are_far_by_the_tokens_that_they_pick(longest, picks):
    """Each row picks an eighth of the longest: below that many tokens it would read all of them,
    and their codes besides."""
    traits = LayerTraits(head_dim=64, longest=longest, rows=99, device=torch.device("cuda"))
    found = phases_for(Phases(decode=Sketch()), traits)[0].decode
    assert found == Sketch(k=picks)
    assert found.row_crossover(traits.device).row == 5 * (640 + picks)
