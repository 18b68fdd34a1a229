"""attnplug inside vLLM's own engine, on a CPU: `scripts/vllm_cpu.sh FOLDER` makes the environment,
`ATTNPLUG_VLLM_PYTHON=FOLDER/bin/python pytest -m vllm tests/serve` runs this.

A small Qwen2 with random weights answers through chunked prefills, mixed batches, prefix hits,
evictions and preemptions. Its tokens are those of transformers, with stock attention where the
budget covers everything, with attnplug there where it does not. The traces of its prompts are those
that attnplug records in transformers.
"""

import pytest
from vllm_engines import (
    FIRST,
    MADE,
    SECOND,
    TRACED,
    answers,
    equal,
    generated,
    last_of,
    lists_of,
    prompt,
    recorded,
    room_of,
    small_model,
    traced_job,
)

import attnplug
from attnplug import trace
from attnplug.trace.view import write_page

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SMALL = [
    "gather(k=3, block=16, sink=1, local=2, min_tokens=400, bounds='exact')",
    "gvr(k=24, sink=2, window=24, min_tokens=400)",
]
# What each request says of its trace.
ASKED = [["first", True, "third"], [False, "fifth"]]
FILES = {
    "prompt-0001-first.parquet": FIRST[0],
    "prompt-0002.parquet": FIRST[1],
    "prompt-0003-third.parquet": FIRST[2],
    "prompt-0004-fifth.parquet": SECOND[1],
}
# More than 130 pages of 16 hold: rows are preempted, and pages change hands.
CROWD = [[prompt(seed, 500, 40 * seed) for seed in range(turn, turn + 4)] for turn in (1, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Where the engine's traces go."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Where the engines' reports go, by policy."""
    folder = tmp_path_factory.mktemp("reports")
    return {policy: folder / str(place) for place, policy in enumerate([TRACED, *SMALL])}


@pytest.fixture(scope="module")
def runs(model, traces, reports, tmp_path_factory):
    """What an engine of each policy made and noted: {policy: (outputs, notes of its calls)}."""
    turns = [
        dict(prompts=turn, tokens=MADE, traces=asked)
        for turn, asked in zip((FIRST, SECOND), ASKED, strict=True)
    ]
    jobs = [traced_job(traces, turns)]
    jobs += [
        dict(
            attnplug={"policy": policy},
            options=dict(max_num_batched_tokens=256, num_gpu_blocks_override=130),
            turns=[dict(prompts=turn, tokens=MADE) for turn in CROWD],
        )
        for policy in SMALL
    ]
    for job in jobs:
        job["report"] = str(reports[job["attnplug"]["policy"]])
    outputs, notes = answers(jobs, model, tmp_path_factory.mktemp("jobs"))
    return {
        (policy := job["attnplug"]["policy"]): (
            output,
            [note for note in notes if note["policy"] == policy],
        )
        for job, output in zip(jobs, outputs, strict=True)
    }


def test_covering_budgets_give_the_tokens_of_stock(runs, model):
    outputs, _ = runs[TRACED]
    assert [o["tokens"] for o in outputs] == generated(model[0], FIRST + SECOND)


@pytest.mark.parametrize("policy", SMALL)
def test_small_budgets_give_the_tokens_of_attnplug_in_transformers(runs, model, policy):
    outputs, _ = runs[policy]
    prompts = [p for turn in CROWD for p in turn]
    stock = generated(model[0], prompts)
    # A cache below `min_tokens` is dense there by its size, here a row by its length.
    for output, p, dense in zip(outputs, prompts, stock, strict=True):
        want = [dense]
        if len(p) >= 400:
            with attnplug.applied(model[0], policy.replace("400", "0")):
                want = generated(model[0], [p])
        assert output["tokens"] == want[0]
    assert [o["tokens"] for o in outputs] != stock  # or the budget decided nothing


def test_the_layers_really_ran(runs):
    """vLLM's CPU platform drops a backend that it does not know without an error."""
    outputs, notes = runs[TRACED]
    assert sum(note["momo"] for note in notes) > 10
    assert sum(note["far"] for note in notes) > 40
    assert any(note["chunks"] for note in notes), "no later chunk of a prompt"
    assert any(note["steps"] and note["prompts"] for note in notes), "no mixed batch"
    assert any(output["cached"] > 0 for output in outputs), "no prefix hit"


def test_the_report_says_who_has_served(runs, reports):
    """In each turn all chunks and all steps, and in the turn behind the last nothing."""
    assert last_of(reports[TRACED]) == [[("momo", "gather")] * 2] * 2
    for policy in SMALL:
        assert last_of(reports[policy]) == [[("dense", policy.partition("(")[0])] * 2] * 2


@pytest.mark.parametrize("policy", SMALL)
def test_what_is_kept_is_never_stale_under_eviction(runs, policy):
    """The engine's backend compares every complete block, or every code, of every call with its
    keys."""
    outputs, notes = runs[policy]
    assert sum(note["checked"] for note in notes) > 1000
    blocks = {sum(len(p) for p in turn) // 16 for turn in CROWD}
    assert min(blocks) > 130, "all rows fit: nothing was evicted"
    assert any(output["cached"] > 0 for output in outputs)


@pytest.mark.parametrize("name", FILES)
def test_the_trace_of_a_served_prompt_is_that_of_transformers(runs, model, traces, tmp_path, name):
    """In vLLM's chunks, the tokens that came from the prefix cache left out."""
    found, ids = trace.read(traces / name), FILES[name]
    found.verify()
    meta = found.meta
    assert found.token_ids[0].tolist() == ids and meta["prompt_tokens"] == len(ids)
    steps = [(step["first"][0], step["queries"][0]) for step in meta["steps"]]
    chunks = [steps[0][0], *(first + queries for first, queries in steps)]
    assert [first for first, _ in steps] == chunks[:-1] and chunks[-1] >= len(ids) - 1
    assert meta["cached_tokens"] == chunks[0]
    same = recorded(model[0], ids, chunks, tmp_path / "same")
    equal(lists_of(found), lists_of(same), room := room_of(found))
    for layer, heads in meta["captured"].items():
        assert heads == pytest.approx(same.meta["captured"][layer], abs=room)
    assert meta["policy"] == same.meta["policy"] and meta["heads"] == same.meta["heads"]
    assert write_page(found, tmp_path / "page.html") > 1e6


def test_the_traces_hold_chunks_and_prefix_hits(runs, traces):
    steps, cached = zip(
        *((len(found.meta["steps"]), found.meta["cached_tokens"] > 0)
          for found in (trace.read(traces / name) for name in FILES)), strict=True
    )  # fmt: skip
    assert max(steps) >= 3 and any(cached) and not all(cached)


def test_only_what_was_asked_for_is_recorded(runs, traces):
    assert sorted(path.name for path in traces.iterdir()) == [".lock", *sorted(FILES)]
