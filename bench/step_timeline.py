"""Where a layer's time goes in a whole decode step: each kernel's time, and the gap in front of it.

    python bench/step_timeline.py --out timeline.json [--policies 'dense;gather'] [--lengths 32768]
                                  [--room 1048576] [--layers 8] [--batch 1]

The shape is Qwen2.5-7B's with random bf16 weights and fewer layers, the step that of
test_e2e_policies: caches with room for `--room` tokens, compiled with CUDA graphs. A kernel's gap
is the time from the last end of any kernel before it to its start, negative where it starts early
(PDL). Each layer of a step has the same kernels; times are medians over the layers and steps.
`us_step` is a step without the profiler, `us_layer` a layer with it."""

import argparse
import gc
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _models import random_model
from test_e2e_decode import CONFIG, Decoder, time_steps
from test_e2e_policies import decoders_at
from transformers import Qwen2Config, Qwen2ForCausalLM

from attnplug.bench.provenance import provenance

STEPS = 20
LEAST = 8  # kernels of a layer


def kernels_of(decoder: Decoder) -> list[dict[str, Any]]:
    """The kernels of one step in the order of their starts, each with its `gap`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        decoder.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    kernels = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    end = kernels[0]["ts"]
    for kernel in kernels:
        kernel["gap"] = kernel["ts"] - end
        end = max(end, kernel["ts"] + kernel["dur"])
    return kernels


def layers_of(kernels: list[dict[str, Any]], layers: int) -> Iterator[list[dict[str, Any]]]:
    """The kernels of each layer but the first and the last: the step's names repeat themselves. A
    layer has at least LEAST of them; a few equal ones in a row are none."""
    names = [re.sub(r"_\d+$", "", kernel["name"]) for kernel in kernels]  # inductor numbers its own
    for first in range(len(names)):
        for period in range(LEAST, len(names) // layers + 1):
            inner = names[first : first + period * (layers - 2)]
            if inner == inner[:period] * (layers - 2):
                for at in range(first, first + len(inner), period):
                    yield kernels[at : at + period]
                return
    raise RuntimeError("no kernels repeat themselves as layers do: " + ", ".join(names))


def timeline(decoder: Decoder, layers: int) -> tuple[list[dict[str, Any]], float]:
    """(kernel, gap, time) of a layer, and a whole layer's microseconds."""
    found, whole = [], []
    for _ in range(5):
        inner = list(layers_of(kernels_of(decoder), layers))
        whole += [b[0]["ts"] - a[0]["ts"] for a, b in itertools.pairwise(inner)]
        found += inner
    rows = []
    for same in zip(*found, strict=True):
        gap, time = (round(statistics.median(k[what] for k in same), 2) for what in ("gap", "dur"))
        rows.append({"kernel": same[0]["name"][:60], "gap_us": gap, "us": time})
    return rows, statistics.median(whole)


def measure(
    model: Any, policy: str, lengths: list[int], room: int, batch: int
) -> Iterator[dict[str, Any]]:
    layers = model.config.num_hidden_layers
    torch.compiler.reset()
    for n, decoder in decoders_at(lengths, model, policy, room, batch):
        step = statistics.median(time_steps(decoder, STEPS))
        rows, layer = timeline(decoder, layers)
        facts = {"policy": policy, "n": n, "batch": batch, "room": room}
        facts |= {"us_step": step, "us_layer": layer}
        yield facts | {"layers": layers, "kernels": rows}
    del decoder
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", default="dense;gather(min_tokens=0);sketch(min_tokens=0)")
    parser.add_argument("--lengths", default="32768")
    parser.add_argument("--room", type=int, default=1 << 20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",")]
    if options.layers < 5:
        parser.error("--layers: fewer than 5 do not tell a layer from what else repeats itself")
    if any(b - a < 2 * STEPS for a, b in itertools.pairwise(lengths)):
        parser.error(f"--lengths: one cache is filled on, so each is {2 * STEPS} more at least")
    shape = CONFIG.to_dict() | {"num_hidden_layers": options.layers, "layer_types": None}
    config = Qwen2Config.from_dict(shape, attn_implementation="sdpa")
    model = random_model(Qwen2ForCausalLM, config, "cuda")
    rows = []
    for policy in options.policies.split(";"):
        for row in measure(model, policy, lengths, options.room, options.batch):
            rows.append(row | provenance())
            options.out.write_text(json.dumps(rows, indent=1))
            step, layer = row["us_step"], row["us_layer"]
            print(f"{policy} n={row['n']}: step {step:.0f} us, layer {layer:.1f} us")
            for kernel in row["kernels"]:
                print(f"  {kernel['gap_us']:8.2f} {kernel['us']:8.2f}  {kernel['kernel']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
