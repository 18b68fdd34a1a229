"""The Triton kernel of gather_rows: pieces of far rows, which keep some blocks, and of near rows,
which are read whole, in one launch over pages."""

from attnplug.ops.common.pages import page_of
from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import attend_tile
from attnplug.ops.common.splits import store_piece
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


@triton.jit
def _attend_whole(
    split,
    h,
    b,
    length,
    total_rows,
    q,
    cache,
    output,
    scale,
    cap,
    splits,
    places,
    SHAPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TURNS: tl.constexpr,
    CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Piece `split` of `splits` of all keys of a row, as `dense_decode` cuts and adds them up. A
    row without keys, which pads a batch, gives pieces of weight 0."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    PAGE: tl.constexpr = SHAPE.PAGE
    TILE: tl.constexpr = TURNS.TILE
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    head = h * GROUP + g
    in_group = g < GROUP
    in_width = d < D
    q_at = q.at + b * q.b + head.to(tl.int64)[:, None] * q.h + d[None, :]
    query = tl.load(q_at, mask=in_group[:, None] & in_width[None, :], other=0.0)
    tiles = tl.cdiv(length, TILE)
    first = split * tiles // splits
    last = (split + 1) * tiles // splits
    row_table = cache.table + b * cache.table_b
    k_at = cache.k + h.to(tl.int64) * cache.k_h + d[None, :]
    v_at = cache.v + h.to(tl.int64) * cache.v_h + d[None, :]
    if cache.k_scale is not None:
        scale *= tl.load(cache.k_scale)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for i in tl.range(first, last, num_stages=TURNS.STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at = i * TILE + n
        seen = at < length
        loadable = seen[:, None] & in_width[None, :]
        pages = _pages_of_tile(row_table, i * TILE, length, TILE, PAGE, ASM)
        in_page = (at % PAGE).to(tl.int64)
        key_at = k_at + (pages * cache.k_b + in_page * cache.k_s)[:, None]
        value_at = v_at + (pages * cache.v_b + in_page * cache.v_s)[:, None]
        key = tl.load(key_at, mask=loadable, other=0.0)
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
    if cache.v_scale is not None:
        acc *= tl.load(cache.v_scale)
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=b * (KV_HEADS * GROUP) + head,
        rows=total_rows,
        d=d,
        in_group=in_group,
        in_width=in_width,
        split=split,
        splits=places,
        D=D,
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
    if has_whole & (other <= 0):  # its keys were there before the first kernel of the step began
        _attend_whole(
            split=number % whole_splits,
            h=number // whole_splits % KV_HEADS,
            b=whole_b.to(tl.int64),
            length=whole_length,
            total_rows=total_rows,
            q=q,
            cache=cache,
            output=output,
            scale=scale,
            cap=cap,
            splits=whole_splits,
            places=places,
            SHAPE=SHAPE,
            KV_HEADS=KV_HEADS,
            TURNS=WHOLE_TURNS,
            CAPPED=CAPPED,
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
            total_rows=total_rows,
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
            splits=splits,
            places=places,
            SHAPE=SHAPE,
            KEEP=KEEP,
            TURNS=TURNS,
            CAPPED=CAPPED,
            CHAINED=CHAINED,
            PDL=PDL,
        )
    if PDL:
        gdc_wait()  # the end of this grid tells that the kernels in front have ended too
