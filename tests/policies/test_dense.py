"""dense: every route to exact attention gives the same answer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnplug.policies import AttentionCall, Dense, dense


def call(queries: int, keys: int, *, device: str, padded: bool = False, **options) -> AttentionCall:
    random = torch.Generator().manual_seed(queries)
    q = torch.randn(2, 4, queries, 64, generator=random).to(device)
    k, v = (torch.randn(2, 2, keys, 64, generator=random).to(device) for _ in range(2))
    c = AttentionCall(q, k, v, scale=0.125, **options)
    if padded:
        c.start = torch.tensor([0, 5], dtype=torch.int32, device=device)
        c.key_mask = torch.arange(keys, device=device) >= c.start[:, None]
    return c


def exact(c: AttentionCall) -> torch.Tensor:
    """fp64 attention with lengths, key mask, softcap and sinks."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (c.k, c.v))
    scores = c.q.double() @ k.transpose(2, 3) * c.scale
    if c.softcap:
        scores = c.softcap * torch.tanh(scores / c.softcap)
    length = c.k.shape[2] if c.lengths is None else int(c.lengths)
    keys = torch.arange(c.k.shape[2], device=scores.device)
    rows = torch.arange(c.q.shape[2], device=scores.device) + length - c.q.shape[2]
    seen = keys <= rows[:, None]
    if c.key_mask is not None:
        seen = seen & c.key_mask[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if c.sinks is not None:
        sink = c.sinks.double().view(1, -1, 1, 1).expand(2, -1, c.q.shape[2], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].nan_to_num() @ v
    return scores.softmax(-1).nan_to_num() @ v


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 40), (7, 40), (40, 40), (33, 70)])
@pytest.mark.parametrize("feature", ["plain", "softcap", "sinks"])
def test_every_route_is_exact(queries, keys, padded, feature, device):
    c = call(queries, keys, padded=padded, device=device)
    c.softcap = 4.0 if feature == "softcap" else 0.0
    c.sinks = SINKS.to(device) if feature == "sinks" else None
    assert (Dense().attend(c) - exact(c)).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [1, 5, 24])
def test_a_larger_buffer_changes_nothing(queries, device):
    c = call(queries, 40, device=device)
    wanted = Dense().attend(c)
    c.k, c.v = (torch.nn.functional.pad(x, (0, 0, 0, 50), value=torch.nan) for x in (c.k, c.v))
    c.lengths = torch.tensor([40], device=device)
    assert (Dense().attend(c) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(
    "batch, queries, keys, few",
    [
        (1, 256, 5000, True),
        (1, 257, 5000, False),
        (2, 128, 5000, True),
        (2, 129, 5000, False),
        (3, 20, 5000, False),
        (0, 20, 5000, True),
        (1, 200, 200, False),  # torch's own kernel
    ],
)
def test_few_queries_of_a_long_cache_split_its_keys(batch, queries, keys, few):
    """32 heads of so many queries, on a GPU that need not be here."""
    with FakeTensorMode():
        q = torch.empty(batch, 32, queries, 64, device="cuda")
        k = torch.empty(batch, 8, keys, 64, device="cuda")
        assert dense._leaves_a_gpu_idle(AttentionCall(q, k, k, 0.125)) == few
        assert not dense._leaves_a_gpu_idle(AttentionCall(q.cpu(), k.cpu(), k.cpu(), 0.125))
        one = torch.empty(1, 1, 257, 64, device="cuda")
        assert not dense._leaves_a_gpu_idle(AttentionCall(one, k, k, 0.125))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("feature", ["plain", "softcap", "sinks"])
def test_few_queries_are_exact_too(padded, feature, device, monkeypatch):
    """By the op that splits the keys, which the flash kernel's fallback is not."""
    monkeypatch.setattr(dense, "_leaves_a_gpu_idle", lambda call: True)
    monkeypatch.setattr(dense, "_flash", lambda call: pytest.fail("not split"))
    c = call(33, 70, padded=padded, device=device)
    c.softcap = 4.0 if feature == "softcap" else 0.0
    c.sinks = SINKS.to(device) if feature == "sinks" else None
    assert (Dense().attend(c) - exact(c)).abs().max() < 1e-5


@pytest.mark.gpu
def test_grouped_float32_stores_no_scores():
    """torch's kernels that take grouped heads want 16 bits; its math kernel would store 16 GiB."""
    q, k, v = (torch.randn(1, heads, 32768, 64, device="cuda") for heads in (4, 2, 2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Dense().attend(AttentionCall(q, k, v, 0.125))
    assert torch.cuda.max_memory_allocated() - before < 2**30


def with_holes(*holes: int, device: str) -> AttentionCall:
    """Left padding in the second row, and hidden tokens in the first."""
    c = call(60, 60, padded=True, device=device)
    assert c.key_mask is not None
    c.key_mask[0, list(holes)] = False
    return c


@pytest.mark.parametrize("holes", [(), (30,), (3, 4, 59), (0, 20)])
def test_long_padded_rows_go_to_torchs_kernel_one_by_one(holes, device, monkeypatch):
    masks = []
    keep = dense._sdpa

    def spy(call, mask):
        masks.append(mask)
        return keep(call, mask)

    monkeypatch.setattr(dense, "ROW_TOKENS", 50)
    monkeypatch.setattr(dense, "_sdpa", spy)
    c = with_holes(*holes, device=device)
    assert (Dense().attend(c) - exact(c)).abs().max() < 1e-5
    assert masks == [None, None]
    c.v = c.v.masked_fill(~c.key_mask[:, None, :, None], torch.nan)
    clean = with_holes(*holes, device=device)
    assert (Dense().attend(c) - exact(clean)).abs().max() < 1e-5  # what is hidden is not read


def test_a_row_of_many_holes_or_of_none_but_padding_is_served(device, monkeypatch):
    monkeypatch.setattr(dense, "ROW_TOKENS", 50)
    monkeypatch.setattr(dense, "MOST_HOLES", 2)
    c = with_holes(7, 8, 9, device=device)
    assert dense._row_by_row(c) is None
    assert (Dense().attend(c) - exact(c)).abs().max() < 1e-5
    c = with_holes(device=device)
    c.key_mask[1] = False
    assert (Dense().attend(c) - exact(c)).abs().max() < 1e-5
