"""The Triton kernel of gather_rows: pieces of far rows, which keep some blocks, and of near rows,
which are read whole, in one launch over pages."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
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


@triton.jit
def _attend_whole(
    split,
    h,
    b,
    length,
    rows,
    q,
    k,
    v,
    table,
    partial,
    scale,
    cap,
    splits,
    places,
    q_strides,
    k_strides,
    v_strides,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Piece `split` of `splits` of all keys of a row, as `dense_decode` cuts and adds them up. A
    row without keys, which pads a batch, gives pieces of weight 0."""
    q_b, q_h, _ = q_strides
    k_p, k_h, k_s = k_strides
    v_p, v_h, v_s = v_strides
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q + b * q_b + head.to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    tiles = tl.cdiv(length, TILE)
    first = split * tiles // splits
    last = (split + 1) * tiles // splits
    row_table = table + b * table_stride
    k_at = k + h.to(tl.int64) * k_h + d[None, :]
    v_at = v + h.to(tl.int64) * v_h + d[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at = i * TILE + n
        seen = at < length
        loadable = seen[:, None] & in_width[None, :]
        pages = _pages_of_tile(row_table, i * TILE, length, TILE, PAGE, ASM)
        in_page = (at % PAGE).to(tl.int64)
        key = tl.load(k_at + (pages * k_p + in_page * k_s)[:, None], mask=loadable, other=0.0)
        value = tl.load(v_at + (pages * v_p + in_page * v_s)[:, None], mask=loadable, other=0.0)
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
    store_piece(
        top=top,
        total=total,
        acc=acc,
        sinks=None,
        partial=partial,
        out=partial,
        lse=partial,
        head=head,
        row=b * (KV_HEADS * GROUP) + head,
        rows=rows,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=places,
        D=D,
        FUSED=False,
    )


@triton.jit
def attend_rows(
    q,
    k,
    v,
    index,
    lengths,
    near,
    table,
    partial,
    scale,
    cap,
    S,
    splits,
    whole_splits,
    places,
    q_strides,
    k_strides,
    v_strides,
    table_stride,
    KV_HEADS: tl.constexpr,
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
    WHOLE_TILE: tl.constexpr,
    WHOLE_STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    CHAINED: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    NEAR_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """All heads of one KV head against one piece of a row: of its kept keys where `lengths` has it
    (`attend_kept`), of all keys where it has 0 and `near` the row's length. A row has `places` for
    pieces, of which a far row fills `splits`, and another `whole_splits`.

    Programs are numbered through once over the pieces of far rows and once over those of near ones,
    and serve whichever of their two is there, or both. So the programs of near rows, which read the
    most, come first and find multiprocessors of their own, however few they are.
    """
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    batch = tl.num_programs(1)
    rows = batch.to(tl.int64) * (KV_HEADS * GROUP)
    whole_b = number // (whole_splits * KV_HEADS)
    kept_b = number // (splits * KV_HEADS)
    has_whole, has_kept = whole_b < batch, kept_b < batch
    whole_b, kept_b = tl.minimum(whole_b, batch - 1), tl.minimum(kept_b, batch - 1)
    length, low = row_span(lengths, None, kept_b.to(tl.int64), S, LENGTH_STEP, 0)
    other, _ = row_span(lengths, None, whole_b.to(tl.int64), S, LENGTH_STEP, 0)
    whole_length, _ = row_span(near, None, whole_b.to(tl.int64), S, NEAR_STEP, 0)
    if has_whole & (other <= 0):  # its keys were there before the first kernel of the step began
        _attend_whole(
            split=number % whole_splits,
            h=number // whole_splits % KV_HEADS,
            b=whole_b.to(tl.int64),
            length=whole_length,
            rows=rows,
            q=q,
            k=k,
            v=v,
            table=table,
            partial=partial,
            scale=scale,
            cap=cap,
            splits=whole_splits,
            places=places,
            q_strides=q_strides,
            k_strides=k_strides,
            v_strides=v_strides,
            table_stride=table_stride,
            KV_HEADS=KV_HEADS,
            GROUP=GROUP,
            ROWS=ROWS,
            D=D,
            DP=DP,
            TILE=WHOLE_TILE,
            STAGES=WHOLE_STAGES,
            CAPPED=CAPPED,
            PAGE=PAGE,
            ASM=ASM,
        )
    if has_kept & (length > 0):
        h = number // splits % KV_HEADS
        attend_piece(
            split=number % splits,
            t=0,
            h=h,
            b=kept_b.to(tl.int64),
            row=kept_b.to(tl.int64) * KV_HEADS + h,
            kv_heads=KV_HEADS,
            rows=rows,
            length=length,
            low=low,
            q=q,
            k=k,
            v=v,
            new_k=None,
            new_v=None,
            index=index,
            key_mask=None,
            table=table,
            sinks=None,
            partial=partial,
            out=partial,
            lse=partial,
            scale=scale,
            cap=cap,
            T=1,
            S=S,
            splits=splits,
            places=places,
            q_strides=q_strides,
            k_strides=k_strides,
            v_strides=v_strides,
            new_k_strides=(0, 0),
            new_v_strides=(0, 0),
            mask_stride=0,
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
            FUSED=False,
            ONE=False,
            CHAINED=CHAINED,
            PAGE=PAGE,
            PDL=PDL,
        )
    if PDL:
        gdc_wait()  # the end of this grid tells that the kernels in front have ended too
