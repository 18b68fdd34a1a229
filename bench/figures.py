"""Holds the figures in README's and docs' sentences against bench/results.

    python bench/figures.py             # exit 1 where a figure is in no row
    python bench/figures.py --quoted    # what is allowed without a row, and why

A figure is a time, a ratio, a rate, a share, a difference in nats, a KL or perplexity, any number
of two decimals or more, or a count ("two of 30"), in digits or words ("half a percent"). A row must
have it, rounded as written. Which rows may: those of an op or policy that the paragraph names, else
the page's own; of the lengths and the models that it names; for shares, decimals and counts, of the
task that it names, of the ceiling or of the hits. So a sentence says which configuration it is, or
its figure fails.

Tables between report.py's markers come from rows already. A table typed by hand fails if a cell
is a decimal number, or one with a unit. Between `<!-- quoted REASON -->` and `<!-- /quoted -->`
stands what no row has: another's figures, a definition, an output. A region that allows nothing
fails too. Pages of docs/log are dated history, and free.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stale import gone, read_rows

from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
GENERATED = re.compile(
    r"<!-- (results|numbers|scores|scratch|bounds|choice|story|op|capabilities)\b(.*?)-->"
    r".*?<!-- /\1 -->",
    re.DOTALL,
)
QUOTED = re.compile(r"<!-- quoted\b(.*?)-->(.*?)<!-- /quoted -->", re.DOTALL)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARAGRAPH = re.compile(r"(?:(?!\n\s*\n|\n\s*[-*|#]|\n\s*\d+\. ).)+", re.DOTALL)

WORDS = dict(zip(
    "one two three four five six seven eight nine ten eleven twelve twenty fifty hundred".split(),
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 50, 100), strict=True,
)) | {"half a": 0.5, "half an": 0.5}  # fmt: skip
SPELLED = "|".join(rf"{word}\b" for word in sorted(WORDS, reverse=True))
NUMBER = rf"(?<![\w.,/^-])(?P<number>\d[\d,]*(?:\.\d+)?|{SPELLED})"
SECONDS = {
    "us": 1e-6, "µs": 1e-6, "microsecond": 1e-6, "ms": 1e-3, "millisecond": 1e-3, "s": 1.0,
    "second": 1.0, "minute": 60.0, "hour": 3600.0,
}  # fmt: skip
SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# a kind of figure and what it looks like; `unit` scales the number
KINDS = {
    "time": NUMBER + r"[\s-]*(?P<unit>[uµm]?s(?!\w)|(?:micro|milli)?second(?=s?\b)|minute|hour)",
    "ratio": NUMBER
    + r"(?:\s?[x×](?!\w)|[\s-]+times (?:faster|slower|as (?:fast|slow|much|long)\b))",
    "twice": r"(?P<number>\b[Tt]wice) (?:faster|slower|as (?:fast|slow|much|long)\b)",
    "rate": NUMBER + r"\s?(?P<unit>[KMGT])(?:i?B|FLOP|FLOPs)(?:/s|S| a second| per second)",
    "tokens": NUMBER + r"\s?tok(?:en)?s?\s?(?:/|per|a)\s?s(?:econd)?\b",
    "share": NUMBER + r"(?:\s?%|\s+(?:percent|per cent)\b)",
    "score": NUMBER + r" nats?\b",
    "named score": r"\b(?:KL|kl|[Pp]erplexity)`?(?: divergence)?(?: is| was| of|:| =)* (?P<number>"
    r"\d+\.\d+)",
    "count": NUMBER
    + r" (?:(?:needle|prompt|answer|trial|window)s? )?of (?P<unit>\d+)(?!\w|[.,]\d)",
    "event": NUMBER + r" (?:needle|prompt|answer|trial)s? events?\b",
    # what no other kind has: a score, a perplexity for another, a share of the best mask
    "decimal": r"(?<![\w.,/^-])(?P<number>\d{1,3}\.\d{2,})(?!\w|\.\w)",
}
FIGURES = {kind: re.compile(text.replace(" ", r"\s+")) for kind, text in KINDS.items()}
# a cell of a table that is a decimal number, or a number with a unit
CELL = re.compile(r"\**[<>~+-]?(?:\d[\d,]*\.\d+(?: ?\S+)?|\d[\d,]* ?(?:[uµm]?s|[x×%]|[GT]B/s))\**")
# numbers that nobody measured: versions, and the confidence of all intervals
UNMEASURED = re.compile(
    r"(?:\b(?:C?Python|PyTorch|torch|Triton|transformers|CUDA|vLLM)\b|>=)[ `]*\d[\d.]*"
    r"(?: (?:to|or|and) \d[\d.]*)*|\bconfidence 0\.95\b"
)
MODELS = {"SmolLM2": "smollm2-135m", "Gemma": "gemma3-270m"}
SCORES = (
    "kl",
    "total-variation",
    "perplexity",
    "decode-perplexity",
    "output-error",
    "long-kl",
    "long-decode-perplexity",
    "topic-kl",
    "topic-decode-perplexity",
)


class Figure(NamedTuple):
    """A figure where it stands: `low` to `high` is what rounds to it."""

    page: Path
    line: int
    kind: str
    text: str
    low: float
    high: float
    total: int | None
    paragraph: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Figures in sentences, held against rows.")
    parser.add_argument("--root", type=Path, default=ROOT, help="holds README.md, docs/ and bench/")
    parser.add_argument("--quoted", action="store_true", help="list what needs no row, and why")
    options = parser.parse_args(arguments)
    rows = list(load(options.root / "bench" / "results"))
    found = []
    for page in pages(options.root):
        name, text = page.relative_to(options.root), page.read_text()
        if options.quoted:
            for match in QUOTED.finditer(text):
                print(f"{name}:{_line(text, match.start())}: {' '.join(match[1].split())}")
            continue
        found += [f"{name}:{told}" for told in problems(page, text, rows)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def pages(root: Path) -> list[Path]:
    """README and the pages of docs, without the log and what report.py writes whole."""
    docs = root / "docs"
    free = {docs / "reference" / "results.md"}
    return [
        page
        for page in (root / "README.md", *sorted(docs.rglob("*.md")))
        if page.exists() and page not in free and page.parent != docs / "log"
    ]


def load(folder: Path) -> Iterator[Row]:
    """Every row of every file but those of deleted options, `study` set."""
    for file, row in read_rows(folder):
        if not gone(row):
            yield {"study": file.parts[0] if file.parent != Path() else ""} | row


def problems(page: Path, text: str, rows: Sequence[Row]) -> Iterator[str]:
    """`line: what is wrong`, for a page of this text."""
    for match in QUOTED.finditer(text):
        line = _line(text, match.start())
        if not match[1].strip():
            yield f"{line}: quoted, and no reason given"
        if not any(_figures(page, match[2])) and not any(map(_typed, match[2].splitlines())):
            yield f"{line}: quoted ({match[1].strip()}), but there is no figure"
    text = _blanked(QUOTED, _blanked(GENERATED, text))
    for figure in _figures(page, text):
        if not any(supports(row, figure) for row in rows if _speaks_of(row, figure)):
            yield f"{figure.line}: {figure.text!r} is in no row of what its paragraph names"
    for number, line in enumerate(_blanked(FENCED, text).splitlines(), 1):
        if _typed(line):
            yield f"{number}: a table typed by hand: {line.strip()[:60]}"


def _typed(line: str) -> bool:
    """Whether this is a line of a table with a measured number in a cell of its own."""
    cells = re.sub(r"`[^`]*`", "", line).split("|")
    return line.lstrip().startswith("|") and any(CELL.fullmatch(cell.strip()) for cell in cells)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """The text with each match's characters but line ends replaced by spaces."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _figures(page: Path, text: str) -> Iterator[Figure]:
    """Figures outside of code; what a fenced text shows counts."""
    text = FENCED.sub(
        lambda match: match[0] if match[1] == "text" else re.sub(r"[^\n]", " ", match[0]), text
    )
    for paragraph in PARAGRAPH.finditer(text):
        told = re.sub(r"`[^`\n]*\d[^`\n]*`", lambda code: " " * len(code[0]), paragraph[0])
        told = _blanked(UNMEASURED, told)
        seen = set()
        for kind, pattern in FIGURES.items():
            for match in pattern.finditer(told):
                if kind != "decimal" or match.start("number") not in seen:
                    yield _figure(page, text, paragraph, kind, match)
                seen.add(match.start("number"))


def _figure(
    page: Path, text: str, paragraph: re.Match[str], kind: str, match: re.Match[str]
) -> Figure:
    written = " ".join(match["number"].lower().split())
    unit = match.groupdict().get("unit") or ""
    digits = len(written.partition(".")[2])
    value = 2.0 if written == "twice" else WORDS.get(written)
    value = float(written.replace(",", "")) if value is None else float(value)
    half = 0.5 * 10.0**-digits if written[0].isdigit() else 0.1 * value
    scale = {"time": SECONDS.get(unit, 1.0), "rate": SCALES.get(unit, 1.0), "share": 0.01}
    low, high = ((value + side) * scale.get(kind, 1.0) for side in (-half, half))
    kind = {"twice": "ratio", "named score": "score", "event": "count"}.get(kind, kind)
    total = int(unit) if kind == "count" and unit else None
    line = _line(text, paragraph.start() + match.start())
    said = " ".join(match[0].split())
    return Figure(page, line, kind, said, low * (1 - 1e-9), high * (1 + 1e-9), total, paragraph[0])


def _speaks_of(row: Row, figure: Figure) -> bool:
    """Whether the paragraph (or its page) speaks of this row's method, length and model."""
    told = figure.paragraph
    subjects = {row.get("op"), row["study"], *re.findall(r"\w+", row.get("policy", ""))} - {
        "",
        None,
    }
    named = {word for word in re.findall(r"\w+", told) if word in KNOWN}
    if not named - REFERENCES:
        named |= {figure.page.stem.partition("-")[0]}
    if not subjects & named:
        return False
    sizes = {int(a.replace(",", "")) << b for a, b in _sizes(told)}
    if sizes and row.get("n") not in sizes:
        return False
    models = {model for name, model in MODELS.items() if name in told}
    return not models or row.get("model") in models


REFERENCES = {"dense", "stock"}  # what any page's method is held against
KNOWN = frozenset(
    "dense dense_decode momo gather gvr sketch certified stream stream_mask tiered topk "
    "select_blocks measure_blocks score_tokens top_tokens gather_tokens_attention "
    "query_sparse_attention block_sparse_attention merge_block_rows delta_correct stock "
    "random_blocks".split()
)


def _sizes(text: str) -> Iterator[tuple[str, int]]:
    """Lengths as (digits, shift): 32K, 1M, 32,768 tokens."""
    for number, letter in re.findall(r"\b(\d+)([KM])\b", text):
        yield number, 10 if letter == "K" else 20
    for number in re.findall(r"\b(\d[\d,]+)(?= (?:prompt )?tokens\b(?! per| a s))", text):
        yield number, 0


def supports(row: Row, figure: Figure) -> bool:
    """Whether the row has a value of the figure's kind that rounds to it."""
    if figure.kind == "count":
        return _counts(row, figure)
    return any(figure.low <= value <= figure.high for value in values(row, figure))


def values(row: Row, figure: Figure) -> Iterator[float]:
    """The numbers of a row that a figure of this kind may quote."""
    told, seconds = figure.paragraph, (row.get("p50_us") or 0) * 1e-6
    if figure.kind == "time":
        yield from (row[key] * 1e-6 for key in row if key.endswith("_us") and row[key] is not None)
    elif figure.kind == "ratio" and row.get("ratio"):
        yield row["ratio"]
    elif figure.kind == "rate" and seconds:
        yield from (row[key] / seconds for key in ("bytes", "flops") if row.get(key))
        yield from (float(rate) * 1e9 for rate in re.findall(r"([\d.]+) GB/s", row["options"]))
    elif figure.kind == "tokens" and seconds and row.get("case") == "e2e-decode":
        yield row["batch"] / seconds
    elif figure.kind == "share" and "op" in row:
        if re.search("ceiling|bandwidth", told) and row["ceiling_fraction"] is not None:
            yield row["ceiling_fraction"]
        if "hit" in told:
            yield from (float(share) for share in re.findall(r"hits ([\d.]+)", row["options"]))
    elif "task" in row and _asks(row, figure):
        keys = ("value", "dense", "diff")
        if figure.kind != "decimal":  # an interval's ends are so many that any decimal is one
            keys += ("low", "high", "diff_low", "diff_high")
        yield from (abs(row[key]) for key in keys if row.get(key) is not None)


def _asks(row: Row, figure: Figure) -> bool:
    """Whether a quality row is of what the figure quotes: the paragraph's tasks, for a decimal of
    any task where it names none."""
    if figure.kind == "score":
        return row["task"] in SCORES
    named = _tasks(figure.paragraph) & ALL_TASKS
    return row["task"] in named | SPOKEN if named else figure.kind == "decimal"


SPOKEN = frozenset(SCORES) | {"captured-mass-of-oracle"}  # a sentence names these in words
ALL_TASKS = frozenset([*TASKS, *MEASURES, "captured-attention", "output-error"])


def _tasks(text: str) -> set[str]:
    """Tasks that a paragraph names, by their name or in words; "needle" is both kinds of text."""
    words = " ".join(text.lower().split())
    found = {task for task in re.findall(r"[\w]+(?:-\w+)+", text)}
    found |= {task for task in ALL_TASKS if task.replace("-", " ") in words}
    if "keys" in words:
        found.add("multi-key")
    return found | ({"needle-noise", "needle-prose"} if "needle" in words else set())


def _counts(row: Row, figure: Figure) -> bool:
    """Whether a row found so many (of so many), or asked so many."""
    if "trials" not in row:
        return False
    if figure.total is None:
        return figure.low <= row["trials"] <= figure.high
    found = (row["value"] * row["trials"], row.get("dense_only"), row.get("policy_only"))
    asked = {row["trials"], round(row["dense"] * row["trials"])}  # or those that dense solves
    same = figure.total in asked and row["task"] in _tasks(figure.paragraph)
    return same and any(figure.low <= one <= figure.high for one in found if one is not None)


if __name__ == "__main__":
    sys.exit(main())
