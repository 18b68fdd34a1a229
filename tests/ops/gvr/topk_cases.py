"""What the tests of topk share: rows that are easy to get wrong, hints, plans small enough for
every way that a row can go, and the comparison with torch's stable sort."""

import torch

from attnplug.ops import topk
from attnplug.ops.gvr import topk as op
from attnplug.ops.gvr.kernels.topk_sifted_rows import Sift

# Small enough for a list of 64 to overflow and for several programs to share 300 scores.
SMALL = dict(
    verifiers=2, verify_tile=64, collect_tile=64, capacity=64, small=16, refine_tile=64, bins=32,
    sample=32, batch=4,
)  # fmt: skip
PLANS = {
    "default": None,
    "whole_row": op.Plan(True, refine_warps=1, small=0),
    "list": op.Plan(True, refine_warps=8),
    "short_list": op.Plan(True, refine_warps=1, small=16),
    "programs": op.Plan(False, **SMALL),
    "tiles": op.Plan(False, **SMALL | {"verifiers": 5, "collect_tile": 32}),
    "groups": op.Plan(False, group=4, here=32, **SMALL),
    "sifted": op.Plan(False, sift=Sift(4, 16, 12, 1, 1, ranked=16, searched=64)),
}


def call(device_path, scores, k, hint=None, lengths=None, sorted=False, plan=None):
    """(indices, values, stats) on the CPU; by the reference, or by the kernels under a plan."""
    device, path = device_path
    scores, hint, lengths = (
        x if x is None else x.to(device) if x.is_contiguous() or device == "cpu" else strided(x)
        for x in (scores, hint, lengths)
    )
    if path == "reference" or (plan is None and device == "cuda"):
        found = topk(scores, k, hint=hint, lengths=lengths, sorted=sorted, stats=True)
    else:
        found = op._allocate(scores, k, hint, lengths, sorted)
        op.launch_topk(scores, k, hint, lengths, sorted, *found, plan=plan)
    return tuple(x.cpu() for x in found)


def strided(x):
    """The same strides on the GPU."""
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return moved.copy_(x)


def stable(scores, k, n):
    """The first k of the stable sort of scores[:n], largest first, and the values."""
    x = torch.where(scores[:n].isnan(), -torch.inf, scores[:n])
    order = x.sort(descending=True, stable=True).indices[:k]
    return order, x[order]


def assert_exact(found, scores, k, lengths=None, sorted=False):
    indices, values, _ = found
    rows, size = scores.shape
    assert indices.dtype == torch.int32 and values.dtype == torch.float32
    assert indices.shape == values.shape == (rows, k)
    for r in range(rows):
        n = size if lengths is None else int(lengths[r % len(lengths)].clamp(0, size))
        order, value = stable(scores[r], k, n)
        got = indices[r, : len(order)].long()
        assert (indices[r, len(order) :] == -1).all()
        assert (values[r, len(order) :] == -torch.inf).all()
        if sorted:
            assert got.tolist() == order.tolist()
            assert torch.equal(values[r, : len(order)], value)
        else:
            assert got.sort().values.tolist() == order.sort().values.tolist()
            x = torch.where(scores[r].isnan(), -torch.inf, scores[r])
            assert torch.equal(values[r, : len(order)], x[got])


KINDS = (
    "normal", "constant", "ascending", "descending", "two", "relu", "denormal", "odd", "cluster",
    "heavy", "sink", "masked", "wide", "together", "pile",
)  # fmt: skip


def make(kind, size, k, generator, rows=1):
    """Rows that are easy to get wrong."""
    x = torch.randn(rows, size, generator=generator)
    i = torch.arange(size)
    if kind == "constant":
        x = torch.full_like(x, float(x[0, 0]))
    elif kind == "ascending":
        x = i.float().repeat(rows, 1)
    elif kind == "descending":
        x = -i.float().repeat(rows, 1)
    elif kind == "two":
        x = (x > 1).float()
    elif kind == "relu":
        x = (x - 1).relu() * torch.where(i % 2 == 0, 1.0, -0.0)
    elif kind == "denormal":
        x = x * 1e-41
    elif kind == "odd":
        x[:, i % 3 == 0] = -torch.inf
        x[:, i % 7 == 1] = torch.nan
        x[:, i % 11 == 2] = torch.inf
    elif kind == "cluster":  # many within a few steps of the k-th score
        near = torch.rand(rows, size, generator=generator) < min(1.0, 3 * k / max(size, 1))
        steps = torch.randint(0, 9, (rows, size), generator=generator, dtype=torch.int32)
        close = (torch.tensor(2.0).view(torch.int32) + steps).view(torch.float32)
        x = torch.where(near, close, x)
    elif kind == "heavy":
        x = (4 * x).exp()
    elif kind == "sink":
        x[:, i % 97 == 0] = 1e6
    elif kind == "masked":
        x[:, i > size // 2] = torch.finfo(torch.float32).min
    elif kind == "wide":
        x = x.sign() * torch.exp2(40 * x)
    elif kind == "pile":  # the k-th is one of many equals, and what is near shares their bin
        near = torch.rand(rows, size, generator=generator) < 0.3
        x = torch.where(near, 1 - 1e-5 * torch.rand(rows, size, generator=generator), 1.0)
        x[:, i % 61 == 3] = -100.0
        x[:, i % 67 == 4] = 100.0
    elif kind == "together":
        x[:, size // 3 : size // 3 + k] += 9
    return x


HINTS = ("none", "empty", "before", "noise", "same", "outside")


def make_hint(kind, scores, k, generator):
    rows, size = scores.shape
    if kind == "none":
        return None
    if kind == "before":  # the picks of a step whose scores were close
        noise = torch.randn(rows, size, generator=generator) * 0.3
        return (scores.nan_to_num() + noise).sort(descending=True).indices[:, :k].int()
    if kind == "outside":
        return torch.tensor([[-1, size, 2**31 - 1, -(2**31)]], dtype=torch.int32).repeat(rows, 9)
    shape = (rows, 0 if kind == "empty" else 33)
    noise = torch.randint(-9, 2 * size + 1, shape, generator=generator, dtype=torch.int32)
    return torch.full_like(noise, max(size - 1, 0)) if kind == "same" else noise
