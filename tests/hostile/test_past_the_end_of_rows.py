"""As test_past_the_end.py, whose guards these are: the ops that serve rows of a batch over pages,
those that read latents and index keys, the steps that leave the lengths alone, and that no op that
writes to its arguments is without such a test."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from test_past_the_end import (
    BATCH,
    BLOCK,
    GROUP,
    HEADS,
    LENGTHS,
    SANE,
    SIZE,
    WIDTH,
    Guarded,
    Step,
    both,
    call,
    in_turn,
    random,
)

import attnplug.ops
from attnplug.ops.common import divide_rows as divide
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import gather_pieces as halves
from attnplug.ops.gather import page_bounds as bounds_of_pages
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gvr import index_topk as index
from attnplug.ops.gvr import pool_keys as pools
from attnplug.ops.latent import latent_attention as latent
from attnplug.ops.sketch import host_decode as sketch_host
from attnplug.ops.sketch import sketch_decode as sketch
from attnplug.ops.sketch.basis import fit_basis
from attnplug.ops.sketch.state import empty_codes
from attnplug.policies._certified_layer import CertifiedLayer
from attnplug.policies._indexed_layer import IndexedLayer
from attnplug.policies._sketch_layer import SketchLayer

# The interpreter computes with numpy, which warns where the kernel means infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def typed(length: int, *others: int) -> torch.Tensor:
    """Lengths in 32 bits where they fit and are odd."""
    dtype = torch.int32 if -(2**31) <= length < 2**31 and length % 2 else torch.int64
    return torch.tensor([length, *others], dtype=dtype)


class Pages:
    """Guarded pages of two rows, their table, summaries and a query."""

    def __init__(self, device: str, page: int):
        self.guard = Guarded(device)
        self.size = -(-SIZE // page) * page
        count = BATCH * self.size // page
        self.kv = self.guard.all(random(0, 2, count, HEADS, page, WIDTH))
        self.q, self.out = self.guard.all(random(2, 2, BATCH, HEADS * GROUP, 1, WIDTH))
        self.bounds = self.guard(bounds_of_pages.empty_page_bounds(self.kv[0], BLOCK))
        every = torch.arange(BATCH * self.size, device=device)
        bounds_of_pages.page_bounds(self.kv[0], self.bounds, every, block=BLOCK)
        table = torch.arange(count, dtype=torch.int32).view(BATCH, -1)
        self.table = self.guard(table)


PAGED = in_turn(LENGTHS, 16, 48, 64)


@pytest.mark.parametrize("length, page", PAGED)
def test_gather_pieces(device_path, monkeypatch, length, page):
    """The first half writes the summary of the block that a slot completes, the second a row's
    output; a row of no length keeps what is there. One as long as its table reads no page
    behind it."""
    device, path = device_path
    found = []
    for last in (length, min(max(length, 0), Pages("cpu", page).size)):
        pages = Pages(device, page)
        if path == "kernel" and device == "cpu":
            pages.guard.watch(monkeypatch)
        lengths = pages.guard(typed(last, SANE).flip(0))
        slots = pages.guard(torch.tensor([SANE + 1, -1]))
        choice = 0.125, BLOCK, 1, 1, 2, "bounds", 0.0, None, None
        args = [pages.q, *pages.kv, pages.bounds, pages.table, lengths, slots, *choice]
        op = halves._gather_pieces, halves._allocate
        pieces = pages.guard(call(op, halves.launch_gather_pieces, path, device, args))
        op = halves._merge_pieces, halves._allocate_merge
        args = [pieces, lengths, pages.out, None, True]
        call(op, halves.launch_merge_pieces, path, device, args)
        pages.guard.check()
        monkeypatch.undo()
        found.append((pages.out.cpu(), pages.bounds.cpu()))
    assert all(out[0].isfinite().all() for out, _ in found)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("length, page", PAGED)
def test_gather_decode_paged(device_path, monkeypatch, length, page):
    """It writes nothing, and reads no page behind the table."""
    device, path = device_path
    found = []
    for last in (length, SANE):
        pages = Pages(device, page)
        if path == "kernel" and device == "cpu":
            pages.guard.watch(monkeypatch)
        lengths = pages.guard(typed(last, SANE).flip(0))
        args = [pages.q, *pages.kv, pages.bounds, None, pages.table, lengths]
        args += [0.125, BLOCK, 1, 1, 2, "bounds", None, None, 0.0, None]
        op = decode._gather_decode_paged, decode._paged(decode._allocate)
        found.append(call(op, decode.launch_gather_decode_paged, path, device, args).cpu())
        pages.guard.check()
        monkeypatch.undo()
    assert found[0][0].isfinite().all() and torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("length", LENGTHS)
def test_divide_rows(device_path, length):
    device, path = device_path
    for steps in (None, 1, 2, 3):
        guard = Guarded(device)
        lengths = guard(typed(length, SANE, 0))
        near, far = guard(lengths * 0 - 7), guard(lengths * 0 - 7)
        chosen = guard(torch.zeros(3, dtype=torch.uint8)).view(torch.bool)
        args = [lengths, near, far, chosen, 20, 25, 3 if steps is None else steps]
        op = divide._divide_rows, divide._allocate
        call(op, divide.launch_divide_rows, path, device, args)
        guard.check()
        assert torch.equal(near + far, lengths) and torch.equal(far != 0, chosen)


@pytest.mark.parametrize("length", LENGTHS)
def test_gather_decode_uncounted(device_path, length):
    device, path = device_path

    def attend(step: Step) -> torch.Tensor:
        bounds = step.guard(empty_bounds(step.k, BLOCK, 2))
        progress = step.guard(torch.zeros(BATCH, 2, dtype=torch.int32))
        args = [step.q, step.k, step.v, *step.new, bounds, progress, step.lengths]
        args += [0.125, BLOCK, 1, 1, 1, "bounds", None, None, 0.0, None]
        op = decode._gather_decode_uncounted, decode._allocate

        def launch(*given):
            decode.launch_gather_decode(*given, count=False)

        out, before = call(op, launch, path, device, args), [length, SANE]
        assert step.lengths.tolist() in (before, [SANE, SANE])
        return out

    both(device, length, attend).hold_appended(length)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("length", [1279, 1280, 2**31 + 5, 2**32 + 3, -1])
def test_sketch_decode_uncounted(device_path, length, host):
    device, path = device_path
    step = Step(device, length, size=1280)
    many = random(5, BATCH, HEADS * GROUP, 40, WIDTH).to(device)
    basis = fit_basis(step.k, step.v, many, size=24)
    codes = step.guard.all(empty_codes(step.k, 24))
    recent = step.guard(random(6, BATCH, HEADS * GROUP, 8, WIDTH))
    hint = step.guard(torch.full((BATCH, HEADS), -torch.inf))
    args = [step.q, step.k, step.v, *step.new, *basis, *codes]
    args += [recent, hint, step.lengths, 0.125, 60, "regression", None, None, 0.0, None]
    op, run = (sketch._sketch_decode_uncounted, sketch._allocate), sketch.launch_sketch_decode
    if host:
        op = sketch_host._sketch_host_decode_uncounted, sketch_host._allocate
        run = sketch_host.launch_sketch_host_decode
        args += step.guard.all(sketch_host.FixedPart.empty(step.k))
    out = call(op, lambda *given: run(*given, count=False), path, device, args)
    step.hold_appended(length)
    assert out[1].isfinite().all() and step.lengths.tolist() == [length, SANE]


@pytest.mark.parametrize("length", LENGTHS)
def test_latents_and_index_keys_are_read_within_their_buffers(device_path, monkeypatch, length):
    """By picks of any tokens, of all, and as an indexer makes them."""
    device, path = device_path
    found = []
    for last in (length, SANE):
        guard = Guarded(device)
        if path == "kernel" and device == "cpu":
            guard.watch(monkeypatch)
        lengths = guard(typed(last, SANE))
        keys, latents = guard.all(random(0, 2, BATCH, SIZE, WIDTH))
        rope = guard(random(1, BATCH, SIZE, 32))
        q = guard(random(2, BATCH, 1, 16, WIDTH))
        weights = guard(random(3, BATCH, 1, 16))
        args = [q, weights, keys, 8, 0.125, lengths, None, None, None]
        op = index._index_topk, index._allocate
        picks = call(op, index.launch_index_topk, path, device, args)
        outputs = [picks]
        turned = guard(random(4, BATCH, 1, 16, 32))
        for listed in (None, guard(picks), guard(torch.full_like(picks, 2**31 - 1))):
            args = [q, turned, latents, rope, listed, 0.125, None, lengths, None]
            op = latent._latent_attention, latent._allocate
            outputs.append(call(op, latent.launch_latent_attention, path, device, args))
        guard.check()
        monkeypatch.undo()
        assert ((picks >= -1) & (picks < SIZE)).all()
        found.append([each[1].cpu() for each in outputs])
    assert all(map(torch.equal, *found)) and found[0][1].isfinite().all()


@pytest.mark.parametrize("length", LENGTHS)
def test_pool_keys(device_path, monkeypatch, length):
    """Blocks behind the cache's last are not written, nor their tokens read."""
    device, path = device_path
    guard, ratio = Guarded(device), 4
    blocks = SIZE // ratio
    pooled = guard(torch.full((BATCH, blocks, WIDTH), 5.0))
    tensors = random(0, BATCH, SIZE, WIDTH), *random(1, 2, BATCH, SIZE, 16), random(3, WIDTH)
    since = guard(torch.zeros(BATCH, dtype=torch.int64))
    until = guard(torch.tensor([length // ratio, blocks - 1]))
    args = [pooled, *guard.all(tensors), since, until, ratio, 1e-6, None]
    if path == "kernel" and device == "cpu":
        guard.watch(monkeypatch)
        pools.launch_pool_keys(*args)
    else:
        pools._pool_keys(*args)
    guard.check()
    monkeypatch.undo()
    written = min(max(0, length // ratio), blocks)
    assert (pooled[0, written:] == 5).all() and (pooled[1, -1] == 5).all()
    assert (pooled[0, :written] != 5).any(-1).all() and pooled.isfinite().all()


LAYERS = {
    "certified": lambda: CertifiedLayer(SIZE, BLOCK, 2, "device", lambda *_: True),
    "sketch": lambda: SketchLayer(SIZE, 24, lambda *_: True),
    "indexed": lambda: IndexedLayer(max_cache_len=SIZE),
}


@pytest.mark.parametrize("length", [length for length in LENGTHS if not 0 <= length < SIZE])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_appends_within_its_buffers(name, length):
    """On a CPU, where it raises."""
    layer, guard = LAYERS[name](), Guarded("cpu")
    layer.update(*random(0, 2, BATCH, HEADS, 20, WIDTH))
    if isinstance(layer, IndexedLayer):
        layer.update_indexer(random(3, BATCH, 20, 32))
    layer.keys, layer.values = guard.all((layer.keys, layer.values))
    layer._rebind_rows(guard)
    layer.note_writes()
    before = layer.keys.clone(), layer.values.clone()
    layer.cumulative_length.fill_(length)
    with pytest.raises((RuntimeError, IndexError)):
        layer._write(*random(1, 2, BATCH, HEADS, 1, WIDTH))
    if isinstance(layer, IndexedLayer):
        layer.cumulative_length.fill_(min(length, 2**63 - 2) + 1)
        with pytest.raises((RuntimeError, IndexError)):
            layer.update_indexer(random(4, BATCH, 1, 32))
    guard.check()
    assert torch.equal(layer.keys, before[0]) and torch.equal(layer.values, before[1])


def test_every_op_that_writes_to_its_arguments_is_tried_past_the_end():
    for module in pkgutil.walk_packages(attnplug.ops.__path__, "attnplug.ops."):
        importlib.import_module(module.name)
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    schemas = [
        getattr(torch.ops.attnplug, name.partition(".")[0]).default._schema
        for library, _, name in names
        if library == "attnplug"
    ]
    writing = {schema.name.partition("::")[2] for schema in schemas if schema.is_mutable}
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_past_the_end*.py"))
    called = set(re.findall(r"\b_?([a-z_]+)", text))
    assert {"gather_decode", "gather_pieces", "quantize_kv"} <= writing
    assert writing - called == set()
