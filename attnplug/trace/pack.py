"""Edges of a trace as the viewer's page holds them: one byte string a layer, within a budget.

Layout of a layer, rows being (head, query block) in that order and E the edges kept:

    uint8 [heads * NQ]   edges of each row
    uint8 [E], [E]       key block less the one before it in the row (ascending): low, high byte
    uint8 [E]            weight: 0 none, else a step from the layer's lowest to its highest weight,
                         of the logarithm but of scores
    uint8 [masks, E]     share of the edge that each mask keeps, 255 for all of it
    uint8 [heads, rows, columns]         with a grid: sums of *all* edges by cell, coded likewise
    uint8 [masks, heads, rows, columns]  and the share of each cell that each mask misses
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attnplug.trace.reader import Trace

RANGE = 1e7  # weights this many times below a layer's largest are drawn as if not smaller
KEY_BLOCKS = 1 << 16
MOST_EDGES = 255  # of one row


@dataclass(frozen=True)
class Grid:
    """Cells of `q_step` x `k_step` blocks, powers of two."""

    q_step: int
    k_step: int
    rows: int
    columns: int


class Edges(NamedTuple):
    """Edges of one layer and sequence, ordered by row and key block."""

    row: np.ndarray  # head * NQ + query block, int64
    k: np.ndarray
    weight: np.ndarray

    def take(self, index: np.ndarray) -> "Edges":
        return Edges(self.row[index], self.k[index], self.weight[index])


def read_layer(trace: Trace, layer: int, sequence: int, query_blocks: int) -> Edges:
    """The edges of one layer."""
    keys = 0, trace.key_count(sequence)
    table = trace.edges(layer, sequence=sequence, queries=(0, query_blocks), keys=keys)
    head, q, k, weight = (
        table.column(name).to_numpy() for name in ("head", "q_block", "k_block", "weight")
    )
    row = head.astype(np.int64) * query_blocks + q
    order = np.argsort(row * KEY_BLOCKS + k, kind="stable")
    return Edges(row, k.astype(np.int64), np.nan_to_num(weight, nan=0.0)).take(order)


def strongest(edges: Edges, most: int) -> np.ndarray:
    """The `most` heaviest edges of each row, as indices in order."""
    if not len(edges.row) or np.bincount(edges.row).max() <= most:
        return np.arange(len(edges.row))
    order = np.lexsort((edges.k, -edges.weight, edges.row))
    row = edges.row[order]
    first = np.flatnonzero(np.r_[True, row[1:] != row[:-1]])
    place = np.arange(len(row)) - np.repeat(first, np.diff(np.r_[first, len(row)]))
    return np.sort(order[place < most])


class Coder:
    """Weights as one byte. `low` and `high` are what the page needs to read them."""

    def __init__(self, weights: np.ndarray, logarithmic: bool):
        self.logarithmic = logarithmic
        values = weights[weights > 0] if logarithmic else weights[np.isfinite(weights)]
        if logarithmic:
            values = np.log(values.astype(np.float64))
        self.high = float(values.max()) if values.size else 0.0
        self.low = float(values.min()) if values.size else 0.0
        if logarithmic:
            self.low = max(self.low, self.high - np.log(RANGE))

    def encode(self, weights: np.ndarray) -> np.ndarray:
        """uint8 codes."""
        there = weights > 0 if self.logarithmic else np.isfinite(weights)
        values = np.where(there, weights, 1.0).astype(np.float64)
        if self.logarithmic:
            values = np.log(values)
        step = (self.high - self.low) / 254 or 1.0
        codes = 1 + np.clip(np.rint((values - self.low) / step), 0, 254)
        return np.where(there, codes, 0).astype(np.uint8)

    @property
    def range(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class Packer:
    """How the layers of one sequence become bytes. `keep` edges of each row at most."""

    trace: Trace
    sequence: int
    spans: np.ndarray  # [NQ,2] tokens of the query blocks
    keep: int
    grid: Grid | None
    masks: Sequence["Mask"]

    def layer(self, layer: int) -> tuple[bytes, dict[str, Any]]:
        """The bytes of a layer, and what the page says of it."""
        edges = read_layer(self.trace, layer, self.sequence, len(self.spans))
        seen = [mask.seen(layer, edges, self) for mask in self.masks]
        about = {"layer": layer, **self._measures(edges, seen)}
        chosen = strongest(edges, self.keep)
        kept = edges.take(chosen)
        sums = self._by_head(np.isin(np.arange(len(edges.row)), chosen), edges)
        about["kept"] = _share(sums, self._by_head(np.ones(len(edges.row)), edges))
        coder = Coder(kept.weight, self.logarithmic)
        about["range"] = coder.range
        rows = self.trace.heads * len(self.spans)
        new_row = np.r_[True, kept.row[1:] != kept.row[:-1]][: len(kept.row)]
        step = np.where(new_row, kept.k, kept.k - np.r_[0, kept.k[:-1]][: len(kept.k)])
        parts = [
            np.bincount(kept.row, minlength=rows).astype(np.uint8),
            (step & 255).astype(np.uint8),
            (step >> 8).astype(np.uint8),
            coder.encode(kept.weight),
            *(np.rint(255 * share[chosen]).astype(np.uint8) for share in seen),
        ]
        if self.grid is not None:
            cells, about["gridRange"] = self._grid(edges, seen, self.grid)
            parts += cells
        return b"".join(part.tobytes() for part in parts), about

    @property
    def logarithmic(self) -> bool:
        return self.trace.meta["weights"] != "score"

    def _amount(self, edges: Edges) -> np.ndarray:
        """What an edge counts in a sum: its weight, and 1 where weights are scores."""
        return edges.weight if self.logarithmic else np.ones(len(edges.row), np.float32)

    def _by_head(self, factor: np.ndarray, edges: Edges) -> np.ndarray:
        head = edges.row // max(len(self.spans), 1)
        return np.bincount(head, self._amount(edges) * factor, minlength=self.trace.heads)

    def _measures(self, edges: Edges, seen: Sequence[np.ndarray]) -> dict[str, Any]:
        """By head: the shares that go to the first block, to the own block and the one before, and
        further; the blocks of a list; what each mask misses."""
        query = edges.row % max(len(self.spans), 1)
        own = (self.spans[query, 1] - 1) // self.trace.block
        sink, local = edges.k == 0, (edges.k > 0) & (edges.k >= own - 1)
        total = self._by_head(np.ones(len(edges.row)), edges)
        lists = max(int((self.spans[:, 1] > self.spans[:, 0]).sum()), 1)
        sizes = np.bincount(edges.row // max(len(self.spans), 1), minlength=self.trace.heads)
        return {
            "listed": [round(float(size) / lists, 4) for size in sizes],
            "far": _share(self._by_head(~(sink | local), edges), total),
            "sink": _share(self._by_head(sink, edges), total),
            "local": _share(self._by_head(local, edges), total),
            "missed": [_share(self._by_head(1 - share, edges), total) for share in seen],
        }

    def _grid(
        self, edges: Edges, seen: Sequence[np.ndarray], grid: Grid
    ) -> tuple[list[np.ndarray], list[float]]:
        head, q = np.divmod(edges.row, len(self.spans))
        cell = (head * grid.rows + q // grid.q_step) * grid.columns + edges.k // grid.k_step
        size = self.trace.heads * grid.rows * grid.columns
        if self.logarithmic:
            total = np.bincount(cell, edges.weight, minlength=size)
        else:
            total = np.full(size, -np.inf)
            np.maximum.at(total, cell, edges.weight)
        coder = Coder(total, self.logarithmic)
        amount = self._amount(edges)
        whole = np.maximum(np.bincount(cell, amount, minlength=size), 1e-30)
        missed = [np.bincount(cell, amount * (1 - s), minlength=size) / whole for s in seen]
        shares = [np.rint(255 * np.clip(x, 0, 1)).astype(np.uint8) for x in missed]
        return [coder.encode(total), *shares], coder.range


def _share(part: np.ndarray, whole: np.ndarray) -> list[float]:
    return [round(float(x), 4) for x in part / np.where(whole > 0, whole, 1.0)]


class Mask:
    """A selection of blocks, read from a trace file: its edges are what is kept. Where it has no
    query block for a token, or not the layer, the policy was dense there and keeps everything."""

    def __init__(self, name: str, trace: Trace, sequence: int):
        self.name, self.trace, self.sequence = name, trace, sequence
        self.spans = trace.query_blocks(sequence)
        self.row_of = np.full(trace.meta["tokens"][sequence], -1, np.int64)
        for row, (first, end) in enumerate(self.spans):
            self.row_of[first:end] = row

    def seen(self, layer: int, edges: Edges, packer: Packer) -> np.ndarray:
        """float32, for each edge: the share of its causal pairs of tokens that the mask keeps."""
        if layer not in self.trace.layers or not len(edges.row):
            return np.ones(len(edges.row), np.float32)
        mine = read_layer(self.trace, layer, self.sequence, len(self.spans))
        keys = np.unique(mine.row * KEY_BLOCKS + mine.k)
        head, query = np.divmod(edges.row, len(packer.spans))
        head = head * self.trace.heads // packer.trace.heads  # a mask by KV head serves its group
        first, end = packer.spans[query].T
        row0, row1 = self._rows(first), self._rows(end - 1)
        there = (row0 >= 0) & (row1 >= 0)
        size, block = packer.trace.block, self.trace.block
        kept, pairs = np.zeros(len(edges.row)), np.zeros(len(edges.row))
        for i in range(int((row1 - row0)[there].max(initial=-1)) + 1):
            there &= row0 + i <= row1
            row = np.where(there, row0 + i, 0)
            low = np.where(there, np.maximum(first, self.spans[row, 0]), 0)
            high = np.where(there, np.maximum(np.minimum(end, self.spans[row, 1]), low), 0)
            for j in range((size - 2) // block + 2):
                cell = edges.k * size // block + j
                begin = np.maximum(edges.k * size, cell * block)
                stop = np.maximum(np.minimum((edges.k + 1) * size, (cell + 1) * block), begin)
                count = _causal_pairs(low, high, stop) - _causal_pairs(low, high, begin)
                code = (head * len(self.spans) + row) * KEY_BLOCKS + cell
                place = np.minimum(np.searchsorted(keys, code), max(len(keys) - 1, 0))
                pairs += count
                kept += count * (keys[place] == code if len(keys) else False)
        return np.where(pairs > 0, kept / np.maximum(pairs, 1), 1.0).astype(np.float32)

    def _rows(self, token: np.ndarray) -> np.ndarray:
        inside = np.clip(token, 0, len(self.row_of) - 1)
        return np.where((token >= 0) & (token < len(self.row_of)), self.row_of[inside], -1)


def _causal_pairs(low: np.ndarray, high: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pairs of a query t in [low, high) and a key s < keys with s <= t."""
    turn = np.clip(keys, low, high)  # from here on a query sees all of the keys
    return (turn * (turn + 1) - low * (low + 1)) // 2 + (high - turn) * keys
