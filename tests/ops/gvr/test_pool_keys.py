"""pool_keys against the compressed keys of one block after the other in float64."""

import pytest
import torch
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import pool_keys
from attnplug.ops.gvr import pool_keys as op

EPS = 1e-5


def call(device_path, pooled, *args, plan=None):
    """What the public op leaves in `pooled`, or the launcher where the op would not run it."""
    device, path = device_path
    pooled, *args = (x.to(device) if isinstance(x, torch.Tensor) else x for x in (pooled, *args))
    if path == "reference" or (device == "cuda" and plan is None):
        *tensors, ratio, eps, slots = args
        pool_keys(pooled, *tensors, ratio=ratio, eps=eps, slots=slots)
    else:
        op._allocate(pooled, *args)
        op.launch_pool_keys(pooled, *args, plan=plan)
    return pooled.cpu()


def exact(pooled, keys, cos, sin, weight, since, until, ratio, eps, slots, dtype=torch.float64):
    out, wide = pooled.clone().to(dtype), [x.to(dtype) for x in (keys, cos, sin, weight)]
    keys, cos, sin, weight = wide
    turned = cos.shape[2]
    for b in range(len(out)):
        tokens = torch.arange(keys.shape[1]) if slots is None else slots[b].long()
        for j in range(max(0, int(since[b])), min(int(until[b]), out.shape[1])):
            if (j + 1) * ratio > len(tokens):
                continue
            mine = tokens[j * ratio : (j + 1) * ratio]
            x = keys[b, mine].mean(0)
            x = x * (x.pow(2).mean() + eps).rsqrt() * (1 + weight)
            first, rest = x[:turned], x[turned:]
            half = torch.cat((-first[turned // 2 :], first[: turned // 2]))
            out[b, j] = torch.cat((first * cos[b, mine[0]] + half * sin[b, mine[0]], rest))
    return out


def inputs(seed, batch, size, width, turned, dtype=torch.float32):
    angles = random(seed, batch, size, turned)
    keys = random(seed + 1, batch, size, width, dtype=dtype)
    return keys, angles.cos().to(dtype), angles.sin().to(dtype), random(seed + 2, width).to(dtype)


@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, size = draw(st.integers(1, 2)), draw(st.integers(1, 90))
    width = draw(st.sampled_from([16, 48, 64]))
    turned = draw(st.sampled_from([2, 12, width]))
    ratio, room = draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 40))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    made = inputs(seed, batch, size, width, turned, dtype)
    ends = st.lists(st.integers(-2, room + 3), min_size=batch, max_size=batch)
    since, until = torch.tensor(draw(ends)), torch.tensor(draw(ends))
    slots = None
    if draw(st.booleans()):
        slots = random(seed + 5, batch, size).argsort(-1).int()
    pooled = random(seed + 6, batch, room, width, dtype=dtype)
    args = *made, since, until, ratio, EPS, slots
    plan = op.Plan(16, draw(st.integers(1, 3))) if device_path[1] == "kernel" else None
    found = call(device_path, pooled, *args, plan=plan)
    wanted = exact(pooled, *args)
    plain = exact(pooled, *args, dtype=dtype).double()
    epsilon = torch.finfo(dtype).eps
    allowed = 2 * (plain - wanted).abs().max() + 2 * epsilon * wanted.abs().max() + 1e-6
    assert (found.double() - wanted).abs().max() <= allowed
    kept = torch.arange(room)[None] < since.clamp(min=0)[:, None]
    assert torch.equal(found[kept], pooled[kept])


def test_views(device_path):
    """Keys in a larger cache, cosines and sines beside each other, turns of one row for all."""
    keys, cos, sin, weight = inputs(1, 2, 30, 32, 8)
    cache = torch.full((2, 40, 2, 32), torch.nan)
    cache[:, :30, 1] = keys
    both = torch.cat((cos[:1], sin[:1]), -1).expand(2, -1, -1)
    since, until = torch.zeros(2).long(), torch.tensor([7, 3])
    args = cache[:, :, 1], both[..., :8], both[..., 8:], weight, since, until, 4, EPS, None
    pooled = torch.zeros(2, 10, 32)
    found = call(device_path, pooled, *args)
    torch.testing.assert_close(found, exact(pooled, *args).float())
    half = call(device_path, pooled, args[0].half(), *args[1:])  # its keys of another dtype
    torch.testing.assert_close(half, found, atol=2e-2, rtol=2e-2)


def test_compiles_as_one_graph(device):
    keys, cos, sin, weight = (x.to(device) for x in inputs(2, 1, 20, 16, 4))
    ends = torch.zeros(1).long().to(device), torch.full((1,), 5).to(device)

    def fill(keys):
        pooled = torch.zeros(1, 5, 16, device=device)
        pool_keys(pooled, keys, cos, sin, weight, *ends, ratio=4, eps=EPS)
        return pooled

    compiled = torch.compile(fill, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(keys), fill(keys))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_size(dtype):
    keys, cos, sin, weight = inputs(3, 2, 1 << 15, 128, 64, dtype)
    since, until = torch.tensor([0, 8190]), torch.tensor([8192, 8191])
    pooled = torch.zeros(2, 8192, 128, dtype=dtype)
    args = keys, cos, sin, weight, since, until, 4, 1e-6, None
    found = call(("cuda", "kernel"), pooled, *args).double()
    wanted, plain = (exact(pooled, *args, dtype=kind).double() for kind in (torch.float64, dtype))
    assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 1e-6


WRONG = [
    ({"pooled": torch.zeros(1, 16)}, r"pooled has 2 dimensions, needs \[B,J,D\]"),
    ({"pooled": torch.zeros(1, 5, 16).double()}, "pooled is torch.float64"),
    ({"pooled": torch.zeros(1, 5, 20)}, "head dimension 20 is not a multiple of 16"),
    ({"pooled": torch.zeros(1, 16, 5).mT[:, :, :16]}, "pooled is not contiguous"),
    ({"keys": torch.zeros(1, 20, 16).double()}, "keys is torch.float64, needs float32"),
    ({"keys": torch.zeros(1, 20, 32)}, r"keys has shape \(1, 20, 32\), needs \[B,T,D\]"),
    ({"keys": torch.zeros(1, 16, 20).mT}, "keys has stride 20 in D"),
    ({"cos": torch.zeros(1, 20, 2)}, r"cos is torch.float32 \(1, 20, 2\) and sin"),
    ({"cos": torch.zeros(1, 20, 3), "sin": torch.zeros(1, 20, 3)}, "even up to 16"),
    ({"weight": torch.zeros(15)}, r"weight has shape \(15,\)"),
    ({"since": torch.zeros(1)}, "since is torch.float32"),
    ({"until": torch.zeros(2).long()}, r"until is torch.int64 \(2,\), needs int64 \[B\] = \[1\]"),
    ({"ratio": 0}, "ratio is 0, needs 1 to 256"),
    ({"slots": torch.zeros(1, 20)}, "slots is torch.float32"),
    ({"slots": torch.zeros(1, 20, device="meta").int()}, "slots is on meta, pooled on cpu"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    turns, ends = torch.zeros(1, 20, 4), torch.zeros(1).long()
    made = {"pooled": torch.zeros(1, 5, 16), "keys": torch.zeros(1, 20, 16), "cos": turns}
    made |= {"sin": turns, "weight": torch.zeros(16), "since": ends, "until": ends, "ratio": 4}
    with pytest.raises(ArgumentError, match="^pool_keys: .*" + message):
        pool_keys(**(made | change), eps=EPS)
