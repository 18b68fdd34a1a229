"""quantize_kv: what the format promises, on the numba reference and on the Triton kernel."""

import pytest
import torch
from cases import WIDTHS
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops.certified import quantize_kv as op


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantize(device_path, k, v, block, tier=None, lengths=None, start=None, key_mask=None):
    device, path = device_path
    batch, heads, size, width = k.shape
    tier = tier or op.QuantizedKV.empty(batch, heads, size, width, block, device)
    args = [x if x is None else x.to(device) for x in (lengths, start, key_mask)]
    if path == "reference" or device == "cuda":
        names = ("lengths", "start", "key_mask")
        options = dict(zip(names, args, strict=True))
        op.quantize_kv(k.to(device), v.to(device), tier, block=block, **options)
    else:
        op.launch_quantize_kv(k, v, *tier, *args, block)
    return tier


def dequantize(tier, width):
    """(keys, values) `[B,Hkv,N,block,D]` in fp64, from the format as the docs describe it."""
    scale, zero = tier.k_meta.cpu().double().unsqueeze(4).unbind(3)
    keys = tier.k_codes.cpu().double() * scale + zero
    codes = tier.v_codes.cpu().int()
    channels = torch.cat([codes & 15, codes >> 4], -1)[..., :width]
    words = tier.v_meta.cpu()
    low, high = words & 0xFFFF, words >> 16 & 0xFFFF
    meta = [(x - ((x >> 15) << 16)).short().view(torch.float16).double() for x in (low, high)]
    scale, zero = (x.repeat_interleave(16, -1)[..., :width] for x in meta)
    return keys, channels * scale + zero


def blocks_of(x, row, start, count, block):
    return x[row, :, start : start + count * block].double().unflatten(1, (count, block))


@given(data=st.data())
def test_errors_are_within_what_is_stored(device_path, data):
    """Each key within half a scale, each block's values within eta and nu, every dtype's range."""
    draw = data.draw
    width, block = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from([16, 32]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    size, seed = draw(st.integers(block, 5 * block)), draw(st.integers(0, 999))
    k, v = random(seed, 2, 2, 1, size, width)
    exponent = st.sampled_from([-30, -6, -2, 0, 0, 2, 4])
    k[..., draw(st.integers(0, width - 1))] += 10.0 ** min(draw(exponent), 4)  # a biased channel
    k[..., draw(st.integers(0, width - 1))] = draw(st.sampled_from([0.0, 0.1, -7.0]))  # constant
    k, v = k * 10.0 ** draw(exponent), v * 10.0 ** draw(exponent)
    k, v = (x.clamp(-6e4, 6e4).to(dtype) for x in (k, v))
    start = torch.tensor([0, draw(st.integers(0, size - 1))])
    tier = quantize(device_path, k, v, block, start=start)
    keys, values = dequantize(tier, width)
    for row in range(2):
        count = (size - int(start[row])) // block
        assert tier.progress[row].tolist() == [count, int(start[row])]
        parts = [blocks_of(x, row, int(start[row]), count, block) for x in (k, v)]
        scale = tier.k_meta[row, :, :count, 0].cpu().double()[:, :, None]
        error = (parts[0] - keys[row, :, :count]).abs()
        assert (error <= scale / 2 * (1 + 1e-4) + 1e-29).all()
        spread = (parts[0].amax(2) - parts[0].amin(2)).unsqueeze(2)
        assert (scale <= spread / 254 * 1.02 + parts[0].abs().amax(2, True) * 2**-15 + 1e-29).all()
        eta, nu, *spectra = tier.summary[row, :, :count].cpu().double().unbind(-1)
        for part, near, most in zip(parts, (keys, values), spectra, strict=True):
            norm = torch.linalg.matrix_norm(part - near[row, :, :count], 2)
            small = 2.0**-18 * part.abs().amax((2, 3))  # what float32 can make of an error
            assert (norm <= most * (1 + 1e-6) + small).all()
            assert (most <= 1.2 * block ** (1 / 8) * (norm + small) + 1e-14).all()
        error = (parts[1] - values[row, :, :count]).norm(dim=-1).amax(-1)
        assert (error <= eta).all() and (eta <= error * 1.002 + 1e-14).all()
        norm = parts[1].norm(dim=-1).amax(-1)
        assert (norm <= nu).all() and (nu <= norm * 1.002 + 1e-14).all()


def test_kernel_and_reference_write_the_same(device):
    """All but the last bit of measured errors, and so of the check that covers them."""
    if device == "cuda":
        paths = [("cpu", "reference"), ("cuda", "kernel")]
    else:
        paths = [("cpu", "reference"), ("cpu", "kernel")]
    k, v = random(0, 2, 2, 2, 90, 80, dtype=torch.float16)
    options = {
        "lengths": torch.tensor([90, 77]),
        "start": torch.tensor([0, 9]),
        "key_mask": random(1, 2, 90) > -1,
    }
    one, two = (quantize(path, k, v, 16, **options) for path in paths)
    for name in ("k_codes", "k_meta", "v_codes", "v_meta", "progress"):
        assert torch.equal(getattr(one, name), getattr(two, name).cpu()), name
    assert torch.equal(one.check[..., 0], two.check[..., 0].cpu())
    sizes, spectra = one.summary.split(2, -1)
    assert torch.allclose(sizes, two.summary[..., :2].cpu(), rtol=1e-5)
    assert torch.allclose(spectra, two.summary[..., 2:].cpu(), rtol=0.01)  # of fp16 factors


def test_blocks_are_done_once_and_in_any_portions(device_path):
    k, v = random(0, 2, 2, 2, 100, 64, dtype=torch.float16)
    whole = quantize(device_path, k, v, 16, lengths=torch.tensor([100, 70]))
    parts = None
    for lengths in ([5, 16], [33, 40], [33, 70], [100, 70]):
        parts = quantize(device_path, k, v, 16, parts, lengths=torch.tensor(lengths))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    quantize(device_path, k + 1, v + 1, 16, parts, lengths=torch.tensor([100, 70]))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    moved = quantize(device_path, k, v, 16, parts, start=torch.tensor([3]))
    assert moved.progress.tolist() == [[6, 3]] * 2
    fresh = quantize(device_path, k, v, 16, start=torch.tensor([3]))
    assert all(
        torch.equal(a[:, :, :6], b[:, :, :6]) for a, b in zip(fresh[:6], moved[:6], strict=True)
    )


def test_hidden_keys_enter_nothing(device_path):
    k, v = random(0, 2, 1, 1, 64, 64)
    mask = torch.ones(1, 64, dtype=torch.bool)
    mask[:, 3:9] = mask[:, 32:48] = False
    poisoned = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v)]
    one = quantize(device_path, k, v, 16, key_mask=mask)
    two = quantize(device_path, *poisoned, 16, key_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert (one.k_meta[0, 0, 2] == 0).all() and (one.summary[0, 0, 2] < 1e-9).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_what_is_not_finite_cannot_be_certified(device_path, bad):
    k, v = random(0, 2, 1, 2, 64, 64)
    k[0, 0, 20, 5] = v[0, 1, 40, 9] = bad
    tier = quantize(device_path, k, v, 16)
    assert tier.k_meta[0, 0, 1, 0, 5].isnan() and tier.k_meta.isnan().sum() == 1
    found = tier.summary.isinf()  # not the spectrum of the keys beside the value, and only that
    assert found[0, 1, 2].tolist() == [True, True, False, True]  # of the block with the key
    assert found[0, 0, 1].tolist() == [False, False, True, False] and found.sum() == 4


def test_memory_is_at_most_56_percent_of_fp16():
    for block, most in ((16, 0.51), (64, 0.46)):
        tier = op.QuantizedKV.empty(1, 8, 8192, 128, block, "cpu")
        assert tier.nbytes() <= most * (2 * 8 * 8192 * 128 * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 8}, "block is 8, needs 16, 32, 64, 128"),
        ({"k": torch.zeros(1, 1, 64, 32)}, r"k \(1, 1, 64, 32\) and v"),
        ({"name": "k_codes"}, r"k_codes is torch.float32 \(1, 1, 4, 16, 64\), needs torch.int8"),
        ({"name": "summary"}, "summary is torch.float64"),
        ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32"),
    ],
    ids=["block", "width", "codes", "summary", "lengths"],
)
def test_refuses(change, message):
    change = dict(change)
    k = torch.zeros(1, 1, 64, 64)
    tier = op.QuantizedKV.empty(1, 1, 64, 64, 16, "cpu")
    name = change.pop("name", None)
    if name:
        wrong = getattr(tier, name)
        wrong = wrong.double() if name == "summary" else wrong.float()
        tier = tier._replace(**{name: wrong})
    with pytest.raises(ArgumentError, match="^quantize_kv: .*" + message):
        op.quantize_kv(**({"k": k, "v": k, "tier": tier, "block": 16} | change))
