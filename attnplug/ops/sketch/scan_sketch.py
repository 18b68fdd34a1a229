"""The scan of `sketch`: estimated scores of all coded tokens, each token's share of its group's
attention, and what the tokens add up to.

    s^_gi = offset_g + w_g.code_i                       to the base 2, w_g in int8 units
    h_i   = log2 sum_g 2^(s^_gi - N_g)                  the token's share, rounded to float16
    Z_g   = sum_i 2^(s^_gi - N_g),   U_g = sum_i 2^(s^_gi - N_g) (s^_gi - N_g)

N_g stands for the head's log-sum-exp, which nobody knows yet: that of the tokens read exactly,
joined with what n scores would have if they were normal, mean + variance ln(2) / 2 + log2 n.
Tokens are counted by share, in bins about the share that the k-th would have if scores were normal;
`pick_tokens` finds the k-th from the counts.
Source: the rules measured in docs/log/sketch.md; picking single tokens by cheap scores as in
DeepSeek's lightning indexer (DeepSeek-V3.2, 2025).
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_sequence_inputs
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import mask_bytes, rows_on_cpu
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import rows_of, steps_of
from attnplug.ops.sketch.encode_keys import check_codes, check_float, near_block
from attnplug.ops.sketch.estimates import (
    BINS,
    LARGEST,
    bin_of,
    capped,
    estimate,
    exp2,
    in_units,
    log2,
    unpack,
)
from attnplug.ops.sketch.kernels import hopper_scan
from attnplug.ops.sketch.kernels import scan as kernels
from attnplug.ops.sketch.kernels.codes import Code, Scanned, pieces_of, projection_of
from attnplug.ops.sketch.state import BLOCK, CHUNK, Codes

NAME = "sketch_scan"
SCHEMA = (
    f"{NAME}(Tensor projected, Tensor fixed_lse, Tensor fine, Tensor coarse, Tensor odd, "
    "Tensor progress, int top_k, int parts, Tensor? lengths, Tensor? start, Tensor? key_mask, "
    "float softcap) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def scan_sketch(
    projected: torch.Tensor,
    fixed_lse: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    progress: torch.Tensor,
    *,
    top_k: int,
    parts: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Score all candidates: the tokens between the sink and the last four blocks.

    Args:
        projected, fixed_lse: of `prepare_query`, `[B, Hq, 2 r + 2 + D]` and `[B, Hq, pieces]`.
        fine, coarse, odd, progress: the codes, up to date with `lengths` (`encode_keys`).
        top_k: tokens that are to be picked; it places the bins.
        parts: contiguous parts that a row's candidates are cut in, by blocks.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: as for the exact scores. Shares and Z are of capped scores, U is of uncapped ones,
            which the regression wants: 2^(cap(s^) - N) s^.

    Returns:
        shares float16 `[B, Hkv, S]`, written for candidates, at least -126, -inf for a hidden one.
            Of others -inf; in a chain what is written for them means nothing.
        total int32 `[B, Hkv, 256]`: how many visible candidates there are (bin 0), and how many in
            each other bin; bins that cannot hold the k-th may miss some.
        sums float32 `[B, Hq, parts, 2]`: Z and U of each part. NaN where a key or value of the part
            is not finite, or codes are missing.
        norm float32 `[B, Hq]`: N.
        middle float32 `[B, Hkv]`: the share that is the lower edge of bin 128.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, projected, fixed_lse)
    codes, rows = (fine, coarse, odd, progress), (lengths, start, key_mask)
    return _scan_sketch(projected, fixed_lse, *codes, top_k, parts, *rows, softcap)


def _allocate(*args):
    call = Call(*args)
    projected, fine, parts = call.projected, call.fine, call.parts
    codes, rows = (fine, call.coarse, call.odd, call.progress), (call.lengths, call.start)
    check_scan_inputs(NAME, projected, *codes, *rows, call.key_mask)
    batch, heads = projected.shape[:2]
    pieces = batch, heads, call.fixed_lse.shape[-1]
    check_float(NAME, "fixed_lse", call.fixed_lse, pieces, projected.device)
    require(call.top_k >= 1, NAME, f"top_k is {call.top_k}, needs at least 1")
    require(parts >= 1, NAME, f"parts is {parts}, needs at least 1")
    softcap = call.softcap
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive cap")
    return outputs(projected, fine, parts)


def outputs(projected: torch.Tensor, fine: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Memory for what `scan_sketch` returns, of projected `[B, Hq, 2 r + 2 + D]`."""
    batch, heads, _ = projected.shape
    rows, new = (batch, fine.shape[1]), projected.new_empty
    return (
        new((*rows, fine.shape[2]), dtype=torch.float16),
        new((*rows, BINS), dtype=torch.int32),
        new((batch, heads, parts, 2)),
        new((batch, heads)),
        new(rows),
    )


def check_scan_inputs(name, projected, fine, coarse, odd, progress, lengths, start, key_mask):
    """The checks of a projected query and the codes that it scores."""
    for label, tensor in (("projected", projected), ("fine", fine), ("coarse", coarse)):
        dims = 3 if tensor is projected else 4
        if tensor.dim() != dims:
            raise ArgumentError(f"{name}: {label} has {tensor.dim()} dimensions, needs {dims}")
    heads, kv_heads = projected.shape[1], fine.shape[1]
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        name,
        f"{heads} query heads are not a multiple of {kv_heads} KV heads",
    )
    width = projected.shape[2] - 2 - 2 * (2 * fine.shape[3] + 4 * coarse.shape[3])
    require(width > 0, name, f"projected has {projected.shape[2]} columns, needs 2 r + 2 + D")
    cache = fine.new_empty((*fine.shape[:3], width), device="meta")
    check_float(name, "projected", projected, (fine.shape[0], *projected.shape[1:]), fine.device)
    check_sequence_inputs(name, fine, fine, lengths, start, key_mask)
    check_codes(name, _Cache(cache.shape, fine.device), fine, coarse, odd, progress)


class _Cache(NamedTuple):
    """What `check_codes` asks of a cache that the op does not read."""

    shape: torch.Size
    device: torch.device


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def quantile(p):
    """z with P(Z > z) = p for a standard normal Z: Abramowitz and Stegun 26.2.22."""
    t = np.sqrt(-2 * np.log(max(min(p, 1 - p), 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1 + t * (0.99229 + 0.04481 * t))
    return z if p < 0.5 else -z


@njit()
def _place(facts, fixed_lse, rank, n_tokens, k, cap, norm):
    """Fill `norm` of a group; returns the middle of its histogram."""
    middle = -np.inf
    log_n = log2(n_tokens) if n_tokens > 0 else -np.inf
    for g in range(norm.shape[0]):
        mean = facts[g, rank + 1]
        variance = (facts[g, rank + 2 : 2 * rank + 2] ** 2).sum()
        closed = capped(mean, cap) + log_n + np.log(2) / 2 * variance
        if cap > 0:
            closed = min(closed, cap + log_n)
        top = max(closed, fixed_lse[g].max())
        shift = 0.0 if top == -np.inf else top
        known = exp2(closed - shift)
        for lse in fixed_lse[g]:
            known += exp2(lse - shift)
        norm[g] = shift + log2(known) if known != 0 else -np.inf
        likely = capped(mean + quantile(k / max(n_tokens, 1)) * np.sqrt(variance), cap) - norm[g]
        middle = max(middle, likely)
    return np.float32(middle if abs(middle) < 1e30 else 0.0)


@njit(parallel=True)
def _score(
    projected,
    fixed_lse,
    fine,
    coarse,
    odd,
    done,
    lengths,
    start,
    mask,
    k,
    cap,
    shares,
    sums,
    norm,
    middle,
):
    """Shares and sums of every part of every row and KV head, the rows and heads in parallel."""
    batch, heads, _ = projected.shape
    kv_heads, parts = fine.shape[1], sums.shape[2]
    rank = 2 * fine.shape[3] + 4 * coarse.shape[3]
    group = heads // kv_heads
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        hidden = mask[b * len(mask) // batch]
        near = near_block(lengths[b], start[b])
        facts = projected[b, h * group : (h + 1) * group]
        own_norm = norm[b, h * group : (h + 1) * group]
        middle[b, h] = _place(
            facts,
            fixed_lse[b, h * group : (h + 1) * group],
            rank,
            (near - 1) * BLOCK,
            k,
            cap,
            own_norm,
        )
        whole = np.empty((group, rank), np.float32)
        unit = np.empty(group, np.float32)
        for g in range(group):
            whole[g], unit[g] = in_units(facts[g, :rank])
        codes = np.empty(rank, np.float32)
        for part in range(parts):
            first, last = part * (near - 1) // parts, (part + 1) * (near - 1) // parts
            mass, moment = np.zeros((2, group), np.float64)
            poison = done[b] < near and near > 1
            for n in range(start[b] + (1 + first) * BLOCK, start[b] + (1 + last) * BLOCK):
                poison |= odd[b, h, (n - start[b]) // CHUNK] != 0
                if hidden.shape[0] > 0 and not hidden[n]:
                    shares[b, h, n] = -np.inf
                    continue
                unpack(fine[b, h, n], coarse[b, h, n], codes)
                share = 0.0
                for g in range(group):
                    s = estimate(whole[g], unit[g], facts[g, rank], codes)
                    e = exp2(min(capped(s, cap) - own_norm[g], np.float32(LARGEST)))
                    mass[g] += e
                    moment[g] += e * (s - (np.float32(0) if cap > 0 else own_norm[g]))
                    share += e
                shares[b, h, n] = log2(max(share, 2.0**-126))
            for g in range(group):
                sums[b, h * group + g, part, 0] = np.nan if poison else mass[g]
                sums[b, h * group + g, part, 1] = moment[g]


@njit(parallel=True)
def count_shares(shares, lengths, start, middle, total):
    """The histogram of rounded shares of each row and KV head, in parallel."""
    batch, kv_heads, _ = total.shape
    for item in prange(batch * kv_heads):
        b, h = item // kv_heads, item % kv_heads
        total[b, h] = 0
        first = start[b] + BLOCK
        for n in range(first, start[b] + near_block(lengths[b], start[b]) * BLOCK):
            if shares[b, h, n] > -np.inf:
                index = bin_of(shares[b, h, n], middle[b, h])
                total[b, h, 0] += 1
                if index > 0:
                    total[b, h, index] += 1


def _cpu(*args):
    call, (shares, total, sums, norm, middle) = Call(*args[:-5]), args[-5:]
    progress = call.progress
    lengths, start = rows_on_cpu(call.fine, call.lengths, call.start)
    done = torch.where(progress[:, 1] == start, progress[:, 0], 0)
    wide = torch.full_like(shares, -torch.inf, dtype=torch.float32)
    _score(
        *arrays(call.projected, call.fixed_lse, call.fine, call.coarse, call.odd, done),
        *arrays(lengths, start, call.key_mask, call.top_k, call.softcap * LOG2E),
        *arrays(wide, sums, norm, middle),
    )
    shares.copy_(wide)
    count_shares(*arrays(shares, lengths, start, middle, total))


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work."""

    tile: int  # tokens of one step: 128 or 256
    warps: int
    stages: int
    hopper: bool = True  # the kernel for Hopper where it can run, which has one way
    registers: int | None = 128  # of a thread of it, at most
    patience: int = 4  # steps of a part of it, below which it counts all its tokens
    evict: str = ""  # Triton's eviction policy of the codes' loads, in the kernel for Hopper


PLAN = Plan(256, 4, 3)
ALL_PARTS = -1  # the `fewest` with which every row has all of them


def launch_scan_sketch(
    *args, plan=PLAN, chained=False, hint=None, is_new=False, fewest=ALL_PARTS, counted=None
):
    """Run a kernel; tensors as in `scan_sketch`, on a GPU or in Triton's interpreter. In a chain
    `total` has been cleared, and the codes are known to be complete. Tokens are counted from the
    bin `hint` on, float32 `[B, Hkv]`, which the picks of the step before left; 0: all. With
    `is_new`, `lengths` lack a token. A short row has fewer parts, about `fewest` (`parts_of`).
    `counted` gets what `pick_tokens.Notes` says. `projected` may be of T queries of each row."""
    call, (shares, total, sums, norm, middle) = Call(*args[:-5]), args[-5:]
    projected, fine, parts = call.projected, call.fine, call.parts
    lengths, start, key_mask, softcap = call.lengths, call.start, call.key_mask, call.softcap
    batch, (rows, kv_heads, size, _) = len(projected), fine.shape
    group = projected.shape[1] // kv_heads
    found, (pdl, dependent) = card(projected.device), early(projected.device)
    if not chained:
        total.zero_()
    fixed = pieces_of(None, call.fixed_lse)
    asked = {
        "projected": projection_of(projected),
        "fixed": fixed,
        "codes": Codes(fine, call.coarse, call.odd, call.progress),
        "rows": rows_of(size, lengths, start, mask_bytes(key_mask)),
        "hint": hint,
        "counted": counted,
        "scanned": Scanned(shares, total, sums, norm, middle, parts),
        "k": call.top_k,
        "chunks": call.odd.shape[2],
        "fewest": fewest,
        "GROUP": group,
        "CODE": Code.of(fine, call.coarse),
        "PIECES": triton.next_power_of_2(fixed.number),
        "CHECKED": not chained,
        "NEW": int(is_new),
        "STEPS": steps_of(lengths, start, batch // rows),
        "PDL": pdl,
        **dependent,
    }
    grid = (parts, kv_heads, batch)
    plain = group <= 8 and key_mask is None and softcap == 0
    if plan.hopper and plain and found.mma:
        asked |= {"patience": plan.patience, "EVICT": plan.evict}
        warps, limit = hopper_scan.WARPS.value, found.limit(plan.registers)
        launch_kernel(hopper_scan.scan, grid=grid, **asked, num_warps=warps, **limit)
        return
    launch_kernel(
        kernels.scan,
        grid=grid,
        **asked,
        cap=softcap * LOG2E,
        HEADS=max(8, triton.next_power_of_2(group)),
        TILE=plan.tile,
        STAGES=plan.stages,
        REFRESH=1,
        CAPPED=softcap > 0,
        ASM=found.asm,
        num_warps=plan.warps,
    )


def _launch_alone(*args):
    """Outside of a chain, where the caller may read all shares."""
    args[-5].fill_(-torch.inf)
    launch_scan_sketch(*args)


_scan_sketch = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=_launch_alone,
)
