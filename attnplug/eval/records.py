"""The log of a study: one JSON line a sample and policy, appended as soon as it is known."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnplug.deprecated import current_text
from attnplug.errors import ArgumentError

Record = dict[str, Any]
# What makes two records the same question. A run that changes any of these asks anew. The batch
# counts: in low precision a row's result may depend on its batch mates' lengths.
KEY = ("task", "model", "n", "trial", "seed", "policy", "batch", "device", "dtype")


def key_of(record: Record) -> tuple[Any, ...]:
    """A record's values of KEY; a policy's text as it is written today."""
    values = {name: record[name] for name in KEY} | {"policy": current_text(record["policy"])}
    return tuple(values.values())


class Records:
    """The samples of a JSONL file, by key; `add` appends. A last line that an interruption cut off
    is dropped. Raises ArgumentError where the file holds anything else, and leaves it as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[Any, ...], Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        *lines, torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.known[key_of(record)] = record
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _no_sample(path, number) from error
        if not b'{"'.startswith(torn[:2]):
            raise _no_sample(path, len(lines) + 1)
        if torn:
            path.write_bytes(b"".join(line + b"\n" for line in lines))

    def add(self, records: Iterable[Record]) -> None:
        """Append the records that are not known yet."""
        fresh = [record for record in records if key_of(record) not in self.known]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in fresh))
        self.known |= {key_of(record): record for record in fresh}


def _no_sample(path: Path, number: int) -> ArgumentError:
    return ArgumentError(f"{path}, line {number}, is no sample of a study; name another folder")
