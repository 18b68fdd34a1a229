"""Norms, rotary embeddings and gated activations against transformers' own code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from attnplug.ops.common.triton import INSTALLED
from attnplug.ops.layer import gated, rms_norm, rotate

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="kernels are Triton's"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # numpy's, in the interpreter
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*size, dtype, device, scale=1.0):
    return (torch.randn(size) * scale).to(dtype).to(device)


def hold(found, wanted, places=3, around_zero=1e-6):
    """Equal but for a rounding at each intermediate."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    exact = wanted.dtype == torch.float32
    close = 4e-6 if exact else places * torch.finfo(wanted.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=close, atol=around_zero)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@given(
    shape=st.sampled_from([(1, 1), (2, 3), (1, 37), (3, 4, 5)]),
    width=st.sampled_from([1, 16, 80, 96, 128, 576, 2304, 5120]),
)
def test_a_norm_is_the_models_own(device, dtype, kind, shape, width):
    norm = kind(width, eps=1e-5).to(device, dtype)
    nn.init.normal_(norm.weight)
    x = random(*shape, width, dtype=dtype, device=device, scale=3.0)
    offset = kind is GemmaRMSNorm
    hold(rms_norm(x, norm.weight.data, 1e-5, offset), norm(x).detach())


def test_a_norm_reads_parts_of_a_wide_product(device):
    wide = random(2, 3, 160, dtype=torch.float32, device=device)
    norm = LlamaRMSNorm(32).to(device)
    for part in wide.split([96, 64], -1):
        heads = part.view(2, 3, -1, 32)
        hold(rms_norm(heads, norm.weight.data, norm.variance_epsilon), norm(heads).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (28, 4), (40, 40)]),
    tokens=st.integers(1, 9),
    width=st.sampled_from([2, 16, 64, 80, 96, 128, 256]),
    shared=st.booleans(),
    wide=st.booleans(),
)
def test_rotated_as_the_model_rotates(device, dtype, rows, heads, tokens, width, shared, wide):
    heads_q, heads_kv = heads
    products = random(rows, tokens, (heads_q + heads_kv) * width, dtype=dtype, device=device)
    parts = products.split([heads_q * width, heads_kv * width], -1)
    if not wide:
        parts = [part.contiguous() for part in parts]
    q, k = (part.view(rows, tokens, -1, width).transpose(1, 2) for part in parts)
    angles = random(1 if shared else rows, tokens, width, dtype=torch.float32, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    before = q.clone(), k.clone()
    wanted, found = apply_rotary_pos_emb(q, k, cos, sin), rotate(q, k, cos, sin)
    for own, ours in zip(wanted, found, strict=True):
        if device == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts where it rounds
            hold(ours, own, around_zero=0.06)
        else:
            assert torch.equal(ours, own)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
@given(
    tokens=st.integers(1, 5), width=st.sampled_from([1, 96, 1024, 1536, 3000]), wide=st.booleans()
)
def test_gated_as_the_model_gates(device, dtype, names, tokens, width, wide):
    both = random(1, tokens, 2 * width, dtype=dtype, device=device, scale=6.0)
    gate, up = both.split(width, -1)
    if not wide:
        gate, up = gate.contiguous(), up.contiguous()
    # torch loses digits of small GELUs: 1 + tanh
    hold(gated(gate, up, names[1]), ACT2FN[names[0]](gate) * up, around_zero=1e-5)


def test_extremes_are_the_models_own(device):
    gate = torch.tensor([[-1e10, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e10, float("nan")]])
    gate, up = gate.to(device), torch.ones_like(gate).to(device)
    for name, ours in (("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")):
        found, wanted = gated(gate, up, ours), ACT2FN[name](gate) * up
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7, equal_nan=True)
    norm = LlamaRMSNorm(4).to(device)
    rows = torch.tensor([[0.0] * 4, [1e18] * 4, [float("nan"), 1, 1, 1], [1, 2, 3, 4]]).to(device)
    found = rms_norm(rows, norm.weight.data, norm.variance_epsilon)
    torch.testing.assert_close(found, norm(rows).detach(), equal_nan=True)
