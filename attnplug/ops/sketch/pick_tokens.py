"""The tokens that a step of `sketch` reads exactly: the k with the largest shares.

The k-th share's bin is the highest that k tokens reach. Picks are all tokens above it, and those
in it in the order of the cache while the list has room: k to k + k / 8 tokens, and the k best
among them unless more than k / 8 tokens share the bin, which then takes in some for others at
most a bin's width (2^(1/16) near the middle) better. No sort, and no pass over the shares but one.
"""

from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import check_sequence_inputs, check_tensor
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import rows_on_cpu
from attnplug.ops.common.sizes import cdiv
from attnplug.ops.common.triton import triton
from attnplug.ops.common.views import rows_of, steps_of
from attnplug.ops.sketch.encode_keys import near_block
from attnplug.ops.sketch.estimates import BINS, FINE, LOWER, MARGIN, OCTAVE, RISE, bin_of
from attnplug.ops.sketch.kernels import pick as kernels
from attnplug.ops.sketch.kernels.codes import Scanned
from attnplug.ops.sketch.state import BLOCK

NAME = "sketch_pick"
ROUND = 64  # tokens: lists are a multiple of it
EIGHT, NOTED = kernels.EIGHT.value, kernels.NOTED.value
EIGHTS = 2048  # eights of a piece at most: two counts of its tokens fit in an int32


def capacity_for(k: int) -> int:
    """Places of a list of k picks or a few more."""
    return -(-(k + k // 8) // ROUND) * ROUND


def pick_tokens(
    shares: torch.Tensor,
    total: torch.Tensor,
    middle: torch.Tensor,
    *,
    top_k: int,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the tokens with the largest shares.

    Args:
        shares, total, middle: of `scan_sketch`.
        top_k: tokens to pick, as in the scan.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.

    Returns:
        picks int32 `[B, Hkv, capacity_for(top_k)]`: slots of the cache, ascending, -1
            behind them. All candidates where there are no more than top_k.
        cut float32 `[B, Hkv, 3]`: the share from which on a pick is of the upper half (inf: none
            is), how many visible candidates are not picked, and the `hint` for the next step's
            scan: the bin from which it counts, the highest that 2 top_k tokens reach; 0: all. In
            the chain it goes up a bin a step at most, and is a guess where too few were counted.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, shares, middle)
    return _pick_tokens(shares, total, middle, top_k, lengths, start)


def _allocate(shares, total, middle, top_k, lengths, start):
    if shares.dim() != 3 or shares.dtype != torch.float16:
        raise ArgumentError(
            f"{NAME}: shares is {shares.dtype} {tuple(shares.shape)}, needs float16 [B,Hkv,S]"
        )
    rows = tuple(shares.shape[:2])
    check_tensor(NAME, "total", total, torch.int32, (*rows, BINS), shares.device)
    check_tensor(NAME, "middle", middle, torch.float32, rows, shares.device)
    require(shares.is_contiguous(), NAME, "shares is not contiguous")
    require(top_k >= 1, NAME, f"top_k is {top_k}, needs at least 1")
    like = shares[..., None]
    check_sequence_inputs(NAME, like, like, lengths, start, None)
    return outputs(shares, top_k)


def outputs(shares: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for what `pick_tokens` returns."""
    rows = tuple(shares.shape[:2])
    return (
        shares.new_empty((*rows, capacity_for(top_k)), dtype=torch.int32),
        shares.new_empty((*rows, 3), dtype=torch.float32),
    )


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def edge_of(index, middle):
    """The lower edge of a bin."""
    y = index - 128.0
    if abs(y) > FINE:
        y = (1.0 if y > 0 else -1.0) * (FINE + (abs(y) - FINE) * 8)
    return middle + y / OCTAVE


@njit()
def _reaching(total, wanted):
    """The highest bin that `wanted` tokens reach, and how many are above it."""
    above = 0
    for index in range(BINS - 1, 0, -1):
        if above + total[index] >= wanted:
            return index, above
        above += total[index]
    return 0, above


@njit()
def _next_hint(total, wanted):
    """The bin from which a next scan counts: the highest that so many tokens reach. Where too few
    were counted to know it, LOWER below the lowest bin that has one."""
    if total[0] <= wanted:
        return 0
    index, above = _reaching(total, wanted)
    if index > 0:
        return index
    if above == 0:
        return 0
    lowest, _ = _reaching(total, above)
    return max(lowest - LOWER, 0)


def coming_hint(hint: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The hint after a step that had `hint` and found `known`: queries differ, and one that is too
    high costs more than one that is too low, so it goes up slowly and down at once."""
    limit = hint.floor().clamp(max=BINS - 1) + RISE
    return torch.where(hint >= 2, torch.minimum(known, limit), known)


@njit(parallel=True)
def _reference(shares, total, middle, top_k, lengths, start, picks, cut):
    """The list of every row and KV head, in parallel."""
    batch, heads, _ = shares.shape
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        capacity = picks.shape[2]
        visible = total[b, h, 0]
        wanted = min(top_k, visible)
        threshold, above = _reaching(total[b, h], wanted)
        upper, _ = _reaching(total[b, h], wanted // 2)
        cut[b, h, 0] = edge_of(upper, middle[b, h]) if upper > threshold else np.inf
        count, equal = 0, 0
        first = start[b] + BLOCK
        for n in range(first, start[b] + near_block(lengths[b], start[b]) * BLOCK):
            if not shares[b, h, n] > -np.inf:
                continue
            index = bin_of(shares[b, h, n], middle[b, h])
            if index < threshold or (index == threshold and equal >= capacity - above):
                continue
            equal += index == threshold
            picks[b, h, count] = n
            count += 1
        cut[b, h, 1] = visible - count
        cut[b, h, 2] = _next_hint(total[b, h], MARGIN * top_k)
        picks[b, h, count:] = -1


def _cpu(shares, total, middle, top_k, lengths, start, picks, cut):
    lengths, start = rows_on_cpu(shares[..., None], lengths, start)
    _reference(
        *arrays(shares, total, middle, top_k, lengths, start, picks, cut),
    )


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; results do not depend on it."""

    pieces: int  # of a row's KV head
    least: int = 128  # eights of a piece, a multiple of 4: a short row has fewer pieces
    tile: int = 2048  # tokens that a program looks at at once
    warps: int = 8
    registers: int = 64  # of a thread, at most


def plan_for(rows: int, size: int, multiprocessors: int) -> Plan:
    """The plan for `rows` rows and KV heads with `size` slots each."""
    pieces = min(max(1, 2 * multiprocessors // rows), cdiv(size, 1024))
    pieces = max(pieces, fewest_for(size))
    return Plan(pieces, tile=1024, warps=4) if size <= 1024 * pieces else Plan(pieces)


def fewest_for(size: int) -> int:
    """How many pieces there must be: none has more than EIGHTS times eight tokens."""
    return max(1, cdiv(size, EIGHT * EIGHTS))


class Notes(NamedTuple):
    """What the kernels of a chain leave for `pick`, and it for itself.

    marks: int64 `[B,Hkv,pieces + SHARED]`, what the programs of a row tell each other. To be
        cleared before each launch: in a chain `prepare` does.
    counted: uint8 `[B,Hkv,S/32]`: whether the scan may have counted one of eight candidates, four
        bits in a byte; None: nobody has noted it.
    listed: int32 `[B,Hkv,S/8]`, of which eights it has; None with `counted`.
    """

    marks: torch.Tensor
    counted: torch.Tensor | None = None
    listed: torch.Tensor | None = None

    @classmethod
    def empty(cls, shares: torch.Tensor, plan: Plan) -> "Notes":
        """Memory for all of them, not cleared."""
        rows, size = tuple(shares.shape[:2]), shares.shape[2]
        return cls(
            shares.new_empty((*rows, plan.pieces + kernels.SHARED.value), dtype=torch.int64),
            shares.new_empty((*rows, size // NOTED), dtype=torch.uint8),
            shares.new_empty((*rows, size // EIGHT), dtype=torch.int32),
        )


def own_plan(shares: torch.Tensor) -> Plan:
    """The plan for these shares on their device."""
    batch, heads, size = shares.shape
    return plan_for(batch * heads, size, card(shares.device).processors)


def launch_pick_tokens(
    shares,
    total,
    middle,
    top_k,
    lengths,
    start,
    picks,
    cut,
    plan=None,
    notes=None,
    hint=None,
    is_new=False,
    queries=1,
):
    """Run the kernel; tensors as in `pick_tokens`, on a GPU or in Triton's interpreter. `notes` are
    a chain's, made for the plan; `hint` is the one that the scan had. With `is_new`, `lengths` lack
    a token. `shares` may be of several queries of each row, `queries` of them."""
    batch, heads, size = shares.shape
    capacity = picks.shape[2]
    plan = plan or own_plan(shares)
    require(plan.pieces >= fewest_for(size), NAME, f"{plan.pieces} pieces are too few")
    require(plan.least in range(4, EIGHTS + 1, 4), NAME, f"least is {plan.least}")
    if notes is None:
        notes = Notes(Notes.empty(shares, plan).marks.zero_())
    pdl, dependent = early(shares.device)
    launch_kernel(
        kernels.pick,
        grid=(plan.pieces, heads, batch),
        scanned=Scanned(shares, total, middle=middle),
        notes=notes,
        rows=rows_of(size, lengths, start),
        hint=hint,
        picks=picks,
        cut=cut,
        k=top_k,
        pieces=plan.pieces,
        capacity=capacity,
        EIGHTS=EIGHTS,
        LEAST=plan.least,
        TILE=plan.tile,
        PIECES=triton.next_power_of_2(plan.pieces),
        CAPACITY_P=triton.next_power_of_2(capacity),
        ASM=card(shares.device).asm,
        NEW=int(is_new),
        STEPS=steps_of(lengths, start, queries),
        PDL=pdl,
        num_warps=plan.warps,
        **dependent,
        **card(shares.device).limit(plan.registers),
    )


_pick_tokens = define_op(
    f"{NAME}(Tensor shares, Tensor total, Tensor middle, int top_k, "
    "Tensor? lengths, Tensor? start) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_pick_tokens,
)
