"""The policy certified and its two-tier cache layer."""

import copy
import dataclasses

import pytest
import torch
from step_cases import DIM, HEADS, KV_HEADS, filled, random, step

import attnplug
from attnplug import Certified, Dense, HostMemoryError, PolicyError, telemetry
from attnplug.models import host_memory
from attnplug.models.cache import PlugLayer
from attnplug.ops.common.device import Card
from attnplug.policies import AttentionCall, LayerShape, certificates, certified
from attnplug.policies.certified import CertifiedLayer
from attnplug.testing import oracle_attention, tiny_model

EXACT = Certified(block=16, tolerance=None, coverage=1.0, k_min=64, v_tol=0.0, min_tokens=0)
LOOSE = Certified(
    block=16, tolerance=None, explore=0.0, min_tokens=0
)  # fmt: skip
SIZE = 200


def tokens(seed: int, count: int, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    return random(seed, 2, batch, KV_HEADS, count, DIM).to(device)


def oracle(call: AttentionCall) -> torch.Tensor:
    rows = {"lengths": call.lengths, "key_mask": call.key_mask}
    rows = {name: None if x is None else x.cpu() for name, x in rows.items()}
    every = [x.cpu() for x in (call.q, call.k, call.v)]
    return oracle_attention(*every, scale=call.scale, softcap=call.softcap, **rows)[0]


def hold(policy: Certified, call: AttentionCall) -> None:
    """What the layer's telemetry says of the step is true of it."""
    layer = call.state
    assert isinstance(layer, CertifiedLayer) and layer.telemetry is not None
    layer.telemetry.zero_()
    found = policy.attend(call).double().cpu()
    error = (found - oracle(call))[:, :, 0].norm(dim=-1)
    heads = layer.telemetry[:, :, : HEADS // KV_HEADS].flatten(1, 2).cpu()
    assert (heads[..., 0] == 1).all()
    assert (error <= heads[..., 8] + heads[..., 10] + heads[..., 12] + 1e-5).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 130, 199, 200])
def test_steps_are_certified_or_exact(length, device):
    layer = filled(LOOSE, tokens(0, length, batch=2, device=device))
    hold(LOOSE, step(layer))
    hold(LOOSE, step(layer, softcap=3.0))
    exact = step(filled(EXACT, tokens(0, length, batch=2, device=device)))
    assert (EXACT.attend(exact).cpu() - oracle(exact)).abs().max() < 1e-5


def test_the_quantized_tier_is_felt(device):
    call = step(filled(LOOSE, tokens(0, 190, device=device)))
    assert 1e-3 < (LOOSE.attend(call) - Dense().attend(call)).abs().max() < 0.5


def test_left_padding_does_not_change_a_row(device):
    kv = tokens(0, 170, batch=3, device=device)
    starts = (0, 37, 169)
    mask = torch.arange(SIZE, device=device) >= torch.tensor(starts, device=device)[:, None]
    call = step(filled(LOOSE, kv), mask=mask)
    together = LOOSE.attend(call)
    for row, start in enumerate(starts):
        alone = step(filled(LOOSE, kv[:, row : row + 1, :, start:]))
        alone.q = call.q[row : row + 1]
        assert (LOOSE.attend(alone) - together[row]).abs().max() < 1e-5


def test_growth_in_any_portions_is_one_tier(device):
    """Prefilled at once, in chunks, or token by token: the same blocks, the same output."""
    kv = tokens(0, 100, device=device)
    whole = filled(LOOSE, kv)
    want = LOOSE.attend(step(whole))
    for spans in ([37, 63], [16] * 6 + [4], [60] + [1] * 40):
        layer, at = LOOSE.cache_layer(SIZE), 0
        for span in spans:
            layer.update(*kv[:, :, :, at : at + span])
            at += span
            LOOSE.attend(step(layer))
        assert torch.equal(LOOSE.attend(step(layer)), want)
        assert all(torch.equal(a, b) for a, b in zip(layer.tier, whole.tier, strict=True))


def test_crop_forgets_blocks_and_requantizes_what_comes(device):
    layer = filled(LOOSE, tokens(0, 100, device=device))
    LOOSE.attend(step(layer))
    layer.crop(-30)
    assert layer.tier.progress[:, 0].tolist() == [4]
    layer.update(*tokens(1, 20, device=device))
    kv = torch.cat([tokens(0, 100)[:, :, :, :70], tokens(1, 20)], 3).to(device)
    assert torch.equal(LOOSE.attend(step(layer)), LOOSE.attend(step(filled(LOOSE, kv))))


MOVES = pytest.mark.parametrize(
    ("change", "order"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda layer: layer.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    ],
    ids=["reorder", "repeat", "select"],
)


@MOVES
def test_rows_move_with_their_tier(change, order, device):
    kv = tokens(0, 90, batch=3, device=device)
    layer = filled(LOOSE, kv)
    LOOSE.attend(step(layer))
    pointers = [x.data_ptr() for x in (layer.keys, *layer.tier)]
    change(layer)
    if len(order) == 3:
        assert [x.data_ptr() for x in (layer.keys, *layer.tier)] == pointers
    q = random(7, len(order), HEADS, 1, DIM).to(device)
    found, fresh = step(layer), step(filled(LOOSE, kv[:, order]))
    found.q = fresh.q = q
    assert torch.equal(LOOSE.attend(found), LOOSE.attend(fresh))


SCRATCH = Certified(
    block=16, tolerance=None, coverage=0.9, explore=0.0, k_min=2, k_max=128, ranking=1, min_tokens=0
)


def held(layer: CertifiedLayer) -> list[int]:
    """Blocks whose keys the scratch cache holds."""
    assert layer.scratch is not None
    owner = layer.scratch.owner[0, 0]
    return sorted((owner[owner >= 0] // 32).tolist())


def test_crop_drops_what_the_scratch_cache_holds_of_it(device):
    """Also where the same blocks are wanted again with other keys."""
    kv = tokens(0, 100, device=device)
    kv[0, :, :, 64:96] *= 2  # blocks 4 and 5 matter
    layer = filled(SCRATCH, kv)
    SCRATCH.attend(step(layer))
    SCRATCH.attend(step(layer))
    before = held(layer)
    assert {4, 5} & set(before) and int(layer.scratch.counters[..., 2].sum()) > 0
    layer.crop(-30)  # 70 are left, block 4 is broken
    assert held(layer) == [block for block in before if block < 4]
    new = 2 * tokens(1, 30, device=device)
    layer.update(*new)
    fresh = filled(SCRATCH, torch.cat([kv[:, :, :, :70], new], 3))
    assert torch.equal(SCRATCH.attend(step(layer)), SCRATCH.attend(step(fresh)))
    assert layer.telemetry[..., 4].sum() == 0  # nothing was found wrong


@MOVES
def test_rows_move_with_their_scratch_cache(change, order, device):
    """The next step finds all that it wants, and in the right row."""
    layer = filled(SCRATCH, tokens(0, 90, batch=3, device=device))
    call = step(layer)
    SCRATCH.attend(call)
    change(layer)
    found = step(layer)
    found.q = call.q[order]
    before = layer.scratch.counters.sum((1, 2))
    want = SCRATCH.attend(step(filled(SCRATCH, tokens(0, 90, batch=3, device=device))))[order]
    assert torch.equal(SCRATCH.attend(found), want)
    after = layer.scratch.counters.sum((1, 2))
    assert torch.equal((after - before)[:, 1], (after - before)[:, 2])
    assert (after - before)[:, 1].min() > 0 and layer.telemetry[..., 4].sum() == 0


def test_scratch_is_for_originals_of_the_host(device):
    kv = tokens(0, 90, device=device)
    near = filled(dataclasses.replace(SCRATCH, originals="device"), kv)
    few = filled(dataclasses.replace(SCRATCH, coverage=0.0), kv)
    none = filled(dataclasses.replace(SCRATCH, scratch=0), kv)
    some = filled(dataclasses.replace(SCRATCH, scratch=9), kv)
    assert near.scratch is None and none.scratch is None and few.scratch is None
    assert some.scratch.owner.shape[2] == 16
    assert [SCRATCH.slots(blocks) for blocks in (4, 512, 2048, 9999)] == [16, 64, 256, 256]
    assert some.scratch.slots.shape[2] == (16 if device == "cuda" else 0)


def test_reset_empties_the_layer(device):
    layer = filled(SCRATCH, tokens(0, 90, device=device))
    SCRATCH.attend(step(layer))
    assert held(layer)
    layer.reset()
    assert int(layer.tier.progress.sum()) == 0 and float(layer.telemetry.sum()) == 0
    assert not held(layer) and int(layer.scratch.counters.sum()) == 0
    layer.update(*tokens(1, 40, device=device))
    want = SCRATCH.attend(step(filled(SCRATCH, tokens(1, 40, device=device))))
    assert torch.equal(SCRATCH.attend(step(layer)), want)


def test_dense_where_there_is_no_tier_of_these_keys(device):
    kv = tokens(0, 90, device=device)
    plain = PlugLayer(max_cache_len=SIZE)
    plain.update(*kv)
    small = filled(dataclasses.replace(LOOSE, min_tokens=SIZE + 1), kv)
    other = filled(dataclasses.replace(LOOSE, block=32), kv)
    lent = step(filled(LOOSE, kv))
    lent.k = lent.k.clone()
    for call in (step(plain), step(small), step(other), lent):
        assert torch.equal(LOOSE.attend(call), Dense().attend(call))
    assert small.tier is None


def test_the_tier_is_half_of_the_cache():
    layer = filled(Certified(min_tokens=0), tokens(0, 64).bfloat16(), 4096)
    assert layer.tier.nbytes() < 0.48 * (layer.keys.nbytes + layer.values.nbytes)


def test_no_host_memory_is_an_error_at_allocation(monkeypatch):
    """On a GPU whose host has none left to pin."""
    monkeypatch.setattr(host_memory, "_available", lambda: 0)
    monkeypatch.setattr(host_memory.torch.cuda, "device", lambda device: monkeypatch.context())
    with pytest.raises(HostMemoryError, match=r"1\.00 GiB of host memory cannot be had"):
        host_memory.host_zeros((2**28,), torch.float32, "cuda")


@pytest.mark.gpu
def test_originals_are_in_host_memory():
    before = torch.cuda.memory_allocated()
    x = host_memory.host_zeros((1 << 24,), torch.bfloat16, "cuda")
    assert x.is_cuda and torch.cuda.memory_allocated() == before
    x.fill_(3)
    torch.cuda.synchronize()
    assert float(x[123]) == 3 and x.clone().data_ptr() != x.data_ptr()
    layer = filled(dataclasses.replace(LOOSE, originals="host"), tokens(0, 90, device="cuda"))
    assert layer.keys.is_cuda and copy.copy(layer).keys is layer.keys


def test_a_model_generates_and_its_certificates_are_reported(device):
    model = tiny_model(device=device)
    ids = torch.randint(2, 96, (2, 60), generator=torch.Generator().manual_seed(0)).to(device)
    with attnplug.applied(model, EXACT), torch.no_grad():
        cache = attnplug.make_cache(model, 128)
        model(ids, past_key_values=cache)
        for _ in range(5):
            model(ids[:, :1], past_key_values=cache)
        rows = certificates(cache)
    assert [row.layer for row in rows] == [0, 1]
    for row in rows:
        assert row.head_steps == 5 * 2 * 4 and row.key_max == row.value_max == 0.0
        assert row.values > 0 and row.link_bytes > 0 and 0 <= row.exact <= 1
        # 61 to 65 tokens: three complete blocks in every step, the fourth in the last two; a
        # set has one slot here, for the keys or the values of its block
        assert row.wanted == 2 * 2 * 2 * (3 * 5 + 2) and row.hit_rate == (3 * 4 + 1) / 34
        assert row.tier_bytes == cache.layers[row.layer].tier.nbytes()


def test_the_report_decodes_and_shows_certificates(byte_tokenizer):
    """What `attnplug report MODEL --policy certified --steps 3` prints."""

    with attnplug.applied(tiny_model(), EXACT) as model:
        bounds, work = telemetry.run(model, byte_tokenizer, 40, 3).tables()
    assert bounds.row_count == work.row_count == 2
    cells = {column.header: list(column.cells) for column in (*bounds.columns, *work.columns)}
    assert cells["head\nsteps"] == ["12", "12"] and cells["rung 4"] == ["0", "0"]
    with attnplug.applied(tiny_model(), "certified") as model:
        assert telemetry.run(model, byte_tokenizer, 40, 1).tables() == []


def test_it_composes_with_momo():
    policy = attnplug.policies.parse("momo(gamma=8)+certified(block=16)")
    assert str(policy) == "momo(gamma=8)+certified(block=16)"
    assert isinstance(policy.decode, Certified) and policy.prefill.name == "momo"


def test_note_says_what_is_where():
    shape = LayerShape(4, 2, 64, 0.0, False, torch.device("cuda"))
    bound = Certified(tolerance=None, k_min=2, ranking=1, explore=0.0)
    for policy in (bound, Certified(min_tokens=65536)):
        note = policy.note(shape)
        assert "originals on the host" in note and "dense in caches below 65,536 tokens" in note
    assert "dense in every cache" in Certified().note(shape)
    assert "min_tokens=0" in Certified().note(shape)


def test_without_a_row_that_pays_every_cache_is_dense():
    device = torch.device("cuda")
    for policy in (
        Certified(),
        Certified(block=16, tolerance=None, explore=0.0),
        Certified(k_min=3),
    ):
        assert not any(policy.serves(rows, 1 << 20, device) for rows in (1, 4, 64))
    assert Certified(min_tokens=0).serves(1, 64, device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 48}, "block=48, needs 16, 32, 64, 128"),
        ({"coverage": 2}, "coverage=2, needs 0 to 1"),
        ({"ranking": 1}, "k_min=0, needs at least ranking"),
        ({"k_max": 0}, "k_max=0, needs k_min to 1024"),
        ({"v_tol": "a"}, "v_tol='a', needs None or a number"),
        ({"ranking": 5}, "ranking=5, needs 0 to 4"),
        ({"tolerance": "a"}, "tolerance='a', needs None or a number"),
        ({"coverage": None}, "coverage=None, needs a number"),
        ({"coverage": True}, "coverage=True, needs a number"),
        ({"explore": [1]}, r"explore=\[1\], needs a number"),
        ({"tolerance": -1.0}, "tolerance=-1.0, needs None or at least 0"),
        ({"explore": 1.5}, "explore=1.5, needs 0 to 1"),
        ({"scratch": -1}, "scratch=-1, needs 0 to 4096"),
        ({"originals": "disk"}, "originals='disk', needs 'host' or 'device'"),
        ({"min_tokens": 1.5}, "min_tokens=1.5, needs None or an integer"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refuses(options, message):
    with pytest.raises(PolicyError, match=message):
        Certified(**options)


@pytest.mark.parametrize(
    ("capability", "shared", "served"),
    [
        ((8, 9), 101376, (64, 128)),
        ((8, 0), 166912, (64, 128, 256)),
        ((9, 0), 232448, (64, 128, 256)),
    ],
)
def test_a_card_without_the_shared_memory_is_refused_and_named(
    monkeypatch, capability, shared, served
):
    """A 4090, an A100 and an H200, as bench/ptx.py compiles for them."""
    found = Card.made("nvidia", capability, 128, shared)
    monkeypatch.setattr(certified, "card", lambda device: found)
    for width in (64, 128, 256):
        shape = LayerShape(8, 2, width, 0.0, False, torch.device("cuda"))
        why = Certified().refusal(shape)
        assert (why is None) == (width in served)
        assert why is None or (f"heads of {width}" in why and f"{shared:,}" in why)
