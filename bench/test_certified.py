"""certified decode of one layer (quantize what is due, attend, bound, check) against cuDNN's dense
decode in the same run: one query a sequence, bf16, 32/8 heads of 128. Originals in host
memory, as a user has them, and on the device.

Gaussian keys and values, with one key that most of the attention goes to: attention that is spread
evenly has no first block, so that the ranking check would recompute every head from the host.
`default` are the default options: blocks are promoted until every head is inside the tolerance.
`bound` promotes two blocks and leaves the rest to the certificate; `paper` are the paper's options.
Every call reads inputs that are not in the L2. What crossed the link, the tier's share of the
cache's bytes and the share of heads that were recomputed stand in `options`. `phase` rows are the
chain cut off after each of its kernels. `scratch` rows are steps whose queries drift: what of a
query is not along the key that takes most of the attention keeps a stated correlation with the
step before.
"""

import dataclasses
import functools

import pytest
import torch
from peers import cudnn_attention

from attnplug import Certified
from attnplug.bench.quick import loud_key
from attnplug.bench.rows import policy_name
from attnplug.ops import quantize_kv
from attnplug.ops.certified.certified_attention import _allocate
from attnplug.ops.certified.launch import PHASES, launch
from attnplug.ops.certified.records import TELEMETRY
from attnplug.policies import AttentionCall
from attnplug.policies._certified_layer import _summary

HEADS_Q, HEADS_KV, WIDTH = 32, 8, 128
SCALE = WIDTH**-0.5
DEFAULT = Certified(min_tokens=0)
BOUND = Certified(tolerance=None, k_min=2, ranking=1, explore=0.0, min_tokens=0)
PAPER = dataclasses.replace(BOUND, coverage=0.995, k_max=128, v_tol=0.05, scratch=0)
STEPS = 16  # of drifting queries, walked there and back again


def token_bytes(block: int) -> int:
    """What a step reads of a token and KV head: key codes and metadata, value codes and theirs."""
    return WIDTH + 4 * WIDTH // block + WIDTH // 2 + WIDTH // 4


def inputs(policy: Certified, batch: int, n: int, seed: int):
    """(layer with n valid tokens, quantized; call of a step)."""
    random = torch.Generator("cuda").manual_seed(seed)
    normal = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda", generator=random)
    q = normal(batch, HEADS_Q, 1, WIDTH)
    k, v = (normal(batch, HEADS_KV, n, WIDTH) for _ in range(2))
    k[:, :, 3] = loud_key(q, HEADS_KV, SCALE)
    layer = policy.cache_layer(n)
    layer.update(k, v)
    call = AttentionCall(
        q,
        layer.keys,
        layer.values,
        SCALE,
        lengths=layer.cumulative_length.reshape(1),
        state=layer,
    )
    policy.attend(call)  # quantizes
    layer.telemetry.zero_()
    return layer, call, k, v


def run(gpu_bench, policy: Certified, batch: int, n: int, options: str):
    row_bytes = HEADS_KV * n * token_bytes(policy.block)
    sets = gpu_bench.sets(batch * row_bytes)
    made = [inputs(policy, batch, n, seed) for seed in range(sets)]
    for _, call, _, _ in made:
        policy.attend(call)
    layer = made[0][0]
    found = _summary(0, layer)
    share = layer.tier.nbytes() / (2 * made[0][2].nbytes)
    link, again = found.link_bytes, found.exact
    if policy.tolerance is not None:
        options += f", promoted {promoted(layer, policy, n):.4f}"
    gpu_bench(
        op="certified", case="op", n=n, batch=batch, heads_q=HEADS_Q, heads_kv=HEADS_KV,
        head_dim=WIDTH, dtype=torch.bfloat16,
        options=f"{options}, link {link / 2**20:.2f} MiB, tier {share:.3f}, exact {again:.3f}",
        fns=[functools.partial(policy.attend, call) for _, call, _, _ in made], peer="cudnn",
        peer_fns=[
            functools.partial(cudnn_attention, call.q, k, v, scale=SCALE)
            for _, call, k, v in made
        ],
        bytes=batch * row_bytes, flops=4 * batch * n * HEADS_Q * WIDTH,
        policy=policy_name(policy),
    )  # fmt: skip


def promoted(layer, policy: Certified, n: int) -> float:
    """The share of the quantized blocks whose keys the last step read exactly."""
    tokens = layer.telemetry[..., TELEMETRY.index("key_tokens")].sum()
    steps = layer.telemetry[..., TELEMETRY.index("steps")].amax()
    rows = layer.telemetry.shape[0] * HEADS_KV * steps
    return float((tokens - n % policy.block * rows) / (n // policy.block * policy.block * rows))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("n", [65536, 131072, 32768, 524288])
@pytest.mark.parametrize("originals", ["host", "device"])
def test_defaults(gpu_bench, originals, batch, n):
    policy = dataclasses.replace(DEFAULT, originals=originals)
    run(gpu_bench, policy, batch, n, f"default, block=64, originals={originals}")


@pytest.mark.parametrize("n", [65536, 131072])
def test_defaults_without_slots(gpu_bench, n):
    """The same query over and over finds its blocks in the scratch cache: here there is none."""
    policy = dataclasses.replace(DEFAULT, scratch=0)
    run(gpu_bench, policy, 1, n, "default, scratch=0, block=64, originals=host")


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("n", [65536, 131072, 32768, 8192])
@pytest.mark.parametrize("originals", ["host", "device"])
def test_certified(gpu_bench, originals, batch, n):
    policy = dataclasses.replace(BOUND, originals=originals)
    run(gpu_bench, policy, batch, n, f"bound, block=64, originals={originals}")


CHAINS = [
    *(("bound", x) for x in ("quantize_kv", *PHASES[1:]) if x not in ("merge", "weigh", "promote")),
    *(("default", x) for x in PHASES[2:]),
]


@pytest.mark.parametrize("n", [65536, 131072])
@pytest.mark.parametrize(("name", "last"), CHAINS)
def test_phases(gpu_bench, n, name, last):
    """The chain cut off after each of its kernels: what a row adds to the one before is its own."""
    policy = {"bound": BOUND, "default": DEFAULT}[name]
    size = HEADS_KV * n * token_bytes(policy.block)
    near = dataclasses.replace(policy, originals="device")
    made = [inputs(near, 1, n, seed)[:2] for seed in range(gpu_bench.sets(size))]
    if last == "quantize_kv":
        options = {"block": BOUND.block}
        fns = [
            functools.partial(quantize_kv, x.k, x.v, layer.tier, lengths=x.lengths, **options)
            for layer, x in made
        ]
    else:
        phases = PHASES[: PHASES.index(last) + 1]
        fns = [functools.partial(upto, policy, layer, call, phases) for layer, call in made]
    whole = last not in ("quantize_kv", "rest")  # reads the tier
    gpu_bench(
        op="certified", case="phase", n=n, batch=1, heads_q=HEADS_Q, heads_kv=HEADS_KV,
        head_dim=WIDTH, dtype=torch.bfloat16, options=f"{name}, block=64, up to {last}", fns=fns,
        bytes=size * whole, flops=4 * n * HEADS_Q * WIDTH * whole, policy=policy_name(near),
    )  # fmt: skip


def upto(policy: Certified, layer, call, phases) -> None:
    """The first phases of a step, without what `quantize_kv` does."""
    inf = float("inf")
    args = (
        call.q, call.k, call.v, *layer.tier, call.scale, policy.block, policy.coverage,
        policy.k_min, policy.k_max, inf, inf, policy.tolerance or inf, policy.ranking,
        policy.explore, call.lengths, None, None, 0.0, None, layer.telemetry, *(None,) * 5,
    )  # fmt: skip
    launch(*args, *_allocate(*args), phases=phases)


@pytest.mark.parametrize("n", [65536, 131072])
@pytest.mark.parametrize("originals", ["host", "device"])
def test_the_papers_options(gpu_bench, originals, n):
    policy = dataclasses.replace(PAPER, originals=originals)
    run(gpu_bench, policy, 1, n, f"paper, block=64, originals={originals}")


def drifting(call: AttentionCall, correlation: float) -> list[AttentionCall]:
    """Steps over one cache, as a walk there and back; independent ones as a circle."""
    random = torch.Generator("cuda").manual_seed(7)
    q = call.q.float().unflatten(1, (HEADS_KV, -1))
    along = call.k[:, :, 3].float()[:, :, None, None]
    along = along / along.norm(dim=-1, keepdim=True)

    def across(x: torch.Tensor) -> torch.Tensor:
        return x - (x * along).sum(-1, keepdim=True) * along

    fixed, rest, walk = q - across(q), across(q), []
    for _ in range(STEPS if correlation > 0 else 2 * STEPS):
        walk.append(dataclasses.replace(call, q=(fixed + rest).flatten(1, 2).to(call.q.dtype)))
        noise = across(torch.randn(q.shape, device="cuda", generator=random))
        rest = correlation * rest + (1 - correlation**2) ** 0.5 * noise
    return walk + walk[-2:0:-1] if correlation > 0 else walk


@pytest.mark.parametrize("correlation", [0.95, 0.99, 0.0])
@pytest.mark.parametrize(
    ("name", "slots"),
    [("paper", 128), ("paper", 256), ("paper", 64), ("paper", 0), ("default", 256)],
)
def test_scratch(gpu_bench, name, slots, correlation):
    n = 131072
    policy = dataclasses.replace({"paper": PAPER, "default": DEFAULT}[name], scratch=slots)
    layer, call, _, _ = inputs(policy, 1, n, 0)
    steps = drifting(call, correlation)
    for _ in range(2):  # the second is as it goes on
        layer.telemetry.zero_()
        if layer.scratch is not None:
            layer.scratch.counters[..., 1:].zero_()
        for one in steps:
            policy.attend(one)
    found = _summary(0, layer)
    gpu_bench(
        op="certified", case="scratch", n=n, batch=1, heads_q=HEADS_Q, heads_kv=HEADS_KV,
        head_dim=WIDTH, dtype=torch.bfloat16,
        options=f"{name}, block=64, scratch={slots}, correlation={correlation}, "
        f"hits {found.hit_rate:.3f}, link {found.link_bytes / len(steps) / 2**20:.2f} MiB, "
        f"exact {found.exact:.3f}",
        fns=[functools.partial(policy.attend, one) for one in steps], rounds=9,
        bytes=HEADS_KV * n * token_bytes(policy.block),
        flops=4 * n * HEADS_Q * WIDTH, policy=policy_name(policy),
    )  # fmt: skip


@pytest.mark.parametrize("n", [65536, 131072])
def test_blocks_of_16(gpu_bench, n):
    run(gpu_bench, dataclasses.replace(BOUND, block=16), 1, n, "bound, block=16, originals=host")


@pytest.mark.parametrize("n", [131137, 262144, 524288])
def test_other_lengths(gpu_bench, n):
    """131,137: a token of an incomplete block, and a number of blocks that is no power of two."""
    run(gpu_bench, BOUND, 1, n, "bound, block=64, originals=host")
