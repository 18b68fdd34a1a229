"""The Hopper (sm_90) kernel of latent_attention over picks, in Gluon: a program for 64 heads of one
query, and where queries are few for a piece of their picks.

A program is warp-specialised. Four producer warps gather tiles of 64 picked tokens into a ring of
two stages, 16 bytes a copy, since picks lie anywhere and TMA reads boxes. The sum of 64 heads by
512 channels would take all registers of a warpgroup, so two sum half of the channels each. The
first also multiplies queries by keys and makes the weights. The second gets them through shared
memory, with the factors on what it has summed before: a product of 64 by 64 takes the tensor cores
twice as long as its size says, so that nothing is gained if both make the weights. There is no room
for weights but where the rotated keys of their tile were, which nobody reads again.

A tile is stored once and read twice, as keys across its channels and as values across its tokens.
The copies of tokens that a query must not see are masked, which fills their rows with zeros; their
logits get -inf from a row of numbers that the producer writes beside the tile. The running maximum
is at least -1e30, so that heads that have seen no token yet stay free of NaN.
"""

from typing import NamedTuple

import torch

from attnplug.ops.common.constants import Constant
from attnplug.ops.common.device import Card
from attnplug.ops.common.hopper import gdc_launch_dependents, gdc_wait
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.triton import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, TILE, STAGES = 64, 64, 2
WIDTH, TURNED = 512, 64  # channels of a latent, and of a rotated key if there are any

_LOG2E = Constant(LOG2E)
_ROWS, _TILE, _STAGES = Constant(ROWS), Constant(TILE), Constant(STAGES)
_HALF, _TURNED = Constant(WIDTH // 2), Constant(TURNED)
_FLOOR = Constant(-1e30)


class Panels(NamedTuple):
    """Shared memory of queries, or of tiles: both halves of the latents, and the rotated part."""

    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    turned: gl.shared_memory_descriptor


class Spec(NamedTuple):
    """What the kernel is compiled for."""

    H: int  # query heads
    TURNS: bool  # a part of the keys is rotated
    MASKED: bool  # there is a key mask
    SINKS: bool
    STEP: int  # from a row's length to the next row's; 0 where all rows share one
    PIECES: bool  # picks are cut in pieces, which another kernel merges


@gluon.jit
def _copy_rows(panel, at, token, stride, COLUMNS: gl.constexpr):
    """COLUMNS channels of 64 tokens into shared memory, zeros for the token -1. Tokens of 32 bits
    are multiplied in 32 bits, which is what keeps the producer in front of its consumers."""
    layout: gl.constexpr = token.type.layout.parent
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    place = gl.maximum(token, 0)[:, None] * stride + d[None, :]
    async_copy.async_copy_global_to_shared(panel, at + place, mask=(token >= 0)[:, None])


@gluon.jit
def _seen_of(i, picks_at, mask_at, K, limit, spec: gl.constexpr, layout: gl.constexpr):
    """The tokens of tile i of a list; -1 for what may not be read."""
    slot = i * _TILE + gl.arange(0, _TILE, layout)
    token = gl.load(picks_at + slot, mask=slot < K, other=-1)
    seen = (token >= 0) & (token <= limit)
    if spec.MASKED:
        seen = seen & (gl.load(mask_at + token, mask=seen, other=0) != 0)
    return gl.where(seen, token, -1)


@gluon.jit
def _producer(sources, places, queries, tiles, hidden, bars, head, spec: gl.constexpr):
    """The warps that gather the queries, and then tile after tile."""
    q_latent, q_rope, latents, rope, picks, mask = sources
    q_head, q_turned_head, token_step, turned_step, K, count, limit = places
    q_there, full, empty, _, _ = bars
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDE_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    NARROW_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    row = head + gl.arange(0, _ROWS, WIDE_ROW)
    row = gl.where(row < spec.H, row, -1).to(gl.int64)  # heads may lie a prompt apart
    _copy_rows(queries.left, q_latent, row, q_head, _HALF)
    _copy_rows(queries.right, q_latent + _HALF, row, q_head, _HALF)
    if spec.TURNS:
        row = head + gl.arange(0, _ROWS, NARROW_ROW)
        row = gl.where(row < spec.H, row, -1).to(gl.int64)
        _copy_rows(queries.turned, q_rope, row, q_turned_head, _TURNED)
    async_copy.mbarrier_arrive(q_there, increment_count=False)
    token = _seen_of(0, picks, mask, K, limit, spec, WIDE_ROW)
    for i in range(count):
        slot = i % _STAGES
        following = _seen_of(i + 1, picks, mask, K, limit, spec, WIDE_ROW)
        mbarrier.wait(empty.index(slot), ((i // _STAGES) & 1) ^ 1)
        hidden.index(slot).store(gl.where(token >= 0, 0.0, -float("inf")))
        _copy_rows(tiles.left.index(slot), latents, token, token_step, _HALF)
        _copy_rows(tiles.right.index(slot), latents + _HALF, token, token_step, _HALF)
        if spec.TURNS:
            narrow = gl.convert_layout(token, NARROW_ROW)
            _copy_rows(tiles.turned.index(slot), rope, narrow, turned_step, _TURNED)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        mbarrier.arrive(full.index(slot))  # for what `hidden` got
        token = following


@gluon.jit
def _logits(queries, tiles, slot, nothing, spec: gl.constexpr):
    """Start multiplying the queries by the keys of a tile."""
    left, right = tiles.left.index(slot), tiles.right.index(slot)
    s = warpgroup_mma(queries.left, left.permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma(queries.right, right.permute((1, 0)), s, is_async=True)
    if spec.TURNS:
        turned = tiles.turned.index(slot)
        s = warpgroup_mma(queries.turned, turned.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _weigh(s, top, total, scale, slot, tiles, rows, ready):
    """The weights of a tile, handed on to the second consumer; and the new maxima, sums, and what
    they multiply former sums by."""
    hidden, decays, _ = rows
    s = s * scale + hidden.index(slot).load(gl.SliceLayout(0, s.type.layout))[None, :]
    higher = gl.maximum(top, gl.max(s, 1))
    p = gl.exp2(s - higher[:, None])
    decay = gl.exp2(top - higher)
    weights = p.to(tiles.left.dtype)
    decays.index(slot).store(decay)
    tiles.turned.index(slot).store(weights)
    fence_async_shared()
    mbarrier.arrive(ready.index(slot))
    return higher, total * decay + gl.sum(p, 1), decay, weights


@gluon.jit
def _first_consumer(results, numbers, queries, tiles, rows, bars, spec: gl.constexpr):
    """The warpgroup that makes the weights, and sums the left half of the channels."""
    count, scale, head, _, _, _ = numbers
    q_there, full, empty, ready, done = bars
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OUTPUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    nothing = gl.zeros([_ROWS, _TILE], gl.float32, LOGITS)
    top = gl.full([_ROWS], _FLOOR, gl.float32, ROW)
    total = gl.zeros([_ROWS], gl.float32, ROW)
    acc = gl.zeros([_ROWS, _HALF], gl.float32, OUTPUT)
    mbarrier.wait(q_there, 0)
    if count > 0:
        mbarrier.wait(full.index(0), 0)
        fence_async_shared()  # the copies are no asynchronous ones in the eyes of wgmma
        s = warpgroup_mma_wait(0, deps=[_logits(queries, tiles, 0, nothing, spec)])
        for i in range(count - 1):
            slot = i % _STAGES
            top, total, decay, weights = _weigh(s, top, total, scale, slot, tiles, rows, ready)
            acc = acc * gl.convert_layout(decay, OUTPUT_ROW)[:, None]
            weights = gl.convert_layout(weights, WEIGHTS)
            acc = warpgroup_mma(weights, tiles.left.index(slot), acc, is_async=True)
            following = (i + 1) % _STAGES
            mbarrier.wait(full.index(following), ((i + 1) // _STAGES) & 1)
            fence_async_shared()
            s = _logits(queries, tiles, following, nothing, spec)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(slot))
            s = warpgroup_mma_wait(0, deps=[s])
        slot = (count - 1) % _STAGES
        top, total, decay, weights = _weigh(s, top, total, scale, slot, tiles, rows, ready)
        acc = acc * gl.convert_layout(decay, OUTPUT_ROW)[:, None]
        weights = gl.convert_layout(weights, WEIGHTS)
        acc = warpgroup_mma(weights, tiles.left.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, _ROWS, ROW)
    live = head + row < spec.H
    out, lse, sinks = results
    empty_rows = total == 0
    total = gl.where(empty_rows, 1.0, total)
    if spec.PIECES:
        piece = gl.where(empty_rows, -float("inf"), top + gl.log2(total))
        gl.store(lse + _place_of(row, numbers), piece, mask=live)
    elif spec.SINKS:
        logit = gl.load(sinks + head + row, mask=live, other=-float("inf")).to(gl.float32)
        total += gl.exp2(logit * _LOG2E - gl.where(empty_rows, 0.0, top))
    rows[2].store(total)
    mbarrier.arrive(done)
    _store_half(acc, gl.convert_layout(total, OUTPUT_ROW), out, numbers, 0, spec)


@gluon.jit
def _second_consumer(results, numbers, tiles, rows, bars, spec: gl.constexpr):
    """The warpgroup that sums the right half of the channels, by the weights of the first."""
    _, decays, totals = rows
    _, _, empty, ready, done = bars
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    acc = gl.zeros([_ROWS, _HALF], gl.float32, OUTPUT)
    for i in range(numbers[0]):
        slot = i % _STAGES
        mbarrier.wait(ready.index(slot), (i // _STAGES) & 1)
        fence_async_shared()
        acc = acc * decays.index(slot).load(ROW)[:, None]
        acc = warpgroup_mma(tiles.turned.index(slot), tiles.right.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot))
    mbarrier.wait(done, 0)
    _store_half(acc, totals.load(ROW), results[0], numbers, _HALF, spec)


@gluon.jit
def _place_of(row, numbers):
    """The number of a head's piece among all."""
    _, _, _, first_row, split, splits = numbers
    return (first_row + row) * splits + split


@gluon.jit
def _store_half(acc, total, out, numbers, first: gl.constexpr, spec: gl.constexpr):
    """Divide by the sums of weights, and store the channels from `first` on."""
    row = gl.arange(0, _ROWS, total.type.layout)
    d = first + gl.arange(0, _HALF, gl.SliceLayout(0, acc.type.layout))
    at = out + _place_of(row, numbers)[:, None] * (2 * _HALF) + d[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    gl.store(at, result, (numbers[2] + row < spec.H)[:, None])


@gluon.jit
def attend_picks_hopper(
    q_latent,
    q_rope,
    latents,
    rope,
    picks,
    tokens,
    out,
    sinks,
    scale,
    S,
    K,
    splits,
    q_latent_strides,
    q_rope_strides,
    latents_strides,
    rope_strides,
    PDL: gl.constexpr,
    spec: gl.constexpr,
):
    """64 heads of one query against a piece of its `picks [K]`; the arguments are those of
    `attend_latents`, `spec` is a Spec, `out` the pieces where there are some. A tensor that a call
    lacks is any other."""
    if PDL:
        gdc_wait()  # for the picks, and for whatever else the kernels before have written
        gdc_launch_dependents()
    BLOCKS: gl.constexpr = (spec.H + _ROWS - 1) // _ROWS
    query = gl.program_id(0) // BLOCKS
    head = gl.program_id(0) % BLOCKS * _ROWS
    split = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    length = tokens.S
    if tokens.lengths is not None:
        length = gl.load(tokens.lengths + b * spec.STEP)
        length = gl.maximum(gl.minimum(length, tokens.S), 0).to(gl.int32)
    limit = length - S + query
    at = b * S + query  # of the query among all
    q_b, q_s, q_h = q_latent_strides
    turned_b, turned_s, turned_h = q_rope_strides
    latents_b, latents_t = latents_strides
    rope_b, rope_t = rope_strides
    all_tiles = (K + _TILE - 1) // _TILE
    first = split * all_tiles // splits
    count = (split + 1) * all_tiles // splits - first
    mask = picks  # stands for none
    if spec.MASKED:
        mask = tokens.key_mask + b * tokens.mask_b
    sources = (
        q_latent + b * q_b + query.to(gl.int64) * q_s,
        q_rope + b * turned_b + query.to(gl.int64) * turned_s,
        latents + b * latents_b,
        rope + b * rope_b,
        picks + at * K + first * _TILE,
        mask,
    )
    places = (q_h, turned_h, latents_t, rope_t, K - first * _TILE, count, limit)

    DTYPE: gl.constexpr = latents.dtype.element_ty
    READ: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_left = gl.allocate_shared_memory(DTYPE, [_ROWS, _HALF], READ)
    q_right = gl.allocate_shared_memory(DTYPE, [_ROWS, _HALF], READ)
    left = gl.allocate_shared_memory(DTYPE, [_STAGES, _TILE, _HALF], READ)
    right = gl.allocate_shared_memory(DTYPE, [_STAGES, _TILE, _HALF], READ)
    turned = gl.allocate_shared_memory(DTYPE, [_STAGES, _TILE, _TURNED], READ)
    q_turned = q_left
    if spec.TURNS:
        q_turned = gl.allocate_shared_memory(DTYPE, [_ROWS, _TURNED], READ)
    queries = Panels(q_left, q_right, q_turned)
    tiles = Panels(left, right, turned)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    hidden = gl.allocate_shared_memory(gl.float32, [_STAGES, _TILE], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [_ROWS], PLAIN)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_there = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)  # weights
    done = gl.allocate_shared_memory(gl.int64, [1], BARRIER)  # sums of weights
    mbarrier.init(q_there, count=128)  # each thread of the producer when its copies have come
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(done, count=1)
    fence_async_shared()
    row = at * spec.H + head
    lse = out
    if spec.PIECES:
        lse = out + gl.num_programs(2).to(gl.int64) * S * spec.H * splits * (2 * _HALF)
    results, rows = (out, lse, sinks), (hidden, decays, totals)
    numbers = (count, scale, head, row, split, splits)
    bars = (q_there, full, empty, ready, done)
    gl.warp_specialize(
        [
            (_first_consumer, (results, numbers, queries, tiles, rows, bars, spec)),
            (_second_consumer, (results, numbers, tiles, rows, bars, spec)),
            (_producer, (sources, places, queries, tiles, hidden, bars, head, spec)),
        ],
        [4, 4],
        [168, 104],
    )


# ---- host ---------------------------------------------------------------------------------------


def serves(tensors: tuple[torch.Tensor, ...], on: Card) -> bool:
    """Whether the kernel can read `q_latent, q_rope, latents, rope`, and has heads for its rows."""
    q_latent, q_rope, latents, rope = tensors
    rotated = [q_rope, rope] if rope.shape[2] else []
    return (
        on.wgmma
        and q_latent.element_size() == 2
        and q_latent.shape[3] == WIDTH
        and rope.shape[2] in (0, TURNED)
        and q_latent.shape[2] > ROWS // 2
        and all(_copies(x) for x in (q_latent, latents, *rotated))
        and all(x.shape[1] * x.stride(1) < 2**31 for x in (latents, rope))  # `_copy_rows`
    )


def _copies(x: torch.Tensor) -> bool:
    """Whether all rows of channels begin at multiples of the 16 bytes of a copy."""
    strides = [step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in strides)


def splits_of(rows: int, heads: int, slots: int, on: Card) -> int:
    """The pieces that each of `rows` queries' lists of `slots` picks is cut in, so that there is a
    program for every multiprocessor."""
    return max(1, min(cdiv(slots, TILE), on.processors // max(1, rows * cdiv(heads, ROWS))))
