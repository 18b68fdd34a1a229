"""Rows of a study: one for each task, length and policy, dense beside it, from paired samples."""

import datetime
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attnplug.eval.measure import DECODES
from attnplug.eval.records import Record
from attnplug.eval.runner import STOCK
from attnplug.eval.stats import Interval, bootstrap_mean, mcnemar, paired_difference, wilson

Row = dict[str, Any]
MACHINE = ("gpu", "torch", "triton", "transformers")
Pair = tuple[Record, Record]
# What a measure of fidelity is for dense itself.
DENSE_VALUE = {
    "agreement": 1.0,
    "agreement-at-margin": 1.0,
    "kl": 0.0,
    "total-variation": 0.0,
    "captured-mass": 1.0,
    "captured-mass-of-oracle": 1.0,
}


def make_rows(records: Sequence[Record]) -> list[Row]:
    """The rows of a study's records, in the records' order.

    Every policy is compared on the samples that it and dense both have. A task's row also stands
    for dense itself (policy "stock"): which tasks the model can do at all."""
    cells: dict[tuple[Any, ...], dict[Any, Record]] = defaultdict(dict)
    for record in records:
        cells[record["task"], record["n"], record["policy"]][record["trial"]] = record
    rows = []
    for (task, n, policy), found in cells.items():
        stock = cells.get((task, n, STOCK), {})
        pairs = [(stock[trial], found[trial]) for trial in sorted(found) if trial in stock]
        if not pairs:
            continue
        if "score" in pairs[0][1]:
            rows.append(_base(pairs[0][1], task, len(pairs)) | _task_values(pairs))
        elif task == "perplexity":
            rows.append(_base(pairs[0][1], task, len(pairs)) | _perplexity(pairs))
        else:
            prefix = DECODES[task].prefix if task in DECODES else ""
            if policy != STOCK:
                rows += _measured([record for _, record in pairs], prefix)
            pairs = [pair for pair in pairs if all("nll" in side["values"] for side in pair)]
            if pairs:
                name = f"{prefix}decode-perplexity"
                rows.append(_base(pairs[0][1], name, len(pairs)) | _perplexity(pairs))
    return rows


def _base(record: Record, task: str, trials: int) -> Row:
    kept = ("seed", "template", "tokenizer", "batch", "dtype", *MACHINE)
    return {
        "task": task,
        "model": record["model"],
        "n": record["n"],
        "trials": trials,
        "policy": record["policy"],
        **{key: record[key] for key in kept},
        **{key: record[key] for key in ("served", "keys", "bytes") if key in record},
        **_commit(record),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _commit(record: Record) -> Row:
    """Records of before 2026-11-23 do not say what code made them."""
    return {"commit": record["commit"]} if "commit" in record else {}


def _task_values(pairs: Sequence[Pair]) -> Row:
    """Scores are shares of answers; `solved` counts samples with every answer, and McNemar's test
    is on these."""
    dense, policy = ([pair[side]["score"] for pair in pairs] for side in (0, 1))
    value, base, diff = wilson(policy), wilson(dense), paired_difference(dense, policy)
    solved = [[score == 1 for score in scores] for scores in (dense, policy)]
    test = mcnemar(*solved)
    return {
        "dense": base.value,
        "dense_low": base.low,
        "dense_high": base.high,
        **_interval(value),
        **_difference(diff),
        "dense_solved": fmean(solved[0]),
        "solved": fmean(solved[1]),
        **test._asdict(),
        **_accepted([record for _, record in pairs]),
        "depths": depth_counts([record for _, record in pairs]),
    }


def _accepted(records: Sequence[Record]) -> Row:
    """The share of a method's drafts that dense accepted, where it decodes in rounds of drafts."""
    found = [r["served"]["accepted"] for r in records if "accepted" in r.get("served", {})]
    return {"accepted": fmean(found)} if found else {}


def depth_counts(records: Sequence[Record]) -> dict[str, list[int]]:
    """Tenth of the prompt ("0.0" to "0.9") -> answers found there, and answers asked for there."""
    counts: dict[str, list[int]] = {}
    for record in records:
        for depth, found in zip(record["depths"], record["found"], strict=False):
            bin_ = counts.setdefault(f"{min(9, int(depth * 10 + 1e-9)) / 10:.1f}", [0, 0])
            bin_[0] += found
            bin_[1] += 1
    return dict(sorted(counts.items()))


def _perplexity(pairs: Sequence[Pair]) -> Row:
    """Perplexity is exp of the mean loss; the interval is that of the ratio to dense, on dense's
    value: windows differ far more among each other than the policies do."""
    dense, policy = ([pair[side]["values"]["nll"] for pair in pairs] for side in (0, 1))
    diff, base = paired_difference(dense, policy), math.exp(fmean(dense))
    value, low, high = (base * math.exp(bound) for bound in diff)
    return {"dense": base, "value": value, "low": low, "high": high, **_difference(diff)}


def _measured(records: Sequence[Record], prefix: str) -> list[Row]:
    """One row for each value that the records have, named with the prefix."""
    names = dict.fromkeys(name for record in records for name in record["values"])
    names.pop("nll", None)  # a row of its own, beside dense's
    rows = []
    for name in names:
        values = [record["values"][name] for record in records if name in record["values"]]
        shared = {"dense": DENSE_VALUE[name], **_interval(bootstrap_mean(values))}
        rows.append(_base(records[0], prefix + name, len(values)) | shared)
    return rows


def _interval(interval: Interval) -> Row:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _difference(interval: Interval) -> Row:
    return {"diff": interval.value, "diff_low": interval.low, "diff_high": interval.high}
