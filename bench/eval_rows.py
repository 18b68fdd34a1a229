"""Rows and heat map of an eval study that ran in several folders, or on several machines.

    python bench/eval_rows.py smollm2-135m FOLDER/samples.jsonl ...

Writes bench/results/eval-NAME.json (quality rows, one a line) and docs/img/eval-NAME.png from the
samples alone. `attnplug eval` writes the same of one folder."""

import argparse
import json
from pathlib import Path

from attnplug.eval.output import draw_heatmap
from attnplug.eval.records import Records
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import MEASURES
from attnplug.eval.tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("samples", nargs="+", type=Path)
    options = parser.parse_args()
    known = {}
    for path in options.samples:
        known |= Records(path).known
    order = [*TASKS, *MEASURES]
    rows = make_rows(
        sorted(known.values(), key=lambda r: (order.index(r["task"]), r["n"], r["trial"]))
    )
    lines = ",\n".join(json.dumps(row) for row in rows)
    results = ROOT / "bench" / "results" / f"eval-{options.name}.json"
    results.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    image = ROOT / "docs" / "img" / f"eval-{options.name}.png"
    draw_heatmap(rows, image)
    print(f"{len(known)} samples, {len(rows)} rows: {results.relative_to(ROOT)}, {image.name}")


if __name__ == "__main__":
    main()
