"""Rows that benches appended to a file (ATTNPLUG_BENCH_ROWS), as a file of bench/results.

    python bench/join_rows.py rows.jsonl [more.jsonl ...] > bench/results/NAME.json

A line that is cut is left out. Where two rows ask the same question, report.py takes the later."""

import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of the whole lines."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def main(paths: Sequence[str]) -> None:
    rows = [json.dumps(row) for path in paths for row in read_lines(Path(path))]
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None).isoformat(timespec="seconds")
    lines = ",\n".join(rows)
    print(f'{{"datetime": "{now}", "rows": [\n{lines}\n]}}')


if __name__ == "__main__":
    main(sys.argv[1:])
