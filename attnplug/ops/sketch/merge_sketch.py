"""The output of a step of `sketch`: what was read exactly, and an estimate of what was not.

    Z_t = sum over parts of Z - sum over picks' pieces of Z        u = mean of s^ over the rest
    rho = sum E / sum G, within 1/4..4
    v_t = v_mean + Cov(v, s^) (u - mean s) / Var(s)
    out = (sum_p 2^lse_p out_p + rho Z_t 2^N v_t) / (sum_p 2^lse_p + rho Z_t 2^N)

over the pieces p of the fixed part and of the picks. The value of the rest is a regression of
values on estimated scores, from moments taken when the basis was fitted: no token is read for it.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import DTYPES, check_sinks
from attnplug.ops.common.define import arguments_of, define_op, refuse_gradients, require
from attnplug.ops.common.device import early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays, sinks_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import Output, rows_of, steps_of
from attnplug.ops.sketch.encode_keys import check_float
from attnplug.ops.sketch.estimates import exp2, log2
from attnplug.ops.sketch.kernels import merge as kernels
from attnplug.ops.sketch.kernels.codes import Scanned, pieces_of, projection_of

NAME = "sketch_merge"
TAILS = ("drop", "regression")
COLUMNS = 32  # of the head dimension, for one program
RATIO = kernels.RATIO.value
SCHEMA = (
    f"{NAME}(Tensor q, Tensor projected, Tensor fixed_out, Tensor fixed_lse, Tensor pick_out, "
    "Tensor pick_lse, Tensor pick_sums, Tensor sums, Tensor norm, Tensor cut, Tensor v_mean, "
    "str tail, float softcap, Tensor? sinks) -> (Tensor, Tensor)"
)
Call = arguments_of(SCHEMA)


def merge_sketch(
    q: torch.Tensor,
    projected: torch.Tensor,
    fixed_out: torch.Tensor,
    fixed_lse: torch.Tensor,
    pick_out: torch.Tensor,
    pick_lse: torch.Tensor,
    pick_sums: torch.Tensor,
    sums: torch.Tensor,
    norm: torch.Tensor,
    cut: torch.Tensor,
    v_mean: torch.Tensor,
    *,
    tail: str = "regression",
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the pieces, and the rest.

    Args:
        q: `[B, Hq, 1, D]`, for the output's dtype.
        projected, fixed_out, fixed_lse: of `prepare_query`.
        pick_out, pick_lse, pick_sums: of `attend_picks`.
        sums, norm: of `scan_sketch`. cut: of `pick_tokens`.
        v_mean: float32 `[B, Hkv, D]` of `fit_basis`.
        tail: what the rest is: "regression", or "drop", nothing.
        softcap: as in `scan_sketch`.
        sinks: `[Hq]`, one more logit for each head, without a value.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32 (natural logarithm, the rest
        included, sinks left out). A query that sees no key gives 0 and -inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    pieces = fixed_out, fixed_lse, pick_out, pick_lse, pick_sums
    read = projected, *pieces, sums, norm, cut, v_mean
    refuse_gradients(NAME, q, *read, sinks)
    return _merge_sketch(q, *read, tail, softcap, sinks)


def _allocate(*args):
    call = Call(*args)
    q, cut, tail = call.q, call.cut, call.tail
    if q.dim() != 4 or q.shape[2] != 1 or q.dtype not in DTYPES:
        raise ArgumentError(
            f"{NAME}: q is {q.dtype} {tuple(q.shape)}, needs float32, float16 or bfloat16 "
            "[B,Hq,1,D]"
        )
    batch, heads, _, width = q.shape
    if tail not in TAILS:
        raise ArgumentError(f"{NAME}: tail is {tail!r}, needs one of {', '.join(TAILS)}")
    rows = batch, heads
    fixed, pieces = ((*rows, x.shape[-1]) for x in (call.fixed_lse, call.pick_lse))
    for label, shape in (
        ("projected", (*rows, call.projected.shape[-1])),
        ("fixed_out", (*fixed, width)),
        ("fixed_lse", fixed),
        ("pick_out", (*pieces, width)),
        ("pick_lse", pieces),
        ("pick_sums", (*pieces, 4)),
        ("sums", (*rows, call.sums.shape[-2], 2)),
        ("norm", rows),
        ("cut", (batch, cut.shape[1], 3)),
        ("v_mean", (batch, cut.shape[1], width)),
    ):
        check_float(NAME, label, getattr(call, label), shape, q.device)
    require(
        heads % cut.shape[1] == 0,
        NAME,
        f"{heads} query heads are not a multiple of {cut.shape[1]} KV heads",
    )
    if call.sinks is not None:
        check_sinks(NAME, q, call.sinks)
    return q.new_empty(q.shape), q.new_empty((*rows, 1), dtype=torch.float32)


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _rest(projected, pick_sums, sums, norm, left, v_mean, dropped, is_capped, value):
    """log2 of the rest's mass, -inf for none or where it is `dropped`, and its `value`, by a
    regression on the scores."""
    mass = sums[:, 0].sum() - pick_sums[:, 0].sum()
    if dropped or left == 0 or not mass > 0:
        return -np.inf
    exact, guess = pick_sums[:, 2].sum(), pick_sums[:, 3].sum()
    rho = exact / guess if guess > 0 and exact > 0 else 1.0
    rho = min(max(rho, 1 / RATIO), RATIO)
    rank = (projected.shape[0] - 2 - value.shape[0]) // 2
    variance = max((projected[rank + 2 : 2 * rank + 2] ** 2).sum(), 1e-12)
    u = (sums[:, 1].sum() - pick_sums[:, 1].sum()) / mass + (0.0 if is_capped else norm)
    reach = 8 / np.sqrt(variance)
    slope = min(max((u - projected[rank + 1]) / variance, -reach), reach)
    value[:] = v_mean
    value += projected[2 * rank + 2 :] * slope
    return norm + log2(rho * mass)


@njit(parallel=True)
def _reference(
    projected,
    fixed_out,
    fixed_lse,
    pick_out,
    pick_lse,
    pick_sums,
    sums,
    norm,
    cut,
    v_mean,
    dropped,
    is_capped,
    sinks,
    out,
    lse,
):
    """The output of every head, in parallel."""
    batch, heads, _, width = out.shape
    group = heads // cut.shape[1]
    for item in prange(batch * heads):
        b, row = item // heads, item % heads
        value = np.zeros(width, np.float64)
        rest = _rest(
            projected[b, row],
            pick_sums[b, row].astype(np.float64),
            sums[b, row].astype(np.float64),
            norm[b, row],
            cut[b, row // group, 1],
            v_mean[b, row // group],
            dropped,
            is_capped,
            value,
        )
        lses = np.concatenate((fixed_lse[b, row], pick_lse[b, row]))
        top = max(lses.max(), rest)
        shift = 0.0 if top == -np.inf else top
        total = exp2(rest - shift) + sums[b, row, :, 0].sum() * 0  # NaN where the scan says so
        acc = value * exp2(rest - shift)
        for p in range(lses.shape[0]):
            weight = exp2(lses[p] - shift)
            if lses[p] == -np.inf:
                continue
            total += weight
            near = p < fixed_lse.shape[2]
            piece = fixed_out[b, row, p] if near else pick_out[b, row, p - fixed_lse.shape[2]]
            acc += weight * piece
        lse[b, row, 0] = (shift + log2(total)) / LOG2E if total != 0 else -np.inf
        divisor = total if total != 0 else 1.0
        if sinks.shape[0] > 0:
            divisor += exp2(sinks[row] * LOG2E - shift)
        out[b, row, 0] = acc / divisor


def _cpu(*args):
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    read = args[1 : Call._fields.index("tail")]
    _reference(
        *arrays(*read, call.tail == "drop", call.softcap > 0),
        *arrays(sinks_on_cpu(call.sinks), result, lse),
    )
    out.copy_(result)


# --- CUDA ------------------------------------------------------------------------------------


def launch_merge_sketch(*args, note=None, counted=None, hint=None, is_new=False, columns=COLUMNS):
    """Run the kernel; tensors as in `merge_sketch`, on a GPU or in Triton's interpreter. In the
    chain, `note` is (progress, lengths, start, size of the cache), `counted` the lengths that are
    to grow by the new token, which `lengths` lack if it `is_new`; `hint` is written. q
    `[B T, Hq, 1, D]` may have T queries of each row."""
    call, (out, lse) = Call(*args[:-2]), args[-2:]
    (batch, heads, _, width), rows = call.q.shape, len(call.v_mean)
    pdl, dependent = early(call.q.device)
    progress, lengths, start, size = note or (None, None, None, 0)
    rank, parts = (call.projected.shape[2] - 2 - width) // 2, call.sums.shape[2]
    fixed = pieces_of(call.fixed_out, call.fixed_lse)
    picked = pieces_of(call.pick_out, call.pick_lse)
    launch_kernel(
        kernels.merge,
        grid=(batch * heads, cdiv(width, columns)),
        projected=projection_of(call.projected),
        fixed=fixed,
        picked=picked,
        pick_sums=call.pick_sums,
        scanned=Scanned(sums=call.sums, norm=call.norm, parts=parts),
        cut=call.cut,
        v_mean=call.v_mean,
        output=Output(None, out, lse, call.sinks),
        rows=rows_of(size, lengths, start),
        progress=progress,
        counted=counted,
        hint=hint,
        heads=heads,
        group=heads // call.cut.shape[1],
        counts=rows if counted is None else counted.shape[0],
        D=width,
        COLUMNS=columns,
        R=rank,
        RP=triton.next_power_of_2(rank),
        FIXED=triton.next_power_of_2(fixed.number),
        PIECES=triton.next_power_of_2(picked.number),
        PARTS=triton.next_power_of_2(parts),
        TAIL=call.tail,
        CAPPED=call.softcap > 0,
        BATCH=rows,
        NEW=int(is_new),
        CHAINED=note is not None,
        STEPS=steps_of(lengths, start, batch // rows),
        PDL=pdl,
        num_warps=4,
        **dependent,
    )


_merge_sketch = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_merge_sketch,
)
