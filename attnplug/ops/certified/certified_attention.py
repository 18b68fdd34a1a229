"""Decode attention over a quantized cache, with a sound bound on its error for every head.

    out^ = sum_i w_i v'_i,   w_i = exp(s'_i) / sum_j exp(s'_j),   s' = scale q.k'
    ||out^ - out||_2  <=  E_key + E_val + E_round          out: exact attention, real arithmetic

k', v' are the quantized keys and values (`quantize_kv`), or the originals of the blocks that a step
reads exactly: those that hold the attention ("promoted"), those whose values would err too much,
and a random few. The device decides which these are, what the bounds are and when a head or a row
is recomputed from the originals ("the ladder"). Every head that is returned is within its reported
bound, or is the exact output; and the heads of a layer that are not exact are together within

    ||out^ - out||_2  <=  (sum of squared bounds)^(1/2)  <=  tolerance ||out||_2

of all of the layer's heads, side by side, as the model's next product sees them.
docs/methods/certified-bounds.md has the proofs. Source: "Runtime-Certified Bounded-Error Quantized
Attention" (docs/papers.md); the bound that decides is a tighter one, and the layer's promise ours.
"""

import numpy as np
import torch

from attnplug.errors import ArgumentError
from attnplug.ops.certified.call import SCHEMA, Call, CertifiedOutput
from attnplug.ops.certified.launch import launch
from attnplug.ops.certified.plan import capacity_for
from attnplug.ops.certified.proof import (
    BOUND,
    BOUNDARY,
    CAPACITY,
    CHECK,
    HEAD,
    NEEDED,
    RANKING,
    ROW,
    SCORE,
    VALUES,
)
from attnplug.ops.certified.quantize_kv import QuantizedKV, check_tier
from attnplug.ops.certified.records import RANKS, TELEMETRY
from attnplug.ops.certified.reference import reference
from attnplug.ops.certified.scratch import Scratch, check_scratch, simulate
from attnplug.ops.common.checks import check_attention_inputs, check_sequence_inputs, check_sinks
from attnplug.ops.common.define import define_op, refuse_gradients, require
from attnplug.ops.common.reference import sinks_on_cpu
from attnplug.ops.common.rows import NO_MASK, rows_on_cpu

RUNGS = {
    "needed": NEEDED,
    "values": VALUES,
    "head": HEAD,
    "row": ROW,
    "ranking": RANKING,
    "boundary": BOUNDARY,
    "bound": BOUND,
    "capacity": CAPACITY,
    "score": SCORE,
    "check": CHECK,
}
MAX_RANKING = RANKS.value


def certified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tier: QuantizedKV,
    *,
    scale: float,
    block: int,
    tolerance: float | None = 0.05,
    coverage: float = 0.0,
    k_min: int = 0,
    k_max: int = 1024,
    v_tol: float | None = None,
    ranking: int = 0,
    explore: float = 0.0001,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    telemetry: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> CertifiedOutput:
    """Attention of the last token over the quantized tier, certified or exact for each head.

    Args:
        q: `[B, Hq, 1, D]`, float32, float16 or bfloat16.
        k, v: `[B, Hkv, S, D]` like q: the originals. On a GPU they may lie in host memory
            (`models.host_memory`); what a step needs of them is read in place.
        tier: the quantized blocks of these keys. Tokens that `tier.progress` does not cover are
            read from the originals.
        scale: factor on q.k, at least 0, commonly `D ** -0.5`.
        block: keys a block, as the tier was made.
        tolerance: blocks are promoted until the root of the sum of the heads' squared bounds is at
            most this share of the norm that the exact heads of the row have at least. Where it is
            not, heads are recomputed exactly, those with the largest bounds, until the others' is.
            None: no such limit.
        coverage: blocks are promoted until they hold this share of every head's estimated mass.
        k_min: at least so many blocks for each KV head.
        k_max: at most so many blocks for each head by need, and for each KV head by coverage.
        v_tol: a block is read with exact values where mass times value error is above this, in
            units of the values. None: none is for that.
        ranking: depth to which the promoted blocks must rank alike by exact and by quantized mass,
            0 (no check) to 4. A head that fails is recomputed exactly.
        explore: share of the blocks that are read exactly at random, against silent faults.
        lengths: int32 or int64 `[1]` or `[B]`, valid keys, the query being the last. None: all S.
        start: int32 or int64 `[1]` or `[B]`, first real key of a left-padded row. None: 0.
        key_mask: bool `[B, S]`, False where a key must not be seen, as when it was quantized.
        softcap: scores become `softcap * tanh(score / softcap)`; 0: off.
        sinks: `[Hq]`, one more logit for each head, without a value.
        telemetry: float64 `[B, Hkv, R, 18]`, contiguous, R >= Hq / Hkv: this step is added to the
            heads' rows (`TELEMETRY`).
        scratch: where a GPU keeps originals that it read over the link; written, made by
            `Scratch.empty`. Whoever shortens or replaces the keys drops what it holds of them. The
            outputs are the same with and without. On a CPU only its counts are kept. None: none.

    Returns:
        CertifiedOutput: out of q's dtype, lse, bounds, rungs (bits of `RUNGS`) and layer. bounds
        has E_key, E_val, E_round of what is returned, in units of the values; E_key and E_val
        before any recomputation; E_key by the paper's form. A head with bit "head" or "row" was
        recomputed exactly. layer `[B, 2]` float32 has the root of the sum of squared bounds of the
        heads that were not, and what the norm of all exact heads is at least: the former is at most
        `tolerance` times the latter. Both are 0 where the whole row was recomputed.

    Raises:
        ArgumentError: a shape, dtype, device or option does not fit.
        GradientError: an input requires grad.
    """
    refuse_gradients("certified_attention", q, k, v, sinks)
    limits = [float("inf") if x is None else x for x in (v_tol, tolerance)]
    choice = coverage, k_min, k_max, *limits, ranking, explore
    rows, held = (lengths, start, key_mask), scratch or (None,) * 5
    options = scale, block, *choice, *rows, softcap, sinks, telemetry
    return CertifiedOutput(*_certified_attention(q, k, v, *tier, *options, *held))


def _allocate(*args):
    call = Call(*args)
    q, k, telemetry = call.q, call.k, call.telemetry
    name = "certified_attention"
    check_attention_inputs(name, q, k, call.v)
    check_sequence_inputs(name, q, k, call.lengths, call.start, call.key_mask)
    check_tier(name, k, call.tier, call.block)
    check_scratch(k, call.block, call[25:])
    batch, heads, queries, width = q.shape
    require(queries == 1, name, f"q has {queries} queries, needs 1: certified serves decode")
    for label, valid, needed in (
        ("scale", 0 <= call.scale < float("inf"), "at least 0 and finite"),
        ("coverage", 0 <= call.coverage <= 1, "0 to 1"),
        ("k_min", call.k_min >= max(call.ranking, 0), "at least ranking"),
        ("k_max", max(call.k_min, 1) <= call.k_max <= 1024, "k_min to 1024"),
        ("v_tol", call.v_tol >= 0, "at least 0"),
        ("tolerance", call.tolerance >= 0, "at least 0"),
        ("ranking", 0 <= call.ranking <= MAX_RANKING, f"0 to {MAX_RANKING}"),
        ("explore", 0 <= call.explore <= 1, "0 to 1"),
        ("softcap", call.softcap >= 0, "0 (off) or a positive cap"),
    ):
        if not valid:
            raise ArgumentError(f"{name}: {label} is {getattr(call, label)}, needs {needed}")
    if call.sinks is not None:
        check_sinks(name, q, call.sinks)
    if telemetry is not None:
        shape, group = tuple(telemetry.shape), heads // k.shape[1]
        good = len(shape) == 4 and shape[:2] == (batch, k.shape[1]) and shape[2] >= group
        good = good and shape[3] == len(TELEMETRY) and telemetry.dtype == torch.float64
        require(
            good and telemetry.is_contiguous() and telemetry.device == q.device,
            name,
            f"telemetry is {telemetry.dtype} {shape} on {telemetry.device}, needs contiguous "
            f"float64 ({batch}, {k.shape[1]}, {group} or more, {len(TELEMETRY)}) on {q.device}",
        )
    return (
        q.new_empty((batch, heads, 1, width)),
        q.new_empty((batch, heads, 1), dtype=torch.float32),
        q.new_empty((batch, heads, 6), dtype=torch.float32),
        q.new_empty((batch, heads), dtype=torch.int32),
        q.new_empty((batch, 2), dtype=torch.float32),
    )


# --- CPU: `reference.py` is the specification ---------------------------------------------------


def _cpu(*args):
    call, (out, lse, bounds, rungs, layer) = Call(*args[:-5]), args[-5:]
    q, k, v, block = call.q, call.k, call.v, call.block
    lengths, start = rows_on_cpu(k, call.lengths, call.start)
    complete = (lengths - start).clamp(min=0) // block
    blocks = torch.where(
        call.progress[:, 1] == start, torch.minimum(call.progress[:, 0], complete), 0
    ).long()
    valid, count = int(lengths.max()), int(blocks.max())
    start = torch.minimum(start, lengths)  # a row of padding only
    # All contiguous: numba would compile the whole for every other layout.
    near = [x[:, :, :count].contiguous() for x in (call.k_meta, call.v_meta)]
    tier = [call.k_codes, near[0].float(), call.v_codes, _halves(near[1]), call.summary]
    raw = [call.k_meta.view(torch.int16), call.v_meta, call.check]
    result = torch.empty(q.shape[:2] + q.shape[3:], dtype=torch.float32, device="cpu")
    counts = torch.zeros(*k.shape[:2], 2, dtype=torch.int64, device="cpu")
    marks = torch.zeros(*k.shape[:2], count, dtype=torch.int32, device="cpu")
    capacity = capacity_for(call.check.shape[2], call.k_max, call.explore)
    options = (call.coverage, call.k_min, call.k_max, call.v_tol, call.explore)
    reference(
        q[:, :, 0].float().contiguous().numpy(),
        k[:, :, :valid].float().contiguous().numpy(),
        v[:, :, :valid].float().contiguous().numpy(),
        tuple(x.numpy() for x in tier),
        tuple(x.numpy() for x in raw),
        blocks.numpy(),
        lengths.numpy(),
        start.numpy(),
        NO_MASK if call.key_mask is None else call.key_mask.contiguous().numpy(),
        np.float32(call.scale),
        np.float32(call.softcap),
        sinks_on_cpu(call.sinks),
        call.ranking,
        capacity,
        call.tolerance,
        torch.finfo(q.dtype).eps / 2,
        tuple(float(x) for x in options),
        result.numpy(),
        lse[:, :, 0].numpy(),
        bounds.numpy(),
        rungs.numpy(),
        layer.numpy(),
        counts.numpy(),
        marks.numpy(),
    )
    out.copy_(result.unsqueeze(2))
    scratch = call.scratch
    if scratch is not None:
        state = (x.numpy() for x in (marks, start, scratch.owner, scratch.used, scratch.counters))
        simulate(next(state), next(state), block, *state)
    if call.telemetry is not None:
        tail = lengths - start - blocks * block
        _record(call, bounds, rungs, layer, counts * block, tail, lengths - start)


def _halves(words: torch.Tensor) -> torch.Tensor:
    """int32 words as float32 pairs (low half, high half) of float16."""
    return words.view(torch.float16).float().unflatten(-1, (-1, 2))


def _record(call, bounds, rungs, layer, tokens, tail, whole):
    """Add one step to the telemetry of each head."""
    bounds, rungs = (x.unflatten(1, (tokens.shape[1], -1)) for x in (bounds, rungs))
    own = call.telemetry[:, :, : rungs.shape[2]].unbind(-1)
    fields: dict[str, torch.Tensor] = dict(zip(TELEMETRY, own, strict=True))
    fields["steps"] += 1
    for name in ("needed", "values", "head", "row", "ranking", "boundary", "bound"):
        fields[name] += (rungs & RUNGS[name]) > 0
    again = (rungs & (HEAD | ROW)) > 0
    for i, name in enumerate(("key", "value")):
        fields[f"{name}_sum"] += bounds[..., i]
        fields[f"{name}_max"].copy_(torch.maximum(fields[f"{name}_max"], bounds[..., i].double()))
    widest = torch.where(again, 0.0, bounds[..., 2].double())
    fields["round_max"].copy_(torch.maximum(fields["round_max"], widest))
    spent, norm = layer[:, :, None, None].unbind(1)
    share = torch.where(spent > 0, spent / norm, 0.0)
    fields["layer_sum"] += share
    fields["layer_max"].copy_(torch.maximum(fields["layer_max"], share.double()))
    if call.tolerance < float("inf"):  # alone it would be more than the layer's heads may have
        paper = bounds[..., 5] + bounds[..., 4] + bounds[..., 2]
        fields["saved"] += ~again & ~(paper <= call.tolerance * norm)
    # The group's first head keeps count of what its KV head reads.
    shared = again.any(-1) * whole[:, None]
    for i, name in enumerate(("key_tokens", "value_tokens")):
        fields[name][:, :, 0] += tokens[..., i] + tail[:, None] + shared


_certified_attention = define_op(
    SCHEMA,
    allocate=_allocate,
    cpu=_cpu,
    cuda=launch,
)
