"""What the Hopper kernel (`hopper.py`) does with block scores, in a warpgroup of its own: the
online top-k of query_sparse_attention, or every score to memory for measure_blocks."""

from attnplug.ops.common.triton import gl, gluon, mbarrier
from attnplug.ops.momo.kernels.hopper_tiles import LN2, work_item

MOST = gl.constexpr(65504.0)  # float16's largest
NOT_FINITE = gl.constexpr(-3e38)  # stands for the score of a block whose logits are not finite


@gluon.jit
def _insert(x, xi, b, bi):
    """The better of the offered block (x, xi) and the slot (b, bi) stays in the slot, the other is
    returned first. Of equals the earlier block stays."""
    better = x > b
    low, low_i = gl.where(better, b, x), gl.where(better, bi, xi)
    return low, low_i, gl.where(better, x, b), gl.where(better, xi, bi)


@gluon.jit
def _erfinv(ratio):
    # erfinv(1 - 2 ratio), with the coefficients of online_topk.py written out
    w = -gl.log2(gl.maximum(4.0 * ratio * (1.0 - ratio), 1e-30)) * LN2
    a = w - 2.5
    p = 3.43273939e-07 + 2.81022636e-08 * a
    p = -3.5233877e-06 + p * a
    p = -4.39150654e-06 + p * a
    p = 0.00021858087 + p * a
    p = -0.00125372503 + p * a
    p = -0.00417768164 + p * a
    p = 0.246640727 + p * a
    p = 1.50140941 + p * a
    b = gl.sqrt(gl.maximum(w, 0.0)) - 3.0
    r = 0.000100950558 - 0.000200214257 * b
    r = 0.00134934322 + r * b
    r = -0.00367342844 + r * b
    r = 0.00573950773 + r * b
    r = -0.0076224613 + r * b
    r = 0.00943887047 + r * b
    r = 1.00167406 + r * b
    r = 2.83297682 + r * b
    return gl.where(w < 5.0, p, r) * (1.0 - 2.0 * ratio)


@gluon.jit
def _receive(ring, bars, tile, LAYOUT: gl.constexpr, spec: gl.constexpr):
    """A tile's running maxima and the sums of its two blocks, one row a thread."""
    slot = tile % spec.RING
    mbarrier.wait(bars.scores_full.index(slot), (tile // spec.RING) & 1)
    top = ring.index(slot * 3).load(LAYOUT)
    first = ring.index(slot * 3 + 1).load(LAYOUT)
    second = ring.index(slot * 3 + 2).load(LAYOUT)
    mbarrier.arrive(bars.scores_empty.index(slot))
    return top, first, second


@gluon.jit
def _keep_slot(INDEX, SCORE, slot, xi, x, live):
    gl.store(INDEX + slot, xi, mask=live)
    gl.store(SCORE + slot, gl.where(x > -1e38, x * LN2, -float("inf")), mask=live)


@gluon.jit
def selector(INDEX, SCORE, COUNT, LENGTHS, ring, bars, problem, spec: gl.constexpr):
    """online_topk's "estimated", scores in units of log 2: EXACT sorted slots in registers, their
    losers appended to the row's list in memory where they beat the estimated threshold. It is
    estimated anew at every tile, in long rows at every fourth (0 to 9% of the kernel's time)."""
    B: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    EXACT: gl.constexpr = spec.EXACT
    free = problem.free
    ROWS: gl.constexpr = 128 // spec.PACK
    tile_row = gl.arange(0, 128, B)
    tile = 0  # of all work items
    for item in range(gl.program_id(0), problem.items, gl.num_programs(0)):
        b, _kv, head, row, start, n, _edge, _local, _front, _near = work_item(
            item, COUNT, LENGTHS, problem, spec
        )
        r = row + tile_row % ROWS
        live = r < problem.rows
        blocks = (start + tile_row % ROWS * problem.gamma + 1) // 64
        head = b * problem.kv_heads * spec.GROUP + head + tile_row // ROWS
        slots = (head * problem.rows.to(gl.int64) + r) * (free + EXACT)
        x0 = gl.full([128], -float("inf"), gl.float32, B)
        i0 = gl.full([128], -1, gl.int32, B)
        x1 = x0
        x2 = x0
        x3 = x0
        x4 = x0
        x5 = x0
        x6 = x0
        x7 = x0
        i1 = i0
        i2 = i0
        i3 = i0
        i4 = i0
        i5 = i0
        i6 = i0
        i7 = i0
        mean = gl.zeros([128], gl.float32, B)
        squares = mean
        finite = mean
        threshold = mean
        appended = gl.zeros([128], gl.int32, B)
        every = gl.where(n > 64, 4, 1)
        for i in range(n):
            top, first, second = _receive(ring, bars, tile, B, spec)
            tile += 1
            for half in gl.static_range(2):
                j = i * 2 + half
                x = top + gl.log2(first if half == 0 else second)
                offered = j < blocks
                good = offered & (gl.abs(x) < 1e29)
                x = gl.where(good, x, gl.where(offered, NOT_FINITE, -float("inf")))
                xi = gl.where(offered, j, -1)
                finite += good.to(gl.float32)
                delta = gl.where(good, x - mean, 0.0)
                mean += gl.fdiv(delta, gl.maximum(finite, 1.0))
                squares += gl.where(good, delta * (x - mean), 0.0)
                if EXACT > 0:
                    x, xi, x0, i0 = _insert(x, xi, x0, i0)
                if EXACT > 1:
                    x, xi, x1, i1 = _insert(x, xi, x1, i1)
                if EXACT > 2:
                    x, xi, x2, i2 = _insert(x, xi, x2, i2)
                if EXACT > 3:
                    x, xi, x3, i3 = _insert(x, xi, x3, i3)
                if EXACT > 4:
                    x, xi, x4, i4 = _insert(x, xi, x4, i4)
                if EXACT > 5:
                    x, xi, x5, i5 = _insert(x, xi, x5, i5)
                if EXACT > 6:
                    x, xi, x6, i6 = _insert(x, xi, x6, i6)
                if EXACT > 7:
                    x, xi, x7, i7 = _insert(x, xi, x7, i7)
                left = blocks - j
                if half == 0:
                    if i % every == 0:
                        ratio = gl.fdiv((free - appended).to(gl.float32), left.to(gl.float32))
                        ratio = gl.minimum(gl.maximum(ratio, 1e-30), 0.99999994)
                        sigma = gl.sqrt(gl.fdiv(squares, gl.maximum(finite, 1.0)))
                        threshold = mean + 1.4142135623730951 * sigma * _erfinv(ratio)
                open_slots = free - appended
                take = offered & (xi >= 0) & (open_slots > 0)
                take = take & ((open_slots >= left) | (x > threshold))
                _keep_slot(INDEX, SCORE, slots + EXACT + appended, xi, x, take & live)
                appended += take.to(gl.int32)
        if EXACT > 0:
            _keep_slot(INDEX, SCORE, slots, i0, x0, live)
        if EXACT > 1:
            _keep_slot(INDEX, SCORE, slots + 1, i1, x1, live)
        if EXACT > 2:
            _keep_slot(INDEX, SCORE, slots + 2, i2, x2, live)
        if EXACT > 3:
            _keep_slot(INDEX, SCORE, slots + 3, i3, x3, live)
        if EXACT > 4:
            _keep_slot(INDEX, SCORE, slots + 4, i4, x4, live)
        if EXACT > 5:
            _keep_slot(INDEX, SCORE, slots + 5, i5, x5, live)
        if EXACT > 6:
            _keep_slot(INDEX, SCORE, slots + 6, i6, x6, live)
        if EXACT > 7:
            _keep_slot(INDEX, SCORE, slots + 7, i7, x7, live)
        if (start + 1) // 64 < free + EXACT:  # the tile's shortest row; longer ones fill all slots
            for c in range(free):
                empty = live & (appended <= c)
                gl.store(INDEX + slots + EXACT + c, gl.full([128], -1, gl.int32, B), mask=empty)
                nothing = gl.full([128], -float("inf"), gl.float32, B)
                gl.store(SCORE + slots + EXACT + c, nothing, mask=empty)


@gluon.jit
def keeper(SCORE, COUNT, LENGTHS, ring, bars, problem, spec: gl.constexpr):
    """Every complete block's score, natural log in float16, to SCORE `[B,Hq,kept,R]`: the threads
    of a warp are neighbouring rows, so that they write together."""
    B: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = problem.rows
    ROWS: gl.constexpr = 128 // spec.PACK
    tile_row = gl.arange(0, 128, B)
    tile = 0  # of all work items
    for item in range(gl.program_id(0), problem.items, gl.num_programs(0)):
        b, _kv, head, row, start, n, _edge, _local, _front, _near = work_item(
            item, COUNT, LENGTHS, problem, spec
        )
        r = row + tile_row % ROWS
        live = r < rows
        blocks = (start + tile_row % ROWS * problem.gamma + 1) // 64
        head = b * problem.kv_heads * spec.GROUP + head + tile_row // ROWS
        column = head * problem.kept.to(gl.int64) * rows + r
        for i in range(n):
            top, first, second = _receive(ring, bars, tile, B, spec)
            tile += 1
            for half in gl.static_range(2):
                j = i * 2 + half
                x = (top + gl.log2(first if half == 0 else second)) * LN2
                x = gl.where(x > MOST, MOST, x)
                gl.store(SCORE + (column + j * rows), x.to(gl.float16), mask=live & (j < blocks))
