"""dense_decode of a table of pages against dense_decode of the same rows side by side, which its
own tests hold to fp64: shuffled and shared pages, page edges, empty rows, three layouts."""

import pytest
import torch
from cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import LAYOUTS, close, make, paged

from attnplug.errors import ArgumentError
from attnplug.ops import dense_decode
from attnplug.ops.dense import dense_decode as op
from attnplug.ops.dense.plan import Plan

SCALE = 0.125
NAMES = ("scale", "lengths", "start", "key_mask", "window", "softcap", "sinks")


def attend(device_path, q, pages, plan=None, **options):
    """The public op, or the Triton launcher where the op would not run it."""
    device, path = device_path
    pages = pages.to(device)
    options = {"scale": SCALE, "window": 0, "softcap": 0.0, "lengths": pages.lengths} | options
    args = [options.get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    tensors = q.to(device), *pages.kv
    if path == "reference" or (device == "cuda" and plan is None):
        named = dict(zip(NAMES, args, strict=True))
        found = dense_decode(*tensors, table=pages.table, **named)
    else:
        found = op._allocate(*tensors, *args, table=pages.table)
        op.launch_dense_decode(*tensors, *args, *found, plan=plan, table=pages.table)
    return [x.cpu() for x in found]


@given(data=st.data())
def test_equals_the_rows_side_by_side(device_path, data):
    draw, queries = data.draw, data.draw(st.sampled_from([1, 1, 3]))
    pages = draw(paged(least=queries, dtypes=dtypes(device_path)))
    _, batch, heads, size, width = pages.rows.shape
    group, seed = draw(st.sampled_from([1, 3])), draw(st.integers(0, 99))
    options = {"softcap": draw(st.sampled_from([0.0, 2.5])), "window": draw(st.integers(0, 40))}
    if draw(st.booleans()):
        options["sinks"] = 3 * random(seed, heads * group)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts)
    q = random(seed + 2, batch, heads * group, queries, width, dtype=pages.kv.dtype)
    plan = None
    if draw(st.booleans()):  # tiles over several pages, and several tiles a page
        tile, splits = draw(st.sampled_from([16, 64])), draw(st.sampled_from([1, 3]))
        plan = Plan(rows=16, tile=tile, splits=splits, warps=4, stages=2, columns=32)
    want = dense_decode(q, *pages.rows, scale=SCALE, lengths=pages.lengths, **options)
    close(attend(device_path, q, pages, plan, **options), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_row_has_not_is_not_read(device_path, layout):
    """NaN behind every length, in pages of nobody, and in table entries past the end."""
    pages = make(3, [0, 1, 16, 17, 80], layout=layout, room=6)
    pages.table[pages.table < 0] = 1 << 30
    q = random(0, 5, 4, 1, 64)
    out, lse = attend(device_path, q, pages)
    assert not out.isnan().any() and not lse.isnan().any()
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    close((out, lse), dense_decode(q, *pages.rows, scale=SCALE, lengths=pages.lengths))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, v, table, lengths):
        return dense_decode(q * 2, k, v, scale=SCALE, lengths=lengths, table=table)

    q = random(0, 2, 4, 1, 64).to(device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(([1, 0], [33, 64], [90, 16])):
            pages = make(seed, lengths, room=6).to(device)
            got = step(q, *pages.kv, pages.table, pages.lengths)
            options = {"scale": SCALE, "lengths": pages.lengths, "table": pages.table}
            want = dense_decode(q * 2, *pages.kv, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


WRONG = [
    ({"table": torch.zeros(3, 2, dtype=torch.int32)}, r"table is .*needs int32 \[B = 2, pages"),
    ({"table": torch.zeros(2, 2, dtype=torch.int64)}, "table is torch.int64"),
    ({"table": torch.zeros(2, 0, dtype=torch.int32)}, "table is "),
    ({"table": torch.zeros(2, 2, dtype=torch.int32).mT}, "rows of table are not contiguous"),
    ({"key_mask": torch.ones(2, 9, dtype=torch.bool)}, r"key_mask .*\[B,S\] = \[2, 32\]"),
    ({"k": torch.zeros(5, 2, 64, 16).mT}, "k has a stride other than 1 in D"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refuses(change, message):
    inputs = {"q": torch.zeros(2, 4, 1, 64), "k": torch.zeros(5, 2, 16, 64), "scale": 1.0}
    inputs |= {"v": inputs["k"], "table": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises(ArgumentError, match="^dense_decode: .*" + message):
        dense_decode(**(inputs | change))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 256])
def test_one_cuda_graph_for_all_tables(page):
    """Padded rows, too: length 0 and a table of -1."""
    cases = [
        make(seed, lengths, 4, page, 5120 // page, 128, torch.bfloat16, "tokens first")
        for seed, lengths in enumerate(([5000, 1, 256], [16, 0, 0], [700, 5120, 4096]))
    ]
    on, q = cases[0].to("cuda"), random(0, 3, 28, 1, 128, dtype=torch.bfloat16)
    options = {"scale": SCALE, "lengths": on.lengths, "table": on.table}
    at = q.cuda()
    dense_decode(at, *on.kv, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dense_decode(at, *on.kv, **options)
    for case in cases:
        for own, new in zip(on.tensors(), case.tensors(), strict=True):
            own.copy_(new)
        graph.replay()
        want = dense_decode(q, *case.rows, scale=SCALE, lengths=case.lengths)
        close((out.cpu(), lse.cpu()), want)


@pytest.mark.gpu
def test_pages_past_two_to_the_31_elements():
    page, heads, width, pages = 256, 8, 128, 9000
    pool = torch.zeros(2, pages, heads, page, width, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[pages - 1, 0, pages - 2]], dtype=torch.int32, device="cuda")
    own = random(0, 2, 1, heads, 3 * page, width, dtype=torch.bfloat16)
    for p, at in enumerate(table[0].tolist()):
        pool[:, at] = own[:, 0, :, p * page : (p + 1) * page].cuda()
    q = random(1, 1, 32, 1, width, dtype=torch.bfloat16)
    out, lse = dense_decode(q.cuda(), *pool, scale=SCALE, table=table)
    close((out.cpu(), lse.cpu()), dense_decode(q, *own, scale=SCALE))
