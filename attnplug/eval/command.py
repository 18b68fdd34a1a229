"""What stands behind `attnplug eval`: reads the options, runs the study, writes and shows it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from attnplug import files
from attnplug.errors import ArgumentError, FileError
from attnplug.eval.frontier import draw_frontier
from attnplug.eval.harness import Harness, run_harness
from attnplug.eval.output import result_table, write_outputs
from attnplug.eval.rows import make_rows
from attnplug.eval.runner import MEASURES, Study, run_study
from attnplug.eval.suite import SUITES, Suite, all_policies
from attnplug.eval.tasks import TASKS
from attnplug.extras import require
from attnplug.models.pretrained import load

# What is asked where neither a suite nor an option says it.
BRIEF = Suite(("needle-noise", "needle-prose"), (1024,), 10, {})


@dataclass(frozen=True)
class Asked:
    """The command line's words on what to ask; None leaves it to the suite, or to BRIEF."""

    policy: Sequence[str] = ()
    policies: str | None = None
    suite: str | None = None
    tasks: str | None = None
    lengths: Sequence[int] | None = None
    trials: int | None = None
    harness: str | None = None


def make_harness(asked: Asked, seed: int, batch: int, **unused: object) -> Harness:
    """What of lm_eval the command line asks for. Raises ArgumentError, also for options of
    attnplug's own tasks (`unused`), PolicyError, and MissingPackageError where lm_eval is not
    installed."""
    unused |= {"suite": asked.suite, "tasks": asked.tasks}
    for option, value in unused.items():
        if value is not None:
            raise ArgumentError(f"{option} is for attnplug's own tasks, not those of --harness")
    trials = BRIEF.trials if asked.trials is None else asked.trials
    tasks = _split(asked.harness or "")
    harness = Harness(_policies(asked), tasks, asked.lengths or (), trials, seed, batch or 1)
    harness.parsed()
    return harness


def make_study(
    asked: Asked, seed: int, batch: int, limit_seconds: float | None, claims: Path | None = None
) -> Study:
    """A Study from the command line's words. Raises ArgumentError and PolicyError: a typing
    mistake should not wait for the weights."""
    suite = _suite(asked.suite)
    tasks, lengths = suite.tasks, suite.lengths
    if asked.tasks is not None:
        every = asked.tasks.strip() == "all"
        tasks = [*TASKS, *MEASURES] if every else _split(asked.tasks)
    if asked.lengths is not None:
        lengths = list(asked.lengths)
    study = Study(
        _policies(asked),
        tasks,
        lengths,
        suite.trials if asked.trials is None else asked.trials,
        seed,
        batch,
        limit_seconds,
        claims,
        suite.fewer if asked.trials is None else {},
    )
    study.parsed()
    return study


def _suite(name: str | None) -> Suite:
    if name is None:
        return BRIEF
    if name not in SUITES:
        raise ArgumentError(f"suite is {name!r}, needs one of {', '.join(SUITES)}")
    return SUITES[name]


def _policies(asked: Asked) -> list[str]:
    if asked.policies not in (None, "all"):
        raise ArgumentError(f"policies is {asked.policies!r}, needs all; --policy names one")
    named = [*(all_policies() if asked.policies else ()), *asked.policy]
    if not named:
        raise ArgumentError("no policy is named; give --policy NAME or --policies all")
    return named


def check_plot(plot: str | None, study: Study) -> None:
    """Raise ArgumentError where a study has no rows for the plot that is asked for."""
    if plot is None:
        return
    require("plot", "eval --plot")
    if plot != "frontier":
        raise ArgumentError(f"plot is {plot!r}, needs frontier")
    if "fidelity" not in study.tasks:
        raise ArgumentError("plot: the frontier is drawn of the task fidelity: add it to --tasks")


def run(
    model: str,
    study: Study | Harness,
    folder: Path,
    device: str | None,
    console: Console,
    plot: str | None = None,
) -> list[Path]:
    """Load the model, run what `folder/samples.jsonl` lacks (of a Harness everything, into
    `folder/harness.jsonl`), write the outputs, show the table. A local folder's name stands for the
    model in the rows. Returns what was written."""
    network, tokenizer = load(model, device=device)
    name = Path(model).name if Path(model).is_dir() else model
    where = f"{name} on {network.device}, {str(network.dtype).removeprefix('torch.')}"
    console.print(where, highlight=False, markup=False)
    if isinstance(study, Harness):
        samples = folder / "harness.jsonl"
        outcome = run_harness(network, tokenizer, name, study)
        files.make_folder(folder)
        lines = [json.dumps(record) + "\n" for record in outcome.records]
        files.write_text(samples, "".join(lines))
    else:
        samples = folder / "samples.jsonl"
        outcome = run_study(network, tokenizer, name, study, samples)
    if outcome.left_out and not outcome.records:
        reasons = "; ".join(f"{cell}: {reason}" for cell, reason in outcome.left_out.items())
        raise ArgumentError(f"nothing was measured: {reasons}")
    try:
        rows = make_rows(outcome.records)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FileError(
            f"{samples} has a sample of this study that attnplug did not write ({error!r}); name "
            "another folder"
        ) from error
    written = write_outputs(rows, outcome, folder)
    console.print(result_table(rows))
    if plot is not None:
        written.append(draw_frontier(rows, folder / f"{plot}.png"))
    for cell, reason in outcome.left_out.items():
        console.print(f"left out: {cell}: {reason}", highlight=False, markup=False)
    if outcome.stopped:
        console.print("stopped at the time limit; the same command goes on from here")
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, markup=False)
    return written


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
