"""Parts of a prefill's call as calls of their own: its first queries, its last, each row alone,
those of each span of the prompt."""

import dataclasses
from typing import NamedTuple

from attnplug.call import AttentionCall
from attnplug.models.cache import PlugLayer
from attnplug.models.sync import may_sync


class Span(NamedTuple):
    """How queries from one place of their prompt on, to before another (None: to its end), are
    measured, and how many blocks each of their query blocks keeps."""

    begin: int
    end: int | None
    gamma: int
    top_k: int

    def queries(self, tokens: int) -> int:
        """How many of a prompt's queries are in it."""
        return max(0, (tokens if self.end is None else min(tokens, self.end)) - self.begin)


def first_query(call: AttentionCall) -> int | None:
    """The place of the call's first query in its prompt. None where only the device knows it: in
    traced and captured code over a static cache."""
    queries, state = call.q.shape[2], call.state
    if call.lengths is None:
        return call.k.shape[2] - queries
    if not may_sync(call.q.is_cuda):
        return None
    if isinstance(state, PlugLayer) and not state.uncounted:
        return max(0, state.counted - queries)
    return max(0, int(call.lengths) - queries)


def ends_before(call: AttentionCall, place: int) -> bool:
    """Whether the host knows that all of the call's queries are in front of a place."""
    if call.k.shape[2] <= place:
        return True
    first = first_query(call)
    return first is not None and first + call.q.shape[2] <= place


def first_queries(call: AttentionCall, queries: int) -> AttentionCall:
    """The call of its first queries alone."""
    q, later = call.q[:, :, :queries], call.q.shape[2] - queries
    if call.lengths is not None:
        return dataclasses.replace(call, q=q, lengths=call.lengths - later)
    keys = call.k.shape[2] - later
    mask = None if call.key_mask is None else call.key_mask[:, :keys]
    k, v = call.k[:, :, :keys], call.v[:, :, :keys]
    return dataclasses.replace(call, q=q, k=k, v=v, key_mask=mask)


def last_queries(call: AttentionCall, queries: int) -> AttentionCall:
    """The call of its last queries alone."""
    return dataclasses.replace(call, q=call.q[:, :, -queries:])


def groups_of_heads(call: AttentionCall, each: int) -> list[AttentionCall]:
    """The call in groups of so many KV heads, and their query heads."""
    heads = call.k.shape[1]
    if each >= heads:
        return [call]
    group = call.q.shape[1] // heads
    return [
        dataclasses.replace(
            call,
            q=call.q[:, first * group : (first + each) * group],
            k=call.k[:, first : first + each],
            v=call.v[:, first : first + each],
        )
        for first in range(0, heads, each)
    ]


def rows_alone(call: AttentionCall) -> list[AttentionCall | None]:
    """Each row of a padded batch from its first key on, as if it had come alone; None for one
    whose queries are all padding. Looks at lengths and mask on the host."""
    assert call.start is not None
    queries = call.q.shape[2]
    length = call.k.shape[2] if call.lengths is None else int(call.lengths)
    rows: list[AttentionCall | None] = []
    for row, start in enumerate(call.start.tolist()):
        skipped = max(0, start - (length - queries))
        q = call.q[row : row + 1, :, skipped:]
        k, v = (x[row : row + 1, :, start:length] for x in (call.k, call.v))
        mask = None if call.key_mask is None else call.key_mask[row : row + 1, start:length]
        if mask is not None and bool(mask.all()):
            mask = None
        alone = dataclasses.replace(
            call, q=q, k=k, v=v, lengths=None, start=None, key_mask=mask, state=None
        )
        rows.append(alone if skipped < queries else None)
    return rows


def cut_at_spans(
    call: AttentionCall, first: int, spans: list[Span], query_block: int
) -> list[tuple[AttentionCall, Span]]:
    """The call, whose first query has the place `first`, in parts of one span each: cut at its
    first query block that begins behind a span's end."""
    parts, begun, queries = [], 0, call.q.shape[2]
    for span in spans:
        end = queries
        if span.end is not None:
            end = -(-(span.end - first) // query_block) * query_block
        if end <= begun:
            continue
        if end >= queries:
            parts.append((last_queries(call, queries - begun) if begun else call, span))
            break
        part = first_queries(call, end)
        parts.append((last_queries(part, end - begun) if begun else part, span))
        begun = end
    return parts
