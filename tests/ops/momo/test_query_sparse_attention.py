"""query_sparse_attention against fp64 torch: attention, log-sum-exp, block scores, selections."""

import math
import statistics

import pytest
import torch
from cases import WIDTHS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from momo_cases import attention_inputs as inputs
from momo_cases import call_op, dtypes

from attnplug.errors import ArgumentError
from attnplug.ops.momo.online_topk import ALGORITHMS, erfinv
from attnplug.ops.momo.query_sparse_attention import (
    _allocate,
    launch_query_sparse_attention,
    query_sparse_attention,
)

DEFAULTS = dict(
    gamma=4,
    block=16,
    top_k=4,
    exact_k=2,
    algorithm="estimated",
    lengths=None,
    start=None,
    key_mask=None,
    softcap=0.0,
)


def run(device_path, q, k, v, scale, **options):
    """(out, lse, index, score) on CPU, by the op or by the Triton launcher."""
    options = {"scale": scale, **DEFAULTS, **options}
    ways = query_sparse_attention, _allocate, launch_query_sparse_attention
    return call_op(device_path, *ways, (q, k, v), options)


def rows_of(q, k, *, gamma, lengths=None, start=None, **_):
    """For each batch row: start, length, query numbers t and positions of its gamma rows."""
    batch, queries = q.shape[0], q.shape[2]
    lengths = torch.tensor([k.shape[2]]) if lengths is None else lengths
    start = torch.tensor([0]) if start is None else start
    pairs = torch.stack([lengths.expand(batch), start.expand(batch)], 1)
    for length, first in pairs.tolist():
        t = torch.arange(max(0, first - (length - queries)), queries, gamma)
        yield first, length, t, t + length - queries


def oracle(q, k, v, scale, *, dtype=torch.float64, **options):
    """out, lse, block scores [B,H,R,blocks] (-inf where not offered), in fp64, or the plain dense
    attention in `dtype` whose error measures the tolerance."""
    options = {**DEFAULTS, **options}
    batch, heads, queries, dim = q.shape
    group, gamma, block = heads // k.shape[1], options["gamma"], options["block"]
    rows = -(-queries // gamma)
    out = torch.zeros(batch, heads, rows, dim, dtype=dtype)
    lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64)
    slots = max(1, k.shape[2] // block)
    scores = torch.full((batch, heads, rows, slots), -math.inf, dtype=torch.float64)
    for b, (start, length, t, pos) in enumerate(rows_of(q, k, **options)):
        kb = k[b, :, start:length].to(dtype).repeat_interleave(group, 0)
        vb = v[b, :, start:length].to(dtype).repeat_interleave(group, 0)
        x = (q[b, :, t].to(dtype) @ kb.transpose(1, 2)).double() * scale
        if options["softcap"]:
            x = options["softcap"] * torch.tanh(x / options["softcap"])
        seen = torch.arange(start, length)[None] <= pos[:, None]
        if options["key_mask"] is not None:
            mask = options["key_mask"][b, start:length]
            seen = seen & mask
            vb = vb.masked_fill(~mask[None, :, None], 0)
        x = x.masked_fill(~seen, -math.inf)
        out[b, :, : len(t)] = x.softmax(-1).nan_to_num(0.0).to(dtype) @ vb
        lse[b, :, : len(t)] = x.logsumexp(-1)
        blocks = (length - start) // block
        s = x[..., : blocks * block].unflatten(-1, (blocks, block)).logsumexp(-1)
        whole = (torch.arange(blocks)[None] + 1) * block <= (pos - start + 1)[:, None]
        scores[b, :, : len(t), :blocks] = s.masked_fill(~whole, -math.inf)
    return out, lse, scores


def assert_near(got, want, plain, *, factor=4.0):
    """At most `factor` times the error that plain attention in the inputs' dtype makes."""
    if want.numel():
        allowed = factor * (plain.double() - want).abs().max() + 2e-6
        assert (got.double() - want).abs().max() <= allowed


def assert_lists(index, score, scores, top_k, tolerance=1e-4):
    """Every list: distinct offered blocks with their scores, as many as there are or fit."""
    offered = scores > -math.inf
    listed = index >= 0
    assert index.min() >= -1 and index.max() < scores.shape[-1]
    assert torch.equal(listed.sum(-1), offered.sum(-1).clamp(max=top_k))
    order = index.sort(-1).values
    assert not ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()
    assert offered.gather(-1, index.clamp(min=0).long())[listed].all()
    assert (score[~listed] == -math.inf).all()
    truth = scores.gather(-1, index.clamp(min=0).long())[listed]
    assert ((score[listed].double() - truth).abs() <= tolerance).all()


def assert_best(score, scores, tolerance=1e-4):
    """The listed scores are the highest ones (equal sets where scores differ by more)."""
    best = scores.sort(-1, descending=True).values
    best = torch.nn.functional.pad(best, (0, score.shape[-1]), value=-math.inf)
    got = score.double().sort(-1, descending=True).values
    best = best[..., : score.shape[-1]]
    assert torch.equal(got == -math.inf, best == -math.inf)
    assert ((got - best).nan_to_num(0.0).abs() <= tolerance).all()


def check(device_path, q, k, v, scale, **options):
    options = {**DEFAULTS, **options}
    out, lse, index, score = run(device_path, q, k, v, scale, **options)
    want, want_lse, scores = oracle(q, k, v, scale, **options)
    plain, plain_lse, _ = oracle(q, k, v, scale, dtype=q.dtype, **options)
    assert out.dtype == q.dtype and lse.dtype == score.dtype == torch.float32
    assert_near(out, want, plain)
    hidden = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, hidden)
    assert (out[hidden] == 0).all()
    assert_near(lse[~hidden], want_lse[~hidden], plain_lse[~hidden])
    top_k, algorithm = options["top_k"], options["algorithm"]
    if top_k:
        # fp32 logits: relative to the largest score
        tolerance = 1e-5 * (10 + scores.masked_fill(scores == -math.inf, 0).abs().max().item())
        assert_lists(index, score, scores, top_k, tolerance)
        exact = options["exact_k"] if algorithm == "estimated" else top_k
        assert_best(score[..., :exact], scores, tolerance)
    return out, lse, index, score


@st.composite
def cases(draw, dtypes):
    batch, kv_heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 2, 3, 7]))
    queries = draw(st.integers(1, 90))
    keys = queries + draw(st.integers(0, 60))
    q, k, v = inputs(
        batch,
        kv_heads * group,
        kv_heads,
        queries,
        keys,
        draw(st.sampled_from([*WIDTHS, 144, 256])),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 99)),
    )
    options = dict(
        gamma=draw(st.sampled_from([1, 3, 8])),
        block=draw(st.sampled_from([16, 32])),
        top_k=draw(st.sampled_from([0, 1, 3, 5])),
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )
    options["exact_k"] = min(options["top_k"], draw(st.integers(0, 3)))
    if draw(st.booleans()):
        lengths = [draw(st.integers(queries, keys)) for _ in range(batch)]
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        options["lengths"] = torch.tensor(lengths, dtype=dtype)
        for b, length in enumerate(lengths):
            k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    if draw(st.booleans()):
        options["start"] = torch.tensor([draw(st.integers(0, queries)) for _ in range(batch)])
    if draw(st.booleans()):
        gen = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        options["key_mask"] = torch.rand(batch, keys, generator=gen) > 0.3
        options["key_mask"][:, 16:48] &= draw(st.booleans())
    return q, k, v, draw(st.sampled_from([0.05, 0.125, 0.4])), options


def test_fuzz(device_path):
    @settings(suppress_health_check=list(HealthCheck))
    @given(cases(dtypes(device_path)))
    def fuzz(case):
        q, k, v, scale, options = case
        check(device_path, q, k, v, scale, **options)

    fuzz()


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 256])
def test_dense_prefill(device_path, dim):
    for dtype in dtypes(device_path):
        q, k, v = inputs(1, 2, 1, 70, 150, dim, dtype)
        check(device_path, q, k, v, dim**-0.5, gamma=1, top_k=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block", [16, 64, 128])
def test_algorithms(device_path, algorithm, block):
    q, k, v = inputs(2, 2, 1, 8 * block + 5, 8 * block + 5, 64)
    for top_k in (1, 5):
        check(
            device_path,
            q,
            k,
            v,
            0.3,
            gamma=block,
            block=block,
            top_k=top_k,
            exact_k=top_k // 2,
            algorithm=algorithm,
            start=torch.tensor([0, 2 * block + 3]),
        )


def tied_inputs(blocks, block, dim):
    """Integers, so that all arithmetic up to the logits is exact, and blocks that repeat."""
    gen = torch.Generator().manual_seed(3)
    patterns = torch.randint(-1, 2, (4, block, dim), generator=gen).float()
    k = patterns[torch.randint(0, 4, (blocks,), generator=gen)].flatten(0, 1)[None, None]
    q = torch.randint(-1, 2, (1, 2, blocks * block, dim), generator=gen).float()
    return q, k, torch.randn(k.shape, generator=gen)


def test_ties_keep_the_lower_block(device_path):
    q, k, v = tied_inputs(24, 16, 64)
    _, _, scores = oracle(q, k, v, 0.125, gamma=16)
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    for top_k in (1, 6):
        best = torch.where(order.values > -math.inf, order.indices, -1)[..., :top_k]
        for algorithm in ("exact", "tournament"):
            options = dict(gamma=16, top_k=top_k, algorithm=algorithm)
            _, _, index, _ = run(device_path, q, k, v, 0.125, **options)
            assert torch.equal(index.sort(-1).values.long(), best.sort(-1).values)
        options = dict(gamma=16, top_k=12, exact_k=top_k)
        _, _, index, _ = run(device_path, q, k, v, 0.125, **options)
        assert torch.equal(index[..., :top_k].sort(-1).values.long(), best.sort(-1).values)


def estimated_list(scores, top_k, exact_k):
    """The definition of "estimated", step by step, on one row's offered (score, block) pairs."""
    exact, appended, history = [], [], []
    for n, (score, block) in enumerate(scores, start=1):
        history.append(score)
        exact = sorted([*exact, (score, block)], key=lambda pair: (-pair[0], pair[1]))
        if len(exact) <= exact_k:
            continue
        loser, free, left = exact.pop(), top_k - exact_k - len(appended), len(scores) - n + 1
        if 0 < free < left:  # P(S > threshold) = free / left under the fitted normal
            quantile = statistics.NormalDist().inv_cdf(1 - free / left)
            if loser[0] <= statistics.fmean(history) + statistics.pstdev(history) * quantile:
                continue
        if free > 0:
            appended.append(loser)
    return {block for _, block in exact}, [block for _, block in appended]


def test_estimated_follows_its_definition(device_path):
    q, k, v = inputs(1, 4, 2, 400, 400, 64, seed=7)
    for top_k, exact_k in ((9, 3), (6, 0), (4, 1)):
        options = dict(gamma=5, top_k=top_k, exact_k=exact_k)
        _, _, index, _ = run(device_path, q, k, v, 0.3, **options)
        scores = oracle(q, k, v, 0.3, **options)[2]
        for h in range(4):
            for r in range(scores.shape[2]):
                row = [(s, j) for j, s in enumerate(scores[0, h, r].tolist()) if s > -math.inf]
                exact, appended = estimated_list(row, top_k, exact_k)
                got = index[0, h, r].tolist()
                assert set(got[:exact_k]) - {-1} == exact
                assert [j for j in got[exact_k:] if j >= 0] == appended


def test_erfinv():
    ratio = torch.cat([torch.logspace(-6, -1, 50), torch.linspace(0.1, 0.999, 50)]).double()
    want = torch.erfinv(1 - 2 * ratio)
    got = torch.tensor([erfinv(r) for r in ratio.tolist()], dtype=torch.float64)
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_left_padding_equals_the_row_alone(device_path, algorithm):
    q, k, v = inputs(2, 4, 2, 130, 150, 64)
    start = torch.tensor([0, 63])
    options = dict(gamma=8, top_k=3, exact_k=1, algorithm=algorithm)
    both = run(device_path, q, k, v, 0.3, start=start, **options)
    first = 63 - 20
    alone = run(device_path, q[1:, :, first:], k[1:, :, 63:], v[1:, :, 63:], 0.3, **options)
    rows = alone[0].shape[2]
    for got, want in zip(both, alone, strict=True):
        torch.testing.assert_close(got[1:, :, :rows], want, atol=1e-6, rtol=1e-6)
    assert (both[0][1, :, rows:] == 0).all() and (both[1][1, :, rows:] == -math.inf).all()
    assert (both[2][1, :, rows:] == -1).all() and (both[3][1, :, rows:] == -math.inf).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chunked_queries_equal_the_matching_rows(device_path, algorithm):
    q, k, v = inputs(1, 2, 1, 200, 200, 64)
    options = dict(top_k=3, exact_k=1, algorithm=algorithm)
    whole = run(device_path, q, k, v, 0.3, gamma=1, **options)
    tail = torch.full((1, 1, 60, 64), math.nan)
    k, v = torch.cat([k, tail], 2), torch.cat([v, tail], 2)
    lengths = torch.tensor([200], dtype=torch.int32)
    chunk = run(device_path, q[:, :, 130:], k, v, 0.3, gamma=8, lengths=lengths, **options)
    for got, want in zip(chunk, whole, strict=True):
        torch.testing.assert_close(got, want[:, :, 130::8], atol=2e-6, rtol=2e-6)


def test_strides(device_path):
    q, k, v = inputs(2, 4, 2, 50, 60, 64)
    want = run(device_path, q, k, v, 0.3)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    inside = [torch.nn.functional.pad(x, (0, 16, 3, 5))[:, :, 3:-5, :-16] for x in (q, k, v)]
    scattered = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for views in (transposed, inside, scattered):
        assert not any(x.is_contiguous() for x in views)
        for got, expected in zip(run(device_path, *views, 0.3), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("poison", ["q", "k", "v", "inf"])
def test_poison_surfaces(device_path, algorithm, poison):
    q, k, v = inputs(1, 2, 1, 160, 160, 64)
    options = dict(gamma=8, top_k=3, exact_k=1, algorithm=algorithm)
    clean = run(device_path, q, k, v, 0.3, **options)
    if poison == "q":
        q[0, 0, 80, 5] = math.nan
        hit = torch.zeros(1, 2, 20, dtype=torch.bool)
        hit[0, 0, 10] = True
    else:
        target = v if poison == "v" else k
        target[0, 0, 37, 5] = math.nan
        if poison == "inf":  # a logit of +inf or -inf by the sign of q: keep +inf
            k[0, 0, 37] = torch.zeros(64).index_fill(0, torch.tensor([5]), math.inf)
            q[..., 5] = q[..., 5].abs() + 0.1
            clean = run(device_path, q, k.nan_to_num(posinf=0.0), v, 0.3, **options)
        hit = (torch.arange(0, 160, 8) >= 37).expand(1, 2, 20)
    out, lse, index, score = run(device_path, q, k, v, 0.3, **options)
    if poison == "v":
        assert out[hit][:, 5].isnan().all()
        assert torch.equal(index, clean[2])
    else:
        assert out[hit].isnan().all() and not lse[hit].isfinite().any()
    if poison != "v":  # as in dense, 0 * NaN of an unseen value reaches the rows of its tile
        assert out[~hit].isfinite().all() and lse[~hit].isfinite().all()
    assert not score.isnan().any()
    whole = (torch.arange(0, 160, 8) + 1) // 16
    assert torch.equal((index >= 0).sum(-1), whole.clamp(max=3).expand(1, 2, 20))
    assert (index < whole[:, None]).all()
    order = index.sort(-1).values
    assert not ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()


def test_masked_values_never_reach_the_output(device_path):
    q, k, v = inputs(1, 2, 1, 100, 100, 64)
    mask = torch.arange(100)[None] % 3 != 1
    mask[:, 32:64] = False
    want = run(device_path, q, k, v, 0.3, key_mask=mask)
    k[0, :, ~mask[0]], v[0, :, ~mask[0]] = math.nan, math.nan
    for got, expected in zip(run(device_path, q, k, v, 0.3, key_mask=mask), want, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(gamma=0), "gamma is 0"),
        (dict(block=48), "block is 48"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_k=4, exact_k=5), "exact_k is 5"),
        (dict(exact_k=-1), "exact_k is -1"),
        (dict(algorithm="best"), "algorithm is 'best'"),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(scale=0.0), "scale is 0.0"),
        (dict(scale=math.nan), "scale is nan"),
    ],
)
def test_refuses(options, message):
    q, k, v = inputs(1, 2, 1, 8, 8, 64)
    with pytest.raises(ArgumentError, match=message):
        query_sparse_attention(q, k, v, **{"scale": 0.3, **DEFAULTS, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("top_k", [16, 100])
def test_many_rows(algorithm, top_k):
    """65,536 rows: a race between the threads of a program would show in some of them."""
    heads, keys = 16, 16384
    q, k, v = inputs(1, heads, 4, keys, keys, 128, torch.bfloat16)
    q, k, v = (x.cuda() for x in (q, k, v))
    options = dict(gamma=4, block=64, top_k=top_k, exact_k=8, algorithm=algorithm)
    scale = 0.2
    _, _, index, score = query_sparse_attention(q, k, v, scale=scale, **options)
    pos = torch.arange(0, keys, 4, device="cuda")
    whole = (torch.arange(256, device="cuda")[None] + 1) * 64 <= (pos + 1)[:, None]
    for h in range(heads):
        x = (q[0, h, ::4].double() @ k[0, h // 4].double().T) * scale
        scores = x.unflatten(-1, (256, 64)).logsumexp(-1).masked_fill(~whole, -math.inf)
        assert_lists(index[0, h], score[0, h], scores, top_k, 1e-3)
        assert_best(score[0, h, :, : 8 if algorithm == "estimated" else top_k], scores, 1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lengths": torch.tensor([41])}, "lengths go to 41"),
        ({"start": torch.tensor([-1])}, "start from -1"),
    ],
)
def test_keys_that_are_not_there_are_refused_on_a_cpu(options, message):
    q, k = torch.randn(1, 2, 8, 64), torch.randn(1, 1, 40, 64)
    with pytest.raises(ArgumentError, match=message):
        query_sparse_attention(q, k, k, scale=0.1, gamma=1, top_k=0, exact_k=0, **options)
