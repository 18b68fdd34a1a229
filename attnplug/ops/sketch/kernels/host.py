"""The Triton kernels that bring a step of `sketch` what it reads of a cache in host memory: `stage`
keeps the fixed part on the GPU and writes the new token to the host, `fetch` brings the picks."""

from attnplug.ops.common.rows import blocks_done, row_span
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.common.views import begin_of
from attnplug.ops.sketch.kernels.codes import BLOCK, CHUNK, LOCAL, begin, near_block
from attnplug.ops.sketch.kernels.encode import encode_chunks

FIXED = tl.constexpr((1 + LOCAL.value) * BLOCK.value)  # tokens of the first block and of the last


@triton.jit
def _refill(
    cache,
    fixed_k,
    fixed_v,
    held,
    known,
    low,
    near,
    b,
    h,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Make the fixed part on the GPU that of the blocks 0 and `near`, ... of `known` tokens. What
    has moved up by a block is on the GPU already; the rest comes from the host."""
    d = tl.arange(0, DP)
    k_at, v_at = begin_of(cache, b, h)
    was_low = tl.load(held, cache_modifier=".cg")
    was_near = tl.load(held + 1, cache_modifier=".cg")
    tl.debug_barrier()  # every warp loads and stores the same words
    if (was_low != low) | (was_near != near):
        moved = (was_low == low) & (was_near + 1 == near)
        for first in tl.range(0, FIXED, TILE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            slot = first + tl.arange(0, TILE)
            at = (low + slot + tl.where(slot < BLOCK, 0, (near - 1) * BLOCK)).to(tl.int64)
            here = moved & (slot >= BLOCK) & (slot < FIXED - BLOCK)
            wanted = at < tl.where(moved & (slot < BLOCK), 0, known)
            shown = wanted[:, None] & (d < D)[None, :]
            key_at = tl.where(here, fixed_k + (slot + BLOCK) * D, k_at + at * cache.k_s)
            value_at = tl.where(here, fixed_v + (slot + BLOCK) * D, v_at + at * cache.v_s)
            key = tl.load(key_at[:, None] + d[None, :], mask=shown, other=0.0)
            value = tl.load(value_at[:, None] + d[None, :], mask=shown, other=0.0)
            tl.debug_barrier()  # a slot is read before a warp that is ahead gives it another token
            tl.store(fixed_k + slot[:, None] * D + d[None, :], key, mask=shown)
            tl.store(fixed_v + slot[:, None] * D + d[None, :], value, mask=shown)
        tl.store(held, low)
        tl.store(held + 1, near)


@triton.jit
def stage(
    q,
    cache,
    rows,
    token,
    recent,
    fixed,
    held,
    fixed_lengths,
    fixed_mask,
    encoder,
    codes,
    chunks,
    RING: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    CODE: tl.constexpr,
    CODERS: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The first program of a row's KV head has the fixed part as the step reads it, with the length
    and the mask that it has for itself, but for the new token, which `prepare` puts there; and
    writes that token to the host and the query to its ring. The others make the codes of a block
    that has left the fixed part."""
    GROUP: tl.constexpr = SHAPE.GROUP
    ROWS: tl.constexpr = SHAPE.ROWS
    D: tl.constexpr = SHAPE.D
    DP: tl.constexpr = SHAPE.DP
    part = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    NEW: tl.constexpr = 0 if token is None else 1
    length, low = row_span(rows, b, STEPS, NEW)
    room = length <= rows.S
    now = tl.minimum(length, rows.S)
    near = near_block(now, low)
    mask_at = rows.key_mask
    if rows.key_mask is not None:
        mask_at = rows.key_mask + b * rows.mask_b
    if part == 0:
        d = tl.arange(0, DP)
        fixed_k = fixed + place * (2 * FIXED * D)
        # Where the row is full the token is in no place: `prepare` is told so by a full length.
        known = now - tl.where(room, NEW, 0)
        fixed_v, held_at = fixed_k + FIXED * D, held + place * 2
        _refill(cache, fixed_k, fixed_v, held_at, known, low, near, b, h, D, DP, TILE)
        if h == 0:
            count = tl.maximum(now - low - (near - 1) * BLOCK, 0)
            tl.store(fixed_lengths + b, tl.where(room, count - NEW, FIXED))
            if rows.key_mask is not None:
                slot = tl.arange(0, SLOTS)
                at = low + slot + tl.where(slot < BLOCK, 0, (near - 1) * BLOCK)
                inside = (slot < FIXED) & (at < rows.S)
                shown = tl.load(mask_at + at, mask=inside, other=0)
                tl.store(fixed_mask + b * FIXED + slot, shown, mask=slot < FIXED)
        if token is not None:
            written = d < tl.where(room & (length > 0), D, 0)
            token_k = token.k + b * token.k_b + h * token.k_h
            token_v = token.v + b * token.v_b + h * token.v_h
            end = (length - 1).to(tl.int64)
            k_at, v_at = begin_of(cache, b, h)
            tl.store(k_at + end * cache.k_s + d, tl.load(token_k + d, mask=written), mask=written)
            tl.store(v_at + end * cache.v_s + d, tl.load(token_v + d, mask=written), mask=written)
        if recent is not None:
            r = tl.arange(0, ROWS)
            q_at = q.at + b * q.b + (h * GROUP + r).to(tl.int64)[:, None] * q.h
            shown = (r < tl.where(now > 0, GROUP, 0))[:, None] & (d < D)[None, :]
            query = tl.load(q_at + d[None, :], mask=shown, other=0.0)
            ring = (place * GROUP + r)[:, None] * RING + (now - 1) % RING
            tl.store(recent + ring * D + d[None, :], query, mask=shown)
    else:
        PER: tl.constexpr = BLOCK // CHUNK
        done = tl.maximum(blocks_done(codes.progress, b, low), 1)
        encode_chunks(
            cache=cache,
            encoder=encoder,
            codes=codes,
            mask_at=mask_at,
            begin=done * PER + part - 1,
            end=near * PER,
            step=CODERS,
            low=low,
            place=place,
            b=b,
            h=h,
            S=rows.S,
            chunks=chunks,
            D=D,
            DP=DP,
            CODE=CODE,
            PRECISION=PRECISION,
        )


@triton.jit
def fetch(
    cache,
    picks,
    near,
    S,
    capacity,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE picks of a row's KV head from the host, keys and values side by side in the order of the
    picks. A program asks for all its tokens at once: the link wants many bytes under way. Nothing
    else is read here, as reads of the GPU's memory would wait behind these."""
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = b * tl.num_programs(1) + h
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    begin(PDL)
    at = tl.load(
        picks + place * capacity + slot, mask=slot < capacity, other=-1, cache_modifier=".cg"
    )
    shown = ((at >= 0) & (at < S))[:, None] & (d < D)[None, :]
    at = at.to(tl.int64)[:, None]
    k_at, v_at = begin_of(cache, b, h)
    key = tl.load(k_at + at * cache.k_s + d[None, :], mask=shown)
    value = tl.load(v_at + at * cache.v_s + d[None, :], mask=shown)
    first = near + place * (2 * capacity * D) + d[None, :]
    tl.store(first + slot[:, None] * D, key, mask=shown)
    tl.store(first + (capacity + slot)[:, None] * D, value, mask=shown)
