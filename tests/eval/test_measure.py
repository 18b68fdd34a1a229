"""Perplexity, fidelity and rows against values computed by hand."""

import math

import pytest
import torch

from attnplug.errors import ArgumentError
from attnplug.eval.measure import (
    LONG,
    OTHER,
    STEPS,
    STRIDE,
    Reading,
    compare_decodes,
    compare_logits,
    long_window,
    prose_window,
    topic_window,
    window_nll,
)
from attnplug.eval.needle import prose
from attnplug.eval.output import markdown, write_outputs
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import Outcome, machine
from attnplug.policies import parse

FEW = parse("gather(k=1, sink=1, local=1, min_tokens=0)")


def test_windows_slide_by_the_stride(tokenizer):
    one, two = (prose_window(tokenizer, 1500, number) for number in (0, 1))
    assert one.shape == (1, 1500) and torch.equal(one[0, 512:], two[0, : 1500 - 512])
    with pytest.raises(ArgumentError, match="the prose has"):
        prose_window(tokenizer, 1500, 1000)


def test_windows_go_on_in_the_guides_where_the_book_ends(tokenizer):
    book = tokenizer("\n\n".join(prose()), add_special_tokens=False, verbose=False).input_ids
    number = len(book) // STRIDE  # begins in the book, and ends beyond it
    window = prose_window(tokenizer, 1500, number)
    left = len(book) - number * STRIDE
    assert window[0, :left].tolist() == book[-left:]
    first = prose(long=True)[len(prose())]  # paragraph of the guides
    assert tokenizer.decode(window[0, left:]).strip().startswith(first[:40])
    two = prose_window(tokenizer, 1500, number + 1)
    assert torch.equal(window[0, STRIDE:], two[0, : 1500 - STRIDE])


def test_long_windows_measure_no_step_twice(tokenizer):
    one, two = (long_window(tokenizer, 3000, number) for number in (0, 1))
    assert one.shape == (1, 3000) and torch.equal(one[0, LONG:], two[0, : 3000 - LONG])
    with pytest.raises(ArgumentError, match="1024 decode steps need 2048"):
        long_window(tokenizer, 2047, 0)


def test_a_topic_window_ends_in_the_plays(tokenizer):
    """Each with its own part of them, as far as they go."""
    prose, topic = (make(tokenizer, 3000, 2) for make in (long_window, topic_window))
    assert torch.equal(topic[0, :-OTHER], prose[0, :-OTHER])
    first = tokenizer.decode(topic_window(tokenizer, 3000, 0)[0, -OTHER:])
    assert first.startswith("First Citizen:\nBefore we proceed any further")
    assert not tokenizer.decode(topic[0, -OTHER:]).startswith(first[:20])
    with pytest.raises(ArgumentError, match="of the plays"):
        topic_window(tokenizer, 3000, 30)


def test_the_loss_is_that_of_the_last_tokens(tiny, tokenizer):
    ids = prose_window(tokenizer, 200, 0)
    with torch.no_grad():
        logits = tiny(ids).logits[0].double().log_softmax(-1)
    wanted = -sum(logits[at - 1, ids[0, at]].item() for at in range(100, 200)) / 100
    assert window_nll(tiny, ids) == pytest.approx(wanted, rel=1e-5)


def test_fidelity_of_two_hand_made_steps():
    dense = torch.tensor([[2.0, 0.0], [0.5, 0.0]]).log_softmax(-1)
    policy = torch.tensor([[2.0, 0.0], [0.0, 0.5]]).log_softmax(-1)
    found = compare_logits(dense, policy)
    high = 1 / (1 + math.exp(-0.5))
    assert found["agreement"] == 0.5
    assert found["agreement-at-margin"] == 1.0  # the second step's margin is 0.5
    # second step: p = (high, 1 - high), r = (1 - high, high); the first step adds 0
    assert found["total-variation"] == pytest.approx((2 * high - 1) / 2, abs=1e-6)
    assert found["kl"] == pytest.approx((2 * high - 1) * 0.5 / 2, abs=1e-6)
    assert "agreement-at-margin" not in compare_logits(dense[1:], policy[1:])
    many = compare_logits(dense.repeat(50, 1), policy.repeat(50, 1))  # more than one chunk
    assert many == pytest.approx(found)


def test_dense_through_its_decode_steps_is_the_models_own(tiny, tokenizer):
    ids = prose_window(tokenizer, 200, 1)
    stock = Reading(tiny, ids, None, STEPS).logits(0, STEPS)[0]
    with torch.no_grad():
        whole = tiny(ids).logits[0, -STEPS:]
    torch.testing.assert_close(stock, whole, rtol=1e-3, atol=1e-3)
    (found,) = compare_decodes(tiny, ids, {"dense": parse("dense")}, STEPS)["dense"]
    assert found["agreement"] == 1 and found["kl"] < 1e-6 and found["total-variation"] < 1e-3
    steps = range(200 - STEPS, 199)
    wanted = -sum(whole.log_softmax(-1)[at + STEPS - 200, ids[0, at + 1]].item() for at in steps)
    assert found["nll"] == pytest.approx(wanted / (STEPS - 1), rel=1e-3)


def test_decodes_in_turns_and_together_are_those_one_by_one(tiny, tokenizer):
    """Three chunks of steps, two windows, policies that take turns on one model."""
    windows = torch.cat([prose_window(tokenizer, 200, number) for number in (0, 1)])
    policies = {"stock": None, "dense": parse("dense"), "gather": FEW}
    steps = 2 * STEPS + 5
    together = compare_decodes(tiny, windows, policies, steps)
    assert "kl" not in together["stock"][0]
    assert together["gather"][0]["kl"] > 1e-2 > together["dense"][0]["kl"]
    for name, policy in policies.items():
        for row in (0, 1):
            ids = windows[row : row + 1]
            (alone,) = compare_decodes(tiny, ids, {name: policy}, steps)[name]
            assert together[name][row] == pytest.approx(alone, rel=1e-3, abs=1e-6)
            read = Reading(tiny, ids, policy, steps)
            logits = torch.cat([read.logits(0, 7), read.logits(7, steps)], 1)[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1 - steps :])
            assert alone["nll"] == pytest.approx(loss.item(), rel=1e-4)


def record(task: str, policy: str, trial: int, **payload):
    facts = dict(task=task, model="m", n=1024, trial=trial, seed=0, policy=policy, batch=1)
    facts |= dict(device="cpu", dtype="float32", template="plain", tokenizer="t")
    return facts | machine("cpu") | payload


def scores(policy: str, found: list[list[bool]]):
    return [
        record("multi-value", policy, i, found=f, score=sum(f) / 2, depths=[0.05, 0.95])
        for i, f in enumerate(found)
    ]


def test_rows_pair_samples_and_count_depths(tmp_path):
    dense = scores("stock", [[True, True], [True, True], [True, False], [False, False]])
    policy = scores("p", [[True, True], [False, True], [True, True]])
    alone = record("multi-value", "p", 9, found=[True, True], score=1.0, depths=[0.05, 0.95])
    rows = make_rows([*dense, *policy, alone])
    assert [row["trials"] for row in rows] == [4, 3]
    row = rows[1]
    assert (row["dense"], row["value"]) == (pytest.approx(5 / 6), pytest.approx(5 / 6))
    assert (row["dense_only"], row["policy_only"], row["p_value"]) == (1, 1, 1.0)
    assert (row["dense_solved"], row["solved"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert row["depths"] == {"0.0": [2, 3], "0.9": [3, 3]}
    assert row["diff"] == 0 and row["diff_low"] == -0.5 and row["diff_high"] == 0.5
    needed = {"task", "model", "n", "trials", "dense", "policy", "value", "low", "high"}
    assert needed <= row.keys()
    text = markdown(rows, Outcome(left_out={"x at 1": "no room"}, stopped=True))
    assert "| multi-value | 1,024 | p | 2/3 | - |" in text
    assert "- x at 1: no room" in text and "Stopped at the time limit" in text
    written = write_outputs(rows, Outcome(), tmp_path)
    assert [path.name for path in written] == ["rows.json", "tables.md", "heatmap.png"]
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_perplexity_rows_are_of_the_mean_loss():
    dense = [record("perplexity", "stock", i, values={"nll": x}) for i, x in enumerate((2.0, 3.0))]
    policy = [record("perplexity", "p", i, values={"nll": x}) for i, x in enumerate((2.1, 3.1))]
    row = make_rows(dense + policy)[1]
    assert row["dense"] == pytest.approx(math.exp(2.5))
    assert row["value"] == row["low"] == row["high"] == pytest.approx(math.exp(2.6))


def test_the_loss_of_decode_steps_has_a_row_where_both_sides_have_it():
    dense = [record("fidelity", "stock", i, values={"nll": x}) for i, x in enumerate((2.0, 3.0))]
    old = record("fidelity", "stock", 2, values={})  # from before there was such a row
    policy = [record("fidelity", "p", i, values={"nll": 2.6, "kl": 0.1}) for i in range(3)]
    rows = {(row["policy"], row["task"]): row for row in make_rows([*dense, old, *policy])}
    assert set(rows) == {("stock", "decode-perplexity"), ("p", "kl"), ("p", "decode-perplexity")}
    row = rows["p", "decode-perplexity"]
    assert row["dense"] == pytest.approx(math.exp(2.5)) and row["value"] == pytest.approx(
        math.exp(2.6)
    )
    assert (row["trials"], rows["p", "kl"]["trials"]) == (2, 3)


def test_rows_name_the_machine_that_made_the_records():
    there = dict(gpu="H200", torch="2.11", triton="3.6", transformers="5.17")
    records = [record("perplexity", p, 0, values={"nll": 1.0}) | there for p in ("stock", "p")]
    assert all(there.items() <= row.items() for row in make_rows(records))
