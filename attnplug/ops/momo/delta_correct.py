"""Delta correction: what dense attention adds at every gamma-th query, spread over its followers.

    O[t] = O_*[t] + weight (O_g[i] - O_*[first + gamma i]),   i = (t - first) // gamma

O_* is the block-sparse output, O_g the dense output of the sparse rows, `first` the first query
that is no padding. Rows first + gamma i are O_g[i] itself, bit for bit, at any weight.

Source: MOMO (Measure Once, Mask Once), section 3, Eq. (3), after Delta Attention (Willette et al.,
2025), for weight 1. What sparse attention misses at a row resembles what it misses at the row's
followers only in part: the whole difference then adds more error than it removes, half of it does
not.
"""

import numpy as np
import torch

from attnplug.ops.common.checks import DTYPES
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import row_step, rows_as_given
from attnplug.ops.common.sizes import cdiv, padded_width
from attnplug.ops.common.triton import tl, triton
from attnplug.ops.momo.kernels.block_sparse import unit_last

NAME = "delta_correct"


def delta_correct(
    out_sparse: torch.Tensor,
    out_rows: torch.Tensor,
    *,
    gamma: int,
    weight: float = 1.0,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    kv_length: int | None = None,
) -> torch.Tensor:
    """O[t] = O_*[t] + weight (O_g[(t-first)//gamma] - O_*[first + (t-first)//gamma*gamma]).

    out_sparse `[B,H,T,D]` is O_*, out_rows `[B,H,R,D]` is O_g with R = ceil(T/gamma), one dtype
    (fp32, fp16, bf16); the sum is fp32 arithmetic, rounded once. weight is 0 to 1. lengths `[1]` or
    `[B]` and start `[1]` or `[B]` are integers, as in the attention ops. The T queries are the last
    T of `lengths` tokens (None: of `kv_length`, the S of k and v; None again: of T). first is
    `max(0, start - (length - T))`. Queries before `first` are padding and give 0.

    Returns `[B,H,T,D]`. Rows first + gamma i are bitwise equal to out_rows[i].

    Source: MOMO (Measure Once, Mask Once), section 3, Eq. (3).
    """
    refuse_gradients(NAME, out_sparse, out_rows)
    if kv_length is None:
        kv_length = out_sparse.shape[2]
    return _OP(out_sparse, out_rows, gamma, weight, lengths, start, kv_length)


def _allocate(
    out_sparse: torch.Tensor,
    out_rows: torch.Tensor,
    gamma: int,
    weight: float,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    kv_length: int,
) -> torch.Tensor:
    for label, tensor in (("out_sparse", out_sparse), ("out_rows", out_rows)):
        require(tensor.dim() == 4, NAME, f"{label} has {tensor.dim()} dimensions, needs [B,H,T,D]")
        require(
            tensor.dtype in DTYPES,
            NAME,
            f"{label} is {tensor.dtype}, needs float32, float16 or bfloat16",
        )
    require(
        out_rows.dtype == out_sparse.dtype,
        NAME,
        f"out_rows is {out_rows.dtype} but out_sparse is {out_sparse.dtype}",
    )
    require(
        out_rows.device == out_sparse.device,
        NAME,
        f"out_rows is on {out_rows.device}, out_sparse on {out_sparse.device}",
    )
    require(gamma >= 1, NAME, f"gamma is {gamma}, needs at least 1")
    require(0 <= weight <= 1, NAME, f"weight is {weight}, needs 0 to 1")
    batch, heads, queries, dim = out_sparse.shape
    rows = (queries + gamma - 1) // gamma
    require(
        out_rows.shape == (batch, heads, rows, dim),
        NAME,
        f"out_rows has shape {tuple(out_rows.shape)}, needs [B,H,ceil(T/gamma),D] = "
        f"{(batch, heads, rows, dim)}",
    )
    for label, tensor in (("lengths", lengths), ("start", start)):
        if tensor is None:
            continue
        require(
            tensor.dtype in (torch.int32, torch.int64),
            NAME,
            f"{label} is {tensor.dtype}, needs int32 or int64",
        )
        require(
            tensor.dim() == 1 and tensor.shape[0] in (1, batch),
            NAME,
            f"{label} has shape {tuple(tensor.shape)}, needs [1] or [B] = [{batch}]",
        )
        require(
            tensor.device == out_sparse.device,
            NAME,
            f"{label} is on {tensor.device}, out_sparse on {out_sparse.device}",
        )
    return out_sparse.new_empty(out_sparse.shape)


# ---- numba: the specification -------------------------------------------------------------------


@njit(parallel=True)
def _reference(out_sparse, out_rows, gamma, weight, first, out):
    batch, heads, queries, dim = out_sparse.shape
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        for t in range(queries):
            if t < first[b]:
                out[b, h, t] = 0.0
                continue
            row = (t - first[b]) // gamma
            base = first[b] + row * gamma
            if t == base:
                out[b, h, t] = out_rows[b, h, row]
            else:
                for d in range(dim):
                    delta = out_rows[b, h, row, d] - out_sparse[b, h, base, d]
                    out[b, h, t, d] = out_sparse[b, h, t, d] + weight * delta


def _first_queries(out_sparse, lengths, start, kv_length) -> np.ndarray:
    batch, queries = out_sparse.shape[0], out_sparse.shape[2]
    length, begin = rows_as_given(batch, kv_length, lengths, start)
    return (begin - (length - queries)).clamp(min=0).numpy()


def _cpu(out_sparse, out_rows, gamma, weight, lengths, start, kv_length, out):
    out.copy_(correct_on_cpu(out_sparse, out_rows, gamma, weight, lengths, start, kv_length))


def correct_on_cpu(out_sparse, out_rows, gamma, weight, lengths, start, kv_length) -> torch.Tensor:
    """The numba reference, float32."""
    wide = torch.empty(out_sparse.shape, dtype=torch.float32, device="cpu")
    _reference(
        *arrays(out_sparse.contiguous(), out_rows.contiguous(), gamma, weight),
        *arrays(_first_queries(out_sparse, lengths, start, kv_length), wide),
    )
    return wide


# ---- Triton -------------------------------------------------------------------------------------


@triton.jit
def _delta_kernel(
    SPARSE,
    ROWS_OUT,
    OUT,
    LENGTHS,
    START,
    T,
    HEADS,
    kv_length,
    weight,
    sparse_strides,
    rows_strides,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    GAMMA: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    sparse_b, sparse_h, sparse_t = sparse_strides
    rows_b, rows_h, rows_r = rows_strides
    tiles = tl.cdiv(T, TILE)
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    length = kv_length
    if LENGTHS is not None:
        length = tl.load(LENGTHS + b * LENGTH_STEP).to(tl.int32)
    first = T - length
    if START is not None:
        first += tl.load(START + b * START_STEP).to(tl.int32)
    first = tl.maximum(first, 0)

    t = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, D_PAD)[None, :]
    inside = t < T
    live = inside & (t >= first)
    row = tl.where(live, (t - first) // GAMMA, 0)
    base = tl.where(live, first + row * GAMMA, 0)
    whole = d < D
    sparse = SPARSE + b * sparse_b + h * sparse_h
    dense = ROWS_OUT + b * rows_b + h * rows_h
    mask = live[:, None] & whole
    # A group's rows load the same line of the cache: no shuffle is needed.
    target = tl.load(dense + row.to(tl.int64)[:, None] * rows_r + d, mask=mask, other=0.0)
    moved = mask & (t != base)[:, None]
    own = tl.load(sparse + t.to(tl.int64)[:, None] * sparse_t + d, mask=moved, other=0.0)
    anchor = tl.load(sparse + base.to(tl.int64)[:, None] * sparse_t + d, mask=moved, other=0.0)
    delta = target.to(tl.float32) - anchor.to(tl.float32)
    result = (own.to(tl.float32) + weight * delta).to(OUT.dtype.element_ty)
    result = tl.where((t == base)[:, None], target, result)
    result = tl.where(live[:, None], result, 0.0)
    place = (bh * T + t)[:, None] * D + d
    tl.store(OUT + place, result, mask=inside[:, None] & whole)


def launch_delta_correct(out_sparse, out_rows, gamma, weight, lengths, start, kv_length, out):
    """Fill `out` with the Triton kernel."""
    batch, heads, queries, dim = out.shape
    if out.numel() == 0:
        return
    sparse, rows = unit_last(out_sparse), unit_last(out_rows)
    tile = 16
    launch_kernel(
        _delta_kernel,
        grid=(batch * heads * cdiv(queries, tile),),
        SPARSE=sparse,
        ROWS_OUT=rows,
        OUT=out,
        LENGTHS=lengths,
        START=start,
        T=queries,
        HEADS=heads,
        kv_length=kv_length,
        weight=float(weight),
        sparse_strides=sparse.stride()[:3],
        rows_strides=rows.stride()[:3],
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        GAMMA=gamma,
        D=dim,
        D_PAD=padded_width(dim),
        TILE=tile,
        num_warps=4,
    )


_OP = define_op(
    f"{NAME}(Tensor out_sparse, Tensor out_rows, int gamma, float weight, Tensor? lengths, "
    "Tensor? start, SymInt kv_length) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_delta_correct,
)
