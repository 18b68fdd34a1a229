"""A whole decode step of `sketch`: the best tokens read exactly, the rest estimated from the codes.

    encode_keys; prepare_query; scan_sketch; pick_tokens; attend_picks; merge_sketch

in one chain of five kernels, each launched before the one in front of it has ended (programmatic
dependent launch), nothing asked of the host: attend to the sink and the last blocks, project the
query, and make the codes of a block that has just left the last ones; scan the codes; list the
picks; attend to them; merge. Exact where there are no more than `top_k` candidates.
"""

import functools
from typing import NamedTuple

import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import machine
from attnplug.ops.sketch import attend_picks as attend
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import merge_sketch as merge
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import prepare_query as prepare
from attnplug.ops.sketch import scan_sketch as scan

NAME = "sketch_decode"


def sketch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    encoder: torch.Tensor,
    queries: torch.Tensor,
    v_mean: torch.Tensor,
    fine: torch.Tensor,
    coarse: torch.Tensor,
    odd: torch.Tensor,
    progress: torch.Tensor,
    *,
    scale: float,
    top_k: int = 2048,
    tail: str = "regression",
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last token of each row.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q, the cache, the query's own token in it.
        encoder, queries, v_mean: of `fit_basis`.
        fine, coarse, odd, progress: of `empty_codes`; written. After a prefill call `encode_keys`
            once: a step makes missing codes with few programs.
        scale: factor on q.k, commonly `D ** -0.5`.
        top_k: tokens that are read exactly beside the sink and the last blocks.
        tail: what the rest is: "regression", "mean" or "drop" (`merge_sketch`).
        lengths: int32 or int64 `[1]` or `[B]`, valid keys. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.

    Returns:
        out `[B, Hq, 1, D]` of q's dtype and lse `[B, Hq, 1]` float32 (natural logarithm, sinks left
        out).

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, k, v, sinks)
    return _sketch_decode(
        q,
        k,
        v,
        encoder,
        queries,
        v_mean,
        fine,
        coarse,
        odd,
        progress,
        scale,
        top_k,
        tail,
        lengths,
        start,
        key_mask,
        softcap,
        sinks,
    )


def _allocate(
    q,
    k,
    v,
    encoder,
    queries,
    v_mean,
    fine,
    coarse,
    odd,
    progress,
    scale,
    top_k,
    tail,
    lengths,
    start,
    key_mask,
    softcap,
    sinks,
):
    prepare.check_step(NAME, q, k, v, lengths, start, key_mask, softcap)
    encode.check_codes(NAME, k, fine, coarse, odd, progress)
    batch, heads, _, width = q.shape
    rank = 2 * fine.shape[3] + 4 * coarse.shape[3]
    rows = tuple(k.shape[:2])
    encode.check_float(NAME, "encoder", encoder, (*rows, width + 1, rank), q.device)
    encode.check_float(NAME, "queries", queries, (*rows, width, 2 * rank + 2 + width), q.device)
    encode.check_float(NAME, "v_mean", v_mean, (*rows, width), q.device)
    require(top_k >= 1, NAME, f"top_k is {top_k}, needs at least 1")
    require(tail in merge.TAILS, NAME, f"tail is {tail!r}, needs one of {', '.join(merge.TAILS)}")
    if sinks is not None:
        require(
            tuple(sinks.shape) == (heads,),
            NAME,
            f"sinks has shape {tuple(sinks.shape)}, needs [Hq] = [{heads}]",
        )
    return q.new_empty(q.shape), q.new_empty((batch, heads, 1), dtype=torch.float32)


# --- CPU: the specification ------------------------------------------------------------------


def _cpu(
    q,
    k,
    v,
    encoder,
    queries,
    v_mean,
    fine,
    coarse,
    odd,
    progress,
    scale,
    top_k,
    tail,
    lengths,
    start,
    key_mask,
    softcap,
    sinks,
    out,
    lse,
):
    codes, rows = (fine, coarse, odd, progress), (lengths, start)
    encode._encode_keys(k, v, encoder, *codes, *rows, key_mask)
    projected, *fixed = prepare._prepare_query(q, k, v, queries, scale, *rows, key_mask, softcap)
    shares, counts, total, sums, norm, middle = scan._scan_sketch(
        projected, fixed[1], *codes, top_k, 1, *rows, key_mask, softcap
    )
    picks, cut = pick._pick_tokens(shares, counts, total, middle, top_k, *rows)
    picked = attend._attend_picks(
        q, k, v, projected, fine, coarse, picks, cut, norm, scale, 1, softcap
    )
    merge._cpu(
        q, projected, *fixed, *picked, sums, norm, cut, v_mean, tail, softcap, sinks, out, lse
    )


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    parts: int  # of a row's candidates in the scan
    scan: scan.Plan
    pieces: int  # of the list of picks
    attend_warps: int
    columns: int  # of the head dimension, for one program of the merge


@functools.lru_cache(maxsize=1024)
def plan_for(
    rows: int, size: int, top_k: int, width: int, itemsize: int, multiprocessors: int
) -> Plan:
    """The plan of a shape: `rows` (sequence, KV head) pairs with caches of `size` tokens."""
    blocks = max(1, size // encode.BLOCK)
    parts = max(1, min(2 * multiprocessors // rows, blocks // 2))
    steps = pick.capacity_for(top_k) // attend.TILE
    pieces = max(1, min(steps, 8 * multiprocessors // rows))
    wide = width * itemsize > 256
    return Plan(parts, scan.Plan(256, 4, 3), -(-steps // -(-steps // pieces)), 8 if wide else 4, 32)


def launch_sketch_decode(
    q,
    k,
    v,
    encoder,
    queries,
    v_mean,
    fine,
    coarse,
    odd,
    progress,
    scale,
    top_k,
    tail,
    lengths,
    start,
    key_mask,
    softcap,
    sinks,
    out,
    lse,
    plan=None,
):
    """Run the kernels; tensors as in `sketch_decode`, on a GPU or in Triton's interpreter."""
    if plan is None:
        plan = plan_for(
            k.shape[0] * k.shape[1],
            k.shape[2],
            top_k,
            k.shape[3],
            k.element_size(),
            machine(q.device)[0],
        )
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    codes, rows = (fine, coarse, odd, progress), (lengths, start)
    asked = (q, k, v, queries, scale, *rows, key_mask, softcap)
    projected, *fixed = prepare._allocate(*asked)
    asked_scan = (projected, fixed[1], *codes, top_k, plan.parts, *rows, key_mask, softcap)
    scanned = shares, counts, total, sums, norm, middle = scan._allocate(*asked_scan)
    prepare.launch_prepare_query(
        *asked, projected, *fixed, total=total, encoder=encoder, codes=codes
    )
    scan.launch_scan_sketch(*asked_scan, *scanned, plan=plan.scan, chained=True)
    asked_picks = (shares, counts, total, middle, top_k, *rows)
    picks, cut = pick._allocate(*asked_picks)
    pick.launch_pick_tokens(*asked_picks, picks, cut)
    asked_attend = (q, k, v, projected, fine, coarse, picks, cut, norm, scale, plan.pieces, softcap)
    picked = attend._allocate(*asked_attend)
    attend.launch_attend_picks(*asked_attend, *picked, warps=plan.attend_warps)
    merge.launch_merge_sketch(
        q,
        projected,
        *fixed,
        *picked,
        sums,
        norm,
        cut,
        v_mean,
        tail,
        softcap,
        sinks,
        out,
        lse,
        note=(progress, lengths, start, k.shape[2]),
        columns=plan.columns,
    )


_sketch_decode = define_op(
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor encoder, Tensor queries, Tensor v_mean, "
    "Tensor(a!) fine, Tensor(b!) coarse, Tensor(c!) odd, Tensor(d!) progress, float scale, "
    "int top_k, str tail, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap, "
    "Tensor? sinks) -> (Tensor, Tensor)",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_sketch_decode,
)
