"""The seal of a trace file: checksums of its bytes, which the reader compares before Arrow sees
any of them, as Arrow may end the process on a damaged footer.

The seal lies between the last page and the Parquet footer, where Parquet readers never look:

    pages | JSON | length of the JSON, uint32 | sha256 of JSON and footer | MAGIC | footer | PAR1

The JSON lists the file's segments in order: `[end, sha256]`, one a row group, from the file's
first byte on. The footer here is with its length and the closing PAR1. Integers are little-endian.
"""

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from attnplug.errors import TraceFileError
from attnplug.trace.arrow import pq
from attnplug.trace.claims import segments_of

MAGIC, PARQUET = b"ATPSEAL1", b"PAR1"
TAIL = struct.Struct("<I32s8s")  # the length of the JSON, the digest, MAGIC
CHUNK = 1 << 20
AGAIN = "Make it anew with attnplug.trace.record, or take another copy of it"


@dataclass(frozen=True)
class Segment:
    """Bytes `begin` to `end - 1` of the file and their sha256."""

    begin: int
    end: int
    digest: bytes


def seal(path: Path) -> None:
    """Put a seal into a Parquet file that has none."""
    footer = pq.read_metadata(path)
    with path.open("r+b") as file:  # a draft, which the writer renames once it is sealed
        begin, tail = _footer(path, file)
        ends = [_group_begin(footer.row_group(i)) for i in range(1, footer.num_row_groups)]
        segments = _digests(file, [*ends, begin])
        listed = json.dumps(segments, separators=(",", ":")).encode()
        digest = hashlib.sha256(listed + tail).digest()
        file.seek(begin)
        file.write(listed + TAIL.pack(len(listed), digest, MAGIC) + tail)


def open_seal(path: Path, file: Any) -> list[Segment]:
    """The segments of an open trace file, whose footer is as it was written. Raises TraceFileError
    where it is not, or has no seal."""
    begin, tail = _footer(path, file)
    if begin < TAIL.size:
        raise _no_trace(path)
    length, digest, magic = TAIL.unpack(_read(file, begin - TAIL.size, begin))
    if magic != MAGIC or length > begin - TAIL.size:
        raise _no_trace(path)
    listed = _read(file, begin - TAIL.size - length, begin - TAIL.size)
    if hashlib.sha256(listed + tail).digest() != digest:
        raise TraceFileError(f"{path} is damaged: its footer is not what was written. {AGAIN}")
    try:
        return [Segment(*each) for each in segments_of(listed, begin - TAIL.size - length)]
    except ValueError as error:
        raise TraceFileError(f"{path} is no trace of attnplug: {error}. {AGAIN}") from error


def check_segment(path: Path, file: Any, segment: Segment) -> None:
    """Raise TraceFileError where the bytes of a segment are not those that were written."""
    digest = hashlib.sha256()
    for at in range(segment.begin, segment.end, CHUNK):
        digest.update(_read(file, at, min(at + CHUNK, segment.end)))
    if digest.digest() != segment.digest:
        raise TraceFileError(
            f"{path} is damaged: bytes {segment.begin:,} to {segment.end:,} are not what was "
            f"written. {AGAIN}"
        )


def _no_trace(path: Path) -> TraceFileError:
    return TraceFileError(
        f"{path} is a Parquet file and no trace, or one whose seal is damaged; attnplug trace "
        f"writes one. {AGAIN}"
    )


def _footer(path: Path, file: Any) -> tuple[int, bytes]:
    """Where the Parquet footer begins, and it with what follows."""
    size = file.seek(0, os.SEEK_END)
    size = file.tell() if size is None else size
    last = _read(file, max(0, size - 8), size)
    begin = size - 8 - int.from_bytes(last[:4], "little")
    if len(last) < 8 or last[4:] != PARQUET or begin < len(PARQUET):
        raise TraceFileError(
            f"{path} cannot be read as a trace: it does not end as a Parquet file. {AGAIN}"
        )
    return begin, _read(file, begin, size)


def _read(file: Any, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _group_begin(group: Any) -> int:
    """The first byte of a row group's pages."""
    columns = [group.column(i) for i in range(group.num_columns)]
    places = [(x.dictionary_page_offset, x.data_page_offset) for x in columns]
    return min(at for pair in places for at in pair if at is not None)


def _digests(file: BinaryIO, ends: list[int]) -> list[list[Any]]:
    found, start = [], 0
    for end in ends:
        digest = hashlib.sha256()
        for at in range(start, end, CHUNK):
            digest.update(_read(file, at, min(at + CHUNK, end)))
        found.append([end, digest.hexdigest()])
        start = end
    return found
