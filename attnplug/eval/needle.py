"""Needle prompts: one sentence with a magic number, hidden in a long text, and the question for it.

Two haystacks: "noise" repeats five short sentences (RULER's niah_single_1), "prose" is a run of
English paragraphs (chapters of a textbook and of manuals, see data/NOTICE.md), at a random place of
it. Everything follows from the seed."""

import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

from attnplug.errors import ArgumentError
from attnplug.eval.prompts import LOW, SHORTEST, encode, render

# Longer prompts read the guides too, as the book alone would soon repeat itself. Shorter ones read
# what they always did, so that samples of all versions stay comparable.
BOOK_PROMPT = 32768
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Athens Cairo Tokyo Delhi Lima "
    "Boston Chicago Denver Seattle Toronto Sydney"
).split()


@dataclass(frozen=True)
class Needle:
    """A prompt: token ids `[1,T]` (int64), the digits that answer it, and the whole text."""

    ids: torch.Tensor
    answer: str
    text: str

    def found_in(self, reply: str) -> bool:
        """Whether a decoded reply names the number, not as a part of a longer one (thousands
        separators allowed)."""
        return re.search(rf"(?<!\d){self.answer}(?!\d)", reply.replace(",", "")) is not None


def needle_prompt(
    tokenizer: Any,
    target_tokens: int,
    depth: float = 0.5,
    seed: int = 0,
    haystack: Literal["noise", "prose"] = "noise",
) -> Needle:
    """A prompt of 90 to 100% of `target_tokens`, the needle at `depth` (0 first, 1 last) of it.

    A tokenizer with a chat template gets the prompt as a user's turn, with the assistant's turn
    opened; another gets the start of the answer's sentence. Raises ArgumentError for a depth
    outside [0, 1], an unknown haystack, a target below 160 tokens or beyond what the prose has."""
    if not 0 <= depth <= 1:
        raise ArgumentError(f"depth is {depth}, needs 0 to 1")
    if target_tokens < SHORTEST:
        raise ArgumentError(f"target_tokens is {target_tokens}, needs at least {SHORTEST}")
    if haystack not in ("noise", "prose"):
        raise ArgumentError(f"haystack is {haystack!r}, needs 'noise' or 'prose'")
    rng = random.Random(seed)
    city, answer = rng.choice(CITIES), str(rng.randint(10_000, 99_999))
    frame = _Frame(tokenizer, city, answer)
    budget = target_tokens - len(frame.ids([], 0.0))
    pieces: list[str] = []
    for piece in _pieces(haystack, rng, target_tokens):
        # The pieces are counted one by one, which can only overcount what they cost joined.
        cost = _cost(tokenizer, piece)
        if cost > budget:
            if budget > (1 - LOW) * target_tokens:  # a long paragraph: its first sentences fit
                pieces += _beginning(tokenizer, piece, budget)
            break
        budget -= cost
        pieces.append(piece)
    else:
        raise ArgumentError(f"target_tokens is {target_tokens}, more than the {haystack} text has")
    ids = frame.ids(pieces, depth)
    return Needle(
        torch.tensor([ids], dtype=torch.int64, device="cpu"), answer, frame.text(pieces, depth)
    )


class _Frame:
    """Everything of a prompt but the haystack."""

    def __init__(self, tokenizer: Any, city: str, answer: str) -> None:
        self.tokenizer = tokenizer
        self.needle = f"The special magic number for {city} is {answer}."
        self.question = f"What is the special magic number for {city} mentioned in the text?"
        self.intro = f"The special magic number for {city} is hidden in this text. Remember it."
        self.lead = f"The special magic number for {city} mentioned in the text is"

    def text(self, pieces: list[str], depth: float) -> str:
        place = round(depth * len(pieces))
        body = "\n".join([*pieces[:place], self.needle, *pieces[place:]])
        user = f"{self.intro}\n{body}\n{self.question}"
        return render(self.tokenizer, user, self.lead)

    def ids(self, pieces: list[str], depth: float) -> list[int]:
        return encode(self.tokenizer, self.text(pieces, depth))


def _cost(tokenizer: Any, piece: str) -> int:
    return len(tokenizer(piece + "\n", add_special_tokens=False).input_ids)


def _beginning(tokenizer: Any, piece: str, budget: int) -> list[str]:
    """As many of a paragraph's first sentences as fit, as one piece."""
    sentences = re.split(r"(?<=[.!?]) ", piece)
    while sentences and _cost(tokenizer, " ".join(sentences)) > budget:
        sentences.pop()
    return [" ".join(sentences)] if sentences else []


def _pieces(haystack: str, rng: random.Random, target_tokens: int) -> Iterator[str]:
    if haystack == "noise":
        while True:
            yield NOISE
    text = prose(target_tokens > BOOK_PROMPT)
    start = rng.randrange(len(text))
    yield from (text[(start + i) % len(text)] for i in range(len(text)))


@cache
def prose(long: bool = False) -> tuple[str, ...]:
    """The paragraphs of the prose haystack, about 73,000 tokens in all. `long`: followed by those
    of the guides, about 310,000 tokens, of which no paragraph is there twice."""
    data = files("attnplug.eval").joinpath("data")
    text = data.joinpath("rust_book.txt").read_text(encoding="utf-8")
    if long:
        guides = lzma.decompress(data.joinpath("rust_guides.txt.xz").read_bytes())
        text = f"{text.strip()}\n\n{guides.decode()}"
    return tuple(text.strip().split("\n\n"))
