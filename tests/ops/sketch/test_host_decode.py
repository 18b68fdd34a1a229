"""sketch_host_decode: what a cache on the GPU gives, to the bit; and the fixed part on the GPU is
what the host has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sketch_cases import DEFAULTS, cache, coded, random, step
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import FixedPart
from attnplug.ops.sketch import host_decode as op
from attnplug.ops.sketch.state import empty_codes
from attnplug.testing import oracle_attention, plain_attention

# The interpreter computes with numpy, which warns where the kernel means infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def nothing_held(k: torch.Tensor) -> FixedPart:
    """A fixed part that poisons whoever reads a place without a token."""
    fixed = FixedPart.empty(k)
    fixed.tokens.fill_(torch.nan)
    return fixed


def same(device_path, found, wanted) -> None:
    """To the bit where Triton does not compile the kernels for each call's alignment."""
    for a, b in zip(found, wanted, strict=True):
        if device_path[0] == "cpu":
            assert torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))
        else:
            assert torch.equal(a.isnan(), b.isnan())
            assert (a.nan_to_num() - b.nan_to_num()).abs().max() < 1e-5


def check_fixed(fixed: FixedPart, k, v, lengths, start) -> None:
    """Every token of a row's first and last blocks is in its place."""
    starts = [0] * len(k) if start is None else start.tolist()
    for b, (length, low) in enumerate(zip(lengths.tolist(), starts, strict=True)):
        near = max((length - 1 - low) // 128 - 3, 1)
        assert (fixed.held[b] == torch.tensor([low, near])).all()
        tokens = [*range(low, low + 128), *range(low + 128 * near, low + 128 * near + 512)]
        for place, token in enumerate(tokens):
            if token < length:
                there = fixed.tokens[b, :, :, place]
                assert torch.equal(there, torch.stack([k[b, :, token], v[b, :, token]], 1))


@settings(max_examples=4)
@given(data=st.data())
def test_steps_are_those_of_a_cache_on_the_gpu(device_path, data):
    """Over the ends of blocks, with tokens that the op writes and tokens that are there; picks
    included, as the hint that they leave is the same."""
    draw = data.draw
    width, size = draw(st.sampled_from([(64, 24), (48, 16), (128, 24), (96, 32), (112, 24)]))
    group, dtype = (
        draw(st.sampled_from([1, 3, 7])),
        draw(st.sampled_from([torch.float32, torch.float16])),
    )
    length, seed = draw(st.integers(1, 1150)), draw(st.integers(0, 99))
    length = draw(st.sampled_from([length, 128 * (length // 128) + 126]))
    q, k, v = cache(seed, 2, 1, group, 1300, width, dtype)
    options = {"scale": width**-0.5, "softcap": draw(st.sampled_from([0.0, 3.0])), "top_k": 90}
    if draw(st.booleans()):
        starts = [draw(st.integers(0, length)), draw(st.integers(0, 90))]
        options["start"] = torch.tensor(starts)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 3, 2, 1300) > -0.5
    if draw(st.booleans()):
        options["sinks"] = 2 * random(seed + 4, group)
    lengths = torch.tensor([length, max(1, length - draw(st.integers(0, 300)))])
    basis, codes = coded(q, k, v, size, **options | {"lengths": lengths})
    side_by_side = torch.stack([k, v], 3).unbind(3)  # as a cache in host memory has them
    near = [*side_by_side, *(x.clone() for x in (*codes, lengths))]
    near[0][:, :, length:], near[1][:, :, length:] = torch.nan, torch.nan
    fixed = nothing_held(k)
    hints = torch.zeros(2, 2, 1)
    for turn in range(3):
        new = tuple(random(seed + turn + 9, 2, 2, 1, 1, width).to(dtype))
        asked = {**options, "new": new if turn != 1 else None}
        both = (k, v, *codes, lengths), near
        wanted, found = (
            step(
                device_path,
                *(q[:, :, turn : turn + 1], keys, values, basis, made),
                **asked | {"lengths": rows, "hint": hint, "fixed": where},
            )
            for (keys, values, *made, rows), hint, where in zip(
                both, hints, (None, fixed), strict=True
            )
        )
        same(device_path, found, wanted)
        assert torch.equal(hints[0], hints[1]) and torch.equal(lengths, near[-1])
        assert all(torch.equal(a, b) for a, b in zip(codes, near[2:6], strict=True))
        for b, end in enumerate(lengths.tolist()):
            assert torch.equal(k[b, :, :end], near[0][b, :, :end])
            assert torch.equal(v[b, :, :end], near[1][b, :, :end])
        check_fixed(fixed, k, v, lengths, options.get("start"))


def test_the_fixed_part_moves_up_and_follows_another_start(device_path):
    """Steps over the ends of two blocks; then a longer padding, a crop, and a longer row."""
    q, k, v = cache(4, 1, 1, 2)
    basis, codes = coded(q, k, v, lengths=torch.tensor([900]))
    fixed, lengths = nothing_held(k), torch.tensor([894])
    for token in (894, 895, 896, 897, 1022, 1023, 1024, 1025):
        if token == 1022:
            fixed.held.fill_(-1)  # what is left out comes without the op
        new = k[:, :, token : token + 1].clone(), v[:, :, token : token + 1].clone()
        lengths.fill_(token)
        found = step(
            device_path, q, k, v, basis, codes, new=new, lengths=lengths, fixed=fixed, top_k=40
        )
        want = step(device_path, q, k, v, basis, codes, lengths=lengths, top_k=40)
        same(device_path, found, want)
        check_fixed(fixed, k, v, lengths, None)
    for length, low in ((1030, 37), (600, 37), (1300, 0)):
        options = {"lengths": torch.tensor([length]), "start": torch.tensor([low]), "top_k": 40}
        codes.progress.zero_()
        found = step(device_path, q, k, v, basis, codes, fixed=fixed, **options)
        same(device_path, found, step(device_path, q, k, v, basis, codes, **options))
        check_fixed(fixed, k, v, options["lengths"], options["start"])


@settings(max_examples=4)
@given(length=st.integers(1, 1100), seed=st.integers(0, 99), capped=st.booleans())
def test_a_budget_that_covers_all_is_dense(device_path, length, seed, capped):
    q, k, v = cache(seed, 2, 1, 3, 1100)
    options = {"scale": 0.125, "lengths": torch.tensor([length]), "softcap": 3.0 * capped}
    basis, codes = coded(q, k, v, **options)
    out, lse = step(
        device_path, q, k, v, basis, codes, top_k=1100, fixed=nothing_held(k), **options
    )
    want, want_lse = oracle_attention(q[:, :, -1:], k, v, **options)
    plain, _ = plain_attention(q[:, :, -1:], k, v, **options)
    epsilon = torch.finfo(torch.float32).eps
    allowed = 2 * (plain - want).abs().max() + 2 * epsilon * want.abs().max() + 2e-6
    assert (out.double() - want).abs().max() <= allowed
    assert (lse.double() - want_lse).abs().max() <= 3e-5


@pytest.mark.parametrize(
    ("where", "token"),  # coded and not picked, sink, local: what differs from a cache on the GPU
    [("k", 400), ("v", 400), ("k", 0), ("v", 1250)],
)
def test_a_nan_surfaces(device_path, where, token):
    tensors = dict(zip("qkv", cache(0), strict=True))
    basis, _ = coded(*tensors.values())
    tensors[where][0, 1, token, 3] = torch.nan
    codes = empty_codes(tensors["k"], 24)
    out, _ = step(device_path, *tensors.values(), basis, codes, fixed=nothing_held(tensors["k"]))
    lost = out.isnan().any(-1)[..., 0]
    assert lost[0, 3:6].all() and int(lost.sum()) == 3


def test_a_full_row_and_one_of_no_length(device_path):
    """NaN, and nothing is written; the next step of the other row is right."""
    q, k, v = cache(8, tokens=900)
    basis, codes = coded(q, k, v)
    fixed, lengths = nothing_held(k), torch.tensor([900, -3])
    before = k.clone(), v.clone()
    new = tuple(random(1, 2, 2, 2, 1, 64))
    out, _ = step(device_path, q, k, v, basis, codes, new=new, lengths=lengths, fixed=fixed)
    assert out[0].isnan().all() and (out[1] == 0).all()
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    options = {"lengths": torch.tensor([900, 700])}
    codes.progress.zero_()
    fixed.held[1] = -1  # its tokens came without the op
    found = step(device_path, q, k, v, basis, codes, fixed=fixed, **options)
    same(device_path, found, step(device_path, q, k, v, basis, codes, **options))


def test_a_step_is_seven_launches(monkeypatch):
    """No other kernel: the host only allocates and makes views."""
    q, k, v = cache(0, tokens=900)
    basis, codes = coded(q, k, v)
    launched, seen = [], []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def run(self, **_):
            launched.append(self.name)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    chain = op.chain
    of = ((op, "stage"), (chain.prepare, "prepare"), (chain.scan, "scan"), (chain.pick, "pick"))
    for module, name in (*of, (op, "fetch"), (chain.attend, "attend"), (chain.merge, "merge")):
        monkeypatch.setattr(module.kernels, name, Kernel(name))
    named = basis._asdict() | codes._asdict() | {"q": q[:, :, -1:], "k": k, "v": v}
    named |= DEFAULTS | {"new_k": k[:, :, :1], "new_v": v[:, :, :1], "hint": torch.zeros(2, 2)}
    named |= {"lengths": torch.tensor(850), "recent": torch.zeros(2, 6, 8, 64)}
    named |= {"key_mask": torch.ones(2, 900, dtype=torch.bool)}
    call = (*chain.Call(**(dict.fromkeys(chain.Call._fields) | named)), *FixedPart.empty(k))
    outputs = op._allocate(*call)
    with Seen():
        op.launch_sketch_host_decode(*call, *outputs)
    assert launched == ["stage", "prepare", "scan", "pick", "fetch", "attend", "merge"]
    assert set(seen) <= {"new_empty", "empty_like", "view", "unsqueeze", "unbind", "detach"}


def test_refusals():
    q, k, v = cache(0, tokens=200)
    basis, codes = coded(q, k, v)
    good, fixed = (q[:, :, -1:], k, v, *basis, *codes), FixedPart.empty(k)
    short = FixedPart(fixed.tokens[:, :, :, 1:], fixed.held)
    with pytest.raises(ArgumentError, match=r"fixed\.tokens is .* \(2, 2, 2, 639, 64\), needs"):
        op.sketch_host_decode(*good, short, scale=1.0)
    with pytest.raises(ArgumentError, match="held is torch\\.int64"):
        op.sketch_host_decode(*good, fixed._replace(held=fixed.held.long()), scale=1.0)
    with pytest.raises(ArgumentError, match=r"fixed\.tokens is not contiguous"):
        turned = fixed.tokens.mT.contiguous().mT
        op.sketch_host_decode(*good, fixed._replace(tokens=turned), scale=1.0)
    with pytest.raises(ArgumentError, match="v has a stride of 200 in D"):
        turned = v.mT.contiguous().mT
        op.sketch_host_decode(*good[:2], turned, *good[3:], fixed, scale=1.0)
    with pytest.raises(GradientError):
        op.sketch_host_decode(good[0].requires_grad_(), *good[1:], fixed, scale=1.0)
