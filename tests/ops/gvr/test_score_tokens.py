"""score_tokens against fp64 torch, by the numba reference and the Triton kernel; and INT8 keys."""

import numba
import pytest
import torch
from cases import WIDTHS
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops.gvr import score_tokens as op

NAMES = ("sink", "window", "lengths", "start", "key_mask")


def score(device_path, q, codes, steps, **options):
    device, path = device_path
    options = {"sink": 3, "window": 5} | options
    args = [options.get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    there = [x.to(device) for x in (q, codes, steps)]
    if path == "reference" or device == "cuda":
        return op.score_tokens(*there, **dict(zip(NAMES, args, strict=True))).cpu()
    scores = op._allocate(*there, *args)
    op.launch_score_tokens(*there, *args, scores)
    return scores


def oracle(q, codes, steps, sink=3, window=5, lengths=None, start=None, key_mask=None):
    batch, heads, size, _ = codes.shape
    lengths = torch.tensor([size]) if lengths is None else lengths
    start = torch.tensor([0]) if start is None else start
    keys = codes.double() * steps.double()[..., None]
    best = torch.einsum("bhgd,bhnd->bhgn", q.double()[:, :, 0].unflatten(1, (heads, -1)), keys)
    at = torch.arange(size)
    seen = (at >= start[:, None] + sink) & (at < lengths[:, None] - window)
    seen = seen.expand(batch, size) if key_mask is None else seen & key_mask
    return torch.where(seen[:, None], best.amax(2), -torch.inf).flatten(0, 1)


@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    group, size = draw(st.sampled_from([1, 3, 7, 17])), draw(st.integers(1, 300))
    width, seed = draw(st.sampled_from([*WIDTHS, 256])), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes(device_path)))
    options = {"sink": draw(st.sampled_from([0, 3])), "window": draw(st.sampled_from([1, 40]))}
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    q = random(seed, batch, 1, heads * group, width, dtype=dtype).transpose(1, 2)
    codes, steps = op.quantize_keys(random(seed + 2, batch, size, heads, width).transpose(1, 2))
    found = score(device_path, q, codes, steps, **options)
    want = oracle(q, codes, steps, **options)
    assert found.dtype == torch.float32 and found.shape == (batch * heads, size)
    assert torch.equal(found == -torch.inf, want == -torch.inf)
    seen = want != -torch.inf
    assert ((found.double() - want)[seen].abs() <= 1e-4 + 1e-5 * want[seen].abs()).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_each_of_a_few_queries_matches_fp64(device_path, group, queries, masked):
    """As in a step of its own, whose row ends with it."""
    batch, heads, size, width = 2, 2, 290, 64
    options = {"lengths": torch.tensor([size - 20])}
    if masked:
        options["lengths"] = torch.tensor([size, 150])
        options["start"] = torch.tensor([31, 140], dtype=torch.int32)
        options["key_mask"] = random(3, batch, size) > -0.5
    q = random(0, batch, queries, heads * group, width).transpose(1, 2)
    codes, steps = op.quantize_keys(random(1, batch, size, heads, width).transpose(1, 2))
    found = score(device_path, q, codes, steps, **options).view(batch * heads, queries, size)
    for t in range(queries):
        own = options | {"lengths": options["lengths"] - (queries - 1 - t)}
        want = oracle(q[:, :, t : t + 1], codes, steps, **own)
        assert torch.equal(found[:, t] == -torch.inf, want == -torch.inf)
        seen = want != -torch.inf
        assert ((found[:, t].double() - want)[seen].abs() <= 1e-4 + 1e-5 * want[seen].abs()).all()


def by_matrix_product(q, codes, steps, sink, window):
    """What the CPU path computed before it was numba: one float32 product of all keys."""
    heads, size = codes.shape[1:3]
    products = q.float().unflatten(1, (heads, -1))[:, :, :, 0] @ codes.float().mT
    best = (products * steps[:, :, None]).nan_to_num(torch.inf, torch.inf, -torch.inf).amax(2)
    at = torch.arange(size)
    return torch.where((at >= sink) & (at < size - window), best, -torch.inf).flatten(0, 1)


@pytest.mark.parametrize("size", [1, op.REFERENCE_TILE, op.REFERENCE_TILE + 1, 700])
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_the_reference_equals_a_matrix_product(size, bad):
    """To the rounding of float32; exactly where a score is not finite. Tiles leave no gap."""
    q, keys = random(0, 2, 6, 1, 80), random(1, 2, 2, size, 80)
    keys[0, 1, size // 2, 5] = q[1, 4, 0, 7] = bad
    codes, steps = op.quantize_keys(keys)
    found = op.score_tokens(q, codes, steps, sink=2, window=3)
    want = by_matrix_product(q, codes, steps, 2, 3)
    assert torch.equal(found[~want.isfinite()], want[~want.isfinite()])
    assert torch.allclose(found, want, rtol=1e-5, atol=2e-4)


def test_the_reference_is_deterministic():
    """The number of threads changes no bit."""
    q = random(0, 2, 6, 1, 128)
    codes, steps = op.quantize_keys(random(1, 2, 2, 1500, 128))
    threads = numba.get_num_threads()
    found = op.score_tokens(q, codes, steps)
    numba.set_num_threads(1)
    try:
        alone = op.score_tokens(q, codes, steps)
    finally:
        numba.set_num_threads(threads)
    assert torch.equal(found, alone)


def test_codes_are_within_half_a_step():
    keys = random(0, 2, 3, 50, 64) * random(1, 2, 3, 50, 1).exp()
    codes, steps = op.quantize_keys(keys)
    assert codes.dtype == torch.int8 and steps.dtype == torch.float32
    assert (codes.abs().amax(-1) == 127).all()
    assert ((codes * steps[..., None] - keys).abs() <= 0.5001 * steps[..., None]).all()
    zeros, none = op.quantize_keys(torch.zeros(2, 4, 64))
    assert (zeros == 0).all() and (none == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_scores_highest(device_path, bad):
    keys = random(0, 1, 2, 90, 64)
    keys[0, 1, 40, 7] = bad
    found = score(device_path, random(1, 1, 6, 1, 64), *op.quantize_keys(keys))
    assert found[1, 40] == torch.inf and found.isfinite().sum() == 2 * 82 - 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_query_scores_all_highest(device_path):
    q = random(1, 1, 6, 1, 64)
    q[0, 4, 0, 0] = torch.nan
    found = score(device_path, q, *op.quantize_keys(random(0, 1, 2, 90, 64)))
    assert found[0].isfinite().sum() == 82 and (found[1] == torch.inf).sum() == 82


def test_what_lies_behind_the_length_is_not_read(device_path):
    codes, steps = op.quantize_keys(random(0, 2, 2, 900, 64))
    steps[:, :, 200:] = torch.nan
    q, lengths = random(1, 2, 4, 1, 64), torch.tensor([200])
    found = score(device_path, q, codes, steps, lengths=lengths)
    assert not found.isnan().any() and (found[:, 195:] == -torch.inf).all()
    assert (found[:, 3:195] > -torch.inf).all()


CODES = torch.zeros(1, 2, 40, 64, dtype=torch.int8)
WRONG = [
    ({"codes": CODES.float()}, "codes is torch.float32"),
    ({"codes": CODES[:, :, :, :32]}, "needs int8"),
    ({"steps": torch.zeros(1, 2, 39)}, r"steps is torch.float32 \(1, 2, 39\), needs"),
    ({"q": torch.zeros(1, 4, 17, 64)}, r"q is \(1, 4, 17, 64\), needs \[B,Hq,T,D\] with T from"),
    (
        {"q": torch.zeros(1, 4, 2, 64), "table": torch.zeros(1, 1, dtype=torch.int32)},
        r"needs \[B,Hq,1,D\]",
    ),
    ({"q": torch.zeros(1, 3, 1, 64)}, "codes is"),
    ({"window": 0}, "window is 0"),
    ({"sink": -1}, "sink is -1"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "codes": CODES, "steps": torch.zeros(1, 2, 40)}
    with pytest.raises(ArgumentError, match="^score_tokens: .*" + message):
        op.score_tokens(**(inputs | change))
