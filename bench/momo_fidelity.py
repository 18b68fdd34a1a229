"""momo on SmolLM2: needles found (paired with dense) and attention mass kept (against the oracle).

    python bench/momo_fidelity.py                         # 20 prompts each at 4K and 8K
    python bench/momo_fidelity.py --device cpu --lengths 1024 --trials 4 --top-k 4

Writes quality rows to bench/results/momo_fidelity.json (`bench/report.py` makes tables of them)
and prints a table. Intervals are 95%: Wilson's for needles; for captured mass, Student's over
prompts. `dense` is stock SDPA on the same prompts (for captured mass 1: it keeps everything)."""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from _provenance import provenance
from rich.console import Console
from rich.table import Table
from scipy import stats

from attnplug import Momo, applied
from attnplug.eval import Needle, needle_prompt
from attnplug.eval.fidelity import measure_masks
from attnplug.models.pretrained import load

MODEL = "smollm2-135m"
HAYSTACKS = ("noise", "prose")
RESULTS = Path(__file__).parent / "results" / "momo_fidelity.json"
CONSOLE = Console(width=140)  # a run's log is no terminal, and would be cut at 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--mass-trials", type=int, default=4, help="prompts for captured mass")
    parser.add_argument("--top-k", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    model, tokenizer = load(MODEL, device=options.device)
    policies = [Momo(top_k=k, exact_k=min(k, Momo.exact_k), min_tokens=0) for k in options.top_k]
    rows: list[dict[str, Any]] = []
    for tokens in options.lengths:
        for haystack in HAYSTACKS:
            prompts = [
                needle_prompt(tokenizer, tokens, (i + 0.5) / options.trials, i, haystack)
                for i in range(options.trials)
            ]
            dense = [finds(model, tokenizer, prompt) for prompt in prompts]
            for policy in policies:
                with applied(model, policy):
                    found = [finds(model, tokenizer, prompt) for prompt in prompts]
                rows.append(needle_row(haystack, tokens, policy, dense, found))
                some = prompts[:: max(1, len(prompts) // options.mass_trials)]
                rows += mass_rows(model, haystack, tokens, policy, some[: options.mass_trials])
                CONSOLE.print(rows[-3:], soft_wrap=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    CONSOLE.print(table(rows))


def finds(model: Any, tokenizer: Any, prompt: Needle) -> bool:
    ids = prompt.ids.to(model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        disable_compile=True,
    )
    return prompt.found_in(tokenizer.decode(out[0, ids.shape[1] :]))


def needle_row(
    haystack: str, tokens: int, policy: Momo, dense: list[bool], found: list[bool]
) -> dict[str, Any]:
    test = stats.binomtest(sum(found), len(found))
    interval = test.proportion_ci(method="wilson")
    pairs = list(zip(dense, found, strict=True))
    return row(f"needle-{haystack}", tokens, policy, len(found)) | {
        "dense": sum(dense) / len(dense),
        "value": sum(found) / len(found),
        "low": interval.low,
        "high": interval.high,
        "dense_only": sum(a and not b for a, b in pairs),
        "policy_only": sum(b and not a for a, b in pairs),
    }


def mass_rows(
    model: Any, haystack: str, tokens: int, policy: Momo, prompts: list[Needle]
) -> list[dict[str, Any]]:
    """Attention kept by momo's mask, and its ratio to the best mask of the same size."""
    kept, ratio, density = [], [], []
    for prompt in prompts:
        masks = measure_masks(model, prompt.ids.to(model.device), policy)
        kept.append(statistics.fmean(mask.captured for mask in masks))
        ratio.append(kept[-1] / statistics.fmean(mask.oracle for mask in masks))
        density.append(statistics.fmean(mask.density for mask in masks))
    shared = {"dense": 1.0, "density": statistics.fmean(density)}
    return [
        row(f"{task}-{haystack}", tokens, policy, len(prompts)) | shared | interval(values)
        for task, values in (("captured-mass", kept), ("captured-mass-of-oracle", ratio))
    ]


def interval(values: list[float]) -> dict[str, float]:
    """Mean and Student's 95% interval; of one value, that value."""
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        error = statistics.stdev(values) / len(values) ** 0.5
        half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return {"value": mean, "low": mean - half, "high": mean + half}


def row(task: str, tokens: int, policy: Momo, trials: int) -> dict[str, Any]:
    return {"task": task, "model": MODEL, "n": tokens, "trials": trials, "policy": str(policy)} | (
        provenance()
    )


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"{MODEL} on {rows[0]['gpu']}")
    for column in ("task", "tokens", "policy", "trials", "dense", "momo", "95% interval"):
        shown.add_column(column, justify="left" if column in ("task", "policy") else "right")
    for r in rows:
        numbers = (f"{r['dense']:.3f}", f"{r['value']:.4f}", f"{r['low']:.3f}..{r['high']:.3f}")
        shown.add_row(r["task"], str(r["n"]), r["policy"], str(r["trials"]), *numbers)
    return shown


if __name__ == "__main__":
    main()
