"""Time to first token of a prompt that no single GPU's memory holds, in pieces of its sequence over
several GPUs, under momo and dense.

    torchrun --nproc-per-node 4 bench/million_tokens.py --out rows.jsonl [--tokens 1048576]

The shape is Llama-3.1-8B's with random bf16 weights. Every rank has the whole model, and a decoder
that is split by heads takes the cache: of 1M tokens each of four ranks keeps 33 GB. Kernels compile
on the prompt's first `--warm` tokens; momo then runs twice and dense once, as it takes minutes.
Rows: `case=tp-ttft`, peer `dense` on the same GPUs. `--cpu` is a small shape over gloo.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import tensor_parallel
import torch
import torch.distributed as dist
from tensor_parallel import RANK, ROOM, SMALL, WORLD, Bench, say
from vllm_engine import SHAPES

import attnplug

LLAMA = {key: SHAPES["llama8b"][key] for key in SMALL}
ROUNDS = {"momo": 2, "dense": 1}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--warm", type=int, default=65536)
    parser.add_argument("--cpu", action="store_true", help="a small shape over gloo")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def seconds_of(bench: Bench, run: Any) -> tuple[float, torch.Tensor]:
    bench.wait()
    begun = time.perf_counter()
    logits = run()
    bench.wait()
    return time.perf_counter() - begun, logits


def measure(bench: Bench, name: str, model: Any, decoder: Any, ids: torch.Tensor) -> list[float]:
    """Microseconds of each round."""

    def run(tokens: int) -> torch.Tensor:
        made = attnplug.prefill(
            model, ids[:, :tokens], mesh=bench.mesh, decoder=decoder, max_length=tokens + ROOM
        )
        return made.logits

    times = []
    with attnplug.applied(model, name):
        taken, _ = seconds_of(bench, lambda: run(bench.asked.warm))
        say(f"{name}, {bench.asked.warm} tokens, first call: {taken:.2f} s")
        for _ in range(ROUNDS[name]):
            bench.free()
            taken, logits = seconds_of(bench, lambda: run(bench.asked.tokens))
            assert torch.isfinite(logits).all()
            peak = torch.cuda.max_memory_allocated() / 1e9 if not bench.asked.cpu else 0.0
            say(f"{name}, {bench.asked.tokens} tokens: {taken:.2f} s, peak {peak:.1f} GB")
            times.append(taken * 1e6)
        bench.compare(None, logits[:, -1].float(), name)
    return times


def main() -> None:
    asked = arguments()
    if not asked.cpu:
        torch.cuda.set_device(RANK)
        tensor_parallel.SHAPE |= LLAMA
    place = None if asked.cpu else torch.device("cuda", RANK)
    dist.init_process_group("gloo" if asked.cpu else "nccl", device_id=place)
    bench = Bench(asked)
    random = torch.Generator(bench.device).manual_seed(5)
    vocabulary = bench.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, asked.tokens), device=bench.device, generator=random)
    model, decoder = bench.whole(), bench.split()
    with attnplug.applied(decoder, "dense"):
        times = {name: measure(bench, name, model, decoder, ids) for name in ROUNDS}
    if RANK == 0:
        bench.add("tp-ttft", "momo", "momo", times["momo"], times["dense"], f"dense, {WORLD} GPUs")
    bench.wait()
    sys.stdout.flush()
    os._exit(0)  # as tensor_parallel.py


if __name__ == "__main__":
    main()
