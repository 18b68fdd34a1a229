"""How a study writes its rows."""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stale import gone

from attnplug.bench.rows import policy_name
from attnplug.eval.runner import STOCK, machine, parse_with_control


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of quality rows, one a line, so that a change of one shows as such."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n')


def run_of(device: str = "cpu") -> dict[str, str]:
    """What a quality row says of its run on a kind of device: machine, versions, commit, day."""
    return machine(device) | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def row_policy(asked: str) -> str:
    """What rows call the policy that eval was asked: `policy_name`, where `random_blocks` is known
    too. The model's own attention and policies with a deleted option keep their text."""
    if asked == STOCK or gone({"policy": asked}):
        return asked
    return policy_name(parse_with_control(asked))
