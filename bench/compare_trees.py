"""The same benches in two trees, in turn, in one call: what a change of the kernels costs.

    git archive COMMIT attnplug bench setup.cfg pyproject.toml | tar x -C .carry/old   # here
    python bench/compare_trees.py .carry/old . --out $OUT/trees.json bench/test_gvr.py::test_gvr ...

Each tree runs its own benches, by its own package. The trees take turns, --turns times; a row's
time is the smallest of its tree's, and the table says how far each tree's own times lie apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = ("op", "case", "n", "batch", "options", "peer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("benches", nargs="+", help="node ids, as pytest takes them")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = {"before": options.before, "after": options.after}
    runs: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in trees}
    for _ in range(options.turns):
        for side, tree in trees.items():
            runs[side].append(measure(tree, options.benches))
    rows = [
        compare(before, after) for before, after in zip(*map(by_place, runs.values()), strict=True)
    ]
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(tree: Path, benches: list[str]) -> list[dict[str, Any]]:
    """The rows of one run of a tree's benches."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        path = os.pathsep.join([str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {
            "PYTHONPATH": path,
            "ATTNPLUG_BENCH_ROWS": str(rows),
            "ATTNPLUG_COMMIT": os.environ.get("ATTNPLUG_COMMIT", "unknown"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *benches]
        subprocess.run(command, cwd=tree, env=os.environ | variables, check=True)
        return [json.loads(line) for line in rows.read_text().splitlines()]


def by_place(runs: list[list[dict[str, Any]]]) -> list[tuple[dict[str, Any], ...]]:
    """The same row of every run: a bench writes its rows in one order, though what they say of the
    link or of hits may differ."""
    return list(zip(*runs, strict=True))


def compare(
    before: tuple[dict[str, Any], ...], after: tuple[dict[str, Any], ...]
) -> dict[str, Any]:
    row: dict[str, Any] = {column: after[0][column] for column in COLUMNS}
    least = []
    for side, found in (("before", before), ("after", after)):
        times = [each["p50_us"] for each in found]
        least.append(min(times))
        row[f"{side}_us"] = round(least[-1], 2)
        row[f"{side}_spread"] = round(max(times) / least[-1] - 1, 4)
    return row | {"after_over_before": round(least[1] / least[0], 4)}


if __name__ == "__main__":
    main()
