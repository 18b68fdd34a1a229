"""Studies: paired, repeatable, resumable; broken policies are told apart from dense."""

import dataclasses
import json
from collections import Counter
from typing import ClassVar

import pytest
import torch

from attnplug.call import causal_mask
from attnplug.errors import ArgumentError, PolicyError
from attnplug.eval.control import RandomBlocks
from attnplug.eval.generate import replies
from attnplug.eval.measure import DECODES, prose_window
from attnplug.eval.output import COLUMNS
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import STOCK, Outcome, Study, commit, run_study
from attnplug.eval.tasks import make_sample
from attnplug.policies import AttentionCall, Dense, Phase, Policy, parse

CONTROL = "random_blocks(top_k=1)"


@dataclasses.dataclass(frozen=True)
class Nearsighted(Phase):
    """Sees the last 16 keys only: a third party's policy, broken."""

    name: ClassVar[str] = "nearsighted"
    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})

    def attend(self, call: AttentionCall) -> torch.Tensor:
        groups = call.q.shape[1] // call.k.shape[1]
        k, v = (x.nan_to_num().repeat_interleave(groups, 1) for x in (call.k, call.v))
        near = causal_mask(call)
        far = near.flip(-1).cumsum(-1).flip(-1) > 16
        return torch.nn.functional.scaled_dot_product_attention(
            call.q, k, v, attn_mask=near & ~far, scale=call.scale
        )


def study(**options) -> Study:
    defaults = dict(policies=[CONTROL], tasks=["needle-noise"], lengths=[200], trials=4)
    return Study(**(defaults | options))


def run(model, tokenizer, path, **options) -> Outcome:
    clock = {"clock": options.pop("clock")} if "clock" in options else {}
    return run_study(model, tokenizer, "tiny", study(**options), path, **clock)


def undated(rows):
    return [{key: value for key, value in row.items() if key != "date"} for row in rows]


def test_every_policy_and_dense_get_the_same_prompts(tiny, tokenizer, tmp_path):
    outcome = run(tiny, tokenizer, tmp_path / "s.jsonl", policies=[CONTROL, Dense()])
    assert Counter(r["policy"] for r in outcome.records) == {STOCK: 4, CONTROL: 4, "dense": 4}
    for trial in range(4):
        mine = [r for r in outcome.records if r["trial"] == trial]
        assert len({r["prompt_hash"] for r in mine}) == 1
        assert len({r["reply"] for r in mine if r["policy"] != CONTROL}) == 1
    record = outcome.records[0]
    assert record["template"].startswith("chat-") and record["tokenizer"].endswith("-49152")
    assert (record["seed"], record["depths"], record["n"]) == (0, [0.45], 200)
    assert 180 <= record["tokens"] <= 200


def test_two_runs_give_the_same_samples_and_rows(tiny, tokenizer, tmp_path):
    options = dict(tasks=["needle-noise", "perplexity", "fidelity", "captured-mass"], lengths=[300])
    one = run(tiny, tokenizer, tmp_path / "one.jsonl", trials=2, **options)
    two = run(tiny, tokenizer, tmp_path / "two.jsonl", trials=2, **options)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert undated(make_rows(one.records)) == undated(make_rows(two.records))
    tasks = {row["task"] for row in make_rows(one.records)}
    assert {"needle-noise", "perplexity", "agreement", "kl", "total-variation"} <= tasks
    assert {"captured-mass", "captured-mass-of-oracle"} <= tasks


def test_a_stopped_run_resumes_to_the_same_rows(tiny, tokenizer, tmp_path):
    whole = run(tiny, tokenizer, tmp_path / "whole.jsonl", trials=6, batch=2)
    ticks = iter(range(100))
    path = tmp_path / "part.jsonl"
    options = dict(trials=6, batch=2)
    part = run(tiny, tokenizer, path, limit_seconds=1.5, clock=lambda: next(ticks), **options)
    assert part.stopped and len(part.records) == 4  # one batch of two, dense and the policy
    assert all(row["trials"] == 2 for row in make_rows(part.records))
    # An interruption in the middle of a write: a torn line, and a batch known in part.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40])
    resumed = run(tiny, tokenizer, path, **options)
    assert not resumed.stopped
    assert undated(make_rows(resumed.records)) == undated(make_rows(whole.records))
    assert sorted(path.read_text().splitlines()) == sorted(
        (tmp_path / "whole.jsonl").read_text().splitlines()
    )


def test_processes_that_claim_batches_make_the_whole(tiny, tokenizer, tmp_path):
    """A batch belongs to the first that begins it, and what a process left undone to the others."""
    options = dict(trials=5, batch=2)
    whole = run(tiny, tokenizer, tmp_path / "whole.jsonl", **options)
    claims, ticks = tmp_path / "claims", iter(range(100))
    first = run(
        tiny, tokenizer, tmp_path / "0.jsonl", claims=claims, limit_seconds=1.5,
        clock=lambda: next(ticks), **options,
    )  # fmt: skip
    second = run(tiny, tokenizer, tmp_path / "1.jsonl", claims=claims, **options)
    third = run(tiny, tokenizer, tmp_path / "2.jsonl", claims=claims, **options)
    assert len(first.records) == 4 and not third.records
    assert {r["trial"] for r in first.records}.isdisjoint(r["trial"] for r in second.records)
    parts = sorted(first.records + second.records, key=lambda record: record["trial"])
    assert undated(make_rows(parts)) == undated(make_rows(whole.records))


def test_other_steps_have_rows_of_their_own(tiny, tokenizer, tmp_path, monkeypatch):
    """Names that say which windows, and the code's commit."""
    monkeypatch.setenv("ATTNPLUG_COMMIT", "abc")
    commit.cache_clear()
    for name in ("long-decode", "topic-change"):
        shorter = dataclasses.replace(DECODES[name], window=prose_window, steps=8)
        monkeypatch.setitem(DECODES, name, shorter)
    options = dict(tasks=["fidelity", "long-decode", "topic-change"], lengths=[300])
    found = run(tiny, tokenizer, tmp_path / "s.jsonl", trials=1, **options)
    commit.cache_clear()
    rows = make_rows(found.records)
    assert {row["commit"] for row in rows} == {"abc"}
    tasks = {row["task"] for row in rows}
    for prefix in ("", "long-", "topic-"):
        assert {f"{prefix}kl", f"{prefix}agreement", f"{prefix}decode-perplexity"} <= tasks


def test_what_is_known_is_not_run_again(tiny, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    run(tiny, tokenizer, path, trials=2)
    before = path.read_bytes()
    monkeypatch.setattr(tiny, "generate", None)
    again = run(tiny, tokenizer, path, trials=2)
    assert len(again.records) == 4 and path.read_bytes() == before


def test_more_trials_and_another_seed_ask_new_questions(tiny, tokenizer, tmp_path):
    path = tmp_path / "s.jsonl"
    run(tiny, tokenizer, path, trials=2)
    run(tiny, tokenizer, path, trials=3)
    run(tiny, tokenizer, path, trials=2, seed=1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(r["seed"] for r in records) == {0: 6, 1: 4}
    assert len({r["prompt_hash"] for r in records}) == 5


def test_a_batch_answers_as_its_rows_alone(tiny, tokenizer):
    ids = torch.randint(100, 1000, (2, 150), generator=torch.Generator().manual_seed(0))
    prompts = [ids[:1], ids[1:, :120]]
    policies = {STOCK: None} | study(policies=["dense"]).parsed()
    together = replies(tiny, tokenizer, prompts, policies, 6)
    alone = [replies(tiny, tokenizer, [prompt], policies, 6) for prompt in prompts]
    for policy, found in together.items():
        assert found == [each[policy][0] for each in alone]


@dataclasses.dataclass(frozen=True)
class FarsightedDecode(Phase):
    """Dense decode that forgets the last 40 keys: a decode method unlike dense."""

    name: ClassVar[str] = "farsighted"
    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert call.lengths is not None
        return Dense().attend(dataclasses.replace(call, lengths=call.lengths - 40))


def test_policies_that_share_a_prefill_run_it_once(tiny, tokenizer, monkeypatch):
    samples = [make_sample(tokenizer, "needle-noise", 200, trial) for trial in range(2)]
    prompts = [samples[0].ids, samples[1].ids[:, 20:]]
    policies = {"dense": parse("dense"), "far": Policy(decode=FarsightedDecode()), STOCK: None}
    wanted = {name: replies(tiny, tokenizer, prompts, {name: p}, 8)[name]
              for name, p in policies.items()}  # fmt: skip
    prefills = []
    attend = Dense.attend
    count = lambda self, call: prefills.append(call.q.shape[2]) or attend(self, call)  # noqa: E731
    monkeypatch.setattr(Dense, "attend", count)
    assert replies(tiny, tokenizer, prompts, policies, 8) == wanted
    assert sum(tokens > 1 for tokens in prefills) == tiny.config.num_hidden_layers
    assert wanted["dense"] != wanted["far"]


def test_a_reply_ends_where_the_model_ended_it(tiny, tokenizer, monkeypatch):
    """Also where the first token, which the shared prefill gives, is the end."""
    ids = torch.randint(100, 1000, (1, 50), generator=torch.Generator().manual_seed(0))
    policies = {"dense": parse("dense"), "far": Policy(decode=FarsightedDecode())}
    first = tiny(ids).logits[0, -1].argmax().item()
    monkeypatch.setattr(tiny.generation_config, "eos_token_id", [first, 5])
    assert replies(tiny, tokenizer, [ids], policies, 8) == {"dense": [""], "far": [""]}


def test_cells_that_cannot_be_are_left_out_and_named(tiny, tokenizer, tmp_path):
    options = dict(tasks=["common-words", "needle-noise", "captured-mass"], lengths=[200, 2000])
    outcome = run(tiny, tokenizer, tmp_path / "s.jsonl", policies=["dense"], trials=1, **options)
    assert "needs at least 1" in outcome.left_out["common-words at 200"]
    assert outcome.left_out["2,000 tokens"] == "the model has 1024 positions"
    assert outcome.left_out["captured-mass of dense"] == "its prefill has no block mask"
    assert {row["task"] for row in make_rows(outcome.records)} == {"needle-noise"}


def test_a_nearsighted_policy_is_told_apart_from_dense(smollm2, tmp_path):
    outcome = run(*smollm2, tmp_path / "s.jsonl", policies=[Nearsighted()], trials=6, batch=6)
    stock, broken = make_rows(outcome.records)
    assert stock["value"] == 1 and stock["p_value"] == 1
    assert broken["value"] == 0 and broken["dense"] == 1
    assert (broken["dense_only"], broken["policy_only"]) == (6, 0)
    assert broken["p_value"] == pytest.approx(1 / 32) and broken["high"] < stock["low"]


def test_random_blocks_are_told_apart_from_dense(smollm2, tmp_path):
    options = dict(tasks=["perplexity"], lengths=[512], trials=4)
    outcome = run(*smollm2, tmp_path / "s.jsonl", policies=["dense", CONTROL], **options)
    rows = {row["policy"]: row for row in make_rows(outcome.records)}
    assert rows["dense"]["value"] == pytest.approx(rows[STOCK]["value"], rel=1e-3)
    assert rows[CONTROL]["diff_low"] > 0.02
    assert rows[CONTROL]["low"] > rows["dense"]["high"]


def test_the_control_lists_earlier_blocks_once_and_needs_no_registration():
    q = torch.zeros(1, 2, 500, 64)
    lists = RandomBlocks(top_k=3).select(AttentionCall(q, q, q, 1.0)).blocks
    assert lists.shape == (1, 2, 4, 3) and lists.dtype == torch.int32
    for row, picked in enumerate(lists[0, 0].tolist()):
        real = [block for block in picked if block >= 0]
        assert len(real) == min(3, 2 * row) and real == sorted(set(real))
        assert all((block + 1) * 64 <= row * 128 for block in real)
    with pytest.raises(PolicyError, match="top_k=0"):
        study(policies=["random_blocks(top_k=0)"]).parsed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tasks=["niah"]), "task is 'niah'"),
        (dict(tasks=[]), "tasks is empty"),
        (dict(lengths=[100]), "length is 100 tokens, needs at least 160"),
        (dict(trials=0), "trials is 0"),
        (dict(trials=10**20), "needs at most 1000000"),
    ],
)
def test_a_study_that_cannot_be_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        study(**options)


def test_rows_say_who_served_and_how_many_keys_a_step_read(tiny, tokenizer, tmp_path):
    forced = str(parse("momo(min_tokens=0)+gather(k=1, sink=1, local=2, min_tokens=0)"))
    covers = "gather(k=64, min_tokens=0)"
    policies = [forced, covers, "gather", Nearsighted()]
    tasks = ["needle-noise", "fidelity", "perplexity"]
    rows = make_rows(run(tiny, tokenizer, tmp_path / "s", policies=policies, tasks=tasks).records)
    told = {(row["policy"], row["task"]): row for row in rows}
    shown = dict(COLUMNS)

    def cells(policy, task):
        row = told[policy, task]
        return shown["served by"](row), shown["keys a step"](row)

    for task in ("needle-noise", "kl"):
        assert cells(forced, task) == ("momo, then gather", "64")
        assert cells(covers, task) == ("dense, then gather", "all (budget covers)")
        assert cells("gather", task) == ("dense", "all")  # below its crossover
        assert cells("nearsighted", task) == ("nearsighted", "-")
    assert cells(forced, "perplexity") == ("momo", "-")  # no step came
    assert cells(STOCK, "needle-noise") == ("-", "all")
    read = {policy: told[policy, "kl"]["bytes"] for policy in (forced, covers, "gather")}
    tokens, layers, heads, dim = 200, 2, 2, 64
    whole = tokens * layers * heads * 2 * dim * 4  # keys and values in float32
    pages = tokens // 16 * (2 * dim * 2) * layers * heads  # what a band's summaries take, scanned
    assert read == {forced: 64 / tokens * whole + pages, covers: whole, "gather": whole}
    assert shown["bytes a step"](told[covers, "kl"]) == "0.41 MB"
    assert shown["bytes a step"](told[forced, "perplexity"]) == "-"


def test_samples_of_before_have_rows_without_it(tiny, tokenizer, tmp_path):
    records = run(tiny, tokenizer, tmp_path / "s.jsonl").records
    older = [{key: r[key] for key in r if key not in ("served", "keys")} for r in records]
    (row,) = (row for row in make_rows(older) if row["policy"] == CONTROL)
    assert [dict(COLUMNS)[name](row) for name in ("served by", "keys a step")] == ["-", "-"]


def test_rows_of_exact_say_what_share_of_drafts_dense_accepted(tiny, tokenizer, tmp_path):
    drafts = ("gather(k=64)", "gather(k=0, sink=0, local=1)")
    policies = [str(parse(f"exact(draft={draft!r}, m=3, min_tokens=0)")) for draft in drafts]
    options = dict(policies=policies, trials=2)
    rows = {
        row["policy"]: row
        for row in make_rows(run(tiny, tokenizer, tmp_path / "s", **options).records)
    }
    all_read, few_read = (rows[policy]["accepted"] for policy in policies)
    assert all_read == 1.0 and 0.0 <= few_read < 1.0
    shown = dict(COLUMNS)["drafts accepted"]
    assert shown(rows[policies[0]]) == "1.00" and shown(rows[STOCK]) == "-"
