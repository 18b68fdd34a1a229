"""exact: how many drafts a round makes, and whether rounds go on."""

import math
import random

import pytest
import torch
from exact_cases import (
    GVR,
    HEAVY,
    ROWS,
    SAMPLED,
    SKETCH,
    as_over_heavy_caches,
    call,
    exact,
    ids_of,
    padding_model,
    rows_of,
    tally,
    windowed,
)
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import attnplug
from attnplug.models import pace, round_steps, rounds
from attnplug.policies import exact as policy


@pytest.fixture
def model(device):
    return padding_model(device)


def drafts_of_rounds(model, monkeypatch, policy, ids=None, **options):
    """How many drafts each round of a call made, which gives dense's tokens."""
    made, judge = [], rounds.Rounds._verify
    note = lambda self, drafts, *a: made.append(drafts) or judge(self, drafts, *a)  # noqa: E731
    monkeypatch.setattr(rounds.Rounds, "_verify", note)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, new=60, **options)
    with attnplug.applied(model, policy):
        assert call(model, ids, new=60, **options)[0] == wanted
        found, text = tally(model), str(attnplug.report(model))
    assert found.drafted == sum(made) and found.rounds == len(made)
    assert f"rounds of {sum(made) / len(made):.2g} drafts" in text
    return made


def test_auto_drafts_as_many_as_are_accepted(model, monkeypatch):
    """A draft that reads all is right each time, one that is always wrong hardly ever."""
    as_over_heavy_caches(monkeypatch)
    assert drafts_of_rounds(model, monkeypatch, exact("gather", "auto"))[-2:] == [8, 8]
    judge = rounds.Rounds._verify

    def wrong(self, *args):
        self.feed.tokens[:, 1:] = 96  # which dense chooses now and then
        judge(self, *args)

    monkeypatch.setattr(rounds.Rounds, "_verify", wrong)
    made = drafts_of_rounds(model, monkeypatch, exact("gather", "auto"))
    assert made[0] == 5 and set(made[12:]) == {1}


def test_what_a_round_has_not_drafted_is_not_accepted(model, monkeypatch):
    """Behind the one draft of each round stands what dense will choose."""
    with attnplug.applied(model, "dense"):
        _, text = call(model, new=60)
    monkeypatch.setattr(pace.Pace, "next", lambda self: 1)
    judge = rounds.Rounds._verify

    def fill(self, drafts, options):
        more = text[0, self.lengths[0] + drafts :][: self.most - drafts]
        self.feed.tokens[0, drafts + 1 : drafts + 1 + len(more)] = more
        judge(self, drafts, options)

    monkeypatch.setattr(rounds.Rounds, "_verify", fill)
    assert drafts_of_rounds(model, monkeypatch, exact("gather", "auto")) == [1] * 30


@pytest.mark.parametrize("p", [0.05, 0.5, 0.8, 0.95, 0.999])
def test_the_next_round_has_most_tokens_for_its_time(p):
    made = pace.Pace(8, HEAVY, accepted=10 * p, judged=10)
    draws = torch.rand((200_000, 8), generator=torch.Generator().manual_seed(3)) < p
    tokens = [1 + draws[:, :n].int().cumprod(1).sum(1).float().mean() for n in range(1, 9)]
    rates = [float(x) / (n + HEAVY.verification) for n, x in enumerate(tokens, 1)]
    assert rates[made.next() - 1] > 0.995 * max(rates)


def test_a_pace_forgets():
    made = pace.Pace(8, HEAVY)
    for _ in range(20):
        made.note([0], 8)
    assert made.next() == 1
    for _ in range(16):
        made.note([8], 8)
    assert made.next() == 8


@pytest.fixture
def chosen(monkeypatch):
    """Rounds by the policy's own choice, over caches that weigh as much as the weights do, of steps
    that are ready at once."""
    for table in (policy.CROSSOVER, policy.ROW_CROSSOVER):
        monkeypatch.setitem(table, "cpu", 1)
        monkeypatch.setitem(table, "cuda", 1)
    monkeypatch.setattr(rounds, "costs_of", lambda *about: pace.Costs(1.5, 1.6, 0.0))
    monkeypatch.setattr(pace, "BEHIND", 4)  # calls are short here


def wrong_from(count, monkeypatch):
    """Drafts of which none is dense's from a call's round `count` on."""
    judge = rounds.Rounds._verify

    def wrong(self, *args):
        if self.tally.rounds + (self.unread is not None) >= count:
            tokens = self.feed.tokens
            tokens[:, 1:] = (tokens[:, 1:] + 1) % 60
        judge(self, *args)

    monkeypatch.setattr(rounds.Rounds, "_verify", wrong)


def defaults(draft, m):
    return f"exact(draft={draft!r}, m={m!r})"


@pytest.mark.parametrize(("m", "options"), [(4, {}), ("auto", SAMPLED)], ids=["4", "auto, sampled"])
@pytest.mark.parametrize("draft", ["gather", GVR, SKETCH])
@pytest.mark.parametrize("what", ["one row", *ROWS])
def test_rounds_end_where_they_do_not_pay(model, chosen, what, draft, m, options, monkeypatch):
    ids, more = (ids_of(), {}) if what == "one row" else rows_of(what, model)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, new=40, **options, **more)
    wrong_from(2, monkeypatch)
    with attnplug.applied(model, defaults(draft, m)):
        assert call(model, ids, new=40, **options, **more)[0] == wanted
        found, text = tally(model), str(attnplug.report(model))
    assert found.ended and 0 < found.rounds < 14
    assert "dense steps decoded the rest" in text


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("what", ["one row", *ROWS])
def test_windows_move_on_with_dense_steps(device, chosen, what, options, monkeypatch):
    hybrid = windowed(device)
    ids, more = (ids_of(), {}) if what == "one row" else rows_of(what, hybrid)
    with attnplug.applied(hybrid, "dense"):
        wanted, _ = call(hybrid, ids, new=45, **more, **options)
        after = torch.rand(3, device=hybrid.device)
    wrong_from(2, monkeypatch)
    with attnplug.applied(hybrid, defaults("gather", 4)):
        for _ in range(2):
            assert call(hybrid, ids, new=45, **more, **options)[0] == wanted
            assert torch.equal(torch.rand(3, device=hybrid.device), after)
            assert tally(hybrid).ended


def test_a_row_that_has_ended_stays_at_its_position(device, chosen, monkeypatch):
    """Learned positions: one row is far ahead when rounds end, and the others go on without it."""
    config = GPT2Config(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=150 + 60 + 8, eos_token_id=None,
        bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device).eval()
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids_of(rows=2), new=60)
    judge = rounds.Rounds._verify

    def wrong(self, *args):
        self.feed.tokens[1, 1:] = (self.feed.tokens[1, 1:] + 1) % 60
        judge(self, *args)

    monkeypatch.setattr(rounds.Rounds, "_verify", wrong)
    monkeypatch.setattr(pace.Pace, "pays", lambda self, left: self.judged < 30)
    fed, step = [], rounds.dense_step
    note = lambda model, cache, *a: fed.append(a[1].max().item()) or step(model, cache, *a)  # noqa: E731
    monkeypatch.setattr(rounds, "dense_step", note)
    with attnplug.applied(model, defaults("gather", 4)):
        assert call(model, ids_of(rows=2), new=60)[0] == wanted
        assert tally(model).ended
    assert len(fed) > 20 and max(fed) < 150 + 60


def test_rounds_that_pay_go_on(model, chosen):
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, new=60)
    with attnplug.applied(model, defaults("gather", 4)):
        assert call(model, new=60)[0] == wanted
        assert not tally(model).ended and tally(model).accepted > 40


def test_asked_for_they_go_on_whatever_they_cost(model, chosen, monkeypatch):
    wrong_from(0, monkeypatch)
    with attnplug.applied(model, exact("gather", 4)):
        call(model, new=40)
        assert not tally(model).ended and tally(model).rounds == 39


@pytest.mark.parametrize("what", ["rows", "padded rows"])
def test_holes_are_closed_for_dense_steps_too(model, chosen, what, monkeypatch):
    ids, more = rows_of(what, model)
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, ids, new=90, **more)
    wrong_from(1, monkeypatch)
    closed, close = [], rounds.close_holes
    note = lambda *a: closed.append(a) or close(*a)  # noqa: E731
    monkeypatch.setattr(rounds, "close_holes", note)
    with attnplug.applied(model, defaults("gather", 4)):
        assert call(model, ids, new=90, **more)[0] == wanted
        assert tally(model).ended
    assert closed


@pytest.mark.parametrize("draft", ["gather", "gvr(k=256)", "sketch(k=256)"])
def test_the_next_turn_drafts_over_what_dense_steps_wrote(model, chosen, draft, monkeypatch):
    """A cache that is kept: summaries, codes and counts know the tokens of both kinds of steps."""
    ids = ids_of()
    answers = {}
    for name in ("dense", defaults(draft, 4)):
        with attnplug.applied(model, name), monkeypatch.context() as patched:
            cache = attnplug.make_cache(model, 400)
            if name != "dense":
                wrong_from(1, patched)
            first, out = call(model, ids, new=60, past_key_values=cache)
            if name != "dense":
                assert tally(model).ended
            patched.undo()
            longer = torch.cat([out, ids_of(20, seed=5).to(out.device)], 1)
            answers[name] = first, call(model, longer, new=60, past_key_values=cache)[0]
            if name != "dense":
                assert not tally(model).ended and tally(model).accepted > 20
    assert answers["dense"] == answers[defaults(draft, 4)]


def test_rounds_end_once_they_are_behind_dense():
    """A round of four drafts and a verification of 1.6 runs as long as 5.6 / 1.5 dense steps. Two
    and four accepted drafts in turn give more tokens than those, two each time fewer."""
    costs = pace.Costs(dense=1.5, verification=1.6, ready=0)
    loss = 5.6 / 1.5 - 3

    def rounds_of(accepted, **more):
        made = pace.Pace(4, costs, False, **more)
        for count in range(1000):
            if not made.pays(100):
                return count
            made.note(accepted(count), 4)
        return math.inf

    assert rounds_of(lambda count: [2]) == math.ceil(pace.BEHIND / loss)
    assert rounds_of(lambda count: [2, 2]) == math.ceil(pace.BEHIND / loss)  # rows of a batch
    assert rounds_of(lambda count: [2], ends=False) == math.inf
    assert rounds_of(lambda count: [2 + count % 2 * 2]) == math.inf
    good = 50  # rounds that are ahead of dense, which later ones gain nothing by
    assert rounds_of(lambda count: [4 if count < good else 2]) == good + math.ceil(
        pace.BEHIND / loss
    )


@pytest.mark.parametrize("p", [0.88, 0.95])
def test_chance_does_not_end_rounds_that_pay(p):
    """1,000 new tokens at what a row of 131,072 tokens costs on an H200."""
    draw, ended = random.Random(3), 0
    for _ in range(200):
        made, tokens = pace.Pace(8, pace.Costs(1.3, 1.26, 24)), 0
        while tokens < 1000 and made.pays(1000 - tokens):
            drafts = made.next()
            right = next((i for i in range(drafts) if draw.random() >= p), drafts)
            made.note([right], drafts)
            tokens += right + 1
        ended += tokens < 1000
    assert ended <= 10


def test_a_light_cache_wants_rounds_of_few_drafts_and_a_heavy_one_of_many():
    """Where nine drafts of ten are accepted. The light costs are what an H200 took over a row of
    131,072 tokens of a 7B model, where dense steps give 1 token in the time of 1.3 drafts."""
    light, heavy = pace.Costs(1.3, 1.26, 0), pace.Costs(3, 4, 0)
    known = dict(accepted=18, judged=20)
    assert pace.Pace(8, light, **known).next() <= 2
    assert pace.Pace(8, heavy, **known).next() >= 6
    chosen, fixed = (pace.Pace(6, light, varies, **known) for varies in (True, False))
    assert chosen._best()[0] * light.dense > 1.05 > 1 > fixed._best()[0] * light.dense


@pytest.mark.parametrize("m", [1, 6, 15])
def test_a_cache_that_is_too_light_has_no_rounds(model, chosen, m, monkeypatch):
    """And the report says why."""
    monkeypatch.setattr(rounds, "costs_of", lambda *about: pace.Costs(1.01, 1.01, 0.0))
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model, new=40)
    with attnplug.applied(model, defaults("gather", m)):
        assert call(model, new=40)[0] == wanted
        assert tally(model).rounds == 0
        assert "rounds would not pay over so light a cache" in str(attnplug.report(model))


def test_the_second_step_must_pay(model, chosen, monkeypatch):
    """A round of four drafts and a verification of 1.6 takes 5.6 drafts and gives 4.1 tokens if 0.9
    of drafts are accepted; for these dense takes 1.5 each. A step that takes 3 drafts to be made
    ready takes 46 tokens to make up for twice."""
    costs = pace.Costs(1.5, 1.6, 3.0)
    tokens = (1 - 0.9**5) / 0.1
    least = pace.Pace(4, costs, False).least()
    assert least == pytest.approx(2 * 3 / (1.5 - 5.6 / tokens)) and 45 < least < 46
    monkeypatch.setattr(rounds, "costs_of", lambda *about: costs)
    ids = ids_of(150)
    for new, begins in ((45, False), (46, True)):
        with attnplug.applied(model, defaults("gather", 4)):
            call(model, ids, new=new)
            assert (tally(model).rounds > 0) is begins
            told = "45 new tokens, and rounds pay from 46 on" in str(attnplug.report(model))
            assert told is not begins
    with attnplug.applied(model, exact("gather", 4)):  # asked for
        call(model, ids, new=10)
        assert tally(model).rounds > 0


def test_a_cache_below_the_crossover_is_not_weighed(model, monkeypatch):
    """Its room is the reason, whatever rounds would cost."""
    monkeypatch.setattr(rounds, "pace_of", None)
    with attnplug.applied(model, "exact"):
        call(model, new=4)
        (why,) = {each.decode for each in attnplug.report(model).last}
    assert "worth while" in why or "it serves from" in why


def test_few_tokens_are_left_to_rounds_that_do_not_pay():
    """A dense step would take longer to be made ready than the tokens that are left."""
    costs = pace.Costs(1.5, 1.6, 6.0)
    made = pace.Pace(4, costs, False, accepted=0, judged=20, behind=99)  # 1 token in 5.6 drafts
    assert made.pays(1) and not made.pays(2)


def test_costs_of_experts_are_of_those_that_tokens_go_to():
    config = MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    mixtral = MixtralForCausalLM(config)
    stacked = sum(x.nbytes for x in mixtral.parameters() if x.dim() == 3)
    whole = sum(x.nbytes for x in mixtral.parameters())
    for rows, share in ((1, 1 / 4), (2, 1 / 2), (4, 1), (9, 1)):
        assert stacked and pace._weights_of(mixtral, rows) == whole - (1 - share) * stacked


def test_a_layer_that_never_runs_costs_nothing(model, chosen, monkeypatch):
    """Its count of tokens is on the host, which a step must not ask."""
    model.model.layers = model.model.layers[:1]
    with attnplug.applied(model, "dense"):
        wanted, _ = call(model)
    seen, own = [], round_steps.take_back
    note = lambda layers, tokens: seen.extend(layers) or own(layers, tokens)  # noqa: E731
    monkeypatch.setattr(round_steps, "take_back", note)
    with attnplug.applied(model, defaults("gather", 4)):
        assert call(model)[0] == wanted
    assert seen and all(layer.is_initialized for layer in seen)


def test_costs_are_of_the_cache_beside_the_weights(model):
    with attnplug.applied(model, "exact"):
        cache = attnplug.make_cache(model, 300)
        with torch.no_grad():
            model(ids_of(200).to(model.device), past_key_values=cache)
        found = pace.costs_of(model, cache.layers, 100)
        one = pace.costs_of(model, cache.layers[:1], 100)  # of a model with sliding windows
    held = sum(2 * layer.keys[:, :, :100].nbytes for layer in cache.layers)
    weights = sum(each.nbytes for each in model.parameters())
    ready = pace.READY * len(cache.layers) / weights  # the host makes all layers ready
    share = held / weights
    assert found == pytest.approx((1 + 0.55 * share, 1.05 + 0.6 * share, ready))
    assert len(cache.layers) > 1 and one.ready == found.ready
