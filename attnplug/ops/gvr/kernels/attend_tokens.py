"""The kernel of gather_tokens_attention that attends: a program for each split of the kept keys."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


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
    k,
    v,
    index,
    lengths,
    start,
    key_mask,
    table,
    sinks,
    partial,
    out,
    lse,
    scale,
    cap,
    T,
    S,
    splits,
    q_strides,
    k_strides,
    v_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one query and KV head against one split of the kept keys. With a `table`, k and
    v are pages of PAGE keys."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    split = tl.program_id(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()  # for the list, and for whatever else the kernels before have written
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    position = length - T + t
    window_first = tl.maximum(position - WINDOW + 1, low + SINK)
    index_at = index + ((b * tl.num_programs(1)) + tl.program_id(1)) * K

    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    if table is None:
        k_at = k + b * k_b + h.to(tl.int64) * k_h + d[None, :]
        v_at = v + b * v_b + h.to(tl.int64) * v_h + d[None, :]
    else:
        k_at = k + h.to(tl.int64) * k_h + d[None, :]
        v_at = v + h.to(tl.int64) * v_h + d[None, :]
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
        if key_mask is not None:
            seen = seen & (tl.load(key_mask + b * mask_stride + at, mask=seen, other=0) != 0)
        loadable = seen[:, None] & in_width[None, :]
        page = 0
        if table is not None:
            page = page_of(table + b * table_stride, at, seen, PAGE)
        key = tl.load(k_at + _places(at, page, k_b, k_s, PAGE), mask=loadable, other=0.0)
        value = tl.load(v_at + _places(at, page, v_b, v_s, PAGE), mask=loadable, other=0.0)
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

    heads = (tl.num_programs(1) // T) * GROUP
    store_piece(
        top=top,
        total=total,
        acc=acc,
        sinks=sinks,
        partial=partial,
        out=out,
        lse=lse,
        head=head,
        row=(b * heads + head) * T + t,
        rows=tl.num_programs(2).to(tl.int64) * heads * T,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=splits,
        D=D,
        FUSED=FUSED,
    )
