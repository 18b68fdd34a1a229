"""Producer and consumer of the Hopper kernel (`_hopper.py`): what moves tiles and what attends."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnplug.ops.common.hopper import copy_tile

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1e30)  # of a running maximum


@gluon.jit
def work_item(
    t, COUNT, LENGTHS, lengths_stride, T, S, R, NQ, HK, across, window, gamma,
    SPARSE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, HAS_LENGTHS: gl.constexpr,
):  # fmt: skip
    """Work item t -> batch row, KV head, (first) head, first row, its position, tiles of keys; the
    masked tiles are the first `edge` ones if block-sparse, else those from `edge` on; and the first
    local block, 1 if a block is put in front, the number of local blocks."""
    length = S
    if SPARSE:
        # KV head by KV head, so that its keys stay in L2; the longest lists first, and the heads
        # of a group, which share most of their blocks, side by side
        place = NQ - 1 - t // GROUP % NQ
        kv = t // GROUP // NQ
        b = kv // HK
        head = kv % HK * GROUP + t % GROUP
        if HAS_LENGTHS:
            length = gl.load(LENGTHS + b * lengths_stride).to(gl.int32)
        row = place * 128
        position = length - T + row
        local = gl.maximum(position - window, 0) // 64
        near = gl.minimum(position + 127, length - 1) // 64 - local + 1
        blocks = near + gl.load(COUNT + (b * HK * GROUP + head) * NQ + place)
        front = blocks % 2
        return (
            b, kv % HK, head, row, position, (front + blocks) // 2, (front + near + 1) // 2, local,
            front, near,
        )  # fmt: skip
    else:
        PARTS: gl.constexpr = GROUP // PACK
        ROWS: gl.constexpr = 128 // PACK
        row = ((R + ROWS - 1) // ROWS - 1 - t // across) * ROWS  # heaviest first
        part = t % across
        b = part // (HK * PARTS)
        kv = part // PARTS % HK
        if HAS_LENGTHS:
            length = gl.load(LENGTHS + b * lengths_stride).to(gl.int32)
        position = length - T + row * gamma
        last = length - T + (gl.minimum(row + ROWS, R) - 1) * gamma
        head = kv * GROUP + part % PARTS * PACK
        return b, kv, head, row, position, last // 128 + 1, (position + 1) // 128, 0, 0, 0


@gluon.jit
def _copy_block(
    desc, tail_desc, tail, buffer, bar, slot, half, b, kv, key,
    PANELS: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """One 64-key block into half a slot; the ring seen as 64 x 64 swizzle panels, (column, row)."""
    for c in gl.static_range(PANELS):
        panel = buffer.index(slot * (2 * PANELS) + 2 * c + half)
        if HAS_TAIL:
            if key >= tail:
                copy_tile(tail_desc, [b, kv, key - tail, c * 64], bar, panel)
            else:
                copy_tile(desc, [b, kv, key, c * 64], bar, panel)
        else:
            copy_tile(desc, [b, kv, key, c * 64], bar, panel)


@gluon.jit
def _listed_key(entry, near, local, LIST):
    """First key of block `entry` of local part and list, the block in front being entry -1."""
    block = gl.load(LIST + gl.maximum(entry - near, 0))
    return gl.where(entry < near, local + gl.maximum(entry, 0), block) * 64


@gluon.jit
def producer(
    QD, KD, VD, TD, LIST, COUNT, LENGTHS, q_p, k_p, v_p, kf, ke, vf, ve, qf, qe,
    lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, listed,
    SPARSE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    PANELS: gl.constexpr = D // 64
    it = 0
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        b, kv, head, row, _position, n, _edge, local, front, near = work_item(
            t, COUNT, LENGTHS, lengths_stride, T, S, R, NQ, HK, across, window, gamma,
            SPARSE, GROUP, PACK, HAS_LENGTHS,
        )  # fmt: skip
        tail = 0
        if HAS_LENGTHS:
            tail = (gl.load(LENGTHS + b * lengths_stride).to(gl.int32) - 1) // 128 * 128
        mbarrier.wait(qe, (done & 1) ^ 1)
        done += 1
        mbarrier.expect(qf, 256 * D)
        for w in gl.static_range(2):
            for c in gl.static_range(PANELS):
                if PACK == 4:
                    for j in gl.static_range(2):
                        panel = q_p.index((w * PANELS + c) * 2 + j)
                        copy_tile(QD, [b, head + w * 2 + j, row, c * 64], qf, panel)
                elif PACK == 2:
                    copy_tile(QD, [b, head + w, row, c * 64], qf, q_p.index(w * PANELS + c))
                else:
                    copy_tile(QD, [b, head, row + w * 64, c * 64], qf, q_p.index(w * PANELS + c))
        own = LIST
        if SPARSE:
            own = LIST + ((b * HK * GROUP + head) * NQ + row // 128).to(gl.int64) * listed
        for i in range(n):
            slot = it % ST
            phase = ((it // ST) & 1) ^ 1
            it += 1
            if SPARSE:
                first = _listed_key(i * 2 - front, near, local, own)
                second = _listed_key(i * 2 + 1 - front, near, local, own)
            else:
                first = i * 128
                second = first + 64
            bar = kf.index(slot)
            mbarrier.wait(ke.index(slot), phase)
            mbarrier.expect(bar, 256 * D)
            _copy_block(KD, TD, tail, k_p, bar, slot, 0, b, kv, first, PANELS, False)
            _copy_block(KD, TD, tail, k_p, bar, slot, 1, b, kv, second, PANELS, False)
            bar = vf.index(slot)
            mbarrier.wait(ve.index(slot), phase)
            mbarrier.expect(bar, 256 * D)
            _copy_block(VD, TD, tail, v_p, bar, slot, 0, b, kv, first, PANELS, HAS_LENGTHS)
            _copy_block(VD, TD, tail, v_p, bar, slot, 1, b, kv, second, PANELS, HAS_LENGTHS)


@gluon.jit
def _mask_key(entry, near, local):
    """First key of a block for the causal mask: hidden in front, whole where it is a listed one."""
    key = gl.where(entry < near, (local + entry) * 64, -(1 << 20))
    return gl.where(entry < 0, 1 << 30, key)


@gluon.jit
def _mask(s, i, position, column, local, front, near, SPARSE: gl.constexpr):
    if SPARSE:
        first = _mask_key(i * 2 - front, near, local)
        second = _mask_key(i * 2 + 1 - front, near, local)
        key = gl.where(column < 64, first + column, second + column - 64)
    else:
        key = i * 128 + column
    return gl.where(position[:, None] >= key[None, :], s, -float("inf"))


@gluon.jit
def _emit(p, m, ring, sf, se, it, W: gl.constexpr, RL: gl.constexpr, RING: gl.constexpr):
    """Row sums of p; each block's, with the running maximum, goes to the selection's ring. The
    caller arrives at `sf` (every arrival is a barrier of the warpgroup: it has one in a moment)."""
    a, b = p.reshape([64, 2, 64]).permute(0, 2, 1).split()
    a = gl.convert_layout(gl.sum(a, 1), RL)
    b = gl.convert_layout(gl.sum(b, 1), RL)
    slot = it % RING
    mbarrier.wait(se.index(slot), ((it // RING) & 1) ^ 1)
    ring.index(slot * 3).slice(W * 64, 64).store(m)
    ring.index(slot * 3 + 1).slice(W * 64, 64).store(a)
    ring.index(slot * 3 + 2).slice(W * 64, 64).store(b)
    return a + b


@gluon.jit
def consumer(
    OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf, qe, sf, se,
    lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, scale, weight,
    W: gl.constexpr, SPARSE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr,
    PACK: gl.constexpr, SELECT: gl.constexpr, DELTA: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    ST: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    RL: gl.constexpr = gl.SliceLayout(1, LS)
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    PL: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    DTYPE: gl.constexpr = OUT.dtype.element_ty
    ROWS: gl.constexpr = 128 // PACK
    m_row = W * 64 + gl.arange(0, 64, RL)
    column = gl.arange(0, 128, gl.SliceLayout(0, LS))
    no_logits = gl.zeros([64, 128], gl.float32, LS)
    q = q_s.index(W)
    it = 0
    done = 0
    for t in range(gl.program_id(0), items, gl.num_programs(0)):
        b, _kv, head, row, start, n, edge, local, front, near = work_item(
            t, COUNT, LENGTHS, lengths_stride, T, S, R, NQ, HK, across, window, gamma,
            SPARSE, GROUP, PACK, HAS_LENGTHS,
        )  # fmt: skip
        if SPARSE:
            position = start + m_row
        else:
            position = start + m_row % ROWS * gamma
        mbarrier.wait(qf, done & 1)
        done += 1
        slot = it % ST
        phase = (it // ST) & 1
        mbarrier.wait(kf.index(slot), phase)
        s = warpgroup_mma(
            q, k_s.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(ke.index(slot))
        s = _mask(s, 0, position, column, local, front, near, SPARSE)
        m = gl.maximum(gl.max(s, 1) * scale, FLOOR)
        p = gl.exp2(s * scale - m[:, None])
        if SELECT:
            total = _emit(p, m, ring, sf, se, it, W, RL, RING)
            mbarrier.arrive(sf.index(it % RING))
        else:
            total = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(DTYPE), PL)
        acc = gl.zeros([64, D], gl.float32, LO)
        for i in range(1, n):
            v_slot = slot
            v_phase = phase
            it += 1
            slot = it % ST
            phase = (it // ST) & 1
            mbarrier.wait(kf.index(slot), phase)
            following = warpgroup_mma(
                q, k_s.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
            )
            mbarrier.wait(vf.index(v_slot), v_phase)
            acc = warpgroup_mma(weights, v_s.index(v_slot), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[following])
            mbarrier.arrive(ke.index(slot))
            if SPARSE:
                if i < edge:
                    s = _mask(s, i, position, column, local, front, near, SPARSE)
            else:
                if i >= edge:
                    s = _mask(s, i, position, column, local, front, near, SPARSE)
            higher = gl.maximum(m, gl.max(s, 1) * scale)
            p = gl.exp2(s * scale - higher[:, None])
            kept = gl.exp2(m - higher)
            m = higher
            if SELECT:
                total = total * kept + _emit(p, m, ring, sf, se, it, W, RL, RING)
            else:
                total = total * kept + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ve.index(v_slot))
            if SELECT:
                mbarrier.arrive(sf.index(it % RING))
            acc = acc * gl.convert_layout(kept, RO)[:, None]
            weights = gl.convert_layout(p.to(DTYPE), PL)
        it += 1
        mbarrier.arrive(qe)
        mbarrier.wait(vf.index(slot), phase)
        acc = warpgroup_mma(weights, v_s.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ve.index(slot))
        _finish(
            acc, m, total, OUT, LSE, DENSE, b * HK * GROUP + head, row, T, R, weight,
            W, SPARSE, D, PACK, DELTA,
        )  # fmt: skip


@gluon.jit
def _finish(
    acc, m, total, OUT, LSE, DENSE, head, row, T, R, weight,
    W: gl.constexpr, SPARSE: gl.constexpr, D: gl.constexpr, PACK: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    RO: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    ROWS: gl.constexpr = 128 // PACK
    m_row = W * 64 + gl.arange(0, 64, RO)
    d = gl.arange(0, D, gl.SliceLayout(0, acc.type.layout))
    m = gl.convert_layout(m, RO)
    total = gl.convert_layout(total, RO)
    if SPARSE:
        r = row + m_row
        live = r < T
        place = head * T.to(gl.int64) + r
    else:
        r = row + m_row % ROWS
        live = r < R
        place = (head + m_row // ROWS) * R.to(gl.int64) + r
    out = acc / total[:, None]
    if DELTA:
        # a group's rows are one warp's: out[t] + weight (dense[i] - out[first of group i])
        first = (m_row % DELTA == 0)[:, None]
        groups = gl.where(first, out, 0.0).reshape([64 // DELTA, DELTA, D])
        base, _ = gl.broadcast(gl.sum(groups, 1).expand_dims(1), groups)
        base = gl.convert_layout(base.reshape([64, D]), acc.type.layout)
        dense_row = head * R.to(gl.int64) + r // DELTA
        dense = gl.load(DENSE + dense_row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        dense = dense.to(gl.float32)
        out = gl.where(first, dense, out + weight * (dense - base))
    gl.store(OUT + place[:, None] * D + d[None, :], out.to(OUT.dtype.element_ty), live[:, None])
    gl.store(LSE + place, (m + gl.log2(total)) * LN2, mask=live)
