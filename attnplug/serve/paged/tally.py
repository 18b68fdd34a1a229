"""What has really served the rows of an engine's batches, counted on the host since somebody last
asked, and in words."""

import dataclasses
from collections.abc import Iterable

from attnplug.policies.crossover import RowCrossover
from attnplug.serve.paged.rows import Row


@dataclasses.dataclass
class StepRows:
    """The rows of the steps that all layers of an engine have had, how many of them were far, and
    the most keys of a row that was not. A captured graph runs no code of a layer's on the host, but
    the host knows each batch's lengths, and far rows follow from these alone."""

    rows: int = 0
    far: int = 0
    nearest: int = 0

    def note(self, keys: Iterable[int], rule: RowCrossover | None) -> None:
        """A batch of steps that see so many keys. A row with a single key pads the batch, or is an
        engine's own trial: a step comes behind a prompt."""
        real = [count for count in keys if count > 1]
        far = 0 if rule is None else rule.count(real)
        near = [count for count in real if not far or rule is None or count < rule.row]
        self.rows += len(real)
        self.far += far
        self.nearest = max(self.nearest, *near, 0)

    def reset(self) -> None:
        """Begin to count again."""
        self.rows = self.far = self.nearest = 0


@dataclasses.dataclass
class PromptRows:
    """The rows of several queries that one layer has had, prompts or chunks of them, how many of
    them the method for prompts has served, and the most queries and keys of the others."""

    rows: int = 0
    sparse: int = 0
    queries: int = 0
    keys: int = 0

    def note_dense(self, rows: Iterable[Row]) -> None:
        """Rows that dense serves."""
        for row in rows:
            self.rows += 1
            self.queries = max(self.queries, row.queries)
            self.keys = max(self.keys, row.seen)

    def note_sparse(self) -> None:
        """A row that the method serves."""
        self.rows += 1
        self.sparse += 1

    def reset(self) -> None:
        """Begin to count again."""
        self.rows = self.sparse = self.queries = self.keys = 0


def in_words(method: str, count: int, rows: int, what: str, why: str) -> str:
    """Who has served `rows` rows, named `what`: `count` of them the `method`, which is "" where
    there is none, and dense the others, for the reason `why`. "" where no rows came."""
    if not rows:
        return ""
    if not count:
        return f"dense ({why})" if why else "dense"
    if count == rows:
        return method
    return f"{method} ({count:,} of {rows:,} {what}, else dense: {why})"
