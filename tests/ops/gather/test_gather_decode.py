"""gather_decode against the steps that it is made of, on the numba reference and on the Triton
kernels; their own tests hold those to fp64."""

import pytest
import torch
from cases import WIDTHS, random, to_device
from gather_cases import DEFAULTS, OPTIONS, ask_for_sizes, empty
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import gather_attention, select_blocks
from attnplug.ops.gather import gather_attention as attend
from attnplug.ops.gather import gather_decode as op
from attnplug.ops.gather import select_blocks as select
from attnplug.ops.gather.attend_plan import Plan as AttendPlan
from attnplug.ops.gather.block_bounds import empty_bounds, frame_of, summary_parts


class Cache:
    """k, v of random tokens, blocks of different spread; NaN where no token is yet."""

    def __init__(
        self, seed, batch, heads, size, width, lengths, block=16, parts=2, dtype=None, int8=False
    ):
        self.block = block
        kv = random(seed, 2, batch, heads, size, width)
        kv *= (
            random(seed + 1, 1, batch, heads, size // 16 + 1, 1)
            .exp()
            .repeat_interleave(16, 3)[:, :, :, :size]
        )
        self.lengths = torch.tensor(lengths)
        hidden = torch.arange(size) >= self.lengths.expand(batch)[:, None]
        kv = kv.masked_fill(hidden[None, :, None, :, None], torch.nan).to(dtype or torch.float32)
        self.k, self.v = kv
        self.bounds, self.progress = empty(self.k, block, parts, torch.int8 if int8 else None)

    def tensors(self):
        return {x: getattr(self, x) for x in ("k", "v", "bounds", "progress", "lengths")}

    def copy(self, device="cpu"):
        other = object.__new__(Cache)
        other.block = self.block
        for name, tensor in self.tensors().items():
            setattr(other, name, tensor.to(device, copy=True))
        return other


def step(device_path, cache, q, new, plan=None, **options):
    """gather_decode on a copy of the cache: (out, lse, the copy)."""
    device, path = device_path
    options = DEFAULTS | options
    args = to_device([options.get(name) for name in OPTIONS], device)
    cache = cache.copy(device)
    there = (q.to(device), cache.k, cache.v, *new.to(device), cache.bounds, cache.progress)
    if path == "reference" or (device == "cuda" and plan is None):
        out, lse = op._gather_decode(*there, cache.lengths, *args)
    else:
        out, lse = op._allocate(*there, cache.lengths, *args)
        op.launch_gather_decode(*there, cache.lengths, *args, out, lse, plan=plan)
    return out.cpu(), lse.cpu(), cache.copy()


def apart(cache, q, new, **options):
    """The same by torch and the two ops, on the CPU: (out, lse, the cache after it)."""
    options = DEFAULTS | options
    cache = cache.copy()
    for b, at in enumerate(cache.lengths.expand(q.shape[0]).tolist()):
        cache.k[b, :, at], cache.v[b, :, at] = new[0, b, :, 0], new[1, b, :, 0]
    cache.lengths += 1
    common = {x: options.get(x) for x in ("block", "sink", "local", "start", "key_mask")}
    common["lengths"] = cache.lengths
    choice = {x: options[x] for x in ("top_k", "scoring")}
    index = select_blocks(q, cache.k, cache.bounds, cache.progress, **choice, **common)
    more = {x: options.get(x) for x in ("scale", "softcap", "sinks")}
    out, lse = gather_attention(q, cache.k, cache.v, index, **more, **common)
    return out, lse, cache


def same_codes(found, wanted, blocks):
    """But for what a division rounds to, and of bands the sums that they are made of."""
    assert ((found.int() - wanted.int())[:, :, :blocks].abs() <= 1).all()
    for a, b in zip(frame_of(found, blocks), frame_of(wanted, blocks), strict=True):
        if found.shape[3] == 1:
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert torch.allclose(a, b, rtol=1e-6)


def hold(got, want, atol=1e-5, summaries=True, band=False):
    out, lse, cache = got
    for name, tensor in want[2].tensors().items():
        if name in ("bounds", "progress") and not summaries:
            continue
        found, wanted = getattr(cache, name).nan_to_num(7.5), tensor.nan_to_num(7.5)
        if found.dtype == torch.int8:
            same_codes(found, wanted, -(-cache.k.shape[2] // cache.block))
        elif name == "bounds" and band:  # a sum rounds as it was ordered
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, wanted), name
    assert (out - want[0]).abs().max() <= atol * (1 + want[0].abs().max())
    seen = want[1] != -torch.inf
    assert torch.equal(lse != -torch.inf, seen)
    assert ((lse - want[1])[seen].abs() <= atol + 1e-5 * want[1][seen].abs()).all()


@given(data=st.data())
def test_equals_its_parts(device_path, data):
    draw = data.draw
    batch, heads, seed = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 99))
    group, width = draw(st.sampled_from([1, 3])), draw(st.sampled_from(WIDTHS))
    size = draw(st.integers(1, 300))
    rows = draw(st.sampled_from([1, batch]))
    lengths = draw(st.lists(st.integers(0, size - 1), min_size=rows, max_size=rows))
    options = {
        "top_k": draw(st.sampled_from([0, 1, 3, 8])),
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
        "scoring": draw(st.sampled_from(["bounds", "band"])),
        "softcap": draw(st.sampled_from([0.0, 2.5])),
    }
    if draw(st.booleans()):
        options["sinks"] = random(seed + 2, heads * group)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 3, batch, size) > -0.5
    int8 = draw(st.booleans())
    parts = summary_parts(options["scoring"], int8)
    cache = Cache(seed, batch, heads, size, width, lengths, parts=parts, int8=int8)
    q = random(seed + 4, batch, heads * group, 1, width)
    new = random(seed + 5, 2, batch, 1, heads, width).transpose(2, 3)
    got, want = step(device_path, cache, q, new, **options), apart(cache, q, new, **options)
    # a window needs no summaries
    hold(got, want, summaries=options["top_k"] > 0, band=options["scoring"] == "band")


def plans():
    """Everything that the shipped plans use, in small: flat and grouped selection,
    repeated chunks, early reads; a tile a program, several, one program a row, blocks in tiles."""
    select, attend = op.SelectPlan(16, 0, 4, 1), AttendPlan(16, 6, 4, 1, 32)
    yield "flat", op.Plan(select, attend)
    yield "soon", op.Plan(select._replace(soon=True), attend)
    yield "repeat", op.Plan(select._replace(repeat=2, stages=2), attend)
    yield "groups", op.Plan(select._replace(members=4), attend)
    yield "pieces", op.Plan(select, attend._replace(splits=4, stages=2))
    yield "fused", op.Plan(select, attend._replace(splits=1, stages=3))
    yield "wide tiles", op.Plan(select, attend._replace(tile=64, splits=2))
    ahead = attend._replace(splits=2, stages=3, ahead=True)
    yield "looked up", op.Plan(select, ahead)
    yield "wide tiles, looked up", op.Plan(select, ahead._replace(tile=64))


@pytest.mark.parametrize("name, plan", list(plans()))
@pytest.mark.parametrize("size, length", [(200, 130), (560, 559), (90, 20)])
def test_any_plan_gives_the_same(device_path, name, plan, size, length):
    """One that covers more steps than a block has, so that summaries are made on the way."""
    if device_path[1] == "reference":
        plan = None
    cache = Cache(0, 2, 2, size, 64, [length, max(0, length - 35)])
    options = {"start": torch.tensor([0, 9], dtype=torch.int32)}
    for token in range(2):
        q, new = random(token, 2, 6, 1, 64), random(token + 9, 2, 2, 2, 1, 64)
        if int(cache.lengths.max()) == size:
            break
        want = apart(cache, q, new, **options)
        hold(step(device_path, cache, q, new, plan, **options), want)
        cache = want[2]


def test_a_card_that_asks_for_sizes_gives_the_same(device, monkeypatch):
    ask_for_sizes(monkeypatch)
    cache = Cache(0, 2, 2, 90, 64, [70, 40])
    q, new = random(0, 2, 6, 1, 64), random(9, 2, 2, 2, 1, 64)
    hold(step((device, "kernel"), cache, q, new), apart(cache, q, new))


def test_growth_over_block_edges(device_path):
    cache = Cache(0, 1, 2, 120, 64, [70])
    for token in range(20):
        q, new = random(token, 1, 4, 1, 64), random(token + 50, 2, 1, 2, 1, 64)
        got = step(device_path, cache, q, new)
        hold(got, apart(cache, q, new))
        cache = got[2]
    assert cache.lengths.tolist() == [90] and cache.progress.tolist() == [[4, 0]]


def test_the_count_can_be_the_callers(device):
    cache = Cache(0, 2, 2, 200, 64, [130]).copy(device)
    q, new = random(0, 2, 6, 1, 64).to(device), random(9, 2, 2, 2, 1, 64).to(device)
    want = apart(cache.copy(), q.cpu(), new.cpu())
    options = {x: DEFAULTS[x] for x in ("scale", "block", "top_k", "sink", "local")}
    args = (cache.k, cache.v, *new, cache.bounds, cache.progress, cache.lengths.reshape(()))
    got = op.gather_decode(q, *args, count=False, **options)
    assert cache.lengths.tolist() == [130]
    cache.lengths += 1
    hold((got[0].cpu(), got[1].cpu(), cache.copy()), want)


def test_ties_go_to_the_lower_block(device_path):
    """Ranks and sorts agree on who is first among equals."""
    cache = Cache(0, 1, 1, 330, 64, [320])
    cache.k[:, :, :320] = random(0, 1, 1, 16, 64).repeat(1, 1, 20, 1)
    q, new = random(1, 1, 2, 1, 64), random(2, 2, 1, 1, 1, 64)
    want = apart(cache, q, new, top_k=4)
    for _, plan in plans() if device_path[1] == "kernel" else [("", None)]:
        hold(step(device_path, cache, q, new, plan, top_k=4), want)


@pytest.mark.parametrize("splits", [1, 6])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_full_row_gives_nan_and_writes_nothing(device_path, splits):
    cache = Cache(0, 2, 2, 100, 64, [100, 40])
    q, new = random(1, 2, 4, 1, 64), random(2, 2, 2, 2, 1, 64)
    plan = None
    if device_path[1] == "kernel":
        plan = op.Plan(op.SelectPlan(16, 0, 4, 1), AttendPlan(16, splits, 4, 1, 32))
    mask = torch.ones(2, 100, dtype=torch.bool)
    for options in ({}, {"key_mask": mask}):
        out, lse, after = step(device_path, cache, q, new, plan, **options)
        assert out[0].isnan().all() and lse[0].isnan().all()
        assert torch.equal(after.k[0], cache.k[0]) and torch.equal(after.v[0], cache.v[0])
        assert out[1].isfinite().all() and torch.equal(after.k[1, :, 40], new[0, 1, :, 0])


@pytest.mark.parametrize("where", ["q", "new_k", "new_v"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_bad_numbers_of_the_token_surface(device_path, where):
    cache, q = Cache(0, 1, 2, 200, 64, [150]), random(1, 1, 4, 1, 64)
    new = random(2, 2, 1, 2, 1, 64)
    {"q": q, "new_k": new[0], "new_v": new[1]}[where][0, 1, 0, 3] = torch.nan
    out, _, _ = step(device_path, cache, q, new)
    heads = {"q": [1], "new_k": [2, 3], "new_v": [2, 3]}[where]
    assert out.isnan().any(-1)[0, :, 0].nonzero().flatten().tolist() == heads


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    """Step after step on one cache, which the compiled code writes in place."""
    torch._dynamo.reset()
    cache = Cache(0, 1, 2, 200, 64, [0]).copy(device)
    options = {x: DEFAULTS[x] for x in ("scale", "block", "top_k", "sink", "local", "scoring")}

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def compiled(q, k, v, new, bounds, progress, lengths):
        return op.gather_decode(q * 2, k, v, *new, bounds, progress, lengths, **options)

    tokens = [(random(t, 1, 4, 1, 64), random(t + 50, 2, 1, 2, 1, 64)) for t in range(70)]
    wanted = [(None, None, cache.copy())]
    for q, new in tokens:  # before the first compiled call: numba changes torch's thread count
        wanted.append(apart(wanted[-1][2], q * 2, new))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for (q, new), want in zip(tokens, wanted[1:], strict=True):
            got = compiled(
                q.to(device),
                cache.k,
                cache.v,
                new.to(device),
                cache.bounds,
                cache.progress,
                cache.lengths,
            )
            hold((got[0].cpu(), got[1].cpu(), cache.copy()), want)


WRONG = [
    ({"q": torch.zeros(1, 4, 2, 64)}, "q has 2 queries a row, needs 1"),
    ({"new_k": torch.zeros(1, 2, 2, 64)}, r"new_k is .*needs torch.float32 \[B,Hkv,1,D\]"),
    ({"new_v": torch.zeros(1, 2, 1, 64).half()}, "new_v is torch.float16"),
    ({"v": torch.zeros(1, 2, 64, 100).mT}, "v has a stride of 100 in D"),
    ({"top_k": 257}, "top_k is 257"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    cache = Cache(0, 1, 2, 100, 64, [40])
    new = {"new_k": torch.zeros(1, 2, 1, 64), "new_v": torch.zeros(1, 2, 1, 64)}
    inputs = {"q": torch.zeros(1, 4, 1, 64), **new, **cache.tensors()} | DEFAULTS | change
    with pytest.raises(ArgumentError, match=message):
        op.gather_decode(**inputs)


SHIPPED = [
    (1, 8192, 8, {}),
    (1, 131072, 8, {}),
    (1, 131072, 8, {"exact": True}),
    (8, 131072, 8, {"exact": True}),
    (1, 131072, 32, {}),
    (1, 1 << 20, 8, {}),
    (8, 131072, 8, {}),
    (8, 131072, 32, {}),
    (64, 8192, 8, {}),
    (8, 131072, 8, {"masked": True}),
    (1, 131072, 64, {"block": 16, "local": 32}),
    (1, 8192, 256, {"block": 16, "local": 32, "scoring": "band"}),
    (1, 131072, 256, {"block": 16, "local": 32, "scoring": "band"}),
    (1, 1 << 20, 256, {"block": 16, "local": 32, "scoring": "band"}),
    (8, 131072, 256, {"block": 16, "local": 32, "scoring": "band"}),
    (8, 131072, 8, {"scoring": "band", "masked": True}),
    (2, 32768, 32, {"scoring": "band", "width": 80}),
    (8, 32768, 8, {"width": 64}),
    (8, 32768, 8, {"width": 80}),
    (8, 32768, 8, {"width": 96}),
    (2, 32768, 8, {"width": 256}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("batch, size, top_k, more", SHIPPED)
def test_shipped_plans_equal_unpipelined_ones(batch, size, top_k, more):
    """At round sizes, where Triton 3.6 has compiled pipelined loops wrong; many calls, as kernels
    launched early overtake one another only now and then."""
    width, block, local = more.get("width", 128), more.get("block", 128), more.get("local", 4)
    scoring, size = more.get("scoring", "bounds"), size // 16 * 16
    k, v = torch.randn(2, batch, 4, size, width, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(batch, 28, 1, width, dtype=torch.bfloat16, device="cuda")
    new = k[:, :, -1:].clone(), v[:, :, -1:].clone()
    start = key_mask = None
    if more.get("masked"):
        start = torch.full((batch,), 77, dtype=torch.int32, device="cuda")
        key_mask = (torch.arange(size, device="cuda") >= 77).expand(batch, size).contiguous()
        key_mask[:, size // 2] = False
    int8 = not more.get("exact")
    parts = summary_parts(scoring, int8)
    bounds = empty_bounds(k, block, parts, dtype=torch.int8 if int8 else None)
    progress = torch.zeros(batch, 2, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([size], device="cuda")

    args = (
        q,
        k,
        bounds,
        progress,
        block,
        top_k,
        1,
        local,
        scoring,
        lengths,
        start,
        key_mask,
    )
    index = select.allocate_index(*args)
    members = 16 if size // block > 512 else 0
    select.launch_select_blocks(*args, index, plan=op.SelectPlan(16, members, 4, 4))
    args = (q, k, v, index, width**-0.5, block, 1, local, lengths, start, key_mask, 0.0, None)
    want, want_lse = attend.allocate_attention(*args)
    tile = 64 if width <= 128 else 32
    tiles = (1 + local + top_k) * block // tile
    attend.launch_gather_attention(*args, want, want_lse, AttendPlan(tile, tiles, 4, 1, 32))
    for turn in range(50):
        if turn == 25:
            progress.zero_()
            bounds.fill_(-77 if int8 else torch.nan)
        k[:, :, -1] = v[:, :, -1] = torch.nan
        lengths.fill_(size - 1)
        out, lse = op.gather_decode(
            q,
            k,
            v,
            *new,
            bounds,
            progress,
            lengths,
            scale=width**-0.5,
            block=block,
            top_k=top_k,
            local=local,
            scoring=scoring,
            start=start,
            key_mask=key_mask,
        )
        assert (out.float() - want.float()).abs().max() <= 2e-2 * want.abs().max()
        assert (lse - want_lse).abs().max() < 1e-3
        assert int(lengths) == size and torch.equal(k[:, :, -1:], new[0])
        assert torch.equal(v[:, :, -1:], new[1])
