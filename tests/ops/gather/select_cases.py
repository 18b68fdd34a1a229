"""What the tests of select_blocks share: a call on a path, an fp64 oracle that reads the keys or
what summaries say of them, and what a list must hold."""

import itertools

import torch
from cases import to_device
from gather_cases import decoded, empty, hold_progress

from attnplug.ops.gather import select_blocks as op
from attnplug.ops.gather.block_bounds import summary_parts

NAMES = ("block", "top_k", "sink", "local", "scoring", "lengths", "start", "key_mask")
DEFAULTS = {"block": 16, "top_k": 2, "sink": 1, "local": 2, "scoring": "bounds"}


def select(device_path, q, k, state=None, plan=None, **options):
    """The public op, or the Triton launcher where the op would not run it. `state` is (bounds,
    progress) on the CPU, updated; a fresh cache's without."""
    device, path = device_path
    options = DEFAULTS | options
    bounds, progress = state or empty(k, options["block"])
    args = [options.get(name) for name in NAMES]
    there = to_device((q, k, bounds, progress), device)
    args = to_device(args, device)
    if plan is None and (path == "reference" or device == "cuda"):
        out = op.select_blocks(*there, **dict(zip(NAMES, args, strict=True)))
    else:
        out = op.allocate_index(*there, *args).fill_(-7)
        op.launch_select_blocks(*there, *args, out, plan=plan)
    bounds.copy_(there[2])
    progress.copy_(there[3])
    if state is None and options["top_k"] > 0:
        hold_progress(progress, k, options)
    return out.cpu()


def codes(k, block, scoring="bounds"):
    """(INT8 summaries of a fresh cache, its progress)."""
    return empty(k, block, summary_parts(scoring, True), dtype=torch.int8)


def said(bounds, blocks):
    """What INT8 summaries say, `[B, Hkv, blocks, 2, D]` fp64."""
    return decoded(bounds, blocks)[0]


def edges(keys, scoring="bounds"):
    """(max, min) of keys `[n, D]`, or the edges of their band."""
    if scoring != "band":
        return keys.amax(0), keys.amin(0)
    half = 0.8 * keys.std(0, unbiased=False)
    return keys.mean(0) + half, keys.mean(0) - half


def scores(
    q,
    k,
    b,
    h,
    t,
    *,
    block,
    sink,
    local,
    scoring,
    lengths=None,
    start=None,
    key_mask=None,
    words=None,
    **_,
):
    """({candidate block: fp64 score}, what rounding may change in one) of one query; by the keys,
    or by what summaries say of them (`words`)."""
    group = q.shape[1] // k.shape[1]
    length = k.shape[2] if lengths is None else int(lengths.expand(k.shape[0])[b])
    low = 0 if start is None else int(start.expand(k.shape[0])[b])
    query = q[b, h * group : (h + 1) * group, t].double()
    position = length - q.shape[2] + t
    found = {}
    for j in range(sink, (position - low) // block - local + 1):
        at = torch.arange(low + j * block, low + (j + 1) * block)
        at = at if key_mask is None else at[key_mask[b, at]]
        if len(at) == 0:
            continue
        keys = k[b, h, at].double()
        high, deep = edges(keys, scoring) if words is None else words[b, h, j]
        above = query.clamp(min=0) @ high + query.clamp(max=0) @ deep
        assert scoring == "band" or (query @ keys.T).max() <= above.max() + 1e-9
        found[j] = above.max()
    values = {j: float(score) for j, score in found.items()}
    return values, 2e-5 * max([1.0, *map(abs, values.values())])


def hold(index, q, k, **options):
    """Every list is as long as it can be, has no block twice, offers candidates only, and leaves
    out nothing that scores clearly higher; best first."""
    options = DEFAULTS | options
    assert index.shape == (k.shape[0], k.shape[1], q.shape[2], options["top_k"])
    # Sums of squares differ a little more.
    loose = {"bounds": 1, "band": 50}[options["scoring"]]
    for b, h, t in itertools.product(*map(range, index.shape[:3])):
        value, room = scores(q, k, b, h, t, **options)
        room *= loose if q.dtype == torch.float32 else 100 * loose
        room *= 1 if options.get("words") is None else 50  # 15 bits of a query
        picked = [j for j in index[b, h, t].tolist() if j != -1]
        assert index[b, h, t, len(picked) :].eq(-1).all()
        assert len(picked) == len(set(picked)) == min(options["top_k"], len(value))
        assert set(picked) <= set(value)
        left = [value[j] for j in value if j not in picked]
        if left and picked:
            assert max(left) <= min(value[j] for j in picked) + room
        for a, c in itertools.pairwise(picked):
            assert value[a] >= value[c] - room
