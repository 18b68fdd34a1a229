"""New rows into the files of bench/results, in the place of those that ask the same question.

    python bench/install_rows.py rows.json [more.json ...]

A row of an op goes into results/OP.json. Rows that it supersedes are dropped from whatever file has
them; a file that has none left is deleted. Rows whose commit is no clean one are refused.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _results import write_rows
from report import question, rows_of

RESULTS = Path(__file__).resolve().parent / "results"


def main(paths: Sequence[str]) -> None:
    new = {question(row): row for path in paths for row in rows_of(Path(path))[1]}
    dirty = {row["commit"] for row in new.values() if not re.fullmatch("[0-9a-f]+", row["commit"])}
    if dirty:
        raise SystemExit(f"rows of {', '.join(sorted(dirty))}: measure them at a commit")
    waiting: dict[str, list[dict[str, Any]]] = {}
    for row in new.values():
        waiting.setdefault(row["op"], []).append(row)
    replaced = 0
    for path in sorted(RESULTS.glob("*.json")):
        old = rows_of(path)[1]
        if not old or "task" in old[0]:
            continue
        kept = [row for row in old if question(row) not in new]
        rows = kept + waiting.pop(path.stem, [])
        replaced += len(old) - len(kept)
        if not rows:
            path.unlink()
        elif rows != old:
            write_rows(path, rows)
    for op, rows in waiting.items():
        write_rows(RESULTS / f"{op}.json", rows)
    print(f"{len(new)} rows installed, {replaced} of them in the place of older ones")


if __name__ == "__main__":
    main(sys.argv[1:])
