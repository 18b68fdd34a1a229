"""The log of a study: one JSON line a sample and policy, appended as soon as it is known."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from attnplug import files
from attnplug.errors import AttnplugError, FileError

Record = dict[str, Any]
CHUNK = 1 << 16
# What makes two records the same question. A run that changes any of these asks anew. The batch
# counts: in low precision a row's result may depend on its batch mates' lengths.
KEY = ("task", "model", "n", "trial", "seed", "policy", "batch", "device", "dtype")


def key_of(record: Record) -> tuple[Any, ...]:
    """A record's values of KEY."""
    return tuple(record[name] for name in KEY)


class Records:
    """The samples of a JSONL file, by key; `add` appends. A last line that an interruption cut off
    is dropped. Raises FileError where the file holds anything else or cannot be read or written,
    and leaves it as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[Any, ...], Record] = {}
        files.make_folder(path.parent)
        with files.reading(path, "samples of a study"):
            if not path.exists():
                return
            if not path.is_file():
                raise FileError(f"{path} is no regular file; name another folder")
            *lines, torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.known[key_of(record)] = record
            except (AttnplugError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise _no_sample(path, number) from error
        if not b'{"'.startswith(torn[:2]):
            raise _no_sample(path, len(lines) + 1)
        if torn:
            with self._open() as file:
                _drop_torn_line(file)

    def add(self, records: Iterable[Record]) -> None:
        """Append the records that are not known yet: all of them, or none where the disk takes no
        more."""
        fresh = [record for record in records if key_of(record) not in self.known]
        text = "".join(json.dumps(record) + "\n" for record in fresh)
        with self._open() as file:
            size = _drop_torn_line(file)
            try:
                left = memoryview(text.encode())
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
        self.known |= {key_of(record): record for record in fresh}

    @contextlib.contextmanager
    def _open(self) -> Iterator[FileIO]:
        """The file, to read and append, for this process alone."""
        with files.writing(self.path), FileIO(self.path, "a+") as file:
            files.lock_file(file.fileno())
            yield file


def _drop_torn_line(file: FileIO) -> int:
    """Cut off what follows the last end of a line, and return the bytes that stay. Writes nothing,
    so that a full disk and a kill leave every sample where it is."""
    end = at = file.seek(0, os.SEEK_END)
    while at:
        begin = max(0, at - CHUNK)
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        at = begin
        if found >= 0:
            at = begin + found + 1
            break
    if at < end:
        file.truncate(at)
    return at


def _no_sample(path: Path, number: int) -> FileError:
    return FileError(f"{path}, line {number}, is no sample of a study; name another folder")
