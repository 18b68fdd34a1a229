"""gather as a whole, and its cache layer: what methods/gather.md says must be true."""

import dataclasses
import itertools

import pytest
import torch
from gather_policy_cases import BAND, EXACT, GATHER, SIZE, bounds_of, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import HEADS, KV_HEADS, filled, random, step

from attnplug import Dense, Gather
from attnplug.policies import AttentionCall
from attnplug.policies._gather_layers import Form
from attnplug.policies.gather import GatherLayer
from attnplug.testing import oracle_attention


def assert_right(words: torch.Tensor, keys: torch.Tensor, form: Form) -> None:
    """Assert that `words [2,D]` hold keys `[block,D]`, or are the edges of their band, but for half
    a code's worth."""
    if form.band:
        half = 0.8 * keys.std(0, correction=0)
        wanted = torch.stack([keys.mean(0) + half, keys.mean(0) - half])
        if form.codes:  # one width for all channels
            wanted, words = wanted.mean(0, keepdim=True), words.mean(0, keepdim=True)
        assert (words - wanted).abs().max() < 0.1
    else:
        assert (words[0] >= keys.amax(0)).all() and (words[1] <= keys.amin(0)).all()


def ranked(query: torch.Tensor, words: dict[int, torch.Tensor]) -> list[int]:
    """The candidates, best first, by what their summaries `[2,D]` say to a group `query [G,D]`."""
    if not words:
        return []
    first, second = torch.stack(list(words.values())).unbind(1)
    score = (query.clamp(min=0) @ first.T + query.clamp(max=0) @ second.T).amax(0)
    worth = dict(zip(words, score.tolist(), strict=True))
    return sorted(worth, key=lambda j: -worth[j])


def kept_blocks(
    call: AttentionCall, policy: Gather, b: int, h: int, visible: torch.Tensor
) -> list[list[int]]:
    """The blocks that each query reads: its first and last, and those that it picks."""
    assert isinstance(call.state, GatherLayer)
    length, queries, group = int(call.lengths), call.q.shape[2], HEADS // KV_HEADS
    start, said = int(visible.int().argmax()), bounds_of(call.state)
    kept = []
    for t in range(queries):
        own = (length - queries + t - start) // policy.block
        words = {}
        for j in range(policy.sink, own - policy.local + 1 if policy.k else 0):
            at = start + torch.arange(j * policy.block, (j + 1) * policy.block)
            keys = call.k[b, h, at[visible[at]]].double().cpu()
            if len(keys):
                words[j] = said[b, h, j]
                assert_right(words[j], keys, call.state.form)
        query = call.q[b, h * group : h * group + group, t].double().cpu()
        near = [*range(policy.sink), *range(max(own - policy.local + 1, 0), own + 1)]
        kept.append([*near, *ranked(query, words)[: policy.k]])
    return kept


def expected(call: AttentionCall, policy: Gather) -> torch.Tensor:
    """fp64 attention over the keep set that the summaries tell, which are to be right."""
    length, queries, group = int(call.lengths), call.q.shape[2], HEADS // KV_HEADS
    kept = torch.zeros(queries, *call.k.shape[:3], dtype=torch.bool)
    for b in range(call.k.shape[0]):
        visible = torch.arange(call.k.shape[2]) < length
        if call.key_mask is not None:
            visible = visible & call.key_mask[b].cpu()
        start = int(visible.int().argmax())
        for h in range(KV_HEADS):
            for t, blocks in enumerate(kept_blocks(call, policy, b, h, visible)):
                for j in blocks:
                    begin = start + j * policy.block
                    kept[t, b, h, begin : begin + policy.block] = True
        kept[:, b] &= visible
    out = torch.empty(call.q.shape, dtype=torch.float64)
    for t, h in itertools.product(range(queries), range(KV_HEADS)):
        heads = slice(h * group, h * group + group)
        out[:, heads, t : t + 1], _ = oracle_attention(
            call.q[:, heads, t : t + 1].cpu(),
            call.k[:, h : h + 1].cpu(),
            call.v[:, h : h + 1].cpu(),
            scale=call.scale,
            softcap=call.softcap,
            sinks=None if call.sinks is None else call.sinks.cpu()[heads],
            lengths=call.lengths.cpu() - queries + 1 + t,
            key_mask=kept[t, :, h],
        )
    return out


def hold(policy: Gather, call: AttentionCall) -> None:
    found = policy.attend(call).cpu()  # and the summaries
    assert (found - expected(call, policy)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 49, 64, 65, 130, 199, 200])
@pytest.mark.parametrize("policy", [GATHER, EXACT, BAND], ids=["int8", "exact", "band"])
def test_a_step_attends_to_the_keep_set(policy, length, device):
    layer = filled(policy, tokens(0, length, batch=2, device=device))
    hold(policy, step(layer))
    hold(policy, step(layer, softcap=3.0, sinks=random(5, HEADS).to(device)))


def test_the_budget_is_felt(device):
    layer = filled(GATHER, tokens(0, 190, device=device))
    call = step(layer)
    assert (GATHER.attend(call) - Dense().attend(call)).abs().max() > 1e-2


@pytest.mark.parametrize("scoring", ["bounds", "band"])
@given(length=st.integers(1, SIZE), seed=st.integers(0, 99))
def test_a_keep_set_of_everything_is_dense(scoring, length, seed):
    covering = dataclasses.replace(GATHER, k=12, scoring=scoring)
    call = step(filled(covering, tokens(seed, length)), seed)
    assert (covering.attend(call) - Dense().attend(call)).abs().max() < 2e-6


@pytest.mark.parametrize("scoring", ["bounds", "band"])
def test_left_padding_does_not_change_a_row(scoring, device):
    policy = dataclasses.replace(GATHER, scoring=scoring)
    kv = tokens(0, 170, batch=3, device=device)
    starts = (0, 37, 169)
    mask = torch.arange(SIZE, device=device) >= torch.tensor(starts, device=device)[:, None]
    call = step(filled(policy, kv), mask=mask)
    together = policy.attend(call)
    for row, start in enumerate(starts):
        alone = step(filled(policy, kv[:, row : row + 1, :, start:]))
        alone.q = call.q[row : row + 1]
        assert (policy.attend(alone) - together[row]).abs().max() < 1e-6


@pytest.mark.parametrize("policy", [GATHER, BAND], ids=["bounds", "band"])
def test_a_hole_in_the_mask_is_neither_read_nor_summarised(policy, device):
    kv = tokens(0, 170, device=device)
    kv[:, :, :, 90] = torch.nan
    kv[:, :, :, 40:64] = 1e3  # a whole block and a half
    mask = torch.ones(1, SIZE, dtype=torch.bool, device=device)
    mask[:, 90] = mask[:, 40:64] = False
    hold(policy, step(filled(policy, kv), mask=mask))


@pytest.mark.parametrize("policy", [GATHER, BAND], ids=["bounds", "band"])
def test_padding_that_appears_later_is_seen(policy, device):
    """A step without a mask and then one with: the blocks are counted anew, and back again."""
    layer = filled(policy, tokens(0, 170, device=device))
    mask = torch.arange(SIZE, device=device)[None] >= 21
    for each in (None, mask, None):
        hold(policy, step(layer, mask=each))
    assert layer.progress.tolist() == [[(169 // 16) - 1, 0]]


@pytest.mark.parametrize("policy", [GATHER, BAND], ids=["bounds", "band"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_surfaces_wherever_it_is(bad, policy, device):
    """Its block ranks first, so that no budget can hide it."""
    kv = tokens(0, 190, device=device)
    kv[0, 0, 1, 77] = bad
    call = step(filled(policy, kv))
    found, dense = policy.attend(call), Dense().attend(call)
    assert dense[:, 2:].isnan().any() and torch.equal(found.isnan(), dense.isnan())


def test_no_distant_blocks_is_a_window(device):
    window = dataclasses.replace(GATHER, k=0)
    hold(window, step(filled(window, tokens(0, 190, device=device))))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(0, 50)),
        st.tuples(st.just("reorder"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=40)
@given(
    actions=ACTIONS,
    padded=st.booleans(),
    early=st.booleans(),
    policy=st.sampled_from([GATHER, BAND, EXACT]),
)
def test_summaries_follow_whatever_happens_to_the_cache(actions, padded, early, policy):
    """Prefills in chunks, steps, crops, beams, batch changes, resets: a step gives what it gives
    with a cache made at once from the same tokens, and every summary that counts is right."""
    layer, rows, seed = policy.cache_layer(SIZE), tokens(0, 100, batch=2), 1
    if early:
        layer.lazy_initialization(rows[0, :, :, :0], rows[1, :, :, :0])
    layer.update(rows[0], rows[1])
    pads = torch.tensor([0, 5]) if padded else torch.tensor([0, 0])
    check(policy, layer, rows, pads, seed)
    for action, number in actions:
        length, seed = rows.shape[3], seed + 2
        if action in ("append", "step"):
            spans = [number] if action == "append" else [1] * number
            for span in spans:
                if rows.shape[3] + span > SIZE:
                    break
                new = tokens(seed := seed + 2, span, batch=rows.shape[1])
                layer.update(new[0], new[1])
                rows = torch.cat([rows, new], 3)
                if action == "step":
                    check(policy, layer, rows, pads, seed)
        elif action == "crop":
            layer.crop(-min(number, length - 6))
            rows = rows[:, :, :, : length - min(number, length - 6)]
        elif action == "reorder":
            order = torch.tensor(
                [number * (row + 1) // 3 % rows.shape[1] for row in range(len(pads))]
            )
            layer.reorder_cache(order)
            rows, pads = rows[:, order], pads[order]
        elif action == "repeat" and len(pads) < 5:
            layer.batch_repeat_interleave(number)
            rows, pads = rows.repeat_interleave(number, 1), pads.repeat_interleave(number)
        elif action == "select":
            chosen = torch.arange(len(pads))[: number + 1].flip(0)
            layer.batch_select_indices(chosen)
            rows, pads = rows[:, chosen], pads[chosen]
        elif action == "reset":
            layer.reset()
            rows = tokens(seed, 70, batch=len(pads))
            layer.update(rows[0], rows[1])
        check(policy, layer, rows, pads, seed)


def check(
    policy: Gather, layer: GatherLayer, rows: torch.Tensor, pads: torch.Tensor, seed: int
) -> None:
    mask = torch.arange(SIZE) >= pads[:, None] if bool(pads.any()) else None
    call, fresh = (step(x, seed, mask) for x in (layer, filled(policy, rows)))
    assert torch.equal(policy.attend(call), policy.attend(fresh))
    length = rows.shape[3]
    for row, (done, start) in enumerate(layer.progress.tolist()):
        assert start == (int(pads[row]) if mask is not None else 0)
        assert (length - 1 - start) // 16 - 1 <= max(done, 0) <= (length - start) // 16
        keys = rows[0, row, :, start : start + done * 16].unflatten(1, (done, 16)) if done else None
        if keys is not None:
            said = bounds_of(layer)[row, :, :done]
            high, low = said.unbind(2)
            for h, j in itertools.product(range(KV_HEADS), range(done)):
                assert_right(said[h, j], keys[h, j].double(), layer.form)
            if not layer.form.codes:
                assert torch.equal(high, keys.amax(2).double())
                assert torch.equal(low, keys.amin(2).double())


def test_beams_are_reordered_in_place(device):
    """A CUDA graph goes on reading the old addresses."""
    layer = filled(GATHER, tokens(0, 150, batch=3, device=device))
    starts = torch.tensor([0, 9, 30], device=device)
    GATHER.attend(step(layer, mask=torch.arange(SIZE, device=device) >= starts[:, None]))
    before = [x.data_ptr() for x in (layer.keys, layer.bounds, layer.progress)]
    assert layer.progress.tolist() == [[8, 0], [7, 9], [6, 30]]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert before == [x.data_ptr() for x in (layer.keys, layer.bounds, layer.progress)]
    assert layer.progress.tolist() == [[6, 30], [8, 0], [8, 0]]


def test_a_cache_of_bounds_is_none_of_bands(device):
    """Both are INT8, and say other things: a step over the other's summaries is dense."""
    layer = filled(GATHER, tokens(0, 190, device=device))
    call = step(layer)
    assert torch.equal(BAND.attend(call), Dense().attend(call))
    hold(BAND, step(filled(BAND, tokens(0, 190, device=device))))
