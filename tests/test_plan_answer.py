"""What a plan answers: which method a bill favours, what a cache takes, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from plan_cases import BILL, SHAPE, asked_for, rows
from typer.testing import CliRunner

from attnplug import Certified, Exact, Gather, Gvr, Sketch, plan, plan_answer, plan_map
from attnplug.cli import app
from attnplug.errors import ArgumentError
from attnplug.ops.common.device import Card
from attnplug.plan_answer import Asked, facts, notes, plan_for, read_options, serves_from, steps
from attnplug.plan_memory import memory_of
from attnplug.policies import crossover, names, parse, tuned
from attnplug.policies.base import Phase
from attnplug.policies.dense import Dense


@pytest.mark.parametrize("batch, tokens", [(1, "65,536"), (8, "20,624")])
def test_the_notes_name_the_crossover_of_the_batch(batch, tokens):
    assert f"dense in caches below {tokens} tokens" in notes(Asked(SHAPE, BILL, Gather(), batch))


def test_the_command(tmp_path):
    (tmp_path / "rows.json").write_text(
        json.dumps({"benchmarks": [{"extra_info": r} for r in rows(BILL)]})
    )
    arguments = ["plan", "qwen2.5-7b", "--context", "8192,1048576", "--policy", "momo+gather(k=8)"]
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    result = runner.invoke(app, [*arguments, "--image", str(tmp_path / "map.png")])
    assert result.exit_code == 0, result.output
    shape, policy = plan.SHAPES["qwen2.5-7b"], Gather(k=8)
    line = next(x for x in result.output.splitlines() if "1,048,576" in x)
    assert f"{plan.H200.speedup(shape, 1 << 20, 1, policy):.2f}" in line
    assert "pays from" in result.output and (tmp_path / "map.png").stat().st_size > 10_000
    result = runner.invoke(app, [*arguments, "--rows", str(tmp_path / "rows.json")])
    assert result.exit_code == 0 and "2.00 TB/s" in result.output and "R2 1.0000" in result.output


def test_the_command_for_other_methods_and_gpus():
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    arguments = ["plan", "llama-3.1-8b", "--policy", "momo+sketch", "--gpus", "4", "--json"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["gpus"] == 4 and found["steps"][-1]["sketch_ms"] < found["steps"][-1]["dense_ms"]
    result = runner.invoke(app, [*arguments[:-2], "3"])
    assert result.exit_code != 0 and "8 KV heads cannot be dealt to 3 GPUs" in result.output


@pytest.mark.parametrize(
    ("policy", "taken"), [("auto", "sketch"), ("momo+auto(quality='fast')", "gather")]
)
def test_auto_is_billed_as_what_it_takes(policy, taken):
    asked = asked_for(policy, batch=32)
    assert asked.method.name == taken and f"{taken}_ms" in steps(asked, [8192])[0]
    assert f"auto takes {taken}, on a GPU with room for its cache." in notes(asked)
    if taken == "sketch":  # whose rows auto serves later than sketch alone does
        alone = facts(asked_for("sketch", batch=32), [8192])["serves_from"]
        assert facts(asked, [8192])["serves_from"] > alone


@pytest.fixture
def tuned_here(tmp_path, monkeypatch):
    """Has torch see a GPU of this name, for which `attnplug tune` has kept a file."""

    def see(name):
        card = Card.made("nvidia", (8, 9), 58, 101376, 3e11)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(crossover, "card", lambda _: card)
        monkeypatch.setenv(tuned.PATH, str(tmp_path / "crossovers.json"))
        kept = {"gather": {"row": 3000, "alone": 7000}, "momo": {"row": 5000, "alone": 5000}}
        tuned.keep(torch.device("cuda"), "28/4x128", "2026-01-02", kept)

    return see


def test_what_was_tuned_on_the_card_of_the_bill_is_told(tuned_here, monkeypatch):
    before = notes(asked_for("momo+gather"))
    assert "below 65,536 tokens, as measured on an H200." in before
    assert "for the H200, and there is no GPU here: no file of `attnplug tune` is read." in before
    tuned_here("NVIDIA H200 NVL")
    asked, day = asked_for("momo+gather", batch=2), "as measured on this machine on 2026-01-02"
    said = notes(asked)
    assert f"runs dense in caches below 5,000 tokens, {day}." in said and "lacks" not in said
    assert f"momo serves prompts from 5,000 tokens on, {day};" in said
    told = facts(asked, [8192])
    assert (told["serves_from"], told["origin"]) == (5000, day)
    assert plan_map.gains(asked.shape, plan.H200, plan_answer.mapped(asked.method))[0, 1] != 1
    sketch = notes(asked_for("sketch"))  # which was not measured
    assert "below 98,304 tokens" not in sketch and "scaled from an H200's by bandwidth" in sketch
    asked = asked_for("gather(min_tokens=300)")
    assert "below 300 tokens, as min_tokens asks." in notes(asked)


def test_what_was_tuned_on_another_card_is_told_beside_the_bills(tuned_here):
    tuned_here("NVIDIA L4")
    asked = asked_for("momo+gather")
    said, day = notes(asked), "as measured on this machine on 2026-01-02"
    assert "below 65,536 tokens, as measured on an H200." in said
    assert f"The GPU here is NVIDIA L4, where gather serves from 7,000 tokens on, {day}." in said
    assert facts(asked, [8192])["serves_from"] == 65536
    measured = [row | {"gpu": "NVIDIA L4"} for row in rows(BILL)]
    bill = plan.fit(measured).bill
    assert bill.card == "NVIDIA L4" and not plan.fit([*measured, *rows(BILL)]).bill.card
    named = read_options([8192], 1, "momo+gather")
    said = notes(plan_for(plan.SHAPES["qwen2.5-7b"], bill, named))
    assert f"below 7,000 tokens, {day}." in said and "65,536" not in said
    said = notes(plan_for(plan.SHAPES["llama-3.1-8b"], bill, named))  # of other heads
    assert "below 14,336 tokens, scaled from an H200's by bandwidth" in said


@pytest.mark.parametrize("policy", ["momo", "stream", "trained", "momo+trained+stream", "dense"])
def test_a_policy_that_decodes_by_dense_gets_dense_steps(policy):
    asked = asked_for(policy, batch=4)
    (step,) = steps(asked, [1 << 17])
    assert step["dense_ms"] == pytest.approx(1e3 * plan.H200.dense(asked.shape, 1 << 17, 4))
    assert step["speedup"] == 1 and step["dense_gb"] == 4 * asked.shape.cached(1 << 17) / 1e9
    said = notes(asked)
    assert "Every decode step is dense." in said
    assert ("momo serves prompts from 16,384 tokens on" in said) == ("momo" in policy)
    assert ("stream changes no step" in said) == ("stream" in policy)
    assert ("trained serves none" in said) == ("trained" in policy)


LATENTS = plan.Shape(0, 8, 128, 1e9, shared=576)


@pytest.mark.parametrize("policy", ["trained", "dense", "auto", "momo"])
def test_a_cache_that_the_bill_was_not_fitted_to_has_bytes_and_no_time(policy):
    asked = asked_for(policy, LATENTS)
    (step,) = steps(asked, [1 << 17])
    assert step["dense_ms"] is None and step["dense_read_gb"] is None
    assert step["dense_gb"] == (1 << 17) * 576 * 2 / 1e9
    said = notes(asked)
    assert "The time of a step is not predicted" in said and "serves none" not in said


def test_a_method_of_the_users_has_bytes_and_no_time():
    @dataclasses.dataclass(frozen=True)
    class Mine(Phase):
        name = "mine"
        phases = frozenset({"decode"})

    asked = Asked(plan.SHAPES["qwen2.5-7b"], plan.H200, Mine())
    (step,) = steps(asked, [8192])
    assert step["mine_ms"] is None and step["mine_gb"] == step["dense_gb"]
    assert "the bill has no steps of mine" in notes(asked)


@pytest.mark.parametrize("policy", ["gather", "certified", "exact"])
def test_a_method_that_serves_no_layer_is_refused_with_the_bytes(policy):
    with pytest.raises(ArgumentError, match=f"{policy} serves no layer of this model.*1,152 bytes"):
        asked_for(policy, LATENTS)


def test_what_certified_keeps_is_on_the_gpu_and_on_the_host():
    """By the table of its tiers (docs/methods/certified.md), and no time is made up for it."""
    n, d, b, batch = 1 << 17, 128, 64, 2
    asked = asked_for("momo+certified", batch=batch)
    shape = asked.shape
    keys = n * d + n // b * 2 * d * 2
    values = n * 16 * (d // 32) + n * 16 * (d // 32) // 8 * 4
    marks = n // b * (4 * 4 + 2 * 4)
    tier = batch * shape.layers * shape.heads_kv * (keys + values + marks)
    (step,) = steps(asked, [n])
    assert step["certified_read_gb"] == pytest.approx(tier / 1e9, rel=1e-3)
    assert step["certified_host_gb"] == step["dense_gb"] == batch * shape.cached(n) / 1e9
    assert tier / 1e9 < step["certified_gb"] < 1.01 * tier / 1e9
    assert step["certified_ms"] is None and step["speedup"] is None
    said = notes(asked)
    assert "The time of a step is not predicted" in said and "By bytes" not in said
    assert 'dense in every cache, as measured on an H200, unless you ask for "certified(min' in said
    assert serves_from(asked) is None
    bound = Certified(tolerance=None, k_min=2, explore=0.0)
    assert serves_from(asked._replace(method=bound)) == 65536
    on_device = memory_of(shape, Certified(originals="device"), batch, n)
    assert on_device.host == 0 and on_device.gpu > batch * shape.cached(n)


def test_what_others_keep_beside_keys_and_values():
    """gvr's codes are a byte an element of a key and a scale; a draft's state is its method's."""
    shape, n = plan.SHAPES["qwen2.5-7b"], 1 << 17
    cache = memory_of(shape, Dense(), 1, n).gpu
    assert cache == shape.cached(n)
    codes = memory_of(shape, Gvr(), 1, n).gpu - cache
    assert codes == pytest.approx(cache * (128 + 4) / (2 * 2 * 128), rel=1e-2)
    for draft, method in {"gather": Gather(), "gvr": Gvr(), "sketch": Sketch()}.items():
        assert memory_of(shape, Exact(draft=draft), 1, n).gpu == memory_of(shape, method, 1, n).gpu
    for policy in ("gather(kv='host')", "sketch(kv='host')"):
        held = memory_of(shape, parse(policy).decode, 1, 1 << 20)
        assert held.host == shape.cached(1 << 20) and held.gpu < 0.06 * held.host
        assert "not predicted, because it depends on the link" in notes(asked_for(policy))
    halves = shape.of_rank(2)
    assert memory_of(halves, Sketch(), 1, n).gpu == pytest.approx(
        memory_of(shape, Sketch(), 1, n).gpu / 2, rel=1e-2
    )


def test_a_cache_without_room_is_said_so():
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(
        app, ["plan", "qwen2.5-7b", "--policy", "certified", "--context", "8K,1M", "--batch", "3"]
    )
    assert result.exit_code == 0, result.output
    short, far = (x for x in result.output.splitlines() if "8,192" in x or "1,048,576" in x)
    assert "no room" not in short and far.count("no room") == 1  # dense alone


@pytest.mark.parametrize("policy", [p for p in names() if p != "dense"])
@pytest.mark.parametrize("words", [[], ["--gpus", "4", "--batch", "3", "--json"]])
def test_the_command_answers_for_every_method(policy, words):
    arguments = ["plan", "llama-3.1-8b", "--policy", policy, "--context", "32K,1M", *words]
    result = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    if words:
        found = json.loads(result.stdout)
        told = found["steps"][1]
        kept = [told[key] for key in told if key.endswith("_gb") and "read" not in key]
        assert len(kept) >= 2 and None not in kept and found["gpus"] == 4
        assert told["speedup"] or found["not_predicted"]
    else:
        assert "32,768" in result.output and "Bill of" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--accepted", "1.5"], "accepted is 1.5, needs 0 to 1"),
        (["--policy", "gather(kv='host')", "--image", "a.png"], "there is no map of gather(kv="),
        (["--policy", "certified", "--image", "a.png"], "there is no map of certified"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(words, message):
    result = CliRunner().invoke(app, ["plan", "qwen2.5-7b", *words])
    assert result.exit_code != 0 and message in result.output and not Path("a.png").exists()
