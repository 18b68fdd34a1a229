"""Two soaks of one process or several, with everything that a long day brings.

    python bench/soak.py --requests 10000 --processes 4 --seconds 500 --out soak-requests.json
    python bench/soak.py --seconds 540 --seed 0 --longest 200000 --out soak.json

With `--requests`, a server's day: two models with a policy each that answer requests of mixed kinds
(rows 1 to 8, 100 to 100,000 tokens, sampled, padded, streamed, cancelled, adapters, own end tokens,
autocast, inference mode, hooks), which `_requests.py` draws. Of the first process one model's steps
are compiled. In the middle the policies change places and an adapter comes. Fails where a request
is lost, an answer of any has another form than it should, each fiftieth has other tokens than
stock's (but for ties, which are counted), or the memory between two requests rises from the second
quarter of the soak to the last by more than a hundredth; of the host's memory, in which Triton
keeps each kernel that it has compiled, what came after the last of these counts. The counts of all
processes are written as they go, so that a soak that is cut leaves them. A call of ten minutes has
time for about 8,000 requests: two calls of 5,000 with other seeds are 10,000.

Without, rounds of random policies applied and removed, lengths, batches, padding, samplers,
assistants, interrupts, memory that runs out in a prefill, caches that go on for turns, NaN in a
cache, flipped bits in certified's tier. Counts what was seen, prints it and writes it to --out.
Fails at the first exact policy whose greedy tokens are not stock's (but for ties, which are
counted), at a NaN or a flipped bit that does not show, and where the memory after a round rises by
more than a hundredth above the first rounds'.
"""

import argparse
import collections
import functools
import gc
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _requests import Requests, bytes_in_use, joined
from transformers import LogitsProcessor

import attnplug
from attnplug.models.names import CACHE
from attnplug.testing.policy import tiny_model

EXACT = {
    "dense": "dense",
    "momo": "momo(gamma=8, block=128, query_block=128, top_k=64, exact_k=64, min_tokens=0)",
    "gather": "gather(k={blocks}, block=128, local=2, min_tokens=0)",
    "gather-host": "gather(k={blocks}, block=128, local=2, min_tokens=0, kv='host')",
    "gvr": "gvr(k=2048, sink=4, window=64, min_tokens=0)",
    "sketch": "sketch(k=2048, min_tokens=0)",
    "certified": "certified(block=64, coverage=1.0, k_min=1024, k_max=1024, v_tol=0.0, "
    "tolerance=0.0, min_tokens=0)",
}
# Tokens up to which a budget covers all that there is.
COVERS = {
    "momo": 64 * 128,
    "gather": 256 * 128,
    "gather-host": 256 * 128,
    "gvr": 2048,
    "sketch": 2048,
}
DEFAULT = ("momo", "gather", "gather(kv='host')", "gvr", "sketch", "certified", "momo+gather")
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 5},
    {"do_sample": True, "top_p": 0.9},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 3},
]
NEW = 8
PATIENCE = 90  # seconds that a process of requests gets for its last one
WARM, LAST = slice(5, 15), slice(-10, None)  # rounds whose memory is compared
TIE = 1e-4  # of the largest logit
# Scores of a batch that stock may have to store: in float32, with groups of heads or a mask, its
# attention makes a matrix of them.
MOST_SCORES = 1 << 33


class Interrupt(LogitsProcessor):
    """Ctrl-C at one of the steps."""

    def __init__(self, step: int):
        self.left = step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return scores


class Soak:
    def __init__(self, device: str, longest: int, seed: int):
        self.device, self.longest = device, longest
        self.rng, self.counts = random.Random(seed), collections.Counter()
        kind = {"device": device, "dtype": torch.float32, "max_position_embeddings": 2 * longest}
        self.model: Any = tiny_model(**kind)
        self.helper: Any = tiny_model(seed=3, **kind)
        self.memory: list[int] = []
        self.graph = _registered(device)

    def ids(self, rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(2, 90, (rows, tokens), device=self.device)

    def prompt(self, longest: int, rows: int = 16, stock: bool = False) -> dict[str, torch.Tensor]:
        """Lengths evenly in the logarithm, as many rows as fit a budget, some padded. `stock`: what
        stock attention, too, has room for."""
        square = MOST_SCORES // self.model.config.num_attention_heads
        longest = min(longest, self.longest)
        if stock:
            longest = min(longest, math.isqrt(square))
        tokens = int(math.exp(self.rng.uniform(0, math.log(longest))))
        most = min(rows, 2 * self.longest // max(1, tokens))
        if stock:
            most = min(most, square // max(1, tokens**2))
        rows = self.rng.randint(1, max(1, most))
        ids = self.ids(rows, tokens)
        mask = torch.ones_like(ids)
        few = rows * tokens**2 <= square
        if rows > 1 and 4 < tokens and few and self.rng.random() < 0.5:
            mask[0, : self.rng.randrange(tokens - 1)] = 0
            self.counts["padded"] += 1
        return {"input_ids": ids, "attention_mask": mask}

    def generate(self, inputs: dict[str, Any], **options: Any) -> Any:
        options = {"max_new_tokens": NEW, "do_sample": False} | options
        return self.model.generate(**inputs, return_dict_in_generate=True, **options)

    @torch.no_grad()
    def hold(self, name: str, found: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor):
        """The same tokens; where they part, stock's two best logits are as good as equal. Called
        without a policy."""
        assert found.shape == wanted.shape, f"{name}: {found.shape}, stock's are {wanted.shape}"
        for row in (found != wanted).any(1).nonzero()[:, 0].tolist():
            at = int((found[row] != wanted[row]).nonzero()[0])
            real = torch.ones_like(wanted[row : row + 1, :at])
            real[:, : mask.shape[1]] = mask[row, :at]
            logits = self.model(wanted[row : row + 1, :at], attention_mask=real).logits[0, -1]
            best = logits.topk(2).values
            gap = float((best[0] - best[1]) / logits.abs().max())
            assert gap < TIE, f"{name}: other tokens than stock's at {at}, which is no tie ({gap})"
            self.counts["ties"] += 1

    def exact(self, name: str | None = None) -> None:
        name = name or self.rng.choice(list(EXACT))
        inputs = self.prompt(COVERS.get(name, self.longest) - 2 * NEW - 100, stock=True)
        tokens = inputs["input_ids"].shape[1] + 2 * NEW + 100
        policy = EXACT[name].format(blocks=min(256, -(-tokens // 128)))
        wanted = self.generate(inputs).sequences
        with attnplug.applied(self.model, policy):
            out = self.generate(inputs)
            turns = [self.next_turn(inputs, out)] if self.rng.random() < 0.5 else []
        self.hold(name, out.sequences, wanted, inputs["attention_mask"])
        for turn, again in turns:
            self.hold(name, again, self.generate(turn).sequences, turn["attention_mask"])
            self.counts["next turns"] += 1
        self.counts[f"exact {name}"] += 1

    def next_turn(self, inputs: dict[str, Any], out: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """A second turn's inputs, and its tokens with the cache of the first."""
        more = self.ids(len(out.sequences), self.rng.randint(1, 100))
        ids = torch.cat([out.sequences, more], 1)
        mask = inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        turn = {"input_ids": ids, "attention_mask": mask}
        return turn, self.generate(turn, **{CACHE: out[CACHE]}).sequences

    def assisted(self) -> None:
        """A policy on the assistant, whatever it is, and an exact one on the model: rounds on."""
        inputs = self.prompt(2000, rows=1, stock=True)
        wanted = self.generate(inputs, max_new_tokens=4 * NEW).sequences
        with attnplug.applied(self.helper, self.rng.choice(DEFAULT)):
            options = {"assistant_model": self.helper, "max_new_tokens": 4 * NEW}
            one = self.generate(inputs, **options).sequences
            with attnplug.applied(self.model, "dense"):
                two = self.generate(inputs, **options).sequences
        for found in (one, two):
            self.hold("assisted", found, wanted, inputs["attention_mask"])
        self.counts["assisted"] += 1

    def sampled(self, policy: str | None = None) -> None:
        policy, options = policy or self.rng.choice(DEFAULT), self.rng.choice(SAMPLERS)
        inputs = self.prompt(self.longest, rows=1 if "prompt_lookup_num_tokens" in options else 16)
        with attnplug.applied(self.model, policy):
            self.generate(inputs, **options)
        self.counts[f"default {policy}"] += 1

    def interrupted(self) -> None:
        with attnplug.applied(self.model, self.rng.choice(DEFAULT)):
            try:
                stop = Interrupt(self.rng.randrange(NEW))
                self.generate(self.prompt(self.longest), logits_processor=[stop])
            except KeyboardInterrupt:
                self.counts["interrupts"] += 1

    def out_of_memory(self) -> None:
        """A prefill that finds no memory, and the same after it. torch may take no more than it
        has: the driver keeps what it needs for itself, and other processes what they need."""
        if self.device != "cuda":
            return
        inputs = self.prompt(self.longest, stock=True)
        wanted = self.generate(inputs).sequences
        with attnplug.applied(self.model, "dense"):
            torch._dynamo.reset()  # what graphs of the last round hold
            gc.collect()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            try:
                self.generate(inputs)
            except torch.OutOfMemoryError:
                self.counts["out of memory"] += 1
            torch.cuda.set_per_process_memory_fraction(1.0)
            again = self.generate(inputs).sequences
        self.hold("after running out", again, wanted, inputs["attention_mask"])

    @torch.no_grad()
    def caches(self) -> tuple[torch.Tensor, list[Any], Any]:
        """A token, two equal caches with a prompt and a step in each, and a layer of the first."""
        ids = self.ids(1, 200)
        pair = [attnplug.make_cache(self.model, 256) for _ in range(2)]
        for cache in pair:
            self.model(ids, **{CACHE: cache})
            self.model(ids[:, :1], **{CACHE: cache})
        return ids[:, :1], pair, pair[0].layers[0]

    @torch.no_grad()
    def faults(self) -> None:
        """NaN in a cache surfaces; a flipped bit in certified's tier changes no token."""
        policy = self.rng.choice(["dense", EXACT["gather"].format(blocks=4), EXACT["gvr"]])
        with attnplug.applied(self.model, policy):
            token, pair, layer = self.caches()
            layer.values[0, 0, self.rng.randrange(200), 0] = math.nan
            found = self.model(token, **{CACHE: pair[0]}).logits
            assert found.isnan().any(), f"{policy}: a NaN became a number"
        with attnplug.applied(self.model, EXACT["certified"]):
            token, pair, layer = self.caches()
            codes = layer.tier.k_codes.view(-1)
            codes[self.rng.randrange(codes.numel() // 2)] ^= 1 << self.rng.randrange(7)
            found, wanted = (self.model(token, **{CACHE: x}).logits for x in pair)
            assert found.argmax() == wanted.argmax(), "a flipped bit changed a token"
        self.counts["faults"] += 1

    def first_rounds(self) -> list[Callable[[], None]]:
        """Each kind of round once, the rare ones first: a short run has them all."""
        kinds: list[Callable[[], None]] = [
            self.out_of_memory,
            self.faults,
            self.interrupted,
            self.assisted,
        ]
        kinds += [functools.partial(self.exact, name) for name in EXACT]
        return kinds + [functools.partial(self.sampled, policy) for policy in DEFAULT]

    def round(self) -> None:
        often: list[Callable[[], None]] = [self.exact] * 5 + [self.sampled] * 4
        seldom = [self.assisted, self.interrupted, self.out_of_memory, self.faults]
        first = self.first_rounds()
        done = self.counts["rounds"]
        kind = first[done] if done < len(first) else self.rng.choice([*often, *seldom])
        begin = time.monotonic()
        kind()
        print(f"round {done}: {_name(kind)}, {time.monotonic() - begin:.1f} s", flush=True)
        torch._dynamo.reset()  # each round compiles and captures anew
        gc.collect()
        self.memory.append(bytes_in_use(self.device))
        self.counts["rounds"] += 1

    def hold_memory(self) -> None:
        """The last rounds leave a hundredth more than the first ones, or a MiB, at most."""
        if len(self.memory) < 30:
            return
        low, high = max(self.memory[WARM]), max(self.memory[LAST])
        assert high <= max(1.01 * low, low + (1 << 20)), f"memory: {low:,} to {high:,} bytes"


def _registered(device: str) -> Any:
    """A CUDA graph, kept. torch gives its generator memory with the first graph that lives, and
    ends the process where there is none (`~CUDAGraph`, "should be registered to the state")."""
    if device != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(1, device=device)
    return graph


def _name(kind: Any) -> str:
    """Of a round: a method, or one with its first argument."""
    if isinstance(kind, functools.partial):
        return " ".join([kind.func.__name__, *kind.args])
    return kind.__name__


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "longest": options.longest,
    }


def requests(options: argparse.Namespace) -> dict[str, Any]:
    """All processes' requests: each takes every so many, and writes its counts as it goes."""
    folder, count = Path(tempfile.mkdtemp(prefix="soak-")), options.processes
    paths = [folder / f"part-{index}.json" for index in range(count)]
    given = {"requests": options.requests, "seconds": options.seconds, "seed": options.seed}
    given |= {"longest": options.longest, "device": options.device}
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in given.items())]
    logs = [path.with_suffix(".log").open("w") for path in paths]
    run = [
        subprocess.Popen(
            [*command, f"--part={index}/{count}", f"--out={path}"], stdout=log, stderr=log
        )
        for index, (path, log) in enumerate(zip(paths, logs, strict=True))
    ]
    begun, ends = time.monotonic(), options.seconds + PATIENCE
    try:
        while any(each.poll() is None for each in run) and time.monotonic() - begun < ends:
            time.sleep(min(10, options.seconds / 20))
            facts = joined_so_far(options, paths)
            answered = facts["counts"].get("answered", 0)
            print(f"{time.monotonic() - begun:.0f} s: {answered} answered", flush=True)
            if options.out:
                options.out.write_text(json.dumps(facts, indent=1) + "\n")
    finally:
        for each in run:  # a process that hangs
            if each.poll() is None:
                each.kill()
    facts = joined_so_far(options, paths)
    for index, (each, path, log) in enumerate(zip(run, paths, logs, strict=True)):
        log.close()
        if each.wait() or not path.exists():
            said = Path(log.name).read_text().strip()[-2000:]
            facts["wrong"].append(f"process {index} ended with {each.returncode}: {said}")
    return facts


def joined_so_far(options: argparse.Namespace, paths: list[Path]) -> dict[str, Any]:
    parts = [json.loads(path.read_text()) for path in paths if path.exists()]
    return provenance(options) | joined(parts, options.requests)


def part(options: argparse.Namespace) -> None:
    """One process of `requests`."""
    index, count = map(int, options.part.split("/"))
    more = {"halfway": options.requests // 2, "compiled": index == 0, "out": options.out}
    soak = Requests(options.device, options.longest, options.seed, **more)
    soak.run(range(index, options.requests, count), options.seconds)


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    soak = Soak(options.device, options.longest, options.seed)
    begin = time.monotonic()
    while time.monotonic() - begin < options.seconds:
        soak.round()
    soak.hold_memory()
    return provenance(options) | {
        "seconds": round(time.monotonic() - begin),
        "counts": dict(sorted(soak.counts.items())),
        "memory": soak.memory[:: max(1, len(soak.memory) // 100)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, help="of a server's day; without, rounds")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", help="of a server's day, what a process of several is: 0/4")
    parser.add_argument("--longest", type=int, help="tokens: 200,000, or 100,000 of a request")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.longest = options.longest or (100_000 if options.requests else 200_000)
    torch.manual_seed(options.seed)
    if options.part:
        part(options)
        return
    facts = requests(options) if options.requests else rounds(options)
    print(json.dumps(facts, indent=1))
    if options.out:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(bool(facts.get("wrong")))


if __name__ == "__main__":
    main()
