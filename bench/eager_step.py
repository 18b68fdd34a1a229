"""The time of one layer's decode step in a loop of one's own: the cache takes a token, and the
policy attends.

    python bench/eager_step.py --out rows.jsonl [--profile]

A row has the microseconds a step until the host has launched it (`host_us`), until the device is
done as well (`eager_us`), and of the attention alone in a CUDA graph (`graph_us`), once with the
launches of a known form made again (`repeated`) and once with each call checked, planned and bound
anew. `--profile` prints where the host's time goes, and what the graph's kernels take.
"""

import argparse
import cProfile
import dataclasses
import pstats
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from whole_calls import say

import attnplug.ops.common.launches as launches
from attnplug.bench.quick import PLANS, Heads, decode_call, gaussian
from attnplug.models.cache import PlugLayer
from attnplug.policies import parse

HEADS = Heads()
STEPS = 100


class Steps:
    """The steps of one layer with room for a few hundred tokens more."""

    def __init__(self, policy: str, tokens: int, device: str):
        self.method = parse(policy)
        assert self.method.decode is not None  # of every policy
        plan = PLANS[device]
        room = 8 * STEPS
        self.call, *_ = decode_call(HEADS, plan, tokens, self.method.decode, seed=0, room=room)
        normal = gaussian(plan, 1)
        self.new = [normal(1, HEADS.kv, 1, HEADS.dim) for _ in range(2)]
        state: Any = self.call.state
        self.layer: PlugLayer = state

    def step(self) -> torch.Tensor:
        """As the hook, transformers' attention module and `plug_attention` do it."""
        layer = self.layer
        layer.defer_next = layer.defers_write and layer.exposes_buffers
        keys, values = layer.update(*self.new)
        lengths = layer.cumulative_length.reshape(1)
        call = dataclasses.replace(self.call, k=keys, v=values, lengths=lengths)
        out = self.method.attend(call)
        layer.note_writes()
        return out.transpose(1, 2).contiguous()

    def attend(self) -> torch.Tensor:
        return self.method.attend(self.call)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def timed(steps: Steps, device: str, count: int, profile: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"repeated": launches.REPEATING}
    for _ in range(5):
        steps.step()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        steps.step()
    launched = time.perf_counter()
    synchronize(device)
    done = time.perf_counter()
    row["host_us"] = round((launched - begun) / count * 1e6, 1)
    row["eager_us"] = round((done - begun) / count * 1e6, 1)
    if device == "cuda":
        steps.attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                steps.attend()
        graph.replay()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(10):
            graph.replay()
        synchronize(device)
        row["graph_us"] = round((time.perf_counter() - begun) / 100 * 1e6, 1)
        if profile:
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as kernels:
                graph.replay()
                synchronize(device)
            print(kernels.key_averages().table(max_name_column_width=60, row_limit=12))
    if profile:
        found = cProfile.Profile()
        found.enable()
        for _ in range(count):
            steps.step()
        found.disable()
        synchronize(device)
        pstats.Stats(found).sort_stats("tottime").print_stats(25)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="8192,131072")
    parser.add_argument("--policies", default="dense;gather;gvr;sketch")
    parser.add_argument("--small", action="store_true", help="for a try on a CPU")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device, count = ("cpu", 3) if asked.small else ("cuda", STEPS)
    about = {"gpu": "cpu" if asked.small else torch.cuda.get_device_name()}
    about["torch"] = torch.__version__
    for tokens in map(int, asked.tokens.split(",")):
        for name in asked.policies.split(";"):
            policy = name if name == "dense" else f"{name}(min_tokens=0)"
            steps = Steps(policy, tokens, device)
            for launches.REPEATING in (False, True):
                row = {"policy": policy, "n": tokens}
                say(asked.out, row | timed(steps, device, count, asked.profile) | about)


if __name__ == "__main__":
    main()
