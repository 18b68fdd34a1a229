"""What `latent_ops.py` runs the ops on, and what it holds them against: torch in float64, and exact
sums of integers."""

import functools
from typing import Any

import torch

from attnplug.ops import index_topk, latent_attention
from attnplug.ops.gvr import index_topk as indexing
from attnplug.ops.latent import latent_attention as attending

HEADS, LATENT, ROPE, VALUE = 128, 512, 64, 128
INDEX_HEADS, INDEX_WIDTH, PICKS = 64, 128, 2048
SCALE = (VALUE + ROPE) ** -0.5
SCALE_OF_INDEX = 0.125  # a power of two: sums stay exact
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = (LATENT, ROPE)


# --- inputs ----------------------------------------------------------------------------------


def normal(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=random).to(dtype)


def integers(seed: int, *shape: int, most: int = 1, dtype: torch.dtype = BF16) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-most, most + 1, shape, device="cuda", generator=random).to(dtype)


def length_of(tokens: int) -> torch.Tensor:
    return torch.full((1,), tokens, device="cuda", dtype=torch.int64)


def index_inputs(batch, queries, tokens, dtype=BF16, heads=INDEX_HEADS, width=INDEX_WIDTH, seed=1):
    """Integers of three values: scores are exact in all dtypes, and many of them are equal."""
    q = integers(seed, batch, queries, heads, width, dtype=dtype)
    weights = integers(seed + 1, batch, queries, heads, most=3, dtype=FP32)
    return q, weights, integers(seed + 2, batch, tokens, width, dtype=dtype)


def latent_inputs(batch, queries, tokens, dtype=BF16, heads=HEADS, widths=WIDTHS, seed=1):
    """q_latent, q_rope, latents, rope: queries are small, so that no token has all the weight."""
    q = [normal(seed + i, batch, queries, heads, x, dtype=FP32) / 2 for i, x in enumerate(widths)]
    cache = [normal(seed + 2 + i, batch, tokens, x, dtype=dtype) for i, x in enumerate(widths)]
    return *(x.to(dtype) for x in q), *cache


def picks_of(batch: int, queries: int, tokens: int, count: int, seed: int = 9) -> torch.Tensor:
    """Tokens that a query sees, none twice: those of neighbouring queries are mostly the same, and
    spread over the cache."""
    random = torch.Generator("cuda").manual_seed(seed)
    rows = [
        torch.randperm(tokens - queries, device="cuda", generator=random)[:count]
        for _ in range(batch)
    ]
    moved = torch.arange(queries, device="cuda")[:, None]
    return torch.stack([(row[None, :] + moved) for row in rows]).int().contiguous()


# --- checks ----------------------------------------------------------------------------------


def seen_by(batch, queries, tokens, lengths, key_mask, rows) -> torch.Tensor:
    """`[B,rows,T]`: the tokens that the last `rows` queries see."""
    length = torch.tensor([tokens], device="cuda") if lengths is None else lengths
    at = torch.arange(queries - rows, queries, device="cuda") - queries
    own = length.clamp(0, tokens).expand(batch)[:, None] + at
    seen = torch.arange(tokens, device="cuda") <= own[:, :, None]
    return seen if key_mask is None else seen & key_mask[:, None]


def check_index(inputs, k: int, lengths=None, key_mask=None, plan=None) -> dict[str, Any]:
    """The last queries' picks are the stable sort's; a second run gives the same."""
    q, weights, keys = inputs
    (batch, queries), tokens, rows = q.shape[:2], keys.shape[1], min(16, q.shape[1])
    run = functools.partial(run_index, inputs, k, plan, lengths, key_mask)
    found = run()
    again = run()
    assert torch.equal(found, again), "not the same twice"
    q, weights = q[:, -rows:].float(), weights[:, -rows:]
    scores = torch.stack(
        [
            (weights[:, s, :, None] * (q[:, s] @ keys.float().mT * SCALE_OF_INDEX).relu()).sum(1)
            for s in range(rows)
        ],
        1,
    )
    seen = seen_by(batch, queries, tokens, lengths, key_mask, rows)
    scores = scores.masked_fill(~seen, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : min(k, tokens)]
    wanted = order.masked_fill(~seen.gather(2, order), tokens).sort(-1).values
    mine = found[:, -rows:].long()
    assert ((mine >= 0).int().diff(dim=-1) <= 0).all(), "not packed to the left"
    mine = mine.masked_fill(mine < 0, tokens).sort(-1).values
    assert torch.equal(mine, wanted), f"{int((mine != wanted).sum())} other tokens"
    return {"result": "exact", "picked": int((found >= 0).sum())}


def run_index(inputs, k: int, plan=None, lengths=None, key_mask=None) -> torch.Tensor:
    if plan is None:
        rows = {"lengths": lengths, "key_mask": key_mask}
        return index_topk(*inputs, k, scale=SCALE_OF_INDEX, **rows)
    args = *inputs, k, SCALE_OF_INDEX, lengths, key_mask, None, None
    picks = indexing._allocate(*args)
    indexing.launch_index_topk(*args, picks, plan=plan)
    return picks


def attended(tensors, seen: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The last queries' outputs, in `dtype`."""
    q_latent, q_rope, latents, rope = (x.to(dtype) for x in tensors)
    outs = []
    for s in range(q_latent.shape[1] - rows, q_latent.shape[1]):
        x = (q_latent[:, s] @ latents.mT + q_rope[:, s] @ rope.mT) * SCALE
        hidden = ~seen[:, s - q_latent.shape[1] + rows, None]
        p = x.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        outs.append(p @ latents)
    return torch.stack(outs, 1)


def check_latent(tensors, picks=None, lengths=None, key_mask=None, plan=None) -> dict[str, Any]:
    """The last queries' outputs are within a small factor of what torch errs by in this dtype."""
    (batch, queries), tokens = tensors[0].shape[:2], tensors[2].shape[1]
    rows = min(4, queries)
    found = run_latent(tensors, picks, plan, lengths, key_mask)[:, -rows:]
    seen = seen_by(batch, queries, tokens, lengths, key_mask, rows)
    if picks is not None:
        listed = torch.zeros(batch, rows, tokens + 1, dtype=torch.bool, device="cuda")
        seen = seen & listed.scatter(2, picks[:, -rows:].long() % (tokens + 1), True)[..., :tokens]
    exact = attended(tensors, seen, rows, torch.float64)
    plain = attended(tensors, seen, rows, tensors[0].dtype)
    error = (found.double() - exact).abs().max().item()
    allowed = 4 * (plain.double() - exact).abs().max().item() + 2e-6
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
    return {"result": f"error {error:.1e}, allowed {allowed:.1e}"}


def run_latent(tensors, picks=None, plan=None, lengths=None, key_mask=None) -> torch.Tensor:
    if plan is None:
        rows = {"lengths": lengths, "key_mask": key_mask}
        return latent_attention(*tensors, picks, scale=SCALE, **rows)
    args = *tensors, picks, SCALE, None, lengths, key_mask
    out = attending._allocate(*args)
    attending.launch_latent_attention(*args, out, plan=plan)
    return out


def mask_of(batch: int, tokens: int) -> torch.Tensor:
    return normal(8, batch, tokens) < 1.3
