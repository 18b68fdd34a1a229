"""What a trace file says of itself, looked at before anything is believed: the seal's checksums
tell damage from what was written, but not what attnplug wrote from what another program did. Each
check raises ValueError; the reader makes one TraceFileError of it."""

from typing import Any

import numpy as np

from attnplug.files import json_of
from attnplug.trace.arrow import pq
from attnplug.trace.layout import (
    LONGEST,
    META,
    MOST,
    SCHEMA,
    TOKENS,
    VOCABULARY,
    unpack_ids,
    unpack_vocabulary,
)

Span = tuple[int, int]
TEXTS = ("model", "tokenizer", "policy", "method", "weights", "checksum")
COUNTS = ("query_block", "block", "heads", "sequences", "edges")
INT16 = 1 << 15  # heads, layers and sequences are columns of such numbers


def segments_of(text: bytes, size: int) -> list[tuple[int, int, bytes]]:
    """Each segment's (begin, end, sha256); they follow each other from the first byte to `size`."""
    listed = json_of(text)
    _need(isinstance(listed, list) and listed, "the seal lists no segments")
    found, start = [], 0
    for entry in listed:
        _need(isinstance(entry, list) and len(entry) == 2, "a segment is no pair")
        end, digest = entry
        _need(_is_count(end) and start < end <= size, "a segment has no place in the file")
        _need(isinstance(digest, str) and len(digest) == 64, "a segment has no sha256")
        found.append((start, end, bytes.fromhex(digest)))
        start = end
    _need(start == size, "the segments are not the whole file")
    return found


def meta_of(entries: dict[bytes, bytes]) -> dict[str, Any]:
    """The metadata of a file of any format."""
    meta = json_of(entries[META])
    _need(isinstance(meta, dict), "the metadata is no object")
    return meta


def check_meta(meta: dict[str, Any], entries: dict[bytes, bytes]) -> None:
    """The metadata is what a file of FORMAT needs: all that the reader looks up in it."""
    _need(TOKENS in entries and VOCABULARY in entries, "it lists no tokens")
    _need(all(isinstance(meta.get(name), str) for name in TEXTS), f"{TEXTS} are not all texts")
    "".join(meta[name] for name in TEXTS).encode()  # half a surrogate pair is no text
    _need(all(_is_count(meta.get(name)) for name in COUNTS), f"{COUNTS} are not all counts")
    _need(max(meta["heads"], meta["sequences"]) <= INT16, "more heads than a column can number")
    sizes = meta["query_block"], meta["block"]
    _need(min(sizes) > 0 and max(sizes) <= LONGEST, "a block has no tokens, or too many")
    _need(all(isinstance(meta.get(name), dict) for name in ("options", "versions")), "no origin")
    layers: Any = meta.get("layers")
    _need(
        _are_counts(layers) and layers == sorted({*layers} & {*range(INT16)}),
        "its layers are no numbers",
    )
    tokens: Any = meta.get("tokens")
    sequences = meta["sequences"]
    _need(_are_counts(tokens) and len(tokens) == sequences, "its tokens are not counted")
    _check_steps(meta)
    _check_captured(meta.get("captured"))


def _check_steps(meta: dict[str, Any]) -> None:
    """Every step's blocks are those of its queries, which lie inside the sequences."""
    steps: Any = meta.get("steps")
    total = 0
    _need(isinstance(steps, list), "it has no steps")
    for step in steps:
        _need(isinstance(step, dict) and _is_count(step.get("blocks")), "a step has no blocks")
        for name in ("first", "queries"):
            row: Any = step.get(name)
            _need(_are_counts(row) and len(row) == meta["sequences"], "a step is not counted")
        ends = [a + b for a, b in zip(step["first"], step["queries"], strict=True)]
        inside = all(end <= most for end, most in zip(ends, meta["tokens"], strict=True))
        _need(inside, "a step lies behind the end of a sequence")
        blocks = -(-max(step["queries"], default=0) // meta["query_block"])
        _need(step["blocks"] == blocks, "a step's blocks are not those of its queries")
        total += blocks
    _need(total <= MOST, "it has too many query blocks")


def _check_captured(captured: Any) -> None:
    if captured is None:
        return
    _need(isinstance(captured, dict), "captured is no object")
    for shares in captured.values():
        good = isinstance(shares, list) and all(type(x) in (int, float) for x in shares)
        _need(good, "captured has a share that is no number")


def spans_of(footer: pq.FileMetaData, meta: dict[str, Any]) -> list[dict[str, Span]]:
    """Smallest and largest value of each column but the weight in each row group, from statistics
    that lie in what the metadata says."""
    limits = _limits(meta)
    spans = []
    for group in range(footer.num_row_groups):
        columns = [footer.row_group(group).column(i) for i in range(footer.num_columns - 1)]
        known = all(x.statistics is not None and x.statistics.has_min_max for x in columns)
        _need(known, "a row group has no span")
        found = {x.path_in_schema: (x.statistics.min, x.statistics.max) for x in columns}
        for name, most in limits.items():
            low, high = found[name]
            good = type(low) is int and type(high) is int and 0 <= low <= high < most
            _need(good, f"a {name} is none of the file's")
        spans.append(found)
    _need(footer.num_rows == meta["edges"], "it does not have the edges that it says")
    return spans


def _limits(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "sequence": meta["sequences"],
        "layer": max(meta["layers"], default=-1) + 1,
        "head": meta["heads"],
        "q_block": sum(step["blocks"] for step in meta["steps"]),
        "k_block": MOST,
    }


def check_rows(table: Any, spans: dict[str, Span]) -> None:
    """A row group's values are within its statistics, and all there."""
    for name in SCHEMA.names:
        column = table.column(name)
        _need(column.null_count == 0, f"a {name} is missing")
        if name in spans:
            values = column.to_numpy()
            low, high = spans[name]
            inside = len(values) and low <= values.min() and values.max() <= high
            _need(bool(inside), f"a {name} is not in its row group's span")


def token_ids_of(text: bytes, meta: dict[str, Any]) -> list[np.ndarray] | None:
    """Each sequence's token ids, None where the file has none."""
    packed = json_of(text)
    if packed is None:
        return None
    good = isinstance(packed, list) and all(isinstance(row, str) for row in packed)
    _need(good and len(packed) == meta["sequences"], "its token ids are no texts")
    return [unpack_ids(row) for row in packed]


def vocabulary_of(text: bytes) -> dict[int, bytes]:
    """The bytes of the tokens that occur."""
    entries = json_of(text)
    good = isinstance(entries, dict) and all(isinstance(piece, str) for piece in entries.values())
    _need(good, "its vocabulary is none")
    return unpack_vocabulary(entries)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(x) is int and 0 <= x <= MOST for x in values)


def _need(condition: Any, words: str) -> None:
    if not condition:
        raise ValueError(words)
