"""Long-context tasks in the style of RULER (Hsieh et al., 2024), written anew and offline.

Each builder turns random numbers, a depth and a filler into a draft; `make_sample` finds the number
of the filler's units that fills 90 to 100% of the target. Scoring is strict: an answer counts
where the reply has it as a whole number or word, the score is the share of the answers, and a
sample is solved only with all of them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.eval.needle import BOOK_PROMPT, CITIES, NOISE, SHORTEST, needle_prompt, prose
from attnplug.eval.prompts import depth_of, digest, encode, fit, generator, render

ZETA_ALPHA = 2.0
COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
Rng = np.random.Generator


class Draft(NamedTuple):
    """A prompt before the chat template: the user's text, the start of the answer, what it must
    name, and at which depth (0 to 1) each answer stands; no depths where answers are everywhere."""

    user: str
    lead: str
    answers: tuple[str, ...]
    depths: tuple[float, ...] = ()


class Prompt(NamedTuple):
    """A prompt that fits: its tokens, text, answers and their depths."""

    ids: torch.Tensor
    text: str
    answers: tuple[str, ...]
    depths: tuple[float, ...]


class Filler(NamedTuple):
    """How many units (sentences, words) fill a prompt, and whether it is one that reads the long
    prose."""

    units: int
    long: bool


Rngs = Callable[[], Rng]  # every call starts the sample's random numbers anew
Build = Callable[[Rng, float, Filler], Draft]


@dataclass(frozen=True)
class Task:
    """A generator `make(tokenizer, target, depth, rngs)`, and the tokens an answer may take."""

    name: str
    make: Callable[[Any, int, float, Rngs], Prompt]
    new_tokens: int


@dataclass(frozen=True)
class Sample:
    """One prompt: its tokens `[1,T]` (int64), the whole text, and what the row logs of it."""

    task: str
    target: int
    trial: int
    seed: int
    ids: torch.Tensor
    text: str
    answers: tuple[str, ...]
    depths: tuple[float, ...]

    @property
    def prompt_hash(self) -> str:
        return digest(self.text)

    def found(self, reply: str) -> list[bool]:
        """Which answers the reply names, each as a whole number or word."""
        text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", reply).lower()
        return [
            re.search(rf"(?<![a-z0-9]){re.escape(answer.lower())}(?![a-z0-9])", text) is not None
            for answer in self.answers
        ]

    def score(self, reply: str) -> float:
        """The share of the answers that the reply names; 1 solves the sample."""
        found = self.found(reply)
        return sum(found) / len(found)


def make_sample(tokenizer: Any, task: str, target: int, trial: int = 0, seed: int = 0) -> Sample:
    """The prompt number `trial` of a task, 90 to 100% of `target` tokens long.

    Its random numbers follow from (task, target, trial, seed) alone. Raises ArgumentError for an
    unknown task, and where the task does not fit into the target or the target passes the text."""
    if task not in TASKS:
        raise ArgumentError(f"task is {task!r}, needs one of {', '.join(TASKS)}")
    if target < SHORTEST:
        raise ArgumentError(f"target is {target} tokens, needs at least {SHORTEST}")
    try:
        prompt = TASKS[task].make(
            tokenizer, target, depth_of(trial), lambda: generator(task, target, trial, seed)
        )
    except ArgumentError as error:
        raise ArgumentError(f"{task}: {error}") from error
    return Sample(task, target, trial, seed, *prompt)


def _needle(haystack: Literal["noise", "prose"]) -> Callable[[Any, int, float, Rngs], Prompt]:
    def make(tokenizer: Any, target: int, depth: float, rngs: Rngs) -> Prompt:
        needle = needle_prompt(tokenizer, target, depth, int(rngs().integers(2**31)), haystack)
        return Prompt(needle.ids, needle.text, (needle.answer,), (depth,))

    return make


def _filled(build: Build) -> Callable[[Any, int, float, Rngs], Prompt]:
    """The draft with as many units of filler as fit."""

    def make(tokenizer: Any, target: int, depth: float, rngs: Rngs) -> Prompt:
        def attempt(units: int) -> tuple[list[int], str, Draft]:
            draft = build(rngs(), depth, Filler(units, target > BOOK_PROMPT))
            text = render(tokenizer, draft.user, draft.lead)
            return encode(tokenizer, text), text, draft

        ids, text, draft = attempt(fit(lambda units: len(attempt(units)[0]), target))
        return Prompt(
            torch.tensor([ids], dtype=torch.int64, device="cpu"), text, draft.answers, draft.depths
        )

    return make


def _multi_key(rng: Rng, depth: float, filler: Filler) -> Draft:
    keys, values = _pairs(rng, 4)
    spots = _spread(depth, 4)
    text = _hide(_facts(keys, values), spots, _sentences(rng, filler))
    asked = f"the special magic number for {keys[0]}"
    return _number_draft(text, asked, "is", values[:1], spots[:1])


def _multi_value(rng: Rng, depth: float, filler: Filler) -> Draft:
    keys, values = _pairs(rng, 4)
    spots = _spread(depth, 4)
    text = _hide(_facts([keys[0]] * 4, values), spots, _sentences(rng, filler))
    return _number_draft(
        text, f"all four special magic numbers for {keys[0]}", "are", values, spots
    )


def _queries(count: int) -> Build:
    def build(rng: Rng, depth: float, filler: Filler) -> Draft:
        keys, values = _pairs(rng, count)
        spots = _spread(depth, count)
        text = _hide(_facts(keys, values), spots, _sentences(rng, filler))
        named = f"{', '.join(keys[:-1])} and {keys[-1]}"
        return _number_draft(text, f"the special magic numbers for {named}", "are", values, spots)

    return build


def _variable_tracking(rng: Rng, depth: float, filler: Filler) -> Draft:
    names = _words(rng, 5, 5, upper=True)
    value = str(rng.integers(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    spots = tuple((step + depth) / 5 for step in range(5))
    text = _hide(chain, spots, [NOISE] * filler.units)
    user = (
        "Memorize and track the chain of variable assignments that is hidden in this text.\n"
        f"{text}\nFind all variables that are assigned the value {value} in the text above, "
        "directly or through another variable."
    )
    lead = f"The five variables that are assigned the value {value} are: VAR"
    return Draft(user, lead, tuple(names), spots)


def _common_words(rng: Rng, depth: float, filler: Filler) -> Draft:
    vocabulary, count = _vocabulary(filler.long), COMMON + filler.units
    if count > len(vocabulary):
        raise ArgumentError(f"needs {count} words, the prose has {len(vocabulary)}")
    order = rng.permutation(len(vocabulary))
    words = [vocabulary[i] for i in order[:count]]
    entries = words[:COMMON] * COMMON_TIMES + words[COMMON:] * OTHER_TIMES
    shuffled = [entries[i] for i in rng.permutation(len(entries))]
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(shuffled, 1))
    user = (
        "Below is a numbered list of words. In it, some words appear far more often than others. "
        f"Memorize the ones that appear most often.\n{listed}\n"
        f"What are the {COMMON} most common words in the list above?"
    )
    lead = f"The {COMMON} words that appear most often in the list are: 1."
    return Draft(user, lead, tuple(words[:COMMON]))


def _frequent_words(rng: Rng, depth: float, filler: Filler) -> Draft:
    total = 120 + 10 * filler.units
    counts = []  # of ranks 1, 2, ...: a zeta distribution, its first rank being the noise "..."
    norm = sum(rank**-ZETA_ALPHA for rank in range(1, 10_000))
    while not counts or counts[-1] > 1:
        counts.append(max(1, round(total * (len(counts) + 1) ** -ZETA_ALPHA / norm)))
    counts += [1] * (total - sum(counts))
    words = ["...", *_words(rng, len(counts) - 1, 6)]
    entries = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    text = " ".join(entries[i] for i in rng.permutation(len(entries)))
    user = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"coded words that appear most often; ignore the dots.\n{text}\n"
        "What are the three most frequently appearing words in the coded text above?"
    )
    return Draft(user, "The three words that appear most often are:", tuple(words[1:4]))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("needle-noise", _needle("noise"), 12),
        Task("needle-prose", _needle("prose"), 12),
        Task("multi-key", _filled(_multi_key), 12),
        Task("multi-value", _filled(_multi_value), 48),
        Task("multi-query", _filled(_queries(4)), 64),
        Task("ten-needles", _filled(_queries(10)), 160),
        Task("variable-tracking", _filled(_variable_tracking), 48),
        Task("common-words", _filled(_common_words), 80),
        Task("frequent-words", _filled(_frequent_words), 32),
    )
}


def _number_draft(
    text: str, asked: str, verb: str, values: Sequence[str], spots: Sequence[float]
) -> Draft:
    user = (
        "Some special magic numbers are hidden in this text. Memorize them.\n"
        f"{text}\nWhat {verb} {asked} mentioned in the text?"
    )
    lead = f"{asked[0].upper()}{asked[1:]} mentioned in the text {verb}"
    return Draft(user, lead, tuple(values), tuple(spots))


def _pairs(rng: Rng, count: int) -> tuple[list[str], list[str]]:
    """Different cities and different numbers of five digits."""
    keys = [CITIES[i] for i in rng.permutation(len(CITIES))[:count]]
    return keys, [str(10_000 + n) for n in rng.choice(90_000, count, replace=False)]


def _facts(keys: Sequence[str], values: Sequence[str]) -> list[str]:
    return [
        f"One of the special magic numbers for {key} is {value}."
        if keys.count(key) > 1
        else f"The special magic number for {key} is {value}."
        for key, value in zip(keys, values, strict=True)
    ]


def _spread(depth: float, count: int) -> tuple[float, ...]:
    """`count` depths at equal distances (around the end), the first at `depth`."""
    return tuple((depth + i / count) % 1.0 for i in range(count))


def _hide(facts: Sequence[str], spots: Sequence[float], filler: Sequence[str]) -> str:
    """The filler with each fact at its depth, counted in characters, between two pieces."""
    ends = list(accumulate(map(len, filler)))
    middles = [(end - len(piece) / 2) / ends[-1] for piece, end in zip(filler, ends, strict=True)]
    placed = [*zip(middles, filler, strict=True), *zip(spots, facts, strict=True)]
    return " ".join(piece for _, piece in sorted(placed, key=lambda pair: pair[0]))


def _sentences(rng: Rng, filler: Filler) -> list[str]:
    """A run of the prose's sentences from a random place, around its end."""
    sentences = _prose_sentences(filler.long)
    if filler.units > len(sentences):
        raise ArgumentError(f"needs {filler.units} sentences, the prose has {len(sentences)}")
    start = int(rng.integers(len(sentences)))
    return [sentences[(start + i) % len(sentences)] for i in range(filler.units)]


@cache
def _prose_sentences(long: bool) -> tuple[str, ...]:
    return tuple(s for paragraph in prose(long) for s in re.split(r"(?<=[.!?]) ", paragraph))


@cache
def _vocabulary(long: bool) -> tuple[str, ...]:
    """The different lower-case words of the prose, 4 letters or more."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,}\b", " ".join(prose(long))))))


def _words(rng: Rng, count: int, letters: int, upper: bool = False) -> list[str]:
    """`count` different random words."""
    words: dict[str, None] = {}
    first = ord("A" if upper else "a")
    while len(words) < count:
        words["".join(chr(first + n) for n in rng.integers(26, size=letters))] = None
    return list(words)
