"""certified's rival on the same text as certified_fidelity.py, on a CPU: transformers'
QuantizedCache with the quanto backend, INT4 keys and values, which dequantizes the whole cache in
every step. Appends its rows to bench/results/certified/fidelity.json.

    python bench/certified_rival.py [context tokens] [steps]      (needs optimum-quanto)
"""

import json
import math
import sys
import time
from typing import Any

import torch
from _provenance import provenance
from certified_fidelity import RESULTS, ROOT, bootstrap, losses
from transformers import Cache, QuantizedCache

import attnplug
from attnplug import Certified
from attnplug.models.pretrained import load
from attnplug.policies.certified import CertifiedLayer

RIVALS = {  # axis 0 is a scale for 64 numbers beside each other, -1 one for 64 of a channel
    "QuantizedCache(quanto, nbits=4)": {"nbits": 4},
    "QuantizedCache(quanto, nbits=4, axis_key=-1)": {"nbits": 4, "axis_key": -1},
    "QuantizedCache(quanto, nbits=2)": {"nbits": 2},
}


def quanto_bytes(cache: Cache) -> int:
    """What the cache holds: packed codes, scales and shifts, and the newest tokens as they are; of
    the numbers that are float32 here, two bytes, as in a 16-bit model."""

    def size(x: torch.Tensor) -> int:
        return x.numel() * 2 if x.is_floating_point() else x.nbytes

    total = 0
    for layer in cache.layers:
        for x in (layer._quantized_keys, layer._quantized_values):
            parts = (x._data, x._scale, x._shift)
            total += sum(size(getattr(part, "_data", part)) for part in parts)
        total += size(layer.keys) + size(layer.values)
    return total


def certified_bytes(cache: Cache) -> int:
    """What stays on the GPU: the tiers."""
    layers = [layer for layer in cache.layers if isinstance(layer, CertifiedLayer)]
    return sum(layer.tier.nbytes() for layer in layers if layer.tier is not None)


@torch.no_grad()
def main(context: int = 1024, steps: int = 40, name: str = "smollm2-135m") -> None:
    model, tokenizer = load(name, dtype=torch.float32)
    text = (ROOT / "attnplug/eval/data/rust_book.txt").read_text()[:20000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : context + steps + 1]
    config = model.config
    whole = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def decode(cache: Cache) -> tuple[torch.Tensor, float]:
        model(ids[:, :context], past_key_values=cache)
        begin = time.perf_counter()
        found = losses(model, cache, ids[:, context:])
        return found, (time.perf_counter() - begin) / len(found)

    with attnplug.applied(model, attnplug.Policy(decode=attnplug.Dense())):
        base, dense_s = decode(attnplug.make_cache(model, context + steps + 8))
    measured: dict[str, tuple[torch.Tensor, float, int]] = {}
    certified = Certified(min_tokens=0)
    with attnplug.applied(model, attnplug.Policy(decode=certified)):
        cache = attnplug.make_cache(model, context + steps + 8)
        measured["certified, beside QuantizedCache"] = (*decode(cache), certified_bytes(cache))
    for label, options in RIVALS.items():
        cache = QuantizedCache("quanto", config, q_group_size=64, residual_length=128, **options)
        measured[label] = (*decode(cache), quanto_bytes(cache))
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    rows = [row for row in rows if row["policy"] not in measured]
    for label, (found, seconds, size) in measured.items():
        delta = found - base
        low, high = bootstrap(delta)
        row = {
            "task": "perplexity", "model": name, "n": context, "trials": len(delta),
            "policy": label, "dense": math.exp(float(base.mean())),
            "value": math.exp(float(found.mean())), "delta_nll": float(delta.mean()),
            "low": low, "high": high, "memory": size / (whole * (context + steps)),
            "step_s": seconds, "dense_step_s": dense_s, **provenance(),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        rows.append(row)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
