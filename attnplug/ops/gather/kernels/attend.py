"""The Triton kernel of gather_attention: one program attends to one piece of a row's kept keys."""

from typing import NamedTuple

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span, shown
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.gather.kernels.slots import edge_block, look_up


class Turns(NamedTuple):
    """How a program goes through its piece."""

    TILE: int  # keys of a turn
    STAGES: int
    AHEAD: int = 0  # slots that are looked up before the first turn, padded; 0: in each turn
    ONE: bool = False  # there is one turn


@triton.jit
def _append(new, cache, position, S, d, s_stride, D: tl.constexpr):
    """Write a token's key or value `[D]` to its place, if the cache has one at `position`."""
    room = tl.where((position >= 0) & (position < S), D, 0)
    x = tl.load(new + d, mask=d < D, other=0.0, cache_modifier=".cg")
    tl.store(cache + position.to(tl.int64) * s_stride + d, x, mask=d < room)


@triton.jit
def _token_at(cache, new, at, position, pages, in_page, p_stride, s_stride, table):
    """Where the keys (values) of the tokens `at` are: the newest one's is not in the cache yet, or
    with a table all of them are in the `pages`, at `in_page`."""
    if table is None:
        token_at = cache + at.to(tl.int64) * s_stride
        if new is not None:
            token_at = tl.where(at == position, new, token_at)
    else:
        token_at = cache + pages * p_stride + in_page * s_stride
    return token_at


@triton.jit
def attend_piece(
    split,
    t,
    h,
    b,
    row,
    kv_heads,
    total_rows,
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
    splits,
    places,
    SHAPE: tl.constexpr,
    KEEP: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Piece `split` of `splits` of a row that is not empty, stored among `places`: query t and KV
    head h of sequence b (int64), the `row`-th of all. What else is given is that of `attend_kept`
    and `attend_rows`."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    PAGE: tl.constexpr = SHAPE.PAGE
    BLOCK: tl.constexpr = KEEP.BLOCK
    SINK: tl.constexpr = KEEP.SINK
    LOCAL: tl.constexpr = KEEP.LOCAL
    K: tl.constexpr = KEEP.K
    LIST: tl.constexpr = KEEP.LIST
    TILE: tl.constexpr = TURNS.TILE
    AHEAD: tl.constexpr = TURNS.AHEAD
    ONE: tl.constexpr = TURNS.ONE
    NEW: tl.constexpr = 0 if token is None else 1
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + t * q.t + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & in_width[None, :], other=0.0, cache_modifier=".cg"
    )
    position = length - q.T + t
    reach = position
    if NEW == 1:
        reach = tl.minimum(position, rows.S - 1)
    own = tl.maximum(position - low, 0) // BLOCK
    edge = tl.maximum(own - LOCAL + 1, SINK)
    k_at, v_at = begin_of(cache, b, h)
    token_k, token_v = None, None
    if token is not None:
        token_k = token.k + b * token.k_b + h * token.k_h
        token_v = token.v + b * token.v_b + h * token.v_h
        if split == 0:
            _append(token_k, k_at, position, rows.S, d, cache.k_s, D)
            _append(token_v, v_at, position, rows.S, d, cache.v_s, D)
        # The cache is full: the output shows it.
        scale = tl.where(length > rows.S, float("nan"), scale)
    if cache.k_scale is not None:
        scale *= tl.load(cache.k_scale)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    TILES: tl.constexpr = ((SINK + LOCAL + K) * BLOCK + TILE - 1) // TILE
    # Slots are the sink's blocks, then the local ones, then the list; no block counts twice.
    KNOWN: tl.constexpr = SINK + LOCAL
    WHOLE: tl.constexpr = BLOCK % TILE == 0  # a tile lies in one block
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    only, listed_blocks = 0, 0
    if ONE and WHOLE:  # one block: only a program whose block is a listed one waits
        slot = split * TILE // BLOCK
        only = edge_block(slot, own, KEEP)
        if slot >= KNOWN:
            if PDL and CHAINED:
                gdc_wait()
            if K > 0:
                only = tl.load(index + row * K + slot - KNOWN, cache_modifier=".cg")
    else:
        if PDL and CHAINED:
            gdc_wait()
        if WHOLE:
            i = tl.arange(0, LIST)
            listed_blocks = tl.load(index + row * K + i, mask=i < K, other=-1, cache_modifier=".cg")
    # The loop loads keys alone where it looks nothing up, so that several tiles are on their way.
    PER: tl.constexpr = TILE // BLOCK if AHEAD > 0 else 1
    begins, visible = 0, 0
    if AHEAD > 0:
        row_table = None
        if cache.table is not None:
            row_table = cache.table + b * cache.table_b
        begins, visible = look_up(
            slot=first * PER + tl.arange(0, AHEAD),
            listed_at=index + row * K,
            row_table=row_table,
            own=own,
            edge=edge,
            reach=reach,
            low=low,
            KEEP=KEEP,
            PAGE=PAGE,
        )
    for i in tl.range(first, last, num_stages=TURNS.STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        pages, in_page = 0, 0
        if AHEAD > 0:
            mine = (i - first) * PER + n // BLOCK
            at = tl.gather(begins, mine, 0)
            seen = n % BLOCK < tl.gather(visible, mine, 0)
            if cache.table is None:
                at += n % BLOCK
            else:
                pages = (at // (PAGE // BLOCK)).to(tl.int64)
                in_page = (at % (PAGE // BLOCK) * BLOCK + n % BLOCK).to(tl.int64)
        else:
            place = i * TILE + n
            if WHOLE:
                slot = i * TILE // BLOCK
                if ONE:
                    j = only
                else:
                    j = edge_block(slot, own, KEEP)
                    if K > 0:
                        mine = tl.arange(0, LIST) == slot - KNOWN
                        listed = tl.max(tl.where(mine, listed_blocks, -1), 0)
                        j = tl.where(slot < KNOWN, j, listed)
            else:
                slot = place // BLOCK
                j = edge_block(slot, own, KEEP)
                in_list = (slot >= KNOWN) & (slot < KNOWN + K)
                if K > 0:
                    listed = tl.load(index + row * K + slot - KNOWN, mask=in_list, other=-1)
                    j = tl.where(slot < KNOWN, j, listed)
            # Keys of block j are visible up to the query's own position, or none where the slot's
            # block is counted in another slot.
            until = tl.where((slot < KNOWN) | (j < edge), reach, -0x7FFFFFFF)
            until = tl.where((slot < SINK) | (j >= SINK), until, -0x7FFFFFFF)
            at = low + j * BLOCK + place % BLOCK
            seen = shown(rows, b, at, at <= until)
            if cache.table is not None:
                pages = page_of(cache.table + b * cache.table_b, at, seen, PAGE)
                in_page = (at % PAGE).to(tl.int64)
        loadable = seen[:, None] & in_width[None, :]
        # .cg: nothing is read twice, and an L1 line may be older than the last token.
        key = tl.load(
            _token_at(
                k_at, token_k, at, position, pages, in_page, cache.k_b, cache.k_s, cache.table
            )[:, None]
            + d[None, :],
            mask=loadable,
            other=0.0,
            cache_modifier=".cg",
        )
        value = tl.load(
            _token_at(
                v_at, token_v, at, position, pages, in_page, cache.v_b, cache.v_s, cache.table
            )[:, None]
            + d[None, :],
            mask=loadable,
            other=0.0,
            cache_modifier=".cg",
        )
        top, total, acc = attend_tile(
            query=query,
            key=key,
            value=value,
            seen=seen,
            top=top,
            total=total,
            acc=acc,
            scale=scale,
            cap=cap,
            CAPPED=CAPPED,
        )

    if cache.v_scale is not None:
        acc *= tl.load(cache.v_scale)
    heads = kv_heads * GROUP
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=(b * heads + head) * q.T + t,
        rows=total_rows,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=places,
        D=D,
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
    attend_piece(
        split=split,
        t=t,
        h=h,
        b=b,
        row=b * tl.num_programs(1) + tl.program_id(1),
        kv_heads=tl.num_programs(1) // q.T,
        total_rows=tl.num_programs(2).to(tl.int64) * (tl.num_programs(1) * SHAPE.GROUP),
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
        splits=splits,
        places=splits,
        SHAPE=SHAPE,
        KEEP=KEEP,
        TURNS=TURNS,
        CAPPED=CAPPED,
        CHAINED=CHAINED,
        PDL=PDL,
    )
