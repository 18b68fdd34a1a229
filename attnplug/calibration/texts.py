"""Eight kinds of text that a model is measured on: keys of one kind alone would give a basis that
other kinds need more bytes for (docs/log/sketch.md). All of them come with the package, or are made
from a seed, so that the same model always reads the same."""

import json
import random
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from attnplug.eval.needle import NOISE, prose

LETTERS = 24_000  # of a kind, which make TOKENS of any tokenizer
TOKENS = 2048  # of a kind that are read


def windows(tokenizer: Any, tokens: int = TOKENS) -> Iterator[tuple[str, list[int]]]:
    """Each kind's name, and the ids of its first tokens, the tokenizer's own beginning included."""
    begin = tokenizer("").input_ids
    for name, make in KINDS.items():
        ids = tokenizer(make(), add_special_tokens=False, verbose=False).input_ids
        yield name, [*begin, *ids][:tokens]


def _book() -> str:
    return "\n\n".join(prose())[:LETTERS]


def _guides() -> str:
    return "\n\n".join(prose(long=True))[-LETTERS:]


def _plays() -> str:
    return files("attnplug.eval").joinpath("data/plays.txt").read_text(encoding="utf-8")[:LETTERS]


def _code() -> str:
    """attnplug's own."""
    names = ("api.py", "files.py", "call.py")
    return "\n".join(files("attnplug").joinpath(x).read_text(encoding="utf-8") for x in names)[
        :LETTERS
    ]


def _repeated() -> str:
    return "\n".join([NOISE] * (LETTERS // len(NOISE)))


def _log(rng: random.Random) -> str:
    return _lines(
        lambda i: (
            f"2026-03-{1 + i // 100:02d}T{i % 24:02d}:{rng.randrange(60):02d}Z "
            f"{rng.choice(('INFO', 'INFO', 'WARN', 'ERROR'))} worker-{rng.randrange(9)} "
            f"{rng.choice(('GET', 'POST'))} /v1/items/{rng.randrange(10**5)} "
            f"{rng.choice((200, 200, 404, 503))} {rng.randrange(900)}ms"
        )
    )


def _records(rng: random.Random) -> str:
    def record(i: int) -> str:
        tags = rng.sample(("new", "paid", "late", "gift", "bulk"), 2)
        name = rng.choice(("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi"))
        facts = {"id": i, "customer": name, "price": rng.randrange(10**4) / 100, "tags": tags}
        return json.dumps({**facts, "address": {"street": rng.randrange(300), "city": "Oslo"}})

    return _lines(record)


def _table(rng: random.Random) -> str:
    head = "year,station,temperature,rain,wind\n"
    return head + _lines(
        lambda i: (
            f"{1900 + i // 12},{rng.choice('ABCDEF')}{rng.randrange(99)},{rng.gauss(9, 8):.1f},"
            f"{rng.expovariate(0.02):.1f},{rng.gauss(20, 6):.2f}"
        )
    )


def _lines(line: Callable[[int], str]) -> str:
    """Lines of about 40 letters or more."""
    return "\n".join(line(i) for i in range(LETTERS // 40))


KINDS: dict[str, Callable[[], str]] = {
    "book": _book,
    "guides": _guides,
    "plays": _plays,
    "code": _code,
    "repeated sentences": _repeated,
    "log": lambda: _log(random.Random(1)),
    "records": lambda: _records(random.Random(2)),
    "table": lambda: _table(random.Random(3)),
}
