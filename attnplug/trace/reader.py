"""Reads a trace file: edges as Arrow, pandas or dense windows, and the text of the tokens."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnplug.errors import TraceFileError
from attnplug.trace.arrow import pa, pq
from attnplug.trace.claims import (
    check_meta,
    check_rows,
    meta_of,
    spans_of,
    token_ids_of,
    vocabulary_of,
)
from attnplug.trace.layout import (
    FORMAT,
    META,
    SCHEMA,
    TOKENS,
    VOCABULARY,
    Checksum,
)
from attnplug.trace.seal import AGAIN, check_segment, open_seal

if TYPE_CHECKING:
    import pandas

Span = tuple[int, int]  # from, up to and without


def read(path: str | os.PathLike[str]) -> "Trace":
    """Open a trace file; edges stay on disk until they are asked for. Raises TraceFileError where
    the file is not there, no trace, or damaged: what is read later raises it then."""
    return Trace(Path(path))


class Trace:
    """A trace file. `meta` is its metadata (see `attnplug.trace`).

    Where a method takes `layer`, `head` or `sequence`, None means all of them; `queries` and `keys`
    are half-open spans of query and key *blocks*, None for all.
    """

    def __init__(self, path: Path):
        self.path = path
        with _refusing(path):
            self._source = _open(path)
            self._segments = open_seal(path, self._source)
            self._file = pq.ParquetFile(self._source, page_checksum_verification=True)
            self._entries = self._file.metadata.metadata or {}
            if META not in self._entries:
                raise TraceFileError(
                    f"{path} is a Parquet file and no trace; attnplug trace writes one"
                )
            self.meta: dict[str, Any] = meta_of(self._entries)
        self._checked: set[int] = set()  # row groups whose bytes and values have been looked at
        self._check_format()
        with _refusing(path):
            check_meta(self.meta, self._entries)
            self._edge_groups = spans_of(self._file.metadata, self.meta)
            if len(self._segments) != max(1, len(self._edge_groups)):
                raise ValueError("it has not a segment for each row group")
        self._texts: dict[int, tuple[bytes, np.ndarray]] = {}

    def _check_format(self) -> None:
        number = self.meta.get("format")
        if type(number) is not int or number != FORMAT:
            raise TraceFileError(
                f"{self.path} has the trace format {str(number)[:20]}, this attnplug reads {FORMAT}"
            )
        columns = self._file.schema_arrow
        if not columns.equals(SCHEMA):
            found = ", ".join(f"{field.name} {field.type}" for field in columns)
            needed = ", ".join(f"{field.name} {field.type}" for field in SCHEMA)
            raise TraceFileError(
                f"{self.path} has the columns {found}; a trace has {needed}. {AGAIN}"
            )

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"Trace({str(self.path)!r}: {meta['edges']:,} edges, layers {len(self.layers)}, heads "
            f"{self.heads}, tokens {meta['tokens']})"
        )

    @property
    def layers(self) -> list[int]:
        """Layer indices that were traced."""
        return self.meta["layers"]

    @property
    def heads(self) -> int:
        """Query heads a layer."""
        return self.meta["heads"]

    @property
    def block(self) -> int:
        """Keys a block."""
        return self.meta["block"]

    @property
    def density(self) -> float:
        """Edges for each pair of a query block and a key block that a query of it sees."""
        pairs = sum(int(((ends - 1) // self.block + 1).sum()) for ends in self._ends())
        return self.meta["edges"] / max(1, pairs * len(self.layers) * self.heads)

    @property
    def listed(self) -> float:
        """Key blocks in the list of a query block with queries, on average over all lists."""
        lists = sum(len(ends) for ends in self._ends()) * len(self.layers) * self.heads
        return self.meta["edges"] / max(1, lists)

    def list_sizes(self, layer: int, sequence: int = 0) -> np.ndarray:
        """int64 `[heads,NQ]`: the key blocks in the list of every query block, in bounded memory.
        Lists differ in length where a query block sees few blocks, and with stream's `gap`,
        `budget` and `block_mask`."""
        slots = len(self.query_blocks(sequence))
        sizes = np.zeros(self.heads * slots, np.int64)
        for part in self.batches(layer, sequence=sequence):
            head, q = _columns(part, "head", "q_block")
            sizes += np.bincount(head.astype(np.int64) * slots + q, minlength=len(sizes))
        return sizes.reshape(self.heads, slots)

    def _ends(self) -> Iterator[np.ndarray]:
        """Each sequence's tokens after the last query of a query block, for those with queries."""
        for sequence in range(self.meta["sequences"]):
            spans = self.query_blocks(sequence)
            yield spans[spans[:, 1] > spans[:, 0], 1]

    def key_count(self, sequence: int = 0) -> int:
        """Key blocks of a sequence."""
        return -(-self.meta["tokens"][sequence] // self.block)

    def query_blocks(self, sequence: int = 0) -> np.ndarray:
        """int64 `[NQ,2]`: the first token of every query block, and the one after its last; both
        are the same where the sequence has no query in it."""
        size, parts = self.meta["query_block"], [np.zeros((0, 2), np.int64)]
        for step in self.meta["steps"]:
            first, end = step["first"][sequence], step["queries"][sequence]
            at = np.minimum(np.arange(step["blocks"] + 1) * size, end) + first
            parts.append(np.stack([at[:-1], at[1:]], 1))
        return np.concatenate(parts)

    # --- edges

    def edges(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        sequence: int | None = None,
        queries: Span | None = None,
        keys: Span | None = None,
    ) -> pa.Table:
        """The edges in file order, as an Arrow table with the file's columns."""
        parts = list(self.batches(layer, head, sequence=sequence, queries=queries, keys=keys))
        return pa.concat_tables(parts) if parts else SCHEMA.empty_table()

    def batches(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        sequence: int | None = None,
        queries: Span | None = None,
        keys: Span | None = None,
    ) -> Iterator[pa.Table]:
        """The same row group by row group (about a million rows), in bounded memory."""
        wanted: dict[str, Span] = {
            name: span
            for name, span in (
                ("layer", _one(layer)),
                ("head", _one(head)),
                ("sequence", _one(sequence)),
                ("q_block", queries),
                ("k_block", keys),
            )
            if span is not None
        }
        for group, spans in enumerate(self._edge_groups):
            inside = [
                (name, span)
                for name, span in wanted.items()
                if not (span[0] <= spans[name][0] and spans[name][1] < span[1])
            ]
            if any(b <= spans[name][0] or spans[name][1] < a for name, (a, b) in inside):
                continue
            table = self._read_group(group)
            for name, (a, b) in inside:
                (column,) = _columns(table, name)
                table = table.filter(pa.array((column >= a) & (column < b)))
            if table.num_rows:
                yield table

    def to_pandas(
        self, layer: int | None = None, head: int | None = None, **spans: Any
    ) -> "pandas.DataFrame":
        """The same as a pandas data frame (pandas must be installed)."""
        return self.edges(layer, head, **spans).to_pandas()

    # --- maps

    def dense(
        self, layer: int, queries: Span | None = None, keys: Span | None = None, sequence: int = 0
    ) -> np.ndarray:
        """float32 `[heads, dst, src]`, what CircuitsVis draws: the weights of a window of query
        blocks (dst) and key blocks (src), 0 where there is no edge."""
        queries = queries or (0, len(self.query_blocks(sequence)))
        keys = keys or (0, self.key_count(sequence))
        out = np.zeros((self.heads, queries[1] - queries[0], keys[1] - keys[0]), np.float32)
        for part in self.batches(layer, sequence=sequence, queries=queries, keys=keys):
            head, q, k, weight = _columns(part, "head", "q_block", "k_block", "weight")
            out[head, q - queries[0], k - keys[0]] = weight
        return out

    def heatmap(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        rows: int = 512,
        columns: int = 512,
        queries: Span | None = None,
        keys: Span | None = None,
        sequence: int = 0,
        count: bool = False,
    ) -> np.ndarray:
        """float64 `[rows, columns]`: the weights (with `count` the number) of all edges of the
        window, summed in a grid of cells of equally many blocks, in bounded memory. Cell i holds
        the query blocks q with (q - first) * rows // blocks == i, likewise for keys. `rows` and
        `columns` are cut to the blocks that there are."""
        queries = queries or (0, len(self.query_blocks(sequence)))
        keys = keys or (0, self.key_count(sequence))
        high, wide = max(queries[1] - queries[0], 1), max(keys[1] - keys[0], 1)
        rows, columns = min(rows, high), min(columns, wide)
        out = np.zeros(rows * columns)
        for part in self.batches(layer, head, sequence=sequence, queries=queries, keys=keys):
            q, k, weight = _columns(part, "q_block", "k_block", "weight")
            row = (q.astype(np.int64) - queries[0]) * rows // high
            column = (k.astype(np.int64) - keys[0]) * columns // wide
            cell = row * columns + column
            out += np.bincount(cell, None if count else weight, minlength=rows * columns)
        return out.reshape(rows, columns)

    # --- text

    @functools.cached_property
    def token_ids(self) -> list[np.ndarray] | None:
        """Each sequence's token ids, int32, or None where the file has none."""
        with _refusing(self.path):
            return token_ids_of(self._entries[TOKENS], self.meta)

    @functools.cached_property
    def vocabulary(self) -> dict[int, bytes]:
        """The bytes of the tokens that occur."""
        with _refusing(self.path):
            return vocabulary_of(self._entries[VOCABULARY])

    def pieces(self, first: int, end: int, sequence: int = 0) -> list[bytes]:
        """The bytes of tokens `first` to `end - 1`; empty where the file has no tokens."""
        if self.token_ids is None:
            return []
        return [self.vocabulary.get(i, b"") for i in self.token_ids[sequence][first:end].tolist()]

    def text(self, first: int, end: int, sequence: int = 0) -> str:
        """The text of tokens `first` to `end - 1`."""
        return b"".join(self.pieces(first, end, sequence)).decode(errors="replace")

    def find(self, text: str, sequence: int = 0) -> list[Span]:
        """Where a text occurs: spans of the tokens that hold it, in order, overlaps included."""
        body, starts = self._bytes(sequence)
        wanted, found, at = text.encode(), [], -1
        while wanted and (at := body.find(wanted, at + 1)) >= 0:
            ends = [at, at + len(wanted) - 1]
            first, last = np.searchsorted(starts, ends, side="right") - 1
            found.append((int(first), int(last) + 1))
        return found

    def verify(self) -> None:
        """Read everything and compare the checksum. Raises TraceFileError where it differs."""
        checksum, wanted = Checksum(), self.meta["checksum"]
        for part in self.batches():
            checksum.update(part)
        meta = {name: value for name, value in self.meta.items() if name != "checksum"}
        found = checksum.finish(meta, self._entries[TOKENS], self._entries[VOCABULARY])
        if found != wanted:
            raise TraceFileError(f"{self.path} is damaged: checksum {found}, it says {wanted}")

    def _bytes(self, sequence: int) -> tuple[bytes, np.ndarray]:
        """The whole text as bytes, and where each token begins in it."""
        if sequence in self._texts:
            return self._texts[sequence]
        pieces = self.pieces(0, self.meta["tokens"][sequence], sequence)
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self._texts[sequence] = b"".join(pieces), np.cumsum(sizes) - sizes
        return self._texts[sequence]

    def _read_group(self, group: int) -> pa.Table:
        """A row group, whose bytes are compared with the seal before Arrow sees them."""
        with _refusing(self.path):
            if group not in self._checked:
                check_segment(self.path, self._source, self._segments[group])
            table = self._file.read_row_group(group)
            if group not in self._checked:
                check_rows(table, self._edge_groups[group])
                self._checked.add(group)
            return table


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """A TraceFileError of what the disk, Arrow and `attnplug.trace.claims` raise."""
    try:
        yield
    except TraceFileError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        said = str(error)[:300]
        raise TraceFileError(f"{path} cannot be read as a trace: {said}. {AGAIN}") from error


def _open(path: Path) -> pa.NativeFile:
    """The open file, which must be a regular one."""
    if path.exists() and not path.is_file():
        raise TraceFileError(f"{path} cannot be read as a trace: it is no regular file")
    return pa.OSFile(str(path))


def _one(value: int | None) -> Span | None:
    return None if value is None else (value, value + 1)


def _columns(table: pa.Table, *names: str) -> list[np.ndarray]:
    return [table.column(name).to_numpy() for name in names]
