"""Whether cells that were run again from scratch come to the counts that are committed.

    FRESH=1 SMOLLM=0 bash bench/eval_gpu.sh 60 --suite default --policies all \\
        --lengths 4096 --tasks needle-noise
    python bench/same_counts.py gemma3-270m $OUT/gemma3-270m.jsonl

Prints a line for each task, length and policy: the sum of the scores, then and now, and how many
replies are the same. Exits with 1 where a sum, a prompt or the number of prompts differs."""

import sys
from collections import defaultdict
from pathlib import Path

from eval_rows import ROOT, read_packed

from attnplug.eval.records import Record, Records

Cell = tuple[str, int, str]


def cells(records: dict[tuple, Record]) -> dict[Cell, dict[int, Record]]:
    """The records that have a score, by their cell and prompt."""
    found: dict[Cell, dict[int, Record]] = defaultdict(dict)
    for record in records.values():
        if "score" in record:
            found[record["task"], record["n"], record["policy"]][record["trial"]] = record
    return found


def compare(then: dict[int, Record], now: dict[int, Record]) -> tuple[str, bool]:
    """A line on one cell, and whether its counts are the same."""
    prompts = all(trial in then for trial in now) and len(then) == len(now)
    prompts &= all(then[t]["prompt_hash"] == x["prompt_hash"] for t, x in now.items() if t in then)
    sums = [round(sum(record["score"] for record in side.values()), 6) for side in (then, now)]
    replies = sum(then[t]["reply"] == x["reply"] for t, x in now.items() if t in then)
    line = f"{sums[0]:g} then, {sums[1]:g} now, {replies} of {len(now)} replies the same"
    return line + ("" if prompts else ", other prompts"), prompts and sums[0] == sums[1]


def main(model: str, path: Path, folder: Path = ROOT / "bench" / "results" / "samples") -> int:
    committed = cells(read_packed(folder / f"{model}.jsonl.xz"))
    again = cells(Records(path).known)
    same = bool(again)
    for cell, now in sorted(again.items()):
        line, equal = compare(committed.get(cell, {}), now)
        print(*cell, line, sep="\t")
        same &= equal
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
