"""The exact top-k of every row of scores, by Guess-Verify-Refine.

    picks(r) = the k indices i < length(r) that come first by (scores[r, i] descending, i ascending)

so the set is the one of a stable sort: ties go to the lower index. NaN counts as -inf, -0.0 as 0.0.
A hint, the picks of the decode step before, may say where the k-th score lies. It never changes the
set. It saves the reference passes; on CUDA a sample of the row says as much (docs/log/gvr.md).

Guess: scores at the hint suggest a threshold t. Verify (lemma 1): if k <= |{x >= t}| <= C, the
elements >= t contain every top-k. Refine: the k best of these few are selected. If no threshold
fits C, a radix search over the row finds one.

The paper's kernel runs one program a row, tries thresholds one after the other, and leaves ties to
chance. The numba reference below follows it, with ties resolved. The CUDA path gives a row many
programs and tries 62 thresholds in one pass: the edges of a histogram between the hint's extremes
(kernels/topk_long_rows.py). The device decides on the radix search.
Long batches count only the maximum of every 16 neighbours: if k maxima reach t, then k scores do.
Short rows have one program each (kernels/topk_short_rows.py, topk_select.py).
Source: "Guess-Verify-Refine: Data-Aware Top-K for Sparse-Attention Decoding on Blackwell via
Temporal Correlation" (docs/papers.md), section 4.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.rows import row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr.kernels import topk_select as select
from attnplug.ops.gvr.kernels import topk_short_rows as short_rows
from attnplug.ops.gvr.kernels.topk_long_rows import launch_long_rows
from attnplug.ops.gvr.kernels.topk_sifted_rows import Sift, launch_sifted_rows, sift_for

NAME = "topk"
MAX_K = 4096
MAX_SCORES = 2**22
# The paths of a row, in the order of their numbers in `stats`.
PATHS = ("all", "whole_row", "gvr", "radix")


def topk(
    scores: torch.Tensor,
    k: int,
    *,
    hint: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    sorted: bool = False,
    stats: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The k largest scores of every row and their indices: the set of the module's equation.

    Args:
        scores: `[R,N]` float32, N up to 4,194,304, any row stride.
        k: 1 to 4096, also above N.
        hint: `[R,M]` int32 or None: indices that are likely in the result, ideally the result of
            the decode step before. Any content is allowed (-1, out of range, twice, none right).
            None: the row is sampled instead. On CUDA four rows and more of 8,193 to 524,288 scores
            do without either, for k from 256 on.
        lengths: int32 or int64 `[R]` or `[1]`: row r has scores[r, :lengths[r]]; scores behind that
            are not read. None: N. A length below 0 counts as 0, one above N as N.
        sorted: largest first, of equals the lower index first. Otherwise the order is
            unspecified, but the same in every run with the same arguments on the same device.
        stats: also return the path and the cost of each row.

    Returns:
        indices `[R,k]` int32 and values `[R,k]` float32; where k exceeds a row's length, -1 and
        -inf at the end. With `stats` a third tensor `[R,3]` int32. It has the path (index into
        `PATHS`), the passes that counted scores against thresholds, and the candidates that reached
        the refinement.

    Raises:
        ArgumentError: a shape, dtype, device or k does not fit.
        GradientError: scores requires grad.
    """
    refuse_gradients(NAME, scores)
    indices, values, how = _topk(scores, k, hint, lengths, sorted)
    return (indices, values, how) if stats else (indices, values)


def _allocate(scores, k, hint, lengths, sorted):
    require(scores.dim() == 2, NAME, f"scores has {scores.dim()} dimensions, needs [R,N]")
    require(
        scores.dtype == torch.float32, NAME, f"scores is {scores.dtype}, needs float32; .float() it"
    )
    rows, size = scores.shape
    require(
        size <= MAX_SCORES, NAME, f"scores has {size} columns, at most {MAX_SCORES} are allowed"
    )
    require(1 <= k <= MAX_K, NAME, f"k is {k}, needs 1 to {MAX_K}")
    for label, tensor in (("hint", hint), ("lengths", lengths)):
        if tensor is not None and tensor.device != scores.device:
            require(False, NAME, f"{label} is on {tensor.device}, scores on {scores.device}")
    if hint is not None:
        require(hint.dtype == torch.int32, NAME, f"hint is {hint.dtype}, needs int32")
        require(
            hint.dim() == 2 and hint.shape[0] == rows,
            NAME,
            f"hint has shape {tuple(hint.shape)}, needs [R,M] with R = {rows}",
        )
    if lengths is not None:
        require(
            lengths.dtype in (torch.int32, torch.int64),
            NAME,
            f"lengths is {lengths.dtype}, needs int32 or int64",
        )
        require(
            lengths.dim() == 1 and lengths.shape[0] in (1, rows),
            NAME,
            f"lengths has shape {tuple(lengths.shape)}, needs [1] or [R] = [{rows}]",
        )
    return (
        scores.new_empty((rows, k), dtype=torch.int32),
        scores.new_empty((rows, k)),
        scores.new_empty((rows, 3), dtype=torch.int32),
    )


# ---- numba: the specification -------------------------------------------------------------------

ALL, GVR, RADIX = select.ALL, select.GVR, select.RADIX
TRIES = 16
SAMPLE = 256


@njit()
def _guess(x, hint):
    """(least, mean, most) of the finite scores at the hint, or of a sample of the row."""
    least, most, total, count = np.inf, -np.inf, 0.0, 0
    for sample in (False, True):
        if count > 0:
            break
        for e in range(SAMPLE if sample else hint.size):
            j = e * x.size // SAMPLE if sample else hint[e]
            if 0 <= j < x.size and np.isfinite(x[j]):
                v = np.float64(x[j])
                least, most, total, count = min(least, v), max(most, v), total + v, count + 1
    return (least, total / count, most) if count > 0 else (0.0, 0.0, 0.0)


@njit()
def _count(x, t):
    """How many scores reach t."""
    count = 0
    for i in range(x.size):
        count += x[i] >= t
    return count


@njit()
def _verify(x, k, capacity, least, mean, most):
    """A threshold t with k <= |{x >= t}| <= capacity: (t, count, passes); count 0: none found.

    Secant steps between a threshold that too many scores reach and one that too few reach; the
    first step is damped. While one of the two is unknown, the next threshold lies at or beyond the
    hint's extremes. After half of the tries: bisection.
    """
    low, high = -np.inf, np.inf
    at_low, at_high = x.size, 0
    width = max(most - least, 1e-6 * max(abs(most), abs(least)), 1e-30)
    goal = (k + capacity) // 2
    t = np.float32(mean)
    passes = 0
    while passes < TRIES:
        passes += 1
        count = _count(x, t)
        if k <= count <= capacity:
            return t, count, passes
        if count > capacity:
            low, at_low = np.float64(t), count
        else:
            high, at_high = np.float64(t), count
        if high == np.inf:
            following = most if most > low else low + width
            width *= 2
        elif low == -np.inf:
            following = least if least < high else high - width
            width *= 2
        else:
            secant = (at_low - goal) / (at_low - at_high)
            following = low + (high - low) * (0.5 * secant + 0.25 if passes == 2 else secant)
            if passes > TRIES // 2:
                following = 0.5 * (low + high)
        t = np.float32(following)
        if not low < np.float64(t) < high:
            break
    return t, 0, passes


@njit()
def _select_row(scores, k, hint, sort, index, value, how):
    """One row `[n]`; index, value `[k]`, how `[3]`."""
    index[:], value[:] = -1, -np.inf
    n = scores.size
    x = scores.copy()
    for i in range(n):
        if np.isnan(x[i]):
            x[i] = -np.inf
    path, passes, candidates = ALL, 0, n
    t = np.float32(-np.inf)
    chosen = np.arange(n)
    if n > k:
        capacity = max(3 * k, 64)
        least, mean, most = _guess(x, hint)
        t, candidates, passes = _verify(x, k, capacity, least, mean, most)
        path = GVR if candidates > 0 else RADIX
        if path == GVR:
            chosen = np.flatnonzero(x >= t)
        # t becomes the k-th largest score itself.
        among = -x[chosen]
        t = -np.partition(among, k - 1)[k - 1]
        candidates = chosen.size
        ties = k - np.sum(x[chosen] > t)
        kept = np.empty(k, np.int64)
        count = 0
        for i in chosen:
            if x[i] > t or (x[i] == t and ties > 0):
                ties -= x[i] == t
                kept[count] = i
                count += 1
        chosen = kept
    if sort:  # the indices ascend, and a stable sort leaves equal scores in that order
        chosen = chosen[np.argsort(-x[chosen], kind="mergesort")]
    index[: chosen.size] = chosen
    value[: chosen.size] = x[chosen]
    how[0], how[1], how[2] = path, passes, candidates


@njit(parallel=True)
def _reference(scores, k, hint, lengths, sort, index, value, how):
    for r in prange(scores.shape[0]):
        n = min(max(lengths[r], 0), scores.shape[1])
        _select_row(scores[r, :n], k, hint[r], sort, index[r], value[r], how[r])


def _cpu(scores, k, hint, lengths, sorted, indices, values, how):
    rows, size = scores.shape
    if lengths is None:
        lengths = torch.full((rows,), size, dtype=torch.int64, device="cpu")
    _reference(
        scores.contiguous().numpy(),
        k,
        np.empty((rows, 0), np.int32) if hint is None else hint.contiguous().numpy(),
        lengths.to(torch.int64).expand(rows).contiguous().numpy(),
        sorted,
        indices.numpy(),
        values.numpy(),
        how.numpy(),
    )


# ---- CUDA ---------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernels divide a shape; chosen from static shapes alone."""

    whole_row: bool  # one program a row, in registers
    verifiers: int = 1  # programs of `verify` a row, one for each part
    verify_tile: int = 2048
    verify_warps: int = 8
    collect_tile: int = 2048
    collect_warps: int = 8
    group: int = 1  # neighbours of which only the maximum is counted
    here: int = 1024  # groups of one program of `collect`
    batch: int = 64  # groups that `collect` reads at once
    capacity: int = 4096  # of the list that `refine` selects from
    small: int = 512  # lists up to this take fewer registers; for a short row its list, 0: none
    refine_tile: int = 2048  # of `refine`'s search over the row
    refine_warps: int = 4
    bins: int = 64
    sample: int = 256  # scores of the hint, and of the row, that the guess reads
    sift: Sift | None = None  # two kernels that read the row once, in place of the three


WHOLE_ROW = 8192  # scores of the longest row that one program does alone
GROUPED = 2**20  # scores of the smallest batch of which only maxima are counted
SIFTED = 2**19  # scores of the longest row that is read once: rows of 1M were slower so
COLLECTORS = 1024  # most programs a row that look back at one another


@functools.lru_cache(maxsize=1024)
def plan_for(rows: int, size: int, k: int) -> Plan:
    """The pre-tuned plan of a shape. `size` is the buffer's; the host does not know the lengths."""
    if size <= WHOLE_ROW:
        padded = next_power_of_two(size)
        if padded <= 256:
            return Plan(True, refine_warps=1, small=0)
        return Plan(True, refine_warps=8, small=256)
    if rows >= 4 and k >= 256 and size <= SIFTED:  # faster than the best hint makes `verify`
        return Plan(False, sift=sift_for(size, k, rows))
    return verified_plan_for(rows, size, k)


def verified_plan_for(rows: int, size: int, k: int) -> Plan:
    """The plan of long rows that a hint, or a sample of the row, begins."""
    total = rows * size
    group = 16 if total >= GROUPED and size >= 256 * k else 1
    # Programs a row. Each samples the row: more programs would cost more than idle multiprocessors.
    each = max(4, min(128, 256 // rows))
    small = size <= 2**16 and total <= 2**17
    smallest = 1024 if small else 2048 if total <= 2**18 else 4096
    verifiers = min(each, cdiv(size, smallest))
    tile = min(4096, max(smallest, next_power_of_two(cdiv(size, verifiers))))
    here = 1024 if rows <= 4 else 2048
    here = max(here, next_power_of_two(cdiv(size, group * COLLECTORS)))
    warps = 8 if group > 1 or (rows == 1 and tile > 1024) else 4  # of `collect`
    capacity = max(4096, 2 * next_power_of_two(k))
    return Plan(
        whole_row=False,
        verifiers=verifiers,
        verify_tile=tile,
        verify_warps=8,
        collect_tile=min(tile, 2048),
        collect_warps=warps,
        group=group,
        here=here,
        capacity=capacity,
        refine_warps=4 if capacity <= 4096 else 8,
    )


def launch_topk(scores, k, hint, lengths, sorted, indices, values, how, plan=None):
    """Run the kernels; tensors as in `topk`, on a GPU or in Triton's interpreter."""
    rows, size = scores.shape
    if rows == 0:
        return
    pdl = card(scores.device).pdl
    if hint is not None and hint.shape[1] == 0:
        hint = None
    plan = plan or plan_for(rows, size, k)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    if plan.whole_row:
        _launch_short_rows(scores, k, lengths, indices, values, how, plan, pdl)
    elif plan.sift is not None:
        launch_sifted_rows(scores, k, lengths, indices, values, how, plan.sift, pdl)
    else:
        if hint is not None and hint.stride(1) != 1:
            hint = hint.contiguous()
        launch_long_rows(scores, k, hint, lengths, indices, values, how, plan, pdl)
    if sorted:
        padded = max(2, next_power_of_two(k))
        warps = min(16, max(1, padded // 128))
        launch_kernel(
            select.order,
            grid=(rows,),
            indices=indices,
            values=values,
            K=k,
            K_PAD=padded,
            num_warps=warps,
        )


def _launch_short_rows(scores, k, lengths, indices, values, how, plan, pdl):
    """The one kernel of short rows: by rounds of thresholds, or by bins and a list."""
    rows, size = scores.shape
    padded = max(32, next_power_of_two(size))
    shared = {
        "scores": scores,
        "lengths": lengths,
        "indices": indices,
        "values": values,
        "stats": how,
        "N": size,
        "scores_stride": scores.stride(0),
        "K": k,
        "K_PAD": max(2, next_power_of_two(k)),
        "LENGTH_STEP": row_step(lengths),
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    if plan.small == 0:
        launch_kernel(
            select.whole_row, grid=(rows,), **shared, SIZE=padded, num_warps=plan.refine_warps
        )
        return
    warps = max(1, padded // 1024, min(plan.refine_warps, padded // 512))  # 16 or 32 a thread
    launch_kernel(
        short_rows.binned_row,
        grid=(rows,),
        **shared,
        entries=indices.new_empty((rows, plan.small + short_rows.TILE), dtype=torch.int64),
        HALVES=max(1, padded // (512 * warps)),
        WARPS=warps,
        LIST=plan.small,
        SHARE=short_rows.SHARE,
        WIDTH=short_rows.WIDTH,
        num_warps=warps,
    )


_topk = define_op(
    f"{NAME}(Tensor scores, int k, Tensor? hint, Tensor? lengths, bool sorted) -> "
    "(Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_topk,
)
