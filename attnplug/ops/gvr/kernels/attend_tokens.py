"""The kernel of gather_tokens_attention that attends: a program for each split of the kept keys."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span, shown
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.common.views import begin_of


@triton.jit
def _places(at, page, page_stride, key_stride, PAGE: tl.constexpr):
    """Where keys `at` of a row lie, as a column: in their pages, unless PAGE is 0."""
    if PAGE == 0:
        return at.to(tl.int64)[:, None] * key_stride
    else:
        return (page * page_stride + (at % PAGE).to(tl.int64) * key_stride)[:, None]


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
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one query and KV head against one split of the kept keys."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    PAGE: tl.constexpr = SHAPE.PAGE
    split = tl.program_id(0)
    t = tl.program_id(1) % q.T
    h = tl.program_id(1) // q.T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()  # for the list, and for whatever else the kernels before have written
        gdc_launch_dependents()
    length, low = row_span(rows, b, STEPS)
    position = length - q.T + t
    window_first = tl.maximum(position - WINDOW + 1, low + SINK)
    index_at = index + ((b * tl.num_programs(1)) + tl.program_id(1)) * K

    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + t * q.t + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    k_at, v_at = begin_of(cache, b, h)
    k_at, v_at = k_at + d[None, :], v_at + d[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    TILES: tl.constexpr = (SINK + WINDOW + K + TILE - 1) // TILE
    first = split * TILES // splits
    last = (split + 1) * TILES // splits
    # Not pipelined: Triton 3.6 silently compiled such a loop over gathered keys to wrong code
    # (block_sparse_attention).
    for i in tl.range(first, last, num_stages=1):
        # Slots are the sink, then the window, then the list; no token counts twice.
        slot = i * TILE + n
        in_list = (slot >= SINK + WINDOW) & (slot < SINK + WINDOW + K)
        listed = tl.load(index_at + slot - SINK - WINDOW, mask=in_list, other=-1)
        nearby = position - WINDOW + 1 + slot - SINK
        at = tl.where(slot < SINK, low + slot, tl.where(slot < SINK + WINDOW, nearby, listed))
        until = tl.where(in_list, window_first - 1, position)
        since = tl.where(slot < SINK, low, low + SINK)
        seen = (at >= since) & (at <= until) & (slot < SINK + WINDOW + K)
        seen = shown(rows, b, at, seen)
        loadable = seen[:, None] & in_width[None, :]
        page = 0
        if cache.table is not None:
            page = page_of(cache.table + b * cache.table_b, at, seen, PAGE)
        key_at = k_at + _places(at, page, cache.k_b, cache.k_s, PAGE)
        key = tl.load(key_at, mask=loadable, other=0.0)
        value_at = v_at + _places(at, page, cache.v_b, cache.v_s, PAGE)
        value = tl.load(value_at, mask=loadable, other=0.0)
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

    heads = (tl.num_programs(1) // q.T) * GROUP
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=(b * heads + head) * q.T + t,
        rows=tl.num_programs(2).to(tl.int64) * heads * q.T,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=splits,
        D=D,
    )
