"""block_bounds against torch, on the numba reference and on the Triton kernel: the bounds hold,
padding enters nothing, and growing, cropping and moving a row leave them right."""

import pytest
import torch
from cases import FEW, WIDTHS, random, to_device
from gather_cases import decoded, empty
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplug.errors import ArgumentError
from attnplug.ops.gather import block_bounds as op

BLOCK = 16


def refresh(device_path, k, bounds, progress, block=BLOCK, **rows):
    """The public op, or the Triton launcher where the op would not run it; works in place on CPU
    tensors whatever the device."""
    device, path = device_path
    band = rows.pop("band", False)
    names = ("lengths", "start", "key_mask")
    args = [rows.get(name) for name in names]
    there = to_device((k, bounds, progress, *args), device)
    if path == "reference" or device == "cuda":
        named = dict(zip(names, there[3:], strict=True))
        op.block_bounds(*there[:3], block=block, band=band, **named)
    else:
        op._allocate(*there, block, band)
        op.launch_block_bounds(*there, block, band)
    bounds.copy_(there[1])
    progress.copy_(there[2])


def oracle(k, block, length, start, key_mask=None):
    """fp64 bounds of the complete blocks of one row, `[Hkv, blocks, 2, D]`."""
    whole = start + max(0, length - start) // block * block
    keys = k[:, start:whole].double().unflatten(1, (-1, block))
    hidden = torch.zeros(keys.shape[1:3], dtype=torch.bool)
    if key_mask is not None:
        hidden = ~key_mask[start:whole].unflatten(0, (-1, block))
    hide = hidden[None, :, :, None]
    high, low = (
        keys.masked_fill(hide, -torch.inf).amax(2),
        keys.masked_fill(hide, torch.inf).amin(2),
    )
    none = hidden.all(1)[None, :, None]
    return torch.stack([high.masked_fill(none, 0), low.masked_fill(none, 0)], 2)


def hold(k, bounds, progress, block, lengths, starts, key_mask=None):
    for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        mask = None if key_mask is None else key_mask[b]
        want = oracle(k[b], block, length, start, mask)
        done = want.shape[1]
        assert progress[b].tolist() == [done, start]
        found = bounds[b, :, :done].double()
        assert torch.equal(found, want)  # a maximum rounds nothing
        assert bounds[b, :, done:].isnan().all()


DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_matches_torch(device_path, data):
    draw = data.draw
    batch, heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 150))
    width, block = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from([16, 32, 64]))
    seed = draw(st.integers(0, 999))
    k = random(seed, batch, heads, size, width, dtype=draw(DTYPES))
    lengths = draw(st.lists(st.integers(1, size), min_size=batch, max_size=batch))
    starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
    rows = {"lengths": torch.tensor(lengths), "start": torch.tensor(starts, dtype=torch.int32)}
    if draw(st.booleans()):
        rows["key_mask"] = random(seed + 1, batch, size) > draw(st.sampled_from([-0.5, 1.5]))
    bounds, progress = empty(k, block)
    poisoned = k.clone()
    for b in range(batch):  # nothing outside of the row may be read
        poisoned[b, :, lengths[b] :] = poisoned[b, :, : starts[b]] = torch.nan
        if "key_mask" in rows:
            poisoned[b, :, ~rows["key_mask"][b]] = torch.nan
    refresh(device_path, poisoned, bounds, progress, block, **rows)
    hold(k, bounds, progress, block, lengths, starts, rows.get("key_mask"))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_key_scores_above_its_bound(device_path, data):
    seed, dtype = data.draw(st.integers(0, 999)), data.draw(DTYPES)
    k, q = random(seed, 1, 2, 70, 64, dtype=dtype), random(seed + 1, 64, dtype=dtype).double()
    k[:, :, :, data.draw(st.integers(0, 63))] *= data.draw(st.sampled_from([1, 30]))
    bounds, progress = empty(k, BLOCK)
    refresh(device_path, k, bounds, progress)
    bounds = bounds[:, :, :4].double()
    above = bounds[:, :, :, 0] @ q.clamp(min=0) + bounds[:, :, :, 1] @ q.clamp(max=0)
    scores = (k[:, :, :64].double() @ q).unflatten(2, (4, 16))
    assert (scores <= above[..., None] + 1e-9 * above.abs().max()).all()


@pytest.mark.parametrize("int8", [False, True])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bands_lie_about_the_mean(device_path, int8, data):
    """In padded and masked rows; and offsets of channels cost nothing. Codes hold means to half a
    step, and the mean of the widths in the channels' units."""
    draw = data.draw
    seed, width, start = draw(st.integers(0, 999)), draw(st.sampled_from(WIDTHS)), 3
    k = random(seed, 1, 2, 90, width) * random(seed + 1, 1, 2, 1, width).exp()
    k += random(seed + 2, 1, 2, 1, width) * draw(st.sampled_from([0, 1, 50]))
    seen = random(seed + 3, 1, 90) > draw(st.sampled_from([-0.5, -9.0]))
    form = {"parts": 1, "dtype": torch.int8} if int8 else {}
    bounds = op.empty_bounds(k, BLOCK, **form)
    progress = torch.zeros(1, 2, dtype=torch.int32)
    rows = {"start": torch.tensor([start]), "key_mask": seen, "lengths": torch.tensor([85])}
    poisoned = k.masked_fill(~seen[:, None, :, None], torch.nan)  # hidden keys enter nothing
    refresh(device_path, poisoned, bounds, progress, band=True, **rows)
    assert progress.tolist() == [[5, start]]
    found, step = decoded(bounds, 6) if int8 else (bounds.double(), torch.zeros(()))
    keys = k[0, :, start : start + 80].double().unflatten(1, (5, 16))
    shown = seen[0, start : start + 80].unflatten(0, (5, 16))[None, :, :, None].double()
    count = shown.sum(2)
    mean = (keys * shown).sum(2) / count
    half = 0.8 * (((keys - mean[:, :, None]) ** 2 * shown).sum(2) / count).sqrt()
    assert (count > 0).all()
    room = 2e-3 * half + 3e-6 * mean.abs() + 1e-6
    if int8:
        frame = op.frame_of(bounds, 6)
        width = (half / frame.unit[0, :, None].double()).mean(2)
        assert torch.allclose(frame.width[0, :, :5].double(), width, rtol=2e-3, atol=1e-4)
        room = 3e-6 * keys.abs().amax(2) + 1e-6 + 0.501 * step[0, :, :5, 0]
        assert ((found[0, :, :5].mean(2) - mean).abs() <= room).all()
        return
    assert ((found[0, :, :5, 0] - mean - half).abs() <= room).all()
    assert ((found[0, :, :5, 1] - mean + half).abs() <= room).all()


def test_a_band_has_two_exact_parts_or_one_of_codes():
    k, progress = random(0, 1, 2, 64, 64), torch.zeros(1, 2, dtype=torch.int32)
    bounds = op.empty_bounds(k, BLOCK, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="a band has two exact parts"):
        op.block_bounds(k, bounds, progress, block=BLOCK, band=True)


def test_codes_of_one_part_are_bands():
    k, progress = random(0, 1, 2, 64, 64), torch.zeros(1, 2, dtype=torch.int32)
    bounds = op.empty_bounds(k, BLOCK, 1, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="INT8 codes of one part are those of a band"):
        op.block_bounds(k, bounds, progress, block=BLOCK)


@settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_codes_hold_every_key(device_path, data):
    """In real numbers, whatever the channels' sizes and offsets, and not by more than a step; and
    what a row's summaries are does not depend on the steps that they were made in."""
    draw = data.draw
    batch, size = draw(st.integers(1, 2)), draw(st.integers(1, 150))
    width, block = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from([16, 32]))
    seed, dtype, blocks = draw(st.integers(0, 999)), draw(DTYPES), -(-size // block)
    k = random(seed, batch, 2, size, width)
    k = k * random(seed + 1, 1, 2, 1, width).exp() ** draw(st.sampled_from([0, 1, 4]))
    k += random(seed + 2, 1, 2, 1, width) * draw(st.sampled_from([0, 1, 50]))
    k = (k * draw(st.sampled_from([1.0, 1e-3, 1e3]))).clamp(-6e4, 6e4).to(dtype)
    if draw(st.booleans()):
        k[:, :, : draw(st.integers(0, size))] = draw(st.sampled_from([0.0, 1.0]))
    starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
    rows = {"start": torch.tensor(starts)}
    if draw(st.booleans()):
        rows["key_mask"] = random(seed + 3, batch, size) > -0.5
    bounds, progress = (
        op.empty_bounds(k, block, dtype=torch.int8).fill_(-77),
        torch.zeros(batch, 2).int(),
    )
    for length in sorted([*draw(st.lists(st.integers(1, size), max_size=2)), size]):
        refresh(device_path, k, bounds, progress, block, **rows, lengths=torch.tensor([length]))
    once, other = (
        op.empty_bounds(k, block, dtype=torch.int8).fill_(-77),
        torch.zeros(batch, 2).int(),
    )
    refresh(device_path, k, once, other, block, **rows)
    assert torch.equal(progress, other)
    found, step = decoded(bounds, blocks)
    for b, start in enumerate(starts):
        want = oracle(
            k[b],
            block,
            size,
            start,
            rows["key_mask"][b] if rows.get("key_mask") is not None else None,
        )
        done = want.shape[1]
        assert torch.equal(bounds[b, :, :done], once[b, :, :done])
        high, low = found[b, :, :done].unbind(2)
        assert (high >= want[:, :, 0]).all() and (low <= want[:, :, 1]).all()
        room = 1.001 * step[b, :, :done, 0] + 1e-25
        assert (high - want[:, :, 0] <= room).all() and (want[:, :, 1] - low <= room).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [3, 20])
@pytest.mark.parametrize("band", [False, True], ids=["bounds", "band"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_makes_a_scale_of_nan(device_path, band, at, bad):
    """And of its own block alone, the first block's frame or not."""
    k = random(0, 1, 2, 48, 64)
    k[0, 1, at, 5] = bad
    bounds, progress = (
        op.empty_bounds(k, BLOCK, 1 if band else 2, dtype=torch.int8),
        torch.zeros(1, 2, dtype=torch.int32),
    )
    refresh(device_path, k, bounds, progress, band=band)
    scale = op.frame_of(bounds, 3).scale
    assert scale.isnan().nonzero().tolist() == [[0, 1, at // 16]]
    found, _ = decoded(bounds, 3)
    others = [(h, j) for h in range(2) for j in range(3) if (h, j) != (1, at // 16)]
    for h, j in others:
        keys = k[0, h, j * 16 : j * 16 + 16].double()
        if band:
            assert (found[0, h, j].mean(0) - keys.mean(0)).abs().max() < 0.1
            continue
        assert (found[0, h, j, 0] >= keys.amax(0)).all()
        assert (found[0, h, j, 1] <= keys.amin(0)).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(-20, 40), min_size=1, max_size=8), start=st.integers(0, 20))
def test_growing_and_cropping(device_path, steps, start):
    """Bounds follow a cache that grows across block edges, in prefills and single tokens, and is
    cropped and written anew: whoever crops lowers the count to what is still complete."""
    size, length, seed = 130, 0, 0
    k = torch.full((1, 2, size, 64), torch.nan)
    bounds, progress = empty(k, BLOCK)
    for step in steps:
        if step > 0:
            new = min(step, size - length)
            k[:, :, length : length + new] = random(seed := seed + 1, 1, 2, new, 64)
            length += new
        else:
            length = max(0, length + step)
            whole = max(0, length - start) // BLOCK
            progress[:, 0].clamp_(max=whole)
            bounds[:, :, whole:] = torch.nan  # what hold() expects of blocks that are not done
        rows = {"lengths": torch.tensor([length]), "start": torch.tensor([start])}
        refresh(device_path, k, bounds, progress, **rows)
        hold(k, bounds, progress, BLOCK, [length], [start])


def test_done_blocks_are_not_read_again(device_path):
    k = random(0, 2, 1, 64, 64)
    bounds, progress = empty(k, BLOCK)
    lengths = torch.tensor([40])
    refresh(device_path, k, bounds, progress, lengths=lengths)
    before = bounds.clone()
    k[:, :, :32] = 7.0
    refresh(device_path, k, bounds, progress, lengths=torch.tensor([50]))
    assert torch.equal(bounds[:, :, :2], before[:, :, :2])
    assert torch.equal(bounds[:, :, 2, 0], k[:, :, 32:48].amax(2))


def test_another_start_does_them_anew(device_path):
    k = random(0, 2, 1, 64, 64)
    bounds, progress = empty(k, BLOCK)
    refresh(device_path, k, bounds, progress)
    bounds[1, :, 3] = torch.nan  # the row that moves has one complete block less
    refresh(device_path, k, bounds, progress, start=torch.tensor([0, 5]))
    hold(k, bounds, progress, BLOCK, [64, 64], [0, 5])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("at", [16, 20, 31])
def test_a_nan_key_makes_a_nan_bound(device_path, at):
    k = random(0, 1, 2, 48, 64)
    k[0, 1, at, 5] = torch.nan
    bounds, progress = empty(k, BLOCK)
    refresh(device_path, k, bounds, progress)
    odd = bounds.isnan()
    assert odd[0, 1, 1, :, 5].all() and odd.sum() == 2


K = torch.zeros(2, 2, 40, 64)
WRONG = [
    ({"block": 48}, "block is 48, needs 16, 32, 64, 128"),
    ({"block": 8}, "block is 8"),
    (
        {"bounds": torch.zeros(2, 2, 2, 2, 64)},
        r"bounds has shape .*= \[2, 2, 3, 2, 64\]",
    ),
    ({"bounds": torch.zeros(2, 2, 3, 1, 64)}, r"bounds has shape .*= \[2, 2, 3, 2, 64\]"),
    ({"bounds": torch.zeros(2, 2, 3, 2, 64).double()}, "bounds is torch.float64 but k is"),
    ({"bounds": torch.zeros(2, 2, 3, 2, 64).char()}, r"scales,parts,D\] = \[2, 2, 8, 2, 64\]"),
    ({"bounds": torch.zeros(2, 2, 3, 2, 128)[..., ::2]}, "bounds is not contiguous"),
    ({"progress": torch.zeros(2, 2)}, r"progress is torch.float32 \(2, 2\), needs int32 \[B,2\]"),
    ({"progress": torch.zeros(1, 2).int()}, r"progress is torch.int32 \(1, 2\)"),
    ({"k": torch.zeros(2, 40, 64)}, "k has 3 dimensions"),
    ({"k": K.double()}, "k is torch.float64"),
    ({"k": torch.zeros(2, 2, 40, 40)}, "head dimension 40"),
    ({"lengths": torch.zeros(3).int()}, r"lengths has shape \(3,\)"),
    ({"key_mask": torch.ones(2, 41).bool()}, r"key_mask has shape \(2, 41\)"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"k": K, "bounds": torch.zeros(2, 2, 3, 2, 64), "block": 16}
    inputs["progress"] = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="^block_bounds: .*" + message):
        op.block_bounds(**(inputs | change))


@pytest.mark.gpu
def test_a_million_tokens_times_eight():
    """Offsets past 2^31: the last row's last block."""
    size = 1 << 20
    k = torch.zeros(8, 4, size, 128, dtype=torch.bfloat16, device="cuda")
    tail = random(0, 8, 4, 300, 128, dtype=torch.bfloat16)
    k[:, :, -300:] = tail.cuda()
    bounds = torch.full((8, 4, size // 128, 2, 128), torch.nan, dtype=k.dtype, device="cuda")
    progress = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
    op.block_bounds(k, bounds, progress, block=128)
    assert torch.equal(bounds[:, :, -1, 0].cpu(), tail[:, :, -128:].amax(2))
    assert torch.equal(bounds[:, :, -1, 1].cpu(), tail[:, :, -128:].amin(2))
    assert (bounds[:, :, : size // 128 - 3] == 0).all()
    assert progress.tolist() == [[size // 128, 0]] * 8
