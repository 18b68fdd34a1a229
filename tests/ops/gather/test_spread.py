"""Spread summaries and long lists: against fp64 oracles, on the numba reference and on the Triton
kernels."""

import itertools
import math

import pytest
import select_cases
import torch
from cases import dtypes, random, to_device
from gather_cases import OPTIONS, decoded_spread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnplug.ops import gather_attention
from attnplug.ops.gather import block_bounds as summaries
from attnplug.ops.gather import gather_decode as decode
from attnplug.ops.gather import select_blocks as op
from attnplug.ops.gather.spread import SAMPLE, spread_parts

SCALE = 0.125
DEFAULTS = select_cases.DEFAULTS | {"scoring": "spread"}


def fresh(k, block=16, scoring="spread"):
    return select_cases.fresh(k, block, scoring)


def select(device_path, q, k, state=None, plan=None, **options):
    """`select_cases.select` by spread, unless told otherwise."""
    return select_cases.select(device_path, q, k, state, plan, **(DEFAULTS | options))


def refresh(device_path, k, block, state=None, **options):
    """block_bounds on spread summaries; `state` as in `select`."""
    device, path = device_path
    bounds, progress = state or fresh(k, block)
    args = to_device((k, bounds, progress), device)
    rows = to_device([options.get(name) for name in ("lengths", "start", "key_mask")], device)
    if path == "reference" or device == "cuda":
        names = ("lengths", "start", "key_mask")
        summaries.block_bounds(*args, block=block, **dict(zip(names, rows, strict=True)))
    else:
        summaries.launch_block_bounds(*args, *rows, block)
    bounds.copy_(args[1])
    progress.copy_(args[2])
    return bounds, progress


def candidates(k, t, queries, b, block, sink, local, lengths=None, start=None, key_mask=None, **_):
    """({block: whether the mask lets one of its keys through}, by the definition."""
    length = k.shape[2] if lengths is None else int(lengths.expand(k.shape[0])[b])
    low = 0 if start is None else int(start.expand(k.shape[0])[b])
    found = {}
    for j in range(sink, (length - queries + t - low) // block - local + 1):
        at = torch.arange(low + j * block, low + (j + 1) * block)
        found[j] = key_mask is None or bool(key_mask[b, at].any())
    return found


def oracle(query, words, shown):
    """fp64 scores of the blocks `shown` of a group `query [G, D]`, by the means and variances
    `words [blocks, 2, D]`."""
    blocks = list(shown)
    if not any(shown.values()):
        return {}
    mean, variance = words[blocks].unbind(1)
    each = SCALE * (query @ mean.T + 3 * (query**2 @ variance.T).sqrt())
    sample = range(0, min(len(blocks), SAMPLE * max(len(blocks) // SAMPLE, 1)))
    sample = list(sample)[:: max(len(blocks) // SAMPLE, 1)]
    sample = [i for i in sample if shown[blocks[i]]]
    norm = each[:, sample].logsumexp(1) if sample else torch.zeros(len(query)).double()
    score = (each - norm[:, None]).logsumexp(0)
    return {j: float(score[i]) for i, j in enumerate(blocks) if shown[j]}


def hold(index, value, top_k, room):
    """A list is as long as it can be, offers candidates only and leaves out nothing that scores
    clearly higher; a short one is best first, a long one ascends."""
    picked = [j for j in index.tolist() if j != -1]
    assert index[len(picked) :].eq(-1).all()
    assert len(picked) == len(set(picked)) == min(top_k, len(value))
    assert set(picked) <= set(value)
    left = [value[j] for j in value if j not in picked]
    if left and picked:
        assert max(left) <= min(value[j] for j in picked) + room
    for a, c in itertools.pairwise(picked):
        assert (a < c) if top_k > 32 else (value[a] >= value[c] - room)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_codes_are_means_and_variances_to_half_a_step(device_path, data):
    draw = data.draw
    batch, heads, block = draw(st.integers(1, 2)), draw(st.integers(1, 2)), 16
    size, width = draw(st.integers(1, 120)), draw(st.sampled_from([64, 80, 128]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    k = 3 * random(seed, batch, heads, size, width) + 9 * random(seed + 1, 1, heads, 1, width)
    k = k.to(dtype)
    options = {
        "start": torch.tensor(draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch)))
    }
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 2, batch, size) > draw(st.sampled_from([-0.5, 1.8]))
    bounds, progress = refresh(device_path, k, block, **options)
    words, worth = decoded_spread(bounds, -(-size // block))
    for b, start in enumerate(options["start"].tolist()):
        done = max(size - start, 0) // block
        assert progress[b].tolist() == [done, min(start, size)]
        for j in range(done):
            at = torch.arange(start + j * block, start + (j + 1) * block)
            at = at[options["key_mask"][b, at]] if "key_mask" in options else at
            keys = k[b][:, at].double()
            mean = keys.mean(1) if len(at) else torch.zeros(heads, width).double()
            variance = keys.var(1, correction=0) if len(at) else torch.zeros(heads, width).double()
            wanted = torch.stack([mean, variance], 1)
            error = (words[b, :, j] - wanted).abs()
            assert (error <= worth[b, :, j] * 0.501 + 1e-6 * wanted.abs()).all()
            step = (
                wanted.abs().unflatten(-1, (-1, 16)).amax(-1) / 127
            )  # no scale is needlessly wide
            assert (worth[b, :, j, :, ::32].amax(-1) <= 1.01 * step.amax(-1) + 1e-29).all()


def test_a_block_shares_nothing_with_others(device_path):
    """A page may be part of several sequences: the same keys give the same bytes anywhere."""
    k = random(0, 2, 1, 160, 64)
    k[1, 0, 96:112] = k[0, 0, 16:32]
    bounds, _ = refresh(device_path, k, 16)
    codes, scales = spread_parts(bounds, 10)
    assert torch.equal(codes[0, 0, 1], codes[1, 0, 6])
    assert torch.equal(scales[0, 0, :, :, 1], scales[1, 0, :, :, 6])
    assert not torch.equal(codes[0, 0, 1], codes[1, 0, 5])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # device_path is a constant
@given(data=st.data())
def test_selects_the_oracles_set(device_path, data):
    draw = data.draw
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, queries = kv_heads * draw(st.sampled_from([1, 3, 7])), draw(st.sampled_from([1, 1, 2]))
    size, width = draw(st.integers(queries, 800)), draw(st.sampled_from([64, 80, 128]))
    dtype, seed = draw(st.sampled_from(dtypes(device_path))), draw(st.integers(0, 999))
    top_k = draw(st.sampled_from([0, 1, 8, 33, 40]))
    options = {"top_k": top_k, "sink": draw(st.integers(0, 2)), "local": draw(st.integers(1, 3))}
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(queries, size), min_size=batch, max_size=batch))
        options["lengths"] = torch.tensor(lengths)
    if draw(st.booleans()):
        starts = draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
        options["start"] = torch.tensor(starts, dtype=torch.int32)
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 1, batch, size) > draw(st.sampled_from([-0.5, 1.8]))
    q = random(seed, batch, queries, heads, width, dtype=dtype).transpose(1, 2)
    q = q * torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0, 3.0, 1.0])[torch.arange(heads) % 7][
        :, None, None
    ].to(dtype)
    k = random(seed + 2, batch, size, kv_heads, width)
    k *= random(seed + 3, batch, size // 16 + 1, 1, 1).exp().repeat_interleave(16, 1)[:, :size]
    k = k.to(dtype).transpose(1, 2)
    state = fresh(k)
    index = select(device_path, q, k, state, **options)
    words = decoded_spread(state[0], -(-size // 16))[0]
    options = DEFAULTS | options
    for b, h, t in itertools.product(*map(range, index.shape[:3])):
        shown = candidates(k, t, queries, b, **options)
        group = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads)
        value = oracle(q[b, group, t].double(), words[b, h], shown)
        most = max([1.0, *map(abs, value.values())])
        hold(index[b, h, t], value, top_k, 2e-3 * most)  # 15 bits of a query


@pytest.mark.parametrize("scoring", ["bounds", "spread"])
@pytest.mark.parametrize("members", [0, 1, 4, 16])
def test_any_plan_lists_the_same(device_path, scoring, members):
    """With one level of selection and with two, and more blocks than a list takes."""
    device, path = device_path
    plan = None if path == "reference" else op.Plan(16, members, 4, 4, repeat=3, stages=1)
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 60 * 16, 64)
    k *= random(2, 1, 1, 60, 1).exp().repeat_interleave(16, 2)
    state = fresh(k, scoring=scoring)
    wanted = select((device, "reference"), q, k, top_k=35, scoring=scoring)
    for _ in range(2):  # with fresh summaries, and with kept ones
        index = select(device_path, q, k, state, plan=plan, top_k=35, scoring=scoring)
        assert torch.equal(index, wanted)
    assert (index[..., 1:] > index[..., :-1]).all() and index.min() >= 1


@pytest.mark.parametrize("top_k", [33, 48, 64])
def test_ties_of_a_long_list_go_to_the_lower_block(device_path, top_k):
    """All equal; and all equal but the last candidate, which is better."""
    q, k = random(0, 1, 2, 1, 64), random(1, 1, 1, 16, 64).repeat(1, 1, 70, 1)
    plans = [None, op.Plan(16, 4, 4, 4)] if device_path[1] != "reference" else [None]
    for plan in plans:
        index = select(device_path, q, k, top_k=top_k, plan=plan, scoring="bounds")
        assert index.flatten().tolist() == list(range(1, top_k + 1))
    k[:, :, 67 * 16 : 68 * 16] *= 3
    for plan in plans:
        index = select(device_path, q, k, top_k=top_k, plan=plan, scoring="bounds")
        assert index.flatten().tolist() == [*range(1, top_k), 67]


def test_a_long_list_of_a_short_sequence(device_path):
    """Fewer candidates than the list has room for: all of them, then -1."""
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 300, 64)
    index = select(device_path, q, k, top_k=40, lengths=torch.tensor([300, 40]))
    assert index[0].eq(torch.tensor([*range(1, 17), *[-1] * 24])).all()
    assert (index[1] == -1).all()


def test_each_head_counts_by_its_share(device_path):
    """A head with short queries, whose one block is all that it looks for, is heard beside one with
    long queries that looks everywhere: the largest raw score would not name its block."""
    q = torch.zeros(1, 2, 1, 64)
    q[0, 0, 0, 0], q[0, 1, 0, 1] = 400.0, 40.0
    k = 0.01 * random(1, 1, 1, 40 * 16, 64)
    k[..., 0] = 1 + 0.002 * random(2, 1, 1, 40, 1).repeat_interleave(16, 2)[..., 0]
    k[0, 0, 20 * 16 : 21 * 16, 1] = 3.0
    k[0, 0, 20 * 16 : 21 * 16, 0] = 0.9
    assert select(device_path, q, k, top_k=1).item() == 20
    assert select(device_path, q, k, top_k=1, scoring="bounds").item() != 20


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_key_is_selected_first(device_path, bad):
    """So that it surfaces as in dense; the other head's list is as without it."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    k[0, 1, 7 * 16 + 3, 9] = bad
    index = select(device_path, q, k, top_k=2)
    assert index[0, 1, 0, 0] == 7
    other = k[:, :1].expand(1, 2, 300, 64)
    assert torch.equal(index[0, 0], select(device_path, q, other, top_k=2)[0, 0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bad_query_still_gets_a_list(device_path):
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    q[0, 1, 0, 5] = torch.nan
    index = select(device_path, q, k, top_k=3)
    assert index[0, 0, 0].tolist() == [1, 2, 3]  # all are infinite
    assert torch.equal(index[0, 1], select(device_path, q[:, 2:], k[:, 1:], top_k=3)[0, 0])


def test_hidden_keys_enter_nothing(device_path):
    """A huge key that the mask hides does not make its block attractive, nor a NaN."""
    q, k = random(0, 1, 4, 1, 64), random(1, 1, 2, 300, 64)
    mask = torch.ones(1, 300, dtype=torch.bool)
    mask[0, 101] = mask[0, 150] = False
    mask[0, 160:176] = False
    poisoned = k.clone()
    poisoned[0, :, 101], poisoned[0, :, 150] = 1e4, torch.nan
    for top_k in (14, 40):
        index = select(device_path, q, poisoned, top_k=top_k, key_mask=mask)
        assert not (index == 10).any()  # all of it is hidden
        assert torch.equal(index, select(device_path, q, k, top_k=top_k, key_mask=mask))


def test_left_padding_does_not_change_a_row(device_path):
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 330, 64)
    start = torch.tensor([0, 37])
    mask = torch.arange(330) >= start[:, None]
    both = select(device_path, q, k, top_k=4, start=start, key_mask=mask)
    assert torch.equal(both[1:], select(device_path, q[1:], k[1:, :, 37:], top_k=4))


def test_growth_and_a_crop_equal_starting_anew(device_path):
    """The sample moves as the sequence grows, and its summaries may be missing."""
    q, k = random(0, 2, 4, 1, 64), random(1, 2, 2, 700, 64)
    state = fresh(k)
    start = torch.tensor([0, 21])
    for length in [90, 96, 98, 300, 700]:
        options = {"lengths": torch.tensor([length]), "top_k": 3, "start": start}
        index = select(device_path, q, k, state, **options)
        anew = fresh(k)
        assert torch.equal(index, select(device_path, q, k, anew, **options))
        assert torch.equal(state[1], anew[1])
        for b, blocks in enumerate(state[1][:, 0].tolist()):
            for one, other in zip(*(spread_parts(x[0], 44) for x in (state, anew)), strict=True):
                of_block = (b, slice(None), slice(0, blocks)) if one.dtype == torch.int8 else (
                    b, ..., slice(0, blocks))  # fmt: skip
                assert torch.equal(one[of_block], other[of_block])
    k[:, :, 170:] = random(2, 2, 2, 530, 64)
    state[1][:, 0] = (170 - start) // 16
    options = {"top_k": 3, "start": start}
    assert torch.equal(
        select(device_path, q, k, state, **options), select(device_path, q, k, **options)
    )


def test_a_step_is_its_ops(device_path):
    """gather_decode appends, lists by spread and attends, in one chain, for a list that ascends."""
    device, path = device_path
    q, kv, new = random(0, 2, 4, 1, 64), random(1, 2, 2, 2, 640, 64), random(2, 2, 2, 2, 1, 64)
    kv[0] *= random(3, 2, 1, 40, 1).exp().repeat_interleave(16, 2)
    lengths, start = torch.tensor([639, 590]), torch.tensor([0, 13])
    options = {"scale": SCALE, "block": 16, "top_k": 33, "sink": 1, "local": 2}
    options |= {"scoring": "spread", "start": start}
    args = (q, *kv.clone(), *new, *fresh(kv[0]), lengths.clone())
    args, moved = (
        to_device(args, device),
        dict(zip(options, to_device([*options.values()], device), strict=True)),
    )
    if path == "reference" or device == "cuda":
        out, lse = decode.gather_decode(*args, **moved)
    else:
        call = (*args, *(moved.get(name, 0.0 if name == "softcap" else None) for name in OPTIONS))
        out, lse = decode._allocate(*call)
        decode.launch_gather_decode(*call, out, lse)
    for b, at in enumerate(lengths.tolist()):
        kv[:, b, :, at] = new[:, b, :, 0]
    assert torch.equal(torch.stack(args[1:3]).cpu(), kv) and (args[7].cpu() == lengths + 1).all()
    now = {"lengths": lengths + 1, "start": start}
    index = select((device, "reference"), q, kv[0], **(options | now))
    wanted, wanted_lse = gather_attention(
        q, *kv, index, scale=SCALE, block=16, sink=1, local=2, **now
    )
    assert (out.cpu() - wanted).abs().max() < 1e-5
    assert (lse.cpu() - wanted_lse).abs().max() < 1e-5


def test_opcheck(device):
    q, k = random(0, 2, 4, 1, 64).to(device), random(1, 2, 2, 200, 64).to(device)
    bounds, progress = (x.to(device) for x in fresh(k.cpu()))
    bounds.zero_()
    rows = torch.tensor([130, 200], device=device)
    mask = torch.ones(2, 200, dtype=torch.bool, device=device)
    for extra in ((None,) * 3, (rows, rows - 130, mask)):
        args = (q, k, bounds, progress, SCALE, 16, 3, 1, 2, "spread", *extra)
        torch.library.opcheck(torch.ops.attnplug.select_blocks.default, args)
        args = (k, bounds, progress, *extra, 16, False)
        torch.library.opcheck(torch.ops.attnplug.block_bounds.default, args)


def test_plans_hold_any_cache():
    """Every plan's groups fit its chunk and the counters of the search, up to 4M tokens."""
    for rows, power, top_k in itertools.product((1, 4, 32, 512), range(4, 19), (33, 256)):
        plan = op.plan_for(rows, 1 << power, top_k, 128, 1, True)
        groups = -(-(1 << power) // plan.members) if plan.members else 1 << power
        assert plan.members == 0 or plan.chunk % plan.members == 0
        assert max(groups, 256 * plan.members) <= 1 << 15
        assert math.log2(plan.chunk).is_integer()


@pytest.mark.gpu
def test_a_million_tokens_times_eight():
    """Offsets past 2^31: near the end of each row and head stands one key, and its block wins."""
    size = 1 << 20
    q = random(0, 8, 28, 1, 128, dtype=torch.bfloat16).cuda()
    k = torch.zeros(8, 4, size, 128, dtype=torch.bfloat16, device="cuda")
    at = size - 1000 - 128 * torch.arange(32, device="cuda").view(8, 4)
    for b, h in itertools.product(range(8), range(4)):
        k[b, h, at[b, h]] = q[b, 7 * h, 0]
    bounds, progress = (
        summaries.empty_bounds(k, 16, dtype=torch.uint8),
        torch.zeros(8, 2).int().cuda(),
    )
    options = {"scale": SCALE, "block": 16, "scoring": "spread"}
    for top_k in (8, 256):
        index = op.select_blocks(q, k, bounds, progress, top_k=top_k, **options)
        assert (index[:, :, 0] == (at // 16)[..., None]).any(-1).all()
    assert progress.tolist() == [[size // 16 - 4, 0]] * 8
