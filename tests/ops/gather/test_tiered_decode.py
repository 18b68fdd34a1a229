"""tiered_decode against the ops of a cache on the GPU, on the numba reference and on the Triton
kernels; their own tests hold those to fp64. And what is in the slots, against what should be."""

import pytest
import torch
from cases import random
from gather_cases import DEFAULTS, OPTIONS, ask_for_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import ResidentBlocks, gather_attention, select_blocks, tiered_decode
from attnplug.ops.gather import tiered_decode as op
from attnplug.ops.gather.attend_plan import Plan
from attnplug.ops.gather.block_bounds import empty_bounds, summary_parts

SIZE = 200


class Cache:
    """k, v with NaN where no token is yet, the ring of their last, and nothing in the slots."""

    def __init__(self, seed, batch, heads, width, length, slots, options, device="cpu", int8=False):
        block, local = options["block"], options["local"]
        parts = summary_parts(options["scoring"], int8)
        kv = random(seed, 2, batch, heads, SIZE, width)
        kv *= random(seed + 1, 1, batch, heads, 25, 1).exp().repeat_interleave(8, 3)
        kv[:, :, :, length:] = torch.nan
        self.k, self.v = kv.to(device)
        self.lengths = torch.tensor([length], device=device)
        self.bounds = empty_bounds(self.k, block, parts, dtype=torch.int8 if int8 else None)
        self.progress = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        self.near = ResidentBlocks.empty(
            batch, heads, SIZE, width, block, local, slots, torch.float32, torch.device(device)
        )
        last = torch.arange(max(0, length - local * block), length)
        self.near.ring[:, :, :, last % (local * block)] = torch.stack(
            [self.k[:, :, last], self.v[:, :, last]], 2
        )

    def append(self, new):
        at = int(self.lengths)
        self.k[:, :, at], self.v[:, :, at] = new[0, :, :, 0], new[1, :, :, 0]
        place = at % self.near.ring.shape[3]
        self.near.ring[:, :, :, place] = new[:, :, :, 0].permute(1, 2, 0, 3)
        self.lengths += 1


def run(path, cache, q, new, options, plan=None):
    """(out, lse); the token `new` is written by the op, or is there already where it is None."""
    args = [options.get(name) for name in OPTIONS]
    there = (q, cache.k, cache.v, *(new if new is not None else (None, None)))
    there = (*there, cache.bounds, cache.progress, *cache.near, cache.lengths, *args)
    if path == "reference" or (q.is_cuda and plan is None):
        return op._tiered_decode(*there)
    outputs = op._allocate(*there)
    op.launch_tiered_decode(*there, *outputs, plan=plan)
    return outputs


def wanted(cache, q, bounds, progress, options):
    """(out, lse, blocks) of a cache on the GPU that holds the token."""
    common = {x: options.get(x) for x in ("block", "sink", "local", "start", "key_mask")}
    common["lengths"] = cache.lengths
    choice = {x: options[x] for x in ("top_k", "scoring")}
    index = select_blocks(q, cache.k, bounds, progress, **choice, **common)
    more = {x: options.get(x) for x in ("scale", "softcap", "sinks")}
    return *gather_attention(q, cache.k, cache.v, index, **more, **common), index


def check_near(cache, index, options):
    """Every block that this step wanted is where the table says, as the cache has it, and so is
    the ring."""
    near, block = cache.near, options["block"]
    length = int(cache.lengths)
    for b, h in ((b, h) for b in range(index.shape[0]) for h in range(index.shape[1])):
        start = 0 if options.get("start") is None else int(options["start"][b])
        edge = max(length - 1 - start, 0) // block - options["local"] + 1
        for j in [*range(options["sink"]), *index[b, h, 0].tolist()]:
            if not 0 <= j < edge:
                continue
            slot, first = int(near.table[b, h, j]), start + j * block
            assert int(near.owner[b, h, slot]) == first
            keys = torch.stack([cache.k[b, h], cache.v[b, h]])[:, first : first + block]
            assert torch.equal(near.slots[b, h, slot], keys)
    width = near.ring.shape[3]
    last = torch.arange(max(0, length - width), length, device=near.ring.device)
    kept = torch.stack([cache.k[:, :, last], cache.v[:, :, last]], 2)
    assert torch.equal(near.ring[:, :, :, last % width], kept)


@settings(max_examples=10)
@given(data=st.data())
def test_steps_are_those_of_a_cache_on_the_gpu(device_path, data):
    device, path = device_path
    draw = data.draw
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seed, length = draw(st.integers(0, 99)), draw(st.integers(1, SIZE - 6))
    options = DEFAULTS | {
        "top_k": draw(st.sampled_from([0, 1, 3])),
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
        "scoring": draw(st.sampled_from(["bounds", "band"])),
        "softcap": draw(st.sampled_from([0.0, 2.5])),
    }
    if draw(st.booleans()):
        options["sinks"] = random(seed + 2, heads * group).to(device)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    if draw(st.booleans()):
        options["key_mask"] = (random(seed + 3, batch, SIZE) > -0.5).to(device)
    least = max(1, options["sink"] + options["top_k"])
    slots = draw(st.integers(least, least + 4))
    int8 = draw(st.booleans())
    cache = Cache(seed, batch, heads, 64, length, slots, options, device, int8)
    bounds, progress = cache.bounds.clone(), cache.progress.clone()
    for turn in range(4):
        q = random(seed + turn, batch, heads * group, 1, 64).to(device)
        new = random(seed + 9 + turn, 2, batch, heads, 1, 64).to(device)
        if turn % 2:
            cache.append(new)
            out, lse = run(path, cache, q, None, options)
        else:
            out, lse = run(path, cache, q, new, options)
            cache.lengths += 1
        want = wanted(cache, q, bounds, progress, options)
        assert (out - want[0]).abs().max() < 1e-5 * (1 + want[0].abs().max())
        seen = want[1] != -torch.inf
        assert torch.equal(lse != -torch.inf, seen)
        assert ((lse - want[1])[seen].abs() < 1e-5 * (1 + want[1][seen].abs())).all()
        check_near(cache, want[2], options)


def test_slots_are_the_references(device_path):
    """Table, owners, marks, hand and counts: to the letter, over many steps of few slots."""
    device, path = device_path
    options = DEFAULTS | {"top_k": 2}
    ours, theirs = (Cache(3, 1, 2, 64, SIZE - 20, 4, options, where) for where in (device, "cpu"))
    for cache in (ours, theirs):  # no block is everyone's favourite
        cache.k.copy_(random(7, *cache.k.shape))
    for turn in range(16):
        q, new = random(turn, 1, 4, 1, 64), random(turn + 50, 2, 1, 2, 1, 64)
        run(path, ours, q.to(device), new.to(device), options)
        run("reference", theirs, q, new, options)
        for cache in (ours, theirs):
            cache.lengths += 1
        for name, got, want in zip(ResidentBlocks._fields, ours.near, theirs.near, strict=True):
            assert torch.equal(got.cpu(), want), (turn, name)
    counted = theirs.near.counters[0, :, :2].sum(0).tolist()
    assert counted[0] == 2 * 16 * 3 and 16 < counted[1] < counted[0] - 8


def test_a_card_that_asks_for_sizes_gives_the_same(device, monkeypatch):
    ask_for_sizes(monkeypatch)
    ours, theirs = (Cache(3, 1, 2, 64, 150, 5, DEFAULTS, where) for where in (device, "cpu"))
    for turn in range(2):  # from the host, then from slots
        q, new = random(turn, 1, 4, 1, 64), random(turn + 50, 2, 1, 2, 1, 64)
        out, _ = run("kernel", ours, q.to(device), new.to(device), DEFAULTS)
        want, _ = run("reference", theirs, q, new, DEFAULTS)
        assert (out.cpu() - want).abs().max() < 1e-5 * want.abs().max()
        for cache in (ours, theirs):
            cache.lengths += 1
        for name in ("ring", "slots", "table", "counters"):
            got = getattr(ours.near, name).cpu().nan_to_num(7.5)
            assert torch.equal(got, getattr(theirs.near, name).nan_to_num(7.5)), (turn, name)
        assert torch.equal(ours.k.cpu().nan_to_num(7.5), theirs.k.nan_to_num(7.5))


@pytest.mark.parametrize(
    "plan",
    [Plan(16, 6, 4, 1, 32), Plan(16, 2, 4, 1, 32), Plan(16, 1, 4, 1, 64)],
    ids=["a tile a program", "three tiles", "one program a row"],
)
def test_pieces_do_not_matter(device_path, plan):
    device, path = device_path
    found = []
    for way in (None, plan):
        cache = Cache(5, 2, 2, 64, 170, 5, DEFAULTS, device)
        q, new = random(1, 2, 6, 1, 64).to(device), random(2, 2, 2, 2, 1, 64).to(device)
        for _ in range(2):
            out, _ = run("kernel" if way else path, cache, q, new, DEFAULTS, way)
        found.append(out)
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].abs().max()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_full_cache_gives_nan(device_path):
    device, path = device_path
    cache = Cache(5, 1, 2, 64, SIZE, 5, DEFAULTS, device)
    before = cache.k.clone()
    q, new = random(1, 1, 4, 1, 64).to(device), random(2, 2, 1, 2, 1, 64).to(device)
    out, _ = run(path, cache, q, new, DEFAULTS)
    assert out.isnan().all() and torch.equal(cache.k, before)
    out, _ = run(path, cache, q, None, DEFAULTS)
    assert out.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_surfaces_from_slots_and_ring(device_path, bad):
    device, path = device_path
    for place in (5, 70, 169):
        cache = Cache(5, 1, 2, 64, 170, 5, DEFAULTS, device)
        cache.k[0, 1, place] = bad
        cache.near.ring[0, 1, 0, place % 32] = cache.k[0, 1, place]
        q = random(1, 1, 4, 1, 64).to(device)
        for _ in range(2):  # from the host, then from where it was put
            out, _ = run(path, cache, q, None, DEFAULTS)
            assert out[0, 2:].isnan().any() and out[0, :2].isfinite().all()


def test_refuses():
    cache = Cache(5, 1, 2, 64, 170, 5, DEFAULTS)
    q, new = random(1, 1, 4, 1, 64), random(2, 2, 1, 2, 1, 64)
    options = {x: y for x, y in DEFAULTS.items()} | {"lengths": cache.lengths}

    def call(q=q, near=cache.near, **more):
        there = (q, cache.k, cache.v, cache.bounds, cache.progress, near)
        return tiered_decode(*there, **(options | more))

    for change, message in (
        ({"q": random(1, 1, 4, 2, 64)}, "q has 2 queries a row, needs 1"),
        ({"new": (new[0], new[1].double())}, r"new_v is torch.float64 \(1, 2, 1, 64\)"),
        ({"new": new[:, :, :1]}, r"new_k is .*, needs torch.float32 \[B,Hkv,1,D\]"),
        ({"top_k": 5}, r"near has 5 slots, needs sink \+ top_k = 6"),
        ({"local": 3}, r"near.ring is .*needs torch.float32 \[1, 2, 2, 48, 64\]"),
        ({"near": cache.near._replace(owner=cache.near.owner.long())}, "near.owner is torch.int64"),
        ({"near": cache.near._replace(slots=cache.near.slots.mT.contiguous().mT)}, "contiguous"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(**change)
    with pytest.raises(GradientError):
        call(q=q.requires_grad_())
