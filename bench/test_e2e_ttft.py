"""Time to first token of a whole model: cuDNN's attention, the fastest dense prefill in torch,
against policy momo.

The shape is Llama-3.1-8B's with random bf16 weights, batch 1, a prompt of n random tokens. Both run
the same compiled forward pass, which fills a cache and computes the logits of the last token. The
dense side is policy dense, which asks torch for causal attention without a mask: compiled for any
length, stock transformers writes a mask of n x n (2.75 s at 32K, out of memory at 256K).
ATTNPLUG_BENCH_TOKENS names the lengths ("131072,32768").

At 512K and 1M tokens (`test_long`) the pass is eager, its MLPs take the tokens in parts, and it
keeps no cache: 137 GB of keys and values would not fit, and to write them takes milliseconds. The
dense model would run for minutes there, so that its time is ours with cuDNN's attention in momo's
place: one layer of both is timed alone, and their difference counts for every layer.
"""

import functools
import os
import time

import peers
import pytest
import test_momo
import torch
from _models import heads_of, mlps_in_parts, random_model, timed
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import attnplug
from attnplug.policies import AttentionCall

TOKENS = sorted(
    int(n) for n in os.environ.get("ATTNPLUG_BENCH_TOKENS", "32768,131072,262144").split(",")
)
ROUNDS = {32768: 5, 131072: 2}  # dense takes 11 s at 128K
WANTED = {131072: 1.8}  # what issue 8 asks for
LONG = [524288, 1048576]
WARM = 32768
CONFIG = LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=262144,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)


@pytest.fixture(scope="module")
def model():
    return random_model(LlamaForCausalLM, CONFIG, "cuda")


def prefills(model):
    """A function of tokens that returns the microseconds of each prefill. The first call of a
    length is not counted: one compilation serves all lengths, but inductor makes another where a
    tensor of the model passes 2^31 elements (between 128K and 256K tokens)."""
    torch.compiler.reset()
    forward = torch.compile(model.__call__, fullgraph=True, dynamic=True)

    @torch.no_grad()
    def prefill(tokens):
        return forward(tokens, use_cache=True, logits_to_keep=1).logits

    def measure(tokens):
        n, begun = tokens.shape[1], time.perf_counter()
        logits = prefill(tokens)
        torch.cuda.synchronize()
        print(f"first call at {n}: {time.perf_counter() - begun:.1f} s", flush=True)
        times = []
        for _ in range(ROUNDS.get(n, 1)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            logits = prefill(tokens)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        assert logits.isfinite().all()
        torch.cuda.empty_cache()
        print(n, [round(t / 1e6, 2) for t in times], "s", flush=True)
        return times

    return measure


def work(n):
    """Bytes (weights once, the cache written) and FLOPs that the model with momo needs."""
    embedding = CONFIG.vocab_size * CONFIG.hidden_size
    cache = 2 * LAYERS * CONFIG.num_key_value_heads * DIM * n
    _, attention = test_momo.work(test_momo.LLAMA, attnplug.Momo(), n)
    return 2 * (LAYERS * LINEAR + embedding + cache), LAYERS * (2 * LINEAR * n + attention)


def facts(n, options=""):
    """What every row of a prompt of n tokens says of it."""
    nbytes, flops = work(n)
    return dict(
        op="momo",
        case="e2e-ttft",
        n=n,
        batch=1,
        **heads_of(CONFIG),
        dtype=torch.bfloat16,
        options=f"gamma={test_momo.GAMMAS}, k={test_momo.BLOCKS}{options}",
        bytes=nbytes,
        flops=flops,
        policy="momo",
    )


LAYERS, DIM = CONFIG.num_hidden_layers, 128
LINEAR = CONFIG.hidden_size * (  # weights of a layer's products
    2 * CONFIG.hidden_size + 2 * CONFIG.num_key_value_heads * DIM + 3 * CONFIG.intermediate_size
)


def layer_seconds(n: int) -> tuple[float, float]:
    """Seconds of one layer's attention, by cuDNN and by momo, which this also compiles."""
    draw = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    heads = (CONFIG.num_attention_heads, *[CONFIG.num_key_value_heads] * 2)
    q, k, v = (draw(1, n, each, DIM).transpose(1, 2) for each in heads)  # as a model lays them out
    ours = functools.partial(attnplug.Momo().attend, AttentionCall(q, k, v, DIM**-0.5))
    ours()
    return timed(peers.causal("cudnn", q, k, v, DIM**-0.5)), timed(ours)


@torch.no_grad()
@pytest.mark.parametrize("n", LONG)
def test_long(gpu_bench, model, n):
    dense, momo = layer_seconds(n)
    ids = torch.randint(0, CONFIG.vocab_size, (1, n), device="cuda")
    forward = functools.partial(model, use_cache=False, logits_to_keep=1)
    with mlps_in_parts(model), attnplug.applied(model, "momo"):
        forward(ids[:, :WARM])
        ours = timed(functools.partial(forward, ids))
    torch.cuda.empty_cache()
    theirs = ours + LAYERS * (dense - momo)
    row = gpu_bench.record(
        **facts(n, ", eager, no cache"),
        times_us=[ours * 1e6],
        peer="cudnn by layer",
        peer_times_us=[theirs * 1e6],
    )
    assert row["ratio"] >= WANTED[131072]


# Last, as momo stays applied to the model until the module's end.
@pytest.fixture(scope="module")
def measured(model):
    """A function of n that returns the microseconds of dense and of momo. All of dense's are
    measured before, momo's when a test asks: a run that is cut keeps the rows it has."""
    prompts = {n: torch.randint(0, CONFIG.vocab_size, (1, n), device="cuda") for n in TOKENS}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), attnplug.applied(model, "dense"):
        measure = prefills(model)
        dense = {n: measure(tokens) for n, tokens in prompts.items()}
    with attnplug.applied(model, "momo"):
        measure = prefills(model)
        yield lambda n: (dense[n], measure(prompts[n]))


@pytest.mark.parametrize("n", TOKENS)
def test_e2e_ttft(gpu_bench, measured, n):
    dense, ours = measured(n)
    row = gpu_bench.record(**facts(n), times_us=ours, peer="cudnn", peer_times_us=dense)
    assert row["ratio"] >= WANTED.get(n, 1.0)
