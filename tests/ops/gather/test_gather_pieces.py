"""The two halves of a served step of gather, against `gather_decode` on the same pages: rows that
it serves get its output, and the others keep what is there."""

import pytest
import torch
from cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import make, paged

from attnplug.errors import ArgumentError
from attnplug.ops import gather_decode, page_bounds
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import gather_pieces as halves
from attnplug.ops.gather import page_bounds as summarise
from attnplug.ops.gather import page_scores
from attnplug.ops.gather import select_blocks as select
from attnplug.ops.gather.attend_plan import Plan as AttendPlan
from attnplug.ops.gather.page_bounds import empty_page_bounds

FORMS = {
    "bounds": None,
    "band": torch.int8,
}
OPTIONS = {"scale": 0.2, "block": 16, "top_k": 3, "sink": 1, "local": 2, "scoring": "bounds"}


def empty(k, block, scoring):
    """Summaries of pages, with what no kernel writes where none has written."""
    dtype = FORMS[scoring]
    return empty_page_bounds(k, block, dtype=dtype).fill_(torch.nan if dtype is None else -77)


def note(device_path, k, bounds, slots, scoring, block=16):
    """`page_bounds` as the halves run it: sums of another order differ in the last bits."""
    if device_path == ("cpu", "kernel"):
        summarise.launch_page_bounds(k, bounds, slots, block, scoring == "band")
    else:
        page_bounds(k, bounds, slots, block=block, band=scoring == "band")


def run(device_path, q, pages, bounds, lengths, out, plan=None, slots=None, sinks=None, **options):
    """Both halves by the ops, or by the launchers where the ops would not run them."""
    options = OPTIONS | {"softcap": 0.0, "k_scale": None, "v_scale": None} | options
    k, v = pages.kv
    at = bounds, pages.table, lengths
    if device_path[1] == "reference" or (device_path[0] == "cuda" and plan is None):
        pieces = halves.gather_pieces(q, k, v, *at, slots=slots, **options)
        halves.merge_pieces(pieces, lengths, out, sinks=sinks)
        return
    names = ("scale", "block", "top_k", "sink", "local", "scoring", "softcap")
    choice, scales = [options[name] for name in names], (options["k_scale"], options["v_scale"])
    args = q, k, v, *at, slots, *choice, *scales
    if plan is None:  # that of a GPU: on a CPU the op itself makes one piece
        plan = decode.plan_of(halves.step_of(q, k, v, bounds, lengths, *choice), pages.table)
    pieces = halves._allocate(*args, plan=plan)
    halves.launch_gather_pieces(*args, pieces, plan=plan)
    halves._allocate_merge(pieces, lengths, out, sinks, True)
    halves.launch_merge_pieces(pieces, lengths, out, sinks, True)


def newest(pages):
    """Where the last key of each row is; -1 for a row without keys, and where another row has the
    page: a page that is written is one row's own."""
    slots = []
    for b, length in enumerate(pages.lengths.tolist()):
        page = int(pages.table[b, max(length - 1, 0) // pages.page])
        own = length > 0 and int((pages.table == page).sum()) == 1
        slots.append(page * pages.page + (length - 1) % pages.page if own else -1)
    return torch.tensor(slots)


def a_plan(draw, kept, block, top_k):
    """A plan, or None for that of the shape."""
    if draw(st.booleans()):
        return None
    tile, splits = draw(st.sampled_from([16, 64])), draw(st.sampled_from([1, 2, 5]))
    if draw(st.booleans()):  # a block a program
        tile, splits = block, kept
    chosen = select.Plan(16, draw(st.sampled_from([0, 8])) if top_k <= 32 else 0, 4, 4)
    ahead = draw(st.booleans())
    stages = draw(st.sampled_from([1, 3])) if ahead else 1
    return decode.Plan(chosen, AttendPlan(tile, splits, 4, stages, 64, ahead))


@given(data=st.data())
def test_rows_that_are_served_get_gathers_output_and_the_others_keep_theirs(device_path, data):
    draw, device = data.draw, device_path[0]
    pages = draw(paged(pages=(32, 64), dtypes=dtypes(device_path)[:1]))
    _, batch, heads, _, width = pages.rows.shape
    block, scoring = draw(st.sampled_from([16, 32])), draw(st.sampled_from([*FORMS, "bounds"]))
    options = {
        "scale": 0.125,
        "block": block,
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
        "top_k": draw(st.sampled_from([0, 1, 3, 40])),
        "scoring": scoring,
        "softcap": draw(st.sampled_from([0.0, 2.5])),
    }
    seed, group = draw(st.integers(0, 99)), draw(st.sampled_from([1, 3]))
    q = random(seed, batch, heads * group, 1, width).to(device)
    sinks = random(1, heads * group).to(device) if draw(st.booleans()) else None
    served = torch.tensor(draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    on = pages.to(device)
    bounds, slots = empty(on.kv[0], block, scoring), newest(pages).to(device)
    known = torch.tensor([x for x in pages.slots().tolist() if x not in slots.tolist()])
    note(device_path, on.kv[0], bounds, known.to(device).long(), scoring, block)

    right = bounds.clone()
    note(device_path, on.kv[0], right, slots, scoring, block)
    step = {"table": on.table, "sinks": sinks, **options}
    want, _ = gather_decode(q, *on.kv, None, None, right, None, on.lengths, **step)

    there = random(seed + 1, *q.shape).to(device)  # what another attention has written
    out, lengths = there.clone(), (on.lengths * served.to(device)).int()
    plan = a_plan(
        draw, options["sink"] + options["local"] + options["top_k"], block, options["top_k"]
    )
    programs = draw(st.sampled_from([0, page_scores.PROGRAMS]))  # 0: one, for all chunks of a row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_scores, "PROGRAMS", programs)
        more = {"plan": plan, "slots": slots, "sinks": sinks}
        run(device_path, q, on, bounds, lengths, out, **more, **options)
    kept = (lengths == 0).cpu()
    assert torch.equal(out.cpu()[kept], there.cpu()[kept])
    epsilon = torch.finfo(q.dtype).eps
    error = (out.cpu()[~kept].double() - want.cpu()[~kept].double()).abs()
    assert not error.numel() or error.max() <= (4 * epsilon + 1e-5) * (1 + want.abs().max().item())
    assert torch.equal(bounds.cpu().nan_to_num(7), right.cpu().nan_to_num(7))


@pytest.mark.parametrize(
    "top_k, scoring",
    [(3, "bounds"), (3, "band"), (0, "bounds"), (0, "band")],
)
def test_blocks_that_a_step_completes_are_summarised_in_all_rows(device_path, top_k, scoring):
    """A served row, another attention's, one whose block is not complete, and one that pads."""
    pages = make(3, [96, 64, 50, 0], page=32)
    on, q = pages.to(device_path[0]), random(0, 4, 4, 1, 64).to(device_path[0])
    slots = newest(pages)
    assert (slots % 16 == 15).tolist() == [True, True, False, True] and slots[3] == -1
    bounds = empty(on.kv[0], 16, scoring)
    known = torch.tensor([x for x in pages.slots().tolist() if x not in slots.tolist()])
    note(device_path, on.kv[0], bounds, known.to(device_path[0]), scoring)
    right = bounds.clone()
    note(device_path, on.kv[0], right, slots.to(device_path[0]), scoring)
    assert not torch.equal(bounds.cpu().nan_to_num(7), right.cpu().nan_to_num(7))
    lengths = on.lengths * torch.tensor([1, 0, 1, 0], device=on.lengths.device)
    for wide in (slots, slots.int()):
        own, out = bounds.clone(), torch.zeros_like(q)
        more = {"slots": wide.to(device_path[0]), "top_k": top_k, "scoring": scoring}
        run(device_path, q, on, own, lengths, out, **more)
        assert torch.equal(own.cpu().nan_to_num(7), right.cpu().nan_to_num(7))


def test_a_batch_without_a_served_row_is_left_as_it_is(device_path):
    """Nothing is read of pages, of which no entry of the table is one here."""
    pages = make(3, [96, 64], page=32).to(device_path[0])
    pages.table.fill_(-1)
    q = random(0, 2, 4, 1, 64).to(device_path[0])
    bounds, out = empty(pages.kv[0], 16, "bounds"), torch.full_like(q, 7.0)
    run(device_path, q, pages, bounds, torch.zeros_like(pages.lengths), out, top_k=40)
    assert (out == 7.0).all() and bounds.isnan().all()


@pytest.mark.parametrize(
    ("scoring", "programs", "members"),
    [("bounds", 0, 0), ("bounds", 1, 8), ("band", 0, 8), ("band", 1, 0)],
)
def test_few_programs_score_all_chunks_of_a_long_row(
    device_path, monkeypatch, scoring, programs, members
):
    """One program a row, or two: 62 blocks are four chunks, and 25 are two."""
    monkeypatch.setattr(page_scores, "PROGRAMS", programs)
    pages = make(5, [999, 400, 640], page=32)
    on, q = pages.to(device_path[0]), random(0, 3, 4, 1, 64).to(device_path[0])
    bounds, lengths = empty(on.kv[0], 16, scoring), on.lengths.clone()
    note(device_path, on.kv[0], bounds, on.slots(), scoring)
    options = OPTIONS | {"top_k": 5, "scoring": scoring}
    step = {"table": on.table, **options}
    want, _ = gather_decode(q, *on.kv, None, None, bounds, None, on.lengths, **step)
    plan = decode.Plan(select.Plan(16, members, 4, 4), AttendPlan(16, 2, 4, 1, 64))
    lengths[2], out = 0, torch.full_like(q, 7.0)
    run(device_path, q, on, bounds, lengths, out, plan, **options)
    epsilon = torch.finfo(q.dtype).eps
    error = (out[:2].double() - want[:2].double()).abs().max()
    assert error <= (4 * epsilon + 1e-5) * (1 + want.abs().max()) and (out[2] == 7.0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots is torch.int64 \(3,\)"),
        ({"slots": torch.zeros(2)}, "slots is torch.float32"),
        ({"q": torch.zeros(2, 4, 2, 64)}, "q has 2 queries a row"),
    ],
)
def test_the_first_half_refuses(change, message):
    k = torch.zeros(5, 2, 32, 64)
    inputs = {
        "q": torch.zeros(2, 4, 1, 64), "k": k, "v": k, "bounds": empty_page_bounds(k, 16),
        "table": torch.zeros(2, 2, dtype=torch.int32), "lengths": torch.tensor([3, 4]),
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="^gather_pieces: " + message):
        halves.gather_pieces(**(inputs | OPTIONS | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pieces": torch.zeros(2 * 4 * 65 + 1)}, "needs those of gather_pieces"),
        ({"pieces": torch.zeros(2 * 4 * 65, dtype=torch.float16)}, "pieces is torch.float16"),
        ({"out": torch.zeros(2, 8, 1, 64)[:, ::2]}, "out is not contiguous"),
        ({"lengths": torch.tensor([3])}, r"needs int32 or int64 \[B\] = \[2\]"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
    ],
)
def test_the_second_half_refuses(change, message):
    inputs = {
        "pieces": torch.zeros(2 * 4 * 65), "lengths": torch.tensor([3, 4]),
        "out": torch.zeros(2, 4, 1, 64),
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="^merge_pieces: .*" + message):
        halves.merge_pieces(**(inputs | change))
