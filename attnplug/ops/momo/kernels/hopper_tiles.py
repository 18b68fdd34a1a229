"""Producer and consumer of the Hopper kernel (`hopper.py`): the warp that moves tiles and the
warpgroups that attend over them, and the tuples that `hopper.py` hands to every warpgroup."""

from typing import NamedTuple

from attnplug.ops.common.hopper import copy_tile
from attnplug.ops.common.triton import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1e30)  # of a running maximum
LISTS = gl.constexpr(1)  # of Spec.SELECT
SCORES = gl.constexpr(2)


class Problem(NamedTuple):
    """The numbers of a call. The kernel is compiled once, whatever their values."""

    lengths_step: int  # from a row's length to the next row's: 0 where all rows share one
    queries: int  # T
    keys: int  # S
    rows: int  # R: attended queries, or delta groups
    query_blocks: int
    kv_heads: int
    gamma: int  # tokens from one row to the next
    items: int  # work items, a program each
    scale: float  # logits to base 2
    columns: int = 1  # query-sparse: work items of one range of rows
    window: int = 0  # block-sparse: tokens before the query block that are local
    listed: int = 0  # block-sparse: entries of a query block's list
    free: int = 0  # SELECT == LISTS: slots of a row that are appended to
    kept: int = 0  # SELECT == SCORES: blocks of a row
    weight: float = 1.0  # of the delta correction


class Spec(NamedTuple):
    """What the kernel is compiled for."""

    D: int
    GROUP: int  # query heads of a KV head
    HAS_LENGTHS: bool
    SPARSE: bool = False  # block-sparse; else query-sparse
    PACK: int = 1  # query-sparse: heads of a group that share a program
    SELECT: int = 0  # query-sparse: 0 nothing, LISTS (`selector`) or SCORES (`keeper`)
    EXACT: int = 0  # exact slots of a list
    DELTA: int = 0  # block-sparse: queries of a delta group, 0 for no correction
    VALUES: bool = True  # False with SCORES alone: `scorer` instead of `consumer`
    STAGES: int = 2  # tiles of keys and of values in shared memory
    RING: int = 4  # tiles whose block scores are in shared memory


class Tiles(NamedTuple):
    """Shared memory of q (64 rows a consumer), k and v (128 keys a stage)."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """One for each stage: its tile is there (full), its tile was read by both consumers (empty)."""

    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    scores_full: gl.shared_memory_descriptor
    scores_empty: gl.shared_memory_descriptor


@gluon.jit
def work_item(item, COUNT, LENGTHS, problem, spec: gl.constexpr):
    """Where a work item lies: batch row, KV head, (first) head, first row, its position, tiles of
    keys; the masked tiles are the first `edge` ones if block-sparse, else those from `edge` on;
    and the first local block, 1 if a block is put in front, the number of local blocks."""
    GROUP: gl.constexpr = spec.GROUP
    queries, kv_heads = problem.queries, problem.kv_heads
    length = problem.keys
    if spec.SPARSE:
        # KV head by KV head, so that its keys stay in L2; the longest lists first, and the heads
        # of a group, which share most of their blocks, side by side
        query_blocks = problem.query_blocks
        query_block = query_blocks - 1 - item // GROUP % query_blocks
        kv = item // GROUP // query_blocks
        b = kv // kv_heads
        head = kv % kv_heads * GROUP + item % GROUP
        if spec.HAS_LENGTHS:
            length = gl.load(LENGTHS + b * problem.lengths_step).to(gl.int32)
        row = query_block * 128
        position = length - queries + row
        local = gl.maximum(position - problem.window, 0) // 64
        near = gl.minimum(position + 127, length - 1) // 64 - local + 1
        listed = gl.load(COUNT + (b * kv_heads * GROUP + head) * query_blocks + query_block)
        blocks = near + listed
        front = blocks % 2
        tiles, edge = (front + blocks) // 2, (front + near + 1) // 2
        return b, kv % kv_heads, head, row, position, tiles, edge, local, front, near
    else:
        PARTS: gl.constexpr = GROUP // spec.PACK
        ROWS: gl.constexpr = 128 // spec.PACK
        rows, columns = problem.rows, problem.columns
        row = ((rows + ROWS - 1) // ROWS - 1 - item // columns) * ROWS  # heaviest first
        part = item % columns
        b = part // (kv_heads * PARTS)
        kv = part // PARTS % kv_heads
        if spec.HAS_LENGTHS:
            length = gl.load(LENGTHS + b * problem.lengths_step).to(gl.int32)
        position = length - queries + row * problem.gamma
        last = length - queries + (gl.minimum(row + ROWS, rows) - 1) * problem.gamma
        head = kv * GROUP + part % PARTS * spec.PACK
        return b, kv, head, row, position, last // 128 + 1, (position + 1) // 128, 0, 0, 0


@gluon.jit
def _copy_block(sources, buffer, bar, slot, half, b, kv, key, PANELS: gl.constexpr):
    """One 64-key block into half a slot; the ring seen as 64 x 64 swizzle panels, (column, row).
    `sources`: a descriptor, and where values have a tail, its descriptor and first key."""
    for c in gl.static_range(PANELS):
        panel = buffer.index(slot * (2 * PANELS) + 2 * c + half)
        if len(sources) == 1:
            copy_tile(sources[0], [b, kv, key, c * 64], bar, panel)
        elif key >= sources[2]:
            copy_tile(sources[1], [b, kv, key - sources[2], c * 64], bar, panel)
        else:
            copy_tile(sources[0], [b, kv, key, c * 64], bar, panel)


@gluon.jit
def _listed_key(entry, near, local, LIST):
    """First key of block `entry` of local part and list, the block in front being entry -1."""
    block = gl.load(LIST + gl.maximum(entry - near, 0))
    return gl.where(entry < near, local + gl.maximum(entry, 0), block) * 64


@gluon.jit
def _copy_queries(q_desc, buffer, bar, b, head, row, spec: gl.constexpr):
    """The 128 rows of a work item, 64 for each consumer, PACK heads of 128 / PACK rows."""
    PANELS: gl.constexpr = spec.D // 64
    for w in gl.static_range(2):
        for c in gl.static_range(PANELS):
            if spec.PACK == 4:
                for j in gl.static_range(2):
                    panel = buffer.index((w * PANELS + c) * 2 + j)
                    copy_tile(q_desc, [b, head + w * 2 + j, row, c * 64], bar, panel)
            elif spec.PACK == 2:
                copy_tile(q_desc, [b, head + w, row, c * 64], bar, buffer.index(w * PANELS + c))
            else:
                at = [b, head, row + w * 64, c * 64]
                copy_tile(q_desc, at, bar, buffer.index(w * PANELS + c))


@gluon.jit
def producer(sources, panels, bars, problem, spec: gl.constexpr):
    """The warp that fills the rings of keys and values, tile by tile, and q for each work item."""
    q_desc, k_desc, v_desc, tail_desc, LIST, COUNT, LENGTHS = sources
    D: gl.constexpr = spec.D
    PANELS: gl.constexpr = D // 64
    produced = 0  # tiles
    done = 0  # work items
    for item in range(gl.program_id(0), problem.items, gl.num_programs(0)):
        b, kv, head, row, _position, tiles, _edge, local, front, near = work_item(
            item, COUNT, LENGTHS, problem, spec
        )
        tail = 0
        if spec.HAS_LENGTHS:
            tail = gl.load(LENGTHS + b * problem.lengths_step).to(gl.int32)
            tail = (tail - 1) // 128 * 128
        mbarrier.wait(bars.q_empty, (done & 1) ^ 1)
        done += 1
        mbarrier.expect(bars.q_full, 256 * D)
        _copy_queries(q_desc, panels.q, bars.q_full, b, head, row, spec)
        own = LIST
        if spec.SPARSE:
            query_block = (b * problem.kv_heads * spec.GROUP + head) * problem.query_blocks
            own = LIST + (query_block + row // 128).to(gl.int64) * problem.listed
        for i in range(tiles):
            slot = produced % spec.STAGES
            phase = ((produced // spec.STAGES) & 1) ^ 1
            produced += 1
            if spec.SPARSE:
                first = _listed_key(i * 2 - front, near, local, own)
                second = _listed_key(i * 2 + 1 - front, near, local, own)
            else:
                first = i * 128
                second = first + 64
            bar = bars.k_full.index(slot)
            mbarrier.wait(bars.k_empty.index(slot), phase)
            mbarrier.expect(bar, 256 * D)
            _copy_block((k_desc,), panels.k, bar, slot, 0, b, kv, first, PANELS)
            _copy_block((k_desc,), panels.k, bar, slot, 1, b, kv, second, PANELS)
            if spec.VALUES:
                bar = bars.v_full.index(slot)
                mbarrier.wait(bars.v_empty.index(slot), phase)
                mbarrier.expect(bar, 256 * D)
                if spec.HAS_LENGTHS:
                    values = (v_desc, tail_desc, tail)
                    _copy_block(values, panels.v, bar, slot, 0, b, kv, first, PANELS)
                    _copy_block(values, panels.v, bar, slot, 1, b, kv, second, PANELS)
                else:
                    _copy_block((v_desc,), panels.v, bar, slot, 0, b, kv, first, PANELS)
                    _copy_block((v_desc,), panels.v, bar, slot, 1, b, kv, second, PANELS)


@gluon.jit
def _mask_key(entry, near, local):
    """First key of a block for the causal mask: hidden in front, whole where it is a listed one."""
    key = gl.where(entry < near, (local + entry) * 64, -(1 << 20))
    return gl.where(entry < 0, 1 << 30, key)


@gluon.jit
def mask(s, i, position, column, local, front, near, SPARSE: gl.constexpr):
    """Logits of tile i, -inf where its key comes after the row's position."""
    if SPARSE:
        first = _mask_key(i * 2 - front, near, local)
        second = _mask_key(i * 2 + 1 - front, near, local)
        key = gl.where(column < 64, first + column, second + column - 64)
    else:
        key = i * 128 + column
    return gl.where(position[:, None] >= key[None, :], s, -float("inf"))


@gluon.jit
def emit(p, top, ring, bars, tile, W: gl.constexpr, ROW: gl.constexpr, RING: gl.constexpr):
    """Row sums of p; each block's, with the running maximum, goes to the selection's ring. The
    caller arrives at `scores_full`: every arrival is a barrier of the warpgroup, and the caller has
    one in a moment."""
    first, second = p.reshape([64, 2, 64]).permute(0, 2, 1).split()
    first = gl.convert_layout(gl.sum(first, 1), ROW)
    second = gl.convert_layout(gl.sum(second, 1), ROW)
    slot = tile % RING
    mbarrier.wait(bars.scores_empty.index(slot), ((tile // RING) & 1) ^ 1)
    ring.index(slot * 3).slice(W * 64, 64).store(top)
    ring.index(slot * 3 + 1).slice(W * 64, 64).store(first)
    ring.index(slot * 3 + 2).slice(W * 64, 64).store(second)
    return first + second


@gluon.jit
def consumer(tensors, tiles, ring, bars, problem, W: gl.constexpr, spec: gl.constexpr):
    """Warpgroup W attends with rows 64 W to 64 W + 63 of each work item."""
    OUT, LSE, DENSE, COUNT, LENGTHS = tensors
    scale = problem.scale
    D: gl.constexpr = spec.D
    SPARSE: gl.constexpr = spec.SPARSE
    SELECT: gl.constexpr = spec.SELECT
    STAGES: gl.constexpr = spec.STAGES
    RING: gl.constexpr = spec.RING
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    OUTPUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    DTYPE: gl.constexpr = OUT.dtype.element_ty
    ROWS: gl.constexpr = 128 // spec.PACK
    tile_row = W * 64 + gl.arange(0, 64, ROW)
    column = gl.arange(0, 128, gl.SliceLayout(0, LOGITS))
    no_logits = gl.zeros([64, 128], gl.float32, LOGITS)
    q = tiles.q.index(W)
    tile = 0  # of all work items
    done = 0  # work items
    for item in range(gl.program_id(0), problem.items, gl.num_programs(0)):
        b, _kv, head, row, start, n, edge, local, front, near = work_item(
            item, COUNT, LENGTHS, problem, spec
        )
        if SPARSE:
            position = start + tile_row
        else:
            position = start + tile_row % ROWS * problem.gamma
        mbarrier.wait(bars.q_full, done & 1)
        done += 1
        slot = tile % STAGES
        phase = (tile // STAGES) & 1
        mbarrier.wait(bars.k_full.index(slot), phase)
        s = warpgroup_mma(
            q, tiles.k.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(bars.k_empty.index(slot))
        s = mask(s, 0, position, column, local, front, near, SPARSE)
        top = gl.maximum(gl.max(s, 1) * scale, FLOOR)
        p = gl.exp2(s * scale - top[:, None])
        if SELECT:
            total = emit(p, top, ring, bars, tile, W, ROW, RING)
            mbarrier.arrive(bars.scores_full.index(tile % RING))
        else:
            total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        acc = gl.zeros([64, D], gl.float32, OUTPUT)
        for i in range(1, n):
            v_slot = slot
            v_phase = phase
            tile += 1
            slot = tile % STAGES
            phase = (tile // STAGES) & 1
            mbarrier.wait(bars.k_full.index(slot), phase)
            following = warpgroup_mma(
                q, tiles.k.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
            )
            mbarrier.wait(bars.v_full.index(v_slot), v_phase)
            acc = warpgroup_mma(weights, tiles.v.index(v_slot), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[following])
            mbarrier.arrive(bars.k_empty.index(slot))
            if SPARSE:
                if i < edge:
                    s = mask(s, i, position, column, local, front, near, SPARSE)
            else:
                if i >= edge:
                    s = mask(s, i, position, column, local, front, near, SPARSE)
            higher = gl.maximum(top, gl.max(s, 1) * scale)
            p = gl.exp2(s * scale - higher[:, None])
            decay = gl.exp2(top - higher)
            top = higher
            if SELECT:
                total = total * decay + emit(p, top, ring, bars, tile, W, ROW, RING)
            else:
                total = total * decay + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.v_empty.index(v_slot))
            if SELECT:
                mbarrier.arrive(bars.scores_full.index(tile % RING))
            acc = acc * gl.convert_layout(decay, OUTPUT_ROW)[:, None]
            weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        tile += 1
        mbarrier.arrive(bars.q_empty)
        mbarrier.wait(bars.v_full.index(slot), phase)
        acc = warpgroup_mma(weights, tiles.v.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(bars.v_empty.index(slot))
        head = b * problem.kv_heads * spec.GROUP + head
        _finish(acc, top, total, (OUT, LSE, DENSE), head, row, problem, W, spec)


@gluon.jit
def _finish(acc, top, total, tensors, head, row, problem, W: gl.constexpr, spec: gl.constexpr):
    """Divide by the softmax's denominator, correct if DELTA, store output and log-sum-exp."""
    OUT, LSE, DENSE = tensors
    D: gl.constexpr = spec.D
    DELTA: gl.constexpr = spec.DELTA
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    ROWS: gl.constexpr = 128 // spec.PACK
    tile_row = W * 64 + gl.arange(0, 64, ROW)
    d = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))
    top = gl.convert_layout(top, ROW)
    total = gl.convert_layout(total, ROW)
    if spec.SPARSE:
        r = row + tile_row
        live = r < problem.queries
        out_row = head * problem.queries.to(gl.int64) + r
    else:
        r = row + tile_row % ROWS
        live = r < problem.rows
        out_row = (head + tile_row // ROWS) * problem.rows.to(gl.int64) + r
    out = acc / total[:, None]
    if DELTA:
        # a group's rows are one warp's: out[t] + weight (dense[i] - out[first of group i])
        first = (tile_row % DELTA == 0)[:, None]
        groups = gl.where(first, out, 0.0).reshape([64 // DELTA, DELTA, D])
        base, _ = gl.broadcast(gl.sum(groups, 1).expand_dims(1), groups)
        base = gl.convert_layout(base.reshape([64, D]), acc.type.layout)
        dense_row = head * problem.rows.to(gl.int64) + r // DELTA
        dense = gl.load(DENSE + dense_row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        dense = dense.to(gl.float32)
        out = gl.where(first, dense, out + problem.weight * (dense - base))
    at = OUT + out_row[:, None] * D + d[None, :]
    gl.store(at, out.to(OUT.dtype.element_ty), live[:, None])
    gl.store(LSE + out_row, (top + gl.log2(total)) * LN2, mask=live)
