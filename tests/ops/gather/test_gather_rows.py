"""A served step of all rows in one chain: far rows get what `gather_decode` gives on the same
pages, and near ones what `dense_decode` gives."""

import pytest
import torch
from cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import make, paged
from test_gather_pieces import FORMS, a_plan, empty, newest, note

from attnplug.errors import ArgumentError
from attnplug.ops import dense_decode, gather_decode
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import gather_rows as op
from attnplug.ops.gather.gather_pieces import step_of

OPTIONS = {"scale": 0.2, "block": 16, "top_k": 3, "sink": 1, "local": 2, "scoring": "bounds"}
CHOICE = ("scale", "block", "top_k", "sink", "local", "scoring", "softcap")


def run(device_path, q, pages, bounds, lengths, near, out, plan=None, whole=None, **options):
    """The op, or its launcher where the op would not run it."""
    none = {"sinks": None, "slots": None, "k_scale": None, "v_scale": None}
    options = OPTIONS | {"softcap": 0.0} | none | options
    at = bounds, pages.table, lengths, near, out
    if device_path[1] == "reference" or (device_path[0] == "cuda" and plan is None):
        op.gather_rows(q, *pages.kv, *at, **options)
        return
    choice = [options[name] for name in CHOICE]
    if plan is None:
        plan = decode.plan_of(step_of(q, *pages.kv, bounds, lengths, *choice), pages.table)
    scales = options["k_scale"], options["v_scale"]
    args = q, *pages.kv, *at, options["sinks"], options["slots"], *choice, *scales
    op._check(*args)
    op.launch_gather_rows(*args, plan=plan, whole=whole)


def close(out, want):
    epsilon = torch.finfo(want.dtype).eps
    error = (out.cpu().double() - want.cpu().double()).abs()
    assert not error.numel() or error.max() <= (4 * epsilon + 1e-5) * (1 + want.abs().max().item())


@given(data=st.data())
def test_far_rows_get_gathers_output_and_near_ones_dense_decodes(device_path, data):
    draw, device = data.draw, device_path[0]
    pages = draw(paged(pages=(32, 64), dtypes=dtypes(device_path)[:1]))
    _, batch, heads, _, width = pages.rows.shape
    options = {
        "scale": 0.125,
        "block": draw(st.sampled_from([16, 32])),
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
        "top_k": draw(st.sampled_from([0, 1, 3, 40])),
        "scoring": draw(st.sampled_from([*FORMS, "bounds"])),
        "softcap": draw(st.sampled_from([0.0, 2.5])),
    }
    block, scoring = options["block"], options["scoring"]
    seed, group = draw(st.integers(0, 99)), draw(st.sampled_from([1, 3]))
    q = random(seed, batch, heads * group, 1, width).to(device)
    sinks = random(1, heads * group).to(device) if draw(st.booleans()) else None
    far = torch.tensor(draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    on = pages.to(device)
    bounds, slots = empty(on.kv[0], block, scoring), newest(pages).to(device)
    known = torch.tensor([x for x in pages.slots().tolist() if x not in slots.tolist()])
    note(device_path, on.kv[0], bounds, known.to(device).long(), scoring, block)
    right = bounds.clone()
    note(device_path, on.kv[0], right, slots, scoring, block)
    step = {"table": on.table, "sinks": sinks}
    kept, _ = gather_decode(q, *on.kv, None, None, right, None, on.lengths, **step, **options)
    dense = {"scale": options["scale"], "softcap": options["softcap"], "lengths": on.lengths}
    whole, _ = dense_decode(q, *on.kv, **step, **dense)

    lengths = (on.lengths * far.to(device)).int()
    # What it says of far rows is not looked at.
    near = on.lengths if draw(st.booleans()) else on.lengths - lengths
    out, cut = torch.full_like(q, torch.nan), None
    plan = a_plan(draw, options["sink"] + options["local"] + options["top_k"], block, 0)
    if draw(st.booleans()):
        tile, splits = draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([1, 3, 7]))
        cut = op.Whole(tile, splits, 2)
    more = {"plan": plan, "whole": cut, "slots": slots, "sinks": sinks}
    run(device_path, q, on, bounds, lengths, near, out, **more, **options)
    is_far = (lengths > 0).cpu()
    close(out.cpu()[is_far], kept.cpu()[is_far])
    close(out.cpu()[~is_far], whole.cpu()[~is_far])
    assert torch.equal(bounds.cpu().nan_to_num(7), right.cpu().nan_to_num(7))


@pytest.mark.parametrize("page", [16, 32, 48, 64])
def test_what_a_near_row_has_not_is_not_read(device_path, page):
    """Pages behind a row's end are none, and NaN lies behind the end of its last one."""
    pages = make(4, [page * 3 - 1, 1, 0, page + 1], page=page).to(device_path[0])
    q = random(0, 4, 4, 1, 64).to(device_path[0])
    bounds, out = empty(pages.kv[0], 16, "bounds"), torch.full_like(q, torch.nan)
    lengths = torch.zeros_like(pages.lengths)
    whole = op.Whole(32, 3, 3)
    run(device_path, q, pages, bounds, lengths, pages.lengths, out, whole=whole)
    rows = {"lengths": pages.lengths, "table": pages.table}
    want, _ = dense_decode(q, *pages.kv, scale=OPTIONS["scale"], **rows)
    close(out, want)
    assert (out[2] == 0).all() and bounds.isnan().all()


def test_rows_do_not_change_each_other(device_path):
    """A near row among far ones has the bits that it has among near ones, and the reverse."""
    pages = make(5, [700, 333, 900], page=32).to(device_path[0])
    q = random(0, 3, 4, 1, 64).to(device_path[0])
    bounds = empty(pages.kv[0], 16, "bounds")
    note(device_path, pages.kv[0], bounds, pages.slots(), "bounds")
    found = {}
    for far in ((0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)):
        lengths = pages.lengths * torch.tensor(far, device=pages.lengths.device)
        out = torch.full_like(q, torch.nan)
        run(device_path, q, pages, bounds, lengths, pages.lengths, out)
        for b, kind in enumerate(far):
            assert torch.equal(out[b], found.setdefault((b, kind), out[b])), (far, b)
    assert not torch.equal(found[0, 0], found[0, 1])


def test_the_reference_follows_no_far_row_to_where_near_says(monkeypatch):
    """Table entries behind a row's end may be anything: where one is no page, it would crash."""
    pages = make(5, [100, 40], page=16)
    q, asked, attend = random(0, 2, 4, 1, 64), [], op.descaled_on_cpu

    def note_lengths(call, index, lengths, *more):
        asked.append(lengths.tolist())
        attend(call, index, lengths, *more)

    monkeypatch.setattr(op, "descaled_on_cpu", note_lengths)
    at = empty(pages.kv[0], 16, "bounds"), pages.table, torch.tensor([0, 40])
    op.gather_rows(q, *pages.kv, *at, torch.tensor([100, 112]), torch.empty_like(q), **OPTIONS)
    assert [lengths[1] <= 40 for lengths in asked] == [True]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"near": torch.zeros(3, dtype=torch.int32)}, r"near is torch.int32 \(3,\)"),
        ({"near": torch.zeros(2)}, "near is torch.float32"),
        ({"out": torch.zeros(2, 4, 1, 32)}, r"out is torch.float32 \(2, 4, 1, 32\)"),
        ({"out": torch.zeros(2, 4, 1, 64).half()}, "out is torch.float16"),
        ({"out": torch.zeros(2, 4, 1, 128)[..., :64]}, "contiguous"),
        ({"slots": torch.zeros(2)}, "slots is torch.float32"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    pages = make(0, [130, 77], page=32)
    inputs = {
        "q": torch.zeros(2, 4, 1, 64),
        "k": pages.kv[0],
        "v": pages.kv[1],
        "bounds": empty(pages.kv[0], 16, "bounds"),
        "table": pages.table,
        "lengths": pages.lengths,
        "near": pages.lengths,
        "out": torch.zeros(2, 4, 1, 64),
    }
    with pytest.raises(ArgumentError, match="^gather_rows: .*" + message):
        op.gather_rows(**(inputs | OPTIONS | change))
