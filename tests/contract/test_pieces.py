"""A prompt in pieces over several gloo processes: what one process computes, into a cache that the
model or its tensor-parallel split decodes from; and errors on all ranks where one cannot take
part."""

import json
from pathlib import Path
from typing import Any

import pytest
from contract_cases import CASES
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from ranks import needs_gloo, run_ranks

from attnplug import ArgumentError
from attnplug.models.pieces import Pieces
from attnplug.testing import tiny_model

TOKENS = 157  # no multiple of a block, so that pieces differ in length
ROUNDING = 1e-5  # of the largest logit; momo without its mask is off by tens of percent
MOMO = CASES["momo+gather"].policy
GROWING = "momo(block=16, query_block=32, top_k=1, tail=8, min_tokens=0)"  # gamma, with the place
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [8.0] * 32,
    "original_max_position_embeddings": 130,  # the second rank's tokens all come before it
}


PIECES: list[dict[str, Any]] = [
    {"model": "tiny", "policy": "dense", "tokens": TOKENS},
    {"model": "tiny", "policy": MOMO, "tokens": TOKENS, "rows": 2},
    {"model": "tiny", "policy": MOMO, "tokens": TOKENS, "decoder": True, "heads": 1},
    {"model": "tiny", "policy": GROWING, "tokens": 250, "gammas": [160, 4, 16]},
    {"model": "rope", "policy": "dense", "tokens": TOKENS},
]
DECODING = "gvr", "certified", "momo+sketch", "gather in host memory", "sketch in host memory"
DECODERS: list[dict[str, Any]] = [
    {"model": "tiny", "policy": CASES[name].policy, "tokens": TOKENS} for name in DECODING
]
DECODERS += [
    {"model": "tiny", "policy": CASES[name].policy, "tokens": 900, "decoder": True, "heads": 1}
    for name in ("momo+sketch", "certified")
]
SERVED = {family.name: family for family in FAMILIES if family.served}
OF_FAMILIES: list[dict[str, Any]] = [
    {"model": name, "policy": MOMO, "tokens": TOKENS}
    | ({"options": {"attn_implementation": "eager"}} if name == "gemma2" else {})
    for name in SERVED
]


def ask(folder: Path, asked: list[Any], models: dict[str, Any], **options: Any) -> list[Any]:
    """What each rank finds of each call, done in pieces and alone."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
    (folder / "asked.json").write_text(json.dumps(asked))
    run_ranks("contract/pieces_rank.py", folder, **options)
    ranks = range(options.get("ranks", 2))
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in ranks]


def hold(asked: list[Any], found: list[Any]) -> None:
    """Hold calls in pieces to those alone."""
    chosen = set()
    for rank, results in enumerate(found):
        for call, each in zip(asked, results, strict=True):
            assert each["logits"] < ROUNDING, (rank, call, each)
            assert each["cache"] < ROUNDING * 100, (rank, call, each)
            assert each["tokens"] and each["restored"], (rank, call, each)
            assert each["heads"] == call.get("heads", 2), (rank, call, each)
            chosen.add(str(each["chosen"]))
    assert len(chosen) > 1 or len(asked) == 1  # policies that choose, or models that differ


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[Any]:
    """Of two ranks: PIECES, DECODERS and OF_FAMILIES in turn. Importing torch takes a process some
    seconds, so that two do all of it."""
    models = {"tiny": tiny_model(), "rope": tiny_model(rope_parameters=LONG_ROPE)}
    models |= {name: family.build() for name, family in SERVED.items()}
    folder = tmp_path_factory.mktemp("ranks")
    # most of the limit is for compiling numba's functions
    return ask(folder, [*PIECES, *DECODERS, *OF_FAMILIES], models, limit=900)


@needs_gloo
@pytest.mark.slow
def test_pieces_give_what_one_process_gives(found):
    hold(PIECES, [each[: len(PIECES)] for each in found])


@needs_gloo
@pytest.mark.slow
def test_every_decode_method_continues(found):
    begin = len(PIECES)
    hold(DECODERS, [each[begin : begin + len(DECODERS)] for each in found])


@needs_gloo
@pytest.mark.slow
def test_every_family_gives_what_one_process_gives(found):
    hold(OF_FAMILIES, [each[-len(OF_FAMILIES) :] for each in found])


@needs_gloo
def test_three_ranks_have_uneven_pieces(tmp_path):
    policy = CASES["momo"].policy
    asked = [{"model": "tiny", "policy": policy, "tokens": TOKENS, "given": {"max_length": 160}}]
    hold(asked, ask(tmp_path, asked, {"tiny": tiny_model()}, ranks=3))


@needs_gloo
def test_what_one_rank_cannot_do_raises_on_all(tmp_path):
    run_ranks("contract/pieces_faults_rank.py", tmp_path)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    both = {
        "lengths": ("RankError", "prompt's shape of rank 0 is 1 x 64, that of rank 1 1 x 63"),
        "tokens": ("RankError", "the prompt of rank 0 is one of other tokens"),
        "models": ("RankError", "the model of rank 0 is LlamaForCausalLM torch.float32"),
        "rooms": ("RankError", "the max_length of rank 0 is 64, that of rank 1 65"),
        "short": ("ArgumentError", "3 tokens is too short for 2 ranks: it has 3 blocks of 1"),
        "no room": ("ArgumentError", "max_length=63"),
        "no policy": ("NotAppliedError", "call attnplug.apply"),
        "stream": ("PolicyError", "whose result depends on where a prompt is cut"),
        "off the grid": ("ArgumentError", "it has 1 blocks of 64 queries"),
        "mesh": ("ArgumentError", "mesh has 2 dimensions"),
        "named mesh": ("", ""),
    }
    for name, (error, text) in both.items():
        for found in (first, second):
            assert found[name][0] == error and text in found[name][1], (name, found[name])
    assert second["padding"][0] == "UnsupportedCallError"
    assert first["padding"][0] == "RankError" and "rank 1" in first["padding"][1]
    assert first["killed"][0] == "RankError" and "one of them has ended" in first["killed"][1]
    assert first["killed"][2] < 60 and first["names"][0] == "attnplug"


@given(
    ranks=st.integers(1, 8),
    grid=st.integers(1, 128),
    blocks=st.integers(0, 99),
    last=st.floats(0, 1),
)
def test_pieces_cover_the_prompt_on_the_grid(ranks, grid, blocks, last):
    tokens = (2 * ranks - 1 + blocks) * grid + max(1, round(last * grid))
    pieces = Pieces.of(tokens, ranks, grid)
    sizes = [b - a for a, b in zip(pieces.cuts, pieces.cuts[1:], strict=False)]
    assert pieces.cuts[0] == 0 and pieces.cuts[-1] == tokens and len(sizes) == 2 * ranks
    assert all(cut % grid == 0 for cut in pieces.cuts[:-1]) and min(sizes) > 0
    assert max(sizes) - min(sizes) < 2 * grid
    everywhere = [pieces.positions(rank, "cpu") for rank in range(ranks)]
    assert sorted(p for each in everywhere for p in each.tolist()) == list(range(tokens))
    # What causal attention costs, query by query, differs by a block at either end of a piece.
    costs = [int((each + 1).sum()) for each in everywhere]
    assert max(costs) - min(costs) <= 4 * grid * tokens


@pytest.mark.parametrize(("tokens", "ranks", "grid"), [(3, 2, 1), (383, 2, 128), (1, 1, 1)])
def test_a_prompt_of_fewer_blocks_than_pieces_is_refused(tokens, ranks, grid):
    with pytest.raises(ArgumentError, match=f"a prompt of {tokens} tokens is too short"):
        Pieces.of(tokens, ranks, grid)
