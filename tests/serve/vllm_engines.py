"""What the tests of vLLM's CPU engine share: a small Qwen2, its prompts, the engines that answer
them, and what transformers makes of the same."""

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

HERE = Path(__file__).parent / "vllm_cpu"
PYTHON = os.environ.get("ATTNPLUG_VLLM_PYTHON", sys.executable)
ENVIRONMENT = dict(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    # An engine's ranks listen some seconds after it has found a port free. Below those ports that
    # Linux gives to whoever connects, and apart from other processes of tests, it is free still.
    VLLM_PORT=str(16_384 + 16 * (os.getpid() % 1024)),
    HF_HUB_OFFLINE="1",
    PYTHONPATH=os.pathsep.join([str(HERE), str(Path(attnplug.__file__).parent.parent)]),
)
NO_ENGINE = 9  # as engine.py exits
COVERING = "momo(min_tokens=0, top_k=512)+gather(min_tokens=0)"
# Every list is exact: at most twice as many blocks are visible as it has places.
TRACED = f"{COVERING}+stream(top_k=48, block=16, query_block=16, measure=64)"
SHARED = [random.Random(7).randrange(2, 1000) for _ in range(600)]
MADE = 12


def prompt(seed: int, shared: int, more: int) -> list[int]:
    """`shared` tokens that other prompts begin with too, and some of its own."""
    draw = random.Random(seed)
    return SHARED[:shared] + [draw.randrange(2, 1000) for _ in range(more)]


# Several chunks of 512 each, beside steps; the second turn finds prefixes of the first.
FIRST = [prompt(1, 600, 700), prompt(2, 0, 300), prompt(3, 600, 30)]
SECOND = [prompt(4, 600, 200), prompt(1, 600, 701)]


def small_model(folder: Path):
    """The model, and the folder where it is."""
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
    made.save_pretrained(folder)
    return made, folder


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


def last_of(file: Path) -> list[list[tuple[str, str]]]:
    """What a job's reports say of who has served: of each turn, of each layer."""
    reports = json.loads(file.read_text())
    return [[(each["prefill"], each["decode"]) for each in report["last"]] for report in reports]


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


def generated(model, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens, each prompt alone."""
    return [
        model.generate(torch.tensor([p]), max_new_tokens=MADE, do_sample=False)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]


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
