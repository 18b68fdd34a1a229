"""The Triton kernel of gather_attention: one program attends to one piece of a row's kept keys."""

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
from attnplug.ops.gather.kernels.slots import edge_block, last_seen, look_up


class Way(NamedTuple):
    """What a program knows of its piece before the first turn."""

    source: Source
    cache: Any
    token: Any
    rows: Any
    b: Any
    low: Any
    position: Any  # of the query
    reach: Any  # the last key that is seen
    own: Any  # the query's own block
    edge: Any  # the first block that no list may name
    listed_at: Any  # where the row's list begins
    first: Any  # turn
    only: Any  # the block, where there is one turn
    listed: Any  # blocks, where a turn lies in one of them
    begins: Any  # of the blocks that were looked up, and how many of their first keys are seen
    visible: Any


@triton.jit
def _append(new, cache, position, S, d, s_stride, D: tl.constexpr):
    """Write a token's key or value `[D]` to its place, if the cache has one at `position`."""
    room = tl.where((position >= 0) & (position < S), D, 0)
    x = tl.load(new + d, mask=d < D, other=0.0, cache_modifier=".cg")
    tl.store(cache + position.to(tl.int64) * s_stride + d, x, mask=d < room)


@triton.jit
def _read_kept(i, way, SHAPE: tl.constexpr, KEEP: tl.constexpr, TURNS: tl.constexpr):
    """The keys of turn i. Slots are the sink's blocks, then the local ones, then the list; no block
    counts twice."""
    PAGE: tl.constexpr = SHAPE.PAGE
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    K: tl.constexpr = KEEP.K
    LIST: tl.constexpr = KEEP.LIST
    TILE: tl.constexpr = TURNS.TILE
    KNOWN: tl.constexpr = SINK + KEEP.LOCAL
    cache, low = way.cache, way.low
    n = tl.arange(0, TILE)
    pages, in_page = 0, 0
    if TURNS.AHEAD > 0:
        mine = (i - way.first) * (TILE // BLOCK) + n // BLOCK
        at = tl.gather(way.begins, mine, 0)
        seen = n % BLOCK < tl.gather(way.visible, mine, 0)
        if cache.table is None:
            at += n % BLOCK
        else:
            pages = (at // (PAGE // BLOCK)).to(tl.int64)
            in_page = (at % (PAGE // BLOCK) * BLOCK + n % BLOCK).to(tl.int64)
    else:
        place = i * TILE + n
        if BLOCK % TILE == 0:
            slot = i * TILE // BLOCK
            if TURNS.ONE:
                j = way.only
            else:
                j = edge_block(slot, way.own, KEEP)
                if K > 0:
                    mine = tl.arange(0, LIST) == slot - KNOWN
                    listed = tl.max(tl.where(mine, way.listed, -1), 0)
                    j = tl.where(slot < KNOWN, j, listed)
        else:
            slot = place // BLOCK
            j = edge_block(slot, way.own, KEEP)
            in_list = (slot >= KNOWN) & (slot < KNOWN + K)
            if K > 0:
                listed = tl.load(way.listed_at + slot - KNOWN, mask=in_list, other=-1)
                j = tl.where(slot < KNOWN, j, listed)
        at = low + j * BLOCK + place % BLOCK
        seen = at <= last_seen(slot, j, way.edge, way.reach, KEEP)
        seen = shown(way.rows, way.b, at, seen)
        if cache.table is not None:
            pages = page_of(cache.table + way.b * cache.table_b, at, seen, PAGE)
            in_page = (at % PAGE).to(tl.int64)
    # .cg: nothing is read twice, and an L1 line may be older than the last token.
    key, value = load_tile(
        way.source, cache, way.token, at, way.position, pages, in_page, seen, SHAPE, ".cg"
    )
    return key, value, seen


@triton.jit
def attend_piece(
    piece,
    splits,
    row,
    length,
    low,
    q,
    cache,
    rows,
    token,
    index,
    output,
    scale,
    cap,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One `piece` of `splits` of a row that is not empty, the `row`-th of all. What else is given
    is that of `attend_kept` and `attend_rows`."""
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    K: tl.constexpr = KEEP.K
    LIST: tl.constexpr = KEEP.LIST
    KNOWN: tl.constexpr = SINK + KEEP.LOCAL
    TILE: tl.constexpr = TURNS.TILE
    AHEAD: tl.constexpr = TURNS.AHEAD
    split, t, h, b = piece.split, piece.t, piece.h, piece.b
    query = load_queries(q, t, h, b, SHAPE, ".cg")
    position = length - q.T + t
    reach = position
    if token is not None:
        reach = tl.minimum(position, rows.S - 1)
    own = tl.maximum(position - low, 0) // BLOCK
    edge = tl.maximum(own - KEEP.LOCAL + 1, SINK)
    source = source_of(cache, token, b, h)
    if token is not None:
        if split == 0:
            d = tl.arange(0, DP)
            _append(source.new_k, source.k, position, rows.S, d, cache.k_s, D)
            _append(source.new_v, source.v, position, rows.S, d, cache.v_s, D)
        # The cache is full: the output shows it.
        scale = tl.where(length > rows.S, float("nan"), scale)
    TILES: tl.constexpr = ((KNOWN + K) * BLOCK + TILE - 1) // TILE
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    listed_at = index + row * K
    only, listed = 0, 0
    WHOLE: tl.constexpr = BLOCK % TILE == 0  # a tile lies in one block
    if TURNS.ONE and WHOLE:  # one block: only a program whose block is a listed one waits
        slot = split * TILE // BLOCK
        only = edge_block(slot, own, KEEP)
        if slot >= KNOWN:
            if PDL and CHAINED:
                gdc_wait()
            if K > 0:
                only = tl.load(listed_at + slot - KNOWN, cache_modifier=".cg")
    else:
        if PDL and CHAINED:
            gdc_wait()
        if WHOLE:
            i = tl.arange(0, LIST)
            listed = tl.load(listed_at + i, mask=i < K, other=-1, cache_modifier=".cg")
    # The loop loads keys alone where it looks nothing up, so that several tiles are on their way.
    begins, visible = 0, 0
    if AHEAD > 0:
        row_table = None
        if cache.table is not None:
            row_table = cache.table + b * cache.table_b
        begins, visible = look_up(
            slot=first * (TILE // BLOCK) + tl.arange(0, AHEAD),
            listed_at=listed_at,
            row_table=row_table,
            own=own,
            edge=edge,
            reach=reach,
            low=low,
            KEEP=KEEP,
            PAGE=SHAPE.PAGE,
        )
    way = Way(
        source=source,
        cache=cache,
        token=token,
        rows=rows,
        b=b,
        low=low,
        position=position,
        reach=reach,
        own=own,
        edge=edge,
        listed_at=listed_at,
        first=first,
        only=only,
        listed=listed,
        begins=begins,
        visible=visible,
    )
    attend_split(
        query=query,
        first=first,
        last=last,
        way=way,
        piece=piece,
        T=q.T,
        output=output,
        scale=scale,
        cap=cap,
        READ=_read_kept,
        SHAPE=SHAPE,
        KEEP=KEEP,
        TURNS=TURNS,
        CAPPED=CAPPED,
    )


@triton.jit
def attend_kept(
    q,
    cache,
    rows,
    token,
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
    CHAINED: tl.constexpr,
    PDL: tl.constexpr,
    SKIP_EMPTY: tl.constexpr = 0,
):
    """All heads of one query and KV head against one piece of the kept keys.

    The listed blocks stand in `index`. With a new `token` (T = 1) the kernel reads its key and
    value from there and writes them to the cache. CHAINED: the kernels in front are those of the
    same decode step, and only programs that read their list wait for it. Everything else was there
    before the first of those kernels began. In pages the token is already. SKIP_EMPTY: nothing is
    stored for a row of length 0.
    """
    split = tl.program_id(0)
    t = tl.program_id(1) % q.T
    h = tl.program_id(1) // q.T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if not CHAINED:
            gdc_wait()  # for the list, and for all else that the kernels in front have written
        gdc_launch_dependents()
    NEW: tl.constexpr = 0 if token is None else 1
    length, low = row_span(rows, b, STEPS, NEW)
    if SKIP_EMPTY:
        if length <= 0:
            if PDL and CHAINED:
                gdc_wait()  # the end of this grid tells that the kernels in front have ended too
            return
    heads = tl.num_programs(1) // q.T * SHAPE.GROUP
    total_rows = tl.num_programs(2).to(tl.int64) * (tl.num_programs(1) * SHAPE.GROUP)
    attend_piece(
        piece=Piece(split, splits, t, h, b, heads, total_rows),
        splits=splits,
        row=b * tl.num_programs(1) + tl.program_id(1),
        length=length,
        low=low,
        q=q,
        cache=cache,
        rows=rows,
        token=token,
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
