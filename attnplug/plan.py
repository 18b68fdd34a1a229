"""The bill: what a decode step costs with dense attention and with a sparse method, before it is
run.

    t_dense(n, B)  = (W + B A_d(n)) / beta + c0,        A_d = 2 L Hkv D bytes n
    t_sparse(n, B) = (W + B A_s(n)) / beta + c0 + c1 + c2 k,   A_s = what is kept, and its index

W are the weights that a step reads, A the cache that one sequence of n tokens reads, both in bytes;
beta is the bandwidth, c0 what a step takes beside reading, c1 what the method adds to that and c2
what 128 keys of gather's list add: k counts blocks of 128 here. beta and c0 come from measured
dense steps alone, the others from the method's. On several GPUs each reads its share of W and A.
Source: "Attention Pays Its Bill" (docs/papers.md); c2, other methods than gather and GPUs are ours.
What the command answers for each method stands in `plan_answer.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attnplug import files
from attnplug.errors import ArgumentError, FileError
from attnplug.policies.gather import Gather
from attnplug.policies.gvr import Gvr
from attnplug.policies.sketch import Sketch

Sparse = Gather | Gvr | Sketch  # the methods that the bill knows
METHODS = "gather", "gvr", "sketch"
CONTEXTS = tuple(1 << power for power in range(12, 21))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model the bill needs: layers of full attention, KV heads, head dimension, bytes of
    weights that a step reads, and bytes an element of the cache. `positions`: the most tokens that
    the model reads, None where only its shape is known. `gpus`: how many share the model, of which
    heads and weights are the share of one. `shared`: numbers that all layers together keep of a
    token for no head of its own, which are latents and the keys of indexers. Each GPU has these.
    `heads`: query heads, None where they are not known."""

    layers: int
    heads_kv: int
    head_dim: int
    weights: float
    itemsize: int = 2
    positions: int | None = dataclasses.field(default=None, compare=False)
    gpus: int = 1
    shared: int = 0
    heads: int | None = dataclasses.field(default=None, compare=False)

    def reads(self, tokens: int) -> bool:
        """Whether the model has positions for so many tokens."""
        return self.positions is None or tokens <= self.positions

    def cached(self, tokens: float) -> float:
        """Bytes that the cache keeps of `tokens` tokens."""
        numbers = 2 * self.layers * self.heads_kv * self.head_dim + self.shared
        return numbers * self.itemsize * tokens

    def read(self, policy: Sparse, tokens: int) -> float:
        """Bytes that a step of `policy` reads of one sequence."""
        return self.cached(read_tokens(policy, tokens, tokens, self.head_dim))

    def of_rank(self, gpus: int) -> "Shape":
        """What one of several GPUs has of the model: its KV heads and its part of the weights.
        Raises ArgumentError where the heads cannot be dealt out."""
        if gpus < 1 or (self.layers and self.heads_kv % gpus):
            raise ArgumentError(f"plan: {self.heads_kv} KV heads cannot be dealt to {gpus} GPUs")
        each, heads = max(1, self.heads_kv // gpus), self.heads and self.heads // gpus
        return dataclasses.replace(
            self, heads_kv=each, heads=heads, weights=self.weights / gpus, gpus=gpus
        )


def listed(policy: Sparse) -> float:
    """How many times 128 keys a KV head's list of blocks names."""
    return policy.k * policy.block / 128 if isinstance(policy, Gather) else 0.0


def read_tokens(policy: Sparse, tokens: int, size: int, head_dim: int = 128) -> float:
    """Tokens whose keys and values are as many bytes as what a step of `policy` reads of one
    sequence of `tokens`, in a cache with room for `size`: what is kept, and the summaries or codes
    that choose it, for a cache in 16 bits."""
    keys, scanned = policy.step_reads(tokens, head_dim, size)
    return keys + scanned / (4 * head_dim)


SHAPES = {
    "qwen2.5-7b": Shape(28, 4, 128, 14_141_238_272, heads=28),
    "llama-3.1-8b": Shape(32, 8, 128, 15_009_849_344, heads=32),
}


class Extra(NamedTuple):
    """Seconds that a method adds to a step, and for each 128 keys of its list."""

    step: float
    each: float = 0.0


@dataclasses.dataclass(frozen=True)
class Bill:
    """Of one machine: bytes a second, seconds that a step takes beside reading, what each method
    adds to that, and bytes of memory (infinite where unknown). `card`: the name of its GPU, ""
    where that is not known."""

    bandwidth: float
    fixed: float
    extras: Mapping[str, Extra] = dataclasses.field(default_factory=dict)
    source: str = ""
    memory: float = math.inf
    card: str = ""

    def dense(self, shape: Shape, tokens: int, batch: int) -> float:
        """Seconds of a step with dense attention."""
        return (shape.weights + batch * shape.cached(tokens)) / self.bandwidth + self.fixed

    def sparse(self, shape: Shape, tokens: int, batch: int, policy: Sparse) -> float:
        """Seconds of a step with `policy`, were it to run at every length. Raises ArgumentError
        where no step of its method was measured."""
        if policy.name not in self.extras:
            raise ArgumentError(f"plan: no step of {policy.name} is among {self.source}")
        extra = self.extras[policy.name]
        read = shape.weights + batch * shape.read(policy, tokens)
        return read / self.bandwidth + self.fixed + extra.step + extra.each * listed(policy)

    def speedup(self, shape: Shape, tokens: int, batch: int, policy: Sparse) -> float:
        return self.dense(shape, tokens, batch) / self.sparse(shape, tokens, batch, policy)

    def fits(self, shape: Shape, tokens: int, batch: int) -> bool:
        """Whether weights and cache are no more than the memory. Activations come on top."""
        return shape.weights + batch * shape.cached(tokens) <= self.memory

    def crossover(self, shape: Shape, batch: int, policy: Sparse) -> int | None:
        """The fewest tokens, a multiple of the block, from which on `policy` is faster; None where
        that is beyond 16M tokens. Past what is kept dense grows faster, so there is one point."""
        block = policy.block if isinstance(policy, Gather) else 1
        return first_length(lambda n: self.speedup(shape, n, batch, policy) > 1, block)


def first_length(pays: Callable[[int], bool], block: int = 1) -> int | None:
    """The fewest tokens, a multiple of `block`, for which `pays` holds, as it does for all more;
    None where that is beyond 16M tokens."""
    low, high = 0, (1 << 24) // block
    if not pays(high * block):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if pays(middle * block):
            high = middle
        else:
            low = middle
    return high * block


# Fitted to e2e_decode.json, e2e_gather.json, gvr.json and sketch.json of bench/results.
H200 = Bill(
    4.5843e12,
    1.9227e-3,
    {
        "gather": Extra(0.33867e-3, 5.2701e-6),
        "gvr": Extra(1.3858e-3),
        "sketch": Extra(0.76003e-3),
    },
    source="one NVIDIA H200, compiled decode",
    memory=141e9,
    card="NVIDIA H200",
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A bill and how well it tells the rows: R2 on the dense ones (None for two, which every line
    passes through), for every batch size the mean relative error of a fit without it (none where
    too few rows are left), and for every method the mean relative error of its own rows."""

    bill: Bill
    r2: float | None
    held_out: dict[int, float]
    errors: dict[str, float]


def fit(rows: Iterable[Mapping[str, Any]]) -> Fit:
    """Fit a bill to end-to-end decode rows of one machine, as `bench` writes them (`case`, `op`,
    `batch`, `bytes`, `p50_us`, and of a method's `policy`). Rows of a method that keeps its cache
    in host memory are left out. Raises ArgumentError with fewer than two dense lengths, or where a
    gather row does not name its policy."""
    steps = [row for row in rows if row["case"] == "e2e-decode"]
    dense = [row for row in steps if row["op"] == "dense_decode"]
    if len({row["bytes"] for row in dense}) < 2:
        raise ArgumentError("plan: a bill needs dense e2e-decode rows of at least two lengths")
    read, seconds = _columns(dense)
    slope, fixed = np.polyfit(read, seconds, 1)
    if not slope > 0:
        raise ArgumentError("plan: no dense row takes longer for more bytes, so no bill fits them")
    rest = ((seconds - slope * read - fixed) ** 2).sum()
    r2 = float(1 - rest / ((seconds - seconds.mean()) ** 2).sum()) if len(dense) > 2 else None
    held_out = {}
    for batch in sorted({row["batch"] for row in dense}):
        left = [row for row in dense if row["batch"] != batch]
        if len({row["bytes"] for row in left}) >= 2:
            line = np.polyfit(*_columns(left), 1)
            read, seconds = _columns([row for row in dense if row["batch"] == batch])
            held_out[batch] = float(np.abs(np.polyval(line, read) / seconds - 1).mean())
    extras, errors, counts = {}, {}, [f"{len(dense)} dense"]
    for name in METHODS:
        sparse = [(row, method) for row, method in _rows_of(name, steps) if on_gpu(method)]
        if sparse:
            extras[name], errors[name] = _extra(sparse, slope, fixed)
            counts.append(f"{len(sparse)} {name}")
    source = f"{', '.join(counts[:-1])} and {counts[-1]} rows" if extras else f"{counts[0]} rows"
    cards = {str(row.get("gpu", "")) for row in steps}
    card = cards.pop() if len(cards) == 1 else ""
    bill = Bill(float(1 / slope), float(fixed), extras, source, card=card)
    return Fit(bill, r2, held_out, errors)


def on_gpu(method: object) -> bool:
    """Whether a method keeps keys and values on the GPU, whose memory the bill is of."""
    return getattr(method, "kv", "gpu") == "gpu"


def _rows_of(
    name: str, steps: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Sparse]]:
    """A method's rows, each with the method and its options."""
    from attnplug.policies import parse

    for row in steps:
        if row["op"] != name:
            continue
        if "policy" not in row:
            raise ArgumentError(f"plan: a {name} row has no policy, which says what its step reads")
        method = parse(row["policy"]).decode
        if not isinstance(method, Gather | Gvr | Sketch) or method.name != name:
            raise ArgumentError(f"plan: a {name} row's policy does not decode with {name}")
        yield row, method


def _extra(
    rows: list[tuple[Mapping[str, Any], Sparse]], slope: float, fixed: float
) -> tuple[Extra, float]:
    """What a method adds to a step, and the mean relative error of that on its own rows. Rows whose
    lists all have one length cannot tell the part of the list from the rest."""
    read, seconds = _columns(row for row, _ in rows)
    told, lists = slope * read + fixed, np.array([listed(method) for _, method in rows])
    rest = seconds - told
    each, step = np.polyfit(lists, rest, 1) if len(set(lists)) > 1 else (0.0, rest.mean())
    error = np.abs((told + step + each * lists) / seconds - 1).mean()
    return Extra(float(step), float(each)), float(error)


def _columns(rows: Iterable[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, seconds) of the rows."""
    pairs = np.array([(row["bytes"], row["p50_us"] * 1e-6) for row in rows], np.float64)
    return pairs[:, 0], pairs[:, 1]


def read_rows(paths: Iterable[Path]) -> list[Mapping[str, Any]]:
    """The rows of benchmark files. Raises FileError where one cannot be read."""
    rows: list[Mapping[str, Any]] = []
    for path in paths:
        facts = files.read_json(path, "benchmark rows")
        try:
            if "benchmarks" in facts:
                rows += [_checked(each["extra_info"]) for each in facts["benchmarks"]]
            else:
                rows += map(_checked, facts["rows"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise FileError(f"plan: {path} cannot be read as benchmark rows: {error!r}") from error
    return rows


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row, if its measured numbers are numbers. Raises ValueError, KeyError, TypeError."""
    if row["case"] == "e2e-decode":
        numbers = [row[name] for name in ("bytes", "p50_us", "batch")]
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ValueError(f"bytes, p50_us and batch are {numbers}")
    return row


def shape_of(model: str) -> Shape:
    """The shape of a model: a name of SHAPES or of `pretrained.names()`, or a folder or hub id with
    a config. Raises ArgumentError where there is none."""
    if model in SHAPES:
        return SHAPES[model]
    from transformers import AutoModelForCausalLM

    from attnplug.models import pretrained
    from attnplug.models.layers import config_heads, positions

    try:
        config = pretrained.text_config(model)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except pretrained.damaged() as error:
        raise ArgumentError(
            f"plan: {model!r} is none of {', '.join(SHAPES)} and has no config: "
            f"{pretrained.first_line(error)}{pretrained.did_you_mean(model, SHAPES)}"
        ) from error
    count = sum(p.numel() for p in network.parameters())
    if not config.tie_word_embeddings:  # of an embedding table a step reads one row
        count -= network.get_input_embeddings().weight.numel()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    heads, heads_kv, dim = config_heads(config)
    full, shared = _kept_otherwise(network, types)
    many = {"positions": positions(config), "shared": shared, "heads": heads}
    return Shape(full, heads_kv, dim, 2 * count, **many)


def _kept_otherwise(network: torch.nn.Module, types: Sequence[str]) -> tuple[int, int]:
    """How many layers keep keys and values of their own, and the numbers that others, and indexers,
    keep of a token."""
    from attnplug.models import picked_compressed, picked_entries
    from attnplug.models.latents import has_latents, numbers_a_token
    from attnplug.models.picked_blocks import picks_blocks

    modules = list(network.modules())
    latent = [each for each in modules if has_latents(each)]
    blocks: list[Any] = [each for each in modules if picks_blocks(each)]
    pooled = [each for each in modules if picked_compressed.picks_compressed(each)]
    full = (0 if latent else types.count("full_attention")) + len(blocks) + len(pooled)
    beside = sum(map(numbers_a_token, latent)) + sum(x.indexer.head_dim for x in blocks)
    beside += sum(map(picked_compressed.numbers_a_token, pooled))
    entries = [each for each in modules if picked_entries.reads_entries(each)]
    return full, beside + sum(map(picked_entries.numbers_a_token, entries))


def summary(fitted: Fit) -> str:
    """The bill in a sentence, and how far it is to be trusted."""
    bill = fitted.bill
    text = (
        f"fitted to {bill.source}: {bill.bandwidth / 1e12:.2f} TB/s, {bill.fixed * 1e3:.2f} ms "
        "beside reading; "
    )
    for name, extra in bill.extras.items():
        text += f"{name} {extra.step * 1e3:+.2f} ms"
        text += f" and {extra.each * 1e6:.1f} us for each 128 listed keys" if extra.each else ""
        text += f" ({fitted.errors[name]:.1%} off its rows); "
    text += "no evidence of the fit" if fitted.r2 is None else f"R2 {fitted.r2:.4f}"
    for batch, error in fitted.held_out.items():
        text += f"; batch {batch} left out: {error:.1%} off"
    return text
