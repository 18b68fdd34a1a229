"""momo's `tail`: the prompt's last queries are dense, and all others as without it."""

import dataclasses

import pytest
import torch

import attnplug
from attnplug import Momo, PolicyError
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall, Dense
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
