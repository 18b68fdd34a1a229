"""`attnplug demo`: SmolLM2 finds a needle in a long prompt, as transformers has it and with momo's
block-sparse prefill, side by side, with what the mask read and what it kept."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from attnplug import files
from attnplug.api import applied
from attnplug.errors import ArgumentError
from attnplug.eval.fidelity import LayerMask, measure_masks
from attnplug.eval.mass import captured_mass, visible_blocks
from attnplug.eval.needle import SHORTEST, Needle, needle_prompt
from attnplug.extras import require
from attnplug.models.device import default_device
from attnplug.models.pretrained import load
from attnplug.policies import Momo, Policy

MODEL = "smollm2-135m"
TOKENS = {"cpu": 4096, "cuda": 8192}
LONGEST = 8192  # SmolLM2's positions
NEW_TOKENS = 12
ON_A_CPU = (
    "On a CPU this demo shows what momo reads and what it keeps. Its times say nothing of speed: "
    "that needs a GPU, and on a CPU stock is faster."
)


@dataclass(frozen=True)
class Run:
    """One generation: seconds to the first token, seconds a later token, and the reply."""

    reply: str
    found: bool
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class DemoResult:
    """What `run` measured; `table()` shows it."""

    policy: str
    device: str
    crossover: int
    needle: Needle
    stock: Run
    momo: Run
    layers: list[LayerMask]
    image: Path

    @property
    def density(self) -> float:
        return sum(layer.density for layer in self.layers) / len(self.layers)

    @property
    def captured(self) -> float:
        return sum(layer.captured for layer in self.layers) / len(self.layers)

    @property
    def oracle(self) -> float:
        return sum(layer.oracle for layer in self.layers) / len(self.layers)

    def table(self) -> Table:
        tokens = self.needle.ids.shape[1]
        table = Table(
            title=f"{MODEL}, {tokens:,} tokens, {self.device}: which number hides in the text? "
            f"({self.needle.answer})",
            caption=self.policy,
        )
        table.add_column("")
        table.add_column("stock", justify="right")
        table.add_column("momo", justify="right")
        pair = (self.stock, self.momo)
        table.add_row("answer", *(_answer(run) for run in pair))
        table.add_row("prefill", *(f"{run.prefill_s:.2f} s" for run in pair))
        table.add_row("decode, per token", *(f"{run.decode_s * 1e3:.1f} ms" for run in pair))
        table.add_row("key blocks read", "100%", f"{self.density:.1%}")
        table.add_row("attention kept", "100%", f"{self.captured:.2%}")
        table.add_row("best possible at that size", "", f"{self.oracle:.2%}")
        return table

    def notes(self) -> str:
        names = ", ".join(str(layer.layer) for layer in self.layers)
        tail = Momo().tail_of(self.needle.ids.shape[1])
        return (
            f"Key blocks and attention are means over layers {names}, all heads and query blocks; "
            "the pass that finds the mask reads every key on top, from every 16th query, as the "
            f"prompt's last {tail} queries do. Unforced, this momo runs from "
            f"{self.crossover:,} prompt tokens on {self.device} and leaves shorter prompts dense. "
            "Stock is the model without attnplug; beside momo, attnplug's "
            f"dense decodes. Picture of one head's mask: {self.image}"
        )


def run(
    tokens: int | None = None,
    *,
    top_k: int = 16,
    haystack: Literal["noise", "prose"] = "prose",
    seed: int = 2,
    device: str | None = None,
    image: str | Path = "attnplug-demo.png",
    console: Console | None = None,
) -> DemoResult:
    """Run the demo and save the picture of one head's block mask to `image` (PNG).

    `tokens` is the prompt's length (4,096 on CPU, 8,192 on CUDA; 160 to 8,192), `top_k` momo's
    blocks a query block. Raises ArgumentError, MissingPackageError, WeightsUnavailableError."""
    require("demo", "attnplug demo")
    device = default_device() if device is None else device
    if tokens is None:
        tokens = TOKENS["cuda" if device.startswith("cuda") else "cpu"]
    if not SHORTEST <= tokens <= LONGEST:
        raise ArgumentError(f"tokens is {tokens}, needs {SHORTEST} to {LONGEST} ({MODEL}'s length)")
    policy = Momo(top_k=top_k, exact_k=min(top_k, Momo.exact_k), min_tokens=0)
    model, tokenizer = load(MODEL, device=device)
    needle = needle_prompt(tokenizer, tokens, 0.4, seed, haystack)
    with _progress(console or Console(stderr=True)) as begin:
        begin("compiling kernels on a short prompt")
        # On CUDA the first run at a length still tunes cuBLAS; there a full warm-up costs little.
        warm = (
            needle if device.startswith("cuda") else needle_prompt(tokenizer, SHORTEST, seed=seed)
        )
        _generate(model, tokenizer, warm, None)
        _generate(model, tokenizer, warm, policy)
        begin(f"stock: {needle.ids.shape[1]:,} tokens")
        stock = _generate(model, tokenizer, needle, None)
        begin(f"{policy}: {needle.ids.shape[1]:,} tokens")
        momo = _generate(model, tokenizer, needle, policy)
        begin("exact attention mass inside the mask")
        layers = measure_masks(model, needle.ids.to(device), policy)
        begin("drawing the mask")
        _draw(layers, policy, Path(image))
    unforced = dataclasses.replace(policy, min_tokens=None).crossover(torch.device(device))
    return DemoResult(str(policy), device, unforced, needle, stock, momo, layers, Path(image))


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that says which step begins: beside a spinner on a terminal, a line each in a pipe
    or a file."""
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        step = bar.add_task("", total=None)
        yield lambda text: bar.update(step, description=text)


class _Clock(BaseStreamer):
    """Notes when tokens arrive (generate copies them to the host, so the GPU has finished)."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, tokenizer: Any, needle: Needle, policy: Momo | None) -> Run:
    ids, clock = needle.ids.to(model.device), _Clock()
    options = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)

    def generate() -> torch.Tensor:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            disable_compile=True,
            **options,
        )

    if policy is None:
        out = generate()
    else:
        with applied(model, Policy(prefill=policy)):
            out = generate()
    reply = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    _, prompt, first, *rest = clock.times  # the start, generate's echo of the prompt, the tokens
    return Run(reply, needle.found_in(reply), first - prompt, (rest[-1] - first) / len(rest))


def _answer(run: Run) -> Text:
    text = Text(" ".join(run.reply.split()), style="green" if run.found else "red")
    return text if run.found else Text.assemble(text, " (not found)")


def _draw(layers: list[LayerMask], policy: Momo, path: Path) -> None:
    """Exact attention beside the mask, for the head where choosing matters most."""
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure

    layer, head = _telling_head(layers)
    values = layer.mass.values[0, head].float().cpu()
    seen = visible_blocks(layer.mass, layer.index)[0, head].cpu().int()
    causal, fixed = layer.mass.causal().cpu().int(), layer.mass.fixed().cpu().int()
    shown = causal + seen + seen * (1 - fixed)  # 0 future, 1 skipped, 2 always read, 3 chosen
    kept = captured_mass(layer.mass, layer.index)[0, head].mean().item()

    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    heat = left.imshow(
        values.masked_fill(causal == 0, float("nan")).clamp(min=1e-4).numpy(),
        norm=LogNorm(1e-4, 1),
        cmap="magma",
        aspect="auto",
        interpolation="nearest",
    )
    figure.colorbar(heat, ax=left, label="share of a query's attention")
    left.set_title(f"{MODEL}, layer {layer.layer}, head {head}: exact attention", fontsize=10)
    colours = ListedColormap(["white", "#e4e7ec", "#98a8bf", "#c2410c"])
    right.imshow(
        shown.numpy(), cmap=colours, vmin=0, vmax=3, aspect="auto", interpolation="nearest"
    )
    share = (seen.sum() / causal.sum()).item()
    kept_text = f"{share:.0%} of the key blocks read, {kept:.1%} of the attention kept"
    right.set_title(kept_text, fontsize=10)
    labels = (f"chosen (top {layer.index.shape[-1]})", "always read", "skipped")
    marks = [right.plot([], [], "s", color=colours(c))[0] for c in (3, 2, 1)]
    right.legend(marks, labels, loc="upper right")
    for axes in (left, right):
        axes.set_xlabel(f"key block ({policy.block} tokens)")
        axes.set_ylabel(f"query block ({policy.query_block} tokens)")
    files.make_folder(path.parent)
    files.write_figure(path, figure)


def _telling_head(layers: list[LayerMask]) -> tuple[LayerMask, int]:
    """The layer and head whose list keeps most beyond what a random list of its size would."""

    def gain(layer: LayerMask) -> torch.Tensor:
        free = layer.mass.causal() & ~layer.mass.fixed()
        listed = visible_blocks(layer.mass, layer.index) & free
        part = listed.sum(-1) / free.sum(-1).clamp(min=1)
        kept, outside = (layer.mass.values * where for where in (listed, free))
        return (kept.sum(-1) - outside.sum(-1) * part).mean(-1)[0]

    layer = max(layers, key=lambda layer: gain(layer).max().item())
    return layer, int(gain(layer).argmax().item())
