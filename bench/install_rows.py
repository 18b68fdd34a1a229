"""New rows into the files of bench/results, in the place of those that ask the same question.

    python bench/install_rows.py rows.json [more.json ...]

A row of an op goes into results/OP.json. Rows that it supersedes are dropped from whatever file has
them; a file that has none left is deleted. Rows whose commit is no clean one are refused.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import question

RESULTS = Path(__file__).resolve().parent / "results"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of rows or of pytest-benchmark's."""
    content = json.loads(path.read_text())
    measured = [bench["extra_info"] for bench in content.get("benchmarks", ())]
    return [row for row in measured if "op" in row] + content.get("rows", [])


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One row a line, so that a change of one shows as such; the newest day is the file's."""
    if not rows:
        path.unlink()
        return
    day = max(row.get("date", "") for row in rows)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"datetime": "{day}", "rows": [\n{lines}\n]}}\n')


def main(paths: Sequence[str]) -> None:
    new = {question(row): row for path in paths for row in rows_of(Path(path))}
    dirty = {row["commit"] for row in new.values() if not re.fullmatch("[0-9a-f]+", row["commit"])}
    if dirty:
        raise SystemExit(f"rows of {', '.join(sorted(dirty))}: measure them at a commit")
    waiting: dict[str, list[dict[str, Any]]] = {}
    for row in new.values():
        waiting.setdefault(row["op"], []).append(row)
    replaced = 0
    for path in sorted(RESULTS.glob("*.json")):
        old = rows_of(path)
        if not old or "task" in old[0] or "op" not in old[0]:
            continue
        kept = [row for row in old if question(row) not in new]
        mine = waiting.pop(path.stem, [])
        if mine or len(kept) < len(old):
            replaced += len(old) - len(kept)
            write(path, kept + mine)
    for op, rows in waiting.items():
        write(RESULTS / f"{op}.json", rows)
    print(f"{len(new)} rows installed, {replaced} of them in the place of older ones")


if __name__ == "__main__":
    main(sys.argv[1:])
