"""No op that writes to a cache writes outside of it, whatever length it is told: every buffer lies
between guards, and what the view of a longer cache leaves out stays as it was. The same tests run
on the GPU, and under compute-sanitizer there. Reads of guards, which change no result, are held in
the interpreter.

The second row of each batch has a length as it should be: what it gets does not depend on the
first one's.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from attnplug.models.cache import PlugLayer
from attnplug.ops import QuantizedKV, ResidentBlocks, Scratch, block_bounds
from attnplug.ops.certified import certified_attention as certified
from attnplug.ops.certified import quantize_kv as quantize
from attnplug.ops.certified.plan import Plan
from attnplug.ops.gather import block_bounds as summaries
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import gather_rows as rows_of_pages
from attnplug.ops.gather import page_bounds as bounds_of_pages
from attnplug.ops.gather import select_blocks as select
from attnplug.ops.gather import tiered_decode as tiered
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gvr import page_codes as codes_of_pages
from attnplug.ops.sketch import encode_keys as encode
from attnplug.ops.sketch import encode_pages as encoded_pages
from attnplug.ops.sketch import host_decode as sketch_host
from attnplug.ops.sketch import pages as sketch_of_pages
from attnplug.ops.sketch import sketch_decode as sketch
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.model_basis import Moments, fit_model_basis
from attnplug.ops.sketch.state import empty_codes
from attnplug.policies._gather_layers import Form, GatherLayer, HostGatherLayer
from attnplug.policies._gvr_layer import GvrLayer
from attnplug.policies._sketch_layer import HostSketchLayer

BATCH, HEADS, GROUP, SIZE, WIDTH, BLOCK = 2, 2, 2, 48, 64, 16
GUARD = 4096  # elements on either side
SANE = 30
FULL = [SIZE, SIZE + 1, SIZE + 7, 3 * SIZE, 2**31 - 1]
HUGE = [2**31 + 5, 2**32, 2**32 + 3, 2**63 - 1]  # int64: the lower halves of some are places
NEGATIVE = [-1, -9, -(2**31), -(2**32) + 3, -(2**63)]
LENGTHS = [SIZE - 1, *FULL, *HUGE, *NEGATIVE]

# The interpreter computes with numpy, which warns where the kernel means infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Guarded:
    """Makes copies of tensors that lie in the middle of larger ones, on a device."""

    def __init__(self, device: str):
        self.device = device
        self.whole: list[tuple[torch.Tensor, int]] = []
        self.longer: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel()
        flat = torch.full((count + 2 * GUARD,), 77, dtype=tensor.dtype, device=self.device)
        inner = flat[GUARD : GUARD + count].view(tensor.shape)
        inner.copy_(tensor)
        self.whole.append((flat, count))
        return inner

    def all(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [self(tensor) for tensor in tensors]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a view of a longer cache, whose other tokens must stay."""
        batch, heads, size, width = tensor.shape
        longer = torch.full((batch, heads, size + 24, width), 77.0, dtype=tensor.dtype)
        self.longer.append(self(longer))
        inner = self.longer[-1][:, :, 8 : 8 + size]
        inner.copy_(tensor)
        return inner

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the interpreter raise IndexError where a kernel loads from a guard."""
        load = InterpreterBuilder.create_masked_load

        def load_inside(builder, ptrs, mask, *more):
            addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
            for flat, count in self.whole:
                place = (addresses - flat.data_ptr()) // flat.element_size()
                outside = (place < GUARD) | (place >= GUARD + count)
                if (outside & (place >= 0) & (place < len(flat))).any():
                    raise IndexError(f"loads {place[outside]} of {count} after {GUARD}")
            return load(builder, ptrs, mask, *more)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load_inside)

    def check(self) -> None:
        for flat, count in self.whole:
            assert (flat[:GUARD] == 77).all() and (flat[GUARD + count :] == 77).all()
        for longer in self.longer:
            assert (longer[:, :, :8] == 77).all() and (longer[:, :, -16:] == 77).all()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Step:
    """A cache, a query, and the query's own token, guarded."""

    def __init__(self, device: str, length: int, size: int = SIZE):
        self.guard = Guarded(device)
        rows = random(0, 2, BATCH, HEADS, size, WIDTH)
        self.k, self.v = (self.guard.view(x) for x in rows)
        self.q = self.guard(random(2, BATCH, HEADS * GROUP, 1, WIDTH))
        self.new = self.guard.all(random(3, 2, BATCH, HEADS, 1, WIDTH))
        dtype = torch.int32 if -(2**31) <= length < 2**31 and length % 2 else torch.int64
        self.lengths = self.guard(torch.tensor([length, SANE], dtype=dtype))
        self.before = self.k.clone(), self.v.clone()

    def hold_unwritten(self) -> None:
        """The op reads the cache only."""
        self.guard.check()
        assert torch.equal(self.k, self.before[0]) and torch.equal(self.v, self.before[1])

    def hold_appended(self, length: int) -> None:
        """A row's token is where its length says, and nothing else has changed."""
        self.guard.check()
        for row, place in enumerate((length, SANE)):
            for now, before, new in zip((self.k, self.v), self.before, self.new, strict=True):
                wanted = before[row].clone()
                if 0 <= place < self.k.shape[2]:
                    wanted[:, place] = new[row, :, 0]
                assert torch.equal(now[row], wanted)


def both(device: str, length: int, attend: Callable[[Step], torch.Tensor]) -> Step:
    """Run a step with a length, and hold the outputs; the step."""
    step, sane = Step(device, length), Step(device, SANE)
    out, wanted = attend(step), attend(sane)
    assert wanted.isfinite().all() and torch.equal(out[1], wanted[1])
    if length == SIZE - 1:
        assert out.isfinite().all()
    elif length >= SIZE:
        assert out[0].isnan().all()
    return step


def call(op: Any, launch: Callable[..., Any], path: str, device: str, args: list[Any]) -> Any:
    """The op itself, or its launcher in the interpreter; the first output."""
    if path == "reference" or device == "cuda":
        found = op[0](*args)
        return found if found is None or isinstance(found, torch.Tensor) else found[0]
    outputs = op[1](*args)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
    launch(*args, *outputs)
    return outputs[0] if outputs else None


FORMS = list(itertools.product(("bounds", "codes", "band codes"), ((1, 1), (0, 3), (40, 1))))


def in_turn(lengths: list[int], *choices: Any, end: int = SIZE) -> list[Any]:
    """Every length with one of the choices, every choice with a length past the end, one past what
    32 bits hold and one below zero."""
    turn = itertools.cycle(choices)
    some = [(length, choice) for choice in choices for length in (end, 2**32 + 3, -1)]
    return list(dict.fromkeys([*((length, next(turn)) for length in lengths), *some]))


@pytest.mark.parametrize("length, chosen", in_turn(LENGTHS, *FORMS))
def test_gather_decode(device_path, length, chosen):
    device, path = device_path
    form, (top_k, local) = chosen

    def attend(step: Step) -> torch.Tensor:
        dtype, parts = torch.int8 if "codes" in form else None, 1 if "band" in form else 2
        bounds = step.guard(empty_bounds(step.k, BLOCK, parts, dtype=dtype))
        progress = step.guard(torch.zeros(BATCH, 2, dtype=torch.int32))
        args = [step.q, step.k, step.v, *step.new, bounds, progress, step.lengths]
        args += [
            0.125,
            BLOCK,
            top_k,
            1,
            local,
            "band" if "band" in form else "bounds",
            None,
            None,
            0.0,
            None,
        ]
        op = decode._gather_decode, decode._allocate
        return call(op, decode.launch_gather_decode, path, device, args)

    both(device, length, attend).hold_appended(length)


@pytest.mark.parametrize("length", LENGTHS)
def test_tiered_decode(device_path, length):
    device, path = device_path

    def attend(step: Step) -> torch.Tensor:
        bounds = step.guard(empty_bounds(step.k, BLOCK, 2))
        progress = step.guard(torch.zeros(BATCH, 2, dtype=torch.int32))
        kind = torch.float32, torch.device("cpu")
        near = ResidentBlocks.empty(BATCH, HEADS, SIZE, WIDTH, BLOCK, 1, 3, *kind)
        args = [step.q, step.k, step.v, *step.new, bounds, progress, *step.guard.all(near)]
        args += [step.lengths, 0.125, BLOCK, 1, 1, 1, "bounds", None, None, 0.0, None]
        op = tiered._tiered_decode, tiered._allocate
        return call(op, tiered.launch_tiered_decode, path, device, args)

    both(device, length, attend).hold_appended(length)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_summaries(device_path, length, int8):
    """block_bounds makes all that are missing, select_blocks those that a step lacks."""
    device, path = device_path
    for scores in (False, True):
        step = Step(device, length)
        bounds = step.guard(empty_bounds(step.k, BLOCK, 2, dtype=torch.int8 if int8 else None))
        progress = step.guard(torch.zeros(BATCH, 2, dtype=torch.int32))
        if scores:
            args = [step.q, step.k, bounds, progress, BLOCK, 1, 1, 1, "bounds"]
            args += [step.lengths, None, None]
            op = select._select_blocks, select.allocate_index
            call(op, select.launch_select_blocks, path, device, args)
        elif path == "reference" or device == "cuda":
            block_bounds(step.k, bounds, progress, block=BLOCK, lengths=step.lengths)
        else:
            rows = step.lengths, None, None
            summaries.launch_block_bounds(step.k, bounds, progress, *rows, BLOCK)
        step.hold_unwritten()
        done = progress[:, 0].tolist()
        assert 0 <= done[0] <= SIZE // BLOCK and done[1] <= SANE // BLOCK


INV_FREQ = 0.7 ** torch.arange(32)
MOMENTS = torch.zeros(HEADS, 64).double(), *2 * [torch.eye(64).double().expand(HEADS, -1, -1)]
IN_THE_MODELS_BASIS = (
    fit_model_basis(Moments(*MOMENTS), INV_FREQ, size=24).encoder,
    sketch_of_pages.turns_of(INV_FREQ, 4096),
)


@pytest.mark.parametrize("form", ["bounds", "band", "exact band", "codes", "sketch"])
@pytest.mark.parametrize(
    "lost", [2 * SIZE + 15, 2**31 + 31, 2**32 + 15, 2**63 - 1, -1, -(2**63) + 15]
)
def test_slots_outside_of_the_pages(device_path, lost, form):
    """What is kept of written keys, by slot: a slot that no page has is nowhere."""
    device, path = device_path
    random = torch.Generator().manual_seed(0)
    k = torch.randn(2, HEADS, SIZE, 64 if form == "sketch" else WIDTH, generator=random)
    kept: list[list[torch.Tensor]] = []
    for slots in ([SANE + 1, lost], [SANE + 1]):  # that slot completes a block
        guard = Guarded(device)
        keys, where = guard(k), guard(torch.tensor(slots))
        if form == "codes":
            state = guard.all(codes_of_pages.empty_page_codes(k))
            args = [keys, *state, where]
            op = codes_of_pages._page_codes, codes_of_pages._allocate
            call(op, codes_of_pages.launch_page_codes, path, device, args)
        elif form == "sketch":
            state = guard.all(sketch_of_pages.empty_page_sketch(k, 24))
            basis = guard.all([*IN_THE_MODELS_BASIS])
            args = [keys, guard(k), *basis, *state, where, guard(torch.arange(len(slots)))]
            op = encoded_pages._encode_pages, encoded_pages._allocate
            call(op, encoded_pages.launch_encode_pages, path, device, args)
        else:
            dtype = torch.int8 if form == "band" else None
            band = "band" in form
            state = [guard(bounds_of_pages.empty_page_bounds(k, BLOCK, dtype=dtype))]
            op = bounds_of_pages._page_bounds, bounds_of_pages._allocate
            args = [keys, *state, where, BLOCK, band]
            call(op, bounds_of_pages.launch_page_bounds, path, device, args)
        guard.check()
        assert torch.equal(keys.cpu(), k)
        kept.append([x.cpu() for x in state])
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))
    assert any(x.any() for x in kept[0])


ROWS = list(itertools.product((16, 48, 64), (False, True)))


@pytest.mark.parametrize("length, chosen", in_turn(LENGTHS, *ROWS))
def test_gather_rows(device_path, monkeypatch, length, chosen):
    """It writes the summary of the block that a slot completes, and its output. A row as long as
    its table reads no page behind the table, whose last row it is."""
    device, path = device_path
    page, far = chosen
    size = -(-SIZE // page) * page
    dtype = torch.int32 if -(2**31) <= length < 2**31 and length % 2 else torch.int64
    found = []
    for last in (length, min(max(length, 0), size)):
        guard = Guarded(device)
        if path == "kernel" and device == "cpu":
            guard.watch(monkeypatch)
        pages = guard.all(random(0, 2, BATCH * size // page, HEADS, page, WIDTH))
        q, out = guard.all(random(2, 2, BATCH, HEADS * GROUP, 1, WIDTH))
        bounds = guard(bounds_of_pages.empty_page_bounds(pages[0], BLOCK))
        every = torch.arange(BATCH * size, device=device)
        bounds_of_pages.page_bounds(pages[0], bounds, every, block=BLOCK)
        table = guard(torch.arange(BATCH * size // page, dtype=torch.int32).view(BATCH, -1))
        rows = torch.tensor([SANE, last], dtype=dtype)
        lengths, near = guard(rows if far else rows * 0), guard(rows * 0 if far else rows)
        slots = guard(torch.tensor([SANE + 1, -1]))
        choice = 0.125, BLOCK, 1, 1, 2, "bounds", 0.0, None, None
        args = [q, *pages, bounds, table, lengths, near, out, None, slots, *choice]
        whole = rows_of_pages.Whole(64, 2, 2)  # a tile of several pages
        launch = functools.partial(rows_of_pages.launch_gather_rows, whole=whole)
        call((rows_of_pages._gather_rows, rows_of_pages._check), launch, path, device, args)
        guard.check()
        monkeypatch.undo()
        found.append((out.cpu(), bounds.cpu()))
    assert found[0][0].isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 7, 2**31 + 5, 2**32 + 3, -1, -(2**63)])
def test_certified(device_path, length):
    """quantize_kv writes the tier; a step of certified_attention its scratch and its telemetry."""
    device, path = device_path
    step = Step(device, length)
    tier = QuantizedKV.empty(BATCH, HEADS, SIZE, WIDTH, BLOCK, "cpu")
    tier = QuantizedKV(*step.guard.all(tier))
    if path == "reference" or device == "cuda":
        quantize.quantize_kv(step.k, step.v, tier, block=BLOCK, lengths=step.lengths)
    else:
        quantize.launch_quantize_kv(step.k, step.v, *tier, step.lengths, None, None, BLOCK)
    step.hold_unwritten()
    done = tier.progress[:, 0].tolist()
    assert 0 <= done[0] <= SIZE // BLOCK and done[1] == SANE // BLOCK
    kind = torch.float32, device
    scratch = Scratch.empty(BATCH, HEADS, 16, BLOCK, WIDTH, *kind)
    real = torch.zeros(BATCH, HEADS, scratch.owner.shape[2], BLOCK, WIDTH)
    scratch = scratch._replace(slots=real)  # in the interpreter too
    telemetry = torch.zeros(BATCH, HEADS, 32, len(certified.TELEMETRY), dtype=torch.float64)
    args = [step.q, step.k, step.v, *tier, 0.125, BLOCK, 0.9, 1, 2, 0.05, 1e30, 1, 0.3]
    args += [step.lengths, None, None, 0.0, None, step.guard(telemetry), *step.guard.all(scratch)]
    launch = functools.partial(certified.launch, plan=Plan(splits=3, pieces=2))
    op = torch.ops.attnplug.certified_attention, certified._allocate
    out = call(op, launch, path, device, args)
    step.hold_unwritten()
    assert out[1].isfinite().all()


KEPT = list(itertools.product((False, True), (False, True)))


@pytest.mark.parametrize(
    "length, chosen",
    in_turn([1279, 1280, 1287, 2**31 + 5, 2**32 + 3, -1, -(2**63)], *KEPT, end=1280),
)
def test_sketch(device_path, length, chosen):
    """encode_keys writes codes, and so does a whole step, which may write its token as well, of a
    cache on the GPU or in host memory."""
    device, path = device_path
    appends, host = chosen
    step = Step(device, length, size=1280)
    many = random(5, BATCH, HEADS * GROUP, 40, WIDTH).to(device)
    basis = fit_basis(step.k, step.v, many, size=24)
    codes = step.guard.all(empty_codes(step.k, 24))
    args = [step.k, step.v, basis.encoder, *codes, step.lengths, None, None]
    op = encode._encode_keys, encode._allocate
    call(op, encode.launch_encode_keys, path, device, args)
    step.hold_unwritten()
    codes[-1].zero_()
    recent = step.guard(random(6, BATCH, HEADS * GROUP, 8, WIDTH))
    hint = step.guard(torch.full((BATCH, HEADS), -torch.inf))
    args = [step.q, step.k, step.v, *(step.new if appends else (None, None)), *basis, *codes]
    args += [recent, hint, step.lengths, 0.125, 60, "regression", None, None, 0.0, None]
    op, launch = (sketch._sketch_decode, sketch._allocate), sketch.launch_sketch_decode
    if host:
        op = sketch_host._sketch_host_decode, sketch_host._allocate
        launch = sketch_host.launch_sketch_host_decode
        args += step.guard.all(sketch_host.FixedPart.empty(step.k))
    out = call(op, launch, path, device, args)
    if appends:
        step.hold_appended(length)
    else:
        step.hold_unwritten()
    assert out[1].isfinite().all()


LAYERS = {
    "dense": lambda: PlugLayer(max_cache_len=SIZE),
    "gather": lambda: GatherLayer(SIZE, BLOCK, Form(2, torch.int8), lambda *_: True),
    "gather-host": lambda: HostGatherLayer(SIZE, BLOCK, Form(2, None), lambda *_: True, 1, 3),
    "gvr": lambda: GvrLayer(SIZE, 8, 12, lambda *_: True),
    "sketch-host": lambda: HostSketchLayer(SIZE, 24, lambda *_: True),
}


@pytest.mark.parametrize("length", [*FULL, *HUGE, *NEGATIVE])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_appends_within_its_buffers(name, tokens, length):
    """On a CPU, where it raises: a GPU's index_copy_ stops in an assertion, and the process with
    it. The places are told by the device's length, which may be anything."""
    layer, guard = LAYERS[name](), Guarded("cpu")
    layer.update(*random(0, 2, BATCH, HEADS, 20, WIDTH))
    layer.keys, layer.values = guard.all((layer.keys, layer.values))
    layer._rebind_rows(guard)
    layer.note_writes()
    before = layer.keys.clone(), layer.values.clone()
    layer.cumulative_length.fill_(length)
    with pytest.raises((RuntimeError, IndexError)):
        layer._write(*random(1, 2, BATCH, HEADS, tokens, WIDTH))
    guard.check()
    assert torch.equal(layer.keys, before[0]) and torch.equal(layer.values, before[1])
