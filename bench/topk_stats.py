"""How the guess of Guess-Verify-Refine fares: passes and candidates of topk's CPU reference, which
tries thresholds one after the other by secant steps as the paper does.

    python bench/topk_stats.py

Rows are the scores of consecutive decode steps over prose (per KV head the best of its group's
q . k, in three layers of each small model), with the picks of the step before as hint, or hints
of which a given share are picks; and random normal ones. Writes bench/results/topk-stats.json:
quality rows of the study `topk`, a mean over rows and the 5th and 95th percentile."""

from collections.abc import Iterator
from pathlib import Path

import torch
from _results import run_of, write_rows

from attnplug.eval.capture import capture_layers
from attnplug.eval.measure import prose_window
from attnplug.models.layers import find_attention_layers
from attnplug.models.pretrained import load
from attnplug.ops import topk
from attnplug.ops.gvr.topk import PATHS

TOKENS, STEPS, K = 8192, 200, 1024
NORMAL, NORMAL_ROWS, NORMAL_K = 32768, 200, 2048
OVERLAPS = (0, 3, 40, 90)
RESULTS = Path(__file__).parent / "results" / "topk-stats.json"


def decode_scores(
    name: str, tokens: int = TOKENS, steps: int = STEPS, device: str = "cpu"
) -> dict[int, torch.Tensor]:
    """Scores of the last `steps` + 1 steps over prose, `[KV head, step, token]` of each of three
    layers; later tokens -inf."""
    model, tokenizer = load(name, device=device)
    served = [layer.index for layer in find_attention_layers(model) if not layer.reason]
    chosen = [served[0], served[len(served) // 2], served[-1]]
    calls = capture_layers(model, prose_window(tokenizer, tokens, 0).to(device), chosen)
    future = torch.ones(steps + 1, tokens, device=device).triu(tokens - steps).bool()
    found = {}
    for layer, call in calls.items():
        q = call.q[0, :, -steps - 1 :].float().unflatten(0, (call.k.shape[1], -1))
        scores = (q @ call.k[0, :, None].float().mT).amax(1)
        found[layer] = scores.masked_fill(future, -torch.inf)
    return found


def hint_of(picks: torch.Tensor, size: int, overlap: int) -> torch.Tensor:
    """As many places as there are picks: `overlap` per cent are picks, the rest anywhere."""
    rows, k = picks.shape
    kept = round(k * overlap / 100)
    order = torch.rand(rows, k).argsort(1)[:, :kept]
    return torch.cat([picks.gather(1, order), torch.randint(0, size, (rows, k - kept))], 1).int()


def measured(model: str, rows: torch.Tensor, hint: torch.Tensor | None, policy: str, k: int):
    """The quality rows of one kind of hint."""
    picks, _, how = topk(rows, k, hint=hint, stats=True)
    found = how[:, 0] == PATHS.index("gvr")
    shares = {
        "found in one pass": (found & (how[:, 1] == 1)).float(),
        "found in three passes": (found & (how[:, 1] <= 3)).float(),
        "passes": how[:, 1].float(),
        "candidates for a pick": how[:, 2].float() / k,
    }
    if hint is not None:
        both = zip(picks.long(), hint.long(), strict=True)
        shares["hits of the hint"] = torch.stack([torch.isin(a, b).float().mean() for a, b in both])
    about = {"study": "topk", "model": model, "n": rows.shape[1], "trials": len(rows), "k": k}
    about |= {"policy": policy, "dense": 1.0, **run_of()}
    for task, values in shares.items():
        low, high = torch.quantile(values, torch.tensor([0.05, 0.95])).tolist()
        mean = values.mean().item()
        if task.startswith("found"):
            low = high = mean  # a share of rows
        yield about | {"task": task, "value": mean, "low": low, "high": high}


def of_hints(model: str, rows: torch.Tensor, k: int) -> Iterator[dict]:
    picks = topk(rows, k)[0].long()
    for overlap in OVERLAPS:
        hint = hint_of(picks, rows.shape[1], overlap)
        yield from measured(model, rows, hint, f"{overlap} of 100 right", k)
    yield from measured(model, rows, None, "no hint", k)


def main() -> None:
    torch.manual_seed(0)
    found = list(of_hints("normal scores", torch.randn(NORMAL_ROWS, NORMAL), NORMAL_K))
    for name in ("smollm2-135m", "gemma3-270m"):
        scores = torch.cat([*decode_scores(name).values()])
        rows = scores[:, 1:].flatten(0, 1)
        before = topk(scores[:, :-1].flatten(0, 1), K)[0]
        found += measured(name, rows, before, "picks of the step before", K)
        found += of_hints(name, rows, K)
        print(name, len(rows), "rows", flush=True)
    write_rows(RESULTS, found)


if __name__ == "__main__":
    main()
