"""Rows and heat map of an eval study that ran in several folders, or on several machines.

    python bench/eval_rows.py smollm2-135m [FOLDER/samples.jsonl ...]

With `--study momo`: rows of a comparison of their own, which tables show where their filters say
`study=momo` and plots leave out. NAME is then the study's file, such as momo-smollm2-135m; in a
model's name, "-" stands for "@". Without files it makes the rows of the samples that are there;
with `--anew` it drops these.

Adds the samples to bench/results/samples/NAME.jsonl.xz, which holds every prompt's hash, reply and
score, and writes from it alone bench/results/eval-NAME.json (quality rows, one a line,
a policy in the spelling of all rows, which samples and some studies have as it was asked) and
docs/img/eval-NAME.png. `attnplug eval` goes on from the samples, unpacked as OUT/samples.jsonl."""

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

from _results import row_policy, write_rows
from studies import STUDIES

from attnplug.eval.output import draw_heatmap
from attnplug.eval.records import Record, Records, key_of
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import MEASURES, STOCK
from attnplug.eval.tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent
ORDER = [*TASKS, *MEASURES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("samples", nargs="*", type=Path)
    parser.add_argument("--study", default="")
    parser.add_argument("--anew", action="store_true", help="drop the samples that are there")
    options = parser.parse_args()
    if options.anew and not options.samples:
        parser.error("--anew needs the samples that take the place of those that are there")
    name = options.name.replace("@", "-")
    packed = ROOT / "bench" / "results" / "samples" / f"{name}.jsonl.xz"
    known = {} if options.anew else read_packed(packed)
    for path in options.samples:
        known |= Records(path).known
    records = sorted(known.values(), key=_order)
    packed.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    packed.write_bytes(lzma.compress(text.encode(), preset=9))
    about = {"study": options.study} if options.study else {}
    asked = options.study in STUDIES and STUDIES[options.study].as_asked
    named = str if asked else row_policy
    rows = [about | row | {"policy": named(row["policy"])} for row in make_rows(records)]
    results = ROOT / "bench" / "results" / f"eval-{name}.json"
    write_rows(results, rows)
    print(f"{len(records)} samples, {len(rows)} rows: {results.relative_to(ROOT)}")
    if not options.study:
        draw_heatmap(rows, ROOT / "docs" / "img" / f"eval-{name}.png")


def read_packed(path: Path) -> dict[tuple[Any, ...], Record]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    return {key_of(record): record for record in records}


def _order(record: Record) -> tuple[Any, ...]:
    policy = (record["policy"] != STOCK, record["policy"])
    return (ORDER.index(record["task"]), record["n"], record["trial"], *policy, str(key_of(record)))


if __name__ == "__main__":
    main()
