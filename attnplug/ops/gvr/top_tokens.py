"""The best cached tokens of a decode step: `score_tokens` and `topk` of the scores in two kernels.

    picks[b, h] = the k tokens n < length[b] that come first by (score[b, h, n] descending,
                  n ascending)

with `score` of score_tokens.py; ties, NaN and -0.0 as in topk.py. Picks and values are those of
the two ops. A kernel and a reading of the scores are saved. The programs that score a row also keep
the best of their scores, in the slots of kernels/topk_sifted_rows.py. `finish` selects from these.
All scores are written too. `finish` searches a row that its slots do not settle, and takes all of
one that is no longer than k.
Source: as in topk.py.
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr import score_tokens as scoring
from attnplug.ops.gvr import topk as ranking
from attnplug.ops.gvr.kernels.topk_sifted_rows import (
    LARGEST,
    Sift,
    empty_slots,
    launch_finish,
    tile_of,
)

NAME = "top_tokens"


def top_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    k: int,
    *,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    stats: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The k cached tokens of each KV head with the largest scores, for one decode step.

    Args:
        q: `[B,Hq,1,D]`, float32, float16 or bfloat16.
        codes: int8 `[B,Hkv,S,D]`, Hkv dividing Hq, S up to 4,194,304; see `quantize_keys`.
        steps: float32 `[B,Hkv,S]`, each key's quantization scale: the value of code 1.
        k: 1 to 4096, also above S.
        sink: the first so many real tokens of each row score -inf.
        window: the last so many tokens score -inf, the query's own included.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read, and
            not picked.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.
        stats: also return the path and the cost of each row, as `topk` does.

    Returns:
        indices `[R,k]` int32 and values `[R,k]` float32 of the R = B * Hkv rows. Their order is
        unspecified, but the same in every run with the same arguments on the same device. Where
        fewer than k tokens may be seen, others of the length are picked, whose value is -inf. Where
        k exceeds a row's length, -1 and -inf at the end. With `stats` a third tensor `[R,3]` int32.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    indices, values, how = _top_tokens(q, codes, steps, k, sink, window, lengths, start, key_mask)
    return (indices, values, how) if stats else (indices, values)


def _allocate(q, codes, steps, k, sink, window, lengths, start, key_mask):
    options = sink, window, lengths, start, key_mask
    rows, size = scoring.score_shape(NAME, q, codes, steps, *options, None)
    require(1 <= k <= ranking.MAX_K, NAME, f"k is {k}, needs 1 to {ranking.MAX_K}")
    require(
        size <= ranking.MAX_SCORES,
        NAME,
        f"codes has {size} tokens a row, at most {ranking.MAX_SCORES} are allowed",
    )
    return (
        q.new_empty((rows, k), dtype=torch.int32),
        q.new_empty((rows, k), dtype=torch.float32),
        q.new_empty((rows, 3), dtype=torch.int32),
    )


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(q, codes, steps, k, sink, window, lengths, start, key_mask, indices, values, how):
    options = {"sink": sink, "window": window, "start": start, "key_mask": key_mask}
    scores = scoring.score_tokens(q, codes, steps, lengths=lengths, **options)
    rows = scoring.score_lengths(lengths, codes.shape[1])
    found = ranking.topk(scores, k, lengths=rows, stats=True)
    for output, result in zip((indices, values, how), found, strict=True):
        output.copy_(result)


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the two kernels divide a shape; chosen from static shapes alone."""

    score: scoring.Plan
    each: int  # parts of a program
    sift: Sift  # parts of a row, and their slots; its chunk is that of the tokens of a part
    registers: int | None = None  # most of a thread of the programs that score


# Rows and tokens that were timed. From half a million tokens of all rows on, scores are what takes
# time, and programs that also select leave less of the memory's bandwidth to them.
ROWS, LONGEST = range(4, 8), 1 << 17
SHORT, FEW_TOKENS = 1 << 15, 1024  # rows of which `finish` takes most: the fewer slots, the better
PART = 2048  # most tokens of a part: they are held in registers
SLOTS = 8192  # of a row, where that is to be had
PROGRAMS = 128  # most of a row: the slots of more parts are too many for one program of `finish`
REGISTERS = 80  # 24 warps of a multiprocessor can have so many
# Neighbours that one part has. Real picks stand together: with 128 neighbours a part has its share
# of k so unevenly that rows must be searched, with 16 hardly more so than by chance.
CHUNK = 16


def share_of(k: int, parts: int) -> int:
    """More of k scores, anywhere in the row, than one of its parts has."""
    mean = k / parts
    return int(mean + 6 * mean**0.5 + 6)


def plan_of(k: int, score: scoring.Plan, each: int, room: int = 0, chunk: int = CHUNK) -> Plan:
    """The plan with `each` parts a program. room: slots of a part; 0: so
    many that a part with far more than its share of k loses none of it."""
    parts = score.programs * each
    least = share_of(k, parts)
    if room:
        least = min(least, max(1, int(0.8 * room)))
    room = room or max(16, next_power_of_two(int(1.25 * least)))
    warps = max(4, min(16, next_power_of_two(parts * room) // 512))
    sift = Sift(parts, room, least, score.warps, warps, min(chunk, score.tile))
    return Plan(score, each, sift, REGISTERS)


def slots_of(plan: Plan) -> int:
    """Slots of a row."""
    return plan.sift.parts * plan.sift.room


@functools.lru_cache(maxsize=1024)
def plan_for(rows: int, size: int, width: int, k: int, multiprocessors: int) -> Plan | None:
    """The pre-tuned plan of a shape. None: the kernels of the two ops, where these are faster or
    nobody has timed others."""
    if rows not in ROWS or not ranking.WHOLE_ROW < size <= LONGEST or k < 256:
        return None
    score = scoring.plan_for(rows, size, width, multiprocessors)
    if size <= SHORT:
        programs = cdiv(size, FEW_TOKENS)
        score = score._replace(tile=256, programs=programs, warps=8)
        return plan_of(k, score, 1, next_power_of_two(share_of(k, programs)))
    return fewest_parts(size, k, score._replace(programs=min(score.programs, PROGRAMS)))


def fitting(plan: Plan, q: torch.Tensor, codes: torch.Tensor, shared: int) -> Plan:
    """The plan, where `shared` bytes of shared memory are enough for its tiles of tokens."""
    group = q.shape[1] // codes.shape[1]
    return plan._replace(
        score=scoring.fitting(plan.score, group, q.shape[3], q.element_size(), shared)
    )


def fewest_parts(size: int, k: int, score: scoring.Plan) -> Plan | None:
    """The plan with the fewest parts that fit the registers and the slots, if there is one."""
    plans = [plan_of(k, score, each) for each in range(1, 33)]
    plans = [plan for plan in plans if tile_of(size, plan.sift.parts, plan.sift.chunk) <= PART]
    for most in (SLOTS, LARGEST):
        for plan in plans:
            if slots_of(plan) <= most:
                return plan
    return None


def launch_top_tokens(
    q,
    codes,
    steps,
    k,
    sink,
    window,
    lengths,
    start,
    key_mask,
    indices,
    values,
    how,
    plan=None,
    scores=None,
):
    """Run the kernels; tensors as in `top_tokens`, on a GPU or in Triton's interpreter. `scores`
    `[R,S]` float32: where the scores are written."""
    rows, size = len(q) * codes.shape[1], codes.shape[2]
    if rows == 0:
        return
    found = card(q.device)
    if plan is None:
        plan = plan_for(rows, size, q.shape[3], k, found.processors)
        plan = plan and fitting(plan, q, codes, found.shared)
    if scores is None:
        scores = q.new_empty((rows, size), dtype=torch.float32)
    step = (q, codes, steps, sink, window, lengths, start, key_mask, scores)
    if plan is None:
        scoring.launch_score_tokens(*step)
        own = scoring.score_lengths(lengths, codes.shape[1])
        ranking.launch_topk(scores, k, None, own, False, indices, values, how)
        return
    slots = empty_slots(rows, plan.sift, q.device)
    keep = scoring.Keep(plan.sift, plan.each, slots, k, plan.registers)
    scoring.launch_score_tokens(*step, plan=plan.score, keep=keep)
    shared = 1 if lengths is None or lengths.shape[0] == 1 else codes.shape[1]
    launch_finish(scores, k, lengths, slots, indices, values, how, plan.sift, found.pdl, shared)


_top_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, int k, int sink, int window, Tensor? lengths, "
    "Tensor? start, Tensor? key_mask) -> (Tensor, Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_top_tokens,
)
