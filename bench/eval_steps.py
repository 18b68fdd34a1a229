"""What an eager decode step of each default costs in an evaluation, before a long one is begun.

    python bench/eval_steps.py gemma3-270m 32768 4        # model, tokens of a window, windows
    python bench/eval_steps.py gemma3-270m 32768 4 --processes 8

A line for each policy: seconds of the prefill, milliseconds a step, and the share of them that the
host was busy with. With several processes at once each tells its own."""

import argparse
import subprocess
import sys
import time

import torch

from attnplug.eval.measure import Reading, prose_window
from attnplug.eval.runner import STOCK
from attnplug.eval.suite import all_policies
from attnplug.models.pretrained import load
from attnplug.policies import parse

WARM = 4  # steps, in which kernels are compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("tokens", type=int)
    parser.add_argument("windows", type=int)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    if options.processes == 1:
        tell(options)
        return
    command = [sys.executable, __file__, options.model, str(options.tokens), str(options.windows)]
    command += ["--steps", str(options.steps)]
    running = [subprocess.Popen(command) for _ in range(options.processes)]
    failed = [process for process in running if process.wait()]
    sys.exit(1 if failed else 0)


def tell(options: argparse.Namespace) -> None:
    model, tokenizer = load(options.model)
    ids = torch.cat([prose_window(tokenizer, options.tokens, i) for i in range(options.windows)])
    ids = ids.to(model.device)
    for name in (STOCK, *all_policies()):
        begun = time.perf_counter()
        policy = None if name == STOCK else parse(name)
        reading = Reading(model, ids, policy, WARM + options.steps)
        reading.logits(0, WARM)
        finish(model)
        prefill = time.perf_counter() - begun
        begun, busy = time.perf_counter(), time.process_time()
        reading.logits(WARM, WARM + options.steps)
        finish(model)
        wall, busy = time.perf_counter() - begun, time.process_time() - busy
        step = wall / options.steps * 1e3
        print(f"{name:26} {prefill:7.2f} s {step:8.2f} ms {busy / wall:6.0%}", flush=True)


def finish(model: torch.nn.Module) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
