"""Exact attention to the picks of `sketch`, and what the scan made of the same tokens.

    pick_lse_p = log2 sum_{i in piece p} 2^s_i,   pick_out_p = sum_i 2^(s_i - pick_lse_p) v_i
    Z_p = sum_i 2^(s^_i - N),   U_p = sum_i 2^(s^_i - N) (s^_i - N)
    E_p = sum_{i lower} 2^(s_i - N),   G_p = sum_{i lower} 2^(s^_i - N)

over the picks i of a piece of the list; the lower ones have a share below `cut`. Z and U are to be
taken from the scan's sums: what is left is what nobody reads. E / G calibrates that.
"""

import functools

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pipeline import Loop
from attnplug.ops.common.reference import arrays, reference_kept
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import LOG2E, base_two
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import cache_of, query_of, shape_of, steps_of
from attnplug.ops.sketch.encode_keys import check_float
from attnplug.ops.sketch.estimates import (
    LARGEST,
    capped,
    estimate,
    exp2,
    in_units,
    log2,
    rounded,
    unpack,
)
from attnplug.ops.sketch.kernels import attend as kernels
from attnplug.ops.sketch.kernels.codes import Code, Pieces, projection_of
from attnplug.ops.sketch.prepare_query import check_step
from attnplug.ops.sketch.state import Codes

NAME = "sketch_attend"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor projected, Tensor fine, Tensor coarse, "
    "Tensor picks, Tensor cut, Tensor norm, float scale, int pieces, float softcap) "
    "-> (Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)
TILE = 64  # picks of one step
# Of a program of several steps in four warps: with 204 two of them fitted a multiprocessor, where
# the plan counts on three. Larger groups and eight warps would only spill.
REGISTERS = 168
SUMS = kernels.SUMS.value


def attend_picks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    projected: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    picks: torch.Tensor,
    cut: torch.Tensor,
    norm: torch.Tensor,
    *,
    scale: float,
    pieces: int = 1,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend to the picks, in pieces.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q.
        projected: of `prepare_query`. fine, coarse: the codes.
        picks, cut: of `pick_tokens`. norm: of `scan_sketch`.
        scale: factor on q.k, commonly `D ** -0.5`.
        pieces: that the list is cut in, of whole steps of 64 picks.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.

    Returns:
        pick_out `[B, Hq, pieces, D]`, pick_lse `[B, Hq, pieces]` to the base 2, and pick_sums
        `[B, Hq, pieces, 4]`: Z, U, E, G; float32. A piece without picks has -inf and zeros. With
        softcap U is as in `scan_sketch`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    return _attend_picks(q, k, v, projected, fine, coarse, picks, cut, norm, scale, pieces, softcap)


def _allocate(q, k, v, projected, fine, coarse, picks, cut, norm, scale, pieces, softcap):
    check_step(NAME, q, k, v, None, None, None, softcap)
    batch, heads, _, width = q.shape
    rank = 2 * fine.shape[-1] + 4 * coarse.shape[-1]
    check_float(NAME, "projected", projected, (batch, heads, 2 * rank + 2 + width), q.device)
    check_float(NAME, "cut", cut, (*k.shape[:2], 3), q.device)
    check_float(NAME, "norm", norm, (batch, heads), q.device)
    for label, tensor in (("fine", fine), ("coarse", coarse)):
        if tensor.shape[:3] != k.shape[:3] or tensor.dtype != torch.uint8:
            raise ArgumentError(
                f"{NAME}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs uint8 "
                f"{[*k.shape[:3]]} and bytes"
            )
        require(tensor.device == q.device, NAME, f"{label} is on {tensor.device}, q on {q.device}")
        require(tensor.is_contiguous(), NAME, f"{label} is not contiguous")
    if picks.dim() != 3 or picks.shape[:2] != k.shape[:2] or picks.dtype != torch.int32:
        raise ArgumentError(
            f"{NAME}: picks is {picks.dtype} {tuple(picks.shape)}, needs int32 [B,Hkv,K]"
        )
    require(picks.device == q.device, NAME, f"picks is on {picks.device}, q on {q.device}")
    require(picks.is_contiguous(), NAME, "picks is not contiguous")
    require(pieces >= 1, NAME, f"pieces is {pieces}, needs at least 1")
    return outputs(q, pieces)


def outputs(q: torch.Tensor, pieces: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for what `attend_picks` returns, of q `[B, Hq, 1, D]`."""
    batch, heads, _, width = q.shape
    return (
        q.new_empty((batch, heads, pieces, width), dtype=torch.float32),
        q.new_empty((batch, heads, pieces), dtype=torch.float32),
        q.new_empty((batch, heads, pieces, SUMS), dtype=torch.float32),
    )


def tiles_of(capacity: int, pieces: int) -> int:
    """Steps of 64 picks in one piece."""
    return cdiv(cdiv(capacity, TILE), pieces)


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(
    q,
    k,
    v,
    projected,
    fine,
    coarse,
    picks,
    cut,
    norm,
    scale,
    softcap,
    size,
    pick_out,
    pick_lse,
    pick_sums,
):
    """Every piece of every row and KV head, the rows and heads in parallel."""
    batch, heads, _, width = q.shape
    kv_heads = k.shape[1]
    group, rank = heads // kv_heads, 2 * fine.shape[3] + 4 * coarse.shape[3]
    cap = softcap * np.float32(LOG2E)
    none = np.empty(0, np.float32)
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        heads_of = slice(h * group, (h + 1) * group)
        query = np.ascontiguousarray(q[b, heads_of])
        codes = np.empty(rank, np.float32)
        whole = np.empty((group, rank), np.float32)
        unit = np.empty(group, np.float32)
        for g in range(group):
            whole[g], unit[g] = in_units(projected[b, h * group + g, :rank])
        for p in range(pick_lse.shape[2]):
            listed = picks[b, h, p * size : (p + 1) * size]
            listed = listed[listed >= 0]
            out = np.empty((group, 1, width), np.float32)
            lse = np.empty((group, 1), np.float32)
            reference_kept(query, k[b, h], v[b, h], listed, none, scale, softcap, out, lse)
            pick_out[b, heads_of, p] = out[:, 0]
            pick_lse[b, heads_of, p] = lse[:, 0] * np.float32(LOG2E)
            sums = np.zeros((group, SUMS), np.float64)
            for n in listed:
                unpack(fine[b, h, n], coarse[b, h, n], codes)
                exact, guess = np.empty((2, group), np.float64)
                for g in range(group):
                    row = h * group + g
                    s = estimate(whole[g], unit[g], projected[b, row, rank], codes)
                    guess[g] = exp2(min(capped(s, cap) - norm[b, row], np.float32(LARGEST)))
                    sums[g, 0] += guess[g]
                    shift = np.float32(0) if cap > 0 else norm[b, row]
                    sums[g, 1] += guess[g] * (s - shift)
                    dot = np.float64(0)
                    for d in range(width):
                        dot += q[b, row, 0, d] * k[b, h, n, d]
                    true = capped(np.float32(dot * scale * LOG2E), cap) - norm[b, row]
                    exact[g] = exp2(min(true, np.float32(LARGEST)))
                if rounded(log2(guess.sum())) < cut[b, h, 0]:
                    sums[:, 2] += exact
                    sums[:, 3] += guess
            pick_sums[b, heads_of, p] = sums


def _cpu(*args):
    call, outputs = Call(*args[:-3]), args[-3:]
    size = TILE * tiles_of(call.picks.shape[2], call.pieces)
    _reference(
        *arrays(call.q.contiguous(), *args[1 : Call._fields.index("scale")]),
        *arrays(call.scale, call.softcap, size, *outputs),
    )


# --- CUDA ------------------------------------------------------------------------------------


@functools.cache
def tile_for(rows: int, padded: int, itemsize: int, shared: int) -> int:
    """Picks that a program attends to at once: TILE, or as many as `shared` bytes are enough for.
    A step's keys and values are loaded together, as in a pipeline of two stages."""
    tile = TILE
    while tile > 16 and Loop(rows, tile, 2).shared(padded * itemsize, itemsize) > shared:
        tile //= 2
    return tile


def launch_attend_picks(*args, warps=4, chained=False, fetched=False):
    """Run the kernel; tensors as in `attend_picks`, on a GPU or in Triton's interpreter. `chained`:
    the kernel in front is `pick`, or `fetched` with it: one that has put keys and values side by
    side in the order of the picks. q `[B T, Hq, 1, D]` may have T queries of each row."""
    call, (pick_out, pick_lse, pick_sums) = Call(*args[:-3]), args[-3:]
    fine, coarse, picks, pieces = call.fine, call.coarse, call.picks, call.pieces
    batch, (rows, kv_heads, size) = len(call.q), fine.shape[:3]
    found, (pdl, dependent) = card(fine.device), early(fine.device)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in args[:3])
    factor, cap = base_two(call.scale, call.softcap)
    shape, tiles = shape_of(q, fine), tiles_of(picks.shape[2], pieces)
    tile = tile_for(shape.ROWS, shape.DP, q.element_size(), found.shared)
    few = tiles > 1 and warps == 4 and shape.GROUP <= 16
    launch_kernel(
        kernels.attend,
        grid=(pieces, kv_heads, batch),
        q=query_of(q),
        cache=cache_of(k, v),
        projected=projection_of(call.projected),
        # The kernel reads no others of the codes.
        codes=Codes(fine, coarse, None, None),  # pyright: ignore[reportArgumentType]
        picks=picks,
        cut=call.cut,
        norm=call.norm,
        pieces=Pieces(pick_out, pick_lse, pieces),
        pick_sums=pick_sums,
        scale=factor,
        cap=cap,
        S=size,
        capacity=picks.shape[2],
        SHAPE=shape,
        HEADS=max(8, triton.next_power_of_2(shape.GROUP)),
        CODE=Code.of(fine, coarse),
        TILE=tile,
        TILES=tiles * TILE // tile,
        CAPPED=call.softcap > 0,
        ASM=found.asm,
        CHAINED=chained,
        FETCHED=fetched,
        STEPS=steps_of(None, queries=batch // rows),
        PDL=pdl,
        num_warps=warps,
        **found.limit(REGISTERS if few else None),
        **dependent,
    )


_attend_picks = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_attend_picks,
)
