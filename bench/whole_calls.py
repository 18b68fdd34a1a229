"""What a user pays for whole calls of generate, through the public API alone.

    python bench/whole_calls.py --tokens 128,1024,8192,100000 --new 1,128 --out rows.jsonl \
        --policies 'stock;dense;auto;momo+gather' [--warm] [--batch 8] [--root OTHER_TREE]

A model of Qwen2.5-7B's shape with random bf16 weights. Each call has another prompt, as a user's
has. `first_s` is the first call of its kind after `apply`, and `call_s` the median of the later
ones, of which `--calls` sets the number: short ones want a dozen, as the host is what they wait
for. Nothing is left out of a call. `--profile` says how long each kernel of a call ran, in all.
`--beside` gives each policy a model of its own, of the same weights, and takes their calls in turn:
a host whose speed changes within seconds is then the same for all. Name a policy twice, the second
time with a space behind it, to see what two models of the same policy differ by. `--root` measures
another tree's attnplug with this script: run both in turn on one machine. `--small` is for a try on
a CPU.
`--accepted` is the chance that a draft of exact is accepted, as random weights say nothing of it.
`call_rows.py` makes rows of results of what `--out` got.
"""

import argparse
import contextlib
import copy
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

CONFIG = Qwen2Config(
    hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18944, vocab_size=152064, max_position_embeddings=1 << 20,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
)  # fmt: skip
SMALL = Qwen2Config(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=200, max_position_embeddings=4096,
)  # fmt: skip
FEW = 32768  # tokens up to which a cell has three calls
SHOWN = 30  # kernels of a profile


class Calls:
    """Calls of one model, each with a prompt that no other has."""

    def __init__(self, model: Any, batch: int):
        self.model, self.batch, self.seed = model, batch, 0

    def __call__(self, tokens: int, new: int) -> float:
        """Seconds of a call."""
        self.seed += 1
        device = self.model.device
        seeded = torch.Generator(device).manual_seed(self.seed)
        size, top = (self.batch, tokens), self.model.config.vocab_size - 10
        ids = torch.randint(10, top, size, device=device, generator=seeded)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return seconds(lambda: self.model.generate(ids, **options), device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def kernels(work: Callable[[], Any]) -> None:
    """Print the milliseconds and the launches of each kernel of a call, the longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
    found: dict[str, list[float]] = {}
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time_total / 1e3)
    print(f"{sum(map(sum, found.values())):9.2f} ms in all")
    for name, times in sorted(found.items(), key=lambda each: -sum(each[1]))[:SHOWN]:
        print(f"{sum(times):9.2f} ms {len(times):6} {name[:120]}", flush=True)


def built(config: Qwen2Config, device: str) -> Any:
    from _models import random_model

    model = random_model(Qwen2ForCausalLM, config, device)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def beside(first: Any, policies: list[str], asked: argparse.Namespace, about: dict) -> None:
    """A model with each policy, all of the same weights, and their calls in turn. Half way through
    a cell each policy moves on to the next model, as two models differ by where their weights lie,
    and each round begins with another policy. `of_first` is the median over the rounds of a call's
    time divided by the first policy's."""
    import attnplug

    models = [first, *(copy.deepcopy(first) for _ in policies[1:])]  # steps fuse their weights
    for tokens, new in itertools.product(asked.tokens, asked.new):
        firsts: dict[str, float] = {}
        times: dict[str, list[float]] = {policy: [] for policy in policies}
        rounds = asked.calls or (3 if tokens <= FEW else 2)
        for turn in range(2):
            calls = {}
            for place, policy in enumerate(policies):
                model = models[(place + turn) % len(models)]
                calls[policy] = Calls(model, asked.batch)
                if policy != "stock":
                    attnplug.apply(model, policy)
                firsts.setdefault(policy, calls[policy](tokens, new))
            for number in range(turn, rounds, 2):
                begin = number // 2 % len(policies)  # alike in both halves
                for policy in (*policies[begin:], *policies[:begin]):
                    times[policy].append(calls[policy](tokens, new))
            for policy, call in calls.items():
                if policy != "stock":
                    attnplug.remove(call.model)
        for policy, each in times.items():
            parts = [mine / peer for mine, peer in zip(each, times[policies[0]], strict=True)]
            row = {"policy": policy, "n": tokens, "new": new, "first_s": round(firsts[policy], 4)}
            row |= {"call_s": round(statistics.median(each), 4), "times_s": each, "beside": True}
            say(asked.out, row | about | {"of_first": round(statistics.median(parts), 4)})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=counts, default="128,1024,8192,32768,100000")
    parser.add_argument("--new", type=counts, default="1,16,128,512")
    parser.add_argument("--policies", default="stock;dense;auto;momo+gather")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--calls", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--accepted", type=float)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.root:
        sys.path.insert(0, str(asked.root))
    from attnplug.bench.provenance import provenance  # of --root

    device = "cpu" if asked.small else "cuda"
    model = built(SMALL if asked.small else CONFIG, device)
    about = {
        "case": "call",
        "batch": asked.batch,
        "warm": asked.warm,
        "root": str(asked.root or ""),
    }
    about |= provenance()
    if asked.accepted is not None:
        about["imposed"] = asked.accepted
    with drafts(asked.accepted):
        if asked.beside:
            if asked.warm or asked.profile:
                parser.error("--beside takes neither --warm nor --profile")
            beside(model, asked.policies.split(";"), asked, about)
        else:
            alone(model, asked, about)


def drafts(accepted: float | None) -> Any:
    """A context in which drafts are accepted with this chance, if it is given."""
    if accepted is None:
        return contextlib.nullcontext()
    from _acceptance import accepting

    return accepting(accepted)


def alone(model: Any, asked: argparse.Namespace, about: dict) -> None:
    """The calls of one policy after the other."""
    import attnplug

    call = Calls(model, asked.batch)
    for policy in asked.policies.split(";"):
        if policy != "stock":
            attnplug.apply(model, policy)
        if asked.warm and policy != "stock":
            took = seconds(
                lambda: attnplug.warm(model, lengths=asked.tokens, batch=asked.batch), model.device
            )
            say(asked.out, {"policy": policy, "warm_s": round(took, 2)} | about)
        for tokens in asked.tokens:
            for new in asked.new:
                first = call(tokens, new)
                later = asked.calls or (3 if tokens <= FEW else 2)
                times = [call(tokens, new) for _ in range(later)]
                row = {"policy": policy, "n": tokens, "new": new, "first_s": round(first, 4)}
                row |= {"call_s": round(statistics.median(times), 4), "times_s": times}
                say(asked.out, row | about)
                if asked.profile:
                    kernels(lambda: call(tokens, new))  # noqa: B023 - called here
        if policy != "stock":
            attnplug.remove(model)
        torch.compiler.reset()
        gc.collect()


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def say(path: Path | None, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if path:
        with path.open("a") as file:
            print(line, file=file)


if __name__ == "__main__":
    main()
