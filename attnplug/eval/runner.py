"""Dense and every policy on the same prompts: what `attnplug eval` runs.

A cell is a task at a length. Its trials go in batches; a batch is finished for the model's own
attention ("stock") and for every policy before the next one begins, so that a run that stops has
complete pairs. A batch's records are written at once and a batch is run whole or not at all, so
that a resumed run gives the rows of an uninterrupted one."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attnplug import files
from attnplug.api import applied
from attnplug.bench.provenance import commit
from attnplug.errors import ArgumentError, FileError
from attnplug.eval.control import RandomBlocks
from attnplug.eval.fidelity import has_block_mask
from attnplug.eval.generate import replies
from attnplug.eval.measure import (
    DECODES,
    compare_decodes,
    mask_values,
    prose_window,
    window_nll,
)
from attnplug.eval.own_attention import own_attention
from attnplug.eval.prompts import SHORTEST, digest, template_name
from attnplug.eval.records import KEY, Record, Records
from attnplug.eval.served import Served, ServedBy, reads_of, token_bytes, who_served
from attnplug.eval.tasks import TASKS, Sample, make_sample
from attnplug.ops.common.triton import triton
from attnplug.policies import Policy, methods, parse
from attnplug.policies.grammar import parse_policy

Batch = tuple[Sequence[int], Sequence[str]]  # trials, and the policies that lack any of them
STOCK = "stock"
MEASURES = ("perplexity", *DECODES, "captured-mass")
# Tokens of a batch on CUDA, where a step of many rows takes as long as one of few. Prompts differ
# in length, and sliding windows have a mask `[B,1,T,T]` of padded ones: 13 GiB of 13 x 32K.
PROMPT_TOKENS = 13 * 2**15
WINDOW_TOKENS = 2**19
MOST_TRIALS = 1_000_000  # of one task at one length: they are listed ahead
READ_BYTES = 2**32  # of one policy's keys and values, where all policies read windows in turns


@dataclass(frozen=True)
class Study:
    """What to run. `policies` are strings, methods or Policies; `batch` 0 chooses by the device.
    `claims`: a folder in which processes that run one study together say which batches they run.
    `fewer`: the trials of tasks that have not `trials`."""

    policies: Sequence[Any]
    tasks: Sequence[str] = ("needle-noise", "needle-prose")
    lengths: Sequence[int] = (1024,)
    trials: int = 10
    seed: int = 0
    batch: int = 0
    limit_seconds: float | None = None
    claims: Path | None = None
    fewer: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [*TASKS, *MEASURES]
        for task in self.tasks:
            if task not in known:
                raise ArgumentError(f"task is {task!r}, needs one of {', '.join(known)}")
        for name, values in (("tasks", self.tasks), ("lengths", self.lengths)):
            if not values:
                raise ArgumentError(f"{name} is empty, needs at least one")
        for length in self.lengths:
            if length < SHORTEST:
                raise ArgumentError(f"length is {length} tokens, needs at least {SHORTEST}")
        if self.trials < 1 or self.batch < 0 or self.seed < 0:
            raise ArgumentError(
                f"trials is {self.trials}, batch {self.batch}, seed {self.seed}; needs at least 1, "
                "0 and 0"
            )
        if self.trials > MOST_TRIALS:
            raise ArgumentError(f"trials is {self.trials}, needs at most {MOST_TRIALS}")
        if self.limit_seconds is not None and not self.limit_seconds >= 0:
            raise ArgumentError(f"limit_seconds is {self.limit_seconds}, needs at least 0")

    def trials_of(self, task: str) -> int:
        """How many prompts the task has at each length."""
        return self.fewer.get(task, self.trials)

    def parsed(self) -> dict[str, Policy]:
        """Each policy by its text. Raises PolicyError."""
        return {str(policy): policy for policy in map(parse_with_control, self.policies)}


def parse_with_control(policy: Any) -> Policy:
    """`attnplug.policies.parse`, where "random_blocks" is known too: a policy that is broken on
    purpose and so belongs to no one's methods."""
    if isinstance(policy, str):
        return parse_policy(policy, methods() | {RandomBlocks.name: RandomBlocks})
    return parse(policy)


@dataclass
class Outcome:
    """The records of the study that ran (or were there already), the cells that were left out, with
    the reason, and whether the time limit stopped the run."""

    records: list[Record] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def run_study(
    model: Any,
    tokenizer: Any,
    name: str,
    study: Study,
    path: Path,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run what `path` (JSONL) does not have yet of the study, and append it there.

    `model` has no policy applied; `name` is what rows call it. Raises PolicyError and
    UnsupportedModelError before anything runs."""
    policies = study.parsed()
    for policy in policies.values():
        with applied(model, policy):
            pass  # a model that cannot be served should say so now
    records, outcome, begin = Records(path), Outcome(), clock()
    if "captured-mass" in study.tasks:
        for text, policy in policies.items():
            if not has_block_mask(policy.prefill):
                outcome.left_out[f"captured-mass of {text}"] = "its prefill has no block mask"
    cells = []
    for length in study.lengths:
        if reason := too_long(model, length):
            outcome.left_out[f"{length:,} tokens"] = reason
        else:
            cells += [(task, length) for task in study.tasks]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console or Console(stderr=True)) as bar:
        step = bar.add_task("samples", total=sum(study.trials_of(task) for task, _ in cells))
        for task, length in cells:
            cell = _Cell(model, tokenizer, name, study, policies, task, length)
            bar.update(step, description=f"{task} at {length:,}")
            try:
                for done, batch in cell.batches(records):
                    late = study.limit_seconds is not None and clock() - begin > study.limit_seconds
                    if batch is not None and late:
                        outcome.stopped = True
                        break
                    if batch is not None and cell.claim(*batch):
                        records.add(cell.run(*batch))
                        _give_memory_back()
                    bar.advance(step, done)
            except FileError:  # a disk that is full concerns the whole study
                raise
            except ArgumentError as error:
                outcome.left_out[f"{task} at {length}"] = str(error)
                bar.advance(step, study.trials_of(task))
            outcome.records += cell.known(records)
            if outcome.stopped:
                break
    return outcome


def _give_memory_back() -> None:
    """To the other processes that may share the study's GPU: batches differ in what they need."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def too_long(model: Any, length: int) -> str:
    """Why the model cannot be asked at that length, "" where it can."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return f"the model has {limit} positions" if limit is not None and length > limit else ""


@dataclass
class _Cell:
    """One task at one length."""

    model: Any
    tokenizer: Any
    name: str
    study: Study
    policies: dict[str, Policy]
    task: str
    length: int

    @property
    def trials(self) -> int:
        return self.study.trials_of(self.task)

    def batches(self, records: Records) -> Iterator[tuple[int, Batch | None]]:
        """The number of trials of each batch, and the batch; None where all of it is known."""
        self._check()
        size = self.batch_size()
        for first in range(0, self.trials, size):
            trials = range(first, min(first + size, self.trials))
            wanted = [STOCK, *self.policies]
            missing = [
                p for p in wanted if any(self.key(t, p) not in records.known for t in trials)
            ]
            yield len(trials), (trials, missing) if missing else None

    def claim(self, trials: Sequence[int], missing: Sequence[str]) -> bool:
        """Whether this process runs the batch: the first that asks does."""
        if self.study.claims is None:
            return True
        name = digest(str([self.key(trial, policy) for trial in trials for policy in missing]))
        files.make_folder(self.study.claims)
        with files.writing(self.study.claims / name):
            try:
                (self.study.claims / name).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def _check(self) -> None:
        last = self.trials - 1
        if self.task in TASKS:
            make_sample(self.tokenizer, self.task, self.length, last, self.study.seed)
        else:
            self.window(last)

    def batch_size(self) -> int:
        if self.task not in TASKS and self.task not in DECODES:
            return 1
        if self.study.batch:
            return self.study.batch
        if self.model.device.type != "cuda":
            return 1
        tokens = PROMPT_TOKENS
        if self.task in DECODES:
            tokens = min(WINDOW_TOKENS, READ_BYTES // token_bytes(self.model))
        return max(1, tokens // self.length)

    def run(self, trials: Sequence[int], missing: Sequence[str]) -> list[Record]:
        if self.task in TASKS:
            return self._generate(trials, missing)
        if self.task in DECODES:
            return self._decodes(trials, missing)
        return [record for trial in trials for record in self._measure(trial, missing)]

    def _generate(self, trials: Sequence[int], missing: Sequence[str]) -> list[Record]:
        samples = [
            make_sample(self.tokenizer, self.task, self.length, trial, self.study.seed)
            for trial in trials
        ]
        served: ServedBy = {}
        texts = replies(
            self.model,
            self.tokenizer,
            [sample.ids for sample in samples],
            {policy: self.policies.get(policy) for policy in missing},
            TASKS[self.task].new_tokens,
            served,
        )
        return [
            self.record(sample.trial, policy, sample.ids, sample.text, served.get(policy))
            | _scored(sample, reply)
            for policy in missing
            for sample, reply in zip(samples, texts[policy], strict=True)
        ]

    def window(self, trial: int) -> torch.Tensor:
        """The tokens `[1,n]` of a measure's trial."""
        make = DECODES[self.task].window if self.task in DECODES else prose_window
        return make(self.tokenizer, self.length, trial)

    def _decodes(self, trials: Sequence[int], missing: Sequence[str]) -> list[Record]:
        """Windows have one length each: they are read together."""
        steps = DECODES[self.task].steps
        windows = [self.window(trial) for trial in trials]
        served: ServedBy = {}
        values = compare_decodes(
            self.model,
            torch.cat(windows).to(self.model.device),
            {name: self.policies.get(name) for name in missing},
            steps,
            served,
        )
        return [
            self.record(trial, name, ids, str(ids[0].tolist()), served.get(name))
            | {"steps": steps, "values": values[name][row]}
            for row, (trial, ids) in enumerate(zip(trials, windows, strict=True))
            for name in missing
        ]

    def _measure(self, trial: int, missing: Sequence[str]) -> Iterator[Record]:
        ids = self.window(trial)
        on_device = ids.to(self.model.device)
        for name in missing:
            policy = self.policies.get(name)
            record = self.record(trial, name, ids, str(ids[0].tolist()))
            if self.task == "perplexity":
                with own_attention(self.model) if policy is None else applied(self.model, policy):
                    record["values"] = {"nll": window_nll(self.model, on_device)}
                    if policy is not None:
                        record["served"] = who_served(self.model)
            elif policy and has_block_mask(policy.prefill):
                mask: Any = policy.prefill
                record["values"], record["layers"] = mask_values(self.model, on_device, mask)
            else:
                record["values"] = {}  # nothing to compare: no block mask
            yield record

    def record(
        self,
        trial: int,
        policy: str,
        ids: torch.Tensor,
        text: str,
        served: Served | None = None,
    ) -> Record:
        """What every record says: its key, where its prompt came from, and who served it."""
        return dict(zip(KEY, self.key(trial, policy), strict=True)) | {
            "tokens": ids.shape[1],
            "prompt_hash": digest(text),
            "tokenizer": f"{type(self.tokenizer).__name__}-{len(self.tokenizer)}",
            "served": served or {},
            **reads_of(self.policies.get(policy), served or {}, ids.shape[1], self.model),
            "template": template_name(self.tokenizer) if self.task in TASKS else "plain",
            **machine(self.model.device.type),
        }

    def key(self, trial: int, policy: str) -> tuple[Any, ...]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        facts = (self.task, self.name, self.length, trial, self.study.seed, policy)
        return (*facts, self.batch_size(), self.model.device.type, dtype)

    def known(self, records: Records) -> list[Record]:
        keys = [self.key(t, p) for t in range(self.trials) for p in (STOCK, *self.policies)]
        return [records.known[key] for key in keys if key in records.known]


def machine(device: str) -> Record:
    """Where a record was made: a study may go on elsewhere."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": commit(),
    }


def _scored(sample: Sample, reply: str) -> Record:
    return {
        "depths": list(sample.depths),
        "answers": list(sample.answers),
        "reply": reply,
        "found": sample.found(reply),
        "score": sample.score(reply),
    }
