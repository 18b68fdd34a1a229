"""The Triton kernel of gather_rows: pieces of far rows, which keep some blocks, and of near rows,
which are read whole, in one launch over pages."""

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
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.common.views import Rows
from attnplug.ops.gather.kernels.attend import attend_piece


@triton.jit
def _page_at(row_table, i, ASM: tl.constexpr):
    """One entry of a row's table, int64. A load of Triton's would be taken into the loop's pipeline
    and copied asynchronously, and the keys, whose addresses come from it, would then be on their
    way for one tile at a time, whatever the number of stages (Triton 3.6)."""
    if ASM:
        page = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];",
            "=r,l",
            [(row_table + i).to(tl.int64)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        page = tl.load(row_table + i)
    return page.to(tl.int64)


@triton.jit
def _pages_of_tile(
    row_table, first, length, TILE: tl.constexpr, PAGE: tl.constexpr, ASM: tl.constexpr
):
    """The pages of keys `first` to `first + TILE - 1`, int64, `[TILE]` or one for all. From
    `length` on, that of the last key."""
    n = tl.arange(0, TILE)
    if PAGE % TILE == 0:
        pages = _page_at(row_table, tl.minimum(first, length - 1) // PAGE, ASM)
    elif TILE % PAGE == 0:
        pages = tl.zeros([TILE], tl.int64)
        for i in tl.static_range(TILE // PAGE):
            page = _page_at(row_table, tl.minimum(first + i * PAGE, length - 1) // PAGE, ASM)
            pages = tl.where(n // PAGE == i, page, pages)
    else:
        pages = page_of(row_table, first + n, first + n < length, PAGE)
    return pages


class WholeRow(NamedTuple):
    source: Source
    cache: Any
    row_table: Any
    length: Any


@triton.jit
def _read_whole(i, row, SHAPE: tl.constexpr, ASM: tl.constexpr, TURNS: tl.constexpr):
    """The keys of turn i, all of a row in their order."""
    TILE: tl.constexpr = TURNS.TILE
    PAGE: tl.constexpr = SHAPE.PAGE
    at = i * TILE + tl.arange(0, TILE)
    seen = at < row.length
    pages = _pages_of_tile(row.row_table, i * TILE, row.length, TILE, PAGE, ASM)
    in_page = (at % PAGE).to(tl.int64)
    key, value = load_tile(row.source, row.cache, None, at, -1, pages, in_page, seen, SHAPE, "")
    return key, value, seen


@triton.jit
def _attend_whole(
    piece,
    splits,
    length,
    q,
    cache,
    output,
    scale,
    cap,
    SHAPE: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """One `piece` of `splits` of all keys of a row, as `dense_decode` cuts and adds them up. A row
    without keys, which pads a batch, gives pieces of weight 0."""
    h, b = piece.h, piece.b
    tiles = tl.cdiv(length, TURNS.TILE)
    row_table = cache.table + b * cache.table_b
    attend_split(
        query=load_queries(q, 0, h, b, SHAPE, ""),
        first=piece.split * tiles // splits,
        last=(piece.split + 1) * tiles // splits,
        way=WholeRow(source_of(cache, None, b, h), cache, row_table, length),
        piece=piece,
        T=1,
        output=output,
        scale=scale,
        cap=cap,
        READ=_read_whole,
        SHAPE=SHAPE,
        KEEP=ASM,
        TURNS=TURNS,
        CAPPED=CAPPED,
    )


@triton.jit
def attend_rows(
    q,
    cache,
    rows,
    near,
    index,
    output,
    scale,
    cap,
    splits,
    whole_splits,
    places,
    SHAPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEEP: tl.constexpr,
    TURNS: tl.constexpr,
    WHOLE_TURNS: tl.constexpr,
    STEPS: tl.constexpr,
    NEAR_STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one KV head against one piece of a row: of its kept keys where `rows` has its
    length (`attend_kept`), of all keys where `rows` has 0 and `near` the length. A row has `places`
    for pieces, of which a far row fills `splits`, and another `whole_splits`.

    Programs are numbered through once over the pieces of far rows and once over those of near ones,
    and serve whichever of their two is there, or both. So the programs of near rows, which read the
    most, come first and find multiprocessors of their own, however few they are.
    """
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    batch = tl.num_programs(1)
    total_rows = batch.to(tl.int64) * (KV_HEADS * SHAPE.GROUP)
    whole_b = number // (whole_splits * KV_HEADS)
    kept_b = number // (splits * KV_HEADS)
    has_whole, has_kept = whole_b < batch, kept_b < batch
    whole_b, kept_b = tl.minimum(whole_b, batch - 1), tl.minimum(kept_b, batch - 1)
    length, low = row_span(rows, kept_b.to(tl.int64), STEPS)
    other, _ = row_span(rows, whole_b.to(tl.int64), STEPS)
    whole_length, _ = row_span(
        Rows(near, None, None, None, rows.S), whole_b.to(tl.int64), NEAR_STEPS
    )
    heads = KV_HEADS * SHAPE.GROUP
    if has_whole & (other <= 0):  # its keys were there before the first kernel of the step began
        h = number // whole_splits % KV_HEADS
        b = whole_b.to(tl.int64)
        _attend_whole(
            piece=Piece(number % whole_splits, places, 0, h, b, heads, total_rows),
            splits=whole_splits,
            length=whole_length,
            q=q,
            cache=cache,
            output=output,
            scale=scale,
            cap=cap,
            SHAPE=SHAPE,
            TURNS=WHOLE_TURNS,
            CAPPED=CAPPED,
            ASM=ASM,
        )
    if has_kept & (length > 0):
        h = number // splits % KV_HEADS
        b = kept_b.to(tl.int64)
        attend_piece(
            piece=Piece(number % splits, places, 0, h, b, heads, total_rows),
            splits=splits,
            row=b * KV_HEADS + h,
            length=length,
            low=low,
            q=q,
            cache=cache,
            rows=rows,
            token=None,
            index=index,
            output=output,
            scale=scale,
            cap=cap,
            SHAPE=SHAPE,
            KEEP=KEEP,
            TURNS=TURNS,
            CAPPED=CAPPED,
            CHAINED=CHAINED,
            PDL=PDL,
        )
    if PDL:
        gdc_wait()  # the end of this grid tells that the kernels in front have ended too
