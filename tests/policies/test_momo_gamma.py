"""momo's gamma by default: queries far into a prompt are measured half as often, wherever the
prompt is cut into chunks."""

import dataclasses

import pytest
import torch
from span_cases import PADDING, ROOM, SELECTIONS, TOKENS, call, padded

import attnplug
from attnplug import Momo, PolicyError
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall
from attnplug.policies import momo as policy
from attnplug.policies._prompt_parts import first_query
from attnplug.testing.policy import tiny_model

FAR, NEAR_GAMMA, FAR_GAMMA = 100, 4, 16  # 100 is not on the grid: gamma changes at 128
CUT = 128
MOMO = Momo(block=16, query_block=32, top_k=2, exact_k=2, tail=0, min_tokens=0)
METHODS = SELECTIONS | {"tail": {"tail": 40}}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Gamma changes within a test's prompt."""
    for name in ("FAR", "NEAR_GAMMA", "FAR_GAMMA"):
        monkeypatch.setattr(policy, name, globals()[name])


def of(method: Momo, gamma: int) -> Momo:
    return dataclasses.replace(method, gamma=gamma)


@pytest.mark.parametrize("room", [TOKENS, ROOM])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_each_query_is_measured_by_its_place(options, sinks, room, device):
    method, c = dataclasses.replace(MOMO, **options), call(device, room=room, sinks=sinks)
    near, far = of(method, NEAR_GAMMA).attend(c), of(method, FAR_GAMMA).attend(c)
    found = method.attend(c)
    torch.testing.assert_close(found[:, :, :CUT], near[:, :, :CUT], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[:, :, CUT:], far[:, :, CUT:], rtol=0, atol=1e-6)
    assert (near - far)[:, :, CUT:].abs().max() > 1e-2  # other blocks


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("chunk", [32, 96, 224])
def test_chunks_on_the_grid_are_measured_as_the_whole(chunk, delta, device):
    method, whole = dataclasses.replace(MOMO, delta=delta), call(device)
    alone, cached, foreign, seen = [], [], [], PlugLayer(ROOM)
    for at in range(0, TOKENS, chunk):
        end = min(at + chunk, TOKENS)
        q, k, v = whole.q[:, :, at:end], whole.k[:, :, :end], whole.v[:, :, :end]
        alone.append(method.attend(dataclasses.replace(whole, q=q, k=k, v=v)))
        seen.counted = end
        lengths = torch.full((1,), end, device=device)
        step = dataclasses.replace(whole, q=q, state=seen, lengths=lengths)
        cached.append(method.attend(step))
        foreign.append(method.attend(dataclasses.replace(step, state=None)))
    wanted = method.attend(whole)
    torch.testing.assert_close(torch.cat(alone, 2), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat(cached, 2), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat(foreign, 2), wanted, rtol=0, atol=1e-6)


def test_a_layer_that_was_cut_back_or_stepped_uncounted_knows_its_place(device):
    layer, kv = PlugLayer(ROOM), torch.zeros(1, 2, 200, 64, device=device)
    layer.update(kv, kv)
    layer.crop(-150)
    layer.update(kv[:, :, :20], kv[:, :, :20])
    assert layer.counted == 70
    step = AttentionCall(torch.zeros(1, 4, 20, 64, device=device), layer.keys, layer.values, 1.0)
    step.lengths, step.state = layer.cumulative_length.view(1), layer
    assert first_query(step) == 50
    layer.counted, layer.uncounted = 30, True  # compiled steps came, which the host did not count
    assert first_query(step) == 50
    layer.crop(-1000)
    assert layer.counted == 0


def test_a_compiled_call_over_a_static_cache_counts_from_its_own_first_query():
    c = call("cpu", room=ROOM, batch=1)

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v, lengths):
        return MOMO.attend(AttentionCall(q, k, v, 0.125, lengths=lengths))

    late = c.q[:, :, 160:].contiguous()
    found = compiled(late, c.k, c.v, c.lengths)
    near = of(MOMO, NEAR_GAMMA).attend(AttentionCall(late, c.k, c.v, 0.125, lengths=c.lengths))
    torch.testing.assert_close(found, near)
    long = compiled(c.q, c.k, c.v, c.lengths)  # counts from its own first query
    torch.testing.assert_close(long, MOMO.attend(c))


def test_a_cut_chunk_off_the_grid_begins_its_far_part_on_its_own_grid(device):
    """At its first query block that begins at FAR or behind it."""
    whole = call(device)
    late = dataclasses.replace(whole, q=whole.q[:, :, 50:])
    parts = MOMO._parts(late)
    assert [(part.q.shape[2], span.gamma) for part, span in parts] == [
        (64, NEAR_GAMMA),
        (TOKENS - 50 - 64, FAR_GAMMA),
    ]
    assert parts[0][0].k.shape[2] == 50 + 64


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("room", [TOKENS, ROOM])
def test_a_row_is_measured_as_if_it_were_alone(room, hole, device):
    c = padded(device, room=room, hole=hole)
    found = MOMO.attend(c)
    q, k, v = (x[1:2, :, PADDING:] for x in (c.q, c.k, c.v))
    alone = AttentionCall(q, k[:, :, : TOKENS - PADDING], v[:, :, : TOKENS - PADDING], c.scale)
    if hole:
        alone.key_mask = c.key_mask[1:2, PADDING:TOKENS]
    wanted = MOMO.attend(alone)
    torch.testing.assert_close(found[1:2, :, PADDING:], wanted, rtol=0, atol=1e-6)
    assert (found[1, :, :PADDING] == 0).all() and (found[2] == 0).all()
    assert (of(MOMO, NEAR_GAMMA).attend(c) - found)[1].abs().max() > 1e-2
    late = dataclasses.replace(c, q=c.q[:, :, 96:])  # a chunk: where it begins, only keys say
    if room == TOKENS:
        torch.testing.assert_close(MOMO.attend(late)[:1], found[:1, :, 96:], rtol=0, atol=1e-6)


def test_a_padded_rows_trace_is_that_of_the_row_alone(device):
    c = padded(device)
    alone = AttentionCall(*(x[1:2, :, PADDING:] for x in (c.q, c.k, c.v)), c.scale)
    found, wanted = MOMO.reads(c), MOMO.reads(alone)
    assert found is not None and wanted is not None
    blocks = wanted.index.shape[2]
    c.start = torch.full((3,), TOKENS, dtype=torch.int32, device=device)
    nothing = MOMO.reads(c)
    assert nothing is not None and (nothing.index == -1).all()
    assert torch.equal(found.index[1:2, :, :blocks], wanted.index)
    assert (found.index[1, :, blocks:] == -1).all() and (found.index[2] == -1).all()


def test_the_trace_reads_what_attention_does(device):
    c = call(device)
    found, near, far = (m.reads(c) for m in (MOMO, of(MOMO, NEAR_GAMMA), of(MOMO, FAR_GAMMA)))
    assert found is not None and near is not None and far is not None
    rows = CUT // MOMO.query_block
    assert torch.equal(found.index[:, :, :rows], near.index[:, :, :rows])
    assert torch.equal(found.index[:, :, rows:], far.index[:, :, rows:])
    assert not torch.equal(far.index, near.index)


def test_a_compiled_call_is_cut_too():
    c = call("cpu", batch=1)

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v):
        return MOMO.attend(AttentionCall(q, k, v, 0.125))

    for tokens in (TOKENS, 210, 90):
        part = [x[:, :, :tokens].contiguous() for x in (c.q, c.k, c.v)]
        found = compiled(*part)
        torch.testing.assert_close(found, MOMO.attend(AttentionCall(*part, 0.125)))


@pytest.mark.parametrize("chunk", [32, 96])
def test_chunks_of_generate_give_the_whole_prompts_answer(chunk, device):
    model = tiny_model(device=device, num_hidden_layers=2)
    ids = torch.randint(2, 97, (1, 200), generator=torch.Generator().manual_seed(1)).to(device)
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    with attnplug.applied(model, "momo(block=16, query_block=32, top_k=1, tail=8, min_tokens=0)"):
        wanted = model.generate(ids, output_logits=True, **options)
        found = model.generate(ids, output_logits=True, prefill_chunk_size=chunk, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.logits[0], wanted.logits[0], rtol=0, atol=1e-5)
    with attnplug.applied(
        model, "momo(gamma=16, block=16, query_block=32, top_k=1, tail=8, min_tokens=0)"
    ):
        other = model.generate(ids, output_logits=True, **options)
    assert (other.logits[0] - wanted.logits[0]).abs().max() > 1e-4


def test_the_papers_density_counts_both():
    long = dataclasses.replace(MOMO, delta=0.5, sink=0)
    rows = FAR / NEAR_GAMMA + (1000 - FAR) / FAR_GAMMA
    assert long.density(1000) == pytest.approx((16 * 2 + rows) / 1000)
    assert of(long, NEAR_GAMMA).density(1000) == pytest.approx((32 + 1000 / NEAR_GAMMA) / 1000)


def test_query_blocks_hold_both(monkeypatch):
    with pytest.raises(PolicyError, match="query_block=8, needs a multiple of 16"):
        Momo(query_block=8)
    monkeypatch.undo()
    with pytest.raises(PolicyError, match="query_block=48, needs a multiple of 32"):
        Momo(query_block=48)
    assert Momo(gamma=16, query_block=48).query_block == 48
    assert str(Momo()) == "momo" and str(Momo(gamma=16)) == "momo(gamma=16)"
