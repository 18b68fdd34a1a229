"""What sketch's outputs are off by, estimated without bias from a few tokens that a step has not
read.

The host repeats a step between two steps, from the query that the cache layer has kept. With
out = (N_r + N_t) / (Z_r + Z_t), r what was read and t what was estimated, and tokens j drawn among
the others with the probabilities p_j,

    X_j = exp(s_j) (v_j - out) / p_j - (N_t - out Z_t),    E X_j = (out* - out) Z*

where out* and Z* are those of dense attention. The mean of X_i.X_j over pairs i != j then estimates
|out* - out|^2 Z*^2 without bias, whatever the sketch does. It is an estimate and no bound: a needle
that the sketch hides is seldom drawn.
"""

import dataclasses
from typing import NamedTuple

import torch

from attnplug.ops.common.device import card
from attnplug.ops.sketch.attend_picks import attend_picks
from attnplug.ops.sketch.encode_keys import LOCAL
from attnplug.ops.sketch.merge_sketch import merge_sketch
from attnplug.ops.sketch.pick_tokens import pick_tokens
from attnplug.ops.sketch.prepare_query import prepare_query
from attnplug.ops.sketch.scan_sketch import scan_sketch
from attnplug.ops.sketch.sketch_decode import plan_for
from attnplug.ops.sketch.state import BLOCK, Basis, Codes

SAMPLES = 64  # tokens that are drawn for each row and KV head
LN2 = 0.6931471805599453


class Asked(NamedTuple):
    """What a policy asks of a step, but for its rows."""

    scale: float
    softcap: float
    sinks: torch.Tensor | None
    top_k: int
    tail: str


class _Step(NamedTuple):
    """A repeated step: the output and log-sum-exp (natural, sinks included) of it all, those of
    what it read, the picks, and the shares of the candidates."""

    out: torch.Tensor  # [B, Hq, D], float32
    lse: torch.Tensor  # [B, Hq]
    read_out: torch.Tensor
    read_lse: torch.Tensor
    picks: torch.Tensor  # int32 [B, Hkv, K]
    shares: torch.Tensor  # float16 [B, Hkv, S]


def audit_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    basis: Basis,
    codes: Codes,
    asked: Asked,
    *,
    lengths: torch.Tensor,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(estimate of |out* - out|^2, |out|^2) of a step from the last token, float64 `[B, Hq]`.

    Tensors as in `sketch_decode`, the token in the cache. Z of the step stands for that of dense.
    An estimate of single steps may be negative; of a row that reads all it is 0.
    """
    rows = {"lengths": lengths, "start": start, "key_mask": key_mask}
    step = _repeat(q, k, v, basis, codes, asked, rows)
    weight = _weights(step, k.shape[2], **rows)
    none = weight.sum(-1, keepdim=True) == 0
    chance = torch.where(none, 1.0 / weight.shape[-1], weight)
    generator = torch.Generator(k.device).manual_seed(seed)
    drawn = torch.multinomial(chance.flatten(0, 1), SAMPLES, True, generator=generator)
    drawn = drawn.view(*chance.shape[:2], SAMPLES)
    heads = q.shape[1] // k.shape[1]
    place = drawn[..., None].expand(*drawn.shape, k.shape[3])
    keys, values = (x.gather(2, place).float().repeat_interleave(heads, 1) for x in (k, v))
    chance = (chance / chance.sum(-1, keepdim=True)).gather(2, drawn).repeat_interleave(heads, 1)
    scores = (keys @ q[:, :, 0, :, None].float())[..., 0] * asked.scale
    if asked.softcap > 0:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    # All in units of the step's Z. N_t - out Z_t = out Z_r - N_r.
    share = torch.exp(scores - step.lse[..., None]) / chance
    read = torch.exp(step.read_lse - step.lse)[..., None] * (step.out - step.read_out)
    x = (share[..., None] * (values - step.out[:, :, None]) - read[:, :, None]).double()
    pairs = x.sum(2).square().sum(-1) - x.square().sum((2, 3))
    estimate = pairs / (SAMPLES * (SAMPLES - 1))
    estimate = estimate.masked_fill(none[..., 0].repeat_interleave(heads, 1), 0.0)
    return estimate, step.out.double().square().sum(-1)


def _repeat(q, k, v, basis, codes, asked, rows) -> _Step:
    """The step again, its parts kept."""
    lengths, start = rows["lengths"], rows["start"]
    capped = {"softcap": asked.softcap}
    fixed = prepare_query(q, k, v, basis.queries, scale=asked.scale, **rows, **capped)
    places = k.shape[0] * k.shape[1], k.shape[2], asked.top_k, k.shape[3], k.element_size()
    plan = plan_for(*places, card(k.device).processors)
    shares, total, sums, norm, middle = scan_sketch(
        *(fixed[0], fixed[2], *codes), top_k=asked.top_k, parts=plan.parts, **rows, **capped
    )
    picks, cut = pick_tokens(shares, total, middle, top_k=asked.top_k, lengths=lengths, start=start)
    coded = fixed[0], codes.fine, codes.coarse
    of_picks = attend_picks(
        *(q, k, v, *coded, picks, cut, norm), scale=asked.scale, pieces=plan.pieces, **capped
    )
    out, lse = merge_sketch(
        *(q, *fixed, *of_picks, sums, norm, cut, basis.v_mean),
        **{"tail": asked.tail, "sinks": asked.sinks, **capped},
    )
    pieces = torch.cat([fixed[2], of_picks[1]], -1) * LN2
    read_lse, lse = torch.logsumexp(pieces, -1), lse[..., 0]
    parts = torch.where((pieces > -torch.inf)[..., None], torch.cat([fixed[1], of_picks[0]], 2), 0)
    numerator = (torch.exp(pieces - read_lse[..., None])[..., None] * parts).sum(2)
    if asked.sinks is not None:  # in the denominator of what was read
        sinks = asked.sinks.float()[None]
        with_sinks, lse = torch.logaddexp(read_lse, sinks), torch.logaddexp(lse, sinks)
        numerator = numerator * torch.exp(read_lse - with_sinks)[..., None]
        read_lse = with_sinks
    return _Step(out[:, :, 0].float(), lse, numerator, read_lse, picks, shares)


def _weights(step: _Step, size: int, lengths, start, key_mask) -> torch.Tensor:
    """How likely each token is to be drawn, up to a factor, `[B, Hkv, S]`: half by share and half
    evenly among the candidates that were not picked, 0 for others."""
    place = torch.arange(size, device=lengths.device)
    low = torch.zeros_like(lengths) if start is None else start.clamp(min=0)
    near = ((lengths - 1 - low).clamp(min=0) // BLOCK - (LOCAL - 1)).clamp(min=1)
    first, last = (low + BLOCK)[:, None, None], (low + near * BLOCK)[:, None, None]
    left = (place >= first) & (place < last) & torch.ones_like(step.shares, dtype=torch.bool)
    if key_mask is not None:
        left = left & key_mask[:, None]
    picked = torch.zeros(*left.shape[:2], size + 1, dtype=torch.bool, device=left.device)
    picked.scatter_(2, torch.where(step.picks < 0, size, step.picks).long(), True)
    left = left & ~picked[..., :size]
    shares = torch.where(left, step.shares.float(), -torch.inf)
    top = shares.amax(-1, keepdim=True)
    weight = torch.exp2(shares - torch.where(top.isfinite(), top, 0.0))
    weight = (weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)).nan_to_num(0.0)
    even = left.float()
    return weight + even / even.sum(-1, keepdim=True).clamp(min=1)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What the outputs of one layer's cache are off by, estimated in `audits` steps from 64 unread
    tokens of each KV head: the root mean square over steps, rows and heads of |out - dense out|, in
    units of the values (`error`) and of the outputs (`relative`). An estimate, not a bound."""

    layer: int
    audits: int
    error: float
    relative: float
