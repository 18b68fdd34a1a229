"""The kernel of latent_attention that attends: a program for each block of query-head pairs and
piece of their tokens."""

from attnplug.ops.common.rows import row_span
from attnplug.ops.common.softmax import online_softmax
from attnplug.ops.common.splits import store_piece
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _tokens_of(i, picks_at, mask_at, slots, limit, TILE: tl.constexpr):
    """The tokens of tile i, entries of a list or neighbours; -1 for what may not be read."""
    slot = i * TILE + tl.arange(0, TILE)
    if picks_at is not None:
        token = tl.load(picks_at + slot, mask=slot < slots, other=-1)
        seen = (token >= 0) & (token <= limit)
    else:
        token = slot
        seen = token <= limit
    if mask_at is not None:
        seen = seen & (tl.load(mask_at + token, mask=seen, other=0) != 0)
    return tl.where(seen, token, -1)


@triton.jit
def _rows_of(at, token, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`[TILE, PADDED]`, the channels of tokens; 0 for the token -1."""
    d = tl.arange(0, PADDED)
    wanted = (token >= 0)[:, None]
    if WIDTH != PADDED:
        wanted = wanted & (d < WIDTH)[None, :]
    return tl.load(at + token.to(tl.int64)[:, None] * stride + d[None, :], mask=wanted, other=0.0)


@triton.jit
def _queries_of(at, query, head, strides, live, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`[ROWS, PADDED]`, the channels of query-head pairs."""
    _, query_stride, head_stride = strides
    d = tl.arange(0, PADDED)
    places = query.to(tl.int64) * query_stride + head.to(tl.int64) * head_stride
    wanted = live[:, None] & (d < WIDTH)[None, :]
    return tl.load(at + places[:, None] + d[None, :], mask=wanted, other=0.0)


@triton.jit
def attend_latents(
    q_latent,
    q_rope,
    latents,
    rope,
    picks,
    tokens,
    output,
    scale,
    S,
    K,
    splits,
    q_latent_strides,
    q_rope_strides,
    latents_strides,
    rope_strides,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    P: tl.constexpr,
    PP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS heads of one query against a piece of its `picks [K]`; or without picks, ROWS query-head
    pairs of neighbouring queries against a piece of the tokens that the last of these sees."""
    latents_b, latents_t = latents_strides
    rope_b, rope_t = rope_strides
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()  # for the picks, and for whatever else the kernels before have written
        gdc_launch_dependents()
    length, _ = row_span(tokens, b, STEPS)
    g = tl.arange(0, ROWS)
    if picks is not None:
        BLOCKS: tl.constexpr = (H + ROWS - 1) // ROWS
        last = tl.program_id(0) // BLOCKS
        head = tl.program_id(0) % BLOCKS * ROWS + g
        query = tl.zeros([ROWS], tl.int32) + last
        live = head < H
    else:  # the longest programs first
        pair = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS + g
        query, head = pair // H, pair % H
        live = query < S
        last = tl.minimum(tl.max(query, 0), S - 1)
    position = length - S + query
    limit = length - S + last

    q_latent_b, _, _ = q_latent_strides
    q_rope_b, _, _ = q_rope_strides
    ql = _queries_of(q_latent + b * q_latent_b, query, head, q_latent_strides, live, R, RP)
    qr = _queries_of(q_rope + b * q_rope_b, query, head, q_rope_strides, live, P, PP)
    latents_at, rope_at = latents + b * latents_b, rope + b * rope_b
    mask_at = None
    if tokens.key_mask is not None:
        mask_at = tokens.key_mask + b * tokens.mask_b
    picks_at = None
    slots = limit + 1
    if picks is not None:
        picks_at = picks + (b * S + last) * K
        slots = K
    tiles = tl.maximum(tl.cdiv(slots, TILE), 0)
    first = (split * tiles.to(tl.int64) // splits).to(tl.int32)
    end = ((split + 1) * tiles.to(tl.int64) // splits).to(tl.int32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RP], tl.float32)
    # A turn looks the next turn's tokens up. Where the loads of a turn take addresses from a load
    # of the same turn, Triton 3.6 made wrong code of the pipeline (block_sparse_attention).
    LOOKED_UP: tl.constexpr = picks is not None or tokens.key_mask is not None
    token = _tokens_of(first, picks_at, mask_at, slots, limit, TILE)
    for i in tl.range(first, end, num_stages=STAGES):
        if not LOOKED_UP:
            token = _tokens_of(i, None, None, slots, limit, TILE)
        latent = _rows_of(latents_at, token, latents_t, R, RP)
        s = tl.zeros([ROWS, TILE], tl.float32)
        if P > 0:
            turned = _rows_of(rope_at, token, rope_t, P, PP)
            s = tl.dot(qr, turned.T, input_precision=PRECISION)
        s = tl.dot(ql, latent.T, s, input_precision=PRECISION) * scale
        seen = (token >= 0)[None, :]
        if picks is None:
            seen = seen & (token[None, :] <= position[:, None])
        s = tl.where(seen, s, float("-inf"))
        if LOOKED_UP:
            token = _tokens_of(i + 1, picks_at, mask_at, slots, limit, TILE)
        p, decay, top, total = online_softmax(s, top, total)
        p = p.to(latent.dtype)
        acc = tl.dot(p, latent, acc * decay[:, None], input_precision=PRECISION)

    r = tl.arange(0, RP)
    store_piece(
        top=top,
        total=total,
        acc=acc,
        output=output,
        head=head,
        row=(b * S + query) * H + head,
        rows=tl.num_programs(2).to(tl.int64) * S * H,
        d=r,
        in_group=live,
        in_width=r < R,
        split=split,
        splits=splits,
        D=R,
    )
