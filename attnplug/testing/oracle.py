"""What attention inputs should give (fp64), and what plain low-precision attention gives."""

from typing import Any

import torch


def oracle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    lengths: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention computed in `dtype`: out `[B,Hq,T,D]` and natural log-sum-exp `[B,Hq,T]`.

    Query t of a row of length n stands at position n - T + t and sees keys `start` (0) to its own
    position, those of the last `window` (0: all) that `key_mask` leaves. Logits are `scale q.k`,
    with `softcap` c > 0 then c tanh(logit / c). `sinks` `[Hq]` adds a logit to each head's
    denominator and not to the log-sum-exp. A query that sees nothing: out 0, log-sum-exp -inf.
    Keys that a query does not see cannot touch it, whatever they hold.
    """
    group = q.shape[1] // k.shape[1]
    visible = _visible(q, k, lengths, start, key_mask, window)[:, None]
    seen = visible.any(2)[..., None]
    k = torch.where(seen, k.to(dtype), 0).repeat_interleave(group, 1)
    v = torch.where(seen, v.to(dtype), 0).repeat_interleave(group, 1)
    logits = q.to(dtype) @ k.transpose(2, 3) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    wide = torch.promote_types(dtype, torch.float32)  # softmax in fp32, as eager attention does
    logits = logits.to(wide).masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    total = lse
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(wide)[None, :, None].expand_as(lse))
    weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0)[..., None]).to(dtype)
    if torch.isfinite(v).all():
        return weights @ v, lse
    # 0 * NaN would carry a value to queries that do not see its key.
    spread = torch.where(visible[..., None], weights[..., None] * v[:, :, None], 0)
    return spread.sum(3), lse


def _visible(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    start: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    """Which keys each query sees, `[B,T,S]` bool."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    length = (
        torch.full((1,), keys, device=q.device, dtype=torch.int64) if lengths is None else lengths
    )
    position = length.long().reshape(-1, 1, 1) - queries
    position = position + torch.arange(queries, device=q.device)[None, :, None]
    key = torch.arange(keys, device=q.device)[None, None]
    visible = (key <= position).expand(batch, -1, -1)
    if start is not None:
        visible = visible & (key >= start.reshape(-1, 1, 1))
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    if window:
        visible = visible & (key > position - window)
    return visible


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What plain dense attention gives: `oracle_attention` in q's own dtype, softmax in fp32."""
    return oracle_attention(q, k, v, dtype=q.dtype, **options)


def dense_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> float:
    """The largest absolute error that plain attention in q's dtype makes against fp64 on these
    inputs (`options` as for `oracle_attention`)."""
    plain = plain_attention(q, k, v, **options)[0].double()
    return largest(plain - oracle_attention(q, k, v, **options)[0])


def tolerance(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, factor: float = 4.0, **options: Any
) -> float:
    """The absolute error an op may make on these inputs: `factor` times `dense_error`, and at least
    two roundings of the largest value (plain attention over one key errs by nothing)."""
    rounding = torch.finfo(q.dtype).eps * largest(oracle_attention(q, k, v, **options)[0])
    return factor * dense_error(q, k, v, **options) + 2 * rounding + 1e-7


def largest(x: torch.Tensor) -> float:
    """The largest finite magnitude in x, 0 where there is none."""
    finite = x[torch.isfinite(x)]
    return float(finite.abs().max()) if finite.numel() else 0.0
