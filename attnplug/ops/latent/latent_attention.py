"""Attention over the compressed cache of multi-head latent attention (MLA): one key and value head,
shared by all query heads, over all tokens or over those that each query picks.

    score[b, s, h, t] = scale (q_latent[b, s, h] . latents[b, t] + q_rope[b, s, h] . rope[b, t])
    out[b, s, h] = sum over t of p[t] latents[b, t],   p = softmax over t of score[b, s, h]

where t runs over the tokens that query s sees, or over those among `picks[b, s]`. The part of a
head's projections that expands latents into its keys and values is folded into `q_latent`, and is
applied to `out`: heads read the cache as it is stored, once for all of them.

One program attends ROWS heads of a query to its picks; on a Hopper card that is a kernel of its own
(kernels/hopper.py) for the widths that models have. Without picks its rows are query-head pairs
of neighbouring queries, over all that the last of these sees. Where there are too few such programs
for a card, the tokens are cut in pieces that a second kernel merges (split-k).
Sources: DeepSeek-V2 (2024) for MLA, DeepSeek-V3.2 (2025) for its sparse attention; Flash-Decoding
as in `dense_decode`.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.common.checks import DTYPES, check_shared_cache_inputs, check_sinks
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.device import Card, card, early
from attnplug.ops.common.launches import launch_kernel
from attnplug.ops.common.numba_cache import njit, prange
from attnplug.ops.common.pipeline import BESIDE
from attnplug.ops.common.product import add_product
from attnplug.ops.common.reference import add_tile
from attnplug.ops.common.rows import NO_MASK, mask_bytes, row_step, rows_as_given
from attnplug.ops.common.sizes import cdiv, next_power_of_two
from attnplug.ops.common.softmax import LOG2E
from attnplug.ops.common.splits import launch_merge, pieces_of
from attnplug.ops.common.views import Output, rows_of, steps_of
from attnplug.ops.latent.kernels import hopper
from attnplug.ops.latent.kernels.attend import attend_latents

NAME = "latent_attention"
WIDEST_LATENT, WIDEST_ROPE = 512, 64
FEW = 4096  # query-head pairs, for which the merge cuts columns, too


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latents: torch.Tensor,
    rope: torch.Tensor,
    picks: torch.Tensor | None = None,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax attention of the last S tokens over latents, all or those picked.

    Args:
        q_latent: `[B,S,H,R]`, float32, float16 or bfloat16, any strides; R up to 512.
        q_rope: `[B,S,H,P]` like q_latent; P from 0, where nothing is rotated, up to 64.
        latents: `[B,T,R]` like q_latent, any strides of rows and tokens. T is the size of the
            cache.
        rope: `[B,T,P]` like q_latent, any strides of rows and tokens.
        picks: int32 `[B,S,K]`, each query's tokens, none twice, such as `index_topk` picks. -1 is
            skipped, and so is a token that the query does not see. None: all that it sees.
        scale: factor on the scores.
        sinks: `[H]`, one more logit for each head, without a value.
        lengths: int32 or int64 `[1]` or `[B]`, valid tokens, the S queries being the last of them.
            None: all T. Query s sees the tokens up to `lengths - S + s`, its own. Slots from
            `lengths` on are not read.
        key_mask: bool `[B,T]`, False where a token must not be seen.

    Returns:
        out `[B,S,H,R]` of q_latent's dtype, summed in float32. A query that sees no token gives 0.

    Raises:
        ArgumentError: a shape, stride, dtype or device does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients(NAME, q_latent, q_rope, latents, rope, sinks)
    return _latent_attention(
        q_latent, q_rope, latents, rope, picks, scale, sinks, lengths, key_mask
    )


def _allocate(q_latent, q_rope, latents, rope, picks, scale, sinks, lengths, key_mask):
    require(q_latent.dim() == 4, NAME, f"q_latent has {q_latent.dim()} dimensions, needs [B,S,H,R]")
    dtype, known = q_latent.dtype, q_latent.dtype in DTYPES
    require(known, NAME, f"q_latent is {dtype}, needs float32, float16 or bfloat16")
    batch, queries, heads, width = q_latent.shape
    least = 1 <= width <= WIDEST_LATENT
    require(least, NAME, f"q_latent has {width} channels, needs 1 to {WIDEST_LATENT}")
    require(heads >= 1, NAME, "q_latent has no heads")
    turned = q_rope.shape[-1] if q_rope.dim() == 4 else 0
    _check_like(q_latent, "q_rope", q_rope, "[B,S,H,P]", (batch, queries, heads, turned))
    require(turned <= WIDEST_ROPE, NAME, f"q_rope has {turned} channels, needs 0 to {WIDEST_ROPE}")
    size = latents.shape[1] if latents.dim() == 3 else 0
    _check_like(q_latent, "latents", latents, "[B,T,R]", (batch, size, width))
    _check_like(q_latent, "rope", rope, "[B,T,P]", (batch, size, turned))
    for label, tensor in (("latents", latents), ("rope", rope)):
        whole = tensor.stride(2) == 1 or tensor.shape[2] <= 1
        require(whole, NAME, f"{label} has stride {tensor.stride(2)} in its channels, needs 1")
    fits = queries <= size
    require(fits, NAME, f"q_latent has {queries} queries, more than latents' {size} tokens")
    if picks is not None:
        if picks.dtype != torch.int32 or picks.dim() != 3 or picks.shape[:2] != q_latent.shape[:2]:
            raise ArgumentError(
                f"{NAME}: picks is {picks.dtype} {tuple(picks.shape)}, needs int32 [B,S,K] = "
                f"[{batch}, {queries}, K]"
            )
        here = picks.device == q_latent.device
        require(here, NAME, f"picks is on {picks.device}, q_latent on {q_latent.device}")
    if sinks is not None:
        check_sinks(NAME, q_latent.transpose(1, 2), sinks)
    check_shared_cache_inputs(NAME, "latents", latents, lengths, key_mask)
    return q_latent.new_empty((batch, queries, heads, width))


def _check_like(model, label, tensor, names, shape):
    if tuple(tensor.shape) != shape or tensor.dtype != model.dtype:
        raise ArgumentError(
            f"{NAME}: {label} is {tensor.dtype} {tuple(tensor.shape)}, needs {model.dtype} "
            f"{names} for q_latent {tuple(model.shape)}"
        )
    here = tensor.device == model.device
    require(here, NAME, f"{label} is on {tensor.device}, q_latent on {model.device}")


# --- CPU: the specification ------------------------------------------------------------------


@njit()
def _attend(query, keys, tokens, sinks, width, out):
    """Online softmax of query `[H, R + P]`, scaled, over keys `[T, R + P]`, whose first `width`
    channels are the values, and over `sinks` `[H]` without a value, -inf for none."""
    heads, tile = query.shape[0], 128
    top = sinks.copy()
    total = np.zeros(heads, np.float32)
    for h in range(heads):
        total[h] = 1.0 if top[h] > -np.inf else 0.0
    acc = np.zeros((heads, width), np.float32)
    for first in range(0, tokens.shape[0], tile):
        chosen = keys[tokens[first : first + tile]]
        s = np.zeros((heads, chosen.shape[0]), np.float32)
        add_product(query, np.ascontiguousarray(chosen.T), s)
        add_tile(s, np.ascontiguousarray(chosen[:, :width]), top, total, acc)
    for h in range(heads):
        for r in range(width):
            out[h, r] = acc[h, r] / total[h] if total[h] != 0 else 0.0


@njit(parallel=True)
def _reference(query, keys, picks, listed, lengths, mask, sinks, width, out):
    """Every (row, query) in parallel: over its picks if these are `listed`, else over all."""
    batch, queries = query.shape[:2]
    for item in prange(batch * queries):
        b, s = item // queries, item % queries
        count = max(lengths[b] - queries + s + 1, 0)
        shown = mask[b * len(mask) // batch]
        tokens = np.arange(count)
        if listed:
            entries = picks[b, s]
            tokens = np.empty(entries.shape[0], np.int64)
            kept = 0
            for t in entries:
                if 0 <= t < count:
                    tokens[kept] = t
                    kept += 1
            tokens = tokens[:kept]
        if shown.shape[0] > 0:
            tokens = tokens[shown[tokens]]
        _attend(query[b, s], keys[b], tokens, sinks, width, out[b, s])


def _cpu(q_latent, q_rope, latents, rope, picks, scale, sinks, lengths, key_mask, out):
    (batch, size, width), heads = latents.shape, q_latent.shape[2]
    lengths, _ = rows_as_given(batch, size, lengths, None)
    lengths = lengths.clamp(0, size).contiguous()
    most = int(lengths.max()) if batch else 0
    result = torch.empty(out.shape, dtype=torch.float32, device="cpu")
    nothing = torch.empty((1, 1, 0), dtype=torch.int32, device="cpu")
    if sinks is None:
        sinks = torch.full((heads,), float("-inf"), dtype=torch.float32, device="cpu")
    _reference(
        (torch.cat((q_latent, q_rope), -1).float() * scale).numpy(),
        torch.cat((latents[:, :most], rope[:, :most]), -1).float().numpy(),
        (nothing if picks is None else picks.contiguous()).numpy(),
        picks is not None,
        lengths.numpy(),
        NO_MASK if key_mask is None else key_mask.contiguous().numpy(),
        sinks.float().contiguous().numpy(),
        width,
        result.numpy(),
    )
    out.copy_(result)


# --- CUDA: attend, then merge where there is more than one piece -----------------------------


class Plan(NamedTuple):
    """How the kernels cut the work; chosen from static shapes alone."""

    rows: int  # query-head pairs of a program
    tile: int  # tokens that it attends to at a time
    splits: int  # pieces that the tokens are cut in; 1: fused
    warps: int
    stages: int
    columns: int  # of the latent, for one program of the merge


def padded_channels(width: int) -> int:
    """Channels of a tile: a power of two, and what a product needs at least."""
    return max(16, next_power_of_two(width))


def shared_bytes(plan: Plan, widths: tuple[int, int], itemsize: int, on: Card) -> int:
    """Bytes of shared memory of a program at most: its queries, tiles of tokens, and the weights of
    a tile. Warp groups, which multiply 64 rows, keep the tiles of a turn more, and so do float32
    products, which also keep their queries twice. Products in tensor memory, of 64 rows too, keep
    two turns more once a loop is a pipeline."""
    row = sum(padded_channels(x) for x in widths) * itemsize
    rows = plan.rows * (2 if itemsize == 4 else 1)
    wide = itemsize == 2 and plan.rows >= 64
    longer = itemsize == 4 or (wide and (on.wgmma or on.tmem))
    turns = plan.stages if longer else max(1, plan.stages - 1)
    if wide and on.tmem and plan.stages > 1:
        turns += 1
    weights = 0 if longer else plan.rows * plan.tile * itemsize  # else in registers
    return (rows + turns * plan.tile) * row + weights + BESIDE


@functools.lru_cache(maxsize=1024)
def plan_for(
    batch: int,
    queries: int,
    heads: int,
    slots: int,
    listed: bool,
    widths: tuple[int, int],
    itemsize: int,
    on: Card,
) -> Plan:
    """The plan of a shape: each query has `slots` picks if `listed`, else tokens of the cache;
    `widths` are those of the latent and the rope. Smaller tiles where the card's shared memory is
    not enough."""
    pairs = heads if listed else queries * heads
    most = 32 if listed and batch * queries * cdiv(heads, 64) < on.processors // 2 else 64
    rows = max(16, min(most, next_power_of_two(pairs)))
    plan = Plan(rows, 64, 1, 8 if rows > 16 else 4, 2, 0)
    if itemsize == 4 and widths[0] > 256:  # the products' operands alone are more than registers
        plan = Plan(16, 16, 1, 8, 1, 0)
    fewest = 4 if itemsize == 4 else 16  # rows; tensor cores, which float32 does not use, have 16
    while shared_bytes(plan, widths, itemsize, on) > on.shared:
        if plan.stages > 2:
            plan = plan._replace(stages=plan.stages - 1)
        elif plan.rows > 32 and not on.tmem:  # which takes 64 rows or none
            plan = plan._replace(rows=plan.rows // 2)
        elif plan.tile > 16:
            plan = plan._replace(tile=plan.tile // 2)
        elif plan.rows > fewest:
            plan = plan._replace(rows=plan.rows // 2)
        elif plan.stages > 1:
            plan = plan._replace(stages=1)
        else:
            break
    blocks = batch * program_blocks(plan, queries, heads, listed)
    splits = max(1, min(cdiv(slots, plan.tile), on.processors // max(1, blocks)))
    few = batch * queries * heads <= FEW
    return plan._replace(splits=splits, columns=32 if few else padded_channels(widths[0]))


def program_blocks(plan: Plan, queries: int, heads: int, listed: bool) -> int:
    """The blocks of query-head pairs of one row of the batch."""
    if listed:
        return queries * cdiv(heads, plan.rows)
    return cdiv(queries * heads, plan.rows)


def launch_latent_attention(
    q_latent, q_rope, latents, rope, picks, scale, sinks, lengths, key_mask, out, plan=None
):
    """Run the kernels; tensors as in `latent_attention`, on a GPU or in Triton's interpreter."""
    batch, queries, heads, width = q_latent.shape
    size, turned = rope.shape[1:]
    if out.numel() == 0:
        return
    found, listed = card(q_latent.device), picks is not None
    slots = picks.shape[2] if listed else size
    tensors = q_latent, q_rope, latents, rope
    if plan is None and listed and hopper.serves(tensors, found):
        launch_on_hopper(tensors, picks, scale, sinks, lengths, key_mask, out)
        return
    if plan is None:
        shape = batch, queries, heads, slots, listed, (width, turned), q_latent.element_size()
        plan = plan_for(*shape, found)
    q_latent, q_rope = (x if x.stride(3) == 1 else x.contiguous() for x in (q_latent, q_rope))
    key_mask = mask_bytes(key_mask)
    merged = out.view(batch * queries, heads, 1, width)  # as other families lay their outputs out
    pieces = None if plan.splits == 1 else pieces_of(merged, plan.splits)
    output = Output(pieces, merged, None, sinks)
    pdl, dependent = early(out.device)
    launch_kernel(
        attend_latents,
        grid=(program_blocks(plan, queries, heads, listed), plan.splits, batch),
        q_latent=q_latent,
        q_rope=q_rope,
        latents=latents,
        rope=rope,
        picks=picks.contiguous() if listed else None,
        tokens=rows_of(size, lengths, None, key_mask),
        output=output,
        scale=scale * LOG2E,
        S=queries,
        K=slots if listed else 0,
        splits=plan.splits,
        q_latent_strides=q_latent.stride()[:3],
        q_rope_strides=q_rope.stride()[:3],
        latents_strides=latents.stride()[:2],
        rope_strides=rope.stride()[:2],
        H=heads,
        ROWS=plan.rows,
        R=width,
        RP=padded_channels(width),
        P=turned,
        PP=padded_channels(turned),
        TILE=plan.tile,
        STAGES=plan.stages,
        STEPS=steps_of(lengths),
        PRECISION=found.precision,
        PDL=pdl,
        **{"num_warps": plan.warps, **dependent},
    )
    if pieces is not None:
        launch_merge(output, plan.splits, plan.columns)


def launch_on_hopper(
    tensors, picks, scale, sinks, lengths, key_mask, out, splits: int | None = None
):
    """Run the Gluon kernel (kernels/hopper.py), and merge its pieces if there are some."""
    q_latent, q_rope, latents, rope = tensors
    batch, queries, heads, width = q_latent.shape
    turned, slots = rope.shape[2] > 0, picks.shape[2]
    if splits is None:
        splits = hopper.splits_of(batch * queries, heads, slots, card(out.device))
    merged = out.view(batch * queries, heads, 1, width)
    pieces = None if splits == 1 else pieces_of(merged, splits)
    pdl, dependent = early(out.device)
    launch_kernel(
        hopper.attend_picks_hopper,
        grid=(queries * cdiv(heads, hopper.ROWS), splits, batch),
        q_latent=q_latent,
        q_rope=q_rope if turned else q_latent,
        latents=latents,
        rope=rope if turned else latents,
        picks=picks.contiguous(),
        tokens=rows_of(latents.shape[1], lengths, None, mask_bytes(key_mask)),
        out=out if pieces is None else pieces,
        sinks=out if sinks is None else sinks,
        scale=scale * LOG2E,
        S=queries,
        K=slots,
        splits=splits,
        q_latent_strides=q_latent.stride()[:3],
        q_rope_strides=q_rope.stride()[:3],
        latents_strides=latents.stride()[:2],
        rope_strides=rope.stride()[:2],
        PDL=pdl,
        spec=hopper.Spec(
            H=heads,
            TURNS=turned,
            MASKED=key_mask is not None,
            SINKS=sinks is not None,
            STEP=row_step(lengths),
            PIECES=pieces is not None,
        ),
        **{"num_warps": 4, **dependent},
    )
    if pieces is not None:
        launch_merge(Output(pieces, merged, None, sinks), splits, merged_columns(out))


def merged_columns(out: torch.Tensor) -> int:
    """Columns of a program of the merge: fewer, and more programs, where rows are few."""
    return 32 if out[..., 0].numel() <= FEW else padded_channels(out.shape[3])


_latent_attention = define_op(
    f"{NAME}(Tensor q_latent, Tensor q_rope, Tensor latents, Tensor rope, Tensor? picks, "
    "float scale, Tensor? sinks, Tensor? lengths, Tensor? key_mask) -> Tensor",
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch_latent_attention,
)
