"""Writes a trace file edge list by edge list, with bounded memory."""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from attnplug import files
from attnplug.errors import ArgumentError, TraceFileError
from attnplug.trace.arrow import pa, pq
from attnplug.trace.layout import (
    FORMAT,
    LONGEST,
    META,
    MOST,
    SCHEMA,
    TOKENS,
    VOCABULARY,
    Checksum,
    Layout,
    pack_ids,
    pack_vocabulary,
    to_json,
)
from attnplug.trace.seal import seal

GROUP = 1 << 20  # rows of a row group, about 20 MB in memory
ROW = sum(kind.bit_width for kind in SCHEMA.types) // 8  # bytes of a row


class Writer:
    """A trace file that is being written. `begin` a step, `append` its layers, and so on; leaving
    the `with` block finishes the file, an exception leaves what was at `path` before.

    `about` holds what the file says of its origin: model, tokenizer, policy, method, options,
    versions (all optional).
    """

    def __init__(self, path: str | os.PathLike[str], layout: Layout, **about: Any):
        sizes = layout.query_block, layout.block
        if min(sizes) < 1 or max(sizes) > LONGEST:
            raise ArgumentError(f"trace: {layout}, blocks have 1 to {LONGEST:,} tokens")
        self._draft = files.Draft(path, TraceFileError)
        self.path = self._draft.path
        self.layout = layout
        self.about = about
        self.steps: list[dict[str, Any]] = []
        self.layers: set[int] = set()
        self.heads = 0
        self.rows = 0
        self.tokens: list[np.ndarray] | None = None
        self.vocabulary: dict[int, bytes] = {}
        self.captured: dict[str, list[float]] = {}
        self._checksum = Checksum()
        self._hasher = ThreadPoolExecutor(1, "attnplug-checksum")
        self._held: list[pa.Table] = []
        self._held_rows = 0
        indexed: Any = [name for name in SCHEMA.names if name != "weight"]
        with _disk(self.path), contextlib.ExitStack() as undo:
            undo.callback(self._draft.discard)
            self._file = pq.ParquetWriter(
                self._draft.part,
                SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=indexed,
                column_encoding={"weight": "BYTE_STREAM_SPLIT"},
                write_page_checksum=True,
            )
            undo.pop_all()

    def begin(self, first: Sequence[int], queries: Sequence[int]) -> None:
        """A step begins: each sequence's token of its first real query, and its real queries."""
        if self.steps and len(first) != len(self.steps[0]["first"]):
            raise ArgumentError(
                f"trace: a step of {len(first)} sequences after one of "
                f"{len(self.steps[0]['first'])}; record them in files of their own"
            )
        blocks = -(-max(queries, default=0) // self.layout.query_block)
        ends = [a + b for a, b in zip(first, queries, strict=True)]
        if max(ends, default=0) > MOST:
            raise ArgumentError(f"trace: a sequence has {max(ends):,} tokens, at most {MOST:,}")
        self.steps.append(
            {"first": [int(x) for x in first], "queries": [int(x) for x in queries]}
            | {"blocks": blocks}
        )

    @property
    def nbytes(self) -> int:
        """About the bytes of the file so far; what is held counts as it is in memory."""
        with _disk(self.path):
            return self._draft.part.stat().st_size + self._held_rows * ROW

    @property
    def first_block(self) -> int:
        """The number of the current step's first query block."""
        return sum(step["blocks"] for step in self.steps[:-1])

    def append(self, layer: int, index: np.ndarray, weight: np.ndarray) -> None:
        """The edges of one layer in the current step: key blocks `index` int32 `[B,H,NQ,K]`, -1
        for none, and `weight` float32 like it."""
        if index.ndim != 4 or index.shape != weight.shape:
            raise ArgumentError(
                f"trace: index {index.shape} and weight {weight.shape}, need [B,H,NQ,K] both"
            )
        first = self.first_block
        self.layers.add(int(layer))
        self.heads = max(self.heads, index.shape[1])
        for b in range(index.shape[0]):
            for h in range(index.shape[1]):
                self._hold(_table(b, layer, h, first, index[b, h], weight[b, h]))

    def name_tokens(self, ids: Sequence[np.ndarray], vocabulary: Mapping[int, bytes]) -> None:
        """Each sequence's token ids, and the bytes of those that occur."""
        self.tokens = [np.asarray(row, np.int32) for row in ids]
        self.vocabulary = dict(vocabulary)

    def close(self) -> None:
        """Write what is held and the metadata, and give the file its name."""
        self._flush()
        tokens = to_json(None if self.tokens is None else [pack_ids(x) for x in self.tokens])
        vocabulary = to_json(pack_vocabulary(self.vocabulary))
        meta = self._meta()
        meta["checksum"] = self._checksum.finish(meta, tokens, vocabulary)
        self._file.add_key_value_metadata(
            {META: to_json(meta), TOKENS: tokens, VOCABULARY: vocabulary}
        )
        with _disk(self.path):
            self._file.close()
            self._hasher.shutdown()
            seal(self._draft.part)
        self._draft.publish()

    def discard(self) -> None:
        """Leave no file."""
        self._hasher.shutdown()
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise

    def _meta(self) -> dict[str, Any]:
        ends = [0] * (len(self.steps[0]["first"]) if self.steps else 0)
        for step in self.steps:
            ends = [
                max(end, first + count)
                for end, first, count in zip(ends, step["first"], step["queries"], strict=True)
            ]
        named = {"model": "", "tokenizer": "", "policy": "", "method": "", "options": {}}
        return {
            **named,
            "kv_heads": None,
            "versions": {"pyarrow": pa.__version__},
            **self.about,
            "format": FORMAT,
            "query_block": self.layout.query_block,
            "block": self.layout.block,
            "weights": self.layout.weights,
            "layers": sorted(self.layers),
            "heads": self.heads,
            "sequences": len(ends),
            "tokens": ends,
            "prompt_sha256": [
                hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest() for ids in self.tokens or []
            ],
            "steps": self.steps,
            "edges": self.rows,
            "captured": self.captured or None,
        }

    def _hold(self, table: pa.Table) -> None:
        if self._held_rows + table.num_rows > GROUP:
            self._flush()
        self._held.append(table)
        self._held_rows += table.num_rows

    def _flush(self) -> None:
        if not self._held_rows:
            return
        table = pa.concat_tables(self._held).combine_chunks()
        self._held, self._held_rows = [], 0
        self.rows += table.num_rows
        summed = self._hasher.submit(self._checksum.update, table)  # both run without the GIL
        with _disk(self.path):
            self._file.write_table(table, row_group_size=GROUP)
        summed.result()


def check_path(path: str | os.PathLike[str]) -> Path:
    """Where a trace will be, links followed. Raises TraceFileError where a file cannot be made or
    replaced there."""
    return files.check_place(path, TraceFileError)


def _disk(path: Path) -> contextlib.AbstractContextManager[None]:
    """A full disk and the like as an error that says what is left."""
    return files.writing(path, TraceFileError)


def _table(
    sequence: int, layer: int, head: int, first: int, index: np.ndarray, weight: np.ndarray
) -> pa.Table:
    """The rows of one sequence's head, of lists `[NQ,K]`."""
    listed = index >= 0
    blocks = np.repeat(np.arange(first, first + len(index), dtype=np.int32), listed.sum(1))
    rows = len(blocks)
    columns = [
        *(np.full(rows, x, np.int16) for x in (sequence, layer, head)),
        blocks,
        index[listed].astype(np.int32, copy=False),
        weight[listed].astype(np.float32, copy=False),
    ]
    return pa.Table.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)
