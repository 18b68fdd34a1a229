"""Published tasks of EleutherAI's lm-evaluation-harness (`lm_eval`) under a policy.

The harness makes the prompts, asks the model and scores the replies. Its tasks are loaded once, so
that the model's own attention and every policy get the same samples. What comes back are records as
`run_study` makes them, one for each sample, score and policy: `make_rows` compares them in
pairs."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import set_seed

from attnplug.api import applied
from attnplug.errors import ArgumentError, MissingPackageError, NotAppliedError
from attnplug.eval.generate import uncompiled
from attnplug.eval.records import KEY, Record
from attnplug.eval.runner import STOCK, Outcome, machine, parse_with_control, too_long
from attnplug.eval.served import Served, reads_of, who_served
from attnplug.extras import require
from attnplug.policies import Policy

# A score of a task: the metric's name, and the filter that the replies went through first.
Score = tuple[str, str]


@dataclass(frozen=True)
class Harness:
    """What to run: `tasks` are names of lm_eval, of tasks or groups, or files of tasks; `lengths`
    are those of tasks that make prompts of a given length, as RULER's do, and else empty. Of each
    task (and length) the first `trials` samples are asked, `batch` at once."""

    policies: Sequence[Any]
    tasks: Sequence[str]
    lengths: Sequence[int] = ()
    trials: int = 10
    seed: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        require("harness", "attnplug eval --harness")
        if not self.tasks:
            raise ArgumentError("harness is empty, needs at least one task of lm_eval")
        if self.trials < 1 or self.batch < 1 or self.seed < 0:
            raise ArgumentError(
                f"trials is {self.trials}, batch {self.batch}, seed {self.seed}; needs at least 1, "
                "1 and 0"
            )

    def parsed(self) -> dict[str, Policy]:
        """Each policy by its text. Raises PolicyError."""
        return {str(policy): policy for policy in map(parse_with_control, self.policies)}


def run_harness(model: Any, tokenizer: Any, name: str, asked: Harness) -> Outcome:
    """The records of the model's own attention and of every policy. `model` has no policy applied;
    `name` is what rows call it. Raises PolicyError, UnsupportedModelError, ArgumentError for a task
    that lm_eval does not know, and MissingPackageError where it lacks a package for one."""
    policies: dict[str, Policy | None] = {STOCK: None, **asked.parsed()}
    (lm, noted), outcome = _lm(model, tokenizer, asked.batch), Outcome()
    for length in asked.lengths or (None,):
        if length is not None and (reason := too_long(model, length)):
            outcome.left_out[f"{length:,} tokens"] = reason
            continue
        tasks = _load(asked, tokenizer, length)
        for text, policy in policies.items():
            with contextlib.nullcontext() if policy is None else applied(model, policy, fuse=False):
                results, served = _evaluate(lm, tasks, asked), _together(noted)
            for task, samples in results["samples"].items():
                cell = _Cell(model, tokenizer, name, asked, task, text, policy)
                found, unlike = cell.records(samples, results["results"][task], served)
                outcome.records += found
                outcome.left_out |= {f"{task} {score}": reason for score, reason in unlike.items()}
    return outcome


def _lm(model: Any, tokenizer: Any, batch: int) -> tuple[Any, list[Served]]:
    """The harness's view of the model, and a list that takes who served each of its calls."""
    from lm_eval.models.huggingface import HFLM

    made: Any = HFLM
    lm, noted = made(pretrained=model, tokenizer=tokenizer, batch_size=batch), []

    def noting(call: Callable[..., Any], options: Callable[[], dict[str, Any]]) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            out = call(*given, **named, **options())
            with contextlib.suppress(NotAppliedError):  # the model's own attention
                noted.append(who_served(model))
            return out

        return run

    lm._model_call = noting(lm._model_call, dict)
    lm._model_generate = noting(lm._model_generate, lambda: uncompiled(model))
    return lm, noted


def _together(noted: list[Served]) -> Served:
    """Who served the calls: of each phase all that did. Empties the list."""
    of: dict[str, list[Any]] = {}
    while noted:
        for phase, by in noted.pop(0).items():
            of.setdefault(phase, []).append(by)
    shares = of.pop("accepted", [])
    served: Served = {phase: " or ".join(dict.fromkeys(names)) for phase, names in of.items()}
    return served | ({"accepted": fmean(shares)} if shares else {})


def _load(asked: Harness, tokenizer: Any, length: int | None) -> list[Any]:
    """The tasks, with their samples."""
    from lm_eval.tasks import TaskManager

    about: dict[str, Any] = {"tokenizer": tokenizer.name_or_path}
    if length is not None:
        about["max_seq_lengths"] = [length]
    named = not all(Path(task).is_file() for task in asked.tasks)  # an index takes its time
    manager = TaskManager(metadata=about, include_defaults=named)
    set_seed(asked.seed)  # prompts that are made at random are made now
    with contextlib.redirect_stdout(sys.stderr):
        try:
            tasks = list(manager.load(list(asked.tasks))["tasks"].values())
        except KeyError as error:
            raise ArgumentError(f"harness: {error.args[0]}") from error
        except ImportError as error:
            raise MissingPackageError(f"harness: {error}") from error
        except (OSError, LookupError) as error:  # datasets and nltk, without a network
            said = " ".join(str(error).split())
            raise ArgumentError(f"harness: a task's data cannot be had: {said}") from error
    for task in tasks:
        if length is not None and "max_length" not in task.eval_docs[0]:
            raise ArgumentError(f"harness: {task.task_name} has no lengths; leave --lengths out")
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=asked.seed)
    return tasks


def _evaluate(lm: Any, tasks: Sequence[Any], asked: Harness) -> Mapping[str, Any]:
    """What the harness reports, with its samples."""
    from lm_eval.evaluator import evaluate

    set_seed(asked.seed)
    run: Any = evaluate
    named = {task.task_name: task for task in tasks}
    with contextlib.redirect_stdout(sys.stderr):
        return run(lm, {"tasks": named}, limit=asked.trials, bootstrap_iters=0)


@dataclass(frozen=True)
class _Cell:
    """One task under one policy."""

    model: Any
    tokenizer: Any
    name: str
    asked: Harness
    task: str
    text: str
    policy: Policy | None

    def records(
        self, samples: Sequence[Mapping[str, Any]], results: Mapping[str, Any], served: Served
    ) -> tuple[list[Record], dict[str, str]]:
        """A record for each sample and score, and why other scores are left out."""
        longest = max(self._tokens(sample) for sample in samples)
        found: list[Record] = []
        unlike: dict[str, str] = {}
        for score in _scores(samples):
            told = [(s, _value(s, score)) for s in samples if s["filter"] == score[1]]
            asked = [(sample, value) for sample, value in told if value != UNASKED]
            if not asked:
                continue
            if not _is_mean_of_shares([value for _, value in asked], results[",".join(score)]):
                unlike[score[0]] = "it is no mean of a share of each sample, so has no interval"
                continue
            for sample, value in asked:
                n = sample["doc"].get("max_length", longest)
                found.append(self._record(sample, _named(self.task, score, n), n, served, value))
        return found, unlike

    def _tokens(self, sample: Mapping[str, Any]) -> int:
        return max(len(self.tokenizer(each[0]).input_ids) for each in sample["arguments"])

    def _record(
        self, sample: Mapping[str, Any], task: str, n: int, served: Served, value: float
    ) -> Record:
        device, dtype = self.model.device.type, str(self.model.dtype).removeprefix("torch.")
        trial, seed, batch = sample["doc_id"], self.asked.seed, self.asked.batch
        key = (task, self.name, n, trial, seed, self.text, batch, device, dtype)
        return dict(zip(KEY, key, strict=True)) | {
            "tokens": self._tokens(sample),
            "prompt_hash": sample["prompt_hash"],
            "tokenizer": f"{type(self.tokenizer).__name__}-{len(self.tokenizer)}",
            "template": "plain",
            "served": served,
            **reads_of(self.policy, served, n, self.model),
            **machine(device),
            "reply": str(sample["filtered_resps"]),
            "depths": [],
            "found": [],
            "score": value,
        }


UNASKED = -1.0  # what RULER's tasks say of lengths that a sample does not have


def _scores(samples: Sequence[Mapping[str, Any]]) -> list[Score]:
    return list(dict.fromkeys((name, s["filter"]) for s in samples for name in s["metrics"]))


def _value(sample: Mapping[str, Any], score: Score) -> Any:
    return sample[score[0]]


def _is_mean_of_shares(values: Sequence[Any], reported: Any) -> bool:
    """Whether what the harness reports is the mean of the samples' values, each in [0, 1]."""
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
        return False
    return abs(fmean(values) - reported) < 1e-6


def _named(task: str, score: Score, n: int) -> str:
    """The task, and its score where that is not the one of a length."""
    name, filtered = score
    parts = [task, *([name] if name != str(n) else []), *([filtered] if filtered != "none" else [])]
    return " ".join(parts)
