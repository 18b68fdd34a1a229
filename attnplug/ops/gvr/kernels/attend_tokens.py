"""The kernel of gather_tokens_attention that attends: a program for each split of the kept keys."""

from typing import Any, NamedTuple

from attnplug.ops.common.attend import (
    Piece,
    Source,
    attend_split,
    load_queries,
    load_tile,
    source_of,
)
from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span, shown
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


class KeepTokens(NamedTuple):
    """The keep set that a kernel is compiled for."""

    SINK: int  # first tokens
    WINDOW: int  # last tokens
    K: int  # listed ones


class Way(NamedTuple):
    """What a program knows of its piece before the first turn."""

    source: Source
    cache: Any
    rows: Any
    b: Any
    low: Any
    position: Any  # of the query
    listed_at: Any  # where the row's list begins


@triton.jit
def _read_tokens(i, way, SHAPE: tl.constexpr, KEEP: tl.constexpr, TURNS: tl.constexpr):
    """The keys of turn i. Slots are the sink, then the window, then the list; no token counts
    twice."""
    SINK: tl.constexpr = KEEP.SINK
    WINDOW: tl.constexpr = KEEP.WINDOW
    PAGE: tl.constexpr = SHAPE.PAGE
    KNOWN: tl.constexpr = SINK + WINDOW
    cache, low, position = way.cache, way.low, way.position
    window_first = tl.maximum(position - WINDOW + 1, low + SINK)
    slot = i * TURNS.TILE + tl.arange(0, TURNS.TILE)
    in_list = (slot >= KNOWN) & (slot < KNOWN + KEEP.K)
    listed = tl.load(way.listed_at + slot - KNOWN, mask=in_list, other=-1)
    nearby = position - WINDOW + 1 + slot - SINK
    at = tl.where(slot < SINK, low + slot, tl.where(slot < KNOWN, nearby, listed))
    until = tl.where(in_list, window_first - 1, position)
    since = tl.where(slot < SINK, low, low + SINK)
    seen = (at >= since) & (at <= until) & (slot < KNOWN + KEEP.K)
    seen = shown(way.rows, way.b, at, seen)
    pages, in_page = 0, 0
    if cache.table is not None:
        pages = page_of(cache.table + way.b * cache.table_b, at, seen, PAGE)
        in_page = (at % PAGE).to(tl.int64)
    key, value = load_tile(way.source, cache, None, at, -1, pages, in_page, seen, SHAPE, "")
    return key, value, seen


@triton.jit
def attend_tokens(
    q,
    cache,
    rows,
    index,
    output,
    scale,
    cap,
    splits,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    TURNS: tl.constexpr,
    STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one query and KV head against one split of the kept keys."""
    split = tl.program_id(0)
    t = tl.program_id(1) % q.T
    h = tl.program_id(1) // q.T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()  # for the list, and for whatever else the kernels before have written
        gdc_launch_dependents()
    length, low = row_span(rows, b, STEPS)
    listed_at = index + (b * tl.num_programs(1) + tl.program_id(1)) * KEEP.K
    source = source_of(cache, None, b, h)
    heads = tl.num_programs(1) // q.T * SHAPE.GROUP
    total_rows = tl.num_programs(2).to(tl.int64) * heads * q.T
    TILES: tl.constexpr = tl.cdiv(KEEP.SINK + KEEP.WINDOW + KEEP.K, TURNS.TILE)
    attend_split(
        query=load_queries(q, t, h, b, SHAPE, ""),
        first=split * TILES // splits,
        last=(split + 1) * TILES // splits,
        way=Way(source, cache, rows, b, low, length - q.T + t, listed_at),
        piece=Piece(split, splits, t, h, b, heads, total_rows),
        T=q.T,
        output=output,
        scale=scale,
        cap=cap,
        READ=_read_tokens,
        SHAPE=SHAPE,
        KEEP=KEEP,
        TURNS=TURNS,
        CAPPED=CAPPED,
    )
