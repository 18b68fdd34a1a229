"""best_tokens: the exact top-k of the scores of score_tokens and share_tokens, whichever way a row
goes, by the CPU's composition and the Triton kernels."""

import pytest
import torch
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import make as make_pages
from topk_cases import KINDS, SMALL, assert_exact, make
from topk_cases import op as topk_op

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops import score_tokens, share_tokens
from attnplug.ops.gvr import best_tokens as op
from attnplug.ops.gvr.page_codes import PageCodes, empty_page_codes
from attnplug.ops.gvr.score_tokens import quantize_keys

# The kernels mean to overflow: a range that is infinite is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAMES = (
    "k", "share", "scale", "sink", "window", "lengths", "start", "key_mask", "softcap",
)  # fmt: skip
DEFAULTS = {"k": 20, "share": False, "scale": 0.125, "sink": 3, "window": 5, "softcap": 0.0}
# Small enough for several programs to share a row, and for a list of 64 to overflow.
FEW = SMALL | {"verify_warps": 4, "collect_warps": 4}
PLANS = {
    "default": None,
    "programs": topk_op.Plan(False, **FEW),
    "tiles": topk_op.Plan(False, **FEW | {"verifiers": 5, "verify_tile": 16, "collect_tile": 32}),
    "one": topk_op.Plan(False, **FEW | {"verifiers": 1, "bins": 64, "capacity": 256}),
}


def best(device_path, q, codes, steps, plan=None, table=None, **options):
    """(picks `[B * Hkv, k]`, scores, stats) on the CPU."""
    device, path = device_path
    args = [(DEFAULTS | options).get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    there = [x.to(device) for x in (q, codes, steps)]
    table = None if table is None else table.to(device)
    if path == "reference" or (device == "cuda" and plan is None):
        named = dict(zip(NAMES, args, strict=True))
        group = "share" if named.pop("share") else "max"
        found = op.best_tokens(*there, group=group, table=table, stats=True, **named)
    else:
        found = op._allocate(*there, *args, table=table)
        op.launch_best_tokens(*there, *args, *found, plan=plan, table=table)
    picks, scores, how = (x.cpu() for x in found)
    return picks.flatten(0, 1), scores, how


def hold(found, k, lengths, heads):
    """The stable sort's set of the row's own scores; `lengths [B]`."""
    picks, scores, how = found
    rows = lengths.repeat_interleave(heads)
    past = torch.arange(scores.shape[1]) >= rows[:, None]
    scores = scores.masked_fill(past, torch.nan)
    values = scores.gather(1, picks.clamp(min=0).long())
    values = torch.where(picks >= 0, values, -torch.inf)
    assert_exact((picks, values, how), scores, k, rows)


@given(data=st.data())
def test_is_the_stable_sort_of_the_scores(device_path, data):
    draw = data.draw
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    group, size = draw(st.sampled_from([1, 3, 17])), draw(st.sampled_from([1, 64, 100, 300]))
    width, seed = draw(st.sampled_from([64, 80, 256])), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes(device_path)))
    options = {"sink": draw(st.sampled_from([0, 3])), "window": draw(st.sampled_from([1, 40]))}
    options["k"] = draw(st.sampled_from([1, 5, 31, 64]))
    lengths = torch.full((batch,), size)
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        given_ = torch.tensor(draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows)))
        options["lengths"], lengths = given_, given_.expand(batch)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    q = random(seed, batch, 1, heads * group, width, dtype=dtype).transpose(1, 2)
    codes, steps = quantize_keys(random(seed + 2, batch, size, heads, width).transpose(1, 2))
    kept = {name: value for name, value in options.items() if name != "k"}
    share = draw(st.booleans())
    if share:
        capped = {"scale": 0.2, "softcap": draw(st.sampled_from([0.0, 2.5]))}
        options |= capped
        want = share_tokens(q, codes, steps, **capped, **kept)
    else:
        want = score_tokens(q, codes, steps, **kept)
    plan = PLANS[draw(st.sampled_from(list(PLANS)))] if device_path[1] == "kernel" else None
    found = best(device_path, q, codes, steps, plan, share=share, **options)
    hold(found, options["k"], lengths, heads)
    inside = torch.arange(size) < lengths.repeat_interleave(heads)[:, None]
    finite = want.isfinite() & inside
    assert torch.equal(found[1].isinf() & inside, want.isinf() & inside)
    assert torch.allclose(found[1][finite], want[finite], rtol=1e-5, atol=2e-4)


def keys_of(rows):
    """(q, codes, steps) of one head whose scores are `rows [R, N]`, a row each; NaN is +inf."""
    keys = torch.zeros(len(rows), 1, rows.shape[1], 64)
    keys[:, 0, :, 0] = rows
    q = torch.zeros(len(rows), 1, 1, 64)
    q[..., 0] = 1
    return q, *quantize_keys(keys)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_plan(device_path, kind, plan):
    """Constant rows, ties, infinities, scores over many orders of magnitude: two rows of
    different lengths."""
    rows = make(kind, 301, 33, torch.Generator().manual_seed(3), rows=2)
    plan = PLANS[plan] if device_path[1] == "kernel" else None
    lengths = torch.tensor([301, 211])
    found = best(device_path, *keys_of(rows), plan, k=33, sink=0, window=1, lengths=lengths)
    hold(found, 33, lengths, 1)


def path_of(found):
    return [topk_op.PATHS[path] for path in found[2][:, 0].tolist()]


@pytest.mark.parametrize("plan", ["programs", "tiles"])
def test_paths(device_path, plan):
    """Each of four rows goes its own way, all exactly: bins about the guess, equal scores, a list
    that overflows, and a row that is short."""
    generator = torch.Generator().manual_seed(6)
    k, size = 30, 300
    easy = torch.randn(2, size, generator=generator)
    # Far more than the list holds share one bin, and differ.
    hard = make("wide", size, k, generator)
    rows = torch.cat([easy[:1], torch.ones(1, size), hard, easy[1:]])
    lengths = torch.tensor([size, size, size, k])
    plan = PLANS[plan] if device_path[1] == "kernel" else None
    found = best(device_path, *keys_of(rows), plan, k=k, sink=0, window=1, lengths=lengths)
    hold(found, k, lengths, 1)
    if device_path == ("cpu", "kernel"):
        assert path_of(found) == ["gvr", "gvr", "radix", "all"]
        assert k <= found[2][0, 2] < k + 20  # the bins are narrow, and where the k-th is


def test_a_sample_that_lies(device_path):
    """Only the sampled tokens score high, and they are fewer than k: the bins are above the
    k-th."""
    k, size, sample = 40, 301, SMALL["sample"]
    rows = torch.randn(1, size, generator=torch.Generator().manual_seed(14))
    rows[0, (2 * torch.arange(sample) + 1) * (size - 1) // (2 * sample)] += 50
    plan = PLANS["programs"] if device_path[1] == "kernel" else None
    found = best(device_path, *keys_of(rows), plan, k=k, sink=0, window=1)
    hold(found, k, torch.tensor([size]), 1)
    if device_path == ("cpu", "kernel"):
        assert path_of(found) == ["radix"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("share", [False, True])
def test_a_bad_key_is_picked(device_path, bad, share):
    keys = random(0, 1, 2, 290, 64)
    keys[0, 1, 40, 7] = bad
    plan = PLANS["programs"] if device_path[1] == "kernel" else None
    q = random(1, 1, 6, 1, 64)
    found = best(device_path, q, *quantize_keys(keys), plan, share=share)
    hold(found, 20, torch.tensor([290]), 2)
    assert (found[0][1] == 40).any() and not (found[0][0] == 40).any()


@pytest.mark.parametrize("plan", ["default", "programs"])
def test_a_table_of_pages(device_path, plan):
    """Rows of different lengths, one of none; NaN in pages of nobody."""
    pages = make_pages(3, [0, 7, 96, 300, 150], page=32)
    own = quantize_keys(pages.rows[0].nan_to_num())
    state = empty_page_codes(pages.kv[0])
    state = PageCodes(state.codes.fill_(111), state.scales.fill_(torch.nan))
    for b, length in enumerate(pages.lengths.tolist()):
        n = torch.arange(length)
        at, place = pages.table[b].long()[n // 32], n % 32
        state.codes[at, :, place] = own[0][b, :, :length].transpose(0, 1)
        state.scales[at, :, place] = own[1][b, :, :length].transpose(0, 1)
    q = random(1, 5, 6, 1, 64)
    plan = PLANS[plan] if device_path[1] == "kernel" else None
    for share in (False, True):
        options = {"table": pages.table, "lengths": pages.lengths, "share": share}
        found = best(device_path, q, *state, plan, **options)
        hold(found, 20, pages.lengths, 2)
        kept = {"sink": 3, "window": 5, "lengths": pages.lengths}
        want = score_tokens(q, *own, **kept)
        if share:
            want = share_tokens(q, *own, scale=0.125, **kept)
        inside = torch.arange(want.shape[1]) < pages.lengths.repeat_interleave(2)[:, None]
        inside &= want.isfinite()
        close = found[1][:, : want.shape[1]][inside], want[inside]
        assert torch.allclose(*close, rtol=1e-5, atol=2e-4)


def test_a_long_row_by_its_own_plan(device_path):
    """More tokens than one program of topk takes: the plan that a GPU would have."""
    size, k = 9000, 50
    q, keys = random(0, 1, 2, 1, 64), random(1, 1, 1, size, 64)
    found = best(device_path, q, *quantize_keys(keys), k=k)
    hold(found, k, torch.tensor([size]), 1)
    if device_path[1] == "kernel":
        assert path_of(found) == ["gvr"] and found[2][0, 2] < 8 * k
    assert torch.allclose(
        found[1], score_tokens(q, *quantize_keys(keys), sink=3, window=5), atol=2e-4
    )


def test_opcheck(device):
    codes, steps = (x.to(device) for x in quantize_keys(random(0, 2, 2, 90, 64)))
    q, rows = random(1, 2, 4, 1, 64).to(device), torch.tensor([90, 90], device=device)
    mask = torch.ones(2, 90, dtype=torch.bool, device=device)
    for extra in [(None, None, None, 0.0), (rows, rows - 60, mask, 3.0)]:
        for share in (False, True):
            args = q, codes, steps, 9, share, 0.125, 3, 5, *extra
            torch.library.opcheck(op._best_tokens, args)
    pages = make_pages(0, [96, 96], page=32).to(device)  # past a length a score is unspecified
    state = empty_page_codes(pages.kv[0])
    paged = (q, *state, pages.table, 9, True, 0.125, 3, 5, pages.lengths, None, None, 0.0)
    torch.library.opcheck(op._best_tokens_paged, paged)


CODES = torch.zeros(1, 2, 40, 64, dtype=torch.int8)
WRONG = [
    ({"codes": CODES.float()}, "codes is torch.float32"),
    ({"k": 0}, "k is 0, needs 1 to 4096"),
    ({"k": 5000}, "k is 5000, needs 1 to 4096"),
    ({"group": "mean"}, "group is 'mean', needs 'max' or 'share'"),
    ({"window": 0}, "window is 0"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "codes": CODES, "steps": torch.zeros(1, 2, 40)}
    with pytest.raises(ArgumentError, match="^best_tokens: .*" + message):
        op.best_tokens(**(inputs | {"k": 5} | change))


def test_refuses_gradients():
    q = torch.zeros(1, 4, 1, 64, requires_grad=True)
    with pytest.raises(GradientError, match="best_tokens"):
        op.best_tokens(q, CODES, torch.zeros(1, 2, 40), 5)
