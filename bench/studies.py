"""The comparisons of a method's options: which policies each one asks, on what.

    python bench/studies.py              # their names, and how many prompts each asks
    python bench/studies.py gvr          # the arguments of `attnplug eval`, one a line
    python bench/studies.py as-written gemma3-270m@64k look       # of that model, a first look
    python bench/studies.py as-written gemma3-270m@64k SAMPLES    # and then

`bench/studies_gpu.sh` runs them, and `bench/eval_long.sh` those of models that read more.
`bench/eval_rows.py NAME-MODEL FILE --study NAME --anew` makes rows, which a table shows where its
filters say `study=NAME`. `bench/missing.py` says which lack rows. A first look asks dense alone,
LOOK prompts a task; with its file of samples, the tasks of which the model's own attention answers
less than FLOOR are left out."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from attnplug.eval.runner import STOCK
from attnplug.eval.tasks import TASKS

NAIVE = "certified(tolerance=None, explore=0.0, min_tokens=0)"
PAPERS_LADDER = "tolerance=None, coverage=0.995, k_min=2, k_max=128, v_tol=0.05, ranking=1"
LARGE_BLOCKS = "block=128, sink=1, local=4"
RIVALS = "streaming", "matched_window", "quest", "double_sparsity", "loki", "snapkv"
FLOOR = 0.2  # a task of which the model itself answers less says nothing about a policy
LOOK = 12  # whole batches of every length
BOTH = MappingProxyType({"smollm2-135m": 8192, "gemma3-270m": 32768})  # and what they read
FAR = MappingProxyType({"gemma3-270m@64k": 65536, "gemma3-270m@128k": 131072})


@dataclass(frozen=True)
class Options:
    """One comparison. Each of `models` is asked at those of `lengths` that it reads, with `trials`
    prompts or windows a task; 0 are as many as eval's default suite asks. `as_asked`: rows keep
    `min_tokens=0`, as the default is asked beside it."""

    policies: Sequence[str]
    tasks: Sequence[str]
    lengths: Sequence[int] = (32768, 8192)
    trials: int = 20
    models: Mapping[str, int] = field(default_factory=lambda: BOTH)
    as_asked: bool = False

    def arguments(self, model: str = "", without: Sequence[str] = ()) -> list[str]:
        """Of `attnplug eval`, of which all tasks but those of `without` are asked; of a model at
        the lengths that are its own."""
        named = [word for policy in self.policies for word in ("--policy", policy)]
        lengths = self.lengths_of(model) if model else self.lengths
        tasks = [task for task in self.tasks if task not in without]
        asked = ["--lengths", ",".join(map(str, lengths)), "--tasks", ",".join(tasks)]
        suite = ["--trials", str(self.trials)] if self.trials else ["--suite", "default"]
        return [*named, *asked, *suite]

    def look(self, model: str) -> list[str]:
        """Of a first look at what the model itself can do."""
        tasks = [task for task in self.tasks if task in TASKS]
        policies, trials = ["dense"], LOOK
        return replace(self, policies=policies, tasks=tasks, trials=trials).arguments(model)

    def lengths_of(self, model: str) -> list[int]:
        """A model of BOTH reads them all up to its limit; one that was made for a length, that."""
        limit = self.models[model]
        return [n for n in self.lengths if (n <= limit if model in BOTH else n == limit)]


STUDIES: Mapping[str, Options] = MappingProxyType(
    {
        "gvr": Options(
            [
                *(f"gvr(k={k}, min_tokens=0)" for k in (64, 128, 256, 512, 1024)),
                "gvr(min_tokens=0)",
            ],
            ("needle-noise", "needle-prose", "fidelity"),
        ),
        "gather": Options(
            [
                *(f"gather(k={k}, scoring='bounds', min_tokens=0)" for k in (64, 128)),
                "gather(min_tokens=0)",
                "gather(scoring='bounds', min_tokens=0)",
                *(
                    f"gather(k={k}, {LARGE_BLOCKS}, scoring='bounds', min_tokens=0)"
                    for k in (0, 8, 32, 64)
                ),
            ],
            ("needle-noise", "needle-prose", "fidelity"),
        ),
        "certified": Options(
            [
                "certified(min_tokens=0)",
                "certified(block=16, min_tokens=0)",
                "certified(tolerance=0.1, min_tokens=0)",
                f"certified({PAPERS_LADDER}, min_tokens=0)",
                NAIVE,
                NAIVE.replace("(", "(block=16, "),
            ],
            (
                *("needle-noise", "needle-prose", "multi-key", "variable-tracking"),
                *("common-words", "frequent-words", "fidelity"),
            ),
        ),
        "momo-options": Options(
            [
                *(f"momo(top_k={k}, min_tokens=0)" for k in (16, 64, 128, 256)),
                *(f"momo(gamma={gamma}, top_k=64, min_tokens=0)" for gamma in (8, 32)),
                *(f"momo(top_k=64, delta={delta}, min_tokens=0)" for delta in (0.5, 1.0)),
                "momo(top_k=64, tail=0, min_tokens=0)",
                "momo(top_k=64, selection='estimated', min_tokens=0)",
                "momo(top_k=64, selection='exact', min_tokens=0)",
                "momo(top_k=64, selection='estimated', merge='mean', delta=1.0, tail=0, "
                "min_tokens=0)",
            ],
            ("needle-prose", "captured-mass", "perplexity"),
        ),
        # What the tasks say of a mask that is broken on purpose.
        "control": Options(
            ["random_blocks(top_k=64)"],
            ("needle-noise", "needle-prose", "multi-key", "variable-tracking", "perplexity"),
        ),
        # What a user gets who writes no option, at lengths where the methods serve, and what the
        # methods do where their defaults leave the work to dense. First what says most.
        "as-written": Options(
            [
                # On a GPU auto is momo+sketch at these lengths.
                *("dense", "sketch", "gather", "momo", "momo+gather", "auto"),
                *("gvr(min_tokens=0)", "certified(min_tokens=0)", "gvr", "certified", "exact"),
            ],
            (
                *("fidelity", "needle-prose", "multi-key", "long-decode", "needle-noise"),
                *("perplexity", "variable-tracking", "topic-change"),
            ),
            (65536, 131072, 32768),
            trials=0,
            models=MappingProxyType(
                {
                    "gemma3-270m@64k": 65536,
                    "gemma3-270m@128k": 131072,
                    "gemma3-270m": 32768,
                }
            ),
            as_asked=True,
        ),
        # What would keep dense's answers at 64K and 128K, where rows of `as-written` show that
        # decode by sketch and gather costs perplexity, and that momo loses needles.
        "far-decode": Options(
            [
                *(f"sketch(k={k})" for k in (4096, 8192, 16384)),
                *("sketch(bytes=32)", "sketch(k=4096, bytes=32)", "sketch(k=8192, bytes=32)"),
                "gather(k=256)",
            ],
            ("fidelity", "needle-prose", "long-decode"),
            (65536, 131072),
            trials=0,
            models=FAR,
            as_asked=True,
        ),
        "far-prefill": Options(
            [
                *("momo(gamma=16)", "momo(top_k=256)", "momo(gamma=16, top_k=256)"),
                *(f"momo(top_k={k}, min_tokens=0)" for k in (256, 512)),
                *("momo(tail=1024)", "momo(gamma=8)", "momo(delta=1.0)", "momo(window=1024)"),
            ],
            ("needle-prose", "perplexity", "multi-key", "fidelity"),
            (65536, 131072),
            trials=0,
            models=FAR,
            as_asked=True,
        ),
        # The literature's methods (bench/rivals.py) beside ours, at the bytes that ours read.
        "rivals": Options(
            [
                *("gather(min_tokens=0)", "sketch(min_tokens=0)", "momo(min_tokens=0)"),
                *(f"{name}(like='{like}')" for like in ("gather", "sketch") for name in RIVALS),
                *("pooled_blocks", "vertical_slash"),
            ],
            ("fidelity", "needle-prose", "multi-key"),
            (65536, 32768, 8192),
            models=MappingProxyType({"gemma3-270m@64k": 65536} | BOTH),
            as_asked=True,
        ),
    }
)


def beyond(samples: Path) -> list[str]:
    """The tasks of a file of samples of which the model's own attention answers less than FLOOR."""
    scores: dict[str, list[float]] = defaultdict(list)
    for record in map(json.loads, samples.read_text().splitlines()):
        if record["policy"] == STOCK and "score" in record:
            scores[record["task"]].append(record["score"])
    return [task for task, found in scores.items() if fmean(found) < FLOOR]


def main(words: Sequence[str]) -> None:
    if words:
        name, model, then = (*words, "", "")[:3]
        options = STUDIES[name]
        without = beyond(Path(then)) if then not in ("", "look") else []
        asked = options.look(model) if then == "look" else options.arguments(model, without)
        print("\n".join(asked))
        return
    for name, options in STUDIES.items():
        asked = f"{options.trials or 'up to 50'} prompts of {len(options.tasks)} tasks"
        print(f"{name:12} {len(options.policies)} policies, {asked} at each length")


if __name__ == "__main__":
    main(sys.argv[1:])
