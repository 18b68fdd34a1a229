"""gvr as a whole, and its cache layer: what methods/gvr.md says must be true."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import DIM, HEADS, KV_HEADS, filled, random, step
from transformers.cache_utils import StaticLayer

import attnplug
from attnplug import Dense, Gvr, PolicyError, telemetry
from attnplug.models.cache import PlugLayer
from attnplug.ops.gvr.score_tokens import quantize_keys
from attnplug.policies import AttentionCall, LayerShape, gvr, picks
from attnplug.policies.gvr import GvrLayer
from attnplug.testing import oracle_attention, tiny_model

GVR = Gvr(k=24, sink=4, window=20, min_tokens=0)
SHARE = dataclasses.replace(GVR, group="share")
HINT = dataclasses.replace(GVR, hint=True)
POLICIES = [GVR, SHARE, HINT]
SIZE = 200


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys and values of `count` new tokens, `[2,B,Hkv,count,D]`."""
    return random(seed, 2, batch, KV_HEADS, count, DIM).to(device)


def group_score(
    call: AttentionCall, products: torch.Tensor, near: torch.Tensor, group: str
) -> torch.Tensor:
    """What ranks tokens for a group, from its heads' q . k `[G,S]`."""
    if group == "max":
        return products.amax(0)
    logits = products * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    return (logits - logits[:, near].logsumexp(1, keepdim=True)).logsumexp(0)


def expected(call: AttentionCall, policy: Gvr) -> torch.Tensor:
    """fp64 attention over the keep set that the rounded keys tell."""
    length = int(call.lengths)
    group, kept = HEADS // KV_HEADS, torch.zeros(*call.k.shape[:3], dtype=torch.bool)
    codes, steps = (x.cpu() for x in quantize_keys(call.k))
    keys = codes.double() * steps.double()[..., None]
    at = torch.arange(call.k.shape[2])
    for b in range(call.k.shape[0]):
        visible = at < length
        if call.key_mask is not None:
            visible = visible & call.key_mask[b].cpu()
        start = int(visible.int().argmax())
        near = (at < start + policy.sink) | (at >= length - policy.window)
        for h in range(KV_HEADS):
            query = call.q[b, h * group : h * group + group, 0].double().cpu()
            score = group_score(call, query @ keys[b, h].T, near & visible, policy.group)
            score = torch.where(visible & ~near, score, -torch.inf)
            kept[b, h, score.topk(policy.k).indices] = True
            kept[b, h] = (kept[b, h] | near) & visible
    parts = [
        oracle_attention(
            call.q[:, h * group : h * group + group].cpu(),
            call.k[:, h : h + 1].cpu(),
            call.v[:, h : h + 1].cpu(),
            scale=call.scale,
            softcap=call.softcap,
            sinks=None if call.sinks is None else call.sinks.cpu()[h * group : h * group + group],
            lengths=call.lengths.cpu(),
            key_mask=kept[:, h],
        )[0]
        for h in range(KV_HEADS)
    ]
    return torch.cat(parts, 1)


def hold(policy: Gvr, call: AttentionCall) -> None:
    found = policy.attend(call).cpu()
    assert (found - expected(call, policy)).abs().max() < 1e-5


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("length", [1, 4, 5, 20, 24, 25, 48, 49, 130, 199, 200])
def test_a_step_attends_to_the_keep_set(length, policy, device):
    layer = filled(policy, tokens(0, length, batch=2, device=device))
    hold(policy, step(layer))
    hold(policy, step(layer, softcap=3.0, sinks=random(5, HEADS).to(device)))


def test_shares_keep_other_tokens_than_maxima(device):
    layer = filled(GVR, tokens(0, 190, device=device))
    call = step(layer)
    call.q[:, 0] *= 9  # a head with long queries
    hold(SHARE, call)
    assert (SHARE.attend(call) - GVR.attend(call)).abs().max() > 1e-2


def test_the_budget_is_felt(device):
    call = step(filled(GVR, tokens(0, 190, device=device)))
    assert (GVR.attend(call) - Dense().attend(call)).abs().max() > 1e-2


@given(length=st.integers(1, SIZE), seed=st.integers(0, 99))
def test_a_keep_set_of_everything_is_dense(length, seed):
    covering = dataclasses.replace(GVR, k=SIZE)
    call = step(filled(covering, tokens(seed, length)), seed)
    assert (covering.attend(call) - Dense().attend(call)).abs().max() < 2e-6


def test_the_hint_changes_nothing(device):
    """Steps with the picks of other steps in the layer, or with none."""
    kv = tokens(0, 190, device=device)
    used = filled(HINT, kv)
    for seed in range(4):
        found = HINT.attend(step(used, seed))
        assert torch.equal(found, HINT.attend(step(filled(HINT, kv), seed)))
        plain = GVR.attend(step(filled(GVR, kv), seed))
        assert (found - plain).abs().max() < 1e-6  # the order of the picks may differ


def test_maxima_without_a_hint_are_scored_and_picked_by_one_op(device, monkeypatch):
    kv, found = tokens(0, 190, device=device), []
    one, several = gvr.top_tokens, gvr.topk
    monkeypatch.setattr(gvr, "top_tokens", lambda *a, **b: found.append(1) or one(*a, **b))
    monkeypatch.setattr(gvr, "topk", lambda *a, **b: found.append(2) or several(*a, **b))
    for policy in (GVR, SHARE, HINT):
        policy.attend(step(filled(policy, kv)))
    assert found == [1, 2, 2]


def test_without_a_hint_no_picks_are_kept(device):
    """Nor are those of another's layer read or written."""
    kv = tokens(0, 190, device=device)
    layer, other = filled(GVR, kv), filled(HINT, kv)
    assert torch.equal(GVR.attend(step(layer)), GVR.attend(step(other)))
    assert layer.last is None and (other.last.picks == -1).all()
    assert len(layer.tensors()) == len(other.tensors()) - 2
    assert GVR.row_state(3, 2, device) is None
    assert HINT.row_state(3, 2, device).shape == (3, 2, 24)
    [read] = picks(SimpleNamespace(layers=[layer]))
    assert math.isnan(read.overlap) and read.density == pytest.approx(48 / 190)
    HINT.attend(step(layer))
    assert layer.last is None


def test_a_layer_continues_from_the_picks_of_its_like(device):
    kv = tokens(0, 190, device=device)
    source, more = filled(HINT, kv), filled(HINT, kv)
    HINT.attend(step(source))
    more.continue_from(source)
    assert torch.equal(more.last.picks, source.last.picks)
    for policy in (GVR, dataclasses.replace(HINT, k=25)):
        fresh = filled(HINT, kv)
        fresh.continue_from(filled(policy, kv))
        assert (fresh.last.picks == -1).all()
    plain = filled(GVR, kv)
    plain.continue_from(source)
    assert plain.last is None


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_left_padding_does_not_change_a_row(policy, device):
    kv = tokens(0, 170, batch=3, device=device)
    starts = (0, 37, 169)
    mask = torch.arange(SIZE, device=device) >= torch.tensor(starts, device=device)[:, None]
    call = step(filled(policy, kv), mask=mask)
    together = policy.attend(call)
    for row, start in enumerate(starts):
        alone = step(filled(policy, kv[:, row : row + 1, :, start:]))
        alone.q = call.q[row : row + 1]
        assert (policy.attend(alone) - together[row]).abs().max() < 1e-6


def test_a_hole_in_the_mask_is_not_read(device):
    kv = tokens(0, 170, device=device)
    kv[:, :, :, 90] = torch.nan
    kv[:, :, :, 40:64] = 1e3
    mask = torch.ones(1, SIZE, dtype=torch.bool, device=device)
    mask[:, 90] = mask[:, 40:64] = False
    found = GVR.attend(step(filled(GVR, kv), mask=mask))
    kv[:, :, :, 90] = kv[:, :, :, 40:64] = 0.0
    hold(GVR, step(filled(GVR, kv), mask=mask))
    assert torch.equal(found, GVR.attend(step(filled(GVR, kv), mask=mask)))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_surfaces_wherever_it_is(bad, policy, device):
    """It ranks first, so that no budget can hide it."""
    kv = tokens(0, 190, device=device)
    kv[0, 0, 1, 77] = bad
    call = step(filled(policy, kv))
    found, dense = policy.attend(call), Dense().attend(call)
    assert dense[:, 2:].isnan().any() and torch.equal(found.isnan(), dense.isnan())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(0, 50)),
        st.tuples(st.just("reorder"), st.integers(0, 8)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=20)
@given(actions=ACTIONS, padded=st.booleans())
def test_codes_follow_whatever_happens_to_the_cache(actions, padded):
    """Prefills in chunks, steps, crops, beams, batch changes, resets: a step gives what it gives
    with a cache made at once from the same tokens."""
    layer, rows, seed = HINT.cache_layer(SIZE), tokens(0, 100, batch=2), 1
    layer.update(rows[0], rows[1])
    pads = torch.tensor([0, 5]) if padded else torch.tensor([0, 0])
    check(layer, rows, pads, seed)
    for action, number in actions:
        length, seed = rows.shape[3], seed + 2
        if action in ("append", "step"):
            for span in [number] if action == "append" else [1] * number:
                if rows.shape[3] + span > SIZE:
                    break
                new = tokens(seed := seed + 2, span, batch=rows.shape[1])
                layer.update(new[0], new[1])
                rows = torch.cat([rows, new], 3)
        elif action == "crop":
            layer.crop(-min(number, length - 6))
            rows = rows[:, :, :, : length - min(number, length - 6)]
        elif action == "reorder":
            order = torch.tensor(
                [number * (row + 1) // 3 % rows.shape[1] for row in range(len(pads))]
            )
            layer.reorder_cache(order)
            rows, pads = rows[:, order], pads[order]
        elif action == "repeat" and len(pads) < 5:
            layer.batch_repeat_interleave(number)
            rows, pads = rows.repeat_interleave(number, 1), pads.repeat_interleave(number)
        elif action == "select":
            chosen = torch.arange(len(pads))[: number + 1].flip(0)
            layer.batch_select_indices(chosen)
            rows, pads = rows[:, chosen], pads[chosen]
        elif action == "reset":
            layer.reset()
            rows = tokens(seed, 70, batch=len(pads))
            layer.update(rows[0], rows[1])
        check(layer, rows, pads, seed)


def check(layer: GvrLayer, rows: torch.Tensor, pads: torch.Tensor, seed: int) -> None:
    mask = torch.arange(SIZE) >= pads[:, None] if bool(pads.any()) else None
    call, fresh = (step(x, seed, mask) for x in (layer, filled(HINT, rows)))
    assert torch.equal(HINT.attend(call), HINT.attend(fresh))
    codes, steps = quantize_keys(rows[0])
    length = rows.shape[3]
    assert torch.equal(layer.codes[:, :, :length], codes)
    assert torch.equal(layer.scales[:, :, :length], steps)


def test_beams_are_reordered_in_place(device):
    """A CUDA graph goes on reading the old addresses."""
    layer = filled(HINT, tokens(0, 150, batch=3, device=device))
    HINT.attend(step(layer))
    addresses = [x.data_ptr() for x in layer.tensors()]
    want = [x[[2, 0, 0]] for x in layer.tensors()]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert len(want) == 6 and addresses == [x.data_ptr() for x in layer.tensors()]
    assert all(map(torch.equal, want, layer.tensors()))


def test_the_layer_is_sized_once():
    layer = HINT.cache_layer(SIZE)
    layer.crop(-3)  # of nothing, as generate may
    layer.reset()
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    assert not layer.is_initialized
    kv = tokens(0, 3).bfloat16()
    layer.update(kv[0], kv[1])
    assert layer.codes.shape == (1, KV_HEADS, SIZE, DIM) and layer.codes.dtype == torch.int8
    assert layer.scales.shape == (1, KV_HEADS, SIZE) and layer.scales.dtype == torch.float32
    assert {x.shape for x in layer.last} == {(1, KV_HEADS, 24)}


def test_overlap_and_density():
    layer = filled(HINT, tokens(0, 190))
    last = layer.last
    assert math.isnan(last.overlap())
    HINT.attend(step(layer, 1))
    assert math.isnan(last.overlap())  # one step has nothing to be compared with
    HINT.attend(step(layer, 1))
    assert last.overlap() == 1.0
    HINT.attend(step(layer, 2))
    now, before = last.picks[0], last.before[0]
    shares = [len({*a.tolist()} & {*b.tolist()}) / 24 for a, b in zip(now, before, strict=True)]
    assert last.overlap() == pytest.approx(sum(shares) / 2) and last.overlap() < 0.9
    short = filled(HINT, tokens(0, 30))
    of_long, of_short = picks(SimpleNamespace(layers=[Dense(), layer, short]))
    assert (of_long.layer, of_long.tokens, of_long.overlap) == (1, 190, last.overlap())
    assert of_long.density == pytest.approx(48 / 190) and of_short.density == 1.0
    layer.reset()
    assert math.isnan(last.overlap())


@pytest.mark.parametrize("policy", [GVR, HINT], ids=str)
def test_the_report_decodes_and_shows_what_was_read(byte_tokenizer, policy):
    """What `attnplug report MODEL --policy gvr --steps 4` prints."""

    with attnplug.applied(tiny_model(), policy) as model:
        [shown] = telemetry.run(model, byte_tokenizer, 120, 4)
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert cells["tokens"] == ["124", "124"] and cells["density"] == [f"{48 / 124:.3f}"] * 2
    if policy.hint:
        assert all(0 < float(share) <= 1 for share in cells["overlap"])
    else:
        assert cells["overlap"] == ["nan", "nan"]


def foreign_layers(kv: torch.Tensor) -> dict[str, StaticLayer | None]:
    """Layers whose codes, if any, are not those of the call's keys under GVR."""
    layers = {
        "static": StaticLayer(max_cache_len=SIZE),
        "plug": PlugLayer(max_cache_len=SIZE),
        "another k": dataclasses.replace(GVR, k=25).cache_layer(SIZE),
    }
    for layer in layers.values():
        layer.update(kv[0], kv[1])
    return layers


@pytest.mark.parametrize("kind", foreign_layers(tokens(0, 1)))
def test_without_codes_of_its_own_it_is_dense(kind, device):
    call = step(foreign_layers(tokens(0, 190, device=device))[kind])
    assert torch.equal(GVR.attend(call), Dense().attend(call))


def test_the_report_says_what_is_read_and_where_it_is_dense():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cpu"))
    assert Gvr().note(shape) == (
        "reads 2,320 tokens, 1.8% of 131,072, and INT8 keys to choose them; dense in caches below "
        "524,288 tokens and in those that attnplug did not make for it"
    )
    model = attnplug.apply(tiny_model(), GVR)
    assert "gvr(k=24, sink=4, window=20, min_tokens=0); gvr: reads 48 tokens" in str(
        attnplug.report(model)
    )


WRONG = [
    ({"k": 0}, "k=0, needs 1 to 4096"),
    ({"k": 4097}, "k=4097, needs 1 to 4096"),
    ({"k": True}, "k=True, needs an integer"),
    ({"window": 0}, "window=0, needs at least 1"),
    ({"sink": -1}, "sink=-1, needs at least 0"),
    ({"min_tokens": -1}, "min_tokens=-1, needs None or"),
    ({"min_tokens": "8K"}, "min_tokens='8K', needs None or"),
    ({"group": "mean"}, "group='mean', needs max or share"),
    ({"hint": 1}, "hint=1, needs True or False"),
    ({"hint": "last"}, "hint='last', needs True or False"),
]


def test_hint_is_read_from_a_string():
    assert attnplug.policies.parse("gvr(k=24, hint=True)").decode == Gvr(k=24, hint=True)
    assert str(HINT) == "gvr(k=24, sink=4, window=20, min_tokens=0, hint=True)"


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_refuses(options, message):
    with pytest.raises(PolicyError, match=f"gvr: {message}"):
        Gvr(**options)
