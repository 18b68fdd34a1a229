"""The bill: what a decode step costs with dense attention and with `gather`, before it is run.

    t_dense(n, B)  = (W + B A_d(n)) / beta + c0,        A_d = 2 L Hkv D bytes n
    t_gather(n, B) = (W + B A_g(n)) / beta + c0 + c1 + c2 k,   A_g = the keep set and the summaries

W are the weights that a step reads, A the cache that one sequence of n tokens reads, both in bytes;
beta is the bandwidth, c0 what a step takes beside reading, c1 what gather adds to that and c2 what
128 keys of its list add: k counts blocks of 128 here. beta and c0 come from measured dense steps
alone, the others from gather's.
Source: "Attention Pays Its Bill" (docs/papers.md); c2 is ours.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from attnplug import files
from attnplug.errors import ArgumentError, FileError
from attnplug.extras import require
from attnplug.policies.gather import Gather

CONTEXTS = tuple(1 << power for power in range(12, 21))
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model the bill needs: layers of full attention, KV heads, head dimension, bytes of
    weights that a step reads, and bytes an element of the cache. `positions`: the most tokens that
    the model reads, None where only its shape is known."""

    layers: int
    heads_kv: int
    head_dim: int
    weights: float
    itemsize: int = 2
    positions: int | None = dataclasses.field(default=None, compare=False)

    def reads(self, tokens: int) -> bool:
        """Whether the model has positions for so many tokens."""
        return self.positions is None or tokens <= self.positions

    def cached(self, tokens: float) -> float:
        """Bytes of keys and values of so many tokens."""
        return 2 * self.layers * self.heads_kv * self.head_dim * self.itemsize * tokens

    def gathered(self, policy: Gather, tokens: int) -> float:
        """Bytes that a step of `policy` reads of one sequence."""
        return self.cached(read_tokens(policy, tokens, tokens, self.head_dim))


def listed(policy: Gather) -> float:
    """How many times 128 keys a KV head's list names."""
    return policy.k * policy.block / 128


def read_tokens(policy: Gather, tokens: int, size: int, head_dim: int = 128) -> float:
    """Tokens whose keys and values are as many bytes as what a step of `policy` reads of one
    sequence of `tokens`, in a cache with room for `size`: the keep set, and the summaries."""
    kept = min((policy.sink + policy.local + policy.k) * policy.block, tokens)
    summaries = tokens // policy.block if policy.k else 0
    parts, codes, _ = policy.summary_form(size)
    # A band's codes have a scale and a width each, float32.
    scales = 2 / head_dim if codes == torch.int8 and parts == 1 else 0
    return kept + summaries * (parts / (2 if codes is None else 4) + scales)


SHAPES = {
    "qwen2.5-7b": Shape(28, 4, 128, 14_141_238_272),
    "llama-3.1-8b": Shape(32, 8, 128, 15_009_849_344),
}


@dataclasses.dataclass(frozen=True)
class Bill:
    """Of one machine: bytes a second, seconds a step beside reading, gather's extra seconds, those
    of each 128 keys that it lists, and bytes of memory, where they are known."""

    bandwidth: float
    fixed: float
    extra: float = 0.0
    each: float = 0.0
    source: str = ""
    memory: float = math.inf

    def dense(self, shape: Shape, tokens: int, batch: int) -> float:
        """Seconds of a step with dense attention."""
        return (shape.weights + batch * shape.cached(tokens)) / self.bandwidth + self.fixed

    def gather(self, shape: Shape, tokens: int, batch: int, policy: Gather) -> float:
        """Seconds of a step with `policy`, were it to run at every length."""
        read = shape.weights + batch * shape.gathered(policy, tokens)
        return read / self.bandwidth + self.fixed + self.extra + self.each * listed(policy)

    def speedup(self, shape: Shape, tokens: int, batch: int, policy: Gather) -> float:
        return self.dense(shape, tokens, batch) / self.gather(shape, tokens, batch, policy)

    def fits(self, shape: Shape, tokens: int, batch: int) -> bool:
        """Whether weights and cache are no more than the memory. Activations come on top."""
        return shape.weights + batch * shape.cached(tokens) <= self.memory

    def crossover(self, shape: Shape, batch: int, policy: Gather) -> int | None:
        """The fewest tokens, a multiple of the block, from which on gather is faster; None where
        that is beyond 16M tokens. Past the keep set dense grows faster, so there is one point."""
        low, high = 0, (1 << 24) // policy.block
        if self.speedup(shape, high * policy.block, batch, policy) <= 1:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.speedup(shape, middle * policy.block, batch, policy) > 1:
                high = middle
            else:
                low = middle
        return high * policy.block


# Fitted to bench/results/e2e_decode.json and e2e_gather.json.
H200 = Bill(
    4.5843e12,
    1.9227e-3,
    0.33867e-3,
    5.2701e-6,
    source="one NVIDIA H200, compiled decode",
    memory=141e9,
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A bill and how well it tells the rows: R2 on the dense ones (None for two, which every line
    passes through), and for every batch size the mean relative error of a fit without it (none
    where too few rows are left)."""

    bill: Bill
    r2: float | None
    held_out: dict[int, float]


def fit(rows: Iterable[Mapping[str, Any]]) -> Fit:
    """Fit a bill to end-to-end decode rows of one machine, as `bench` writes them (`case`, `op`,
    `batch`, `bytes`, `p50_us`, and of gather's `policy`). Raises ArgumentError with fewer than two
    dense lengths, or where a gather row does not name its policy."""
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
    sparse = [row for row in steps if row["op"] == "gather"]
    extra, each = _gathers(sparse, slope, fixed) if sparse else (0.0, 0.0)
    source = f"{len(dense)} dense and {len(sparse)} gather rows"
    return Fit(Bill(float(1 / slope), float(fixed), extra, each, source), r2, held_out)


def _gathers(rows: list[Mapping[str, Any]], slope: float, fixed: float) -> tuple[float, float]:
    """gather's extra seconds, and those of each 128 keys that it lists, which rows of one budget
    cannot tell apart."""
    from attnplug.policies import parse

    read, seconds = _columns(rows)
    rest = seconds - slope * read - fixed
    if not all("policy" in row for row in rows):
        raise ArgumentError("plan: a gather row has no policy, which says how much its step lists")
    policies = [parse(row["policy"]).decode for row in rows]
    blocks = [listed(policy) for policy in policies if isinstance(policy, Gather)]
    if len(blocks) < len(rows):
        raise ArgumentError("plan: a gather row's policy does not decode with gather")
    if len(set(blocks)) < 2:
        return float(rest.mean()), 0.0
    each, extra = np.polyfit(blocks, rest, 1)
    return float(extra), float(each)


def _columns(rows: Iterable[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, seconds) of the rows."""
    pairs = np.array([(row["bytes"], row["p50_us"] * 1e-6) for row in rows], np.float64)
    return pairs[:, 0], pairs[:, 1]


def read_rows(paths: Iterable[Path]) -> list[Mapping[str, Any]]:
    """The rows of benchmark files. Raises FileError where one cannot be read."""
    rows: list[Mapping[str, Any]] = []
    for path in paths:
        try:
            facts = json.loads(path.read_text())
            if "benchmarks" in facts:
                rows += [_checked(each["extra_info"]) for each in facts["benchmarks"]]
            else:
                rows += map(_checked, facts["rows"])
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
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
    _, heads_kv, dim = config_heads(config)
    full = types.count("full_attention")
    return Shape(full, heads_kv, dim, 2 * count, positions=positions(config))


def read_options(contexts: Sequence[int], batch: int, policy: str) -> Gather:
    """The method that the command's options name. Raises ArgumentError for numbers below 1 and a
    method that the bill is not of, or PolicyError for the policy's text."""
    from attnplug.policies import parse

    if min(contexts) < 1:
        raise ArgumentError(f"plan: context is {min(contexts)}, needs at least 1")
    if batch < 1:
        raise ArgumentError(f"plan: batch is {batch}, needs at least 1")
    method = parse(policy).decode
    if not isinstance(method, Gather):
        raise ArgumentError(f"plan: {policy!r} does not decode with gather, which this bill is of")
    if method.kv != "gpu":
        raise ArgumentError(f"plan: {policy!r} reads the host's memory; this bill knows the GPU's")
    return method


def summary(fitted: Fit) -> str:
    """The bill in a sentence, and how far it is to be trusted."""
    bill = fitted.bill
    text = (
        f"fitted to {bill.source}: {bill.bandwidth / 1e12:.2f} TB/s, {bill.fixed * 1e3:.2f} ms "
        f"beside reading, gather {bill.extra * 1e3:+.2f} ms "
        f"and {bill.each * 1e6:.1f} us for each 128 listed keys; "
    )
    text += "no evidence of the fit" if fitted.r2 is None else f"R2 {fitted.r2:.4f}"
    for batch, error in fitted.held_out.items():
        text += f"; batch {batch} left out: {error:.1%} off"
    return text


def notes(shape: Shape, bill: Bill, policy: Gather, batch: int) -> str:
    """From where on it pays, and what the bill leaves out."""
    crossover = bill.crossover(shape, batch, policy)
    pays = "does not pay at any length up to 16M tokens"
    if crossover is not None:
        pays = f"pays from {crossover:,} tokens on"
    least = policy.row_crossover(torch.device("cuda")).least(batch)
    reads = ""
    if shape.positions is not None:
        never = f": {policy.name} never serves it" if least > shape.positions else ""
        reads = f" The model reads {shape.positions:,} tokens{never}; longer contexts are left out."
    return (
        f"By bytes {policy} {pays}. attnplug runs dense in caches below "
        f"{least:,} tokens.{reads} Bill of: {bill.source}."
    )


def steps(
    shape: Shape, bill: Bill, policy: Gather, batch: int, contexts: Iterable[int]
) -> list[dict[str, float]]:
    """A step of each context that the model reads: `tokens`, milliseconds `dense_ms` and
    `gather_ms`, `speedup`, and `gather_tokens_per_s` of the whole batch."""
    found = []
    for tokens in filter(shape.reads, contexts):
        dense, sparse = bill.dense(shape, tokens, batch), bill.gather(shape, tokens, batch, policy)
        found.append(
            {
                "tokens": tokens,
                "dense_ms": dense * 1e3,
                "gather_ms": sparse * 1e3,
                "speedup": dense / sparse,
                "gather_tokens_per_s": batch / sparse,
            }
        )
    return found


def facts(
    shape: Shape, bill: Bill, policy: Gather, batch: int, contexts: Iterable[int]
) -> dict[str, Any]:
    """What `table` and `notes` tell, for a program. `pays_from` is the crossover by bytes, and
    `serves_from` the length below which attnplug runs dense; lengths in tokens, None where the
    method pays at none, and `positions` None where only the model's shape is known."""
    return {
        "policy": str(policy),
        "batch": batch,
        "positions": shape.positions,
        "pays_from": bill.crossover(shape, batch, policy),
        "serves_from": policy.row_crossover(torch.device("cuda")).least(batch),
        "bill": bill.source,
        "steps": steps(shape, bill, policy, batch, contexts),
    }


def table(shape: Shape, bill: Bill, policy: Gather, batch: int, contexts: Iterable[int]) -> Table:
    """Milliseconds a step and the speed-up, for each context that the model reads."""
    printed = Table(title=f"{policy}, batch {batch}")
    for title in ("tokens", "dense ms", "gather ms", "speed-up", "gather tokens/s"):
        printed.add_column(title, justify="right")
    for step in steps(shape, bill, policy, batch, contexts):
        printed.add_row(
            f"{step['tokens']:,}",
            f"{step['dense_ms']:.2f}",
            f"{step['gather_ms']:.2f}",
            f"{step['speedup']:.2f}",
            f"{step['gather_tokens_per_s']:,.0f}",
        )
    return printed


def gains(shape: Shape, bill: Bill, policy: Gather) -> np.ndarray:
    """Speed-ups `[BATCHES,CONTEXTS]` of what attnplug would run: 1 where that is dense, NaN where
    the cache does not fit or the model does not read so many tokens."""
    cuda = torch.device("cuda")
    return np.array(
        [
            [
                math.nan
                if not (bill.fits(shape, n, b) and shape.reads(n))
                else 1.0
                if not policy.serves(b, n, cuda)
                else bill.speedup(shape, n, b, policy)
                for n in CONTEXTS
            ]
            for b in BATCHES
        ]
    )


def draw_map(shape: Shape, bill: Bill, policy: Gather, path: Path) -> None:
    """Context across, batch up, the speed-up as colour and number; grey where it runs dense, empty
    where the cache does not fit, or is longer than what the model reads. Raises
    MissingPackageError."""
    require("plot", "the map of attnplug plan")
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    found, cuda = gains(shape, bill, policy), torch.device("cuda")
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    colors = colormaps["viridis"].with_extremes(bad="#ffffff")
    dense = np.array([[not policy.serves(b, n, cuda) for n in CONTEXTS] for b in BATCHES])
    shown = np.where(dense, np.nan, np.log2(found))
    axes.imshow(shown, origin="lower", cmap=colors, aspect="auto")
    for (row, column), gain in np.ndenumerate(found):
        if np.isnan(gain):
            continue
        if dense[row, column]:
            square = Rectangle((column - 0.5, row - 0.5), 1, 1, color="#d4d4d4")
            axes.add_patch(square)
        bright = not dense[row, column] and np.log2(gain) < 0.6 * np.nanmax(shown)
        color = "#ff9e80" if gain < 1 else "w" if bright else "k"
        label = "dense" if dense[row, column] else f"{gain:.2f}"
        axes.text(column, row, label, ha="center", va="center", color=color)
    names = [f"{n // 1024}K" if n < 1 << 20 else f"{n >> 20}M" for n in CONTEXTS]
    axes.set_xticks(range(len(CONTEXTS)), names)
    axes.set_yticks(range(len(BATCHES)), [str(b) for b in BATCHES])
    axes.set_xlabel("tokens of context; empty: the cache does not fit")
    axes.set_ylabel("sequences")
    axes.set_title(f"predicted decode speed-up of {policy} over dense")
    files.write_figure(path, figure)
