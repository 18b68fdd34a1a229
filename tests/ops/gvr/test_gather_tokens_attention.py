"""gather_tokens_attention against fp64 torch, on the numba reference and on the Triton kernels,
split and fused."""

import itertools

import pytest
import torch
from cases import WIDTHS
from gvr_cases import dtypes, random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops import dense_decode
from attnplug.ops.gvr import gather_tokens_attention as op
from attnplug.testing import oracle_attention, plain_attention

SCALE = 0.125
NAMES = ("scale", "sink", "window", "lengths", "start", "key_mask", "softcap", "sinks")
DEFAULTS = {"scale": SCALE, "sink": 4, "window": 20, "softcap": 0.0}


def attend(device_path, q, k, v, index, plan=None, **options):
    """The public op, or the Triton launcher where the op would not run it."""
    device, path = device_path
    options = DEFAULTS | options
    args = [options.get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    there = [x.to(device) for x in (q, k, v, index)]
    if path == "reference" or (device == "cuda" and plan is None):
        out, lse = op.gather_tokens_attention(*there, **dict(zip(NAMES, args, strict=True)))
    else:
        out, lse = op._allocate(*there, *args)
        op.launch_gather_tokens_attention(*there, *args, out, lse, plan)
    return out.cpu(), lse.cpu()


def keep(q, k, index, sink, window, lengths=None, start=None, key_mask=None, **_):
    """[B, Hkv, T, S]: which keys each query of each KV head reads."""
    batch, size, queries = k.shape[0], k.shape[2], q.shape[2]
    kept = torch.zeros(batch, k.shape[1], queries, size, dtype=torch.bool)
    for b, h, t in itertools.product(*map(range, kept.shape[:3])):
        length = size if lengths is None else int(lengths.expand(batch)[b])
        low = 0 if start is None else int(start.expand(batch)[b])
        position = length - queries + t
        named = index[b, h, t]
        kept[b, h, t, named[(named >= 0) & (named < size)].long()] = True
        kept[b, h, t, low : low + sink] = True
        kept[b, h, t, max(position - window + 1, 0) :] = True
        kept[b, h, t, position + 1 :] = kept[b, h, t, :low] = False
    return kept if key_mask is None else kept & key_mask[:, None, None]


def oracle(attention, q, k, v, index, **options):
    """`attention` (fp64, or plain in q's dtype), one KV head and query at a time."""
    group, kept = q.shape[1] // k.shape[1], keep(q, k, index, **options)
    more = {"scale": options["scale"], "softcap": options["softcap"]}
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3]).double()
    for h, t in itertools.product(range(k.shape[1]), range(q.shape[2])):
        heads = slice(h * group, (h + 1) * group)
        if options.get("sinks") is not None:
            more["sinks"] = options["sinks"][heads]
        own = (x[:, h : h + 1] for x in (k, v))
        part = attention(q[:, heads, t : t + 1], *own, key_mask=kept[:, h, t], **more)
        out[:, heads, t], lse[:, heads, t] = (x.double()[:, :, 0] for x in part)
    return out, lse


def hold(got, q, k, v, index, **options):
    """The error is at most a small factor of the one that attention in q's own dtype makes."""
    options = DEFAULTS | options
    out, lse = got
    want, want_lse = oracle(oracle_attention, q, k, v, index, **options)
    plain, _ = oracle(plain_attention, q, k, v, index, **options)
    epsilon = torch.finfo(q.dtype).eps
    allowed = 2 * (plain - want).abs().max() + 2 * epsilon * want.abs().max() + 1e-6
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert (out.double() - want).abs().max() <= allowed
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    finite = want_lse != -torch.inf
    assert ((lse.double() - want_lse)[finite].abs() <= 2e-5 + 1e-6 * want_lse[finite].abs()).all()
    assert (out[~finite] == 0).all()


def lists(seed, k, queries, count):
    """Distinct random tokens, some of them sink, window, padding, after the query, or none (-1)."""
    places = torch.rand(*k.shape[:2], queries, max(count, k.shape[2] + 9),
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    index = places.argsort(-1)[..., :count]
    return torch.where(places[..., :count] < 0.2, -1, index).int()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, queries = kv_heads * draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1, 1, 3]))
    size, width = draw(st.integers(queries, 300)), draw(st.sampled_from(WIDTHS))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    options = {
        "scale": draw(st.sampled_from([width**-0.5, 0.5])),
        "sink": draw(st.sampled_from([0, 1, 16])),
        "window": draw(st.sampled_from([0, 1, 7, 64])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.5])),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(queries, size), min_size=batch, max_size=batch))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    if draw(st.booleans()):
        options["sinks"] = 3 * random(seed + 2, heads, dtype=dtype)
    q = random(seed, batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    k, v = random(seed + 3, 2, batch, size, kv_heads, width, dtype=dtype).transpose(2, 3)
    least = int(options["sink"] + options["window"] == 0)  # an op that reads nothing refuses
    index = lists(seed + 4, k, queries, draw(st.sampled_from([least, 1, 50])))
    clean = q, k, v, index
    unread = ~keep(q, k, index, **options).any(2)[..., None]  # nothing else may be read
    k, v = k.masked_fill(unread, torch.nan), v.masked_fill(unread, torch.nan)
    splits, plan = draw(st.sampled_from([None, 1, 2, 5])), None
    if splits is not None and device_path[1] == "kernel":
        plan = op.Plan(tile=draw(st.sampled_from([16, 32])), splits=splits, warps=4, columns=64)
    hold(attend(device_path, q, k, v, index, plan, **options), *clean, **options)


def test_a_keep_set_of_everything_is_dense(device_path):
    q, (k, v) = random(0, 2, 4, 3, 64), random(1, 2, 2, 2, 250, 64)
    index = torch.arange(250, dtype=torch.int32).flip(0).expand(2, 2, 3, 250)
    options = {"lengths": torch.tensor([250, 77]), "start": torch.tensor([30, 0]), "scale": SCALE}
    got = attend(device_path, q, k, v, index, **options)
    for found, wanted in zip(got, dense_decode(q, k, v, **options), strict=True):
        assert (found - wanted).abs().max() < 2e-6


def test_nothing_listed_is_a_sliding_window(device_path):
    q, (k, v) = random(0, 1, 4, 1, 64), random(1, 2, 1, 2, 160, 64)
    index = torch.empty(1, 2, 1, 0, dtype=torch.int32)
    got, _ = attend(device_path, q, k, v, index, sink=0, window=48)
    wanted, _ = dense_decode(q, k, v, scale=SCALE, window=48)
    assert (got - wanted).abs().max() < 2e-6


def test_listed_sink_and_window_tokens_count_once(device_path):
    q, (k, v) = random(0, 1, 4, 1, 64), random(1, 2, 1, 2, 160, 64)
    some = torch.tensor([70, -1, -1, -1], dtype=torch.int32).expand(1, 2, 1, 4)
    more = torch.tensor([140, 70, 3, 159], dtype=torch.int32).expand(1, 2, 1, 4)
    found = [attend(device_path, q, k, v, index) for index in (some, more)]
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("key", [0, 70, 199])  # sink, listed, window
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_bad_numbers_surface(device_path, where, bad, key):
    """In the rows that read them, finite or not just where dense attention is."""
    tensors = {"q": random(0, 2, 4, 1, 64), "k": random(1, 2, 2, 200, 64)}
    tensors["v"] = random(2, 2, 2, 200, 64)
    tensors[where][0, 1, 0 if where == "q" else key, 3] = bad
    index = torch.tensor([70, -1], dtype=torch.int32).expand(2, 2, 1, 2)
    out, lse = attend(device_path, *tensors.values(), index)
    want, want_lse = oracle(oracle_attention, *tensors.values(), index, **DEFAULTS)
    assert torch.equal(out.isnan(), want.isnan() & ~torch.isneginf(want_lse)[..., None])
    assert torch.equal(out.isinf(), want.isinf())
    assert torch.equal(lse.isnan(), want_lse.isnan() | torch.isposinf(want_lse))


def test_round_sizes(device_path):
    """Sizes that are multiples of 16, several steps a program: Triton 3.6 miscompiled such loops
    where they were pipelined over gathered keys."""
    q, (k, v) = random(0, 4, 8, 1, 64), random(1, 2, 4, 2, 512, 64)
    index = lists(2, k, 1, 256)
    plan = op.Plan(64, 1, 4, 64) if device_path[1] == "kernel" else None
    hold(attend(device_path, q, k, v, index, plan), q, k, v, index)


def test_plans_fill_the_machine():
    assert op.plan_for(4, 7, 2320, 128, 2, 132).splits == 37  # a program a tile
    many = op.plan_for(512, 7, 2320, 128, 2, 132)
    assert 1 < many.splits < 37 and 512 * many.splits >= 2 * 132
    assert op.plan_for(4096, 7, 2320, 128, 2, 132).splits == 1


INDEX = torch.zeros(1, 2, 1, 3, dtype=torch.int32)
WRONG = [
    ({"index": INDEX.long()}, r"index is torch.int64 \(1, 2, 1, 3\), needs int32"),
    ({"index": INDEX[:, :1]}, r"index is .* needs int32 \[B,Hkv,T,K\] = \[1, 2, 1, K\]"),
    ({"sink": -1}, "sink is -1"),
    ({"window": -1}, "window is -1, needs at least 0"),
    ({"softcap": float("nan")}, "softcap is nan"),
    ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
    ({"q": torch.zeros(1, 4, 1, 32)}, "q has head dimension 32 but k has 64"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "k": torch.zeros(1, 2, 40, 64), "index": INDEX}
    inputs["v"] = inputs["k"]
    with pytest.raises(ArgumentError, match="^gather_tokens_attention: .*" + message):
        op.gather_tokens_attention(**(inputs | DEFAULTS | change))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 37])
def test_a_million_tokens_times_eight(splits):
    """Offsets past 2^31: the last row's last tokens decide."""
    size = 1 << 20
    q = random(0, 8, 28, 1, 128, dtype=torch.bfloat16)
    k = torch.zeros(8, 4, size, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    tail = random(1, 2, 8, 4, 4096, 128, dtype=torch.bfloat16)
    k[:, :, -4096:], v[:, :, -4096:] = tail.cuda()
    small = lists(2, tail[0, :, :, :3000], 1, 2048)
    index = torch.where(small < 0, -1, small + size - 4096)
    plan = op.Plan(64, splits, 4, 32)
    got = attend(("cuda", "kernel"), q, k, v, index, plan, sink=0, window=256)
    hold(got, q, *tail, small, sink=0, window=256)
