"""The Hopper kernel of query_sparse_attention and block_sparse_attention, through the public ops,
on many tiles and on odd shapes: against fp64, and against the Triton kernels of the rest."""

import math
import os
import subprocess
import sys

import pytest
import torch

from attnplug import Momo
from attnplug.ops import block_sparse_attention, measure_blocks, query_sparse_attention
from attnplug.ops.momo import block_sparse_attention as block_sparse_module
from attnplug.ops.momo import measure_blocks as measure_module
from attnplug.ops.momo import query_sparse_attention as query_sparse_module
from attnplug.ops.momo.kernels import hopper as _hopper
from attnplug.policies import AttentionCall

BF16, FP16 = torch.bfloat16, torch.float16


def tensors(batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided, device="cuda"):
    """q, k, v: `[B,H,S,D]` or views of `[B,S,H,D]`; NaN in the slots past each length."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads, tokens):
        shape = (batch, tokens, heads, dim) if strided else (batch, heads, tokens, dim)
        x = torch.randn(shape, device=device, generator=generator).to(dtype)
        return x.transpose(1, 2) if strided else x

    q, k, v = draw(heads, queries), draw(kv_heads, keys), draw(kv_heads, keys)
    for b in range(batch if lengths else 0):
        for x in (k, v):
            x[b, :, lengths[b % len(lengths)] :] = math.nan
    return q, k, v


@pytest.fixture
def only_hopper(monkeypatch):
    """The Triton kernels must not be asked."""

    def refuse(*_args, **_options):
        raise AssertionError("the Triton kernel was launched")

    for module in (query_sparse_module, block_sparse_module, measure_module):
        monkeypatch.setattr(module, "launch_triton", refuse)


def logits_of(q, k, scale, b, t, length):
    """[Hq, len(t), length] fp64, -inf in the future."""
    key = k[b, :, :length].double().repeat_interleave(q.shape[1] // k.shape[1], 0)
    x = (q[b, :, t].double() @ key.transpose(1, 2)) * scale
    seen = torch.arange(length, device=q.device)[None] <= (t + length - q.shape[2])[:, None]
    return x.masked_fill(~seen, -math.inf)


def values_of(q, v, b, length):
    return v[b, :, :length].double().repeat_interleave(q.shape[1] // v.shape[1], 0)


def assert_near(got, want, dtype):
    """Weights are rounded to the inputs' dtype, and so is the output."""
    eps = torch.finfo(dtype).eps
    assert (got.double() - want).abs().max() <= 2 * eps * (1 + want.abs().max())


# batch, heads, KV heads, queries, keys, dim, dtype, lengths, strided, gamma, top_k, exact_k
ROWS = [
    (1, 8, 2, 4096, 4096, 128, BF16, None, False, 16, 0, 0),
    (1, 8, 2, 4096, 4096, 128, BF16, None, False, 16, 16, 8),
    (1, 4, 1, 16384, 16384, 128, BF16, None, True, 16, 100, 8),  # threshold at every fourth tile
    (1, 7, 1, 3000, 3000, 128, FP16, None, False, 16, 16, 3),  # one head a tile
    (2, 4, 2, 1000, 1300, 64, FP16, [1100, 1203], True, 16, 12, 8),  # two heads a tile
    (2, 8, 1, 500, 777, 128, BF16, [777], False, 4, 5, 0),
    (1, 2, 2, 300, 900, 64, BF16, [811], True, 1, 0, 0),
    (2, 4, 4, 2, 100, 128, BF16, [90], True, 16, 4, 2),  # a single row
    (1, 4, 1, 130, 20000, 128, BF16, [19001], True, 1, 128, 8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_query_sparse(only_hopper, case):
    batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided, gamma, top_k, exact_k = (
        case
    )
    q, k, v = tensors(batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided)
    scale = 0.3 * (64 / dim) ** 0.5
    on_device = None if lengths is None else torch.tensor(lengths, device="cuda")
    out, lse, index, score = query_sparse_attention(
        q, k, v, scale=scale, gamma=gamma, top_k=top_k, exact_k=exact_k, lengths=on_device
    )
    for b in range(batch):
        length = lengths[b % len(lengths)] if lengths else keys
        t = torch.arange(0, queries, gamma, device="cuda")
        x = logits_of(q, k, scale, b, t, length)
        assert_near(out[b], x.softmax(-1) @ values_of(q, v, b, length), dtype)
        torch.testing.assert_close(lse[b].double(), x.logsumexp(-1), atol=1e-4, rtol=1e-5)
        if top_k:
            blocks = length // 64
            scores = x[..., : 64 * blocks].unflatten(-1, (blocks, 64)).logsumexp(-1)
            whole = (torch.arange(blocks, device="cuda")[None] + 1) * 64 <= (
                t + length - queries + 1
            )[:, None]
            check_lists(index[b].long(), score[b], scores.masked_fill(~whole, -math.inf), exact_k)


# batch, heads, KV heads, queries, keys, dim, dtype, lengths, strided, gamma, query block, top_k
JOINT = [
    (1, 8, 2, 4096, 4096, 128, BF16, None, False, 16, 128, 16),
    (1, 4, 1, 16384, 16384, 128, BF16, None, True, 16, 128, 100),
    (1, 7, 1, 3000, 3000, 128, FP16, None, False, 16, 64, 16),  # one head a tile
    (2, 4, 2, 1000, 1300, 64, FP16, [1100, 1203], True, 16, 48, 12),  # two heads a tile
    (2, 8, 1, 500, 777, 128, BF16, [777], False, 4, 128, 5),
    (1, 4, 1, 130, 20000, 128, BF16, [19001], True, 1, 128, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", JOINT, ids=str)
def test_measure_blocks(only_hopper, monkeypatch, case, parts):
    batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided, gamma, chi, top_k = case
    q, k, v = tensors(batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided)
    scale = 0.3 * (64 / dim) ** 0.5
    on_device = None if lengths is None else torch.tensor(lengths, device="cuda")
    rows = -(-queries // gamma)
    monkeypatch.setattr(
        measure_module, "SCORE_BYTES", 2 * rows * (keys // 64) * batch * heads // parts
    )
    call = AttentionCall(q, k, v, scale, lengths=on_device)
    before = Momo(gamma=gamma, query_block=chi)._first_local(call)
    options = dict(scale=scale, gamma=gamma, query_block=chi, top_k=top_k, lengths=on_device)
    out, lse, blocks = measure_blocks(q, k, v, before, **options)
    none, *same = measure_blocks(q, k, None, before, **options)
    assert none.shape[3] == 0 and torch.equal(same[0], lse) and torch.equal(same[1], blocks)
    for b in range(batch):
        length = lengths[b % len(lengths)] if lengths else keys
        t = torch.arange(0, queries, gamma, device="cuda")
        x = logits_of(q, k, scale, b, t, length)
        weights = x.softmax(-1)
        assert_near(out[b], weights @ values_of(q, v, b, length), dtype)
        torch.testing.assert_close(lse[b].double(), x.logsumexp(-1), atol=1e-4, rtol=1e-5)
        full = length // 64
        masses = weights[..., : 64 * full].unflatten(-1, (full, 64)).sum(-1)
        edges = before.expand(batch, -1)[b]
        for n in range(before.shape[1]):
            edge = edges[n].item()
            mass = masses[:, n * chi // gamma : (n + 1) * chi // gamma].sum(1)[:, 1:edge]
            count = min(max(edge - 1, 0), top_k)
            listed = blocks[b, :, n]
            assert (listed[:, count:] == -1).all() and (listed[:, :count] >= 1).all()
            assert (listed[:, 1:count] > listed[:, : count - 1]).all() if count > 1 else True
            if count:
                kept = mass.gather(1, listed[:, :count].long() - 1).sum(1)
                assert (kept > 0.999 * mass.topk(count, -1).values.sum(1)).all()


def check_lists(index, score, scores, exact_k):
    """Distinct complete blocks with their scores, all slots used, the first exact_k the best."""
    listed = index >= 0
    offered = scores > -math.inf
    assert torch.equal(listed.sum(-1), offered.sum(-1).clamp(max=index.shape[-1]))
    ordered = index.sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    assert (index[~listed] == -1).all() and (score[~listed] == -math.inf).all()
    got = scores.gather(-1, index.clamp(min=0))
    assert (got[listed] - score[listed]).abs().max() < 1e-3
    few = min(exact_k, scores.shape[-1])
    best = scores.topk(few, -1).values
    mine = score[..., :few].double().sort(-1, descending=True).values
    assert (best - mine).nan_to_num(0.0, 0.0, 0.0).abs().max() < 1e-3 if few else True


@pytest.mark.gpu
def test_the_estimate_captures_what_tritons_does(monkeypatch):
    q, k, v = tensors(1, 4, 1, 16384, 16384, 128, BF16, None, False)
    masses = []
    for serves in (_hopper.serves, lambda *_: False):
        monkeypatch.setattr(_hopper, "serves", serves)
        _, lse, _, score = query_sparse_attention(q, k, v, scale=0.2, top_k=32)
        masses.append((score.logsumexp(-1) - lse).exp()[..., 256:].mean().item())
    assert masses[0] > 0.98 * masses[1]


# batch, heads, KV heads, queries, keys, dim, dtype, lengths, strided, names, window, gamma of rows
BLOCKS = [
    (1, 8, 2, 4096, 4096, 128, BF16, None, False, 16, 0, 0),
    (1, 8, 2, 4096, 4096, 128, BF16, None, False, 17, 0, 16),
    (1, 7, 1, 3000, 3000, 128, BF16, None, False, 5, 100, 0),
    (2, 4, 2, 1000, 1300, 64, FP16, [1100, 1203], True, 9, 70, 0),
    (2, 4, 2, 1000, 1300, 64, FP16, [1100, 1203], True, 9, 0, 8),
    (2, 4, 2, 1000, 1300, 64, BF16, [1203], True, 9, 0, 32),  # too wide to fuse
    (1, 2, 2, 3, 900, 64, BF16, [811], True, 4, 0, 16),
    (1, 2, 2, 200, 200, 128, BF16, None, True, 0, 0, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_block_sparse(only_hopper, case):
    batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided, names, window, gamma = case
    q, k, v = tensors(batch, heads, kv_heads, queries, keys, dim, dtype, lengths, strided)
    places = -(-queries // 128)
    shape = (batch, heads, places, names)
    index = torch.randint(-1, keys // 64 + 1, shape, device="cuda", dtype=torch.int32)
    rows = None
    if gamma:
        rows = torch.randn(batch, heads, -(-queries // gamma), dim, device="cuda").to(dtype)
    scale = 0.3 * (64 / dim) ** 0.5
    on_device = None if lengths is None else torch.tensor(lengths, device="cuda")
    options = dict(
        scale=scale, window=window, lengths=on_device, rows=rows, gamma=gamma or 16, weight=0.5
    )
    out, lse = block_sparse_attention(q, k, v, index, **options)
    t = torch.arange(queries, device="cuda")
    for b in range(batch):
        length = lengths[b % len(lengths)] if lengths else keys
        x = logits_of(q, k, scale, b, t, length)
        first = t // 128 * 128 + length - queries
        local = (first - window).clamp(min=0) // 64
        block = torch.arange(length, device="cuda") // 64
        listed = torch.zeros(heads, places, keys // 64 + 2, dtype=torch.bool, device="cuda")
        name = index[b].long()
        listed.scatter_(-1, name.where(name >= 0, keys // 64 + 1), True)
        listed[..., 0], listed[..., -1] = True, False
        seen = listed[:, t // 128][:, :, block] | (block[None] >= local[:, None])
        x = x.masked_fill(~seen, -math.inf)
        want = x.softmax(-1) @ values_of(q, v, b, length)
        torch.testing.assert_close(lse[b].double(), x.logsumexp(-1), atol=1e-4, rtol=1e-5)
        if rows is not None:
            want = want + 0.5 * (rows[b].double()[:, t // gamma] - want[:, t // gamma * gamma])
            want[:, ::gamma] = rows[b].double()
            assert torch.equal(out[b, :, ::gamma], rows[b])
        assert_near(out[b], want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_not_finite_surfaces(only_hopper, where, value):
    """As in dense, and nowhere else than in rows that see it (a value's NaN: in the tile)."""
    queries, at = 1024, 300
    q, k, v = tensors(1, 4, 2, queries, queries, 128, BF16, None, False)
    {"q": q, "k": k, "v": v}[where][0, 0, at, 7] = value
    t = torch.arange(0, queries, 16, device="cuda")
    x = logits_of(q, k, 0.2, 0, t, queries)
    want = x.softmax(-1) @ values_of(q, v.nan_to_num(0.0, 0.0, 0.0), 0, queries)
    out, lse, index, score = query_sparse_attention(q, k, v, scale=0.2, top_k=5, exact_k=3)
    if where == "v":
        hit = (t >= at).expand(2, -1)
        assert not out[0, :2, :, 7][hit].isfinite().any()
    else:
        assert torch.equal(out[0].isnan().any(-1), want.isnan().any(-1))
        same = x.logsumexp(-1)
        assert torch.equal(lse[0].isfinite(), same.isfinite())
    assert not score.isnan().any()
    whole = (t + 1) // 64
    assert torch.equal((index >= 0).sum(-1), whole.clamp(max=5).expand(1, 4, -1))
    assert (index < whole[:, None]).all()
    dense = torch.arange(16, device="cuda", dtype=torch.int32).expand(1, 4, 8, 16)
    sparse, _ = block_sparse_attention(q, k, v, dense, scale=0.2)
    if where != "v":
        every = torch.arange(queries, device="cuda")
        x = logits_of(q, k, 0.2, 0, every, queries)
        assert torch.equal(sparse[0].isnan().any(-1), x.softmax(-1).isnan().any(-1))


@pytest.mark.gpu
def test_serves_only_what_tma_reads():
    q, k, v = tensors(1, 2, 1, 256, 256, 128, BF16, None, False)
    assert _hopper.serves(q, k, v)
    assert _hopper.serves(q[:, :1], k, v.transpose(1, 2).contiguous().transpose(1, 2))
    assert not _hopper.serves(q.float(), k.float(), v.float())
    assert not _hopper.serves(q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
    odd = torch.zeros(1, 1, 256, 132, dtype=BF16, device="cuda")[..., :128]
    assert not _hopper.serves(q, odd, v)
    shifted = torch.zeros(256 * 128 + 1, dtype=BF16, device="cuda")[1:].view(1, 1, 256, 128)
    assert not _hopper.serves(q, shifted, v)


def test_a_cpu_has_no_hopper():
    q, k, v = tensors(1, 2, 1, 64, 64, 128, BF16, None, False, "cpu")
    assert not _hopper.serves(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (7, 1)])
def test_momo_equals_its_triton_kernels(monkeypatch, heads):
    """The whole policy, with lists that name every block, so that selections cannot differ."""
    q, k, v = tensors(2, *heads, 2000, 2300, 128, BF16, [2100, 2300], True)
    lengths = torch.tensor([2100], device="cuda")
    call = AttentionCall(q, k, v, scale=0.1, lengths=lengths)
    momo = Momo(top_k=40, delta=0.5, tail=0, min_tokens=0)
    fast = momo.attend(call)
    monkeypatch.setattr(_hopper, "serves", lambda *_: False)
    slow = momo.attend(call)
    assert (fast.float() - slow.float()).abs().max() < 0.03


@pytest.mark.gpu
def test_a_graph_follows_the_length(only_hopper):
    q, k, v = tensors(1, 4, 1, 256, 2048, 128, BF16, None, False)
    lengths = torch.tensor([2048], device="cuda")
    momo = Momo(top_k=8, delta=0.5, tail=0, min_tokens=0)
    call = AttentionCall(q, k, v, scale=0.1, lengths=lengths)
    momo.attend(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = momo.attend(call)
    for length in (2048, 300, 1111):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(out, momo.attend(call))


@pytest.mark.gpu
def test_compiled_equals_eager(only_hopper):
    q, k, v = tensors(1, 4, 1, 2048, 2048, 128, BF16, None, True)
    momo = Momo(top_k=8, min_tokens=0)

    def attend(q, k, v):
        return momo.attend(AttentionCall(q, k, v, scale=0.1))

    compiled = torch.compile(attend, fullgraph=True)
    assert torch.equal(compiled(q, k, v), attend(q, k, v))


BIG = pytest.param("cuda", 1 << 20, (32, 8), BF16, marks=pytest.mark.gpu, id="1M")


@pytest.mark.parametrize(
    ("device", "tokens", "heads", "dtype"),
    [
        pytest.param("cpu", 1280, (4, 2), torch.float32, id="small"),
        BIG,
    ],
)
def test_offsets_past_2_to_the_31(device, tokens, heads, dtype):
    """momo's queries and outputs of 32 heads at 1M tokens have 2 ** 32 elements: some queries of
    the first and the last head, one key at a time."""
    q, k, v = tensors(1, *heads, tokens, tokens, 128, dtype, None, False, device)
    momo = Momo(gamma=16, top_k=6, exact_k=4, delta=0.5, tail=0, min_tokens=0)
    call = AttentionCall(q, k, v, scale=0.4)  # so sharp that no output is near 0
    out = momo.attend(call)
    blocks = momo.select(call).blocks
    tolerance = 0.04 if dtype == BF16 else 1e-4

    def attend(head, t, keys):
        key, value = (x[0, head * heads[1] // heads[0], keys].double() for x in (k, v))
        return (key @ q[0, head, t].double() * 0.4).softmax(0) @ value

    def sparse(head, t):
        local = t // 128 * 2
        listed = blocks[0, head, t // 128]
        named = torch.cat([listed[listed >= 0].long(), torch.zeros(1).long().to(device)])
        past = named[named < local].unique()
        keys = (past[:, None] * 64 + torch.arange(64, device=device)).flatten()
        return attend(head, t, torch.cat([keys, torch.arange(local * 64, t + 1, device=device)]))

    for head in (0, heads[0] - 1):
        for t in (5, tokens // 2 + 77, tokens - 1):
            base = t // 16 * 16
            row = attend(head, base, torch.arange(base + 1, device=device))
            assert row.abs().max() > 0.1
            assert (out[0, head, base].double() - row).abs().max() < tolerance
            want = sparse(head, t) + momo.delta * (row - sparse(head, base))
            assert (out[0, head, t].double() - want).abs().max() < 2 * tolerance


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from attnplug.ops.momo.kernels import hopper as _hopper

class Hopper:  # a driver that knows its target and has no device
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

driver.set_active(Hopper())
run = jit.JITFunction.run
compiled = []
jit.JITFunction.run = lambda self, *a, grid, warmup, **k: compiled.append(
    run(self, *a, grid=grid, warmup=True, **k))
q, k, v = (torch.zeros(1, heads, 256, 128, dtype=torch.bfloat16) for heads in (4, 1, 1))
lengths, index = torch.tensor([256]), torch.zeros(1, 4, 16, 5, dtype=torch.int32)
lse, score = torch.zeros(1, 4, 16), torch.zeros(1, 4, 16, 5)
_hopper.launch_query_sparse(q, k, v, 0.1, 16, 3, lengths, q[:, :, :16].clone(), lse, index, score)
every = torch.zeros(1, 4, 4, 16, dtype=torch.float16)
_hopper.launch_scores(q, k, v, 0.1, 16, lengths, q[:, :, :16].clone(), lse, every)
lists, count = torch.zeros(1, 4, 2, 5, dtype=torch.int32), torch.zeros(1, 4, 2, dtype=torch.int32)
lse = torch.zeros(1, 4, 256)
_hopper.launch_block_sparse(
    q, k, v, lists, count, 0.1, 0, lengths, q[:, :, :16].clone(), 16, 0.5, q.clone(), lse)
print([("wgmma.mma_async" in kernel.asm["ptx"], "setmaxnreg" in kernel.asm["ptx"])
       for kernel in compiled if kernel is not None and kernel.asm["ptx"].count("mbarrier")])
"""


def test_compiles_without_a_gpu():
    """For sm_90, by the Triton that is installed: its Gluon has changed names before."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.strip() == str([(True, True)] * 3), found.stderr[-2000:]
