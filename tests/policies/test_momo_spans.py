"""momo(top_k=None): queries at the beginning of a prompt list fewer blocks than those behind them,
wherever the prompt is cut into chunks."""

import dataclasses

import pytest
import torch
from span_cases import PADDING, ROOM, SELECTIONS, TOKENS, call, padded

from attnplug import Dense, Momo, PolicyError
from attnplug.errors import ArgumentError, GradientError
from attnplug.eval.fidelity import measure_mask
from attnplug.policies import AttentionCall, _momo_defaults, parse
from attnplug.policies import momo as policy
from attnplug.policies.auto import MeasuredMomo

NEAR, NEAR_TOP_K, FAR_TOP_K, FAR = 70, 1, 3, 150  # on the grid of 32: 96 and 160
CUT, FAR_CUT = 96, 160
MOMO = Momo(gamma=4, block=16, query_block=32, top_k=None, exact_k=1, tail=0, min_tokens=0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Spans end within a test's prompt."""
    for name in ("NEAR", "NEAR_TOP_K", "FAR_TOP_K", "FAR"):
        monkeypatch.setattr(policy, name, globals()[name])
    monkeypatch.setattr(policy, "NEAR_GAMMA", 4)
    monkeypatch.setattr(policy, "FAR_GAMMA", 16)


def of(method: Momo, **options) -> Momo:
    return dataclasses.replace(method, **options)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("room", [TOKENS, ROOM])
@pytest.mark.parametrize("options", SELECTIONS.values(), ids=SELECTIONS)
def test_each_query_block_lists_by_its_place(options, room, device):
    method, c = of(MOMO, **options), call(device, room=room)
    near, far = of(method, top_k=NEAR_TOP_K).attend(c), of(method, top_k=FAR_TOP_K).attend(c)
    found = method.attend(c)
    close(found[:, :, :CUT], near[:, :, :CUT])
    close(found[:, :, CUT:], far[:, :, CUT:])
    assert (near - far)[:, :, CUT:].abs().max() > 1e-2


def test_gamma_and_the_blocks_change_at_places_of_their_own(device):
    c, method = call(device), of(MOMO, gamma=None)
    spans = [(0, CUT, 4, 1), (CUT, FAR_CUT, 4, 3), (FAR_CUT, TOKENS, 16, 3)]
    found = method.attend(c)
    for begin, end, gamma, top_k in spans:
        alone = of(MOMO, gamma=gamma, top_k=top_k).attend(c)
        close(found[:, :, begin:end], alone[:, :, begin:end])
    budgets = method.budgets(c).tolist()
    assert budgets == [1] * 3 + [3] * 5


@pytest.mark.parametrize("gamma", [None, 4])
@pytest.mark.parametrize("chunk", [32, 96, 128, 192])
def test_chunks_on_the_grid_list_as_the_whole(chunk, gamma, device):
    method, whole, found = of(MOMO, gamma=gamma), call(device), []
    for at in range(0, TOKENS, chunk):
        end = min(at + chunk, TOKENS)
        q, k, v = whole.q[:, :, at:end], whole.k[:, :, :end], whole.v[:, :, :end]
        found.append(method.attend(dataclasses.replace(whole, q=q, k=k, v=v)))
    close(torch.cat(found, 2), method.attend(whole))


@pytest.mark.parametrize("with_padding", [False, True])
def test_code_that_knows_no_place_lists_the_most(with_padding):
    c = call("cpu", room=ROOM, batch=1)
    start = torch.tensor([PADDING], dtype=torch.int32) if with_padding else None
    mask = torch.arange(ROOM)[None] >= PADDING if with_padding else None

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(q, k, v, lengths):
        rows = dict(lengths=lengths, start=start, key_mask=mask)
        return MOMO.attend(AttentionCall(q, k, v, 0.125, **rows))

    wanted = of(MOMO, top_k=FAR_TOP_K)
    for first in (0, 64):  # a whole prompt, and a chunk that sees its beginning in the cache
        q = c.q[:, :, first:].contiguous()
        rows = dict(lengths=c.lengths, start=start, key_mask=mask)
        close(
            compiled(q, c.k, c.v, c.lengths),
            wanted.attend(AttentionCall(q, c.k, c.v, 0.125, **rows)),
        )


@pytest.mark.parametrize(("tokens", "served"), [(60, []), (100, ["eager"]), (TOKENS, "both")])
def test_code_that_knows_no_place_serves_from_where_the_most_blocks_pay(
    tokens, served, monkeypatch
):
    monkeypatch.setattr(policy, "NEAR", 100)
    monkeypatch.setattr(_momo_defaults, "CROSSOVER_FLOOR", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(
        _momo_defaults, "CROSSOVER_FACTOR", {"cpu": 4, "cuda": 4}
    )  # 64 tokens, and 192 of the most
    c, method = call("cpu", room=ROOM, batch=1), of(MOMO, min_tokens=None)
    q = c.q[:, :, :tokens].contiguous()
    lengths = torch.full((1,), tokens)
    calls = []
    monkeypatch.setattr(
        Momo, "_attend_rows", lambda self, call: calls.append("") or Dense().attend(call)
    )
    of(method).attend(AttentionCall(q, c.k, c.v, 0.125, lengths=lengths))
    eager = len(calls)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q, k, v, lengths):
        return method.is_short(AttentionCall(q, k, v, 0.125, lengths=lengths))

    found = ["eager"] * eager + ["compiled"] * (not compiled(q, c.k, c.v, lengths))
    assert found == (["eager", "compiled"] if served == "both" else served)
    whole = [x[:, :, :tokens].contiguous() for x in (c.k, c.v)]  # whose places are known
    assert method.is_short(AttentionCall(q, *whole, 0.125)) == (not eager)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_compiled_prompt_without_a_cache_is_cut_too(sinks):
    """In one graph for all lengths, however many spans they have."""
    c = call("cpu", batch=1)
    extra = {"sinks": torch.linspace(-1, 1, c.q.shape[1])} if sinks else {}
    attend = torch.compile(
        lambda q, k, v: MOMO.attend(AttentionCall(q, k, v, 0.125, **extra)),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    for turn, tokens in enumerate((210, TOKENS, 65)):
        part = [x[:, :, :tokens].contiguous() for x in (c.q, c.k, c.v)]
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            close(attend(*part), MOMO.attend(AttentionCall(*part, 0.125, **extra)))


def test_autos_momo_and_old_pickles_attend():
    """A subclass that says so is one op too; one that does not, and what lacks the text, is not."""
    same, other = MeasuredMomo(**vars_of(MOMO)), type("Other", (Momo,), {})(**vars_of(MOMO))
    assert same._text == str(MOMO) == MOMO._text and other._text is None
    old = of(MOMO)
    del vars(old)["_text"]
    c = call("cpu", batch=1)
    assert torch.equal(old.attend(c), MOMO.attend(c))


def vars_of(method):
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


def test_the_op_of_compiled_code_refuses_gradients_and_wrong_inputs(monkeypatch):
    c = call("cpu", batch=1)
    op = torch.ops.attnplug.prefill_rows.default
    rows = None, None, None, None, 0.125, 0.0, str(MOMO)
    with torch._subclasses.FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (c.q, c.k, c.v))
        with pytest.raises(ArgumentError, match=r"momo.*float16"):
            op(q.half(), k, v, *rows)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(GradientError, match="momo: an input requires grad"):
        MOMO.attend(AttentionCall(c.q.clone().requires_grad_(), c.k, c.v, 0.125))


def test_a_padded_row_lists_as_if_it_were_alone(device):
    c = padded(device)
    alone = AttentionCall(*(x[1:2, :, PADDING:] for x in (c.q, c.k, c.v)), c.scale)
    close(MOMO.attend(c)[1:2, :, PADDING:], MOMO.attend(alone))
    found, wanted = MOMO.reads(c), MOMO.reads(alone)
    assert found is not None and wanted is not None
    assert torch.equal(found.index[1:2, :, : wanted.index.shape[2]], wanted.index)


def test_the_oracle_lists_no_more_than_the_mask(device):
    c = call(device, batch=1)
    measured = measure_mask(0, c, MOMO)
    for lists in (measured.index, measured.best):
        listed = (lists >= 0).sum(-1)
        assert (listed[:, :, : CUT // 32] <= NEAR_TOP_K).all()
        assert (listed[:, :, CUT // 32 :] == FAR_TOP_K).all()
    assert 0 < measured.captured <= measured.oracle < 1


@pytest.mark.parametrize("room", [TOKENS, ROOM])
def test_padded_rows_that_end_before_a_span_does_list_as_it_says(room, device, monkeypatch):
    monkeypatch.setattr(policy, "NEAR", 256)  # behind all tokens, in front of the room's end
    c = padded(device, room=room)
    close(MOMO.attend(c), of(MOMO, top_k=NEAR_TOP_K).attend(c))


def test_what_is_read():
    blocks = (NEAR * NEAR_TOP_K + (1000 - NEAR) * FAR_TOP_K) / 1000
    assert of(MOMO, sink=0).density(1000) == pytest.approx(16 * blocks / 1000)
    assert of(MOMO, sink=0).density(NEAR) == pytest.approx(16 * NEAR_TOP_K / NEAR)


def test_the_published_places(monkeypatch):
    monkeypatch.undo()
    placed, constant = Momo(), Momo(top_k=128)
    assert parse("momo(top_k=None)").prefill == placed and str(placed) == "momo"
    far = (65536, None, 32, 128)
    assert placed.spans() == [(0, 16384, 16, 64), (16384, 65536, 16, 128), far]
    assert placed.spans(placed=False) == constant.spans() == [(0, 65536, 16, 128), far]
    assert [placed.measured_crossover(kind) for kind in ("cuda", "cpu")] == [16384, 65536]
    assert [constant.measured_crossover(kind) for kind in ("cuda", "cpu")] == [32768, 65536]
    assert Momo(top_k=64).measured_crossover("cpu") == 32768


@pytest.mark.parametrize("top_k", [0, 1025, 2.0, True, "64"])
def test_top_k_is_none_or_a_count(top_k):
    with pytest.raises(PolicyError, match=r"top_k=.*needs None or an integer, 1 to 1024"):
        Momo(top_k=top_k)
