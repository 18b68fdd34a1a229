"""How much of the attention gather keeps, and how far its output is from dense's, policy by policy.

    python bench/gather_mass.py smollm2-135m --tokens 4096 --listed 1024

Each window of prose goes through the model once, dense. Its queries, keys and values then go
through gather's own cache layer and decode step, token by token for the last 16 positions, under
policies that list equally many tokens. Of every layer with full attention: the share of the exact
softmax that the step's blocks hold (`captured-attention`), and |out - dense| / |dense| of a layer's
heads (`output-error`), means over layers and steps. Adds quality rows to
bench/results/gather-mass.json, one a policy and question; the interval is a bootstrap over windows.
`--every 3` takes every third of these layers."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from _results import run_of, write_rows

from attnplug import Dense, Gather
from attnplug.bench.rows import policy_name
from attnplug.eval.capture import capture_layers
from attnplug.eval.measure import prose_window
from attnplug.eval.stats import bootstrap_mean
from attnplug.models.pretrained import load
from attnplug.policies import AttentionCall

STEPS = 16
RESULTS = Path(__file__).parent / "results" / "gather-mass.json"


def policies(listed: int) -> list[Gather]:
    """The options of before and pages of 16, each with lists of so many tokens."""
    old = Gather(
        k=listed // 128, block=128, sink=1, local=4, scoring="bounds", min_tokens=0, bounds="int8"
    )
    new = dataclasses.replace(old, k=listed // 16, block=16, sink=8, local=32)
    return [old, new, dataclasses.replace(new, scoring="spread", bounds=None)]


def full_layers(config: Any) -> list[int]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def kept(policy: Gather, call: AttentionCall) -> torch.Tensor:
    """Which keys a step reads, bool `[Hq,S]`."""
    reads = policy.reads(call)
    assert reads is not None and reads.block == policy.block
    blocks = torch.zeros(call.q.shape[1], -(-call.k.shape[2] // policy.block) + 1).bool()
    blocks.scatter_(1, reads.index[0, :, 0].long() % blocks.shape[1], True)  # -1: the last, unused
    return blocks[:, :-1].repeat_interleave(policy.block, 1)[:, : call.k.shape[2]]


def measure(policy: Gather, layer: AttentionCall) -> tuple[float, float]:
    """(share of attention kept, error of the output), means over the last steps of a layer."""
    size, group = layer.k.shape[2], layer.q.shape[1] // layer.k.shape[1]
    cache = policy.cache_layer(size)
    cache.update(layer.k[:, :, : size - STEPS], layer.v[:, :, : size - STEPS])
    mass, error = 0.0, 0.0
    for at in range(size - STEPS, size):
        cache.update(layer.k[:, :, at : at + 1], layer.v[:, :, at : at + 1])
        assert cache.keys is not None and cache.values is not None
        call = AttentionCall(
            layer.q[:, :, at : at + 1].contiguous(),
            cache.keys,
            cache.values,
            layer.scale,
            lengths=cache.cumulative_length.reshape(1),
            state=cache,
        )
        out, dense = policy.attend(call), Dense().attend(call)
        error += float((out - dense).norm() / dense.norm())
        keys = layer.k[0, :, : at + 1].repeat_interleave(group, 0)
        logits = (keys @ call.q[0, :, 0, :, None])[..., 0] * layer.scale
        mass += float((logits.softmax(-1) * kept(policy, call)[:, : at + 1]).sum(-1).mean())
    return mass / STEPS, error / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--listed", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu")
    model = model.float()
    layers = full_layers(model.config)[:: options.every]
    methods = policies(options.listed)
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(options.windows):
        ids = prose_window(tokenizer, options.tokens, number).reshape(1, -1)
        with torch.no_grad():
            calls = capture_layers(model, ids, layers)
            for policy in methods:
                each = torch.tensor([measure(policy, call) for call in calls.values()])
                means = tuple(each.mean(0).tolist())
                found.setdefault(policy_name(policy), []).append(means)
                print(number, policy, means, flush=True)
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    about = {"model": options.model, "n": options.tokens, "trials": options.windows}
    about |= {"listed": options.listed, "layers": len(layers), **run_of()}
    for place, (task, dense) in enumerate((("captured-attention", 1.0), ("output-error", 0.0))):
        for policy, samples in found.items():
            mean = bootstrap_mean([sample[place] for sample in samples])
            values = {"value": mean.value, "low": mean.low, "high": mean.high}
            row = {"study": "gather-mass", "task": task, "policy": policy, "dense": dense}
            known = [
                old
                for old in known
                if any(old[key] != (row | about)[key] for key in ("task", "policy", "model", "n"))
            ]
            known.append(row | about | values)
    write_rows(RESULTS, known)


if __name__ == "__main__":
    main()
