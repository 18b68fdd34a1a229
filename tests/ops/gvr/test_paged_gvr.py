"""gvr's ops on a table of pages against the same ops on the rows side by side, which their own
tests hold to fp64; and the INT8 keys of pages."""

import pytest
import torch
from cases import FEW, dtypes, random, random_lists
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import LAYOUTS, close, make, paged

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import gather_tokens_attention, page_codes, score_tokens, topk
from attnplug.ops.gvr import gather_tokens_attention as attend
from attnplug.ops.gvr import page_codes as coding
from attnplug.ops.gvr import score_tokens as scoring
from attnplug.ops.gvr.page_codes import PageCodes, empty_page_codes
from attnplug.ops.gvr.score_tokens import quantize_keys

ROW = ("lengths", "start", "key_mask")


def garbage(k):
    """Codes of pages, with what no kernel writes where none has written."""
    made = empty_page_codes(k)
    return PageCodes(made.codes.fill_(111), made.scales.fill_(torch.nan))


def note(device_path, k, state, slots):
    """The public op, or the Triton launcher where the op would not run it."""
    if device_path[1] == "reference" or device_path[0] == "cuda":
        page_codes(k, *state, slots)
    else:
        coding._allocate(k, *state, slots)
        coding.launch_page_codes(k, *state, slots)


def noted(device_path, pages):
    """The codes of all keys of all rows."""
    state = garbage(pages.kv[0])
    note(device_path, pages.kv[0], state, pages.slots().to(device_path[0]))
    return state


def hold_codes(pages, state):
    """Bit for bit the codes of each row's keys, where its pages are."""
    codes, scales = (x.cpu() for x in state)
    wanted, steps = quantize_keys(pages.rows[0])
    for b, length in enumerate(pages.lengths.tolist()):
        n = torch.arange(length)
        at, place = pages.table[b].long()[n // pages.page], n % pages.page
        assert torch.equal(codes[at, :, place], wanted[b, :, :length].transpose(0, 1))
        own, right = scales[at, :, place], steps[b, :, :length].transpose(0, 1)
        assert torch.equal(own.nan_to_num(7.0), right.nan_to_num(7.0))


def score(device_path, q, state, pages, plan=None, **options):
    device, path = device_path
    options = {"lengths": pages.lengths, "start": None, "key_mask": None} | options
    if path == "reference" or (device == "cuda" and plan is None):
        return score_tokens(q, *state, table=pages.table, **options).cpu()
    args = q, *state, options["sink"], options["window"], *(options[x] for x in ROW)
    scores = scoring._allocate(*args, table=pages.table)
    scoring.launch_score_tokens(*args, scores, plan=plan, table=pages.table)
    return scores.cpu()


def attended(device_path, q, pages, index, plan=None, **options):
    device, path = device_path
    names = ("scale", "sink", "window", *ROW, "softcap", "sinks")
    args = [({"lengths": pages.lengths} | options).get(name) for name in names]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    tensors = q, *pages.kv, index.to(device)
    if path == "reference" or (device == "cuda" and plan is None):
        named = dict(zip(names, args, strict=True))
        found = gather_tokens_attention(*tensors, table=pages.table, **named)
    else:
        found = attend._allocate(*tensors, *args, table=pages.table)
        attend.launch_gather_tokens_attention(*tensors, *args, *found, plan=plan, table=pages.table)
    return [x.cpu() for x in found]


def same_scores(found, want, lengths):
    """Sums of float32 in another order; infinities where they were, up to each row's length."""
    assert found.shape == want.shape
    rows = len(found) // len(lengths)
    past = torch.arange(found.shape[1]) >= lengths.repeat_interleave(rows)[:, None]
    found, want = (x.masked_fill(past, 0.0) for x in (found, want))
    assert not found.isnan().any()
    assert torch.equal(found.isinf(), want.isinf())
    assert torch.equal(found[found.isinf()], want[want.isinf()])
    finite = want.isfinite()
    room = 1e-4 + 1e-5 * want[finite].abs()
    assert ((found[finite] - want[finite]).abs() <= room).all()


@given(data=st.data())
def test_equals_the_rows_side_by_side(device_path, data):
    """Codes, scores, and attention over listed tokens, some of them none of the row's."""
    draw, device = data.draw, device_path[0]
    queries = draw(st.sampled_from([1, 1, 2]))
    pages = draw(paged(least=queries, dtypes=dtypes(device_path)))
    _, batch, heads, size, width = pages.rows.shape
    group, seed = draw(st.sampled_from([1, 3])), draw(st.integers(0, 99))
    options = {"sink": draw(st.sampled_from([0, 3])), "window": draw(st.sampled_from([1, 20]))}
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts)
    q = random(seed, batch, heads * group, queries, width, dtype=pages.kv.dtype)
    there = {x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in options.items()}
    on = pages.to(device)
    state = noted(device_path, on)
    hold_codes(pages, state)
    if queries == 1:
        own = quantize_keys(pages.rows[0].nan_to_num())
        want = score_tokens(q, *own, lengths=pages.lengths, **options)
        plan = None
        if device_path[1] == "kernel" and draw(st.booleans()):
            programs = draw(st.sampled_from([1, 3]))
            plan = scoring.Plan(tile=draw(st.sampled_from([16, 64])), programs=programs, warps=4,
                                stages=1)  # fmt: skip
        found = score(device_path, q.to(device), state, on, plan, **there)
        same_scores(found, want, pages.lengths)

    more = {"scale": 0.125, "softcap": draw(st.sampled_from([0.0, 2.5]))}
    if draw(st.booleans()):
        more["sinks"] = random(seed + 3, heads * group)
    index = random_lists(seed + 4, pages.rows[0], queries, draw(st.sampled_from([1, 9, 40])), size)
    plan = None
    if device_path[1] == "kernel" and draw(st.booleans()):
        splits = draw(st.sampled_from([1, 3]))
        plan = attend.Plan(draw(st.sampled_from([16, 64])), splits, 4, 64)
    want = gather_tokens_attention(q, *pages.rows, index, lengths=pages.lengths, **options, **more)
    close(attended(device_path, q.to(device), on, index, plan, **options, **more), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_row_has_not_is_not_read(device_path, layout):
    """NaN behind every length, in pages of nobody, and wild table entries past the end."""
    pages = make(3, [0, 1, 16, 17, 80], layout=layout, room=6)
    pages.table[pages.table < 0] = 1 << 30
    on, q = pages.to(device_path[0]), random(0, 5, 4, 1, 64).to(device_path[0])
    scores = score(device_path, q, noted(device_path, on), on, sink=2, window=4)
    past = torch.arange(96) >= pages.lengths.repeat_interleave(2)[:, None]
    scores.masked_fill_(past, -torch.inf)
    assert not scores.isnan().any() and (scores != torch.inf).all()
    seen = torch.tensor([0, 0, 10, 11, 74]).repeat_interleave(2)
    assert torch.equal(scores.isfinite().sum(1), seen)
    index = torch.arange(96, dtype=torch.int32).expand(5, 2, 1, 96).contiguous()
    out, lse = attended(device_path, q, on, index, scale=0.125, sink=2, window=4, softcap=0.0)
    assert not out.isnan().any() and not lse.isnan().any()
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()


@FEW
@given(data=st.data())
def test_codes_follow_what_is_written(device_path, data):
    """Writes in pieces of any size, -1 among them; then another sequence takes the pages."""
    draw, device = data.draw, device_path[0]
    layout = draw(st.sampled_from(LAYOUTS))
    first = make(1, [150, 64], page=32, layout=layout)
    then = make(2, [64, 150], page=32, layout=layout)
    then.table = first.table.flip(0).contiguous()
    state = garbage(first.to(device).kv[0])
    kv = first.to(device).kv.fill_(torch.nan)
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
                note(device_path, kv[0], state, slots.int() if done % 2 else slots)
        hold_codes(turn, state)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_keys_that_are_zero_or_not_finite(device_path):
    pages = make(1, [96], page=32)
    for n, bad in ((5, torch.nan), (40, torch.inf), (70, -torch.inf)):
        pages.rows[0, 0, 1, n, 7] = bad
        pages.kv[0, pages.table[0, n // 32], 1, n % 32, 7] = bad
    pages.rows[0, 0, :, 33] = 0
    pages.kv[0, pages.table[0, 1], :, 1] = 0
    on = pages.to(device_path[0])
    state = noted(device_path, on)
    hold_codes(pages, state)
    found = score(device_path, random(0, 1, 4, 1, 64).to(device_path[0]), state, on, sink=0,
                  window=1)  # fmt: skip
    assert found[1, [5, 40, 70]].tolist() == [torch.inf] * 3 and (found[:, 33] == 0).all()


def test_a_hint_of_another_row_changes_no_pick(device_path):
    """A whole step with the picks of the last step, of rows that have changed places, and with
    what no step has made."""
    pages = make(7, [300, 0, 64, 290], page=16)
    device, k = device_path[0], 40
    on, q = pages.to(device), random(0, 4, 4, 1, 64).to(device)
    state = noted(device_path, on)
    scores = score(device_path, q, state, on, sink=2, window=9)
    own = quantize_keys(pages.rows[0].nan_to_num())
    beside = score_tokens(q.cpu(), *own, sink=2, window=9, lengths=pages.lengths)
    same_scores(scores, beside, pages.lengths)
    rows = pages.lengths.repeat_interleave(2)
    want, _ = topk(scores, k, lengths=rows)
    wild = torch.randint(-(2**31), 2**31 - 1, (8, k), dtype=torch.int32)
    for hint in (want, want.flip(0).contiguous(), torch.full_like(want, -1), wild):
        picks, _ = topk(scores, k, hint=hint, lengths=rows)
        assert torch.equal(picks.sort(1).values, want.sort(1).values)
    index = want.view(4, 2, 1, k)
    options = {"scale": 0.125, "sink": 2, "window": 9, "softcap": 0.0}
    found = attended(device_path, q, on, index, **options)
    close(found, gather_tokens_attention(q.cpu(), *pages.rows, index, lengths=pages.lengths,
                                         **options))  # fmt: skip


K = torch.zeros(5, 2, 32, 64)
STATE = empty_page_codes(K)
WRONG = [
    ({"codes": STATE.codes.float()}, "codes is torch.float32"),
    ({"codes": STATE.codes[:4]}, r"codes is torch.int8 \(4, 2, 32, 64\), needs torch.int8"),
    ({"scales": STATE.scales.double()}, "scales is torch.float64"),
    ({"scales": STATE.scales.transpose(0, 1).contiguous().transpose(0, 1)}, "not contiguous"),
    ({"slots": torch.zeros(3)}, r"slots is torch.float32 \(3,\), needs int32 or int64 \[N\]"),
    ({"k": K.mT.contiguous().mT}, "k has a stride of 32 in D, needs 1"),
    ({"k": K.long()}, "k is torch.int64"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_page_codes_refuses(change, message):
    inputs = {"k": K, "codes": STATE.codes, "scales": STATE.scales, "slots": torch.zeros(1).int()}
    with pytest.raises(ArgumentError, match="^page_codes: .*" + message):
        page_codes(**(inputs | change))


def test_refuses_gradients_and_tables_that_do_not_fit():
    with pytest.raises(GradientError, match="page_codes"):
        page_codes(K.clone().requires_grad_(), *STATE, torch.zeros(1).int())
    q, table = torch.zeros(2, 4, 1, 64), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^score_tokens: table is torch\.int64"):
        score_tokens(q, *STATE, table=table.long())
    with pytest.raises(ArgumentError, match=r"^score_tokens: codes has a stride other than 1"):
        score_tokens(q, STATE.codes.mT.contiguous().mT, STATE.scales, table=table)
    index = torch.zeros(2, 2, 1, 3, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^gather_tokens_attention: table is .*B = 2"):
        gather_tokens_attention(q, K, K, index, scale=1.0, table=table[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 256])
def test_one_cuda_graph_for_all_tables(page):
    """A whole step, its hint kept in place. Padded rows, too: length 0 and a table of -1."""
    cases = [
        make(seed, lengths, 4, page, 20480 // page, 128, torch.bfloat16, "tokens first")
        for seed, lengths in enumerate(([20000, 1, 256], [16, 0, 0], [9000, 20480, 4096]))
    ]
    on, q = cases[0].to("cuda"), random(0, 3, 28, 1, 128, dtype=torch.bfloat16)
    state, at = garbage(on.kv[0]), q.cuda()
    kept = {"sink": 16, "window": 256, "lengths": on.lengths, "table": on.table}
    hint = torch.full((12, 2048), -1, dtype=torch.int32, device="cuda")

    def step():
        scores = score_tokens(at, *state, **kept)
        picks, _ = topk(scores, 2048, hint=hint, lengths=on.lengths.repeat_interleave(4))
        index = picks.view(3, 4, 1, 2048)
        found = gather_tokens_attention(at, *on.kv, index, scale=0.125, **kept)
        hint.copy_(picks)
        return *found, picks

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, picks = step()
    for case in [*cases, cases[2]]:
        for own, new in zip(on.tensors(), case.tensors(), strict=True):
            own.copy_(new)
        page_codes(on.kv[0], *state, case.slots().cuda())
        hold_codes(case, state)
        graph.replay()
        own = quantize_keys(case.rows[0].nan_to_num())
        scores = score_tokens(q, *own, sink=16, window=256, lengths=case.lengths)
        rows, index = case.lengths.repeat_interleave(4), picks.cpu()
        best = topk(scores, 2048, lengths=rows, sorted=True)[1]
        chosen = torch.where(index >= 0, scores.gather(1, index.clamp(min=0).long()), -torch.inf)
        finite = best.isfinite()
        assert torch.equal(finite, chosen.sort(1, descending=True).values.isfinite())
        spread = (chosen.sort(1, descending=True).values - best)[finite].abs()
        assert (spread <= 1e-2).all()  # products of bfloat16 are summed in another order
        want = gather_tokens_attention(
            q, *case.rows, index.view(3, 4, 1, 2048), scale=0.125, sink=16, window=256,
            lengths=case.lengths,
        )  # fmt: skip
        close((out.cpu(), lse.cpu()), want)
