"""A made-up trace of any length, for tests, benches and screenshots of the viewer."""

import os

import numpy as np

from attnplug.trace.layout import Layout
from attnplug.trace.writer import Writer

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could"
).split()
NEEDLE = " the special magic number is 48213 ."


def synthesize(
    path: str | os.PathLike[str],
    *,
    tokens: int = 1 << 20,
    layers: int = 2,
    heads: int = 4,
    top_k: int = 16,
    block: int = 64,
    seed: int = 0,
    steps: int = 0,
) -> int:
    """Write a trace of random edges with the features of real ones: the sink, a local part, a
    few columns that many attend to, blocks at a head's own distance, and in every odd layer's last
    head a needle, the token run NEEDLE in the middle of the text, that the last query blocks and
    all `steps` decode steps attend to most. Returns the needle's key block."""
    rng = np.random.default_rng(seed)
    words = [f" {word}".encode() for word in WORDS]
    needle = [f" {word}".encode() for word in NEEDLE.split()]
    vocabulary = {i: piece for i, piece in enumerate([*words, *needle])}
    ids = rng.integers(0, len(words), tokens + steps, dtype=np.int32)
    at = tokens // 2
    ids[at : at + len(needle)] = np.arange(len(words), len(words) + len(needle))
    place = at // block
    about = {"model": "synthetic", "policy": "synthetic", "options": {"seed": seed}}
    with Writer(path, Layout(block, block, "mass"), **about) as writer:
        writer.name_tokens([ids], vocabulary)
        for step in range(steps + 1):
            first = tokens + step - 1 if step else 0
            writer.begin([first], [1 if step else tokens])
            ends = np.array([first]) if step else np.arange(0, tokens, block)
            queries = np.minimum(tokens - ends, block) if not step else np.ones(1)
            for layer in range(layers):
                lists = [
                    _lists(rng, ends // block, top_k, place if layer % 2 and h == heads - 1 else -1)
                    for h in range(heads)
                ]
                index, share = (np.stack(parts)[None] for parts in zip(*lists, strict=True))
                writer.append(layer, index, (share * queries[:, None]).astype(np.float32))
    return place


def _lists(
    rng: np.random.Generator, last: np.ndarray, top_k: int, needle: int
) -> tuple[np.ndarray, np.ndarray]:
    """Key blocks int32 `[NQ,K]` and their shares, of query blocks whose own block is `last`."""
    count = len(last)
    columns = rng.integers(0, last.max() + 1, 4)
    index = rng.integers(0, last[:, None] + 1, (count, top_k))
    index[:, : top_k // 4] = columns[rng.integers(0, 4, (count, top_k // 4))]
    index[:, top_k // 4] = last - rng.integers(1, 50)
    index[:, -3:] = np.stack([0 * last, last - 1, last], 1)[:, -min(3, top_k) :]
    score = rng.exponential(1.0, index.shape).astype(np.float32)
    score[:, -3:] *= 8
    if needle >= 0:
        index[:, 0] = needle
        score[:, 0] = np.where(np.arange(count) >= count - 16, 100, 0.01)
    index[(index < 0) | (index > last[:, None])] = -1
    # a block once a list, the heaviest first
    order = np.argsort(-score, 1, kind="stable")
    index, score = (np.take_along_axis(x, order, 1) for x in (index, score))
    same = np.argsort(index, 1, kind="stable")
    row = np.take_along_axis(index, same, 1)
    twice = np.zeros_like(row, bool)
    twice[:, 1:] = row[:, 1:] == row[:, :-1]
    np.put_along_axis(index, same, np.where(twice, -1, row), 1)
    score[index < 0] = 0
    total = np.maximum(score.sum(1, keepdims=True), 1e-9)
    return index.astype(np.int32), score / total
