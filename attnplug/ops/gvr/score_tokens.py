"""What every cached token is worth to a decode step, read from INT8 keys.

    score[b, h, n] = max over the group's heads g of  q[b, g] . codes[b, h, n]  steps[b, h, n]

which is max_g q . k up to the rounding of the keys, k = codes * steps to within steps / 2. It ranks
tokens for `topk`; the scale of the softmax is left out, and a softcap would not change the order.
Tokens that a step reads in any case (the sink, the window) and those it may not see are -inf; what
is NaN, of a bad key or query, is +inf, so that it is picked and surfaces. One byte a number and one
float a token are read where dense attention reads four bytes a number.
Source: the indexer of Guess-Verify-Refine (shared/papers/002), on keys of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import HEAD_DIMS, check_sequence_inputs
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import machine
from attnplug.ops.common.rows import mask_bytes, row_span, row_step, rows_on_cpu

NAME = "score_tokens"


def score_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    *,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scores of the cached tokens for one decode step.

    Args:
        q: `[B,Hq,1,D]`, float32, float16 or bfloat16.
        codes: int8 `[B,Hkv,S,D]`, Hkv dividing Hq; see `quantize_keys`.
        steps: float32 `[B,Hkv,S]`, what a code of 1 stands for.
        sink: first tokens of each row that get -inf.
        window: last tokens that get -inf, the query's own included.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.

    Returns:
        scores `[B * Hkv, S]` float32.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    return _score_tokens(q, codes, steps, sink, window, lengths, start, key_mask)


def quantize_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes `[...,D]` and float32 steps `[...]` of keys `[...,D]`: the largest is 127 steps.
    A key that is not finite has a step that is not, and so are its scores."""
    wide = keys.float()
    steps = wide.abs().amax(-1) / 127
    codes = (wide / steps[..., None]).nan_to_num(0.0, 0.0, 0.0).round()
    return codes.to(torch.int8), steps


def _allocate(q, codes, steps, sink, window, lengths, start, key_mask):
    if q.dim() != 4 or q.shape[2] != 1 or q.shape[3] not in HEAD_DIMS:
        raise ArgumentError(
            f"{NAME}: q is {tuple(q.shape)}, needs [B,Hq,1,D] with D of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    fits = codes.dim() == 4 and codes.shape[0] == q.shape[0] and codes.shape[3] == q.shape[3]
    if not fits or codes.dtype != torch.int8 or q.shape[1] % codes.shape[1]:
        raise ArgumentError(
            f"{NAME}: codes is {codes.dtype} {tuple(codes.shape)}, needs int8 [B,Hkv,S,D] for q "
            f"{tuple(q.shape)}"
        )
    if steps.dtype != torch.float32 or steps.shape != codes.shape[:3]:
        raise ArgumentError(
            f"{NAME}: steps is {steps.dtype} {tuple(steps.shape)}, needs float32 [B,Hkv,S] = "
            f"{list(codes.shape[:3])}"
        )
    for label, tensor in (("codes", codes), ("steps", steps)):
        require(tensor.device == q.device, NAME, f"{label} is on {tensor.device}, q on {q.device}")
    check_sequence_inputs(NAME, q, codes, lengths, start, key_mask)
    require(sink >= 0, NAME, f"sink is {sink}, needs at least 0")
    require(window >= 1, NAME, f"window is {window}, needs at least 1, the query's own token")
    batch, heads, size, _ = codes.shape
    return q.new_empty((batch * heads, size), dtype=torch.float32)


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(q, codes, steps, sink, window, lengths, start, key_mask, scores):
    batch, heads, size, _ = codes.shape
    lengths, start = rows_on_cpu(codes, lengths, start)
    valid = int(lengths.max())
    keys = codes[:, :, :valid].float()
    best = (q.float().unflatten(1, (heads, -1))[:, :, :, 0] @ keys.mT) * steps[:, :, None, :valid]
    best = best.nan_to_num(torch.inf, torch.inf, -torch.inf).amax(2)
    at = torch.arange(valid)
    seen = (at >= start[:, None] + sink) & (at < lengths[:, None] - window)
    if key_mask is not None:
        seen = seen & key_mask[:, :valid]
    scores.fill_(-torch.inf)
    found = torch.where(seen[:, None], best, -torch.inf)
    scores.view(batch, heads, size)[:, :, :valid] = found


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernel cuts the work; chosen from static shapes alone."""

    tile: int  # tokens of one step
    programs: int  # a row and KV head
    warps: int
    stages: int  # of the pipeline over tiles


@triton.jit
def _score(
    q, codes, steps, lengths, start, key_mask, scores, S, P,
    q_b, q_h, c_b, c_h, c_s, s_b, s_h, s_s, mask_b,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SINK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    LENGTH_STEP: tl.constexpr, START_STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c of P: every P-th tile of one row and KV head."""
    c = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    n = tl.arange(0, TILE)
    in_width = d < D
    q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=(g < GROUP)[:, None] & in_width[None, :], other=0.0)
    codes_at = codes + b * c_b + h.to(tl.int64) * c_h + d[None, :]
    steps_at = steps + b * s_b + h.to(tl.int64) * s_h
    out_at = scores + (b * tl.num_programs(1) + h) * S
    # Two loops, so that a short row in a long buffer costs its own reads and -inf for the rest.
    reach = tl.minimum(tl.maximum(length - WINDOW, 0), S)
    rounds = tl.cdiv(tl.maximum(reach - c * TILE, 0), P * TILE)
    for i in tl.range(0, rounds, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        at = (c + i * P) * TILE + n
        seen = (at >= low + SINK) & (at < length - WINDOW)
        if key_mask is not None:
            seen = seen & (tl.load(key_mask + b * mask_b + at, mask=seen, other=0) != 0)
        wide = at.to(tl.int64)
        loadable = seen[:, None] & in_width[None, :]
        key = tl.load(codes_at + wide[:, None] * c_s, mask=loadable, other=0)
        step = tl.load(steps_at + wide * s_s, mask=seen, other=0.0)
        s = tl.dot(query, key.to(query.dtype).T, input_precision="ieee") * step[None, :]
        s = tl.where(s == s, s, float("inf"))
        best = tl.max(tl.where((g < GROUP)[:, None], s, float("-inf")), 0)
        tl.store(out_at + at, tl.where(seen, best, float("-inf")), mask=at < S)
    for first in range((c + rounds * P) * TILE, S, P * TILE):
        tl.store(out_at + first + n, tl.full([TILE], float("-inf"), tl.float32), mask=first + n < S)


def plan_for(rows: int, size: int, width: int, multiprocessors: int) -> Plan:
    """The pre-tuned plan of a shape: `rows` (sequence, KV head) pairs of `size` tokens."""
    wide = 2 if width > 128 else 1
    if rows * size <= 2**21:  # one wave of few, long programs
        tile = 256 // wide
        return Plan(tile, max(1, min(triton.cdiv(size, tile), 2 * multiprocessors // rows)), 8, 3)
    tile = 128 // wide
    return Plan(tile, max(1, min(triton.cdiv(size, tile), 8 * multiprocessors // rows)), 4, 3)


def launch_score_tokens(
    q, codes, steps, sink, window, lengths, start, key_mask, scores, plan=None
):  # fmt: skip
    """Run the kernel; tensors as in `score_tokens`, on a GPU or in Triton's interpreter."""
    batch, heads, size, width = codes.shape
    group = q.shape[1] // heads
    if q.stride(3) != 1:
        q = q.contiguous()
    if codes.stride(3) != 1:
        codes = codes.contiguous()
    key_mask = mask_bytes(key_mask)
    multiprocessors, pdl = machine(q.device)
    plan = plan or plan_for(batch * heads, size, width, multiprocessors)
    _score[(plan.programs, heads, batch)](
        q, codes, steps, lengths, start, key_mask, scores, size, plan.programs,
        q.stride(0), q.stride(1), *codes.stride()[:3], *steps.stride(),
        0 if key_mask is None else key_mask.stride(0),
        group, max(16, triton.next_power_of_2(group)), width, triton.next_power_of_2(width),
        sink, window, plan.tile, plan.stages, row_step(lengths), row_step(start), pdl,
        num_warps=plan.warps,  # pyright: ignore[reportCallIssue]
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


_score_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, int sink, int window, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_score_tokens,
)
