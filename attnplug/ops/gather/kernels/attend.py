"""The Triton kernel of gather_attention: one program attends to one piece of a row's kept keys."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gather.kernels.slots import edge_block, look_up


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
    rows,
    length,
    low,
    q,
    k,
    v,
    new_k,
    new_v,
    index,
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
    places,
    q_strides,
    k_strides,
    v_strides,
    new_k_strides,
    new_v_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    ONE: tl.constexpr,
    CHAINED: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Piece `split` of `splits` of a row that is not empty, stored among `places`: query t and KV
    head h of sequence b (int64), the `row`-th of all. What else is given is that of `attend_kept`
    and `attend_rows`."""
    q_b, q_h, q_t = q_strides
    k_b, k_h, k_s = k_strides
    v_b, v_h, v_s = v_strides
    NEW: tl.constexpr = 0 if new_k is None else 1
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + t * q_t + d[None, :]
    query = tl.load(
        q_at, mask=in_group[:, None] & in_width[None, :], other=0.0, cache_modifier=".cg"
    )
    position = length - T + t
    reach = position
    if NEW == 1:
        reach = tl.minimum(position, S - 1)
    own = tl.maximum(position - low, 0) // BLOCK
    edge = tl.maximum(own - LOCAL + 1, SINK)
    if table is None:
        k_at = k + b * k_b + h.to(tl.int64) * k_h
        v_at = v + b * v_b + h.to(tl.int64) * v_h
    else:
        k_at = k + h.to(tl.int64) * k_h
        v_at = v + h.to(tl.int64) * v_h
    token_k, token_v = new_k, new_v
    if NEW == 1:
        token_k = new_k + b * new_k_strides[0] + h * new_k_strides[1]
        token_v = new_v + b * new_v_strides[0] + h * new_v_strides[1]
        if split == 0:
            _append(token_k, k_at, position, S, d, k_s, D)
            _append(token_v, v_at, position, S, d, v_s, D)
        scale = tl.where(length > S, float("nan"), scale)  # the cache is full: the output shows it
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
        only = edge_block(slot, own, SINK, LOCAL)
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
        if table is not None:
            row_table = table + b * table_stride
        begins, visible = look_up(
            slot=first * PER + tl.arange(0, AHEAD),
            listed_at=index + row * K,
            row_table=row_table,
            own=own,
            edge=edge,
            reach=reach,
            low=low,
            BLOCK=BLOCK,
            SINK=SINK,
            LOCAL=LOCAL,
            K=K,
            PAGE=PAGE,
        )
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        pages, in_page = 0, 0
        if AHEAD > 0:
            mine = (i - first) * PER + n // BLOCK
            at = tl.gather(begins, mine, 0)
            seen = n % BLOCK < tl.gather(visible, mine, 0)
            if table is None:
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
                    j = edge_block(slot, own, SINK, LOCAL)
                    if K > 0:
                        mine = tl.arange(0, LIST) == slot - KNOWN
                        listed = tl.max(tl.where(mine, listed_blocks, -1), 0)
                        j = tl.where(slot < KNOWN, j, listed)
            else:
                slot = place // BLOCK
                j = edge_block(slot, own, SINK, LOCAL)
                in_list = (slot >= KNOWN) & (slot < KNOWN + K)
                if K > 0:
                    listed = tl.load(index + row * K + slot - KNOWN, mask=in_list, other=-1)
                    j = tl.where(slot < KNOWN, j, listed)
            # Keys of block j are visible up to the query's own position, or none where the slot's
            # block is counted in another slot.
            until = tl.where((slot < KNOWN) | (j < edge), reach, -0x7FFFFFFF)
            until = tl.where((slot < SINK) | (j >= SINK), until, -0x7FFFFFFF)
            at = low + j * BLOCK + place % BLOCK
            seen = at <= until
            if key_mask is not None:
                seen = seen & (tl.load(key_mask + b * mask_stride + at, mask=seen, other=0) != 0)
            if table is not None:
                pages = page_of(table + b * table_stride, at, seen, PAGE)
                in_page = (at % PAGE).to(tl.int64)
        loadable = seen[:, None] & in_width[None, :]
        # .cg: nothing is read twice, and an L1 line may be older than the last token.
        key = tl.load(
            _token_at(k_at, token_k, at, position, pages, in_page, k_b, k_s, table)[:, None]
            + d[None, :],
            mask=loadable,
            other=0.0,
            cache_modifier=".cg",
        )
        value = tl.load(
            _token_at(v_at, token_v, at, position, pages, in_page, v_b, v_s, table)[:, None]
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

    heads = kv_heads * GROUP
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
        rows=rows,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=places,
        D=D,
        FUSED=FUSED,
    )


@triton.jit
def attend_kept(
    q,
    k,
    v,
    new_k,
    new_v,
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
    new_k_strides,
    new_v_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    CAPPED: tl.constexpr,
    FUSED: tl.constexpr,
    ONE: tl.constexpr,
    CHAINED: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
    SKIP_EMPTY: tl.constexpr = 0,
):
    """All heads of one query and KV head against one piece of the kept keys.

    The listed blocks stand in `index`. With a new token (T = 1) the kernel reads its key and value
    from `new_k, new_v` and writes them to the cache. ONE: each piece is one tile. CHAINED: the
    kernels in front are those of the same decode step, and only programs that read their list wait
    for it. Everything else was there before the first of those kernels began. With a `table`, k and
    v are pages of PAGE keys; the token is in them already. SKIP_EMPTY: nothing is stored for a row
    of length 0.
    """
    split = tl.program_id(0)
    t = tl.program_id(1) % T
    h = tl.program_id(1) // T
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        if not CHAINED:
            gdc_wait()  # for the list, and for all else that the kernels in front have written
        gdc_launch_dependents()
    NEW: tl.constexpr = 0 if new_k is None else 1
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP, NEW)
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
        kv_heads=tl.num_programs(1) // T,
        rows=tl.num_programs(2).to(tl.int64) * (tl.num_programs(1) * GROUP),
        length=length,
        low=low,
        q=q,
        k=k,
        v=v,
        new_k=new_k,
        new_v=new_v,
        index=index,
        key_mask=key_mask,
        table=table,
        sinks=sinks,
        partial=partial,
        out=out,
        lse=lse,
        scale=scale,
        cap=cap,
        T=T,
        S=S,
        splits=splits,
        places=splits,
        q_strides=q_strides,
        k_strides=k_strides,
        v_strides=v_strides,
        new_k_strides=new_k_strides,
        new_v_strides=new_v_strides,
        mask_stride=mask_stride,
        table_stride=table_stride,
        GROUP=GROUP,
        ROWS=ROWS,
        D=D,
        DP=DP,
        BLOCK=BLOCK,
        SINK=SINK,
        LOCAL=LOCAL,
        K=K,
        LIST=LIST,
        TILE=TILE,
        STAGES=STAGES,
        AHEAD=AHEAD,
        CAPPED=CAPPED,
        FUSED=FUSED,
        ONE=ONE,
        CHAINED=CHAINED,
        PAGE=PAGE,
        PDL=PDL,
    )
