"""Inputs and harness for the tests of `certified_attention`: caches, adversaries, both paths."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnplug.ops import QuantizedKV, quantize_kv
from attnplug.ops.certified import certified_attention as op
from attnplug.ops.certified.plan import Plan
from attnplug.testing import oracle_attention, plain_attention

INF = float("inf")
OPTIONS = {
    "coverage": 0.995,
    "k_min": 2,
    "k_max": 128,
    "v_tol": 0.05,
    "tolerance": INF,
    "ranking": 1,
    "explore": 0.02,
}
LOOSE = {"coverage": 0.0, "k_min": 0, "v_tol": 1e30, "ranking": 0, "explore": 0.0}
EVERY = LOOSE | {"coverage": 1.0, "k_max": 128, "v_tol": 0.0}


def tier_faults(block: int, value_zero: int) -> dict[str, Callable[[QuantizedKV], Any]]:
    """What a fault may do to a tier, by name: to a block of the second head of the first row, and
    to the zero point in that word of its values' metadata."""
    at = (0, 1, block)
    both = (0, 1, slice(block, block + 2))
    return {
        "key code": lambda t: t.k_codes[at].view(-1)[77:78].add_(1),
        "key scale": lambda t: t.k_meta[at][0, 5:6].mul_(2),
        "key zero": lambda t: t.k_meta[at][1, 5:6].add_(1),
        "value code": lambda t: t.v_codes[at].view(-1)[77:78].bitwise_xor_(0x30),
        "value scale": lambda t: t.v_meta[at].view(-1)[7:8].bitwise_xor_(0x0400),
        "value zero": lambda t: t.v_meta[at].view(-1)[value_zero].bitwise_xor_(0x04000000),
        "eta": lambda t: t.summary[at][0:1].mul_(0.5),
        "nu": lambda t: t.summary[at][1:2].mul_(0.5),
        "key spectrum": lambda t: t.summary[at][2:3].mul_(0.5),
        "value spectrum": lambda t: t.summary[at][3:4].mul_(0.5),
        "check": lambda t: t.check[at][0:1].add_(1),
        "second check": lambda t: t.check[at][1:2].add_(1),
        "count": lambda t: t.progress[0, 0:1].fill_(99),
        "other block": lambda t: t.k_codes[at].copy_(t.k_codes[0, 1, block + 1]),
        "swapped": lambda t: [x[both].copy_(x[both].flip(0)) for x in t[:6]],
    }


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclasses.dataclass
class Case:
    """q `[B,Hq,1,D]`, originals `[B,Hkv,S,D]` and what goes with them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block: int = 16
    scale: float = 0.125
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # lengths, start, key_mask, ...

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact output `[B,Hq,D]` and log-sum-exp `[B,Hq]` in fp64."""
        out, lse = oracle_attention(self.q, self.k, self.v, scale=self.scale, **self.more)
        return out[:, :, 0], lse[:, :, 0]

    def tier(self, device: str = "cpu") -> QuantizedKV:
        batch, heads, size, width = self.k.shape
        tier = QuantizedKV.empty(batch, heads, size, width, self.block, device)
        names = ("lengths", "start", "key_mask")
        rows = {n: self.more[n].to(device) for n in names if self.more.get(n) is not None}
        quantize_kv(self.k.to(device), self.v.to(device), tier, block=self.block, **rows)
        return tier


def attend(device_path, case: Case, tier=None, telemetry=None, scratch=None, plan=None, **options):
    """The public op, or the Triton launcher where the op would not run it; results on the CPU."""
    device, path = device_path
    tier = case.tier(device) if tier is None else QuantizedKV(*(x.to(device) for x in tier))
    values = OPTIONS | options
    more = [case.more.get(name) for name in ("lengths", "start", "key_mask", "softcap", "sinks")]
    more[3] = more[3] or 0.0
    more = [x.to(device) if isinstance(x, torch.Tensor) else x for x in more]
    inputs = [x.to(device) for x in (case.q, case.k, case.v)]
    args = [*inputs, *tier, case.scale, case.block, *values.values(), *more, telemetry]
    args += scratch or [None] * 5
    if path == "reference" or (device == "cuda" and plan is None):
        found = op.CertifiedOutput(*torch.ops.attnplug.certified_attention(*args))
    else:
        found = op.CertifiedOutput(*op._allocate(*args))
        op.launch(*args, *found, plan=plan or Plan(splits=3, pieces=2))
    return op.CertifiedOutput(*(x.cpu() for x in found))


def counted(device_path, case: Case, **more) -> tuple[op.CertifiedOutput, torch.Tensor]:
    """`attend` and the telemetry of its step `[B,Hkv,G,fields]`, on the CPU."""
    batch, kv_heads = case.k.shape[:2]
    shape = (batch, kv_heads, case.q.shape[1] // kv_heads, len(op.TELEMETRY))
    telemetry = torch.zeros(shape, dtype=torch.float64, device=device_path[0])
    found = attend(device_path, case, telemetry=telemetry, **more)
    return found, telemetry.cpu()


# For tests of a kernel that hold it to the reference themselves.
KERNEL_PATHS = [("cpu", "kernel"), pytest.param(("cuda", "kernel"), marks=pytest.mark.gpu)]


def errors(found, case: Case) -> torch.Tensor:
    """||out - exact||_2 of every head `[B,Hq]`."""
    return (found.out[:, :, 0].double() - case.oracle()[0]).norm(dim=-1)


def hold(found, case: Case) -> torch.Tensor:
    """No head is further from the exact output than it says; returns error / bound."""
    error, bound = errors(found, case), found.bounds[..., :3].double().sum(-1)
    assert bound.isfinite().all() and (bound >= 0).all()
    worst = (error / bound).max()
    assert (error <= bound).all(), f"violated: error / bound = {float(worst):.4f}"
    return error / bound


def keep_promise(found, case: Case, tolerance: float) -> None:
    """The heads of a row that were not recomputed are together within the tolerance of exact
    attention, by their bounds and in truth; what the row says of both is true."""
    kept = ~(rungs(found, "head") | rungs(found, "row"))
    bound = torch.where(kept, found.bounds[..., :3].double().sum(-1), 0.0).norm(dim=-1)
    error = torch.where(kept, errors(found, case), 0.0).norm(dim=-1)
    norm = case.oracle()[0].flatten(1).norm(dim=-1)
    spent, least = found.layer.double().unbind(-1)
    assert (least <= norm * (1 + 1e-6)).all() and (spent <= tolerance * least * (1 + 1e-6)).all()
    counts = spent > 0  # else nothing is quantized, or all is recomputed, or all values are zero
    assert (error[counts] <= tolerance * norm[counts]).all()
    assert (bound <= spent * (1 + 1e-6))[counts].all() and (error <= bound).all()


def rungs(found, name):
    return (found.rungs & op.RUNGS[name]) > 0


def rounding(device_path, case):
    """E_round of every head `[B,Hq]` with all blocks read, as a share of its output's norm: no
    smaller tolerance can be met."""
    found = attend(device_path, case, **EVERY)
    assert (found.bounds[..., :2] == 0).all()
    return found.bounds[..., 2] / found.out[:, :, 0].float().norm(dim=-1)


def exact(found, case):
    """The heads that are as dense attention in their dtype would be."""
    want = case.oracle()[0]
    plain, _ = plain_attention(case.q, case.k, case.v, scale=case.scale, **case.more)
    allowed = 2 * (plain[:, :, 0].double() - want).abs().amax(-1)
    allowed = allowed + 4 * torch.finfo(case.q.dtype).eps * want.abs().amax(-1) + 1e-6
    return (found.out[:, :, 0].double() - want).abs().amax(-1) <= allowed


def gaussian(seed: int, dtype=torch.float32, batch=2, kv_heads=2, group=2, size=200, width=64):
    k, v = random(seed, 2, batch, kv_heads, size, width)
    q = 2 * random(seed + 1, batch, kv_heads * group, 1, width)
    return Case(q.to(dtype), k.to(dtype), v.to(dtype), scale=width**-0.5)


def adversary(seed: int, dtype=torch.float32, batch=4, kv_heads=4, group=1, size=144, width=64):
    """Keys at the far ends of their quantization intervals, on the side that moves all scores of a
    block one way, blocks up and down at random; values that point along the resulting change.
    Ranges differ by channel (outliers, constants) and from case to case (scales 1e-3 to 1e3)."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    block, blocks = 16, size // 16
    q = torch.randn(batch, kv_heads, 1, width, generator=generator) * 10 ** (uniform(1) * 2 - 1)
    spread = 10 ** (2 * uniform(1, kv_heads, 1, 1, width) - 1)
    spread = spread * (uniform(1, kv_heads, 1, 1, width) > 0.1)  # some constant channels
    middle = 3 * torch.randn(1, kv_heads, 1, 1, width, generator=generator) * spread
    k = middle + spread * (2 * uniform(batch, kv_heads, blocks, block, width) - 1)
    k[:, :, :, 0], k[:, :, :, 1] = (middle - spread)[:, :, :, 0], (middle + spread)[:, :, :, 0]
    size_of_scores = float(q.abs().mean() * spread.mean() * width**0.5)
    scale = float(10 ** (uniform(1) * 2 - 0.5)) / max(size_of_scores, 1e-6)
    k = k.flatten(2, 3).to(dtype)
    case = Case(q.to(dtype), k, k, scale=scale)
    tier = case.tier()
    step, zero = tier.k_meta.float().unsqueeze(4).unbind(3)
    way = torch.where(uniform(batch, kv_heads, blocks, 1, 1) < 0.5, -1.0, 1.0)
    side = way * q.to(dtype).float().sign().unsqueeze(2)
    far = zero + step * (tier.k_codes.float() + 0.498 * side)
    keys = k.unflatten(2, (blocks, block)).float().clone()
    inside = (far > keys[:, :, :, :1]) & (far < keys[:, :, :, 1:2])  # the range must not change
    keys[:, :, :, 2:] = torch.where(inside, far, keys)[:, :, :, 2:]
    direction = torch.randn(batch, kv_heads, 1, 1, width, generator=generator)
    v = way * direction + 0.01 * torch.randn(keys.shape, generator=generator)
    v = v * 10 ** (4 * uniform(1) - 2)
    q = q.repeat_interleave(group, 1)
    return Case(q.to(dtype), keys.flatten(2, 3).to(dtype), v.flatten(2, 3).to(dtype), scale=scale)


def aligned(
    seed: int, dtype=torch.float32, batch=4, kv_heads=4, group=1, size=144, width=64, values=False
):
    """Errors that are one vector for all tokens of a block, times a number each, and weights in
    proportion to these numbers: Cauchy-Schwarz, by which spectral norms bound what errors do, is an
    equality. The errors of the keys lie along the query, and values point the way that their
    weight changes. With `values` the keys have none, and the values' errors add up."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    block, blocks = 16, size // 16
    shape = batch, kv_heads, blocks, block
    step = 2.0 ** torch.randint(-2, 3, (batch, kv_heads, 1, 1, width), generator=generator)
    sign = torch.where(uniform(batch, kv_heads, 1, 1, width) < 0.5, -1.0, 1.0)
    part = 0.3 + 0.7 * uniform(*shape)  # of the largest error; tokens 0..2 span the channels' range
    part[..., 3::2] *= -1
    part[..., :3] = 0
    deviation = 10 ** (2 * uniform(1) - 2)  # D of every block: 0.01 to 1
    q = step * sign
    scale = float(deviation) / float((step * step / 2).sum(-1).amax())
    unit = scale * (step * step).sum(-1)  # what a code more in every channel makes of a score
    codes = (part.abs().clamp(min=1e-9).log() / unit * width).round()
    first = codes.div(width, rounding_mode="floor")
    codes = first[..., None] + (torch.arange(width) < (codes - width * first)[..., None])
    third = torch.arange(width) % 3 == torch.arange(3)[:, None]
    codes[..., :3, :] = torch.where(third, 1.0, -1.0) * (127 if dtype == torch.bfloat16 else 126.99)
    off = 0.0 if values else 0.48 * part[..., None]
    k = (codes.clamp(-127, 127) * sign + off * sign) * step
    if values:
        levels = torch.randint(1, 15, (batch, kv_heads, 1, 1, width), generator=generator).float()
        levels[..., 0::16], levels[..., 1::16] = 0.0, 15.0
        inner = (levels > 0) & (levels < 15)
        v = (levels + 0.48 * torch.where(inner, part[..., None].abs(), 0.0)) / 8 - 1
    else:
        v = torch.where(part < 0, -1.0, 1.0)[..., None] * (
            2.0 ** torch.randint(-3, 3, (batch, kv_heads, 1, 1, width // 16), generator=generator)
        ).repeat_interleave(16, -1)
    q = q[:, :, 0].repeat_interleave(group, 1)
    k, v = (x.expand(*shape, width).flatten(2, 3) for x in (k, v))
    return Case(q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous(), scale=scale)
