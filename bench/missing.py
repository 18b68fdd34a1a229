"""Which rows the docs need and bench/results lacks, and which of them older code measured.

    python bench/missing.py            # a line a cell; exits 1 while there is one

Quality: the default of every method on the tasks and measures of the default suite, with its number
of prompts, for both small models at the suite's lengths that fit them. Timing: one layer's step of
every default, momo's prefill, every op alone that a method calls, time to first token and decode of
whole models. Masks: momo's rivals. Comparisons of options: those of bench/studies.py. A cell is

    missing     no row answers it
    few         its row has fewer prompts than the suite asks
    stale       code that the row depends on has changed since (bench/stale.py)
    no commit, dirty, unknown commit    what measured it cannot be said

Without git's history only `missing` and `few` are told."""

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _plots import tokens
from _results import row_policy
from _tables import beyond_model
from report import load
from stale import History, NoHistoryError
from studies import BOTH, STUDIES, Options

from attnplug.eval.measure import DECODES
from attnplug.eval.runner import STOCK
from attnplug.eval.suite import SUITES, all_policies
from attnplug.policies import methods, parse

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
SUITE = SUITES["default"]
# a measure's rows have names of their own
MEASURED = {"captured-mass": ("captured-mass", "captured-mass-of-oracle")} | {
    name: tuple(
        measure.prefix + value
        for value in ("agreement", "kl", "total-variation", "decode-perplexity")
    )
    for name, measure in DECODES.items()
}
MILLION = 1 << 20
STEPS = (8192, 32768, 131072, 524288, MILLION)
# what is asked of timings: op, case, lengths
TIMED: tuple[tuple[str, str, Sequence[int]], ...] = (
    *((name, "step", STEPS) for name in ("dense_decode", "gather", "gvr", "sketch", "certified")),
    ("momo", "op", (8192, 16384, 32768, 131072, 524288, MILLION)),
    ("momo", "e2e-ttft", (32768, 131072, 262144, 524288, MILLION)),
    ("dense_decode", "op", (8192, 32768, 131072, 524288, MILLION)),
    ("dense_decode", "e2e-decode", (8192, 131072)),
    ("gather", "e2e-decode", (8192, 32768, 131072, 524288, MILLION)),
    *((name, "e2e-decode", (32768, 131072, MILLION)) for name in ("gvr", "sketch")),
    ("certified", "e2e-decode", (131072,)),
    ("tiered", "e2e-decode", (MILLION,)),
    ("block_bounds", "op", (32768, 131072, MILLION)),
    ("gather_attention", "op", (32768, 131072, MILLION)),
    ("quantize_kv", "op", (32768, 131072, 524288)),
    ("stream_edges", "op", (32768, 131072)),
    ("stream_mask", "op", (131072, MILLION)),
    *(
        (name, "op", (32768, 131072, MILLION))
        for name in ("score_tokens", "topk", "gather_tokens_attention")
    ),
    *(
        (name, "op", (32768, 131072, 524288))
        for name in ("measure_blocks", "block_sparse_attention", "merge_block_rows")
    ),
    ("query_sparse_attention", "op", (32768, 131072)),
    ("delta_correct", "op", (32768, 131072, 524288)),
)
# random keys have no block that stands out: certified's default would recompute every head
OTHER_OPTIONS = {("certified", "e2e-decode")}
MASKS = ("mean-pooling", "vertical-slash")


class Cell(NamedTuple):
    """What is asked, and the least number of prompts, 0 of a timing."""

    what: str
    case: str
    where: str
    trials: int
    answers: Callable[[Row], bool]
    # the rows of the model's own attention: below FLOOR there is nothing to ask
    stock: Callable[[Row], bool] | None = None


def main(results: Path = ROOT / "bench" / "results", root: Path = ROOT) -> int:
    timing, quality = load(results)
    try:
        history: History | None = History(root)
    except NoHistoryError as error:
        print(f"What older code measured is not told: {error}.")
        history = None
    found = [(cell, word) for cell, word in judged(timing, quality, history) if word]

    def place(each: tuple[Cell, str]) -> tuple[str, str, str]:
        return each[1], each[0].what, each[0].where

    for (word, what, where), group in itertools.groupby(sorted(found, key=place), key=place):
        print(f"{word:15} {what:24} {where:14} {', '.join(cell.case for cell, _ in group)}")
    counts = Counter(word for _, word in found)
    told = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    print(f"\n{told or 'nothing is missing'}")
    return 1 if found else 0


def judged(
    timing: Sequence[Row], quality: Sequence[Row], history: History | None
) -> Iterator[tuple[Cell, str]]:
    """Each cell, and what is wrong with the best row that answers it: "" where nothing is."""
    for cell in cells():
        rows = [row for row in (quality if cell.trials else timing) if cell.answers(row)]
        enough = [row for row in rows if row.get("trials", 0) >= cell.trials]
        if cell.stock and any(beyond_model(row) for row in quality if cell.stock(row)):
            yield cell, ""
        elif not rows:
            yield cell, "missing"
        elif not enough:
            yield cell, "few"
        else:
            words = [history.state(row).word if history else "" for row in enough]
            yield cell, "" if "" in words else words[-1]


def cells() -> Iterator[Cell]:
    """All that is asked."""
    for policy, task, model, n in itertools.product(
        map(row_policy, all_policies()), SUITE.tasks, BOTH, SUITE.lengths
    ):
        if n > BOTH[model] or not applies(policy, task):
            continue
        for name in MEASURED.get(task, (task,)):
            asked = {"policy": policy, "task": name, "model": model, "n": n}
            trials = SUITE.fewer.get(task, SUITE.trials)
            yield Cell(policy, f"{name} {tokens(n)}", model, trials, of_no_study(asked))
    for op, case, lengths in TIMED:
        for n in lengths:
            yield Cell(op, tokens(n), case, 0, of_default(op, case, n))
    for mask, (model, n) in itertools.product(MASKS, BOTH.items()):
        yield Cell(mask, tokens(n), model, 1, of_mask(mask, model, n))
    for name, options in STUDIES.items():
        yield from cells_of_study(name, options)


def cells_of_study(name: str, options: Options) -> Iterator[Cell]:
    """What a comparison of options asks. Its tasks that a model cannot do are not asked of
    policies."""
    named = str if options.as_asked else row_policy
    for policy, task, model in itertools.product(
        map(named, options.policies), options.tasks, options.models
    ):
        for n in options.lengths_of(model):
            measure = MEASURED.get(task, (task,))[0]
            about = {"study": name, "task": measure, "model": model, "n": n}
            case = f"{policy} {task} {tokens(n)}"
            trials = options.trials or SUITE.fewer.get(task, SUITE.trials)
            answers = asking(about | {"policy": policy})
            stock = asking(about | {"policy": STOCK})
            yield Cell(f"study {name}", case, model, trials, answers, stock)


@functools.cache
def applies(policy: str, task: str) -> bool:
    """Whether the suite has such a cell: a block mask is a prefill's, a decode's steps are a
    decode's, and dense is what all are beside."""
    if policy == "dense":
        return False
    served = parse(policy)
    prefills = policy.partition("(")[0] in methods() and served.prefill.name != "dense"
    if task == "captured-mass":
        return prefills and hasattr(served.prefill, "select")
    return True


def asking(wanted: dict[str, Any]) -> Callable[[Row], bool]:
    return lambda row: all(row.get(key) == value for key, value in wanted.items())


def of_no_study(wanted: dict[str, Any]) -> Callable[[Row], bool]:
    """A comparison's rows may hold a default, too, and stand in tables of their own."""
    return lambda row: not row.get("study") and asking(wanted)(row)


def of_default(op: str, case: str, n: int) -> Callable[[Row], bool]:
    """A method's timing is its default's."""
    own = op in methods() and (op, case) not in OTHER_OPTIONS
    return asking({"op": op, "case": case, "n": n} | ({"policy": op} if own else {}))


def of_mask(mask: str, model: str, n: int) -> Callable[[Row], bool]:
    place = {"study": "masks", "model": model, "n": n}
    return lambda row: asking(place)(row) and row["policy"].startswith(mask)


if __name__ == "__main__":
    sys.exit(main())
