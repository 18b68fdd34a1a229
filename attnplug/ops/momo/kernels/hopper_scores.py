"""The consumer of the Hopper kernel (`hopper.py`) that measures without values: block scores and
log-sum-exps, with half of the products."""

from attnplug.ops.common.triton import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from attnplug.ops.momo.kernels.hopper_tiles import FLOOR, LN2, emit, mask, work_item


@gluon.jit
def _weigh(s, top, total, scale, ring, bars, tile, W: gl.constexpr, RING: gl.constexpr):
    """A row's maximum and denominator with the logits s of a tile, whose blocks go to the ring."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    higher = gl.maximum(top, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - higher[:, None])
    decay = gl.exp2(top - higher)
    return higher, total * decay + emit(p, higher, ring, bars, tile, W, ROW, RING)


@gluon.jit
def scorer(tensors, tiles, ring, bars, problem, W: gl.constexpr, spec: gl.constexpr):
    """Warpgroup W measures rows 64 W to 64 W + 63 of each work item. The tensor cores compute the
    next tile's logits while it takes the exponentials of this one's."""
    _OUT, LSE, _DENSE, COUNT, LENGTHS = tensors
    scale = problem.scale
    STAGES: gl.constexpr = spec.STAGES
    RING: gl.constexpr = spec.RING
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
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
        position = start + tile_row % ROWS * problem.gamma
        mbarrier.wait(bars.q_full, done & 1)
        done += 1
        slot = tile % STAGES
        mbarrier.wait(bars.k_full.index(slot), (tile // STAGES) & 1)
        s = warpgroup_mma(
            q, tiles.k.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(bars.k_empty.index(slot))
        top = gl.full([64], FLOOR, gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        for i in range(1, n):
            slot = (tile + 1) % STAGES
            mbarrier.wait(bars.k_full.index(slot), ((tile + 1) // STAGES) & 1)
            following = warpgroup_mma(
                q, tiles.k.index(slot).permute((1, 0)), no_logits, use_acc=False, is_async=True
            )
            if i > edge:
                s = mask(s, i - 1, position, column, local, front, near, False)
            top, total = _weigh(s, top, total, scale, ring, bars, tile, W, RING)
            s = warpgroup_mma_wait(0, deps=[following])
            mbarrier.arrive(bars.k_empty.index(slot))
            mbarrier.arrive(bars.scores_full.index(tile % RING))
            tile += 1
        mbarrier.arrive(bars.q_empty)
        s = mask(s, n - 1, position, column, local, front, near, False)
        top, total = _weigh(s, top, total, scale, ring, bars, tile, W, RING)
        mbarrier.arrive(bars.scores_full.index(tile % RING))
        tile += 1
        r = row + tile_row % ROWS
        head = b * problem.kv_heads * spec.GROUP + head + tile_row // ROWS
        at = LSE + head * problem.rows.to(gl.int64) + r
        gl.store(at, (top + gl.log2(total)) * LN2, mask=r < problem.rows)
