"""block_sparse_attention against masked attention in fp64, with the mask built from the words of
its docstring."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from momo_cases import call_op

from attnplug.ops.momo import block_sparse_attention as op
from attnplug.ops.momo.block_sparse_attention import block_sparse_attention

# The interpreter computes 0/0 and inf - inf with numpy, which warns.
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEFAULTS = dict(
    query_block=16,
    block=8,
    sink=1,
    window=0,
    lengths=None,
    start=None,
    key_mask=None,
    softcap=0.0,
    rows=None,
    gamma=16,
    weight=1.0,
)
# Each line is one compiled kernel on CUDA: head dimension, dtype, query block, block, KV heads,
# heads a group, softcap, key mask.
VARIANTS = [
    (64, torch.float32, 16, 8, 2, 2, 0.0, False),
    (48, torch.float16, 24, 10, 1, 3, 0.0, True),
    (128, torch.bfloat16, 32, 16, 2, 1, 5.0, False),
    (16, torch.float16, 8, 64, 1, 1, 0.0, False),
    (112, torch.bfloat16, 160, 4, 1, 4, 0.0, False),
    (256, torch.float16, 16, 32, 1, 2, 2.0, True),
    (128, torch.bfloat16, 128, 64, 1, 2, 0.0, False),
]


def call(device_path, q, k, v, index, scale, **options):
    """The op on `device_path`, outputs on the CPU."""
    options = {"scale": scale, **DEFAULTS, **options}
    ways = block_sparse_attention, op._allocate, op.launch_block_sparse_attention
    return call_op(device_path, *ways, (q, k, v, index), options)


def usable(dtype, device_path):
    """The interpreter's bfloat16 dot is garbage."""
    interpreted = device_path == ("cpu", "kernel")
    return torch.float16 if dtype == torch.bfloat16 and interpreted else dtype


def visible(q, k, index, query_block, block, sink, window, lengths, start, key_mask, **_):
    """[B,Hq,T,S] bool: query t sees key s."""
    batch, heads, queries, _ = q.shape
    mask = torch.zeros(batch, heads, queries, k.shape[2], dtype=torch.bool)
    for b in range(batch):
        length = k.shape[2] if lengths is None else int(lengths.expand(batch)[b])
        begin = 0 if start is None else int(start.expand(batch)[b])
        first_position = max(length - queries, begin)
        key = torch.arange(k.shape[2])
        for t in range(queries):
            position = length - queries + t
            if position < begin:
                continue
            place = (position - first_position) // query_block
            head_position = first_position + place * query_block
            local = begin + max(head_position - window - begin, 0) // block * block
            causal = (key >= begin) & (key <= position)
            if key_mask is not None:
                causal &= key_mask[b]
            number = torch.where(key >= begin, (key - begin) // block, -1)
            for h in range(heads):
                listed = torch.isin(number, index[b, h, place].long().clamp(min=-2))
                listed &= number >= 0
                mask[b, h, t] = causal & ((key >= local) | (number < sink) | listed)
    return mask


def attend(q, k, v, mask, scale, softcap, dtype):
    """Masked attention in `dtype`; rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    logits = (q.to(dtype) @ k.transpose(2, 3)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    # A masked key takes no part at all: 0 * NaN must not enter the oracle.
    weights = torch.softmax(logits, -1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ v, torch.logsumexp(logits.float() if dtype != torch.float64 else logits, -1)


def assert_close(got, q, k, v, index, scale, **options):
    """Error at most a few times that of plain attention in the inputs' dtype."""
    options = DEFAULTS | options
    out, lse = got
    mask = visible(q, k, index, **options)
    k, v = (torch.where(mask.any(2).any(1)[:, None, :, None], x, 0.0) for x in (k, v))
    want, want_lse = attend(q, k, v, mask, scale, options["softcap"], torch.float64)
    plain, plain_lse = attend(q, k, v, mask, scale, options["softcap"], q.dtype)
    eps = torch.finfo(q.dtype).eps
    allowed = 3 * (plain.double() - want).abs().max() + 2 * eps * v.double().abs().max()
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert (out.double() - want).abs().max() <= allowed
    seen = mask.any(-1)
    assert torch.equal(lse.isneginf(), ~seen)
    assert (out[~seen] == 0).all()
    if seen.any():
        plain_error = (plain_lse.double() - want_lse)[seen].abs().max()
        error = (lse.double() - want_lse)[seen].abs().max()
        assert error <= 3 * plain_error + 1e-5 * (1 + want_lse[seen].abs().max())


def draw_tensors(seed, batch, heads, kv_heads, queries, keys, dim, dtype):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, dim)] + 2 * [(batch, kv_heads, keys, dim)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes], generator


@st.composite
def cases(draw):
    dim, dtype, query_block, block, kv_heads, group, softcap, masked = draw(
        st.sampled_from(VARIANTS)
    )
    batch = draw(st.sampled_from([1, 2]))
    queries = draw(st.sampled_from([1, 2, query_block - 1, query_block, query_block + 3, 48, 41]))
    # Triton compiles other code for sizes that 16 divides.
    length = queries + draw(st.one_of(st.integers(0, 70), st.sampled_from([0, 64, 208])))
    spare = draw(st.sampled_from([0, 5]))
    lengths = [length] * draw(st.sampled_from([1, batch]))
    if len(lengths) > 1:
        lengths[1] = draw(st.integers(queries, length))
    start = [draw(st.integers(0, min(lengths))) for _ in range(batch)]
    return dict(
        dim=dim,
        dtype=dtype,
        kv_heads=kv_heads,
        heads=kv_heads * group,
        masked=masked,
        batch=batch,
        queries=queries,
        keys=length + spare,
        names=draw(st.sampled_from([0, 1, 5])),
        lengths=torch.tensor(lengths) if spare or draw(st.booleans()) else None,
        start=torch.tensor(start, dtype=torch.int32) if draw(st.booleans()) else None,
        options=dict(
            query_block=query_block,
            block=block,
            softcap=softcap,
            sink=draw(st.sampled_from([0, 1, 3])),
            window=draw(st.integers(0, 20)),
        ),
        scale=draw(st.sampled_from([0.1, 1.0, -0.5])),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_matches_fp64(device_path, case):
    dtype = usable(case["dtype"], device_path)
    (q, k, v), generator = draw_tensors(
        case["seed"],
        case["batch"],
        case["heads"],
        case["kv_heads"],
        case["queries"],
        case["keys"],
        case["dim"],
        dtype,
    )
    if case["lengths"] is not None:  # slots past the length were never written
        for b in range(case["batch"]):
            for x in (k, v):
                x[b, :, int(case["lengths"].expand(case["batch"])[b]) :] = torch.nan
    options = case["options"] | dict(lengths=case["lengths"], start=case["start"])
    if case["masked"]:
        options["key_mask"] = torch.rand(case["batch"], case["keys"], generator=generator) < 0.7
    query_blocks = -(-case["queries"] // options["query_block"])
    index = torch.randint(
        -1,
        case["keys"] // options["block"] + 2,
        (case["batch"], case["heads"], query_blocks, case["names"]),
        generator=generator,
        dtype=torch.int32,
    )
    got = call(device_path, q, k, v, index, case["scale"], **options)
    assert_close(got, q, k, v, index, case["scale"], **options)


@pytest.mark.parametrize("block", [8, 16, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_sizes(device_path, dtype, block):
    """Whole query blocks, whole key blocks, no option, on the kernel's every way of cutting key
    blocks into tiles. (Triton 3.6 gave wrong numbers here and nowhere else.)"""
    dtype = usable(dtype, device_path)
    (q, k, v), generator = draw_tensors(11, 1, 2, 2, 128, 512, 64, dtype)
    index = torch.randint(-1, 512 // block, (1, 2, 4, 6), generator=generator, dtype=torch.int32)
    for queries in (128, 32):
        cut = q[:, :, :queries], k, v, index[:, :, : queries // 32]
        options = dict(query_block=32, block=block)
        assert_close(call(device_path, *cut, 0.125, **options), *cut, 0.125, **options)


def test_all_blocks_is_dense(device_path):
    (q, k, v), _ = draw_tensors(0, 1, 4, 2, 50, 50, 64, torch.float32)
    index = torch.arange(7, dtype=torch.int32).expand(1, 4, 4, 7)
    out, _ = call(device_path, q, k, v, index, 0.125, sink=0)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True, scale=0.125
    )
    assert (out.double() - want).abs().max() < 2e-6


def test_lists_are_sets(device_path):
    """Order, repeats, empties, the sink, the local part and the future change nothing, to the
    bit."""
    (q, k, v), _ = draw_tensors(1, 1, 2, 1, 16, 96, 64, torch.float32)
    clean = torch.tensor([1, 3, 4, 7, -1, -1, -1, -1, -1, -1], dtype=torch.int32)
    messy = torch.tensor([7, -1, 3, 3, 0, 4, 10, 1, 99, 3], dtype=torch.int32)
    options = dict(window=3, sink=1)
    want = call(device_path, q, k, v, clean.expand(1, 2, 1, 10).contiguous(), 0.2, **options)
    got = call(device_path, q, k, v, messy.expand(1, 2, 1, 10).contiguous(), 0.2, **options)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_left_padded_row_equals_row_alone(device_path):
    (q, k, v), generator = draw_tensors(2, 2, 2, 1, 60, 60, 64, torch.float32)
    pad = 21
    index = torch.randint(-1, 8, (2, 2, 4, 3), generator=generator, dtype=torch.int32)
    k[1, :, :pad] = torch.nan
    out, lse = call(device_path, q, k, v, index, 0.125, start=torch.tensor([0, pad]), window=5)
    alone = [x[1:, :, pad:] for x in (q, k, v)]
    want, want_lse = call(device_path, *alone, index[1:, :, :3], 0.125, window=5)
    torch.testing.assert_close(out[1:, :, pad:], want, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse[1:, :, pad:], want_lse, rtol=0, atol=1e-6)
    assert (out[1, :, :pad] == 0).all() and lse[1, :, :pad].isneginf().all()


def test_chunks_equal_one_call(device_path):
    (q, k, v), generator = draw_tensors(3, 1, 2, 2, 64, 64, 64, torch.float32)
    index = torch.randint(-1, 8, (1, 2, 4, 3), generator=generator, dtype=torch.int32)
    out, lse = call(device_path, q, k, v, index, 0.125)
    for begin, end in ((0, 32), (32, 64)):
        blocks = slice(begin // 16, end // 16)
        got, got_lse = call(
            device_path,
            q[:, :, begin:end],
            k,
            v,
            index[:, :, blocks],
            0.125,
            lengths=torch.tensor([end]),
        )
        torch.testing.assert_close(got, out[:, :, begin:end], rtol=0, atol=1e-6)
        torch.testing.assert_close(got_lse, lse[:, :, begin:end], rtol=0, atol=1e-6)


def test_strides_are_honoured(device_path):
    (q, k, v), generator = draw_tensors(4, 2, 4, 2, 20, 40, 64, torch.float32)
    index = torch.randint(-1, 5, (2, 4, 2, 3), generator=generator, dtype=torch.int32)
    want = call(device_path, q, k, v, index, 0.125)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    v = v.transpose(2, 3).contiguous().transpose(2, 3)
    index = torch.stack([index, index], -1)[..., 0]
    got = call(device_path, q, k, v, index, 0.125)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_rows_correct_the_output(device_path, gamma):
    """With `rows` it is delta_correct of what it gives without."""
    (q, k, v), generator = draw_tensors(12, 2, 4, 2, 45, 70, 64, torch.float32)
    index = torch.randint(-1, 8, (2, 4, 3, 3), generator=generator, dtype=torch.int32)
    rows = torch.randn(2, 4, -(-45 // gamma), 64, generator=generator)
    options = dict(lengths=torch.tensor([66]), start=torch.tensor([0, 30]))
    sparse, lse = call(device_path, q, k, v, index, 0.125, **options)
    correction = dict(rows=rows, gamma=gamma, weight=0.5)
    got, got_lse = call(device_path, q, k, v, index, 0.125, **correction, **options)
    assert torch.equal(got_lse, lse)
    for b, first in ((0, 0), (1, 9)):
        t = torch.arange(first, 45)
        row = (t - first) // gamma
        want = sparse[b, :, t] + 0.5 * (rows[b][:, row] - sparse[b][:, first + row * gamma])
        want[:, ::gamma] = rows[b][:, row[::gamma]]
        torch.testing.assert_close(got[b, :, t], want, rtol=0, atol=1e-5)
        exact = torch.equal(got[b, :, first::gamma], rows[b][:, : len(range(first, 45, gamma))])
        assert exact and (got[b, :, :first] == 0).all()


@interpreted
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_surfaces(device_path, where, value):
    """What dense gives for the rows that see it: NaN for NaN, inf or NaN or a finite number for an
    inf. Rows of earlier query blocks, other heads and other batch rows stay as they were."""
    (q, k, v), _ = draw_tensors(5, 2, 2, 1, 48, 48, 64, torch.float32)
    index = torch.full((2, 2, 3, 1), 2, dtype=torch.int32)
    before, _ = call(device_path, q, k, v, index, 0.125, window=0)
    {"q": q, "k": k, "v": v}[where][0, 0, 20, 7] = value
    mask = visible(q, k, index, **DEFAULTS)
    want, _ = attend(q, k, torch.zeros_like(v), mask, 0.125, 0.0, torch.float64)
    out, _ = call(device_path, q, k, v, index, 0.125, window=0)
    sees = mask[..., 20].clone()
    if where == "q":
        sees[:] = False
        sees[0, 0, 20] = True
    elif where == "k":
        sees[1] = False
        broken = want.isnan().any(-1)
        assert torch.equal(out.isnan().any(-1), broken)
        assert broken.any()
    else:
        sees[1] = False
    assert sees.any()
    if where == "v":
        assert (~out[..., 7].isfinite())[sees].all()
    elif where == "q":
        assert out.isnan().all(-1)[sees].all()
    apart = torch.ones_like(sees)
    apart[0, :, 16:] = False
    assert torch.equal(out[apart], before[apart])


@interpreted
def test_hidden_keys_never_leak(device_path):
    """NaN in masked keys, in padding and past the length: no trace."""
    (q, k, v), generator = draw_tensors(6, 1, 2, 1, 30, 80, 64, torch.float32)
    index = torch.randint(-1, 9, (1, 2, 2, 4), generator=generator, dtype=torch.int32)
    key_mask = torch.rand(1, 80, generator=generator) < 0.6
    options = dict(lengths=torch.tensor([70]), start=torch.tensor([6]), key_mask=key_mask)
    clean = call(device_path, q, k, v, index, 0.125, **options)
    for x in (k, v):
        x[0, :, ~key_mask[0]] = torch.nan
        x[0, :, :6] = torch.inf
        x[0, :, 70:] = torch.nan
    got = call(device_path, q, k, v, index, 0.125, **options)
    assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])


@interpreted
def test_query_without_keys(device_path):
    (q, k, v), _ = draw_tensors(7, 1, 2, 1, 20, 20, 64, torch.float32)
    index = torch.full((1, 2, 2, 1), -1, dtype=torch.int32)
    key_mask = torch.ones(1, 20, dtype=torch.bool)
    key_mask[0, :9] = False
    out, lse = call(device_path, q, k, v, index, 0.125, key_mask=key_mask)
    assert (out[:, :, :9] == 0).all() and lse[:, :, :9].isneginf().all()
    assert out[:, :, 9:].isfinite().all() and lse[:, :, 9:].isfinite().all()


@interpreted
def test_all_logits_minus_inf_is_nan(device_path):
    """Query 0 sees one key, whose logit is -inf: 0/0 as in dense, not 0."""
    (q, k, v), _ = draw_tensors(8, 1, 1, 1, 3, 3, 64, torch.float32)
    q[..., 0] = 1.0
    k[0, 0, 0, 0] = -torch.inf
    index = torch.full((1, 1, 1, 1), -1, dtype=torch.int32)
    out, _ = call(device_path, q, k, v, index, 0.125)
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1:].isfinite().all()


@pytest.mark.gpu
def test_offsets_past_2_to_the_31():
    """The last head of a 2.4e9-element cache, of which only what the lists name is written."""
    keys, queries = 6 << 20, 128
    k = torch.full((1, 3, keys, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    v = torch.full_like(k, torch.nan)
    names = torch.tensor([7, 50_000, 98_000], dtype=torch.int32, device="cuda")
    spans = [torch.arange(n * 64, n * 64 + 64) for n in (0, *names.tolist())]
    seen = torch.cat([*spans, torch.arange(keys - queries, keys)]).cuda()
    k[:, :, seen] = torch.randn(1, 3, len(seen), 128, device="cuda").bfloat16()
    v[:, :, seen] = torch.randn(1, 3, len(seen), 128, device="cuda").bfloat16()
    q = torch.randn(1, 3, queries, 128, device="cuda").bfloat16()
    out, _ = block_sparse_attention(q, k, v, names.expand(1, 3, 1, 3).contiguous(), scale=0.08)
    mask = torch.ones(queries, len(seen), dtype=torch.bool, device="cuda")
    mask = mask.tril(len(seen) - queries)
    want, _ = attend(q, k[:, :, seen], v[:, :, seen], mask, 0.08, 0.0, torch.float64)
    assert (out.double() - want).abs().max() < 0.03
