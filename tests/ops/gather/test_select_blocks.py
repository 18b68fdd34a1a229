"""select_blocks against an fp64 oracle that reads the keys themselves, on the numba reference and
on the Triton kernels."""

import itertools

import pytest
import torch
from cases import WIDTHS, dtypes, random
from gather_cases import empty
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from select_cases import DEFAULTS, NAMES, codes, hold, said, select

from attnplug.errors import ArgumentError
from attnplug.ops.gather import select_blocks as op

SCORINGS = st.sampled_from(["bounds", "band"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_selects_the_oracles_set(device_path, data):
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, queries = kv_heads * draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1, 1, 3]))
    size, width = draw(st.integers(queries, 400)), draw(st.sampled_from(WIDTHS))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    options = {
        "block": draw(st.sampled_from([16, 16, 32])),
        "top_k": draw(st.sampled_from([0, 1, 3, 8])),
        "sink": draw(st.integers(0, 2)),
        "local": draw(st.integers(1, 3)),
        "scoring": draw(SCORINGS),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(queries, size), min_size=batch, max_size=batch))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > draw(st.sampled_from([-0.5, 1.8]))
    q = random(seed, batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    k = random(seed + 2, batch, size, kv_heads, width)
    k *= random(seed + 3, batch, size // 16 + 1, 1, 1).exp().repeat_interleave(16, 1)[:, :size]
    k = k.to(dtype).transpose(1, 2)  # blocks of different spread
    if options["top_k"] and draw(st.booleans()):
        k = (k.float() + 20 * random(seed + 4, 1, kv_heads, 1, width)).to(dtype)
        state = codes(k, options["block"], options["scoring"])
        index = select(device_path, q, k, state, **options)
        options["words"] = said(state[0], -(-size // options["block"]))
        hold(index, q, k, **options)
    else:
        hold(select(device_path, q, k, **options), q, k, **options)


@pytest.mark.parametrize("scoring", ["bounds", "band"])
def test_two_levels_of_selection(device_path, scoring):
    """530 blocks: the score kernel hands on group maxima."""
    q, k = random(0, 1, 7, 1, 64), random(1, 1, 1, 530 * 16, 64)
    options = {"top_k": 5, "scoring": scoring, "lengths": torch.tensor([530 * 16 - 3])}
    hold(select(device_path, q, k, **options), q, k, **options)


def test_many_blocks_at_once(device_path):
    """300 blocks and no groups: the keys are sorted in an order of their own."""
    q, k = random(0, 1, 7, 1, 64), random(1, 1, 1, 300 * 16, 64)
    options = {"top_k": 5, "lengths": torch.tensor([300 * 16 - 3])}
    hold(select(device_path, q, k, **options), q, k, **options)


MERGES = [(0, False), (1, True), (4, False), (16, False), (16, True)]
CHOICES = [(1, False, "bounds"), (6, True, "bounds"), (6, True, "band"), (32, False, "bounds")]


# Every merge with two of the choices, every choice with two or three merges.
PAIRS = [(m, c) for i, m in enumerate(MERGES) for j, c in enumerate(CHOICES) if (i + j) % 2 == 0]


@pytest.mark.parametrize(("merge", "choice"), PAIRS)
def test_any_plan_selects_the_same(device_path, merge, choice):
    (members, spaced), (top_k, int8, scoring) = merge, choice
    repeat = 3 if members in (1, 16) else 1
    plan = op.Plan(16, members, 4, 1, soon=members == 4, repeat=repeat, spaced=spaced)
    if device_path[1] == "reference":
        plan = None
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 50 * 16, 64)
    state = codes(k, 16, scoring) if int8 else empty(k, 16)
    options = {"top_k": top_k, "scoring": scoring}
    for _ in range(1 + int8):  # with fresh summaries, and with kept ones
        index = select(device_path, q, k, state, plan=plan, **options)
        hold(index, q, k, words=said(state[0], 50) if int8 else None, **options)


@pytest.mark.parametrize("scoring", ["bounds", "band"])
def test_ties_go_to_the_lower_block(device_path, scoring):
    q, k = random(0, 1, 2, 1, 64), random(1, 1, 1, 16, 64).repeat(1, 1, 20, 1)
    index = select(device_path, q, k, top_k=4, scoring=scoring)
    assert index.flatten().tolist() == [1, 2, 3, 4]


def test_a_needle_is_found(device_path):
    """A key like the query scores highest under every scoring; its rivals are noise."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    q = q[:, :1].expand(1, 4, 1, 64).contiguous()
    k[0, :, 101] = 6 * q[0, 0, 0]
    for scoring in ("bounds", "band"):
        assert (select(device_path, q, k, top_k=1, scoring=scoring) == 101 // 16).all()


def test_left_padding_does_not_change_a_row(device_path):
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 330, 64)
    start = torch.tensor([0, 37])
    mask = torch.arange(330) >= start[:, None]
    for scoring in ("bounds", "band"):
        options = {"top_k": 4, "scoring": scoring}
        both = select(device_path, q, k, start=start, key_mask=mask, **options)
        assert torch.equal(both[1:], select(device_path, q[1:], k[1:, :, 37:], **options))


def test_growth_refreshes_what_is_missing_and_nothing_else(device_path):
    """Step by step over block edges, with summaries carried along, equals starting anew."""
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 200, 64)
    state = empty(k, 16)
    for length in [90, 96, 97, 98, 112, 113, 118, 140, 200]:
        options = {"lengths": torch.tensor([length]), "top_k": 3, "start": torch.tensor([0, 21])}
        done = state[1][:, 0].tolist()
        index = select(device_path, q, k, state, **options)
        assert torch.equal(index, select(device_path, q, k, **options))
        for b, start in enumerate((0, 21)):
            until = max(done[b], (length - 1 - start) // 16 - 1)
            assert state[1][b].tolist() == [until, start]
            keys = k[b, :, start : start + until * 16].unflatten(1, (until, 16))
            assert torch.equal(state[0][b, :, :until, 0], keys.amax(2))
            assert state[0][b, :, until:].isnan().all()


def test_a_crop_is_followed_when_the_count_is_lowered(device_path):
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 200, 64)
    state = empty(k, 16)
    select(device_path, q, k, state)
    k[:, :, 70:] = random(2, 1, 2, 130, 64)
    state[1][:, 0] = 70 // 16
    assert torch.equal(select(device_path, q, k, state), select(device_path, q, k))


@pytest.mark.parametrize("scoring", ["bounds", "band"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_is_selected_first(device_path, scoring, bad):
    """So that it surfaces as in dense: all dimensions are hit here."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    k[0, 1, 7 * 16 + 3] = bad
    index = select(device_path, q, k, top_k=2, scoring=scoring)
    assert index[0, 1, 0, 0] == 7
    assert torch.equal(
        index[0, 0], select(device_path, q, k[:, :1].expand(1, 2, 300, 64))[0, 0]
    ) or (scoring != "bounds")


def test_hidden_keys_enter_nothing(device_path):
    """A huge key that the mask hides does not make its block attractive."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[0, 101] = mask[0, 150] = False
    mask[0, 160:176] = False
    poisoned = k.clone()
    poisoned[0, :, 101], poisoned[0, :, 150] = 1e4, torch.nan
    for scoring in ("bounds", "band"):
        options = {"top_k": 16, "scoring": scoring, "key_mask": mask}
        index = select(device_path, q, poisoned, **options)
        assert not (index == 10).any()  # all of it is hidden
        assert torch.equal(index, select(device_path, q, k, **options))


def test_a_sequence_too_short_has_no_candidates(device_path):
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 300, 64)
    for lengths in ([1, 48], [40, 5]):
        index = select(device_path, q, k, lengths=torch.tensor(lengths))
        assert (index == -1).all()
    assert (select(device_path, q, k, start=torch.tensor([299, 300])) == -1).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own, torch 2.11
def test_compiles_without_a_break_or_a_recompilation(device):
    """And the mutation of the summaries is seen by the next step."""
    torch._dynamo.reset()
    q, k = random(0, 1, 4, 1, 64).to(device), random(1, 1, 2, 400, 64).to(device)
    bounds, progress = (x.to(device) for x in empty(k.cpu(), 16))
    options = {name: DEFAULTS[name] for name in NAMES[:5]}

    @torch.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    def step(q, k, bounds, progress, lengths):
        return op.select_blocks(q * 2, k, bounds, progress, lengths=lengths, **options)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (80, 97, 400):
            lengths = torch.tensor([length], device=device)
            got = step(q, k, bounds, progress, lengths)
            assert torch.equal(
                got.cpu(), select((device, "reference"), q.cpu(), k.cpu(), lengths=lengths.cpu())
            )
            assert progress[0, 0] == (length - 1) // 16 - 1
    assert torch.equal(bounds[:, :, 22, 0], k[:, :, 352:368].amax(2))


WRONG = [
    ({"top_k": -1}, "top_k is -1, needs 0 to 256"),
    ({"top_k": 257}, "top_k is 257"),
    ({"sink": -1}, "sink is -1"),
    ({"local": 0}, "local is 0, needs at least 1"),
    ({"scoring": "max"}, "scoring is 'max', needs bounds, band"),
    (
        {"scoring": "band", "bounds": torch.zeros(1, 2, 8, 2, 64).char()},
        "bounds has 2 parts of torch.int8, scoring 'band' needs 1",
    ),
    ({"block": 64}, "bounds has shape"),
    ({"progress": torch.zeros(1, 2)}, "progress is torch.float32"),
    ({"q": torch.zeros(1, 4, 1, 128)}, "q has head dimension 128"),
]


@pytest.mark.parametrize(
    ("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refuses(change, message):
    k = torch.zeros(1, 2, 40, 64)
    bounds, progress = empty(k, 16)
    inputs = {"q": torch.zeros(1, 4, 1, 64), "k": k, "bounds": bounds, "progress": progress}
    with pytest.raises(ArgumentError, match="^select_blocks: .*" + message):
        op.select_blocks(**(inputs | DEFAULTS | change))


@pytest.mark.gpu
def test_a_million_tokens_times_eight():
    """Offsets past 2^31: near the end of each row and head stands one key, and its block wins."""
    size = 1 << 20
    q = random(0, 8, 28, 1, 128, dtype=torch.bfloat16).cuda()
    k = torch.zeros(8, 4, size, 128, dtype=torch.bfloat16, device="cuda")
    at = size - 1000 - 128 * torch.arange(32, device="cuda").view(8, 4)
    for b, h in itertools.product(range(8), range(4)):
        k[b, h, at[b, h]] = q[b, 7 * h, 0]
    bounds = torch.full((8, 4, size // 128, 2, 128), torch.nan, dtype=k.dtype, device="cuda")
    progress = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
    for scoring in ("bounds", "band", "bounds"):
        options = {"block": 128, "top_k": 8, "scoring": scoring}
        index = op.select_blocks(q, k, bounds, progress, **options)
        assert torch.equal(index[:, :, 0, 0].long(), at // 128)
    assert progress.tolist() == [[size // 128 - 4, 0]] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["bounds", "band"])
def test_thousands_of_rows_are_repeatable(scoring):
    """Keys cross from one kernel to the next, early launched one, and counts are read and written
    by several warps: no row may be torn, with fresh summaries or kept ones."""
    q = random(0, 1300, 8, 1, 64, dtype=torch.float16).cuda()
    k = random(1, 1300, 2, 600, 64, dtype=torch.float16).cuda()
    bounds, progress = (x.cuda() for x in empty(k, 16))
    first = None
    for turn in range(20):
        if turn % 3 == 0:
            progress.zero_()
        options = DEFAULTS | {"top_k": 6, "scoring": scoring}
        index = op.select_blocks(q, k, bounds, progress, **options)
        first = index if first is None else first
        assert torch.equal(first, index)
        assert (progress[:, 0] == 36).all()
    rows = slice(0, 1300, 431)
    hold(index[rows].cpu(), q[rows].cpu(), k[rows].cpu(), top_k=6, scoring=scoring)
