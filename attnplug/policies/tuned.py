"""Crossovers that `attnplug tune` has measured on this machine, in a file of the user's.

A method's own crossovers are those of an H200. On another card dense attention takes another time
for a token, and a method's kernels another time to start, so that it pays from another length on.
The file has them by card, by heads, and by the versions whose kernels were timed.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch

from attnplug import files
from attnplug.ops.common.triton import triton
from attnplug.version import __version__

PATH = "ATTNPLUG_CROSSOVERS"  # of the file, where it is not in the user's data folder


class Tuned(NamedTuple):
    """From so many tokens on a row pays beside others (`row`), and a row alone (`alone`), as
    RowCrossover has them; and the day of the measurement."""

    row: int
    alone: int
    date: str


def crossover_file() -> Path:
    """The file that `attnplug tune` writes: $ATTNPLUG_CROSSOVERS, or one of the user's data."""
    return files.users_own(
        PATH, lambda: platformdirs.user_data_path("attnplug") / "crossovers.json"
    )


def card_name(device: torch.device) -> str:
    """What the file calls a device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def measured_with() -> str:
    """The versions that the times depend on."""
    return f"attnplug {__version__}, torch {torch.__version__}, Triton {triton.__version__}"


def lookup(device: torch.device, heads: str, method: str) -> Tuned | None:
    """What was measured of a method, by its text in a policy, for `heads` such as "28/4x128"; None
    where nothing was, or with other versions. Raises FileError for a file that is damaged."""
    found = _known().get(card_name(device), {}).get(heads, {})
    entry = found.get("methods", {}).get(method)
    if entry is None or found.get("versions") != measured_with():
        return None
    return Tuned(entry["row"], entry["alone"], found["date"])


def make_place() -> Path:
    """The file, where it can be written now and is not damaged. Raises FileError."""
    path = crossover_file()
    with files.named_by(PATH):
        files.make_place(path)
    _known()
    return path


def keep(device: torch.device, heads: str, date: str, methods: Mapping[str, Any]) -> Path:
    """Write what was measured into the file, in the place of what it says of these methods."""
    path = make_place()
    with files.named_by(PATH), files.alone_in(path.parent):
        _write(path, card_name(device), heads, date, methods)
    return path


def _write(path: Path, card: str, heads: str, date: str, methods: Mapping[str, Any]) -> None:
    known = _known()
    of_card = dict(known.get(card, {}))
    old = of_card.get(heads, {})
    kept = old.get("methods", {}) if old.get("versions") == measured_with() else {}
    entry = {"versions": measured_with(), "date": date, "methods": {**kept, **methods}}
    of_card[heads] = entry
    files.write_text(path, json.dumps({**known, card: of_card}, indent=1) + "\n")


def _known() -> dict[str, Any]:
    """What the file has; nothing where there is none, as most users have none."""
    try:
        path = crossover_file()
        stamp = path.stat().st_mtime_ns
    except OSError:
        return {}
    return _read(path, stamp)


@functools.lru_cache(maxsize=4)
def _read(path: Path, stamp: int) -> dict[str, Any]:
    """The file's content; `stamp` is when it was written, so that a new one is read again."""
    what = "crossovers; delete it, and run attnplug tune again"
    found = files.read_json(path, what)
    with files.reading(path, what):
        if not _is_table(found):
            raise ValueError("it is not what attnplug tune writes")
    return found


def _is_table(found: Any) -> bool:
    """Whether each card has entries of heads, and each entry what `lookup` and `keep` read."""
    try:
        entries = [entry for card in found.values() for entry in card.values()]
        methods = [method for entry in entries for method in entry["methods"].values()]
        texts = [entry[name] for entry in entries for name in ("versions", "date")]
        counts = [method[name] for method in methods for name in ("row", "alone")]
    except (AttributeError, LookupError, TypeError):
        return False
    return all(type(x) is str for x in texts) and all(type(x) is int and x >= 0 for x in counts)
