"""What a decode step of Qwen2.5-7B's shape costs, compiled in several ways.

    python bench/step_7b.py --out rows.jsonl [--lengths 8192,131072] [--variants as-is,gemv]
                            [--depths 2,6] [--profile] [--jobs 4] [--limit 90] [--budget 285]

The step is the one of attnplug's own loop of generate (`decode_step`: a greedy step of a model with
random bf16 weights, policy dense), in one CUDA graph. Each variant is a process of its own, on an
empty compile cache, ended after `--limit` seconds. `--jobs` of them compile at the same time, which
what they tune may feel, and are timed one after the other, while none compiles. `--jobs 1` gives
each the machine. All end when the `--budget` is spent.

A variant compiles models of two depths. A layer costs the difference over the layers between, and
`ms_28` is what 28 layers and the rest would take. `--profile` prints the kernels of a replay of the
deeper model, summed by name. Before it is timed, a compiled step must choose a token that the
uncompiled, unfused step finds (nearly) the best.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _models import random_model
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.generation.configuration_utils import CompileConfig

import attnplug
from attnplug.bench.provenance import provenance
from attnplug.models import decode_loop
from attnplug.models.cache import PlugLayer
from attnplug.models.decode_loop import DecodeLoop, StepBuffers, decode_step
from attnplug.models.generate import LOOP
from attnplug.models.regional import LayeredStep

LAYERS = 28
ROOM, WARMUP, STEPS, ROUNDS = 128, 8, 40, 3
SHAPE: dict[str, Any] = dict(
    hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944,
    vocab_size=152064, max_position_embeddings=262144, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attn_implementation="sdpa",
)  # fmt: skip
SMALL: dict[str, Any] = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
                             intermediate_size=512, vocab_size=1024)  # fmt: skip
OPTIONS = {"logits_to_keep": 1}  # as generate has it


@dataclass(frozen=True)
class Variant:
    """How a step is compiled: fused projections, inductor's options, environment, BLAS library,
    and layer by layer in a graph of our own instead of whole."""

    fuse: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    blas: str = ""
    by_layer: bool = False


GEMV = {"coordinate_descent_tuning": True}  # a product with one row becomes a Triton reduction
TUNED = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    "epilogue_fusion": True,
}
FREEZE = {"TORCHINDUCTOR_FREEZING": "1"}  # weights are constants, which inductor joins by itself
VARIANTS = {
    "as-is": Variant(),
    "fused": Variant(fuse=True),
    "gemv": Variant(options=GEMV),
    "gemv+fused": Variant(fuse=True, options=GEMV),
    "layers": Variant(by_layer=True),
    "layers+gemv": Variant(by_layer=True, options=GEMV),
    "layers+fused": Variant(by_layer=True, fuse=True),
    "layers+fused+combo": Variant(by_layer=True, fuse=True, options={"combo_kernels": True}),
    "layers+gemv+fused": Variant(by_layer=True, fuse=True, options=GEMV),
    "lt": Variant(blas="cublaslt"),
    "lt+fused": Variant(fuse=True, blas="cublaslt"),
    "gemv+combo": Variant(options=GEMV | {"combo_kernels": True}),
    "gemv+cooperative": Variant(options=GEMV | {"triton.cooperative_reductions": True}),
    "tuned+fused": Variant(fuse=True, options=TUNED),
    "tuned": Variant(options=TUNED),
    "freeze": Variant(environment=FREEZE),
}


class Stepper:
    """A model of some depth, its cache and one compiled step."""

    def __init__(self, layers: int, variant: Variant, options: argparse.Namespace):
        shape = SHAPE | (SMALL if options.small else {})
        self.config = Qwen2Config(num_hidden_layers=layers, **shape)
        self.device = torch.device(options.device)
        self.model = random_model(Qwen2ForCausalLM, self.config, options.device)
        attnplug.apply(self.model, options.policy, fuse=variant.fuse)
        self.loop: DecodeLoop = vars(self.model)[LOOP]
        inductor = variant.options
        if self.device.type == "cuda":
            inductor = inductor | {"triton.cudagraphs": True}
        config = CompileConfig(fullgraph=True, mode=None, options=inductor)
        decode_loop.BY_LAYER = frozenset({self.device.type} if variant.by_layer else ())
        self.step = self.loop.compiled(self.model, config)
        # The loop's calls use these again and again, too.
        self.buffers = StepBuffers.empty(1, 1, None, 0, 1, self.device)

    def fill(self, n: int) -> None:
        """A cache with n random tokens, and the buffers set to its first step."""
        dim = self.config.hidden_size // self.config.num_attention_heads
        heads = self.config.num_key_value_heads
        self.n, self.cache = n, attnplug.make_cache(self.model, n + ROOM)
        self.cache.early_initialization(1, heads, dim, torch.bfloat16, self.device)
        for layer in self.cache.layers:
            layer.keys[:, :, :n].normal_()
            layer.values[:, :, :n].normal_()
        self.reset()

    def reset(self) -> None:
        """The state before the first step again."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.n)
        self.buffers.token.fill_(7)
        self.buffers.position.fill_(self.n)
        self.buffers.slot.fill_(self.n)
        for tensor, value in ((self.buffers.ends, -1), (self.buffers.pad, 0)):
            assert tensor is not None
            tensor.fill_(value)
        if isinstance(self.step, LayeredStep):  # as at the beginning of a call
            self.step.begin()

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """Of the first step `[V]`, uncompiled and unfused."""
        buffers = self.buffers.stepped()
        found = decode_step(self.model, self.cache, *buffers, False, OPTIONS)
        assert found is not None
        self.reset()
        return found[0]

    @torch.no_grad()
    def run(self) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, PlugLayer):
                layer.prepare_step(self.n, None)
        self.step(self.model, self.cache, *self.buffers.stepped(), True, OPTIONS)


def times_of(stepper: Stepper) -> list[float]:
    """Microseconds of a step in each round, the host ahead of the device."""
    times = []
    for _ in range(ROUNDS):
        stepper.reset()
        for _ in range(WARMUP):
            stepper.run()
        synchronize(stepper.device)
        begun = time.perf_counter()
        for _ in range(STEPS):
            stepper.run()
        synchronize(stepper.device)
        times.append((time.perf_counter() - begun) / STEPS * 1e6)
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernels_of(stepper: Stepper, steps: int = 5) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a step of each kernel, by name."""
    stepper.reset()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            stepper.run()
        synchronize(stepper.device)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time / steps
            found[event.name][1] += 1 / steps
    ordered = sorted(found.items(), key=lambda entry: -entry[1][0])
    return {name: (us, launches) for name, (us, launches) in ordered}


def bytes_of(config: PreTrainedConfig, n: int) -> int:
    """Bytes that a step of 28 layers must read: weights but for the embedding table, and cache."""
    width, inner = config.hidden_size, config.intermediate_size
    kv = width // config.num_attention_heads * config.num_key_value_heads
    layer = width * (2 * width + 2 * kv + 3 * inner) + 2 * n * kv
    return 2 * (LAYERS * layer + width * config.vocab_size)


def measure(name: str, options: argparse.Namespace) -> None:
    """One variant, in a process of its own: compiles, waits for its turn, and prints a row of each
    length."""
    variant, depths = VARIANTS[name], [int(x) for x in options.depths.split(",")]
    if variant.blas:
        torch.backends.cuda.preferred_blas_library(variant.blas)
    lengths = [int(x) for x in options.lengths.split(",")]
    steppers = [Stepper(depth, variant, options) for depth in depths]
    compiled = [compile_and_check(stepper, lengths[0]) for stepper in steppers]
    wait_for_turn(Path(options.folder))
    for n in lengths:
        times = []
        for stepper in steppers:
            compile_and_check(stepper, n)
            with stepper.loop.fused(stepper.model):
                times.append(times_of(stepper))
                deepest = stepper is steppers[-1]
                table = kernels_of(stepper) if options.profile and deepest else {}
        row = row_of(name, n, depths, times, steppers[0].config)
        print(json.dumps(row | {"compile_s": compiled, "kernels": table}), flush=True)


def compile_and_check(stepper: Stepper, n: int) -> float:
    """Seconds of the first step on a cache of n tokens. Raises where it chose another token than
    the uncompiled step's (nearly) best."""
    stepper.fill(n)
    logits = stepper.logits()
    begun = time.perf_counter()
    with stepper.loop.fused(stepper.model):
        stepper.run()
    chosen = logits[int(stepper.buffers.token)]
    taken = time.perf_counter() - begun
    gap = float((logits.max() - chosen) / logits.std())
    assert gap < 0.3, f"the compiled step chose a token {gap:.2f} deviations below the best"
    stepper.reset()
    return taken


def wait_for_turn(folder: Path) -> None:
    """One process at a time is timed, and none while another compiles."""
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def row_of(
    name: str, n: int, depths: list[int], times: list[list[float]], config: PreTrainedConfig
) -> dict[str, Any]:
    few, many = (statistics.median(each) for each in times)
    layer = (many - few) / (depths[1] - depths[0])
    whole = many + (LAYERS - depths[1]) * layer
    rate = bytes_of(config, n) / whole / 1e6
    return {
        "case": "step-7b", "variant": name, "n": n, "depths": depths, "times_us": times,
        "layer_us": layer, "rest_us": few - depths[0] * layer, "ms_28": whole / 1e3, "tb_s": rate,
    }  # fmt: skip


class Child:
    """The process of one variant."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.wrong = name, folder, ""
        folder.mkdir()
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t"}
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.run = subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--child", name, "--folder", str(folder)],
                env=os.environ | caches | VARIANTS[name].environment, stdout=out, stderr=err,
                cwd=Path(__file__).parent, start_new_session=True,
            )  # fmt: skip

    def await_file(self, name: str, until: float) -> None:
        """Until the process has made the file or has ended. It is killed when time is up."""
        while self.run.poll() is None and not (self.folder / name).exists():
            if time.monotonic() > until:
                os.killpg(self.run.pid, signal.SIGKILL)  # inductor's workers too
                self.run.wait()
                self.wrong = "its time was up"
            time.sleep(0.02)

    def rows(self) -> list[dict[str, Any]]:
        """What it has measured, and what went wrong if something did."""
        error = (self.folder / "err").read_text().strip()
        if self.run.returncode and not self.wrong:
            self.wrong = " | ".join(error.splitlines()[-3:])
        out = (self.folder / "out").read_text().splitlines()
        rows = [json.loads(line) for line in out if line.startswith("{")]
        if self.wrong:
            print(error[-1500:], file=sys.stderr, flush=True)
            rows.append({"case": "step-7b", "variant": self.name, "wrong": self.wrong})
        return rows


def run_wave(names: list[str], options: argparse.Namespace, until: float) -> None:
    """Several variants compile at the same time, and are timed one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        children = [Child(name, Path(folder) / name) for name in names]
        for each in children:
            each.await_file("ready", min(until, time.monotonic() + options.limit))
        for each in children:
            (each.folder / "go").touch()
            each.await_file("never", min(until, time.monotonic() + options.limit))
            for row in each.rows():
                show(row)
                if options.out:
                    with options.out.open("a") as file:
                        print(json.dumps(row | provenance()), file=file)


def show(row: dict[str, Any]) -> None:
    if "wrong" in row:
        print(f"{row['variant']:18} {row['wrong']}", flush=True)
        return
    print(
        f"{row['variant']:18} {row['n']:7}: {row['ms_28']:.3f} ms for {LAYERS} layers, "
        f"{row['layer_us']:.1f} us a layer and {row['rest_us']:.0f} us, {row['tb_s']:.2f} TB/s, "
        f"compiled in {', '.join(f'{s:.1f}' for s in row['compile_s'])} s",
        flush=True,
    )
    for kernel, (us, launches) in itertools.islice(row["kernels"].items(), 24):
        print(f"    {us:9.1f} us  {launches:6.1f} x  {kernel[:90]}", flush=True)
    if row["kernels"]:
        total = sum(us for us, _ in row["kernels"].values())
        step = statistics.median(row["times_us"][1])
        print(f"    {total:9.1f} us in kernels of {step:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lengths", default="8192,131072")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--depths", default="2,6", help="layers of two models")
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--jobs", type=int, default=4, help="variants that compile at a time")
    parser.add_argument("--limit", type=float, default=90, help="seconds to compile, and to time")
    parser.add_argument("--budget", type=float, default=285, help="seconds of all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="narrow layers, to try the driver")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return measure(options.child, options)
    begun, names = time.monotonic(), options.variants.split(",")
    unknown = {*names} - {*VARIANTS}
    if unknown:
        parser.error(f"no variants: {', '.join(unknown)}")
    for first in range(0, len(names), options.jobs):
        wave = names[first : first + options.jobs]
        if time.monotonic() - begun > options.budget - 20:
            print(f"{', '.join(wave)}: not begun, time is up", flush=True)
            continue
        run_wave(wave, options, begun + options.budget)
    return None


if __name__ == "__main__":
    main()
