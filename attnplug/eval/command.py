"""What stands behind `attnplug eval`: reads the options, runs the study, writes and shows it."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnplug.errors import ArgumentError
from attnplug.eval.output import result_table, write_outputs
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import MEASURES, Study, run_study
from attnplug.eval.tasks import TASKS
from attnplug.models.pretrained import load


def make_study(
    policies: Sequence[str],
    tasks: str,
    lengths: str,
    trials: int,
    seed: int,
    batch: int,
    limit_seconds: float | None,
    share: str = "0/1",
) -> Study:
    """A Study from the command line's words. Raises ArgumentError and PolicyError: a typing
    mistake should not wait for the weights."""
    named = [*TASKS, *MEASURES] if tasks.strip() == "all" else _split(tasks)
    try:
        numbers = [int(word) for word in _split(lengths)]
    except ValueError as error:
        raise ArgumentError(f"lengths is {lengths!r}, needs numbers with commas between") from error
    part = re.fullmatch(r"(\d+)/(\d+)", share)
    if part is None:
        raise ArgumentError(f"share is {share!r}, needs two numbers such as 0/4")
    parts = int(part[1]), int(part[2])
    study = Study(policies, named, numbers, trials, seed, batch, limit_seconds, parts)
    study.parsed()
    return study


def run(model: str, study: Study, folder: Path, device: str | None, console: Console) -> None:
    """Load the model, run what `folder/samples.jsonl` lacks, write the outputs, show the table.
    A local folder's name stands for the model in the rows."""
    network, tokenizer = load(model, device=device)
    name = Path(model).name if Path(model).is_dir() else model
    where = f"{name} on {network.device}, {str(network.dtype).removeprefix('torch.')}"
    console.print(where, highlight=False, markup=False)
    outcome = run_study(network, tokenizer, name, study, folder / "samples.jsonl")
    rows = make_rows(outcome.records)
    written = write_outputs(rows, outcome, folder)
    console.print(result_table(rows))
    for cell, reason in outcome.left_out.items():
        console.print(f"left out: {cell}: {reason}", highlight=False, markup=False)
    if outcome.stopped:
        console.print("stopped at the time limit; the same command goes on from here")
    console.print(f"wrote {', '.join(str(path) for path in written)}", highlight=False)


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
