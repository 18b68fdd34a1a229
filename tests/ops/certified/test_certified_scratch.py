"""The scratch cache of certified_attention: never felt in an output, counted as the reference says,
and not believed when it is wrong."""

import numpy as np
import pytest
import torch
from certified_cases import LOOSE, OPTIONS, Case, attend, exact, gaussian, op, random, rungs

from attnplug.errors import ArgumentError
from attnplug.ops import Scratch
from attnplug.ops.certified.plan import Plan
from attnplug.ops.certified.scratch import SETS, simulate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
FEW = LOOSE | {"k_min": 3, "v_tol": 1e29}  # few blocks, listed all the same
MANY = {"explore": 0.0, "coverage": 0.9, "v_tol": 0.02}  # with values
STEPS = 3


def empty(case: Case, count: int, device: str) -> Scratch:
    """Slots that are real in the interpreter too."""
    batch, heads, _, width = case.k.shape
    made = Scratch.empty(batch, heads, count, case.block, width, case.k.dtype, device)
    real = (batch, heads, made.owner.shape[2], case.block, width)
    return made._replace(slots=torch.zeros(real, dtype=case.k.dtype, device=device))


def steps(case: Case, seed: int = 5):
    """The case with queries that drift."""
    for step in range(STEPS):
        yield Case(case.q + 0.3 * step * random(seed + step, *case.q.shape).to(case.q.dtype),
                   case.k, case.v, case.block, case.scale, case.more)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "dtype", "count"),
    [
        (FEW, torch.float32, 4 * SETS),
        (MANY, torch.float16, SETS),
        ({"explore": 0.3}, torch.float16, 4 * SETS),
    ],
    ids=["few", "many", "explored"],
)
def test_outputs_do_not_feel_it(device_path, options, dtype, count):
    """Bit for bit, with hits and misses, enough slots and too few; slots hold originals."""
    case = gaussian(0, dtype, batch=2, size=110)
    case.more |= {"lengths": torch.tensor([110, 90]), "start": torch.tensor([0, 13])}
    tier, scratch = case.tier(device_path[0]), empty(case, count, device_path[0])
    for now in steps(case):
        plain = attend(device_path, now, tier, **options)
        found = attend(device_path, now, tier, scratch=scratch, **options)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        assert not rungs(found, "row").any()
    _, wanted, hits = scratch.counters.sum((0, 1, 2)).tolist()
    assert 0 < hits < wanted
    assert scratch.counters[..., 0].unique().tolist() == [STEPS]
    if device_path[1] == "kernel":
        check_slots(scratch, case)


def check_slots(scratch: Scratch, case: Case) -> None:
    owner, slots = scratch.owner.cpu(), scratch.slots.cpu()
    held = (owner >= 0).nonzero().tolist()
    assert held
    for b, h, slot in held:
        at, which = divmod(int(owner[b, h, slot]), 2)
        original = (case.k, case.v)[which][b, h, at : at + case.block]
        assert torch.equal(slots[b, h, slot], original)


@pytest.mark.parametrize(
    ("options", "chunks"), [(FEW, 4), (MANY, 2), (MANY, SETS), ({"explore": 0.3}, 2)], ids=str
)
def test_kernels_keep_what_the_reference_says(device_path, options, chunks):
    """The same directory and counts, however many programs choose."""
    case = gaussian(3, batch=1, size=300 if device_path[1] == "reference" else 130)
    want = empty(case, 16, "cpu")
    for now in steps(case):
        attend(("cpu", "reference"), now, scratch=want, **options)
    scratch = empty(case, 16, device_path[0])
    plan = Plan(splits=3, pieces=2, chunks=chunks, list_readers=2)
    for now in steps(case):
        attend(device_path, now, scratch=scratch, plan=plan, **options)
    for name in ("owner", "used", "counters"):
        a, b = getattr(scratch, name).cpu(), getattr(want, name)
        if name == "counters":
            a, b = a.sum(2), b.sum(2)
        assert torch.equal(a, b), name


def run(rows, owner, used, counters, start=0):
    """Steps of `simulate` of one row and head; each is {block: mark}. Returns its hits a step."""
    hits = []
    for row in rows:
        marks = np.zeros((1, 1, 64), np.int32)
        for block, mark in row.items():
            marks[0, 0, block] = mark
        before = counters[..., 2].sum()
        simulate(marks, np.array([start]), 16, owner, used, counters)
        hits.append(int(counters[..., 2].sum() - before))
    return hits


def directory(count):
    made = Scratch.empty(1, 1, count, 16, 64, torch.float32, "cpu")
    return [x.numpy() for x in (made.owner, made.used, made.counters)]


def test_what_is_kept():
    """Two ways a set: the longest unused goes, nothing that this step or the last one wanted."""
    state = directory(2 * SETS)
    a, b, c = (SETS * i for i in range(3))  # of one set
    wanted = [{a: 1}, {b: 1}, {a: 1}, {}, {c: 1}, {a: 1}, {b: 1}]
    assert run(wanted, *state) == [0, 0, 1, 0, 0, 1, 0]
    # more than there is room for: two of three stay, where the least recently used would miss all
    assert run([{a: 1, b: 1, c: 1}] * 6, *directory(2 * SETS)) == [0, 2, 2, 2, 2, 2]
    # keys and values are two items, spot checks are not kept
    assert run([{a: 1}, {a: 3}, {a: 3}, {a + 1: 7}, {a + 1: 7}], *directory(2 * SETS)) == [
        0, 1, 2, 0, 0
    ]  # fmt: skip


def test_forget_and_clear():
    made = Scratch.empty(2, 1, SETS, 16, 64, torch.float32, "cpu")
    made.owner.copy_(torch.arange(SETS) * 32)  # keys of blocks 0, 1, ..
    made.forget(torch.tensor([48, 31]), 16)
    assert (made.owner >= 0).sum(-1).flatten().tolist() == [3, 1]
    made.clear()
    assert (made.owner == -1).all() and (made.used == -2).all() and (made.counters == 0).all()


def flip(scratch, case, b, h, slot):
    """One bit of one word, the smallest."""
    words = scratch.slots[b, h, slot].view(torch.int16)
    words[3, 5] ^= 1


def stale(scratch, case, b, h, slot):
    """What the block was before somebody replaced it and did not say so: a right seal."""
    tile = scratch.slots[b, h, slot]
    tile.copy_(tile.roll(1, -1))
    words = tile.view(torch.int16 if tile.element_size() == 2 else torch.int32).long().cpu()
    rows, width = words.shape
    place = torch.arange(rows * width).view(rows, width)
    item = int(scratch.owner[b, h, slot])
    seal = int((words * (2 * place + 1)).sum()) + item * 7919 + 100000007
    scratch.seals[b, h, slot] = (seal + 2**31) % 2**32 - 2**31


def exchanged(scratch, case, b, h, slot):
    """A directory that names another block."""
    scratch.owner[b, h, slot] += 2 * SETS * case.block


@pytest.mark.parametrize(
    ("fault", "options"),
    [(flip, FEW), (stale, MANY | {"v_tol": 1e30}), (exchanged, FEW)],
    ids=["flip", "stale", "exchanged"],
)
def test_a_wrong_slot_is_noticed_and_dropped(device_path, fault, options):
    """The row is exact and says so; the next step reads the originals again."""
    device, path = device_path
    if path == "reference":
        return simulated_slots_are_never_read(options)
    case = gaussian(0, torch.float16, batch=2, size=280 if fault is exchanged else 140)
    if fault is exchanged:  # every block of the set is wanted
        options = options | {"k_min": 64, "coverage": 1.0}
    tier, scratch = case.tier(device), empty(case, 64, device)
    attend(device_path, case, tier, scratch=scratch, **options)
    clean = attend(device_path, case, tier, scratch=scratch, **options)
    keys = (scratch.owner[0, 1] >= 0) & (scratch.owner[0, 1] % 2 == 0)
    slot = int(keys.nonzero()[0])
    if fault is exchanged:
        slot = int(((scratch.owner[0, 1] == 0) & keys).nonzero()[0])
        other = scratch.owner[0, 1] == 2 * SETS * case.block
        scratch.owner[0, 1].masked_fill_(other, -1)
    fault(scratch, case, 0, 1, slot)
    found = attend(device_path, case, tier, scratch=scratch, **options)
    row = rungs(found, "row") & rungs(found, "score")
    assert row[0].all() and not row[1].any()
    assert exact(found, case)[0].all() and (found.bounds[0, :, :2] == 0).all()
    assert torch.equal(found.out[1], clean.out[1])
    again = attend(device_path, case, tier, scratch=scratch, **options)
    assert torch.equal(again.out, clean.out) and not rungs(again, "row").any()


def simulated_slots_are_never_read(options):
    """On a CPU there are none."""
    case = gaussian(0, torch.float16, batch=2, size=140)
    made = Scratch.empty(2, 2, 64, case.block, 64, torch.float16, "cpu")
    assert made.slots.numel() == 0
    found = [attend(("cpu", "reference"), case, scratch=x, **options) for x in (None, made, made)]
    assert all(torch.equal(found[0].out, x.out) for x in found)
    assert int(made.counters[..., 2].sum()) > 0


def test_refuses_other_shapes():
    case = gaussian(0, batch=1, size=64)
    q, k, v = case.q, case.k, case.v
    good = Scratch.empty(1, 2, SETS, 16, 64, torch.float32, "cpu")
    options = {n: x for n, x in OPTIONS.items() if x != float("inf")}
    for wrong, message in (
        (good._replace(owner=good.owner.long()), "scratch.owner is torch.int64"),
        (good._replace(slots=good.slots.half()), "scratch.slots is torch.float16"),
        (good._replace(counters=good.counters[:, :, :3]), "scratch.counters"),
        (Scratch(*(x[:, :, :3].contiguous() if x.dim() == 3 else x for x in good)), "multiple of"),
    ):
        with pytest.raises(ArgumentError, match=f"certified_attention: .*{message}"):
            op.certified_attention(
                q, k, v, case.tier(), scale=0.1, block=16, scratch=wrong, **options
            )
