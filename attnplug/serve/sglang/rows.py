"""The rows of SGLang's batches: those of prompts first, the steps of a mixed batch behind them."""

from typing import NamedTuple

from attnplug.serve.paged.rows import Batch, Row


class Extend(NamedTuple):
    """A batch with prompts. Its rows from `first_step` on, with tokens from `first_token` on, have
    one query each, and are the batch's steps."""

    batch: Batch
    first_step: int
    first_token: int


def extend_of(queries: list[int], prefixes: list[int]) -> Extend:
    """The batch whose row i has so many queries behind so many keys that are cached: a prefix hit,
    chunks before, or a step's context. A prompt's rest of one token may be among the steps."""
    rows, first = [], 0
    for index, (count, prefix) in enumerate(zip(queries, prefixes, strict=True)):
        rows.append(Row(index, first, count, prefix + count))
        first += count
    steps = 0
    while steps < len(rows) and rows[-1 - steps].queries == 1:
        steps += 1
    prompts, behind = rows[: len(rows) - steps], rows[len(rows) - steps :]
    batch = Batch(tuple(row.seen for row in behind), tuple(row for row in prompts if row.queries))
    return Extend(batch, len(prompts), first - steps)
