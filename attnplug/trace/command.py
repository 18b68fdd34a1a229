"""What stands behind `attnplug trace MODEL`: loads, records with a progress bar, and says what came
of it."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from attnplug import api, files, policies
from attnplug.errors import ArgumentError
from attnplug.files import located
from attnplug.models.layers import positions
from attnplug.models.pretrained import load
from attnplug.policies import Policy, Stream
from attnplug.trace.reader import Trace, read
from attnplug.trace.record import record


@dataclass(frozen=True)
class Outcome:
    """What a recording took: seconds with and, where it was asked for, without the trace."""

    trace: Trace
    seconds: float
    untraced: float | None

    def table(self) -> Table:
        """For the terminal."""
        meta = self.trace.meta
        title = f"{self.trace.path}: {meta['model']}, {meta['policy']}"
        table = Table(title=Text(title), show_header=False)
        table.add_column("")
        table.add_column("", justify="right", overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        trace, meta = self.trace, self.trace.meta
        size = trace.path.stat().st_size
        rows = [
            ("tokens", f"{meta['tokens'][0]:,}"),
            ("steps", f"{len(meta['steps']):,}"),
            ("layers x heads", f"{len(trace.layers)} x {trace.heads}"),
            ("edges", f"{meta['edges']:,}"),
            ("of the visible block pairs", f"{trace.density:.1%}"),
            ("in a list", f"{trace.listed:.1f} blocks, {trace.listed * trace.block:,.0f} tokens"),
            ("file", f"{size:,} bytes, {size / max(1, meta['edges']):.1f} an edge"),
        ]
        if meta["captured"]:
            shares = [share for heads in meta["captured"].values() for share in heads]
            rows.append(("attention that they hold", f"{sum(shares) / len(shares):.2%}"))
        rows.append(("seconds", f"{self.seconds:.2f}"))
        if self.untraced is not None:
            more = self.seconds / self.untraced - 1
            rows.append(("untraced", f"{self.untraced:.2f} (the trace adds {more:.0%})"))
        rows.append(("checksum", meta["checksum"]))
        return rows


def traced(policy: str, method: Stream) -> Policy:
    """The policy with its own tracing method, or else `method`. Raises PolicyError."""
    parsed = policies.parse(policy)
    return parsed if parsed.trace is not None else dataclasses.replace(parsed, trace=method)


def read_text(text: str | None, file: Path | None) -> str:
    """The prompt, given either way; the file may be a pipe. Raises ArgumentError, and FileError for
    the file, also where it has no end."""
    if (text is None) == (file is None):
        raise ArgumentError("give the text with --prompt TEXT or with --file PATH, one of them")
    if file is not None:
        with files.reading(file, "text"):
            return files.read_text(file)
    assert text is not None  # one of them is given
    try:
        text.encode()  # what a terminal gave may be no text
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the prompt cannot be read as text: {error}") from error
    return text


def run(
    model: str,
    text: str,
    policy: Policy,
    out: Path,
    *,
    max_tokens: int = 0,
    new_tokens: int = 0,
    compare: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trace `model` on `text` to `out`, with `new_tokens` greedy steps after it; `compare` runs it
    untraced first. Raises ArgumentError for an empty text, a folder that is not there, and a
    number of tokens that is negative, or more than the model reads."""
    for option, value in (("max_tokens", max_tokens), ("new_tokens", new_tokens)):
        if value < 0:
            raise ArgumentError(f"{option} is {value}, needs at least 0")
    folder = located(out, ArgumentError).parent
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder; make it, or choose another --out")
    console = console or Console(stderr=True)
    network, tokenizer = load(model, device=device)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    ids = ids[:, :max_tokens] if max_tokens else ids
    if ids.shape[1] < 2:
        raise ArgumentError(f"the text has {ids.shape[1]} tokens, needs at least 2")
    most = positions(network.config)
    if most and new_tokens > most:
        raise ArgumentError(f"new_tokens is {new_tokens}, and the model reads at most {most:,}")
    asked = ids.shape[1] + max(new_tokens - 1, 0)  # nobody reads the last one
    if most and asked > most:
        raise ArgumentError(
            f"the text and its steps have {asked:,} tokens, and the model reads at most {most:,}; "
            "cut the text by --max-tokens"
        )
    with api.applied(network, policy), torch.inference_mode():
        untraced = _timed(network, ids, new_tokens) if compare else None
        seconds = _record(network, tokenizer, ids, out, Path(model).name, new_tokens, console)
    return Outcome(read(out), seconds, untraced)


def _record(
    network: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    out: Path,
    name: str,
    new_tokens: int,
    console: Console,
) -> float:
    """Seconds of the recording, the file's end included."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    layers = len(api.report(network).layers) * max(1, new_tokens)
    begin = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(f"tracing {ids.shape[1]:,} tokens", total=layers)

        def advance(layer: int) -> None:
            bar.advance(task)

        with record(network, out, tokenizer=tokenizer, name=name, progress=advance):
            _timed(network, ids, new_tokens)
            bar.update(task, description="finishing the file")
    return time.perf_counter() - begin


def _timed(network: Any, ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds of one run of the model."""
    begin = time.perf_counter()
    if new_tokens:
        mask = torch.ones_like(ids)
        network.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    else:
        network.base_model(ids, use_cache=False)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
