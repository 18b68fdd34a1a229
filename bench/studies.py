"""The comparisons of a method's options: which policies each one asks, on what.

    python bench/studies.py              # their names, and how many prompts each asks
    python bench/studies.py gvr          # the arguments of `attnplug eval`, one a line

`bench/studies_gpu.sh` runs them, `bench/eval_rows.py NAME-MODEL FILE --study NAME --anew` makes
rows, which a table shows where its filters say `study=NAME`. `bench/missing.py` says which lack
rows."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

NAIVE = "certified(tolerance=None, explore=0.0, min_tokens=0)"
PAPERS_LADDER = "tolerance=None, coverage=0.995, k_min=2, k_max=128, v_tol=0.05, ranking=1"
LARGE_BLOCKS = "block=128, sink=1, local=4"


@dataclass(frozen=True)
class Options:
    """One comparison. Both small models are asked at those of `lengths` that fit them, with
    `trials` prompts or windows a task."""

    policies: Sequence[str]
    tasks: Sequence[str]
    lengths: Sequence[int] = (32768, 8192)
    trials: int = 20

    def arguments(self) -> list[str]:
        """Of `attnplug eval`."""
        named = [word for policy in self.policies for word in ("--policy", policy)]
        lengths, tasks = ",".join(map(str, self.lengths)), ",".join(self.tasks)
        return [*named, "--lengths", lengths, "--tasks", tasks, "--trials", str(self.trials)]


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
    }
)


def main(names: Sequence[str]) -> None:
    for name in names:
        print("\n".join(STUDIES[name].arguments()))
    if not names:
        for name, options in STUDIES.items():
            asked = options.trials * len(options.tasks) * len(options.lengths)
            print(f"{name:10} {len(options.policies)} policies, {asked} prompts each")


if __name__ == "__main__":
    main(sys.argv[1:])
