"""gather decode of one layer (append, selector, attention over the keep set), against cuDNN's dense
decode over the valid keys: one query a sequence, bf16, 28/4 heads of 128, 8K to 1M tokens. Gaussian
keys: which blocks are kept is random, which is no easier for the memory than a real model's choice.
Every call reads inputs that are not in the L2, and with `warm` in its options such that are; the
summaries are made before the first, as they are after a prefill."""

import functools

import pytest
import torch
from peers import cudnn_attention

from attnplug import Gather
from attnplug.policies import AttentionCall

HEADS_Q, HEADS_KV, WIDTH = 28, 4, 128
SCALE = WIDTH**-0.5
LENGTHS = [8192, 32768, 131072, 524288, 1048576]


def inputs(policy: Gather, batch: int, n: int, seed: int):
    """(layer with n valid tokens, call of a step, new key and value of its token)."""
    random = torch.Generator("cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=random)
    layer = policy.cache_layer(n)
    empty = torch.empty(batch, HEADS_KV, 0, WIDTH, dtype=torch.bfloat16, device="cuda")
    layer.lazy_initialization(empty, empty)
    for buffer in (layer.keys, layer.values):
        buffer.normal_(generator=random)
    layer.cumulative_length.fill_(n)
    call = AttentionCall(
        normal(batch, HEADS_Q, 1, WIDTH),
        layer.keys,
        layer.values,
        SCALE,
        lengths=layer.cumulative_length.reshape(1),
        state=layer,
    )
    return layer, call, normal(2, batch, HEADS_KV, 1, WIDTH)


def step(policy: Gather, layer, call: AttentionCall, new: torch.Tensor) -> torch.Tensor:
    """Write the token where it goes, as the cache does, and attend."""
    last = layer.cumulative_length.reshape(1) - 1
    layer.keys.index_copy_(2, last, new[0])
    layer.values.index_copy_(2, last, new[1])
    return policy.attend(call)


def run(gpu_bench, policy: Gather, batch: int, n: int, options: str, warm: bool = False):
    kept = min((policy.sink + policy.local + policy.k) * policy.block, n)
    summaries = n // policy.block if policy.k else 0
    parts = 1 if policy.scoring == "mean" else 2
    row_bytes = 2 * HEADS_KV * WIDTH * (2 * kept + parts * summaries)
    nbytes = batch * (row_bytes + 2 * 2 * HEADS_Q * WIDTH)
    flops = 4 * batch * HEADS_Q * WIDTH * (kept + summaries * parts / 2)
    sets = 1 if warm else gpu_bench.sets(nbytes)
    made = [inputs(policy, batch, n, seed) for seed in range(sets)]
    gpu_bench(
        op="gather", case="op", n=n, batch=batch, heads_q=HEADS_Q, heads_kv=HEADS_KV,
        head_dim=WIDTH, dtype=torch.bfloat16, options=options + ", warm" * warm,
        fns=[functools.partial(step, policy, *each) for each in made], peer="cudnn",
        peer_fns=[
            functools.partial(cudnn_attention, call.q, call.k, call.v, scale=SCALE)
            for _, call, _ in made
        ],
        bytes=nbytes, flops=flops,
    )  # fmt: skip


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("k", [8, 32])
def test_gather(gpu_bench, k, batch, n, warm):
    run(gpu_bench, Gather(k=k, min_tokens=0), batch, n, f"k={k}", warm)


@pytest.mark.parametrize("n", [32768, 131072, 1048576])
@pytest.mark.parametrize("scoring", ["estimate", "mean"])
def test_scorings(gpu_bench, scoring, n):
    policy = Gather(k=8, scoring=scoring, min_tokens=0)
    run(gpu_bench, policy, 1, n, f"k=8, scoring={scoring}")


@pytest.mark.parametrize("n", [32768, 131072, 1048576])
@pytest.mark.parametrize("batch", [1, 8])
def test_pages_of_16(gpu_bench, batch, n):
    policy = Gather(k=64, block=16, local=32, min_tokens=0)
    run(gpu_bench, policy, batch, n, "k=64, block=16, local=32")


@pytest.mark.parametrize("n", [8192, 131072])
def test_window_only(gpu_bench, n):
    run(gpu_bench, Gather(k=0, min_tokens=0), 1, n, "k=0")
