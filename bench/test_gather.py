"""A gather decode step of one layer, whole (append, bounds, selection, attention over the keep set,
count of the token), against the fastest dense decode of the same run over the same cache: one query
a sequence, bf16, 28/4 heads of 128, 8K to 1M tokens. Gaussian keys: which blocks are kept is
random, which is no easier for the memory than a real model's choice.

The dense peer, cuDNN's or attnplug's own, only attends; with `dense appends` in the options it also
writes its token, as a static cache does. Every call reads inputs that are not in the L2, and with
`warm` in its options such that are; summaries are made before the first, as after a prefill."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers import cudnn_attention

from attnplug import Dense, Gather
from attnplug.bench.rows import policy_name
from attnplug.bench.timing import runner
from attnplug.plan import read_tokens
from attnplug.policies import AttentionCall

HEADS_Q, HEADS_KV, WIDTH = 28, 4, 128
SCALE = WIDTH**-0.5
ROOM = 64  # tokens that a graph may append before it starts from the same length again
CALLS = 32  # in one graph
# (k, batch, tokens)
SHAPES = [
    *((8, 1, n) for n in (8192, 32768, 131072, 524288, 1048576)),
    *((32, 1, n) for n in (8192, 32768, 131072, 1048576)),
    *((k, 8, n) for k in (8, 32) for n in (131072, 1048576)),
    (8, 64, 8192),
]
DEFAULTS = [(1, 32768), (1, 131072), (1, 524288), (1, 1048576), (8, 131072), (8, 1048576)]


def published(k: int) -> Gather:
    """The paper's options with a budget of k blocks."""
    return Gather(k=k, block=128, sink=1, local=4, scoring="bounds", min_tokens=0)


class Caches:
    """Layers with room for n tokens, all but ROOM of them there, and the call of a step on each."""

    def __init__(self, policy: Gather, batch: int, n: int, count: int):
        self.policy, self.n = policy, n
        self.lengths = torch.full((count,), n - ROOM, device="cuda")
        self.made = [self._make(batch, seed) for seed in range(count)]

    def _make(self, batch: int, seed: int) -> tuple[Any, AttentionCall, torch.Tensor]:
        random = torch.Generator("cuda").manual_seed(seed)
        normal = functools.partial(
            torch.randn, dtype=torch.bfloat16, device="cuda", generator=random
        )
        layer = self.policy.cache_layer(self.n)
        empty = torch.empty(batch, HEADS_KV, 0, WIDTH, dtype=torch.bfloat16, device="cuda")
        layer.lazy_initialization(empty, empty)
        for buffer in layer._buffers():
            buffer.normal_(generator=random)
        layer.cumulative_length = self.lengths[seed]
        call = AttentionCall(
            normal(batch, HEADS_Q, 1, WIDTH),
            *layer._buffers(),
            SCALE,
            lengths=layer.cumulative_length.reshape(1),
            state=layer,
        )
        return layer, call, normal(2, batch, HEADS_KV, 1, WIDTH)

    def graph(self, step: Callable[..., Any]) -> list[Callable[[], Any]]:
        """`step` on every cache in turn, CALLS times or so; the first call resets the lengths."""
        calls = [functools.partial(step, *made) for made in self.made]
        calls *= max(1, CALLS // len(calls))
        first = calls[0]

        def reset() -> Any:
            self.lengths.fill_(self.n - ROOM)
            return first()

        return [reset, *calls[1:]]

    def step(self, layer: Any, call: AttentionCall, new: torch.Tensor) -> torch.Tensor:
        """What a step does where `PolicyHook` lets the layer hold its token."""
        layer.pending = new[0], new[1]
        return self.policy.attend(call)


def cudnn(layer: Any, call: AttentionCall, new: torch.Tensor) -> torch.Tensor:
    return cudnn_attention(call.q, call.k, call.v, scale=SCALE)


def dense(layer: Any, call: AttentionCall, new: torch.Tensor) -> torch.Tensor:
    return Dense().attend(call)


def dense_step(layer: Any, call: AttentionCall, new: torch.Tensor) -> torch.Tensor:
    layer.update(new[0], new[1])
    return Dense().attend(call)


def fastest(caches: Caches) -> Callable[..., torch.Tensor]:
    """Of the dense peers, by a few replays."""
    times = {}
    for peer in (cudnn, dense):
        calls = caches.graph(peer)
        replay = runner(calls)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for mark in marks:
            replay()
            mark.record()
        torch.cuda.synchronize()
        times[peer] = marks[0].elapsed_time(marks[-1])
    return min(times, key=times.__getitem__)


def run(
    gpu_bench, policy: Gather, batch: int, n: int, options: str, warm: bool, appends: bool = False
) -> None:
    kept = min((policy.sink + policy.local + policy.k) * policy.block, n)
    summaries = n // policy.block if policy.k else 0
    parts = policy.summary_form(n)[0]
    row_bytes = HEADS_KV * 4 * WIDTH * read_tokens(policy, n, n)
    nbytes = round(batch * (row_bytes + 2 * 2 * HEADS_Q * WIDTH))
    flops = 4 * batch * HEADS_Q * WIDTH * (kept + summaries * parts / 2)
    room = torch.cuda.get_device_properties(0).total_memory * 6 // 10
    sets = min(gpu_bench.sets(nbytes), room // (4 * batch * HEADS_KV * n * WIDTH))
    caches = Caches(policy, batch, n, 1 if warm else max(1, sets))
    peer = dense_step if appends else fastest(caches)
    gpu_bench(
        op="gather",
        case="op",
        n=n,
        batch=batch,
        heads_q=HEADS_Q,
        heads_kv=HEADS_KV,
        head_dim=WIDTH,
        dtype=torch.bfloat16,
        options=options + ", warm" * warm + ", dense appends" * appends,
        fns=caches.graph(caches.step),
        peer="cudnn" if peer is cudnn else "dense",
        peer_fns=caches.graph(peer),
        bytes=nbytes,
        flops=flops,
        policy=policy_name(policy),
    )


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("k", "batch", "n"), SHAPES)
def test_gather(gpu_bench, k, batch, n, warm):
    run(gpu_bench, published(k), batch, n, f"k={k}", warm)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("batch", "n"), DEFAULTS)
def test_the_default(gpu_bench, batch, n, warm):
    run(gpu_bench, Gather(min_tokens=0), batch, n, "default", warm)


@pytest.mark.parametrize(("k", "batch", "n"), [s for s in SHAPES if s[1] == 1])
def test_against_a_dense_step(gpu_bench, k, batch, n):
    run(gpu_bench, published(k), batch, n, f"k={k}", True, appends=True)


def test_pages_of_16(gpu_bench):
    policy = Gather(k=64, sink=1, scoring="bounds", min_tokens=0)
    run(gpu_bench, policy, 1, 131072, "k=64, block=16, local=32", False)


def test_window_only(gpu_bench):
    run(gpu_bench, published(0), 1, 131072, "k=0", False)
