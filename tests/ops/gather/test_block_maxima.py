"""block_maxima against float64 torch, on the numba reference and on the Triton kernel, and the
plans that the kernel can take."""

import pytest
import torch
from cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops.common.device import Card
from attnplug.ops.gather import block_maxima as op


def call(device_path, q, keys, positions, block, plan=None):
    """Maxima on the CPU; by the public op, or by the launcher where the op would not run it."""
    device, path = device_path
    q, keys, positions = (x.to(device) for x in (q, keys, positions))
    if path == "reference" or (device == "cuda" and plan is None):
        return op.block_maxima(q, keys, positions, block=block).cpu()
    out = op._allocate(q, keys, positions, block)
    op.launch_block_maxima(q, keys, positions, block, out, plan)
    return out.cpu()


def maxima(q, keys, positions, block, dtype=torch.float64):
    """The scores of all keys, and their maxima."""
    scores = torch.einsum("bhsd,btd->bhst", q.to(dtype), keys.to(dtype))
    size = keys.shape[1]
    unseen = torch.arange(size, device=q.device) > positions[:, None, :, None]
    scores = scores.masked_fill(unseen, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -size % block), value=-torch.inf)
    return scores.unflatten(-1, (-1, block)).amax(-1)


@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 4, 20]))
    queries, width = draw(st.sampled_from([1, 2, 7, 40])), draw(st.sampled_from([16, 48, 128]))
    size, block = draw(st.sampled_from([1, 31, 64, 300])), draw(st.sampled_from([16, 32, 64, 128]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    q = random(seed, batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    room = random(seed + 1, batch, size + 3, width, dtype=dtype)
    keys = room[:, :size]
    places = st.lists(st.integers(-2, size + 5), min_size=queries, max_size=queries)
    positions = torch.tensor([draw(places) for _ in range(batch)])
    if draw(st.booleans()):
        positions = positions[:1].to(torch.int32).expand(batch, -1)
    plan = None
    if draw(st.booleans()):
        tile, programs = draw(st.sampled_from([16, block])), draw(st.sampled_from([1, 2, 5]))
        plan = op.Plan(draw(st.sampled_from([16, 64])), tile, programs, 4, 2)
    wanted = maxima(q, keys, positions, block)
    unread = torch.arange(size) > positions.max(1).values[:, None]
    keys = keys.masked_fill(unread[..., None], torch.nan)  # what no query sees is not looked at
    found = call(device_path, q, keys, positions, block, plan)
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    seen = wanted > -torch.inf
    allowed = 1e-5 * (1 + width**0.5)  # products of 16 bits are exact, and their sums float32's
    assert ((found - wanted)[seen].abs() <= allowed).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of an infinity times 0
def test_nan_and_infinity_come_through(device_path):
    q, keys = torch.ones(1, 2, 3, 16), torch.zeros(1, 60, 16)
    keys[0, 20, 3], keys[0, 40, 0], keys[0, 59, 0] = torch.nan, torch.inf, torch.nan
    positions = torch.tensor([[10, 41, 59]])
    found = call(device_path, q, keys, positions, 16)[0, 1].tolist()
    assert str(found) == str(maxima(q, keys, positions, 16)[0, 1].tolist())
    assert str(found[2]) == "[0.0, nan, inf, nan]"


def test_strides_are_honoured(device_path):
    q = random(0, 2, 3, 32, 5).permute(0, 1, 3, 2)
    keys = random(1, 2, 32, 70).mT
    positions = torch.arange(65, 70).expand(2, -1)
    found = call(device_path, q, keys, positions, 32)
    torch.testing.assert_close(found, maxima(q, keys, positions, 32).float())


def test_nothing_to_do(device_path):
    q, keys = torch.zeros(2, 3, 4, 16), torch.zeros(2, 0, 16)
    positions = torch.zeros(2, 4, dtype=torch.long)
    assert call(device_path, q, keys, positions, 16).shape == (2, 3, 4, 0)
    empty = call(device_path, q[:, :, :0], torch.zeros(2, 9, 16), positions[:, :0], 16)
    assert empty.shape == (2, 3, 0, 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [65536, 101376, 232448])
def test_plans_fit_the_card(itemsize, shared):
    on = Card.made("nvidia", (9, 0), 132, shared)
    for width in (16, 128, 256):
        for block in (16, 128):
            for pairs in (4, 64, 4096):
                plan = op.plan_for(1, pairs, 131072, block, width, itemsize, on)
                assert op.shared_bytes(plan, width, itemsize) <= shared
                assert block % plan.tile == 0 and plan.programs >= 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "queries", "size"), [(1, 1, 131072), (8, 1, 40001), (1, 700, 20000)]
)
def test_minimax_sizes(batch, queries, size):
    """A step, steps and a part of a prompt at MiniMax-M3's widths."""
    q = random(0, batch, 4, queries, 128, dtype=torch.bfloat16).cuda()
    keys = random(1, batch, size, 128, dtype=torch.bfloat16).cuda()
    positions = torch.arange(size - queries, size, device="cuda").expand(batch, -1)
    found = op.block_maxima(q, keys, positions, block=128)
    wanted = maxima(q, keys, positions, 128)
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    assert (found - wanted).abs().nan_to_num().max() < 1e-4


GOOD = {
    "q": torch.zeros(1, 2, 3, 16),
    "keys": torch.zeros(1, 40, 16),
    "positions": torch.zeros(1, 3, dtype=torch.long),
    "block": 16,
}
WRONG = [
    ({"q": torch.zeros(2, 3, 16)}, "q has 3 dimensions"),
    ({"q": torch.zeros(1, 2, 3, 16).double()}, "q is torch.float64"),
    ({"q": torch.zeros(1, 2, 3, 20)}, "20"),
    ({"q": torch.zeros(1, 0, 3, 16)}, "q has no heads"),
    ({"keys": torch.zeros(1, 40, 32)}, r"keys is .* needs torch.float32 \[B,T,D\] = \[1, T, 16\]"),
    ({"keys": torch.zeros(1, 40, 16).half()}, "keys is torch.float16"),
    ({"positions": torch.zeros(1, 4, dtype=torch.long)}, r"positions is .* \[B,S\] = \[1, 3\]"),
    ({"positions": torch.zeros(1, 3)}, "positions is torch.float32"),
    ({"block": 8}, "block is 8, needs 16, 32, 64, 128"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[text for _, text in WRONG])
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match="^block_maxima: .*" + message):
        op.block_maxima(**(GOOD | change))


def test_refuses_gradients():
    with pytest.raises(GradientError):
        op.block_maxima(**(GOOD | {"q": GOOD["q"].clone().requires_grad_()}))
