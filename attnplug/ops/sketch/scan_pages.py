"""The scan of `sketch` over pages: `scan_sketch` with weights of each band's own, tokens through a
block table, and a norm of what is read exactly.

    s^_gi = offset_gb + w_gb.code_i     of token i in band b, to the base 2, w_gb in int8 units
    N_g   = log2 sum over pieces p of the fixed part of 2^fixed_lse_gp

It also turns the sample's sums into what `merge_sketch` takes: mean, deviation and covariance of
each head, and the mean value.
"""

import numpy as np
import torch

from attnplug.ops.common.checks import check_sequence_inputs, check_table, check_tensor
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import rows_on_cpu
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.views import Cache, Shape, rows_of, steps_of
from attnplug.ops.sketch.encode_keys import check_float, near_block
from attnplug.ops.sketch.estimates import BINS, LARGEST, capped, estimate, exp2, log2, unpack
from attnplug.ops.sketch.kernels import pages_scan as kernels
from attnplug.ops.sketch.kernels.codes import Code, Scanned, pieces_of
from attnplug.ops.sketch.kernels.pages import Sampled, Weights
from attnplug.ops.sketch.model_basis import BAND
from attnplug.ops.sketch.pages import PageSketch, check_codes_of
from attnplug.ops.sketch.prepare_pages import SAMPLE, SAMPLES
from attnplug.ops.sketch.scan_sketch import count_shares, quantile
from attnplug.ops.sketch.state import BLOCK

NAME = "sketch_scan_pages"
EACH = 512  # tokens of one program
TILE = 128  # of one step of it
FACTS = 4  # columns of an estimate in front of the covariance
SCHEMA = (
    f"{NAME}(Tensor whole, Tensor facts, Tensor fixed_lse, Tensor scores, Tensor values, "
    "Tensor fine, Tensor coarse, Tensor odd, Tensor table, Tensor lengths, int top_k, "
    "float softcap) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def scan_pages(
    whole: torch.Tensor,
    facts: torch.Tensor,
    fixed_lse: torch.Tensor,
    scores: torch.Tensor,
    values: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    top_k: int,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Score all candidates: the tokens between the sink and the last four blocks.

    Args:
        whole, facts, fixed_lse, scores, values: of `prepare_pages`, int8 `[B, Hq, bands, r]`,
            float32 `[B, Hq, bands, 2]`, `[B, Hq, 10]`, `[B, Hq, 8, 2 + D]` and `[B, Hkv, 8, D]`.
        fine, coarse, odd: of `encode_pages`, uint8 `[pages, Hkv, page, bytes]` twice and
            `[pages, Hkv, page]`.
        table: int32 `[B, pages a row]`.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys.
        top_k: tokens that are to be picked; it places the bins.
        softcap: as in `scan_sketch`.

    Returns:
        shares, total, sums, norm, middle as `scan_sketch` does, with S the keys that a row has room
        for and a part for each 512 of them; shares of tokens that are no candidates mean nothing.
        estimate float32 `[B, Hq, 4 + D]`, the scores' mean at 2, deviation at 3 and covariance with
        values from 4 on, in the place of `prepare_query`'s projection with r = 1; and v_mean
        `[B, Hkv, D]`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, facts, fixed_lse, scores, values)
    read = whole, facts, fixed_lse, scores, values, fine, coarse, odd, table, lengths
    return _scan_pages(*read, top_k, softcap)


def _allocate(*args):
    call = Call(*args)
    whole, odd, table = call.whole, call.odd, call.table
    require(whole.dim() == 4, NAME, f"whole has {whole.dim()} dimensions, needs [B,Hq,bands,r]")
    require(odd.dim() == 3, NAME, f"odd has {odd.dim()} dimensions, needs [pages,Hkv,page]")
    (batch, heads, bands, rank), kv_heads = whole.shape, odd.shape[1]
    width = call.values.shape[-1]
    check_codes_of(NAME, rank, call.fine, call.coarse, odd)
    check_tensor(NAME, "whole", whole, torch.int8, tuple(whole.shape), odd.device)
    require(heads % kv_heads == 0, NAME, f"{heads} query heads are no multiple of {kv_heads}")
    rows = batch, heads
    for label, shape in (
        ("facts", (*rows, bands, 2)),
        ("fixed_lse", (*rows, call.fixed_lse.shape[-1])),
        ("scores", (*rows, SAMPLES, 2 + width)),
        ("values", (batch, kv_heads, SAMPLES, width)),
    ):
        check_float(NAME, label, getattr(call, label), shape, odd.device)
    check_table(NAME, table, odd, batch)
    like = odd[..., None]
    check_sequence_inputs(NAME, call.facts, like, call.lengths, None, None, table)
    room = capacity(like, table)
    require(bands * BAND >= room, NAME, f"whole has {bands} bands, a row has room for {room} keys")
    require(call.top_k >= 1, NAME, f"top_k is {call.top_k}, needs at least 1")
    require(call.softcap >= 0, NAME, f"softcap is {call.softcap}, needs 0 or a positive cap")
    return outputs(call.facts, odd, table, width)


def outputs(facts, odd, table, width) -> tuple[torch.Tensor, ...]:
    """Memory for what `scan_pages` returns."""
    batch, heads = facts.shape[:2]
    rows, new = (batch, odd.shape[1]), facts.new_empty
    room = capacity(odd[..., None], table)
    # `pick_tokens` counts by eights and notes 32 tokens together.
    return (
        new((*rows, cdiv(room, 32) * 32), dtype=torch.float16),
        new((*rows, BINS), dtype=torch.int32),
        new((batch, heads, cdiv(room, EACH), 2)),
        new((batch, heads)),
        new(rows),
        new((batch, heads, FACTS + width)),
        new((*rows, width)),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _estimate(scores, values, candidates, own, v_mean):
    """Fill the estimate `own` of a head, and the mean value; returns (mean, variance)."""
    count = np.float32(max(min(candidates, SAMPLE), 1))
    sums, v_mean[:] = np.zeros(scores.shape[1], np.float32), 0
    for p in range(scores.shape[0]):
        sums += scores[p]
        v_mean += values[p]
    mean = sums[0] / count
    variance = max(sums[1] / count - mean * mean, np.float32(0))
    v_mean /= count
    own[:] = 0
    own[2], own[3] = mean, np.sqrt(variance)
    own[FACTS:] = sums[2:] / count - mean * v_mean
    return mean, variance


@njit(parallel=True)
def _reference(
    whole,
    facts,
    fixed_lse,
    scores,
    values,
    fine,
    coarse,
    odd,
    table,
    lengths,
    k,
    cap,
    shares,
    sums,
    norm,
    middle,
    estimates,
    v_mean,
):
    """Shares, sums and estimates of every row and KV head, these in parallel."""
    batch, heads, _, rank = whole.shape
    kv_heads, page = odd.shape[1], odd.shape[2]
    group = heads // kv_heads
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        g0, near = h * group, near_block(lengths[b], 0)
        candidates = (near - 1) * BLOCK
        likely = -np.inf
        for g in range(g0, g0 + group):
            mean, variance = _estimate(
                scores[b, g], values[b, h], candidates, estimates[b, g], v_mean[b, h]
            )
            top = fixed_lse[b, g].max()
            shift = np.float32(0) if top == -np.inf else top
            known = 0.0
            for lse in fixed_lse[b, g]:
                known += exp2(lse - shift)
            norm[b, g] = shift + log2(known) if known != 0 else -np.inf
            best = mean + quantile(k / max(candidates, 1)) * np.sqrt(variance)
            likely = max(likely, capped(best, cap) - norm[b, g])
        middle[b, h] = likely if abs(likely) < 1e30 else 0.0
        sums[b, g0 : g0 + group] = 0
        codes = np.empty(rank, np.float32)
        for part in range(sums.shape[2]):
            mass, moment = np.zeros((2, group), np.float64)
            poison = False
            for n in range(max(part * EACH, BLOCK), min((part + 1) * EACH, near * BLOCK)):
                p, i, band = table[b, n // page], n % page, n // BAND
                poison |= odd[p, h, i] != 0
                unpack(fine[p, h, i], coarse[p, h, i], codes)
                share = 0.0
                for g in range(group):
                    unit, offset = facts[b, g0 + g, band]
                    s = estimate(whole[b, g0 + g, band], unit, offset, codes)
                    e = exp2(min(capped(s, cap) - norm[b, g0 + g], np.float32(LARGEST)))
                    mass[g] += e
                    moment[g] += e * (s - (np.float32(0) if cap > 0 else norm[b, g0 + g]))
                    share += e
                shares[b, h, n] = log2(max(share, 2.0**-126))
            for g in range(group):
                sums[b, g0 + g, part, 0] = np.nan if poison else mass[g]
                sums[b, g0 + g, part, 1] = moment[g]


def _cpu(*args):
    call, (shares, total, sums, norm, middle, estimates, v_mean) = Call(*args[:-7]), args[-7:]
    lengths, start = rows_on_cpu(call.odd[..., None], call.lengths, None, call.table)
    wide = torch.full_like(shares, -torch.inf, dtype=torch.float32)
    _reference(
        *arrays(call.whole, call.facts, call.fixed_lse, call.scores, call.values),
        *arrays(call.fine, call.coarse, call.odd, call.table, lengths, call.top_k),
        *arrays(call.softcap * LOG2E, wide, sums, norm, middle, estimates, v_mean),
    )
    shares.copy_(wide)
    count_shares(*arrays(shares, lengths, start, middle, total))


# --- CUDA ------------------------------------------------------------------------------------


def launch_scan_pages(*args, chained=False):
    """Run the kernel; tensors as in `scan_pages`, on a GPU or in Triton's interpreter. In the chain
    `total` has been cleared."""
    call, (shares, total, sums, norm, middle, estimates, v_mean) = Call(*args[:-7]), args[-7:]
    whole, odd, table = call.whole, call.odd, call.table
    (batch, heads, bands, _), (_, kv_heads, page) = whole.shape, odd.shape
    width, group, parts = v_mean.shape[2], heads // kv_heads, sums.shape[2]
    if not chained:
        total.zero_()
    fixed = pieces_of(None, call.fixed_lse)
    none = (None,) * 8
    launch_kernel(
        kernels.scan,
        grid=(parts, kv_heads, batch),
        weights=Weights(whole, call.facts, bands),
        fixed=fixed,
        sampled=Sampled(call.scores, call.values, SAMPLES),
        sketch=PageSketch(call.fine, call.coarse, odd),
        cache=Cache(*none, table=table, table_b=table.stride(0)),
        rows=rows_of(shares.shape[2], call.lengths),
        scanned=Scanned(shares, total, sums, norm, middle, parts),
        estimate=estimates,
        v_mean=v_mean,
        k=call.top_k,
        cap=call.softcap * LOG2E,
        SHAPE=Shape(group, 16, width, max(16, next_power_of_two(width)), page),
        HEADS=max(8, next_power_of_two(group)),
        CODE=Code.of(call.fine, call.coarse),
        TILE=TILE,
        EACH=EACH,
        PER_BAND=BAND // EACH,
        PIECES=next_power_of_two(fixed.number),
        SAMPLES=SAMPLES,
        SAMPLE=SAMPLE,
        CAPPED=call.softcap > 0,
        ASM=card(whole.device).asm,
        STEPS=steps_of(call.lengths),
        **{"num_warps": 4},
    )


_scan_pages = define_op(SCHEMA, allocate=_allocate, cpu=_cpu, cuda=launch_scan_pages)
