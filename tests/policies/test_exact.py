"""exact: its tokens are dense's, whatever drafts, and so is all that a call leaves behind."""

import pytest
import torch
from exact_cases import (
    DRAFTS,
    FAR,
    GVR,
    NEW,
    SAMPLED,
    SHORT,
    SKETCH,
    call,
    exact,
    ids_of,
    padding_model,
    tally,
)

import attnplug
from attnplug import PolicyError
from attnplug.models import decode_loop, rounds
from attnplug.policies.exact import Exact


@pytest.fixture
def model(device):
    return padding_model(device)


@pytest.mark.parametrize(
    ("m", "options"),
    [(1, {}), (4, {}), (15, {}), (4, SAMPLED), ("auto", {}), ("auto", SAMPLED)],
    ids=["1", "4", "15", "4, sampled", "auto", "auto, sampled"],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_are_denses(model, draft, m, options):
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, **options)
        after = torch.rand(3, device=model.device)
    with attnplug.applied(model, exact(draft, m)):
        for _ in range(2):
            assert call(model, **options)[0] == wanted
            assert torch.equal(torch.rand(3, device=model.device), after)
        assert tally(model).rounds > 0
        assert "rounds of" in str(attnplug.report(model))
        last = attnplug.report(model).last
        assert {(each.prefill, each.decode) for each in last} == {("dense", "exact")}


def test_a_draft_that_covers_the_text_is_accepted_whole(model):
    with attnplug.applied(model, exact("gather", 5)):
        call(model, new=25)
        found = tally(model)
    assert found.accepted == found.drafted and found.rounds == 4  # 1 + 4 x (5 + 1)


def test_a_draft_that_is_wrong_costs_rounds_and_no_token(model):
    with attnplug.applied(model, exact(FAR, 5)):
        call(model, new=25)
        assert tally(model).rounds > 12


@pytest.mark.parametrize("draft", [SHORT, FAR])
def test_a_round_begins_before_the_host_has_read_the_last_one(model, draft, monkeypatch):
    """What it has fed for a row that has ended is taken back."""
    order = []
    for name in ("_draft", "_verify", "_read"):
        step = getattr(rounds.Rounds, name)
        note = lambda self, *a, n=name, f=step: order.append(n) or f(self, *a)  # noqa: E731
        monkeypatch.setattr(rounds.Rounds, name, note)
    ids = ids_of()
    with attnplug.applied(model, "dense"):
        free, _ = call(model, ids, new=60)
    for end in (7, 8, 9, 10, 11, 30):
        stops = dict(eos_token_id=free[0][end], pad_token_id=0, return_dict_in_generate=True)
        with attnplug.applied(model, "dense"):
            wanted, out = call(model, ids, new=60, **stops)
            tokens = int(out.past_key_values.layers[0].cumulative_length)
        with attnplug.applied(model, exact(draft, 3)):
            order.clear()
            found, out = call(model, ids, new=60, **stops)
        assert found == wanted
        assert order[:5] == ["_draft"] * 3 + ["_verify", "_draft"] and order[5] == "_read"
        for layer in out.past_key_values.layers:
            assert int(layer.cumulative_length) == tokens == len(ids[0]) + len(found[0]) - 1


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_few_tokens(model, new):
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, new=new)
    with attnplug.applied(model, exact(SHORT, 6)):
        assert call(model, new=new)[0] == wanted


@pytest.mark.parametrize("draft", [SHORT, "gather(k=2, block=16, bounds='int8')", GVR, SKETCH])
def test_what_a_call_leaves_in_its_cache_is_what_dense_would_have_left(model, draft):
    ids, later = ids_of(), ids_of(20, seed=4)
    with attnplug.applied(model, "dense"):
        wanted, first = call(model, ids, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, later.to(model.device)], 1).cpu()
        again, _ = call(model, longer, past_key_values=first.past_key_values)
        stock = first.past_key_values.layers
    with attnplug.applied(model, exact(draft, 5)):
        found, out = call(model, ids, return_dict_in_generate=True)
        assert found == wanted
        mine = out.past_key_values.layers
        for a in mine:
            assert int(a.cumulative_length) == ids.shape[1] + NEW - 1 and a.round_part == ""
        assert call(model, longer, past_key_values=out.past_key_values)[0] == again
        tokens = longer.shape[1]
        for a, b in zip(mine, stock, strict=True):
            assert torch.allclose(a.keys[:, :, :tokens], b.keys[:, :, :tokens], atol=1e-4)


def test_summaries_are_those_of_a_call_without_drafts(model):
    kept = {}
    for policy in (exact("gather(k=2, block=16, sink=1, local=1)", 5), "dense"):
        with attnplug.applied(model, policy):
            _, out = call(model, new=40, return_dict_in_generate=True)
            kept[policy] = out.past_key_values
    mine, stock = kept.values()
    for layer, plain in zip(mine.layers, stock.layers, strict=True):
        done = int(layer.progress[0, 0])
        assert done >= 150 // 16
        fresh = type(layer)(layer.max_cache_len, layer.block, layer.form, layer.serves)
        tokens = int(layer.cumulative_length)
        fresh.update(plain.keys[:, :, :tokens].clone(), plain.values[:, :, :tokens].clone())
        fresh.summarise(None, None)
        assert torch.allclose(layer.bounds[:, :, :done], fresh.bounds[:, :, :done], atol=1e-4)


def test_momo_serves_the_prompt_and_never_a_verification(model, monkeypatch):
    momo = "momo(gamma=8, block=16, query_block=16, top_k=8, tail=8, min_tokens=0)"
    with attnplug.applied(model, f"{momo}+dense"):
        wanted, _ = call(model)
    seen = []
    attend = attnplug.Momo.attend
    monkeypatch.setattr(attnplug.Momo, "attend", lambda *a: seen.append(a[1].q.shape) or attend(*a))
    with attnplug.applied(model, exact(SHORT, 5, f"{momo}+")):
        assert call(model)[0] == wanted
    assert seen and all(shape[2] == 150 for shape in seen)


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.3),
        dict(num_beams=2),
        dict(prompt_lookup_num_tokens=3),
        dict(use_cache=False),
    ],
    ids=str,
)
def test_calls_without_rounds_are_denses(model, options):
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, **options)
    with attnplug.applied(model, exact(FAR, 5)):
        assert call(model, **options)[0] == wanted
        assert tally(model).rounds == 0


@pytest.mark.parametrize(
    "options", [dict(min_new_tokens=20), dict(suppress_tokens=[7, 9])], ids=str
)
def test_processors_that_look_at_lengths_alone(model, options):
    with attnplug.applied(model, "dense"):
        free, _ = call(model)
        ends = dict(eos_token_id=free[0][4])
        wanted, _ = call(model, **ends, **options)
    with attnplug.applied(model, exact(SHORT, 5)):
        assert call(model, **ends, **options)[0] == wanted
        assert tally(model).rounds > 0


def test_a_draft_that_is_no_number_is_no_token(model, monkeypatch):
    """Dense's pass is sound, and says what comes."""
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, **SAMPLED)
    step = decode_loop.decode_step

    def broken(*args):
        logits = step(*args)
        return logits if logits is None else torch.full_like(logits, torch.nan)

    monkeypatch.setattr(decode_loop, "decode_step", broken)
    with attnplug.applied(model, exact("gather", 3)):
        assert call(model, **SAMPLED)[0] == wanted and tally(model).accepted == 0


NONE = {
    "short room": "a round wants 5 behind",
    "moving rope": "rotary embeddings depend on the longest position",
}


@pytest.mark.parametrize("what", NONE)
def test_what_has_no_rounds_decodes_by_dense(model, what):
    ids, options = ids_of(), {}
    if what == "moving rope":
        model.model.rotary_emb.rope_type = "dynamic"
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, **options)
    with attnplug.applied(model, exact(FAR, 5)):
        if what == "short room":
            options["past_key_values"] = attnplug.make_cache(model, 150 + NEW)
        assert call(model, ids, **options)[0] == wanted
        assert tally(model).rounds == 0
        assert all(NONE[what] in each.decode for each in attnplug.report(model).last)


def test_learned_positions_end_no_process(device):
    """A verification is fed behind the last token, where GPT-2 has no position."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_positions=150 + NEW, n_embd=64, n_layer=2, n_head=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(config).to(device).eval()
    with attnplug.applied(gpt2, "dense"):
        wanted, _ = call(gpt2)
    with attnplug.applied(gpt2, exact(FAR, 5)):
        assert call(gpt2)[0] == wanted and tally(gpt2).rounds == 0
        assert "learned positions end" in attnplug.report(gpt2).last[0].decode
        few, _ = call(gpt2, new=8)
        assert few[0] == wanted[0][:8] and tally(gpt2).rounds > 0


def test_a_loop_of_your_own_is_denses(model):
    ids = ids_of().to(model.device)
    with attnplug.applied(model, exact(FAR, 5)), torch.no_grad():
        cache = attnplug.make_cache(model, 200)
        model(ids[:, :-1], past_key_values=cache)
        found = model(ids[:, -1:], past_key_values=cache).logits
        assert "drafts are made in generate's loop only" in str(attnplug.report(model).last)
    with torch.no_grad():
        assert torch.allclose(found[:, -1], model(ids).logits[:, -1], atol=1e-4)


def test_a_hostile_step_changes_no_token(model, monkeypatch):
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model)
    step = rounds.Rounds._draft

    def other(self, drafts, options):
        step(self, drafts, options)
        self.feed.tokens[:, 1:] = (self.feed.tokens[:, 1:] + 1) % 60

    monkeypatch.setattr(rounds.Rounds, "_draft", other)
    with attnplug.applied(model, exact("gather", 5)):
        assert call(model)[0] == wanted
        assert tally(model).accepted == 0


def test_a_row_that_torch_could_not_sample_from_raises(model):
    with torch.no_grad():
        model.lm_head.weight[:] = float("nan")
    with attnplug.applied(model, exact("gather", 3)), pytest.raises(RuntimeError, match="nan"):
        call(model, **SAMPLED)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(draft="dense"), "there are gather, gvr, sketch"),
        (dict(draft="exact"), "there are gather, gvr, sketch"),
        (dict(draft="momo"), "there are gather, gvr, sketch"),
        (dict(draft="gather+gvr"), "keep one"),
        (dict(draft="gather(kv='host')"), "kv='gpu'"),
        (dict(draft="sketch(kv='host')"), "kv='gpu'"),
        (dict(draft="sketch(audit=64)"), "without audits"),
        (dict(draft="sketch", m=9), "1 to 8 where sketch drafts"),
        (dict(draft="gather(k=-1)"), "k=-1"),
        (dict(draft="gathr"), "Did you mean gather"),
        (dict(draft=3), "a method's name"),
        (dict(m=0), "1 to 15"),
        (dict(m=16), "1 to 15"),
        (dict(m=2.0), "an integer"),
        (dict(m=True), "an integer"),
        (dict(m="six"), "or 'auto'"),
        (dict(min_tokens=-1), "at least 0"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(PolicyError, match=match):
        Exact(**options)


def test_its_text_is_read_back():
    auto = attnplug.policies.parse("exact(m='auto')")
    assert auto.decode == Exact(m="auto") and attnplug.policies.parse(str(auto)) == auto
    policy = attnplug.policies.parse("momo+exact(draft='gather(k=64)', m=4)")
    assert attnplug.policies.parse(str(policy)) == policy
    assert policy.decode.drafter == attnplug.Gather(k=64, min_tokens=0)
