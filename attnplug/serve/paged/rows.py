"""The rows of a batch as the host knows them, cut into runs that one kernel serves."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import groupby


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's part of a batch: its queries are tokens `first` to `first + queries - 1`, and
    `seen` keys are in its pages, those of the queries included."""

    index: int
    first: int
    queries: int
    seen: int


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring rows of one kind."""

    rows: tuple[Row, ...]
    sparse: bool

    @property
    def tokens(self) -> slice:
        """The run's tokens in the batch."""
        return slice(self.rows[0].first, self.rows[-1].first + self.rows[-1].queries)

    @property
    def longest(self) -> int:
        """The most queries of a row."""
        return max(row.queries for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a batch's metadata says on the host. Rows with one query, which see `step_keys` keys,
    are neighbours; `prompts` are the others."""

    step_keys: tuple[int, ...]
    prompts: tuple[Row, ...]

    @property
    def steps(self) -> int:
        """How many rows have one query, or none."""
        return len(self.step_keys)

    def runs(self, is_sparse: Callable[[Row], bool]) -> Iterator[Run]:
        """The prompts in runs of neighbours that a method serves, or that it leaves dense. A run
        of rows that it serves has one row."""
        for sparse, rows in groupby(self.prompts, is_sparse):
            if sparse:
                yield from (Run((row,), True) for row in rows)
            else:
                yield Run(tuple(rows), False)


def batch_of(starts: list[int], seen: list[int]) -> Batch:
    """The batch whose row i has queries `starts[i]` to `starts[i + 1] - 1` and `seen[i]` keys. Rows
    with one query come first, as vLLM reorders batches, and count as steps. Those without queries,
    which pad a batch, do too: kernels look at their lengths. vLLM sets first chunks last: one of a
    single token is among the prompts where a longer row is in front of it."""
    rows = [
        Row(i, first, last - first, keys)
        for i, (first, last, keys) in enumerate(zip(starts, starts[1:], seen, strict=False))
    ]
    steps = next((row.index for row in rows if row.queries > 1), len(rows))
    prompts = tuple(row for row in rows[steps:] if row.queries > 0)
    return Batch(tuple(row.seen for row in rows[:steps]), prompts)
