"""Two GPUs against one, in one run: decode steps of a model split by heads, and the time to first
token of a prompt in pieces of its sequence.

    torchrun --nproc-per-node 2 bench/tensor_parallel.py --out rows.jsonl
    torchrun --nproc-per-node 2 bench/tensor_parallel.py --parts decode --policies gather --profile

The shape is Qwen2.5-7B's with random bf16 weights (`--layers` takes fewer), the same on one GPU and
on two. Decode (`case=tp-decode`): the first rank times steps of the whole model while the others
wait, then all ranks those of the split one; the cache holds random keys and values of `--tokens`
tokens. Prefill (`case=tp-ttft`): the first rank runs the model on a prompt, then all ranks
`attnplug.prefill`. Logits of one GPU and of several are compared, and all ranks must have the same.
A row is a line of JSON in --out, peer `one GPU`.

Steps are those of generate, compiled and captured, whose logits somebody wants. `--ways nccl` sums
over the ranks by NCCL, `one-shot` as generate does, which the rows are of. `host` is how long the
host takes to hand a step to an idle GPU: a step that is not shorter waits for the host. `--profile`
prints the kernels of a step, and the gaps between them.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import test_momo
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

import attnplug
from attnplug.bench.rows import make_row
from attnplug.models import all_reduce
from attnplug.models.decode_step import StepBuffers, decode_step
from attnplug.models.generate import LOOP
from attnplug.models.names import CACHE
from attnplug.models.parallel import local_weights
from attnplug.plan import read_tokens

RANKS = all_reduce.RANKS
POLICIES = {"dense": "dense", "gather": "gather(min_tokens=0)", "momo": "momo"}
BUFFERS = (1, 1, None, 0, 0)  # one row without a mask, that no token ends
ROOM, WARMUP, STEPS, HOST_STEPS, PROFILED = 128, 8, 30, 12, 3
SLOW = 3e-6  # seconds without a kernel that count as a gap
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SHAPE: dict[str, Any] = dict(
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    max_position_embeddings=1 << 20,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
SMALL = dict(
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=512,
    vocab_size=512,
)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default="decode,ttft")
    parser.add_argument("--policies", default="dense,gather", help="of decode")
    parser.add_argument("--prefills", default="momo", help="policies of prefill; dense takes long")
    parser.add_argument("--ways", default="nccl,one-shot")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=3, help="of prefill")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="a small shape over gloo, uncompiled")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


def say(*words: Any) -> None:
    if RANK == 0:
        print(*words, flush=True)


class Bench:
    """The device of this rank, the shape, and what was asked for."""

    def __init__(self, asked: argparse.Namespace):
        self.asked = asked
        self.device = torch.device("cpu") if asked.cpu else torch.device("cuda", RANK)
        self.dtype = torch.float32 if asked.cpu else torch.bfloat16
        shape = SHAPE | (SMALL if asked.cpu else {})
        self.config = Qwen2Config(**shape, num_hidden_layers=asked.layers)
        self.dim = self.config.hidden_size // self.config.num_attention_heads
        self.mesh = init_device_mesh(self.device.type, (WORLD,))
        self.rows: list[dict[str, Any]] = []

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wait(self) -> None:
        self.sync()
        dist.barrier()

    def free(self) -> None:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- models with equal weights ---

    def whole(self) -> Qwen2ForCausalLM:
        with torch.device("meta"):
            model = Qwen2ForCausalLM(self.config).to(self.dtype)
        return self._filled(model)

    def split(self) -> Qwen2ForCausalLM:
        from transformers.distributed import DistributedConfig

        made = DistributedConfig(tp_size=WORLD, tp_plan="auto")
        config, _, mesh = Qwen2ForCausalLM.prepare_distribute_model(made)
        with torch.device("meta"):
            model = Qwen2ForCausalLM(self.config).to(self.dtype)
        return self._filled(Qwen2ForCausalLM.maybe_distribute_model(model, config, mesh))

    def _filled(self, model: Any) -> Any:
        """Random weights, the same on all ranks, of which a DTensor gets this rank's part."""
        from torch.distributed.tensor import DTensor, Shard

        model.eval().requires_grad_(False)
        for index, (name, parameter) in enumerate(list(model.named_parameters())):
            full = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
            random = torch.Generator(self.device).manual_seed(index)
            full.fill_(1) if name.endswith("norm.weight") else full.normal_(
                0, 0.02, generator=random
            )
            if isinstance(parameter, DTensor):
                place = parameter.placements[0]
                local = full
                if isinstance(place, Shard):
                    local = full.chunk(WORLD, place.dim)[RANK].clone()
                assert local.shape == parameter.to_local().shape, name
                full = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            owner, _, short = name.rpartition(".")
            module = model.get_submodule(owner)
            module._parameters[short] = torch.nn.Parameter(full, requires_grad=False)
        with torch.device(self.device):
            model.model.rotary_emb = type(model.model.rotary_emb)(self.config)
        return model

    # --- decode ---

    def cache(self, model: Any, heads: slice) -> Any:
        """A cache of random keys and values, of these of the model's KV heads."""
        tokens, count = self.asked.tokens, self.config.num_key_value_heads
        cache = attnplug.make_cache(model, tokens + ROOM)
        cache.early_initialization(1, len(range(count)[heads]), self.dim, self.dtype, self.device)
        for index, layer in enumerate(cache.layers):
            random = torch.Generator(self.device).manual_seed(index)
            for buffer in (layer.keys, layer.values):
                for head in range(count):
                    one = torch.empty(tokens, self.dim, dtype=self.dtype, device=self.device)
                    one.normal_(generator=random)
                    if head in range(count)[heads]:
                        buffer[0, head - range(count)[heads].start, :tokens] = one
            layer.cumulative_length.fill_(tokens)
            layer.exposes_buffers = True  # as a prefill would have found
        return cache

    @torch.no_grad()
    def decode(self, model: Any, policy: str, heads: slice, label: str) -> tuple[list[float], Any]:
        """Microseconds of each step, and the logits of the first. All heads: on this rank alone."""
        with attnplug.applied(model, POLICIES[policy]), contextlib.ExitStack() as stack:
            cache, buffers = self.cache(model, heads), StepBuffers.empty(*BUFFERS, self.device)
            buffers.token.fill_(7)
            buffers.position.fill_(self.asked.tokens)
            buffers.slot.fill_(self.asked.tokens)
            forward, loop = decode_step, vars(model)[LOOP]
            stack.enter_context(loop.fused(model))
            if self.device.type == "cuda":
                loop.compile_soon()
                forward = loop.compiled(model, None)

            def step() -> torch.Tensor:
                for layer in cache.layers:
                    layer.prepare_step(self.asked.tokens, None)
                state = buffers.stepped()
                logits = forward(model, cache, *state, False, dict(logits_to_keep=1))
                assert logits is not None
                buffers.token.copy_(logits.argmax(-1, keepdim=True))
                return logits

            begun = time.perf_counter()
            first = step().clone()
            self.sync()
            say(f"{label}: first step {time.perf_counter() - begun:.1f} s")
            for _ in range(WARMUP):
                step()
            times, host = self._times(step, heads == slice(None)), self._host_times(step)
            p50 = statistics.median(times)
            say(
                f"{label}: {p50 / 1e3:.2f} ms a step ({min(times) / 1e3:.2f} to "
                f"{max(times) / 1e3:.2f}), host {statistics.median(host) / 1e3:.2f} ms"
            )
            if self.asked.profile and self.device.type == "cuda":
                self._profile(step, label)
        self.free()
        return times, first

    def _times(self, step: Any, alone: bool) -> list[float]:
        if not alone:  # another rank would take this barrier for the one that it waits at
            self.wait()
        if self.device.type == "cpu":
            return self._host_times(step)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        self.sync()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        self.sync()
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]

    def _host_times(self, step: Any) -> list[float]:
        """Microseconds that the host takes for a step where the device is idle."""
        found = []
        for _ in range(HOST_STEPS):
            self.sync()
            begun = time.perf_counter()
            step()
            found.append((time.perf_counter() - begun) * 1e6)
        self.sync()
        return found

    def _profile(self, step: Any, label: str) -> None:
        kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as recorded:
            for _ in range(PROFILED):
                step()
            self.sync()
        if RANK:
            return
        averages = recorded.key_averages()
        launches = {e.key: e.count / PROFILED for e in averages if "Launch" in e.key}
        say(f"{label}: launches a step (one of a graph is a replay): {launches}")
        say(averages.table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))
        say(averages.table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=60))
        on_gpu = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        print_gaps(label, [(e.time_range.start, e.time_range.end, e.name) for e in on_gpu])

    # --- prefill ---

    @torch.no_grad()
    def one_prefill(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        cache = attnplug.make_cache(model, ids.shape[1] + ROOM)
        return model(ids, **{CACHE: cache}, logits_to_keep=1).logits

    def ttft(self, run: Any, alone: bool, label: str) -> tuple[list[float], torch.Tensor]:
        """Microseconds of each prefill but the first, and its logits. `alone`: on this rank."""
        times, logits = [], torch.empty(0)
        for _ in range(self.asked.rounds + 1):
            if not alone:
                self.wait()
            self.sync()
            begun = time.perf_counter()
            logits = run()
            self.sync()
            times.append((time.perf_counter() - begun) * 1e6)
        shown = ", ".join(f"{t / 1e6:.3f}" for t in times[1:])
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
        say(f"{label}: first {times[0] / 1e6:.2f} s, then {shown} s; peak {peak:.1f} GB")
        return times[1:], logits[:, -1].float()

    # --- rows ---

    def work(self, op: str, case: str) -> tuple[int, int]:
        """Bytes and FLOPs that all GPUs together need: weights but the embedding table once, keys
        and values that are read or written, products with both."""
        config, n = self.config, self.asked.tokens
        layers, hidden = config.num_hidden_layers, config.hidden_size
        attended = 2 * hidden + 2 * config.num_key_value_heads * self.dim
        linear = layers * hidden * (attended + 3 * config.intermediate_size)
        head = hidden * config.vocab_size
        cached = layers * 2 * config.num_key_value_heads * self.dim
        if case == "tp-decode":
            policy = attnplug.policies.parse(POLICIES["gather"]).decode
            read = read_tokens(policy, n, n + ROOM) if op == "gather" else n
            return int(2 * (linear + head + cached * read)), int(
                2 * (linear + head) + layers * 4 * hidden * read
            )
        shape = test_momo.Shape(1, config.num_attention_heads, config.num_key_value_heads, self.dim)
        scored = (
            2 * hidden * n * n if op == "dense" else test_momo.work(shape, attnplug.Momo(), n)[1]
        )
        return int(2 * (linear + head + cached * n)), int(2 * linear * n + layers * scored)

    def compare(self, one: torch.Tensor | None, several: torch.Tensor, label: str) -> None:
        """All ranks must have the same logits; those of one GPU differ by rounding."""
        first = several.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(int(torch.equal(first, several)), device=self.device)
        dist.all_reduce(same)
        assert int(same) == WORLD, f"{label}: the ranks have different logits"
        if one is not None:
            error = float((several - one).norm() / one.norm())
            say(f"{label}: logits differ from one GPU's by {error:.4f} of their norm")
            assert error < 0.2, f"{label}: not the same computation"

    def add(
        self, case: str, op: str, policy: str, times: list[float], base: list[float], peer="one GPU"
    ) -> None:
        config, n = self.config, self.asked.tokens
        nbytes, flops = self.work(op, case)
        row = make_row(
            op=op,
            case=case,
            n=n,
            batch=1,
            heads_q=config.num_attention_heads,
            heads_kv=config.num_key_value_heads,
            head_dim=self.dim,
            dtype=self.dtype,
            options=f"gpus={WORLD}, layers={self.asked.layers}",
            times_us=times,
            peer=peer,
            peer_times_us=base,
            bytes=nbytes,
            flops=flops,
            ceiling=lambda seconds: None,  # of several GPUs: none was measured
            policy=policy,
        )
        say(f"{case} {policy}: {row['ratio']:.2f}x of {peer}")
        if self.asked.out is not None and RANK == 0:
            with self.asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def print_gaps(label: str, spans: list[tuple[float, float, str]]) -> None:
    """How much of a stretch of time kernels ran, and behind and before which of them none did.
    `spans` are begin, end (microseconds) and name."""
    spans = sorted(spans)
    if not spans:
        return
    end, before, idle = spans[0][1], spans[0][2], 0.0
    gaps: dict[tuple[str, str], list[float]] = {}
    for begin, until, name in spans[1:]:
        if begin > end:
            idle += begin - end
            if begin - end > SLOW * 1e6:
                gaps.setdefault((before[:40], name[:40]), []).append(begin - end)
        if until > end:
            end, before = until, name
    whole = end - spans[0][0]
    print(f"{label}: {whole:.0f} us, of which no kernel ran in {idle:.0f} ({idle / whole:.0%})")
    longest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:10]
    for (one, other), each in longest:
        print(f"  {sum(each):8.0f} us in {len(each):3} gaps between {one} and {other}")


def run_decode(bench: Bench) -> None:
    heads, ways = bench.config.num_key_value_heads // WORLD, bench.asked.ways.split(",")
    alone: dict[str, Any] = {}
    names = bench.asked.policies.split(",")
    if RANK == 0:
        model = bench.whole()
        for name in names:
            alone[name] = bench.decode(model, name, slice(None), f"decode {name}, one GPU")
        del model
        bench.free()
    bench.wait()
    model = bench.split()
    own = slice(RANK * heads, (RANK + 1) * heads)
    for name in names:
        for way in ways:
            label = f"decode {name}, {WORLD} GPUs, {way}"
            all_reduce.RANKS = () if way == "nccl" else RANKS
            with local_weights(model):
                times, first = bench.decode(model, name, own, label)
            one = alone[name][1] if RANK == 0 else None
            bench.compare(one, first, label)
            if RANK == 0 and way == "one-shot":
                op = "gather" if name == "gather" else "dense_decode"
                bench.add("tp-decode", op, name, times, alone[name][0])


def run_ttft(bench: Bench) -> None:
    model, n = bench.whole(), bench.asked.tokens
    random = torch.Generator(bench.device).manual_seed(5)
    vocabulary = bench.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, n), device=bench.device, generator=random)
    for name in bench.asked.prefills.split(","):
        with attnplug.applied(model, POLICIES[name]):
            one = None
            if RANK == 0:
                label = f"prefill {name}, one GPU"
                one = bench.ttft(lambda: bench.one_prefill(model, ids), True, label)
            bench.wait()
            bench.free()

            def run() -> torch.Tensor:
                return attnplug.prefill(model, ids, mesh=bench.mesh, max_length=n + ROOM).logits

            label = f"prefill {name}, {WORLD} GPUs"
            times, logits = bench.ttft(run, False, label)
            bench.compare(None if one is None else one[1], logits, label)
            if one is not None:
                op = "momo" if name == "momo" else "dense"
                bench.add("tp-ttft", op, name, times, one[0])


def main() -> None:
    asked = arguments()
    torch._logging.set_logs(perf_hints=True, recompiles=asked.profile)  # why there is no graph
    if not asked.cpu:
        torch.cuda.set_device(RANK)
    place = None if asked.cpu else torch.device("cuda", RANK)
    dist.init_process_group("gloo" if asked.cpu else "nccl", device_id=place)
    bench = Bench(asked)
    parts = {"decode": run_decode, "ttft": run_ttft}
    for name in asked.parts.split(","):
        parts[name](bench)
        bench.free()
        bench.wait()
    sys.stdout.flush()
    os._exit(0)  # torch waits long for a communicator that a captured graph holds


if __name__ == "__main__":
    main()
