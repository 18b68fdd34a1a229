"""share_tokens against fp64 torch, by the numba reference and the Triton kernels."""

import numba
import pytest
import torch
from gvr_cases import dtypes, random
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import make

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops.gvr import score_tokens as scoring
from attnplug.ops.gvr import share_tokens as op
from attnplug.ops.gvr.page_codes import PageCodes, empty_page_codes
from attnplug.ops.gvr.score_tokens import quantize_keys

NAMES = ("scale", "sink", "window", "lengths", "start", "key_mask", "softcap")
DEFAULTS = {"scale": 0.125, "sink": 3, "window": 5, "softcap": 0.0}


def share(device_path, q, codes, steps, plan=None, table=None, **options):
    device, path = device_path
    options = DEFAULTS | options
    args = [options.get(name) for name in NAMES]
    args = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    there = [x.to(device) for x in (q, codes, steps)]
    table = None if table is None else table.to(device)
    if path == "reference" or (device == "cuda" and plan is None):
        return op.share_tokens(*there, table=table, **dict(zip(NAMES, args, strict=True))).cpu()
    shares = op._allocate(*there, *args, table=table)
    op.launch_share_tokens(*there, *args, shares, plan=plan, table=table)
    return shares.cpu()


def oracle(q, codes, steps, lengths=None, start=None, key_mask=None, **options):
    """fp64: log-sum-exps over masked logits."""
    o = DEFAULTS | options
    batch, heads, size, _ = codes.shape
    lengths = torch.tensor([size]) if lengths is None else lengths
    start = torch.tensor([0]) if start is None else start
    keys = codes.double() * steps.double()[..., None]
    s = torch.einsum("bhgd,bhnd->bhgn", q.double()[:, :, 0].unflatten(1, (heads, -1)), keys)
    s = s * o["scale"]
    if o["softcap"]:
        s = o["softcap"] * torch.tanh(s / o["softcap"])
    at = torch.arange(size)
    live = ((at >= start[:, None]) & (at < lengths[:, None])).expand(batch, size)
    live = live if key_mask is None else live & key_mask
    far = live & (at >= start[:, None] + o["sink"]) & (at < lengths[:, None] - o["window"])
    near = (live & ~far)[:, None, None]
    norm = s.masked_fill(~near, -torch.inf).logsumexp(-1, keepdim=True)
    norm = norm.where(near.any(-1, keepdim=True), 0.0)
    shares = (s - norm).logsumexp(2) / torch.tensor(2.0).log()
    return shares.masked_fill(~far[:, None], -torch.inf).flatten(0, 1)


def hold(found, want):
    assert found.dtype == torch.float32 and found.shape == want.shape
    assert torch.equal(found == -torch.inf, want == -torch.inf)
    seen = want != -torch.inf
    assert ((found.double() - want)[seen].abs() <= 1e-4 + 1e-5 * want[seen].abs()).all()


@given(data=st.data())
def test_matches_fp64(device_path, data):
    draw = data.draw
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    group, size = draw(st.sampled_from([1, 3, 7, 17])), draw(st.integers(1, 300))
    width, seed = draw(st.sampled_from([64, 80, 256])), draw(st.integers(0, 999))
    dtype = draw(st.sampled_from(dtypes(device_path)))
    options = {"sink": draw(st.sampled_from([0, 3])), "window": draw(st.sampled_from([1, 40, 150]))}
    options["softcap"] = draw(st.sampled_from([0.0, 2.5]))
    options["scale"] = draw(st.sampled_from([0.05, 0.5]))
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        lengths = draw(st.lists(st.integers(0, size), min_size=rows, max_size=rows))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > -0.5
    q = random(seed, batch, 1, heads * group, width, dtype=dtype).transpose(1, 2)
    codes, steps = quantize_keys(random(seed + 2, batch, size, heads, width).transpose(1, 2))
    plan = None
    if device_path[1] == "kernel" and draw(st.booleans()):
        programs = draw(st.sampled_from([1, 3]))
        tile = draw(st.sampled_from([16, 64]))
        plan = scoring.Plan(tile=tile, programs=programs, warps=4, stages=1)
    hold(share(device_path, q, codes, steps, plan, **options), oracle(q, codes, steps, **options))


def test_a_table_of_pages_equals_the_rows_side_by_side(device_path):
    """Rows of different lengths, one of none; NaN in pages of nobody."""
    pages = make(3, [0, 7, 96, 300, 150], page=32)
    own = quantize_keys(pages.rows[0].nan_to_num())
    state = empty_page_codes(pages.kv[0])
    state = PageCodes(state.codes.fill_(111), state.scales.fill_(torch.nan))
    for b, length in enumerate(pages.lengths.tolist()):
        n = torch.arange(length)
        at, place = pages.table[b].long()[n // 32], n % 32
        state.codes[at, :, place] = own[0][b, :, :length].transpose(0, 1)
        state.scales[at, :, place] = own[1][b, :, :length].transpose(0, 1)
    q = random(1, 5, 6, 1, 64)
    found = share(device_path, q, *state, table=pages.table, lengths=pages.lengths)
    want = oracle(q, *own, lengths=pages.lengths)
    past = torch.arange(want.shape[1]) >= pages.lengths.repeat_interleave(2)[:, None]
    hold(found[:, : want.shape[1]].masked_fill(past, -torch.inf), want)


def test_a_head_with_short_queries_counts_as_much(device_path):
    """The best token of a group's shorter head is among the best by share, and not by maximum."""
    q = random(0, 1, 2, 1, 64)
    keys = random(1, 1, 1, 400, 64)
    keys[0, 0, 200] = 20 * q[0, 1, 0] / q[0, 1, 0].norm()
    q[0, 0] *= 20
    codes, steps = quantize_keys(keys)
    by_share = share(device_path, q, codes, steps)[0]
    by_maximum = scoring.score_tokens(q, codes, steps, sink=3, window=5)[0]
    assert (by_share > by_share[200]).sum() < 20 < (by_maximum > by_maximum[200]).sum()


def test_a_masked_window_normalizes_nothing(device_path):
    """N is 0 where a head sees neither sink nor window."""
    q, mask = random(1, 1, 2, 1, 64), torch.ones(1, 90, dtype=torch.bool)
    mask[:, :3] = mask[:, 85:] = False
    codes, steps = quantize_keys(random(0, 1, 1, 90, 64))
    found = share(device_path, q, codes, steps, key_mask=mask)
    logits = (q[0, :, 0] @ (codes[0, 0] * steps[0, 0, :, None]).T) * 0.125
    want = logits.double().logsumexp(0)[3:85] / torch.tensor(2.0).log()
    assert torch.allclose(found[0, 3:85].double(), want, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_scores_highest(device_path, bad):
    keys = random(0, 1, 2, 90, 64)
    keys[0, 1, 40, 7] = bad
    found = share(device_path, random(1, 1, 6, 1, 64), *quantize_keys(keys))
    assert found[1, 40] == torch.inf and found.isfinite().sum() == 2 * 82 - 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", ["query", "window"])
def test_a_bad_query_or_window_scores_all_highest(device_path, where):
    """Attention reads the window in any case, so that the NaN surfaces there."""
    q, keys = random(1, 1, 6, 1, 64), random(0, 1, 2, 90, 64)
    if where == "query":
        q[0, 4, 0, 0] = torch.nan
    else:
        keys[0, 1, 88, 5] = torch.nan
    found = share(device_path, q, *quantize_keys(keys))
    assert found[0].isfinite().sum() == 82 and (found[1] == torch.inf).sum() == 82


def test_what_lies_behind_the_length_is_not_read(device_path):
    codes, steps = quantize_keys(random(0, 2, 2, 900, 64))
    steps[:, :, 200:] = torch.nan
    q, lengths = random(1, 2, 4, 1, 64), torch.tensor([200])
    found = share(device_path, q, codes, steps, lengths=lengths)
    assert not found.isnan().any() and (found[:, 195:] == -torch.inf).all()
    assert found[:, 3:195].isfinite().all()


def test_the_reference_is_deterministic():
    """The number of threads changes no bit."""
    q = random(0, 2, 6, 1, 128)
    codes, steps = quantize_keys(random(1, 2, 2, 1500, 128))
    threads = numba.get_num_threads()
    found = op.share_tokens(q, codes, steps, scale=0.1)
    numba.set_num_threads(1)
    try:
        alone = op.share_tokens(q, codes, steps, scale=0.1)
    finally:
        numba.set_num_threads(threads)
    assert torch.equal(found, alone)


def test_opcheck(device):
    codes, steps = (x.to(device) for x in quantize_keys(random(0, 2, 2, 90, 64)))
    q, rows = random(1, 2, 4, 1, 64).to(device), torch.tensor([60, 90], device=device)
    mask = torch.ones(2, 90, dtype=torch.bool, device=device)
    for extra in [(None, None, None, 0.0), (rows, rows - 60, mask, 3.0)]:
        torch.library.opcheck(op._share_tokens, (q, codes, steps, 0.125, 3, 5, *extra))
    pages = make(0, [96, 96], page=32).to(device)  # past a length a share is unspecified
    state = empty_page_codes(pages.kv[0])
    paged = (q, *state, pages.table, 0.125, 3, 5, pages.lengths, None, None, 0.0)
    torch.library.opcheck(op._share_tokens_paged, paged)


CODES = torch.zeros(1, 2, 40, 64, dtype=torch.int8)
WRONG = [
    ({"codes": CODES.float()}, "codes is torch.float32"),
    ({"steps": torch.zeros(1, 2, 39)}, r"steps is torch.float32 \(1, 2, 39\), needs"),
    ({"q": torch.zeros(1, 4, 2, 64)}, r"q is \(1, 4, 2, 64\), needs \[B,Hq,1,D\]"),
    ({"window": 0}, "window is 0"),
    ({"sink": -1}, "sink is -1"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"lengths": torch.tensor([1.0])}, "lengths is torch.float32"),
    ({"table": torch.zeros(1, 2)}, r"table is torch.float32"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    inputs = {"q": torch.zeros(1, 4, 1, 64), "codes": CODES, "steps": torch.zeros(1, 2, 40)}
    with pytest.raises(ArgumentError, match="^share_tokens: .*" + message):
        op.share_tokens(**(inputs | {"scale": 1.0} | change))


def test_refuses_gradients():
    q = torch.zeros(1, 4, 1, 64, requires_grad=True)
    with pytest.raises(GradientError, match="share_tokens"):
        op.share_tokens(q, CODES, torch.zeros(1, 2, 40), scale=1.0)
