"""The best tokens of a decode step: scores from INT8 keys and their exact top-k in one chain.

    picks[b, h] = the k tokens n < length(b) that come first by (score[b, h, n] descending, n)

with the scores of `score_tokens`, or the shares of `share_tokens`. The set is the one that `topk`
gives for these scores. On CUDA the kernel that scores a long row counts its scores for `topk` at
once, in bins about the place where the k-th should be. So `topk` reads the scores once and not
twice, and one kernel less runs. A sample of 256 tokens tells that place, and no hint is needed.
Where the guess is wrong, `topk` finds the k-th by its own exact search.
Source: `score_tokens` and `topk`; the guess is measured in docs/log/gvr.md.
"""

import functools

import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import machine
from attnplug.ops.common.pages import capacity, table_at
from attnplug.ops.common.rows import mask_bytes, row_step
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.gvr import share_tokens as sharing
from attnplug.ops.gvr.kernels.score import score_and_count
from attnplug.ops.gvr.kernels.topk_long_rows import allocate_buffers, launch_after_counts
from attnplug.ops.gvr.score_tokens import _cpu as score_on_cpu
from attnplug.ops.gvr.score_tokens import (
    allocate_scores,
    launch_score_tokens,
    score_lengths,
)
from attnplug.ops.gvr.topk import MAX_K, MAX_SCORES, WHOLE_ROW, Plan, launch_topk
from attnplug.ops.gvr.topk import _cpu as topk_on_cpu

NAME = "best_tokens"
SAMPLE = 256  # tokens of a row that tell where its k-th score is


def best_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    k: int,
    *,
    group: str = "max",
    scale: float = 1.0,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    table: torch.Tensor | None = None,
    stats: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The k best tokens of each KV head for one decode step.

    Args:
        q: `[B,Hq,1,D]`, float32, float16 or bfloat16.
        codes: int8 `[B,Hkv,S,D]`, as in `score_tokens`; with a table pages `[pages,Hkv,page,D]`.
        steps: float32 `[B,Hkv,S]`; with a table `[pages,Hkv,page]`.
        k: 1 to 4096.
        group: "max" for the scores of `score_tokens`, "share" for those of `share_tokens`, to which
            scale and softcap are given.
        scale: factor on q.k.
        sink: the first so many real tokens of each row score -inf.
        window: so do the last so many tokens, the query's own included.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.
        softcap: shares are of `softcap * tanh(score / softcap)`; 0: off.
        table: int32 `[B,P]`, the pages of each row, as in `score_tokens`.
        stats: also return how each row went.

    Returns:
        picks `[B,Hkv,k]` int32, in any order, -1 at the end where a row has fewer than k tokens; of
        a row with fewer than k scores above -inf, tokens with -inf too. And scores `[B * Hkv,S]`
        float32, unspecified past a row's length. With `stats` `[B * Hkv,3]` int32, as in `topk`.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    require(group in ("max", "share"), NAME, f"group is {group!r}, needs 'max' or 'share'")
    options = k, group == "share", scale, sink, window, lengths, start, key_mask, softcap
    if table is None:
        picks, scores, how = _best_tokens(q, codes, steps, *options)
    else:
        picks, scores, how = _best_tokens_paged(q, codes, steps, table, *options)
    return (picks, scores, how) if stats else (picks, scores)


def _allocate(
    q, codes, steps, k, share, scale, sink, window, lengths, start, key_mask, softcap, table=None
):
    require(1 <= k <= MAX_K, NAME, f"k is {k}, needs 1 to {MAX_K}")
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive cap")
    scores = allocate_scores(NAME, q, codes, steps, sink, window, lengths, start, key_mask, table)
    size = scores.shape[1]
    require(size <= MAX_SCORES, NAME, f"S is {size}, at most {MAX_SCORES} are allowed")
    picks = q.new_empty((len(q), codes.shape[1], k), dtype=torch.int32)
    return picks, scores, q.new_empty((len(scores), 3), dtype=torch.int32)


def _cpu(
    q,
    codes,
    steps,
    k,
    share,
    scale,
    sink,
    window,
    lengths,
    start,
    key_mask,
    softcap,
    picks,
    scores,
    how,
    table=None,
):
    kept = sink, window, lengths, start, key_mask
    if share:
        sharing._cpu(q, codes, steps, scale, *kept, softcap, scores, table=table)
    else:
        score_on_cpu(q, codes, steps, *kept, scores, table=table)
    indices, values = picks.flatten(0, 1), scores.new_empty((len(scores), k))
    of_rows = score_lengths(lengths, codes.shape[1])
    topk_on_cpu(scores, k, None, of_rows, False, indices, values, how)


# --- CUDA ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def plan_for(rows: int, size: int, k: int, width: int, multiprocessors: int) -> Plan:
    """The plan of a shape, for `score_and_count` (its parts and tiles are those of `verify`) and
    the kernels of `topk` behind it. No GPU has compared plans yet: the programs are as many as
    those of `score_tokens`, where `collect` can read all their counts."""
    small = rows * size <= 2**21
    tile = (256 if small else 128) // (2 if width > 128 else 1)
    most = (128, 2 * multiprocessors // rows) if small else (256, 8 * multiprocessors // rows)
    parts = max(1, min(*most, cdiv(size, tile)))
    list_size = max(4096, 2 * next_power_of_two(k))
    return Plan(
        whole_row=False,
        verifiers=parts,
        verify_tile=tile,
        verify_warps=8 if small else 4,
        collect_tile=max(256, min(2048, next_power_of_two(cdiv(size, parts)))),
        collect_warps=8 if parts > 128 else 4,
        capacity=list_size,
        refine_warps=4 if list_size <= 4096 else 8,
        sample=SAMPLE,
    )


def launch_best_tokens(
    q,
    codes,
    steps,
    k,
    share,
    scale,
    sink,
    window,
    lengths,
    start,
    key_mask,
    softcap,
    picks,
    scores,
    how,
    plan=None,
    table=None,
):
    """Run the kernels; tensors as in `best_tokens`, on a GPU or in Triton's interpreter. A `plan`
    is for a long row."""
    q, codes = (x if x.stride(3) == 1 else x.contiguous() for x in (q, codes))
    kept = sink, window, lengths, start, key_mask
    rows, size = scores.shape
    shares = None
    if share:
        shares = sharing.launch_normalizers(q, codes, steps, scale, *kept, softcap, table)
    multiprocessors, pdl = machine(q.device)
    indices, values = picks.flatten(0, 1), scores.new_empty((rows, k))
    of_rows = score_lengths(lengths, codes.shape[1])
    if plan is None and size <= WHOLE_ROW:
        launch_score_tokens(q, codes, steps, *kept, scores, table=table, shares=shares)
        launch_topk(scores, k, None, of_rows, False, indices, values, how)
        return
    plan = plan or plan_for(rows, size, k, q.shape[3], multiprocessors)
    buffers = allocate_buffers(scores, k, plan)
    _launch_score(q, codes, steps, k, kept, table, shares, scores, buffers, plan, pdl)
    launch_after_counts(scores, k, of_rows, indices, values, how, plan, pdl, buffers, fresh=True)


def _launch_score(q, codes, steps, k, kept, table, shares, scores, buffers, plan, pdl):
    """Score, and count for `topk`."""
    sink, window, lengths, start, key_mask = kept
    heads, width = codes.shape[1], q.shape[3]
    key_mask = mask_bytes(key_mask)
    score_and_count.run(
        grid=(plan.verifiers, heads, len(q)),
        warmup=False,
        q=q,
        codes=codes,
        scales=steps,
        lengths=lengths,
        start=start,
        key_mask=key_mask,
        table=table,
        shares=None if shares is None else shares[:2],
        cap=None if shares is None else shares.cap,
        scores=scores,
        edges=buffers.edges,
        counts=buffers.counts,
        S=capacity(codes, table),
        K=k,
        parts=plan.verifiers,
        q_strides=q.stride()[:2],
        codes_strides=codes.stride()[:3],
        scales_strides=steps.stride(),
        mask_stride=0 if key_mask is None else key_mask.stride(0),
        table_stride=None if table is None else table.stride(0),
        GROUP=q.shape[1] // heads,
        ROWS=max(16, next_power_of_two(q.shape[1] // heads)),
        D=width,
        DP=next_power_of_two(width),
        SINK=sink,
        WINDOW=window,
        TILE=plan.verify_tile,
        STAGES=1 if table is not None else 3,  # loaded addresses: see `score_tokens`
        SAMPLE=plan.sample,
        BINS=plan.bins,
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        PAGE=0 if table is None else codes.shape[2],
        PDL=pdl,
        num_warps=plan.verify_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


_OUTPUTS = "(Tensor, Tensor, Tensor)"
_OPTIONS = (
    "int k, bool share, float scale, int sink, int window, Tensor? lengths, Tensor? start, "
    "Tensor? key_mask, float softcap"
)
_best_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, {_OPTIONS}) -> {_OUTPUTS}",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_best_tokens,
)

_best_tokens_paged = define_op(
    f"{NAME}_paged(Tensor q, Tensor codes, Tensor steps, Tensor table, {_OPTIONS}) -> {_OUTPUTS}",
    allocate=table_at(3, _allocate),
    cpu=table_at(3, _cpu),
    cuda=table_at(3, launch_best_tokens),
)
