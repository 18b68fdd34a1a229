"""What a step of `sketch` knows before it reads a code: the exact attention to the sink and the
last blocks, in pieces, and the query in the basis of the codes.

    projected = scale log2(e) q @ queries          `[2 r + 2 + D]` a head: see `fit_basis`
    fixed_lse_p = log2 sum_{i in piece p} 2^s_i,   fixed_out_p = sum_i 2^(s_i - fixed_lse_p) v_i

over the tokens of a row's first block and of its last four, s the scores to the base 2. The pieces
are 64 tokens each, two of the sink and eight of the last blocks.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import arrays, reference_kept
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import LOG2E, base_two
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import (
    cache_of,
    chosen_between,
    query_of,
    rows_of,
    shape_of,
    steps_of,
    token_of,
)
from attnplug.ops.sketch.encode_keys import LOCAL, check_float, near_block
from attnplug.ops.sketch.kernels import prepare as kernels
from attnplug.ops.sketch.kernels.codes import Code, pieces_of, projection_of
from attnplug.ops.sketch.state import BLOCK, Codes

NAME = "sketch_prepare"
PIECE = kernels.PIECE.value  # tokens
PIECES = (1 + LOCAL) * BLOCK // PIECE
COLUMNS = 16  # of the projection, for one program
ENCODERS = 4  # programs a KV head that make codes in the chain


def prepare_query(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project the query and attend to the tokens that every step reads exactly.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q, Hkv dividing Hq.
        queries: float32 `[B, Hkv, D, 2 r + 2 + D]` of `fit_basis`.
        scale: factor on q.k, commonly `D ** -0.5`.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the query's own the last. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off. The projection is of the
            scores before it.

    Returns:
        projected `[B, Hq, 2 r + 2 + D]`, fixed_out `[B, Hq, 10, D]`, fixed_lse `[B, Hq, 10]`,
        float32. A piece without tokens has -inf, and anything for an output.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    return _prepare_query(q, k, v, queries, scale, lengths, start, key_mask, softcap)


def _allocate(q, k, v, queries, scale, lengths, start, key_mask, softcap):
    check_step(NAME, q, k, v, lengths, start, key_mask, softcap)
    batch, _, _, width = q.shape
    if queries.dim() != 4 or (queries.shape[3] - 2 - width) % 2 != 0:
        raise ArgumentError(
            f"{NAME}: queries has shape {tuple(queries.shape)}, needs [B,Hkv,D,2r+2+D]"
        )
    wanted = (batch, k.shape[1], width, queries.shape[3])
    check_float(NAME, "queries", queries, wanted, q.device)
    return outputs(q, queries)


def outputs(q: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory for what `prepare_query` returns, of q `[B, Hq, 1, D]`."""
    batch, heads, _, width = q.shape
    pieces = (batch, heads, PIECES)
    return (
        q.new_empty((batch, heads, queries.shape[3]), dtype=torch.float32),
        q.new_empty((*pieces, width), dtype=torch.float32),
        q.new_empty(pieces, dtype=torch.float32),
    )


def check_step(name, q, k, v, lengths, start, key_mask, softcap, most=1):
    """The checks of a step's inputs, shared by the ops that read keys and values; a row may have
    `most` queries."""
    check_attention_inputs(name, q, k, v)
    check_sequence_inputs(name, q, k, lengths, start, key_mask)
    needed = "1" if most == 1 else f"1 to {most}"
    require(0 < q.shape[2] <= most, name, f"q has {q.shape[2]} queries a row, needs {needed}")
    require(softcap >= 0, name, f"softcap is {softcap}, needs 0 (off) or a positive cap")


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def fixed_token(slot, length, start):
    """The token of a slot 0..639 of the fixed part; `length` and past it there is none."""
    if slot < BLOCK:
        return start + slot
    return start + near_block(length, start) * BLOCK + slot - BLOCK


@njit(parallel=True)
def _reference(
    q, k, v, queries, lengths, start, mask, scale, softcap, projected, fixed_out, fixed_lse
):
    """The projection, and dense attention to each piece, for every row and KV head in parallel."""
    batch, heads, _, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    log2e = np.float32(LOG2E)
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        g = slice(h * group, (h + 1) * group)
        query = np.ascontiguousarray(q[b, g])
        product = np.zeros((group, queries.shape[3]), np.float32)
        add_product(query.reshape(group, width) * (scale * log2e), queries[b, h], product)
        projected[b, g] = product
        hidden = mask[b * len(mask) // batch]
        for p in range(PIECES):
            kept = np.empty(PIECE, np.int64)
            count = 0
            for i in range(PIECE):
                n = fixed_token(p * PIECE + i, lengths[b], start[b])
                if n < lengths[b] and (hidden.shape[0] == 0 or hidden[n]):
                    kept[count], count = n, count + 1
            out = np.empty((group, 1, width), np.float32)
            lse = np.empty((group, 1), np.float32)
            none = np.empty(0, np.float32)
            reference_kept(query, k[b, h], v[b, h], kept[:count], none, scale, softcap, out, lse)
            fixed_out[b, g, p] = out[:, 0]
            fixed_lse[b, g, p] = lse[:, 0] * log2e


def _cpu(
    q, k, v, queries, scale, lengths, start, key_mask, softcap, projected, fixed_out, fixed_lse
):
    lengths, start = rows_on_cpu(k, lengths, start)
    _reference(
        *arrays(q.contiguous(), k, v, queries, lengths, start, key_mask, scale, softcap),
        *arrays(projected, fixed_out, fixed_lse),
    )


# --- CUDA ------------------------------------------------------------------------------------


def launch_prepare_query(
    q,
    k,
    v,
    queries,
    scale,
    lengths,
    start,
    key_mask,
    softcap,
    projected,
    fixed_out,
    fixed_lse,
    total=None,
    encoder=None,
    codes=(None,) * 4,
    new=(None, None),
    recent=None,
    marks=None,
    warps=None,
    registers=None,
):
    """Run the kernel; tensors as in `prepare_query`, on a GPU or in Triton's interpreter. In the
    chain also clear `total` and `marks`, make the missing codes, and write the token `new` to the
    cache and the query to the ring `recent`. q `[B T, Hq, 1, D]` may have T queries of each row."""
    batch, (rows, kv_heads, size, width) = len(q), k.shape
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    new_k, new_v = (x if x is None or x.stride(3) == 1 else x.contiguous() for x in new)
    fine, coarse, odd, _ = codes
    coders = 0 if encoder is None else ENCODERS
    programs = kernels.Programs(PIECES, cdiv(queries.shape[3], COLUMNS), coders)
    wide, found = width * q.element_size(), card(q.device)
    factor, cap = base_two(scale, softcap)
    cache, token = chosen_between(q.device, cache_of(k, v), token_of(new_k, new_v))
    launch_kernel(
        kernels.prepare,
        grid=(sum(programs) + (total is not None), kv_heads, batch),
        q=query_of(q),
        cache=cache,
        rows=rows_of(size, lengths, start, mask_bytes(key_mask)),
        token=token,
        recent=recent,
        queries=queries,
        projected=projection_of(projected),
        fixed=pieces_of(fixed_out, fixed_lse),
        total=total,
        marks=marks,
        encoder=encoder,
        codes=Codes(*codes),
        q_scale=scale * LOG2E,
        scale=factor,
        cap=cap,
        chunks=0 if odd is None else odd.shape[2],
        mark_count=0 if marks is None else marks.shape[2],
        RING=1 if recent is None else recent.shape[2],
        SHAPE=shape_of(q, k),
        TILE=16 if wide > 512 else 32 if wide > 256 else 64,
        PROGRAMS=programs,
        COUNT=COLUMNS,
        MARKS=1 if marks is None else triton.next_power_of_2(marks.shape[2]),
        CAPPED=softcap > 0,
        CODE=None if fine is None else Code.of(fine, coarse),
        STEPS=steps_of(lengths, start, batch // rows),
        PDL=found.pdl,
        PRECISION=found.precision,
        num_warps=warps or (8 if wide > 256 else 4),
        **found.limit(registers),
    )


_prepare_query = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor queries, float scale, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask, float softcap) -> (Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_prepare_query,
)
