"""One layer's step of every method with its default options, in one run: what a choice among them
goes by. One query over a cache of n tokens, 28/4 heads of 128, bf16, beside attnplug's own dense
step over the same keys; dense itself beside cuDNN.

Inputs are those of `attnplug bench --quick`: Gaussian keys but for one that most of the attention
goes to. Writing the token is in no side's time, and the crossover is switched off (`min_tokens=0`).
`memory` is what the layer's cache takes of the GPU, by torch's allocator, codes and summaries
included; originals in pinned host memory are not of the GPU."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from peers import cudnn_attention

from attnplug import Dense
from attnplug.bench import quick
from attnplug.bench.rows import policy_name
from attnplug.policies import AttentionCall, Phase, methods

HEADS, PLAN = quick.Heads(), quick.PLANS["cuda"]
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
CALLS = 8  # in one graph, or more


class Caches:
    """Calls over as many caches as keep a step from reading the L2, the keys and values of each,
    and the bytes of the GPU that one cache takes. What a step reads decides, and not what a cache
    has: a few MB of 268 at 128K, which would stay in the L2 from one step to the next. `rotate`
    says how many that takes, one where nothing is timed."""

    def __init__(self, policy: Phase, n: int, rotate: Callable[[int], int]):
        self.calls: list[AttentionCall] = []
        self.dense: list[AttentionCall] = []
        gc.collect()
        torch.cuda.synchronize()
        before, seen = torch.cuda.memory_allocated(), 0
        for call, k, v in quick.rotated_calls(HEADS, PLAN, n, policy, rotate):
            plain = AttentionCall(call.q, k, v, call.scale, lengths=call.lengths)
            self.calls.append(call)
            self.dense.append(plain)
            seen += k.nbytes + v.nbytes
        gc.collect()
        self.memory = (torch.cuda.memory_allocated() - before - seen) // len(self.calls)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", quick.DECODES)
def test_step(gpu_bench, name, n):
    policy = methods()[name](**({} if name == "dense" else {"min_tokens": 0}))
    made = Caches(policy, n, gpu_bench.sets)
    each = max(1, CALLS // len(made.calls))
    theirs = [functools.partial(Dense().attend, call) for call in made.dense]
    if name == "dense":
        theirs = [
            functools.partial(cudnn_attention, call.q, call.k, call.v, scale=call.scale)
            for call in made.dense
        ]
    kv_bytes = 2 * HEADS.kv * n * HEADS.dim * PLAN.dtype.itemsize
    gpu_bench(
        op="dense_decode" if name == "dense" else name,
        case="step",
        n=n,
        batch=1,
        heads_q=HEADS.query,
        heads_kv=HEADS.kv,
        head_dim=HEADS.dim,
        dtype=PLAN.dtype,
        options="",
        fns=[functools.partial(policy.attend, call) for call in made.calls] * each,
        peer="cudnn" if name == "dense" else "dense",
        peer_fns=theirs * each,
        bytes=kv_bytes,
        flops=4 * n * HEADS.query * HEADS.dim,
        # of a method that reads less than all keys this would be no share of what it can do
        ceiling=None if name == "dense" else lambda seconds: None,
        policy=policy_name(policy),
        memory=made.memory,
    )
