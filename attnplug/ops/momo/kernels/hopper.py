"""The Hopper (sm_90) kernel of query_sparse_attention and block_sparse_attention, in Gluon.

A program is warp-specialised. A producer warp loads tiles of two 64-key blocks by TMA into a ring
of two stages. Two consumer warpgroups hold 64 query rows each. The tensor cores compute q.k of the
next tile while they compute p.v of the current one; the softmax stays in registers. For a selection
a third warpgroup, one row a thread, receives every block's score through a small ring. It keeps the
row's list, so that the selection does not delay the softmax. Where only scores are wanted, nobody
loads values, and the consumers are others (`hopper_scores.py`).

Query-sparse: the key tiles come in ascending order, and the last ones are masked causally. PACK
heads of a group share a program, with 128 / PACK rows of each. Block-sparse: a program has 128
queries of one head. The local part (masked) comes first, then the listed blocks, any two a tile. An
odd number of blocks is made even by one block in front, which the mask hides from every row.

TMA reads whole boxes and fills in zeros past the tensor's end. The values of the tile that holds
the last valid key are read from a copy that ends in zeros: an unwritten slot may hold NaN, and
0 * NaN is NaN. Hidden logits are -inf and the running maximum is at least -1e30. A row that has
seen no key yet, or only logits of -inf, therefore stays free of NaN.

A block's score is computed from its exponentials against the row's running maximum. A score more
than 87 below that maximum becomes -inf; the Triton kernels still tell such scores apart.
"""

import torch

from attnplug.ops.common.device import card
from attnplug.ops.common.hopper import reinterpret
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.triton import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tl,
    triton,
)
from attnplug.ops.momo.kernels.hopper_scores import scorer
from attnplug.ops.momo.kernels.hopper_select import keeper, selector
from attnplug.ops.momo.kernels.hopper_tiles import (
    LISTS,
    SCORES,
    Barriers,
    Problem,
    Spec,
    Tiles,
    consumer,
    producer,
)

BLOCK = 64  # keys a block
QUERY_BLOCK = 128  # rows a program
MAX_EXACT = 8  # exact slots, in registers
MAX_DELTA = 16  # a delta group must lie in the 16 rows that one warp holds
LOG2E = 1.4426950408889634


# Triton specialises every number in a tuple argument, whatever do_not_specialize says: the numbers
# come one by one, and become a tuple here.
@gluon.jit(do_not_specialize=Problem._fields)
def attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    tail_desc,
    OUT,
    LSE,
    DENSE,
    LIST,
    COUNT,
    LENGTHS,
    INDEX,
    SCORE,
    lengths_step,
    queries,
    keys,
    rows,
    query_blocks,
    kv_heads,
    gamma,
    items,
    scale,
    columns,
    window,
    listed,
    free,
    kept,
    weight,
    spec: gl.constexpr,
):
    """The numbers are the fields of Problem, `spec` is a Spec. A tensor that a call lacks is any
    other."""
    problem = Problem(
        lengths_step=lengths_step,
        queries=queries,
        keys=keys,
        rows=rows,
        query_blocks=query_blocks,
        kv_heads=kv_heads,
        gamma=gamma,
        items=items,
        scale=scale,
        columns=columns,
        window=window,
        listed=listed,
        free=free,
        kept=kept,
        weight=weight,
    )
    DTYPE: gl.constexpr = OUT.dtype.element_ty
    D: gl.constexpr = spec.D
    STAGES: gl.constexpr = spec.STAGES
    RING: gl.constexpr = spec.RING
    READ: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WRITTEN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    QR: gl.constexpr = 32 if spec.PACK == 4 else 64
    q = gl.allocate_shared_memory(DTYPE, [2, 64, D], READ)
    k = gl.allocate_shared_memory(DTYPE, [STAGES, 128, D], READ)
    v = k
    if spec.VALUES:
        v = gl.allocate_shared_memory(DTYPE, [STAGES, 128, D], READ)
    tiles = Tiles(q, k, v)
    panels = Tiles(
        reinterpret(q, DTYPE, [2 * D // QR, 1, 1, QR, 64], WRITTEN),
        reinterpret(k, DTYPE, [STAGES * D // 32, 1, 1, 64, 64], WRITTEN),
        reinterpret(v, DTYPE, [STAGES * D // 32, 1, 1, 64, 64], WRITTEN),
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    bars = Barriers(
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [RING, 1], BARRIER),
    )
    ring = gl.allocate_shared_memory(
        gl.float32, [RING * 3, 128], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.k_full.index(i), count=1)
        mbarrier.init(bars.k_empty.index(i), count=2)
        mbarrier.init(bars.v_full.index(i), count=1)
        mbarrier.init(bars.v_empty.index(i), count=2)
    for i in gl.static_range(RING):
        mbarrier.init(bars.scores_full.index(i), count=2)
        mbarrier.init(bars.scores_empty.index(i), count=1)
    mbarrier.init(bars.q_full, count=1)
    mbarrier.init(bars.q_empty, count=2)
    fence_async_shared()
    # Tensors alone are bundled here: in a tuple with a name, constexprs decay to tensors.
    tensors = (OUT, LSE, DENSE, COUNT, LENGTHS)
    sources = (q_desc, k_desc, v_desc, tail_desc, LIST, COUNT, LENGTHS)
    if spec.SELECT == LISTS:
        gl.warp_specialize(
            [
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(0), spec)),
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(1), spec)),
                (producer, (sources, panels, bars, problem, spec)),
                (selector, (INDEX, SCORE, COUNT, LENGTHS, ring, bars, problem, spec)),
            ],
            [4, 4, 4],
            [208, 24, 72],
        )
    elif not spec.VALUES:
        gl.warp_specialize(
            [
                (scorer, (tensors, tiles, ring, bars, problem, gl.constexpr(0), spec)),
                (scorer, (tensors, tiles, ring, bars, problem, gl.constexpr(1), spec)),
                (producer, (sources, panels, bars, problem, spec)),
                (keeper, (SCORE, COUNT, LENGTHS, ring, bars, problem, spec)),
            ],
            [4, 4, 4],
            [216, 24, 56],
        )
    elif spec.SELECT == SCORES:
        gl.warp_specialize(
            [
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(0), spec)),
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(1), spec)),
                (producer, (sources, panels, bars, problem, spec)),
                (keeper, (SCORE, COUNT, LENGTHS, ring, bars, problem, spec)),
            ],
            [4, 4, 4],
            [216, 24, 56],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(0), spec)),
                (consumer, (tensors, tiles, ring, bars, problem, gl.constexpr(1), spec)),
                (producer, (sources, panels, bars, problem, spec)),
            ],
            [4, 1],
            [240, 24],
        )


# ---- host ---------------------------------------------------------------------------------------


def _tma_reads(x: torch.Tensor) -> bool:
    """Whether x `[B,H,S,D]` can be read through a tensor descriptor: unit last stride, the others
    and the address multiples of 16 bytes."""
    strides = [s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    aligned = all(s > 0 and s % 8 == 0 for s in strides) and x.data_ptr() % 16 == 0
    return aligned and x.stride(3) == 1


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel can read these inputs, from what the host knows."""
    return (
        q.device.type == "cuda"
        and card(q.device).wgmma
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] in (64, 128)
        and _tma_reads(q)
        and _tma_reads(k)
        and _tma_reads(v)
    )


def corrects(rows: torch.Tensor, gamma: int) -> bool:
    """Whether block_sparse can correct by these dense rows as it writes its output."""
    return gamma <= MAX_DELTA and gamma & (gamma - 1) == 0 and rows.is_contiguous()


def _descriptor(x: torch.Tensor, rows: int, step: int = 1) -> TensorDescriptor:
    """x `[B,H,S,D]`, every step-th of its tokens, in boxes of `rows` tokens and 64 columns."""
    shape = [*x.shape[:2], (x.shape[2] + step - 1) // step, x.shape[3]]
    strides = [x.stride(0), x.stride(1), x.stride(2) * step, 1]
    # the stride of a dimension of one is never used, but must be valid
    strides = [s if n > 1 else x.shape[3] for n, s in zip(shape, strides, strict=True)]
    strides[3] = 1
    return TensorDescriptor(x, shape, strides, [1, 1, rows, 64], gl.NVMMASharedLayout(128, 16, 4))


@triton.jit
def _tail_kernel(V, TAIL, LENGTHS, v_strides, lengths_step, kv_heads, D: tl.constexpr):
    v_b, v_h, v_s = v_strides
    pair = tl.program_id(0).to(tl.int64)
    b = pair // kv_heads
    length = tl.load(LENGTHS + b * lengths_step).to(tl.int32)
    row = (length - 1) // 128 * 128 + tl.arange(0, 128)
    d = tl.arange(0, D)[None, :]
    offset = b * v_b + pair % kv_heads * v_h + row.to(tl.int64) * v_s
    tail = tl.load(V + offset[:, None] + d, mask=(row < length)[:, None], other=0.0)
    tl.store(TAIL + (pair * 128 + tl.arange(0, 128)[:, None]) * D + d, tail)


def _values_tail(v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[B,Hkv,128,D]`: the 128-key tile of the last valid key, zeros after that key."""
    tail = v.new_empty((*v.shape[:2], 128, v.shape[3]))
    launch_kernel(
        _tail_kernel,
        grid=(v.shape[0] * v.shape[1],),
        V=v,
        TAIL=tail,
        LENGTHS=lengths,
        v_strides=v.stride()[:3],
        lengths_step=row_step(lengths),
        kv_heads=v.shape[1],
        D=v.shape[3],
        num_warps=4,
    )
    return tail


def _launch(
    q,
    k,
    v,
    out,
    lse,
    lengths,
    problem,
    spec,
    *,
    dense=None,
    lists=None,
    count=None,
    index=None,
    score=None,
):
    """One launch of the kernel. Tensors that it does not read are stood in for by others."""
    values = _descriptor(k if v is None else v, 64)
    has_tail = v is not None and lengths is not None
    launch_kernel(
        attention_kernel,
        grid=(problem.items,),
        q_desc=_descriptor(q, 32 if spec.PACK == 4 else 64, 1 if spec.SPARSE else problem.gamma),
        k_desc=_descriptor(k, 64),
        v_desc=values,
        tail_desc=_descriptor(_values_tail(v, lengths), 64) if has_tail else values,
        OUT=out,
        LSE=lse,
        DENSE=out if dense is None else dense,
        LIST=lse if lists is None else lists,
        COUNT=lse if count is None else count,
        LENGTHS=lse if lengths is None else lengths,
        INDEX=lse if index is None else index,
        SCORE=lse if score is None else score,
        **problem._asdict(),
        spec=spec,
        num_warps=4,
    )


def _problem(q, k, scale, gamma, lengths, items, **numbers) -> Problem:
    return Problem(
        lengths_step=row_step(lengths),
        queries=q.shape[2],
        keys=k.shape[2],
        rows=-(-q.shape[2] // gamma),
        query_blocks=-(-q.shape[2] // QUERY_BLOCK),
        kv_heads=k.shape[1],
        gamma=gamma,
        items=items,
        scale=scale * LOG2E,
        **numbers,
    )


def _packed(q, k, rows):
    """How many heads of a group share a program, program columns, and programs of `rows` rows."""
    group = q.shape[1] // k.shape[1]
    pack = 4 if group % 4 == 0 else 2 if group % 2 == 0 else 1
    columns = q.shape[0] * q.shape[1] // pack
    return pack, columns, -(-rows // (QUERY_BLOCK // pack)) * columns


def _spec(q, k, lengths, **options) -> Spec:
    group = q.shape[1] // k.shape[1]
    return Spec(D=q.shape[3], GROUP=group, HAS_LENGTHS=lengths is not None, **options)


def launch_query_sparse(q, k, v, scale, gamma, exact_k, lengths, out, lse, index, score):
    """query_sparse_attention's "estimated" selection with at most MAX_EXACT exact slots, or none
    (index with no slots); blocks of BLOCK keys."""
    pack, columns, items = _packed(q, k, out.shape[2])
    top_k = index.shape[3]
    exact = exact_k if top_k else 0
    problem = _problem(q, k, scale, gamma, lengths, items, columns=columns, free=top_k - exact)
    select = LISTS.value if top_k else 0
    spec = _spec(q, k, lengths, PACK=pack, SELECT=select, EXACT=exact)
    listed = dict(index=index, score=score) if top_k else {}
    _launch(q, k, v, out, lse, lengths, problem, spec, **listed)


def launch_scores(q, k, v, scale, gamma, lengths, out, lse, score):
    """The same rows, and the scores of all their complete blocks of BLOCK keys: score
    `[B,Hq,blocks,R]` float16, written nowhere else. Without v out is not written, either."""
    pack, columns, items = _packed(q, k, out.shape[2])
    problem = _problem(q, k, scale, gamma, lengths, items, columns=columns, kept=score.shape[2])
    how = {} if v is not None else dict(VALUES=False, STAGES=4)
    spec = _spec(q, k, lengths, PACK=pack, SELECT=SCORES.value, **how)
    _launch(q, k, v, out, lse, lengths, problem, spec, score=score)


def launch_block_sparse(
    q, k, v, lists, count, scale, window, lengths, dense, gamma, weight, out, lse
):
    """block_sparse_attention with QUERY_BLOCK queries and BLOCK keys a block, over lists of
    distinct blocks before the local part. `dense` `[B,Hq,ceil(T/gamma),D]` or None: correct by it
    with that weight (delta_correct), gamma a power of two up to MAX_DELTA."""
    items = q.shape[0] * q.shape[1] * -(-q.shape[2] // QUERY_BLOCK)
    group_rows = 1 if dense is None else gamma
    listed, weight = lists.shape[3], float(weight)
    problem = _problem(
        q, k, scale, group_rows, lengths, items, window=window, listed=listed, weight=weight
    )
    spec = _spec(q, k, lengths, SPARSE=True, DELTA=0 if dense is None else gamma)
    _launch(q, k, v, out, lse, lengths, problem, spec, dense=dense, lists=lists, count=count)
