"""stream_edges against dense fp64 formulas over the named blocks, on the numba reference and on the
Triton kernel."""

import math

import pytest
import torch
from cases import WIDTHS
from hypothesis import given
from hypothesis import strategies as st
from stream_cases import dtypes, random

from attnplug.errors import ArgumentError
from attnplug.ops import stream_mask
from attnplug.ops.stream import stream_edges as op

NAMES = (
    "scale", "weights", "output", "query_block", "block", "lengths", "start", "key_mask",
)  # fmt: skip
DEFAULTS = {"scale": 0.125, "weights": "mass", "output": True, "query_block": 16, "block": 16}
WEIGHTS = ["score", "mass", "value"]


def edges(device_path, q, k, v, index, plan=None, **options):
    """(weight, out, lse) on the CPU, of the public op, or of the launcher where the op would not
    run it."""
    device, path = device_path
    args = [(DEFAULTS | options).get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    there = [x.to(device) for x in (q, k, v, index)]
    if plan is None and (path == "reference" or device == "cuda"):
        out = op.stream_edges(*there, **dict(zip(NAMES, args, strict=True)))
    else:
        out = op._allocate(*there, *args)
        op.launch_stream_edges(*there, *args, *out, plan=plan)
    return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()


def named(index, q, k, *, query_block, block, lengths=None, start=None, key_mask=None, **_):
    """[(b, h, i, place, queries, keys, pairs `[T, S]`)] of every entry that counts."""
    queries, size = q.shape[2], k.shape[2]
    found = []
    for b, h, i, place in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        length = size if lengths is None else int(lengths.expand(q.shape[0])[b])
        low = 0 if start is None else int(start.expand(q.shape[0])[b])
        position = (length - queries + torch.arange(queries))[:, None]
        key = torch.arange(size)
        seen = (key <= position) & (key >= low) & (key < length)
        if key_mask is not None:
            seen = seen & key_mask[b]
        r = int(index[b, h, i, place])
        first = max(0, low - (length - queries)) + i * query_block
        row, at = torch.arange(queries), key - low
        mine = (row >= first) & (row < first + query_block)
        pairs = seen & mine[:, None] & (at >= r * block) & (at < (r + 1) * block)
        found.append((b, h, i, place, pairs if r >= 0 else torch.zeros_like(pairs)))
    return found


def dense(q, k, v, index, dtype=torch.float64, **options):
    """{weights: `[B, Hq, NQ, K]`}, out, lse."""
    options = DEFAULTS | options
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    s = q.to(dtype) @ k.mT
    places = named(index, q, k, **options)
    union = torch.zeros(s.shape, dtype=torch.bool)
    for b, h, _, _, pairs in places:
        union[b, h] |= pairs
    logits = (s * options["scale"]).masked_fill(~union, -torch.inf)
    p = logits.softmax(-1).masked_fill(~union, 0)
    used = union.any(-2)[..., None]
    weight = {name: torch.zeros(index.shape, dtype=dtype) for name in WEIGHTS}
    weight["score"].fill_(-math.inf)
    v = v.masked_fill(~used, 0)
    for b, h, i, place, pairs in places:
        mine = p[b, h].masked_fill(~pairs, 0)
        if pairs.any():
            exact = s[b, h][pairs].nan_to_num(-math.inf, math.inf, -math.inf)
            weight["score"][b, h, i, place] = exact.max()
            weight["mass"][b, h, i, place] = mine.sum()
            own = v[b, h].masked_fill(~pairs.any(0)[:, None], 0)
            weight["value"][b, h, i, place] = (mine @ own).sum(0).norm()
    return weight, p @ v, logits.logsumexp(-1)


def close(found, wanted, q, queries):
    """Rounding of the inputs' own precision: to it p is multiplied with v. A weight sums up to
    `queries` rows of it."""
    step = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[q.dtype]
    weight, out, lse = found
    assert torch.allclose(weight.double(), wanted[0], rtol=1e-4, atol=2e-5 * queries)
    assert torch.allclose(out.double(), wanted[1], rtol=step, atol=8 * step)
    assert torch.allclose(lse.double(), wanted[2], rtol=1e-5, atol=2e-5)


def inputs(seed, batch, heads, kv_heads, queries, size, width=64, dtype=torch.float32):
    """q, k, v, strided as transformers hands them on."""
    shapes = ((queries, heads), (size, kv_heads), (size, kv_heads))
    return [
        random(seed + i, batch, *shape, width, dtype=dtype).transpose(1, 2)
        for i, shape in enumerate(shapes)
    ]


def lists(seed, batch, heads, slots, blocks, wanted):
    """Distinct blocks in any order, of the future and -1 among them."""
    order = random(seed, batch, heads, slots, blocks + 1).argsort(-1)[..., :wanted]
    return (order - 1).int()


@given(data=st.data())
def test_equals_the_dense_formulas(device_path, data):
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, queries = kv_heads * draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 16, 17, 40]))
    size = queries + draw(st.sampled_from([0, 1, 30, 90]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    options: dict = {
        "weights": draw(st.sampled_from(WEIGHTS)),
        "query_block": draw(st.sampled_from([16, 32])),
        "block": draw(st.sampled_from([16, 32])),
    }
    q, k, v = inputs(seed, batch, heads, kv_heads, queries, size, draw(st.sampled_from(WIDTHS)),
                     dtype)  # fmt: skip
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(queries, size), min_size=batch, max_size=batch))
        options["lengths"] = torch.tensor(rows)
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(rows, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 5, batch, size) > draw(st.sampled_from([-0.5, 1.0]))
    slots, blocks = -(-queries // options["query_block"]), -(-size // options["block"])
    index = lists(seed + 6, batch, heads, slots, blocks, draw(st.sampled_from([1, 3, 5])))
    weight, out, lse = dense(q, k, v, index, **options)
    if "lengths" in options:
        for b, length in enumerate(options["lengths"].tolist()):
            k[b, :, length:] = v[b, :, length:] = torch.nan  # not written yet
    found = edges(device_path, q, k, v, index, **options)
    close(found, (weight[options["weights"]], out, lse), q, options["query_block"])


@pytest.mark.parametrize("width", [16, 48, 80, 128, 256])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_head_dimension(device_path, width, weights):
    q, k, v = inputs(width, 1, 2, 1, 17, 150, width)
    index = lists(0, 1, 2, 1, 3, 4)
    options = {"weights": weights, "query_block": 64, "block": 64, "scale": width**-0.5}
    weight, out, lse = dense(q, k, v, index, **options)
    found = edges(device_path, q, k, v, index, **options)
    close(found, (weight[weights], out, lse), q, 17)
    alone = edges(device_path, q, k, v, index, output=False, **options)
    assert torch.equal(alone if isinstance(alone, torch.Tensor) else alone[0], found[0])


def test_the_score_is_the_masks(device_path):
    """Bit for bit, where the arithmetic is exact."""
    q, k, v = (x.round() for x in inputs(0, 1, 4, 2, 40, 200))
    index, score = stream_mask(q, k, query_block=16, block=16, top_k=4)
    options = {"weights": "score", "start": torch.tensor([0])}
    assert torch.equal(edges(device_path, q, k, v, index, **options)[0], score)


def test_the_masses_of_a_query_block_are_its_queries(device_path):
    """And of all blocks, the output is dense attention's."""
    q, k, v = inputs(0, 1, 2, 1, 40, 100)
    index = torch.arange(7, dtype=torch.int32).expand(1, 2, 3, 7)
    weight, out, lse = edges(device_path, q, k, v, index)
    assert torch.allclose(weight.sum(-1), torch.tensor([16.0, 16.0, 8.0]), atol=1e-4)
    s = (q @ k.repeat_interleave(2, 1).mT) * DEFAULTS["scale"]
    s = s.masked_fill(torch.ones(40, 100).triu(61).bool(), -torch.inf)
    assert torch.allclose(out, s.softmax(-1) @ v.repeat_interleave(2, 1), atol=1e-5)
    assert torch.allclose(lse, s.logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_hidden_keys_enter_nothing_and_runs_agree(device_path, weights):
    q, k, v = inputs(0, 2, 2, 1, 20, 100)
    mask, index = random(9, 2, 100) > 0, lists(1, 2, 2, 2, 7, 5)
    options = {"weights": weights, "key_mask": mask, "start": torch.tensor([0, 30])}
    found = edges(device_path, q, k, v, index, **options)
    for b, low in enumerate((0, 30)):
        hidden = ~mask[b] | (torch.arange(100) < low)
        k[b, :, hidden] = v[b, :, hidden] = torch.nan
    for x, y in zip(found, edges(device_path, q, k, v, index, **options), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_or_value_surfaces(device_path, bad):
    """In the masses and values of the query blocks that see it, and in no others; a score takes a
    NaN for -inf."""
    q, k, v = inputs(0, 1, 1, 1, 32, 64)
    index = torch.tensor([[[[0, 1], [1, 3]]]], dtype=torch.int32)
    spoilt = k.clone()
    spoilt[0, 0, 5] = bad  # of block 0
    for weights in ("mass", "value"):
        weight, out, _ = edges(device_path, q, spoilt, v, index, weights=weights)
        assert not weight[0, 0, 0].isfinite().any() and weight[0, 0, 1].isfinite().all()
        assert not out[0, 0, :16].isfinite().any() and out[0, 0, 16:].isfinite().all()
    score = edges(device_path, q, spoilt, v, index, weights="score")[0]
    assert not score.isnan().any()
    if math.isnan(bad):
        mask = torch.arange(64)[None] != 5
        without = edges(device_path, q, k, v, index, weights="score", key_mask=mask)[0]
        assert torch.equal(score, without)
    worse = v.clone()
    worse[0, 0, 5] = bad
    weight, out, _ = edges(device_path, q, k, worse, index, weights="value")
    assert weight.isfinite().tolist() == [[[[False, True], [True, True]]]]
    assert not out[0, 0, :16].isfinite().any() and out[0, 0, 16:].isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_query_surfaces_in_what_it_sees(device_path):
    q, k, v = inputs(0, 1, 1, 1, 32, 64)
    q[0, 0, 0] = math.nan  # at position 32: it does not see block 3
    index = torch.tensor([[[[0, 3]]]], dtype=torch.int32)
    for weights in ("mass", "value"):
        options = {"weights": weights, "query_block": 32}
        weight, out, lse = edges(device_path, q, k, v, index, **options)
        assert weight.isnan().tolist() == [[[[True, False]]]]
        assert out[0, 0, 0].isnan().all() and lse[0, 0, 0].isnan()
        assert out[0, 0, 1:].isfinite().all() and lse[0, 0, 1:].isfinite().all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break(device):
    torch._dynamo.reset()
    q, k, v = inputs(0, 1, 4, 2, 20, 60)
    index = lists(0, 1, 4, 2, 4, 3)

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, v, index):
        return op.stream_edges(q * 2, k, v, index, **(DEFAULTS | {"weights": "value"}))

    found = [x.cpu() for x in step(*(x.to(device) for x in (q, k, v, index)))]
    weight, out, lse = dense(2 * q, k, v, index)
    close(found, (weight["value"], out, lse), q, 16)


WRONG = [
    ({"query_block": 48}, "query_block is 48, needs 16, 32, 64, 128"),
    ({"block": 8}, "block is 8, needs"),
    ({"scale": 0.0}, "scale is 0.0"),
    ({"weights": "sum"}, "weights is 'sum', needs score, mass, value"),
    ({"index": torch.zeros(1, 4, 3, 2)}, "index is torch.float32"),
    ({"index": torch.zeros(1, 2, 3, 2, dtype=torch.int32)}, r"needs int32 .* = \[1, 4, 3, K\]"),
    ({"v": torch.zeros(1, 2, 41, 64)}, "differ in shape"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    k = torch.zeros(1, 2, 40, 64)
    index = torch.zeros(1, 4, 3, 2, dtype=torch.int32)
    given = {"q": torch.zeros(1, 4, 40, 64), "k": k, "v": k, "index": index}
    with pytest.raises(ArgumentError, match="^stream_edges: .*" + message):
        op.stream_edges(**(given | DEFAULTS | change))
