"""gather's ops on a table of pages against the same ops on the rows side by side, which their own
tests hold to fp64; and the summaries of pages."""

import pytest
import torch
from cases import FEW, dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import LAYOUTS, close, make, paged

from attnplug.errors import ArgumentError
from attnplug.ops import (
    block_bounds,
    dense_decode,
    gather_attention,
    gather_decode,
    page_bounds,
    select_blocks,
)
from attnplug.ops.gather import gather_attention as attend
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import page_bounds as summarise
from attnplug.ops.gather import select_blocks as select
from attnplug.ops.gather.attend_plan import Plan as AttendPlan
from attnplug.ops.gather.block_bounds import empty_bounds
from attnplug.ops.gather.page_bounds import empty_page_bounds, page_summaries, rows_of_summaries

SCORINGS = ("bounds", "band")


def garbage(k, block):
    """Summaries of pages, with what no kernel writes where none has written."""
    return empty_page_bounds(k, block).fill_(torch.nan)


def note(device_path, k, bounds, slots, block, scoring):
    """The public op, or the Triton launcher where the op would not run it."""
    if device_path[1] == "reference" or device_path[0] == "cuda":
        page_bounds(k, bounds, slots, block=block, band=scoring == "band")
    else:
        args = k, bounds, slots, block, scoring == "band"
        summarise._allocate(*args)
        summarise.launch_page_bounds(*args)


def of_rows(pages, block, scoring):
    """(bounds, progress) of the rows side by side."""
    k = pages.rows[0].contiguous()
    bounds = empty_bounds(k, block)
    progress = torch.zeros((len(k), 2), dtype=torch.int32)
    how = {"lengths": pages.lengths, "band": scoring == "band"}
    block_bounds(k, bounds, progress, block=block, **how)
    return bounds, progress


def hold_summaries(pages, bounds, block, scoring):
    """The summaries of every complete block of every row, where its page is."""
    wanted, _ = of_rows(pages, block, scoring)
    blocks = pages.rows.shape[3] // block
    found = rows_of_summaries(bounds.cpu(), pages.table.cpu(), blocks, pages.kv[0], block)
    for b, length in enumerate(pages.lengths.tolist()):
        own, right = found[b, :, : length // block], wanted[b, :, : length // block]
        # A sum rounds as it was ordered.
        assert torch.allclose(own.float(), right.float(), rtol=2e-5, atol=2e-6, equal_nan=True)


def chosen(device_path, q, pages, bounds, plan=None, **options):
    """`select_blocks` by the public op, or by the launcher."""
    if device_path[1] == "reference" or (device_path[0] == "cuda" and plan is None):
        options |= {"lengths": pages.lengths, "table": pages.table}
        return select_blocks(q, pages.kv[0], bounds, None, **options).cpu()
    names = ("block", "top_k", "sink", "local", "scoring")
    args = q, pages.kv[0], bounds, None, *(options[x] for x in names), pages.lengths, None, None
    out = select.allocate_index(*args, table=pages.table).fill_(-7)
    select.launch_select_blocks(*args, out, plan=plan, table=pages.table)
    return out.cpu()


@given(data=st.data())
def test_equals_the_rows_side_by_side(device_path, data):
    """Summaries, choice, attention, and all of it in one step."""
    draw, device = data.draw, device_path[0]
    queries = draw(st.sampled_from([1, 1, 2]))
    pages = draw(paged(pages=(32, 64), least=queries, dtypes=dtypes(device_path)[:1]))
    _, batch, heads, _, width = pages.rows.shape
    block, scoring = draw(st.sampled_from([16, 32])), draw(st.sampled_from(SCORINGS))
    kept = {
        "block": block,
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
    }
    options = {"scale": 0.125, **kept}
    choice = {"top_k": draw(st.sampled_from([1, 3, 40])), "scoring": scoring}
    more = {"softcap": draw(st.sampled_from([0.0, 2.5]))}
    q = random(
        draw(st.integers(0, 99)), batch, heads * draw(st.sampled_from([1, 3])), queries, width
    )
    if draw(st.booleans()):
        more["sinks"] = random(1, q.shape[1])
    on = pages.to(device)
    there = q.to(device)
    k, v = on.kv
    bounds = garbage(k, block)
    note(device_path, k, bounds, on.slots(), block, scoring)
    hold_summaries(pages, bounds, block, scoring)

    own, progress = of_rows(pages, block, scoring)
    lengths = {"lengths": pages.lengths}
    plan = None
    if device_path[1] == "kernel" and choice["top_k"] <= 32 and draw(st.booleans()):
        plan = select.Plan(16, draw(st.sampled_from([0, 8])), 4, 4)
    index = select_blocks(q, pages.rows[0], own, progress, **choice, **kept, **lengths)
    found = chosen(device_path, there, on, bounds, plan, **choice, **kept)
    assert torch.equal(found, index)

    want = gather_attention(q, *pages.rows, index, **options, **more, **lengths)
    at = {"table": on.table, "lengths": on.lengths}
    if device_path == ("cpu", "kernel"):
        names = ("scale", "block", "sink", "local")
        args = there, k, v, index, *(options[x] for x in names), pages.lengths, None, None
        args = *args, more["softcap"], more.get("sinks")
        got = attend.allocate_attention(*args, table=on.table)
        tile, splits = draw(st.sampled_from([16, 64])), draw(st.sampled_from([1, 2, 5]))
        ahead = draw(st.booleans())
        own_plan = AttendPlan(tile, splits, 4, 3 if ahead else 1, 64, ahead)
        attend.launch_gather_attention(*args, *got, plan=own_plan, table=on.table)
    else:
        there_more = {x: y.to(device) if x == "sinks" else y for x, y in more.items()}
        got = gather_attention(there, k, v, index.to(device), **options, **there_more, **at)
    close([x.cpu() for x in got], want)
    if queries == 1:
        step = whole_step(device_path, there, on, bounds, **options, **choice, **more)
        close(step, want)


def whole_step(device_path, q, pages, bounds, **options):
    """`gather_decode` by the public op, or by the launcher."""
    q_device = q.device
    k, v = pages.kv
    sinks = options.get("sinks")
    options["sinks"] = None if sinks is None else sinks.to(q_device)
    if device_path[1] == "reference" or device_path[0] == "cuda":
        found = gather_decode(
            q, k, v, None, None, bounds, None, pages.lengths, table=pages.table, **options
        )
        return [x.cpu() for x in found]
    names = ("scale", "block", "top_k", "sink", "local", "scoring")
    rest = *(options[x] for x in names), None, None, options.get("softcap", 0.0), options["sinks"]
    args = q, k, v, bounds, None, pages.table, pages.lengths, *rest
    found = decode._paged(decode._allocate)(*args)
    decode.launch_gather_decode_paged(*args, *found)
    return [x.cpu() for x in found]


@FEW
@given(data=st.data())
def test_summaries_follow_what_is_written(device_path, data):
    """Writes in pieces of any size, -1 among them; then another sequence takes the pages."""
    draw, device = data.draw, device_path[0]
    scoring, block = draw(st.sampled_from(SCORINGS)), draw(st.sampled_from([16, 32]))
    layout = draw(st.sampled_from(LAYOUTS))
    first, then = (make(seed, [150, 64], page=32, layout=layout) for seed in (1, 2))
    then.table = first.table.flip(0).contiguous()
    then.table = torch.where(then.table < 0, first.table[0], then.table)
    then = make(2, [64, 96], page=32, layout=layout) if draw(st.booleans()) else first
    bounds = garbage(first.kv[0].to(device), block)
    kv = first.to(device).kv
    kv.fill_(torch.nan)
    for turn in (first, then):
        for b, length in enumerate(turn.lengths.tolist()):
            done = 0
            while done < length:
                n = torch.arange(done, min(length, done + draw(st.integers(1, 70))))
                done = int(n[-1]) + 1
                at = turn.table[b].long()[n // 32]
                kv[:, at.to(device), :, (n % 32).to(device)] = (
                    turn.rows[:, b, :, n].permute(2, 0, 1, 3).to(device)
                )
                slots = torch.cat([at * 32 + n % 32, torch.tensor([-1])])
                slots = slots[torch.randperm(len(slots))].to(device)
                slots = slots.int() if done % 2 else slots
                note(device_path, kv[0], bounds, slots, block, scoring)
        turn.kv = kv.cpu()
        hold_summaries(turn, bounds, block, scoring)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_copied_page_takes_its_summaries_along(scoring):
    pages = make(0, [64, 64], page=32)
    bounds = garbage(pages.kv[0], 16)
    page_bounds(pages.kv[0], bounds, pages.slots(), block=16, band=scoring == "band")
    old, new = pages.table[0].tolist(), pages.table[1].tolist()
    pages.kv[:, new] = pages.kv[:, old]
    pages.rows[:, 1] = pages.rows[:, 0]
    for part in page_summaries(bounds, pages.kv[0], 16):
        assert len(part) == pages.kv.shape[1]
        part[new] = part[old]
    hold_summaries(pages, bounds, 16, scoring)


def test_a_nan_key_comes_first(device_path):
    """What is not finite must surface, also from a page."""
    pages = make(1, [320], page=32)
    pages.rows[0, 0, 1, 100, 7] = torch.nan
    pages.kv[0, pages.table[0, 3], 1, 4, 7] = torch.nan
    on, q = pages.to(device_path[0]), random(0, 1, 4, 1, 64)
    for scoring in SCORINGS:
        bounds = garbage(on.kv[0], 16)
        note(device_path, on.kv[0], bounds, on.slots(), 16, scoring)
        options = {"block": 16, "top_k": 2, "sink": 1, "local": 2, "scoring": scoring}
        index = chosen(device_path, q.to(device_path[0]), on, bounds, **options)
        assert 6 in index[0, 1, 0] and 6 not in index[0, 0, 0, :0]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    torch._dynamo.reset()
    options = {"scale": 0.125, "block": 16, "top_k": 3, "sink": 1, "local": 2}

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, v, bounds, table, lengths, slots):
        page_bounds(k, bounds, slots, block=16)
        return gather_decode(q * 2, k, v, None, None, bounds, None, lengths, table=table, **options)

    q = random(0, 2, 4, 1, 64).to(device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(([160, 80], [128, 112], [200, 40])):
            pages = make(seed, lengths, page=32, room=8).to(device)
            bounds = garbage(pages.kv[0], 16)
            there = pages.table, pages.lengths, pages.slots().to(device)
            got = step(q, *pages.kv, bounds, *there)
            own = garbage(pages.kv[0], 16)
            page_bounds(pages.kv[0], own, there[2], block=16)
            want = whole_step((device, "reference"), q * 2, pages, own, scoring="bounds", **options)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
            assert torch.equal(bounds.nan_to_num(7), own.nan_to_num(7))


def small():
    k = torch.zeros(5, 2, 32, 64)
    table = torch.zeros(2, 2, dtype=torch.int32)
    return {
        "q": torch.zeros(2, 4, 1, 64), "k": k, "bounds": empty_page_bounds(k, 16),
        "progress": None, "block": 16, "top_k": 2, "table": table,
    }  # fmt: skip


WRONG = [
    ({"progress": torch.zeros(2, 2, dtype=torch.int32)}, "with a table there are no progress"),
    ({"start": torch.zeros(2, dtype=torch.int32)}, "with a table there are no progress, no start"),
    ({"key_mask": torch.ones(2, 64, dtype=torch.bool)}, "no key_mask"),
    ({"block": 64}, "pages of 32 keys are no multiple of block 64"),
    ({"block": 17}, "block is 17"),
    (
        {"bounds": torch.zeros(1, 2, 10, 2, 64, dtype=torch.int8)},
        r"bounds has shape .*= \[1, 2, 15, 2, 64\]",
    ),
    ({"bounds": torch.zeros(1, 2, 10, 2, 64).half()}, "need that or int8"),
    ({"bounds": torch.zeros(2, 2, 10, 2, 64)}, r"bounds has shape .*\[1, 2, 10, 2, 64\]"),
    ({"table": torch.zeros(1, 2, dtype=torch.int32)}, "needs int32"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match="^select_blocks: .*" + message):
        select_blocks(**(small() | change))


def test_refuses_a_token_to_write_on_pages():
    inputs = small() | {"scale": 1.0, "lengths": torch.tensor([3, 4])}
    new = torch.zeros(2, 2, 1, 64)
    with pytest.raises(ArgumentError, match="gather_decode: with a table there are no new_k"):
        gather_decode(**inputs, v=inputs["k"], new_k=new, new_v=new)


@pytest.mark.parametrize("slots", [torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64)])
def test_page_bounds_refuses(slots):
    k = torch.zeros(5, 2, 32, 64)
    with pytest.raises(ArgumentError, match=r"^page_bounds: slots is .*needs int32 or int64 \[N\]"):
        page_bounds(k, empty_page_bounds(k, 16), slots, block=16)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("page", [16, 256])
def test_one_cuda_graph_for_all_tables(page, scoring):
    """Padded rows, too: length 0 and a table of -1. The default keep set, and a plan of its own."""
    cases = [
        make(seed, lengths, 4, page, 20480 // page, 128, torch.bfloat16, "tokens first")
        for seed, lengths in enumerate(([20000, 1, 256], [16, 0, 0], [9000, 20480, 4096]))
    ]
    options = {"scale": 0.125, "block": 16, "top_k": 256, "sink": 8, "local": 32}
    on, q = cases[0].to("cuda"), random(0, 3, 28, 1, 128, dtype=torch.bfloat16)
    bounds, at = garbage(on.kv[0], 16), q.cuda()
    rest = {"table": on.table, "scoring": scoring} | options
    call = at, *on.kv, None, None, bounds, None, on.lengths
    gather_decode(*call, **rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = gather_decode(*call, **rest)
    for case in cases:
        for own, new in zip(on.tensors(), case.tensors(), strict=True):
            own.copy_(new)
        page_bounds(on.kv[0], bounds, case.slots().cuda(), block=16, band=scoring == "band")
        graph.replay()
        choice = {x: options[x] for x in ("block", "sink", "local")}
        index = select_blocks(
            at, on.kv[0], bounds, None, top_k=256, scoring=scoring, table=on.table,
            lengths=on.lengths, **choice,
        ).cpu()  # fmt: skip
        rows = {"scale": options["scale"], "lengths": case.lengths}
        want = gather_attention(q, *case.rows, index, **rows, **choice)
        close((out.cpu(), lse.cpu()), want)


def test_a_sink_of_more_blocks_than_a_row_has_room_for(device_path):
    pages = make(5, [0, 15], page=32)
    on, q = pages.to(device_path[0]), random(0, 2, 6, 1, 64)
    options = {"scale": 0.2, "block": 32, "sink": 2, "local": 1, "top_k": 1, "scoring": "bounds"}
    bounds = garbage(on.kv[0], 32)
    got = whole_step(device_path, q.to(device_path[0]), on, bounds, **options)
    rows = {"lengths": pages.lengths, "scale": 0.2}
    close(got, dense_decode(q, *pages.rows, **rows))
