"""dense_decode against fp64 torch, on the numba reference and on the Triton kernel."""

import pytest
import torch
from cases import WIDTHS, dtypes, hold_attention, random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops.dense import dense_decode as op
from attnplug.ops.dense.plan import Plan, plan_for

SCALE = 0.125


def attend(device_path, q, k, v, **options):
    """The public op, or the Triton launcher where the op would not run it."""
    device, path = device_path
    moved = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    q, k, v = q.to(device), k.to(device), v.to(device)
    if path == "reference" or device == "cuda":
        out, lse = op.dense_decode(q, k, v, **moved)
        return out.cpu(), lse.cpu()
    names = ("scale", "lengths", "start", "key_mask", "window", "softcap", "sinks")
    filled = {"window": 0, "softcap": 0.0} | moved
    args = [filled.get(name) for name in names]
    outputs = op._allocate(q, k, v, *args)
    op.launch_dense_decode(q, k, v, *args, *outputs)
    return outputs


def visible(q, k, lengths=None, start=None, key_mask=None, window=0, **_):
    """[B, 1, T, S]: the keys that each query sees, and whether the query is not padding."""
    batch, size, queries = k.shape[0], k.shape[2], q.shape[2]
    lengths = torch.tensor([size]) if lengths is None else lengths
    start = torch.tensor([0]) if start is None else start
    position = (lengths[:, None] - queries + torch.arange(queries)).view(-1, 1, queries, 1)
    key = torch.arange(size)
    seen = (key <= position) & (key >= start.view(-1, 1, 1, 1))
    if window:
        seen = seen & (key > position - window)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    return seen.expand(batch, 1, queries, size)


def dense(q, k, v, dtype=torch.float64, *, scale, softcap=0.0, sinks=None, **masks):
    """Attention with every operation in `dtype`: the oracle in float64, else the yardstick."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    score = q.to(dtype) @ k.transpose(2, 3) * scale
    score = softcap * torch.tanh(score / softcap) if softcap else score
    seen = visible(q, k, **masks)
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.double().logsumexp(-1)
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, sink], -1)
    weight = score.softmax(-1)[..., : k.shape[2]].masked_fill(~seen.any(-1, True), 0.0)
    return weight @ v, lse


def hold(got, q, k, v, **options):
    """The error is at most a small factor of the one that attention in q's own dtype makes."""
    plain, _ = dense(q, k, v, q.dtype, **options)
    hold_attention(got, dense(q, k, v, **options), plain, q.dtype)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.sampled_from([1, 3, 4, 7]))
    queries = draw(st.sampled_from([1, 1, 1, 2, 5, 19]))
    size = draw(st.integers(queries, 300))
    width = draw(st.sampled_from([*WIDTHS, 144, 256]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    options = {"scale": draw(st.sampled_from([width**-0.5, 0.5]))}
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(queries, size), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, int])))
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    if draw(st.booleans()):
        options["sinks"] = 3 * random(seed + 2, heads, dtype=dtype)
    options["window"] = draw(st.sampled_from([0, 0, 1, 17, 128]))
    options["softcap"] = draw(st.sampled_from([0.0, 0.0, 2.5]))
    q = random(seed, batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    if draw(st.booleans()):
        k, v = random(seed + 3, 2, batch, kv_heads, size, width, dtype=dtype)
    else:
        k, v = random(seed + 3, batch, size, 2 * kv_heads, width, dtype=dtype).split(kv_heads, 2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    hold(attend(device_path, q, *poisoned(k, v, **options), **options), q, k, v, **options)


def poisoned(k, v, lengths=None, start=None, key_mask=None, **_):
    """k, v with NaN wherever no query of the call may look: past the length, in padding, masked."""
    lengths = torch.tensor([k.shape[2]]) if lengths is None else lengths
    start = torch.tensor([0]) if start is None else start
    key = torch.arange(k.shape[2])
    outside = (key >= lengths[:, None]) | (key < start[:, None])
    if key_mask is not None:
        outside = outside | ~key_mask
    outside = outside.expand(k.shape[0], -1)[:, None, :, None]
    return k.masked_fill(outside, torch.nan), v.masked_fill(outside, torch.nan)


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 511, 1999, 2000])
def test_every_length_of_a_static_cache(device_path, length):
    """More splits than tiles and the reverse; nothing past the length is read."""
    q, lengths = random(0, 1, 6, 1, 64), torch.tensor([length])
    k, v = random(1, 2, 1, 2, 2000, 64)
    options = {"scale": SCALE, "lengths": lengths}
    hold(attend(device_path, q, *poisoned(k, v, **options), **options), q, k, v, **options)


@pytest.mark.parametrize("queries", [16, 40, 128])
def test_blocks_of_queries(device_path, queries):
    """40 queries of 7 heads are three blocks of rows, cut inside a query."""
    q, (k, v) = random(0, 1, 7, queries, 64), random(1, 2, 1, 1, 150, 64)
    options = {"scale": SCALE, "lengths": torch.tensor([131]), "window": 30}
    hold(attend(device_path, q, k, v, **options), q, k, v, **options)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_outliers_and_far_scores(device_path):
    """Scores of +-500 and a sink above and below them all."""
    q, (k, v) = random(0, 1, 4, 1, 64), random(1, 2, 1, 2, 200, 64)
    k[:, :, 77] *= 40
    options = {"scale": 1.0, "sinks": torch.tensor([300.0, -300.0, 0.0, 1.0])}
    hold(attend(device_path, q, k, v, **options), q, k, v, **options)


def test_queries_that_see_nothing(device_path):
    q, (k, v) = random(0, 2, 4, 3, 64), random(1, 2, 2, 2, 100, 64)
    options = {"scale": SCALE, "start": torch.tensor([98, 100]), "sinks": torch.zeros(4)}
    out, lse = attend(device_path, q, k, v, **options)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert (out[0, :, 0] == 0).all() and (lse[0, :, 0] == -torch.inf).all()
    hold((out, lse), q, k, v, **options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("key", [0, 199])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_bad_numbers_surface(device_path, where, bad, key):
    """In the rows that see them, finite or not just where dense attention is."""
    tensors = {"q": random(0, 2, 4, 1, 64), "k": random(1, 2, 2, 200, 64)}
    tensors["v"] = random(2, 2, 2, 200, 64)
    spot = (0, 1, 0 if where == "q" else key, 3)
    tensors[where][spot] = bad
    out, lse = attend(device_path, *tensors.values(), scale=SCALE)
    want, want_lse = dense(*tensors.values(), scale=SCALE)
    assert torch.equal(out.isnan(), want.isnan() & ~torch.isneginf(want_lse)[..., None])
    assert torch.equal(out.isinf(), want.isinf())
    assert torch.equal(lse.isnan(), want_lse.isnan() | torch.isposinf(want_lse))


def test_lse_merges_two_halves(device_path):
    q, (k, v) = random(0, 1, 4, 1, 64), random(1, 2, 1, 2, 180, 64)
    left, left_lse = attend(device_path, q, k[:, :, :70], v[:, :, :70], scale=SCALE)
    right, right_lse = attend(device_path, q, k[:, :, 70:], v[:, :, 70:], scale=SCALE)
    total = torch.logaddexp(left_lse, right_lse)
    merged = (
        left * (left_lse - total).exp()[..., None] + right * (right_lse - total).exp()[..., None]
    )
    hold((merged, total), q, k, v, scale=SCALE)


def test_a_row_does_not_see_its_batch_mates(device_path):
    q, (k, v) = random(0, 3, 4, 1, 64), random(1, 2, 3, 2, 150, 64)
    lengths, start = torch.tensor([150, 40, 99]), torch.tensor([0, 13, 98])
    out, lse = attend(device_path, q, k, v, scale=SCALE, lengths=lengths, start=start)
    for b in range(3):
        row = slice(b, b + 1)
        alone = {"lengths": lengths[row], "start": start[row]}
        hold((out[row], lse[row]), q[row], k[row], v[row], scale=SCALE, **alone)


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_any_plan_gives_the_same(device_path, splits):
    if device_path[1] == "reference":
        got = attend(device_path, random(0, 1, 4, 1, 64), *random(1, 2, 1, 2, 300, 64), scale=SCALE)
    else:
        q, (k, v) = random(0, 1, 4, 1, 64).to(device_path[0]), random(1, 2, 1, 2, 300, 64)
        k, v = k.to(device_path[0]), v.to(device_path[0])
        got = torch.full_like(q, torch.nan), q.new_full((1, 4, 1), torch.nan)
        plan = Plan(rows=16, tile=32, splits=splits, warps=4, stages=3, columns=32)
        none = (None, None, None)
        op.launch_dense_decode(q, k, v, SCALE, *none, 0, 0.0, None, *got, plan)
    got = tuple(x.cpu() for x in got)
    hold(got, random(0, 1, 4, 1, 64), *random(1, 2, 1, 2, 300, 64), scale=SCALE)


def test_plan_fills_the_machine_once():
    for batch, kv_heads in [(1, 4), (8, 4), (8, 8), (1, 8), (3, 5), (20, 4)]:
        plan = plan_for(batch, 4 * kv_heads, kv_heads, 1, 1 << 20, 128, 2, 132, False, 232448)
        assert 0.9 * 132 <= plan.splits * batch * kv_heads <= 2 * 132
    assert plan_for(1, 28, 4, 1, 1 << 20, 128, 2, 132, True, 232448).splits == 66
    assert plan_for(64, 32, 8, 1, 1 << 20, 128, 2, 132, False, 232448).splits == 1
    assert (
        plan_for(1, 28, 4, 1, 100, 128, 2, 132, False, 232448).splits == 2
    )  # no more than there are tiles


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def step(q, k, v, lengths):
        return op.dense_decode(q * 2, k, v, scale=SCALE, lengths=lengths)

    q, (k, v) = random(0, 1, 4, 1, 64).to(device), random(1, 2, 1, 2, 90, 64).to(device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (1, 33, 90):
            lengths = torch.tensor([length], device=device)
            got = step(q, k, v, lengths)
            want = op.dense_decode(q * 2, k, v, scale=SCALE, lengths=lengths)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


WRONG = [
    ({"lengths": torch.tensor([1, 2, 3])}, r"lengths has shape \(3,\)"),
    ({"window": -1}, "window is -1"),
    ({"softcap": -2.0}, "softcap is -2.0"),
    ({"softcap": float("nan")}, "softcap is nan"),
    ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), needs \[Hq\] = \[4\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks is torch.int32"),
    ({"key_mask": torch.ones(1, 9)}, "key_mask is torch.float32"),
    ({"q": torch.zeros(1, 4, 1, 32)}, "head dimension 32"),
    ({"q": torch.zeros(1, 3, 1, 64)}, "3 query heads are not a multiple of 2 KV heads"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "k": torch.zeros(1, 2, 9, 64), "scale": 1.0}
    inputs["v"] = inputs["k"]
    with pytest.raises(ArgumentError, match="^dense_decode: .*" + message):
        op.dense_decode(**(inputs | change))


@pytest.mark.gpu
def test_one_cuda_graph_for_all_lengths():
    q = random(0, 2, 28, 1, 128, dtype=torch.bfloat16)
    k, v = random(1, 2, 2, 4, 5000, 128, dtype=torch.bfloat16)
    on = [x.cuda() for x in (q, k, v)]
    lengths = torch.tensor([5000], device="cuda")
    op.dense_decode(*on, scale=SCALE, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = op.dense_decode(*on, scale=SCALE, lengths=lengths)
    for length in (1, 700, 4096, 5000):
        lengths.fill_(length)
        graph.replay()
        options = {"scale": SCALE, "lengths": torch.tensor([length])}
        hold((out.cpu(), lse.cpu()), q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 5])
def test_a_million_tokens_times_eight(queries):
    """Offsets past 2^31: the last row's last keys decide."""
    size, kv_heads = 1 << 20, 4
    q = random(0, 8, 28, queries, 128, dtype=torch.bfloat16).cuda()
    k = torch.zeros(8, kv_heads, size, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    tail = random(1, 2, 8, kv_heads, 3000, 128, dtype=torch.bfloat16).cuda()
    k[:, :, -3000:], v[:, :, -3000:] = tail[0], tail[1]
    out, lse = op.dense_decode(q, k, v, scale=SCALE, start=torch.tensor([size - 3000]).cuda())
    hold((out.cpu(), lse.cpu()), q.cpu(), tail[0].cpu(), tail[1].cpu(), scale=SCALE)
    _, whole = op.dense_decode(q, k, v, scale=SCALE)
    zeros = torch.tensor(float(size - 3000), device="cuda").log()
    assert (whole - torch.logaddexp(lse, zeros)).abs().max() < 1e-4


@pytest.mark.gpu
def test_ten_thousand_rows_are_repeatable():
    """Pieces cross from one kernel to the next, early launched one: no row may be torn."""
    q = random(0, 1300, 8, 1, 64, dtype=torch.float16).cuda()
    k, v = random(1, 2, 1300, 2, 300, 64, dtype=torch.float16).cuda()
    plan = Plan(rows=16, tile=32, splits=5, warps=4, stages=3, columns=32)
    first = None
    for _ in range(20):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        op.launch_dense_decode(q, k, v, SCALE, None, None, None, 0, 0.0, None, out, lse, plan)
        first = out.clone() if first is None else first
        assert torch.equal(first, out)
    hold((first.cpu(), lse.cpu()), q.cpu(), k.cpu(), v.cpu(), scale=SCALE)


@pytest.mark.parametrize("start", [None, torch.tensor([3, 3, 0, 0])[::2]])
def test_lengths_and_starts_of_any_stride(device_path, start):
    """A row's length lies a stride away from the one before, not always the next in memory."""
    q, k, v = (torch.randn(2, h, s, 64) for h, s in ((4, 1), (2, 60), (2, 60)))
    for lengths in (torch.tensor([40, 7, 55, 9])[::2], torch.tensor([33]).expand(2)):
        options = dict(scale=0.2, start=start)
        found = attend(device_path, q, k, v, lengths=lengths, **options)
        wanted = attend(device_path, q, k, v, lengths=lengths.clone().contiguous(), **options)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
