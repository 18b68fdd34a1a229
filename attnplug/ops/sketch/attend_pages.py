"""Exact attention to the picks of `sketch` over pages, and what the scan made of the same tokens:
`attend_picks` with weights of each band's own, and tokens through a block table.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_tensor
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, page_rows
from attnplug.ops.common.reference import arrays, reference_kept
from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.common.softmax import LOG2E, base_two
from attnplug.ops.common.views import cache_of, query_of, shape_of
from attnplug.ops.sketch.attend_picks import SUMS, TILE, outputs, tile_for, tiles_of
from attnplug.ops.sketch.encode_keys import check_float
from attnplug.ops.sketch.estimates import LARGEST, capped, estimate, exp2, log2, rounded, unpack
from attnplug.ops.sketch.kernels import pages_scan as kernels
from attnplug.ops.sketch.kernels.codes import Code, Pieces
from attnplug.ops.sketch.kernels.pages import Weights
from attnplug.ops.sketch.model_basis import BAND
from attnplug.ops.sketch.pages import PageSketch, check_pages
from attnplug.ops.sketch.prepare_pages import check_paged_step

NAME = "sketch_attend_pages"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor whole, Tensor facts, Tensor fine, "
    "Tensor coarse, Tensor odd, Tensor table, Tensor picks, Tensor cut, Tensor norm, float scale, "
    "int pieces, float softcap) -> (Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: torch.Tensor,
    facts: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    table: torch.Tensor,
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
        k, v: `[pages, Hkv, page, D]` like q.
        whole, facts: of `prepare_pages`, int8 `[B, Hq, bands, r]` and float32 `[B, Hq, bands, 2]`.
        fine, coarse, odd: the codes, uint8 `[pages, Hkv, page, bytes]` twice and
            `[pages, Hkv, page]`.
        table: int32 `[B, pages a row]`.
        picks, cut: of `pick_tokens`. norm: of `scan_pages`.
        scale, pieces, softcap: as in `attend_picks`.

    Returns:
        pick_out `[B, Hq, pieces, D]`, pick_lse `[B, Hq, pieces]` and pick_sums `[B, Hq, pieces, 4]`
        as `attend_picks` does.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v)
    codes = fine, coarse, odd
    read = q, k, v, whole, facts, *codes, table, picks, cut, norm
    return _attend_pages(*read, scale, pieces, softcap)


def _allocate(*args):
    call = Call(*args)
    q, k, picks = call.q, call.k, call.picks
    check_paged_step(NAME, q, k, call.v, call.table, None, call.softcap)
    check_pages(NAME, k, call.fine, call.coarse, call.odd)
    (batch, heads), kv_heads = q.shape[:2], k.shape[1]
    rank = 2 * call.fine.shape[3] + 4 * call.coarse.shape[3]
    bands = call.facts.shape[2] if call.facts.dim() == 4 else 0
    check_tensor(NAME, "whole", call.whole, torch.int8, (batch, heads, bands, rank), q.device)
    check_float(NAME, "facts", call.facts, (batch, heads, bands, 2), q.device)
    room = capacity(k, call.table)
    require(bands * BAND >= room, NAME, f"facts has {bands} bands, a row has room for {room} keys")
    check_float(NAME, "cut", call.cut, (batch, kv_heads, 3), q.device)
    check_float(NAME, "norm", call.norm, (batch, heads), q.device)
    fits = picks.dim() == 3 and picks.shape[:2] == (batch, kv_heads) and picks.dtype == torch.int32
    if not fits:
        raise ArgumentError(
            f"{NAME}: picks is {picks.dtype} {tuple(picks.shape)}, needs int32 [B,Hkv,K]"
        )
    check_tensor(NAME, "picks", picks, torch.int32, tuple(picks.shape), q.device)
    require(call.pieces >= 1, NAME, f"pieces is {call.pieces}, needs at least 1")
    return outputs(q, call.pieces)


# --- CPU: the specification ------------------------------------------------------------------


@njit(parallel=True)
def _reference(
    q,
    k,
    v,
    whole,
    facts,
    fine,
    coarse,
    table,
    places,
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
    """Every piece of every row and KV head, the rows and heads in parallel. `places` is the table
    of k and v, which may be copies."""
    batch, heads, _, width = q.shape
    kv_heads, rank, page, room = k.shape[1], whole.shape[3], fine.shape[2], k.shape[2]
    group, cap = heads // kv_heads, softcap * np.float32(LOG2E)
    none = np.empty(0, np.float32)
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        g0 = h * group
        query = np.ascontiguousarray(q[b, g0 : g0 + group])
        codes = np.empty(rank, np.float32)
        for p in range(pick_lse.shape[2]):
            listed = picks[b, h, p * size : (p + 1) * size]
            listed = listed[listed >= 0]
            keys = np.empty((len(listed), width), np.float32)
            values = np.empty((len(listed), width), np.float32)
            for i in range(len(listed)):
                keys[i] = k[places[b, listed[i] // room], h, listed[i] % room]
                values[i] = v[places[b, listed[i] // room], h, listed[i] % room]
            out, lse = np.empty((group, 1, width), np.float32), np.empty((group, 1), np.float32)
            kept = np.arange(len(listed))
            reference_kept(query, keys, values, kept, none, scale, softcap, out, lse)
            pick_out[b, g0 : g0 + group, p] = out[:, 0]
            pick_lse[b, g0 : g0 + group, p] = lse[:, 0] * np.float32(LOG2E)
            sums = np.zeros((group, SUMS), np.float64)
            for i in range(len(listed)):
                n = listed[i]
                own = table[b, n // page]
                unpack(fine[own, h, n % page], coarse[own, h, n % page], codes)
                exact, guess = np.empty((2, group), np.float64)
                for g in range(group):
                    unit, offset = facts[b, g0 + g, n // BAND]
                    s = estimate(whole[b, g0 + g, n // BAND], unit, offset, codes)
                    base = norm[b, g0 + g]
                    guess[g] = exp2(min(capped(s, cap) - base, np.float32(LARGEST)))
                    sums[g, 0] += guess[g]
                    sums[g, 1] += guess[g] * (s - (np.float32(0) if cap > 0 else base))
                    dot = np.float64(0)
                    for d in range(width):
                        dot += query[g, 0, d] * keys[i, d]
                    true = capped(np.float32(dot * scale * LOG2E), cap) - base
                    exact[g] = exp2(min(true, np.float32(LARGEST)))
                if rounded(log2(guess.sum())) < cut[b, h, 0]:
                    sums[:, 2] += exact
                    sums[:, 3] += guess
            pick_sums[b, g0 : g0 + group, p] = sums


def _cpu(*args):
    call, outs = Call(*args[:-3]), args[-3:]
    size = TILE * tiles_of(call.picks.shape[2], call.pieces)
    most = int(call.picks.max()) + 1
    k, v, places = page_rows(call.k, call.v, call.table, max(most, 1))
    _reference(
        *arrays(call.q.contiguous(), k, v, call.whole, call.facts, call.fine, call.coarse),
        *arrays(call.table, places, call.picks, call.cut, call.norm, call.scale, call.softcap),
        *arrays(size, *outs),
    )


# --- CUDA ------------------------------------------------------------------------------------


def launch_attend_pages(*args, warps=4):
    """Run the kernel; tensors as in `attend_pages`, on a GPU or in Triton's interpreter."""
    call, (pick_out, pick_lse, pick_sums) = Call(*args[:-3]), args[-3:]
    q, k, v, pieces = call.q, call.k, call.v, call.pieces
    q = q if q.stride(3) == 1 else q.contiguous()
    found, capacity_ = card(q.device), call.picks.shape[2]
    factor, cap = base_two(call.scale, call.softcap)
    shape, tiles = shape_of(q, k, call.table), tiles_of(capacity_, pieces)
    tile = tile_for(shape.ROWS, shape.DP, q.element_size(), found.shared)
    launch_kernel(
        kernels.attend,
        grid=(pieces, k.shape[1], len(q)),
        q=query_of(q),
        cache=cache_of(k, v, call.table),
        weights=Weights(call.whole, call.facts, call.facts.shape[2]),
        sketch=PageSketch(call.fine, call.coarse, call.odd),
        picks=call.picks,
        cut=call.cut,
        norm=call.norm,
        pieces=Pieces(pick_out, pick_lse, pieces),
        pick_sums=pick_sums,
        scale=factor,
        cap=cap,
        room=capacity(k, call.table),
        capacity=capacity_,
        SHAPE=shape,
        HEADS=max(8, next_power_of_two(shape.GROUP)),
        CODE=Code.of(call.fine, call.coarse),
        TILE=tile,
        TILES=tiles * TILE // tile,
        BAND=BAND,
        CAPPED=call.softcap > 0,
        ASM=found.asm,
        **{"num_warps": warps},
    )


_attend_pages = define_op(SCHEMA, allocate=_allocate, cpu=_cpu, cuda=launch_attend_pages)
