"""measure_blocks against fp64 torch: its rows, and the sets of blocks that their masses ask for."""

import math

import pytest
import torch
from cases import WIDTHS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from momo_cases import attention_inputs as draw_inputs
from momo_cases import call_op

from attnplug import Momo
from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import measure_blocks
from attnplug.ops.momo import measure_blocks as module
from attnplug.policies import AttentionCall

DEFAULTS = dict(
    gamma=8,
    block=16,
    query_block=32,
    top_k=3,
    sink=1,
    lengths=None,
    start=None,
    key_mask=None,
    softcap=0.0,
)


def first_local(q, k, options):
    """The blocks before a query block's first query, as momo bounds its candidates."""
    call = AttentionCall(q, k, k, 1.0, lengths=options["lengths"], start=options["start"])
    sizes = {name: options[name] for name in ("gamma", "block", "query_block")}
    return Momo(**sizes)._first_local(call)


def run(device_path, q, k, v, before, scale, **options):
    options = {"scale": scale, **DEFAULTS, **options}
    ways = measure_blocks, module._allocate, module.launch_measure_blocks
    return call_op(device_path, *ways, (q, k, v, before), options)


def row_logits(q, k, b, scale, options):
    """Logits `[Hq,rows,keys]` (fp64, -inf where unseen) of a batch row's gamma rows, counted from
    its first key, and their numbers."""
    length = k.shape[2] if options["lengths"] is None else options["lengths"].flatten()[b].item()
    start = 0 if options["start"] is None else options["start"].flatten()[b].item()
    queries = q.shape[2]
    t = torch.arange(max(0, start - (length - queries)), queries, options["gamma"])
    key = k[b, :, start:length].double().repeat_interleave(q.shape[1] // k.shape[1], 0)
    x = q[b, :, t].double() @ key.transpose(1, 2) * scale
    if options["softcap"]:
        x = options["softcap"] * torch.tanh(x / options["softcap"])
    seen = torch.arange(start, length)[None] <= (t + length - queries)[:, None]
    if options["key_mask"] is not None:
        seen = seen & options["key_mask"][b, start:length]
    return x.masked_fill(~seen, -math.inf), start, length


def check(device_path, q, k, v, scale, **options):
    options = {**DEFAULTS, **options}
    before = first_local(q, k, options)
    out, lse, blocks = run(device_path, q, k, v, before, scale, **options)
    each, block = options["query_block"] // options["gamma"], options["block"]
    top_k = options["top_k"]
    assert blocks.shape == (*q.shape[:2], before.shape[1], top_k) and blocks.dtype == torch.int32
    eps = torch.finfo(q.dtype).eps
    for b in range(q.shape[0]):
        x, start, length = row_logits(q, k, b, scale, options)
        value = v[b, :, start:length].double().repeat_interleave(q.shape[1] // v.shape[1], 0)
        if options["key_mask"] is not None:
            value = value.masked_fill(~options["key_mask"][b, start:length, None], 0.0)
        want = x.softmax(-1).nan_to_num(0.0) @ value
        rows = x.shape[1]
        if rows:
            error = (out[b, :, :rows].double() - want).abs().max()
            assert error <= 8 * eps * (1 + want.abs().max())
        assert (out[b, :, rows:] == 0).all() and (lse[b, :, rows:] == -math.inf).all()
        full = (length - start) // block
        weights = x.softmax(-1).nan_to_num(0.0)[..., : full * block]
        masses = weights.unflatten(-1, (full, block)).sum(-1)
        edges = before.expand(q.shape[0], -1)[b]
        assert (blocks[b, :, -(-rows // each) :] == -1).all()  # past a padded row's end
        for n in range(-(-rows // each)):
            if (x[:, n * each : (n + 1) * each] == -math.inf).all():
                continue  # rows that see nothing
            mass = masses[:, n * each : (n + 1) * each].sum(1)
            edge = min(edges[n].item(), full)
            assert_list(blocks[b, :, n], mass, options["sink"], edge, top_k, x, scale)
    return out, lse, blocks


def assert_list(blocks, mass, sink, edge, top_k, logits, scale):
    """Ascending distinct candidates, as many as there are or fit, none of them worth less than one
    left out (beyond what float16 scores blur)."""
    count = min(max(edge - sink, 0), top_k)
    assert (blocks[:, count:] == -1).all()
    listed = blocks[:, :count].long()
    assert (listed[:, 1:] > listed[:, :-1]).all()
    if count:
        assert listed.min() >= sink and listed.max() < edge
    if edge - sink > top_k:
        left = mass.clone()
        left.scatter_(1, listed, -1.0)
        size = logits[logits > -math.inf].abs().max().item() + 8  # of a score
        blur = 4 * size * 2**-11
        kept = mass.gather(1, listed).amin(1)
        assert (kept >= left[:, sink:edge].amax(1) * (1 - blur) - 1e-30).all()


@st.composite
def cases(draw, dtypes):
    batch, kv_heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 2, 3, 4]))
    queries = draw(st.integers(1, 100))
    keys = queries + draw(st.integers(0, 60))
    q, k, v = draw_inputs(
        batch,
        kv_heads * group,
        kv_heads,
        queries,
        keys,
        draw(st.sampled_from([*WIDTHS, 256])),
        draw(st.sampled_from(dtypes)),
        draw(st.integers(0, 99)),
    )
    gamma = draw(st.sampled_from([1, 4, 8]))
    options = dict(
        gamma=gamma,
        query_block=gamma * draw(st.sampled_from([1, 3, 4])),
        block=draw(st.sampled_from([16, 32])),
        top_k=draw(st.sampled_from([1, 3, 5])),
        sink=draw(st.sampled_from([0, 1, 2])),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )
    if draw(st.booleans()):
        lengths = [draw(st.integers(queries, keys)) for _ in range(batch)]
        options["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        for b, length in enumerate(lengths):
            k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    if draw(st.booleans()):
        options["start"] = torch.tensor([draw(st.integers(0, queries)) for _ in range(batch)])
    if draw(st.booleans()):
        gen = torch.Generator().manual_seed(draw(st.integers(0, 9)))
        options["key_mask"] = torch.rand(batch, keys, generator=gen) > 0.3
    return q, k, v, draw(st.sampled_from([0.05, 0.125])), options


def dtypes(device_path):
    # Triton's interpreter has no bfloat16
    kernel_on_cpu = device_path == ("cpu", "kernel")
    return (torch.float32, torch.float16) + (() if kernel_on_cpu else (torch.bfloat16,))


def check_without_values(device_path, q, k, scale, options, lse, blocks):
    """It measures and chooses the same, bit for bit."""
    before = first_local(q, k, {**DEFAULTS, **options})
    out, *found = run(device_path, q, k, None, before, scale, **options)
    assert out.shape == (*lse.shape, 0) and out.dtype == q.dtype
    assert torch.equal(found[0], lse) and torch.equal(found[1], blocks)


def test_fuzz(device_path):
    @settings(suppress_health_check=list(HealthCheck))
    @given(cases(dtypes(device_path)))
    def fuzz(case):
        q, k, v, scale, options = case
        _, lse, blocks = check(device_path, q, k, v, scale, **options)
        check_without_values(device_path, q, k, scale, options, lse, blocks)

    fuzz()


@pytest.mark.parametrize("padded", [False, True])
def test_parts_are_the_whole(device_path, padded, monkeypatch):
    """Scores that do not fit at once: the same rows and lists, part by part."""
    q, k, v = draw_inputs(2, 4, 2, 200, 230, 64)
    options = dict(lengths=torch.tensor([230, 210], dtype=torch.int32))
    if padded:
        options["start"] = torch.tensor([0, 70])
    whole = check(device_path, q, k, v, 0.125, **options)
    monkeypatch.setattr(module, "SCORE_BYTES", 2 * 14 * 4 * 4 * 2 * 2)
    parts = list(module._parts(q.shape, 2, 8, 32, 14, padded))
    assert len(parts) == 4
    for got, want in zip(check(device_path, q, k, v, 0.125, **options), whole, strict=True):
        assert torch.equal(got, want)
    check_without_values(device_path, q, k, 0.125, options, *whole[1:])
    without = dict(lengths=None, **({"start": options["start"]} if padded else {}))
    check(device_path, q, k, v, 0.125, **without)


def test_ties_go_to_the_lower_block(device_path):
    q, k, v = draw_inputs(1, 2, 1, 128, 128, 64)
    _, _, blocks = run(
        device_path, q, torch.zeros_like(k), v, torch.tensor([[0, 2, 4, 6]]).int(), 1.0
    )
    assert blocks[0, 0].tolist() == [[-1, -1, -1], [1, -1, -1], [1, 2, 3], [1, 2, 3]]


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # NumPy's, interpreted
def test_what_is_not_finite_comes_last(device_path):
    """A NaN or infinite block ranks below every other and is listed only to fill the list."""
    for bad in (math.nan, math.inf):
        q, k, v = draw_inputs(1, 1, 1, 128, 128, 64)
        k[0, 0, 40] = bad
        before = torch.tensor([[0, 2, 4, 6]], dtype=torch.int32)
        out, _, blocks = run(device_path, q, k, v, before, 0.125, top_k=5)
        assert blocks[0, 0, 3].tolist() == [1, 2, 3, 4, 5]
        assert not out[0, 0, 6:].isfinite().all()


def test_one_row_decides_where_the_others_are_flat(device_path):
    """A block that a single row of the query block wants is listed: masses add up, no vote."""
    q, k, v = draw_inputs(1, 1, 1, 256, 256, 64)
    q, k = q * 0.01, k * 0.1
    k[0, 0, 5 * 16 + 3, 0] = 40.0
    q[0, 0, 224 + 8, 0] = 1.0
    before = first_local(q, k, DEFAULTS)
    _, _, blocks = run(device_path, q, k, v, before, 1.0, top_k=1)
    assert blocks[0, 0, 7].tolist() == [5]


def test_strides_and_expanded_rows(device_path):
    q, k, v = draw_inputs(2, 4, 2, 100, 120, 64)
    plain = check(device_path, q, k, v, 0.125)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    lengths = torch.tensor([120], dtype=torch.int32).expand(2)
    for got, want in zip(check(device_path, q, k, v, 0.125, lengths=lengths), plain, strict=True):
        assert torch.allclose(got.float(), want.float(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(query_block=20), "query_block is 20, needs a multiple of gamma = 8"),
        (dict(top_k=0), "top_k is 0, needs at least 1"),
        (dict(sink=-1), "sink is -1"),
        (dict(block=8), "block is 8, needs one of"),
        (dict(scale=0.0), "scale is 0.0"),
    ],
)
def test_bad_options(options, message):
    q, k, v = draw_inputs(1, 2, 1, 64, 64, 64)
    before = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=message):
        measure_blocks(q, k, v, before, **{"scale": 0.1, **DEFAULTS, **options})


def test_bad_tensors():
    q, k, v = draw_inputs(1, 2, 1, 64, 64, 64)
    before = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"before is \(1, 3\)"):
        measure_blocks(q, k, v, torch.zeros(1, 3).int(), scale=0.1, **DEFAULTS)
    with pytest.raises(GradientError):
        measure_blocks(q.requires_grad_(), k, v, before, scale=0.1, **DEFAULTS)
