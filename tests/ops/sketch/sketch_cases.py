"""Caches with codes, and the two ways to run a step of sketch on them."""

import torch

from attnplug.ops.sketch import host_decode as host
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import scan_sketch as scan
from attnplug.ops.sketch import sketch_decode as op
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.state import Basis, Codes, empty_codes

DEFAULTS = {"scale": 0.125, "top_k": 60, "tail": "regression", "softcap": 0.0}
PICKING = pick.Plan(2, tile=1024, warps=4)
PLAN = op.Plan(2, scan.ALL_PARTS, scan.Plan(256, 4, 2), PICKING, 2, 4, 32)


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache(seed, batch=2, kv_heads=2, group=3, tokens=1300, width=64, dtype=torch.float32):
    """Queries `[B, Hq, 40, D]`, the last of which is a step's, keys with an outlying channel, and
    values that depend on them."""
    k, v = random(seed, 2, batch, tokens, kv_heads, width).transpose(2, 3)
    k[..., 3] *= 6
    v = v + 0.5 * k.roll(1, -1)
    q = random(seed + 1, batch, kv_heads * group, 40, width)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def rows_of(options):
    return {name: options.get(name) for name in ("lengths", "start", "key_mask")}


def coded(q, k, v, size=24, **options):
    """(basis, codes) of a cache after its prefill."""
    basis = fit_basis(k, v, q, size=size, **rows_of(options))
    codes = empty_codes(k, size)
    encode_keys(k, v, basis.encoder, *codes, **rows_of(options))
    return basis, codes


def step(
    device_path,
    q,
    k,
    v,
    basis,
    codes,
    plan=PLAN,
    new=None,
    count=True,
    recent=None,
    fixed=None,
    queries=1,
    **more,
):
    """One step from the last query, or from so many `queries`: the public op, or the Triton
    launchers where the op would not run them; with `fixed` that of a cache in host memory. What it
    writes is in the tensors that came, wherever it ran."""
    device, path = device_path
    options, near = DEFAULTS | more, () if fixed is None else tuple(fixed)
    behind = (recent, options.get("lengths"), options.get("hint"), *near)
    written = [k, v, *codes, *(x for x in behind if x is not None)]
    there = {id(x): x.to(device) for x in (*written, *basis, *(new or ()))}
    moved = lambda x: there.get(id(x), x.to(device)) if isinstance(x, torch.Tensor) else x  # noqa: E731
    args = {name: moved(x) for name, x in options.items()}
    tensors = [moved(x) for x in (q[:, :, -queries:], k, v, *basis, *codes)]
    pair = None if new is None else tuple(map(moved, new))
    near = tuple(map(moved, near))
    if path == "reference" or device == "cuda":
        args |= {"new": pair, "count": count, "recent": moved(recent)}
        if fixed is None:
            out, lse = op.sketch_decode(*tensors, **args)
        else:
            out, lse = host.sketch_host_decode(*tensors, host.FixedPart(*near), **args)
    else:
        behind = {"new_k": None, "new_v": None, "recent": moved(recent)}
        if pair is not None:
            behind |= {"new_k": pair[0], "new_v": pair[1]}
        named = dict(zip((*"qkv", *Basis._fields, *Codes._fields), tensors, strict=True))
        call = op.Call(**dict.fromkeys(op.Call._fields) | args | named | behind)
        module, launch = op, op.launch_sketch_decode
        if fixed is not None:
            module, launch = host, host.launch_sketch_host_decode
        out, lse = module._allocate(*call, *near)
        launch(*call, *near, out, lse, plan=plan, count=count)
    for own in written:
        own.copy_(there[id(own)])
    return out.cpu(), lse.cpu()
