"""momo's `tail`: the prompt's last queries are dense, and all others as without it."""

import dataclasses

import pytest
import torch

import attnplug
from attnplug import Momo, PolicyError
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall, Dense, _momo_defaults
from attnplug.testing.policy import tiny_model

MOMO = Momo(gamma=8, block=16, query_block=32, top_k=1, sink=0, tail=0, min_tokens=0)
TAILED = dataclasses.replace(MOMO, tail=40)
TOKENS, ROOM, PADDING = 235, 300, 50


def call(device: str, *, padded: bool, room: int = TOKENS) -> AttentionCall:
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 4, TOKENS, 64), (2, 2, room, 64), (2, 2, room, 64))
    made = AttentionCall(*(torch.randn(s, generator=random).to(device) for s in shapes), 0.125)
    if room > TOKENS:
        made.lengths = torch.full((1,), TOKENS, device=device)
    if padded:
        made.key_mask = torch.ones(2, room, dtype=torch.bool, device=device)
        made.key_mask[1, :PADDING] = False
        made.start = torch.tensor([0, PADDING], dtype=torch.int32, device=device)
    return made


@pytest.mark.parametrize("room", [TOKENS, ROOM])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tail", [7, 40, 64])
def test_the_last_queries_are_dense_and_the_others_as_they_were(tail, padded, room, device):
    c = call(device, padded=padded, room=room)
    found = dataclasses.replace(MOMO, tail=tail).attend(c)
    sparse, dense = MOMO.attend(c), Dense().attend(c)
    assert torch.equal(found[:, :, :-tail], sparse[:, :, :-tail])
    assert (found - dense)[:, :, -tail:].abs().max() < 1e-5
    assert (sparse - dense)[:, :, -tail:].abs().max() > 1e-2  # the lists leave something out


def test_a_tail_as_long_as_the_prompt_is_dense(device):
    c = call(device, padded=False)
    found = dataclasses.replace(MOMO, tail=10**6).attend(c)
    assert (found - Dense().attend(c)).abs().max() < 1e-5


@pytest.mark.parametrize("follow", [0, 9, 40, 200])
def test_tokens_that_follow_take_their_part_of_the_tail(follow, device):
    c, layer = call(device, padded=False), PlugLayer(ROOM)
    wanted = dataclasses.replace(MOMO, tail=max(0, 40 - follow)).attend(c)
    assert torch.equal(TAILED.attend(dataclasses.replace(c, follow=follow)), wanted)
    layer.counted, layer.prefill_tokens = TOKENS, TOKENS + follow
    assert torch.equal(TAILED.attend(dataclasses.replace(c, state=layer)), wanted)


@pytest.mark.parametrize("chunk", [32, 96, 224])
def test_chunks_of_generate_give_the_whole_prompts_answer(chunk, device):
    """Their last queries, but for the prompt's, are sparse as in the whole."""
    ids = torch.randint(2, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    model = attnplug.apply(tiny_model(device=device), TAILED)
    keys = []
    for options in ({}, dict(prefill_chunk_size=chunk)):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
        keys.append(out.past_key_values.layers[-1].keys[:, :, :TOKENS].clone())
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_a_trace_shows_that_the_last_query_blocks_read_all(padded, device):
    c = call(device, padded=padded)
    reads, plain = TAILED.reads(c), MOMO.reads(c)
    first = (TOKENS - 40) // 32
    assert reads is not None and plain is not None
    listed = reads.index[:, :, :first, : plain.index.shape[-1]]
    assert torch.equal(listed, plain.index[:, :, :first])
    assert (reads.index[:, :, :first, plain.index.shape[-1] :] == -1).all()
    for row, start in enumerate((0, PADDING if padded else 0)):
        for block in range(first, reads.index.shape[2]):
            ends = min(start + 32 * (block + 1), TOKENS) - start
            if start + 32 * block >= TOKENS:
                ends = 0
            seen = reads.index[row, 0, block]
            assert seen[seen >= 0].tolist() == list(range(-(-ends // 16)))


def test_the_density_counts_it_and_a_bad_one_is_refused():
    assert TAILED.density(4000) - MOMO.density(4000) == pytest.approx(0.01)
    with pytest.raises(PolicyError, match="tail"):
        Momo(tail=-1)


@pytest.mark.parametrize(
    ("tokens", "tail"), [(1, 128), (16383, 128), (16384, 1024), (1 << 20, 1024)]
)
def test_a_long_prompt_has_a_longer_tail(tokens, tail):
    assert Momo().tail_of(tokens) == tail
    assert Momo(tail=7).tail_of(tokens) == 7
    assert Momo().density(tokens) == pytest.approx(Momo(tail=tail).density(tokens))


@torch.no_grad()
def test_chunks_of_a_known_prompt_have_its_tail(monkeypatch):
    """generate says how long the prompt is, a chunk from elsewhere is as long as it is."""
    for name, value in (("LONG", 300), ("LONG_TAIL", 70), ("SHORT_TAIL", 30)):
        monkeypatch.setattr(_momo_defaults, name, value)
    seen, tail_of = [], Momo._tail
    monkeypatch.setattr(
        Momo, "_tail", lambda self, call: seen.append(tail_of(self, call)) or seen[-1]
    )
    model, ids = tiny_model(), torch.randint(2, 90, (1, 400))
    policy = "momo(gamma=8, block=16, query_block=32, top_k=1, min_tokens=0)"
    with attnplug.applied(model, policy):
        layers = model.config.num_hidden_layers
        for options, tails in (({}, [70]), ({"prefill_chunk_size": 160}, [0, 0, 70])):
            model.generate(ids, max_new_tokens=2, do_sample=False, **options)
            assert seen == [tail for tail in tails for _ in range(layers)]
            seen.clear()
        cache = attnplug.make_cache(model, 400)
        for begin in (0, 160, 320):
            model(ids[:, begin : begin + 160], past_key_values=cache)
        assert seen == [30] * 3 * layers


def test_an_engines_chunk_has_a_short_tail(device):
    """It may be any part of its prompt."""
    c = call(device, padded=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_momo_defaults, "LONG", 1)
        patch.setattr(_momo_defaults, "SHORT_TAIL", 33)
        method = dataclasses.replace(MOMO, tail=None)
        assert method._tail(c) == min(1024, TOKENS)
        assert method._tail(dataclasses.replace(c, follow=None)) == 33
        assert TAILED._tail(dataclasses.replace(c, follow=None)) == 40
