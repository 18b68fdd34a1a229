"""Tables and plots from bench/results/*.json: docs/reference/results.md, docs/img/*.png, and what
stands between `<!-- results FILTERS -->` and `<!-- /results -->`, `<!-- numbers FILTERS -->` and
`<!-- /numbers -->` (each row's ratio, in large), or `<!-- scores FILTERS -->` and
`<!-- /scores -->` (quality rows, a line a task and policy, a column a length), in README.md and in
docs.

    python bench/report.py            # write
    python bench/report.py --check    # exit 1 where a page is not what the JSON says

Rows carry a policy as `attnplug.bench.rows.policy_name` spells it, a default by its bare name;
filters may say `min_tokens=0`, which is left out: a row is of the method, whatever its crossover. A
row whose ceiling is above 100% makes both forms exit with 1: then the probe is slower than the
kernel.

README and the plots of speed leave out a row at whose length and batch the policy runs dense of its
own accord (bench/_served.py). In a page's table `(dense by default)` stands beside its length.

A timing whose kernels have changed since is marked `stale` in results.md, when this program writes
the page (bench/stale.py), and ends it with an error if it stands in README or on the docs' first
page; `--check` leaves these marks out of the comparison, as they follow from git.

FILTERS is any number of key=value[,value...], such as `op=dense_decode batch=1 n=8192,131072
heads=28/4`; none means every row, and `*` in a value stands for anything. `op=a | op=b` takes the
rows of either, in that order (`? op=b` those of b where there are any), and `columns=op,ratio`
those columns of a table. `study=NAME` takes the quality rows of that study, else those of none.
`show=diff` gives scores their distance from dense, `across=task` a column for each task instead of
each length, `floor=yes` says in a cell that the model's own attention cannot do its task, and
`image=FILE` gives a picture above the table. Files are pytest-benchmark's JSON (rows in
`extra_info`) or `{"rows": [...]}` with quality rows (`task, model, n, trials, dense, policy, value,
low, high`). Where two rows ask the same question, the later one stands.
Between `<!-- choice pages=docs/methods -->` and `<!-- /choice -->` stands the table of methods,
between `<!-- story images=docs/img -->` and `<!-- /story -->` the three plots of all, between
`<!-- scratch -->` and `<!-- /scratch -->` what certified/scratch.json has, and between
`<!-- bounds -->` and `<!-- /bounds -->` the quantiles in certified/fidelity.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from _calls import CALL_COLUMNS, numbers
from _choice import choice
from _frontier_plot import draw_frontiers
from _plots import (
    COUNTED,
    PEERS,
    bare,
    draw_all,
    duration,
    has_line,
    heads,
    image_name,
    natural,
    quality_name,
    tokens,
)
from _served import is_served, served
from _story_plots import draw_story, pictures
from _tables import Column, constants, folded, scores, table
from stale import History, NoHistoryError, gone

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
TIMING = (
    "op", "case", "n", "batch", "heads_q", "heads_kv", "head_dim", "dtype", "options", "peer"
)  # fmt: skip
QUALITY = ("study", "task", "model", "n", "trials", "policy")
RUN = ("gpu", "torch", "triton", "commit", "date")
BY_DEFAULT = " (dense by default)"  # beside a length
STALE_MARK = re.compile(r"(?<=\]\(#runs\)) (stale|unknown)(?= \|)")
MARKED = re.compile(
    r"(<!-- (results|numbers|scores|scratch|bounds|choice|story)\b(.*?)-->\n).*?(<!-- /\2 -->)",
    re.DOTALL,
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables and plots from bench/results.")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="holds README.md and docs/")
    parser.add_argument("--check", action="store_true", help="write nothing, compare the pages")
    options = parser.parse_args(arguments)
    timing, quality = load(options.results)
    images: list[str] = []
    marks: dict[int, str] = {}
    main_rows = [row for row in quality if not row["study"]]
    if not options.check:
        more = draw_frontiers(quality, timing) | draw_story(timing, quality)
        images = draw_all(served(timing), main_rows, options.root / "docs" / "img", more)
        marks = stale_marks(timing, options.root)
    results = options.root / "docs" / "reference" / "results.md"
    pages = {results: results_page(timing, main_rows, marks)}
    readme = options.root / "README.md"
    for page in [readme, *sorted((options.root / "docs").rglob("*.md"))]:
        if page.exists() and page not in pages:
            shown = served(timing) if page == readme else timing
            pages[page] = fill_markers(page.read_text(), shown, quality, options.results)
    if options.check and results.exists():
        unmarked = STALE_MARK.sub("", results.read_text())
        pages[results] = results.read_text() if unmarked == pages[results] else pages[results]
    stale = [p for p, text in pages.items() if not p.exists() or p.read_text() != text]
    for page in stale:
        if not options.check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pages[page])
        print(f"{'stale' if options.check else 'wrote'} {page.relative_to(options.root)}")
    for image in images:
        print(f"drew docs/img/{image}")
    wrong = [f"above its ceiling: {told}" for told in above_ceiling(timing)]
    for page in (readme, options.root / "docs" / "index.md"):
        if page.exists() and shows_stale(page.read_text(), served(timing), marks):
            wrong.append(f"{page.name} shows rows that are stale: measure again, or take them out")
    print("".join(f"{told}\n" for told in wrong), end="")
    return 1 if wrong or (options.check and stale) else 0


def above_ceiling(timing: Sequence[Row]) -> Iterator[str]:
    """The rows that did more than their probe says the machine can: the probe was slow."""
    for row in timing:
        share = row["ceiling_fraction"]
        if share is not None and share > 1:
            yield f"{row['op']} {row['case']} {row['options']} n={row['n']}: {share:.1%}"


def load(folder: Path) -> tuple[list[Row], list[Row]]:
    """Timing rows and quality rows of all JSON files, each question once, in a fixed order, but for
    those of deleted options."""
    timing: dict[tuple[Any, ...], Row] = {}
    quality: dict[tuple[Any, ...], Row] = {}
    for _, _, row in sorted(_rows(folder), key=lambda entry: entry[:2]):
        if gone(row):
            continue
        if "task" in row:
            row.setdefault("study", "")
            quality[tuple(row[key] for key in QUALITY)] = row
        else:
            timing[question(row)] = row
    return sorted(timing.values(), key=_timing_order), sorted(quality.values(), key=_quality_order)


def question(row: Row, *, peer: bool = True) -> tuple[Any, ...]:
    """What a timing answers, with whom it is compared or without. What its options say of its own
    run (hits, bytes over the link) is no question. A whole call is of all that its policy names."""
    asked = tuple(row[key] for key in TIMING if key != "options" and (peer or key != "peer"))
    policy = row["policy"] if row["case"] == "call" else ""
    return *asked, policy, COUNTED.sub("", row["options"])


def _rows(folder: Path) -> Iterable[tuple[str, str, Row]]:
    """Each row with the moment of its run (or its day) and its file's name."""
    for path in sorted(folder.glob("*.json")):
        moment, rows = rows_of(path)
        for row in rows:
            yield moment or row.get("date", ""), path.name, row


def rows_of(path: Path) -> tuple[str, list[Row]]:
    """A file's moment ("": its rows have days of their own) and its rows as they were written."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"benchmarks", "rows"} & set(content):
        raise SystemExit(f"{path}: neither pytest-benchmark's JSON nor an object with 'rows'")
    rows = [bench["extra_info"] for bench in content.get("benchmarks", ())]
    rows = [row for row in rows if "op" in row] + content.get("rows", [])
    return content.get("datetime", ""), rows


def _timing_order(row: Row) -> tuple[Any, ...]:
    return (
        row["op"], row["case"] != "op", row["case"], _optioned(row), row["heads_q"],
        row["heads_kv"], row["head_dim"], row["dtype"], row["batch"], natural(row["options"]),
        row["n"], row["peer"] or "",
    )  # fmt: skip


def _quality_order(row: Row) -> tuple[Any, ...]:
    return (
        row["model"],
        row["task"],
        row["n"],
        _optioned(row),
        natural(row["policy"]),
        row["trials"],
    )


def _optioned(row: Row) -> bool:
    """Whether the row's policy names options: the default's rows lead a table."""
    return "(" in row.get("policy", "")


def stale_marks(timing: Sequence[Row], root: Path) -> dict[int, str]:
    """The word beside each row (by `id`) that older code measured; none without git's history."""
    try:
        history = History(root)
    except NoHistoryError as error:
        print(f"no row is marked stale: {error}")
        return {}
    words = {"stale": "stale", "unknown commit": "unknown"}
    states = {id(row): history.state(row).word for row in timing}
    return {row: words[word] for row, word in states.items() if word in words}


def shows_stale(text: str, timing: Sequence[Row], marks: dict[int, str]) -> bool:
    """Whether a page's tables of timings would be others without the rows that are marked."""
    fresh = [row for row in timing if id(row) not in marks]
    try:
        return fill_markers(text, timing, []) != fill_markers(text, fresh, [])
    except SystemExit:  # a table of which nothing is left
        return True


def results_page(
    timing: Sequence[Row], quality: Sequence[Row], marks: dict[int, str] | None = None
) -> str:
    """The whole of docs/reference/results.md; `marks` has the word beside a row's run, by `id`."""
    marks = marks or {}
    runs = _runs(timing)
    parts = [
        "---\nsearch:\n  exclude: true\n---",  # its tables would bury the pages that explain
        "# Results",
        "Every timing and every score that is committed, written by `python bench/report.py` from\n"
        "`bench/results/*.json`.\n"
        "Times are medians of device time (20th to 80th percentile in brackets). The ratio is\n"
        "the peer's time over ours in the same run: above 1 is faster than the peer. The ceiling\n"
        "is the fraction reached of the measured memory bandwidth or matrix rate, whichever is\n"
        "nearer. Beside a run, `stale` says that the kernels which were timed or the policy's\n"
        "defaults have changed since, or may have (`bench/stale.py`), and `unknown` that the\n"
        "repository lacks its commit; both as of the day this was written.\n"
        "Beside a length, `dense by default` says that the policy runs dense there of its own\n"
        "accord. Most of these rows ran it with `min_tokens=0`; the plots leave them out.",
    ]
    for (op, case), each in itertools.groupby(timing, key=lambda row: (row["op"], row["case"])):
        rows = list(each)
        parts.append(f"## {op}" + ("" if case == "op" else f", {case}"))
        if has_line(served(rows)):
            parts.append(f"![{op}: time and ratio against tokens](../img/{image_name(op, case)})")
        run = ("run", lambda row: f"[{runs[_run(row)]}](#runs) {marks.get(id(row), '')}".rstrip())
        told = {"op", "case"}  # the heading says these
        parts += folded(rows, [c for c in [*TIMING_COLUMNS, run] if c[0] not in told], "rows")
    for model, each in itertools.groupby(quality, key=lambda row: row["model"]):
        parts += [f"## Quality, {model}", f"![scores beside dense](../img/{quality_name(model)})"]
        columns = [c for c in QUALITY_COLUMNS if c[0] != "model"]
        for task, scored in itertools.groupby(each, key=lambda row: row["task"]):
            parts += folded(list(scored), columns, f"rows of {task}")
    if runs:
        named = [dict(zip(RUN, run, strict=True), run=number) for run, number in runs.items()]
        columns = [(key, lambda row, key=key: str(row[key])) for key in ("run", *RUN)]
        parts += ["## Runs", table(named, columns)]
    if not timing and not quality:
        parts.append("Nothing has been measured yet.")
    return "\n\n".join(parts) + "\n"


def _run(row: Row) -> tuple[str, ...]:
    return tuple(row[key] for key in RUN)


def _runs(timing: Sequence[Row]) -> dict[tuple[str, ...], int]:
    """The machines, versions and commits of the rows, numbered from the newest."""
    runs = sorted({_run(row) for row in timing}, key=lambda run: (run[-1], run), reverse=True)
    return {run: number for number, run in enumerate(runs, 1)}


def fill_markers(
    text: str, timing: Sequence[Row], quality: Sequence[Row], folder: Path | None = None
) -> str:
    """Replace what stands between each pair of markers by the table its filters ask for."""

    def fill(match: re.Match[str]) -> str:
        if match[2] in CERTIFIED and folder is not None:
            name, key, columns = CERTIFIED[match[2]]
            rows = json.loads((folder / "certified" / name).read_text())
            rows = [row for row in rows if key in row]
            return f"{match[1]}\n{table(rows, columns)}\n\n{match[4]}"
        if match[2] in ("choice", "story"):
            make, key = {"choice": (choice, "pages"), "story": (pictures, "images")}[match[2]]
            (where,) = filters(match[3])[key]
            return f"{match[1]}\n{make(timing, quality, where)}\n\n{match[4]}"
        asked = [term.strip() for term in match[3].split(" | ")]
        terms = [filters(term.removeprefix("?")) for term in asked]
        pivot = match[2] == "scores"
        (show,) = terms[0].pop("show", ["value"]) if pivot else ("",)
        (across,) = terms[0].pop("across", ["n"]) if pivot else ("",)
        (floor,) = terms[0].pop("floor", ["no"]) if pivot else ("",)
        (image,) = terms[0].pop("image", [""])
        titles = terms[0].pop("columns", [])
        rows, columns = (
            (quality, QUALITY_COLUMNS) if pivot or "task" in terms[0] else (timing, TIMING_COLUMNS)
        )
        if rows is quality:  # a study's rows stand in its own tables
            terms = [{"study": [""]} | wanted for wanted in terms]
        found = [[row for row in rows if _passes(row, wanted)] for wanted in terms]
        needed = [rows for term, rows in zip(asked, found, strict=True) if term[:1] != "?"]
        if any(found) and not all(needed):
            raise SystemExit(f"<!-- results{match[3]}-->: a term has no rows")
        rows = list(itertools.chain.from_iterable(found))
        if not rows:
            body = "Not measured yet."
        elif pivot:
            body = scores(rows, show, across, floor == "yes")
        elif match[2] == "numbers":
            body = numbers(rows, TIMING_COLUMNS)
        else:
            rows = hardest(rows) if columns is TIMING_COLUMNS else rows
            body = _whole(rows, _titled(titles, columns), columns)
        if image and rows:
            body = f"![{Path(image).stem}]({image})\n\n{body}"
        return f"{match[1]}\n{body}\n\n{match[4]}"

    return MARKED.sub(fill, text)


def hardest(rows: Sequence[Row]) -> list[Row]:
    """Of each step the row beside the peer that is hardest to beat: a step has one time on a page.
    results.md has the others."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = question(row, peer=False)
        other = best.get(key)
        if other is None or (row["ratio"] or math.inf) < (other["ratio"] or math.inf):
            best[key] = row
    kept = {id(row) for row in best.values()}
    return [row for row in rows if id(row) in kept]


def filters(text: str) -> dict[str, list[str]]:
    """`op=momo n=8192,32768` as {"op": ["momo"], "n": ["8192", "32768"]}."""
    found = {}
    for term in text.split():
        key, equals, values = term.partition("=")
        if not equals:
            raise SystemExit(f"<!-- results{text}-->: {term!r} is not key=value")
        found[key] = [bare(value) if key == "policy" else value for value in values.split(",")]
    return found


def _passes(row: Row, wanted: dict[str, list[str]]) -> bool:
    # an op alone has no policy
    values = {"policy": ""} | row | ({"heads": heads(row)} if "heads_q" in row else {})
    unknown = set(wanted) - set(values)
    if unknown:
        raise SystemExit(f"<!-- results -->: rows have no {', '.join(sorted(unknown))}")
    # options hold commas and spaces of their own: compare them without
    return all(
        any(fnmatchcase(re.sub(r"[ ,]+", ";", str(values[key])), pattern) for pattern in patterns)
        for key, patterns in wanted.items()
    )


def _titled(titles: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    """The columns of these titles, in their order."""
    known = dict([*columns, *CALL_COLUMNS])
    unknown = set(titles) - set(known)
    if unknown:
        raise SystemExit(f"<!-- results -->: no column {', '.join(sorted(unknown))}")
    return [(title, known[title]) for title in titles]


def _whole(rows: Sequence[Row], asked: Sequence[Column], known: Sequence[Column]) -> str:
    """A page's table: the columns that were asked for, or else every column in which rows differ,
    under a line of what all rows share."""
    if asked:
        return table(rows, asked)
    # Of a peer's time the ratio tells; beside other runs of the same peer it would be another.
    shared, columns = constants(rows, [c for c in known if c[0] != "peer's time"])
    return f"{shared}\n\n{table(rows, columns)}" if shared else table(rows, columns)


def _interval(median: str, low: str, high: str) -> str:
    """`7.5 us (6.75 to 9)`: the unit once, where all three have it."""
    unit = median.partition(" ")[2]
    if all(text.partition(" ")[2] == unit for text in (low, high)):
        low, high = (text.partition(" ")[0] for text in (low, high))
    return f"{median} ({low} to {high})"


def _time(row: Row) -> str:
    return _interval(*(duration(row[key]) for key in ("p50_us", "p20_us", "p80_us")))


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    text = f"{row['ratio']:.2f}x"
    return f"**{text}**" if row["ratio"] >= 1 else text


def _ceiling(row: Row) -> str:
    share = row["ceiling_fraction"]
    return "" if share is None else f"{share:.0%}"


TIMING_COLUMNS: list[Column] = [
    ("op", lambda row: f"`{row['op']}`"),
    ("case", lambda row: "" if row["case"] == "op" else row["case"]),
    ("tokens", lambda row: tokens(row["n"]) + ("" if is_served(row) else BY_DEFAULT)),
    ("ratio", _ratio),
    ("time", _time),
    ("peer", lambda row: PEERS.get(row["peer"], row["peer"] or "")),
    ("peer's time", lambda row: duration(row["peer_p50_us"]) if row["peer"] else ""),
    ("policy", lambda row: f"`{row['policy']}`" if row.get("policy") else ""),
    ("options", lambda row: row["options"]),
    ("batch", lambda row: str(row["batch"])),
    ("heads", heads),
    ("D", lambda row: str(row["head_dim"])),
    ("dtype", lambda row: row["dtype"]),
    ("GPU", lambda row: re.sub(r".*?([A-Z]+\d+).*", r"\1", row["gpu"])),
    ("ceiling", _ceiling),
]
QUALITY_COLUMNS: list[Column] = [
    ("task", lambda row: row["task"]),
    ("model", lambda row: row["model"]),
    ("tokens", lambda row: tokens(row["n"])),
    ("trials", lambda row: str(row["trials"])),
    ("policy", lambda row: f"`{row['policy']}`"),
    ("score (95% interval)", lambda r: f"{r['value']:.3g} ({r['low']:.3g} to {r['high']:.3g})"),
    ("dense", lambda row: f"{row['dense']:.3g}"),
]
# results/certified/scratch.json; slots that exceed what there is to hold are no larger share
SCRATCH_COLUMNS: list[Column] = [
    ("block", lambda row: str(row["block"])),
    ("slots", lambda row: str(row["scratch"])),
    ("of the context", lambda row: f"{min(1.0, row['scratch_share']):.2f}"),
    ("read exactly", lambda row: f"{row['items_a_step']:.1f}"),
    ("hit rate", lambda row: f"{row['hit_rate']:.3f}"),
    ("MiB a step", lambda row: f"{row['link_bytes_a_step'] / 2**20:.2f}"),
]
QUANTILES = ("p5", "p50", "p95", "max")


def _quantiles(key: str) -> Column:
    title = key.replace("_over_", " / ")
    return title, lambda row: ", ".join(f"{row[key][name]:.2g}" for name in QUANTILES)


# bench/certified_fidelity.py
BOUND_COLUMNS: list[Column] = [
    ("policy", lambda row: f"`{row['policy']}`"),
    *map(_quantiles, ("E_key", "E_val", "E_round", "bound_over_output", "error_over_output")),
    ("recomputed", lambda row: f"{row['recomputed']:.2g}"),
    ("violated", lambda row: f"{row['violated']} of {row['head_steps']}"),
]
# A marker's file, what its rows have where others in it do not, and the table of them.
CERTIFIED = {
    "scratch": ("scratch.json", "scratch", SCRATCH_COLUMNS),
    "bounds": ("fidelity.json", "E_key", BOUND_COLUMNS),
}

if __name__ == "__main__":
    sys.exit(main())
