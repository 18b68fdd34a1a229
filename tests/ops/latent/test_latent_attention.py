"""latent_attention against a softmax in float64 over expanded keys, with picks and without."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import latent_attention
from attnplug.ops.common.device import Card
from attnplug.ops.latent import latent_attention as op

SCALE = 0.2


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dtypes(device_path):
    """Those that the path can multiply: Triton's interpreter cannot multiply bfloat16."""
    every = [torch.float32, torch.float16]
    return every if device_path == ("cpu", "kernel") else [*every, torch.bfloat16]


def inputs(seed, batch, queries, heads, size, width, turned, dtype=torch.float32):
    """q_latent, q_rope, latents, rope."""
    return (
        random(seed, batch, queries, heads, width, dtype=dtype),
        random(seed + 1, batch, queries, heads, turned, dtype=dtype),
        random(seed + 2, batch, size, width, dtype=dtype),
        random(seed + 3, batch, size, turned, dtype=dtype),
    )


def some_picks(seed, batch, queries, size, count):
    """Picks of any tokens, in any order, none twice, with -1 among them."""
    order = random(seed, batch, queries, max(size, count)).argsort(-1)[..., :count]
    return order.masked_fill((order >= size) | (order % 7 == 3), -1).int()


def call(device_path, tensors, picks=None, lengths=None, key_mask=None, plan=None, sinks=None):
    """out on the CPU; by the public op, or by the launcher where the op would not run it."""
    device, path = device_path
    given = *tensors, picks, sinks, lengths, key_mask
    *tensors, picks, sinks, lengths, key_mask = (x if x is None else x.to(device) for x in given)
    if path == "reference" or (device == "cuda" and plan is None):
        rows = {"sinks": sinks, "lengths": lengths, "key_mask": key_mask}
        return latent_attention(*tensors, picks, scale=SCALE, **rows).cpu()
    args = *tensors, picks, SCALE, sinks, lengths, key_mask
    out = op._allocate(*args)
    op.launch_latent_attention(*args, out, plan=plan)
    return out.cpu()


def visible(tensors, picks=None, lengths=None, key_mask=None):
    """Which tokens `[B,S,T]` a query reads."""
    (batch, queries), size = tensors[0].shape[:2], tensors[2].shape[1]
    length = torch.tensor([size]) if lengths is None else lengths.long().clamp(0, size)
    own = length.expand(batch)[:, None] - queries + torch.arange(queries)
    seen = torch.arange(size) <= own[:, :, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None]
    if picks is not None:
        listed = torch.zeros(batch, queries, size + 1, dtype=torch.bool)
        seen = seen & listed.scatter(2, picks.long() % (size + 1), True)[..., :size]
    return seen


def exact(tensors, seen, dtype=torch.float64, sinks=None):
    q_latent, q_rope, latents, rope = (x.to(dtype) for x in tensors)
    s = torch.einsum("bshr,btr->bsht", q_latent, latents)
    s = (s + torch.einsum("bshp,btp->bsht", q_rope, rope)) * SCALE
    s = s.masked_fill(~seen[:, :, None], -torch.inf)
    if sinks is not None:
        more = sinks.to(dtype)[:, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, more], -1)
    p = s.softmax(-1)[..., : seen.shape[2]].nan_to_num(0.0)
    return torch.einsum("bsht,btr->bshr", p, latents)


def assert_close(found, tensors, seen, sinks=None):
    """Four times what the same formula errs by in the inputs' own precision."""
    wanted = exact(tensors, seen, sinks=sinks)
    plain = exact(tensors, seen, tensors[0].dtype, sinks)
    assert found.dtype == tensors[0].dtype and found.shape == tensors[0].shape
    error = (found.double() - wanted).abs().max()
    assert error <= 4 * (plain.double() - wanted).abs().max() + 2e-6
    assert (found[~seen.any(-1)] == 0).all()


@given(data=st.data())
def test_is_the_softmax_over_what_is_read(device_path, data):
    draw = data.draw
    batch, queries = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 5]))
    heads, turned = draw(st.sampled_from([1, 2, 6, 20])), draw(st.sampled_from([0, 1, 4, 16]))
    width = draw(st.sampled_from([16, 40, 64]))
    size = queries + draw(st.sampled_from([0, 1, 63, 100]))
    seed, dtype = draw(st.integers(0, 999)), draw(st.sampled_from(dtypes(device_path)))
    tensors = inputs(seed, batch, queries, heads, size, width, turned, dtype)
    options = {}
    if draw(st.booleans()):
        count = draw(st.sampled_from([1, 9, 70, 130]))
        options["picks"] = some_picks(seed + 4, batch, queries, size, count)
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(-2, size + 9), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 5, batch, size) > draw(st.sampled_from([-0.5, 9]))
    sinks = random(seed + 6, heads) if draw(st.booleans()) else None
    found = call(device_path, tensors, **options, sinks=sinks)
    assert_close(found, tensors, visible(tensors, **options), sinks)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("rows, tile", [(16, 16), (32, 64)])
def test_plans(device_path, listed, splits, rows, tile):
    """Heads of a query in blocks, or pairs of several queries; pieces without a token too."""
    if device_path[1] == "reference":
        pytest.skip("has no plans")
    tensors = inputs(20, 2, 7, 20, 150, 48, 8)
    picks = some_picks(21, 2, 7, 150, 90) if listed else None
    options = {"picks": picks, "lengths": torch.tensor([150, 30])}
    plan, sinks = op.Plan(rows, tile, splits, 4, 2, 16), random(22, 20)
    found = call(device_path, tensors, plan=plan, sinks=sinks, **options)
    assert_close(found, tensors, visible(tensors, **options), sinks)


@pytest.mark.parametrize("listed", [False, True])
def test_views(device_path, listed):
    """Caches that are larger, queries from transposes."""
    tensors = inputs(30, 2, 5, 4, 60, 32, 16)
    picks = some_picks(31, 2, 5, 60, 20) if listed else None
    wanted = call(device_path, tensors, picks)
    cache = torch.full((2, 1, 80, 48), torch.nan)
    cache[:, 0, 10:70, :32], cache[:, 0, 10:70, 32:] = tensors[2:]
    latents, rope = cache[:, 0, 10:70, :32], cache[:, 0, 10:70, 32:]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:2]]
    apart = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in tensors[:2]]
    for queries in (strided, apart):
        assert torch.equal(call(device_path, (*queries, latents, rope), picks), wanted)


@pytest.mark.parametrize("listed", [False, True])
def test_what_is_not_seen_is_not_read(device_path, listed):
    tensors = inputs(40, 1, 3, 2, 120, 16, 4)
    mask = torch.ones(1, 120, dtype=torch.bool)
    mask[:, 10:20] = False
    picks = some_picks(41, 1, 3, 120, 100) if listed else None
    options = {"picks": picks, "lengths": torch.tensor([80]), "key_mask": mask}
    wanted = call(device_path, tensors, **options)
    for cache in tensors[2:]:
        cache[:, 10:20] = cache[:, 80:] = torch.nan
    assert torch.equal(call(device_path, tensors, **options), wanted)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_a_nan_surfaces(device_path, listed, part):
    tensors = inputs(50, 2, 1, 3, 40, 16, 4)
    picks = torch.arange(40, dtype=torch.int32).expand(2, 1, 40) if listed else None
    tensors[part][0, 0] = torch.nan
    found = call(device_path, tensors, picks)
    assert found[0].isnan().all() and not found[1].isnan().any()


def test_a_list_of_all_is_as_no_list(device_path):
    tensors = inputs(60, 2, 6, 4, 90, 32, 8)
    every = torch.arange(90, dtype=torch.int32).expand(2, 6, 90)
    seen = visible(tensors)
    for picks in (None, every, every.flip(-1)):
        assert_close(call(device_path, tensors, picks), tensors, seen)


def test_an_empty_list_gives_zeros(device_path):
    tensors = inputs(61, 2, 3, 4, 9, 32, 8)
    assert (call(device_path, tensors, torch.empty(2, 3, 0, dtype=torch.int32)) == 0).all()
    assert (call(device_path, tensors, torch.full((2, 3, 5), -1, dtype=torch.int32)) == 0).all()


CARDS = {
    "4090": Card.made("nvidia", (8, 9), 128, 101376),
    "A100": Card.made("nvidia", (8, 0), 108, 166912),
    "H200": Card.made("nvidia", (9, 0), 132, 232448),
    "B200": Card.made("nvidia", (10, 0), 148, 232448),
    "MI300X": Card.made("amd", (9, 4), 304, 65536),
}


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("widths", [(512, 64), (256, 32), (48, 4)])
def test_plans_fit_every_card(name, itemsize, widths):
    for batch, queries, heads, slots in ((1, 1, 128, 2048), (1, 4096, 128, 2048), (2, 9, 6, 9)):
        for listed in (False, True):
            shape = batch, queries, heads, slots, listed, widths, itemsize
            plan = op.plan_for(*shape, CARDS[name])
            assert op.shared_bytes(plan, widths, itemsize, CARDS[name]) <= CARDS[name].shared
            assert (
                plan.tile >= 16 and plan.rows >= (4 if itemsize == 4 else 16) and plan.splits >= 1
            )


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["4090", "MI300X"])
def test_float32_takes_fewer_rows_on_small_cards(device_path, name, listed):
    plan = op.plan_for(2, 3, 6, 90, listed, (512, 64), 4, CARDS[name])
    assert plan.rows == {"4090": 8, "MI300X": 4}[name]
    tensors = inputs(65, 2, 3, 6, 90, 512, 64)
    tensors = *(x / 8 for x in tensors[:2]), *tensors[2:]
    options = {"picks": some_picks(66, 2, 3, 90, 40) if listed else None}
    found = call(device_path, tensors, **options, plan=plan)
    assert_close(found, tensors, visible(tensors, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("picked", [0, 2048])
@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_size(picked, queries, dtype):
    tensors = inputs(70, 1, queries, 128, 4096, 512, 64, dtype)
    tensors = *(x / 8 for x in tensors[:2]), *tensors[2:]
    picks = some_picks(71, 1, queries, 4096, picked) if picked else None
    options = {"picks": picks, "lengths": torch.tensor([4001])}
    found = call(("cuda", "kernel"), tensors, **options)
    assert_close(found, tensors, visible(tensors, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("turned", [0, 64])
@pytest.mark.parametrize("heads", [40, 64, 128])
def test_many_queries(heads, turned, dtype):
    """A program for every multiprocessor, which is where Hopper's kernel serves: lists that end in
    the middle of a tile, padding, rows of their own lengths, sinks, and caches that hold NaN
    wherever nobody may look."""
    tensors = inputs(75, 2, 140, heads, 700, 512, turned, dtype)
    tensors = *(x / 8 for x in tensors[:2]), *tensors[2:]
    mask = random(76, 2, 700) > -1.0
    lengths, sinks = torch.tensor([700, 391]), random(77, heads)
    picks = some_picks(78, 2, 140, 700, 333)
    options = {"picks": picks, "lengths": lengths, "key_mask": mask}
    seen = visible(tensors, **options)
    for cache in tensors[2:]:
        cache[~mask] = torch.nan
        for row, length in zip(cache, lengths.tolist(), strict=True):
            row[length:] = torch.nan
    wide = torch.full((2, 1, 720, 512 + 128), torch.nan, dtype=dtype)  # as a cache is laid out
    wide[:, 0, 8:708, :512], wide[:, 0, 8:708, 512 : 512 + turned] = tensors[2:]
    views = wide[:, 0, 8:708, :512], wide[:, 0, 8:708, 512 : 512 + turned]
    wanted = *tensors[:2], *(x.nan_to_num(0.0) for x in tensors[2:])
    for cache in (tensors[2:], views):
        found = call(("cuda", "kernel"), (*tensors[:2], *cache), **options, sinks=sinks)
        assert_close(found, wanted, seen, sinks)
    found = call(("cuda", "kernel"), wanted, picks)
    assert_close(found, wanted, visible(wanted, picks))


@pytest.mark.gpu
def test_heads_a_prompt_apart():
    """Queries as a product by heads leaves them: more numbers from head to head than 32 bits
    count."""
    queries, heads = 33000, 128
    q = torch.zeros(heads, queries, 512, dtype=torch.bfloat16, device="cuda")
    q[:, -140:] = random(72, heads, 140, 512).cuda() / 8
    q_rope = random(73, 1, queries, heads, 64, dtype=torch.bfloat16).cuda() / 8
    cache = [x.cuda() for x in inputs(74, 1, 1, 1, queries, 512, 64, torch.bfloat16)[2:]]
    picks = some_picks(75, 1, 140, queries - 140, 200).cuda()
    listed = torch.full((1, queries, 200), -1, dtype=torch.int32, device="cuda")
    listed[:, -140:] = picks
    q = q.transpose(0, 1)[None]
    found = latent_attention(q, q_rope, *cache, listed, scale=SCALE)
    last = q[:, -140:].contiguous(), q_rope[:, -140:].contiguous()
    assert torch.equal(found[:, -140:], latent_attention(*last, *cache, picks, scale=SCALE))
    assert (found[:, :-140] == 0).all()


# ---- the op -------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True])
def test_compiles_as_one_graph(device, listed):
    tensors = [x.to(device) for x in inputs(80, 2, 3, 2, 40, 16, 4)]
    picks = some_picks(81, 2, 3, 40, 9).to(device) if listed else None
    compiled = torch.compile(
        lambda *x: latent_attention(*x, picks, scale=SCALE), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*tensors), latent_attention(*tensors, picks, scale=SCALE))


def test_no_queries_and_no_rows(device):
    for batch, queries in ((0, 1), (2, 0)):
        tensors = [x.to(device) for x in inputs(84, batch, queries, 2, 20, 16, 4)]
        assert latent_attention(*tensors, scale=SCALE).shape == (batch, queries, 2, 16)


NAMES = ("q_latent", "q_rope", "latents", "rope")
WRONG = [
    ({"q_latent": torch.zeros(1, 3, 16)}, r"q_latent has 3 dimensions, needs \[B,S,H,R\]"),
    ({"q_latent": torch.zeros(1, 3, 2, 16).double()}, "q_latent is torch.float64, needs float32"),
    ({"q_latent": torch.zeros(1, 3, 2, 513)}, "q_latent has 513 channels, needs 1 to 512"),
    ({"q_latent": torch.zeros(1, 3, 0, 16)}, "q_latent has no heads"),
    ({"q_rope": torch.zeros(1, 3, 4)}, r"q_rope is torch.float32 \(1, 3, 4\), needs"),
    ({"q_rope": torch.zeros(1, 3, 2, 4).half()}, "q_rope is torch.float16"),
    ({"q_rope": torch.zeros(1, 3, 2, 65)}, "q_rope has 65 channels, needs 0 to 64"),
    ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), needs \[Hq\] = \[2\]"),
    ({"latents": torch.zeros(1, 40, 17)}, r"latents is torch.float32 \(1, 40, 17\), needs"),
    ({"latents": torch.zeros(1, 16, 40).mT}, "latents has stride 40 in its channels, needs 1"),
    ({"rope": torch.zeros(1, 39, 4)}, r"rope is torch.float32 \(1, 39, 4\), needs"),
    ({"rope": torch.zeros(1, 40, 4, device="meta")}, "rope is on meta, q_latent on cpu"),
    ({"picks": torch.zeros(1, 3, 9)}, r"picks is torch.float32 \(1, 3, 9\), needs int32"),
    ({"picks": torch.zeros(1, 2, 9).int()}, r"picks is torch.int32 \(1, 2, 9\), needs int32"),
    ({"picks": torch.zeros(1, 3, 9, device="meta").int()}, "picks is on meta, q_latent on cpu"),
    ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32"),
    ({"key_mask": torch.zeros(1, 39) > 0}, r"key_mask has shape \(1, 39\), needs \[B,T\]"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    made = dict(zip(NAMES, inputs(90, 1, 3, 2, 40, 16, 4), strict=True))
    with pytest.raises(ArgumentError, match="^latent_attention: .*" + message):
        latent_attention(**(made | change), scale=1.0)


def test_refuses_fewer_tokens_than_queries():
    with pytest.raises(ArgumentError, match="q_latent has 3 queries, more than latents' 2 tokens"):
        latent_attention(*inputs(91, 1, 3, 2, 2, 16, 4), scale=1.0)
