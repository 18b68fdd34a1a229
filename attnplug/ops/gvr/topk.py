"""The exact top-k of every row of scores, by Guess-Verify-Refine.

    picks(r) = the k indices i < length(r) that come first by (scores[r, i] descending, i ascending)

so the set is the one of a stable sort: ties go to the lower index. NaN counts as -inf, -0.0 as 0.0.
A hint, the picks of the step before, makes it fast where steps resemble each other; it never
changes the set.

Guess-Verify-Refine (paper: Data-Aware Top-K for Sparse-Attention Decoding on Blackwell via Temporal
Correlation): scores at the hint suggest a threshold t (guess); where k <= |{x >= t}| <= C, the
elements >= t contain every top-k (verify, lemma 1), and the k best of these few are found among
themselves (refine). Where no threshold fits C, a radix search over the row finds one.

The paper's kernel is one program a row, tries thresholds one after the other, and leaves ties to
chance. The reference below follows it, with ties resolved. The CUDA path gives a row many programs
and tries 62 thresholds in one pass, the edges of a histogram between the hint's extremes, and its
radix search is decided on the device (`_topk_kernels.py`, `_topk_refine.py`). Long batches count
only the maximum of every 16 neighbours: if k maxima reach t, then k scores do.
"""

import functools
from typing import NamedTuple

import numba
import numpy as np
import torch
import triton

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import machine
from attnplug.ops.common.rows import row_step
from attnplug.ops.gvr.kernels import topk_long_rows as kernels
from attnplug.ops.gvr.kernels import topk_select as select
from attnplug.ops.gvr.kernels import topk_short_rows as row
from attnplug.ops.gvr.kernels.topk_refine import refine

NAME = "topk"
MAX_K = 4096
MAX_SCORES = 2**22
# What `stats` calls the way a row went.
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
        hint: `[R,M]` int32 or None: indices that are likely in the result, best those of the step
            before. Any content is allowed (-1, out of range, twice, none right); None samples the
            row instead.
        lengths: int32 or int64 `[R]` or `[1]`: row r has scores[r, :lengths[r]]; what lies behind
            is not read. None: N. A length below 0 counts as 0, one above N as N.
        sorted: largest first, of equals the lower index first. Otherwise the order is
            unspecified, but the same in every run with the same arguments on the same device.
        stats: also return how each row went.

    Returns:
        indices `[R,k]` int32 and values `[R,k]` float32; where k exceeds a row's length, -1 and
        -inf at the end. With `stats` a third tensor `[R,3]` int32: the path (index into
        `PATHS`), the passes that counted scores against thresholds, and the candidates that
        reached the refinement.

    Raises:
        ArgumentError: a shape, dtype, device or k does not fit.
        GradientError: scores requires grad.

    Source: Guess-Verify-Refine (title above), section 4; ties and several programs a row are ours.
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


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _count(x, t):
    """How many scores reach t."""
    count = 0
    for i in range(x.size):
        count += x[i] >= t
    return count


@numba.njit(cache=True)
def _verify(x, k, capacity, least, mean, most):
    """A threshold t with k <= |{x >= t}| <= capacity: (t, count, passes), or count 0: none found.

    Secant steps between a threshold that too many reach and one that too few reach, the first one
    damped; where one of the two is not known yet, beyond the hint's extremes; else bisection.
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
            step = (at_low - goal) / (at_low - at_high)
            following = low + (high - low) * (0.5 * step + 0.25 if passes == 2 else step)
            if passes > TRIES // 2:
                following = 0.5 * (low + high)
        t = np.float32(following)
        if not low < np.float64(t) < high:
            break
    return t, 0, passes


@numba.njit(cache=True)
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


@numba.njit(parallel=True, cache=True)
def _reference(scores, k, hint, lengths, sort, index, value, how):
    for r in numba.prange(scores.shape[0]):
        n = min(max(lengths[r], 0), scores.shape[1])
        _select_row(scores[r, :n], k, hint[r], sort, index[r], value[r], how[r])


def _cpu(scores, k, hint, lengths, sorted, indices, values, how):
    rows, size = scores.shape
    if lengths is None:
        lengths = torch.full((rows,), size)
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
    """How the kernels cut a shape; chosen from static shapes alone."""

    whole_row: bool  # one program a row, in registers
    verifiers: int = 1  # programs of `verify` a row
    verify_tile: int = 2048
    verify_warps: int = 8
    collect_tile: int = 2048
    collect_warps: int = 8
    group: int = 1  # neighbours of which only the maximum is counted
    here: int = 1024  # groups of one program of `collect`
    batch: int = 64  # groups that `collect` reads at once
    capacity: int = 4096  # of the list that `refine` selects from
    small: int = 512  # up to so many it holds fewer registers; of a whole row its list, 0: none
    refine_tile: int = 2048  # of its search over the row
    refine_warps: int = 4
    bins: int = 64
    sample: int = 256  # of the hint, and of the row


WHOLE_ROW = 8192
GROUPED = 2**20  # scores of a batch from which on maxima are counted
COLLECTORS = 1024  # most programs a row that look back at one another


@functools.lru_cache(maxsize=1024)
def plan_for(rows: int, size: int, k: int, multiprocessors: int) -> Plan:
    """The pre-tuned plan of a shape. `size` is that of the buffer: true lengths are unknown."""
    if size <= WHOLE_ROW:
        padded = triton.next_power_of_2(size)
        if padded <= 256:
            return Plan(True, refine_warps=1, small=0)
        return Plan(True, refine_warps=8, small=256)
    total = rows * size
    group = 16 if total >= GROUPED and size >= 256 * k else 1
    # Programs a row: all their samples of the row cost more than what some multiprocessors idle.
    each = max(4, min(128, 256 // rows))
    small = size <= 2**16 and total <= 2**17
    smallest = 1024 if small else 2048 if total <= 2**18 else 4096
    verifiers = min(each, triton.cdiv(size, smallest))
    tile = min(4096, max(smallest, triton.next_power_of_2(triton.cdiv(size, verifiers))))
    here = 1024 if rows <= 4 else 2048
    here = max(here, triton.next_power_of_2(triton.cdiv(size, group * COLLECTORS)))
    warps = 8 if group > 1 or (rows == 1 and tile > 1024) else 4  # of `collect`
    capacity = max(4096, 2 * triton.next_power_of_2(k))
    return Plan(
        False, verifiers, tile, 8, min(tile, 2048), warps, group, here,
        capacity=capacity, refine_warps=4 if capacity <= 4096 else 8,
    )  # fmt: skip


def launch_topk(scores, k, hint, lengths, sorted, indices, values, how, plan=None):
    """Run the kernels; tensors as in `topk`, on a GPU or in Triton's interpreter."""
    rows, size = scores.shape
    if rows == 0:
        return
    multiprocessors, pdl = machine(scores.device)
    early = {"launch_pdl": True} if pdl else {}
    plan = plan or plan_for(rows, size, k, multiprocessors)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    if plan.whole_row:
        _launch_row(scores, k, lengths, indices, values, how, plan, pdl, early)
    else:
        if hint is not None and hint.shape[1] == 0:
            hint = None
        if hint is not None and hint.stride(1) != 1:
            hint = hint.contiguous()
        _launch_programs(scores, k, hint, lengths, indices, values, how, plan, pdl, early)
    if sorted:
        padded = max(2, triton.next_power_of_2(k))
        select.order[(rows,)](indices, values, k, padded, num_warps=min(16, max(1, padded // 128)))


def _launch_row(scores, k, lengths, indices, values, how, plan, pdl, early):
    """The one kernel of a short row."""
    rows, size = scores.shape
    padded, padded_k = max(32, triton.next_power_of_2(size)), max(2, triton.next_power_of_2(k))
    sizes, step = (size, scores.stride(0), k, padded_k), row_step(lengths)
    if plan.small == 0:
        select.whole_row[(rows,)](
            scores, lengths, indices, values, how, *sizes, padded, step, pdl,
            num_warps=plan.refine_warps, **early,
        )  # fmt: skip
        return
    warps = max(1, padded // 1024, min(plan.refine_warps, padded // 512))  # 16 or 32 a thread
    words = indices.new_empty((rows, plan.small + row.TILE), dtype=torch.int64)
    row.binned_row[(rows,)](
        scores, lengths, indices, values, how, words, *sizes, max(1, padded // (512 * warps)),
        warps, plan.small, row.SHARE, row.WIDTH, step, pdl, num_warps=warps, **early,
    )  # fmt: skip


def _launch_programs(scores, k, hint, lengths, indices, values, how, plan, pdl, early):
    """The three kernels of a long row, and what they hand on."""
    rows, size = scores.shape
    grouped = plan.group > 1
    groups_r = triton.cdiv(size, plan.group) if grouped else 0
    programs = max(plan.verifiers, triton.cdiv(groups_r, plan.here))  # of `collect`, a row
    slots = max(128, triton.next_power_of_2(programs))  # few sizes: few kernels to compile
    counted = min(size, 2 * plan.group * k) if grouped else size  # most that is counted one by one
    part = triton.cdiv(triton.cdiv(counted, plan.verify_tile), plan.verifiers) * plan.verify_tile
    new = functools.partial(torch.empty, device=scores.device)
    edges = new((rows, 2), dtype=torch.float32)
    counts = new(
        (rows, plan.verifiers, plan.bins), dtype=torch.int16 if part < 2**15 else torch.int32
    )
    words = new((rows, programs), dtype=torch.int64)
    ranges = new((rows, programs, 2), dtype=torch.int32)
    list_i = new((rows, 2, plan.capacity), dtype=torch.int32)
    list_x = new((rows, 2, plan.capacity), dtype=torch.float32)
    maxima = new((rows, groups_r), dtype=torch.float32) if grouped else None
    groups = new((rows, groups_r), dtype=torch.int32) if grouped else None
    step = row_step(lengths)
    kernels.verify[(plan.verifiers * rows,)](
        scores, hint, lengths, edges, counts, words, maxima, size,
        0 if hint is None else hint.shape[1], programs, groups_r, scores.stride(0),
        0 if hint is None else hint.stride(0),
        plan.verifiers, k, plan.bins, plan.sample, plan.verify_tile, plan.group,
        triton.next_power_of_2(triton.cdiv(programs, plan.verifiers)), step, pdl,
        num_warps=plan.verify_warps, num_stages=1, **early,
    )  # fmt: skip
    kernels.collect[(programs * rows,)](
        scores, lengths, edges, counts, words, ranges, maxima, groups, list_i, list_x, indices,
        values, size, groups_r, scores.stride(0),
        programs, k, plan.bins, plan.verifiers, triton.next_power_of_2(plan.verifiers),
        plan.verify_tile, plan.collect_tile, plan.here, plan.group, plan.batch, plan.capacity,
        slots, step, pdl, num_warps=plan.collect_warps, num_stages=1, **early,
    )  # fmt: skip
    refine[(rows,)](
        scores, lengths, words, ranges, list_i, list_x, indices, values, how, size,
        scores.stride(0),
        programs, k, max(2, triton.next_power_of_2(k)), plan.refine_tile, plan.capacity,
        plan.small, slots, grouped, step, pdl, num_warps=plan.refine_warps, num_stages=1, **early,
    )  # fmt: skip


_topk = define_op(
    f"{NAME}(Tensor scores, int k, Tensor? hint, Tensor? lengths, bool sorted) -> "
    "(Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_topk,
)
