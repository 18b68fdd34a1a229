"""`generate` as a user calls it: milliseconds a token, time to first token, and the first call of a
process, stock and under policies.

The shape is Qwen2.5-7B's with random bf16 weights (test_e2e_decode). Choose parts by pytest's -k
and by the environment, as a whole run is long:

    ATTNPLUG_BENCH_TOKENS    prompt lengths       "8192,32768,131072"
    ATTNPLUG_BENCH_BATCHES   rows                 "1"
    ATTNPLUG_BENCH_POLICIES                       "dense;gather;momo+gather"
    ATTNPLUG_BENCH_PEER      of test_tokens: "" is stock, or a policy, whose tokens take less long
    ATTNPLUG_BENCH_NEW       new tokens of test_tokens  "256"
    ATTNPLUG_BENCH_SAMPLED   1: sample instead of greedy decoding
    ATTNPLUG_BENCH_COMPILE   a CompileConfig for ours, as JSON: {"mode": "max-autotune"},
                             {"mode": null, "options": {"triton.cudagraphs": true, ...}}
    ATTNPLUG_BENCH_PROFILE   1: print where eight tokens of each policy spend their time

- test_tokens: time a token. The cache holds n - TAIL random tokens already, so no long prefill
  runs: the call feeds the TAIL. A token costs (time from the HEAD-th token on the host to the last)
  / NEW, for a call's first steps look at guards, may be captured, and are audited. attnplug.warm
  comes before. Each policy has a process of its own, where no other has left memory in pieces.
- test_first: the first call of a process on an empty compile cache, of a second process on the same
  cache, and then calls of ten other lengths. Each is a process of its own.
- test_prefill: time to first token, with a mask of ones, and with a prompt that holds its pad id,
  whole and in chunks, and the peak of memory that it took.
"""

import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import heads_of
from test_e2e_decode import CONFIG, profile, work_of
from test_e2e_decode import model as random_weights
from test_e2e_policies import fill_up_to
from torch._dynamo.utils import compilation_time_metrics, counters
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug import Auto, Gather, Gvr, Sketch
from attnplug.bench.rows import policy_name
from attnplug.models import captured
from attnplug.models.decode_loop import Decoding
from attnplug.models.names import CACHE
from attnplug.plan import read_tokens
from attnplug.policies import LayerShape, parse

TOKENS = [int(n) for n in os.environ.get("ATTNPLUG_BENCH_TOKENS", "8192,32768,131072").split(",")]
BATCHES = [int(n) for n in os.environ.get("ATTNPLUG_BENCH_BATCHES", "1").split(",")]
PEER = os.environ.get("ATTNPLUG_BENCH_PEER", "")
POLICIES = os.environ.get("ATTNPLUG_BENCH_POLICIES", "dense;gather;momo+gather").split(";")
SAMPLED = os.environ.get("ATTNPLUG_BENCH_SAMPLED") == "1"
# Of fewer queries sketch makes a basis that it soon makes again, within the new tokens.
TAIL, HEAD, ROUNDS = 128, 16, 3
NEW = int(os.environ.get("ATTNPLUG_BENCH_NEW", 256))
FIRST = 64  # new tokens of a process's first calls
CHUNK = 8192
PAD, END = 0, 2
OPTIONS: dict[str, Any] = dict(eos_token_id=END, pad_token_id=PAD, do_sample=SAMPLED)
COMPILE = os.environ.get("ATTNPLUG_BENCH_COMPILE", "")
OURS = dict(compile_config=CompileConfig(**json.loads(COMPILE))) if COMPILE else {}
KIND = ", ".join(filter(None, ["sampled" if SAMPLED else "", COMPILE]))


@functools.cache
def model() -> Any:
    """Random weights that never choose END, whose logit is 0: a call has all its tokens."""
    made = random_weights()
    with torch.no_grad():
        made.lm_head.weight[END].zero_()
    return made


@contextmanager
def served(policy: str) -> Iterator[Any]:
    """The model, under a policy ("" is stock)."""
    with attnplug.applied(model(), policy) if policy else nullcontext(model()) as made:
        yield made
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def prompt(n: int, batch: int = 1) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(n)
    return torch.randint(10, CONFIG.vocab_size, (batch, n), device="cuda", generator=random)


def filled(policy: str, n: int, batch: int) -> Cache:
    """A cache that holds n random tokens and has room for what a call adds: the one that generate
    takes by default, stock's growing one or ours."""
    if policy:
        made = attnplug.make_cache(model(), n + TAIL + HEAD + NEW)
        fill_up_to(made, n, batch)
        return made
    cache, dim = DynamicCache(config=CONFIG), CONFIG.hidden_size // CONFIG.num_attention_heads
    for index in range(CONFIG.num_hidden_layers):
        random = torch.Generator("cuda").manual_seed(index)
        shape = (batch, CONFIG.num_key_value_heads, n, dim)
        new = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=random)
            for _ in range(2)
        )
        cache.update(*new, index)
    return cache


@contextmanager
def known_tokens() -> Iterator[list[float]]:
    """When the host came to know of each token of a call of generate, in seconds: of transformers'
    loop after its look at what has ended, of ours after its own. Ours looks late, but for the token
    HEAD and the last one."""
    times: list[float] = []
    looked, ended = GenerationMixin._has_unfinished_sequences, Decoding._ended

    def look(*arguments: Any, **options: Any) -> bool:
        found = looked(*arguments, **options)
        times.append(time.perf_counter())
        return found

    def end(loop: Decoding, buffers: Any, lag: int) -> int | None:
        found = ended(loop, buffers, 0 if len(times) + 1 == HEAD else lag)
        times.append(time.perf_counter())
        return found

    GenerationMixin._has_unfinished_sequences, Decoding._ended = look, end
    try:
        yield times
    finally:
        GenerationMixin._has_unfinished_sequences, Decoding._ended = looked, ended


def seconds_of(made: Any, ids: torch.Tensor, tokens: int, **options: Any) -> float:
    """Of one call of generate, to the tokens on the host."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    out = made.generate(ids, max_new_tokens=tokens, **OPTIONS, **options).cpu()
    taken = time.perf_counter() - begun
    assert out.shape[1] == ids.shape[1] + tokens, "it ended early: another seed"
    return taken


@contextmanager
def counted_captures() -> Iterator[list[str]]:
    """A word for each graph that steps are captured as: a call on memory that an earlier one had
    needs none."""
    taken: list[str] = []
    capture = captured.capture

    def counting(*arguments: Any) -> captured.Replay:
        taken.append("captured")  # not the graph, which nobody else may keep
        return capture(*arguments)

    captured.capture = counting
    try:
        yield taken
    finally:
        captured.capture = capture


@functools.cache
def token_times(policy: str, n: int, batch: int) -> list[float]:
    """`times_here` of a process of its own."""
    times = of_a_process("times_here", policy, n, batch)
    print(f"{policy or 'stock'} {n} x {batch}: {[round(t) for t in times]} us", flush=True)
    return times


def of_a_process(name: str, *arguments: Any, **environment: str) -> Any:
    """What a function of this file returns in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, name, json.dumps(arguments)],
        env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    *said, found = run.stdout.splitlines()
    print(*said, sep="\n", flush=True)
    return json.loads(found)


def times_here(policy: str, n: int, batch: int) -> list[float]:
    """Microseconds a token of each round, the first call of all left out."""
    ids = prompt(n, batch)
    times = []
    with served(policy) as made, counted_captures() as graphs:
        if policy:
            warm(made, policy, n, batch)
        for number in range(ROUNDS + 1):
            cache = filled(policy, n - TAIL, batch)
            options = {CACHE: cache, "attention_mask": torch.ones_like(ids)}
            options |= OURS if policy else {}
            with known_tokens() as known:
                taken = seconds_of(made, ids, HEAD + NEW, **options)
            del cache, options
            if number:
                times.append((known[-1] - known[-1 - NEW]) / NEW * 1e6)
                print(f"call {1e3 * taken:.0f} ms, {len(graphs)} captures so far")
        if policy:
            assert attnplug.report(made).loop == "", attnplug.report(made).loop
            assert attnplug.report(made).steps == "", attnplug.report(made).steps
        if policy and os.environ.get("ATTNPLUG_BENCH_PROFILE"):
            profile_of(made, policy, ids)
    return times


def warm(made: Any, policy: str, n: int, batch: int) -> None:
    """Run ahead what steps over a cache of n tokens compile, most of which it holds already."""
    cache = filled(policy, n - TAIL, batch)
    attnplug.warm(made, [n], batch, **{CACHE: cache}, **OPTIONS | OURS)


def profile_of(made: Any, policy: str, ids: torch.Tensor) -> None:
    """Prints where eight tokens' time goes, by kernel."""

    class Decoder:
        def step(self) -> None:
            cache = filled(policy, ids.shape[1] - TAIL, len(ids))
            mask = torch.ones_like(ids)
            seconds_of(made, ids, 8, **{CACHE: cache}, attention_mask=mask, **OURS)

    profile(Decoder(), steps=1)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens(gpu_bench, policy, n, batch):
    times = token_times(policy, n, batch)
    nbytes, flops = work_of(model(), CONFIG, tokens_read(policy, n, batch), batch)
    record(
        gpu_bench,
        policy,
        "decode",
        case="generate",
        n=n,
        batch=batch,
        options=kind_of(policy, KIND),
        times_us=times,
        peer=PEER or "stock",
        peer_times_us=token_times(PEER, n, batch),
        bytes=nbytes,
        flops=flops,
    )


def record(gpu_bench: Any, policy: str, phase: str, *, batch: int = 1, **row: Any) -> None:
    """A row of the model, whose op is the method that serves the phase."""
    shape = dict(batch=batch, **heads_of(CONFIG), dtype=torch.bfloat16)
    op = getattr(parse(policy), phase).name
    gpu_bench.record(op=op, policy=policy_name(policy), **shape, **row)


def kind_of(policy: str, *what: str) -> str:
    """A row's options: what was asked, and a composed policy, which is not its methods alone."""
    return ", ".join(filter(None, [*what, policy if "+" in policy else ""]))


def tokens_read(policy: str, n: int, batch: int) -> float:
    """Keys and values that a step reads of a row, in tokens."""
    method, device = parse(policy).decode, model().device
    if isinstance(method, Auto):
        shape = LayerShape(**heads_of(CONFIG), softcap=0.0, sinks=False, device=device)
        method, _ = method.resolve("decode", shape, CONFIG.num_hidden_layers)
    if not isinstance(method, Gather | Gvr | Sketch) or not method.serves(batch, n, device):
        return n
    return read_tokens(method, n, n + TAIL)


PREFILLS = {"mask of ones": True, "holds its pad id": True, "chunks": False}


@functools.cache
def prefill_times(policy: str, n: int, kind: str) -> tuple[list[float], int]:
    """Microseconds to the first token of each of two rounds, and the peak of bytes above the
    weights."""
    ids = prompt(n)
    options: dict[str, Any] = dict(attention_mask=torch.ones_like(ids))
    if kind == "holds its pad id":
        ids[0, n // 2], options = PAD, {}
    if kind == "chunks":
        options["prefill_chunk_size"] = CHUNK
    times = []
    with served(policy) as made:
        for _ in range(3 if n < 100_000 else 2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times.append(seconds_of(made, ids, 1, **options) * 1e6)
            peak = torch.cuda.max_memory_allocated() - before
    print(f"{policy or 'stock'} {n} {kind}: {times} us, {peak / 2**30:.1f} GiB", flush=True)
    return times[1:], peak


@pytest.mark.parametrize("kind", PREFILLS)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("policy", POLICIES)
def test_prefill(gpu_bench, policy, n, kind):
    times, peak = prefill_times(policy, n, kind)
    compares = PREFILLS[kind]
    against = prefill_times("" if compares else policy, n, "mask of ones")[0]
    read = sum(p.numel() for p in model().parameters())
    record(
        gpu_bench,
        policy,
        "prefill",
        case="generate-prefill",
        n=n,
        options=f"{kind}, peak {peak / 2**30:.1f} GiB",
        times_us=times,
        peer="stock" if compares else "whole",
        peer_times_us=against,
        bytes=2 * read,
        flops=2 * read * n,
    )


@functools.cache
def first_calls(policy: str, n: int) -> dict[str, float]:
    """Seconds of the first calls of two processes on one compile cache, empty at first."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t"}
        for process in ("cold", "second process"):
            for name, value in of_a_process("first_here", policy, n, **caches).items():
                found[f"{process}, {name}"] = value
    print(policy or "stock", n, found, flush=True)
    return found


CALLS = ("first call", "next call", "slowest other length", "median other length")
FIRST = [f"{process}, {call}" for process in ("cold", "second process") for call in CALLS]


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("n", TOKENS[:1])
@pytest.mark.parametrize("policy", POLICIES)
def test_first(gpu_bench, policy, n, name):
    """Of the first length only: each policy takes two processes."""
    nbytes, flops = work_of_prefill(n)
    record(
        gpu_bench,
        policy,
        "decode",
        case="generate-first",
        n=n,
        options=kind_of(policy, name),
        times_us=[first_calls(policy, n)[name] * 1e6],
        peer="stock",
        peer_times_us=[first_calls("", n)[name] * 1e6],
        bytes=nbytes,
        flops=flops,
    )


def work_of_prefill(n: int) -> tuple[int, int]:
    read = CONFIG.num_hidden_layers * CONFIG.hidden_size * 3 * CONFIG.intermediate_size
    return 2 * read, 2 * read * n


def first_here(policy: str, n: int) -> dict[str, float]:
    """Seconds of the first call, of the next, and of a call of each of ten other lengths. Under a
    policy these must not compile. The phases of the first call's compilation go to stderr."""
    found = {}
    with served(policy) as made:
        found["first call"] = seconds_of(made, prompt(n), FIRST)
        print(policy or "stock", n, phases(), file=sys.stderr, flush=True)
        found["next call"] = seconds_of(made, prompt(n), FIRST)
        graphs = counters["stats"]["unique_graphs"]
        others = [seconds_of(made, prompt(n * k // 8), FIRST) for k in range(3, 14) if k != 8]
        found["slowest other length"] = max(others)
        found["median other length"] = statistics.median(others)
        compiled = counters["stats"]["unique_graphs"] - graphs
        assert not policy or compiled == 0, f"{compiled} compilations over ten lengths"
    return found


PHASES = {
    "dynamo traces": "bytecode_tracing",
    "AOT and inductor": "create_aot_dispatcher_function",
    "inductor": "compile_fx_inner",
    "of it lowering": "GraphLowering.run",
    "of it kernels' code": "GraphLowering.codegen",
    "of it waiting for Triton": "async_compile.wait",
}


def phases() -> dict[str, float]:
    """Seconds of each phase of this process's compilations so far, by torch's own clocks."""
    clocks = compilation_time_metrics
    return {name: round(sum(clocks.get(key, ())), 2) for name, key in PHASES.items()}


if __name__ == "__main__":
    here = {each.__name__: each for each in (times_here, first_here)}[sys.argv[1]]
    print(json.dumps(here(*json.loads(sys.argv[2]))))
