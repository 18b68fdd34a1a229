"""gvr as a whole, and its cache layer: what methods/gvr.md says must be true."""

import dataclasses
import itertools
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
from attnplug.policies import AttentionCall, LayerShape, picks
from attnplug.policies.gvr import GvrLayer
from attnplug.testing import oracle_attention, tiny_model

GVR = Gvr(k=24, sink=4, window=20, min_tokens=0)
SIZE = 200


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    """Keys and values of `count` new tokens, `[2,B,Hkv,count,D]`."""
    return random(seed, 2, batch, KV_HEADS, count, DIM).to(device)


def expected(call: AttentionCall, policy: Gvr) -> torch.Tensor:
    """fp64 attention over the keep sets that the rounded keys tell each query."""
    length, queries = int(call.lengths), call.q.shape[2]
    group, out = HEADS // KV_HEADS, torch.empty(call.q.shape, dtype=torch.float64)
    codes, steps = (x.cpu() for x in quantize_keys(call.k))
    keys = codes.double() * steps.double()[..., None]
    at = torch.arange(call.k.shape[2])
    for b, h in itertools.product(range(call.k.shape[0]), range(KV_HEADS)):
        heads = slice(h * group, h * group + group)
        real = torch.ones_like(at, dtype=torch.bool)
        if call.key_mask is not None:
            real = call.key_mask[b].cpu()
        start = int((real & (at < length)).int().argmax())
        for t in range(queries):
            visible = real & (at < length - queries + 1 + t)
            last = at >= length - queries + 1 + t - policy.window
            kept = visible & ((at < start + policy.sink) | last)
            score = (call.q[b, heads, t].double().cpu() @ keys[b, h].T).amax(0)
            best = torch.where(visible & ~kept, score, -torch.inf).topk(policy.k)
            kept[best.indices[best.values > -torch.inf]] = True
            out[b : b + 1, heads, t : t + 1], _ = oracle_attention(
                call.q[b : b + 1, heads, t : t + 1].cpu(),
                call.k[b : b + 1, h : h + 1].cpu(),
                call.v[b : b + 1, h : h + 1].cpu(),
                scale=call.scale,
                softcap=call.softcap,
                sinks=None if call.sinks is None else call.sinks.cpu()[heads],
                lengths=call.lengths.cpu() - queries + 1 + t,
                key_mask=kept[None],
            )
    return out


def hold(policy: Gvr, call: AttentionCall) -> None:
    found = policy.attend(call).cpu()
    assert (found - expected(call, policy)).abs().max() < 1e-5


@pytest.mark.parametrize("length", [1, 4, 5, 20, 24, 25, 48, 49, 130, 199, 200])
def test_a_step_attends_to_the_keep_set(length, device):
    layer = filled(GVR, tokens(0, length, batch=2, device=device))
    hold(GVR, step(layer))
    hold(GVR, step(layer, softcap=3.0, sinks=random(5, HEADS).to(device)))


def test_the_budget_is_felt(device):
    call = step(filled(GVR, tokens(0, 190, device=device)))
    assert (GVR.attend(call) - Dense().attend(call)).abs().max() > 1e-2


@given(length=st.integers(1, SIZE), seed=st.integers(0, 99))
def test_a_keep_set_of_everything_is_dense(length, seed):
    covering = dataclasses.replace(GVR, k=SIZE)
    call = step(filled(covering, tokens(seed, length)), seed)
    assert (covering.attend(call) - Dense().attend(call)).abs().max() < 2e-6


def test_left_padding_does_not_change_a_row(device):
    kv = tokens(0, 170, batch=3, device=device)
    starts = (0, 37, 169)
    mask = torch.arange(SIZE, device=device) >= torch.tensor(starts, device=device)[:, None]
    call = step(filled(GVR, kv), mask=mask)
    together = GVR.attend(call)
    for row, start in enumerate(starts):
        alone = step(filled(GVR, kv[:, row : row + 1, :, start:]))
        alone.q = call.q[row : row + 1]
        assert (GVR.attend(alone) - together[row]).abs().max() < 1e-6


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_surfaces_wherever_it_is(bad, device):
    """It ranks first, so that no budget can hide it."""
    kv = tokens(0, 190, device=device)
    kv[0, 0, 1, 77] = bad
    call = step(filled(GVR, kv))
    found, dense = GVR.attend(call), Dense().attend(call)
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
    layer, rows, seed = GVR.cache_layer(SIZE), tokens(0, 100, batch=2), 1
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
    call, fresh = (step(x, seed, mask) for x in (layer, filled(GVR, rows)))
    assert torch.equal(GVR.attend(call), GVR.attend(fresh))
    codes, steps = quantize_keys(rows[0])
    length = rows.shape[3]
    assert torch.equal(layer.codes[:, :, :length], codes)
    assert torch.equal(layer.scales[:, :, :length], steps)


def test_beams_are_reordered_in_place(device):
    """A CUDA graph goes on reading the old addresses."""
    layer = filled(GVR, tokens(0, 150, batch=3, device=device))
    GVR.attend(step(layer))
    addresses = [x.data_ptr() for x in layer.tensors()]
    want = [x[[2, 0, 0]] for x in layer.tensors()]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert len(want) == 4 and addresses == [x.data_ptr() for x in layer.tensors()]
    assert all(map(torch.equal, want, layer.tensors()))


def test_the_layer_is_sized_once():
    layer = GVR.cache_layer(SIZE)
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


def test_density():
    layers = [Dense(), filled(GVR, tokens(0, 190)), filled(GVR, tokens(0, 30))]
    of_long, of_short = picks(SimpleNamespace(layers=layers))
    assert (of_long.layer, of_long.tokens, of_short.density) == (1, 190, 1.0)
    assert of_long.density == pytest.approx(48 / 190)


def test_the_report_decodes_and_shows_what_was_read(byte_tokenizer):
    """What `attnplug report MODEL --policy gvr --steps 4` prints."""

    with attnplug.applied(tiny_model(), GVR) as model:
        [shown] = telemetry.run(model, byte_tokenizer, 120, 4).tables()
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert cells["tokens"] == ["124", "124"] and cells["density"] == [f"{48 / 124:.3f}"] * 2


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
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_refuses(options, message):
    with pytest.raises(PolicyError, match=f"gvr: {message}"):
        Gvr(**options)
