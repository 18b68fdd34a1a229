"""No op that appends writes outside its buffers, whatever length it is told: every buffer lies
between guards, and what the view of a longer cache leaves out stays as it was. The same tests run
on the GPU, and under compute-sanitizer there."""

import pytest
import torch

from attnplug.ops import Near
from attnplug.ops.certified import quantize_kv as quantize
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import tiered_decode as tiered
from attnplug.ops.gather.block_bounds import empty_bounds

BATCH, HEADS, GROUP, SIZE, WIDTH, BLOCK = 2, 2, 2, 48, 64, 16
GUARD = 4096  # elements on either side
LENGTHS = [SIZE - 1, SIZE, SIZE + 1, SIZE + 7, 3 * SIZE, -1, -9, 2**31 - 1, 2**31 + 5, 2**33 + 3]
FULL = [SIZE, SIZE + 1, SIZE + 7, 3 * SIZE, 2**31 - 1]


class Guarded:
    """Tensors in the middle of larger ones."""

    def __init__(self, device: str):
        self.device, self.whole = device, []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel()
        flat = torch.full((count + 2 * GUARD,), 77, dtype=tensor.dtype, device=self.device)
        inner = flat[GUARD : GUARD + count].view(tensor.shape)
        inner.copy_(tensor)
        self.whole.append((flat, count))
        return inner

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a view of a longer cache, whose other tokens must stay."""
        batch, heads, size, width = tensor.shape
        shape = (batch, heads, size + 24, width)
        longer = torch.full(shape, 77.0, dtype=tensor.dtype)
        self.longer = [*getattr(self, "longer", []), self(longer)]
        inner = self.longer[-1][:, :, 8 : 8 + size]
        inner.copy_(tensor)
        return inner

    def check(self) -> None:
        for flat, count in self.whole:
            assert (flat[:GUARD] == 77).all() and (flat[GUARD + count :] == 77).all()
        for longer in getattr(self, "longer", []):
            assert (longer[:, :, :8] == 77).all() and (longer[:, :, 8 + SIZE :] == 77).all()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache_of(device: str) -> tuple[Guarded, torch.Tensor, torch.Tensor, torch.Tensor, list]:
    guard = Guarded(device)
    k, v = (guard.view(random(seed, BATCH, HEADS, SIZE, WIDTH)) for seed in (0, 1))
    q = random(2, BATCH, HEADS * GROUP, 1, WIDTH).to(device)
    new = [guard(random(seed, BATCH, HEADS, 1, WIDTH)) for seed in (3, 4)]
    return guard, k, v, q, new


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_gather_decode(device_path, length, int8):
    device, path = device_path
    guard, k, v, q, new = cache_of(device)
    bounds = guard(empty_bounds(k, BLOCK, 2, int8=int8))
    progress = guard(torch.zeros(BATCH, 2, dtype=torch.int32))
    lengths = guard(torch.tensor([length]))
    before = k.clone(), v.clone()
    there = (q, k, v, *new, bounds, progress, lengths)
    args = (*there, 0.125, BLOCK, 1, 1, 1, "bounds", None, None, 0.0, None)
    if path == "reference" or device == "cuda":
        out, _ = decode._gather_decode(*args)
    else:
        out, lse = decode._allocate(*args)
        decode.launch_gather_decode(*args, out, lse)
    guard.check()
    hold_output(out, length)
    hold_tokens(before, (k, v), length)


def hold_output(out: torch.Tensor, length: int) -> None:
    if length in FULL:
        assert out.isnan().all()
    elif length == SIZE - 1:
        assert out.isfinite().all()


def hold_tokens(before, after, length: int) -> None:
    """Only the place that the length names is written, and none where it names none."""
    if length in FULL or length < 0:
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    elif length == SIZE - 1:
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[:, :, :-1], y[:, :, :-1]) and not torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's, interpreting
@pytest.mark.parametrize("length", LENGTHS)
def test_tiered_decode(device_path, length):
    device, path = device_path
    guard, k, v, q, new = cache_of(device)
    bounds = guard(empty_bounds(k, BLOCK, 2, int8=False))
    progress = guard(torch.zeros(BATCH, 2, dtype=torch.int32))
    kind = torch.float32, torch.device(device)
    empty = Near.empty(BATCH, HEADS, SIZE, WIDTH, BLOCK, 1, 3, *kind)
    near = Near(*(guard(tensor) for tensor in empty))
    before = k.clone(), v.clone()
    args = (
        q, k, v, *new, bounds, progress, *near, guard(torch.tensor([length])), 0.125, BLOCK, 1, 1,
        1, "bounds", None, None, 0.0, None,
    )  # fmt: skip
    if path == "reference" or device == "cuda":
        out, _ = tiered._tiered_decode(*args)
    else:
        out, lse = tiered._allocate(*args)
        tiered.launch_tiered_decode(*args, out, lse)
    guard.check()
    if length in FULL:
        assert out.isnan().all()
    hold_tokens(before, (k, v), length)


@pytest.mark.parametrize("length", LENGTHS)
def test_quantize_kv(device_path, length):
    device, path = device_path
    guard, k, v, _, _ = cache_of(device)
    tier = quantize.QuantizedKV.empty(BATCH, HEADS, SIZE, WIDTH, BLOCK, device)
    tier = quantize.QuantizedKV(*(guard(tensor) for tensor in tier))
    lengths = guard(torch.tensor([length]))
    if path == "reference" or device == "cuda":
        quantize.quantize_kv(k, v, tier, block=BLOCK, lengths=lengths)
    else:
        quantize.launch_quantize_kv(k, v, *tier, lengths, None, None, BLOCK)
    guard.check()
    done = tier.progress[:, 0]
    assert (done >= 0).all() and (done <= SIZE // BLOCK).all()
