"""certified beside transformers' QuantizedCache with the quanto backend, which keeps packed
integers and dequantizes the whole cache in every step: bytes on the GPU, milliseconds a step, and
what either loses of a real text. Needs optimum-quanto.

`prose`: SmolLM2-135M after 8,000 tokens of a book, its next 64 teacher-forced; loss is the mean
difference from dense of a token's log-likelihood, with a paired bootstrap. `random`: the shape of
Llama-3.1-8B, random weights, 32K random tokens. The prefill is the model's own and the same for
all. Steps are eager on both sides, as quanto's cache breaks the compiler's graph, so that the
host's time is in all of them; `compiled` are steps with mode="reduce-overhead". Memory is what the
cache holds on the GPU over 16 bits a number, `exact` the share of heads that were recomputed.
Random weights attend evenly, and their outputs nearly cancel: most blocks are promoted.

Of quanto's CUDA extension only the kernel that unpacks integers is compiled (with nvcc and ninja,
once): its matrix products, which no cache needs, take minutes.
"""

import dataclasses
import functools
import importlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import heads_of, random_model, recomputed
from certified_fidelity import ROOT, bootstrap
from test_e2e_decode import Decoder, time_steps
from test_e2e_ttft import CONFIG as LLAMA
from transformers import Cache, LlamaForCausalLM, PreTrainedModel, QuantizedCache

import attnplug
from attnplug import Certified, Policy
from attnplug.bench.rows import policy_name
from attnplug.models.names import CACHE
from attnplug.models.pretrained import load
from attnplug.policies.certified import CertifiedLayer

RIVALS: dict[str, dict[str, Any]] = {  # axis 0: a scale for 64 numbers side by side; -1: a channel
    "quanto, 4 bits": {"nbits": 4},
    "quanto, 4 bits, keys by channel": {"nbits": 4, "axis_key": -1},
    "quanto, 2 bits": {"nbits": 2},
}
OURS = Policy(decode=Certified(min_tokens=0))
CONTEXT = {"prose": 8000, "random": 32768}
STEPS, WARMUP = 64, 4


@dataclasses.dataclass
class Run:
    """Microseconds of each step, the loss of each token, bytes of the cache, and the share of heads
    that were recomputed."""

    times: list[float]
    losses: torch.Tensor
    nbytes: int
    exact: float


@functools.cache
def model_and_ids(kind: str) -> tuple[PreTrainedModel, torch.Tensor]:
    tokens = CONTEXT[kind] + STEPS + 1
    if kind == "random":
        model = random_model(LlamaForCausalLM, LLAMA, "cuda")
        return model, torch.randint(0, LLAMA.vocab_size, (1, tokens), device="cuda")
    model, tokenizer = load("smollm2-135m", dtype=torch.float16)
    text = (ROOT / "attnplug/eval/data/rust_book.txt").read_text()
    return model.cuda(), tokenizer(text, return_tensors="pt").input_ids[:, :tokens].cuda()


@torch.no_grad()
def decode(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, context: int) -> Run:
    """Feeds the tokens behind the context one by one."""
    model(ids[:, :context], **{CACHE: cache}, logits_to_keep=1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    losses = []
    marks[0].record()
    for step in range(STEPS):
        at = context + step
        logits = model(ids[:, at : at + 1], **{CACHE: cache}).logits[0, -1].float()
        losses.append(-logits.log_softmax(-1)[ids[0, at + 1]])
        marks[step + 1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)][WARMUP:]
    return Run(times, torch.stack(losses).double().cpu(), held(cache), recomputed(cache))


def held(cache: Cache) -> int:
    """Bytes on the GPU. certified: tiers and scratch caches. quanto: packed codes, scales, shifts,
    newest tokens. Any other: keys and values."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, CertifiedLayer):
            total += layer.tier.nbytes() if layer.tier is not None else 0
            total += sum(part.nbytes for part in layer.scratch or ())
            continue
        for x in (
            getattr(layer, "_quantized_keys", None),
            getattr(layer, "_quantized_values", None),
        ):
            if x is not None:
                parts = (x._data, x._scale, x._shift)
                total += sum(getattr(part, "_data", part).nbytes for part in parts)
        total += layer.keys.nbytes + layer.values.nbytes
    return total


BINDING = """#include <torch/extension.h>
#include "unpack.h"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("unpack", &unpack, "unpack"); }
"""


@functools.cache
def trim_quanto() -> None:
    extension = importlib.import_module("optimum.quanto.library.extensions.cuda").ext
    kernel = next(Path(source) for source in extension.sources if source.endswith("/unpack.cu"))
    binding = Path(tempfile.mkdtemp()) / "binding.cpp"
    binding.write_text(BINDING)
    extension.sources = [str(kernel), str(binding)]
    extension.extra_cflags = [*extension.extra_cflags, f"-I{kernel.parent}"]


@functools.cache
def run(kind: str, which: str) -> Run:
    """`which` is dense or certified, either of them `compiled`, or one of RIVALS."""
    model, ids = model_and_ids(kind)
    context, room = CONTEXT[kind], CONTEXT[kind] + STEPS + 8
    if which in RIVALS:
        trim_quanto()
        cache = QuantizedCache(
            "quanto", model.config, q_group_size=64, residual_length=128, **RIVALS[which]
        )
        return decode(model, cache, ids, context)
    with attnplug.applied(model, "dense" if which.endswith("dense") else OURS):
        cache = attnplug.make_cache(model, room + 2 * STEPS)
        found = decode(model, cache, ids, context)
        if which.startswith("compiled"):
            torch.compiler.reset()
            decoder = Decoder(model, cache, context + STEPS)
            for _ in range(8):
                decoder.step()
            found.times = time_steps(decoder, STEPS)
    return found


def facts(kind: str, which: str) -> str:
    """memory and, of real text, loss."""
    found, whole = run(kind, which), run(kind, "dense")
    numbers = CONTEXT[kind] + STEPS
    config = model_and_ids(kind)[0].config
    size = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * numbers
    text = f"memory {found.nbytes / size:.3f}"
    if which.endswith("certified"):
        text += f" exact {found.exact:.3f}"
    if kind == "prose":
        delta = found.losses - whole.losses
        low, high = bootstrap(delta)
        text += f" loss {float(delta.mean()):+.4f} ({low:+.4f} to {high:+.4f})"
    return text


ROWS = {rival: ("certified", rival) for rival in (*RIVALS, "dense")} | {
    f"compiled, {rival}": ("compiled certified", rival)
    for rival in ("quanto, 4 bits", "quanto, 4 bits, keys by channel", "compiled dense")
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", CONTEXT)
def test_rival(gpu_bench, kind, row):
    ours, peer = ROWS[row]
    config = model_and_ids(kind)[0].config
    mine, theirs = run(kind, ours), run(kind, peer)
    label = "compiled, " if ours.startswith("compiled") else ""
    gpu_bench.record(
        op="certified",
        case="rival",
        n=CONTEXT[kind],
        batch=1,
        **heads_of(config),
        dtype=model_and_ids(kind)[0].dtype,
        options=f"{label}{facts(kind, ours)}; peer's {facts(kind, peer)}",
        times_us=mine.times,
        peer=peer,
        peer_times_us=theirs.times,
        bytes=mine.nbytes,
        flops=0,
        policy=policy_name(OURS),
    )
