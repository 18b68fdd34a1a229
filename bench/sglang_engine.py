"""attnplug inside SGLang beside SGLang's own FlashAttention, on one GPU and in one run: the tokens
of covering budgets, time to first token, and decode steps, of models with random bf16 weights.

    bash bench/sglang_gpu.sh qwen7b --policy momo+gather   # see bench/README.md

Not run on a GPU yet. Each engine runs in a process of its own, stock first; prompts are the same. A
first token is a request for one token, after one of the same length that has warmed it; a step is
what each token more takes, behind a prefix hit. Writes one line of JSON for each engine.
"""

import argparse
import json
import multiprocessing
import os
import queue
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_engine import SHAPES

COVERING = "momo(min_tokens=1024, top_k=512)+gather(k=2048, min_tokens=1024)"
CASES = "8192x1,32768x1,131072x1,32768x8"
MADE, AGAIN, SECONDS = 256, 3, 540  # an engine that takes longer has failed


def engine_of(folder: str, policy: str, longest: int) -> Any:
    import sglang

    stock = policy == "stock"
    if not stock:
        os.environ["ATTNPLUG_POLICY"] = policy
    return sglang.Engine(
        model_path=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend="fa3" if stock else "attnplug",
        page_size=64,
        context_length=longest,
        mem_fraction_static=0.8,
        random_seed=0,
    )


def generate(engine: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, tokens of each prompt)."""
    asked = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    began = time.perf_counter()
    made = engine.generate(input_ids=prompts, sampling_params=asked)
    return time.perf_counter() - began, [each["output_ids"][-tokens:] for each in made]


def measure(job: dict[str, Any], answers: Any) -> None:
    """One engine's figures, into the queue `answers`."""
    vocabulary = SHAPES[job["shape"]]["vocab_size"]
    draw = random.Random(0)

    def prompts(length: int, count: int) -> list[list[int]]:
        return [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]

    engine = engine_of(job["folder"], job["policy"], max(n for n, _ in job["cases"]) + 1024)
    found: dict[str, Any] = {"policy": job["policy"], "shape": job["shape"]}
    for length, rows in job["cases"]:
        generate(engine, prompts(length, rows), 1)
        firsts, steps, tokens = [], [], []
        for _ in range(AGAIN):
            asked = prompts(length, rows)
            firsts.append(generate(engine, asked, 1)[0])
            short, _ = generate(engine, asked, 1)  # a prefix hit
            long, tokens = generate(engine, asked, MADE)
            steps.append((long - short) / (MADE - 1))
        found[f"{length}x{rows}"] = {"first_s": firsts, "step_s": steps, "tokens": tokens}
    engine.shutdown()
    answers.put(found)


def answer_of(process: Any, answers: Any) -> dict[str, Any]:
    """An engine's figures, or an end of this program where its process has ended without any."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            return answers.get(timeout=1)
        except queue.Empty:
            if not process.is_alive() and answers.empty():
                raise SystemExit(f"the engine ended with status {process.exitcode}") from None
    process.terminate()
    raise SystemExit(f"the engine gave no figures within {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--policy", default="momo+gather")
    parser.add_argument("--cases", default=CASES, help="TOKENSxROWS,...")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in given.cases.split(",")]
    context, lines = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        shape = {"torch_dtype": "bfloat16", "max_position_embeddings": 262144, "rms_norm_eps": 1e-6}
        Path(folder, "config.json").write_text(json.dumps(SHAPES[given.shape] | shape))
        for policy in ("stock", COVERING, given.policy):
            answers = context.Queue()
            job = {"shape": given.shape, "policy": policy, "folder": folder, "cases": cases}
            process = context.Process(target=measure, args=(job, answers))
            process.start()
            lines.append(answer_of(process, answers))
            process.join()
            given.out.write_text("\n".join(map(json.dumps, lines)) + "\n")
    stock, covering = lines[:2]
    for case in (f"{length}x{rows}" for length, rows in cases):
        same = stock[case]["tokens"] == covering[case]["tokens"]
        print(f"{case}: covering budgets give {'stock' if same else 'OTHER tokens than stock'}'s")


if __name__ == "__main__":
    main()
