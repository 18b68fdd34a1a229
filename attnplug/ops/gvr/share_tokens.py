"""The share of every cached token in a decode step, summed over a group, read from INT8 keys.

    share[b, h, n] = log2 sum over the group's heads g of  exp(s[g, n] - N[g])
    N[g]           = log sum of exp(s[g, m]) over the tokens m of the sink and of the window
    s[g, n]        = scale q[b, g] . codes[b, h, n]  steps[b, h, n]     (softcap: cap tanh(s / cap))

`topk` ranks tokens by it, as by `score_tokens`, whose largest q . k lets the heads with the longest
queries decide for the group. N stands for a head's log-sum-exp over all tokens, which is not known
before they are scored: the sink and the window hold most of a head's attention, or as much of it as
of another head's. A head that sees none of these tokens has N = 0.
Sources: `score_tokens`; shares of a group as in docs/log/sketch.md.
"""

import numpy as np
import torch

from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import card
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pages import capacity, table_at
from attnplug.ops.common.rows import mask_bytes, row_span, row_step
from attnplug.ops.common.sizes import next_power_of_two
from attnplug.ops.common.softmax import base_two, online_softmax, softcap
from attnplug.ops.common.triton import gdc_launch_dependents, gdc_wait, tl, triton
from attnplug.ops.gvr.kernels.score import token_products
from attnplug.ops.gvr.score_tokens import (
    REFERENCE_TILE,
    Shares,
    allocate_scores,
    arrays_on_cpu,
    key_products,
    launch_score_tokens,
)

NAME = "share_tokens"


def share_tokens(
    q: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    *,
    scale: float,
    sink: int = 0,
    window: int = 1,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shares of the cached tokens for one decode step.

    Args:
        q: `[B,Hq,1,D]`, float32, float16 or bfloat16.
        codes: int8 `[B,Hkv,S,D]`, Hkv dividing Hq; see `quantize_keys`. With a table pages
            `[pages,Hkv,page,D]`, and S is `P * page`.
        steps: float32 `[B,Hkv,S]`, each key's quantization scale. With a table
            `[pages,Hkv,page]`.
        scale: factor on q.k, commonly `D ** -0.5`.
        sink: the first so many real tokens of each row get -inf, and count for N.
        window: so do the last so many tokens, the query's own included.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens. None: all S. Others are not read.
        start: int32 or int64 `[1]` or `[B]`, first real token of a left-padded row. None: 0.
        key_mask: bool `[B,S]`, False where a token must not be seen.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        table: int32 `[B,P]`, the pages of each row, as in `score_tokens`.

    Returns:
        shares `[B * Hkv, S]` float32, to the base 2. With a table what lies past a row's length is
        unspecified. What is not a number, of a bad key or query, is +inf.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: q requires grad.
    """
    refuse_gradients(NAME, q)
    options = scale, sink, window, lengths, start, key_mask, softcap
    if table is not None:
        return _share_tokens_paged(q, codes, steps, table, *options)
    return _share_tokens(q, codes, steps, *options)


def _allocate(q, codes, steps, scale, sink, window, lengths, start, key_mask, softcap, table=None):
    require(softcap >= 0, NAME, f"softcap is {softcap}, needs 0 (off) or a positive cap")
    return allocate_scores(NAME, q, codes, steps, sink, window, lengths, start, key_mask, table)


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _near_tokens(start, length, sink, window, mask):
    """The tokens of a row's sink and window; an empty `mask` hides nothing."""
    first = max(start + sink, length - window)
    sinks = np.arange(start, min(start + sink, length))
    near = np.concatenate((sinks, np.arange(first, max(first, length))))
    return near if mask.shape[0] == 0 else near[mask[near]]


@njit()
def _normalizer(logits):
    """log sum exp of a head's logits `[N]`; 0 where there are none."""
    if len(logits) == 0:
        return 0.0
    top, total = logits.max(), 0.0
    for logit in logits:
        total += np.exp(logit - top)
    return top + np.log(total)


@njit()
def _share(logits, norms):
    """log2 sum exp of a token's `logits - norms`, a group's `[G]`."""
    top, total = -np.inf, 0.0
    for g in range(len(norms)):
        y = logits[g] - norms[g]
        top = max(top, np.inf if np.isnan(y) else y)
    if not np.isfinite(top):
        return top
    for g in range(len(norms)):
        total += np.exp(logits[g] - norms[g] - top)
    return (top + np.log(total)) / np.log(2.0)


@njit()
def _logits(q, codes, scales, pages, tokens, scale, softcap):
    """float64 `[G, N]` of the `tokens` of a row, as in `key_products`."""
    logits = scale * key_products(q, codes, scales, pages, tokens).astype(np.float64)
    return logits if softcap == 0 else softcap * np.tanh(logits / softcap)


@njit(parallel=True)
def _reference(q, codes, scales, table, lengths, start, mask, sink, window, scale, softcap, shares):
    """Every row and KV head in parallel; `shares [B, Hkv, S]` come as -inf."""
    batch, heads = shares.shape[:2]
    group = q.shape[1] // heads
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        query, hidden = q[b, h * group : (h + 1) * group], mask[b * len(mask) // batch]
        keys = codes[:, h], scales[:, h], table[b]
        near = _near_tokens(start[b], lengths[b], sink, window, hidden)
        logits = _logits(query, *keys, near, scale, softcap)
        norms = np.array([_normalizer(logits[g]) for g in range(group)])
        end = lengths[b] - window
        for first in range(start[b] + sink, end, REFERENCE_TILE):
            tokens = np.arange(first, min(first + REFERENCE_TILE, end))
            logits = _logits(query, *keys, tokens, scale, softcap)
            for i in range(len(tokens)):
                if hidden.shape[0] == 0 or hidden[tokens[i]]:
                    shares[b, h, tokens[i]] = _share(logits[:, i], norms)


def _cpu(
    q, codes, steps, scale, sink, window, lengths, start, key_mask, softcap, shares, table=None
):
    shares.fill_(-torch.inf)
    arrays = arrays_on_cpu(q, codes, steps, lengths, start, key_mask, table)
    by_head = shares.view(len(q), codes.shape[1], -1).numpy()
    _reference(*arrays, sink, window, scale, softcap, by_head)


# --- CUDA: the normalizers, then the scores --------------------------------------------------


@triton.jit
def _normalize(
    q,
    codes,
    scales,
    lengths,
    start,
    key_mask,
    table,
    norms,
    factor,
    cap,
    S,
    q_strides,
    codes_strides,
    scales_strides,
    mask_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LENGTH_STEP: tl.constexpr,
    START_STEP: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """log2 of the normalizers N of one row and KV head."""
    q_b, q_h = q_strides
    codes_b, codes_h, _codes_s = codes_strides  # not _, which the loop below binds to a tensor
    scales_b, scales_h, _scales_s = scales_strides
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length, low = row_span(lengths, start, b, S, LENGTH_STEP, START_STEP)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    in_width = d < D
    q_at = q + b * q_b + (h * GROUP + g).to(tl.int64)[:, None] * q_h + d[None, :]
    query = tl.load(q_at, mask=(g < GROUP)[:, None] & in_width[None, :], other=0.0)
    codes_at = codes + h.to(tl.int64) * codes_h + d[None, :]
    scales_at = scales + h.to(tl.int64) * scales_h
    row_table = None
    if table is None:
        codes_at += b * codes_b
        scales_at += b * scales_b
    else:
        row_table = table + b * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, SINK + WINDOW, TILE):
        # Slots are the sink, then the window. Where they overlap no token is scored: N is not read.
        slot = first + tl.arange(0, TILE)
        at = tl.where(slot < SINK, low + slot, length - WINDOW + slot - SINK)
        seen = (at >= low) & (at < length) & (slot < SINK + WINDOW)
        if key_mask is not None:
            seen = seen & (tl.load(key_mask + b * mask_stride + at, mask=seen, other=0) != 0)
        s = factor * token_products(
            at=at,
            seen=seen,
            query=query,
            codes_at=codes_at,
            scales_at=scales_at,
            row_table=row_table,
            codes_strides=codes_strides,
            scales_strides=scales_strides,
            in_width=in_width,
            PAGE=PAGE,
        )
        if cap is not None:
            s = softcap(s, cap)
        s = tl.where(seen[None, :], s, float("-inf"))
        _, _, top, total = online_softmax(s, top, total)
    empty = total == 0
    norm = tl.where(empty, 0.0, top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(norms + (b * tl.num_programs(0) + h) * GROUP + g, norm, mask=g < GROUP)


def launch_share_tokens(
    q,
    codes,
    steps,
    scale,
    sink,
    window,
    lengths,
    start,
    key_mask,
    softcap,
    shares,
    plan=None,
    table=None,
):
    """Run the kernels; tensors as in `share_tokens`, on a GPU or in Triton's interpreter."""
    q, codes = (x if x.stride(3) == 1 else x.contiguous() for x in (q, codes))
    kept = sink, window, lengths, start, key_mask
    shares_of = _launch_normalizers(q, codes, steps, scale, *kept, softcap, table)
    launch_score_tokens(q, codes, steps, *kept, shares, plan, table, shares_of)


def _tile(row_bytes, tokens):
    """Tokens that `_normalize` reads at once: a widened key has `row_bytes`, and more spill."""
    most = 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 16
    return max(16, min(most, next_power_of_two(tokens)))


def _launch_normalizers(
    q, codes, steps, scale, sink, window, lengths, start, key_mask, softcap, table
) -> Shares:
    """What the kernels that score need to know for shares; q and codes have a stride of 1 in D."""
    (batch, _, _, width), heads = q.shape, codes.shape[1]
    group, padded = q.shape[1] // heads, next_power_of_two(width)
    norms = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    factor, cap = base_two(scale, softcap)
    of_shares = Shares(norms, factor, cap if softcap > 0 else None)
    key_mask = mask_bytes(key_mask)
    pdl = card(q.device).pdl
    _normalize.run(
        grid=(heads, batch),
        warmup=False,
        q=q,
        codes=codes,
        scales=steps,
        lengths=lengths,
        start=start,
        key_mask=key_mask,
        table=table,
        norms=norms,
        factor=factor,
        cap=of_shares.cap,
        S=capacity(codes, table),
        q_strides=q.stride()[:2],
        codes_strides=codes.stride()[:3],
        scales_strides=steps.stride(),
        mask_stride=0 if key_mask is None else key_mask.stride(0),
        table_stride=None if table is None else table.stride(0),
        GROUP=group,
        ROWS=max(16, next_power_of_two(group)),
        D=width,
        DP=padded,
        SINK=sink,
        WINDOW=window,
        TILE=_tile(padded * q.element_size(), sink + window),
        LENGTH_STEP=row_step(lengths),
        START_STEP=row_step(start),
        PAGE=0 if table is None else codes.shape[2],
        PDL=pdl,
        num_warps=8,
        **({"launch_pdl": True} if pdl else {}),
    )
    return of_shares


_share_tokens = define_op(
    f"{NAME}(Tensor q, Tensor codes, Tensor steps, float scale, int sink, int window, "
    "Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_share_tokens,
)

_share_tokens_paged = define_op(
    f"{NAME}_paged(Tensor q, Tensor codes, Tensor steps, Tensor table, float scale, int sink, "
    "int window, Tensor? lengths, Tensor? start, Tensor? key_mask, float softcap) -> Tensor",
    allocate=table_at(3, _allocate),
    cpu=table_at(3, _cpu),
    cuda=table_at(3, launch_share_tokens),
)
