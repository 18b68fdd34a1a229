"""A few queries at once over a long cache: candidates of speculative decoding, heads that choose
several tokens, a short turn of a conversation.

Each query picks for itself, and all of them read what any has picked, so that a key is loaded once
for all queries of its KV head:

    far    softmax over the union of the picks        all queries and heads of a group as one group
    near   softmax over what a query reads besides    each query alone
    out    (exp(lse_far) far + exp(lse_near) near) / (exp(lse_far) + exp(lse_near) + exp(sink))
"""

import torch

from attnplug.call import AttentionCall
from attnplug.policies.crossover import DenseBelow
from attnplug.policies.dense import MAX_DECODE_QUERIES, apply_sinks, known_below

MOST_NUMBERS = 128 * 128  # of a program's queries: those of a KV head times the head dimension


def is_few(call: AttentionCall) -> bool:
    """Whether a call brings a few tokens to a cache, known from shapes, and no prompt that generate
    is at: 2 to 16, and no more than one program attends to."""
    (_, heads, queries, width), kv_heads = call.q.shape, call.k.shape[1]
    if call.lengths is None or not known_below(queries, MAX_DECODE_QUERIES + 1):
        return False
    if known_below(queries, 2) or queries * (heads // kv_heads) * width > MOST_NUMBERS:
        return False
    return not getattr(call.state, "steps_are_prepared", False)


def asks_for_few(method: DenseBelow, call: AttentionCall) -> bool:
    """Whether a call is of a few queries that the method is to serve: where `min_tokens` asks for
    it, as no measured length speaks for it. The queries' picks may be as many times the keys of one
    query's, and so must the cache be."""
    if method.min_tokens is None or not is_few(call):
        return False
    return method.serves(len(call.q), call.k.shape[2] // call.q.shape[2], call.q.device)


def union_of(picks: torch.Tensor) -> torch.Tensor:
    """What any query has picked, int32 `[B,Hkv,1,T*K]`, ascending, from picks `[B,Hkv,T,K]`; what
    an entry before says already is -1, as is none."""
    union = picks.flatten(2).sort(-1).values
    again = torch.nn.functional.pad(union[..., 1:] == union[..., :-1], (1, 0))
    return union.masked_fill(again, -1).unsqueeze(2)


def divide(union: torch.Tensor, edge: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What of a union is from `edge` on `[1 or B]`, `most` entries or fewer, `[B,Hkv,1,most]`, and
    the others `[B,Hkv,1,T*K]`. The first query reads the former in any case, others may not."""
    late = union >= edge.clamp(min=0).view(-1, 1, 1, 1)
    return torch.where(late, union, -1).topk(most, -1).values, union.masked_fill(late, -1)


def as_one(q: torch.Tensor) -> torch.Tensor:
    """Queries `[B,Hq,T,D]` as the heads of one, `[B,Hq*T,1,D]`."""
    return q.reshape(q.shape[0], -1, 1, q.shape[3])


def merge(
    near: tuple[torch.Tensor, torch.Tensor],
    far: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The output over both parts `[B,Hq,T,D]`, of each the output and the log-sum-exp: near
    `[B,Hq,T,D]` and `[B,Hq,T]`, far as of `as_one`. What sees no key in either part gives 0."""
    (out, lse), (far_out, far_lse) = near, far
    far_out, far_lse = far_out.view(out.shape), far_lse.view(lse.shape)
    share = torch.where(far_lse == -torch.inf, 0.0, torch.sigmoid(far_lse - lse))
    merged = torch.lerp(out.float(), far_out.float(), share.unsqueeze(-1)).to(out.dtype)
    return apply_sinks(merged, torch.logaddexp(lse, far_lse), sinks)
