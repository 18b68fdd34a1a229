"""The tokens that a lightning indexer picks for every query: its scores, and their exact top-k.

    score[b, s, t] = sum over h of weights[b, s, h] relu(scale q[b, s, h] . keys[b, t])
    picks[b, s] = the k tokens t that query s sees and that come first by
                  (score[b, s, t] descending, t ascending)

Many scores are exactly 0, where no head's product is positive, and the rule for equal scores holds
at the k-th as everywhere: the earlier token is picked. Scores are float32 sums, whose last bits
depend on the device. A NaN counts as +inf, so that the token is picked and the NaN surfaces in
attention; -inf counts as the lowest finite number, for -inf is the score of what is not seen.

The scores of all queries are never stored. Those of a slab of queries are, in at most `WORKSPACE`
bytes; then the kernels of `topk` select from its rows, and the next slab takes its place.
Keys may be float8_e4m3fn with a factor each, as DeepSeek's own code keeps them: keys[b, t] is then
what is stored times key_scale[b, t]. Queries stay as they are.
Source: the lightning indexer of DeepSeek-V3.2 (2025), without the Hadamard transform in front of
its FP8, which changes no product; the top-k as in topk.py.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import (
    DTYPES,
    FP8,
    check_card_converts,
    check_shared_cache_inputs,
    why_not_width,
)
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import Card, card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pipeline import BESIDE
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import arrays
from attnplug.ops.common.rows import mask_bytes, rows_as_given
from attnplug.ops.common.sizes import cdiv, next_power_of_two, padded_width
from attnplug.ops.common.views import rows_of, steps_of
from attnplug.ops.gvr import topk as ranking
from attnplug.ops.gvr.kernels.score_index import pack_picks, score_index

NAME = "index_topk"
WORKSPACE = 64 << 20  # bytes of scores that exist at a time
LOWEST = float(np.finfo(np.float32).min)


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    k: int,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The k tokens that an indexer scores highest, for each of the last S tokens.

    Args:
        q: `[B,S,H,D]`, float32, float16 or bfloat16, any strides; D a multiple of 16 up to 256.
        weights: `[B,S,H]` float32, each head's weight, of either sign.
        keys: `[B,T,D]` like q or float8_e4m3fn, T up to 4,194,304, any strides of rows and tokens.
            T is the size of the cache.
        k: 1 to 4096, also above T.
        scale: factor on q . keys, commonly `D ** -0.5`.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens, the S queries being the last of them.
            None: all T. Query s sees the tokens up to `lengths - S + s`, its own. Slots from
            `lengths` on are not read.
        key_mask: bool `[B,T]`, False where a token must not be seen.
        seen: int32 or int64 `[B,S]`, how many leading tokens each query sees, in the place of
            lengths and key_mask: for keys that are not one a query.
        key_scale: float32 `[B,T]`, any strides, what float8_e4m3fn keys are multiplied by, none
            below 0; None for other keys.

    Returns:
        picks int32 `[B,S,min(k,T)]`: each query's tokens, none twice, and -1 at the end where it
        sees fewer. Their order is unspecified, but the same in every run with the same arguments
        on the same device; where T is at most k, and on a CPU, they ascend.

    Raises:
        ArgumentError: a shape, stride, dtype, device or k does not fit.
        CardError: the GPU does not convert float8_e4m3fn.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q, weights, keys)
    return _index_topk(q, weights, keys, k, scale, lengths, key_mask, seen, key_scale)


def _allocate(q, weights, keys, k, scale, lengths, key_mask, seen=None, key_scale=None):
    require(q.dim() == 4, NAME, f"q has {q.dim()} dimensions, needs [B,S,H,D]")
    require(q.dtype in DTYPES, NAME, f"q is {q.dtype}, needs float32, float16 or bfloat16")
    batch, queries, heads, width = q.shape
    unserved = why_not_width(width)
    require(not unserved, NAME, unserved)
    require(heads >= 1, NAME, "q has no heads")
    if weights.dtype != torch.float32 or tuple(weights.shape) != (batch, queries, heads):
        raise ArgumentError(
            f"{NAME}: weights is {weights.dtype} {tuple(weights.shape)}, needs float32 [B,S,H] = "
            f"[{batch}, {queries}, {heads}]"
        )
    fits = keys.dim() == 3 and keys.shape[0] == batch and keys.shape[2] == width
    if not fits or keys.dtype not in (q.dtype, FP8):
        raise ArgumentError(
            f"{NAME}: keys is {keys.dtype} {tuple(keys.shape)}, needs {q.dtype} [B,T,D] = "
            f"[{batch}, T, {width}]"
        )
    require(keys.stride(2) == 1, NAME, f"keys has stride {keys.stride(2)} in D, needs 1")
    size = keys.shape[1]
    fits = queries <= size or seen is not None
    require(fits, NAME, f"q has {queries} queries, more than keys' {size} tokens")
    most = ranking.MAX_SCORES
    require(size <= most, NAME, f"keys has {size} tokens a row, at most {most} are allowed")
    require(1 <= k <= ranking.MAX_K, NAME, f"k is {k}, needs 1 to {ranking.MAX_K}")
    for label, tensor in (("weights", weights), ("keys", keys)):
        require(tensor.device == q.device, NAME, f"{label} is on {tensor.device}, q on {q.device}")
    check_shared_cache_inputs(NAME, "keys", keys, lengths, key_mask)
    _check_key_scale(keys, key_scale)
    if seen is not None:
        _check_seen(q, seen, lengths is None and key_mask is None)
    return q.new_empty((batch, queries, min(k, size)), dtype=torch.int32)


def _check_key_scale(keys, key_scale):
    stored = keys.dtype == FP8
    if key_scale is None:
        require(not stored, NAME, f"keys is {FP8}, which needs a key_scale")
        return
    require(stored, NAME, f"key_scale is for {FP8} keys, keys is {keys.dtype}")
    check_card_converts(NAME, "keys", keys)
    shape = tuple(keys.shape[:2])
    if key_scale.dtype != torch.float32 or tuple(key_scale.shape) != shape:
        raise ArgumentError(
            f"{NAME}: key_scale is {key_scale.dtype} {tuple(key_scale.shape)}, needs float32 [B,T] "
            f"= {list(shape)}"
        )
    here = key_scale.device == keys.device
    require(here, NAME, f"key_scale is on {key_scale.device}, keys on {keys.device}")


def _check_seen(q, seen, alone):
    require(alone, NAME, "seen stands in the place of lengths and key_mask")
    fits = seen.dtype in (torch.int32, torch.int64)
    if not fits or tuple(seen.shape) != tuple(q.shape[:2]):
        raise ArgumentError(
            f"{NAME}: seen is {seen.dtype} {tuple(seen.shape)}, needs int32 or int64 [B,S] = "
            f"{list(q.shape[:2])}"
        )
    require(seen.device == q.device, NAME, f"seen is on {seen.device}, q on {q.device}")


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _score_tokens(query, weights, keys, count, scores):
    """The scores of the first `count` tokens: query `[H, D]`, scaled, keys `[D, T]`."""
    tile = 512
    for first in range(0, count, tile):
        size = min(tile, count - first)
        products = np.zeros((query.shape[0], size), np.float32)
        add_product(query, np.ascontiguousarray(keys[:, first : first + size]), products)
        for i in range(size):
            x = np.float32(0.0)
            for h in range(query.shape[0]):
                # Not max: a NaN is neither above 0 nor below it.
                relu = np.float32(0.0) if products[h, i] < 0 else products[h, i]
                x += weights[h] * relu
            if np.isnan(x):
                x = np.float32(np.inf)
            scores[first + i] = max(x, np.float32(LOWEST))


@njit()
def _pick_best(scores, seen, picks):
    """The best of the tokens `seen`, ascending, and -1 behind them."""
    picks[:] = -1
    k = picks.shape[0]
    if seen.shape[0] <= k:
        picks[: seen.shape[0]] = seen
        return
    among = -scores[seen]
    least = -np.partition(among, k - 1)[k - 1]
    ties = k - np.sum(scores[seen] > least)
    count = 0
    for t in seen:
        if scores[t] > least or (scores[t] == least and ties > 0):
            ties -= scores[t] == least
            picks[count] = t
            count += 1


@njit(parallel=True)
def _reference(q, weights, keys, seen, mask, scale, picks):
    """Every (row, query) in parallel; keys are `[B, D, T]`, and `seen` `[B, S]` counts leading
    tokens."""
    batch, queries = q.shape[:2]
    for item in prange(batch * queries):
        b, s = item // queries, item % queries
        count = seen[b, s]
        shown = mask[b * len(mask) // batch]
        tokens = np.arange(count)
        if shown.shape[0] > 0:
            tokens = np.flatnonzero(shown[:count])
        scores = np.empty(count, np.float32)
        if tokens.shape[0] > picks.shape[2]:
            _score_tokens(q[b, s] * scale, weights[b, s], keys[b], count, scores)
        _pick_best(scores, tokens, picks[b, s])


def _cpu(q, weights, keys, k, scale, lengths, key_mask, seen, key_scale, picks):
    batch, size, _ = keys.shape
    if key_scale is not None:
        keys = keys.float() * key_scale[..., None]
    if seen is None:
        lengths, _ = rows_as_given(batch, size, lengths, None)
        behind = torch.arange(1 - q.shape[1], 1, device="cpu")
        seen = lengths.clamp(0, size)[:, None] + behind
    _reference(
        *arrays(q.contiguous(), weights.contiguous(), keys.transpose(1, 2).contiguous()),
        *arrays(seen.long().clamp(0, size).contiguous(), key_mask, scale, picks),
    )


# --- CUDA ------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How the scoring kernel cuts the work; chosen from static shapes alone."""

    tile: int  # tokens that are scored at a time
    queries: int  # of one program
    programs: int  # that share the tokens of those queries
    warps: int
    stages: int
    heads: int  # multiplied at a time, padded


class Slab(NamedTuple):
    """What is scored and ranked at a time: all queries of some rows, or some queries of one."""

    rows: int
    queries: int


def slab_for(batch: int, queries: int, size: int, workspace: int) -> Slab:
    """The largest slab whose float32 scores take at most `workspace` bytes, or of one query."""
    most = max(1, workspace // (4 * max(1, size)))  # queries
    if most >= queries:
        return Slab(max(1, min(batch, most // max(1, queries))), queries)
    return Slab(1, most)


def shared_bytes(plan: Plan, heads: int, width: int, itemsize: int, wgmma: bool) -> int:
    """Bytes of shared memory of a program at most: its queries, tiles of keys, and sums over heads.
    Cards that multiply by warp groups keep the tiles of a turn more, and so do float32 products,
    which also keep their queries twice. Where heads come in blocks, a second is beside the first.
    """
    columns = plan.queries * plan.heads * (2 if itemsize == 4 else 1)
    if heads > plan.heads:
        columns *= 2
    turns = plan.stages if wgmma or itemsize == 4 else max(1, plan.stages - 1)
    sums = 4 * plan.tile * plan.queries
    return (columns + turns * plan.tile) * padded_width(width) * itemsize + sums + BESIDE


@functools.lru_cache(maxsize=1024)
def plan_for(slab: Slab, heads: int, size: int, width: int, itemsize: int, on: Card) -> Plan:
    """The plan of a shape, with smaller tiles where the card's shared memory is not enough."""
    block = max(16, min(128 if itemsize == 2 else 64, next_power_of_two(heads)))
    if slab.queries == 1:  # memory decides: key tiles in flight
        plan = Plan(128, 1, 1, 4, 4, block)
    else:
        most = (256 if itemsize == 2 else 64) // block  # neighbours that share a tile of keys
        together = max(1, min(most, 16, next_power_of_two(slab.queries)))
        plan = Plan(128, together, 1, 8, 3, block)
    if itemsize == 4:
        plan = plan._replace(tile=64, stages=2)
    if heads > block:  # a pipeline would keep the queries of all blocks and turns
        plan = plan._replace(stages=1)
    while shared_bytes(plan, heads, width, itemsize, on.wgmma) > on.shared:
        if plan.stages > 2:
            plan = plan._replace(stages=plan.stages - 1)
        elif plan.queries > 1 and plan.queries * plan.heads > 64:
            plan = plan._replace(queries=plan.queries // 2)
        elif plan.tile > 16:
            plan = plan._replace(tile=plan.tile // 2)
        elif plan.heads > 16:
            plan = plan._replace(heads=plan.heads // 2, stages=1)
        elif plan.queries > 1:
            plan = plan._replace(queries=plan.queries // 2)
        elif plan.stages > 1:
            plan = plan._replace(stages=1)
        else:
            break
    blocks = slab.rows * cdiv(slab.queries, plan.queries)
    wanted = (2 if slab.queries == 1 else 4) * on.processors // blocks
    return plan._replace(programs=max(1, min(cdiv(size, plan.tile), wanted)))


def launch_index_topk(
    q,
    weights,
    keys,
    k,
    scale,
    lengths,
    key_mask,
    seen,
    key_scale,
    picks,
    plan=None,
    workspace=WORKSPACE,
):
    """Run the kernels; tensors as in `index_topk`, on a GPU or in Triton's interpreter."""
    batch, queries, heads, width = q.shape
    size = keys.shape[1]
    if picks.numel() == 0:
        return
    q = q if q.stride(3) == 1 else q.contiguous()
    key_mask = mask_bytes(key_mask)
    seen = None if seen is None else seen.long().clamp(0, size).contiguous()
    if k >= size:
        _launch_pack(None, None, lengths, key_mask, picks, queries, size, seen)
        return
    slab = slab_for(batch, queries, size, workspace)
    if plan is None:
        plan = plan_for(slab, heads, size, width, q.element_size(), card(q.device))
    ends = tokens_seen(lengths, batch, queries, size, q.device) if seen is None else seen
    scores = torch.empty((slab.rows * slab.queries, size), dtype=torch.float32, device=q.device)
    for b in range(0, batch, slab.rows):
        rows = slice(b, min(batch, b + slab.rows))
        inputs = q[rows], weights[rows], keys[rows], _of_rows(lengths, rows)
        mask = None if key_mask is None else key_mask[rows]
        for first in range(0, queries, slab.queries):
            some = slice(first, min(queries, first + slab.queries))
            here = scores[: (rows.stop - b) * (some.stop - first)]
            each = (None if x is None else x[rows] for x in (seen, key_scale))
            _launch_scores(*inputs, mask, scale, first, here, plan, *each)
            own = ends
            if ends is not None and ends.dim() == 2:
                own = ends[rows, some].reshape(-1)
            _launch_topk(here, k, own, mask is not None, picks[rows, some].view(-1, k))


def _of_rows(tensor, rows):
    """The entries of `rows` in `[1 or B]`."""
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[rows]


def tokens_seen(lengths, batch, queries, size, device):
    """How many leading tokens each query sees: int64 `[B,S]`; `[1]` as `topk` takes it, or None."""
    if queries == 1 and (lengths is None or batch == 1 or lengths.shape[0] == 1):
        return lengths
    behind = torch.arange(1 - queries, 1, dtype=torch.int64, device=device)
    last = size if lengths is None else lengths.clamp(0, size)[:, None]
    return (behind[None, :] + last).expand(batch, queries)


def _launch_scores(
    q, weights, keys, lengths, key_mask, scale, first, scores, plan, seen, key_scale
):
    """Score the slab of queries that begins at query `first`."""
    batch, queries, heads, width = q.shape
    here = len(scores) // batch
    pdl, dependent = early(q.device)
    launch_kernel(
        score_index,
        grid=(plan.programs, cdiv(here, plan.queries), batch),
        q=q,
        weights=weights,
        keys=keys,
        key_scale=key_scale,
        tokens=rows_of(keys.shape[1], lengths, None, key_mask),
        seen=seen,
        scores=scores,
        scale=scale,
        first=first,
        queries=here,
        S=queries,
        programs=plan.programs,
        q_strides=q.stride()[:3],
        weights_strides=weights.stride(),
        keys_strides=keys.stride()[:2],
        key_scale_strides=None if key_scale is None else key_scale.stride(),
        H=heads,
        HEADS=plan.heads,
        QUERIES=plan.queries,
        D=width,
        DP=padded_width(width),
        TILE=plan.tile,
        STAGES=plan.stages,
        STEPS=steps_of(lengths),
        PRECISION=card(q.device).precision,
        PDL=pdl,
        **{"num_warps": plan.warps, **dependent},
    )


def _launch_topk(scores, k, seen, masked, picks):
    """Rank a slab's scores; what is masked is among them, at -inf."""
    values = scores.new_empty((len(scores), k))
    how = scores.new_empty((len(scores), 3), dtype=torch.int32)
    if not masked:
        ranking.launch_topk(scores, k, None, seen, False, picks, values, how)
        return
    indices = torch.empty_like(picks)
    ranking.launch_topk(scores, k, None, seen, False, indices, values, how)
    _launch_pack(indices, values, None, None, picks, 1, scores.shape[1], None)


def _launch_pack(indices, values, lengths, key_mask, picks, queries, size, seen):
    pdl, dependent = early(picks.device)
    k = picks.shape[-1]
    padded = max(2, next_power_of_two(k))
    launch_kernel(
        pack_picks,
        grid=(picks.numel() // k,),
        indices=indices,
        values=values,
        tokens=rows_of(size, lengths, None, key_mask),
        seen=seen,
        picks=picks,
        S=queries,
        K=k,
        KP=padded,
        STEPS=steps_of(lengths),
        PDL=pdl,
        **{"num_warps": min(8, max(1, padded // 256)), **dependent},
    )


_index_topk = define_op(
    f"{NAME}(Tensor q, Tensor weights, Tensor keys, int k, float scale, Tensor? lengths, "
    "Tensor? key_mask, Tensor? seen, "
    "Tensor? key_scale) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_index_topk,
)
