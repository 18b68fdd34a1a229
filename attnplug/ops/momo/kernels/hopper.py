"""The Hopper (sm_90) kernel of query_sparse_attention and block_sparse_attention, in Gluon.

A program is warp-specialised. A producer warp brings tiles of two 64-key blocks by TMA into a ring
of two stages. Two consumer warpgroups hold 64 query rows each: q.k of the next tile runs on the
tensor cores beside p.v of this one, the softmax stays in registers. For a selection a third
warpgroup, one row a thread, gets every block's score through a small ring and keeps the row's
list, off the softmax's path.

Query-sparse: tiles of keys in ascending order, the last ones masked by causality; PACK heads of a
group share a program, 128 / PACK rows of each. Block-sparse: 128 queries of one head; first the
local part (masked), then the listed blocks, any two a tile. An odd number of blocks is made even
by a block in front that nobody sees.

TMA reads whole boxes. Past the tensor's end it fills in zeros; the values of the tile that holds
the last valid key come from a copy that ends in zeros, for 0 * NaN of an unwritten slot is NaN.
Hidden logits are -inf against a running maximum of at least -1e30, so that a row that has seen
nothing yet, or only -inf, stays free of NaN.

A block's score comes from its exponentials against the row's running maximum: where it lies 87
below that it is -inf. The other kernels still tell such scores apart.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnplug.ops.common.hopper import reinterpret
from attnplug.ops.common.rows import row_step
from attnplug.ops.momo.kernels.hopper_select import keeper, selector
from attnplug.ops.momo.kernels.hopper_tiles import consumer, producer

BLOCK = 64  # keys a block
QUERY_BLOCK = 128  # rows a program
MAX_EXACT = 8  # exact slots, in registers
MAX_DELTA = 16  # a delta group must lie in the 16 rows that one warp holds
LOG2E = 1.4426950408889634
# One compilation whatever their values.
INTEGERS = (
    "lengths_stride", "T", "S", "R", "NQ", "HK", "across", "window", "gamma", "items", "listed",
    "free",
)  # fmt: skip


@gluon.jit(do_not_specialize=INTEGERS)
def attention_kernel(
    QD, KD, VD, TD, OUT, LSE, DENSE, LIST, COUNT, LENGTHS, INDEX, SCORE,
    lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, listed, free, scale, weight,
    SPARSE: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr,
    SELECT: gl.constexpr, EXACT: gl.constexpr, DELTA: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    ST: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    # SELECT: 0 nothing, 1 the lists (`selector`), 2 all scores (`keeper`)
    DTYPE: gl.constexpr = OUT.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PL: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    QR: gl.constexpr = 32 if PACK == 4 else 64
    q_s = gl.allocate_shared_memory(DTYPE, [2, 64, D], KL)
    k_s = gl.allocate_shared_memory(DTYPE, [ST, 128, D], KL)
    v_s = gl.allocate_shared_memory(DTYPE, [ST, 128, D], KL)
    q_p = reinterpret(q_s, DTYPE, [2 * D // QR, 1, 1, QR, 64], PL)
    k_p = reinterpret(k_s, DTYPE, [ST * D // 32, 1, 1, 64, 64], PL)
    v_p = reinterpret(v_s, DTYPE, [ST * D // 32, 1, 1, 64, 64], PL)
    BL: gl.constexpr = mbarrier.MBarrierLayout()
    kf = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    ke = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    vf = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    ve = gl.allocate_shared_memory(gl.int64, [ST, 1], BL)
    qf = gl.allocate_shared_memory(gl.int64, [1], BL)
    qe = gl.allocate_shared_memory(gl.int64, [1], BL)
    sf = gl.allocate_shared_memory(gl.int64, [RING, 1], BL)
    se = gl.allocate_shared_memory(gl.int64, [RING, 1], BL)
    ring = gl.allocate_shared_memory(
        gl.float32, [RING * 3, 128], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    for i in gl.static_range(ST):
        mbarrier.init(kf.index(i), count=1)
        mbarrier.init(ke.index(i), count=2)
        mbarrier.init(vf.index(i), count=1)
        mbarrier.init(ve.index(i), count=2)
    for i in gl.static_range(RING):
        mbarrier.init(sf.index(i), count=2)
        mbarrier.init(se.index(i), count=1)
    mbarrier.init(qf, count=1)
    mbarrier.init(qe, count=2)
    fence_async_shared()
    # The tuples stand inside the call: under a name of their own, constexprs decay to tensors.
    if SELECT == 1:
        gl.warp_specialize([
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(0), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(1), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (producer, (QD, KD, VD, TD, LIST, COUNT, LENGTHS, q_p, k_p, v_p, kf, ke, vf, ve, qf,
                         qe, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, listed,
                         SPARSE, D, GROUP, PACK, HAS_LENGTHS, ST)),
            (selector, (INDEX, SCORE, COUNT, LENGTHS, ring, sf, se, lengths_stride, T, S, R, NQ,
                         HK, across, window, gamma, items, free, GROUP, PACK, EXACT, HAS_LENGTHS,
                         RING)),
        ], [4, 4, 4], [208, 24, 72])  # fmt: skip
    elif SELECT == 2:
        gl.warp_specialize([
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(0), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(1), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (producer, (QD, KD, VD, TD, LIST, COUNT, LENGTHS, q_p, k_p, v_p, kf, ke, vf, ve, qf,
                         qe, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, listed,
                         SPARSE, D, GROUP, PACK, HAS_LENGTHS, ST)),
            (keeper, (SCORE, COUNT, LENGTHS, ring, sf, se, lengths_stride, T, S, R, NQ, HK, across,
                      window, gamma, items, free, GROUP, PACK, HAS_LENGTHS, RING)),
        ], [4, 4, 4], [216, 24, 56])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(0), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (consumer, (OUT, LSE, DENSE, COUNT, LENGTHS, q_s, k_s, v_s, ring, kf, ke, vf, ve, qf,
                         qe, sf, se, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items,
                         scale, weight, gl.constexpr(1), SPARSE, D, GROUP, PACK, SELECT, DELTA,
                         HAS_LENGTHS, ST, RING)),
            (producer, (QD, KD, VD, TD, LIST, COUNT, LENGTHS, q_p, k_p, v_p, kf, ke, vf, ve, qf,
                         qe, lengths_stride, T, S, R, NQ, HK, across, window, gamma, items, listed,
                         SPARSE, D, GROUP, PACK, HAS_LENGTHS, ST)),
        ], [4, 1], [240, 24])  # fmt: skip


# ---- host ---------------------------------------------------------------------------------------


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


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
        and _is_hopper(q.device)
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
def _tail_kernel(
    V, TAIL, LENGTHS, stride_b, stride_h, stride_s, lengths_stride, HK, D: tl.constexpr
):
    pair = tl.program_id(0).to(tl.int64)
    b = pair // HK
    length = tl.load(LENGTHS + b * lengths_stride).to(tl.int32)
    row = (length - 1) // 128 * 128 + tl.arange(0, 128)
    d = tl.arange(0, D)[None, :]
    place = b * stride_b + pair % HK * stride_h + row.to(tl.int64) * stride_s
    tail = tl.load(V + place[:, None] + d, mask=(row < length)[:, None], other=0.0)
    tl.store(TAIL + (pair * 128 + tl.arange(0, 128)[:, None]) * D + d, tail)


def _values_tail(v: torch.Tensor, lengths: torch.Tensor, stride: int) -> torch.Tensor:
    """`[B,Hkv,128,D]`: the 128-key tile of the last valid key, zeros after that key."""
    tail = v.new_empty((*v.shape[:2], 128, v.shape[3]))
    _tail_kernel[(v.shape[0] * v.shape[1],)](
        v, tail, lengths, *v.stride()[:3], stride, v.shape[1], D=v.shape[3], num_warps=4
    )
    return tail


def _launch(
    q, k, v, out, lse, scale, lengths, *, items, across, gamma, pack, sparse,
    lists=None, count=None, window=0, dense=None, delta=0, weight=1.0, index=None,
    score=None, exact=0, kept=0,
):  # fmt: skip
    stride = row_step(lengths)
    values = _descriptor(v, 64)
    tail = values if lengths is None else _descriptor(_values_tail(v, lengths, stride), 64)
    group = q.shape[1] // k.shape[1]
    select = 1 if index is not None else 2 if score is not None else 0
    attention_kernel[(items,)](
        _descriptor(q, 32 if pack == 4 else 64, 1 if sparse else gamma),
        _descriptor(k, 64), values, tail, out, lse, out if dense is None else dense,
        lse if lists is None else lists, lse if count is None else count,
        lse if lengths is None else lengths, lse if index is None else index,
        lse if score is None else score, stride, q.shape[2], k.shape[2],
        (q.shape[2] + gamma - 1) // gamma, triton.cdiv(q.shape[2], QUERY_BLOCK), k.shape[1],
        across, window, gamma, items, 0 if lists is None else lists.shape[3],
        (0, 0 if index is None else index.shape[3] - exact, kept)[select], scale * LOG2E,
        float(weight),
        SPARSE=sparse, D=q.shape[3], GROUP=group, PACK=pack, SELECT=select, EXACT=exact,
        DELTA=delta, HAS_LENGTHS=lengths is not None, ST=2, RING=4, num_warps=4,
    )  # fmt: skip


def _packed(q, k, rows):
    """How many heads of a group share a program, program columns, and programs of `rows` rows."""
    group = q.shape[1] // k.shape[1]
    pack = 4 if group % 4 == 0 else 2 if group % 2 == 0 else 1
    across = q.shape[0] * q.shape[1] // pack
    return pack, across, triton.cdiv(rows, QUERY_BLOCK // pack) * across


def launch_query_sparse(q, k, v, scale, gamma, exact_k, lengths, out, lse, index, score):
    """query_sparse_attention's "estimated" selection with at most MAX_EXACT exact slots, or none
    (index with no slots); blocks of BLOCK keys."""
    pack, across, items = _packed(q, k, out.shape[2])
    top_k = index.shape[3]
    _launch(
        q, k, v, out, lse, scale, lengths, items=items, across=across, gamma=gamma,
        pack=pack, sparse=False, index=index if top_k else None, score=score if top_k else None,
        exact=exact_k if top_k else 0,
    )  # fmt: skip


def launch_scores(q, k, v, scale, gamma, lengths, out, lse, score):
    """The same rows, and the scores of all their complete blocks of BLOCK keys: score
    `[B,Hq,blocks,R]` float16, written nowhere else."""
    pack, across, items = _packed(q, k, out.shape[2])
    _launch(
        q, k, v, out, lse, scale, lengths, items=items, across=across, gamma=gamma,
        pack=pack, sparse=False, score=score, kept=score.shape[2],
    )  # fmt: skip


def launch_block_sparse(
    q, k, v, lists, count, scale, window, lengths, dense, gamma, weight, out, lse
):
    """block_sparse_attention with QUERY_BLOCK queries and BLOCK keys a block, over lists of
    distinct blocks before the local part. `dense` `[B,Hq,ceil(T/gamma),D]` or None: correct by it
    with that weight (delta_correct), gamma a power of two up to MAX_DELTA."""
    items = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], QUERY_BLOCK)
    _launch(
        q, k, v, out, lse, scale, lengths, items=items, across=1,
        gamma=gamma if dense is not None else 1, pack=1, sparse=True, lists=lists,
        count=count, window=window, dense=dense, delta=0 if dense is None else gamma, weight=weight,
    )  # fmt: skip
