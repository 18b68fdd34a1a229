"""The whole step of sketch: exact where it reads all, right about what it estimates, and loud about
what is not finite."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sketch_cases import DEFAULTS, PLAN, cache, coded, random, rows_of, step
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug.errors import ArgumentError, GradientError
from attnplug.ops.sketch import pick_tokens as pick
from attnplug.ops.sketch import sketch_decode as op
from attnplug.ops.sketch.encode_keys import encode_keys
from attnplug.ops.sketch.state import Codes, empty_codes
from attnplug.testing import oracle_attention, plain_attention

# The interpreter computes with numpy, which warns where the kernel means infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def asked(options):
    return {name: x for name, x in options.items() if name not in ("top_k", "tail", "size")}


@settings(max_examples=6)
@given(data=st.data())
def test_a_budget_that_covers_all_is_dense(device_path, data):
    draw = data.draw
    width, size = draw(st.sampled_from([(64, 24), (48, 16), (128, 24), (96, 32), (112, 24)]))
    group, dtype = (
        draw(st.sampled_from([1, 3, 7])),
        draw(st.sampled_from([torch.float32, torch.float16])),
    )
    tokens, seed = draw(st.integers(1, 1100)), draw(st.integers(0, 99))
    q, k, v = cache(seed, 2, 1, group, tokens, width, dtype)
    options = {"scale": width**-0.5, "softcap": draw(st.sampled_from([0.0, 3.0]))}
    if draw(st.booleans()):
        options["lengths"] = torch.tensor([tokens, draw(st.integers(1, tokens))])
    if draw(st.booleans()):
        options["start"] = torch.tensor([draw(st.integers(0, tokens // 2)), 0])
    if draw(st.booleans()):
        options["key_mask"] = random(seed + 3, 2, tokens) > -0.5
    if draw(st.booleans()):
        options["sinks"] = 2 * random(seed + 4, group)
    basis, codes = coded(q, k, v, size, **options)
    out, lse = step(device_path, q, k, v, basis, codes, top_k=1100, **options)
    want, want_lse = oracle_attention(q[:, :, -1:], k, v, **options)
    plain, _ = plain_attention(q[:, :, -1:], k, v, **options)
    epsilon = torch.finfo(dtype).eps
    allowed = 2 * (plain - want).abs().max() + 2 * epsilon * want.abs().max() + 2e-6
    assert (out.double() - want).abs().max() <= allowed
    finite = want_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, finite)
    assert ((lse.double() - want_lse)[finite].abs() <= 3e-5).all()


def test_the_rest_is_estimated(device_path):
    """What is estimated is nearer to dense than what is dropped, in mass and in output. Values that
    follow their keys (`cache` makes such) vary with the score, which the regression sees. No margin
    is asked for."""
    q, k, v = cache(0)
    options = {"lengths": torch.tensor([1300, 1100]), "start": torch.tensor([5, 77])}
    basis, codes = coded(q, k, v, **options)
    want, want_lse = oracle_attention(q[:, :, -1:], k, v, scale=0.125, **options)
    error, mass = {}, {}
    for tail in ("drop", "regression"):
        out, lse = step(device_path, q, k, v, basis, codes, tail=tail, **options)
        error[tail] = float((out - want).norm() / want.norm())
        mass[tail] = (lse - want_lse).abs()
    assert (mass["regression"] < mass["drop"]).all()
    assert error["regression"] < error["drop"]


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_both_paths_agree(softcap):
    q, k, v = cache(2, group=7, dtype=torch.float16)
    options = {
        "lengths": torch.tensor([1290, 1300]),
        "start": torch.tensor([0, 130]),
        "key_mask": random(5, 2, 1300) > -1,
        "softcap": softcap,
        "sinks": random(6, 14),
    }
    basis, codes = coded(q, k, v, **options)
    fresh = empty_codes(k, 24)  # the chain makes the codes itself
    one = step(("cpu", "reference"), q, k, v, basis, codes, **options)
    two = step(("cpu", "kernel"), q, k, v, basis, fresh, **options)
    assert all((a.float() - b.float()).abs().max() < 4e-3 for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(codes, fresh, strict=True))


@pytest.mark.parametrize(
    ("where", "token"),  # sink, coded and not picked, local
    [("q", -1), *itertools.product("kv", (0, 400, 1250))],
)
def test_a_nan_surfaces(device_path, where, token):
    tensors = dict(zip("qkv", cache(0), strict=True))
    basis, _ = coded(*tensors.values())
    tensors[where][0, 1, token, 3] = torch.nan
    codes = empty_codes(tensors["k"], 24)
    out, _ = step(device_path, *tensors.values(), basis, codes)
    lost = out.isnan().any(-1)[..., 0]
    heads = slice(3, 6) if where != "q" else slice(1, 2)
    assert lost[0, heads].all() and int(lost.sum()) == heads.stop - heads.start


def test_hidden_tokens_may_hold_anything(device_path):
    q, k, v = cache(1)
    options = {"key_mask": random(5, 2, 1300) > -0.5}
    options["key_mask"][:, -1] = True
    basis, codes = coded(q, k, v, **options)
    clean = step(device_path, q, k, v, basis, codes, **options)
    hidden = ~options["key_mask"][:, None, :, None]
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    basis_too, codes = coded(q, k, v, **options)
    assert all(torch.equal(a, b) for a, b in zip(basis, basis_too, strict=True))
    again = step(device_path, q, k, v, basis, codes, **options)
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))


def test_a_cropped_cache_is_coded_anew(device_path):
    q, k, v = cache(3)
    basis, codes = coded(q, k, v)
    assert codes.progress[:, 0].tolist() == [7, 7]  # block 10 is being filled, 7 to 10 are read
    k[:, :, 500:], v[:, :, 500:] = random(7, *k[:, :, 500:].shape), 1.0
    codes.progress[:, 0] = codes.progress[:, 0].clamp(max=500 // 128)
    found = step(device_path, q, k, v, basis, codes)
    whole = empty_codes(k, 24)
    wanted = step(device_path, q, k, v, basis, whole)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(codes.progress, whole.progress)


@pytest.mark.parametrize(("softcap", "masked"), [(0.0, False), (4.0, True)])
@pytest.mark.parametrize("queries", [2, 5])
def test_several_queries_are_as_many_steps(device_path, queries, softcap, masked):
    """Of one row and of several with lengths of their own. Between the queries a block leaves the
    last ones, and its codes are made on the way."""
    q, k, v = cache(6, batch=3)
    options = {"lengths": torch.tensor([1282, 1300, 1034]), "softcap": softcap, "top_k": 100}
    if masked:
        options |= {"start": torch.tensor([0, 17, 5]), "key_mask": random(5, 3, 1300) > -1}
        options["sinks"] = random(6, 6)
    before = options | {"lengths": options["lengths"] - queries}
    basis, codes = coded(q, k, v, **before)
    together, hint = Codes(*(x.clone() for x in codes)), torch.zeros(3, 2)
    found = step(device_path, q, k, v, basis, together, queries=queries, hint=hint, **options)
    for t in range(queries):
        own = options | {"lengths": options["lengths"] - (queries - 1 - t)}
        last = q[:, :, : q.shape[2] - (queries - 1 - t)]
        want = step(device_path, last, k, v, basis, codes, hint=torch.zeros(3, 2), **own)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a[:, :, t : t + 1], b, rtol=2e-4, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(together, codes, strict=True))
    assert codes.progress[:, 0].tolist() != [8, 8, 6] and (hint > 0).all()


def test_a_batch_changes_nothing(device_path):
    q, k, v = cache(4)
    basis, codes = coded(q, k, v)
    both, _ = step(device_path, q, k, v, basis, codes)
    one = [x[1:] for x in (q, k, v)]
    basis, codes = coded(*one)
    alone, _ = step(device_path, *one, basis, codes)
    assert (alone - both[1:]).abs().max() < 2e-4


def test_a_new_token_is_written_attended_to_and_counted(device_path):
    """As the same step with the token in the cache; rows that are full give NaN and stay."""
    q, k, v = cache(8, tokens=900)
    options = {"start": torch.tensor([0, 33])}
    basis, _ = coded(q, k, v, lengths=torch.tensor([800]), **options)
    whole, fresh = empty_codes(k, 24), empty_codes(k, 24)
    lengths = torch.tensor([800, 899])
    new = [torch.stack([x[0, :, 800:801], x[1, :, 899:]]) for x in (k, v)]
    ring = torch.zeros(2, 6, 7, 64)
    with_it = {"lengths": lengths + 1, **options}
    want = step(device_path, q, k.clone(), v.clone(), basis, whole, **with_it)
    empty_k, empty_v = k.clone(), v.clone()
    for x in (empty_k, empty_v):
        x[0, :, 800], x[1, :, 899] = torch.nan, torch.nan
    found = step(
        device_path,
        *(q, empty_k, empty_v, basis, fresh),
        **{"new": new, "recent": ring, "lengths": lengths, **options},
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert torch.equal(empty_k, k) and torch.equal(empty_v, v)
    assert lengths.tolist() == [801, 900]
    assert all(torch.equal(a, b) for a, b in zip(fresh, whole, strict=True))
    wanted = torch.zeros_like(ring)
    wanted[0, :, 800 % 7], wanted[1, :, 899 % 7] = q[0, :, -1], q[1, :, -1]
    assert torch.equal(ring, wanted)
    before = [x.clone() for x in (empty_k, empty_v)]
    again = step(
        device_path,
        *(q, empty_k, empty_v, basis, fresh),
        **{"new": new, "count": False, "lengths": lengths, **options},
    )
    assert again[0][1].isnan().all() and again[0][0].isfinite().all()
    assert lengths.tolist() == [801, 900]
    assert torch.equal(empty_k[1], before[0][1]) and torch.equal(
        empty_k[0, :, 801], new[0][0, :, 0]
    )
    assert torch.equal(empty_v[1], before[1][1])


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_no_hint_changes_anything(device_path, softcap):
    """Whatever it says; and the step leaves a bin from which the next one may count."""
    q, k, v = cache(9, tokens=1300)
    options = {"lengths": torch.tensor([1300, 1200]), "softcap": softcap, "top_k": 100}
    basis, codes = coded(q, k, v, **options)
    want = step(device_path, q, k, v, basis, codes, **options)
    left = []
    guesses = (0.0, -torch.inf, torch.inf, torch.nan, -1e30, 1e30, 1.0, 100.0, 160.0, 255.0)
    for guess in guesses[: 3 if softcap else None]:
        hint = torch.full((2, 2), guess)
        found = step(device_path, q, k, v, basis, codes, hint=hint, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), guess
        left.append(hint)
    assert (left[0] > 0).all() and all((x >= 0).all() and (x < 256).all() for x in left)
    different = {tuple(hint.flatten().tolist()): hint for hint in left}
    for hint in different.values():  # too high: all were counted, and the new one is right
        again = step(device_path, q, k, v, basis, codes, hint=hint, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))


@pytest.mark.parametrize("tokens", [700, 1300, 1700])
def test_a_short_row_in_a_large_room(device_path, tokens):
    """What lies behind a row's tokens changes nothing, though plans go by the room: programs of the
    scan and of the picks that have no tokens leave early."""
    q, k, v = cache(4, tokens=tokens)
    room = torch.full((*k.shape[:2], 9000, k.shape[3]), 1e4)
    large_k, large_v = room.clone(), -room
    large_k[:, :, :tokens], large_v[:, :, :tokens] = k, v
    options = {"lengths": torch.tensor([tokens, tokens - 100]), "top_k": 100}
    basis, codes = coded(q, k, v, **options)
    want = step(device_path, q, k, v, basis, codes, **options)
    large = empty_codes(large_k, 24)
    encode_keys(large_k, large_v, basis.encoder, *large, lengths=options["lengths"])
    plan = PLAN._replace(parts=8, fewest=2, pick=pick.plan_for(4, 9000, 8))
    found = step(device_path, q, large_k, large_v, basis, large, plan=plan, **options)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_step_is_five_launches(monkeypatch):
    """No other kernel: the host only allocates and makes views."""
    q, k, v = cache(0, tokens=900)
    basis, codes = coded(q, k, v)
    launched, seen = [], []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def run(self, **_):
            launched.append(self.name)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    of = ((op.prepare, "prepare"), (op.scan, "scan"), (op.pick, "pick"), (op.attend, "attend"))
    for module, name in (*of, (op.merge, "merge")):
        monkeypatch.setattr(module.kernels, name, Kernel(name))
    named = basis._asdict() | codes._asdict() | {"q": q[:, :, -1:], "k": k, "v": v}
    named |= DEFAULTS | {"new_k": k[:, :, :1], "new_v": v[:, :, :1], "hint": torch.zeros(2, 2)}
    named |= {"lengths": torch.tensor(850), "recent": torch.zeros(2, 6, 8, 64)}
    call = op.Call(**(dict.fromkeys(op.Call._fields) | named))
    outputs = op._allocate(*call)
    with Seen():
        op.launch_sketch_decode(*call, *outputs)
    assert launched == ["prepare", "scan", "pick", "attend", "merge"]
    assert set(seen) <= {"new_empty", "view", "unsqueeze"}


def test_refusals():
    q, k, v = cache(0, tokens=200)
    basis, codes = coded(q, k, v)
    good = (q[:, :, -1:], k, v, *basis, *codes)
    with pytest.raises(ArgumentError, match="q has 17 queries a row, needs 1 to 16"):
        op.sketch_decode(q[:, :, -17:], *good[1:], scale=1.0)
    with pytest.raises(ArgumentError, match="q has 2 queries a row, with new or recent it needs 1"):
        op.sketch_decode(q[:, :, -2:], *good[1:], scale=1.0, recent=q.contiguous())
    with pytest.raises(ArgumentError, match="top_k is 0"):
        op.sketch_decode(*good, scale=1.0, top_k=0)
    with pytest.raises(ArgumentError, match="tail is 'half'"):
        op.sketch_decode(*good, scale=1.0, tail="half")
    with pytest.raises(ArgumentError, match="queries is torch"):
        op.sketch_decode(*good[:4], basis.queries[..., 1:].contiguous(), *good[5:], scale=1.0)
    with pytest.raises(ArgumentError, match="bytes is 32, 96 coordinates, more than"):
        empty_codes(k, 32)
    with pytest.raises(GradientError):
        op.sketch_decode(good[0].requires_grad_(), *good[1:], scale=1.0)
    assert rows_of(DEFAULTS) == dict.fromkeys(("lengths", "start", "key_mask"))
