"""What writer and reader of a trace file share: its columns, names and checksum."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnplug.trace.arrow import pa

FORMAT = 1
MOST = 1 << 26  # tokens of a sequence and query blocks of a file
META, TOKENS, VOCABULARY = b"attnplug.trace", b"attnplug.tokens", b"attnplug.vocabulary"
LONGEST = 1 << 14  # tokens of a block
SCHEMA = pa.schema(
    [
        ("sequence", pa.int16()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("q_block", pa.int32()),
        ("k_block", pa.int32()),
        ("weight", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Layout:
    """The geometry of a trace: queries and keys a block, and what a weight means ("score", "mass"
    or "value" as in `attnplug.ops.stream_edges`)."""

    query_block: int
    block: int
    weights: str


def to_json(value: Any) -> bytes:
    """The one spelling of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pack_ids(ids: np.ndarray) -> str:
    """Token ids as text."""
    return base64.b64encode(zlib.compress(ids.astype("<i4").tobytes(), 9)).decode()


def unpack_ids(text: str) -> np.ndarray:
    """The token ids of `pack_ids`, int32. Raises ValueError where they are none, or more than
    MOST, so that a short text cannot fill the memory."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text), 4 * MOST + 1)
    except zlib.error as error:
        raise ValueError(f"token ids that are not packed ({error})") from error
    if not stream.eof or len(data) > 4 * MOST:
        raise ValueError("token ids without an end")
    return np.frombuffer(data, "<i4").astype(np.int32)


def pack_vocabulary(pieces: Mapping[int, bytes]) -> dict[str, str]:
    """Token bytes as JSON can hold them."""
    return {str(i): base64.b64encode(piece).decode() for i, piece in sorted(pieces.items())}


def unpack_vocabulary(entries: Mapping[str, str]) -> dict[int, bytes]:
    """The token bytes of `pack_vocabulary`."""
    return {int(i): base64.b64decode(piece) for i, piece in entries.items()}


class Checksum:
    """sha256 of what a trace says, fed by tables in row order."""

    def __init__(self) -> None:
        self.columns = [hashlib.sha256() for _ in SCHEMA.names]

    def update(self, table: pa.Table) -> None:
        """Add the rows of a table with the file's columns."""
        for digest, name in zip(self.columns, SCHEMA.names, strict=True):
            for chunk in table.column(name).chunks:
                values = chunk.to_numpy(zero_copy_only=True)
                digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).data)

    def finish(self, meta: Mapping[str, Any], tokens: bytes, vocabulary: bytes) -> str:
        """The checksum; `meta` without its own."""
        total = hashlib.sha256(b"".join(digest.digest() for digest in self.columns))
        for part in (tokens, vocabulary, to_json(meta)):
            total.update(hashlib.sha256(part).digest())
        return f"sha256:{total.hexdigest()}"
