"""`attnplug bench --quick`: one layer's decode step and prefill on one's own device.

Decode is one query a sequence over a cache that holds all tokens; writing the token is in no side's
time. Prefill is the whole causal attention of one layer. Keys are Gaussian, but for one key that
most of the attention goes to. Without it attention is spread evenly, which no trained model does,
and `certified` would read every head again. Prompts of a model pick other keys: these rows are
times, and nothing of quality is in them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnplug.bench.rows import Row, make_row
from attnplug.bench.timing import Calls, rotated_sets, time_in_turn, time_on_cpu
from attnplug.call import LayerShape
from attnplug.models.cache import PlugLayer
from attnplug.policies import AttentionCall, Phase, methods

DECODES = ("dense", "gather", "gvr", "sketch", "certified")
PREFILLS = ("momo",)
SHORTEST = 128  # tokens that every method's cache layer is made for
CHUNK = 65536  # tokens that a cache takes at once
MOST_SETS = 24  # of inputs: with 8 MB, about what a step of 8K reads, they fill the L2 thrice
CALLS = 8  # in one graph, or more
NEEDED = 6  # times keys and values: caches, codes, and what a basis is made in
QUERIES = 512  # of a prompt's end, which `sketch` makes its basis of


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads, KV heads and head dimension of a layer; Qwen2.5-7B's by default."""

    query: int = 28
    kv: int = 4
    dim: int = 128

    def shape(self, device: str) -> LayerShape:
        """A layer of these heads."""
        return LayerShape(self.query, self.kv, self.dim, 0.0, False, torch.device(device))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to time, where: lengths of decode and of prefill, rounds, and the dtype."""

    device: str
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    rounds: int
    dtype: torch.dtype


# A CPU runs the ops' references, which decide what is right; lengths at which that is seconds.
PLANS = {
    "cuda": Plan("cuda", (8192, 32768, 131072), (8192, 32768), 15, torch.bfloat16),
    "cpu": Plan("cpu", (512, 2048), (512, 1024), 3, torch.float32),
}


def measure(
    heads: Heads, plan: Plan, begin: Callable[[str], None], leave_out: Callable[[str], None]
) -> Iterator[Row]:
    """The rows of a plan, one after the other. `begin` is told what comes next, `leave_out` what
    does not fit, and why."""
    peer = _peer(plan)
    for names, lengths, time in (
        (DECODES, plan.decode, _time_decode),
        (PREFILLS, plan.prefill, _time_prefill),
    ):
        for n in lengths:
            for name in names:
                options = {} if name == "dense" else {"min_tokens": 0}
                policy = methods()[name](**options)
                if lacking := lacks_memory(heads, plan, n):
                    leave_out(f"left out: {policy} at {n:,}: {lacking}")
                    continue
                begin(f"{policy} at {n:,}")
                yield time(heads, plan, n, name, policy, peer)


def lacks_memory(heads: Heads, plan: Plan, n: int) -> str:
    """Why a length does not fit the GPU's free memory, "" where it does."""
    if plan.device != "cuda":
        return ""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    wanted = NEEDED * _cache_bytes(heads, plan, n)
    return f"{wanted / 1e9:.1f} GB wanted, {free / 1e9:.1f} free" if wanted > free else ""


def _cache_bytes(heads: Heads, plan: Plan, n: int) -> int:
    return 2 * heads.kv * n * heads.dim * plan.dtype.itemsize


def gaussian(plan: Plan, seed: int) -> Callable[..., torch.Tensor]:
    random = torch.Generator(plan.device).manual_seed(seed)
    return functools.partial(torch.randn, dtype=plan.dtype, device=plan.device, generator=random)


def decode_call(
    heads: Heads, plan: Plan, n: int, policy: Phase, seed: int, batch: int = 1, room: int = 0
) -> tuple[AttentionCall, torch.Tensor, torch.Tensor]:
    """A step's call, over a cache layer of the policy that holds n tokens of each row; and these
    tokens' keys and values `[B,Hkv,n,D]` on the device, where the layer's own may be in host
    memory."""
    normal, scale = gaussian(plan, seed), heads.dim**-0.5
    q = normal(batch, heads.query, 1, heads.dim)
    k, v = normal(2, batch, heads.kv, n, heads.dim)
    k[:, :, 3] = loud_key(q, heads.kv, scale)
    layer: Any = policy.cache_layer(n + room) or PlugLayer(max_cache_len=n + room)
    for first in range(0, n, CHUNK):
        part = slice(first, first + CHUNK)
        layer.update(k[:, :, part], v[:, :, part])
    call = AttentionCall(
        q, layer.keys, layer.values, scale, lengths=layer.cumulative_length.reshape(1), state=layer
    )
    layer.note_buffers(layer.keys, layer.values)  # as a prefill: then prompt queries are kept
    prompt = normal(batch, heads.query, min(n, QUERIES), heads.dim)
    policy.note_queries(dataclasses.replace(call, q=prompt))
    policy.attend(call)  # makes codes and bases, which a step finds made
    return call, k, v


def read_bytes(policy: Phase, call: AttentionCall, kv_bytes: int) -> int:
    """Bytes that one step reads of a cache whose keys and values have `kv_bytes`, at most: those of
    all tokens, or of the tokens that the policy keeps and all that its layer has beside them."""
    kept = policy.kept or None
    layer = call.state
    if kept is None or not isinstance(layer, PlugLayer):
        return kv_bytes
    beside = sum(t.nbytes for t in layer.tensors() if t is not call.k and t is not call.v)
    return min(kv_bytes, kv_bytes * kept // call.k.shape[2]) + beside


def rotated_calls(
    heads: Heads,
    plan: Plan,
    n: int,
    policy: Phase,
    rotate: Callable[[int], int] = rotated_sets,
    batch: int = 1,
    room: int = 0,
) -> Iterator[tuple[AttentionCall, torch.Tensor, torch.Tensor]]:
    """`decode_call`s over as many caches as steps go through in turn, so that none is read from the
    L2: as a model's, whose weights come in between. `rotate` says how many that is by what a step
    reads; free memory bounds them. On a CPU one."""
    first = decode_call(heads, plan, n, policy, 0, batch, room)
    yield first
    if plan.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        kv_bytes = batch * _cache_bytes(heads, plan, n)
        wanted = rotate(read_bytes(policy, first[0], kv_bytes))
        for seed in range(1, min(MOST_SETS, wanted, free // (NEEDED * kv_bytes))):
            yield decode_call(heads, plan, n, policy, seed, batch, room)


def loud_key(q: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
    """A key `[B,Hkv,D]` whose score is 13 or more for every query head of its group."""
    group = q.float().unflatten(1, (kv_heads, -1))[:, :, :, 0]
    middle = group.mean(2)
    least = (group * middle.unsqueeze(2)).sum(-1).amin(-1, keepdim=True).clamp(min=1.0) * scale
    return (13 * middle / least).to(q.dtype)


def repeats(plan: Plan, sets: int) -> int:
    """How many times a graph calls each of its sets of inputs."""
    return max(1, CALLS // sets) if plan.device == "cuda" else 1


def times_of(plan: Plan, sides: Sequence[Calls]) -> list[list[float]]:
    """Microseconds a call of every side, a sample a round, the sides in turn."""
    if plan.device == "cuda":
        return time_in_turn(sides, graphs=[True] * len(sides), rounds=plan.rounds)
    return time_on_cpu(sides, rounds=plan.rounds)


def _time_decode(heads: Heads, plan: Plan, n: int, name: str, policy: Phase, peer: str) -> Row:
    made = list(rotated_calls(heads, plan, n, policy))
    each = repeats(plan, len(made))
    ours = [functools.partial(policy.attend, call) for call, _, _ in made] * each
    theirs = [
        functools.partial(attend_by_torch, peer, c.q, k, v, c.scale, False) for c, k, v in made
    ] * each
    size = _cache_bytes(heads, plan, n) + 2 * heads.query * heads.dim * plan.dtype.itemsize
    return _row(heads, plan, n, name, policy, peer, ours, theirs, size, 4 * n)


def _time_prefill(heads: Heads, plan: Plan, n: int, name: str, policy: Phase, peer: str) -> Row:
    normal, scale = gaussian(plan, 0), heads.dim**-0.5
    q = normal(1, heads.query, n, heads.dim)
    k, v = normal(2, 1, heads.kv, n, heads.dim)
    ours = [functools.partial(policy.attend, AttentionCall(q, k, v, scale))]
    theirs = [functools.partial(attend_by_torch, peer, q, k, v, scale, True)]
    size = _cache_bytes(heads, plan, n) + 2 * q.nbytes
    return _row(heads, plan, n, name, policy, peer, ours, theirs, size, 2 * n * n)


def _row(
    heads: Heads,
    plan: Plan,
    n: int,
    name: str,
    policy: Phase,
    peer: str,
    ours: Calls,
    theirs: Calls,
    nbytes: int,
    work: int,
) -> Row:
    """`nbytes` and `work` (FLOPs a query head and channel) are dense attention's, also where a
    method does less. So only dense, on a GPU, has a share of the ceiling."""
    times, peer_times = times_of(plan, [ours, theirs])
    return make_row(
        op="dense_decode" if name == "dense" else name,
        case="op",
        n=n,
        batch=1,
        heads_q=heads.query,
        heads_kv=heads.kv,
        head_dim=heads.dim,
        dtype=plan.dtype,
        options=f"quick, {'prefill' if name in PREFILLS else 'decode'}, {plan.device}",
        times_us=times,
        peer=peer,
        peer_times_us=peer_times,
        bytes=nbytes,
        flops=work * heads.query * heads.dim,
        ceiling=None if name == "dense" and plan.device == "cuda" else lambda seconds: None,
        policy=str(policy),
    )


def _peer(plan: Plan) -> str:
    """`cudnn` where torch's SDPA can run it on this GPU for these heads, else `sdpa`, the kernel
    that torch chooses."""
    if plan.device != "cuda":
        return "sdpa"
    probe = torch.zeros(1, 2, 128, 64, dtype=plan.dtype, device="cuda")
    try:
        attend_by_torch("cudnn", probe, probe, probe, 0.1, False)
    except RuntimeError:  # torch: no available kernel
        return "sdpa"
    return "cudnn"


def attend_by_torch(
    peer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """torch's SDPA, heads grouped by it: cuDNN's kernel for `cudnn`, the one that torch chooses for
    `sdpa`."""
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    if peer == "sdpa":
        return attend(q, k, v, scale=scale, is_causal=causal, enable_gqa=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend(q, k, v, scale=scale, is_causal=causal, enable_gqa=True)
