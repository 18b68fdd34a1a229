"""What the tests of several families of ops define alike: random tensors, the dtypes of a path, and
the tolerance of attention."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings

# For what takes the interpreter a second an example: a third of the profile's.
FEW = settings(max_examples=settings.default.max_examples // 3)
# Head dimensions that tests draw from: below the least that a kernel's tiles are padded to, padded,
# and powers of two.
WIDTHS = (64, 16, 48, 80, 112, 128)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal, rounded to `dtype`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dtypes(device_path: tuple[str, str]) -> list[torch.dtype]:
    """The dtypes that a path computes in: Triton's interpreter cannot multiply bfloat16."""
    exact = [torch.float32, torch.float16]
    return exact if device_path == ("cpu", "kernel") else [*exact, torch.bfloat16]


def to_device(values: Any, device: str) -> list[Any]:
    """`values`, the tensors among them on `device`."""
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in values]


def random_lists(seed: int, k: torch.Tensor, queries: int, count: int, names: int) -> torch.Tensor:
    """int32 `[B,Hkv,queries,count]`: distinct numbers below `names`, a fifth of them replaced by -1
    (none)."""
    places = torch.rand(
        *k.shape[:2], queries, max(count, names), generator=torch.Generator().manual_seed(seed)
    )
    index = places.argsort(-1)[..., :count]
    return torch.where(places[..., :count] < 0.2, -1, index).int()


def attend_over(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64 of `attention` (`oracle_attention`, or `plain_attention` in q's dtype)
    over the keys `kept` `[B,Hkv,T,S]`: one KV head and query at a time, each with its own mask."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3]).double()
    for h, t in itertools.product(range(k.shape[1]), range(q.shape[2])):
        heads = slice(h * group, (h + 1) * group)
        own = (x[:, h : h + 1] for x in (k, v))
        part = attention(
            q[:, heads, t : t + 1],
            *own,
            key_mask=kept[:, h, t],
            scale=scale,
            softcap=softcap,
            sinks=None if sinks is None else sinks[heads],
        )
        out[:, heads, t], lse[:, heads, t] = (x.double()[:, :, 0] for x in part)
    return out, lse


def hold_attention(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    plain: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Hold (out, lse) to fp64 `want`: the error of out is at most a small factor of the one that
    `plain`, attention computed in q's `dtype`, makes. Scores are float32 sums of about the size of
    lse, in whatever order: one that is off by 4 units in the last place shifts its weight by as
    much."""
    out, lse = got
    want_out, want_lse = want
    epsilon = torch.finfo(dtype).eps
    error = (plain.double() - want_out).abs().max()
    largest, finite = want_out.abs().max(), want_lse != -torch.inf
    score = want_lse[finite].abs().max() if finite.any() else 0.0
    order = 4 * torch.finfo(torch.float32).eps * score * largest
    allowed = 2 * error + 2 * epsilon * largest + order + 1e-6
    found = (out.double() - want_out).abs().max()
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert found <= allowed, f"error {found:.3g}, plain attention's {error:.3g}, lse {score:.3g}"
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert ((lse.double() - want_lse)[finite].abs() <= 2e-5 + 1e-6 * want_lse[finite].abs()).all()
    assert (out[~finite] == 0).all()
