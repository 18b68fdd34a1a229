"""One layer's step of every method with its default options, in one run: what a choice among them
goes by. One query of each row over a cache of n tokens, 28/4 heads of 128, bf16, beside attnplug's
own dense step over the same keys; dense itself beside cuDNN.

Inputs are those of `attnplug bench --quick`: Gaussian keys but for one that most of the attention
goes to. Methods whose step writes its token do so, as in a model; the others, and dense beside all
of them, find it written. The crossover is switched off (`min_tokens=0`).
`memory` is what the layer's cache takes of the GPU, by torch's allocator, codes and summaries
included; originals in host memory are not of the GPU."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peers import cudnn_attention

from attnplug import Dense
from attnplug.bench import quick
from attnplug.bench.rows import policy_name
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall, Phase, gather, methods, sketch

HEADS, PLAN = quick.Heads(), quick.PLANS["cuda"]
LENGTHS = [8192, 32768, 131072, 524288, 1048576]
# Of methods that have targets there, and around their crossovers in batches.
BATCHES = [(8, 131072), (8, 1048576), (8, 32768), (8, 16384), (4, 32768), (2, 65536)]
CASES = [(name, 1, n) for name in quick.DECODES for n in LENGTHS]
CASES += [(name, *shape) for name in ("gather", "sketch") for shape in BATCHES]
CALLS = 8  # in one graph, or more


class Caches:
    """Steps over as many caches as keep a step from reading the L2, dense's over the same keys and
    values, and the bytes of the GPU that one cache takes. What a step reads decides, and not what a
    cache has: a few MB of 268 at 128K, which would stay in the L2 from one step to the next.
    `rotate` says how many that takes, one where nothing is timed."""

    def __init__(self, policy: Phase, batch: int, n: int, rotate: Callable[[int], int]):
        self.steps: list[Callable[[], torch.Tensor]] = []
        self.dense: list[AttentionCall] = []
        gc.collect()
        torch.cuda.synchronize()
        before, seen = torch.cuda.memory_allocated(), 0
        for call, k, v in quick.rotated_calls(HEADS, PLAN, n, policy, rotate, batch):
            lengths = torch.full((1,), n, dtype=torch.int32, device=call.q.device)
            self.steps.append(step_of(policy, call))
            self.dense.append(AttentionCall(call.q, k, v, call.scale, lengths=lengths))
            seen += k.nbytes + v.nbytes
        gc.collect()
        self.memory = (torch.cuda.memory_allocated() - before - seen) // len(self.steps)


def step_of(policy: Phase, call: AttentionCall) -> Callable[[], torch.Tensor]:
    """A step that ends with the cache's last token, which it writes if the method's steps do."""
    layer = call.state
    if not policy.takes_pending:
        return functools.partial(policy.attend, call)
    assert isinstance(layer, PlugLayer)
    layer.cumulative_length.sub_(1)
    last = call.k[:, :, -1:].clone(), call.v[:, :, -1:].clone()

    def step() -> torch.Tensor:
        layer.pending = last
        return policy.attend(call)

    return step


def count_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that write their token do not count it: each then writes the same one."""
    for module, name in ((gather, "gather_decode"), (sketch, "sketch_decode")):
        op = getattr(module, name)

        def run(*args: Any, op: Callable[..., Any] = op, **options: Any) -> Any:
            return op(*args, **(options | {"count": False} if "count" in options else options))

        monkeypatch.setattr(module, name, run)


@pytest.mark.parametrize("name,batch,n", CASES)
def test_step(gpu_bench, monkeypatch, name, batch, n):
    count_no_token(monkeypatch)
    policy = methods()[name](**({} if name == "dense" else {"min_tokens": 0}))
    made = Caches(policy, batch, n, gpu_bench.sets)
    each = max(1, CALLS // len(made.steps))
    theirs = [functools.partial(Dense().attend, call) for call in made.dense]
    if name == "dense":
        theirs = [
            functools.partial(cudnn_attention, call.q, call.k, call.v, scale=call.scale)
            for call in made.dense
        ]
    kv_bytes = 2 * batch * HEADS.kv * n * HEADS.dim * PLAN.dtype.itemsize
    gpu_bench(
        op="dense_decode" if name == "dense" else name,
        case="step",
        n=n,
        batch=batch,
        heads_q=HEADS.query,
        heads_kv=HEADS.kv,
        head_dim=HEADS.dim,
        dtype=PLAN.dtype,
        options="",
        fns=made.steps * each,
        peer="cudnn" if name == "dense" else "dense",
        peer_fns=theirs * each,
        bytes=kv_bytes,
        flops=4 * batch * n * HEADS.query * HEADS.dim,
        # of a method that reads less than all keys this would be no share of what it can do
        ceiling=None if name == "dense" else lambda seconds: None,
        policy=policy_name(policy),
        memory=made.memory,
    )
