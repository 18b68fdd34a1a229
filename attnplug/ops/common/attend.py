"""The skeleton of the kernels in which a program attends with a group's queries to one piece of the
keys that a row keeps. A family gives the jit function that reads a turn's keys:

    query = load_queries(...)
    attend_split(query, first, last, Way(...), piece, ..., READ=_read, ...)
    _read(i, way, SHAPE, KEEP, TURNS)  ->  keys [TILE, DP], values [TILE, DP], seen [TILE]

The loop, the online softmax and what is stored are here. `way` is the family's NamedTuple, whatever
its `_read` needs of what the program worked out before the loop.
"""

from typing import Any, NamedTuple

from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_wait, tl, triton
from attnplug.ops.common.views import begin_of


class Turns(NamedTuple):
    """How a program goes through its piece."""

    TILE: int  # keys of a turn
    STAGES: int
    AHEAD: int = 0  # slots that are looked up before the first turn, padded; 0: in each turn
    ONE: bool = False  # there is one turn


class Piece(NamedTuple):
    """Of which row a program attends to which piece."""

    split: Any
    places: Any  # for the pieces of a row
    t: Any
    h: Any  # the KV head
    b: Any  # int64
    heads: Any  # query heads
    rows: Any  # query-head pairs in all, int64


class Source(NamedTuple):
    """Where the keys and values of a row's KV head begin (with a table, those of page 0), and those
    of a step's `token` that is not in the cache yet."""

    k: Any
    v: Any
    new_k: Any
    new_v: Any


@triton.jit
def source_of(cache, token, b, h):
    k_at, v_at = begin_of(cache, b, h)
    new_k, new_v = k_at, v_at  # no Nones: Triton 3.6 returns none in a tuple
    if token is not None:
        new_k = token.k + b * token.k_b + h * token.k_h
        new_v = token.v + b * token.v_b + h * token.v_h
    return Source(k_at, v_at, new_k, new_v)


@triton.jit
def load_queries(q, t, h, b, SHAPE: tl.constexpr, CACHED: tl.constexpr):
    """Query t of each head of KV head h's group, `[ROWS, DP]`."""
    ROWS: tl.constexpr = SHAPE.ROWS
    DP: tl.constexpr = SHAPE.DP
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    head = h * SHAPE.GROUP + g
    at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + t * q.t + d[None, :]
    mask = (g < SHAPE.GROUP)[:, None] & (d < SHAPE.D)[None, :]
    return tl.load(at, mask=mask, other=0.0, cache_modifier=CACHED)


@triton.jit
def _channels_at(begin, new, token, at, newest, pages, in_page, p_stride, s_stride, table, d):
    """Where the channels d of the keys (values) of the tokens `at` are: the newest one's are not in
    the cache yet, or with a table all of them are in the `pages`, at `in_page`."""
    if table is None:
        token_at = begin + at.to(tl.int64) * s_stride
        if token is not None:
            token_at = tl.where(at == newest, new, token_at)
        return token_at[:, None] + d[None, :]
    else:  # channels first: fewer sums of addresses stay in the loop
        return begin + d[None, :] + (pages * p_stride + in_page * s_stride)[:, None]


@triton.jit
def load_tile(
    source,
    cache,
    token,
    at,
    newest,
    pages,
    in_page,
    seen,
    SHAPE: tl.constexpr,
    CACHED: tl.constexpr,
):
    """Keys and values `[TILE, DP]` of the tokens `at` that are `seen`, 0 for the others. `newest`
    is the place of the `token`. With a table, the tokens are in the `pages` (int64), at
    `in_page` (int64)."""
    DP: tl.constexpr = SHAPE.DP
    d = tl.arange(0, DP)
    mask = seen[:, None] & (d < SHAPE.D)[None, :]
    table = cache.table
    key_at = _channels_at(
        source.k, source.new_k, token, at, newest, pages, in_page, cache.k_b, cache.k_s, table, d
    )
    key = tl.load(key_at, mask=mask, other=0.0, cache_modifier=CACHED)
    value_at = _channels_at(
        source.v, source.new_v, token, at, newest, pages, in_page, cache.v_b, cache.v_s, table, d
    )
    value = tl.load(value_at, mask=mask, other=0.0, cache_modifier=CACHED)
    return key, value


@triton.jit
def attend_split(
    query,
    first,
    last,
    way,
    piece,
    T,
    output,
    scale,
    cap,
    READ: tl.constexpr,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    WAITS: tl.constexpr = 0,
):
    """Attend with the queries `[ROWS, DP]` of a `piece`, of T a row, to the keys of turns `first`
    to `last - 1`, and store what comes of it. KEEP is what `READ` is compiled for, beside the
    shape. WAITS: nothing is stored before the kernels in front have ended."""
    ROWS: tl.constexpr = SHAPE.ROWS
    DP: tl.constexpr = SHAPE.DP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(first, last, num_stages=TURNS.STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        key, value, seen = READ(i, way, SHAPE, KEEP, TURNS)
        top, total, acc = attend_tile(query, key, value, seen, top, total, acc, scale, cap, CAPPED)
    if WAITS:
        gdc_wait()
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    head = piece.h * SHAPE.GROUP + g
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=(piece.b * piece.heads + head) * T + piece.t,
        rows=piece.rows,
        d=d,
        in_group=g < SHAPE.GROUP,
        in_width=d < SHAPE.D,
        split=piece.split,
        splits=piece.places,
        D=SHAPE.D,
    )
